# SPDX-License-Identifier: Apache-2.0
"""List, Dict and Sequential."""

import operator

import jax
import jax.numpy as jnp
import pytest

import treetap as tt


def params(*values):
    return [tt.Param(jnp.array(float(value))) for value in values]


def numbers(items):
    return [float(item[...]) for item in items]


def test_lists_behave_like_lists():
    items = tt.List(params(0, 1, 2))
    assert len(items) == 3
    assert numbers(items) == [0, 1, 2]
    assert float(items[-1][...]) == 2
    assert numbers(items[1:]) == [1, 2]
    assert isinstance(items[1:], tt.List)
    assert items[0] in items
    items.append(*params(3))
    items.insert(0, *params(-1))
    items.extend(params(4, 5))
    assert numbers(items) == [-1, 0, 1, 2, 3, 4, 5]
    assert float(items.pop()[...]) == 5
    assert float(items.pop(0)[...]) == -1
    items.reverse()
    assert numbers(items) == [4, 3, 2, 1, 0]
    del items[1:3]
    assert numbers(items) == [4, 1, 0]
    items[0:2] = params(7, 8)
    assert numbers(items) == [7, 8, 0]
    items.clear()
    assert len(items) == 0
    assert not jax.tree.leaves(items)


def test_list_indices_are_checked():
    items = tt.List(params(0))
    for index in (1, -2):
        with pytest.raises(
            IndexError, match=f"List: index {index} is out of range for 1"
        ):
            items[index]
        with pytest.raises(IndexError):
            items[index] = tt.Param(1.0)
    with pytest.raises(TypeError):
        items["a"]
    with pytest.raises(ValueError, match="cannot assign 2 items to a slice of 1"):
        items[0:1] = params(1, 2)
    assert numbers(items) == [0]


def test_items_are_data_or_static_each_by_itself():
    items = tt.List([tt.Param(1.0), jax.nn.relu, tt.data(3), "name"])
    assert len(jax.tree.leaves(items)) == 2
    items[2] = 4
    assert jax.tree.leaves(items)[1] == 4
    items[0] = jax.nn.tanh
    assert jax.tree.leaves(items) == [4]
    items[1] = tt.Param(2.0)
    assert jax.tree.leaves(items) == [2.0, 4]
    with pytest.raises(
        tt.AttributeStatusError, match=r"List\[0\]: Found data on value"
    ):
        items[0] = [jnp.zeros(2)]


def test_positions_in_paths_are_numbers_in_numeric_order():
    items = tt.List(params(*range(12)))
    paths = [path for path, _ in tt.to_flat_state(tt.state(items))]
    assert paths == [(i,) for i in range(12)]
    again = tt.merge(*tt.split(items))
    assert numbers(again) == list(range(12))


def test_lists_survive_jit_and_maps():
    doubled = jax.jit(lambda items: jax.tree.map(lambda x: 2 * x, items))(
        tt.List([*params(1, 2), jax.nn.relu])
    )
    assert numbers(doubled[:2]) == [2, 4]
    assert doubled[2] is jax.nn.relu


def test_lists_may_be_subclassed_with_attributes():
    class Stack(tt.List):
        def __init__(self, items, scale):
            super().__init__(items)
            self.scale = tt.Param(scale)
            self.name = "stack"

    stack = tt.merge(*tt.split(Stack(params(1, 2), 3.0)))
    assert stack.scale[...] == 3.0
    assert stack.name == "stack"
    assert numbers(stack) == [1, 2]
    assert "scale" in dir(stack)
    assert set(tt.state(stack)) == {0, 1, "scale"}
    assert "name='stack'" in repr(stack)


def test_lists_of_outer_traces_cannot_change():
    items = tt.List(params(1))
    for change in (lambda: items.append(1), lambda: items.pop(), items.reverse):
        with pytest.raises(tt.TraceContextError, match="Cannot mutate 'List'"):
            jax.jit(lambda x, change=change: (change(), x)[1])(1.0)
    assert len(items) == 1


