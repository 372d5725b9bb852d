# SPDX-License-Identifier: Apache-2.0
"""update, pop, set_metadata and with_vars: all of it, or nothing."""

import contextlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt


class Linear(tt.Module):
    def __init__(self):
        self.w = tt.Param(jnp.ones((2, 3)))
        self.b = tt.Param(jnp.zeros(3), tag="bias")
        self.size = 3


class Net(tt.Module):
    def __init__(self):
        self.linear = Linear()
        self.seen = tt.BatchStat(0.0)
        self.scale = jnp.ones(3)
        self.number = tt.data(1)
        self.items = tt.data([tt.Param(1.0), {"x": jnp.zeros(2)}])


class Point(NamedTuple):
    x: float
    y: float


def content(node):
    """Values and metadata, for comparison."""
    return tt.map_state(lambda path, leaf: leaf, tt.state(tt.clone(node, arrays=True)))


# update.


def test_update_writes_into_the_variables_there_are():
    net = Net()
    w = net.linear.w
    new = jnp.full((2, 3), 5.0)
    tt.update(net, tt.State({"linear": {"w": tt.Param(new, tag="new")}}))
    assert net.linear.w is w
    assert w[...] is new
    assert w.tag == "new"
    assert net.linear.b.tag == "bias"


def test_update_takes_bare_values_and_plain_leaves():
    net = Net()
    tt.update(net, {"seen": 4.0, "scale": jnp.zeros(3), "number": 7})
    assert (net.seen[...], net.number) == (4.0, 7)
    assert net.scale.tolist() == [0, 0, 0]
    tt.update(net, {"items": {0: 2.0, 1: {"x": jnp.ones(2)}}})
    assert net.items[0][...] == 2
    assert net.items[1]["x"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "convert",
    [
        lambda s: s,
        lambda s: s.raw_mapping,
        tt.to_flat_state,
        lambda s: tt.unpack(Net()),
    ],
    ids=["State", "dict", "FlatState", "GraphState"],
)
def test_update_takes_every_form_of_state(convert):
    net = Net()
    net.seen[...] = 9.0
    tt.update(net, convert(tt.state(Net())))
    assert net.seen[...] == 0
    assert content(net) == content(Net())


def test_update_takes_several_states():
    net = Net()
    tt.update(net, {"seen": 4.0}, {"number": 2}, {"seen": 5.0})
    assert (net.seen[...], net.number) == (5.0, 2)


def test_update_works_on_variables_and_containers():
    variable = tt.Param(jnp.ones(2))
    tt.update(variable, jnp.zeros(2))
    assert variable[...].tolist() == [0, 0]
    tree = {"a": [variable]}
    tt.update(tree, {"a": {0: tt.Param(jnp.ones(2))}})
    assert variable[...].tolist() == [1, 1]


def test_update_works_with_shared_and_cyclic_objects():
    net = Net()
    net.again = net.linear
    net.me = net
    tt.update(net, {"again": {"b": jnp.ones(3)}})
    assert net.linear.b[...].tolist() == [1, 1, 1]


