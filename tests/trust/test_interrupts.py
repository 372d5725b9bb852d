# SPDX-License-Identifier: Apache-2.0
"""Interrupts in the middle of a step: everything is as before it, or as after it.

While a step is traced, the interrupt comes from the model itself. While it runs, real
signals come at random moments, to a program of its own. Without donation nothing can
be lost; what donated arrays can lose is in `test_injected_faults.py`.
"""

import contextlib
import pathlib
import random
import select
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from interrupted_program import BROKEN
from steps import loss, step, two_steps

import treetap as tt
from modes import ALL_MODES
from treetap import edits
from treetap._capture.listening import around_methods, listening

PROGRAM = pathlib.Path(__file__).with_name("interrupted_program.py")
X = jnp.arange(12.0).reshape(4, 3) / 12


class Net(tt.Module):
    """A model that is interrupted at the k-th of its moments."""

    moment = 0  # where the interrupt comes; a class attribute, so no part of the tree
    passed = 0

    def __init__(self, *, rngs):
        self.inner = tt.Linear(3, 8, rngs=rngs)
        self.dropout = tt.Dropout(0.25, rngs=rngs)
        self.seen = tt.BatchStat(jnp.zeros(8))
        self.outer = tt.Linear(8, 1, rngs=rngs)

    def here(self):
        Net.passed += 1
        if Net.passed == Net.moment:
            raise KeyboardInterrupt

    def __call__(self, x):
        self.here()
        x = self.inner(x)
        self.seen[...] = 0.9 * self.seen[...] + x.mean(0)
        self.here()
        x = tt.tap(self.dropout(jnp.tanh(x)), "h")
        self.sow(tt.Intermediate, "seen", x)
        self.here()
        return self.outer(x)


@pytest.fixture(autouse=True)
def quiet():
    """Nobody is interrupted, before and afterwards; and nobody listens."""
    tt.set_sow_outside_capture("ignore")
    yield
    tt.set_sow_outside_capture("store")
    Net.moment = Net.passed = 0
    assert listening.value is None
    assert around_methods.value is None


def rematerialised(model, optimizer, x):
    grads = tt.grad(tt.remat(loss))(model, x)
    optimizer.update(model, grads)


def observed(model, optimizer, x):
    return tt.observe(step, "**:h", reduce=[tt.Moments()])(model, optimizer, x)[0]


def captured(model, optimizer, x):
    grads = tt.grad(lambda model, x: tt.capture(loss, tt.Intermediate)(model, x)[0])
    optimizer.update(model, grads(model, x))


def edited(model, optimizer, x):
    return tt.edit(step, {"**:h": edits.scale(0.5)})(model, optimizer, x)


STEPS = {"jit": step, "scan": two_steps, "remat": rematerialised}
HEARD = {"observe": observed, "capture": captured, "edit": edited}


class Trial:
    """A model and an optimizer, and what they hold."""

    def __init__(self):
        Net.moment = 0
        self.model = Net(rngs=tt.Rngs(0))
        self.optimizer = tt.Optimizer(self.model, optax.sgd(0.1, 0.9), wrt=tt.Param)

    def values(self):
        leaves = jax.tree.leaves(tt.state((self.model, self.optimizer)))
        is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        plain = [jax.random.key_data(x) if is_key(x) else x for x in leaves]
        return [np.array(x) for x in plain]

    def run(self, fn, moment=0):
        """One step, which may be interrupted."""
        Net.moment, Net.passed = moment, 0
        return fn(self.model, self.optimizer, X)


def are_same(first, second):
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def check_moments(fn, moments=100):
    """Interrupts at the moments of a trace: nothing happened; the next is right."""
    trial, moment = Trial(), 0
    before = trial.values()
    while moment < moments:
        moment += 1
        try:
            trial.run(fn, moment)
        except KeyboardInterrupt:
            assert are_same(trial.values(), before)
            assert listening.value is None
        else:  # there are no more, and it was traced to the end
            break
    assert moment > 3
    undisturbed = Trial()
    undisturbed.run(fn)
    assert are_same(trial.values(), undisturbed.values())
    assert not are_same(trial.values(), before)


