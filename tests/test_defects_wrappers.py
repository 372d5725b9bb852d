# SPDX-License-Identifier: Apache-2.0
"""Known defects of NNX around wrapped functions, each shown absent here.

Structure that changes inside, compiled stages, jit_partial, custom_vjp, and the
decorators for metadata and streams. The number in a test's name is the defect's number
in the project's list.
"""

import jax
import jax.numpy as jnp
import pytest

import treetap as tt

both_modes = pytest.mark.parametrize("graph", [False, True], ids=["tree", "graph"])


class Model(tt.Module):
    def __init__(self):
        self.w = tt.Param(jnp.array(3.0))
        self.offset = tt.data(jnp.array(1.0))
        self.kind = "plain"

    def double(self):
        return self.w * 2


# Compiled stages.


@both_modes
def test_a_compiled_stage_refuses_arguments_it_was_not_compiled_for(graph):
    def scaled(v):
        return v[...] * v.get_metadata("factor")

    lowered = tt.jit(scaled, graph=graph).lower(tt.Param(1.0, factor=2))
    compiled = lowered.compile()
    assert float(compiled(tt.Param(3.0, factor=2))) == 6.0
    for other in (tt.Param(3.0, factor=5), tt.BatchStat(3.0, factor=2)):
        with pytest.raises((TypeError, ValueError)):
            compiled(other)


@both_modes
def test_a_compiled_stage_refuses_another_static_argument(graph):
    f = tt.jit(lambda x, n: x * n, static_argnums=1, graph=graph)
    compiled = f.lower(1.0, 2).compile()
    with pytest.raises((TypeError, ValueError)):
        compiled(1.0, 5)


# Changes of structure.


@both_modes
def test_t10_a_mapped_constructor_method_is_refused(graph):
    def use():
        class Mapped(tt.Module):
            @tt.vmap(in_axes=(None, 0), graph=graph)
            def __init__(self, x):
                self.w = tt.Param(x)

        return Mapped(jnp.arange(3.0))

    with pytest.raises(ValueError, match=r"__init__|w was created"):
        use()


def create(model):
    model.extra = tt.Param(1.0)


def replace(model):
    model.offset = model.offset + 1


def remove(model):
    del model.w


CALLS = {
    "jit": lambda f, model, graph: tt.jit(f, graph=graph)(model),
    "vmap": lambda f, model, graph: tt.vmap(f, in_axes=None, axis_size=2, graph=graph)(
        model
    ),
    "remat": lambda f, model, graph: tt.remat(f, graph=graph)(model),
    "grad": lambda f, model, graph: tt.grad(
        lambda model: (f(model), model.offset * 1)[1], graph=graph
    )(model),
    "cond": lambda f, model, graph: tt.cond(True, f, f, model, graph=graph),
    "scan": lambda f, model, graph: tt.scan(
        lambda model, x: (f(model), x)[1], in_axes=(None, 0), out_axes=0, graph=graph
    )(model, jnp.arange(2.0)),
    "fori_loop": lambda f, model, graph: tt.fori_loop(
        0, 2, lambda i, model: (f(model), model)[1], model, graph=graph
    ),
    "checkify": lambda f, model, graph: tt.checkify(f, graph=graph)(model),
}


@both_modes
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("change", "word"),
    [(create, "extra"), (replace, "offset"), (remove, "w")],
    ids=["create", "replace", "remove"],
)
def test_t26_changed_data_attributes_are_refused(graph, name, change, word):
    model = Model()
    with pytest.raises(ValueError, match=rf"{name}(.|\n)*{word}"):
        CALLS[name](change, model, graph)
    assert sorted(vars(model)) == sorted(vars(Model()))
    assert float(model.offset) == 1.0


@both_modes
@pytest.mark.parametrize("name", CALLS)
def test_t26_changed_static_attributes_stay_inside_with_a_warning(graph, name):
    def change(model):
        model.kind = "other"

    model = Model()
    with pytest.warns(UserWarning, match=rf"{name}(.|\n)*kind"):
        CALLS[name](change, model, graph)
    assert model.kind == "plain"


# jit_partial.


def test_t22_jit_partial_refuses_bound_methods():
    with pytest.raises(ValueError, match=r"jit_partial(.|\n)*bound methods"):
        tt.jit_partial(Model().double)


@both_modes
@pytest.mark.parametrize(
    "option", [{"donate_argnames": "m"}, {"donate_argnums": 0}], ids=["name", "number"]
)
def test_t34_variables_given_to_jit_partial_may_be_donated(graph, option):
    m = Model()
    given = m.w[...]
    f = tt.jit_partial(lambda m, x: m.w * x, m, graph=graph, **option)
    assert [float(f(2.0)), float(f(3.0))] == [6.0, 9.0]
    assert given.is_deleted()
    assert float(m.w) == 3.0


@both_modes
@pytest.mark.parametrize("option", [{"static_argnames": "s"}, {"static_argnums": 3}])
def test_t35_jit_partial_numbers_arguments_by_the_signature(graph, option):
    def f(a, b, x, s):
        return a * b + x if s else x

    call = tt.jit_partial(f, tt.Param(2.0), tt.Param(3.0), graph=graph, **option)
    assert float(call(1.0, True)) == 7.0
    assert float(call(1.0, False)) == 1.0
    assert float(call(1.0, s=True)) == 7.0


