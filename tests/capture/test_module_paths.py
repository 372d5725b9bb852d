# SPDX-License-Identifier: Apache-2.0
"""Paths: where in a model a site is, however the Module got there."""

import collections
import copy
import pickle
from typing import NamedTuple

import jax
import numpy as np
import pytest

import treetap as tt
from small_models import ONE, Layer, forward, paths, texts_of
from treetap._capture import module_paths

WRAPS = {
    "eager": lambda f: f,
    "jax.jit": jax.jit,
    "tt.jit": tt.jit,
    "graph": lambda f: tt.jit(f, graph=True),
    "updates": lambda f: tt.jit(f, graph=True, graph_updates=True),
    "remat": tt.remat,
    "vmap": lambda f: lambda m, x: tt.vmap(f, in_axes=(None, 0))(m, x[None]),
}
EVERYWHERE = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


class Pair(NamedTuple):
    left: Layer
    right: Layer


class Containers(tt.Module):
    """Layers in containers of every sort."""

    def __init__(self):
        self.direct = Layer()
        self.list = tt.List([Layer(), tt.List([Layer()])])
        self.dict = tt.Dict(a=Layer(), b=tt.Dict(c=Layer()))
        self.plain = tt.data([Layer(), {"deep": (Layer(),)}])
        self.mixed = tt.data({"list": tt.List([Layer()])})
        self.sequence = tt.Sequential(Layer(), Layer())

    def __call__(self, x):
        x = self.list[1][0](self.list[0](self.direct(x)))
        x = self.dict.b.c(self.dict.a(x))
        x = self.plain[1]["deep"][0](self.plain[0](x))
        return self.sequence(self.mixed["list"][0](x))


CONTAINED = [
    ("direct",),
    ("list", 0),
    ("list", 1, 0),
    ("dict", "a"),
    ("dict", "b", "c"),
    ("plain", 0),
    ("plain", 1, "deep", 0),
    ("mixed", "list", 0),
    ("sequence", "layers", 0),
    ("sequence", "layers", 1),
    ("sequence",),
]


@EVERYWHERE
def test_containers_of_every_sort_are_in_paths(wrap):
    assert paths(wrap(forward), Containers(), ONE) == CONTAINED


class Unusual(tt.Module):
    def __init__(self):
        self.pair = tt.data(Pair(Layer(), Layer()))
        self.ordered = tt.data(collections.OrderedDict(x=Layer()))

    def __call__(self, x):
        return self.ordered["x"](self.pair.right(self.pair.left(x)))


@EVERYWHERE
def test_other_containers_of_jax_are_in_paths(wrap):
    model = Unusual()
    found = paths(wrap(forward), model, ONE)
    assert set(found) == {path for path, _ in tt.iter_modules(model) if path}


class Growing(tt.Module):
    def __init__(self):
        self.layers = tt.data([])
        for _ in range(2):
            self.layers.append(Layer())

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@EVERYWHERE
def test_a_plain_list_may_grow(wrap):
    model = Growing()
    assert paths(wrap(forward), model, ONE) == [("layers", 0), ("layers", 1)]
    model.layers.append(Layer())
    assert paths(wrap(forward), model, ONE)[2:] == [("layers", 2)]


def test_paths_follow_changes_of_a_list():
    class Stack(tt.Module):
        def __init__(self):
            self.layers = tt.List([Layer(2.0), Layer(3.0), Layer(5.0)])

        def __call__(self, x):
            return [layer(x) for layer in self.layers]

    model = Stack()

    def values():
        _, record = tt.observe(model, "layers/*")(ONE)
        return {site.path[1]: float(site.value) for site in record}

    model.layers.insert(0, Layer(7.0))
    assert values() == {0: 7.0, 1: 2.0, 2: 3.0, 3: 5.0}
    model.layers[0], model.layers[3] = model.layers[3], model.layers[0]
    assert values() == {0: 5.0, 1: 2.0, 2: 3.0, 3: 7.0}
    del model.layers[1]
    assert values() == {0: 5.0, 1: 3.0, 2: 7.0}


