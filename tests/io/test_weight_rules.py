# SPDX-License-Identifier: Apache-2.0
"""Rules: patterns of paths, what they mean, and that they work in both directions."""

import itertools
import math

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import treetap as tt
from treetap import WeightsError
from treetap._io.weight_rules import Rules, Tensor, tensor


def name_of(rules, *path):
    source = Rules(rules, "test").find(path)
    return source.names(source.bound)[0]


def test_without_a_rule_a_path_is_its_own_name():
    assert name_of(None, "blocks", 0, "kernel") == "blocks.0.kernel"
    assert name_of({"other": "x"}, "a", "{b}") == "a.{b}"


def test_names_in_braces_carry_over():
    rules = {"blocks/{i}/{what}/scale": "h.{i}.{what}.weight"}
    assert name_of(rules, "blocks", 12, "ln_1", "scale") == "h.12.ln_1.weight"
    assert name_of(rules, "blocks", 12, "scale") == "blocks.12.scale"
    assert name_of({"layers_{i}/w": "h.{i}"}, "layers_3", "w") == "h.3"


def test_several_keys_at_once_and_keys_that_do_not_matter():
    rules = {"{name...}/kernel": "model.{name...}.weight", "**/*": "model.rest"}
    assert name_of(rules, "a", 1, "kernel") == "model.a.1.weight"
    assert name_of(rules, "a", "b", "c") == "model.rest"
    assert name_of({"blocks/*/w": "shared.w"}, "blocks", 3, "w") == "shared.w"


def test_a_name_that_stands_twice_in_a_pattern_must_match_twice():
    rules = {"{a}/{a}": "twice.{a}"}
    assert name_of(rules, "x", "x") == "twice.x"
    assert name_of(rules, "x", "y") == "x.y"


def test_the_first_rule_that_matches_counts():
    rules = {"a/{x}": "first.{x}", "a/b": "second"}
    assert name_of(rules, "a", "b") == "first.b"


def test_special_characters_stand_for_themselves():
    assert name_of({"a.b/c+": "x"}, "a.b", "c+") == "x"
    assert name_of({"a.b/c+": "x"}, "aXb", "cc") == "aXb.cc"
    assert name_of({"{{a}}": "{{b}}"}, "{a}") == "{b}"


def test_rules_that_nothing_matched_are_known():
    rules = Rules({"a": "x", "b": "y"}, "test")
    rules.find(("a",))
    assert [*rules.unmatched] == ["b"]


def test_tensors_are_values():
    one = tensor("a.{i}", "b.{i}").transpose().part(0, of=2).stack().optional()
    same = tensor("a.{i}", "b.{i}").transpose().part(0, of=2).stack().optional()
    assert one == same
    assert hash(one) == hash(same)
    assert one != tensor("a.{i}", "b.{i}")
    assert one != "a"
    assert repr(one) == (
        "tensor('a.{i}', 'b.{i}').transpose().part(0, of=2, axis=0)"
        ".stack(axis=0).optional()"
    )
    joined = tensor("{p}").concat("p", over="qk", sizes=(2, 1)).rearrange("a b -> b a")
    assert repr(joined) == (
        "tensor('{p}').concat('p', over=('q', 'k'), axis=0, sizes=(2, 1))"
        ".rearrange('a b -> b a')"
    )
    assert eval(repr(joined), {"tensor": tensor}) == joined


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: tensor("a{"), "has braces"),
        (lambda: tensor("a{0}"), "has braces"),
        (lambda: tensor("a{i²}"), "has braces"),
        (lambda: tensor("a.{i}", "b"), "do not have the same names"),
        (lambda: tensor("a").transpose(1, 2), "no order of 2 axes"),
        (lambda: tensor("a").rearrange("a b"), "is no pattern"),
        (lambda: tensor("a").rearrange("a b -> a"), "is no pattern"),
        (lambda: tensor("a").rearrange("a a -> a a"), "is no pattern"),
        (lambda: tensor("a").rearrange("(a b -> a b"), "is no pattern"),
        (lambda: tensor("a").rearrange("a ... -> ... a"), "is no pattern"),
        (lambda: tensor("a").rearrange("a b -> (a b)"), "give all but one"),
        (lambda: tensor("a").rearrange("a b -> b a", c=1), "has no size"),
        (lambda: tensor("a").rearrange("a b -> b a", a=0), "has no size"),
        (lambda: tensor("a").part(3, of=3), "no part 3 of 3"),
        (lambda: tensor("a").part(-1, of=3), "no part -1"),
        (lambda: tensor("a").part(0, of=()), "no part 0"),
        (lambda: tensor("a").part(0, of=(1, 0)), "no part 0"),
        (lambda: tensor("a").part(0, of=2).part(0, of=2), "is a part already"),
        (lambda: tensor("{i}").stack(over=()), "nothing to stack"),
        (lambda: tensor("{i}").concat("i", over=()), "differ in number"),
        (lambda: tensor("{i}").concat("i", over="ab", sizes=(1,)), "differ in number"),
    ],
)
def test_tensors_that_mean_nothing(make, reason):
    with pytest.raises(WeightsError, match=reason):
        make()


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"a/{i}": "x"}, r"does not use \['i'\]"),
        ({"a": "x.{i}"}, r"does not say what \['i'\]"),
        ({"a": tensor("{i}.{j}").stack()}, r"does not say what \['i', 'j'\]"),
        ({"a/{i}": tensor("{i}").stack()}, "nothing to stack over"),
        ({"a/{i}": tensor("{i}").stack("i")}, r"cannot gather over \['i'\]"),
        ({"a": tensor("x").stack("i")}, r"cannot gather over \['i'\]"),
        ({"a{": "x"}, "has braces"),
        ({"a/{i²}": "x"}, "has braces"),
    ],
)
def test_rules_that_mean_nothing(rules, reason):
    with pytest.raises(WeightsError, match=reason) as caught:
        Rules(rules, "load_weights")
    assert str(caught.value).startswith("load_weights: ")