def test_update_with_its_own_state_changes_nothing():
    net = Net()
    w = net.linear.w[...]
    tt.update(net, tt.state(net))
    assert net.linear.w[...] is w


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"odd": 1.0}, "unexpected odd: Net has ["),
        ({"linear": {"odd": tt.Param(1.0)}}, "unexpected linear/odd: Linear has ["),
        ({"linear": {"size": 4}}, "linear/size is static"),
        ({"linear": 3.0}, "linear: a float where a Linear stands"),
        (
            {"linear": {"w": jnp.ones((3, 2))}},
            "linear/w: shape (3, 2), expected (2, 3)",
        ),
        (
            {"linear": {"w": tt.Param(jnp.ones((2, 3), jnp.int32))}},
            "linear/w: dtype int32, expected float32",
        ),
        ({"linear": {"w": {"x": 1.0}}}, "linear/w: "),
        ({"scale": jnp.ones(4)}, "scale: shape (4,), expected (3,)"),
        ({"scale": tt.Param(jnp.ones(3))}, "scale: a Param where a plain value stands"),
        ({"scale": {"x": jnp.ones(3)}}, "scale: "),
        ({"items": {5: 1.0}}, "unexpected items/5: list has [0, 1]"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_changes(state, problem):
    net = Net()
    good = {"seen": 9.0, "number": 9, "linear": {"b": tt.Param(jnp.ones(3), tag="x")}}
    with pytest.raises(tt.StructureError) as caught:
        tt.update(net, good, state)
    message = str(caught.value)
    assert message.startswith(
        "update: the state does not fit the object; nothing was changed.\n  - "
    )
    assert problem in message
    assert content(net) == content(Net())


def test_update_lists_all_problems_up_to_a_point():
    with pytest.raises(tt.StructureError, match=r"unexpected 11: .*\n  - and 3 more"):
        tt.update({}, dict.fromkeys(range(15), 1.0))


def test_a_tuple_cannot_be_changed():
    tree = {"a": Point(1.0, 2.0), "b": 3.0}
    with pytest.raises(tt.StructureError, match="a/x: a Point cannot be changed"):
        tt.update(tree, {"b": 4.0, "a": {"x": 5.0}})
    assert tree == {"a": Point(1.0, 2.0), "b": 3.0}


@pytest.mark.parametrize("node", [3.0, np.ones(2), "text"])
def test_update_needs_something_that_can_change(node):
    kind = type(node).__name__
    with pytest.raises(TypeError, match=f"update: a {kind} cannot be changed in place"):
        tt.update(node, {})


def test_update_writes_through_refs():
    model = {"w": tt.Param(jnp.ones(2), ref=True)}
    raw = model["w"].get_raw_value()
    tt.update(model, {"w": tt.Param(jnp.zeros(2))})
    assert model["w"].get_raw_value() is raw
    assert model["w"].ref is True
    assert raw[...].tolist() == [0, 0]
    plain = {"w": tt.Param(jnp.ones(2))}
    tt.update(plain, model)
    assert isinstance(plain["w"].get_raw_value(), jax.Array)


def test_update_respects_the_trace_level():
    net = Net()
    with pytest.raises(tt.TraceContextError, match="Cannot mutate BatchStat from"):
        jax.jit(lambda: tt.update(net, {"seen": 1.0}))()
    with pytest.raises(tt.TraceContextError, match="Cannot mutate 'Net' from"):
        jax.jit(lambda: tt.update(net, {"number": 2}))()
    assert content(net) == content(Net())


def test_update_works_inside_jit_on_an_argument():
    @jax.jit
    def step(net):
        tt.update(net, jax.tree.map(lambda x: x + 1, tt.state(net, tt.Param)))
        return net

    assert step(Net()).linear.w[0, 0] == 2


# pop.


def test_pop_takes_values_out():
    net = Net()
    seen = net.seen
    popped = tt.pop(net, tt.BatchStat)
    assert popped.seen is seen
    assert not hasattr(net, "seen")
    assert len(tt.to_flat_state(tt.state(net))) == 6


def test_pop_groups_by_filters_and_finds_nothing_too():
    net = Net()
    stats, bias, none = tt.pop(net, tt.BatchStat, "bias", tt.Cache)
    assert tt.to_flat_state(stats).paths == (("seen",),)
    assert tt.to_flat_state(bias).paths == (("linear", "b"),)
    assert none == {}
    assert hasattr(net.linear, "w")


def test_pop_takes_every_reference_to_a_variable():
    shared = tt.Cache(1.0)
    tree = {"a": shared, "b": [{"c": shared}], "d": tt.Param(1.0)}
    popped = tt.pop(tree, tt.Cache)
    assert tt.to_flat_state(popped).paths == (("a",),)
    assert list(tree) == ["b", "d"]
    assert tree["b"] == [{}]


def test_pop_takes_items_out_of_a_list_module():
    items = tt.List([tt.Param(0), tt.Cache(1), tt.Param(2), tt.Cache(3)])
    popped = tt.pop(items, tt.Cache)
    assert tt.to_flat_state(popped).paths == ((1,), (3,))
    assert [item[...] for item in items] == [0, 2]


@pytest.mark.parametrize("value", [1.5, jnp.ones(2), "text"])
def test_pop_of_plain_values_goes_by_place(value):
    tree = {"a": value, "b": value}
    popped = tt.pop(tree, tt.PathIn(("a",)))
    assert list(popped) == ["a"]
    assert list(tree) == ["b"]
    tree = {"a": value, "b": value}
    assert list(tt.pop(tree, ...)) == ["a", "b"]
    assert tree == {}


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: Point(x, 1.0)])
def test_pop_cannot_shorten_a_sequence(wrap):
    tree = {"first": tt.Cache(1.0), "x": wrap(tt.Cache(2.0))}
    with pytest.raises(
        tt.StructureError, match=r"pop: x/.* stands in a .* keep its length\. Use `tre"
    ):
        tt.pop(tree, tt.Cache)
    assert list(tree) == ["first", "x"]


