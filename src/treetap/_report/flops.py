# SPDX-License-Identifier: Apache-2.0
"""FLOPs: how many operations a call of a method takes, as XLA counts them.

The method is lowered alone, for the types it was called with, and XLA's analysis of the
lowered program gives the number; nothing is compiled or run. XLA counts the body of a
loop once: the other iterations of a `scan` are added here. Those of a `while` are not,
since nobody knows how often it runs.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from treetap._capture.walk import jax_compat
from treetap._capture.walk.jax_compat import Body
from treetap._capture.walk.operations import operation_of
from treetap._core.variables.values import is_inexact
from treetap._core.variables.variable import raw_values
from treetap._report.calls import MethodCall, Note

Program = Callable[[MethodCall, list[Any]], Any]


class Flops:
    """Counts the FLOPs of calls; equal calls are counted once.

    Args:
        as_nnx: Whether `forward` counts what leads to results only, as NNX does, and
            not what leads to what Variables come to hold.
    """

    def __init__(self, as_nnx: bool = False) -> None:
        self._known = functools.cache(_counted)
        self._forward = _results if as_nnx else _forward

    def forward(self, note: Note) -> int | None:
        """FLOPs of a call; None if XLA gives none."""
        return self._of(self._forward, note.given)

    def backward(self, note: Note) -> int | None:
        """FLOPs of a call and of its derivatives by Variables and arguments."""
        return self._of(_with_derivatives, note.given)

    def _of(self, program: Program, call: MethodCall) -> int | None:
        try:
            return self._known(program, call)
        except TypeError:  # something static cannot be hashed
            return _counted(program, call)


def _forward(call: MethodCall, arrays: list[Any]) -> tuple[list[Any], list[Any]]:
    """The results of a call, and what Variables come to hold."""
    out, leaves, _ = call.run(arrays)
    given = set(map(id, arrays))
    held = _arrays_in(raw_values(leaves))
    return _arrays_in(out), [x for x in held if id(x) not in given]


def _results(call: MethodCall, arrays: list[Any]) -> list[Any]:
    return _forward(call, arrays)[0]


def _with_derivatives(call: MethodCall, arrays: list[Any]) -> Any:
    """The results of a call, and their derivatives."""
    chosen = {n: array for n, array in enumerate(arrays) if is_inexact(array)}

    def of_chosen(values: dict[int, Any]) -> list[Any]:
        given = [values.get(n, array) for n, array in enumerate(arrays)]
        return [x for x in _results(call, given) if is_inexact(x)]

    out, pullback = jax.vjp(of_chosen, chosen)
    # Not of ones: JAX leaves out operations on those.
    return out, pullback(out)


def _arrays_in(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def _counted(program: Program, call: MethodCall) -> int | None:
    """FLOPs of a program of a call, sharded or else not; None if it fails.

    Alone, a method may lack what is around it, such as a mapped axis or a mesh; and not
    every device has an analysis.
    """
    of_arrays = functools.partial(program, call)
    plain = [array.update(sharding=None) for array in call.arrays]
    for arrays in (call.arrays, plain):
        with contextlib.suppress(Exception):
            body = jax_compat.body_of(jax.make_jaxpr(of_arrays)(arrays))
            return round(_flops_of(body)[1])
    return None


def _flops_of(body: Body) -> tuple[float, float]:
    """FLOPs as XLA counts them, each loop body once, and with all iterations."""
    once = all_of_them = _by_xla(body)
    for times, copies, inside in _loops_in(body.jaxpr):
        inner, inner_all = _flops_of(inside)
        all_of_them += times * inner_all - copies * inner
    return once, all_of_them


def _by_xla(body: Body) -> float:
    def fn(*values: Any) -> Any:
        return jax_compat.evaluate(body, values)

    given = [var.aval for var in body.jaxpr.invars]
    found = _analysis(fn, given)
    if found is None:  # not on every device; CPUs have one, and count the same
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            found = _analysis(fn, given)
    # If it is None still, XLA does not tell, and `_counted` gives up.
    # XLA takes one off for what it does not know, such as constraints of shardings.
    return max(0.0, found.get("flops", 0.0))


def _analysis(fn: Callable[..., Any], given: list[Any]) -> Any:
    """XLA's analysis of a function, lowered for the device in use, or None."""
    lowered = jax.jit(fn).lower(*given)
    with contextlib.suppress(NotImplementedError, jax.errors.JaxRuntimeError):
        return lowered.cost_analysis()
    return None


def _loops_in(jaxpr: Any) -> Iterator[tuple[int, int, Body]]:
    """The loops of a jaxpr that are not inside another one, if their length is known.

    For each: how often it runs, how many copies of it XLA sees, and what it runs.
    """
    for eqn in jaxpr.eqns:
        times, copies = operation_of(eqn.primitive, eqn.params).repeats(eqn.params)
        for body in jax_compat.bodies_in(eqn.params):
            if times in (None, 1):
                yield from _loops_in(body.jaxpr)
            else:
                yield times, copies, body
