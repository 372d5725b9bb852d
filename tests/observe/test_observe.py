# SPDX-License-Identifier: Apache-2.0
"""observe and sites: values and gradients on the way, without editing the model."""

import functools
import gc
import os
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt
from modes import ALL_MODES
from small_models import ONE, Layer, forward


class Net(tt.Module):
    def __init__(self):
        self.layers = tt.List([Layer(2.0), Layer(3.0)])
        self.head = Layer(5.0)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def texts(record):
    return [site.text for site in record]


def values(record):
    return [float(site.value) for site in record]


NET_SITES = ["layers/0:__call__", "layers/1:__call__", "head:__call__", "__call__"]


# Values.


@pytest.mark.parametrize(
    "wrap",
    [lambda f: f, jax.jit, tt.jit, jax.checkpoint, lambda f: tt.jit(tt.remat(f))],
    ids=["eager", "jax.jit", "tt.jit", "remat", "jit of remat"],
)
def test_an_unedited_model_is_observed_in_order_of_execution(wrap):
    out, record = tt.observe(wrap(forward))(Net(), ONE)
    assert float(out) == 30.0
    assert texts(record) == NET_SITES
    assert values(record) == [2.0, 6.0, 30.0, 30.0]
    assert {site.how for site in record} == {"output"}


def test_modules_and_methods_are_observed():
    net = Net()
    for fn in (net, net.__call__, functools.partial(net), functools.partial(net, ONE)):
        args = () if getattr(fn, "args", ()) else (ONE,)
        assert texts(tt.observe(fn)(*args)[1]) == NET_SITES
    assert tt.observe(forward).__name__ == "forward"


def test_calls_of_one_site_are_counted():
    def thrice(layer, x):
        return layer(layer(layer(x)))

    expected = ["__call__", "__call__#1", "__call__#2"]
    for fn in (thrice, jax.jit(thrice)):
        _, record = tt.observe(fn)(Layer(), ONE)
        assert texts(record) == expected
        assert values(record) == [2.0, 4.0, 8.0]
        assert [site.index for site in record] == [0, 1, 2]


def test_one_jitted_function_for_many_layers_has_many_sites():
    traces = []

    @jax.jit
    def block(layer, x):
        traces.append(1)
        return layer(x)

    class Stack(tt.Module):
        def __init__(self):
            self.blocks = tt.List([Layer(float(n)) for n in range(1, 25)])

        def __call__(self, x):
            for one in self.blocks:
                x = x + block(one, x)
            return x

    _, record = tt.observe(Stack())(ONE)
    assert len(traces) == 1
    assert len(set(texts(record))) == len(record) == 25


def test_values_can_be_left_out():
    _, record = tt.observe(jax.grad(forward), values=False, grads=True)(Net(), ONE)
    assert [site.value for site in record] == [None] * 4
    assert [float(site.grad) for site in record] == [15.0, 5.0, 1.0, 1.0]
    _, record = tt.observe(forward, values=False)(Net(), ONE)
    assert jax.tree.leaves(record) == []


def test_a_function_without_sites_gives_an_empty_record():
    out, record = tt.observe(lambda x: x + 1)(ONE)
    assert float(out) == 2.0
    assert len(record) == 0


def test_everything_sown_perturbed_and_tapped_is_a_site():
    class Talking(tt.Module):
        def __call__(self, x):
            self.sow(tt.Intermediate, "s", x)
            x = self.perturb("p", x + 1)
            return tt.tap(x * 2, "t")

    _, record = tt.observe(Talking())(ONE)
    found = [(site.name, site.how, site.kind, float(site.value)) for site in record]
    assert found == [
        ("s", "sow", tt.Intermediate, 1.0),
        ("p", "perturb", tt.Perturbation, 2.0),
        ("t", "tap", None, 4.0),
        ("__call__", "output", tt.Intermediate, 4.0),
    ]


