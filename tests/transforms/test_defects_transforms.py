# SPDX-License-Identifier: Apache-2.0
"""Known defects of NNX's transforms, each shown absent here in all three modes.

The number in a test's name is the defect's number in the project's list.
"""

import functools
import threading

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import treetap as tt
from modes import ALL_MODES, GRAPH_MODES, SIMPLE_MODES, UPDATES


class Model(tt.Module):
    def __init__(self, w=3.0):
        self.w = tt.Param(jnp.array(w))
        self.calls = tt.Variable(jnp.array(0))
        self.kind = "plain"

    def square(self):
        return self.w * self.w


def square(model):
    return model.w * model.w


def count(model):
    model.calls[...] += 1


def one_device_mesh():
    return jax.make_mesh((1,), ("a",), (jax.sharding.AxisType.Auto,))


# Donation.


@ALL_MODES
@pytest.mark.parametrize("option", [{"donate_argnames": "m"}, {"donate_argnums": 0}])
@pytest.mark.parametrize("by_name", [False, True])
def test_t01_t02_donated_variables_hold_live_buffers(mode, option, by_name):
    def double(m, x):
        return m.w * x

    model = Model()
    f = tt.jit(double, **mode, **option)
    out = f(m=model, x=2.0) if by_name else f(model, 2.0)
    assert (float(out), float(model.w), int(model.calls)) == (6.0, 3.0, 0)


@ALL_MODES
def test_t01_t02_donated_variables_that_change_are_written(mode):
    model = Model()
    given = model.calls[...]
    f = tt.jit(count, donate_argnames="model", **mode)
    f(model=model)
    f(model)
    assert given.is_deleted()
    assert (int(model.calls), float(model.w)) == (2, 3.0)


# Duplicates.


def add_to_first(pair):
    pair[0][...] += 1
    return pair


def test_t03_loops_refuse_duplicates():
    v = tt.Param(jnp.array(1.0))
    with pytest.raises(ValueError, match=r"Duplicate Param(.|\n)*fori_loop"):
        tt.fori_loop(0, 3, lambda i, pair: add_to_first(pair), (v, v))
    with pytest.raises(ValueError, match=r"Duplicate Param(.|\n)*while_loop"):
        tt.while_loop(lambda pair: pair[0] < 4, add_to_first, (v, v))
    assert float(v) == 1.0


@GRAPH_MODES
def test_t03_loops_handle_duplicates_in_graph_mode(mode):
    v = tt.Param(jnp.array(1.0))
    one, two = tt.fori_loop(0, 3, lambda i, p: add_to_first(p), (v, v), **mode)
    assert one is v
    assert two is v
    assert float(v) == 4.0
    tt.while_loop(lambda pair: pair[1] < 7, add_to_first, (v, v), **mode)
    assert float(v) == 7.0


@pytest.mark.parametrize("name", ["cond", "switch"])
def test_t08_alias_errors_name_the_transform_that_was_called(name):
    v = tt.Param(1.0)

    def body(a, b):
        return a * b

    calls = {
        "cond": lambda: tt.cond(True, body, body, v, v),
        "switch": lambda: tt.switch(0, [body, body], v, v),
    }
    with pytest.raises(ValueError, match="Duplicate Param") as caught:
        calls[name]()
    other = {"cond": "switch", "switch": "cond"}[name]
    assert name in str(caught.value)
    assert other not in str(caught.value)


@SIMPLE_MODES
def test_t18_inspection_refuses_shared_inputs(mode):
    v = tt.Param(jnp.array(1.0))
    for look in (
        functools.partial(tt.eval_shape, lambda a, b: a * b, **mode),
        tt.make_jaxpr(lambda a, b: a * b, **mode),
    ):
        with pytest.raises(ValueError, match="Duplicate Param"):
            look(v, v)


@GRAPH_MODES
def test_alias_errors_in_graph_mode_show_the_users_paths(mode):
    model = Model()
    f = tt.vmap(lambda a, b: None, in_axes=(0, None), **mode)
    with pytest.raises(ValueError, match="Inconsistent aliasing") as caught:
        f(model, {"inner": model})
    assert "args/0/calls: 0" in str(caught.value)
    assert "args/1/inner/calls: None" in str(caught.value)


# Auxiliary results.


