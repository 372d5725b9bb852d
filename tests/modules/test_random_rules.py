# SPDX-License-Identifier: Apache-2.0
"""Streams inside other objects: with_rngs, reseed, split_rngs and fork_rngs."""

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from modes import SIMPLE_MODES
from treetap import compat, nnx


class Dropout(tt.Module):
    def __init__(self, rngs):
        self.rngs = rngs.dropout.fork()
        self.w = tt.Param(1.0)


class Net(tt.Module):
    def __init__(self, rngs):
        self.b = Dropout(rngs)
        self.a = Dropout(rngs)
        self.noise = tt.RngStream(9, tag="noise")


def nth(seed, n):
    return jax.random.fold_in(jax.random.key(seed), n)


def rngs_of():
    return tt.Rngs(0, params=1, dropout=2)


# with_rngs.


def test_every_stream_can_be_split_forked_or_broadcast():
    rngs = rngs_of()
    assert tt.with_rngs(rngs, split=3).params.key.shape == (3,)
    assert tt.with_rngs(rngs, broadcast=(2, 2)).params.key.shape == (2, 2)
    assert tt.with_rngs(rngs, fork=...).params.key[...] == nth(1, 2)
    assert rngs.params.count[...] == 3
    assert rngs.params.key[...] == jax.random.key(1)


def test_rules_go_by_filter_and_the_rest_is_shared():
    rngs = rngs_of()
    new = tt.with_rngs(
        rngs, split={"params": 3}, broadcast={"dropout": 2}, fork=[tt.Nothing()]
    )
    assert new.params.key.shape == (3,)
    assert bool((new.dropout.key[...] == nth(2, 0)).all())
    assert new.default.key is rngs.default.key
    assert new.default.count is rngs.default.count
    assert rngs.default.count[...] == 0


def test_fork_takes_several_filters():
    new = tt.with_rngs(rngs_of(), fork=["params", "dropout"])
    assert new.params.key[...] == nth(1, 0)
    assert new.dropout.key[...] == nth(2, 0)
    assert new.default.key[...] == jax.random.key(0)


def test_a_rule_that_names_a_stream_wins_over_a_catch_all():
    new = tt.with_rngs(rngs_of(), split=3, fork="params", broadcast={"dropout": 2})
    assert new.params.key.shape == ()
    assert new.dropout.key.shape == (2,)
    assert new.default.key.shape == (3,)
    assert tt.with_rngs(rngs_of(), fork=True, split=2).params.key.shape == (2,)


def test_two_rules_that_name_a_stream_are_refused_before_any_draw():
    rngs = rngs_of()
    with pytest.raises(
        tt.StructureError,
        match=r"with_rngs: the stream at params matches multiple rules: split "
        r"\('params'\), fork \(\['params', 'x'\]\)\. Let one rule take it",
    ):
        tt.with_rngs(rngs, split={"params": 2, ...: 3}, fork=[["params", "x"]])
    assert [s.count[...] for _, s in rngs.items()] == [0, 0, 0]


def test_a_stream_of_several_keys_cannot_be_split_again():
    rngs = tt.Rngs(a=0, b=1).split({"b": 3})
    with pytest.raises(
        tt.StructureError,
        match=r"with_rngs: the stream at b has keys of shape \(3,\), .*Map over it",
    ):
        tt.with_rngs(rngs, split=2)
    assert rngs.a.count[...] == 0


def test_only_limits_what_is_touched():
    rngs = rngs_of()
    new = tt.with_rngs(rngs, split=3, only="params")
    assert new.params.key.shape == (3,)
    assert new.dropout.key is rngs.dropout.key


def test_streams_left_alone_may_match_several_rules():
    rules = {"params": 2, tt.RngStream: 3}
    assert tt.with_rngs(rngs_of(), split=rules, only="dropout").dropout.key.shape == (
        3,
    )


