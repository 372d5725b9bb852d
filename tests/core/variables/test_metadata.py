# SPDX-License-Identifier: Apache-2.0
"""Metadata: names, the calls that read and change them, initializers that give them."""

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import treetap as tt

PLAIN = {"hijax": False, "ref": False, "eager_sharding": True}


# Names.


@pytest.mark.parametrize("old", ["sharding", "sharding_names"])
def test_old_sharding_names_are_renamed_with_a_warning(old):
    with pytest.warns(DeprecationWarning, match=f"{old!r}.*'out_sharding'") as caught:
        variable = tt.Param(1.0, eager_sharding=False, **{old: ("x",)})
    assert variable.get_metadata("out_sharding") == ("x",)
    assert not variable.has_metadata(old)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("name", ["shape", "copy", "get_value", "replace"])
def test_metadata_may_not_hide_an_attribute_of_the_class(name):
    with pytest.raises(tt.MetadataError, match=f"Param: {name!r} .*another name"):
        tt.Param(1.0, **{name: 1})


def test_a_renamed_name_given_later_warns_at_the_callers_line():
    variable = tt.Param(1.0)
    with pytest.warns(DeprecationWarning, match="'out_sharding'") as caught:
        variable.set_metadata(sharding=("x",))
    assert variable.out_sharding == ("x",)
    lines = Path(caught[0].filename).read_text().splitlines()
    assert "variable.set_metadata(sharding" in lines[caught[0].lineno - 1]


def test_metadata_named_like_an_array_attribute_do_not_hide_it():
    variable = tt.Param(jnp.ones(2), dtype="mine")
    assert variable.dtype == jnp.float32
    assert variable.get_metadata("dtype") == "mine"
    assert tt.Variable({}, dtype="mine").dtype == "mine"


# Reading.


def test_get_metadata_gives_a_copy():
    variable = tt.Param(1.0, a=1)
    variable.get_metadata()["a"] = 2
    variable.get_metadata(exclude_required=True)["b"] = 2
    assert variable.get_metadata() == {**PLAIN, "a": 1}
    assert variable.get_metadata(exclude_required=False) == {**PLAIN, "a": 1}


def test_get_metadata_by_name():
    variable = tt.Param(1.0, a=1)
    assert variable.get_metadata("a") == 1
    assert variable.get_metadata("b", None) is None
    assert variable.get_metadata("ref") is False
    with pytest.raises(KeyError, match=r"Param has no metadata 'b'; it has .*'a'"):
        variable.get_metadata("b")


def test_get_metadata_refuses_what_does_not_go_together():
    variable = tt.Param(1.0, a=1)
    with pytest.raises(TypeError, match="get_metadata: `default` needs a `name`"):
        variable.get_metadata(default=1)
    with pytest.raises(TypeError, match="`exclude_required` goes without a `name`"):
        variable.get_metadata("a", exclude_required=True)


def test_has_metadata():
    variable = tt.Param(1.0, a=None)
    assert variable.has_metadata("a")
    assert variable.has_metadata("ref")
    assert not variable.has_metadata("b")


# Changing.


def test_a_mapping_replaces_all_metadata_but_the_required():
    variable = tt.Param(1.0, a=1, eager_sharding=False)
    variable.set_metadata({"b": 2})
    assert variable.get_metadata() == {**PLAIN, "eager_sharding": False, "b": 2}
    variable.set_metadata({})
    assert variable.get_metadata(exclude_required=True) == {}


def test_a_name_or_keywords_update_metadata():
    variable = tt.Param(1.0, a=1)
    variable.set_metadata("a", 2)
    variable.set_metadata(b=3, c=4)
    assert variable.get_metadata(exclude_required=True) == {"a": 2, "b": 3, "c": 4}


@pytest.mark.parametrize(
    ("args", "options"),
    [((), {}), (("a", 1), {"b": 2}), (("a", 1, 2), {})],
)
def test_set_metadata_refuses_other_arguments(args, options):
    variable = tt.Param(1.0)
    with pytest.raises(TypeError, match="set_metadata: give one mapping, a name and"):
        variable.set_metadata(*args, **options)


@pytest.mark.parametrize("given", ["a", 3])
def test_set_metadata_wants_a_mapping_when_given_one_thing(given):
    kind = type(given).__name__
    with pytest.raises(TypeError, match=f"expected a mapping, got {kind}"):
        tt.Param(1.0).set_metadata(given)


@pytest.mark.parametrize("change", [{"ref": True}, {"hijax": True}])
def test_required_metadata_cannot_change(change):
    (name,) = change
    variable = tt.Param(1.0, a=1)
    for attempt in (
        lambda: variable.set_metadata(**change),
        lambda: variable.set_metadata(change),
        lambda: variable.set_metadata(name, True),
    ):
        with pytest.raises(tt.MetadataError, match=f"{name!r} of a Param is fixed"):
            attempt()
    variable.set_metadata(ref=False)
    assert variable.get_metadata() == {**PLAIN, "a": 1}


