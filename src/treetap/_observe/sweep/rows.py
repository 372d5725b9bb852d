# SPDX-License-Identifier: Apache-2.0
"""Rows: a flat program for many patches at once, each equation as often as needed.

Every value of the program is known once, for the run without a patch. Beside that it
has *rows*: its values under those patches that it depends on, one after the other. A
point adds the rows of its own patches; an equation is mapped over the rows of its
operands; one that no patch has come to yet is not run again. So a patch costs what
comes after it, and the program has each equation at most twice, however many patches
there are.

The patches of one point are the *places* along an axis that it is patched at, or one
place if it is patched as a whole.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from treetap._capture.walk import jax_compat
from treetap._observe.sweep.flat import Flat, variables
from treetap._observe.sweep.points import Unsuited, point_p
from treetap._observe.sweep.regions import cut, is_fused, whole

Patch = tuple[int, tuple[int, ...]]  # a site by number, and iterations of its loops


class Rows(NamedTuple):
    """The values of a variable under patches.

    Attributes:
        points: The points whose patches it depends on, in order.
        values: One for each of their places, the first point's first.
    """

    points: tuple[int, ...]
    values: Any


def points_of(flat: Flat) -> list[tuple[Any, Patch]]:
    """The points of a program in order: the equations, and what is patched."""
    eqns = [eqn for eqn in flat.eqns if eqn.primitive is point_p]
    return [(eqn, (eqn.params["site"], eqn.params["turns"])) for eqn in eqns]


def check_points(flat: Flat, clean: dict[Patch, Any]) -> None:
    """Refuses a program where points and the values for them do not go together."""
    found = points_of(flat)
    if len({patch for _, patch in found}) < len(found):
        raise Unsuited("a site is in the program more than once")
    for eqn, patch in found:
        aval, value = eqn.outvars[0].aval, clean.get(patch)
        if value is None or (value.shape, value.dtype) != (aval.shape, aval.dtype):
            raise Unsuited("the value of a site is of another type")


def run_once(flat: Flat, values: Sequence[Any]) -> dict[Any, Any]:
    """All values of the program without a patch, by variable."""
    env = flat.env(values)
    for eqn in flat.eqns:
        ins = [jax_compat.read(env, atom) for atom in eqn.invars]
        outs = ins if eqn.primitive is point_p else jax_compat.rebind(eqn, ins)
        env.update(zip(eqn.outvars, outs))
    return env


class Patched:
    """A program to be run with the patches of some points.

    Args:
        flat: The program.
        env: Its values without a patch.
        clean: For each patch, the value that is put in.
        axis: The axis along which places are, as the function sees the value; or None.
        chosen: The patches to run.
    """

    def __init__(
        self,
        flat: Flat,
        env: dict[Any, Any],
        clean: dict[Patch, Any],
        axis: int | None,
        chosen: Sequence[Patch],
    ):
        self.flat, self.env, self.clean, self.axis = flat, env, clean, axis
        self.chosen = {patch: n for n, patch in enumerate(chosen)}

    def results(self, places: Any) -> Any:
        """The first result of the program for each patch, and each of some places."""
        rows: dict[Any, Rows] = {}
        count = len(places)
        for eqn in self.flat.eqns:
            if eqn.primitive is point_p:
                held = self._at_point(eqn, rows.get(eqn.invars[0]), places)
                rows |= {} if held is None else {eqn.outvars[0]: held}
            elif moved := [rows[x] for x in variables(eqn.invars) if x in rows]:
                points = tuple(sorted({n for one in moved for n in one.points}))
                values, axes = [], []
                for atom in eqn.invars:
                    is_moved = atom in rows if variables([atom]) else False
                    axes.append(0 if is_moved else None)
                    values.append(
                        self._spread(atom, rows, points, count)
                        if is_moved
                        else jax_compat.read(self.env, atom)
                    )
                outs = _mapped(eqn, values, axes)
                rows.update(zip(eqn.outvars, (Rows(points, x) for x in outs)))
        result, points = self.flat.results[0], tuple(self.chosen.values())
        if not (variables([result]) and result in rows):
            value = jnp.asarray(jax_compat.read(self.env, result))
            return jnp.broadcast_to(value, (len(points), count, *value.shape))
        # In order of the run; patches that do not come so far change nothing.
        found = self._spread(result, rows, tuple(sorted(points)), count)
        return found.reshape(len(points), count, *found.shape[1:])

    def _at_point(self, eqn: Any, rows: Rows | None, places: Any) -> Rows | None:
        patch = eqn.params["site"], eqn.params["turns"]
        number = self.chosen.get(patch)
        if number is None:
            return rows
        value = self.env[eqn.outvars[0]]
        clean, region = self.clean[patch], eqn.params["region"]
        if region is not None:
            clean = cut(clean, region, whole(clean.shape))
        if self.axis is None:
            new = clean[None]
        else:
            axis = eqn.params["mappings"] + self.axis
            start = 0 if region is None else region[axis][0]
            at = jax.lax.broadcasted_iota(jnp.int32, value.shape, axis) + start
            new = jax.vmap(lambda place: jnp.where(at == place, clean, value))(places)
        if rows is None:
            return Rows((number,), new)
        return Rows((*rows.points, number), jnp.concatenate([rows.values, new]))

    def _spread(
        self, atom: Any, rows: dict[Any, Rows], points: tuple[int, ...], count: int
    ) -> Any:
        """The rows of a variable for more points; others leave it as it is."""
        own = rows[atom]
        if own.points == points:
            return own.values
        value = self.env[atom]
        parts = []
        for n in points:
            if n in own.points:
                start = own.points.index(n) * count
                parts.append(own.values[start : start + count])
            else:
                parts.append(jnp.broadcast_to(value, (count, *value.shape)))
        return jnp.concatenate(parts)


def _mapped(eqn: Any, values: list[Any], axes: list[int | None]) -> list[Any]:
    """The results of an equation for all rows of some operands."""

    def run(*values: Any) -> list[Any]:
        return jax_compat.bind(eqn.primitive, values, eqn.params)

    with jax_compat.in_context_of(eqn):
        return jax.vmap(run, axes)(*values)


class Weight(NamedTuple):
    """How many bytes a program takes: the peak for so many places.

    Attributes:
        fixed: The values without a patch, all together.
        rows: While each equation runs, the rows that are alive, for one place.
    """

    fixed: int
    rows: np.ndarray

    def peak(self, count: int, share: float = 1.0) -> float:
        """For so many places at once, and a share of the points.

        Half as much again is for what XLA needs beside the values.
        """
        return 1.5 * (self.fixed + float(self.rows.max(initial=0)) * count * share)


def weigh(flat: Flat) -> Weight:
    """How much memory a program with all its patches takes.

    A value that goes from one equation to another, both of which a compiler computes in
    one loop over the elements, is in no memory.
    """
    last: dict[Any, int] = {}
    readers: dict[Any, list[Any]] = {}
    for n, eqn in enumerate(flat.eqns):
        last.update((x, n) for x in [*variables(eqn.invars), *eqn.outvars])
        for x in variables(eqn.invars):
            readers.setdefault(x, []).append(eqn)
    last.update((x, len(flat.eqns)) for x in variables(flat.results))
    points: dict[Any, frozenset[int]] = {}  # that a variable depends on
    ending: dict[int, int] = {}  # bytes that are no longer needed after an equation
    alive, peaks, fixed = 0, [], 0
    for n, eqn in enumerate(flat.eqns):
        own = frozenset({n} if eqn.primitive is point_p else ())
        own = own.union(*(points.get(x, ()) for x in variables(eqn.invars)))
        for x in eqn.outvars:
            used = readers.get(x, ())
            is_passed = len(used) == 1 and is_fused(eqn) and is_fused(used[0])
            size = 0 if is_passed else _nbytes(x.aval)
            points[x], fixed, alive = own, fixed + size, alive + len(own) * size
            ending[last[x]] = ending.get(last[x], 0) + len(own) * size
        peaks.append(alive)
        alive -= ending.get(n, 0)
    return Weight(fixed, np.array(peaks, np.float64))


def _nbytes(aval: Any) -> int:
    size = int(np.prod(aval.shape, dtype=np.int64))
    return size * getattr(aval.dtype, "itemsize", 8)
