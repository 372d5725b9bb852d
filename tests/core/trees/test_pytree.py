# SPDX-License-Identifier: Apache-2.0
"""Pytree: flattening, its cache, copies, and life across traces."""

import copy
import functools
import gc
import inspect
import pickle
import threading
import weakref

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt
from treetap._core.trees import pytree as _pytrees


class Block(tt.Module):
    def __init__(self, size=2):
        self.weight = tt.Param(jnp.ones(size))
        self.size = size
        self.bias = tt.Param(jnp.zeros(size))


def test_children_are_sorted_and_keyed_by_attribute():
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(Block())]
    shown = [jax.tree_util.keystr(path) for path in paths]
    assert shown == [".bias.value", ".weight.value"]


def test_positions_of_a_list_are_sequence_keys():
    (path, _), *_ = jax.tree_util.tree_leaves_with_path(tt.List([tt.Param(1.0)]))
    assert isinstance(path[0], jax.tree_util.SequenceKey)


def test_attribute_order_survives_a_round_trip():
    block = jax.tree.map(lambda x: x, Block())
    assert list(vars(block)) == ["weight", "size", "bias"]


def test_order_of_assignment_takes_no_part_in_structure():
    class Free(tt.Module):
        pass

    one, two = Free(), Free()
    one.a, one.b, one.n = jnp.zeros(1), jnp.ones(1), 1
    two.n, two.b, two.a = 1, jnp.ones(1), jnp.zeros(1)
    assert jax.tree.structure(one) == jax.tree.structure(two)
    assert jax.tree.map(jnp.add, one, two).b == 2
    assert tt.graphdef(one) == tt.graphdef(two)


def test_statics_and_metadata_are_structure():
    assert jax.tree.structure(Block(2)) != jax.tree.structure(Block(3))
    block = Block()
    before = jax.tree.structure(block)
    block.weight.set_metadata(role="x")
    assert jax.tree.structure(block) != before


def test_jit_retraces_for_statics_but_not_for_values():
    traces = []

    @jax.jit
    def run(block):
        traces.append(block.size)
        return block.weight[...].sum()

    block = Block()
    run(block)
    block.weight[...] = 5.0
    run(block)
    run(Block())
    assert traces == [2]
    block.size = 7
    run(block)
    assert traces == [2, 7]


@pytest.mark.parametrize(
    "change",
    [
        lambda block: setattr(block, "weight", tt.Param(jnp.full(2, 9.0))),
        lambda block: vars(block).__setitem__("weight", tt.Param(jnp.full(2, 9.0))),
        lambda block: vars(block).update(weight=tt.Param(jnp.full(2, 9.0))),
        lambda block: block._replace_child("weight", tt.Param(jnp.full(2, 9.0))),
        lambda block: block.weight.set_value(jnp.full(2, 9.0)),
    ],
)
def test_cached_children_follow_every_way_of_writing(change):
    block = Block()
    assert jax.tree.leaves(block)[1][0] == 1.0
    change(block)
    assert jax.tree.leaves(block)[1][0] == 9.0
    assert jax.tree.leaves(tt.merge(*tt.split(block)))[1][0] == 9.0


def test_cached_children_follow_additions_and_deletions():
    block = Block()
    assert len(jax.tree.leaves(block)) == 2
    block.extra = jnp.zeros(1)
    assert len(jax.tree.leaves(block)) == 3
    del block.weight
    assert len(jax.tree.leaves(block)) == 2
    del vars(block)["extra"]
    assert len(jax.tree.leaves(block)) == 1
    with pytest.raises(AttributeError):
        del block.weight


def test_a_cached_property_is_no_part_of_the_tree():
    class Cached(Block):
        @functools.cached_property
        def doubled(self):
            return self.weight * 2

    block = Cached()
    assert block.doubled[0] == 2.0
    assert len(jax.tree.leaves(block)) == 2
    assert "doubled" not in vars(jax.tree.map(lambda x: x, block))


