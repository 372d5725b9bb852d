# SPDX-License-Identifier: Apache-2.0
"""Random programs, and a slow interpreter that says what a capture of them must give.

A program is a tree of parts: arithmetic, taps, and what JAX does with functions
(`vmap`, `scan`, `cond`, ...). Each part says what it is twice. `run` is the program for
JAX. `slow` is the same in plain Python and NumPy, with a loop for every row and
iteration. It knows nothing of jaxprs, axes or batching, and notes every tapped value
with the rows, iterations and shards it was tapped in.

Derivatives are taken with a complex step: with `x + 1e-30j` in place of `x`, the
imaginary part of the result is the derivative, to the last bit. The gradient of a
tapped value is the derivative with respect to a step added to that one number.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import treetap as tt
from meshes import mesh_of

Call = tuple[int, ...]  # of functions that are called twice: which call, each time

STEP = 1e-30
MARGIN = 1e-3  # what a comparison must be apart, to be the same in float32


class TooClose(Exception):
    """A branch that rounding decides."""


@dataclass
class Tapped:
    """What the slow interpreter noted of one tap in the program.

    Attributes:
        axes: What gives it axes, outermost first: the part, its kind and its size.
        after: How many of these are outside the differentiation it is in.
        leaves: By row, iteration and shard: the values.
        counts: By the same: how many iterations a `while` around it had so far.
        grads: By the same: derivatives with respect to each leaf.
        depends: The leaves that depend on what is differentiated.
        branches: The parts that branch around it, each with whether `vmap` inlines it.
        in_rule: Whether it is in a function with a rule of its own.
    """

    axes: tuple[tuple[int, str, int], ...]
    after: int | None = None
    leaves: dict[tuple[int, ...], list[Any]] = field(default_factory=dict)
    counts: dict[tuple[int, ...], int] = field(default_factory=dict)
    grads: dict[tuple[int, ...], list[Any]] = field(default_factory=dict)
    depends: set[int] = field(default_factory=set)
    branches: tuple[bool, ...] = ()
    in_rule: bool = False


@dataclass
class Slow:
    """Where the slow interpreter is, and what it has noted.

    Attributes:
        notes: What was tapped, by name and by static call.
        axes: The axes around, with the index along each.
        call: Which calls of functions that are called twice it is in.
        branches: As in `Tapped`.
        rules: How many functions with rules are around.
        counter: Iterations of the `while` around; None outside of any.
        step: The number to step: of which execution of a tap, which leaf and element.
        executed: How many taps were executed since the differentiation began.
        watch: What to do at a tap while a derivative is taken, instead of noting.
        edits: Functions of tapped values, by name.
        after: How many axes were around the differentiation; None outside of any.
    """

    notes: dict[Any, Tapped] = field(default_factory=dict)
    axes: tuple[tuple[int, str, int, int], ...] = ()
    call: tuple[int, ...] = ()
    branches: tuple[bool, ...] = ()
    rules: int = 0
    counter: int | None = None
    step: tuple[int, int, int] | None = None
    executed: int = 0
    watch: Callable[..., None] | None = None
    edits: dict[str, Any] = field(default_factory=dict)
    after: int | None = None

    def numbers(self, result: Any) -> list[Any]:
        """All that was tapped, and a result."""
        tapped = [row for note in self.notes.values() for row in note.leaves.values()]
        return jax.tree.leaves((result, tapped))

    def inside(self, **changed: Any) -> Any:
        """A context in which some of this is something else."""
        return _Inside(self, changed)

    def tap(self, name: str, leaves: list[Any]) -> list[Any]:
        """Executes a tap: notes its leaves, and gives what flows on."""
        place = (name, self.call), tuple(one[3] for one in self.axes)
        if self.watch is not None:
            self.watch(self.executed, place, leaves)
        else:
            self._note(place, leaves)
        if self.step is not None and self.step[0] == self.executed:
            _, leaf, element = self.step
            stepped = np.array(leaves[leaf], complex)
            stepped.reshape(-1)[element] += 1j * STEP
            leaves = [stepped if n == leaf else x for n, x in enumerate(leaves)]
        self.executed += 1
        if name in self.edits:
            leaves = [self.edits[name](x) for x in leaves]
        return leaves

    def _note(self, place: Any, leaves: list[Any]) -> None:
        key, index = place
        axes = tuple(one[:3] for one in self.axes)
        note = self.notes.setdefault(key, Tapped(axes))
        note.leaves[index] = [np.real(x) for x in leaves]
        note.branches, note.after = self.branches, self.after
        note.in_rule = note.in_rule or self.rules > 0
        if self.counter is not None:
            note.counts[index] = self.counter + 1

    def forget(self, taps: list[tuple[str, Call]]) -> None:
        """Forgets what taps gave in the rows and iterations around."""
        here = tuple(one[3] for one in self.axes)
        if self.watch is not None:
            return
        for key in taps:
            note = self.notes.get(key)
            for index in list(note.leaves) if note else ():
                if index[: len(here)] == here:
                    del note.leaves[index]

    def derivatives(self, fn: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
        """The gradients of a function of arrays with a scalar result, once it ran.

        Every tap that the run executes gets its gradient as well.
        """
        executed: list[tuple[Any, list[Any]]] = []

        def see(n: int, place: Any, leaves: list[Any]) -> None:
            executed.append((place, [np.shape(x) for x in leaves]))

        def seen(n: int, place: Any, leaves: list[Any]) -> None:
            note = self.notes[place[0]]
            moved = [n for n, x in enumerate(leaves) if np.any(np.imag(x) != 0)]
            note.depends.update(moved)

        with self.inside(watch=see, executed=0):
            fn(*args)
        with self.inside(watch=seen, executed=0):
            grads = [self._gradient(fn, args, n) for n in range(len(args))]
        with self.inside(watch=lambda *told: None):
            for n, (place, shapes) in enumerate(executed):
                found = [np.zeros(shape) for shape in shapes]
                for leaf, shape in enumerate(shapes):
                    for element in range(int(np.prod(shape))):
                        with self.inside(step=(n, leaf, element), executed=0):
                            slope = np.imag(fn(*args)) / STEP
                        found[leaf].reshape(-1)[element] = slope
                self.notes[place[0]].grads[place[1]] = found
        return grads

    def _gradient(self, fn: Any, args: Sequence[Any], which: int) -> Any:
        found = np.zeros(np.shape(args[which]))
        for element in range(found.size):
            stepped = [np.array(x, complex) for x in args]
            stepped[which].reshape(-1)[element] += 1j * STEP
            with self.inside(executed=0):
                found.reshape(-1)[element] = np.imag(fn(*stepped)) / STEP
        return found


class _Inside:
    """Some attributes are something else for a while."""

    def __init__(self, slow: Slow, changed: dict[str, Any]):
        self.slow, self.changed = slow, changed

    def __enter__(self) -> None:
        self.before = {name: getattr(self.slow, name) for name in self.changed}
        self._set(self.changed)

    def __exit__(self, *error: object) -> None:
        self._set(self.before)

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self.slow, name, value)


def exceeds(value: Any, bound: float) -> bool:
    """A comparison, refused if rounding could decide it."""
    real = float(np.real(value))
    if abs(real - bound) < MARGIN:
        raise TooClose
    return real > bound


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a program: from an array, with scalars around, to one of its shape."""

    def run(self, x: Any, env: tuple[Any, ...]) -> Any:
        """The part as JAX runs it."""
        raise NotImplementedError

    def slow(self, x: Any, env: tuple[Any, ...], at: Slow) -> Any:
        """The same, slowly."""
        raise NotImplementedError

    @property
    def parts(self) -> tuple["Part", ...]:
        """The parts inside it."""
        body = getattr(self, "body", None)
        return getattr(self, "bodies", () if body is None else (body,))

    def taps(self, call: Call = ()) -> list[tuple[str, Call]]:
        """The taps in it, in the order of the program: names and static calls."""
        return [tap for part in self.parts for tap in part.taps(call)]

    def holds(self, kind: type["Part"]) -> bool:
        """Whether there is a part of a kind in it."""
        return isinstance(self, kind) or any(part.holds(kind) for part in self.parts)

    def is_inlined(self, name: str, is_mapped: bool = False) -> bool:
        """Whether a tap is in a branch that runs although it is not taken."""
        if isinstance(self, Branch) and is_mapped and self.kind != "lifted":
            return any(tap == name for tap, _ in self.taps())
        is_mapped |= isinstance(self, Mapped) and self.kind == "vmap"
        return any(part.is_inlined(name, is_mapped) for part in self.parts)

    def __repr__(self) -> str:
        shown = [
            f"{name}={value!r}"
            for name, value in vars(self).items()
            if name not in ("body", "bodies") and not name.startswith("_")
        ]
        shown += [repr(part) for part in self.parts]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, eq=False, repr=False)
