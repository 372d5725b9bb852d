# SPDX-License-Identifier: Apache-2.0
"""Objects that a transform builds around its values know how they are described."""

import jax.numpy as jnp
import pytest

import treetap as tt
from treetap._core.trees.build import regrow
from treetap._core.trees.flatten import take_leaves


class Scale(tt.Module):
    def __init__(self, width=3):
        self.width = width
        self.w = tt.Param(jnp.arange(float(width)))
        self.b = tt.Param(jnp.ones(width))


class Two(tt.Module):
    def __init__(self):
        self.first = Scale()
        self.second = Scale()


def described(tree):
    return take_leaves(tree, False, "test")


def test_a_regrown_object_has_the_description_it_was_made_from():
    definition, leaves = described(Two())
    model, made = regrow(definition, [jnp.zeros(3) for _ in leaves])
    again, found = described(model)
    assert again == definition
    assert again.spec.children[0] is definition.spec.children[0]  # nothing was walked
    assert list(map(id, found)) == list(map(id, made))


def test_given_variables_are_described_as_they_are():
    definition, leaves = described(Scale())
    given = [tt.BatchStat(leaf[...]) for leaf in leaves]
    model, made = regrow(definition, given)
    assert list(map(id, made)) == list(map(id, given))
    kinds = [spec.type for spec in described(model)[0].spec.children]
    assert kinds == [tt.BatchStat, tt.BatchStat]


def test_a_mix_of_variables_and_values():
    definition, (first, second) = described(Scale())
    model, _ = regrow(definition, [first, second[...] * 2])
    found, leaves = described(model)
    assert found == definition
    assert leaves[0] is first
    assert (leaves[1][...] == second[...] * 2).all()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.first.w.set_metadata(tag="new"),
        lambda model: setattr(model.first, "w", tt.BatchStat(jnp.zeros(3))),
        lambda model: setattr(model.first, "width", 4),
        lambda model: delattr(model.first, "b"),
        lambda model: setattr(model.first, "more", tt.Param(jnp.zeros(2))),
    ],
    ids=["metadata", "kind", "static", "removed", "added"],
)
def test_what_changes_inside_is_seen_inside(change):
    plain = Two()
    change(plain)
    expected, _ = tt.split(plain)
    seen = []

    @tt.jit(on_structure_change="ignore")
    def look(model):
        change(model)
        seen.append(tt.split(model)[0])

    look(Two())
    assert seen == [expected]


def test_a_variable_shared_inside_is_refused_inside():
    @tt.jit(on_structure_change="ignore")
    def step(model, x):
        model.second.w = model.first.w
        return tt.grad(lambda model: (model.first.w * x).sum())(model).first.w[...]

    with pytest.raises(tt.AliasError, match=r"grad: Duplicate Param.*aliasing"):
        step(Two(), 2.0)
