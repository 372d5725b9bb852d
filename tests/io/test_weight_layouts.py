# SPDX-License-Identifier: Apache-2.0
"""Layouts: each step gives what it says, and can be undone."""

import numpy as np
import pytest

from treetap._io.weight_rules import Misfit, Rules, assembled, needs, tensor


def made(source, shape, files, pattern="x"):
    """The value of some shape that a rule makes of the tensors of a file."""
    found = Rules({pattern: source}, "test").find(tuple(pattern.split("/")))
    wanted = [
        (found.names(bound)[0], piece)
        for bound, piece in needs(found.tensor.steps, shape, found.bound)
    ]
    assert wanted == [(name, files[name].shape) for name, _ in wanted]
    return assembled(found.tensor.steps, shape, (files[name] for name, _ in wanted))


def numbered(*shape):
    return np.arange(np.prod(shape)).reshape(shape)


def test_transpose():
    a = numbered(2, 3, 4)
    np.testing.assert_array_equal(
        made(tensor("a").transpose(), a.T.shape, {"a": a}), a.T
    )
    turned = a.transpose(1, 2, 0)
    found = made(tensor("a").transpose(1, 2, 0), turned.shape, {"a": a})
    np.testing.assert_array_equal(found, turned)


def test_rearrange_splits_merges_and_reorders():
    a = numbered(4, 6)
    heads = made(tensor("a").rearrange("d (h k) -> d h k"), (4, 2, 3), {"a": a})
    np.testing.assert_array_equal(heads, a.reshape(4, 2, 3))
    source = tensor("a").rearrange("(h k) d -> d h k")
    found = made(source, (6, 2, 2), {"a": a})
    np.testing.assert_array_equal(found, a.reshape(2, 2, 6).transpose(2, 0, 1))
    source = tensor("a").rearrange("o i -> (i o)", i=6)
    np.testing.assert_array_equal(made(source, (24,), {"a": a}), a.T.reshape(-1))
    source = tensor("a").rearrange("o i 1 -> i () o".replace("()", "1"))
    found = made(source, (6, 1, 4), {"a": a[..., None]})
    np.testing.assert_array_equal(found, a.T[:, None])


def test_part_of_equal_and_of_unequal_pieces():
    a = numbered(2, 6)
    for index in range(3):
        found = made(tensor("a").part(index, of=3, axis=1), (2, 2), {"a": a})
        np.testing.assert_array_equal(found, a[:, 2 * index : 2 * index + 2])
    source = tensor("a").part(1, of=(4, 1, 1), axis=-1)
    np.testing.assert_array_equal(made(source, (2, 1), {"a": a}), a[:, 4:5])


def test_the_number_of_parts_costs_nothing():
    """A file of rules may say any number; only the tensor says what there is."""
    many = 10**15
    step = tensor("a").part(many - 1, of=many).steps[0]
    assert step.pieces((2, 3)) == [({}, (2 * many, 3))]


def test_part_after_rearrange_takes_what_is_interleaved():
    a = numbered(12, 5)  # heads, (query, key, value), length of a head
    source = tensor("a").rearrange("(h p k) d -> p h k d").part(1, of=3)
    found = made(source.rearrange("1 h k d -> d h k"), (5, 2, 2), {"a": a})
    expected = a.reshape(2, 3, 2, 5)[:, 1].transpose(2, 0, 1)
    np.testing.assert_array_equal(found, expected)


def test_stack_over_numbers_and_over_names():
    files = {f"h.{i}.w": numbered(2, 3) + 10 * i for i in range(4)}
    source = tensor("h.{i}.w").transpose().stack()
    expected = np.stack([files[f"h.{i}.w"].T for i in range(4)])
    np.testing.assert_array_equal(made(source, (4, 3, 2), files), expected)
    named = tensor("h.{i}.w").stack("i", over=(3, 1), axis=-1)
    expected = np.stack([files["h.3.w"], files["h.1.w"]], -1)
    np.testing.assert_array_equal(made(named, (2, 3, 2), files), expected)


def test_stack_twice():
    files = {
        f"{i}.{e}": numbered(2) + 10 * i + 100 * e for i in range(3) for e in (0, 1)
    }
    found = made(tensor("{i}.{e}").stack("e").stack(), (3, 2, 2), files)
    expected = [[files[f"{i}.{e}"] for e in (0, 1)] for i in range(3)]
    np.testing.assert_array_equal(found, expected)


def test_concat_of_equal_and_of_unequal_tensors():
    files = {"q": numbered(2, 3), "k": numbered(2, 3) + 10}
    found = made(tensor("{p}").concat("p", over="qk", axis=1), (2, 6), files)
    np.testing.assert_array_equal(found, np.concatenate([files["q"], files["k"]], 1))
    files["k"] = numbered(2, 1)
    source = tensor("{p}").concat("p", over="qk", axis=1, sizes=(3, 1))
    expected = np.concatenate([files["q"], files["k"]], 1)
    np.testing.assert_array_equal(made(source, (2, 4), files), expected)


@pytest.mark.parametrize(
    ("source", "shape", "reason"),
    [
        (tensor("a").transpose(1, 0), (2, 3, 4), r"\.transpose\(1, 0\) is for 2 axes"),
        (tensor("a").rearrange("a b -> b a"), (2,), "gives 2 axes"),
        (tensor("a").rearrange("a b -> (b a)", a=2), (5,), "an axis of 5"),
        (tensor("a").rearrange("a b -> b a", a=2), (5, 3), "an axis of 3"),
        (tensor("a").part(0, of=2, axis=2), (2, 3), "needs an axis 2"),
        (tensor("a").part(0, of=(2, 3)), (3,), "gives 2 at axis 0"),
        (tensor("{i}").stack(), (), "needs an axis 0"),
        (tensor("{i}").stack(), (0, 2), "gives 0 at axis 0"),
        (tensor("{i}").stack(over="ab"), (3,), "gives 2 at axis 0"),
        (tensor("{i}").concat("i", over="ab"), (3,), "cannot give an axis of 3"),
        (tensor("{i}").concat("i", over="ab", sizes=(1, 1)), (3,), "an axis of 3"),
    ],
    ids=repr,
)
def test_shapes_that_a_layout_cannot_give(source, shape, reason):
    found = Rules({"x": source}, "test").find(("x",))
    with pytest.raises(Misfit, match=reason):
        list(needs(found.tensor.steps, shape, found.bound))


def test_a_stack_of_more_tensors_than_anybody_has_is_refused():
    with pytest.raises(Misfit, match="would be 1099511627776 tensors at axis 0"):
        list(needs(tensor("{i}").stack("i").steps, (2**40, 0), {}))