def test_pop_needs_a_filter_and_a_holder():
    with pytest.raises(TypeError, match="pop: expected at least one filter"):
        tt.pop(Net())
    for node, kind in ((tt.Param(1.0), "Param"), (3.0, "float")):
        with pytest.raises(
            TypeError, match=f"pop: cannot take anything out of a {kind}"
        ):
            tt.pop(node, ...)
    with pytest.raises(tt.FilterError, match="can only be used as the last"):
        tt.pop(Net(), ..., tt.Param)


def test_pop_respects_the_trace_level():
    net = Net()
    with pytest.raises(tt.TraceContextError, match="Cannot mutate 'Net'"):
        jax.jit(lambda: tt.pop(net, tt.BatchStat) and None)()
    assert hasattr(net, "seen")


def test_pop_of_a_cyclic_object():
    net = Net()
    net.me = net
    assert list(tt.pop(net, tt.BatchStat)) == ["seen"]


# set_metadata.


def test_set_metadata_changes_the_variables_a_filter_takes():
    net = Net()
    tt.set_metadata(net, group="all")
    tt.set_metadata(net, tt.Param, group="params", more=1)
    tt.set_metadata(net, only="bias", group="bias")
    assert (net.seen.group, net.linear.w.group, net.linear.b.group) == (
        "all",
        "params",
        "bias",
    )
    assert net.items[0].more == 1
    assert not net.seen.has_metadata("more")


def test_set_metadata_takes_shared_objects():
    shared = tt.Param(1.0)
    tt.set_metadata([shared, {"a": shared}], tag="x")
    assert shared.tag == "x"


@pytest.mark.parametrize("name", ["ref", "hijax", "eager_sharding"])
def test_set_metadata_refuses_required_names(name):
    net = Net()
    with pytest.raises(
        tt.MetadataError, match=f"set_metadata: {name} are fixed .*`with_vars`"
    ):
        tt.set_metadata(net, **{name: True, "tag": "x"})
    assert not net.seen.has_metadata("tag")


def test_set_metadata_changes_nothing_on_an_error():
    tree = [tt.Param(1.0), tt.Variable(1.0)]
    with pytest.raises(tt.MetadataError, match="'copy' cannot be the name"):
        tt.set_metadata(tree, role="x", copy="y")
    assert not tree[0].has_metadata("role")


def test_set_metadata_respects_the_trace_level():
    net = Net()

    def inside():
        made = tt.Param(1.0)
        with pytest.raises(tt.TraceContextError, match="Cannot mutate"):
            tt.set_metadata([made, net], tag="x")
        assert not made.has_metadata("tag")

    jax.jit(inside)()


# with_vars.


