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
from modes import ALL_MODES, SIMPLE_MODES, UPDATES
from treetap import compat


class Model(tt.Module):
    def __init__(self):
        self.w = tt.Param(jnp.array(3.0))
        self.offset = tt.data(jnp.array(1.0))
        self.kind = "plain"

    def double(self):
        return self.w * 2


# Compiled stages.


@ALL_MODES
def test_a_compiled_stage_refuses_arguments_it_was_not_compiled_for(mode):
    def scaled(v):
        return v[...] * v.get_metadata("factor")

    lowered = tt.jit(scaled, **mode).lower(tt.Param(1.0, factor=2))
    compiled = lowered.compile()
    assert float(compiled(tt.Param(3.0, factor=2))) == 6.0
    for other in (tt.Param(3.0, factor=5), tt.BatchStat(3.0, factor=2)):
        with pytest.raises((TypeError, ValueError)):
            compiled(other)


@ALL_MODES
def test_a_compiled_stage_refuses_another_static_argument(mode):
    f = tt.jit(lambda x, n: x * n, static_argnums=1, **mode)
    compiled = f.lower(1.0, 2).compile()
    with pytest.raises((TypeError, ValueError)):
        compiled(1.0, 5)


# Changes of structure.


@SIMPLE_MODES
def test_t10_a_mapped_constructor_method_is_refused(mode):
    def use():
        class Mapped(tt.Module):
            @tt.vmap(in_axes=(None, 0), **mode)
            def __init__(self, x):
                self.w = tt.Param(x)

        return Mapped(jnp.arange(3.0))

    with pytest.raises(ValueError, match=r"__init__|w was created"):
        use()


@pytest.mark.parametrize(
    "decorator",
    [compat.jit, compat.remat, compat.vmap(in_axes=0)],
    ids=["jit", "remat", "vmap"],
)
def test_t10_a_wrapped_constructor_method_works_with_graph_updates(decorator):
    class Wrapped(tt.Module):
        @decorator
        def __init__(self, x):
            self.w = tt.Param(x * 2)
            self.kind = "wrapped"

    model = Wrapped(jnp.arange(3.0))
    assert model.w[...].tolist() == [0.0, 2.0, 4.0]
    assert model.kind == "wrapped"


def create(model):
    model.extra = tt.Param(1.0)


def replace(model):
    model.offset = model.offset + 1


def remove(model):
    del model.w


CALLS = {
    "jit": lambda f, model, mode: tt.jit(f, **mode)(model),
    "vmap": lambda f, model, mode: tt.vmap(f, in_axes=None, axis_size=2, **mode)(model),
    "remat": lambda f, model, mode: tt.remat(f, **mode)(model),
    "grad": lambda f, model, mode: tt.grad(
        lambda model: (f(model), model.offset * 1)[1], **mode
    )(model),
    "cond": lambda f, model, mode: tt.cond(True, f, f, model, **mode),
    "scan": lambda f, model, mode: tt.scan(
        lambda model, x: (f(model), x)[1], in_axes=(None, 0), out_axes=0, **mode
    )(model, jnp.arange(2.0)),
    "fori_loop": lambda f, model, mode: tt.fori_loop(
        0, 2, lambda i, model: (f(model), model)[1], model, **mode
    ),
    "checkify": lambda f, model, mode: tt.checkify(f, **mode)(model),
}


@SIMPLE_MODES
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("change", "word"),
    [(create, "extra"), (replace, "offset"), (remove, "w")],
    ids=["create", "replace", "remove"],
)
def test_t26_changed_data_attributes_are_refused(mode, name, change, word):
    model = Model()
    with pytest.raises(ValueError, match=rf"{name}(.|\n)*{word}"):
        CALLS[name](change, model, mode)
    assert sorted(vars(model)) == sorted(vars(Model()))
    assert float(model.offset) == 1.0


@SIMPLE_MODES
@pytest.mark.parametrize("name", CALLS)
def test_t26_changed_static_attributes_stay_inside_with_a_warning(mode, name):
    def change(model):
        model.kind = "other"

    model = Model()
    with pytest.warns(UserWarning, match=rf"{name}(.|\n)*kind"):
        CALLS[name](change, model, mode)
    assert model.kind == "plain"


@pytest.mark.parametrize("name", [name for name in CALLS if name != "fori_loop"])
def test_t26_changed_static_attributes_arrive_with_graph_updates(name):
    def change(model):
        model.kind = "other"

    model = Model()
    CALLS[name](change, model, UPDATES)
    assert model.kind == "other"


def test_t26_a_loop_refuses_what_would_change_the_carry():
    def change(model):
        model.kind = "other"

    model = Model()
    with pytest.raises(ValueError, match="changed its structure"):
        CALLS["fori_loop"](change, model, UPDATES)
    assert model.kind == "plain"


@pytest.mark.parametrize("name", ["jit", "vmap", "remat", "grad", "cond", "checkify"])
def test_t26_changed_data_attributes_arrive_with_graph_updates(name):
    model = Model()
    w = model.w
    CALLS[name](create, model, UPDATES)
    assert (type(model.extra), float(model.extra)) == (tt.Param, 1.0)
    CALLS[name](replace, model, UPDATES)
    assert float(model.offset) == 2.0
    assert model.w is w
    CALLS[name](remove, model, UPDATES)
    assert not hasattr(model, "w")


