# SPDX-License-Identifier: Apache-2.0
"""Random streams: keys, counters, forks, splits and samplers."""

import json
import pickle
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt
from treetap._modules.random_streams import INITIALIZERS, SAMPLERS

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "keys.json").read_text())

ARGUMENTS = {
    "ball": (3,),
    "beta": (1.0, 2.0),
    "binomial": (3.0, 0.5),
    "categorical": (jnp.zeros(3),),
    "chisquare": (2.0,),
    "choice": (5,),
    "dirichlet": (jnp.ones(3),),
    "double_sided_maxwell": (0.0, 1.0),
    "f": (2.0, 3.0),
    "gamma": (2.0,),
    "generalized_normal": (2.0,),
    "geometric": (0.5,),
    "loggamma": (2.0,),
    "multinomial": (3.0, jnp.ones(3) / 3),
    "multivariate_normal": (jnp.zeros(2), jnp.eye(2)),
    "orthogonal": (2,),
    "pareto": (2.0,),
    "permutation": (5,),
    "poisson": (2.0,),
    "randint": ((3,), 0, 9),
    "rayleigh": (1.0,),
    "t": (2.0,),
    "triangular": (0.0, 0.5, 1.0),
    "truncated_normal": (-1.0, 1.0),
    "wald": (1.0,),
    "weibull_min": (1.0, 2.0),
}


def words(key):
    return jax.random.key_data(key).ravel().tolist()


def nth(seed, n):
    return jax.random.fold_in(jax.random.key(seed), n)


# Keys.


def test_keys_are_the_recorded_ones():
    recorded = RECORDED["Rngs(0,params=1)"]
    rngs = tt.Rngs(0, params=1)
    assert words(rngs()) == recorded["default#0"]
    assert words(rngs.params()) == recorded["params#0"]
    assert words(rngs.dropout()) == recorded["dropout->default#1"]


def test_derived_keys_are_the_recorded_ones():
    recorded = RECORDED["Rngs(0,params=1)"]
    rngs = tt.Rngs(0, params=1)
    rngs.params()
    assert words(rngs.fork().params.key[...]) == recorded["fork.params key"]
    assert words(rngs.split(3).params.key[...]) == recorded["split(3).params keys"]


def test_the_nth_key_folds_in_n():
    stream = tt.RngStream(7, tag="a")
    for n in range(3):
        assert stream.count[...] == n
        assert stream() == nth(7, n)
    assert stream.count.dtype == jnp.uint32


@pytest.mark.parametrize(
    "key",
    [
        3,
        jax.random.key(3),
        jax.random.PRNGKey(3),
        tt.RngKey(jax.random.key(3)),
        tt.Variable(3),
    ],
    ids=["seed", "key", "key data", "RngKey", "Variable"],
)
def test_a_stream_is_made_from_seeds_and_keys(key):
    stream = tt.RngStream(key, tag="a")
    assert stream.key[...] == jax.random.key(3)
    assert (stream.tag, stream.key.tag, stream.count.tag) == ("a", "a", "a")
    assert isinstance(stream.key, tt.RngKey)
    assert isinstance(stream.count, tt.RngCount)


@pytest.mark.parametrize(
    "key", [True, 1.5, "0", np.int32(3), np.zeros(2, np.uint32), tt.Rngs(0)], ids=repr
)
def test_other_things_are_no_keys(key):
    name = type(key).__name__
    with pytest.raises(
        ValueError, match=r"RngStream: expected a seed \(int\) or a key array, got"
    ) as caught:
        tt.RngStream(key, tag="a")
    assert f"of type {name}" in str(caught.value)


@pytest.mark.parametrize(
    ("array", "shown"), [(jnp.ones(2), r"float32\[2\]"), (jnp.uint32(3), r"uint32\[\]")]
)
def test_other_arrays_are_no_keys(array, shown):
    with pytest.raises(ValueError, match=f"got an array of {shown}.*jax.random.key`"):
        tt.RngStream(array, tag="a")


# Streams.


def test_a_fork_starts_from_the_next_key():
    stream = tt.RngStream(0, tag="a")
    stream()
    forked = stream.fork()
    assert forked.key[...] == nth(0, 1)
    assert (forked.count[...], forked.tag, stream.count[...]) == (0, "a", 2)


@pytest.mark.parametrize("k", [3, (2, 3)])
def test_a_split_has_an_array_of_keys(k):
    stream = tt.RngStream(0, tag="a")
    split = stream.split(k)
    assert words(split.key[...]) == words(jax.random.split(nth(0, 0), k))
    assert split.count.shape == split.key.shape == ((k,) if k == 3 else k)
    assert stream.count[...] == 1


@pytest.mark.parametrize("k", [3, (2, 3)])
def test_a_broadcast_repeats_the_next_key(k):
    stream = tt.RngStream(0, tag="a")
    same = stream.broadcast(k)
    assert same.key.shape == same.count.shape == ((k,) if k == 3 else k)
    assert bool((same.key[...] == nth(0, 0)).all())
    assert same.tag == "a"


