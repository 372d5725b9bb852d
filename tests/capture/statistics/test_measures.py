# SPDX-License-Identifier: Apache-2.0
"""Figures: as NumPy has them, in one fetch, wherever the arrays are."""

import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import meshes
import treetap as tt
from treetap._capture.statistics import measures as _measures
from treetap._capture.statistics.arithmetic import as_integers, bars, bars_by_edge
from treetap._capture.statistics.measures import (
    UNMEASURED,
    Wanted,
    figures_of,
    figures_of_all,
)
from treetap._capture.statistics.reduced import Placed, measured
from treetap._capture.statistics.reducers import as_reducers

EXACT = ("count", "low", "high", "abs_max", "dead", "nan", "infinite")
ROUNDED = ("mean", "std", "norm")


@pytest.fixture(params=["small", "large"])
def size(request, monkeypatch):
    """Both ways: on the host, and through a compiled function."""
    if request.param == "large":
        monkeypatch.setattr(_measures, "SMALL", 0)


def expected(array):
    """Figures by NumPy in float64."""
    array = np.asarray(array)
    wide = np.abs(array) if np.iscomplexobj(array) else array.astype(np.float64)
    held = wide[np.isfinite(wide)]
    dead = None
    if jnp.issubdtype(array.dtype, jnp.inexact) and array.ndim:
        dead = np.mean(np.all(wide.reshape(-1, array.shape[-1]) == 0, axis=0))
    return {
        "count": array.size,
        "mean": held.mean(),
        "std": held.std(),
        "low": held.min(),
        "high": held.max(),
        "abs_max": np.abs(held).max(),
        "norm": math.sqrt((held**2).sum()),
        "dead": dead,
        "nan": np.isnan(wide).sum(),
        "infinite": np.isinf(wide).sum(),
    }


def check(found, array):
    known = expected(array)
    is_rounded = np.iscomplexobj(array)  # magnitudes are
    for name in EXACT:
        wanted = known[name]
        if is_rounded and name in ("low", "high", "abs_max"):
            wanted = pytest.approx(wanted, rel=1e-6)
        assert getattr(found, name) == wanted, name
    for name in ROUNDED:
        assert getattr(found, name) == pytest.approx(known[name], rel=1e-5, abs=1e-7)


def same(first, second):
    for name in EXACT:
        assert getattr(first, name) == getattr(second, name), name
    for name in ROUNDED:
        assert getattr(first, name) == pytest.approx(getattr(second, name), rel=1e-5)


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


ARRAYS = {
    "float32": normal(5, 7),
    "bfloat16": jnp.asarray(normal(5, 7), jnp.bfloat16),
    "float16": jnp.asarray(normal(5, 7), jnp.float16),
    "float8": jnp.asarray(normal(5, 7), jnp.float8_e4m3fn),
    "int32": np.arange(-3, 20, dtype=np.int32),
    "uint8": np.arange(250, 256, dtype=np.uint8),
    "bool": np.array([True, False, True]),
    "complex64": (normal(3, 4) + 1j * normal(3, 4)).astype(np.complex64),
    "scalar": np.float32(3.0),
    "one": np.ones((1, 1), np.float32),
    "zeros": np.zeros((2, 3), np.float32),
    "dead": np.array([[0.0, 1.0, 0.0], [0.0, -1.0, 0.0]], np.float32),
}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.usefixtures("size")
def test_figures_are_those_of_numpy(name):
    array = jnp.asarray(ARRAYS[name])
    check(figures_of(array), array)


@pytest.mark.usefixtures("size")
def test_bars_are_those_of_numpy():
    array = jnp.asarray(normal(50, 7))
    bars = figures_of(array).bars
    assert bars.edges[0] == array.min()
    assert bars.edges[-1] == array.max()
    assert np.allclose(np.diff(bars.edges), np.diff(bars.edges)[0], rtol=1e-3)
    assert bars.counts.tolist() == np.histogram(array, bars.edges)[0].tolist()
    assert len(figures_of(array, bins=3).bars.counts) == 3


WAYS = bars, jax.jit(bars_by_edge)  # of NumPy, and of JAX


@pytest.mark.parametrize("scale", [1.0, 3e38, 1e-38])
def test_both_ways_to_bars_agree(scale):
    array = jnp.asarray(normal(400)) / 5 * scale
    edges = figures_of(array).bars.edges.astype(np.float32)
    # numbers on edges are what the two could differ about
    array = np.concatenate([array[41:], edges])
    counted, compared = (way(edges, array, np.ones(400, bool)) for way in WAYS)
    assert as_integers(counted).tolist() == as_integers(compared).tolist()
    assert as_integers(counted).sum() == 400


LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize("value", [0.0, 5.0, -1e10, 1e-30, LARGEST, -LARGEST])
@pytest.mark.usefixtures("size")
def test_bars_of_equal_numbers_have_a_width(value):
    bars = figures_of(jnp.full(9, value)).bars
    assert np.all(np.diff(bars.edges) > 0)
    assert sorted(bars.counts)[-2:] == [0, 9]


@pytest.mark.usefixtures("size")
def test_what_is_not_finite_is_counted_and_left_out():
    array = jnp.array([1.0, jnp.nan, 3.0, jnp.inf, -jnp.inf])
    found = figures_of(array)
    assert (found.nan, found.infinite, found.nonfinite, found.count) == (1, 2, 3, 5)
    assert (found.mean, found.low, found.high, found.abs_max) == (2.0, 1.0, 3.0, 3.0)
    assert found.bars.counts.sum() == 2


@pytest.mark.usefixtures("size")
def test_of_nothing_finite_only_counts_are_known():
    found = figures_of(jnp.full((2, 2), jnp.nan))
    assert (found.count, found.nan, found.infinite) == (4, 4, 0)
    assert found.mean is found.std is found.low is found.norm is found.bars is None
    empty = figures_of(jnp.zeros((0, 3)))
    assert (empty.count, empty.nonfinite, empty.mean, empty.dead) == (0, 0, None, None)
    assert figures_of(jnp.zeros((3, 0)), apart=1).parts[2].count == 0


@pytest.mark.parametrize("scale", [1e-37, 1e-20, 1e20, 3e38])
@pytest.mark.usefixtures("size")
def test_squares_neither_overflow_nor_vanish(scale):
    array = np.array([0.5, -1.0, 1.0, 0.25], np.float32) * np.float32(scale)
    check(figures_of(jnp.asarray(array)), array)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.usefixtures("size")
def test_figures_of_equal_numbers_near_the_end_of_their_type(dtype):
    largest = float(jnp.finfo(dtype).max)
    found = figures_of(jnp.full((4, 5), largest, dtype))
    assert (found.mean, found.std) == (largest, 0.0)
    assert found.norm == pytest.approx(largest * math.sqrt(20))
    assert found.bars.counts.sum() == 20


@pytest.mark.usefixtures("size")
def test_a_large_mean_does_not_spoil_the_deviation():
    array = 1e4 + normal(1000)
    assert figures_of(jnp.asarray(array)).std == pytest.approx(array.std(), rel=1e-3)


@pytest.mark.usefixtures("size")
def test_leaves_of_a_tree_are_one():
    first, second = normal(3, 4), 2 + normal(5)
    tree = {"a": jnp.asarray(first), "b": [jnp.asarray(second), None, "text"]}
    tree["key"] = jax.random.key(0)
    found, whole = figures_of(tree), np.concatenate([first.ravel(), second])
    check(found, whole)
    edges = found.bars.edges
    assert found.bars.counts.tolist() == np.histogram(whole, edges)[0].tolist()


def test_what_is_no_array_has_no_figures():
    for tree in (None, "text", jax.random.key(0), jax.ShapeDtypeStruct((3,), "f4")):
        assert figures_of(tree) is UNMEASURED
    assert UNMEASURED.nonfinite is None
    assert figures_of(3.0).mean == 3.0
    assert figures_of(np.array([2**40, 0])).high == 2**40


@pytest.mark.usefixtures("size")
def test_parts_are_those_of_the_first_axes():
    array = normal(2, 3, 4, 5)
    array[1, 2] = 0
    found = figures_of(jnp.asarray(array), apart=2)
    assert len(found.parts) == 6
    for part, own in zip(found.parts, array.reshape(6, 4, 5)):
        check(part, own)
        assert part.parts == ()
        assert np.array_equal(part.bars.edges, found.bars.edges)
    total = sum(part.bars.counts for part in found.parts)
    assert total.tolist() == found.bars.counts.tolist()
    assert found.dead == 1 / 6  # units of layers are different units
    assert found.mean == pytest.approx(array.mean(), abs=1e-6)
    assert found.std == pytest.approx(array.std(), rel=1e-5)


