# SPDX-License-Identifier: Apache-2.0
"""`treetap.nnx`: the same library under NNX's names and defaults."""

import inspect
import os
import subprocess
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import pytest
import treescope

import treetap as tt
from modes import GRAPH, TREE
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
            if name in ("EMA", "Optimizer"):  # in graph mode by default
                assert issubclass(theirs, ours)
                continue
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


def grow(m):
    m.note = "new"
    return jnp.sum(m.a[...])


DEFAULTS = {
    "jit": lambda m: nnx.jit(grow)(m),
    "remat": lambda m: nnx.remat(grow)(m),
    "grad": lambda m: nnx.grad(grow)(m),
    "value_and_grad": lambda m: nnx.value_and_grad(grow)(m),
    "vjp": lambda m: nnx.vjp(grow, m),
    "vmap": lambda m: nnx.vmap(grow, in_axes=None, axis_size=2)(m),
    "cond": lambda m: nnx.cond(True, grow, grow, m),
    "switch": lambda m: nnx.switch(0, [grow, grow], m),
    "checkify": lambda m: nnx.checkify(grow)(m),
    "decorated": lambda m: nnx.jit(keep_unused=True)(grow)(m),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_transforms_carry_structure_out_by_default(name):
    model = Tied()
    DEFAULTS[name](model)
    assert model.note == "new"
    assert model.b is model.a
    assert model.me is model


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_settings_turn_graph_updates_off(name):
    model = Tied()
    with nnx.set_graph_updates(False), warnings.catch_warnings():
        warnings.simplefilter("error")
        DEFAULTS[name](model)
    assert not hasattr(model, "note")
    with nnx.set_graph_mode(False), pytest.raises(tt.AliasError):
        DEFAULTS[name](model)


@pytest.mark.parametrize("transform", ["remat", "custom_vjp", "jit"])
def test_static_attributes_that_change_inside_draw_a_warning_in_treetap(transform):
    def changing(model, x):
        model.note = "new"
        return x * jnp.sum(model.a)

    def made(space, **options):
        fn = getattr(space, transform)(changing, **options)
        if transform == "custom_vjp":
            fn.defvjp(lambda m, x: (changing(m, x), m), lambda m, g: (m, g))
        return fn

    model = nnx.Dict(a=nnx.Param(jnp.ones(2)))
    nnx_only = made(nnx, graph_updates=False)
    assert float(nnx_only(model, 1.0)) == 2.0
    grow = lambda model: setattr(model, "b", nnx.Param(1.0))
    nnx.jit(grow, graph_updates=False)(model)  # as there, nothing is said
    with pytest.raises(tt.StructureError, match=r"data attribute .*b was created"):
        tt.jit(grow)(model)
    with pytest.warns(UserWarning, match="static attribute"):
        made(tt)(model, 1.0)


def test_what_has_no_graph_updates_says_so():
    text = r"nnx\.make_jaxpr does not support graph_updates=True"
    with pytest.raises(ValueError, match=text):
        nnx.make_jaxpr(grow)
    with pytest.raises(ValueError, match="graph_updates=True"):
        nnx.jit_partial(grow, Tied())
    assert len(nnx.make_jaxpr(jnp.sin, graph_updates=False)(1.0).eqns) == 1
    made = nnx.jit_partial(lambda m: jnp.sum(m.b[...]), Tied(), graph_updates=False)
    assert float(made()) == 2.0


def test_metadata_follow_the_axis_of_a_model_with_shared_parameters():
    model = nnx.Dict(a=nnx.Param(jnp.ones((2, 3))))
    model.b = model.a
    total = nnx.transform_metadata(lambda m: jnp.sum(m.b[...]), partition="x")
    assert nnx.vmap(total)(model).tolist() == [3.0, 3.0]
    with nnx.set_graph_mode(False), pytest.raises(tt.AliasError):
        nnx.transform_metadata(lambda m: m, partition="x")(model)


def test_averages_are_kept_of_shared_parameters():
    model = Tied()
    average = nnx.EMA(model, 0.5)
    assert average.graph
    average.update(model)


@pytest.mark.parametrize("in_notebook", [True, False])
def test_objects_are_shown_by_treescope_in_a_notebook(in_notebook, monkeypatch, capsys):
    shown = []
    shell = types.ModuleType("IPython.core.getipython")
    shell.get_ipython = lambda: object() if in_notebook else None
    for name in ("IPython", "IPython.core"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, shell.__name__, shell)
    monkeypatch.setattr(treescope, "display", shown.append)
    nnx.display("one", "two")
    assert shown == (["one", "two"] if in_notebook else [])
    assert capsys.readouterr().out == ("" if in_notebook else "one\ntwo\n")


class Parts(nnx.Module):
    def __init__(self):
        self.a, self.b = nnx.Param(jnp.array(1.0)), nnx.Param(jnp.array(2.0))
        self.n = 1


def swap(model):
    model.a, model.b = model.b, model.a
    model.n = 5
    model.a[...] += 10
    return model.a * 1


STAYING = {
    "jit": lambda f, model, mode: nnx.jit(f, **mode)(model),
    "remat": lambda f, model, mode: nnx.remat(f, **mode)(model),
    "grad": lambda f, model, mode: nnx.grad(f, has_aux=False, **mode)(model).b,
    "cond": lambda f, model, mode: nnx.cond(True, f, f, model, **mode),
}


@pytest.mark.parametrize("mode", [GRAPH, TREE], ids=["graph", "tree"])
@pytest.mark.parametrize("name", STAYING)
def test_changes_of_structure_without_graph_updates_stay_inside(name, mode):
    model = Parts()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        STAYING[name](swap, model, mode)
    assert (float(model.a), float(model.b), model.n) == (1.0, 12.0, 1)
    with tt.structure_policy("error"), pytest.raises(tt.StructureError):
        STAYING[name](swap, model, mode)
    with pytest.raises(tt.StructureError, match="was replaced"):
        STAYING[name](swap, model, {**mode, "on_structure_change": "error"})
    with pytest.raises(tt.StructureError, match="was replaced"):
        tt.jit(swap, **mode)(model)