def test_streams_inside_other_objects_are_found():
    net = Net(tt.Rngs(0, dropout=1))
    new = tt.with_rngs({"net": [net]}, split={"dropout": 2})["net"][0]
    assert new.a.rngs.key.shape == new.b.rngs.key.shape == (2,)
    assert new.noise.key is net.noise.key
    assert new.a.w is net.a.w
    assert net.a.rngs.count[...] == 1
    assert net.a.rngs.key.shape == ()


def test_without_rules_everything_is_shared():
    rngs = rngs_of()
    new = tt.with_rngs(rngs)
    assert new is not rngs
    assert new.params.key is rngs.params.key


@pytest.mark.parametrize("flags", [{}, {"graph": True, "graph_updates": True}])
def test_as_a_decorator_it_changes_all_arguments(flags):
    @tt.with_rngs(split={"dropout": 2}, **flags)
    def shapes(rngs, x, *, more):
        """Text."""
        return rngs.dropout.key.shape, rngs.params.key.shape, more.dropout.key.shape, x

    rngs = rngs_of()
    assert shapes(rngs, 7, more=rngs_of()) == ((2,), (), (2,), 7)
    assert shapes.__doc__ == "Text."
    assert rngs.dropout.count[...] == 1


def test_shared_streams_are_refused_or_kept():
    stream = tt.RngStream(0, tag="a")
    with pytest.raises(tt.AliasError, match=r"with_rngs: .*found at paths 0.* and 1"):
        tt.with_rngs([stream, stream], split=2)
    assert stream.count[...] == 0
    new = tt.with_rngs([stream, stream], split=2, graph=True)
    assert new[0] is new[1]
    assert stream.count[...] == 1


def test_a_split_model_can_be_mapped():
    net = tt.with_rngs(tt.Rngs(0), split=3)
    drawn = jax.vmap(lambda rngs: rngs.normal())(net)
    keys = jax.random.split(nth(0, 0), 3)
    expected = [jax.random.normal(jax.random.fold_in(key, 0)) for key in keys]
    assert jnp.allclose(drawn, jnp.stack(expected))


# reseed.


def test_reseeded_rngs_are_those_of_the_seeds():
    rngs = rngs_of()
    rngs.params()
    rngs.dropout()
    assert tt.reseed(rngs, params=5) is None
    assert rngs.params.count[...] == 0
    assert rngs.params() == tt.Rngs(params=5).params()
    assert rngs.dropout.count[...] == 1


@pytest.mark.parametrize("seed", [5, jax.random.key(5), jax.random.PRNGKey(5)])
def test_streams_in_a_model_get_successive_keys(seed):
    net = Net(tt.Rngs(0, dropout=1))
    before = net.a.rngs.key
    net.a.rngs()
    tt.reseed(net, dropout=seed)
    assert net.a.rngs.key is before
    assert net.a.rngs.key[...] == nth(5, 0)
    assert net.b.rngs.key[...] == nth(5, 1)
    assert net.a.rngs.count[...] == 0
    assert net.noise.key[...] == jax.random.key(9)


def test_a_layer_built_from_default_has_that_tag():
    net = Net(tt.Rngs(0))
    tt.reseed(net, default=3, noise=4)
    assert net.a.rngs.key[...] == nth(3, 0)
    assert net.noise.key[...] == nth(4, 0)


def test_an_unknown_tag_changes_nothing():
    net = Net(tt.Rngs(0))
    with pytest.raises(
        tt.StructureError,
        match=r"reseed: no stream is tagged 'dropout', 'odd'; the tags here are "
        r"\['default', 'noise'\]\..*the tag 'default'",
    ):
        tt.reseed(net, noise=1, odd=2, dropout=3)
    assert net.noise.key[...] == jax.random.key(9)


def test_streams_of_several_keys_need_a_policy():
    rngs = tt.Rngs(one=0, many=1).split({"many": 3})
    rngs.one()
    with pytest.raises(
        tt.StructureError,
        match=r"reseed: the stream at many has keys of shape \(3,\)\. Say "
        "`policy='match_shape'`",
    ):
        tt.reseed(rngs, one=5, many=6)
    assert rngs.one.count[...] == 1
    tt.reseed(rngs, policy="match_shape", one=5, many=6)
    assert bool((rngs.many.key[...] == jax.random.split(jax.random.key(6), 3)).all())
    assert rngs.many.count[...].tolist() == [0, 0, 0]


