# SPDX-License-Identifier: Apache-2.0
"""Calling a jitted function again: nothing changed goes unseen, nothing is kept alive.

Each test of a change calls often enough that the quick way is taken, makes the change,
and compares with the function called without `jit`.
"""

import functools
import gc
import subprocess
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treetap as tt
from samples import sampled
from small_models import ONE
from treetap import nnx
from treetap._transforms.lift import call_cache


class Leaf(tt.Module):
    def __init__(self, value=1.0):
        self.w = tt.Param(jnp.full(2, value))
        self.scale = 1


class Model(tt.Module):
    def __init__(self):
        self.a = Leaf(1.0)
        self.b = Leaf(2.0)
        self.items = tt.List([Leaf(3.0)])
        self.named = tt.Dict(x=Leaf(4.0))
        self.plain = tt.data([tt.Param(jnp.full(2, 5.0)), {"k": tt.Param(jnp.ones(2))}])
        self.raw = jnp.full(2, 7.0)
        self.count = tt.Variable(jnp.zeros((), jnp.int32))


def total(model):
    """Everything the model holds, and what it is, as one number."""
    leaves = [variable for _, variable in tt.iter_graph(model, graph=True)]
    values = [x for x in leaves if isinstance(x, tt.Param)]
    tags = sum(len(str(v.get_metadata("tag", ""))) for v in values)
    kinds = sum(type(v) is not tt.Param for v in values)
    numbers = sum(
        hash(repr(node.scale)) % 1000
        for _, node in tt.iter_graph(model, graph=True)
        if isinstance(node, Leaf)
    )
    out = sum(i * v[...].sum() for i, v in enumerate(values)) + model.raw.sum()
    return out + numbers + tags + kinds


def run(model):
    model.count[...] += 1
    return total(model)


class Special(tt.Param):
    pass


def other_leaf(model):
    model.a = Leaf(9.0)


def other_variable(model):
    model.a.w = tt.Param(jnp.full(2, 9.0))


def other_value(model):
    model.a.w[...] = jnp.full(2, 9.0)


def raw_value(model):
    model.a.w.set_raw_value(jnp.full(2, 9.0))


def other_kind(model):
    model.a.w = Special(model.a.w[...])


def metadata(model):
    model.a.w.set_metadata(tag="longer")


def deleted_metadata(model):
    model.b.w.set_metadata(tag="x")
    model.b.w.del_metadata("tag")
    model.b.w.set_metadata(tag="yy")


def static(model):
    model.b.scale = 2


def static_of_another_type(model):
    model.b.scale = True


def through_vars(model):
    vars(model.b)["scale"] = 3


def through_vars_variable(model):
    vars(model.a)["w"] = tt.Param(jnp.full(2, 8.0))


def list_item(model):
    model.items[0] = Leaf(6.0)


def list_longer(model):
    model.items.append(Leaf(6.0))


def list_shorter(model):
    del model.items[0]


def dict_item(model):
    model.named["x"] = Leaf(6.0)


def dict_key(model):
    model.named["y"] = Leaf(6.0)


def plain_list_item(model):
    model.plain[0] = tt.Param(jnp.full(2, 6.0))


def plain_list_longer(model):
    model.plain.append(tt.Param(jnp.full(2, 6.0)))


def plain_dict_value(model):
    model.plain[1]["k"] = tt.Param(jnp.full(2, 6.0))


def plain_dict_key(model):
    model.plain[1]["m"] = tt.Param(jnp.full(2, 6.0))


def array_attribute(model):
    model.raw = jnp.full(2, 70.0)


def swapped(model):
    model.a, model.b = model.b, model.a


def deleted(model):
    del model.b


def new_attribute(model):
    model.c = Leaf(6.0)


def set_everywhere(model):
    model.set_attributes(scale=5)


def updated(model):
    tt.update(model, {"a": {"w": jnp.full(2, 6.0)}})