class Arithmetic(Part):
    """A few operations that are smooth, and do not grow."""

    kind: str
    which: int = 0

    def run(self, x: Any, env: tuple[Any, ...]) -> Any:
        return self._of(jnp, x, env)

    def slow(self, x: Any, env: tuple[Any, ...], at: Slow) -> Any:
        return self._of(np, x, env)

    def _of(self, np: Any, x: Any, env: tuple[Any, ...]) -> Any:
        other = env[self.which % len(env)]
        return {
            "sin": lambda: np.sin(x),
            "tanh": lambda: np.tanh(x),
            "affine": lambda: 0.7 * x + 0.1,
            "product": lambda: x * other,
            "sum": lambda: x + other,
            "mean": lambda: x - 0.5 * np.mean(x),
        }[self.kind]()


@dataclass(frozen=True, eq=False, repr=False)
class Tap(Part):
    """A tap: of the array, of a tree with a constant and a scalar, or of a scalar."""

    name: str
    form: str
    which: int = 0

    def taps(self, call: Call = ()) -> list[tuple[str, Call]]:
        return [(self.name, call)]

    def run(self, x: Any, env: tuple[Any, ...]) -> Any:
        other = env[self.which % len(env)]
        if self.form == "tree":
            tree = {"a": x, "b": other, "c": jnp.arange(3.0)}
            tree = tt.tap(tree, self.name)
            return tree["a"] + 0.1 * tree["b"] * jnp.mean(tree["c"])
        if self.form == "scalar":
            return x * tt.tap(other, self.name)
        if self.form == "unused":
            tt.tap(2 * x, self.name)
            return x
        return tt.tap(x, self.name)

    def slow(self, x: Any, env: tuple[Any, ...], at: Slow) -> Any:
        other = env[self.which % len(env)]
        if self.form == "tree":
            a, b, c = at.tap(self.name, [x, other, np.arange(3.0)])
            return a + 0.1 * b * np.mean(c)
        if self.form == "scalar":
            return x * at.tap(self.name, [other])[0]
        if self.form == "unused":
            at.tap(self.name, [2 * x])
            return x
        return at.tap(self.name, [x])[0]