def test_with_vars_copies_what_changes_and_shares_the_rest():
    net = Linear()
    refs = tt.with_vars(net, ref=True, only="bias")
    assert isinstance(refs.b.get_raw_value(), jax.Ref)
    assert (refs.b.ref, refs.b.tag) == (True, "bias")
    assert refs.w is net.w
    assert isinstance(net.b.get_raw_value(), jax.Array)
    plain = tt.with_vars(refs, ref=False)
    assert isinstance(plain.b.get_raw_value(), jax.Array)
    assert tt.with_vars(net).b is net.b


def test_with_vars_makes_plain_jit_propagate():
    net = tt.with_vars(Linear(), ref=True)

    @jax.jit
    def step(net):
        net.b[...] += 1

    step(net)
    assert net.b[...].tolist() == [1, 1, 1]


def test_with_vars_refuses_or_keeps_sharing():
    shared = tt.Param(jnp.ones(2))
    with pytest.raises(
        tt.AliasError,
        match=r"with_vars: Found duplicate at path b/0: the same Param is at a\. Say "
        "`allow_duplicates=True`",
    ):
        tt.with_vars({"a": shared, "b": [shared]}, ref=True)
    refs = tt.with_vars([shared, shared], ref=True, allow_duplicates=True)
    assert refs[0] is refs[1]
    assert refs[0].ref
    assert tt.with_vars([shared, shared], ref=True, only=tt.Cache)[0] is shared


@pytest.mark.parametrize("options", [{"hijax": True}, {"mutable": True}])
def test_with_vars_refuses_what_is_not_supported(options):
    (name,) = options
    with pytest.raises(
        tt.MetadataError, match=f"with_vars: `{name}` is not supported.*`ref=True`"
    ):
        tt.with_vars(Linear(), **options)


def test_refs_may_be_updated_from_a_closure():
    variable = tt.Param(jnp.zeros(2), ref=True)
    jax.jit(lambda x: tt.update({"v": variable}, {"v": x}))(jnp.ones(2))
    assert variable[0] == 1.0


def test_static_attributes_are_named_as_such():
    module = tt.Dict(n=3)
    with pytest.raises(tt.StructureError, match="- n is static"):
        tt.update(module, {"n": 4})


def test_a_marked_value_in_a_state_is_refused():
    node = tt.Dict(x=tt.data(jnp.ones(2)))
    with pytest.raises(tt.StructureError, match=r"x: data\(.* where a value belongs"):
        tt.update(node, {"x": tt.data(jnp.zeros(2))})
    assert node.x.tolist() == [1.0, 1.0]


def test_statics_of_an_object_that_is_no_pytree_are_no_data():
    class Opaque(tt.Module, pytree=False):
        def __init__(self):
            self.w = tt.Param(1.0)
            self.n = 2

    node = Opaque()
    with pytest.raises(tt.StructureError, match="n is static"):
        tt.update(node, {"n": tt.Param(3.0)})
    assert node.n == 2
    tt.update(node, {"w": tt.Param(5.0)})
    assert node.w[...] == 5.0


class Affine(tt.Module):
    def __init__(self, size=2):
        self.w = tt.Param(jnp.ones(size))
        self.b = tt.Param(jnp.zeros(size))


def test_with_vars_says_that_mutable_is_not_supported():
    model = Affine()
    with pytest.raises(tt.MetadataError, match=r"with_vars: `mutable`.*`ref=True`"):
        tt.with_vars(model, mutable=True)
    assert model.w.get_metadata("ref") is False


class Free(tt.Module):
    """A Module whose attributes the tests give it."""

    def __init__(self, **attributes):
        for name, value in attributes.items():
            setattr(self, name, value)


def nested_model():
    return Free(
        a=tt.Param(jnp.ones(2)),
        b=Free(c=tt.Param(jnp.zeros(3)), d=tt.BatchStat(jnp.zeros(3))),
    )


def test_pop_removes_every_reference_to_a_variable():
    shared = tt.Intermediate(1.0)
    model = Free(x=shared, y=Free(z=shared), w=tt.Param(2.0))
    taken = tt.pop(model, tt.Intermediate)
    assert taken.x is shared
    assert tt.to_flat_state(taken).paths == (("x",),)
    assert not hasattr(model, "x")
    assert not hasattr(model.y, "z")
    assert jax.tree.leaves(model) == [2.0]