def test_a_copy_keeps_the_count_and_goes_its_own_way():
    stream = tt.RngStream(0, tag="a")
    stream()
    same = stream.copy()
    assert same() == stream()
    same()
    assert (same.count[...], stream.count[...]) == (3, 2)


def test_a_stream_of_several_keys_is_mapped():
    split = tt.RngStream(0, tag="a").split(3)
    keys = jax.vmap(lambda stream: stream())(split)
    expected = [jax.random.fold_in(key, 0) for key in split.key[...]]
    assert words(keys) == words(jnp.stack(expected))


def test_a_failed_call_draws_nothing():
    split = tt.RngStream(0, tag="a").split(3)
    with pytest.raises(ValueError, match="key"):
        split()
    assert split.count[...].tolist() == [0, 0, 0]


def test_a_stream_cannot_be_called_at_another_level():
    stream = tt.RngStream(0, tag="a")
    with pytest.raises(
        tt.TraceContextError, match="Cannot mutate RngCount from a different trace"
    ):
        jax.jit(lambda: stream())()
    assert stream.count[...] == 0


def test_a_stream_passed_through_jit_counts_on():
    @jax.jit
    def draw(rngs):
        return rngs.normal(), rngs

    first, rngs = draw(tt.Rngs(0))
    second, rngs = draw(rngs)
    assert first == jax.random.normal(nth(0, 0))
    assert second == jax.random.normal(nth(0, 1))
    assert rngs.default.count[...] == 2


# Rngs.


def test_rngs_are_made_from_seeds_keys_streams_and_mappings():
    assert list(tt.Rngs(0)) == ["default"]
    assert tt.Rngs(params=1).params.key[...] == jax.random.key(1)
    assert tt.Rngs({"a": 1, "b": jax.random.key(2)}, c=3).b() == nth(2, 0)
    assert len(tt.Rngs({"a": 1}, c=3)) == 2
    assert len(tt.Rngs()) == 0


def test_a_stream_given_keeps_its_count_and_takes_the_name():
    stream = tt.RngStream(5, tag="a")
    stream()
    rngs = tt.Rngs(a=stream, b=stream)
    assert rngs.a() == rngs.b() == nth(5, 1)
    assert stream.count[...] == 1
    assert (rngs.b.tag, rngs.b.key.tag, rngs.b.count.tag) == ("b", "b", "b")
    assert stream.tag == "a"


def test_missing_names_are_served_by_default():
    rngs = tt.Rngs(0, params=1)
    assert rngs.dropout is rngs.default
    assert rngs["noise"] is rngs["default"]
    assert rngs() == nth(0, 0)
    assert rngs.dropout() == nth(0, 1)


def test_rngs_are_a_collection_of_streams():
    rngs = tt.Rngs(0, params=1)
    assert list(rngs) == ["params", "default"]
    assert len(rngs) == 2
    assert "params" in rngs
    assert "dropout" not in rngs
    assert dict(rngs.items())["params"] is rngs.params


def test_a_name_without_default_is_refused():
    rngs = tt.Rngs(params=0)
    with pytest.raises(
        AttributeError,
        match=r"No RngStream named 'dropout' in Rngs, which has \['params'\]\. "
        r"Give it one, `Rngs\(dropout=seed\)`",
    ):
        rngs.dropout
    with pytest.raises(KeyError, match="No RngStream named 'dropout'"):
        rngs["dropout"]
    with pytest.raises(AttributeError, match="No RngStream named 'default'"):
        rngs()


def test_special_names_are_never_streams():
    with pytest.raises(AttributeError, match="No RngStream named '__odd__'"):
        tt.Rngs(0).__odd__


def test_a_name_nearly_right_warns():
    rngs = tt.Rngs(0, dropout=1)
    with pytest.warns(UserWarning, match="no stream 'dropuot'.*mean 'dropout'") as seen:
        assert rngs.dropuot is rngs.default
    assert seen[0].filename == __file__
    with pytest.warns(UserWarning, match="did you mean 'dropout'"):
        rngs["dropouts"]


def test_forked_rngs_fork_every_stream():
    rngs = tt.Rngs(0, params=1)
    forked = rngs.fork()
    assert type(forked) is tt.Rngs
    assert forked.default.key[...] == nth(0, 0)
    assert forked.params.key[...] == nth(1, 0)
    assert (rngs.default.count[...], rngs.params.count[...]) == (1, 1)


def test_fork_with_split_is_deprecated():
    with pytest.warns(DeprecationWarning, match=r"use Rngs\.split"):
        assert tt.Rngs(0).fork(split=3).default.key.shape == (3,)