def test_an_interrupt_while_a_step_is_traced():
    check_moments(tt.jit(step))


@pytest.mark.long
@ALL_MODES
@pytest.mark.parametrize("kind", STEPS)
def test_an_interrupt_while_any_step_is_traced(kind, mode):
    check_moments(tt.jit(STEPS[kind], **mode))


@pytest.mark.long
@pytest.mark.parametrize("kind", HEARD)
def test_an_interrupt_while_somebody_listens_to_a_step(kind):
    check_moments(tt.jit(HEARD[kind]))


@pytest.mark.parametrize(
    "around",
    [
        lambda fn: tt.observe(fn),
        lambda fn: tt.observe(fn, grads=True),
        lambda fn: tt.capture(fn, tt.Intermediate),
        lambda fn: tt.edit(fn, {"h": edits.zero()}),
        lambda fn: tt.guard(fn, "h"),
        lambda fn: tt.observe(tt.edit(tt.jit(fn), {"h": edits.scale(2.0)}), "**:h"),
    ],
    ids=["observe", "grads", "capture", "edit", "guard", "nested"],
)
def test_nothing_stays_listening(around):
    trial = Trial()
    trial.model.eval()
    plain = str(jax.make_jaxpr(loss)(trial.model, X))
    Net.passed = 0
    before = jax.tree.leaves(tt.state(trial.model, tt.Param))
    for moment in (1, 2, 3):
        Net.moment, Net.passed = moment, 0
        with pytest.raises(KeyboardInterrupt):
            around(loss)(trial.model, X)
        assert listening.value is None
        assert around_methods.value is None
        # what runs eagerly has done what comes before the interrupt, as Python does
        assert are_same(jax.tree.leaves(tt.state(trial.model, tt.Param)), before)
        Net.moment = 0
        assert str(jax.make_jaxpr(loss)(trial.model, X)) == plain
        assert not tt.state(trial.model, tt.Intermediate)


# Real signals.


class Program:
    """A program that is sent signals, and says how it is afterwards."""

    def __init__(self, seed):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = [sys.executable, "-u", "-W", "ignore", str(PROGRAM)]
        self._process = subprocess.Popen(command, **pipes)
        self._random = random.Random(seed)

    def _line(self, seconds):
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            return ""
        return self._process.stdout.readline().decode().strip() or "it ended"

    def interrupt(self, kind, longest):
        """Lets it work for some time and interrupts it; what it says then."""
        self._process.stdin.write(f"{kind}\n".encode())
        self._process.stdin.flush()
        assert self._line(120) == "ready"
        time.sleep(self._random.uniform(0, longest))
        for _ in range(5):
            self._process.send_signal(signal.SIGINT)
            if told := self._line(10):
                return told
        # it came where Python can only print it, and so did the others
        raise AssertionError(f"{kind} was interrupted and did not stop")

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.terminate()
        self._process.wait()


@pytest.fixture(scope="module")
def program():
    if sys.platform == "win32":
        pytest.skip("needs signals")
    made = Program(seed=7)
    yield made
    made.close()


def check_signals(program, kind, times, longest):
    told = [program.interrupt(kind, longest) for _ in range(times)]
    ours = [text for text in told if text != BROKEN]
    assert len(told) - len(ours) <= 1 + times // 30  # rare, and no fault of ours
    strange = [text for text in ours if text.split()[0] not in ("before", "after")]
    assert not strange
    return ours


def test_signals_while_steps_run(program):
    told = check_signals(program, "jit", 22, 0.02)
    assert len(set(told)) > 8


def test_signals_while_batches_are_appended(program):
    assert len(set(check_signals(program, "store", 10, 0.05))) > 3


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", ["jit", "packed", "graph", "updates", "scan", "observed"]
)
def test_many_signals_while_steps_run(program, kind):
    told = check_signals(program, kind, 300, 0.03)
    assert len(set(told)) > 5


@pytest.mark.long
@pytest.mark.parametrize("kind", ["store", "checkpoint"])
def test_many_signals_while_files_are_written(program, kind):
    check_signals(program, kind, 100, 0.3)