@dataclass(frozen=True, eq=False, repr=False)
class Steps(Part):
    """One part after the other."""

    bodies: tuple[Part, ...]

    def run(self, x: Any, env: tuple[Any, ...]) -> Any:
        for part in self.bodies:
            x = part.run(x, env)
        return x

    def slow(self, x: Any, env: tuple[Any, ...], at: Slow) -> Any:
        for part in self.bodies:
            x = part.slow(x, env, at)
        return x


@dataclass(frozen=True, eq=False, repr=False)
class Twice(Part):
    """The same function called two times."""

    body: Part

    def taps(self, call: Call = ()) -> list[tuple[str, Call]]:
        return [tap for n in range(2) for tap in self.body.taps((*call, n))]

    def run(self, x: Any, env: tuple[Any, ...]) -> Any:
        return self.body.run(self.body.run(x, env), env)

    def slow(self, x: Any, env: tuple[Any, ...], at: Slow) -> Any:
        for n in range(2):
            with at.inside(call=(*at.call, n)):
                x = self.body.slow(x, env, at)
        return x


@dataclass(frozen=True, eq=False, repr=False)
class Through(Part):
    """A body under something that changes no value."""

    kind: str
    body: Part

    @functools.cached_property
    def _fn(self) -> Callable[..., Any]:
        if self.kind == "jit":
            return jax.jit(self.body.run)
        if self.kind == "checkpoint":
            return jax.checkpoint(self.body.run)
        if self.kind == "lifted jit":
            return tt.jit(self.body.run)
        return jax.named_scope(self.kind)(self.body.run)

    def run(self, x: Any, env: tuple[Any, ...]) -> Any:
        return self._fn(x, env)

    def slow(self, x: Any, env: tuple[Any, ...], at: Slow) -> Any:
        return self.body.slow(x, env, at)