KEYS = [
    "x|y",
    "<",
    "%",
    "#1",
    "*",
    "a:b",
    "@",
    "~",
    "!",
    "é ü",
    "a%2Fb",
    "²",
    "a/b",
    "0",
]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("make", [tt.Dict, dict], ids=["Dict", "dict"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_odd_keys_stay_as_they_are(key, make, wrap):
    class Keyed(tt.Module):
        def __init__(self):
            self.d = tt.data(make({key: Layer()}))

        def __call__(self, x):
            return self.d[key](x)

    model = Keyed()
    known = [path for path, _ in tt.iter_modules(model) if path]
    assert paths(wrap(forward), model, ONE) == [("d", key)]
    assert ("d", key) in known


def test_keys_with_a_slash_are_told_apart_from_nesting():
    class Keyed(tt.Module):
        def __init__(self):
            self.d = tt.Dict({"a/b": Layer(2.0), "a": tt.Dict(b=Layer(3.0))})

        def __call__(self, x):
            return self.d["a/b"](self.d["a"].b(x))

    _, state = tt.capture(Keyed(), method_outputs=tt.Intermediate)(ONE)
    assert float(state["d"]["a/b"]["__call__"][0]) == 6.0
    assert float(state["d"]["a"]["b"]["__call__"][0]) == 3.0


# Copies.


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        tt.clone,
        lambda m: tt.merge(*tt.split(m)),
        lambda m: jax.tree.map(lambda x: x, m),
        lambda m: pickle.loads(pickle.dumps(m)),
    ],
    ids=["copy", "deepcopy", "clone", "merge", "tree.map", "pickle"],
)
def test_a_copy_and_its_model_both_have_their_paths(copied):
    model = Containers()
    other = copied(model)
    assert paths(other, ONE) == CONTAINED
    assert paths(model, ONE) == CONTAINED


# Sharing.


class Tied(tt.Module):
    def __init__(self):
        self.first = Layer()
        self.second = tt.Dict(again=self.first)

    def __call__(self, x):
        return self.second.again(self.first(x))


def test_a_shared_module_is_called_by_its_first_path():
    assert texts_of(Tied(), ONE) == ["first:__call__", "first:__call__#1", "__call__"]


@pytest.mark.parametrize("wrap", ["graph", "updates"])
def test_a_shared_module_is_called_by_its_first_path_under_jit(wrap):
    found = texts_of(WRAPS[wrap](forward), Tied(), ONE)
    assert found == ["first:__call__", "first:__call__#1", "__call__"]


class TiedInLists(tt.Module):
    def __init__(self):
        self.layers = tt.data([Layer(), {"deep": (Layer(),)}])
        self.again = tt.data([self.layers[1]["deep"][0], self.layers[0]])

    def __call__(self, x):
        return self.again[1](self.again[0](x))


@pytest.mark.parametrize("wrap", ["eager", "graph", "updates"])
def test_a_module_shared_by_plain_containers_is_called_by_its_first_path(wrap):
    found = texts_of(WRAPS[wrap](forward), TiedInLists(), ONE)
    assert found == ["again/0:__call__", "again/1:__call__", "__call__"]


class Holder(tt.Module):
    def __init__(self, held):
        self.held = tt.data(held)


@pytest.mark.parametrize(
    "hold",
    [
        lambda model: tt.List([model.direct]),
        lambda model: tt.Sequential(model.direct, model.list[0]),
        lambda model: tt.Dict(probe=model.dict),
        lambda model: Holder(model.plain),
    ],
    ids=["List", "Sequential", "Dict", "plain list"],
)
def test_a_module_that_another_object_holds_too_keeps_its_path(hold):
    model = Containers()
    held = hold(model)
    assert paths(model, ONE) == CONTAINED
    del held


def test_threads_give_a_class_one_text():
    from threading import Barrier, Thread

    for _ in range(20):
        cls = type("Fresh", (tt.Module,), {})
        texts, barrier = [], Barrier(8)

        def name(cls=cls, texts=texts, barrier=barrier):
            barrier.wait()
            texts.append(module_paths._class_text(cls))

        threads = [Thread(target=name) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({*texts}) == 1
        assert module_paths.class_named(texts[0]) is cls


def test_arrays_of_the_host_are_no_modules():
    class Table(tt.Module):
        def __init__(self):
            self.rows = tt.data(np.ones(2))
            self.inner = Layer()

        def __call__(self, x):
            return self.inner(x)

    assert texts_of(Table(), ONE) == ["inner:__call__", "__call__"]
