# SPDX-License-Identifier: Apache-2.0
"""Paths: which Module a call belongs to, however it is called; and classes."""

import subprocess
import sys

import cloudpickle
import jax
import pytest

import treetap as tt
from small_models import ONE, Layer, forward, paths, texts_of


class Stack(tt.Module):
    def __init__(self):
        self.layers = tt.List([Layer(), Layer()])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Calls(tt.Module):
    """Calls its children in roundabout ways."""

    def __init__(self):
        self.a = Layer()
        self.b = Layer()

    def through_parent(self, x):
        return Visitor.visit(self, self.b, x)

    def through_closure(self, x):
        b = self.b
        return jax.jit(lambda x: b(x))(x)

    def through_sibling(self, x):
        return self.a(self.b(x))

    def through_map(self, x):
        return jax.vmap(lambda x: self.b(x))(x[None])[0]


class Visitor:
    @staticmethod
    def visit(parent, child, x):
        return child(x)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("through_parent", [("b",)]),
        ("through_closure", [("b",)]),
        ("through_sibling", [("b",), ("a",)]),
        ("through_map", [("b",)]),
    ],
)
def test_children_are_found_however_they_are_called(wrap, name, expected):
    def call(model, x):
        return getattr(model, name)(x)

    assert paths(wrap(call), Calls(), ONE) == expected


def test_a_module_handed_to_another_keeps_its_path():
    class User(tt.Module):
        def __call__(self, helper, x):
            return helper(x)

    class Owner(tt.Module):
        def __init__(self):
            self.user, self.helper = User(), Layer()

        def __call__(self, x):
            return self.user(self.helper, x)

    for wrap in (lambda f: f, jax.jit):
        found = texts_of(wrap(forward), Owner(), ONE)
        assert found == ["helper:__call__", "user:__call__", "__call__"]


def test_a_child_called_without_its_parent_has_its_path():
    for wrap in (lambda f: f, jax.jit):
        call = wrap(lambda model, x: model.layers[1](x))
        assert texts_of(call, Stack(), ONE) == ["layers/1:__call__"]


def test_a_child_alone_through_jit_is_called_by_its_class():
    alone = jax.jit(forward)

    def call(model, x):
        return alone(model.b, alone(model.a, x))

    assert texts_of(call, Calls(), ONE) == ["Layer:__call__", "Layer:__call__#1"]


def test_modules_made_during_the_call_are_called_by_their_class():
    class Maker(tt.Module):
        def __call__(self, x):
            return Layer()(x)

    assert texts_of(Maker(), ONE) == ["Layer:__call__", "__call__"]
    assert texts_of(lambda x: Maker()(x), ONE) == [
        "Maker/Layer:__call__",
        "Maker:__call__",
    ]


OTHER = Layer(3.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda model, x: model(x) + OTHER(x),
        lambda model, x: model(x) + jax.jit(lambda x: OTHER(x))(x),
        lambda model, x: jax.jit(forward)(model, x) + jax.jit(forward)(OTHER, x),
    ],
    ids=["eager", "closure of jit", "argument of jit"],
)
def test_a_module_that_is_no_argument_is_never_called_by_an_arguments_path(call):
    _, record = tt.observe(call)(Layer(2.0), ONE)
    of_model = [float(site.value) for site in record if site.path == ()]
    assert 3.0 not in of_model


def test_two_arguments_of_one_class_are_told_apart():
    def both(student, teacher, x):
        return student(x) + teacher(x)

    student, teacher = Layer(2.0), Layer(3.0)
    assert texts_of(both, student, teacher, ONE) == [
        "student:__call__",
        "teacher:__call__",
    ]
    for wrap in (jax.jit, tt.jit):
        _, record = tt.observe(wrap(both))(student, teacher, ONE)
        assert [float(site.value) for site in record] == [2.0, 3.0]
        assert len({site.text for site in record}) == 2