def test_dicts_behave_like_dicts():
    items = tt.Dict({"b": tt.Param(1.0)}, a=tt.Param(2.0))
    items["c"] = tt.Param(3.0)
    items.d = jax.nn.relu
    assert list(items) == ["b", "a", "c", "d"]
    assert items.a is items["a"]
    assert "a" in items
    assert "z" not in items
    assert len(items) == 4
    assert items.pop("d") is jax.nn.relu
    assert items.get("z", 5) == 5
    del items["b"]
    del items.c
    assert list(items.items()) == [("a", items.a)]
    items.update(x=1)
    assert dict(items)["x"] == 1
    with pytest.raises(KeyError):
        items["z"]
    with pytest.raises(KeyError):
        del items["z"]
    with pytest.raises(AttributeError):
        items.z
    with pytest.raises(TypeError, match="Dict: keys are strings, got 3 of type int"):
        items[3] = 1


def test_dict_order_survives_round_trips():
    items = tt.Dict(b=tt.Param(1.0), a=tt.Param(2.0), c=3)
    for again in (
        tt.clone(items),
        tt.merge(*tt.split(items)),
        jax.tree.map(lambda x: x, items),
        jax.jit(lambda d: d)(items),
    ):
        assert list(again) == ["b", "a", "c"]


def test_containers_compare_by_their_items_and_hash_by_identity():
    relu, module = jax.nn.relu, tt.List()
    items = [1, relu, module]
    one = tt.List(items)
    assert one == items == one
    assert one == tt.List(items)
    assert one != tt.List([1, relu, tt.Dict()])
    assert one != items[:2]
    assert one != tuple(items)
    assert tt.List(params(1, 2)) == tt.List(params(1, 2))
    assert tt.List(params(1, 2)) != tt.List(params(1, 3))
    assert tt.Dict(a=1) == {"a": 1} == tt.Dict(a=1)
    assert tt.Dict(a=1) != {"a": 2}
    assert tt.Dict(a=1) != tt.Dict(b=1)
    assert tt.Dict(a=1) != [1]
    assert {one: 1, tt.Dict(): 2}[one] == 1


def test_lists_are_joined():
    first, second, third = params(0, 1, 2)
    items = tt.List([first, second])
    for joined in (
        operator.add(items, [third]),
        items[:1] + items[1:] + tt.List([third]),
    ):
        assert isinstance(joined, tt.List)
        assert numbers(joined) == [0, 1, 2]
    assert numbers(operator.add([third], items)) == [2, 0, 1]
    assert numbers(items) == [0, 1]
    with pytest.raises(TypeError):
        operator.add(items, (third,))
    with pytest.raises(TypeError):
        operator.add((third,), items)


def test_sequential_passes_results_on():
    chain = tt.Sequential(
        lambda x: (x, 2 * x),
        lambda a, b: {"left": a, "right": b},
        lambda left, right: left + right,
    )
    assert chain(1.0) == 3.0


def test_sequential_hands_rngs_to_those_that_take_it():
    def noisy(x, *, rngs):
        return x + rngs.uniform()

    chain = tt.Sequential(noisy, jnp.square, max)
    chain.layers.pop()
    expected = jnp.square(1.0 + tt.Rngs(0).uniform())
    assert chain(1.0, rngs=tt.Rngs(0)) == expected


@pytest.mark.parametrize(
    ("args", "kwargs", "result"),
    [((1,), {}, 1), ((1, 2), {}, (1, 2)), ((), {"a": 1}, {"a": 1}), ((), {}, None)],
)
def test_an_empty_sequential_returns_its_arguments(args, kwargs, result):
    assert tt.Sequential()(*args, **kwargs) == result


def test_sequential_gives_its_layers():
    layers = (jnp.sin, tt.List(), jnp.cos)
    assert [*tt.Sequential(*layers)] == [*layers]
    assert jnp.cos in tt.Sequential(*layers)


def test_sequential_hands_keywords_to_every_layer_that_takes_them():
    def scale(x, *, by=1):
        return x * by

    def shift(x, by=0, to=0):
        return x + by + to

    def count(x, **options):
        return x + 1000 * len(options)

    def pair(x, by=0):
        return x, by

    chain = tt.Sequential(scale, abs, shift, jnp.negative)
    assert chain(-2.0, by=3, to=100) == -109
    assert chain(-2.0) == -2
    assert chain(-2.0, other=5) == -2
    assert tt.Sequential(scale, count, scale)(1.0, by=3, other=4) == 6009
    assert tt.Sequential(lambda x, y, /: x * y)(2.0, 3.0, x=4) == 6
    # What a layer returns fills its places first; a name may not come from both.
    assert tt.Sequential(pair, shift)(1.0, by=7) == 8
    chain = tt.Sequential(lambda x: {"x": x, "by": 5}, shift)
    assert chain(1.0, to=7) == 13
    with pytest.raises(TypeError, match=r"Sequential: layer 1 gets \['by'\] twice"):
        chain(1.0, by=7)