def test_rules_of_wrong_types():
    with pytest.raises(TypeError, match="rule for 'a' is a int"):
        Rules({"a": 3}, "load_weights")  # pyright: ignore[reportArgumentType] - wrong
    with pytest.raises(TypeError, match="is a list"):
        Rules(["a"], "load_weights")  # pyright: ignore[reportArgumentType] - wrong
    with pytest.raises(TypeError, match="names are texts"):
        tensor(3)  # pyright: ignore[reportArgumentType] - wrong


# Whatever the rules, saving and loading undo each other.


@st.composite
def transposed(draw, source, shape):
    order = draw(st.permutations(range(len(shape))))
    return source.transpose(*order), [shape[axis] for axis in order]


@st.composite
def rearranged(draw, source, shape):
    """Axes split, merged and in another order; an axis of length 1 at the end."""
    names = (f"a{number}" for number in itertools.count())
    groups, sizes = [], {}
    for length in shape:
        factor = draw(
            st.sampled_from([n for n in range(1, length + 1) if not length % n])
        )
        lengths = draw(st.sampled_from([[length], [factor, length // factor]]))
        groups.append({next(names): each for each in lengths})
        sizes |= groups[-1]
    order = draw(st.permutations(list(sizes)))
    cut = draw(st.integers(1, len(order)))
    right = [f"({' '.join(order[:cut])})", *order[cut:], "1"]
    left = [f"({' '.join(group)})" for group in groups]
    after = [math.prod(sizes[n] for n in order[:cut]), *(sizes[n] for n in order[cut:])]
    pattern = f"{' '.join(left)} -> {' '.join(right)}"
    return source.rearrange(pattern, **sizes), [*after, 1]


@st.composite
def laid_out(draw, source, shape):
    """Some steps after a Tensor of some shape, and the shape they give."""
    for step in draw(st.lists(st.sampled_from([transposed, rearranged]), max_size=2)):
        source, shape = draw(step(source, shape))
    return source, shape


@st.composite
def cuts(draw, shape):
    """An axis, and lengths that make it up."""
    axis = draw(st.integers(0, len(shape) - 1))
    ends = draw(st.sets(st.integers(1, shape[axis]), max_size=2)) | {shape[axis]}
    places = [0, *sorted(ends)]
    return axis, [stop - start for start, stop in itertools.pairwise(places)]


@st.composite
def tables(draw, key):
    """Rules for Variables whose tensors share one template, and their shapes."""
    stacks, joins, parts = draw(st.tuples(*[st.booleans()] * 3))
    name = key + ".{i}" * stacks + ".{p}" * joins
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    source, shape = draw(laid_out(tensor(name), shape))
    if joins:
        axis, _ = draw(cuts(shape))
        sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        shape = [*shape[:axis], sum(sizes), *shape[axis + 1 :]]
        # What came before would have to fit each of the lengths.
        source = tensor(name).concat(
            "p", over="xyz"[: len(sizes)], sizes=sizes, axis=axis
        )
        source, shape = draw(laid_out(source, shape))
    axis, lengths = draw(cuts(shape))
    rules, shapes = {}, {}
    for index, length in enumerate(lengths if parts else [shape[axis]]):
        part, piece = source, [*shape[:axis], length, *shape[axis + 1 :]]
        if parts:
            part = part.part(index, of=lengths, axis=axis)
        part, piece = draw(laid_out(part, piece))
        if stacks:
            place = draw(st.integers(0, len(piece)))
            piece.insert(place, 2)
            part = part.stack(axis=place)
        rules[f"{key}/{index}"], shapes[index] = part, tuple(piece)
    return rules, shapes


@hypothesis.given(st.data())
def test_saving_and_loading_undo_each_other(tmp_path_factory, data):
    rules, model = {}, {}
    numbers = np.random.default_rng(0)
    for key in ("one", "two"):
        own, shapes = data.draw(tables(key))
        rules |= own
        model[key] = {
            index: tt.Param(jnp.asarray(numbers.normal(size=shape), jnp.float32))
            for index, shape in shapes.items()
        }
    folder = tmp_path_factory.mktemp("rules")
    tt.save_weights(folder / "a.safetensors", model, rules=rules)
    blank = {
        key: {
            i: tt.Param(jnp.asarray(np.zeros(v.shape, np.float32)))
            for i, v in held.items()
        }
        for key, held in model.items()
    }
    report = tt.load_weights(folder / "a.safetensors", blank, rules=rules)
    assert not report.missing
    assert not report.unused
    assert tt.state(blank) == tt.state(model)
    tt.save_weights(folder / "b.safetensors", blank, rules=rules)
    first, second = (
        load_file(folder / "a.safetensors"),
        load_file(folder / "b.safetensors"),
    )
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])


def test_tensor_is_the_public_way_to_make_one():
    assert isinstance(tt.tensor("a"), Tensor)