def test_a_policy_may_be_a_function():
    calls = []

    def policy(path, key, shape):
        calls.append((path, shape))
        return jnp.broadcast_to(key, shape)

    holder = {"x": tt.RngStream(0, tag="many").split((2,))}
    tt.reseed(holder, policy=policy, many=6)
    assert calls == [(("x",), (2,))]
    assert bool((holder["x"].key[...] == nth(6, 0)).all())


def test_shared_streams_are_visited_once_in_graph_mode():
    stream = tt.RngStream(0, tag="a")
    with pytest.raises(tt.AliasError, match="reseed: Duplicate"):
        tt.reseed([stream, stream], a=1)
    tt.reseed([stream, stream], graph=True, a=1)
    assert stream.key[...] == nth(1, 0)


def test_a_closed_over_stream_cannot_be_reseeded():
    rngs = tt.Rngs(0)
    with pytest.raises(tt.TraceContextError, match="Cannot mutate"):
        jax.jit(lambda: tt.reseed(rngs, default=1))()
    assert rngs.default.key[...] == jax.random.key(0)


def test_seeds_of_another_shape_and_unknown_policies_are_refused():
    rngs = tt.Rngs(a=0)
    keys = jax.random.split(jax.random.key(0), 3)
    with pytest.raises(tt.StructureError, match=r"shape \(\), the new one is of shape"):
        tt.reseed(rngs, a=keys)
    with pytest.raises(ValueError, match="`policy` is 'nonsense'"):
        tt.reseed(rngs, policy="nonsense", a=1)
    assert rngs.a.count[...] == 0


def test_split_rngs_gives_a_copy_and_advances_the_original():
    rngs = tt.Rngs(params=0, dropout=1)
    made = tt.split_rngs(rngs, splits=3, only="dropout")
    assert made.dropout.key.shape == (3,)
    assert made.params.key.shape == ()
    assert rngs.dropout.count[...] == 1
    assert rngs.params.count[...] == 0


def test_split_rngs_squeezes_a_single_split():
    made = tt.split_rngs(tt.Rngs(0), splits=1, squeeze=True)
    key = jax.random.split(tt.Rngs(0)(), 1)[0]
    assert made.default.key[...] == key
    with pytest.raises(ValueError, match="`squeeze` needs splits=1, got 2"):
        tt.split_rngs(tt.Rngs(0), splits=2, squeeze=True)


def test_split_rngs_decorates_a_mapping():
    @tt.split_rngs(splits=4)
    @tt.vmap
    def draw(rngs):
        return rngs.uniform()

    rngs = tt.Rngs(0)
    values = draw(rngs)
    assert len(set(values.tolist())) == 4
    assert rngs.default.count[...] == 1

    @tt.split_rngs(splits=1, squeeze=True)
    def shape(rngs):
        return rngs.default.key.shape

    assert shape(tt.Rngs(0)) == ()


def test_fork_rngs_forks_all_or_splits_by_rule():
    forked = tt.fork_rngs(tt.Rngs(0))
    assert forked.default.key[...] == tt.Rngs(0)()
    split = tt.fork_rngs(tt.Rngs(params=0, dropout=1), split={"params": 2})
    assert split.params.key.shape == (2,)
    assert split.dropout.key[...] == jax.random.key(1)

    @tt.fork_rngs()
    def first(rngs):
        return rngs.default.key[...]

    assert first(tt.Rngs(0)) == tt.Rngs(0)()


# With graph updates streams are changed in place.


def state_of(stream):
    return jax.random.key_data(stream.key[...]).tolist(), stream.count[...].tolist()


