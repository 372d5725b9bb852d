# SPDX-License-Identifier: Apache-2.0
"""Gradients with graph updates: States of Params, and DiffState."""

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from modes import ALL_MODES, SIMPLE_MODES, UPDATES
from treetap import compat, nnx


class Model(tt.Module):
    def __init__(self):
        self.x = tt.Param(jnp.array(1.0))
        self.y = tt.Param(jnp.array(2.0))
        self.n = tt.BatchStat(jnp.array(3.0))
        self.calls = tt.Variable(jnp.array(0))


def loss(m, k=1.0):
    m.calls[...] += 1
    return m.x * m.y * m.n * k


def numbers(state):
    assert type(state) is tt.State
    return {path: float(v) for path, v in tt.to_flat_state(state)}


@pytest.mark.parametrize(
    ("filter", "expected"),
    [
        (nnx.Param, {("x",): 6.0, ("y",): 3.0}),
        (nnx.BatchStat, {("n",): 2.0}),
        (nnx.PathContains("y"), {("y",): 3.0}),
        ((nnx.BatchStat, nnx.PathContains("x")), {("n",): 2.0, ("x",): 6.0}),
        (nnx.Nothing(), {}),
    ],
)
def test_a_filter_says_what_is_differentiated(filter, expected):
    model = Model()
    argnums = nnx.DiffState(0, filter)
    assert numbers(compat.grad(loss, argnums=argnums)(model)) == expected
    value, grads = compat.value_and_grad(loss, argnums=argnums)(model)
    assert (float(value), numbers(grads)) == (6.0, expected)
    assert int(model.calls) == 2


def test_everything_with_a_derivative_may_be_asked_for():
    expected = {("x",): 6.0, ("y",): 3.0, ("n",): 2.0}
    for filter in (..., True, nnx.Everything(), nnx.Variable):
        grads = compat.grad(loss, argnums=nnx.DiffState(0, filter))(Model())
        assert numbers(grads) == expected


def test_filters_and_numbers_stand_side_by_side():
    argnums = (1, nnx.DiffState(0, nnx.BatchStat))
    grad_k, grads = compat.grad(loss, argnums=argnums)(Model(), 10.0)
    assert float(grad_k) == 6.0
    assert numbers(grads) == {("n",): 20.0}


def test_a_negative_number_counts_from_the_end():
    f = lambda k, m: loss(m, k)
    grads = compat.grad(f, argnums=nnx.DiffState(-1, nnx.BatchStat))(1.0, Model())
    assert numbers(grads) == {("n",): 2.0}


def test_objects_in_containers_give_states_in_containers():
    given = {"m": [Model()], "k": jnp.array(2.0)}
    grads = compat.grad(lambda given: loss(given["m"][0], given["k"]))(given)
    assert numbers(grads["m"][0]) == {("x",): 12.0, ("y",): 6.0}


def test_a_state_is_differentiated_whole():
    state = tt.state(Model(), (nnx.Param, nnx.BatchStat))
    grads = compat.grad(lambda s: s["x"] * s["y"] * s["n"])(state)
    assert numbers(grads) == {("x",): 6.0, ("y",): 3.0, ("n",): 2.0}


@pytest.mark.parametrize("argnums", [(0, 0), (nnx.DiffState(0, ...), 0), (0, -2)])
def test_a_repeated_number_is_refused(argnums):
    with pytest.raises(ValueError, match="repeated"):
        compat.grad(loss, argnums=argnums)(Model(), 1.0)


@SIMPLE_MODES
@pytest.mark.parametrize("transform", [tt.grad, tt.value_and_grad])
def test_filters_of_arguments_need_graph_updates(transform, mode):
    for argnums in (nnx.DiffState(0, nnx.Param), (1, nnx.DiffState(0, nnx.Param))):
        text = "`argnums` cannot contain `DiffState` objects"
        with pytest.raises(ValueError, match=text) as caught:
            transform(loss, argnums=argnums, **mode)
        assert str(caught.value).startswith(transform.__name__)


@SIMPLE_MODES
def test_custom_vjp_takes_filters_with_graph_updates_only(mode):
    text = "`nondiff_argnums` cannot contain `DiffState` objects"
    with pytest.raises(ValueError, match=f"custom_vjp: {text}"):
        tt.custom_vjp(loss, nondiff_argnums=(nnx.DiffState(0, nnx.Param),), **mode)


def test_a_diff_state_is_a_value():
    one, two = nnx.DiffState(0, nnx.Param), nnx.DiffState(0, nnx.Param)
    assert one == two
    assert hash(one) == hash(two)
    assert (one.argnum, one.filter) == (0, nnx.Param)
    with pytest.raises(AttributeError):
        one.argnum = 1


