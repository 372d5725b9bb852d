# SPDX-License-Identifier: Apache-2.0
"""Deprecated names work, and say so at the line that uses them."""

import pathlib

import jax.numpy as jnp
import pytest

import treetap as tt
from treetap import nnx


def deprecated(match, call):
    with pytest.warns(DeprecationWarning, match=match) as caught:
        result = call()
    assert pathlib.Path(caught[0].filename).name == "test_deprecated.py"
    return result


def test_value_of_a_variable():
    variable = tt.Param(jnp.ones(2))
    assert deprecated("Variable.value", lambda: variable.value)[0] == 1
    assert deprecated("raw_value", lambda: variable.raw_value)[0] == 1

    def write():
        variable.value = jnp.zeros(3)

    deprecated("Variable.value = x", write)
    assert variable.shape == (3,)


def test_iteration_methods_of_modules():
    model = tt.Dict(a=tt.Dict(), b=tt.Dict())
    model.c = model.a
    found = deprecated(r"iter_modules\(m\)", lambda: list(model.iter_modules()))
    assert [path for path, _ in found] == [("a",), ("b",), ()]
    found = deprecated(r"iter_children\(m\)", lambda: list(model.iter_children()))
    assert [key for key, _ in found] == ["a", "b", "c"]


def test_methods_of_states():
    state = tt.State({"a": {"w": tt.Param(1.0)}, "n": tt.Variable(2)})
    flat = deprecated("to_flat_state", lambda: state.flat_state())
    assert flat.paths == (("a", "w"), ("n",))
    assert deprecated("to_pure_dict", state.to_pure_dict) == {"a": {"w": 1.0}, "n": 2}
    assert list(deprecated("filter_state", lambda: state.filter(tt.Param))) == ["a"]
    one, two = deprecated("split_state", lambda: state.split(tt.Param, ...))
    assert list(deprecated("merge_state", lambda: tt.State.merge(one, two))) == [
        "a",
        "n",
    ]
    mapped = deprecated("map_state", lambda: state.map(lambda path, leaf: len(path)))
    assert mapped.a.w == 2
    assert list(deprecated("diff_state", lambda: state - one)) == ["n"]
    made = deprecated("from_flat_state", lambda: tt.State.from_flat_path({("x",): 1}))
    assert made.x == 1
    deprecated("replace_by_pure_dict", lambda: state.replace_by_pure_dict({"n": 5}))
    assert state.n[...] == 5


def test_an_entry_may_have_the_name_of_a_deprecated_method():
    assert tt.State({"map": 1})["map"] == 1


def test_first_from():
    assert nnx.first_from(None, 0, 1, error_msg="x") == 0
    with pytest.raises(ValueError, match="all are None"):
        nnx.first_from(None, error_msg="all are None")


def test_pure_and_vars_as():
    assert deprecated("as_pure", lambda: nnx.pure({"a": tt.Param(1.0)})) == {"a": 1.0}
    made = deprecated(
        "with_vars", lambda: nnx.vars_as({"a": tt.Param(jnp.ones(2))}, ref=True)
    )
    assert made["a"].get_metadata("ref")


def test_the_type_registry():
    assert nnx.variable_type_from_name("params") is tt.Param
    assert nnx.variable_name_from_type(tt.BatchStat) == "batch_stats"

    @nnx.register_variable_name("fresh")
    class Fresh(tt.Variable):
        pass

    assert nnx.variable_type_from_name("fresh") is Fresh
    with pytest.raises(ValueError, match="is taken by"):
        nnx.register_variable_name("fresh", typ=Fresh)


def test_var_defaults_reads_sets_and_restores():
    assert nnx.var_defaults() == (False, False)
    with nnx.var_defaults(ref=True):
        assert tt.Param(jnp.ones(2)).get_metadata("ref")
    assert not tt.Param(jnp.ones(2)).get_metadata("ref")
    decorated = nnx.var_defaults(ref=True)(lambda: tt.Param(jnp.ones(2)))
    assert decorated().get_metadata("ref")
    assert not tt.Param(jnp.ones(2)).get_metadata("ref")
    with pytest.raises(ValueError, match="hijax"):
        nnx.var_defaults(hijax=True)


def test_var_defaults_set_by_a_plain_call_stay():
    setting = nnx.var_defaults(ref=True)
    try:
        assert tt.Param(jnp.ones(2)).get_metadata("ref")
    finally:
        setting.__exit__()
    assert not tt.Param(jnp.ones(2)).get_metadata("ref")


def test_graphdef_apply_calls_methods_in_its_own_mode():
    class Counter(tt.Module):
        def __init__(self):
            self.n = tt.Variable(0)
            self.same = self.n

        def add(self, k):
            self.n[...] += k
            return self.same[...]

    graphdef, state = tt.split(Counter(), graph=True)
    result, (_, after) = graphdef.apply(state).add(3)
    assert result == 3
    assert after.n[...] == 3
