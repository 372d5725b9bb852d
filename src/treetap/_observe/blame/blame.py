# SPDX-License-Identifier: Apache-2.0
"""blame: which operation made the first NaN or infinity, and where it is written.

The function is run once, compiled, and only its results are looked at. If they are
finite there is nothing to say; if not, it runs again in a way that says of every value
whether it is finite (see `search`), and from this the origin is found (see `origins`).
`guard` is its small sister, always on.
"""

import functools
import linecache
import os
import pathlib
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import is_not
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from treetap._capture.callee import (
    keep_name,
    named_arguments,
    refuse_uncallable,
)
from treetap._capture.listening import listening
from treetap._capture.module_paths import Roots, resolve
from treetap._capture.name_stacks import scopes_in
from treetap._capture.statistics.reducers import AllFinite
from treetap._capture.walk import jax_compat
from treetap._capture.walk.plans import is_inexact
from treetap._core.paths import Path, show_path
from treetap._core.static_values import exact
from treetap._core.trees.traverse import iter_graph
from treetap._core.variables.variable import Variable, raw_values
from treetap._core.wording import first_few
from treetap._observe.blame.origins import Findings, ValueAt
from treetap._observe.blame.search import NAN, search
from treetap._observe.closures import Opened
from treetap._observe.handlers import QUIET, Handler, owner_of, without_partials
from treetap._observe.kept_programs import (
    KeptCall,
    KeptProgram,
    Outline,
    settings,
)
from treetap._observe.observe import observe


@dataclass(frozen=True)
class Blame:
    """Where the first number that is not finite came from; falsy if there is none.

    Attributes:
        kind: `"nan"` or `"inf"`; empty if all is finite.
        operation: JAX's name of the operation.
        path: The Module it is in.
        function: The Python function it is written in.
        file: The file.
        line: The line in it.
        source: What stands there.
        backward: Whether it is in a backward pass, or of use only there.
        iterations: The loops it is in, outermost first, and the iteration of each.
        shard: Under `shard_map`, the shard; else None.
        index: Where in the operation's result the first bad number is; None in a loop
            whose rows end one by one.
        count: How many numbers of the result are bad.
        shape: The shape of the result.
        inputs_finite: Whether all that went into the operation was finite.
        largest_input: The largest finite magnitude that went into it.
        argument: If an argument was bad already, and no operation made anything bad by
            itself, its path.
        arguments: The paths of bad arguments that went into the operation.
        reaches_result: Whether the function's results are bad, too.
    """

    kind: str = ""
    operation: str = ""
    path: Path = ()
    function: str = ""
    file: str = ""
    line: int = 0
    source: str = ""
    backward: bool = False
    iterations: tuple[tuple[str, int], ...] = ()
    shard: int | None = None
    index: tuple[int, ...] | None = ()
    count: int = 0
    shape: tuple[int, ...] = ()
    inputs_finite: bool = True
    largest_input: float = 0.0
    argument: str = ""
    arguments: tuple[str, ...] = ()
    reaches_result: bool = True

    def __bool__(self) -> bool:
        return bool(self.kind)

    @property
    def site(self) -> str:
        """The path of the Module, as text."""
        return show_path(self.path) if self.path else ""

    def __str__(self) -> str:
        """A paragraph for people."""
        if not self:
            return "All is finite."
        what = "NaN" if self.kind == "nan" else "infinity"
        one = f"A {what}" if self.kind == "nan" else f"An {what}"
        is_given, by = bool(self.argument), self.operation
        parts = [
            (is_given, f"{one} came in with the argument {self.argument}"),
            (by, f"The first {what} was made by `{by}`"),
            (not (is_given or by), f"{one} is among the function's own constants"),
            (self.backward, " in the backward pass"),
            (self.file, f", at {self.file}:{self.line} in {self.function}"),
            (self.source, f" (`{self.source}`)"),
            (self.path, f", in the Module {self.site}"),
            *((loop, f", in iteration {n} of a {loop}") for loop, n in self.iterations),
            (self.shard is not None, f", on shard {self.shard}"),
        ]
        text = "".join(text for is_so, text in parts if is_so) + ". "
        if self.count:
            where = "" if self.index is None else f", the first at {list(self.index)}"
            size = int(np.prod(self.shape))
            text += f"{self.count} of {size} numbers are bad{where}. "
        if by and self.inputs_finite:
            text += "What went into it was finite, and at most "
            text += f"{self.largest_input:.4g} in magnitude. "
        elif self.arguments:
            text += f"What went into it comes from {first_few(self.arguments)}, which "
            text += "was not finite. "
        elif by:
            text += "Constants of the program that are not finite went into it. "
        return text.rstrip() if self.reaches_result else text + MASKED