def test_properties_keep_their_setters():
    class Guarded(tt.Module):
        def __init__(self):
            self.half = 4.0

        @property
        def half(self):
            return self._whole / 2

        @half.setter
        def half(self, value):
            self._whole = tt.data(2 * value)

    guarded = Guarded()
    assert guarded.half == 4.0
    assert jax.tree.leaves(guarded) == [8.0]


def test_own_setattr_and_getattr_are_respected():
    class Loud(tt.Module):
        def __init__(self):
            self.w = jnp.zeros(2)

        def __setattr__(self, name, value):
            object.__setattr__(self, name, value)

        def __getattr__(self, name):
            if name == "virtual":
                return 42
            raise AttributeError(name)

    loud = Loud()
    assert loud.virtual == 42
    assert jax.tree.leaves(loud)[0].shape == (2,)
    loud.w = jnp.zeros(5)
    assert jax.tree.leaves(loud)[0].shape == (5,)
    assert jax.tree.map(lambda x: x + 1, loud).w[0] == 1


def test_slots_are_refused():
    with pytest.raises(TypeError, match="Slotted: `__slots__` cannot be used"):

        class Slotted(tt.Module):
            __slots__ = ("x",)


def test_signature_of_a_class_is_that_of_its_constructor():
    assert [*inspect.signature(Block).parameters] == ["size"]
    assert "in_features: int" in str(inspect.signature(tt.Linear))

    class Bare(tt.Module):
        pass

    assert str(inspect.signature(Bare)) == "(*args, **kwargs)"


def test_abstract_methods_work():
    import abc

    class Shape(tt.Module):
        @abc.abstractmethod
        def area(self): ...

    class Unit(Shape):
        def area(self):
            return 1

    with pytest.raises(TypeError, match="abstract"):
        Shape()
    assert Unit().area() == 1


def test_pytree_false_is_inherited_and_can_be_undone():
    class Opaque(tt.Module, pytree=False):
        def __init__(self):
            self.anything = [jnp.zeros(2)]
            self.marked = tt.data(3)

    class Still(Opaque):
        pass

    class Again(Opaque, pytree=True):
        def __init__(self):
            self.w = jnp.zeros(2)

    assert jax.tree.leaves(Still()) != jax.tree.leaves(Again())
    assert len(jax.tree.leaves(Again())) == 1
    assert isinstance(jax.tree.leaves(Still())[0], Still)
    assert Still().marked == 3


def test_pytree_false_objects_split_in_graph_mode_only():
    class Opaque(tt.Module, pytree=False):
        def __init__(self):
            self.parts = [tt.Param(1.0), "text"]
            self.name = "n"

    holder = tt.Dict(inner=Opaque())
    with pytest.raises(tt.StructureError, match=r"pytree=False.*Found at path inner"):
        tt.split(holder)
    with pytest.raises(tt.StructureError, match="pytree=False"):
        tt.clone(Opaque())
    again = tt.merge(*tt.split(holder, graph=True))
    assert again.inner.parts[0][...] == 1.0
    assert again.inner.name == "n"


def test_attributes_of_outer_objects_cannot_change_in_a_trace():
    block = Block()

    def change(x):
        block.size = 3
        return x

    def remove(x):
        del block.size
        return x

    for function in (change, remove):
        with pytest.raises(
            tt.TraceContextError,
            match="Cannot mutate 'Block' from different trace level",
        ):
            jax.jit(function)(1.0)
    assert block.size == 2


def test_arguments_of_a_traced_function_may_change():
    @jax.jit
    def run(block):
        block.size = 9
        block.weight[...] = block.weight * 2
        return block

    block = run(Block())
    assert block.size == 9
    assert block.weight[0] == 2.0