def test_split_rngs_in_place_gives_backups():
    rngs = tt.Rngs(params=0, dropout=1)
    stream, key = rngs.dropout, rngs.dropout.key
    backups = compat.split_rngs(rngs, splits=3, only="dropout")
    assert rngs.dropout is stream
    assert stream.key is key
    assert (stream.key[...] == jax.random.split(nth(1, 0), 3)).all()
    assert stream.count[...].tolist() == [0, 0, 0]
    assert rngs.params.key[...] == jax.random.key(0)
    nnx.restore_rngs(backups)
    assert stream.key[...] == jax.random.key(1)
    assert stream.count[...] == 1


def test_backups_restore_at_the_end_of_a_block_and_after_an_exception():
    rngs = tt.Rngs(0)
    with compat.split_rngs(rngs, splits=2) as backups:
        assert rngs.default.key.shape == (2,)
        assert [backup[0] for backup in backups] == [rngs.default]
    assert state_of(rngs.default) == ([0, 0], 1)

    def fail(key):
        raise KeyError(key)

    with pytest.raises(KeyError), compat.fork_rngs(rngs):
        fail(rngs.default.key[...])
    assert state_of(rngs.default) == ([0, 0], 2)


def test_split_rngs_in_place_squeezes_a_single_split():
    rngs = tt.Rngs(0)
    compat.split_rngs(rngs, splits=1, squeeze=True)
    assert rngs.default.key[...] == jax.random.split(nth(0, 0), 1)[0]
    assert rngs.default.count.shape == ()


def test_fork_rngs_in_place_forks_all_or_splits_by_rule():
    rngs = tt.Rngs(a=0, b=1)
    backups = compat.fork_rngs(rngs)
    assert rngs.a.key[...] == nth(0, 0)
    assert state_of(rngs.b)[1] == 0
    nnx.restore_rngs(backups)
    assert state_of(rngs.b) == ([0, 1], 1)
    compat.fork_rngs(rngs, split={"a": (2, 2)})
    assert rngs.a.key.shape == (2, 2)
    assert state_of(rngs.b) == ([0, 1], 1)


def draw(net):
    return net.a.rngs(), net.b.rngs()


@pytest.mark.parametrize("jitted", [False, True])
def test_a_decorated_function_sees_the_objects_themselves(jitted):
    net = Net(tt.Rngs(0, dropout=1))
    before = net.a.rngs.key[...]
    seen = []

    @compat.split_rngs(splits=4)
    @compat.vmap(in_axes=nnx.StateAxes({nnx.RngState: 0, ...: None}))
    def keys(net):
        return draw(net)

    @compat.split_rngs(splits=4)
    def look(given, *, more):
        seen.append((given is net, given.a.rngs.key.shape, more.default.key.shape))

    drawn, _ = (compat.jit(keys) if jitted else keys)(net)
    assert drawn.shape == (4,)
    assert net.a.rngs.key[...] == before
    assert net.a.rngs.count[...] == 1
    look(net, more=tt.Rngs(0))
    assert seen == [(True, (4,), (4,))]


def test_a_decorated_function_that_raises_restores_its_streams():
    rngs = tt.Rngs(0)

    @compat.split_rngs(splits=4)
    def fail(rngs):
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail(rngs)
    assert state_of(rngs.default) == ([0, 0], 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda rngs: compat.split_rngs(rngs, splits=2, only="a"),
        lambda rngs: compat.fork_rngs(rngs, split={"a": 2}),
    ],
    ids=["split", "fork"],
)
def test_restoring_leaves_streams_that_were_not_changed_alone(change):
    rngs = tt.Rngs(a=0, b=1)
    with change(rngs):
        first = rngs.b()
    assert rngs.b.count[...] == 1
    assert rngs.b() != first


def test_shared_streams_are_split_once():
    stream = tt.RngStream(0, tag="a")
    given = tt.Dict(one=stream, two=stream)
    with compat.split_rngs(given, splits=2) as backups:
        assert stream.key.shape == (2,)
        assert len(backups) == 1
    assert state_of(stream) == ([0, 0], 1)


