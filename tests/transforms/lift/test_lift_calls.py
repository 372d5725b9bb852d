# SPDX-License-Identifier: Apache-2.0
"""How transforms are called: decorated, on methods, in stages, nested, in threads."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treetap as tt
from modes import ALL_MODES, NAMED, SIMPLE_MODES
from treetap import compat


class Layer(tt.Module):
    def __init__(self, w=1.0):
        self.w = tt.Param(jnp.array([w, w]))
        self.n = tt.Variable(jnp.array(0))

    def __call__(self, x):
        self.n[...] += 1
        return jnp.sum(self.w * x)

    @tt.jit
    def compiled(self, x):
        return self(x)

    @tt.jit(static_argnames="times", graph=True)
    def repeated(self, x, times=1):
        for _ in range(times):
            x = self(x) * jnp.ones(2)
        return x

    @tt.remat(prevent_cse=False)
    def lean(self, x):
        return self(x)

    @tt.vmap(in_axes=(None, 0))
    def batched(self, x):
        return jnp.sum(self.w * x)

    @tt.grad
    def slope(self, x):
        return self(x)


def x_of(*shape):
    return jnp.arange(1.0, 1.0 + np.prod(shape)).reshape(shape)


@pytest.mark.parametrize(
    ("name", "expected", "calls"),
    [("compiled", 3.0, 1), ("lean", 3.0, 1), ("repeated", [3.0, 3.0], 1)],
)
def test_a_decorated_method_is_called_on_its_object(name, expected, calls):
    layer = Layer()
    np.testing.assert_array_equal(getattr(layer, name)(x_of(2)), expected)
    np.testing.assert_array_equal(getattr(Layer, name)(layer, x_of(2)), expected)
    assert int(layer.n) == 2 * calls


def test_methods_decorated_by_vmap_and_grad_give_batches_and_gradients():
    layer = Layer()
    np.testing.assert_array_equal(layer.batched(x_of(3, 2)), [3.0, 7.0, 11.0])
    grads = layer.slope(x_of(2))
    np.testing.assert_array_equal(grads.w[...], [1.0, 2.0])
    assert type(grads) is Layer
    assert grads.n.get_raw_value().dtype == jax.dtypes.float0
    assert int(layer.n) == 1


def test_a_static_name_makes_one_program_each():
    layer = Layer(0.5)
    np.testing.assert_array_equal(layer.repeated(x_of(2), times=3), [1.5, 1.5])
    assert int(layer.n) == 3


DECORATORS = {
    "jit": (tt.jit(keep_unused=True), [2.0, 4.0]),
    "remat": (tt.remat(prevent_cse=False), [2.0, 4.0]),
    "vmap": (tt.vmap(in_axes=(0, 0), out_axes=0), [2.0, 4.0]),
    "scan": (tt.scan(in_axes=(0, 0), out_axes=0, unroll=2), [2.0, 4.0]),
    "grad": (tt.grad(argnums=1), 2.0),
    "value_and_grad": (tt.value_and_grad(argnums=(1,)), (4.0, (2.0,))),
    "shard_map": (
        tt.shard_map(
            mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",)),
            in_specs=P(),
            out_specs=P(),
        ),
        [2.0, 4.0],
    ),
}


@pytest.mark.parametrize("name", DECORATORS)
def test_without_a_function_a_transform_is_a_decorator(name):
    decorator, expected = DECORATORS[name]

    @decorator
    def double(v, x):
        """Twice."""
        v[...] = v[...] + x
        return x * 2

    x = jnp.array(2.0) if "grad" in name else x_of(2)
    v = tt.Variable(jnp.zeros_like(x))
    found = double(v, x)
    assert jax.tree.map(lambda leaf: leaf.tolist(), found) == expected
    np.testing.assert_array_equal(v[...], x)
    assert (double.__name__, double.__doc__) == ("double", "Twice.")


KEYWORDS = {
    "jit": tt.jit,
    "remat": tt.remat,
    "vmap": tt.vmap,
    "scan": tt.scan(in_axes=(0, 0), out_axes=0),
    "checkify": tt.checkify,
}


@ALL_MODES
@pytest.mark.parametrize("name", KEYWORDS)
def test_variables_passed_by_keyword_are_written(name, mode):
    def add(x, v):
        v[...] += x

    transform = KEYWORDS[name]
    v = tt.Variable(jnp.zeros(2))
    wrapped = transform(add) if name == "scan" else transform(add, **mode)
    wrapped(x_of(2), v=v)
    np.testing.assert_array_equal(v[...], [1.0, 2.0])


@ALL_MODES
def test_grad_writes_keyword_variables_and_leaves_them_out(mode):
    def loss(v, *, other):
        other[...] += 1
        return jnp.sum(v * other)

    v, other = tt.Param(x_of(2)), tt.Variable(x_of(2))
    grads = tt.grad(loss, **mode)(v, other=other)
    np.testing.assert_array_equal(grads[...], [2.0, 3.0])
    np.testing.assert_array_equal(other[...], [2.0, 3.0])


DONATIONS = [
    ({"donate_argnums": 0}, False),
    ({"donate_argnums": 0}, True),
    ({"donate_argnames": "m"}, False),
    ({"donate_argnames": ("m",)}, True),
    ({"donate_argnums": (-2,)}, False),
]


@ALL_MODES
@pytest.mark.parametrize(("options", "by_name"), DONATIONS)
def test_donated_variables_end_with_live_buffers(options, by_name, mode):
    def f(m, x):
        m.n[...] += 1
        return x * 2

    layer = Layer()
    old = layer.n.get_raw_value()
    step = tt.jit(f, **options, **mode)
    for _ in range(2):
        step(m=layer, x=x_of(2)) if by_name else step(layer, x_of(2))
    np.testing.assert_array_equal(layer.w[...], [1.0, 1.0])
    assert int(layer.n) == 2
    assert old.is_deleted()


@ALL_MODES
def test_static_arguments_by_number_and_name_are_part_of_the_program(mode):
    traces = []

    def f(m, power, *, shift=0):
        traces.append((power, shift))
        m.w[...] = m.w**power + shift

    step = tt.jit(f, static_argnums=1, static_argnames="shift", **mode)
    layer = Layer(2.0)
    step(layer, 3, shift=1)
    step(layer, 1, shift=1)
    step(layer, power=1, shift=1)
    np.testing.assert_array_equal(layer.w[...], [11.0, 11.0])
    step(layer, 3, shift=1)
    assert traces[:2] == [(3, 1), (1, 1)]
    assert traces.count((3, 1)) == 1


def test_static_arguments_of_remat_and_make_jaxpr():
    f = lambda m, times: sum(m(x_of(2)) for _ in range(times))
    layer = Layer()
    assert float(tt.remat(f, static_argnums=1)(layer, 2)) == 6.0
    assert int(layer.n) == 2
    assert len(tt.make_jaxpr(f, static_argnums=1)(layer, 2).eqns) > 0
    assert int(layer.n) == 2


@ALL_MODES
def test_stages_look_without_changing_and_a_compiled_one_writes(mode):
    traces = []

    @tt.jit(**mode)
    def f(m, x):
        traces.append(1)
        return m(x)

    layer = Layer()
    shape = f.eval_shape(layer, x_of(2))
    assert (shape.shape, shape.dtype) == ((), jnp.float32)
    assert jax.tree.leaves(f.trace(layer, x_of(2)).out_info)[0].shape == ()
    assert "stablehlo" in f.trace(layer, x_of(2)).lower().as_text()
    lowered = f.lower(layer, x_of(2))
    compiled = lowered.compile()
    assert int(layer.n) == 0
    assert float(compiled(layer, x_of(2))) == 3.0
    other = Layer(2.0)
    assert float(compiled(other, x_of(2))) == 6.0
    assert (int(layer.n), int(other.n)) == (1, 1)
    assert compiled.args_info is not None
    assert len(traces) == 1


def test_a_compiled_stage_refuses_another_structure():
    compiled = tt.jit(lambda m, x: m(x)).lower(Layer(), x_of(2)).compile()
    layer = Layer()
    layer.role = "other"
    with pytest.raises((TypeError, ValueError)):
        compiled(layer, x_of(2))
    assert int(layer.n) == 0


def test_a_compiled_stage_refuses_another_static_argument():
    f = lambda x, power: x**power
    compiled = tt.jit(f, static_argnums=1).lower(x_of(2), 2).compile()
    np.testing.assert_array_equal(compiled(x_of(2), 2), [1.0, 4.0])
    with pytest.raises((TypeError, ValueError)):
        compiled(x_of(2), 3)


def eight():
    if len(jax.devices()) < 8:
        pytest.skip("needs eight devices")
    return jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


@SIMPLE_MODES
def test_shardings_of_arguments_and_results_are_kept(mode):
    mesh = eight()
    rows, whole = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())

    def f(changed, idle, x):
        changed[...] += x
        return changed * idle

    changed, idle = tt.Variable(jnp.zeros(8)), tt.Variable(jnp.ones(8))
    before = idle.get_raw_value()
    step = tt.jit(f, in_shardings=(rows, whole, None), out_shardings=whole, **mode)
    for _ in range(2):
        out = step(changed, idle, jnp.arange(8.0))
    assert changed.get_raw_value().sharding == rows
    assert out.sharding == whole
    assert idle.get_raw_value() is before
    np.testing.assert_array_equal(out, 2 * jnp.arange(8.0))


def test_with_graph_updates_all_arguments_are_placed_as_asked():
    rows = NamedSharding(eight(), P("d"))
    idle = tt.Variable(jnp.ones(8))
    compat.jit(lambda v: None, in_shardings=(rows,))(idle)
    assert idle.get_raw_value().sharding == rows


def test_shardings_skip_static_arguments():
    rows = NamedSharding(eight(), P("d"))

    def f(times, v):
        v[...] *= times

    v = tt.Variable(jnp.ones(8))
    tt.jit(f, static_argnums=0, in_shardings=(rows,))(3, v)
    assert v.get_raw_value().sharding == rows
    np.testing.assert_array_equal(v[...], 3 * jnp.ones(8))


@pytest.mark.parametrize("around", [jax.jit, jax.checkpoint, jax.vmap])
def test_plain_jax_around_a_transform(around):
    @around
    def f(layer, x):
        tt.jit(lambda m, x: m.w.set_value(m.w * x))(layer, x)
        return tt.remat(lambda m: m.w * 2)(layer), layer

    layer = Layer(3.0)
    layer.n = tt.Variable(jnp.zeros(2))
    out, new = f(layer, x_of(2))
    np.testing.assert_array_equal(out, [6.0, 12.0])
    np.testing.assert_array_equal(new.w[...], [3.0, 6.0])
    np.testing.assert_array_equal(layer.w[...], [3.0, 3.0])


@ALL_MODES
def test_plain_jax_inside_a_transform(mode):
    @tt.jit(**mode)
    def f(layer, x):
        layer.w[...] = jax.jit(jnp.sin)(layer.w[...])
        out, _ = jax.lax.scan(lambda c, x: (c + layer.w * x, None), x, x)
        return jax.vmap(lambda w: w * 2)(out)

    layer = Layer()
    out = f(layer, x_of(2))
    np.testing.assert_allclose(out, 2 * (x_of(2) + 3 * np.sin(1.0)), rtol=1e-6)
    np.testing.assert_allclose(layer.w[...], np.sin([1.0, 1.0]), rtol=1e-6)


@pytest.mark.parametrize("inner", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("outer", NAMED.values(), ids=NAMED)
def test_transforms_of_different_modes_nest(outer, inner):
    @tt.jit(**outer)
    @tt.value_and_grad(**inner)
    def f(layer, x):
        step = tt.remat(lambda m, x: m(x), **outer)
        return tt.cond(x[0] > 0, step, lambda m, x: 0.0, layer, x, **inner)

    layer = Layer()
    value, grads = f(layer, x_of(2))
    assert float(value) == 3.0
    np.testing.assert_array_equal(grads.w[...], [1.0, 2.0])
    assert int(layer.n) == 1


def test_a_transform_inside_may_not_write_through_a_closure():
    layer = Layer()

    @tt.jit
    def f(x):
        tt.jit(lambda m, x: m(x))(layer, x)

    with pytest.raises(tt.TraceContextError, match="Cannot mutate"):
        f(x_of(2))
    assert int(layer.n) == 0


@ALL_MODES
def test_threads_share_a_jitted_function_and_keep_their_objects_apart(mode):
    step = tt.jit(lambda m, x: m(x), **mode)
    layers = [Layer(float(i)) for i in range(4)]
    results, barrier = {}, threading.Barrier(4)

    def work(i):
        barrier.wait()
        results[i] = [float(step(layers[i], x_of(2))) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [3.0 * i] * 20 for i in range(4)}
    assert [int(layer.n) for layer in layers] == [20] * 4


@SIMPLE_MODES
@pytest.mark.parametrize("transform", [tt.vmap, tt.scan])
def test_a_result_may_have_a_module_of_axes(transform, mode):
    make = lambda x: tt.Dict(a=tt.Param(x), b=tt.Variable(x))
    axes = tt.prefix(make(x_of(2)), {tt.Param: 1, ...: 0}, graph=mode["graph"])
    made = transform(make, in_axes=0, out_axes=axes, **mode)(x_of(3, 2))
    assert (made.a.shape, made.b.shape) == ((2, 3), (3, 2))


@pytest.mark.parametrize("axes", [tt.Carry, None])
def test_a_variable_kept_in_a_ref_passes_through_a_scan(axes):
    def add(v, x):
        v[...] += x
        return (v, x) if axes is tt.Carry else x

    v = tt.Variable(jnp.array(0.0), ref=True)
    out_axes = (tt.Carry, 0) if axes is tt.Carry else 0
    tt.scan(add, in_axes=(axes, 0), out_axes=out_axes)(v, x_of(3))
    assert float(v) == 6.0


@pytest.mark.parametrize("transform", [tt.vjp, tt.jvp, tt.make_jaxpr])
def test_vjp_jvp_and_make_jaxpr_are_decorators_too(transform):
    wrapped = transform(graph=True)(lambda x: x * 2)
    x = x_of(2)
    found = wrapped((x,), (x,)) if transform is tt.jvp else wrapped(x)
    if transform is tt.make_jaxpr:
        assert len(found.eqns) == 1
    else:
        np.testing.assert_array_equal(found[0], [2.0, 4.0])


def test_a_static_number_out_of_range_is_refused():
    with pytest.raises(ValueError, match="positional"):
        tt.jit(lambda x: x, static_argnums=3)(1.0)


def test_only_the_same_for_all_may_be_written_where_nothing_is_mapped():
    def add(v, x):
        v[...] += x

    v = tt.Variable(jnp.array(1.0))
    with pytest.raises(ValueError, match="got axis spec None but output was batched"):
        tt.vmap(add, in_axes=(None, 0))(v, x_of(2))
    tt.vmap(lambda v, x: add(v, 1.0), in_axes=(None, 0))(v, x_of(2))
    assert float(v) == 2.0


@pytest.mark.parametrize("pack", [False, True])
def test_a_program_is_called_as_its_function(pack, caplog):
    def train_step(layer, x):
        return layer(x)

    with jax.log_compiles():
        tt.jit(train_step, pack=pack)(Layer(), jnp.ones(2))
    assert "Compiling jit(train_step)" in caplog.text


def square(model):
    return model.w * model.w


@ALL_MODES
@pytest.mark.parametrize(
    "transform",
    [tt.jit, tt.grad, tt.value_and_grad, tt.remat, tt.vmap, tt.scan, tt.checkify],
)
def test_wrappers_keep_name_and_text(mode, transform):
    def loss(model):
        """The square."""
        return square(model)

    wrapped = transform(loss, **mode)
    assert wrapped.__name__ == "loss"
    assert wrapped.__doc__ == "The square."
    assert wrapped.__wrapped__ is loss
