# SPDX-License-Identifier: Apache-2.0
"""Regions: of each value only the part is computed that is read later.

A metric often reads the last position of the logits. XLA computes them all: it does not
push a slice into a product of matrices. Here a walk from the results back finds for
each value its *region*, a start and a stop along each axis, that holds all that is read
of it; and a walk forward runs each equation on such regions. What an equation needs for
a region of its result stands in `_RULES`. One that has no rule there reads all of its
operands and computes all of its results, which is always right.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, primitives

from treetap._capture.walk import jax_compat
from treetap._observe.sweep.flat import Flat, traced, variables
from treetap._observe.sweep.points import point_p

Region = tuple[tuple[int, int], ...]
MAX_KNOWN = 4096  # numbers of an index that is computed now
SPLIT = "split"  # JAX does not export this primitive


class Narrowed(NamedTuple):
    """An equation for regions of its results.

    Attributes:
        ins: The regions of its operands; None for one that is not read.
        outs: The regions of its results, which hold what was wanted.
        run: Its results from such operands.
    """

    ins: Sequence[Region | None]
    outs: Sequence[Region]
    run: Callable[..., list[Any]]


def narrowed(flat: Flat) -> Flat:
    """A program with the same results that computes no more than is read."""
    known = _known(flat)
    wanted = {x: whole(x.aval.shape) for x in variables(flat.results)}
    steps: list[tuple[Any, Narrowed]] = []
    for eqn in reversed(flat.eqns):
        step = _narrowed(eqn, [wanted.get(x) for x in eqn.outvars], known)
        steps.append((eqn, step))
        for atom, region in zip(eqn.invars, step.ins):
            if region is not None and not isinstance(atom, Literal):
                wanted[atom] = _hull(wanted.get(atom), region)
    steps.reverse()

    def run(*values: Any) -> list[Any]:
        held = {x: (v, whole(x.aval.shape)) for x, v in flat.env(values).items()}

        def read(atom: Any, region: Region | None) -> Any:
            if isinstance(atom, Literal) or region is None:
                return getattr(atom, "val", None) if region is not None else None
            value, own = held[atom]
            return cut(value, region, own)

        for eqn, (ins, outs, run_on) in steps:
            with jax_compat.in_context_of(eqn):
                given = map(read, eqn.invars, ins)
                held.update(zip(eqn.outvars, zip(run_on(*given), outs)))
        return [read(x, whole(x.aval.shape)) for x in flat.results]

    return traced(run, [x.aval for x in flat.inputs])


def whole(shape: Sequence[int]) -> Region:
    """The region that is all of a value."""
    return tuple((0, size) for size in shape)


def cut(value: Any, region: Region, own: Region) -> Any:
    """A region of a value that is itself a region."""
    if region == own:
        return value
    pairs = [(a - start, b - start) for (a, b), (start, _) in zip(region, own)]
    return jax.lax.slice(value, *zip(*pairs))


def _size(region: Region) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in region)


def _hull(first: Region | None, second: Region) -> Region:
    pairs = zip(first or second, second)
    return tuple((min(a[0], b[0]), max(a[1], b[1])) for a, b in pairs)


def is_fused(eqn: Any) -> bool:
    """Whether a compiler computes such an equation along with its neighbours."""
    return _RULES.get(eqn.primitive) in (_elementwise, _reduction, _broadcast, _iota)


def _narrowed(eqn: Any, wanted: list[Region | None], known: dict[Any, Any]) -> Narrowed:
    rule, region = _RULES.get(eqn.primitive), wanted[0] if wanted else None
    found = None
    if rule is not None and region is not None and len(wanted) == 1:
        found = rule(eqn, region, known)
    elif eqn.primitive.name == SPLIT:
        found = _of_split(eqn, wanted)
    if isinstance(found, Narrowed):
        return found
    if found is not None:
        assert region is not None
        ins, run = found
        return Narrowed(ins, [region], lambda *xs: [run(*xs)])
    ins = [whole(x.aval.shape) for x in eqn.invars]
    return Narrowed(ins, [whole(x.aval.shape) for x in eqn.outvars], _binding(eqn))


def _known(flat: Flat) -> dict[Any, np.ndarray]:
    """Integers and booleans that depend on no input: indices, most of them."""
    known: dict[Any, Any] = {
        x: np.asarray(v) for x, v in flat.consts.items() if _is_index(x.aval)
    }
    for eqn in flat.eqns:
        is_index = all(_is_index(x.aval) for x in eqn.outvars) and not eqn.effects
        if is_index and all(x in known for x in variables(eqn.invars)):
            with jax.ensure_compile_time_eval():
                values = [jax_compat.read(known, x) for x in eqn.invars]
                outs = jax_compat.bind(eqn.primitive, values, eqn.params)
            known.update(zip(eqn.outvars, map(np.asarray, outs)))
    return known


def _is_index(aval: Any) -> bool:
    kind, shape = getattr(aval, "dtype", None), getattr(aval, "shape", ())
    if kind is None or math.prod(shape) > MAX_KNOWN:
        return False
    return any(jnp.issubdtype(kind, one) for one in (jnp.integer, jnp.bool_))


# Rules: from an equation and the wanted region of its result to the regions of its
# operands, and what gives the result; None if the equation is not understood.

Rule = Callable[[Any, Region, dict[Any, Any]], Any]


def _binding(eqn: Any, **changed: Any) -> Callable[..., list[Any]]:
    def run(*values: Any) -> list[Any]:
        types: list[Any] = [atom.aval for atom in eqn.invars]
        given = [
            np.asarray(x, kind.dtype) if isinstance(atom, Literal) else x
            for x, atom, kind in zip(values, eqn.invars, types)
        ]
        return jax_compat.bind(eqn.primitive, given, {**eqn.params, **changed})

    return run


def _one(eqn: Any, **changed: Any) -> Callable[..., Any]:
    run = _binding(eqn, **changed)
    return lambda *values: run(*values)[0]


def _shapes(eqn: Any) -> list[tuple[int, ...]]:
    return [tuple(atom.aval.shape) for atom in eqn.invars]


def _like(shape: Sequence[int], out: Sequence[int], region: Region) -> Region:
    """The region of an operand that broadcasts to a result along its axes."""
    if len(shape) != len(out):
        return whole(shape)
    pairs = zip(shape, out, region)
    return tuple(part if size == n else (0, size) for size, n, part in pairs)


def _elementwise(eqn: Any, region: Region, known: Any) -> Any:
    out = eqn.outvars[0].aval.shape
    return [_like(shape, out, region) for shape in _shapes(eqn)], _one(eqn)


def _of_point(eqn: Any, region: Region, known: Any) -> Any:
    return [region], _one(eqn, region=region)


def _broadcast(eqn: Any, region: Region, known: Any) -> Any:
    (shape, *rest), out = _shapes(eqn), eqn.outvars[0].aval.shape
    dims = eqn.params["broadcast_dimensions"]
    own = _like(shape, [out[d] for d in dims], tuple(region[d] for d in dims))
    return [own, *map(whole, rest)], _one(eqn, shape=_size(region))


def _transpose(eqn: Any, region: Region, known: Any) -> Any:
    places = np.argsort(eqn.params["permutation"])
    return [tuple(region[n] for n in places)], _one(eqn)


def _reduction(eqn: Any, region: Region, known: Any) -> Any:
    (shape,), axes, left = _shapes(eqn), eqn.params["axes"], iter(region)
    own = [(0, n) if d in axes else next(left) for d, n in enumerate(shape)]
    return [tuple(own)], _one(eqn)


def _cumulative(eqn: Any, region: Region, known: Any) -> Any:
    ((size, *_),) = [[_shapes(eqn)[0][eqn.params["axis"]]]]
    own = list(region)
    own[eqn.params["axis"]] = (0, size)
    run = _one(eqn)
    return [tuple(own)], lambda x: cut(run(x), region, tuple(own))


def _squeeze(eqn: Any, region: Region, known: Any) -> Any:
    (shape,), dims, left = _shapes(eqn), eqn.params["dimensions"], iter(region)
    own = [(0, 1) if d in dims else next(left) for d in range(len(shape))]
    return [tuple(own)], _one(eqn)


def _slice(eqn: Any, region: Region, known: Any) -> Any:
    starts, steps = eqn.params["start_indices"], eqn.params["strides"]
    steps = steps or (1,) * len(region)
    own = tuple(
        (start + a * step, start + (b - 1) * step + 1)
        for start, step, (a, b) in zip(starts, steps, region)
    )
    zeros = (0,) * len(region)
    return [own], lambda x: jax.lax.slice(x, zeros, x.shape, steps)


def _dynamic_slice(eqn: Any, region: Region, known: Any) -> Any:
    shape, sizes = _shapes(eqn)[0], eqn.params["slice_sizes"]
    numbers = [
        jax_compat.read(known, x) if _can_read(known, x) else None
        for x in eqn.invars[1:]
    ]
    starts = [
        None if at is None else min(max(int(at), 0), n - size)
        for at, n, size in zip(numbers, shape, sizes)
    ]
    pairs = list(zip(starts, region, shape))
    own = tuple((0, n) if at is None else (at + a, at + b) for at, (a, b), n in pairs)

    def run(x: Any, *given: Any) -> Any:
        whole_sizes = zip(starts, sizes, x.shape)
        taken = [size if at is None else n for at, size, n in whole_sizes]
        indices = [i if at is None else 0 for at, i in zip(starts, given)]
        found = jax.lax.dynamic_slice(x, indices, taken)
        have = tuple(
            (0, size) if at is None else part
            for at, size, part in zip(starts, sizes, region)
        )
        return cut(found, region, have)

    return [own, *((),) * len(numbers)], run


def _can_read(known: dict[Any, Any], atom: Any) -> bool:
    return isinstance(atom, Literal) or atom in known


def _concatenate(eqn: Any, region: Region, known: Any) -> Any:
    axis, ins, start = eqn.params["dimension"], [], 0
    for shape in _shapes(eqn):
        stop = start + shape[axis]
        low, high = max(region[axis][0], start), min(region[axis][1], stop)
        part = (low - start, high - start)
        own = tuple(part if d == axis else one for d, one in enumerate(region))
        ins.append(own if low < high else None)
        start = stop

    def run(*values: Any) -> Any:
        held = [x for x in values if x is not None]
        return held[0] if len(held) == 1 else jax.lax.concatenate(held, axis)

    return ins, run


def _dot(eqn: Any, region: Region, known: Any) -> Any:
    contracted, batched = eqn.params["dimension_numbers"]
    count, ins = len(batched[0]), []
    left = iter(region[count:])
    for shape, own, rows in zip(_shapes(eqn), contracted, batched):
        part = {d: region[n] for n, d in enumerate(rows)}
        part |= {d: (0, shape[d]) for d in own}
        ins.append(
            tuple(part[d] if d in part else next(left) for d in range(len(shape)))
        )
    return ins, _one(eqn)


def _iota(eqn: Any, region: Region, known: Any) -> Any:
    if eqn.invars:
        return None
    axis, dtype = eqn.params["dimension"], eqn.params["dtype"]

    def run() -> Any:
        numbers = jax.lax.broadcasted_iota(dtype, _size(region), axis)
        return numbers + np.asarray(region[axis][0], dtype)

    return [], run


def _reshape(eqn: Any, region: Region, known: Any) -> Any:
    """Axes that are kept, or split or merged at their first part."""
    shape, out = _shapes(eqn)[0], eqn.outvars[0].aval.shape
    if len(eqn.invars) > 1 or eqn.params["dimensions"] is not None:
        return None
    own, made = list(whole(shape)), list(whole(out))
    for group in _groups(shape, out):
        sizes = zip((shape, out), group)
        olds, news = ([d for d in axes if of[d] != 1] for of, axes in sizes)
        if len(olds) == len(news) == 1:
            own[olds[0]] = made[news[0]] = region[news[0]]
        elif len(olds) == 1 and news:
            inner = math.prod(out[d] for d in news[1:])
            start, stop = made[news[0]] = region[news[0]]
            own[olds[0]] = start * inner, stop * inner
    have = tuple(made)
    run = _one(eqn, new_sizes=_size(have))
    return [tuple(own)], lambda x: cut(run(x), region, have)


def _groups(
    olds: Sequence[int], news: Sequence[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """The axes of two shapes of equal size, those together that a reshape mixes."""
    i = j = 0
    while i < len(olds) or j < len(news):
        first, second = [i] if i < len(olds) else [], [j] if j < len(news) else []
        i, j = i + 1, j + 1
        while True:
            one = math.prod(olds[n] for n in first)
            two = math.prod(news[n] for n in second)
            if one < two and i < len(olds):
                first.append(i)
                i += 1
            elif two < one and j < len(news):
                second.append(j)
                j += 1
            else:
                break
        yield first, second


def _of_split(eqn: Any, wanted: list[Region | None]) -> Narrowed | None:
    """Of a value cut into several along an axis: other axes as all of them want."""
    axis, (shape,), own = eqn.params["axis"], _shapes(eqn), None
    for region in wanted:
        own = own if region is None else _hull(own, region)
    if own is None:
        return None
    outs = [
        tuple((0, size) if d == axis else part for d, part in enumerate(own))
        for size in eqn.params["sizes"]
    ]
    parts = enumerate(own)
    ins = tuple((0, shape[axis]) if d == axis else part for d, part in parts)
    return Narrowed([ins], outs, _binding(eqn))


def _all_named(names: str, rule: Rule) -> dict[Any, Rule]:
    """A rule for those of some primitives that this JAX has."""
    found = (getattr(primitives, f"{name}_p", None) for name in names.split())
    return {primitive: rule for primitive in found if primitive is not None}


_RULES: dict[Any, Rule] = {
    **_all_named(
        """
        abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil clamp conj
        convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2
        expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt
        max min mul name ne neg nextafter not or pow real reduce_precision rem round
        rsqrt select_n sign sin sinh sqrt square stop_gradient sub tan tanh xor
        """,
        _elementwise,
    ),
    **_all_named(
        """
        reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor
        argmax argmin
        """,
        _reduction,
    ),
    **_all_named("cumsum cumprod cummax cummin cumlogsumexp", _cumulative),
    **_all_named("broadcast_in_dim", _broadcast),
    **_all_named("transpose", _transpose),
    **_all_named("squeeze", _squeeze),
    **_all_named("slice", _slice),
    **_all_named("dynamic_slice", _dynamic_slice),
    **_all_named("concatenate", _concatenate),
    **_all_named("dot_general", _dot),
    **_all_named("iota", _iota),
    **_all_named("reshape", _reshape),
    point_p: _of_point,
}