def test_two_arguments_of_different_classes_keep_their_names_under_jit():
    def both(first, second, x):
        return first(second(x))

    for wrap in (jax.jit, tt.jit):
        found = paths(wrap(both), Layer(), Stack(), ONE)
        assert found == [
            ("second", "layers", 0),
            ("second", "layers", 1),
            ("second",),
            ("first",),
        ]


def test_a_module_inside_one_of_its_own_class_has_its_path():
    class Nest(tt.Module):
        def __init__(self, depth):
            self.inner = Nest(depth - 1) if depth else None

        def __call__(self, x):
            return x + 1 if self.inner is None else self.inner(x)

    expected = ["inner/inner:__call__", "inner:__call__", "__call__"]
    assert texts_of(Nest(2), ONE) == expected
    inner = jax.jit(lambda model, x: model.inner(x))
    assert paths(inner, Nest(2), ONE)[-1][-2:] == ("Nest", "inner")


# Classes.


class Base(tt.Module):
    def __call__(self, x):
        return self.helper(x) + 1

    def helper(self, x):
        return x * 2


class Middle(Base):
    def __call__(self, x):
        return super().__call__(x) + 1


class Last(Middle):
    def __call__(self, x):
        return super().__call__(x) + 1

    def helper(self, x):
        return super().helper(x) + 10


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_call_through_super_is_recorded_once(wrap):
    _, record = tt.observe(wrap(forward))(Last(), ONE)
    found = [(site.text, float(site.value)) for site in record]
    assert found == [("helper", 12.0), ("__call__", 15.0)]


class Assorted(tt.Module):
    @staticmethod
    def static(x):
        return x

    @classmethod
    def make(cls):
        return cls()

    @property
    def prop(self):
        return 2.0

    def __call__(self, x):
        return self.static(x) * self.prop

    def _private(self, x):
        return x


def test_only_public_methods_are_recorded():
    assert type(vars(Assorted)["static"]) is staticmethod
    assert type(vars(Assorted)["make"]) is classmethod
    assert type(vars(Assorted)["prop"]) is property

    def call(x):
        model = Assorted.make()
        return model._private(model(x))

    assert texts_of(call, ONE) == ["Assorted:__call__"]


SCRIPT = """
import pickle, sys
import jax, jax.numpy as jnp
import treetap as tt
model = pickle.load(open(sys.argv[1], "rb"))
for fn in (model, jax.jit(model)):
    out, record = tt.observe(fn)(jnp.array(1.0))
    assert [site.text for site in record] == ["inner:__call__", "__call__"], record
    assert float(out) == 7.0
print("observed")
"""


def test_a_class_pickled_by_value_is_observed_elsewhere(tmp_path):
    class Inner(tt.Module):
        def __call__(self, x):
            return x * 6

    class Outer(tt.Module):
        def __init__(self):
            self.inner = Inner()

        def __call__(self, x):
            return self.inner(x) + 1

    path = tmp_path / "model.pkl"
    path.write_bytes(cloudpickle.dumps(Outer()))
    command = [sys.executable, "-c", SCRIPT, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "observed", done.stderr


class Deep(tt.Module):
    """Layers that are stacked, and run by a scan in the parent's own method."""

    def __init__(self):
        made = [Layer(), Layer()]
        self.layers = jax.tree.map(lambda *leaves: jax.numpy.stack(leaves), *made)

    def __call__(self, x):
        step = tt.scan(
            lambda layer, x: layer(x), in_axes=(0, tt.Carry), out_axes=tt.Carry
        )
        return step(self.layers, x)


@pytest.mark.parametrize("wrap", [lambda fn: fn, tt.jit, jax.jit])
def test_layers_scanned_over_have_the_path_they_have_in_the_model(wrap):
    _, record = tt.observe(wrap(forward))(Deep(), ONE)
    assert {site.path for site in record} == {("layers",), ()}
    (layers,) = record.select("layers:__call__")
    assert layers.value.shape[0] == 2
