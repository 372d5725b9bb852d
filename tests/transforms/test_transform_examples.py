# SPDX-License-Identifier: Apache-2.0
"""Worked examples of every transform, and the usual train step, in both modes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify as jax_checkify
from jax.sharding import PartitionSpec

import treetap as tt
from modes import ALL_MODES, SIMPLE_MODES, UPDATES


class Counter(tt.Module):
    """A parameter, a count and a stream: float, integer and key state."""

    def __init__(self):
        self.w = tt.Param(jnp.array(3.0))
        self.calls = tt.Variable(jnp.array(0))
        self.rngs = tt.Rngs(0)

    def loss(self):
        self.calls[...] += 1
        self.rngs.default()
        return self.w * self.w


# Differentiation.


@SIMPLE_MODES
def test_a_gradient_leaves_integer_and_key_state_out(mode):
    model = Counter()
    value, grads = tt.value_and_grad(Counter.loss, **mode)(model)
    assert (float(value), float(grads.w)) == (9.0, 6.0)
    assert type(grads) is Counter
    stream = grads.rngs.default
    for left_out in (grads.calls, stream.key, stream.count):
        assert left_out.get_raw_value().dtype == jax.dtypes.float0
    assert int(model.calls) == 1
    assert int(model.rngs.default.count) == 1


@ALL_MODES
def test_the_gradient_of_a_bare_integer_is_an_error(mode):
    for value in (3, jnp.array(3)):
        with pytest.raises(TypeError, match="int32"):
            tt.grad(lambda x: x * 1.0, **mode)(value)


@SIMPLE_MODES
def test_a_gradient_covers_all_variables_with_floats(mode):
    model = tt.Dict(w=tt.Param(2.0), mean=tt.BatchStat(5.0), unused=tt.Variable(1.0))
    grads = tt.grad(lambda m: m.w * m.mean, **mode)(model)
    assert (float(grads.w), float(grads["mean"])) == (5.0, 2.0)
    assert float(grads.unused) == 0.0


def test_with_graph_updates_only_params_of_objects_are_differentiated():
    model = tt.Dict(w=tt.Param(2.0), mean=tt.BatchStat(5.0), plain=jnp.array(3.0))
    loss = lambda m: m.w * m["mean"] * m.plain
    grads = tt.grad(loss, **UPDATES)(model)
    assert type(grads) is tt.State
    assert {path: float(v) for path, v in tt.to_flat_state(grads)} == {("w",): 15.0}
    grads = tt.grad(lambda v, x: v * x, argnums=(0, 1), **UPDATES)(model["mean"], 3.0)
    assert (type(grads[0]), float(grads[0]), float(grads[1])) == (tt.BatchStat, 3, 5)


def test_with_graph_updates_a_shared_param_is_there_once():
    v = tt.Param(jnp.array(3.0))
    grads = tt.grad(lambda m: m.a * m.b, **UPDATES)(tt.Dict(a=v, b=v))
    assert {path: float(v) for path, v in tt.to_flat_state(grads)} == {("a",): 6.0}


def test_a_shared_variable_gets_its_whole_derivative_at_every_place():
    v = tt.Param(jnp.array(3.0))
    model = tt.Dict(a=v, b=v)
    grads = tt.grad(lambda m: m.a * m.b, graph=True)(model)
    assert (float(grads.a), float(grads.b)) == (6.0, 6.0)
    both = tt.grad(lambda a, b: a * b, argnums=(0, 1), graph=True)(v, v)
    assert [float(grad) for grad in both] == [6.0, 6.0]


@ALL_MODES
def test_several_and_negative_argument_numbers(mode):
    f = lambda a, b, c: a * b + 0 * c
    args = (tt.Param(2.0), 3.0, 4.0)
    found = tt.grad(f, argnums=(-2, 0), **mode)(*args)
    assert isinstance(found, tuple)
    assert [float(grad) for grad in found] == [2.0, 3.0]
    assert type(found[1]) is tt.Param


@ALL_MODES
def test_changes_to_what_is_differentiated_are_written_back(mode):
    def loss(v):
        value = v * v
        v[...] = v * 10
        return value

    v = tt.Param(jnp.array(3.0))
    assert float(tt.grad(loss, **mode)(v)) == 6.0
    assert float(v) == 30.0


@SIMPLE_MODES
def test_vjp_and_jvp_give_trees_like_the_arguments(mode):
    model = Counter()
    out, pull = tt.vjp(Counter.loss, model, **mode)
    (grads,) = pull(jnp.array(1.0))
    (again,) = pull(jnp.array(2.0))
    assert (float(out), float(grads.w), float(again.w)) == (9.0, 6.0, 12.0)
    out, slope = tt.jvp(Counter.loss, (model,), (grads,), **mode)
    assert (float(out), float(slope)) == (9.0, 36.0)
    assert int(model.calls) == 2  # once for each forward pass


@ALL_MODES
def test_jvp_refuses_tangents_with_other_names(mode):
    primal = {"a": tt.Param(2.0), "b": tt.Param(3.0)}
    tangent = {"a": tt.Param(1.0), "c": tt.Param(0.0)}
    with pytest.raises((TypeError, ValueError), match="tangents"):
        tt.jvp(lambda m: m["a"] * m["b"], (primal,), (tangent,), **mode)


@ALL_MODES
def test_remat_changes_variables_once_under_grad(mode):
    model = Counter()
    grads = tt.grad(tt.remat(Counter.loss, **mode), **mode)(model)
    assert (float(grads.w), int(model.calls)) == (6.0, 1)
    assert int(model.rngs.default.count) == 1


# Loops.


@ALL_MODES
def test_scan_returns_the_callers_variables_as_carry(mode):
    def step(model, x):
        model.calls[...] += 1
        model.w[...] = model.w + x
        return model, model.w * 1

    model = Counter()
    out, seen = tt.scan(step, **mode)(model, jnp.arange(3.0))
    assert out.w is model.w
    assert (int(model.calls), float(model.w)) == (3, 6.0)
    assert seen.tolist() == [3.0, 4.0, 6.0]


@ALL_MODES
def test_scan_carries_a_counter_on_axis_none(mode):
    counter = tt.Variable(jnp.array(1))

    def step(counter, total, x):
        counter[...] += 1
        return total + x

    total = tt.scan(step, in_axes=(None, tt.Carry, 0), out_axes=tt.Carry, **mode)(
        counter, jnp.array(0.0), jnp.arange(3.0)
    )
    assert (int(counter), float(total)) == (4, 3.0)


@ALL_MODES
def test_scan_stacks_changes_on_the_axis_they_came_from(mode):
    v = tt.Variable(jnp.arange(6.0).reshape(2, 3))

    def step(v):
        v[...] *= 2
        return v[...] + 1

    out = tt.scan(step, in_axes=(-1,), out_axes=1, **mode)(v)
    np.testing.assert_array_equal(v[...], 2 * np.arange(6.0).reshape(2, 3))
    np.testing.assert_array_equal(out, v[...] + 1)


@ALL_MODES
def test_scan_refuses_none_inside_out_axes(mode):
    with pytest.raises(ValueError, match="Cannot broadcast output state"):
        tt.scan(lambda c, x: (c, (x, x)), out_axes=(tt.Carry, (0, None)), **mode)(
            jnp.array(0.0), jnp.arange(3.0)
        )


def test_an_input_variable_in_the_result_is_not_answered_with_the_mode_in_force():
    v = tt.Param(jnp.array(1.0))
    with pytest.raises(ValueError, match="Duplicate Param") as caught:
        tt.jit(lambda v: v, graph=True)(v)
    assert "in tree mode" not in str(caught.value)
    assert "graph=True)" not in str(caught.value)


def add_one(value):
    value["count"][...] += 1
    return {"count": value["count"], "x": value["x"] * 2}


@ALL_MODES
@pytest.mark.parametrize("steps", [0, 3])
def test_loops_return_the_callers_variables(mode, steps):
    def start():
        return {"count": tt.Variable(jnp.array(0)), "x": jnp.array(1.0)}

    first, second = start(), start()
    found = [
        tt.fori_loop(0, steps, lambda i, value: add_one(value), first, **mode),
        tt.while_loop(lambda v: v["count"] < steps, add_one, second, **mode),
    ]
    for given, out in zip((first, second), found, strict=True):
        assert out["count"] is given["count"]
        assert (int(out["count"]), float(out["x"])) == (steps, 2.0**steps)


@SIMPLE_MODES
def test_loops_refuse_another_variable_in_the_same_place(mode):
    pair = (tt.Param(jnp.array(1.0)), tt.Param(jnp.array(2.0)))
    match = "fori_loop Variable identity must be preserved"
    with pytest.raises(ValueError, match=match):
        tt.fori_loop(0, 2, lambda i, pair: pair[::-1], pair, **mode)
    assert [float(v) for v in pair] == [1.0, 2.0]


@ALL_MODES
def test_a_reference_may_be_changed_in_a_scan_and_beside_a_gradient(mode):
    def step(total, x):
        total[...] += x
        return x * 2

    total = tt.Variable(jnp.array(0.0), ref=True)
    f = tt.scan(step, in_axes=(None, 0), out_axes=0, **mode)
    assert f(total, jnp.arange(3.0)).tolist() == [0.0, 2.0, 4.0]
    assert float(total) == 3.0

    def loss(model):
        model.total[...] += 1
        return model.w * model.w

    model = tt.Dict(w=tt.Param(jnp.array(3.0)), total=total)
    assert float(tt.grad(loss, **mode)(model).w) == 6.0
    assert float(total) == 4.0


# Mapping.


class Layer(tt.Module):
    def __init__(self, size, *, rngs):
        self.w = tt.Param(jax.random.normal(rngs.params(), (size, size)))
        self.calls = tt.Variable(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        return jnp.tanh(x @ self.w)


@ALL_MODES
def test_layers_are_stacked_by_vmap_and_run_by_scan(mode):
    keys = jax.random.split(jax.random.key(0), 3)
    make = lambda key: Layer(2, rngs=tt.Rngs(key))
    stack = tt.vmap(make, **mode)(keys)
    assert type(stack) is Layer
    assert (stack.w.shape, stack.calls.shape) == ((3, 2, 2), (3,))
    layers = [make(key) for key in keys]
    step = lambda x, layer: layer(x)
    x = jnp.ones((4, 2))
    f = tt.scan(step, in_axes=(tt.Carry, 0), out_axes=tt.Carry, **mode)
    found = f(x, stack)
    np.testing.assert_allclose(
        found, functools.reduce(step, layers, x), rtol=1e-5, atol=1e-6
    )
    assert stack.calls[...].tolist() == [1, 1, 1]
    grads = tt.grad(lambda stack: f(x, stack).sum(), **mode)(stack)
    assert grads.w.shape == (3, 2, 2)
    assert float(jnp.abs(grads.w[...]).min(axis=(1, 2)).max()) > 0


@ALL_MODES
def test_axis_size_makes_a_stack_without_mapped_arguments(mode):
    make = lambda start: tt.Dict(w=tt.Param(start[...] + 1.0))
    start = tt.Variable(jnp.zeros(2))
    stack = tt.vmap(make, in_axes=None, out_axes=1, axis_size=3, **mode)(start)
    assert stack.w.shape == (2, 3)
    stack = tt.vmap(lambda: tt.Param(jnp.ones(2)), axis_size=3, **mode)()
    assert stack.shape == (3, 2)


@SIMPLE_MODES
def test_vmap_takes_one_prefix_for_each_variable(mode):
    model = tt.Dict(w=tt.Param(jnp.arange(3.0)), n=tt.Variable(jnp.array(0)))
    axes = tt.prefix(model, {tt.Param: 0, ...: None})

    def step(model, x):
        model.n[...] += 1
        model.w[...] += x
        return tt.Dict(w=tt.Param(model.w * 2), n=tt.Variable(jnp.array(5)))

    f = tt.vmap(step, in_axes=(axes, None), out_axes=axes, **mode)
    out = f(model, jnp.array(1.0))
    assert model.w[...].tolist() == [1.0, 2.0, 3.0]
    assert (int(model.n), int(out.n)) == (1, 5)
    assert out.w[...].tolist() == [2.0, 4.0, 6.0]


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
@ALL_MODES
def test_shard_map_writes_each_shard_back(mode):
    mesh = jax.make_mesh((2,), ("a",), (jax.sharding.AxisType.Auto,))
    sharded, same = PartitionSpec("a"), PartitionSpec()
    v, n = tt.Param(jnp.arange(4.0)), tt.Variable(jnp.array(0))

    def step(v, n):
        assert v.shape == (2,)
        v[...] *= 2
        n[...] += 1
        return v[...] + jax.lax.psum(v[...].sum(), "a")

    f = tt.shard_map(
        step, mesh=mesh, in_specs=(sharded, same), out_specs=sharded, **mode
    )
    assert f(v, n).tolist() == [12.0, 14.0, 16.0, 18.0]
    assert v[...].tolist() == [0.0, 2.0, 4.0, 6.0]
    assert int(n) == 1


# Branches and inspection.


@ALL_MODES
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("index", [0, 1])
def test_branches_may_change_different_variables(mode, index, jitted):
    def left(a, b, c):
        a[...] += 10
        return tt.Param(c * 1)

    def right(a, b, c):
        b[...] += 20
        return tt.Param(c * 2)

    def by_cond(index, *args):
        return tt.cond(index == 0, left, right, *args, **mode)

    def by_switch(index, *args):
        return tt.switch(index, [left, right], *args, **mode)

    for f in (by_cond, by_switch):
        a, b, c = (tt.Variable(jnp.array(float(i))) for i in range(3))
        untouched = c[...]
        out = (tt.jit(f, **mode) if jitted else f)(jnp.array(index), a, b, c)
        assert (float(a), float(b)) == ((10.0, 1.0), (0.0, 21.0))[index]
        assert c[...] is untouched
        assert (type(out), float(out)) == (tt.Param, 2.0 * (index + 1))


@ALL_MODES
@pytest.mark.parametrize("x", [1.0, -1.0])
def test_checkify_writes_back_whether_or_not_the_error_is_set(mode, x):
    def step(counter, x):
        counter[...] += 1
        jax_checkify.check(x > 0, "x must be positive")
        return x * 2

    counter = tt.Variable(jnp.array(0))
    error, out = tt.checkify(step, **mode)(counter, x)
    assert (error.get() is None) == (x > 0)
    assert (int(counter), float(out)) == (1, 2 * x)


@SIMPLE_MODES
def test_eval_shape_and_make_jaxpr_leave_their_inputs_alone(mode):
    model = Counter()
    before = model.calls[...], model.w[...]

    def step(model, x):
        model.calls[...] += 1
        model.w[...] = x
        return tt.Dict(w=tt.Param(jnp.zeros((2, 3))), x=x)

    out = tt.eval_shape(step, model, jnp.array(1.0), **mode)
    tt.make_jaxpr(step, **mode)(model, jnp.array(1.0))
    assert (model.calls[...], model.w[...])[0] is before[0]
    assert model.w[...] is before[1]
    assert type(out.w) is tt.Param
    assert out.w.get_value() == jax.ShapeDtypeStruct((2, 3), jnp.float32)
