# SPDX-License-Identifier: Apache-2.0
"""capture: what it may be given to begin with, and errors that change nothing."""

import functools

import jax
import jax.numpy as jnp
import pytest

import treetap as tt

I = tt.Intermediate  # noqa: E741 - short, as everywhere in these tests
P = tt.Perturbation
ONE = jnp.array(1.0)


class Layer(tt.Module):
    def __init__(self, by=2.0):
        self.by = tt.Param(jnp.array(by))

    def __call__(self, x):
        self.sow(I, "x", x)
        return x * self.by


def forward(model, x):
    return model(x)


def numbers(state):
    """A State as plain numbers."""
    return jax.tree.map(lambda x: jnp.asarray(x).tolist(), tt.to_pure_dict(state))


class Bent(tt.Module):
    def __init__(self):
        self.calls = tt.Variable(jnp.array(0))
        self.inner = Layer()

    def __call__(self, x):
        self.calls[...] += 1
        self.sow(I, "x", x)
        return self.inner(self.perturb("p", x))


def test_sow_continues_from_init():
    init = tt.State({"x": I((jnp.array(1.0),))})
    _, state = tt.capture(lambda m, x: m(x), I, init=init)(Layer(), jnp.array(5.0))
    assert numbers(state) == {"x": (1.0, 5.0)}
    assert numbers(init) == {"x": (1.0,)}


def test_kinds_that_are_only_in_init_are_not_returned():
    init = {"p": P(jnp.array(1.0))}
    out = tt.capture(Bent(), init=init)(ONE)
    assert float(out) == 4.0
    out, state = tt.capture(Bent(), I, init=init)(ONE)
    assert numbers(state) == {"inner": {"x": (2.0,)}, "x": (1.0,)}


def test_perturbations_are_zeros_like_the_values():
    out, state = tt.capture(Bent(), P)(jnp.ones((2, 3), jnp.bfloat16))
    assert out.shape == (2, 3)
    assert (state["p"].shape, state["p"].dtype) == ((2, 3), jnp.bfloat16)
    assert not state["p"][...].any()


def test_one_name_used_twice_has_the_sum_of_gradients():
    class Around(tt.Module):
        def __call__(self, x):
            return 3 * self.perturb("p", 2 * self.perturb("p", x))

    model = Around()
    zeros = tt.capture(model, P)(ONE)[1]
    gradient = jax.grad(lambda p: tt.capture(model, init=p)(ONE))(zeros)
    assert numbers(gradient) == {"p": 9.0}