@dataclass(frozen=True, eq=False, repr=False)
class Rule(Part):
    """A body with a rule of its own: the derivative, times a factor."""

    kind: str
    factor: float
    body: Part

    @functools.cached_property
    def _fn(self) -> Callable[..., Any]:
        body, factor = self.body.run, self.factor
        if self.kind == "custom_jvp":
            by_jvp = jax.custom_jvp(body)

            @by_jvp.defjvp
            def _(primals: Any, tangents: Any) -> Any:
                y, dy = jax.jvp(body, primals, tangents)
                return y, factor * dy

            return by_jvp
        by_vjp = jax.custom_vjp(body)

        def backward(pull: Any, ct: Any) -> Any:
            return pull(factor * ct)

        by_vjp.defvjp(lambda x, env: jax.vjp(body, x, env), backward)
        return by_vjp

    def run(self, x: Any, env: tuple[Any, ...]) -> Any:
        return self._fn(x, env)

    def slow(self, x: Any, env: tuple[Any, ...], at: Slow) -> Any:
        with at.inside(rules=at.rules + 1):
            y = self.body.slow(x, env, at)
        return np.real(y) + 1j * self.factor * np.imag(y)


def _rows(count: int) -> Any:
    return 0.1 * np.arange(1.0, count + 1)


@dataclass(frozen=True, eq=False, repr=False)
class Mapped(Part):
    """A body over rows or shards: over one more scalar, and perhaps the array."""

    kind: str
    size: int
    over_array: bool
    in_axis: int
    out_axis: int
    name: str | None
    body: Part

    @functools.cached_property
    def _fn(self) -> Callable[..., Any]:
        body = self.body.run

        def one(x: Any, row: Any, env: Any) -> Any:
            return body(x, (*env, row))

        if self.kind == "shard_map":

            def shard(x: Any, row: Any, env: Any) -> Any:
                return one(x[0], row[0], env)[None]

            specs = P("d"), P("d"), P()
            mesh = mesh_of((self.size,), ("d",))
            return jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=P("d"))
        axes = self.in_axis if self.over_array else None, 0, None
        return jax.vmap(one, axes, self.out_axis, axis_name=self.name)

    def run(self, x: Any, env: tuple[Any, ...]) -> Any:
        rows = jnp.asarray(_rows(self.size), jnp.float32)
        if self.kind == "shard_map":
            xs = jnp.stack([x * (1 + float(row)) for row in _rows(self.size)])
            return jnp.mean(self._fn(xs, rows, env), 0)
        if self.over_array:
            xs = [x * (1 + float(row)) for row in _rows(self.size)]
            x = jnp.stack(xs, self.in_axis)
        return jnp.mean(self._fn(x, rows, env), self.out_axis)

    def slow(self, x: Any, env: tuple[Any, ...], at: Slow) -> Any:
        out = []
        for n, row in enumerate(_rows(self.size)):
            is_apart = self.over_array or self.kind == "shard_map"
            given = x * (1 + row) if is_apart else x
            axis = id(self), self.kind, self.size, n
            with at.inside(axes=(*at.axes, axis)):
                out.append(self.body.slow(given, (*env, row), at))
        return np.mean(out, axis=0)