def test_layers_are_stacked_from_split_streams():
    @compat.split_rngs(splits=3)
    @compat.vmap
    def make(rngs):
        return tt.Dict(w=tt.Param(rngs.params.normal((2,))))

    rngs = tt.Rngs(params=0)
    stack = make(rngs)
    keys = jax.random.split(nth(0, 0), 3)
    rows = [jax.random.normal(jax.random.fold_in(key, 0), (2,)) for key in keys]
    assert jnp.allclose(stack.w[...], jnp.stack(rows))
    assert state_of(rngs.params) == ([0, 0], 1)


def test_backups_may_be_made_by_hand():
    rngs = tt.Rngs(0)
    backups = compat.backup_keys(rngs)
    tt.reseed(rngs, default=5)
    nnx.restore_rngs(backups)
    assert rngs.default.key[...] == jax.random.key(0)


@SIMPLE_MODES
def test_fork_rngs_takes_a_bare_stream(mode):
    rngs = tt.Rngs(0)

    def draw(stream):
        assert stream is not rngs.default
        return stream()

    key = tt.fork_rngs(**mode)(draw)(rngs.default)
    assert key.shape == ()
    assert int(rngs.default.count) == 1
    shape = lambda stream: stream.key.shape
    assert tt.split_rngs(splits=3, **mode)(shape)(rngs.default) == (3,)
    assert int(rngs.default.count) == 2


def test_with_graph_updates_a_bare_stream_is_changed_in_place():
    rngs = tt.Rngs(0)

    def draw(stream):
        assert stream is rngs.default
        return stream.key[...]

    assert compat.fork_rngs()(draw)(rngs.default) == tt.Rngs(0)()
    shapes = compat.split_rngs(splits=3)(lambda stream: stream.key.shape)
    assert shapes(rngs.default) == (3,)
    assert rngs.default.key[...] == jax.random.key(0)
    assert int(rngs.default.count) == 2


def words(key):
    return tuple(jax.random.key_data(key).ravel().tolist())


def counts(rngs):
    return {name: stream.count[...].tolist() for name, stream in rngs.items()}


class Forking(tt.Module):
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
def test_streams_left_alone_keep_their_counters(how):
    rngs = tt.Rngs(params=0, dropout=1)
    used = [words(rngs.dropout()) for _ in range(3)]
    again = UNTOUCHED[how](rngs)
    assert again.dropout.count[...] == 3
    expected = jax.random.fold_in(jax.random.key(1), 3)
    assert words(again.dropout()) == words(expected)
    assert words(expected) not in used


def test_a_stream_passed_in_is_copied_and_tagged():
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
def test_with_rngs_works_with_the_default_settings(function):
    rngs = tt.Rngs(params=0, dropout=1)
    new = function(rngs, split={"dropout": 3}, fork="params")
    assert new.dropout.key.shape == new.dropout.count.shape == (3,)
    assert words(new.params.key[...]) == words(jax.random.fold_in(jax.random.key(0), 0))
    assert counts(new) == {"params": 0, "dropout": [0, 0, 0]}
    assert counts(rngs) == {"params": 1, "dropout": 1}


@pytest.mark.parametrize("function", [tt.with_rngs, nnx.with_rngs])
def test_with_rngs_is_a_decorator_too(function):
    @function(split=2)
    def f(rngs, *, other):
        return rngs.params.key.shape, other.noise.key.shape

    assert f(tt.Rngs(params=0), other=tt.Rngs(noise=1)) == ((2,), (2,))


def test_conflicting_rules_are_named_and_no_counter_moves():
    model = {"a": tt.Rngs(params=0), "b": tt.Rngs(dropout=1)}
    with pytest.raises(
        tt.StructureError,
        match=r"stream at b/dropout matches multiple rules: split \('dropout'\), fork",
    ):
        tt.with_rngs(model, split={"dropout": 2, "params": 3}, fork="dropout")
    assert counts(model["a"]) == {"params": 0}
    assert counts(model["b"]) == {"dropout": 0}