def test_each_site_has_a_text_of_its_own():
    class Twofold(tt.Module):
        def __call__(self, x):
            self.sow(tt.Intermediate, "x", x)
            return tt.tap(x + 1, "x")

    _, record = tt.observe(Twofold())(ONE)
    assert len(set(texts(record))) == len(record) == 3


def test_values_under_loops_have_an_axis_and_say_so():
    def scanned(layer, xs):
        return jax.lax.scan(lambda c, x: (c + layer(x), None), 0.0, xs)[0]

    _, record = tt.observe(scanned)(Layer(), jnp.arange(3.0))
    assert record[0].wraps == ("scan",)
    assert record[0].value.tolist() == [0.0, 2.0, 4.0]


def test_branches_and_loops_have_flags():
    def fn(x):
        x = jax.lax.cond(x > 0, lambda x: tt.tap(x, "yes"), lambda x: -x, x)
        return jax.lax.while_loop(lambda x: x < 9, lambda x: tt.tap(x * 2, "w"), x)

    _, record = tt.observe(fn)(ONE)
    assert bool(record["yes"].taken) is True
    assert (int(record["w"].count), float(record["w"].value)) == (4, 16.0)
    _, record = tt.observe(fn)(-ONE)
    assert bool(record["yes"].taken) is False
    assert float(record["yes"].value) == 0.0


def test_eager_code_stays_eager():
    def fn(x):
        y = tt.tap(x * 2, "y")
        return y + 1 if float(y) > 1 else np.asarray(y)

    out, record = tt.observe(fn)(ONE)
    assert (float(out), values(record)) == (3.0, [2.0])


# Gradients.


@pytest.mark.parametrize("library", [jax, tt], ids=["jax", "treetap"])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_an_unedited_model(library, compiled):
    fn = library.value_and_grad(forward)
    (loss, _), record = tt.observe(library.jit(fn) if compiled else fn, grads=True)(
        Net(), ONE
    )
    assert float(loss) == 30.0
    assert texts(record) == NET_SITES
    assert values(record) == [2.0, 6.0, 30.0, 30.0]
    assert [float(site.grad) for site in record] == [15.0, 5.0, 1.0, 1.0]


def test_each_call_has_a_gradient_of_its_own():
    def loss(layer, x):
        return layer(layer(layer(x)))

    _, record = tt.observe(jax.jit(jax.grad(loss)), grads=True)(Layer(), ONE)
    assert [float(site.grad) for site in record] == [4.0, 2.0, 1.0]


def test_a_value_the_loss_does_not_use_has_zeros():
    def loss(w):
        tt.tap(w * 3, "unused")
        dead = tt.tap(jnp.ones(2) * w, "dead")
        return tt.tap(w * 2, "used") + jax.lax.stop_gradient(dead).sum()

    for fn in (jax.grad(loss), jax.jit(jax.grad(loss))):
        _, record = tt.observe(fn, "*", grads=True)(ONE)
        assert float(record["unused"].grad) == 0.0
        assert record["dead"].grad.tolist() == [0.0, 0.0]
        assert float(record["used"].grad) == 1.0


def test_trees_have_trees_of_gradients_and_integers_none():
    def loss(w):
        tree = tt.tap({"a": w * 2, "n": jnp.array(3), "b": (w * 5,)}, "tree")
        return tree["a"] * tree["b"][0]

    _, record = tt.observe(jax.grad(loss), grads=True)(ONE)
    grad = record["tree"].grad
    assert (float(grad["a"]), float(grad["b"][0]), grad["n"]) == (5.0, 2.0, None)


def test_repeated_differentiation_lists_gradients_by_order():
    def loss(x):
        return tt.tap(x**3, "h") ** 2

    _, record = tt.observe(jax.grad(jax.grad(loss)), grads=True)(2.0)
    assert [float(grad) for grad in record["h"].grad] == [16.0, 24.0]