@pytest.mark.keeps_traces
def test_leaked_objects_cannot_change_outside():
    kept = []
    jax.jit(lambda block: kept.append(block))(Block())
    with pytest.raises(tt.TraceContextError, match="Cannot mutate 'Block'"):
        kept[0].size = 1
    with pytest.raises(tt.TraceContextError, match="Cannot mutate Param"):
        kept[0].weight[...] = 1.0


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        lambda block: pickle.loads(pickle.dumps(block)),
        lambda block: cloudpickle.loads(cloudpickle.dumps(block)),
    ],
    ids=["copy", "deepcopy", "pickle", "cloudpickle"],
)
def test_copies_are_complete(copied):
    block = Block()
    again = copied(block)
    assert type(again) is Block
    assert list(vars(again)) == list(vars(block))
    assert again.size == 2
    assert (again.weight[...] == block.weight[...]).all()
    again.size = 5
    assert block.size == 2
    assert tt.graphdef(copied(block)) == tt.graphdef(block)


def test_copy_shares_variables_and_deepcopy_does_not():
    block = Block()
    assert copy.copy(block).weight is block.weight
    assert copy.deepcopy(block).weight is not block.weight


def test_deep_copies_keep_cycles():
    block = Block()
    block.me = block
    again = copy.deepcopy(block)
    assert again.me is again


def test_classes_made_at_run_time_survive_cloudpickle():
    code = """
import jax.numpy as jnp
import treetap as tt
class Local(tt.Module):
    def __init__(self): self.w = tt.Param(jnp.ones(2))
    def __call__(self, x): return x * self.w
"""
    namespace = {"__name__": "__main__"}
    exec(code, namespace)
    stored = cloudpickle.dumps(namespace["Local"]())
    import subprocess
    import sys

    program = (
        "import sys, pickle, jax; m = pickle.loads(sys.stdin.buffer.read());"
        "assert m(3.0).sum() == 6.0; assert len(jax.tree.leaves(m)) == 1;"
        "assert jax.jit(lambda m: m(2.0).sum())(m) == 4.0"
    )
    subprocess.run([sys.executable, "-c", program], input=stored, check=True)


def test_dead_objects_are_freed_at_once():
    gc.disable()
    try:
        block = Block()
        jax.tree.leaves(block)
        tt.split(block)
        alive = [weakref.ref(block), weakref.ref(block.weight)]
        del block
        assert [ref() for ref in alive] == [None, None]
    finally:
        gc.enable()