def test_rules_cannot_conflict_on_a_stream_left_out_by_only():
    rngs = tt.Rngs(params=0, dropout=1)
    rules = {"split": {"params": 2}, "fork": "params"}
    new = tt.with_rngs(rngs, **rules, only="dropout")
    assert counts(new) == {"params": 0, "dropout": 0}


def test_a_failing_with_rngs_moves_no_counter():
    rngs = tt.Rngs(a=0, b=jax.random.split(jax.random.key(1), 2))
    with pytest.raises(ValueError, match="key"):  # an array of keys cannot be split
        tt.with_rngs(rngs, split=2)
    assert counts(rngs) == {"a": 0, "b": [0, 0]}


def test_a_specific_rule_wins_over_a_catch_all():
    rngs = tt.Rngs(params=0, dropout=1, noise=2)
    new = tt.with_rngs(rngs, split={...: 4}, fork="dropout", broadcast={"noise": 2})
    assert new.params.key.shape == (4,)
    assert new.dropout.key.shape == ()
    first, second = new.noise.key[...]
    assert words(first) == words(second)
    new = tt.with_rngs(rngs, split={"dropout": 4}, fork=...)
    assert new.dropout.key.shape == (4,)
    assert new.params.key.shape == ()


def test_a_split_of_no_stream_keeps_all_streams():
    rngs = tt.Rngs(0, params=1)
    rngs.params()
    same = rngs.split({})
    assert set(same) == {"default", "params"}
    assert counts(same) == {"default": 0, "params": 1}
    same.params()
    assert rngs.params.count[...] == 1


def test_reseeding_a_tag_nobody_has_is_an_error():
    model = {"drop": Forking(tt.Rngs(0)), "other": Forking(tt.Rngs(dropout=1))}
    assert model["drop"].rngs.tag == "default"
    model["drop"].rngs()
    with pytest.raises(
        tt.StructureError, match=r"no stream is tagged 'noise'.*\['default', 'dropout'"
    ):
        tt.reseed(model, default=5, noise=1)
    assert model["drop"].rngs.count[...] == 1

    lonely = Forking(tt.Rngs(0))
    before = words(lonely.rngs.key[...])
    with pytest.raises(tt.StructureError, match="built from a default stream has the"):
        tt.reseed(lonely, dropout=1)
    assert words(lonely.rngs.key[...]) == before


def test_reseeding_a_tag_nobody_has_does_nothing_if_no_stream_goes_without():
    tt.reseed(tt.Linear(2, 2, rngs=tt.Rngs(0)), dropout=1)  # it keeps no stream
    rngs, alike = tt.Rngs(noise=3), tt.Rngs(noise=4)
    tt.reseed(rngs, noise=4, dropout=1)
    assert words(rngs.noise()) == words(alike.noise())


def test_reseeding_rngs_with_their_seeds_starts_them_anew():
    rngs = tt.Rngs(0, dropout=7)
    first = [words(rngs()), words(rngs.dropout()), words(rngs())]
    tt.reseed(rngs, default=0, dropout=7)
    assert counts(rngs) == {"default": 0, "dropout": 0}
    assert [words(rngs()), words(rngs.dropout()), words(rngs())] == first


def test_reseeding_one_stream_with_its_seed_starts_it_anew():
    stream = tt.RngStream(3, tag="noise")
    first = [words(stream()), words(stream())]
    tt.reseed(stream, noise=3)
    assert [words(stream()), words(stream())] == first


def test_a_refused_reseeding_changes_no_stream():
    rngs = tt.Rngs(a=0, b=jax.random.split(jax.random.key(1), 2))
    rngs.a()
    with pytest.raises(
        tt.StructureError, match=r"stream at b has keys of shape \(2,\).*match_shape"
    ):
        tt.reseed(rngs, a=5, b=5)
    assert words(rngs.a.key[...]) == words(jax.random.key(0))
    assert counts(rngs) == {"a": 1, "b": [0, 0]}