@pytest.mark.usefixtures("size")
def test_units_of_shards_are_the_same_units():
    array = jnp.array([[[0.0, 0.0, 1.0]], [[0.0, 2.0, 1.0]]])
    found = figures_of_all([Wanted(array, 1, shards=(0,))])[0]
    assert found.dead == pytest.approx(1 / 3)
    assert [part.dead for part in found.parts] == pytest.approx([2 / 3, 1 / 3])


def test_units_of_iterations_that_never_ran_are_not_dead():
    array = jnp.array([[[1.0, 2.0]], [[0.0, 0.0]]])  # two iterations, one shard
    ran = jnp.array([True, False])
    found = figures_of_all([Wanted(array, 2, shards=(1,), masks=[[ran]])])[0]
    assert found.dead == 0.0
    assert [part.dead for part in found.parts] == [0.0, None]
    mesh = jax.make_mesh((1,), ("s",), axis_types=(AxisType.Auto,))

    def row(x):
        return tt.tap(x, "v")

    def step(carry, x):
        spread = jax.shard_map(row, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
        return carry, jax.lax.cond(x[0] > 0, spread, lambda x: x, x)

    fn = lambda xs: jax.lax.scan(step, 0.0, xs)[1]
    for options in ({}, {"reduce": [tt.DeadUnits(), tt.Moments()]}):
        _, record = tt.observe(fn, **options)(jnp.array([[1.0, 2.0], [-1.0, 0.0]]))
        assert record["v"].taken.tolist() == [True, False]
        assert record["v"].figures.dead == 0.0


@pytest.mark.usefixtures("size")
def test_what_a_mask_leaves_out_does_not_count():
    array = jnp.asarray(normal(3, 4))
    mask = jnp.array([True, False, True])
    found = figures_of_all([Wanted(array, 1, masks=[[mask]])])[0]
    check(found, array[jnp.array([0, 2])])
    assert [part.count for part in found.parts] == [4, 0, 4]
    assert found.parts[1].mean is found.parts[1].dead is None
    none = figures_of_all([Wanted(array, masks=[[jnp.array(False)]])])[0]
    assert (none.count, none.norm) == (0, None)
    both = figures_of_all([Wanted(array, masks=[[mask, jnp.array([[True]])]])])[0]
    assert both.count == 8  # a mask with an axis of size 1 counts for all of it


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("apart", [0, 1])
def test_sharded_arrays_stay_where_they_are(kind, apart):
    mesh = meshes.mesh_of((4, 2), ("a", "b"), kind)
    array = normal(8, 6, 16)
    spread = jax.device_put(array, jax.NamedSharding(mesh, jax.P("a", None, "b")))
    found, plain = figures_of(spread, apart=apart), figures_of(array, apart=apart)
    same(found, plain)
    assert len(found.parts) == len(plain.parts)
    for ours, theirs in zip(found.parts, plain.parts):
        same(ours, theirs)
    how = _measures.How(apart, (), 40, True)
    with jax.set_mesh(mesh):
        program = _measures._compiled(mesh).lower(how, [(spread, [])]).compile()
    gathered = [
        line.split(" = ")[1]
        for line in program.as_text().splitlines()
        if " all-gather(" in line
    ]
    for text in gathered:  # sums only: of 8 parts, 40 counts of two words
        shape = text[text.index("[") + 1 : text.index("]")]
        assert math.prod(map(int, shape.split(","))) <= 8 * 2 * 40
    with jax.set_mesh(mesh):
        same(figures_of(spread, apart=apart), plain)


def test_leaves_on_different_devices():
    devices = meshes.devices_of(2)
    arrays = [jax.device_put(normal(5) * n, devices[n]) for n in (0, 1)]
    large = [jnp.tile(array, 2**14) for array in arrays]
    masks = [[jax.device_put(True, devices[1])]] * 2
    for pair in (arrays, large):
        found = figures_of_all([Wanted(pair, masks=masks)])[0]
        whole = np.concatenate([np.asarray(array) for array in pair])
        assert found.count == whole.size
        assert found.norm == pytest.approx(np.sqrt((whole**2).sum()), rel=1e-5)


REDUCERS = as_reducers(
    [
        tt.Moments(),
        tt.AbsMax(),
        tt.Norm(),
        tt.NonFinite(),
        tt.DeadUnits(),
        tt.Histogram(bins=8, limits=(-2.0, 2.0)),
    ]
)


def states_of(reducers, array, guards=(), rows=0):
    """What is measured of an array, some of whose first axes are kept apart."""
    levels = tuple(range(rows))
    masks = [Placed(guard, levels[: guard.ndim]) for guard in guards]
    apart = dict(zip(levels, array.shape))
    return measured(reducers, Placed(jnp.asarray(array), levels), masks, apart)


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_figures_from_reducers_are_those_of_values(rows):
    array = normal(2, 3, 4, 5)
    array[0, 1, :, 2] = 0
    array[1, 0, 0, 0], array[1, 0, 0, 1] = np.nan, -np.inf
    reduced = states_of(REDUCERS, array, rows=rows)
    found, direct = figures_of(reduced), figures_of(array, apart=rows)
    assert found.low is found.high is None
    assert len(found.parts) == len(direct.parts)
    for ours, theirs in zip((found, *found.parts), (direct, *direct.parts)):
        for name in ("count", "abs_max", "nan", "infinite", "dead"):
            assert getattr(ours, name) == getattr(theirs, name), name
        for name in ROUNDED:
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-5)
        assert ours.bars.counts.sum() == theirs.count - theirs.nonfinite
    assert found.bars.edges.tolist() == np.linspace(-2, 2, 9).tolist()