CHANGES = [
    other_leaf,
    other_variable,
    other_value,
    raw_value,
    other_kind,
    metadata,
    deleted_metadata,
    static,
    static_of_another_type,
    through_vars,
    through_vars_variable,
    list_item,
    list_longer,
    list_shorter,
    dict_item,
    dict_key,
    plain_list_item,
    plain_list_longer,
    plain_dict_value,
    plain_dict_key,
    array_attribute,
    swapped,
    deleted,
    new_attribute,
    set_everywhere,
    updated,
]


JITS = {
    "tree": tt.jit,
    "graph": functools.partial(tt.jit, graph=True),
    "updates": nnx.jit,
}


@pytest.mark.parametrize("pack", [False, True], ids=["", "packed"])
@sampled("change, mode", CHANGES, [*JITS])
def test_every_change_between_calls_is_noticed(change, mode, pack):
    step, model = JITS[mode](run, pack=pack), Model()
    for _ in range(3):
        np.testing.assert_allclose(step(model), total(model))
    change(model)
    for _ in range(3):
        np.testing.assert_allclose(step(model), total(model))
    assert int(model.count) == 6


def test_a_variable_that_comes_to_stand_twice_is_refused():
    step, model = tt.jit(run), Model()
    step(model), step(model)
    model.b.w = model.a.w
    with pytest.raises(tt.AliasError, match=r"a/w and \S*b/w"):
        step(model)
    model.b.w = tt.Param(jnp.ones(2))
    step(model)


def test_an_object_of_arrays_that_comes_to_stand_twice_is_refused():
    class Raw(tt.Module):
        def __init__(self):
            self.x = jnp.ones(2)

    class Two(tt.Module):
        def __init__(self):
            self.a, self.b = Raw(), Raw()
            self.v = tt.Variable(0)

    step, model = tt.jit(lambda m: m.a.x + m.b.x), Two()
    step(model), step(model)
    model.b = model.a
    with pytest.raises(tt.AliasError):
        step(model)


def test_in_graph_mode_sharing_that_appears_is_kept():
    seen = []

    @functools.partial(tt.jit, graph=True)
    def step(model):
        seen.append(model.a is model.b)
        model.a.w[...] += 1

    model = Model()
    step(model), step(model)
    model.b = model.a
    before = model.a.w[0]
    step(model)
    assert seen == [False, True]
    assert model.b.w[0] == before + 1


def traces_of(fn):
    traces = []

    def counted(*args, **kwargs):
        traces.append(1)
        return fn(*args, **kwargs)

    return counted, traces


def test_other_objects_of_the_same_structure_use_the_same_program():
    counted, traces = traces_of(run)
    step = tt.jit(counted)
    models = [Model() for _ in range(5)]
    for _ in range(3):
        for model in models:
            step(model)
    assert [int(model.count) for model in models] == [3] * 5
    assert len(traces) == 1


def test_views_made_for_each_call_use_the_same_program():
    counted, traces = traces_of(lambda m: m(jnp.ones(4)))
    step = tt.jit(counted)
    model = tt.Dropout(0.5, rngs=tt.Rngs(0))
    for _ in range(3):
        step(tt.view(model, deterministic=False))
    assert len(traces) == 1
    assert int(model.rngs.count) == 3


def test_models_optimizers_and_data_by_position_and_keyword():
    counted, traces = traces_of(lambda m, *, opt, x: opt.update(m, tt.grad(loss)(m, x)))

    def loss(model, x):
        return (model(x) ** 2).sum()

    step = tt.jit(counted)
    model = tt.Linear(2, 3, rngs=tt.Rngs(0))
    optimizer = tt.Optimizer(model, optax.adam(0.1), wrt=tt.Param)
    before = model.kernel[...]
    for number in range(5):
        step(model, opt=optimizer, x=jnp.ones((4, 2)) * number)
    assert int(optimizer.step) == 5
    assert len(traces) == 1
    assert not np.allclose(model.kernel[...], before)


