# SPDX-License-Identifier: Apache-2.0
"""Known defects of NNX's random streams, each shown absent here.

The number in a test's name is the defect's number in the project's list.
"""

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from treetap import nnx


def words(key):
    return tuple(jax.random.key_data(key).ravel().tolist())


def counts(rngs):
    return {name: stream.count[...].tolist() for name, stream in rngs.items()}


class Dropout(tt.Module):
    """A stand-in for a layer that keeps a forked stream."""

    def __init__(self, rngs):
        self.rngs = rngs.dropout.fork()


UNTOUCHED = {
    "split with None": lambda rngs: rngs.split({"params": 5, "dropout": None}),
    "split without a rule": lambda rngs: rngs.split({"params": 5}),
    "split of nothing": lambda rngs: rngs.split({}),
    "split without argument": lambda rngs: rngs.split(),
    "broadcast of None": lambda rngs: rngs.broadcast(None),
    "broadcast of others": lambda rngs: rngs.broadcast({"params": 2}),
    "stream as argument": lambda rngs: tt.Rngs(dropout=rngs.dropout),
    "stream under a new name": lambda rngs: tt.Rngs({"dropout": rngs.dropout}),
    "with_rngs": lambda rngs: tt.with_rngs(rngs, split={"params": 2}),
}


@pytest.mark.parametrize("how", UNTOUCHED)
def test_d24_streams_left_alone_keep_their_counters(how):
    rngs = tt.Rngs(params=0, dropout=1)
    used = [words(rngs.dropout()) for _ in range(3)]
    again = UNTOUCHED[how](rngs)
    assert again.dropout.count[...] == 3
    expected = jax.random.fold_in(jax.random.key(1), 3)
    assert words(again.dropout()) == words(expected)
    assert words(expected) not in used


def test_d24_a_stream_passed_in_is_copied_and_tagged():
    stream = tt.RngStream(0, tag="params")
    stream()
    rngs = tt.Rngs(noise=stream)
    assert rngs.noise is not stream
    assert rngs.noise.tag == rngs.noise.key.tag == rngs.noise.count.tag == "noise"
    rngs.noise()
    assert rngs.noise.count[...] == 2
    assert stream.count[...] == 1
    assert stream.tag == stream.key.tag == "params"


@pytest.mark.parametrize("function", [tt.with_rngs, nnx.with_rngs])
def test_d25_with_rngs_works_with_the_default_settings(function):
    rngs = tt.Rngs(params=0, dropout=1)
    new = function(rngs, split={"dropout": 3}, fork="params")
    assert new.dropout.key.shape == new.dropout.count.shape == (3,)
    assert words(new.params.key[...]) == words(jax.random.fold_in(jax.random.key(0), 0))
    assert counts(new) == {"params": 0, "dropout": [0, 0, 0]}
    assert counts(rngs) == {"params": 1, "dropout": 1}


@pytest.mark.parametrize("function", [tt.with_rngs, nnx.with_rngs])
def test_d25_with_rngs_is_a_decorator_too(function):
    @function(split=2)
    def f(rngs, *, other):
        return rngs.params.key.shape, other.noise.key.shape

    assert f(tt.Rngs(params=0), other=tt.Rngs(noise=1)) == ((2,), (2,))


def test_d25_conflicting_rules_are_named_and_no_counter_moves():
    model = {"a": tt.Rngs(params=0), "b": tt.Rngs(dropout=1)}
    with pytest.raises(
        tt.StructureError,
        match=r"stream at b/dropout matches multiple rules: split \('dropout'\), fork",
    ):
        tt.with_rngs(model, split={"dropout": 2, "params": 3}, fork="dropout")
    assert counts(model["a"]) == {"params": 0}
    assert counts(model["b"]) == {"dropout": 0}


def test_d25_rules_cannot_conflict_on_a_stream_left_out_by_only():
    rngs = tt.Rngs(params=0, dropout=1)
    rules = {"split": {"params": 2}, "fork": "params"}
    new = tt.with_rngs(rngs, **rules, only="dropout")
    assert counts(new) == {"params": 0, "dropout": 0}


def test_d25_a_failing_with_rngs_moves_no_counter():
    rngs = tt.Rngs(a=0, b=jax.random.split(jax.random.key(1), 2))
    with pytest.raises(ValueError, match="key"):  # an array of keys cannot be split
        tt.with_rngs(rngs, split=2)
    assert counts(rngs) == {"a": 0, "b": [0, 0]}