def test_values_that_have_no_gradient_have_none_unless_selected():
    def loss(w, x):
        tt.tap(x * 2, "upstream")
        tt.tap(jax.lax.stop_gradient(w), "stopped")
        return tt.tap(w * x, "h")

    _, record = tt.observe(jax.grad(loss), grads=True)(ONE, ONE)
    assert record["upstream"].grad is None
    assert record["stopped"].grad is None
    assert float(record["h"].grad) == 1.0
    for name in ("upstream", "stopped"):
        with pytest.raises(tt.CaptureError) as caught:
            tt.observe(jax.grad(loss), name, grads=True)(ONE, ONE)
        message = str(caught.value)
        assert f"observe: {name} has no gradient" in message
        assert "depends on nothing that is differentiated" in message
        assert "`perturb`" in message
        assert "`init`" in message


@pytest.mark.parametrize("select", [None, "h"])
def test_observe_inside_the_differentiation_is_an_error_with_the_remedy(select):
    def loss(w):
        out, _ = tt.observe(lambda w: tt.tap(w * 2, "h"), select, grads=True)(w)
        return out

    with pytest.raises(tt.CaptureError, match=r"observe\(jax.grad\(loss\)"):
        jax.grad(loss)(ONE)


def test_observe_without_differentiation_has_no_gradients():
    with pytest.raises(tt.CaptureError, match="no value has a gradient"):
        tt.observe(forward, grads=True)(Net(), ONE)


def test_a_sown_value_has_no_gradient():
    class Sower(Layer):
        def __call__(self, x):
            x = x * self.by
            self.sow(tt.Intermediate, "v", x)
            return x

    with pytest.raises(tt.CaptureError, match=r"v is sown, and .* Use `tap`"):
        tt.observe(jax.grad(forward), "v", grads=True)(Sower(), ONE)


def test_a_value_inside_a_custom_rule_has_no_gradient():
    @jax.custom_vjp
    def double(x):
        return tt.tap(x * 2, "inside")

    double.defvjp(lambda x: (double(x), None), lambda _, g: (g * 2,))
    with pytest.raises(tt.CaptureError, match="inside has no gradient"):
        tt.observe(jax.grad(double), "inside", grads=True)(ONE)


# State.


class Noisy(tt.Module):
    def __init__(self):
        self.w = tt.Param(jnp.array(2.0))
        self.calls = tt.Variable(jnp.array(0))
        self.rngs = tt.Rngs(0)

    def __call__(self, x):
        self.calls[...] += 1
        return tt.tap(x * self.w, "h") + jax.random.normal(self.rngs(), ())


@ALL_MODES
@pytest.mark.parametrize("compiled", [False, True])
def test_state_advances_once(mode, compiled):
    observed, plain = Noisy(), Noisy()
    step = tt.value_and_grad(forward, **mode)
    step = tt.jit(step, **mode) if compiled else step
    for n in (1, 2):
        (out, _), record = tt.observe(step, grads=True)(observed, ONE)
        expected, _ = step(plain, ONE)
        assert float(out) == pytest.approx(float(expected))
        assert float(record["h"].grad) == 1.0
        assert int(observed.calls) == int(plain.calls) == n
        assert int(observed.rngs.default.count) == n


# Selection.


def test_only_what_is_selected_is_recorded():
    _, record = tt.observe(forward, "layers/*")(Net(), ONE)
    assert texts(record) == NET_SITES[:2]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_selector_that_matches_nothing_lists_near_misses(wrap):
    with pytest.raises(tt.CaptureError) as caught:
        tt.observe(wrap(forward), "layer/0")(Net(), ONE)
    message = str(caught.value)
    assert message.startswith("observe: Select('layer/0') matches none of 4 sites.")
    assert "layers/0:__call__" in message


def test_a_selector_for_a_model_without_sites_says_so():
    with pytest.raises(tt.CaptureError, match="there are no sites at all"):
        tt.observe(lambda x: x, "h")(ONE)


