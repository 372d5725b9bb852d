# SPDX-License-Identifier: Apache-2.0
"""Trace levels: where a Variable may be changed, and what a Ref changes about it."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from modes import ALL_MODES
from treetap._core import trace_level

FOREIGN = r"Cannot mutate Param from a different trace level: .*as an argument"


def test_a_closed_over_variable_can_be_read():
    variable = tt.Param(jnp.ones(2))
    assert jax.jit(lambda: variable * 2)().tolist() == [2, 2]


@pytest.mark.parametrize(
    "write",
    [
        lambda v: v.set_value(1.0),
        lambda v: v.set_raw_value(1.0),
        lambda v: v.__setitem__(..., 1.0),
        lambda v: v.__setitem__(0, 1.0),
        lambda v: v.set_metadata(tag="b"),
        lambda v: v.set_metadata({}),
        lambda v: v.del_metadata("tag"),
        lambda v: v.copy_from(tt.Param(1.0)),
        lambda v: v.update_from_state(tt.Variable(1.0)),
        lambda v: tt.update({"v": v}, {"v": jnp.ones(2)}),
        lambda v: tt.set_metadata([v], tag="b"),
    ],
)
@pytest.mark.parametrize(
    "transform", [jax.jit, jax.grad, jax.vmap, jax.checkpoint, jax.make_jaxpr]
)
def test_a_closed_over_variable_cannot_be_written(transform, write):
    variable = tt.Param(jnp.zeros(2), tag="a")

    def inside(x):
        write(variable)
        return x.sum()

    with pytest.raises(tt.TraceContextError, match=FOREIGN):
        transform(inside)(jnp.ones(3))
    assert variable[...].tolist() == [0, 0]
    assert variable.tag == "a"


def test_items_of_a_closed_over_dict_cannot_be_written():
    variable = tt.Param({"a": 1})

    def inside():
        with pytest.raises(tt.TraceContextError, match=FOREIGN):
            variable["a"] = 2
        with pytest.raises(tt.TraceContextError, match=FOREIGN):
            del variable["a"]

    jax.jit(inside)()
    assert variable.get_value() == {"a": 1}


def test_an_argument_can_be_written_and_returned():
    @jax.jit
    def inside(variable):
        variable[...] += 1
        variable.set_metadata(tag="b")
        return variable

    variable = tt.Param(jnp.zeros(2), tag="a")
    new = inside(variable)
    assert (new[0], new.tag) == (1, "b")
    assert (variable[0], variable.tag) == (0, "a")
    new[...] += 1
    assert new[0] == 2


def test_a_variable_made_inside_can_be_written_inside():
    @jax.jit
    def inside(x):
        variable = tt.Param(x)
        variable[...] = x * 2
        return variable[...]

    assert inside(jnp.ones(2)).tolist() == [2, 2]


@pytest.mark.keeps_traces
def test_a_leaked_variable_cannot_be_written():
    leaked = []

    @jax.jit
    def inside(variable):
        leaked.append(variable)
        return variable[...]

    inside(tt.Param(jnp.zeros(2)))
    with pytest.raises(tt.TraceContextError, match=FOREIGN):
        leaked[0][...] = 1.0
    with pytest.raises(tt.TraceContextError, match=FOREIGN):
        leaked[0].set_metadata(tag="a")


def test_an_argument_cannot_be_written_from_a_deeper_level():
    @jax.jit
    def outside(variable):
        @jax.jit
        def inside():
            variable[...] = 1.0

        with pytest.raises(tt.TraceContextError, match=FOREIGN):
            inside()
        return variable[...]

    assert outside(tt.Param(jnp.zeros(2))).tolist() == [0, 0]


def test_the_error_is_no_value_error():
    assert issubclass(tt.TraceContextError, tt.TreetapError)
    assert not issubclass(tt.TraceContextError, ValueError)


def test_the_token_is_the_same_at_one_level():
    assert trace_level.current_trace() is trace_level.EAGER
    assert trace_level.is_eager()
    inside = []
    jax.jit(
        lambda: inside.append((trace_level.is_eager(), trace_level.current_trace()))
    )()
    ((eager, token),) = inside
    assert not eager
    assert trace_level.is_foreign(token)
    assert not trace_level.is_foreign(trace_level.EAGER)


# Refs.


def test_a_ref_variable_reads_and_writes_like_any_other():
    variable = tt.Param(jnp.zeros(3), ref=True)
    raw = variable.get_raw_value()
    assert isinstance(raw, jax.Ref)
    variable[1] = 5.0
    variable[...] += 1
    variable.set_value(variable * 2)
    assert variable[...].tolist() == [2, 12, 2]
    assert variable[1] == 12
    assert variable.get_raw_value() is raw
    assert variable.shape == (3,)


def test_a_ref_variable_takes_numbers_and_refuses_other_trees():
    assert tt.Param(2.0, ref=True)[...] == 2
    with pytest.raises(TypeError):
        tt.Param({"a": 1.0}, ref=True)


def test_the_shape_of_a_ref_is_fixed():
    variable = tt.Param(jnp.zeros(3), ref=True)
    with pytest.raises(ValueError, match="shape"):
        variable.set_value(jnp.zeros(4))
    with pytest.raises(tt.StructureError, match=r"A Ref keeps its shape: \(2, 3\)"):
        variable.set_value(jnp.zeros((2, 3)))
    assert variable.shape == (3,)


def test_plain_jit_propagates_writes_to_a_ref_argument():
    @jax.jit
    def step(variable):
        variable[...] += 1

    variable = tt.Param(jnp.zeros(2), ref=True)
    step(variable)
    step(variable)
    assert variable[...].tolist() == [2, 2]


def test_plain_jit_propagates_writes_to_a_closed_over_ref():
    variable = tt.Param(jnp.zeros(2), ref=True)

    @jax.jit
    def step(x):
        variable[...] += x

    step(jnp.ones(2))
    step(jnp.ones(2))
    assert variable[...].tolist() == [2, 2]


def test_metadata_of_a_closed_over_ref_cannot_change():
    variable = tt.Param(jnp.zeros(2), ref=True)
    with pytest.raises(tt.TraceContextError, match=FOREIGN):
        jax.jit(lambda: variable.set_metadata(tag="a"))()


def test_copies_of_a_ref_have_their_own_ref():
    variable = tt.Param(jnp.zeros(2), ref=True)
    same, plain = variable.copy(), variable.copy(ref=False)
    variable[...] = jnp.ones(2)
    assert same[...].tolist() == [0, 0]
    assert isinstance(same.get_raw_value(), jax.Ref)
    assert isinstance(plain.get_raw_value(), jax.Array)
    assert isinstance(plain.copy(ref=True).get_raw_value(), jax.Ref)


def test_a_ref_takes_what_broadcasts_into_it():
    variable = tt.Param(jnp.zeros((2, 3)), ref=True)
    variable[...] = jnp.ones(3)
    assert variable[1, 2] == 1.0
    for wrong in (jnp.ones(2), jnp.ones((1, 2, 3))):
        with pytest.raises(tt.StructureError, match="A Ref keeps its shape"):
            variable.set_value(wrong)


class Model(tt.Module):
    def __init__(self, w=3.0):
        self.w = tt.Param(jnp.array(w))
        self.calls = tt.Variable(jnp.array(0))
        self.kind = "plain"

    def square(self):
        return self.w * self.w


def square(model):
    return model.w * model.w


@ALL_MODES
def test_an_attribute_of_an_outer_module_cannot_be_deleted(mode):
    model = Model()
    with pytest.raises(tt.TraceContextError, match="Cannot mutate 'Model'"):
        tt.jit(lambda x: delattr(model, "kind"), **mode)(1.0)
    assert model.kind == "plain"


@ALL_MODES
def test_reading_an_outer_module_in_a_nested_jit_is_allowed(mode):
    model = Model()
    inner = tt.jit(square, **mode)
    assert float(jax.jit(lambda x: x * inner(model))(2.0)) == 18.0


@ALL_MODES
@pytest.mark.parametrize("transform", [jax.jit, tt.jit])
def test_an_item_of_an_outer_dictionary_value_cannot_be_set(mode, transform):
    v = tt.Variable({"a": jnp.array(0.0)})
    options = {} if transform is jax.jit else mode
    with pytest.raises(tt.TraceContextError, match="Cannot mutate"):
        transform(lambda x: v.__setitem__("a", x), **options)(1.0)
    assert float(v["a"]) == 0.0


class Affine(tt.Module):
    def __init__(self, size=2):
        self.w = tt.Param(jnp.ones(size))
        self.b = tt.Param(jnp.zeros(size))


@pytest.mark.parametrize("node", [Affine(), tt.Dict(w=tt.Param(1.0))])
def test_deleting_from_an_outer_object_under_jit_is_refused(node):
    @jax.jit
    def traced(x):
        del node.w
        return x

    name = type(node).__name__
    message = f"Cannot mutate '{name}' from different trace level.*as an argument"
    with pytest.raises(tt.TraceContextError, match=message):
        traced(1.0)
    assert isinstance(node.w, tt.Param)
    assert "w" in tt.state(node)


def test_removing_items_of_an_outer_list_under_jit_is_refused():
    items = tt.List([tt.Param(1.0), tt.Param(2.0)])

    @jax.jit
    def traced(x):
        items.pop()
        return x

    with pytest.raises(tt.TraceContextError, match="Cannot mutate 'List'"):
        traced(1.0)
    assert len(items) == 2


def test_a_transparent_trace_says_itself_what_it_hears():
    silent = object.__new__(trace_level.Through)
    with pytest.raises(NotImplementedError):
        silent.hear(None, [])


IMPORTED_UNDER_A_TRACE = """
import jax

def first(x):
    from treetap._core import trace_level
    assert not trace_level.is_eager()
    return x

jax.jit(first)(1.0)
import treetap as tt
from treetap._core import trace_level
assert trace_level.is_eager()
assert tt.Param(1.0)._trace is trace_level.EAGER
"""


def test_the_library_may_be_imported_under_a_trace():
    subprocess.run([sys.executable, "-c", IMPORTED_UNDER_A_TRACE], check=True)