@pytest.mark.parametrize(
    ("init", "words"),
    [
        ({"p": P(jnp.zeros(2))}, r"`init` has at p values of shape"),
        ({"p": P((jnp.array(0.0),))}, r"`init` has at p values"),
        ({"inner": {"p": P(jnp.array(0.0))}}, r"nothing in the call uses.*inner:p"),
        ({"p": I(jnp.array(0.0))}, r"nothing in the call uses.* p\."),
        ({"p": jnp.array(0.0)}, r"`init` has a .*Array.* at .*p.*State of Variables"),
        ({"inner": {"x": 1.0}}, r"`init` has a float"),
        ({"x": I(jnp.array(0.0))}, r"x"),
    ],
    ids=["shape", "tree", "path", "kind", "array", "number", "no tuple"],
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_a_wrong_init_is_an_error_that_changes_nothing(init, words, compiled):
    model = Bent()
    before = dict(vars(model))
    fn = tt.jit(forward) if compiled else forward
    with pytest.raises(tt.CaptureError, match=words):
        tt.capture(fn, I, init=init)(model, ONE)
    assert int(model.calls) == 0
    assert dict(vars(model)) == before


@pytest.mark.parametrize("form", ["module", "method", "partial"])
def test_a_wrong_init_changes_nothing_in_any_form(form):
    model = Bent()
    fn = {
        "module": model,
        "method": model.__call__,
        "partial": functools.partial(forward, model),
    }[form]
    with pytest.raises(tt.CaptureError, match="nothing in the call uses"):
        tt.capture(fn, init={"nope": P(ONE)})(ONE)
    assert int(model.calls) == 0


@pytest.mark.parametrize("init", [P(jnp.array(0.0)), jnp.zeros(2), 3])
def test_an_init_that_is_no_state_is_an_error(init):
    with pytest.raises(tt.CaptureError, match="`init`"):
        tt.capture(Bent(), init=init)(ONE)


def test_a_name_that_is_also_a_childs_is_an_error_that_names_it():
    class Clash(tt.Module):
        def __init__(self):
            self.c = tt.List([Layer()])
            self.calls = tt.Variable(jnp.array(0))

        def first(self, x):
            self.calls[...] += 1
            self.sow(I, "c", x)
            return self.c[0](x)

        def last(self, x):
            out = self.c[0](x)
            self.sow(I, "c", x)
            return out

    for method in (Clash().first, Clash().last):
        with pytest.raises(tt.CaptureError, match="c is a value and also the start of"):
            tt.capture(method, I)(ONE)
    with pytest.raises(tt.CaptureError, match="another name in `sow`"):
        tt.capture(tt.jit(lambda m, x: m.first(x)), I)(Clash(), ONE)
    model = Clash()
    with pytest.raises(tt.CaptureError):
        tt.capture(model.first, I)(ONE)
    assert int(model.calls) == 0


class Perturber(tt.Module):
    def __init__(self, how=lambda module, x: module.perturb("p", x)):
        self.how = how
        self.w = tt.Param(jnp.array(2.0))

    def __call__(self, x):
        return self.how(self, x)


def lists(tree):
    """A tree of arrays, or a State of them, as plain numbers and lists."""
    if isinstance(tree, tt.State):
        tree = tt.to_pure_dict(tree)
    return jax.tree.map(lambda x: x.tolist(), tree)


def test_tuples_are_perturbed_leaf_by_leaf():
    model = Perturber()
    pair = (jnp.array(1.0), jnp.array([2.0, 3.0]))
    out, state = tt.capture(model, tt.Perturbation)(pair)
    assert lists(out) == (1.0, [2.0, 3.0])
    assert lists(state) == {"p": (0.0, [0.0, 0.0])}
    more = jax.tree.map(lambda x: x + 10, state)
    assert lists(tt.capture(model, init=more)(pair)) == (11.0, [12.0, 13.0])


def test_dicts_are_perturbed_leaf_by_leaf():
    model, value = Perturber(), {"a": jnp.array(1.0)}
    out, state = tt.capture(model, tt.Perturbation)(value)
    assert (lists(out), lists(state)) == ({"a": 1.0}, {"p": {"a": 0.0}})
    more = jax.tree.map(lambda x: x + 10, state)
    assert lists(tt.capture(model, init=more)(value)) == {"a": 11.0}


def test_one_name_with_two_shapes_is_an_error():
    def both(module, x):
        module.perturb("p", x)
        return module.perturb("p", x[0])

    with pytest.raises(tt.CaptureError, match=r"perturb: p .*different types"):
        tt.capture(Perturber(both), tt.Perturbation)(jnp.ones(3))


@pytest.mark.parametrize("shape", [(), (2,), (1, 3)])
def test_init_of_another_shape_is_an_error(shape):
    init = tt.State({"p": tt.Perturbation(jnp.zeros(shape))})
    with pytest.raises(tt.CaptureError, match=r"`init` has at p values of shape"):
        tt.capture(Perturber(), init=init)(jnp.ones(3))


def test_unknown_paths_and_raw_arrays_in_init_are_errors():
    model = Perturber()
    with pytest.raises(tt.CaptureError, match="nope:p"):
        tt.capture(model, init={"nope": {"p": tt.Perturbation(jnp.zeros(3))}})(
            jnp.ones(3)
        )
    with pytest.raises(tt.CaptureError, match="State of Variables"):
        tt.capture(model, init={"p": jnp.zeros(3)})(jnp.ones(3))