@dataclass(frozen=True, eq=False, repr=False)
class Loop(Part):
    """A body under `scan`, or `fori_loop`."""

    kind: str
    size: int
    reverse: bool
    unroll: int
    body: Part

    def run(self, x: Any, env: tuple[Any, ...]) -> Any:
        rows = jnp.asarray(_rows(self.size), jnp.float32)
        if self.kind == "fori_loop":

            def turn(n: Any, x: Any) -> Any:
                return self.body.run(x, (*env, rows[n]))

            return jax.lax.fori_loop(0, self.size, turn, x)

        def step(x: Any, row: Any) -> Any:
            x = self.body.run(x, (*env, row))
            return x, row * jnp.mean(x)

        options = {"reverse": self.reverse, "unroll": self.unroll}
        x, ys = jax.lax.scan(step, x, rows, **options)
        return x + jnp.sum(ys)

    def slow(self, x: Any, env: tuple[Any, ...], at: Slow) -> Any:
        rows, total = list(enumerate(_rows(self.size))), 0.0
        is_reverse = self.reverse and self.kind == "scan"
        for n, row in reversed(rows) if is_reverse else rows:
            with at.inside(axes=(*at.axes, (id(self), "scan", self.size, n))):
                x = self.body.slow(x, (*env, row), at)
            total = total + row * np.mean(x)
        return x + total if self.kind == "scan" else x


@dataclass(frozen=True, eq=False, repr=False)
class While(Part):
    """A body under `while_loop`, which runs once more if a scalar is large.

    Nothing is differentiated through it: JAX cannot.
    """

    which: int
    bound: float
    body: Part

    def run(self, x: Any, env: tuple[Any, ...]) -> Any:
        x, *env = jax.lax.stop_gradient((x, *env))
        times = 1 + (env[self.which % len(env)] > self.bound)

        def turn(state: Any) -> Any:
            n, x = state
            return n + 1, self.body.run(x, (*env, 0.1 * n))

        return jax.lax.while_loop(lambda state: state[0] < times, turn, (0, x))[1]

    def slow(self, x: Any, env: tuple[Any, ...], at: Slow) -> Any:
        x, *env = map(np.real, (x, *env))
        times = 1 + exceeds(env[self.which % len(env)], self.bound)
        for n in range(times):
            at.forget(self.body.taps(at.call))  # the last iteration is what is kept
            with at.inside(counter=n):
                x = self.body.slow(x, (*env, 0.1 * n), at)
        return np.real(x)


@dataclass(frozen=True, eq=False, repr=False)
class Branch(Part):
    """Two or three bodies under `cond` or `switch`; a scalar or the array decides."""

    kind: str
    which: int
    bound: float
    by_array: bool
    bodies: tuple[Part, ...]

    def run(self, x: Any, env: tuple[Any, ...]) -> Any:
        value = jnp.mean(x) if self.by_array else env[self.which % len(env)]
        lib = tt if self.kind == "lifted" else jax.lax
        first, *others = [part.run for part in self.bodies]
        if len(self.bodies) == 2:
            return lib.cond(value > self.bound, others[0], first, x, env)
        index = (value > self.bound).astype(int) + (value > self.bound + 0.2)
        return lib.switch(index, [first, *others], x, env)

    def slow(self, x: Any, env: tuple[Any, ...], at: Slow) -> Any:
        value = np.mean(x) if self.by_array else env[self.which % len(env)]
        index = int(exceeds(value, self.bound))
        if len(self.bodies) == 3:
            index += exceeds(value, self.bound + 0.2)
        is_mapped = any(kind == "vmap" for _, kind, *_ in at.axes)
        is_inlined = is_mapped and self.kind != "lifted"
        with at.inside(branches=(*at.branches, is_inlined)):
            return self.bodies[index].slow(x, env, at)


