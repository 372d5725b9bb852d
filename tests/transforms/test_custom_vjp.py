# SPDX-License-Identifier: Apache-2.0
"""custom_vjp: a function with its own reverse rule."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from modes import ALL_MODES, SIMPLE_MODES
from treetap import compat, nnx


class Model(tt.Module):
    def __init__(self, x=1.0, y=2.0):
        self.x = tt.Param(jnp.array(x))
        self.y = tt.Param(jnp.array(y))
        self.calls = tt.Variable(jnp.array(0))


def make(scale=1.0, **options):
    @tt.custom_vjp(**options)
    def f(m):
        m.calls[...] += 1
        return jnp.sin(m.x[...]) * m.y[...]

    def fwd(m):
        return f(m), (jnp.cos(m.x[...]), jnp.sin(m.x[...]), m)

    def bwd(residual, g):
        cos, sin, m = residual
        tangent = tt.clone(m)
        tangent.x[...] = scale * g * cos * m.y[...]
        tangent.y[...] = scale * g * sin
        return (tangent,)

    f.defvjp(fwd, bwd)
    return f


@SIMPLE_MODES
def test_the_worked_numbers(mode):
    model = Model()
    grads = tt.grad(make(**mode), **mode)(model)
    assert jnp.allclose(grads.x[...], 2 * jnp.cos(1.0))
    assert jnp.allclose(grads.y[...], jnp.sin(1.0))
    assert model.calls[...] == 1


def test_the_rule_is_the_one_given():
    grads = tt.jit(tt.grad(make(scale=10.0)))(Model())
    assert jnp.allclose(grads.x[...], 20 * jnp.cos(1.0))


def test_calling_it_plainly_writes_once():
    model = Model()
    assert jnp.allclose(make()(m=model), 2 * jnp.sin(1.0))
    assert model.calls[...] == 1


def test_nondiff_arguments_may_hold_variables_and_functions():
    @tt.custom_vjp(nondiff_argnums=(0, 1))
    def f(fn, counter, x):
        counter[...] += 1
        return fn(x)

    f.defvjp(
        lambda fn, counter, x: (f(fn, counter, x), x),
        lambda fn, counter, x, g: (g * 5,),
    )
    counter = tt.Variable(jnp.array(0))

    def loss(counter, x):
        return f(jnp.sin, counter, x)

    assert tt.grad(loss, argnums=1)(counter, 1.0) == 5.0
    assert counter[...] == 1
    assert jax.grad(lambda x: f(jnp.sin, tt.Variable(jnp.array(0)), x))(1.0) == 5.0


def test_updates_reach_the_rule_that_asks_for_them():
    seen = []

    @tt.custom_vjp
    def f(m):
        m.x[...] = m.x * 3
        return m.y[...] * 1.0

    def bwd(residual, g, *, updates_g):
        seen.append((type(updates_g[0].x), updates_g[0].y))
        tangent = Model()
        tangent.x[...] = updates_g[0].x * 3
        tangent.y[...] = g
        return (tangent,)

    f.defvjp(lambda m: (f(m), None), bwd)

    def loss(m):
        return f(m) + m.x * 2

    grads = tt.grad(loss)(Model())
    assert seen == [(tt.Param, None)]
    assert grads.x[...] == 6.0


def test_a_lost_gradient_is_refused():
    @tt.custom_vjp
    def f(m):
        m.x[...] = m.x * 3
        return m.y[...] * 1.0

    f.defvjp(lambda m: (f(m), None), lambda residual, g: (Model(),))
    with pytest.raises(tt.StructureError, match="a differentiable Param is changed"):
        f(Model())


def test_mistakes_are_named():
    f = tt.custom_vjp(lambda x: x * 2)
    with pytest.raises(tt.StructureError, match=r"defvjp\(fwd, bwd\)"):
        f(1.0)
    f.defvjp(lambda x: x, lambda r, g: (g,))
    with pytest.raises(tt.StructureError, match="`fwd` must return a pair"):
        jax.grad(f)(1.0)
    f.defvjp(lambda x: (x * 2, None), lambda r, g: (g, g))
    with pytest.raises(tt.StructureError, match="2 tangents for 1 differentiable"):
        tt.grad(f)(1.0)
    with pytest.raises(NotImplementedError, match="symbolic_zeros"):
        f.defvjp(None, None, symbolic_zeros=True)


def test_it_binds_as_a_method():
    class Doubling(tt.Module):
        def __init__(self):
            self.w = tt.Param(jnp.array(3.0))

        @tt.custom_vjp
        def run(self, x):
            return self.w * x

    Doubling.run.defvjp(
        lambda m, x: (m.w * x, (m, x)),
        lambda residual, g: (tt.clone(residual[0]), g * 100),
    )
    module = Doubling()
    assert module.run(2.0) == 6.0
    assert tt.grad(lambda m, x: m.run(x), argnums=1)(module, 2.0) == 100.0


# With graph updates.


def make_with_states(seen, **options):
    @compat.custom_vjp(**options)
    def f(m):
        m.calls[...] += 1
        return jnp.sin(m.x[...]) * m.y[...]

    def fwd(m):
        return f(m), (jnp.cos(m.x[...]), jnp.sin(m.x[...]), m)

    def bwd(residual, g):
        updates_g, out_g = g
        seen.append(updates_g)
        cos, sin, m = residual
        tangent = {"x": tt.Param(out_g * cos * m.y[...]), "y": tt.Param(out_g * sin)}
        return (tt.State(tangent),)

    f.defvjp(fwd, bwd)
    return f


@pytest.mark.keeps_traces
@pytest.mark.parametrize("jitted", [False, True])
def test_the_worked_numbers_with_graph_updates(jitted):
    seen, model = [], Model()
    derive = compat.grad(make_with_states(seen))
    grads = (compat.jit(derive) if jitted else derive)(model)
    assert type(grads) is tt.State
    assert jnp.allclose(grads.x[...], 2 * jnp.cos(1.0))
    assert jnp.allclose(grads.y[...], jnp.sin(1.0))
    assert model.calls[...] == 1
    ((updates_g,),) = seen
    assert type(updates_g) is tt.State
    assert {"x", "y"} <= set(updates_g)
    assert type(updates_g["x"]) is tt.Param


def test_with_graph_updates_the_rule_gets_the_cotangent_of_each_change():
    @compat.custom_vjp
    def f(m, k):
        m.x[...] = m.x * 3
        return m.y * k

    def bwd(residual, g):
        updates_g, out_g = g
        assert updates_g[1] is None
        x, y = tt.Param(updates_g[0]["x"] * 3), tt.Param(out_g * 10)
        return tt.State({"x": x, "y": y}), out_g * 100

    f.defvjp(lambda m, k: (f(m, k), None), bwd)

    def loss(m, k):
        return f(m, k) + m.x * 2

    model = Model()
    grads, grad_k = compat.grad(loss, argnums=(0, 1))(model, 5.0)
    assert (float(grads.x), float(grads.y), float(grad_k)) == (6.0, 10.0, 100.0)
    assert float(model.x) == 3.0


def test_with_graph_updates_the_rule_gets_the_cotangent_of_a_changed_variable():
    @compat.custom_vjp
    def f(v):
        v[...] = v * 3
        return jnp.array(0.0)

    def bwd(residual, g):
        (updates_g,), _ = g
        assert type(updates_g) is tt.Param
        return (tt.Param(updates_g * 3),)

    f.defvjp(lambda v: (f(v), None), bwd)
    v = tt.Param(jnp.array(1.0))
    assert float(compat.grad(lambda v: f(v) + v * 2)(v)) == 6.0
    assert float(v) == 3.0


def test_a_filter_says_what_of_an_object_has_a_rule():
    seen = []

    @compat.custom_vjp(nondiff_argnums=(nnx.DiffState(0, nnx.PathContains("x")),))
    def f(m):
        return m.x * m.y

    def bwd(residual, g):
        seen.append(set(g[0][0]))
        return (tt.State({"x": tt.Param(g[1] * 10)}),)

    f.defvjp(lambda m: (f(m), None), bwd)
    grads = compat.grad(f)(Model())
    assert (float(grads.x), float(grads.y)) == (10.0, 0.0)
    assert "x" in seen[0]


@pytest.mark.parametrize("filter", [..., nnx.Everything()])
def test_everything_of_an_object_may_have_a_rule(filter):
    @compat.custom_vjp(nondiff_argnums=(nnx.DiffState(0, filter),))
    def f(m):
        return m.x * m.y

    def bwd(residual, g):
        return (tt.State({"x": tt.Param(g[1] * 10), "y": tt.Param(g[1] * 20)}),)

    f.defvjp(lambda m: (f(m), None), bwd)
    grads = compat.grad(f)(Model())
    assert (float(grads.x), float(grads.y)) == (10.0, 20.0)


def test_with_graph_updates_an_object_is_not_left_out_by_number():
    f = compat.custom_vjp(lambda m, x: x * 2, nondiff_argnums=0)
    f.defvjp(lambda m, x: (x * 2, None), lambda m, residual, g: (g[1],))
    with pytest.raises(TypeError, match=r"custom_vjp: argument 0 .*DiffState\(0, "):
        f(Model(), 1.0)
    g = compat.custom_vjp(lambda fn, x: fn(x), nondiff_argnums=0)
    g.defvjp(lambda fn, x: (fn(x), None), lambda fn, residual, g: (g[1] * 5,))
    assert float(compat.grad(lambda x: g(jnp.sin, x))(1.0)) == 5.0


def test_with_graph_updates_a_repeated_number_is_refused():
    def use():
        f = compat.custom_vjp(lambda a, b: a * b, nondiff_argnums=(0, 0))
        f.defvjp(lambda a, b: (a * b, None), lambda a, residual, g: (g[1],))
        return f(1.0, 2.0)

    with pytest.raises(ValueError, match="repeated"):
        use()


def test_a_number_beyond_the_arguments_is_refused():
    """It was taken round to the first argument, whose gradient was then zero."""

    @tt.custom_vjp(nondiff_argnums=3)
    def product(a, b, scale=1.0):
        return a * b * scale

    product.defvjp(
        lambda a, b, scale=1.0: (a * b * scale, (a, b)),
        lambda scale, kept, g: (g * kept[1], g * kept[0]),
    )
    with pytest.raises(tt.StructureError, match=r"is \[3\], but 3 positional"):
        tt.grad(lambda a: product(a, 3.0))(2.0)


def test_with_graph_updates_structure_changes_by_the_rule_or_without_it():
    def grow(m):
        m.z = tt.Param(m.x * 2)
        return m.x * m.y

    f = compat.custom_vjp(grow)
    tangent = lambda g: tt.State({"x": tt.Param(g[1] * 10)})
    f.defvjp(lambda m: (grow(m), None), lambda residual, g: (tangent(g),))
    for call in (f, lambda m: compat.grad(f)(m).x):
        model = Model(x=3.0)
        assert float(call(model)) in (6.0, 10.0)
        assert float(model.z) == 6.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Scale:
    by: jax.Array

    @tt.custom_vjp
    def call(self, x):
        return self.by * x

    call.defvjp(
        lambda self, x: (self.by * x, self), lambda kept, g: (Scale(g * 0), g * 7)
    )


def test_a_rule_may_be_a_method_of_any_class():
    scale = Scale(jnp.array(3.0))
    assert float(scale.call(2.0)) == float(Scale.call(scale, 2.0)) == 6.0
    assert float(jax.grad(scale.call)(2.0)) == 7.0


def test_a_shared_variable_has_one_tangent():
    f = tt.custom_vjp(lambda m: m.x * m.y, graph=True)

    def bwd(kept, g):
        tangent = Model()
        tangent.x = tangent.y = tt.Param(g * 10)
        return (tangent,)

    f.defvjp(lambda m: (m.x * m.y, None), bwd)
    model = Model()
    model.y = model.x
    grads = tt.grad(lambda m: f(m), graph=True)(model)
    assert grads.x is grads.y
    assert float(grads.x) == 10.0


def test_a_tangent_that_is_no_tree_like_the_argument_is_refused():
    f = tt.custom_vjp(lambda d: d["a"] * 2)
    f.defvjp(lambda d: (f(d), None), lambda kept, g: (g,))
    message = r"for 0 does not fit: it is a .*, the argument is a dict with \['a'\]"
    with pytest.raises(tt.StructureError, match=message):
        tt.grad(lambda d: f(d))({"a": 1.0})


@ALL_MODES
def test_custom_vjp_without_a_rule_says_so(mode):
    @tt.custom_vjp(**mode)
    def double(x):
        return x * 2

    with pytest.raises(ValueError, match=r"double(.|\n)*defvjp"):
        double(1.0)


@SIMPLE_MODES
@pytest.mark.parametrize("calls_itself", [False, True])
def test_custom_vjp_uses_its_rule_for_modules(mode, calls_itself):
    def product(m):
        return jnp.sin(m.x[...]) * m.y

    f = tt.custom_vjp(product, **mode)

    def fwd(m):
        return (f if calls_itself else product)(m), m.x[...] * 1

    def bwd(x, g):
        return (tt.Dict(x=tt.Param(g * 10), y=tt.Param(g * x)),)

    f.defvjp(fwd, bwd)
    m = tt.Dict(x=tt.Param(jnp.array(1.0)), y=tt.Param(jnp.array(2.0)))
    grads = tt.grad(lambda m: f(m) * 3, **mode)(m)
    assert (float(grads.x), float(grads.y)) == (30.0, 3.0)
    assert float(f(m)) == pytest.approx(2 * float(jnp.sin(1.0)))


@SIMPLE_MODES
def test_the_residual_of_custom_vjp_may_be_the_argument_itself(mode):
    f = tt.custom_vjp(lambda v: v * v, **mode)
    f.defvjp(lambda v: (v * v, v), lambda v, g: (tt.Param(g * v * 10),))
    assert float(tt.grad(f, **mode)(tt.Param(jnp.array(3.0)))) == 30.0


@SIMPLE_MODES
def test_an_argument_without_derivative_may_be_anything(mode):
    f = tt.custom_vjp(lambda fn, x: fn(x), nondiff_argnums=0, **mode)
    f.defvjp(lambda fn, x: (fn(x), None), lambda fn, _, g: (g * 10,))
    assert float(tt.grad(lambda x: f(jnp.sin, x), **mode)(1.0)) == 10.0


def test_an_argument_that_only_has_a_name_is_refused_not_dropped():
    @tt.custom_vjp
    def scaled(x, *, factor=1.0):
        return x * factor

    scaled.defvjp(lambda x: (x, None), lambda _, g: (g,))
    with pytest.raises(TypeError, match=r"custom_vjp: the arguments \['factor'\]"):
        scaled(jnp.ones(()), factor=3.0)


@ALL_MODES
@pytest.mark.parametrize("jitted", [False, True])
def test_what_is_not_differentiated_and_no_array_stays_as_it_is(mode, jitted):
    given = (3, "sin", (1, 2.5), None, True)
    seen = []

    def note(arguments):
        seen.append(arguments == given and [*map(type, arguments)] == types)

    types = [*map(type, given)]

    @tt.custom_vjp(nondiff_argnums=tuple(range(1, 6)), **mode)
    def f(x, *arguments):
        note(arguments)
        return x ** arguments[0]

    def bwd(*arguments):
        *passive, _, g = arguments
        note(tuple(passive))
        return ((g[1] if mode.get("graph_updates") else g) * 7,)

    f.defvjp(lambda x, *arguments: (f(x, *arguments), x), bwd)
    run = tt.grad(lambda x: f(x, *given), **mode)
    assert float((tt.jit(run, **mode) if jitted else run)(2.0)) == 7.0
    assert len(seen) >= 2
    assert all(seen)


def test_a_rule_may_leave_out_what_its_filter_does_not_take():
    is_x = lambda path, value: path[-1] == "x"

    @nnx.custom_vjp(nondiff_argnums=(nnx.DiffState(0, is_x),))
    def f(m):
        m.calls[...] += 1
        return jnp.sin(m.x) * m.y

    def bwd(residual, g):
        (tangent,), out_g = g
        assert sorted(tangent) == ["calls", "x", "y"]
        tangent["x"][...] = out_g * residual
        del tangent["y"]
        del tangent["calls"]
        return (tangent,)

    f.defvjp(lambda m: (f(m), jnp.cos(m.x) * m.y * 10), bwd)
    model = Model()
    grads = nnx.grad(f, argnums=nnx.DiffState(0, is_x))(model)
    assert list(grads) == ["x"]
    assert float(grads["x"]) == pytest.approx(20 * float(jnp.cos(1.0)))
    assert int(model.calls) == 1


@ALL_MODES
def test_a_variable_both_differentiated_and_not_is_a_duplicate(mode):
    f = tt.custom_vjp(lambda a, b: a * b, nondiff_argnums=1, **mode)
    f.defvjp(lambda a, b: (a * b, None), lambda b, residual, g: (g,))
    v = tt.Param(jnp.array(2.0))
    with pytest.raises(tt.AliasError, match=r"custom_vjp: .*Duplicate Param"):
        f(v, v)