def test_the_pullback_gives_states_of_params():
    model = Model()
    out, pull = compat.vjp(loss, model, jnp.array(10.0))
    grads, grad_k = pull(jnp.array(1.0))
    assert (float(out), float(grad_k)) == (60.0, 6.0)
    assert numbers(grads) == {("x",): 60.0, ("y",): 30.0}
    assert int(model.calls) == 1


def test_the_gradient_of_a_structure_that_changes_inside_is_that_of_the_start():
    def grow(m):
        m.x, m.y = m.y, m.x
        m.z = tt.Param(m.x * 10)
        return m.z * m.y

    model = Model()
    x, y = model.x, model.y
    grads = compat.grad(grow)(model)
    assert numbers(grads) == {("x",): 20.0, ("y",): 10.0}
    assert model.x is y
    assert model.y is x
    assert float(model.z) == 20.0


def test_a_gradient_state_updates_its_model():
    @compat.jit
    def step(m):
        grads = compat.grad(loss)(m)
        tt.update(m, jax.tree.map(lambda p, g: p - g, tt.state(m, tt.Param), grads))

    model = Model()
    x = model.x
    step(model)
    assert model.x is x
    assert (float(model.x), float(model.y)) == (-5.0, -1.0)


@pytest.mark.parametrize("argnums", [2, -3, (0, 5)])
def test_numbers_of_arguments_that_are_not_there_are_refused(argnums):
    with pytest.raises(tt.StructureError, match="but 2 positional arguments were"):
        tt.grad(lambda x, y: x * y, argnums=argnums)(1.0, 2.0)


@pytest.mark.parametrize("name", ["grad", "value_and_grad", "vjp"])
def test_axes_to_reduce_are_refused(name):
    with pytest.raises(NotImplementedError, match=f"{name}: `reduce_axes` is not supp"):
        getattr(tt, name)(lambda x: x, reduce_axes=("i",))


@pytest.mark.parametrize(
    ("result", "text"), [(lambda x: x, "Tracer"), (lambda x: (x, 1, 2), "3 items")]
)
def test_a_function_with_aux_gives_a_pair(result, text):
    with pytest.raises(tt.StructureError, match=f"must return a pair.*{text}"):
        tt.grad(result, has_aux=True)(1.0)


class Weighted(tt.Module):
    def __init__(self, w=3.0):
        self.w = tt.Param(jnp.array(w))
        self.calls = tt.Variable(jnp.array(0))
        self.kind = "plain"

    def square(self):
        return self.w * self.w


@ALL_MODES
def test_aux_of_a_gradient_may_be_a_new_module(mode):
    def loss(model):
        return model.w * model.w, Weighted(7.0)

    grads, aux = tt.grad(loss, has_aux=True, **mode)(Weighted())
    assert type(grads) is (tt.State if mode is UPDATES else Weighted)
    assert float(grads.w) == 6.0
    assert (type(aux), float(aux.w)) == (Weighted, 7.0)
    (value, aux), grads = tt.value_and_grad(loss, has_aux=True, **mode)(Weighted())
    assert (float(value), float(grads.w), float(aux.w)) == (9.0, 6.0, 7.0)


@ALL_MODES
def test_parts_shared_between_aux_and_itself_stay_shared(mode):
    def loss(model):
        new = tt.Param(model.w * 2)
        return model.w * model.w, (
            (new, new) if mode["graph"] else (new, tt.Param(1.0))
        )

    _, (one, two) = tt.grad(loss, has_aux=True, **mode)(Weighted())
    assert (one is two) == mode["graph"]
    assert float(one) == 6.0


@ALL_MODES
def test_aux_of_vjp_and_jvp_is_what_was_returned(mode):
    def f(x):
        return x * x, (tt.Param(x * 2), Weighted(7.0))

    x = jnp.array(3.0)
    out, pull, aux = tt.vjp(f, x, has_aux=True, **mode)
    assert (type(aux[0]), float(aux[0])) == (tt.Param, 6.0)
    assert (type(aux[1]), float(aux[1].w)) == (Weighted, 7.0)
    assert (float(out), float(pull(jnp.array(1.0))[0])) == (9.0, 6.0)
    out, slope, aux = tt.jvp(f, (x,), (jnp.array(1.0),), has_aux=True, **mode)
    assert (type(aux[0]), float(aux[0])) == (tt.Param, 6.0)
    assert (type(aux[1]), float(aux[1].w)) == (Weighted, 7.0)
    assert (float(out), float(slope)) == (9.0, 6.0)


@ALL_MODES
@pytest.mark.parametrize("argnums", [(0, 0), (0, -2), [1, 1]])
def test_repeated_argument_numbers_are_refused(mode, argnums):
    for transform in (tt.grad, tt.value_and_grad):
        with pytest.raises(ValueError, match=r"argnums(.|\n)*repeat"):
            transform(lambda a, b: a * b, argnums=argnums, **mode)(1.0, 2.0)