MASKED = (
    "The results are finite, all the same: a `where`, or a branch that was not taken, "
    "may have masked it."
)


def blame(fn: Callable[..., Any], *, everywhere: bool = False) -> Callable[..., Blame]:
    """A function that says which operation makes the first NaN or infinity, if any.

    The arguments stay as they are, Modules included; what the function returns is lost.
    While results are finite it costs what the function costs, compiled. What JAX can
    trace can be blamed; booleans, integers and other plain values are taken as such.
    What was compiled serves later calls with other numbers, also of a function that is
    made anew by the same code.

    Args:
        fn: A Module, or any function of Modules and arrays: a loss, a gradient
            function, a whole training step.
        everywhere: Also find what does not reach the results.

    Returns:
        A function of the same arguments, to a `Blame`.

    Examples:
        >>> import jax, jax.numpy as jnp, treetap as tt
        >>> def loss(x):
        ...     return jnp.sqrt(jnp.sum(x ** 2))
        >>> found = tt.blame(jax.grad(loss))(jnp.zeros(3))
        >>> found.kind, found.operation, found.backward
        ('inf', 'div', True)
        >>> bool(tt.blame(loss)(jnp.zeros(3)))
        False
    """
    refuse_uncallable(fn, "blame")

    def blamed(*args: Any, **kwargs: Any) -> Blame:
        with listening(listening.value), listening(None):  # twice: see `listening`
            own, given, named = without_partials(fn, args, kwargs)
            opened = Opened((own,))
            outline, call = Outline.of(
                opened, opened.taken(), (given, named), "blame", _is_traced
            )
            values = list(map(jnp.asarray, call.inputs))
            rest = exact(tuple(value for value in call.values if not _is_traced(value)))
            types, places = tuple(map(jax.typeof, values)), tuple(call.places)
            structure = call.definition, call.tree, places, settings()
            path = functools.partial(_path, call.inputs, own, given, named)
            kept = KeptCall("blame", (own,), structure, rest, types)
            make = functools.partial(_Suspect, outline, values, (own, given, named))
            return kept.run(make, lambda one: one.blame(values, path, everywhere))

    return keep_name(blamed, fn)


# What the program is a function of; other values are parts of it, as flags are.
_NUMBERS = (float, complex)


def _is_traced(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic, *_NUMBERS))


class _Suspect(KeptProgram):
    """A function as a program, for arguments of some structure."""

    def __init__(
        self, outline: Outline, values: Sequence[Any], given: Any, opened: Opened
    ):
        super().__init__(opened)
        self.is_of(given)
        handler, self.known = Handler(QUIET), Roots(())

        def pure(*inputs: Any) -> list[Any]:
            (fn,), (args, kwargs), leaves = outline.parts(inputs)
            given = raw_values(leaves)
            with handler.around(fn, args, kwargs) as out:
                self.known = handler.session.known
            written = map(is_not, left := raw_values(leaves), given)
            results = jax.tree.leaves((out, list(compress(left, written))))
            return [x for x in results if is_inexact(x) or isinstance(x, _NUMBERS)]

        types = list(map(jax.typeof, values))
        self.body = jax_compat.body_of(jax_compat.traced(pure, types))
        self.look_at(self.body.consts)
        self.check = jax.jit(self._all_finite)
        self.search = jax.jit(functools.partial(search, self.body))

    def _all_finite(self, *values: Any) -> Any:
        outs = jax_compat.evaluate(self.body, values)
        return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in outs], bool))

    def blame(
        self, values: list[Any], path_of: Callable[[int], str], everywhere: bool
    ) -> Blame:
        """The verdict for some values; `path_of` gives the path of an argument."""
        if not everywhere and self.check(*values):
            return Blame()
        findings = Findings(self.body, jax.device_get(self.search(*values)))
        results = [ValueAt(findings.top, (), x) for x in self.body.jaxpr.outvars]
        origin = findings.origin([value for value in results if findings.code(value)])
        reaches = origin is not None
        if origin is None and everywhere:
            origin = findings.origin(list(findings.all_bad()))
        if origin is None or (not reaches and origin.is_argument):
            return Blame()
        found = self._described(findings, origin, path_of)
        return Blame(**found, reaches_result=reaches)

    def _described(
        self, findings: Findings, origin: ValueAt, path_of: Callable[[int], str]
    ) -> dict[str, Any]:
        """All there is to say of the value where it began."""
        frame, place, found = origin.frame, origin.place, findings.finiteness(origin)
        shape = tuple(origin.atom.aval.shape)
        index = tuple(map(int, np.unravel_index(int(found.index), shape)))
        arguments = tuple(map(path_of, findings.arguments_behind(origin)))
        about = {
            "kind": "nan" if found.code == NAN else "inf",
            "shape": shape,
            "count": int(found.bad),
            "index": None if any(one.rows for one in frame.around) else index,
        }
        if place is None or place.number is None:  # a constant, or an argument
            return {**about, "argument": "".join(arguments)}
        eqn = frame.body.jaxpr.eqns[place.number]
        equations = [*(one.equation for one in frame.around), eqn]
        stacks = [one.source_info.name_stack for one in equations]
        scopes = [scope for stack in stacks for scope in scopes_in(stack)]
        inputs = [ValueAt(frame, origin.turns, atom) for atom in eqn.invars]
        largest = [float(findings.finiteness(one).largest) for one in inputs]
        return {
            **about,
            "operation": eqn.primitive.name,
            "path": resolve(scopes, self.known).path,
            "backward": findings.is_backward(origin, equations),
            "inputs_finite": not findings.before(origin),
            "arguments": arguments,
            "largest_input": max(largest, default=0.0),
            **_turns(findings, origin),
            **_written(equations[::-1]),
        }


