# SPDX-License-Identifier: Apache-2.0
"""`treetap.nnx`: the same library under NNX's names and defaults."""

import inspect
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from treetap import nnx


class Tied(nnx.Module):
    def __init__(self):
        self.a = nnx.Param(jnp.ones(2))
        self.b = self.a
        self.me = self


def test_classes_are_the_same_in_both_namespaces():
    for name in set(tt.__all__) & set(nnx.__all__):
        ours, theirs = getattr(tt, name), getattr(nnx, name)
        if inspect.isclass(ours) and name not in (
            "set_graph_mode",
            "set_graph_updates",
        ):
            assert ours is theirs, name


@pytest.mark.parametrize(
    "call",
    [
        lambda m: nnx.split(m),
        lambda m: nnx.state(m),
        lambda m: nnx.clone(m),
        lambda m: nnx.graphdef(m),
        lambda m: nnx.unpack(m),
        lambda m: list(nnx.iter_graph(m)),
        lambda m: list(nnx.iter_modules(m)),
        lambda m: nnx.view(m),
        lambda m: nnx.with_attributes(m, me=m),
        lambda m: nnx.view_info(m),
        lambda m: nnx.map(lambda path, leaf: leaf, m),
        lambda m: nnx.flatten(m),
        lambda m: nnx.variables(m),
    ],
)
def test_functions_keep_shared_references_by_default(call):
    call(Tied())
    with nnx.set_graph_mode(False), pytest.raises(tt.AliasError):
        call(Tied())


def test_the_argument_wins_over_setting_and_namespace():
    with pytest.raises(tt.AliasError):
        nnx.split(Tied(), graph=False)
    with tt.set_graph_mode(False):
        assert nnx.split(Tied(), graph=True)
    assert tt.split(Tied(), graph=True)


def test_one_setting_serves_both_namespaces_with_two_defaults():
    assert nnx.set_graph_mode.current_value() is True
    assert tt.set_graph_mode.current_value() is False
    assert nnx.set_graph_updates.current_value() is True
    with nnx.set_graph_mode(True):
        assert tt.set_graph_mode.current_value() is True
        assert tt.split(Tied())
    with tt.set_graph_mode(False):
        assert nnx.set_graph_mode.current_value() is False


@pytest.mark.parametrize(
    ("flag", "expected"), [("0", "False False"), ("yes", "True True")]
)
def test_the_environment_presets_the_mode(flag, expected):
    program = (
        "import treetap as tt; from treetap import nnx;"
        "print(tt.set_graph_mode.current_value(), nnx.set_graph_mode.current_value())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "NNX_GRAPH_MODE": flag, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == expected


def test_signatures_and_docs_are_those_of_the_library():
    assert inspect.signature(nnx.split) == inspect.signature(tt.split)
    assert nnx.split.__doc__ == tt.split.__doc__


def test_objects_are_no_pytrees():
    class Holder(nnx.Object):
        def __init__(self):
            self.parts = [nnx.Param(jnp.ones(2))]

    class Derived(Holder):
        pass

    holder = Derived()
    assert jax.tree.leaves(holder) == [holder]
    again = nnx.merge(*nnx.split(holder))
    assert (again.parts[0][...] == 1).all()
    with pytest.raises(tt.AttributeStatusError, match="an Object is not a pytree"):

        class Wrong(nnx.Object, pytree=True):
            pass


def test_display_prints_outside_a_notebook(capsys):
    nnx.display(nnx.Param(1.0), 3)
    assert capsys.readouterr().out == "Param(\n  value=1.0\n)\n3\n"


def test_an_nnx_program_runs():
    class Linear(nnx.Module):
        def __init__(self, din, dout, *, rngs: nnx.Rngs):
            init = nnx.with_metadata(jax.nn.initializers.lecun_normal(), role="kernel")
            self.w = nnx.Param(init(rngs.params(), (din, dout)))
            self.b = nnx.Param(jnp.zeros((1, dout)))
            self.count = nnx.BatchStat(jnp.array(0))

        def __call__(self, x):
            self.count[...] += 1
            return x @ self.w + self.b

    model = Linear(2, 3, rngs=nnx.Rngs(0))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def loss_and_state(params, rest, x):
        model = nnx.merge(graphdef, params, rest)
        loss = (model(x) ** 2).sum()
        return loss, nnx.state(model, nnx.BatchStat)

    _, rest = loss_and_state(params, rest, jnp.ones((4, 2)))
    nnx.update(model, rest)
    assert model.count[...] == 1
    assert model.w.role == "kernel"
