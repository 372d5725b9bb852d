# SPDX-License-Identifier: Apache-2.0
"""What transforms refuse, when, and with which words."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treetap as tt
from modes import ALL_MODES, GRAPH_MODES, SIMPLE_MODES, UPDATES
from small_models import Scaled
from treetap._transforms.lift import kept_traces
from treetap._transforms.lift.lift import Updates, Written


class Layer(tt.Module):
    def __init__(self, w=1.0):
        self.w = tt.Param(jnp.array([w, w]))
        self.n = tt.Variable(jnp.array([0.0, 0.0]))

    def __call__(self, x):
        self.n[...] += 1
        return jnp.sum(self.w * x)


def ones(*shape):
    return jnp.ones(shape or (2,))


def mesh_of_one():
    return jax.make_mesh((1,), ("d",), devices=jax.devices()[:1])


def sharded(f, **mode):
    specs = {"in_specs": P(), "out_specs": P()}
    return tt.shard_map(f, mesh=mesh_of_one(), **specs, **mode)


# each transform as a call of `f` with two arguments that returns what `f` returns
CALLS = {
    "jit": lambda f, a, b, **mode: tt.jit(f, **mode)(a, b),
    "grad": lambda f, a, b, **mode: tt.grad(
        lambda a, b: (0.0 * jnp.sum(a.get_value()), f(a, b)), has_aux=True, **mode
    )(a, b)[1],
    "vjp": lambda f, a, b, **mode: tt.vjp(
        lambda a, b: (a[...], f(a, b)), a, b, has_aux=True, **mode
    )[2],
    "remat": lambda f, a, b, **mode: tt.remat(f, **mode)(a, b),
    "vmap": lambda f, a, b, **mode: tt.vmap(f, **mode)(a, b),
    "shard_map": lambda f, a, b, **mode: sharded(f, **mode)(a, b),
    "scan": lambda f, a, b, **mode: tt.scan(f, in_axes=(0, 0), out_axes=0, **mode)(
        a, b
    ),
    "cond": lambda f, a, b, **mode: tt.cond(True, f, f, a, b, **mode),
    "switch": lambda f, a, b, **mode: tt.switch(0, [f, f], a, b, **mode),
    "checkify": lambda f, a, b, **mode: tt.checkify(f, **mode)(a, b)[1],
    "eval_shape": lambda f, a, b, **mode: tt.eval_shape(f, a, b, **mode),
}
EVERY = pytest.mark.parametrize("name", CALLS)
# What they call their arguments. `eval_shape` gives copies, so it may return anything.
LABELS = {"vjp": "primals", "cond": "operands", "switch": "operands"}
WITHOUT_COPIES = [name for name in CALLS if name != "eval_shape"]


@EVERY
def test_a_variable_given_twice_is_refused_with_both_paths_and_remedies(name):
    variable = tt.Param(ones())
    with pytest.raises(ValueError, match="Duplicate Param") as caught:
        CALLS[name](lambda a, b: None, variable, variable)
    text = str(caught.value)
    assert name in text
    assert "found at paths" in text
    assert "does not support Variable aliasing" in text
    label = LABELS.get(name, "args")
    assert f"{label}/0" in text
    assert f"{label}/1" in text
    assert "clone" in text
    assert "graph=True" in text


@pytest.mark.parametrize("name", ["jvp", "while_loop", "fori_loop", "make_jaxpr"])
def test_other_transforms_refuse_a_variable_given_twice(name):
    v = tt.Param(ones())
    same = lambda *values: values[-1]
    calls = {
        "jvp": lambda: tt.jvp(same, (v, v), (v, v)),
        "while_loop": lambda: tt.while_loop(lambda c: False, same, (v, v)),
        "fori_loop": lambda: tt.fori_loop(0, 1, same, (v, v)),
        "make_jaxpr": lambda: tt.make_jaxpr(same)(v, v),
    }
    with pytest.raises(ValueError, match="does not support Variable aliasing"):
        calls[name]()


@pytest.mark.parametrize("name", ["eval_shape", "make_jaxpr"])
def test_transforms_that_only_look_refuse_shared_inputs_in_tree_mode_alone(name):
    v = tt.Param(ones())
    f = lambda a, b: a * b
    looks = {
        "eval_shape": lambda **mode: tt.eval_shape(f, v, v, **mode).shape,
        "make_jaxpr": lambda **mode: tt.make_jaxpr(f, **mode)(v, v).out_avals[0].shape,
    }
    with pytest.raises(ValueError, match="Duplicate Param"):
        looks[name](graph=False)
    assert looks[name](graph=True, graph_updates=False) == v.shape


@SIMPLE_MODES
@EVERY
def test_an_input_variable_may_not_be_returned(name, mode):
    with pytest.raises(ValueError, match="Duplicate Param") as caught:
        CALLS[name](lambda a, b: {"r": a}, tt.Param(ones()), ones(), **mode)
    assert f"{LABELS.get(name, 'args')}/0" in str(caught.value)
    assert re.search("out/.*r", str(caught.value))


@SIMPLE_MODES
@pytest.mark.parametrize("name", WITHOUT_COPIES)
def test_a_captured_variable_may_not_be_returned(name, mode):
    outer = tt.Param(ones())
    with pytest.raises(ValueError, match="Cannot return captured Variable") as caught:
        CALLS[name](lambda a, b: [outer], tt.Param(ones()), ones(), **mode)
    assert name in str(caught.value)
    assert "Param" in str(caught.value)
    assert re.search("out/.*0", str(caught.value))


@EVERY
def test_with_graph_updates_an_input_variable_is_returned_as_itself(name):
    given = tt.Param(ones())

    def f(a, b):
        a[...] = a + 1
        return {"r": a}

    found = CALLS[name](f, given, ones(), **UPDATES)["r"]
    if name == "eval_shape":
        assert (type(found), found.shape) == (tt.Param, (2,))
        assert found is not given
        np.testing.assert_array_equal(given[...], ones())
    else:
        assert found is given
        np.testing.assert_array_equal(given[...], 2 * ones())


@pytest.mark.parametrize("name", WITHOUT_COPIES)
def test_with_graph_updates_a_captured_variable_may_not_be_returned(name):
    outer = tt.Param(ones())
    text = "Cannot extract graph node from different trace level"
    with pytest.raises(ValueError, match=text) as caught:
        CALLS[name](lambda a, b: [outer], tt.Param(ones()), ones(), **UPDATES)
    assert str(caught.value).startswith(f"{name}:")
    assert "Param" in str(caught.value)


def new_twice(a, b):
    made = tt.BatchStat(b * 2)
    return made, {"again": made}


@EVERY
def test_a_new_variable_twice_in_the_result_is_refused_in_tree_mode(name):
    with pytest.raises(ValueError, match="Duplicate BatchStat") as caught:
        CALLS[name](new_twice, tt.Param(ones()), ones())
    assert re.search("out/.*0", str(caught.value))
    assert re.search("out/.*1/again", str(caught.value))


@GRAPH_MODES
@EVERY
def test_a_new_variable_twice_in_the_result_is_one_in_graph_mode(name, mode):
    first, second = CALLS[name](new_twice, tt.Param(ones()), ones(), **mode)
    assert first is second["again"]
    assert type(first) is tt.BatchStat


@ALL_MODES
@EVERY
def test_a_variable_of_a_closure_may_be_read_but_not_changed(name, mode):
    outer = tt.Param(ones())
    read = lambda a, b: b * outer[...]
    found = CALLS[name](read, tt.Param(ones()), ones(), **mode)
    assert found.shape[-1] == 2

    def change(a, b):
        outer[...] = b

    with pytest.raises(tt.TraceContextError, match=r"Cannot mutate.*trace level"):
        CALLS[name](change, tt.Param(ones()), ones(), **mode)
    np.testing.assert_array_equal(outer[...], ones())


@ALL_MODES
@EVERY
def test_a_module_of_a_closure_may_not_be_changed(name, mode):
    outer = tt.Dict(a=1)

    def change(a, b):
        outer.b = 2

    text = "Cannot mutate 'Dict' from different trace level"
    with pytest.raises(tt.TraceContextError, match=text):
        CALLS[name](change, tt.Param(ones()), ones(), **mode)
    assert not hasattr(outer, "b")


BOUND = {
    "jit": tt.jit,
    "grad": tt.grad,
    "value_and_grad": tt.value_and_grad,
    "vjp": lambda f: tt.vjp(f, ones()),
    "jvp": lambda f: tt.jvp(f, (ones(),), (ones(),)),
    "remat": tt.remat,
    "vmap": tt.vmap,
    "shard_map": sharded,
    "scan": tt.scan,
    "checkify": tt.checkify,
    "eval_shape": lambda f: tt.eval_shape(f, ones()),
    "make_jaxpr": tt.make_jaxpr,
}


@pytest.mark.parametrize("name", BOUND)
def test_bound_methods_are_refused_when_wrapped(name):
    method = Layer().__call__
    for f in (method, functools.partial(functools.partial(method), 1)):
        with pytest.raises(ValueError, match="bound methods") as caught:
            BOUND[name](f)
        assert str(caught.value).startswith(f"{name}:")
        assert "Layer.__call__" in str(caught.value)


def carry_and_out(carry, x):
    return carry, x


SCAN_RULES = [
    ({"in_axes": (tt.Carry, tt.Carry)}, "Found multiple Carry definitions"),
    ({"out_axes": (tt.Carry, tt.Carry)}, "Found multiple Carry definitions"),
    ({"in_axes": (0, 0)}, "If one of in_axes or out_axes has Carry, the other must"),
    ({"out_axes": 0}, "the other must also have Carry"),
    ({"out_axes": (tt.Carry, None)}, "Cannot broadcast output state.*position 1"),
    ({"in_axes": 0, "out_axes": None}, "Cannot broadcast output state"),
    ({"in_axes": ((tt.Carry, 0), 0)}, "Carry must stand at the top level of in_axes"),
    ({"out_axes": (tt.Carry, {"a": tt.Carry})}, "top level of out_axes"),
    ({"in_axes": (tt.Carry, tt.Param(0))}, "Variables prefixes are not supported"),
]


@pytest.mark.parametrize(("axes", "text"), SCAN_RULES)
def test_wrong_axes_of_scan_are_refused_when_wrapped(axes, text):
    with pytest.raises(ValueError, match=text):
        tt.scan(carry_and_out, **axes)
    with pytest.raises(ValueError, match=text):
        tt.scan(**axes)(carry_and_out)


def test_a_scan_of_carry_alone_takes_one_argument():
    scanned = tt.scan(carry_and_out, in_axes=tt.Carry, out_axes=tt.Carry, length=2)
    text = "When in_axes=Carry, the function must take exactly one argument"
    with pytest.raises(ValueError, match=text):
        scanned(ones(), ones())


@pytest.mark.parametrize("result", [lambda c, x: c, lambda c, x: [c, x]])
def test_a_scan_that_returns_no_tuple_is_told_so(result):
    with pytest.raises(ValueError, match="must return a tuple of that many"):
        tt.scan(result)(ones(), ones(3))


def swap(carry):
    return carry[1], carry[0]


def renew(carry):
    return tt.Param(carry[0] + 1), carry[1]


@ALL_MODES
@pytest.mark.parametrize("body", [swap, renew])
@pytest.mark.parametrize("name", ["scan", "while_loop", "fori_loop"])
def test_a_carry_keeps_its_variables(name, body, mode):
    carry = (tt.Param(ones()), tt.Param(ones()))
    calls = {
        "scan": lambda: tt.scan(lambda c, x: (body(c), x), **mode)(carry, ones(2)),
        "while_loop": lambda: tt.while_loop(lambda c: False, body, carry, **mode),
        "fori_loop": lambda: tt.fori_loop(0, 2, lambda i, c: body(c), carry, **mode),
    }
    if mode is UPDATES and name != "while_loop":  # they may change places there
        out = calls[name]()
        one, two = out[0] if name == "scan" else out
        places = [one is carry[0], two is carry[0], one is carry[1], two is carry[1]]
        assert places == [False, body is swap, body is swap, body is renew]
    else:
        text = f"{name} Variable identity must be preserved"
        with pytest.raises(ValueError, match=text):
            calls[name]()


PREFIXED = {
    "vmap": lambda prefix, **mode: tt.vmap(carry_and_out, in_axes=prefix, **mode),
    "shard_map": lambda prefix, **mode: tt.shard_map(
        carry_and_out, mesh=mesh_of_one(), in_specs=prefix, out_specs=P(), **mode
    ),
    "jit": lambda prefix, **mode: tt.jit(carry_and_out, in_shardings=prefix, **mode),
}


@SIMPLE_MODES
@pytest.mark.parametrize("name", PREFIXED)
def test_a_variable_cannot_stand_in_a_prefix(name, mode):
    with pytest.raises(ValueError, match="Variables prefixes are not supported") as e:
        PREFIXED[name]((tt.Dict(w=tt.Param(0)), 0), **mode)
    assert name in str(e.value)


@SIMPLE_MODES
def test_a_prefix_gives_each_variable_its_axis(mode):
    def f(layer, x):
        layer.w[...] += x

    layer = Layer()
    axes = tt.prefix(layer, {tt.Param: 0, ...: None}, graph=mode["graph"])
    before = layer.n.get_raw_value()
    tt.vmap(f, in_axes=(axes, 0), **mode)(layer, jnp.array([1.0, 2.0]))
    np.testing.assert_array_equal(layer.w[...], [2.0, 3.0])
    assert layer.n.get_raw_value() is before


@pytest.mark.parametrize("axes", [(0,), ({"w": 0, "x": 0}, 0), ((0, 0), 0)])
def test_a_prefix_that_does_not_fit_is_refused(axes):
    with pytest.raises(ValueError, match="`in_axes` does not fit the arguments"):
        tt.vmap(carry_and_out, in_axes=axes)({"w": ones()}, ones())


def test_a_prefix_rule_must_match_every_leaf():
    with pytest.raises(ValueError, match="No filter matched n"):
        tt.prefix(Layer(), {tt.Param: 0})


ALIASED = {
    "vmap": lambda f, mode: tt.vmap(f, in_axes=(0, None), out_axes=0, **mode),
    "scan": lambda f, mode: tt.scan(f, in_axes=(tt.Carry, 0), **mode),
    "grad": lambda f, mode: tt.grad(f, argnums=0, **mode),
}


@GRAPH_MODES
@pytest.mark.parametrize("name", ALIASED)
def test_a_shared_variable_may_not_have_two_prefixes(name, mode):
    shared = tt.Param(ones())
    text = r"Inconsistent aliasing detected(?s:.*)Param(?s:.*)args/0/a(?s:.*)args/1/b"
    with pytest.raises(ValueError, match=text) as caught:
        ALIASED[name](carry_and_out, mode)({"a": shared}, {"b": shared})
    assert str(caught.value).startswith(f"{name}:")


@GRAPH_MODES
def test_a_shared_variable_with_one_prefix_is_mapped_in_graph_mode(mode):
    shared = tt.Param(jnp.arange(3.0))

    def f(a, b):
        assert a["a"] is b[0]
        a["a"][...] += 1

    tt.vmap(f, in_axes=({"a": 0}, [0]), **mode)({"a": shared}, [shared])
    np.testing.assert_array_equal(shared[...], jnp.arange(1.0, 4.0))


def test_what_changed_is_a_static_part_of_a_result():
    def written(*numbers):
        return Written((tuple((n, {"tag": n}) for n in numbers),))

    def structure(note):
        return jax.tree.structure(Updates(([1.0, 1.0],), note))

    one, again, other = written(0, 2), written(0, 2), written(1, 2)
    assert structure(one) == structure(again)
    assert hash(one) == hash(again)  # as JAX asks of what is static
    assert structure(one) != structure(other)


@ALL_MODES
def test_a_scan_of_carry_alone_carries_it(mode):
    def double(layer):
        layer.w[...] = layer.w[...] * 2
        return layer

    layer = Layer()
    start = float(layer.w[...].sum())
    scanned = tt.scan(double, in_axes=tt.Carry, out_axes=tt.Carry, length=3, **mode)
    assert float(scanned(layer).w[...].sum()) == 8 * start


def test_a_scan_sees_a_static_value_that_changed():
    model = Scaled(2.0)
    axes = {"in_axes": (tt.Carry, None, 0), "out_axes": (tt.Carry, 0)}
    scanned = tt.scan(lambda x, model, _: (model(x), None), **axes)
    assert scanned(1.0, model, jnp.zeros(3))[0] == 8.0
    model.options["scale"] = 1.0
    assert scanned(1.0, model, jnp.zeros(3))[0] == 1.0


def test_a_scan_remembers_no_more_structures_than_a_number(monkeypatch):
    monkeypatch.setattr(kept_traces, "MAX_KEPT", 2)
    traces = []

    def step(carry, x):
        traces.append(len(carry))
        return carry, x

    scanned = tt.scan(step)
    for count in (1, 1, 2, 3, 3, 1):
        carry, _ = scanned([jnp.zeros(())] * count, jnp.ones(2))
        assert len(carry) == count
    assert traces == [1, 2, 3, 1]


class Model(tt.Module):
    def __init__(self, w=3.0):
        self.w = tt.Param(jnp.array(w))
        self.calls = tt.Variable(jnp.array(0))
        self.kind = "plain"

    def square(self):
        return self.w * self.w


@GRAPH_MODES
def test_alias_errors_in_graph_mode_show_the_users_paths(mode):
    model = Model()
    f = tt.vmap(lambda a, b: None, in_axes=(0, None), **mode)
    with pytest.raises(ValueError, match="Inconsistent aliasing") as caught:
        f(model, {"inner": model})
    assert "args/0/calls: 0" in str(caught.value)
    assert "args/1/inner/calls: None" in str(caught.value)


@pytest.mark.parametrize("mode", [{}, {"graph": True, "graph_updates": True}], ids=str)
@pytest.mark.parametrize("name", ["jit", "remat", "scan", "fori_loop"])
def test_new_metadata_of_a_variable_with_a_ref_come_out(name, mode):
    """Its value is changed where it is; its metadata were lost with it."""
    v = tt.Param(jnp.ones(2), ref=True)

    def noted(v):
        v[...] += 1
        v.set_metadata(group="decay")
        return v

    def looped(v):
        tt.fori_loop(0, 1, lambda _, v: noted(v), v)

    def scanned(v):
        tt.scan(noted, length=1, in_axes=tt.Carry, out_axes=tt.Carry, **mode)(v)

    def written(v):
        noted(v)

    calls = {
        "jit": tt.jit(written, **mode),
        "remat": tt.remat(written, **mode),
        "scan": scanned,
        "fori_loop": looped,
    }
    calls[name](v)
    assert v.get_metadata("group", None) == "decay"
    assert v[...].tolist() == [2.0, 2.0]
