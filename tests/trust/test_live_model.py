# SPDX-License-Identifier: Apache-2.0
"""A live model against a simple one: whatever is done to it, in any order.

The model is a tree of Modules whose Variables are assigned, shared, replaced, deleted,
transformed, captured, copied, taken apart and stored. Beside it stands a reference of
plain dicts and numpy arrays, in which a shared Variable is a number that stands twice.
After each step both must be the same, and so must what is shared with what.
"""

import contextlib
import pathlib
import tempfile

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import treetap as tt

NAMES = ("a", "b", "c")
numbers = st.integers(-4, 4).map(float)
chances = st.integers(0, 1_000_000)


class Box(tt.Module):
    """A Module that anything can be put into."""


class Interrupted(Exception):
    """Raised in the middle of a function."""


def variables_of(model):
    return [
        x for _, x in tt.iter_graph(model, graph=True) if isinstance(x, tt.Variable)
    ]


def grow(model):
    for variable in variables_of(model):
        variable[...] = 2 * variable[...] + 1


def total(model):
    return sum((jnp.sum(v[...] ** 2) for v in variables_of(model)), jnp.zeros(()))


def grow_and_raise(model):
    grow(model)
    raise Interrupted


def grow_thrice(model):
    def body(model, _):
        grow(model)
        return model, None

    tt.scan(body, in_axes=(tt.Carry, 0), out_axes=(tt.Carry, 0), **GRAPH)(
        model, jnp.arange(3)
    )


def mapped_total(model):
    scaled = lambda model, x: x * total(model)
    return tt.vmap(scaled, in_axes=(None, 0), **GRAPH)(model, jnp.arange(3.0))


def tapped(model):
    for number, variable in enumerate(variables_of(model)):
        tt.tap(variable[...], f"v{number}")
    return total(model)


GRAPH = {"graph": True}
GROW = {graph: tt.jit(grow, graph=graph) for graph in (False, True)}
GROW["donated"] = tt.jit(grow, donate_argnums=0)
GROW["packed"] = tt.jit(grow, pack=True)
RAISE = {graph: tt.jit(grow_and_raise, graph=graph) for graph in (False, True)}
THRICE = tt.jit(grow_thrice, graph=True)
MAPPED = tt.jit(mapped_total, graph=True)