def test_methods_are_called_the_same_way():
    class Counter(tt.Module):
        def __init__(self):
            self.count = tt.Variable(jnp.zeros((), jnp.int32))

        @tt.jit
        def add(self, number):
            self.count[...] += number
            return self.count[...]

    one, two = Counter(), Counter()
    assert [int(one.add(1)) for _ in range(4)] == [1, 2, 3, 4]
    assert int(two.add(5)) == 5


@pytest.mark.parametrize(
    "second", [{"x": {"a": 1.0}}, {"x": [1.0]}, {"x": None}, {"y": 1.0}, [1.0]]
)
def test_data_of_another_structure_is_taken_for_what_it_is(second):
    step = tt.jit(lambda m, batch: (m.count[...], jax.tree.map(lambda x: x + 1, batch)))
    model = Model()
    for _ in range(3):
        step(model, {"x": 1.0})
    _, out = step(model, second)
    assert jax.tree.structure(out) == jax.tree.structure(second)


def test_a_variable_where_an_array_was():
    step = tt.jit(lambda m, x: x[...] + 1)
    model = Model()
    for _ in range(3):
        step(model, jnp.ones(2))
    variable = tt.Param(jnp.full(2, 3.0))
    np.testing.assert_array_equal(step(model, variable), 4.0)


def test_statics_of_equal_value_and_different_type_are_different():
    seen = []

    @functools.partial(tt.jit, static_argnums=1)
    def step(model, flag):
        seen.append(flag)
        return flag

    model = Model()
    for flag in (1, True, 1.0, 1, True, 1.0):
        step(model, flag)
    assert [type(flag) for flag in seen] == [int, bool, float]


def test_compiled_stages_and_fixed_arguments_go_the_quick_way():
    model = Model()
    compiled = tt.jit(run).lower(model).compile()
    for _ in range(3):
        np.testing.assert_allclose(compiled(model), total(model))
    fixed = tt.jit_partial(lambda m, x: run(m) + x, model)
    for _ in range(3):
        np.testing.assert_allclose(fixed(1.0), total(model) + 1)
    assert int(model.count) == 6
    with pytest.raises(tt.StructureError, match="Found Variable in non-partial"):
        fixed(tt.Param(1.0))


def test_an_error_inside_leaves_everything_as_it_was():
    @tt.jit
    def step(model, x):
        model.count[...] += 1
        model.a.w[...] *= x
        return model.a.w[...] @ x

    model = Model()
    for _ in range(3):
        step(model, jnp.ones(2))
    before = jax.tree.map(np.asarray, tt.state(model))
    with pytest.raises(TypeError):
        step(model, jnp.ones(3))
    after = jax.tree.map(np.asarray, tt.state(model))
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))
    step(model, jnp.ones(2))


def test_a_variable_of_an_outer_trace_is_refused_on_the_quick_way():
    step, model = tt.jit(run), Model()
    step(model), step(model)

    @jax.jit
    def outer(x):
        step(model)  # closed over: its Variables belong to the outside
        return x

    with pytest.raises(tt.TraceContextError):
        outer(1.0)
    assert int(model.count) == 2


def test_inside_another_jit():
    step = tt.jit(run)

    @tt.jit
    def twice(model):
        return step(model) + step(model)

    model = Model()
    for _ in range(3):
        twice(model)
    assert int(model.count) == 6


# What is kept.


def test_models_that_die_are_forgotten():
    step = tt.jit(run)
    model = Model()
    for _ in range(3):
        step(model)
    deep = weakref.ref(model.a.w), weakref.ref(model.a), weakref.ref(model)
    del model
    gc.collect()
    assert [ref() for ref in deep] == [None] * 3


def test_a_child_that_was_replaced_is_forgotten_at_the_next_call():
    step, model = tt.jit(run), Model()
    for _ in range(3):
        step(model)
    old = weakref.ref(model.a)
    model.a = Leaf(1.0)
    step(model), step(model)
    gc.collect()
    assert old() is None


def test_no_more_objects_are_remembered_than_a_number():
    step = tt.jit(run)
    models = [Model() for _ in range(call_cache.MAX_VERIFIED + 5)]
    for _ in range(2):
        for model in models:
            step(model)
    (calls,) = step._cached_calls.values()
    assert len(calls) == 1
    assert len(calls[0]._verified) == call_cache.MAX_VERIFIED