@pytest.mark.parametrize("method", ["split", "broadcast"])
def test_rules_choose_streams(method):
    rngs = tt.Rngs(0, params=1, dropout=2)
    rngs.dropout()
    rules = {"params": 3, "dropout": None, ...: (2, 2)}
    changed = getattr(rngs, method)(rules)
    assert changed.params.key.shape == (3,)
    assert changed.default.key.shape == (2, 2)
    assert changed.dropout is not rngs.dropout
    assert changed.dropout() == nth(2, 1)
    assert (rngs.params.count[...], rngs.dropout.count[...]) == (1, 1)


@pytest.mark.parametrize("method", ["split", "broadcast"])
def test_one_shape_is_for_every_stream(method):
    rngs = tt.Rngs(0, params=1)
    changed = getattr(rngs, method)(2)
    assert {name: s.key.shape for name, s in changed.items()} == {
        "default": (2,),
        "params": (2,),
    }
    copied = getattr(rngs, method)({"other": 3})
    assert copied.default.key.shape == ()
    assert copied.default.count[...] == 1


def test_rngs_are_pytrees_and_can_be_pickled():
    rngs = tt.Rngs(0, params=1)
    rngs.params()
    same = pickle.loads(pickle.dumps(rngs))
    assert same.params() == jax.tree.map(lambda x: x, rngs).params() == nth(1, 1)
    assert tt.to_flat_state(tt.state(rngs, "params")).paths == (
        ("params", "count"),
        ("params", "key"),
    )
    assert tt.clone(rngs).default() == rngs.default()


# Draws.


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_draws_one_key(name):
    args = ARGUMENTS.get(name, ())
    expected = getattr(jax.random, name)(nth(0, 0), *args)
    for source in (tt.Rngs(0), tt.RngStream(0, tag="a")):
        found = getattr(source, name)(*args)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
        counter = source if isinstance(source, tt.RngStream) else source.default
        assert counter.count[...] == 1


def test_samplers_take_keywords():
    found = tt.Rngs(0).normal(shape=(2, 3), dtype=jnp.bfloat16)
    assert (found.shape, found.dtype) == ((2, 3), jnp.bfloat16)


@pytest.mark.parametrize("name", INITIALIZERS)
def test_an_initializer_draws_a_key_at_each_use(name):
    options = (1.0, "fan_in", "normal") if name == "variance_scaling" else ()
    shape = (3, 4, 4) if name == "delta_orthogonal" else (3, 4)
    rngs = tt.Rngs(0)
    initialize = getattr(rngs, name)(*options)
    assert rngs.default.count[...] == 0
    for n in range(2):
        expected = getattr(jax.nn.initializers, name)(*options)(nth(0, n), shape)
        np.testing.assert_array_equal(initialize(shape), expected)
    assert initialize(shape, dtype=jnp.complex64).dtype == jnp.complex64
    stream = tt.RngStream(0, tag="a")
    assert getattr(stream, name)(*options)(shape).shape == shape


def test_a_stream_that_is_added_between_compiled_calls_is_seen():
    draw, rngs = tt.jit(lambda rngs: rngs.params()), tt.Rngs(0)
    for _ in range(3):
        draw(rngs)
    rngs.params = tt.RngStream(1, tag="params")
    expected = tt.Rngs(0, params=1).params()
    assert draw(rngs) == expected


@pytest.mark.parametrize("read", [getattr, tt.Rngs.__getitem__])
def test_a_mistyped_stream_is_served_with_a_warning(read):
    rngs = tt.Rngs(0, dropout=1)
    message = "no stream 'dropot', so `default` serves it; did you mean 'dropout'?"
    with pytest.warns(UserWarning, match=message.replace("?", r"\?")) as record:
        stream = read(rngs, "dropot")
    assert stream is rngs.default
    assert record[0].filename == __file__


def test_other_names_fall_back_without_a_warning():
    rngs = tt.Rngs(0, dropout=1)
    assert rngs.carry is rngs.default
    assert "carry" not in rngs


def test_private_names_are_never_streams():
    rngs = tt.Rngs(0)
    assert not hasattr(rngs, "_hidden")
    assert not hasattr(rngs, "__array__")
    with pytest.raises(AttributeError, match="No RngStream named '_hidden' in Rngs"):
        rngs._hidden


def test_without_a_default_a_missing_stream_is_an_error_with_the_remedy():
    rngs = tt.Rngs(params=0)
    message = r"No RngStream named 'noise'.*\['params'\].*`Rngs\(noise=seed\)`"
    with pytest.raises(AttributeError, match=message):
        rngs.noise
    with pytest.raises(KeyError, match="No RngStream named 'noise'"):
        rngs["noise"]
    assert not hasattr(rngs, "noise")


def test_a_draw_that_fails_leaves_the_counter():
    stream = tt.RngStream(jax.random.split(jax.random.key(0), 2), tag="noise")
    with pytest.raises(ValueError, match="key"):
        stream()
    assert jnp.array_equal(stream.count[...], jnp.zeros(2, jnp.uint32))