class LiveModel(RuleBasedStateMachine):
    """The model, and the reference: by name a number, or a dict; values by number."""

    def __init__(self):
        super().__init__()
        self.model, self.tree = Box(), {}
        self.values = {}
        self.count = 0

    # The reference.

    def nodes(self):
        """All Modules with their references."""
        found, rest = [], [(self.model, self.tree)]
        while rest:
            module, tree = rest.pop()
            found.append((module, tree))
            rest += [
                (getattr(module, name), held)
                for name, held in tree.items()
                if isinstance(held, dict)
            ]
        return found

    def places(self):
        """All Variables: Module, its reference, and the name."""
        return [
            (module, tree, name)
            for module, tree in self.nodes()
            for name, held in sorted(tree.items())
            if not isinstance(held, dict)
        ]

    def is_shared(self):
        numbers = [tree[name] for _, tree, name in self.places()]
        return len(numbers) != len({*numbers})

    def live(self):
        """The numbers of the Variables that are there."""
        return {tree[name] for _, tree, name in self.places()}

    def grown(self, times=1):
        for number in self.live():
            for _ in range(times):
                self.values[number] = 2 * self.values[number] + 1

    def pick(self, choice, things):
        return things[choice % len(things)]

    def put(self, module, tree, name, value):
        self.count += 1
        setattr(module, name, tt.Param(jnp.full(2, value)))
        tree[name], self.values[self.count] = self.count, np.full(2, value, np.float32)

    def has_variables(self):
        return bool(self.places())

    # Changes.

    @rule(choice=chances, name=st.sampled_from(NAMES), value=numbers)
    def put_a_variable(self, choice, name, value):
        self.put(*self.pick(choice, self.nodes()), name, value)

    @rule(choice=chances, name=st.sampled_from(NAMES))
    def put_a_module(self, choice, name):
        module, tree = self.pick(choice, self.nodes())
        setattr(module, name, Box())
        tree[name] = {}

    @precondition(has_variables)
    @rule(choice=chances)
    def delete(self, choice):
        module, tree, name = self.pick(choice, self.places())
        delattr(module, name)
        del tree[name]

    @precondition(has_variables)
    @rule(choice=chances, other=chances, name=st.sampled_from(NAMES))
    def share(self, choice, other, name):
        module, tree, held = self.pick(choice, self.places())
        variable, number = getattr(module, held), tree[held]
        target, reference = self.pick(other, self.nodes())
        setattr(target, name, variable)
        reference[name] = number

    @precondition(has_variables)
    @rule(choice=chances, value=numbers)
    def assign(self, choice, value):
        module, tree, name = self.pick(choice, self.places())
        getattr(module, name)[...] = jnp.full(2, value)
        self.values[tree[name]] = np.full(2, value, np.float32)

    @precondition(has_variables)
    @rule(choice=chances, value=numbers)
    def replace_by_another(self, choice, value):
        module, tree, name = self.pick(choice, self.places())
        self.put(module, tree, name, value)

    @precondition(has_variables)
    @rule(choice=chances, tag=st.integers(0, 2))
    def change_metadata(self, choice, tag):
        module, _, name = self.pick(choice, self.places())
        getattr(module, name).set_metadata(tag=tag)

    # Transforms.

    def refusing(self, graph):
        """In tree mode what is shared is refused, and nothing changes."""
        if self.is_shared() and graph is not True:
            return pytest.raises(tt.AliasError)
        return contextlib.nullcontext()

    @rule(graph=st.sampled_from([False, True, "donated", "packed"]))
    def call_a_jitted_function(self, graph):
        with self.refusing(graph):
            GROW[graph](self.model)
            self.grown()

    @rule(graph=st.booleans())
    def raise_in_the_middle(self, graph):
        with pytest.raises((Interrupted, tt.AliasError)):
            RAISE[graph](self.model)

    @rule()
    def scan(self):
        THRICE(self.model)
        self.grown(3)

    @rule()
    def vmap(self):
        wanted = sum(np.sum(self.values[n] ** 2) for n in self.live())
        np.testing.assert_allclose(
            MAPPED(self.model), np.arange(3.0) * wanted, rtol=1e-4
        )

    @precondition(has_variables)
    @rule()
    def differentiate(self):
        grads = tt.grad(total, graph=True)(self.model)
        found = {
            str(path): np.asarray(x) for path, x in tt.iter_graph(grads, graph=True)
        }
        arrays = [x for x in found.values() if x.dtype == np.float32]
        wanted = {tuple(2 * self.values[n]) for n in self.live()}
        assert {tuple(x) for x in arrays} == wanted

    @precondition(has_variables)
    @rule()
    def observe(self):
        _, record = tt.observe(tapped)(self.model)
        found = sorted(tuple(np.asarray(site.value)) for site in record)
        assert found == sorted(tuple(self.values[n]) for n in self.live())

    # Copies and files.

    @rule()
    def clone(self):
        old = self.model
        self.model = tt.clone(old, graph=True)
        kept = [np.asarray(v[...]) for v in variables_of(old)]
        grow(self.model)
        self.grown()
        for before, variable in zip(kept, variables_of(old), strict=True):
            np.testing.assert_array_equal(before, variable[...])

    @rule()
    def split_and_merge(self):
        self.model = tt.merge(*tt.split(self.model, graph=True))

    @rule()
    def take_state_and_put_it_back(self):
        state = jax.tree.map(jnp.copy, tt.state(self.model, graph=True))
        grow(self.model)
        tt.update(self.model, state)

    @precondition(lambda self: self.has_variables() and not self.is_shared())
    @rule()
    def store_and_load(self):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "model.safetensors"
            tt.save_weights(file, self.model)
            grow(self.model)
            tt.load_weights(file, self.model)

    # What must hold after each.

    @invariant()
    def both_are_the_same(self):
        seen = {}
        for module, tree in self.nodes():
            held = {
                name: x
                for name, x in vars(module).items()
                if isinstance(x, Box | tt.Variable)
            }
            assert held.keys() == tree.keys()
        for module, tree, name in self.places():
            variable, number = getattr(module, name), tree[name]
            assert seen.setdefault(number, variable) is variable
            np.testing.assert_allclose(variable[...], self.values[number], rtol=1e-5)
        assert len({id(x) for x in seen.values()}) == len(seen)


LiveModel.TestCase.settings = settings(
    max_examples=settings().max_examples,
    stateful_step_count=25,
    deadline=None,
)
test_a_live_model = LiveModel.TestCase