@dataclass(frozen=True, eq=False, repr=False)
class Gradient(Part):
    """The array less a part of the gradient of the squares of a body."""

    kind: str
    body: Part

    def run(self, x: Any, env: tuple[Any, ...]) -> Any:
        def loss(x: Any) -> Any:
            return jnp.sum(self.body.run(x, env) ** 2)

        if self.kind == "grad":
            return x - 0.1 * jax.grad(loss)(x)
        fn = jax.jit(loss) if self.kind == "vjp of jit" else loss
        value, pull = jax.vjp(fn, x)
        if self.kind == "pulled by a jit":
            pull = functools.partial(jax.jit(lambda pull, ct: pull(ct)), pull)
        return x - 0.1 * pull(jnp.ones_like(value))[0]

    def slow(self, x: Any, env: tuple[Any, ...], at: Slow) -> Any:
        def loss(x: Any) -> Any:
            return np.sum(self.body.slow(x, env, at) ** 2)

        x = np.real(x)
        with at.inside(after=len(at.axes)):
            loss(x)
            (grad,) = at.derivatives(loss, [x])
        return x - 0.1 * grad


@dataclass(frozen=True, eq=False, repr=False)
class Derivative(Part):
    """The array and a part of the derivative of a body, along ones."""

    kind: str
    body: Part

    def run(self, x: Any, env: tuple[Any, ...]) -> Any:
        fn, ones = functools.partial(self.body.run, env=env), jnp.ones_like(x)
        if self.kind == "linearize":
            along = jax.linearize(fn, x)[1](ones)
        else:
            along = jax.jvp(fn, (x,), (ones,))[1]
        return x + 0.1 * along

    def slow(self, x: Any, env: tuple[Any, ...], at: Slow) -> Any:
        x = np.real(x)
        self.body.slow(x, env, at)
        with at.inside(watch=lambda *told: None, executed=0):
            along = np.imag(self.body.slow(x + 1j * STEP, env, at)) / STEP
        return x + 0.1 * along


class Total(tt.Module):
    """A Variable that is written."""

    def __init__(self, total: Any):
        self.total = tt.BatchStat(total)

    def add(self, y: Any) -> None:
        self.total[...] = 0.5 * self.total[...] + jnp.mean(y)


@dataclass(frozen=True, eq=False, repr=False)
class Writing(Part):
    """A body under a transform of treetap's, where it adds to a Variable."""

    kind: str
    bound: float
    body: Part

    def run(self, x: Any, env: tuple[Any, ...]) -> Any:
        model = Total(0.0 * jnp.mean(x))

        def step(model: Total, x: Any, row: Any) -> Any:
            y = self.body.run(x, (*env, row))
            model.add(y)
            return y

        x = self._transformed(step, model, x)
        return x + model.total[...]

    def _transformed(self, step: Callable[..., Any], model: Total, x: Any) -> Any:
        rows = jnp.asarray(_rows(3), jnp.float32)
        if self.kind == "scan":
            once = lambda model, x, row: (step(model, x, row), row)
            axes = {"in_axes": (None, tt.Carry, 0), "out_axes": (tt.Carry, 0)}
            return tt.scan(once, **axes)(model, x, rows)[0]
        if self.kind == "cond":
            other = lambda model, x, row: x
            is_large = jnp.mean(x) > self.bound
            return tt.cond(is_large, step, other, model, x, rows[0])
        return {"jit": tt.jit, "remat": tt.remat}[self.kind](step)(model, x, rows[0])

    def slow(self, x: Any, env: tuple[Any, ...], at: Slow) -> Any:
        rows, axes, branches = enumerate(_rows(3)), at.axes, at.branches
        total = 0.0
        if self.kind == "cond":
            branches = (*branches, False)
            if not exceeds(np.mean(x), self.bound):
                return x
        for n, row in rows if self.kind == "scan" else [(0, _rows(3)[0])]:
            if self.kind == "scan":
                axes = (*at.axes, (id(self), "scan", 3, n))
            with at.inside(axes=axes, branches=branches):
                x = self.body.slow(x, (*env, row), at)
            total = 0.5 * total + np.mean(x)
            axes = at.axes
        return x + total


