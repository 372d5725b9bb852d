# SPDX-License-Identifier: Apache-2.0
"""The one wrapper around a Module's methods."""

import functools
import inspect
import pickle
import traceback

import jax
import jax.numpy as jnp
import pytest
from jax.extend import source_info_util

import treetap as tt


class Scale(tt.Module):
    def __init__(self, by=2.0):
        self.by = tt.Param(jnp.array(by))

    def __call__(self, x):
        """Scales."""
        return x * self.by

    def public(self, x, *, twice=False):
        return x * self.by * (2 if twice else 1)

    def _private(self, x):
        return x * self.by


class Net(tt.Module):
    def __init__(self):
        self.first = Scale()
        self.blocks = tt.List([Scale(), Scale()])
        self.plain = tt.data([Scale(), {"deep": Scale()}])
        self.named = tt.Dict(x=Scale())

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        x = self.plain[1]["deep"](self.plain[0](x))
        return self.named.x(x)


def scopes(fn, *args):
    """The name stacks of the operations a function traces to."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    return [str(eqn.source_info.name_stack) for eqn in jaxpr.eqns]


def test_operations_carry_the_keys_of_their_modules():
    found = scopes(lambda net, x: net(x), Net(), 1.0)
    expected = ["first", "0", "1", "plain/0", "plain/1/deep", "x"]
    assert found == [f"Net/{name}" for name in expected]


def test_compiled_programs_show_module_names():
    text = jax.jit(lambda net, x: net(x)).lower(Net(), 1.0).as_text(debug_info=True)
    assert "Net/first" in text


def test_keys_survive_merging_cloning_and_views():
    net = Net()
    expected = scopes(lambda net, x: net(x), net, 1.0)
    for copied in (
        tt.merge(*tt.split(net)),
        tt.merge(*tt.split(net, graph=True)),
        tt.clone(net),
        tt.view(net),
        pickle.loads(pickle.dumps(net)),
        tt.recursive_map(lambda path, value: value, net),
    ):
        assert scopes(lambda x, copied=copied: copied(x), 1.0) == expected


def test_a_moved_module_takes_the_new_key():
    net = Net()
    net.second = net.first
    net.first = Scale()
    assert scopes(lambda x: net.second(x), 1.0) == ["second"]
    net.blocks.insert(0, Scale())
    assert scopes(lambda x: net.blocks[1](x), 1.0) == ["1"]


def test_a_module_without_a_parent_is_called_by_its_class():
    assert scopes(lambda x: Scale()(x), 1.0)[-1] == "Scale"


def test_the_key_is_no_part_of_structure_or_attributes():
    net = Net()
    alone = Scale()
    assert jax.tree.structure(net.first) == jax.tree.structure(alone)
    assert tt.graphdef(net.first) == tt.graphdef(net.blocks[1])
    assert list(vars(net.first)) == ["by"]


def test_one_trace_serves_all_siblings():
    traces = []

    @jax.jit
    def apply(block, x):
        traces.append(1)
        return block(x)

    for block in Net().blocks:
        apply(block, 1.0)
    assert traces == [1]


def test_public_methods_are_scoped_and_private_ones_are_not():
    scale = Scale()
    assert scopes(lambda x: scale.public(x), 1.0)[0] == "Scale"
    assert scopes(lambda x: scale._private(x), 1.0) == [""]


def test_super_opens_no_second_scope():
    class Derived(Scale):
        def __call__(self, x):
            return super().__call__(x) + 1

    found = scopes(lambda x: Derived()(x), 1.0)
    assert set(found) <= {"", "Derived"}
    assert "Derived" in found


def test_inherited_methods_are_scoped_by_the_class_of_the_object():
    class Plain(Scale):
        pass

    assert scopes(lambda x: Plain()(x), 1.0)[-1] == "Plain"


def test_recursion_opens_a_scope_each_time():
    class Down(tt.Module):
        def __call__(self, x, depth):
            return self(x * 2, depth - 1) if depth else x

    assert scopes(lambda x: Down()(x, 2), 1.0) == ["Down", "Down/Down"]


def test_decorated_methods_are_scoped():
    def twice(fn):
        @functools.wraps(fn)
        def call(self, x):
            return fn(self, fn(self, x))

        return call

    class Decorated(tt.Module):
        @twice
        def double(self, x):
            return x * 2

        @jax.jit
        def jitted(self, x):
            return x * 3

        @functools.partial(jax.jit, static_argnames="power")
        def powered(self, x, power=2):
            return x**power

    module = Decorated()
    assert scopes(lambda x: module.double(x), 1.0) == ["Decorated", "Decorated"]
    assert scopes(lambda x: module.jitted(x), 1.0) == ["Decorated"]
    assert module.powered(3.0, power=2) == 9.0
    assert "stablehlo" in Decorated.jitted.lower(module, 1.0).as_text()


def test_what_is_no_method_is_left_alone():
    class Mixed(tt.Module):
        @staticmethod
        def static(x):
            return x * 2

        @classmethod
        def made(cls):
            return cls()

        @property
        def size(self):
            return 3

        class Inner:
            pass

        activation = staticmethod(jnp.sin)

    mixed = Mixed.made()
    assert mixed.static(2) == 4
    assert mixed.size == 3
    assert isinstance(mixed.Inner(), Mixed.Inner)
    assert isinstance(vars(Mixed)["static"], staticmethod)
    assert isinstance(vars(Mixed)["made"], classmethod)
    assert vars(Mixed)["activation"].__func__ is jnp.sin


def test_own_methods_of_modules_are_left_alone():
    class Quiet(Scale):
        def train(self, **attributes):
            super().train(**attributes)

    assert not hasattr(vars(Quiet)["train"], "__wrapped__")
    assert not hasattr(vars(tt.Module)["eval"], "__wrapped__")


def test_signatures_names_and_docs_are_kept():
    assert str(inspect.signature(Scale.public)) == "(self, x, *, twice=False)"
    assert str(inspect.signature(Scale().public)) == "(x, *, twice=False)"
    assert Scale.__call__.__doc__ == "Scales."
    assert Scale.public.__qualname__ == "Scale.public"
    assert Scale.public.__module__ == __name__


def test_methods_pickle():
    assert pickle.loads(pickle.dumps(Scale.public)) is Scale.public
    bound = pickle.loads(pickle.dumps(Scale().public))
    assert bound(3.0) == 6.0


def test_tracebacks_show_the_users_line():
    class Broken(tt.Module):
        def __call__(self, x):
            raise RuntimeError("here")  # the line to be seen

    with pytest.raises(RuntimeError, match="here") as caught:
        jax.jit(lambda x: Broken()(x))(1.0)
    shown = "".join(traceback.format_exception(caught.value))
    assert "the line to be seen" in shown


def test_operations_point_at_the_users_file():
    jaxpr = jax.make_jaxpr(lambda x: Scale()(x))(1.0)
    place = source_info_util.summarize(jaxpr.eqns[-1].source_info)
    assert "test_methods.py" in place


def test_a_wrapper_is_made_once_per_function():
    class Base(tt.Module):
        def run(self, x):
            return x

    class Alias(Base):
        again = Base.run

    assert vars(Alias)["again"] is Base.run