@ALL_MODES
def test_t04_aux_of_a_gradient_may_be_a_new_module(mode):
    def loss(model):
        return model.w * model.w, Model(7.0)

    grads, aux = tt.grad(loss, has_aux=True, **mode)(Model())
    assert type(grads) is (tt.State if mode is UPDATES else Model)
    assert float(grads.w) == 6.0
    assert (type(aux), float(aux.w)) == (Model, 7.0)
    (value, aux), grads = tt.value_and_grad(loss, has_aux=True, **mode)(Model())
    assert (float(value), float(grads.w), float(aux.w)) == (9.0, 6.0, 7.0)


@ALL_MODES
def test_t04_parts_shared_between_aux_and_itself_stay_shared(mode):
    def loss(model):
        new = tt.Param(model.w * 2)
        return model.w * model.w, (
            (new, new) if mode["graph"] else (new, tt.Param(1.0))
        )

    _, (one, two) = tt.grad(loss, has_aux=True, **mode)(Model())
    assert (one is two) == mode["graph"]
    assert float(one) == 6.0


@ALL_MODES
def test_t05_aux_of_vjp_and_jvp_is_what_was_returned(mode):
    def f(x):
        return x * x, (tt.Param(x * 2), Model(7.0))

    x = jnp.array(3.0)
    out, pull, aux = tt.vjp(f, x, has_aux=True, **mode)
    assert (type(aux[0]), float(aux[0])) == (tt.Param, 6.0)
    assert (type(aux[1]), float(aux[1].w)) == (Model, 7.0)
    assert (float(out), float(pull(jnp.array(1.0))[0])) == (9.0, 6.0)
    out, slope, aux = tt.jvp(f, (x,), (jnp.array(1.0),), has_aux=True, **mode)
    assert (type(aux[0]), float(aux[0])) == (tt.Param, 6.0)
    assert (type(aux[1]), float(aux[1].w)) == (Model, 7.0)
    assert (float(out), float(slope)) == (9.0, 6.0)


# Stages, options, names.


@ALL_MODES
def test_t06_a_compiled_stage_tells_its_arguments(mode):
    compiled = tt.jit(square, **mode).lower(Model()).compile()
    leaves = jax.tree.leaves(compiled.args_info)
    assert {leaf.shape for leaf in leaves} == {()}
    assert len(leaves) == 2


@SIMPLE_MODES
@pytest.mark.parametrize("transform", [tt.vmap, tt.scan])
def test_t07_mapping_refuses_transform_metadata(mode, transform):
    with pytest.raises((TypeError, ValueError), match="transform_metadata"):
        transform(square, transform_metadata={"partition": "a"}, **mode)


@ALL_MODES
def test_t09_axes_may_be_lists(mode):
    stacked = jnp.arange(3.0)
    out = tt.vmap(lambda a, b: a * b, in_axes=[0, None], **mode)(stacked, 2.0)
    assert out.tolist() == [0.0, 2.0, 4.0]
    total, seen = tt.scan(
        lambda c, x: (c + x, c),
        in_axes=[tt.Carry, 0],
        out_axes=[tt.Carry, 0],
        **mode,
    )(jnp.array(0.0), stacked)
    assert float(total) == 3.0
    assert seen.tolist() == [0.0, 0.0, 1.0]


@ALL_MODES
def test_t09_shardings_and_specifications_may_be_lists(mode):
    mesh = one_device_mesh()
    spec, x = PartitionSpec("a"), jnp.arange(2.0)
    whole = NamedSharding(mesh, spec)
    f = tt.jit(lambda a, b: a + b, in_shardings=[whole, whole], **mode)
    assert f(x, x).tolist() == [0.0, 2.0]
    g = tt.shard_map(
        lambda a, b: a + b,
        mesh=mesh,
        in_specs=[spec, spec],
        out_specs=spec,
        **mode,
    )
    assert g(x, x).tolist() == [0.0, 2.0]


@ALL_MODES
def test_t13_the_first_argument_may_be_static_beside_shardings(mode):
    sharding = NamedSharding(one_device_mesh(), PartitionSpec("a"))
    f = tt.jit(
        lambda power, x: x**power,
        in_shardings=(sharding,),
        static_argnums=0,
        **mode,
    )
    assert f(2, jnp.arange(2.0) + 1).tolist() == [1.0, 4.0]