def test_t08_alias_errors_of_jit_partial_name_it():
    v = tt.Param(1.0)
    with pytest.raises(ValueError, match="jit_partial: Duplicate Param"):
        tt.jit_partial(lambda a, b: a * b, v, v)
    call = tt.jit_partial(lambda v: v, v)
    with pytest.raises(ValueError, match="jit_partial: Duplicate Param"):
        call()


# Metadata, streams, rules.


@both_modes
def test_t24_transform_metadata_takes_a_prefix_for_each_variable(graph):
    mesh = jax.make_mesh((1,), ("layers",), (jax.sharding.AxisType.Auto,))
    make = lambda x: tt.Param(x, out_sharding=("layers",), mesh=mesh)
    model = tt.Dict(w=make(jnp.arange(2.0)), n=tt.Variable(jnp.array(0)))
    axes = tt.prefix(model, {tt.Param: 0, ...: None}, graph=graph)
    seen = []

    def step(model):
        seen.append(model.w.get_metadata("out_sharding"))
        model.w[...] *= 2
        return model.w * 1

    inner = tt.transform_metadata(
        step, in_axes=(axes,), out_axes=0, partition="layers", graph=graph
    )
    out = tt.vmap(inner, in_axes=(axes,), graph=graph)(model)
    assert out.tolist() == [0.0, 2.0]
    assert seen[0] == ()
    assert model.w.get_metadata("out_sharding") == ("layers",)
    assert model.w[...].tolist() == [0.0, 2.0]


@both_modes
def test_t29_fork_rngs_takes_a_bare_stream(graph):
    rngs = tt.Rngs(0)

    def draw(stream):
        assert stream is not rngs.default
        return stream()

    key = tt.fork_rngs(graph=graph)(draw)(rngs.default)
    assert key.shape == ()
    assert int(rngs.default.count) == 1
    shape = lambda stream: stream.key.shape
    assert tt.split_rngs(splits=3, graph=graph)(shape)(rngs.default) == (3,)
    assert int(rngs.default.count) == 2


@both_modes
def test_t33_custom_vjp_without_a_rule_says_so(graph):
    @tt.custom_vjp(graph=graph)
    def double(x):
        return x * 2

    with pytest.raises(ValueError, match=r"double(.|\n)*defvjp"):
        double(1.0)


@both_modes
@pytest.mark.parametrize("calls_itself", [False, True])
def test_custom_vjp_uses_its_rule_for_modules(graph, calls_itself):
    def product(m):
        return jnp.sin(m.x[...]) * m.y

    f = tt.custom_vjp(product, graph=graph)

    def fwd(m):
        return (f if calls_itself else product)(m), m.x[...] * 1

    def bwd(x, g):
        return (tt.Dict(x=tt.Param(g * 10), y=tt.Param(g * x)),)

    f.defvjp(fwd, bwd)
    m = tt.Dict(x=tt.Param(jnp.array(1.0)), y=tt.Param(jnp.array(2.0)))
    grads = tt.grad(lambda m: f(m) * 3, graph=graph)(m)
    assert (float(grads.x), float(grads.y)) == (30.0, 3.0)
    assert float(f(m)) == pytest.approx(2 * float(jnp.sin(1.0)))


@both_modes
def test_the_residual_of_custom_vjp_may_be_the_argument_itself(graph):
    f = tt.custom_vjp(lambda v: v * v, graph=graph)
    f.defvjp(lambda v: (v * v, v), lambda v, g: (tt.Param(g * v * 10),))
    assert float(tt.grad(f, graph=graph)(tt.Param(jnp.array(3.0)))) == 30.0


@both_modes
def test_an_argument_without_derivative_may_be_anything(graph):
    f = tt.custom_vjp(lambda fn, x: fn(x), nondiff_argnums=0, graph=graph)
    f.defvjp(lambda fn, x: (fn(x), None), lambda fn, _, g: (g * 10,))
    assert float(tt.grad(lambda x: f(jnp.sin, x), graph=graph)(1.0)) == 10.0


@both_modes
def test_tangents_that_do_not_fit_are_refused_by_name(graph):
    f = tt.custom_vjp(lambda m: m["x"] * m["y"], graph=graph)
    f.defvjp(lambda m: (m["x"] * m["y"], None), lambda _, g: ({"x": g},))
    with pytest.raises((TypeError, ValueError), match="custom_vjp"):
        tt.grad(f, graph=graph)({"x": 1.0, "y": 2.0})


@both_modes
def test_transform_metadata_changes_nothing_when_it_refuses(graph):
    mesh = jax.make_mesh((1,), ("layers",), (jax.sharding.AxisType.Auto,))
    fits = tt.Param(jnp.zeros(2), out_sharding=("layers",), mesh=mesh)
    other = tt.Param(jnp.zeros(2), out_sharding=(None,), mesh=mesh)
    f = tt.transform_metadata(lambda a, b: None, partition="layers", graph=graph)
    with pytest.raises(ValueError, match="layers"):
        f(fits, other)
    assert fits.get_metadata("out_sharding") == ("layers",)
    assert other.get_metadata("out_sharding") == (None,)