def test_sequential_refuses_to_call_what_cannot_be_called():
    chain = tt.Sequential(jnp.sin, 3)
    with pytest.raises(TypeError, match="Sequential: layer 1 is a int, which cannot"):
        chain(1.0)
    chain.layers[1] = jnp.cos
    assert chain(0.0) == 1


def test_sequential_splits_by_position():
    class Scale(tt.Module):
        def __init__(self):
            self.w = tt.Param(jnp.array(2.0))

        def __call__(self, x):
            return x * self.w

    chain = tt.Sequential(Scale(), jnp.sin, Scale())
    graphdef, state = tt.split(chain)
    assert list(state.layers) == [0, 2]
    hash(graphdef)
    assert tt.merge(graphdef, state)(0.0) == 0.0


def test_an_attribute_of_a_list_is_popped():
    items = tt.List(params(1.0, 2.0))
    items.mean = tt.BatchStat(1.5)
    assert tt.pop(items, tt.BatchStat)["mean"][...] == 1.5
    assert not hasattr(items, "mean")
    assert numbers(items) == [1.0, 2.0]


def test_a_sequence_may_hold_functions_without_a_signature():
    model = tt.Sequential(max, tt.Dropout(0.0))
    assert float(model((jnp.array(1.0), jnp.array(2.0)), rngs=tt.Rngs(0))) == 2.0


class Affine(tt.Module):
    def __init__(self, size=2):
        self.w = tt.Param(jnp.ones(size))
        self.b = tt.Param(jnp.zeros(size))


def test_removing_from_a_list_moves_the_rest_up():
    for remove in (lambda items: items.pop(0), lambda items: items.__delitem__(0)):
        items = tt.List([tt.Param(1.0), tt.Param(2.0), tt.Param(3.0)])
        remove(items)
        assert jax.tree.leaves(items) == [2.0, 3.0]
        assert tt.to_flat_state(tt.split(items)[1]).paths == ((0,), (1,))
        assert [v[...] for v in items] == [2.0, 3.0]


def test_inserting_moves_modules_and_functions_alike():
    first, last = Affine(), Affine()
    items = tt.List([first, jax.nn.relu])
    items.insert(0, last)
    assert list(items) == [last, first, jax.nn.relu]
    assert list(tt.state(items)) == [0, 1]
    items.insert(1, jax.nn.tanh)
    assert list(items) == [last, jax.nn.tanh, first, jax.nn.relu]
    assert list(tt.state(items)) == [0, 2]


def test_a_refused_insertion_changes_nothing():
    items = tt.List([Affine(), jax.nn.relu])
    with pytest.raises(tt.AttributeStatusError, match=r"List\[0\]: Found data on"):
        items.insert(0, [jnp.ones(2)])
    assert len(items) == 2
    assert items[1] is jax.nn.relu


def test_keys_of_a_dict_do_not_hide_its_methods():
    d = tt.Dict(items=tt.Param(1.0), train=tt.Param(2.0), update=3)
    for again in (d, tt.clone(d), jax.tree.map(lambda leaf: leaf, d)):
        assert sorted(key for key, _ in again.items()) == ["items", "train", "update"]
        assert again["items"][...] == 1.0
        again.train()
        again.update(more=4)
        assert again["update"] == 3
        assert again["more"] == 4


def test_methods_of_a_dict_are_not_its_items():
    d = tt.Dict()
    assert "update" not in d
    assert len(d) == 0
    with pytest.raises(KeyError, match="update"):
        d["update"]
    with pytest.raises(KeyError, match="update"):
        del d["update"]


def test_a_place_that_was_declared_data_stays_data_in_a_slice_too():
    one, some = tt.List([tt.data(1), 2]), tt.List([tt.data(1), 2])
    one[0] = 3
    some[:] = [3, 4]
    for items in (one, some):
        assert jax.tree.leaves(items) == [3]