@pytest.mark.parametrize("select", ["nope", "h"], ids=["nothing", "no gradient"])
def test_a_call_that_is_refused_changes_nothing(select):
    model = Noisy()
    with pytest.raises(tt.CaptureError):
        tt.observe(forward, select, grads=True)(model, ONE)
    assert (int(model.calls), int(model.rngs.default.count)) == (0, 0)


# sites.


@pytest.mark.parametrize("form", ["module", "method", "function", "grad", "partial"])
def test_sites_lists_without_running_or_changing(form):
    model = Noisy()
    x = jax.ShapeDtypeStruct((), jnp.float32)
    fn, args = {
        "module": (model, (x,)),
        "method": (model.__call__, (x,)),
        "function": (forward, (model, x)),
        "grad": (tt.jit(tt.grad(forward)), (model, x)),
        "partial": (functools.partial(forward, model), (x,)),
    }[form]
    record = tt.sites(fn, *args)
    assert texts(record) == ["h", "__call__"]
    assert (int(model.calls), int(model.rngs.default.count)) == (0, 0)
    assert record["h"].value == jax.ShapeDtypeStruct((), jnp.float32)


def test_sites_of_a_jitted_method_changes_nothing():
    class Jitted(Noisy):
        @tt.jit
        def run(self, x):
            return self(x)

    model = Jitted()
    assert texts(tt.sites(model.run, ONE)) == ["h", "__call__", "run"]
    assert int(model.calls) == 0


def test_sites_tells_the_memory_before_it_is_paid():
    x = jax.ShapeDtypeStruct((1024, 1024, 1024, 64), jnp.float32)
    record = tt.sites(Net(), x)
    assert texts(record) == NET_SITES
    assert record.nbytes == 4 * 4 * 64 * 1024**3
    assert record[0].shape == x.shape


def test_sites_takes_abstract_models_keywords_and_selectors():
    net = tt.eval_shape(Net)
    record = tt.sites(forward, net, x=ONE, select="head")
    assert texts(record) == ["head:__call__"]
    with pytest.raises(tt.CaptureError, match="matches none"):
        tt.sites(forward, net, ONE, select="nope")


def test_sites_under_a_scan_have_its_axis():
    def scanned(layer, xs):
        return jax.lax.scan(lambda c, x: (c + layer(x), None), 0.0, xs)[0]

    record = tt.sites(scanned, Layer(), jnp.arange(3.0))
    assert (record[0].shape, record[0].wraps) == ((3,), ("scan",))


def test_a_misspelt_method_is_told_the_methods_there_are():
    class Layer(tt.Module):
        def __call__(self, x):
            return 2 * x

    with pytest.raises(tt.CaptureError, match=r"Near it are:\n  __call__"):
        tt.observe(Layer(), "**:__cal__")(jnp.ones(2))


def test_a_value_heard_by_two_captures_has_a_path_for_each():
    class Inner(tt.Module):
        def __call__(self, x):
            self.sow(tt.Intermediate, "seen", x)
            return x

    class Outer(tt.Module):
        def __init__(self):
            self.part = Inner()

        def __call__(self, x):
            _, self_record = tt.observe(self.part, "**:seen")(x)
            assert [site.text for site in self_record] == ["seen"]
            return x

    _, record = tt.observe(Outer(), "**:seen")(jnp.ones(2))
    assert [site.text for site in record] == ["part:seen"]


@pytest.mark.parametrize("wrap", [tt.observe, tt.capture])
def test_what_cannot_be_called_is_refused_when_it_is_wrapped(wrap):
    with pytest.raises(TypeError, match="expected a Module, a method or a function"):
        wrap(3)


class Halves(tt.Module):
    def __init__(self):
        self.w = tt.Param(jnp.full((3,), 0.5))

    def __call__(self, x):
        return tt.tap(x * self.w, "h")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("how", ["observe", "capture"])