@pytest.mark.parametrize("change", [create, replace])
def test_t26_a_scan_has_no_place_for_a_new_array_in_what_it_does_not_map(change):
    model = Model()
    with pytest.raises(ValueError, match=r"scan: an object on axis None got a new"):
        CALLS["scan"](change, model, UPDATES)
    assert sorted(vars(model)) == sorted(vars(Model()))
    assert float(model.offset) == 1.0


# jit_partial and cached_partial.


def test_t23_cached_partial_refuses_a_plain_function_by_name():
    model = Model()
    text = r"cached_partial(.|\n)*double(.|\n)*not a function wrapped"
    for plain in (Model.double, tt.jit(Model.double), jax.jit(Model.double)):
        with pytest.raises(ValueError, match=text):
            compat.cached_partial(plain, model)
    assert float(compat.jit(Model.double)(model)) == 6.0  # nothing was left behind


def test_t22_jit_partial_refuses_bound_methods():
    with pytest.raises(ValueError, match=r"jit_partial(.|\n)*bound methods"):
        tt.jit_partial(Model().double)


@SIMPLE_MODES
@pytest.mark.parametrize(
    "option", [{"donate_argnames": "m"}, {"donate_argnums": 0}], ids=["name", "number"]
)
def test_t34_variables_given_to_jit_partial_may_be_donated(mode, option):
    def grow(m, x):
        m.w[...] += m.offset
        return m.w * x

    m = Model()
    given = m.w[...]
    f = tt.jit_partial(grow, m, **mode, **option)
    assert [float(f(2.0)), float(f(3.0))] == [8.0, 15.0]
    assert given.is_deleted()
    assert (float(m.w), float(m.offset)) == (5.0, 1.0)


@SIMPLE_MODES
@pytest.mark.parametrize("option", [{"static_argnames": "s"}, {"static_argnums": 3}])
def test_t35_jit_partial_numbers_arguments_by_the_signature(mode, option):
    def f(a, b, x, s):
        return a * b + x if s else x

    call = tt.jit_partial(f, tt.Param(2.0), tt.Param(3.0), **mode, **option)
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


# Looking, and derivatives, with graph updates.


def test_t18_with_graph_updates_shared_inputs_may_be_looked_at():
    v = tt.Param(jnp.array(1.0))
    found = compat.eval_shape(lambda a, b: {"same": a is b, "a": a, "b": b}, v, v)
    assert found["a"] is found["b"]
    assert found["a"] is not v
    assert found["a"].get_value().shape == ()
    assert float(v) == 1.0


def test_t14_vjp_and_jvp_work_with_graph_updates():
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


# Metadata, streams, rules.


@SIMPLE_MODES
def test_t24_transform_metadata_takes_a_prefix_for_each_variable(mode):
    mesh = jax.make_mesh((1,), ("layers",), (jax.sharding.AxisType.Auto,))
    make = lambda x: tt.Param(x, out_sharding=("layers",), mesh=mesh)
    model = tt.Dict(w=make(jnp.arange(2.0)), n=tt.Variable(jnp.array(0)))
    axes = tt.prefix(model, {tt.Param: 0, ...: None}, graph=mode["graph"])
    seen = []

    def step(model):
        seen.append(model.w.get_metadata("out_sharding"))
        model.w[...] *= 2
        return model.w * 1

    inner = tt.transform_metadata(
        step, in_axes=(axes,), out_axes=0, partition="layers", graph=mode["graph"]
    )
    out = tt.vmap(inner, in_axes=(axes,), **mode)(model)
    assert out.tolist() == [0.0, 2.0]
    assert seen[0] == ()
    assert model.w.get_metadata("out_sharding") == ("layers",)
    assert model.w[...].tolist() == [0.0, 2.0]


@SIMPLE_MODES
def test_t29_fork_rngs_takes_a_bare_stream(mode):
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


def test_t29_with_graph_updates_a_bare_stream_is_changed_in_place():
    rngs = tt.Rngs(0)

    def draw(stream):
        assert stream is rngs.default
        return stream.key[...]

    assert compat.fork_rngs()(draw)(rngs.default) == tt.Rngs(0)()
    shapes = compat.split_rngs(splits=3)(lambda stream: stream.key.shape)
    assert shapes(rngs.default) == (3,)
    assert rngs.default.key[...] == jax.random.key(0)
    assert int(rngs.default.count) == 2


@ALL_MODES
def test_t33_custom_vjp_without_a_rule_says_so(mode):
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


@ALL_MODES
def test_tangents_that_do_not_fit_are_refused_by_name(mode):
    f = tt.custom_vjp(lambda m: m["x"] * m["y"], **mode)
    f.defvjp(lambda m: (m["x"] * m["y"], None), lambda _, g: ({"x": g},))
    with pytest.raises((TypeError, ValueError), match="custom_vjp"):
        tt.grad(f, **mode)({"x": 1.0, "y": 2.0})


@SIMPLE_MODES
def test_transform_metadata_changes_nothing_when_it_refuses(mode):
    mesh = jax.make_mesh((1,), ("layers",), (jax.sharding.AxisType.Auto,))
    fits = tt.Param(jnp.zeros(2), out_sharding=("layers",), mesh=mesh)
    other = tt.Param(jnp.zeros(2), out_sharding=(None,), mesh=mesh)
    f = tt.transform_metadata(
        lambda a, b: None, partition="layers", graph=mode["graph"]
    )
    with pytest.raises(ValueError, match="layers"):
        f(fits, other)
    assert fits.get_metadata("out_sharding") == ("layers",)
    assert other.get_metadata("out_sharding") == (None,)