def test_d60_a_specific_rule_wins_over_a_catch_all():
    rngs = tt.Rngs(params=0, dropout=1, noise=2)
    new = tt.with_rngs(rngs, split={...: 4}, fork="dropout", broadcast={"noise": 2})
    assert new.params.key.shape == (4,)
    assert new.dropout.key.shape == ()
    first, second = new.noise.key[...]
    assert words(first) == words(second)
    new = tt.with_rngs(rngs, split={"dropout": 4}, fork=...)
    assert new.dropout.key.shape == (4,)
    assert new.params.key.shape == ()


def test_d46_a_split_of_no_stream_keeps_all_streams():
    rngs = tt.Rngs(0, params=1)
    rngs.params()
    same = rngs.split({})
    assert set(same) == {"default", "params"}
    assert counts(same) == {"default": 0, "params": 1}
    same.params()
    assert rngs.params.count[...] == 1


@pytest.mark.parametrize("read", [getattr, tt.Rngs.__getitem__])
def test_d47_a_mistyped_stream_is_served_with_a_warning(read):
    rngs = tt.Rngs(0, dropout=1)
    message = "no stream 'dropot', so `default` serves it; did you mean 'dropout'?"
    with pytest.warns(UserWarning, match=message.replace("?", r"\?")) as record:
        stream = read(rngs, "dropot")
    assert stream is rngs.default
    assert record[0].filename == __file__


def test_d47_other_names_fall_back_without_a_warning():
    rngs = tt.Rngs(0, dropout=1)
    assert rngs.carry is rngs.default
    assert "carry" not in rngs


def test_d47_private_names_are_never_streams():
    rngs = tt.Rngs(0)
    assert not hasattr(rngs, "_hidden")
    assert not hasattr(rngs, "__array__")
    with pytest.raises(AttributeError, match="No RngStream named '_hidden' in Rngs"):
        rngs._hidden


def test_d47_without_a_default_a_missing_stream_is_an_error_with_the_remedy():
    rngs = tt.Rngs(params=0)
    message = r"No RngStream named 'noise'.*\['params'\].*`Rngs\(noise=seed\)`"
    with pytest.raises(AttributeError, match=message):
        rngs.noise
    with pytest.raises(KeyError, match="No RngStream named 'noise'"):
        rngs["noise"]
    assert not hasattr(rngs, "noise")


def test_d48_reseeding_a_tag_nobody_has_is_an_error():
    model = {"drop": Dropout(tt.Rngs(0)), "other": Dropout(tt.Rngs(dropout=1))}
    assert model["drop"].rngs.tag == "default"
    model["drop"].rngs()
    with pytest.raises(
        tt.StructureError, match=r"no stream is tagged 'noise'.*\['default', 'dropout'"
    ):
        tt.reseed(model, default=5, noise=1)
    assert model["drop"].rngs.count[...] == 1

    lonely = Dropout(tt.Rngs(0))
    before = words(lonely.rngs.key[...])
    with pytest.raises(tt.StructureError, match="built from a default stream has the"):
        tt.reseed(lonely, dropout=1)
    assert words(lonely.rngs.key[...]) == before


def test_d48_reseeding_rngs_with_their_seeds_starts_them_anew():
    rngs = tt.Rngs(0, dropout=7)
    first = [words(rngs()), words(rngs.dropout()), words(rngs())]
    tt.reseed(rngs, default=0, dropout=7)
    assert counts(rngs) == {"default": 0, "dropout": 0}
    assert [words(rngs()), words(rngs.dropout()), words(rngs())] == first


def test_d48_reseeding_one_stream_with_its_seed_starts_it_anew():
    stream = tt.RngStream(3, tag="noise")
    first = [words(stream()), words(stream())]
    tt.reseed(stream, noise=3)
    assert [words(stream()), words(stream())] == first


def test_d48_a_refused_reseeding_changes_no_stream():
    rngs = tt.Rngs(a=0, b=jax.random.split(jax.random.key(1), 2))
    rngs.a()
    with pytest.raises(
        tt.StructureError, match=r"stream at b has keys of shape \(2,\).*match_shape"
    ):
        tt.reseed(rngs, a=5, b=5)
    assert words(rngs.a.key[...]) == words(jax.random.key(0))
    assert counts(rngs) == {"a": 1, "b": [0, 0]}


def test_a_draw_that_fails_leaves_the_counter():
    stream = tt.RngStream(jax.random.split(jax.random.key(0), 2), tag="noise")
    with pytest.raises(ValueError, match="key"):
        stream()
    assert jnp.array_equal(stream.count[...], jnp.zeros(2, jnp.uint32))