def test_values_are_let_go_with_the_record(how, compiled):
    model = Halves()
    fn = tt.jit(Halves.__call__) if compiled else Halves.__call__
    if how == "observe":
        run = tt.observe(fn)
    else:
        run = tt.capture(fn, tt.Intermediate, method_outputs=tt.Intermediate)
    run(model, jnp.ones(3))
    gc.collect()
    gc.disable()
    try:
        before = len(jax.live_arrays())
        for _ in range(5):
            run(model, jnp.ones(3))
        assert len(jax.live_arrays()) == before
    finally:
        gc.enable()


def test_who_listened_is_let_go_at_once():
    def chosen(site):
        return True

    known = weakref.ref(chosen)
    gc.disable()
    try:
        tt.observe(lambda x: tt.tap(x, "h"), chosen)(1.0)
        del chosen
        assert known() is None
    finally:
        gc.enable()


def test_an_observed_step_still_gives_its_operands_away():
    model = Halves()
    before = model.w[...]

    @functools.partial(tt.jit, donate_argnums=0)
    def step(model, x):
        out = model(x)
        model.w[...] -= 0.1
        return out

    _, record = tt.observe(step)(model, jnp.ones(3))
    assert before.is_deleted()
    assert record["h"].value.tolist() == [0.5, 0.5, 0.5]
    assert np.allclose(model.w[...], 0.4)


def test_what_was_recorded_is_not_given_away():
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    inner = jax.jit(lambda x: tt.tap(x + 1, "inner"), donate_argnums=0)

    def run(x, step):
        return step(tt.tap(x * 2, "h"))

    for fn in (step, inner):
        _, record = tt.observe(run)(jnp.ones(3), fn)
        if fn is inner:
            assert record["inner"].value.tolist() == [3.0, 3.0, 3.0]
        assert record["h"].value.tolist() == [2.0, 2.0, 2.0]


def test_after_a_refusal_nobody_is_left_with_a_buffer_that_was_given_away():
    model = Halves()

    @functools.partial(tt.jit, donate_argnums=0)
    def step(model, x):
        model(x)
        model.w[...] -= 0.1

    with pytest.raises(tt.CaptureError):
        tt.observe(step, "nowhere:h")(model, jnp.ones(3))
    assert np.isfinite(model.w[...]).all()


# JAX notices a lack of memory at the call, or later, when the result is there, and
# `observe` does not wait for that. Here the devices work while the call waits.
OUT_OF_MEMORY = """
import jax, jax.numpy as jnp, treetap as tt

jax.config.update("jax_cpu_enable_async_dispatch", False)
STEPS = 10**9  # machines promise more memory than there is


class Deep(tt.Module):
    def __init__(self):
        self.w, self.count = tt.Param(jnp.ones(10**6)), tt.BatchStat(jnp.array(0))

    def __call__(self, x):
        self.count[...] += 1
        body = lambda x, _: (tt.tap(x * self.w[...], "h"), None)
        x, _ = jax.lax.scan(body, x, None, length=STEPS)
        return tt.tap(x, "out").sum()


model = Deep()
try:
    tt.observe(model, ["h", "out"])(jnp.ones(10**6))
except jax.errors.JaxRuntimeError as error:
    assert "Out of memory" in str(error), error
    print(*error.__notes__)
print("count", model.count[...])
"""


def test_out_of_memory_comes_with_a_bill_and_changes_nothing():
    told = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "the 2 values that are kept take 4000.0 TB, the largest:" in told
    assert "4000.0 TB  h\n" in told
    assert "`reduce`" in told
    assert told.endswith("count 0\n")


def test_a_call_does_not_wait_for_its_results():
    @jax.jit
    def slow(x):
        for _ in range(10):
            x = jnp.sin(x @ x)
        return tt.tap(x, "h")

    call, x = tt.observe(slow), jnp.ones((1000, 1000))
    jax.block_until_ready(call(x))
    out, _ = call(x)
    assert not out.is_ready()
    out.block_until_ready()