def test_threads_that_write_and_flatten_never_leave_stale_children():
    block = Block()
    stop = threading.Event()

    def flatten():
        while not stop.is_set():
            jax.tree.leaves(block)

    readers = [threading.Thread(target=flatten) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for number in range(300):
            block.weight = tt.Param(jnp.full(2, float(number)))
            assert jax.tree.leaves(block)[1][0] == number
    finally:
        stop.set()
        for reader in readers:
            reader.join()


def test_equality_and_hash_go_by_identity():
    assert Block() != Block()
    block = Block()
    assert {block: 1}[block] == 1


def test_stacking_siblings_and_averaging_models_work():
    blocks = [Block() for _ in range(3)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *blocks)
    assert stacked.weight.shape == (3, 2)
    chosen = jax.lax.cond(True, lambda a, b: a, lambda a, b: b, *blocks[:2])
    assert chosen.weight.shape == (2,)


def test_unknown_attributes_are_attribute_errors():
    with pytest.raises(AttributeError, match="'Block' object has no attribute 'nope'"):
        Block().nope


def test_a_replaced_variable_is_freed_at_once():
    block = Block()
    tt.split(block)
    old = weakref.ref(block.weight)
    block.weight = tt.Param(jnp.zeros(2))
    assert old() is None


def test_a_write_while_the_children_are_read_is_not_overlooked(monkeypatch):
    block, real = Block(), _pytrees.set_flat

    def late(node, flat):
        real(node, flat)
        monkeypatch.setattr(_pytrees, "set_flat", real)
        vars(node)["bias"] = tt.Param(7.0)  # as a thread would, in between

    block.bias = tt.Param(1.0)
    monkeypatch.setattr(_pytrees, "set_flat", late)
    jax.tree.leaves(block)
    assert jax.tree.leaves(block)[0] == 7.0


class Free(tt.Module):
    """A Module whose attributes the tests give it."""


ROUND_TRIPS = {
    "clone": tt.clone,
    "merge": lambda node: tt.merge(*tt.split(node)),
    "graph": lambda node: tt.merge(*tt.split(node, graph=True)),
    "tree": lambda node: jax.tree.map(lambda leaf: leaf, node),
    "jit": jax.jit(lambda node: node),
    "deepcopy": copy.deepcopy,
    "pickle": lambda node: pickle.loads(pickle.dumps(node)),
    "view": tt.view,
}


@pytest.mark.parametrize("how", ROUND_TRIPS)
def test_items_and_attributes_keep_their_order(how):
    items = tt.Dict(b=tt.Param(1.0), a=tt.Param(2.0), d="static", c=tt.Param(3.0))
    again = ROUND_TRIPS[how](items)
    assert list(again) == ["b", "a", "d", "c"]
    model = Free()
    model.z, model.m, model.a = tt.Param(1.0), "static", tt.Param(2.0)
    assert list(vars(ROUND_TRIPS[how](model))) == ["z", "m", "a"]


def test_order_under_jit_is_not_that_of_an_earlier_call():
    @jax.jit
    def chain(parts, x):
        for name in parts:
            x = 2 * x if name == "double" else x + 1
        return x

    one = jnp.ones(())
    assert chain(tt.Dict(double=one, add=one), 1.0) == 3.0
    assert chain(tt.Dict(add=one, double=one), 1.0) == 4.0


def test_a_dict_inside_a_variable_keeps_its_order():
    assert list(tt.Variable({"b": 1, "a": 2}).get_value()) == ["b", "a"]


def test_pytree_false_is_inherited():
    class Opaque(tt.Module, pytree=False):
        pass

    class Inner(Opaque):
        def __init__(self):
            self.parts = [tt.Param(1.0)]  # allowed: nothing is checked

    assert len(jax.tree.leaves(Inner())) == 1  # the object itself
    with pytest.raises(tt.StructureError, match="Inner is declared with pytree=False"):
        tt.split(Inner())

    class Open(Opaque, pytree=True):
        def __init__(self):
            self.w = tt.Param(1.0)

    assert jax.tree.leaves(Open()) == [1.0]


class Counted(tt.Module):
    def __init__(self):
        self.number, self.sizes, self.w = 1, [1], tt.Param(jnp.ones(()))


PAST = {
    "a number": (lambda m: object.__setattr__(m, "number", 3), 3.0),
    "a list": (lambda m: object.__setattr__(m, "sizes", [5]), 5.0),
    "a Variable": (lambda m: object.__setattr__(m, "w", tt.Param(jnp.ones(()) * 7)), 7),
    "a new one": (lambda m: object.__setattr__(m, "more", 11), 11.0),
    "one less": (lambda m: object.__delattr__(m, "number"), 0.5),
}


@pytest.mark.parametrize("name", PAST)
@pytest.mark.parametrize("was_listed", [False, True])
def test_what_is_written_past_setattr_is_seen_by_the_next_call(name, was_listed):
    def fn(model):
        number = getattr(model, "number", 0.5)
        return model.w * number * model.sizes[0] * getattr(model, "more", 1)

    write, wanted = PAST[name]
    calls = [tt.jit(fn), tt.jit(fn, graph=True), lambda m: tt.cond(True, fn, fn, m)]
    for call in calls:
        model = Counted()
        if was_listed:
            jax.tree.leaves(model)
        else:
            call(model)
        write(model)
        assert float(call(model)) == float(call(model)) == wanted


def test_data_written_past_setattr_into_a_static_attribute_is_refused():
    model, call = Counted(), tt.jit(lambda model: model.w * model.number)
    call(model)
    object.__setattr__(model, "number", jnp.ones(()))
    with pytest.raises(tt.AttributeStatusError, match=r"Counted\.number"):
        call(model)


def test_a_number_of_numpy_may_be_assigned_to_a_static_attribute():
    model = Counted()
    vars(model)  # from now on its statics are checked each time
    model.number = np.float32(3)
    assert float(tt.jit(lambda model: model.w * model.number)(model)) == 3.0