def test_reducers_leave_out_what_they_do_not_know():
    array = jnp.array([1.0, jnp.nan])
    for reducer, known in {
        tt.Moments(): {"count": 2, "mean": 1.0, "std": 0.0, "nonfinite": 1},
        tt.AbsMax(): {"abs_max": 1.0},
        tt.Norm(): {"norm": 1.0},
        tt.NonFinite(): {"count": 2, "nan": 1, "infinite": 0, "nonfinite": 1},
        tt.AllFinite(): {"nonfinite": 1},
        tt.TopK(1): {},
    }.items():
        found = figures_of(states_of(as_reducers(reducer), array))
        names = (*EXACT, *ROUNDED, "nonfinite")
        left = {name: getattr(found, name) for name in names}
        assert {k: v for k, v in left.items() if v is not None} == known


def test_reduced_trees_and_parts_that_were_not_seen():
    kept = as_reducers([tt.Moments(), tt.Norm()])
    guards = (jnp.array([True, False]),)
    tree = [
        states_of(kept, jnp.array([[3.0], [9.0]]), guards, 1),
        states_of(kept, jnp.array([[4.0, 0.0], [9.0, 9.0]]), guards, 1),
    ]
    found = figures_of(tree)
    assert (found.count, found.norm, found.mean) == (3, 5.0, pytest.approx(7 / 3))
    assert [part.count for part in found.parts] == [3, 0]
    mixed = [tree[0], states_of(kept, jnp.ones(3))]
    assert figures_of(mixed).parts == ()


def test_counts_beyond_32_bits():
    reduced = states_of(as_reducers([tt.NonFinite()]), jnp.ones(3))
    states = jax.tree.map(lambda x: x.at[0].set(2), reduced.states)
    wide = type(reduced)(reduced.seen, states, reduced.reducers)
    assert figures_of(wide).count == 2**33 + 3


def test_traced_and_donated_values_are_refused():
    def inside(x):
        return figures_of(x).mean

    with pytest.raises(tt.CaptureError, match=r"being traced.*Return the Record"):
        jax.jit(inside)(jnp.ones(3))
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(tt.CaptureError, match="donated"):
        figures_of(gone)


def test_thousands_of_small_sites_take_no_time():
    host = jax.devices("cpu")[0]
    arrays = [jax.device_put(normal(8, 16 + n % 20), host) for n in range(2000)]
    start = time.process_time()
    found = figures_of_all([Wanted(array) for array in arrays])
    assert time.process_time() - start < 3
    assert len(found) == 2000


def test_leaves_with_other_first_axes_are_measured_together():
    found = figures_of((jnp.ones((2, 3)), jnp.zeros(4)), apart=1)
    assert (found.count, found.parts) == (10, ())
    assert len(figures_of((jnp.ones((2, 3)), jnp.zeros((2, 4))), apart=1).parts) == 2


def test_a_scalar_has_no_dead_units():
    fn = lambda x: tt.tap(x * 0, "h")
    _, record = tt.observe(fn, reduce=[tt.DeadUnits()])(1.0)
    assert record["h"].figures.dead is None
    _, record = tt.observe(fn, reduce=[tt.DeadUnits()])(jnp.ones((2, 3)))
    assert record["h"].figures.dead == 1.0