def test_programs_are_bounded_in_number(monkeypatch):
    from treetap._transforms.lift import compiled as _compiling

    monkeypatch.setattr(_compiling, "MAX_PROGRAMS", 3)
    step = tt.jit(lambda m: m.scale)
    leaf = Leaf()
    for number in range(10):
        leaf.scale = number
        assert step(leaf) == number
    assert len(step._programs) == 3
    assert sum(map(len, step._cached_calls.values())) <= 3


def test_threads_call_one_function_with_models_of_their_own():
    step = tt.jit(run)
    models = [Model() for _ in range(8)]

    def work(model):
        for _ in range(50):
            step(model)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [int(model.count) for model in models] == [50] * 8


def test_what_is_donated_stays_in_its_buffer():
    """Programs on a GPU are prepared for addresses: others would cost time."""
    model = Model()

    @functools.partial(tt.jit, donate_argnums=(0, 1))
    def step(model, moments):
        moments = [0.9 * m + 1 for m in moments]
        for variable, moment in zip(params(model), moments):
            variable[...] -= 0.1 * moment
        return 1.0, moments

    def params(model):
        found = tt.iter_graph(model, graph=True)
        return [v for _, v in found if isinstance(v, tt.Param)]

    def addresses(arrays):
        return [array.unsafe_buffer_pointer() for array in arrays]

    moments = [jnp.zeros(2) for _ in params(model)]
    moments = step(model, moments)[1]
    before = addresses([v[...] for v in params(model)]), addresses(moments)
    for _ in range(3):
        moments = step(model, moments)[1]
        assert before[0] == addresses([v[...] for v in params(model)])
        assert before[1] == addresses(moments)


def add_one(model):
    for leaf in (model.a, model.b):
        leaf.w[...] += 1


WRITES = {
    "item": lambda m: m.a.w.__setitem__(..., 5.0),
    "value": lambda m: m.a.w.set_value(jnp.full(2, 5.0)),
    "raw": lambda m: m.a.w.set_raw_value(jnp.full(2, 5.0)),
    "copy_from": lambda m: m.a.w.copy_from(tt.Param(jnp.full(2, 5.0))),
    "update": lambda m: tt.update(m, {"a": {"w": jnp.full(2, 5.0)}}),
    "jit": lambda m: tt.jit(lambda m: m.a.w.__setitem__(..., 5.0))(m),
    "jit of a part": lambda m: tt.jit(lambda a: a.w.__setitem__(..., 5.0))(m.a),
    "packed": lambda m: [PACKED(m) for _ in range(3)],
    "partial": lambda m: tt.jit_partial(lambda m: m.a.w.__setitem__(..., 5.0), m)(),
    "vmap": lambda m: tt.vmap(fill, in_axes=(None, 0), axis_size=1)(
        m, jnp.full(1, 5.0)
    ),
    "scan": lambda m: tt.fori_loop(0, 2, lambda _, m: (fill(m, 5.0), m)[1], m),
}


def fill(model, value):
    model.a.w[...] = jnp.full(2, 5.0)


PACKED = tt.jit(lambda m: m.a.w.__setitem__(..., 5.0), pack=True)


@pytest.mark.parametrize("how", WRITES)
def test_whoever_writes_between_calls_is_seen(how):
    """A call may use the values that the last one left, if nobody has written."""
    step, model = tt.jit(add_one), Model()
    for _ in range(4):
        step(model)
    WRITES[how](model)
    for _ in range(3):
        step(model)
    assert model.a.w[0] == 8.0
    assert model.b.w[0] == 9.0


def test_values_that_are_kept_are_those_of_the_variables():
    step, model = tt.jit(add_one), Model()
    for _ in range(4):
        step(model)
    old = weakref.ref(model.a.w[...])
    gc.collect()
    gc.disable()
    try:
        step(model)
        assert old() is None
        old = weakref.ref(model.a.w[...])
        model.a.w[...] = 2.0
        assert old() is None
        step(model)
        old = weakref.ref(model.b.w[...])
        model.b = Leaf()
        step(model), step(model)
        assert old() is None
        old = weakref.ref(model.a.w[...])
        del model
        assert old() is None
    finally:
        gc.enable()


