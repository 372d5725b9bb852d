# SPDX-License-Identifier: Apache-2.0
"""Lists and dicts that change in place in a transform: carried out, or refused."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt


class Model(tt.Module):
    def __init__(self, value, items=()):
        self.v = tt.Variable(value)
        self.w = tt.Param(jnp.ones(2))
        self.items = tt.data(items)


def one():
    return jnp.ones(())


def scanned(f, **mode):
    def step(model, x):
        return model, f(model, x)

    scan = tt.scan(step, in_axes=(tt.Carry, 0), out_axes=(tt.Carry, 0), **mode)
    return lambda model: scan(model, jnp.ones(1))


def looped(f, **mode):
    def body(i, model):
        f(model)
        return model

    return lambda model: tt.fori_loop(0, 1, body, model, **mode)


def while_(f, **mode):
    def body(carry):
        f(carry[1])
        return carry[0] + 1, carry[1]

    return lambda model: tt.while_loop(lambda c: c[0] < 1, body, (0, model), **mode)


def mapped(f, **mode):
    fn = tt.vmap(f, in_axes=(None, 0), **mode)
    return lambda model: fn(model, jnp.ones(2))


def nested(f, **mode):
    return tt.jit(tt.remat(f, **mode), **mode)


BRANCHING = {
    "jit": tt.jit,
    "grad": tt.grad,
    "remat": tt.remat,
    "jit of remat": nested,
    "vmap": mapped,
    "cond": lambda f, **mode: lambda model: tt.cond(True, f, f, model, **mode),
    "switch": lambda f, **mode: lambda model: tt.switch(0, (f, f), model, **mode),
    "checkify": tt.checkify,
    "jit_partial": lambda f, **mode: lambda model: tt.jit_partial(f, model, **mode)(),
}
LOOPS = {"scan": scanned, "fori_loop": looped, "while_loop": while_}
MODES = {
    "tree": {},
    "graph": {"graph": True},
    "updates": {"graph": True, "graph_updates": True},
}
KEEPING = {
    "set an item": (lambda: [one()], lambda v: v.__setitem__(0, 5 * one())),
    "set an inner item": (
        lambda: {"a": [one()]},
        lambda v: v["a"].__setitem__(0, 3 * one()),
    ),
    "set a key": (lambda: {"a": one()}, lambda v: v.update(a=7 * one())),
    "swap": (lambda: [one(), 2 * one()], lambda v: v.reverse()),
}
GROWING = {
    "append": (lambda: [one()], lambda v: v.append(one())),
    "update": (lambda: {"a": one()}, lambda v: v.update(b=one())),
    "pop": (lambda: {"a": one(), "b": one()}, lambda v: v.pop("b")),
    "append inside": (lambda: {"a": [one()]}, lambda v: v["a"].append(one())),
    "clear": (lambda: [one()], lambda v: v.clear()),
}


def numbers(value):
    return jax.tree.map(float, value)


def changing(change):
    def f(model, x=1.0):
        change(model.v)
        return jnp.sum(model.w[...]) * x

    return f


def check_carried_out(change, make, way, mode):
    expected = make()
    change(box := tt.Variable(expected))
    model = Model(make())
    for _ in range(2):  # the second call goes by what the first one kept
        model.v[...] = make()
        way(changing(change), **mode)(model)
        assert numbers(model.v.get_value()) == numbers(box.get_value())


def ways_and_modes(ways):
    """All of both, a quick run one mode each; `jit_partial` has no graph updates."""
    pairs = itertools.product(enumerate(ways), enumerate(MODES))
    return [
        pytest.param(name, mode, marks=() if (n - turn) % 3 == 0 else pytest.mark.long)
        for (n, name), (turn, mode) in pairs
        if (name, mode) != ("jit_partial", "updates")
    ]


@pytest.mark.parametrize(("name", "mode"), ways_and_modes(BRANCHING | LOOPS))
def test_a_value_changed_in_place_is_carried_out(name, mode):
    way = (BRANCHING | LOOPS)[name]
    for make, change in KEEPING.values():
        check_carried_out(change, make, way, MODES[mode])


@pytest.mark.parametrize(("name", "mode"), ways_and_modes(BRANCHING))
def test_a_value_that_grows_is_carried_out(name, mode):
    for make, change in GROWING.values():
        check_carried_out(change, make, BRANCHING[name], MODES[mode])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOOPS)
def test_a_value_that_grows_in_a_loop_is_refused(name, mode):
    for make, change in GROWING.values():
        model = Model(make())
        with pytest.raises(tt.StructureError, match=r"the Variable at \S*v held"):
            LOOPS[name](changing(change), **MODES[mode])(model)
        assert numbers(model.v.get_value()) == numbers(make())


def test_a_value_that_grows_in_one_branch_is_refused():
    grow, leave = changing(lambda v: v.append(one())), changing(lambda v: None)
    for branches in ((grow, leave), (leave, grow)):
        model = Model([one()])
        with pytest.raises(
            tt.StructureError, match="cond: the Variable at operands/0/v"
        ):
            tt.cond(True, *branches, model)
        assert numbers(model.v.get_value()) == [1.0]


def test_a_value_that_nobody_changes_stays_the_same_object():
    model = Model([one()])
    before = model.v.get_raw_value()
    tt.jit(changing(lambda v: v[0]))(model)
    tt.jit(changing(lambda v: v.get_value().clear()))(model)  # of a copy
    assert model.v.get_raw_value() is before


CONTAINERS = {
    "append": (lambda: [one()], lambda items: items.append(one())),
    "append a Param": (lambda: [tt.Param(one())], lambda x: x.append(tt.Param(one()))),
    "set": (lambda: [one()], lambda items: items.__setitem__(0, 2 * one())),
    "set a key": (lambda: {"a": one()}, lambda items: items.update(a=2 * one())),
    "new key": (lambda: {"a": one()}, lambda items: items.update(b=one())),
    "inside": (lambda: {"a": [one()]}, lambda items: items["a"].append(one())),
    "clear": (lambda: [one()], lambda items: items.clear()),
    "swap Params": (
        lambda: [tt.Param(one()), tt.Param(2 * one())],
        lambda items: items.reverse(),
    ),
}


def with_items(change):
    def f(model, x=1.0):
        change(model.items)
        return jnp.sum(model.w[...]) * x

    return f


@pytest.mark.parametrize("mode", ["tree", "graph"])
@pytest.mark.parametrize("name", BRANCHING | LOOPS)
def test_a_container_of_data_changed_in_place_is_refused(name, mode):
    way = (BRANCHING | LOOPS)[name]
    carried = ("set", "set a key") if name in LOOPS else ()  # arrays of the carry
    for each, (make, change) in CONTAINERS.items():
        if each in carried:
            continue
        model = Model(one(), make())
        before = jax.tree.leaves(model)
        text = r"data attribute \S*items was changed in place inside"
        with pytest.raises(tt.StructureError, match=text):
            way(with_items(change), **MODES[mode])(model)
        after = jax.tree.leaves(model)
        assert len(after) == len(before)
        assert all(map(np.array_equal, after, before))


@pytest.mark.parametrize("name", ["jit", "remat", "jit of remat", "vmap", "grad"])
def test_graph_updates_carry_a_container_of_data_out(name):
    for make, change in CONTAINERS.values():
        expected = Model(one(), make())
        change(expected.items)
        model = Model(one(), make())
        BRANCHING[name](with_items(change), **MODES["updates"])(model)
        assert jax.tree.structure(model) == jax.tree.structure(expected)
        pairs = zip(jax.tree.leaves(model), jax.tree.leaves(expected), strict=True)
        assert all(np.array_equal(one, two) for one, two in pairs)


def test_a_container_of_data_may_be_changed_where_the_policy_allows_it():
    model = Model(one(), [one()])
    fn = with_items(lambda items: items.append(one()))
    with pytest.warns(UserWarning, match="items was changed in place"):
        tt.jit(fn, on_structure_change="warn")(model)
    assert len(model.items) == 1
    tt.jit(fn, on_structure_change="ignore")(model)
    assert len(model.items) == 1


def test_what_was_put_elsewhere_is_reported_once():
    def f(model):
        model.items = [one(), one()]

    with pytest.raises(tt.StructureError, match="items was replaced"):
        tt.jit(f)(Model(one(), [one()]))