@ALL_MODES
@pytest.mark.parametrize("argnums", [(0, 0), (0, -2), [1, 1]])
def test_t15_repeated_argument_numbers_are_refused(mode, argnums):
    for transform in (tt.grad, tt.value_and_grad):
        with pytest.raises(ValueError, match=r"argnums(.|\n)*repeat"):
            transform(lambda a, b: a * b, argnums=argnums, **mode)(1.0, 2.0)


@ALL_MODES
def test_t16_scan_binds_keyword_arguments(mode):
    def step(total, x, *, unused=0):
        total[...] += x
        return total, x * 2

    total = tt.Variable(jnp.array(0.0))
    out, seen = tt.scan(step, **mode)(total, x=jnp.arange(3.0))
    assert out is total
    assert float(total) == 3.0
    assert seen.tolist() == [0.0, 2.0, 4.0]
    out, _ = tt.scan(step, **mode)(x=jnp.arange(3.0), total=total)
    assert out is total
    assert float(total) == 6.0


@ALL_MODES
def test_t16_scan_refuses_keyword_only_arguments_which_have_no_axis(mode):
    def step(total, x, *, factor=1.0):
        return total + x * factor, x

    f = tt.scan(step, **mode)
    with pytest.raises((TypeError, ValueError), match="factor"):
        f(jnp.array(0.0), jnp.arange(3.0), factor=2.0)


@ALL_MODES
def test_t17_checkify_binds_keyword_arguments(mode):
    model = Model()

    def step(model, x):
        count(model)
        return model.w * x

    error, out = tt.checkify(step, **mode)(model=model, x=2.0)
    assert error.get() is None
    assert float(out) == 6.0
    assert int(model.calls) == 1


# Trace levels.


@ALL_MODES
def test_t19_an_attribute_of_an_outer_module_cannot_be_deleted(mode):
    model = Model()
    with pytest.raises(tt.TraceContextError, match="Cannot mutate 'Model'"):
        tt.jit(lambda x: delattr(model, "kind"), **mode)(1.0)
    assert model.kind == "plain"


@ALL_MODES
def test_t30_reading_an_outer_module_in_a_nested_jit_is_allowed(mode):
    model = Model()
    inner = tt.jit(square, **mode)
    assert float(jax.jit(lambda x: x * inner(model))(2.0)) == 18.0


@ALL_MODES
@pytest.mark.parametrize("transform", [jax.jit, tt.jit])
def test_t32_an_item_of_an_outer_dictionary_value_cannot_be_set(mode, transform):
    v = tt.Variable({"a": jnp.array(0.0)})
    options = {} if transform is jax.jit else mode
    with pytest.raises(tt.TraceContextError, match="Cannot mutate"):
        transform(lambda x: v.__setitem__("a", x), **options)(1.0)
    assert float(v["a"]) == 0.0


# Settings.


def test_t20_the_graph_mode_holds_in_all_threads():
    found = []

    def read():
        found.append(tt.set_graph_mode.current_value())

    def in_a_thread():
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()

    tt.set_graph_mode(True)
    in_a_thread()
    with tt.set_graph_mode(False):
        in_a_thread()
    assert found == [True, True]  # a block belongs to the thread that runs it


def shared_product(a, b):
    return a * b


@pytest.mark.parametrize(
    "make",
    [
        lambda: tt.scan(in_axes=0, out_axes=0),
        lambda: tt.jit(),
        lambda: tt.vmap(),
        lambda: tt.remat(),
    ],
    ids=["scan", "jit", "vmap", "remat"],
)
def test_t21_a_decorator_takes_the_mode_where_its_options_are_given(make):
    v = tt.Param(jnp.arange(3.0))
    with tt.set_graph_mode(True):
        decorator = make()
    assert decorator(shared_product)(v, v).tolist() == [0.0, 1.0, 4.0]
    decorator = make()
    with tt.set_graph_mode(True):
        f = decorator(shared_product)
    with pytest.raises(ValueError, match="Duplicate Param"):
        f(v, v)


# What a call changes.