def test_vjp_and_jvp_work_with_graph_updates():
    model = tt.Dict(w=tt.Param(jnp.array(3.0)), calls=tt.Variable(jnp.array(0)))

    def f(model, x):
        model.calls[...] += 1
        return model.w * model.w * x

    out, pull = compat.vjp(f, model, jnp.array(2.0))
    grads, grad_x = pull(jnp.array(1.0))
    assert (float(out), float(grads.w), float(grad_x)) == (18.0, 12.0, 9.0)
    assert list(grads) == ["w"]
    tangents = (tt.clone(model), jnp.array(0.0))
    out, slope = compat.jvp(f, (model, jnp.array(2.0)), tangents)
    assert (float(out), float(slope)) == (18.0, 36.0)
    assert int(model.calls) == 2


@ALL_MODES
def test_tangents_that_do_not_fit_are_refused_by_name(mode):
    f = tt.custom_vjp(lambda m: m["x"] * m["y"], **mode)
    f.defvjp(lambda m: (m["x"] * m["y"], None), lambda _, g: ({"x": g},))
    with pytest.raises((TypeError, ValueError), match="custom_vjp"):
        tt.grad(f, **mode)({"x": 1.0, "y": 2.0})


class Tied(tt.Module):
    def __init__(self, shared):
        self.w = shared


@pytest.mark.parametrize(
    "places",
    [
        lambda v: ({"a": v, "b": v}, lambda d: d["a"] * d["b"]),
        lambda v: ([Tied(v), Tied(v)], lambda pair: pair[0].w * pair[1].w),
        lambda v: (tt.Dict(a=v, b=v), lambda d: d.a * d.b),
    ],
    ids=["variables", "objects", "one object"],
)
def test_a_shared_variable_has_one_gradient_with_graph_updates(places):
    value, product = places(tt.Param(jnp.array(2.0)))
    grads = nnx.grad(product)(value)
    assert [float(x) for x in jax.tree.leaves(grads)] == [4.0]


def test_the_gradient_of_a_shared_argument_stands_in_the_first_place():
    v = tt.Param(jnp.array(2.0))
    first, second = nnx.grad(lambda a, b: a * b, argnums=(0, 1))(v, v)
    assert (float(first), second) == (4.0, tt.State({}))


def test_a_filter_sees_the_first_place_of_a_shared_variable():
    v = tt.Param(jnp.array(2.0))
    for name, count in (("a", 1), ("b", 0)):
        chosen = nnx.DiffState(0, nnx.PathContains(name))
        grads = nnx.grad(lambda d: d.a * d.b, argnums=chosen)(tt.Dict(a=v, b=v))
        assert len(jax.tree.leaves(grads)) == count


@ALL_MODES
def test_an_array_given_twice_has_a_gradient_in_each_place(mode):
    x = jnp.array(2.0)
    weigh = lambda a, b: a * 2 + b * 3
    assert tt.grad(weigh, argnums=(0, 1), **mode)(x, x) == (2.0, 3.0)
    pair = tt.grad(lambda d: weigh(d["a"], d["b"]), **mode)({"a": x, "b": x})
    assert pair == {"a": 2.0, "b": 3.0}


@ALL_MODES
def test_arrays_beside_objects_have_gradients(mode):
    value = {"a": jnp.array(5.0), "m": tt.Dict(w=tt.Param(jnp.array(1.0)))}
    grads = tt.grad(lambda d: d["a"] * 2 + d["m"].w * 3, **mode)(value)
    assert float(grads["a"]) == 2.0
    assert float(grads["m"]["w"]) == 3.0


def test_errors_name_arguments_as_the_transform_does():
    v, w = tt.Param(jnp.array(2.0)), tt.Param(jnp.array(2.0))
    product = lambda a, b: a * b
    with pytest.raises(tt.AliasError, match="primals/0 and primals/1"):
        tt.vjp(product, v, v)
    with pytest.raises(tt.AliasError, match="primals/0 and primals/1"):
        tt.jvp(product, (v, v), (v, w))
    with pytest.raises(tt.AliasError, match=r"jvp: .*tangents/0 and tangents/1"):
        tt.jvp(product, (v, w), (v, v))
    with pytest.raises(tt.StructureError, match="tangents are not like the primals"):
        tt.jvp(product, (v, w), (v, 1.0))
    for call in (tt.cond, lambda p, f, g, *args: tt.switch(0, [f, g], *args)):
        with pytest.raises(tt.AliasError, match="operands/0 and operands/1"):
            call(True, product, product, v, v)
        with pytest.raises(tt.AliasError, match="operands/0 and out"):
            call(True, lambda a: a, lambda a: a, v)