def test_pop_takes_only_the_plain_values_that_were_asked_for():
    model = Free(a=tt.data(1), b=tt.data(1))
    assert dict(tt.pop(model, tt.PathContains("a"))) == {"a": 1}
    assert model.b == 1


def test_pop_returns_every_plain_value_it_removes():
    model = Free(a=tt.data(1), b=tt.data(1))
    assert dict(tt.pop(model, ...)) == {"a": 1, "b": 1}


def test_pop_from_a_list_leaves_a_whole_list():
    items = tt.List([tt.Intermediate(1.0), tt.Param(2.0), tt.Intermediate(3.0)])
    kept = items[1]
    taken = tt.pop(items, tt.Intermediate)
    assert tt.to_flat_state(taken).paths == ((0,), (2,))
    assert list(map(id, items)) == [id(kept)]
    assert tt.to_flat_state(tt.state(items)).paths == ((0,),)


def test_pop_from_a_plain_list_is_refused_before_anything_is_taken():
    model = Free(a=tt.Intermediate(1.0), b=tt.data([tt.Intermediate(2.0)]))
    message = r"pop: b/0 stands in a list.*Use `treetap.List`"
    with pytest.raises(tt.StructureError, match=message):
        tt.pop(model, tt.Intermediate)
    assert jax.tree.leaves(model) == [1.0, 2.0]


def numbers_of(model):
    return [leaf.tolist() for leaf in jax.tree.leaves(model)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"typo": 1.0}, r"unexpected b/typo: Free has \['c', 'd'\]"),
        ({"c": jnp.ones(4)}, r"b/c: shape \(4,\), expected \(3,\)"),
        ({"c": np.ones(3, np.int32)}, "b/c: dtype int32, expected float32"),
        (jnp.ones(2), "b: a .* where a Free stands"),
    ],
)
def test_update_refuses_what_does_not_fit_and_changes_nothing(wrong, message):
    model = nested_model()
    before = numbers_of(model)
    with pytest.raises(tt.StructureError, match="nothing was changed.\n.*" + message):
        tt.update(model, {"a": jnp.full(2, 9.0), "b": wrong})
    assert numbers_of(model) == before
    assert not hasattr(model.b, "typo")


def test_update_takes_values_of_variables_of_another_kind():
    model = Net()
    given = tt.BatchStat(jnp.full((2, 3), 7.0), note="new")
    tt.update(model, {"linear": {"w": given}})
    assert type(model.linear.w) is tt.Param
    assert (float(model.linear.w[0, 0]), model.linear.w.note) == (7.0, "new")


@pytest.mark.parametrize("wrong", [[1.5, 2.5], (1, 2), ["x", "y"]])
def test_a_list_does_not_take_the_place_of_an_array(wrong):
    model = Free(w=tt.Param(jnp.ones(2, jnp.int32)))
    with contextlib.suppress(tt.StructureError, TypeError):
        tt.update(model, {"w": wrong})
    assert isinstance(model.w.get_raw_value(), jax.Array)
    assert model.w.dtype == jnp.int32


@pytest.mark.parametrize("wrong", [1.5, "text", None])
def test_a_python_value_does_not_change_the_dtype(wrong):
    model = Free(w=tt.Param(jnp.int32(1)))
    with contextlib.suppress(tt.StructureError, TypeError):
        tt.update(model, {"w": wrong})
    assert isinstance(model.w.get_raw_value(), jax.Array)
    assert model.w.dtype == jnp.int32


def test_a_mapping_does_not_take_the_place_of_an_array():
    model = Free(w=tt.Param(jnp.ones(2)))
    with pytest.raises(tt.StructureError, match="w"):
        tt.update(model, {"w": {"kernel": jnp.ones(2)}})
    assert model.w.shape == (2,)