METADATA_CASES = {
    "jit": lambda f, v, mode: tt.jit(f, **mode)(v),
    "remat": lambda f, v, mode: tt.remat(f, **mode)(v),
    "grad": lambda f, v, mode: tt.grad(f, **mode)(v),
    "vmap": lambda f, v, mode: tt.vmap(f, in_axes=None, axis_size=2, **mode)(v),
    "cond": lambda f, v, mode: tt.cond(True, f, f, v, **mode),
    "checkify": lambda f, v, mode: tt.checkify(f, **mode)(v),
}


@ALL_MODES
@pytest.mark.parametrize("name", METADATA_CASES)
def test_t11_changed_metadata_arrive(mode, name):
    def mark(v):
        v.set_metadata(foo=1)
        return v[...] * 2

    v = tt.Variable(jnp.array(2.0))
    METADATA_CASES[name](mark, v, mode)
    assert v.get_metadata("foo") == 1
    assert float(v) == 2.0


LOOPS = {
    "scan None": lambda mark, v, mode: tt.scan(
        lambda v, x: mark(v), in_axes=(None, 0), out_axes=0, **mode
    )(v, jnp.arange(3.0)),
    "scan Carry": lambda mark, v, mode: tt.scan(lambda v, x: (v, mark(v)), **mode)(
        v, jnp.arange(3.0)
    ),
    "fori_loop": lambda mark, v, mode: tt.fori_loop(
        0, 3, lambda i, v: (mark(v), v)[1], v, **mode
    ),
    "while_loop": lambda mark, v, mode: tt.while_loop(
        lambda v: v < 3, lambda v: (mark(v), v)[1], v, **mode
    ),
}


@ALL_MODES
@pytest.mark.parametrize("name", LOOPS)
def test_t11_a_loop_does_not_silently_drop_changed_metadata(mode, name):
    def mark(v):
        v.set_metadata(foo=1)
        v[...] += 1
        return v[...] * 2

    v = tt.Variable(jnp.array(0.0))
    try:
        LOOPS[name](mark, v, mode)
        wanted = (1, 3.0)
    except (TypeError, ValueError):  # refused: nothing has changed
        wanted = (None, 0.0)
    assert (v.get_metadata("foo", None), float(v)) == wanted


@ALL_MODES
def test_t12_scan_carries_a_changed_variable_on_axis_none(mode):
    v = tt.Variable(jnp.array(0.0))

    def step(v, x):
        v[...] += 1
        return x

    tt.scan(step, in_axes=(None, 0), out_axes=0, **mode)(v, jnp.arange(3.0))
    assert float(v) == 3.0


@ALL_MODES
def test_t25_a_while_condition_may_not_change_variables(mode):
    v = tt.Variable(jnp.array(0))

    def holds(v):
        v[...] += 1
        return v < 3

    with pytest.raises(ValueError, match=r"while_loop(.|\n)*condition"):
        tt.while_loop(holds, lambda v: v, v, **mode)
    assert int(v) == 0


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
@ALL_MODES
@pytest.mark.parametrize("explicit", [False, True])
def test_t27_eval_shape_attaches_shardings(mode, explicit):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2,), ("a",), (kind,))

    def make():
        return tt.Dict(w=tt.Param(jnp.zeros((4, 2)), out_sharding=("a", None)))

    with jax.set_mesh(mesh):
        abstract = tt.eval_shape(make, **mode)
    value = abstract.w.get_value()
    assert isinstance(value, jax.ShapeDtypeStruct)
    assert value.shape == (4, 2)
    assert isinstance(value.sharding, NamedSharding)
    assert value.sharding.spec == PartitionSpec("a", None)


@ALL_MODES
@pytest.mark.parametrize(
    "transform",
    [tt.jit, tt.grad, tt.value_and_grad, tt.remat, tt.vmap, tt.scan, tt.checkify],
)
def test_t28_wrappers_keep_name_and_text(mode, transform):
    def loss(model):
        """The square."""
        return square(model)

    wrapped = transform(loss, **mode)
    assert wrapped.__name__ == "loss"
    assert wrapped.__doc__ == "The square."
    assert wrapped.__wrapped__ is loss


@ALL_MODES
@pytest.mark.parametrize("name", METADATA_CASES)
def test_t31_a_python_number_nobody_changed_stays_one(mode, name):
    v = tt.Variable(2.0)
    METADATA_CASES[name](lambda v: v[...] * 3, v, mode)
    assert type(v.get_raw_value()) is float
    assert v.get_raw_value() == 2.0
