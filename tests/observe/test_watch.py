# SPDX-License-Identifier: Apache-2.0
"""watch: a training that is watched is the same training."""

import functools
import gc
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_loggers import read

import modes
import treetap as tt

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)


class Net(tt.Module):
    def __init__(self, rngs):
        self.first = tt.Linear(4, 8, use_bias=False, rngs=rngs)
        self.norm = tt.BatchNorm(8, rngs=rngs)
        self.dropout = tt.Dropout(0.2, rngs=rngs)
        self.last = tt.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(jax.nn.relu(self.norm(self.first(x)))))


class Meter(tt.Module):
    def __init__(self):
        self.total = tt.Variable(jnp.array(0.0))

    def __call__(self, x):
        self.total[...] += x
        return tt.tap(self.total[...], "total")


def update(model, optimizer, x):
    def loss_of(model):
        return jnp.mean((model(x) - 1) ** 2)

    loss, grads = tt.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def new():
    model = Net(tt.Rngs(0))
    return model, tt.Optimizer(model, optax.adam(1e-2), wrt=tt.Param)


class Notes(list):
    """Keeps steps and records."""

    def __call__(self, record, step):
        self.append((step, record))


def trained(step, calls=7):
    model, optimizer = new()
    losses = [float(step(model, optimizer, X + n)) for n in range(calls)]
    return losses, tt.to_pure_dict(tt.state((model, optimizer), tt.Not(tt.RngKey)))


def assert_close(first, second, **limits):
    """An observed program is another one, and XLA may round otherwise in it."""
    close = functools.partial(np.testing.assert_allclose, **limits)
    jax.tree.map(close, first, second)


def test_a_watched_training_is_the_same():
    step, notes = tt.jit(update), Notes()
    watched = tt.watch(step, 3, to=notes)
    (losses, state), (seen, after) = trained(step), trained(watched)
    assert_close((losses, state), (seen, after), rtol=1e-5, atol=1e-7)
    assert [number for number, _ in notes] == [0, 3, 6]
    assert watched.step == 7
    assert watched.last is notes[-1][1]


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=() if mode == "tree" else pytest.mark.long)
        for mode in modes.NAMED
    ],
)
def test_with_gradients_it_is_the_same_to_rounding(mode):
    step = tt.jit(update, **modes.NAMED[mode])
    watched = tt.watch(step, 3, to=Notes(), grads=True)
    (losses, state), (seen, after) = trained(step), trained(watched)
    assert_close((losses, state), (seen, after), rtol=1e-4, atol=1e-5)
    figures, grad = watched.last.figures()["model/first:__call__"]
    assert figures.count == 16 * 8
    assert grad.norm > 0


def test_donated_arguments_of_a_jit_are_donated():
    def step(state, x):
        return jax.tree.map(lambda leaf: tt.tap(leaf + jnp.sum(x), "s"), state)

    watched = tt.watch(tt.jit(step, donate_argnums=0), 1, to=Notes())
    state = jnp.ones((4, 4))
    out = watched(state, X)
    assert state.is_deleted()
    assert not out.is_deleted()
    meter, before = Meter(), Meter()
    old = meter.total[...]
    watched = tt.watch(tt.jit(Meter.__call__, donate_argnums=0), 2, to=Notes())
    seen = [float(watched(meter, x)) for x in (1.0, 2.0, 4.0)]
    assert seen == [float(before(x)) for x in (1.0, 2.0, 4.0)]
    assert old.is_deleted()
    assert float(meter.total[...]) == 7.0


def test_a_step_that_is_not_compiled_is_watched_too():
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.sum(tt.tap(w * x, "h") ** 2))(w)

    w = first = jnp.ones(4)
    notes = Notes()
    watched = tt.watch(step, 1, to=notes, grads=True)
    for row in X[:3]:
        first, w = step(first, row), watched(w, row)
    assert np.allclose(first, w, rtol=1e-5)
    assert len(notes) == 3
    assert notes[0][1]["h"].grad_figures.norm > 0


def test_static_arguments():
    def step(x, power, *, name):
        return tt.tap(x**power, name)

    notes = Notes()
    known = tt.jit(step, static_argnums=1, static_argnames="name")
    watched = tt.watch(known, 1, to=notes)
    assert watched(2.0, 3, name="a") == 8.0
    assert watched(2.0, power=2, name="b") == 4.0
    assert [record[0].text for _, record in notes] == ["a", "b"]
    told = {"static_argnums": 1, "static_argnames": "name"}
    watched = tt.watch(jax.jit(step, **told), 1, to=notes, **told)
    assert watched(2.0, 3, name="c") == 8.0


class Power(tt.Module):
    def __init__(self):
        self.scale = tt.Param(jnp.array(2.0))

    def __call__(self, x, power):
        assert isinstance(power, int)  # it is static
        return tt.tap(self.scale * x**power, "h")


@pytest.mark.parametrize(
    "told",
    [{"static_argnums": 1}, {"static_argnums": -1}, {"static_argnames": "power"}],
)
def test_arguments_of_a_module_are_counted_as_in_its_call(told):
    for fn in (Power(), Power().__call__):
        notes = Notes()
        watched = tt.watch(fn, 1, to=notes, **told)
        assert watched(3.0, 2) == 18.0
        assert [record[0].path for _, record in notes] == [()]