def test_set_metadata_refuses_names_of_the_class():
    variable = tt.Param(1.0)
    with pytest.raises(tt.MetadataError, match="'shape' cannot be the name"):
        variable.set_metadata(shape=1)
    with pytest.raises(tt.MetadataError, match="'copy' cannot be the name"):
        variable.copy(copy=1)


def test_del_metadata():
    variable = tt.Param(1.0, a=1)
    variable.del_metadata("a")
    assert not variable.has_metadata("a")
    with pytest.raises(KeyError, match="Param has no metadata 'a'"):
        variable.del_metadata("a")
    with pytest.raises(tt.MetadataError, match=r"del_metadata: 'ref' .* is required"):
        variable.del_metadata("ref")


def test_metadata_of_one_variable_are_not_those_of_another():
    one, two = tt.Param(jnp.ones(2)), tt.Param(jnp.ones(2))
    one.set_metadata(a=1)
    assert not two.has_metadata("a")


# Initializers with metadata.


def test_with_metadata_gives_the_variable_its_metadata():
    init = tt.with_metadata(jax.nn.initializers.ones, role="scale")
    made = init(jax.random.key(0), (2,))
    assert isinstance(made, tt.VariableMetadata)
    variable = tt.Param(made, role="lost", kept=1)
    assert variable.get_metadata(exclude_required=True) == {"role": "scale", "kept": 1}
    assert variable[...].tolist() == [1, 1]


def test_the_inner_of_two_metadata_wrappers_wins():
    init = tt.with_metadata(tt.with_metadata(jnp.zeros, a=1, b=1), a=2, c=2)
    assert init(3).metadata == {"a": 1, "b": 1, "c": 2}


def test_flags_of_the_initializer_are_taken_or_contradicted():
    made = tt.VariableMetadata(jnp.ones(2), {"ref": True})
    assert tt.Param(made).ref is True
    assert tt.Param(made, ref=True).ref is True
    with pytest.raises(tt.MetadataError, match=r"ref=True, .*ref=False. Give it once"):
        tt.Param(made, ref=False)


def test_an_initializer_cannot_ask_for_hijax():
    with pytest.raises(tt.MetadataError, match="hijax Variables are not supported"):
        tt.Param(tt.VariableMetadata(1.0, {"hijax": True}))


def test_hooks_are_refused_by_name():
    with pytest.raises(
        tt.MetadataError, match="Param: the hook 'on_get_value' would never be called"
    ):
        tt.Param(jnp.ones(2), on_get_value=lambda variable, value: value * 2)
    with pytest.raises(tt.MetadataError, match="Doubled: the hook 'on_set_value'"):
        type("Doubled", (tt.Variable,), {"on_set_value": lambda self, value: value})
    init = tt.with_metadata(jnp.ones, on_create_value=lambda variable, value: value)
    with pytest.raises(tt.MetadataError, match="override `create_value`"):
        tt.Param(init((2,)))
    variable = tt.Param(jnp.ones(2))
    with pytest.raises(tt.MetadataError, match="transform_metadata"):
        variable.set_metadata(on_add_axis=print)
    assert not variable.has_metadata("on_add_axis")


def test_what_is_missing_reads_well_in_signatures():
    assert "= <missing>" in str(inspect.signature(tt.jit))


def test_metadata_do_not_hide_attributes_of_the_array():
    v = tt.Param(jnp.ones((2, 3)), dtype="mine", T="mine")
    assert v.dtype == jnp.float32
    assert v.T.shape == (3, 2)
    assert v.get_metadata("dtype") == "mine"
    assert v.get_metadata("T") == "mine"


def test_a_kind_can_show_its_metadata_under_their_name():
    class Tagged:
        colour = "plain"

    class Positive(Tagged, tt.Param):
        def __init__(self, value, tag="positive", **metadata):
            super().__init__(value, **metadata)
            self.set_metadata(tag=tag)

        @property
        def tag(self):
            return self.get_metadata("tag").upper()

    v = Positive(1.0, colour="red")
    assert v.tag == "POSITIVE"
    assert v.get_metadata("tag") == "positive"
    assert (v.colour, v.get_metadata("colour")) == ("plain", "red")
    assert jax.jit(lambda v: v.replace(2.0))(v).tag == "POSITIVE"
    assert tt.clone(v).copy(tag="real").tag == "REAL"
    with pytest.raises(tt.MetadataError, match="Positive: 'copy' cannot be the name"):
        Positive(1.0, copy=1)


@pytest.mark.parametrize("name", ["copy", "shape", "get_value", "replace"])
def test_metadata_that_could_not_be_read_are_refused(name):
    message = f"Param: '{name}' cannot be the name of metadata.*Choose another name"
    with pytest.raises(tt.MetadataError, match=message):
        tt.Param(1.0, **{name: 1})
    v = tt.Param(1.0)
    with pytest.raises(tt.MetadataError, match=message):
        v.set_metadata(name, 1)
    assert v.get_metadata(exclude_required=True) == {}
