# SPDX-License-Identifier: Apache-2.0
"""A program that is interrupted by real signals, and looks at what it has then.

It reads lines that name a kind of work, does that work until SIGINT comes, checks that
everything is as before a step or as after one, and tells it: `before 12` or what is
wrong. `test_interrupts.py` sends the lines and the signals.
"""

import os
import pathlib
import signal
import sys
import tempfile
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
from steps import step, two_steps

import treetap as tt
from treetap._observe.records import Record, Site

STEPS = 60
X = jnp.arange(12.0).reshape(4, 3) / 12


class Net(tt.Module):
    def __init__(self, *, rngs):
        self.inner = tt.Linear(3, 8, rngs=rngs)
        self.dropout = tt.Dropout(0.25, rngs=rngs)
        self.norm = tt.BatchNorm(8, rngs=rngs)
        self.outer = tt.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.dropout(jnp.tanh(self.norm(self.inner(x)))))


KINDS = {
    "jit": lambda: tt.jit(step),
    "packed": lambda: tt.jit(step, pack=True),
    "graph": lambda: tt.jit(step, graph=True),
    "updates": lambda: tt.jit(step, graph=True, graph_updates=True),
    "scan": lambda: tt.jit(two_steps),
    "observed": lambda: tt.observe(tt.jit(step), "**/norm"),
}


class Training:
    """A model, its optimizer, and what they hold after each step undisturbed."""

    def __init__(self, kind):
        self.step = KINDS[kind]()
        self.begin()
        self.wanted = [self.values()]
        for _ in range(STEPS):
            self.do()
            self.wanted.append(self.values())
        self.begin()

    def begin(self):
        model = Net(rngs=tt.Rngs(0))
        optimizer = tt.Optimizer(model, optax.adam(0.01), wrt=tt.Param)
        self.held = [model, optimizer, 0]  # at once: an interrupt may come in between

    def do(self):
        model, optimizer, _ = self.held
        self.step(model, optimizer, X)
        self.held[2] += 1

    def values(self):
        leaves = jax.tree.leaves(tt.state(self.held[:2]))
        is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        plain = [jax.random.key_data(x) if is_key(x) else x for x in leaves]
        return [np.asarray(x) for x in plain]

    def until_interrupted(self):
        """Trains; the interrupt may come at any moment."""
        while True:
            self._begin_again()
            self.do()

    def _begin_again(self):
        if self.held[2] + 3 >= len(self.wanted):
            self.begin()

    def _is_at(self, number):
        pairs = zip(self.values(), self.wanted[number], strict=True)
        # counts are equal; floats may be rounded by another program, and a step is 0.01
        return all(np.allclose(a, b, 0, 1e-4 * (a.dtype.kind == "f")) for a, b in pairs)

    def outcome(self):
        """Whether the objects are before or after the step; then does the next."""
        count = self.held[2]
        told = f"between steps, at {count}"
        for how, number in (("before", count), ("after", count + 1)):
            if self._is_at(number):
                self.held[2] = number
                self.do()
                is_right = self._is_at(number + 1)
                told = f"{how if is_right else 'a wrong step after'} {number}"
                break
        self._begin_again()
        return told


class Saving:
    """A checkpoint that is replaced again and again."""

    def __init__(self, _):
        self._folder = tempfile.TemporaryDirectory()
        self.path = pathlib.Path(self._folder.name, "last")
        self.count = self.saved = 0
        self._save()

    def _save(self):
        value = jnp.full((50,), self.count)
        tt.save_checkpoint(self.path, {"n": value, "m": value}, overwrite=True)
        self.saved = self.count

    def until_interrupted(self):
        """Saves; each time another number."""
        while True:
            self.count += 1
            self._save()

    def outcome(self):
        """Whether the checkpoint is the last or the one before, and alone."""
        like = {"n": jnp.zeros(50, int), "m": jnp.zeros(50, int)}
        found = tt.restore_checkpoint(self.path, like)
        number = int(found["n"][0])
        if number not in (self.count, self.saved):
            return f"the checkpoint {number}, and {self.saved} was the last"
        if not all((part == number).all() for part in found.values()):
            return "half of a checkpoint"
        if os.listdir(self.path.parent) != ["last"]:
            return f"rests: {os.listdir(self.path.parent)}"
        self.saved = number
        return f"{'after' if number == self.count else 'before'} {number}"


class Appending:
    """A store to which batches are appended.

    A batch that was interrupted may be kept or not; one that was acknowledged is.
    """

    def __init__(self, _):
        self._folder = tempfile.TemporaryDirectory()
        self.path = pathlib.Path(self._folder.name, "runs")
        self.writer = tt.StoreWriter(self.path)
        self.tries = 0
        self.kept = {}  # by number, the try that was acknowledged

    def _append(self):
        self.tries += 1
        site = Site(np.full((3, 40), self.tries, np.float32), name="a")
        told = {"try": self.tries}
        self.kept[self.writer.append(Record((site,)), told)] = told

    def until_interrupted(self):
        """Appends; a batch counts when `append` has returned."""
        while True:
            self._append()

    def outcome(self):
        """Whether all that was acknowledged is there, before and after one more."""
        for _ in range(2):
            store = tt.Store(self.path)
            last = max(self.kept, default=-1)
            if not last < len(store) <= last + 2:
                return f"{len(store)} batches, and {last} was the last"
            for number in range(max(0, len(store) - 5), len(store)):
                told = store.metadata[number]
                if told != self.kept.get(number, told):
                    return f"another batch {number}"
                if not (store.batch(number)["a"].value == told["try"]).all():
                    return f"wrong numbers in batch {number}"
            how = "before" if len(store) == last + 1 else "after"
            self._append()
        return f"{how} {last}"


BROKEN = "JAX is broken"


def outcome_of(work):
    """What work says of itself, or that JAX can say nothing any more.

    It puts its trace aside in every operation, and an interrupt may come before it has
    made sure that the trace is put back.
    """
    try:
        return work.outcome()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        if not last.startswith(os.path.dirname(jax.__file__)):
            raise
        return BROKEN


def main():
    """Does what each line names until SIGINT comes, and tells how things are."""
    made = {}
    came = []

    def note(*_):
        came.append(True)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    for line in sys.stdin:
        name = line.strip()
        kind = {"checkpoint": Saving, "store": Appending}.get(name, Training)
        if name not in made:
            made[name] = kind(name)
        try:
            print("ready", flush=True)
            made[name].until_interrupted()
        except KeyboardInterrupt:
            pass
        except Exception:
            # JAX and numpy make other errors of an interrupt: one that comes while keys
            # of a cache are compared, or while a dtype is asked for
            if not came:
                raise
        came.clear()
        told = outcome_of(made[name])
        print(told, flush=True)
        if told == BROKEN:  # a new program is not
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    main()