def test_out_shardings_are_kept():
    here = jax.sharding.SingleDeviceSharding(jax.devices()[-1])

    def step(x):
        return tt.tap(2 * x, "h")

    watched = tt.watch(tt.jit(step, out_shardings=here), 1, to=Notes())
    assert watched(jnp.ones(3)).devices() == {jax.devices()[-1]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of JAX, of `device`
def test_the_device_is_kept():
    here = jax.devices()[-1]
    watched = tt.watch(tt.jit(lambda x: tt.tap(2 * x, "h"), device=here), 1, to=Notes())
    assert watched(jnp.ones(3)).devices() == {here}


def test_modules_and_methods():
    for make in (lambda meter: meter, lambda meter: meter.__call__):
        meter, notes = Meter(), Notes()
        watched = tt.watch(make(meter), 2, "total", to=notes)
        assert [float(watched(x)) for x in (1.0, 2.0, 4.0)] == [1.0, 3.0, 7.0]
        assert float(meter.total[...]) == 7.0
        assert [record[0].figures.mean for _, record in notes] == [1.0, 7.0]


@pytest.mark.parametrize("fix", [tt.jit_partial, functools.partial])
def test_fixed_arguments(fix):
    def step(meter, x):
        return meter(x)

    meter, notes = Meter(), Notes()
    watched = tt.watch(fix(step, meter), 2, to=notes)
    assert [float(watched(x)) for x in (1.0, 2.0, 4.0)] == [1.0, 3.0, 7.0]
    assert float(meter.total[...]) == 7.0
    assert [site.text for site in notes[1][1]] == ["total", "__call__"]
    named = tt.watch(functools.partial(step, x=1.0), 1, to=notes)
    assert named(meter) == 8.0
    assert named(meter, x=2.0) == 10.0


@pytest.mark.parametrize("base", [object, tt.Module])
def test_a_method_can_be_watched_where_it_is_defined(base):
    notes = Notes()

    class Twice(base):
        @functools.partial(tt.watch, to=notes)
        @functools.partial(tt.jit, static_argnums=0 if base is object else ())
        def twice(self, x):
            return tt.tap(2 * x, "h")

    assert Twice().twice(3.0) == 6.0
    assert callable(Twice.twice)
    assert notes[0][1][-1].name in ("h", "twice")


def test_it_is_compiled_once():
    traced = []

    def step(x):
        traced.append(1)
        return tt.tap(x + 1, "h")

    watched = tt.watch(jax.jit(step), 2, to=Notes())
    for n in range(9):
        assert watched(jnp.array(float(n))) == n + 1
    assert len(traced) == 2  # the function, and the program with statistics


def test_a_folder_is_written_and_closed(tmp_path):
    with tt.watch(tt.jit(update), 2, "model/*", to=tmp_path, grads=True) as watched:
        trained(watched, 3)
    events = read(tmp_path)
    tag = "model/first:__call__/grad/norm"
    assert [event.step for event in events.Scalars(tag)] == [0, 2]
    last = watched.last["model/first:__call__"]
    assert events.Scalars(tag)[-1].value == np.float32(last.grad_figures.norm)
    histogram = events.Histograms("model/first:__call__/values")[-1].histogram_value
    assert sum(histogram.bucket) == 16 * 8
    record = watched.last
    trained(watched, 4)  # no longer watched
    assert watched.last is record


def test_a_writer_that_was_given_stays_open(tmp_path):
    with tt.EventWriter(tmp_path) as writer:
        watched = tt.watch(lambda x: tt.tap(x, "h"), to=writer)
        watched(jnp.ones(3))
        watched.close()
        watched.close()
        writer.add_scalar("after", 1.0, 0)
    assert set(read(tmp_path).Tags()["scalars"]) >= {"after", "h/norm"}


def test_a_training_that_continues_counts_on():
    notes = Notes()
    watched = tt.watch(lambda x: tt.tap(x, "h"), 10, to=notes)
    watched.step = 998
    for _ in range(4):
        watched(1.0)
    assert [step for step, _ in notes] == [1000]


def test_a_call_that_fails_does_not_count():
    def step(x):
        raise RuntimeError("no")

    watched = tt.watch(step, to=Notes())
    with pytest.raises(RuntimeError, match="no"):
        watched(1.0)
    assert watched.step == 0


def test_old_records_are_let_go():
    alive = []
    keep = lambda record, step: alive.append(weakref.ref(record))
    watched = tt.watch(lambda x: tt.tap(x, "h"), 1, to=keep)
    for _ in range(4):
        watched(jnp.ones(3))
    gc.collect()
    assert [ref() is not None for ref in alive] == [False, False, False, True]


def test_the_other_calls_cost_next_to_nothing():
    def nothing(x):
        return x

    watched = tt.watch(nothing, 10**9, to=Notes())
    watched(1.0)

    def cost(fn):
        best = float("inf")
        for _ in range(20):
            start = time.process_time()
            for _ in range(2000):
                fn(1.0)
            best = min(best, time.process_time() - start)
        return best / 2000

    assert cost(watched) - cost(nothing) < 2e-6


def test_errors():
    with pytest.raises(TypeError, match="watch: expected a Module"):
        tt.watch(3, to=print)
    with pytest.raises(TypeError, match=r"watch: cannot write to a int\. Give a"):
        tt.watch(len, to=3)
    for every in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="`every` is"):
            tt.watch(len, every, to=print)
    with pytest.raises(ValueError, match="`reduce` is None"):
        tt.watch(len, to=print, reduce=None)
    with pytest.raises(tt.CaptureError, match="is no reducer"):
        tt.watch(len, to=print, reduce=[3])
    with pytest.raises(tt.CaptureError, match="nowhere"):
        tt.watch(lambda x: tt.tap(x, "h"), 1, "nowhere", to=print)(1.0)