@dataclass(frozen=True)
class Program:
    """A part with its inputs.

    Attributes:
        body: The part.
        how: `"plain"`, `"grad"` or `"jvp"`.
        jit: `"no"`, `"inside"` or `"outside"` of the capture.
        x: The array.
        env: The scalars.
    """

    body: Part
    how: str
    jit: str
    x: Any
    env: tuple[float, ...]

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments, for JAX."""
        return tuple(jnp.asarray(x, jnp.float32) for x in (self.x, *self.env))

    def fn(self) -> Callable[..., Any]:
        """The function to look into."""

        def plain(x: Any, *env: Any) -> Any:
            return self.body.run(x, env)

        def loss(x: Any, *env: Any) -> Any:
            return jnp.sum(plain(x, *env) ** 2)

        def forward(*args: Any) -> Any:
            return jax.jvp(plain, args, tuple(jnp.ones_like(x) for x in args))

        fn = {"plain": plain, "jvp": forward}.get(self.how)
        fn = fn or jax.value_and_grad(loss, argnums=(0, 1, 2))
        return jax.jit(fn) if self.jit == "inside" else fn

    def around(self, observed: Any) -> Any:
        """What looks into it, compiled if it is to be."""
        return jax.jit(observed) if self.jit == "outside" else observed

    def slow(self, edits: Any = None) -> tuple[Any, Slow]:
        """The result, and what was tapped."""
        at = Slow(edits=edits or {})
        args = [np.asarray(x, float) for x in (self.x, *self.env)]

        def plain(x: Any, *env: Any) -> Any:
            return self.body.slow(x, env, at)

        def loss(*args: Any) -> Any:
            return np.sum(plain(*args) ** 2)

        if self.how == "plain":
            return np.real(plain(*args)), at
        if self.how == "jvp":
            out = np.real(plain(*args))
            with at.inside(watch=lambda *told: None, executed=0):
                slope = np.imag(plain(*[x + 1j * STEP for x in args])) / STEP
            return (out, slope), at
        with at.inside(after=0):
            value = np.real(loss(*args))
            grads = at.derivatives(loss, args)
        return (value, tuple(grads)), at


class Maker:
    """Makes programs by choices that somebody else makes: Hypothesis, or chance."""

    def __init__(self, choose: Callable[[Sequence[Any]], Any]):
        self.choose = choose
        self.count = 0

    def program(self) -> Program:
        """A program."""
        how = self.choose(["plain", "grad", "grad", "jvp"])
        jit = self.choose(["no", "inside", "outside"])
        x = self.choose([0.3, [0.4, -0.7]])
        env = self.choose([(0.5, -0.8), (-0.3, 0.9)])
        kinds = {"top", {"plain": "gradient", "grad": "differentiated"}.get(how, "")}
        return Program(self.steps(4, kinds), how, jit, x, env)

    def steps(self, depth: int, kinds: set[str]) -> Part:
        """A few parts, one after the other, with a tap among them."""
        count = self.choose([1, 1, 2])
        parts = [self.part(depth, kinds) for _ in range(count)]
        if not any(part.taps() for part in parts):
            parts.insert(self.choose(range(count + 1)), self.tap())
        return parts[0] if len(parts) == 1 else Steps(tuple(parts))

    def tap(self) -> Part:
        """A tap with a name of its own."""
        self.count += 1
        form = self.choose(["array", "array", "tree", "scalar", "unused"])
        return Tap(f"t{self.count}", form, self.choose(range(4)))

    def part(self, depth: int, kinds: set[str]) -> Part:
        """Any part, of no more than some depth."""
        simple = [self.arithmetic, self.tap]
        if depth <= 1:
            return self.choose(simple)()
        makers = {
            "twice": lambda: Twice(self.steps(depth - 1, kinds)),
            "through": lambda: self.through(depth, kinds),
            "rule": lambda: self.rule(depth, kinds),
            "vmap": lambda: self.mapped("vmap", depth, kinds - {"top"}),
            "loop": lambda: self.loop(depth, kinds - {"top"}),
            "branch": lambda: self.branch(depth, kinds - {"top"}),
            "writing": lambda: self.writing(depth, kinds - {"top"}),
        }
        if "while" not in kinds:
            makers["while"] = lambda: self.while_(depth, kinds - {"top"} | {"while"})
        if "top" in kinds:
            # JAX adds gradients of what all shards share up where they are, also in a
            # branch that only some shards take: and waits for the others for ever.
            is_stuck = "differentiated" in kinds
            shared = kinds - {"top"} | ({"no branch"} if is_stuck else set())
            makers["shard_map"] = lambda: self.mapped("shard_map", depth, shared)
        if "gradient" in kinds:
            inside = kinds - {"gradient", "top"}
            makers["gradient"] = lambda: self.gradient(depth, inside)
            makers["derivative"] = lambda: self.derivative(depth, inside)
        several = ["vmap", "loop", "branch"] * 2
        if "no branch" in kinds:
            several = ["vmap", "loop"] * 2
            del makers["branch"], makers["writing"]
        return self.choose([*simple, *makers.values(), *map(makers.get, several)])()

    def arithmetic(self) -> Part:
        """Arithmetic."""
        kinds = ["sin", "tanh", "affine", "product", "sum", "mean"]
        return Arithmetic(self.choose(kinds), self.choose(range(4)))

    def through(self, depth: int, kinds: set[str]) -> Part:
        """A body under what changes no value."""
        scopes = ["vmap", "transpose", "@x", "some/where"]
        kind = self.choose(["jit", "checkpoint", "lifted jit", *scopes])
        # A tap in a `while` in a checkpoint that is differentiated ends in JAX.
        inside = kinds | ({"while"} if kind == "checkpoint" else set())
        return Through(kind, self.steps(depth - 1, inside))

    def rule(self, depth: int, kinds: set[str]) -> Part:
        """A body with a rule."""
        kind = self.choose(["custom_jvp", "custom_vjp"])
        inside = kinds - {"gradient", "top"}
        return Rule(kind, self.choose([1.0, 0.5]), self.steps(depth - 1, inside))

    def mapped(self, kind: str, depth: int, kinds: set[str]) -> Part:
        """A body over rows, or shards."""
        axes = [0, -1]
        return Mapped(
            kind,
            2 if kind == "shard_map" else self.choose([2, 3]),
            self.choose([True, False]),
            self.choose(axes),
            self.choose(axes),
            self.choose([None, "i"]),
            self.steps(depth - 1, kinds),
        )

    def loop(self, depth: int, kinds: set[str]) -> Part:
        """A body over and over."""
        kind = self.choose(["scan", "scan", "fori_loop"])
        reverse, unroll = self.choose([False, True]), self.choose([1, 1, 2])
        body = self.steps(depth - 1, kinds)
        return Loop(kind, self.choose([2, 3]), reverse, unroll, body)

    def gradient(self, depth: int, kinds: set[str]) -> Part:
        """A body whose gradient is of use."""
        ways = ["grad", "vjp", "vjp of jit", "pulled by a jit"]
        return Gradient(self.choose(ways), self.steps(depth - 1, kinds))

    def derivative(self, depth: int, kinds: set[str]) -> Part:
        """A body whose derivative is of use."""
        kind = self.choose(["jvp", "linearize"])
        return Derivative(kind, self.steps(depth - 1, kinds))

    def writing(self, depth: int, kinds: set[str]) -> Part:
        """A body that writes."""
        kind = self.choose(["jit", "scan", "cond", "remat"])
        inside = kinds | ({"while"} if kind == "remat" else set())
        bound = self.choose([0.0, 0.15])
        return Writing(kind, bound, self.steps(depth - 1, inside))

    def while_(self, depth: int, kinds: set[str]) -> Part:
        """A body as often as it takes."""
        bound = self.choose([0.0, 0.15])
        return While(self.choose(range(4)), bound, self.steps(depth - 1, kinds))

    def branch(self, depth: int, kinds: set[str]) -> Part:
        """Some bodies of which one is taken."""
        count = self.choose([2, 2, 3])
        return Branch(
            self.choose(["plain", "plain", "lifted"]),
            self.choose(range(4)),
            self.choose([0.0, 0.15]),
            self.choose([True, False]),
            tuple(self.steps(depth - 1, kinds) for _ in range(count)),
        )
