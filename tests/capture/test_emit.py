# SPDX-License-Identifier: Apache-2.0
"""tap, sow and perturb: silent when nobody listens, and what they refuse."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, jet

import treetap as tt
from modes import NAMED
from treetap import nnx
from treetap._core.settings import sow_capture_noop

I = tt.Intermediate  # noqa: E741 - short, as everywhere in these tests
P = tt.Perturbation
ONE = jnp.array(1.0)


def tapped(x):
    return tt.tap(jnp.sin(tt.tap(x * 2.0, "a")), "b") + 1.0


def untapped(x):
    return jnp.sin(x * 2.0) + 1.0


# Nobody listens.


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: f,
        jax.jit,
        jax.grad,
        lambda f: jax.jit(jax.grad(jax.checkpoint(f))),
        lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x])),
        lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), c), x, None, 3),
    ],
)
def test_outside_a_capture_a_tap_emits_nothing(transform):
    def text_of(f):
        text = str(jax.make_jaxpr(lambda x: transform(f)(x))(1.0))
        return text.replace(f.__name__, "f")

    assert text_of(tapped) == text_of(untapped)


def test_outside_a_capture_a_tap_gives_the_very_object():
    value = {"a": object(), "b": [1, "text"]}
    assert tt.tap(value, "anything") is value


def test_methods_of_modules_add_no_operations():
    class Wave(tt.Module):
        def __call__(self, x):
            return tapped(x)

    model = Wave()
    expected = str(jax.make_jaxpr(untapped)(1.0))
    assert str(jax.make_jaxpr(lambda x: model(x))(1.0)) == expected


def test_a_capture_says_that_it_cannot_see_into_jet():
    fn = lambda x: jet.jet(tapped, (x,), ((1.0,),))
    for call in (fn, jax.jit(fn), jax.grad(lambda x: fn(x)[0])):
        with pytest.raises(tt.CaptureError, match=r"tap '.*' is inside `jax\.exp"):
            tt.observe(call)(0.5)


def test_jet_works_on_tapped_functions():
    series = ((jnp.array(1.0), jnp.array(0.0)),)
    given = jet.jet(tapped, (0.5,), series)
    expected = jet.jet(untapped, (0.5,), series)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, given, expected))


def test_linear_transpose_works_on_tapped_functions():
    transposed = jax.linear_transpose(lambda x: tt.tap(x * 3.0, "a"), 1.0)
    assert float(transposed(2.0)[0]) == 6.0


def test_checkify_works_on_tapped_functions():
    def checked(x):
        checkify.check(tt.tap(x, "a") > 0, "not positive")
        return jnp.log(x)

    error, _ = checkify.checkify(jax.jit(checked))(-1.0)
    assert "not positive" in error.get()
    error, out = checkify.checkify(jax.jit(checked))(1.0)
    assert (error.get(), float(out)) == (None, 0.0)


def test_export_works_on_tapped_functions():
    exported = jax.export.export(jax.jit(tapped))(jnp.array(0.5))
    out = exported.call(jnp.array(0.5))
    np.testing.assert_allclose(out, untapped(0.5), rtol=1e-6)


def test_a_capture_leaves_no_trace_in_what_is_compiled_later():
    fn = jax.jit(tapped)
    before = str(jax.make_jaxpr(fn)(1.0))
    _, record = tt.observe(fn)(1.0)
    assert len(record) == 2
    assert str(jax.make_jaxpr(fn)(1.0)) == before


# tap, heard.


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_trees_are_tapped(wrap):
    def fn(x):
        return tt.tap({"a": x, "b": (x + 1, [x * 2])}, "tree")

    out, record = tt.observe(wrap(fn))(ONE)
    expected = {"a": 1.0, "b": (2.0, [2.0])}
    assert jax.tree.map(float, out) == expected
    assert jax.tree.map(float, record["tree"].value) == expected


@pytest.mark.parametrize("value", ["text", None, {"a": "b"}, object()])
def test_other_values_are_kept_at_the_captures_own_level(value):
    out, record = tt.observe(lambda: tt.tap(value, "v"))()
    assert out is value
    assert record["v"].value == value


@pytest.mark.parametrize("wrap", [jax.jit, jax.vmap, jax.checkpoint])
def test_other_values_are_an_error_in_a_traced_function(wrap):
    def fn(x):
        tt.tap("text", "word")
        return x

    with pytest.raises(tt.CaptureError, match="the value 'word' is a str"):
        tt.observe(wrap(fn))(jnp.ones(2))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.vmap, jax.checkpoint])
@pytest.mark.parametrize("value", [None, (), {"a": None}])
def test_what_has_no_leaves_is_kept_at_any_level(wrap, value):
    class Empty(tt.Module):
        def __call__(self, x):
            self.sow(I, "sown", value)
            assert tt.tap(value, "tapped") == value
            return x

    _, record = tt.observe(wrap(lambda x: Empty()(x)), "**/*pe*")(jnp.ones(2))
    _, state = tt.capture(wrap(lambda m, x: m(x)), I)(Empty(), jnp.ones(2))
    assert record[0].value == value
    assert state["sown"][...] == (value,)


def test_numbers_stay_numbers():
    def fn(x):
        flag = tt.tap(True, "flag")
        return x + tt.tap(2, "two") if flag else x

    out, record = tt.observe(fn)(ONE)
    assert float(out) == 3.0
    assert bool(record["flag"].value) is True
    assert int(record["two"].value) == 2


@pytest.mark.parametrize("name", [0, None, b"a", ("a",), ["a"], ""])
@pytest.mark.parametrize("listen", [False, True])
def test_a_name_that_is_no_string_is_refused(name, listen):
    def fn(x):
        return tt.tap(x, name)

    with pytest.raises(tt.CaptureError, match="tap: a name is a string, not"):
        (tt.observe(fn) if listen else fn)(ONE)


def test_a_capture_of_kinds_does_not_hear_taps():
    _, state = tt.capture(tapped, I, method_outputs=I)(ONE)
    assert dict(state) == {}


def test_typed_keys_and_integers_are_tapped():
    def fn(key, n):
        return tt.tap(key, "key"), tt.tap(n, "n")

    _, record = tt.observe(jax.jit(fn))(jax.random.key(1), 5)
    assert record["key"].value == jax.random.key(1)
    assert int(record["n"].value) == 5
    assert "key<fry>[]" in repr(record)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_only_arrays_are_perturbed(wrap):
    class Wordy(tt.Module):
        def __call__(self, x):
            self.perturb("word", "text")
            return x

    with pytest.raises(tt.CaptureError, match="perturb: the value 'word'"):
        tt.capture(wrap(lambda m, x: m(x)), P)(Wordy(), ONE)


# sow and perturb without a capture.


class Sower(tt.Module):
    def __init__(self):
        self.w = tt.Param(jnp.array(2.0))

    def __call__(self, x):
        self.last = self.sow(I, "x", x)
        return x * self.w


class Bent(tt.Module):
    def __init__(self):
        self.w = tt.Param(jnp.array(2.0))

    def __call__(self, x):
        return self.perturb("p", x) * self.w


def warned_here(caught):
    """Whether the only warning names this file."""
    [warning] = caught
    return warning.filename == __file__ and "outside a capture" in str(warning.message)


def test_sow_outside_a_capture_stores_with_a_warning():
    model = Sower()
    for count in (1, 2):
        with pytest.warns(DeprecationWarning) as caught:
            model(ONE)
        assert warned_here(caught)
        assert model.x[...] == (ONE,) * count
        assert type(model.x) is I
        assert model.last is True


def test_perturb_outside_a_capture_stores_zeros_with_a_warning():
    model = Bent()
    with pytest.warns(DeprecationWarning) as caught:
        assert float(model(ONE)) == 2.0
    assert warned_here(caught)
    assert (type(model.p), float(model.p)) == (P, 0.0)
    model.p[...] = 3.0
    with pytest.warns(DeprecationWarning, match="perturb"):
        assert float(model(ONE)) == 8.0


def test_what_was_stored_is_popped():
    model = Sower()
    with pytest.warns(DeprecationWarning):
        model(ONE)
    state = tt.pop(model, I)
    assert state["x"][...] == (ONE,)
    assert not hasattr(model, "x")


@pytest.mark.parametrize("say", ["sow", "perturb"])
def test_an_attribute_that_is_no_variable_is_refused(say):
    model = Sower()
    model.x = "text"
    call = {
        "sow": lambda: model.sow(I, "x", ONE),
        "perturb": lambda: model.perturb("x", ONE),
    }[say]
    words = f"Sower.{say}: Expected 'x' to be a Variable, got str"
    with pytest.raises(ValueError, match=words):  # and before any warning
        call()
    assert model.x == "text"


def test_an_attribute_of_another_kind_is_refused():
    model = Sower()
    words = "Expected 'w' to be of type 'Intermediate', got 'Param'"
    with pytest.raises(ValueError, match=words):
        model.sow(I, "w", ONE)
    words = "Expected 'w' to be of type 'Perturbation', got 'Param'"
    with pytest.raises(ValueError, match=words):
        model.perturb("w", ONE)
    model.p = P(jnp.array(0.0))
    with pytest.raises(ValueError, match="of type"):
        model.sow(I, "p", ONE)  # a subclass will not do for sow
    with pytest.warns(DeprecationWarning):
        assert float(model.perturb("p", ONE, I)) == 1.0  # but does for perturb


def test_an_attribute_that_is_none_is_refused():
    model = Sower()
    model.x = None
    with pytest.raises(ValueError, match="NoneType"):
        model.sow(I, "x", ONE)
    assert model.x is None


@pytest.mark.parametrize("policy", ["store", "ignore"])
@pytest.mark.parametrize("noop", [True, False])
def test_each_sow_may_say_what_it_does_outside_a_capture(policy, noop):
    class Careful(tt.Module):
        def __call__(self, x):
            self.heard = self.sow(I, "x", x, capture_noop=noop)
            return self.perturb("p", x, capture_noop=noop)

    model = Careful()
    tt.set_sow_outside_capture(policy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert float(model(ONE)) == 1.0
    assert model.heard is not noop
    assert hasattr(model, "x") is hasattr(model, "p") is not noop
    assert len(caught) == (0 if noop else 2)
    if noop:  # a capture is not affected
        _, sown, perturbed = tt.capture(model, I, P)(ONE)
        assert [*sown] == ["x"]
        assert [*perturbed] == ["p"]


def test_sow_outside_a_capture_can_be_ignored():
    tt.set_sow_outside_capture("ignore")
    model, bent = Sower(), Bent()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(model(ONE)) == 2.0
        assert float(bent(ONE)) == 2.0
    assert model.last is False
    assert not hasattr(model, "x")
    assert not hasattr(bent, "p")
    _, state = tt.capture(model, I)(ONE)
    assert state["x"][...] == (ONE,)
    tt.set_sow_outside_capture("store")
    with pytest.warns(DeprecationWarning):
        model(ONE)


@pytest.mark.parametrize("policy", ["drop", "", None, True, []])
def test_other_policies_are_refused(policy):
    with pytest.raises(ValueError, match="'store' or 'ignore'"):
        tt.set_sow_outside_capture(policy)
    assert sow_capture_noop.current_value() is False


class Forgotten(tt.Module):
    """A model with a sow and a perturb that somebody left in."""

    def __init__(self):
        self.w = tt.Param(jnp.array(2.0))

    def __call__(self, x):
        self.sow(I, "seen", x)
        return self.perturb("bent", x) * self.w


def train_step(model, x):
    def loss(model):
        return model(x) ** 2

    gradient = tt.grad(loss)(model)
    model.w[...] -= 0.25 * gradient.w[...]


@pytest.mark.parametrize("mode", ["tree", "graph"])
def test_a_forgotten_sow_is_dropped_from_a_train_step(mode):
    model = Forgotten()
    step = tt.jit(train_step, **NAMED[mode])
    with pytest.warns(DeprecationWarning, match="outside a capture") as caught:
        step(model, ONE)
    kinds = {(w.category, w.filename) for w in caught}
    assert kinds == {(DeprecationWarning, __file__)}
    assert float(model.w) == 1.0
    assert list(vars(model)) == ["w"]
    step(model, ONE)  # compiled: nothing to warn of
    assert float(model.w) == 0.5


def forward(model, x):
    return model(x)


@pytest.mark.parametrize("library", [tt, nnx], ids=["treetap", "nnx"])
def test_with_graph_updates_a_sow_arrives_on_the_model(library):
    model = Forgotten()
    step = library.jit(forward, graph=True, graph_updates=True)
    with pytest.warns(DeprecationWarning, match="outside a capture"):
        assert float(step(model, ONE)) == 2.0
    assert model.seen[...] == (ONE,)
    assert float(model.bent) == 0.0


@pytest.mark.parametrize("mode", NAMED)
@pytest.mark.parametrize(
    "transform",
    [
        lambda f, mode: tt.jit(f, **mode),
        lambda f, mode: tt.value_and_grad(f, **mode),
        lambda f, mode: tt.remat(f, **mode),
    ],
    ids=["jit", "grad", "remat"],
)
def test_a_forgotten_sow_is_no_error_under_any_transform(transform, mode):
    model = Forgotten()
    with pytest.warns(DeprecationWarning, match="outside a capture"):
        transform(forward, NAMED[mode])(model, ONE)
    assert ("seen" in vars(model)) == (mode == "updates")


def test_a_value_may_be_sown_for_a_module_from_outside():
    class Empty(tt.Module):
        pass

    def call(models, x):
        models[1].sow(I, "seen", x)
        return models[1].perturb("moved", x)

    _, record = tt.observe(call)([Empty(), Empty()], ONE)
    assert [site.text for site in record] == ["1:seen", "1:moved"]