def test_sites_takes_flags_as_they_are():
    class Net(tt.Module):
        def __call__(self, x, train=False, times=1):
            for _ in range(times):
                x = tt.tap(2 * x, "twice")
            return tt.tap(x, "train") if train else x

    x = jnp.ones(3)
    listed = tt.sites(Net(), x, train=True, times=2)
    assert [site.text for site in listed] == ["twice", "twice#1", "train", "__call__"]
    assert len(tt.sites(Net(), jax.ShapeDtypeStruct((3,), "float32"))) == 2


class Tied(tt.Module):
    def __init__(self, *, rngs):
        self.one = tt.Linear(2, 2, rngs=rngs)
        self.two = self.one

    def __call__(self, x):
        return self.two(self.one(x)).sum()


@pytest.mark.parametrize("transform", [tt.jit, tt.value_and_grad, tt.remat])
def test_a_shared_module_has_one_name_in_every_transform(transform):
    model, x = Tied(rngs=tt.Rngs(0)), jnp.ones((1, 2))
    wanted = ["one:__call__", "one:__call__#1", "__call__"]
    run = transform(lambda model, x: model(x), graph=True)
    for fn in (lambda model, x: model(x), run):
        _, record = tt.observe(fn)(model, x)
        assert [site.text for site in record] == wanted


def test_a_selector_may_ask_for_types():
    def call(x):
        return tt.tap({"a": x, "n": 3}, "both"), tt.tap(x.astype(jnp.int32), "whole")

    _, record = tt.observe(call, lambda site: site.dtype == jnp.int32)(ONE)
    assert [site.text for site in record] == ["whole"]


def failing(text):
    def call(x):
        tt.tap(x, "h")
        raise jax.errors.JaxRuntimeError(text)

    return call


@pytest.mark.parametrize(
    ("text", "notes"),
    [
        ("INTERNAL: something else", []),
        ("RESOURCE_EXHAUSTED: Out of memory", ["observe: only statistics are kept; "]),
    ],
)
def test_other_errors_and_statistics_come_without_a_bill(text, notes):
    with pytest.raises(jax.errors.JaxRuntimeError, match=text) as raised:
        tt.observe(failing(text), reduce=[tt.AbsMax()])(ONE)
    found = getattr(raised.value, "__notes__", [])
    assert [note[: len(start)] for note, start in zip(found, notes)] == notes
    assert len(found) == len(notes)


def test_values_that_are_no_arrays_are_listed_by_their_class():
    class Note(tt.Module):
        def __call__(self, x):
            self.sow(tt.Intermediate, "note", "a text")
            return x

    (note, _) = tt.sites(Note(), ONE)
    assert note.value == "a text"
    _, record = tt.observe(Note())(ONE)
    assert "note      sow     str" in str(record)


class Plain:
    """Not a Module: its methods are functions like others."""

    factor = 2.0

    def scaled(self, x):
        return tt.tap(x * self.factor, "scaled")


def test_a_method_of_any_object_can_be_listed_and_blamed():
    assert [site.text for site in tt.sites(Plain().scaled, 1.0)] == ["scaled"]
    assert tt.blame(Plain().scaled)(jnp.inf).argument == "x"
    assert not tt.blame(Plain().scaled)(1.0)


def test_statistics_of_turns_in_which_no_row_took_a_branch_are_zeros():
    def turn(carry, bound):
        row = lambda x: jax.lax.cond(x > bound, lambda: tt.tap(x, "t"), lambda: 0.0)
        return carry, jax.vmap(row)(jnp.array([1.0, 2.0]))

    fn = lambda bounds: jax.lax.scan(turn, 0.0, bounds)[1]
    _, record = tt.observe(fn, reduce=tt.AbsMax())(jnp.array([0.0, 5.0]))
    np.testing.assert_array_equal(record["t"].stats["abs_max"], [2.0, 0.0])