def test_tracers_are_not_kept():
    step = tt.jit(add_one)

    @tt.jit
    def outer(model):
        for _ in range(4):
            step(model)

    model = Model()
    with jax.checking_leaks():
        outer(model)
    assert model.a.w[0] == 5.0


def test_threads_that_write_are_not_overlooked():
    step = tt.jit(lambda m: m.a.w[...].sum() + m.b.w[...].sum())
    model, wrong = Model(), []

    def work(number):
        for _ in range(200):
            model.a.w[...] = jnp.full(2, float(number))
            step(model)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(50):
        model.a.w[...] = jnp.full(2, float(number))
        wrong.append(step(model) != 2 * number + 4)
    assert not any(wrong)


def test_python_ends_in_silence_while_models_are_known():
    program = """
import jax.numpy as jnp, treetap as tt
model = tt.Linear(2, 2, rngs=tt.Rngs(0))
step = tt.jit(lambda model, x: model(x))
for _ in range(3):
    step(model, jnp.ones(2))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""


class Careful(Leaf):
    """A class that writes its attributes its own way."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value)


def test_an_object_that_writes_its_own_way_is_looked_at_each_time():
    model = Model()
    model.a = Careful()
    call = tt.jit(run)
    for scale in (1, 1, 1, 5, 5):
        model.a.scale = scale
        np.testing.assert_allclose(call(model), total(model))


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize(
    ("change", "mode"),
    [
        (lambda model: model.a.w.set_metadata(tag="new"), {}),
        (lambda model: setattr(model, "c", Leaf(9.0)), {"graph": True}),
    ],
    ids=["metadata", "structure"],
)
def test_a_call_that_comes_to_change_more_than_values(change, mode, pack):
    def step(model, x):
        model.a.w[...] += x[0]
        if x.shape[0] > 1:
            change(model)
        return x.sum()

    call = tt.jit(step, pack=pack, graph_updates=bool(mode), **mode)
    model, other = Model(), Model()
    for size in (1, 1, 1, 2, 2):
        assert float(call(model, jnp.ones(size))) == size
        step(other, jnp.ones(size))
    np.testing.assert_array_equal(total(model), total(other))


@jax.tree_util.register_pytree_node_class
class Fresh:
    """A container that makes what it holds whenever it is asked."""

    def __init__(self, value):
        self.value = value

    def tree_flatten(self):
        return (self.value + 0,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_a_container_with_ever_new_leaves_goes_the_long_way():
    model = Model()
    call = tt.jit(lambda model, batch: run(model) * batch.value)
    for scale in (1.0, 2.0, 3.0):
        found = call(model, Fresh(jnp.array(scale)))
        np.testing.assert_allclose(found, total(model) * scale)
    assert int(model.count) == 3


def test_a_compiled_stage_passes_by_the_cached_calls_of_other_programs():
    fn = tt.jit(lambda batch: sum(batch.values()))
    one, two = {"a": ONE}, {"a": ONE, "b": ONE}
    compiled = fn.lower(one).compile()
    assert float(fn(two)) == 2.0
    assert float(compiled(one)) == 1.0


def test_a_function_without_a_signature_has_static_arguments_by_number():
    assert int(tt.jit(max, static_argnums=(0, 1))(2, 3)) == 3


def test_what_a_call_keeps_goes_with_the_model_without_a_search_for_cycles():
    class Model(tt.Module):
        def __init__(self):
            self.w, self.scale = tt.Param(jnp.ones(3)), 2

    model, call = Model(), tt.jit(lambda model: model.w[...] * model.scale)
    for _ in range(3):
        call(model)
    held = weakref.ref(model), weakref.ref(model.w)
    gc.disable()
    try:
        del model
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()