def _turns(findings: Findings, value: ValueAt) -> dict[str, Any]:
    """The iterations and the shard of a value."""
    loops, shard = [], None
    for frame, turn in findings.steps(value):
        if frame.mesh:
            shard = turn
        elif turn is not None and not frame.rows:  # which would end one by one
            loops.append((frame.operation.name, turn))
    return {"iterations": tuple(loops), "shard": shard}


_PATHS = sysconfig.get_paths()
_OWN = os.path.dirname(jax.__file__), pathlib.Path(__file__).resolve().parents[2]
NOT_USERS = tuple(os.path.join(path, "") for path in (*_OWN, _PATHS["stdlib"]))


def _written(equations: list[JaxprEqn]) -> dict[str, Any]:
    """The user's line of code that the first equation comes from, or the next, ..."""
    tracebacks = [one.source_info.traceback for one in equations]
    frames = [found for one in tracebacks if one is not None for found in one.frames]
    for found in frames:
        if _is_users(found.file_name):
            line = linecache.getline(found.file_name, found.line_num)
            return {
                "file": found.file_name,
                "line": found.line_num,
                "function": found.function_name.rpartition(".")[2],
                "source": line.strip(),
            }
    return {}


def _is_users(file: str) -> bool:
    if file.startswith(("<frozen", *NOT_USERS[:2])):
        return False
    return file.startswith(_PATHS["purelib"]) or not file.startswith(NOT_USERS)


def _path(given: Sequence[Any], fn: Any, args: Any, kwargs: Any, number: int) -> str:
    """The path of an input among the arguments."""
    value, named = given[number], named_arguments(fn, args, kwargs)
    for name, tree in [*named, ((), owner_of(fn))]:
        for path, leaf in iter_graph(tree, graph=True):
            held = leaf.get_raw_value() if isinstance(leaf, Variable) else leaf
            if any(x is value for x in jax.tree.leaves(held)):
                return show_path((*name, *path))
    return "that the function closes over"


def guard(
    fn: Callable[..., Any], select: Any = None, *, grads: bool = False
) -> Callable[..., Any]:
    """A function that also returns, for selected sites, whether all was finite.

    It is `observe` with the reducer `AllFinite`: one bit for each site, iteration and
    shard, cheap enough to be always on. `Record.first_nonfinite` names the first.

    Args:
        fn: A Module, a function of Modules or of arrays, or a gradient function such as
            `jax.value_and_grad(loss)`.
        select: Which sites: a glob such as `"blocks/*/attn"`, a `Select`, a class, a
            function, or a list of them; all by default.
        grads: Whether to look at gradients, too.

    Examples:
        >>> import jax, jax.numpy as jnp, treetap as tt
        >>> def loss(x):
        ...     return tt.tap(jnp.log(x), "log").sum()
        >>> _, record = jax.jit(tt.guard(loss, "log"))(jnp.array([1.0, 0.0]))
        >>> record.first_nonfinite()
        'log'
    """
    return observe(fn, select, grads=grads, reduce=[AllFinite()])
