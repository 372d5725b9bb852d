# SPDX-License-Identifier: Apache-2.0
"""Random changes of structure under random stacks of transforms, and without any."""

import hypothesis
import jax.numpy as jnp
from hypothesis import strategies as st

import treetap as tt
from treetap import compat


class Part(tt.Module):
    def __init__(self, w):
        self.w = tt.Param(jnp.array(w))


def world():
    """Two arguments that share a part, with a cycle in one of them."""
    one = tt.Dict(p=Part(1.0), q=Part(2.0), r=tt.List([Part(3.0)]))
    two = tt.Dict(p=one.q, q=Part(4.0), v=tt.BatchStat(jnp.array(5.0)))
    one.r.append(one)
    return one, two


NAMES = ["p", "q", "v", "x"]
names = st.sampled_from(NAMES)
sides = st.integers(0, 1)
operations = st.one_of(
    st.tuples(st.just("move"), sides, names, sides, names),
    st.tuples(st.just("swap"), sides, names, sides, names),
    st.tuples(st.just("refer"), sides, names, sides),
    st.tuples(st.just("remove"), sides, names),
    st.tuples(st.just("new"), sides, names, st.sampled_from([7.0, 8.0])),
    st.tuples(st.just("plain"), sides, names, st.sampled_from([7.0, 8.0])),
    st.tuples(st.just("static"), sides, names),
    st.tuples(st.just("append"), sides, names),
    st.tuples(st.just("write"), sides, names),
)


def put(given, key, value):
    """Sets an attribute, whatever stood there."""
    given[key] = (tt.static if isinstance(value, str) else tt.data)(value)


def apply(operation, pair):
    """One change; nothing happens where it makes no sense."""
    name, side, key, *rest = operation
    given = pair[side]
    match name, rest:
        case (("move" | "swap"), [other, source]):
            if source in pair[other] and key in given:
                mine, theirs = given[key], pair[other][source]
                put(given, key, theirs)
                if name == "swap":
                    put(pair[other], source, mine)
        case "refer", [other]:
            put(given, key, pair[other])
        case "remove", _ if key in given:
            del given[key]
        case "new", [value]:
            put(given, key, Part(value))
        case "plain", [value]:
            put(given, key, jnp.array(value))
        case "static", _:
            put(given, key, "text")
        case "append", _ if key in given and isinstance(given[key], tt.Module):
            pair[0].r.append(given[key])
        case "write", _ if key in given and isinstance(given[key], Part):
            given[key].w[...] = given[key].w * 2


def beside_a_gradient(f):
    loss = lambda *args: (jnp.zeros(()), f(*args))
    return lambda *args: compat.grad(loss, argnums=(0, 1), has_aux=True)(*args)[1]


STACKS = {
    "jit": compat.jit,
    "remat": compat.remat,
    "vmap": lambda f: compat.vmap(f, in_axes=None, out_axes=None, axis_size=2),
    "grad": beside_a_gradient,
    "cond": lambda f: lambda *args: compat.cond(True, f, f, *args),
}


def described(pair, known):
    """What stands at each path: an object known by its place, or what it holds."""
    found, seen = {}, {}
    for path, value in tt.iter_graph(pair, graph=True):
        if isinstance(value, tt.Variable):
            found[path] = type(value), float(value[...])
        elif isinstance(value, tt.Pytree):
            found[path] = type(value), None
        elif not isinstance(value, tuple):
            found[path] = None, value if isinstance(value, str) else float(value)
        if isinstance(value, tt.Variable | tt.Pytree):
            seen[path] = known.get(id(value), (None,))[0]
    return found, seen, tt.graphdef(pair, graph=True)


def run(program, around):
    pair = world()
    known = {
        id(value): (path, value)  # held, so that no identity is used again
        for path, value in tt.iter_graph(pair, graph=True)
        if isinstance(value, tt.Variable | tt.Pytree)
    }

    def change(one, two):
        for operation in program:
            apply(operation, (one, two))
        return one, two

    back = around(change)(*pair)
    assert back[0] is pair[0]
    assert back[1] is pair[1]
    return described(pair, known)


@hypothesis.given(
    st.lists(operations, max_size=5),
    st.lists(st.sampled_from(sorted(STACKS)), min_size=1, max_size=2),
)
@hypothesis.example([("refer", 0, "p", 1), ("new", 1, "x", 7.0)], ["vmap"])
@hypothesis.example([("refer", 0, "p", 0), ("swap", 0, "q", 1, "q")], ["grad", "jit"])
def test_structure_changes_under_transforms_as_it_does_without(program, stack):
    def around(f):
        for name in stack:
            f = STACKS[name](f)
        return f

    assert run(program, around) == run(program, lambda f: f)
