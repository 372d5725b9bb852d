# SPDX-License-Identifier: Apache-2.0
"""Statistics under transforms: the same numbers as of a full capture."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import treetap as tt
from meshes import mesh_of
from small_models import Layer

X = jnp.asarray(np.random.default_rng(1).normal(size=(4, 6)), jnp.float32)
LENGTHS = jnp.array([2, 0, 3, 1])
REDUCERS = [tt.Moments(), tt.AbsMax(), tt.Norm()]
MORE = [*REDUCERS, tt.Histogram(8), tt.TopK(3), tt.DeadUnits(), tt.NonFinite()]


def step(x):
    return tt.tap(jnp.sin(x) * 1.5, "h") + 0.1


def scanned(x):
    return jax.lax.scan(lambda x, _: (step(x), None), x, None, length=5)[0]


def looped(x, times=4):
    body = lambda held: (held[0] + 1, step(held[1]))
    return jax.lax.while_loop(lambda held: held[0] < times, body, (0, x))[1]


def numbers(values):
    """The plainest statistics of all values together, by NumPy."""
    values = np.asarray(values, np.float64).ravel()
    largest, norm = np.abs(values).max(), np.linalg.norm(values)
    return values.mean(), values.var(), values.size, largest, norm


def found(stats):
    moments = stats["moments"]
    first = moments.mean, moments.variance, moments.count
    return *first, stats["abs_max"], stats["norm"]


def assert_stats(stats, values):
    np.testing.assert_allclose(found(stats), numbers(values), rtol=1e-5, atol=1e-6)


WRAPS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "tt.jit": tt.jit,
    "remat": jax.checkpoint,
    "vmap": jax.vmap,
    "vmap of vmap": lambda f: jax.vmap(jax.vmap(f)),
    "jit of remat of vmap": lambda f: jax.jit(jax.checkpoint(jax.vmap(f))),
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "jit of grad of remat": lambda f: jax.jit(
        jax.grad(lambda x: jax.checkpoint(f)(x).sum())
    ),
}


@pytest.mark.parametrize("name", WRAPS)
@pytest.mark.parametrize("fn", [step, scanned], ids=["once", "scan"])
def test_statistics_are_those_of_the_captured_values(name, fn):
    wrapped = WRAPS[name](fn)
    out, full = tt.observe(wrapped)(X)
    same, record = tt.observe(wrapped, reduce=REDUCERS)(X)
    np.testing.assert_allclose(out, same, rtol=1e-6)
    site = record["h"]
    assert site.value is None
    assert_stats(record.total()["h"].stats, full["h"].value)
    assert site.stats["norm"].shape == (() if fn is step else (5,))


@pytest.mark.parametrize("fn", [scanned, jax.jit(looped)], ids=["scan", "while"])
def test_reducers_of_all_sorts_go_through_loops(fn):
    count = {"max_iterations": 4} if fn is not scanned else {}
    values = np.asarray(tt.observe(fn, **count)(X)[1]["h"].value)
    stats = tt.observe(fn, reduce=MORE)(X)[1].total()["h"].stats
    assert_stats(stats, values)
    largest = sorted(np.abs(values).ravel(), reverse=True)[:3]
    np.testing.assert_allclose(np.abs(stats["top_k"].values), largest, rtol=1e-6)
    assert stats["histogram"].counts.sum() == values.size
    assert stats["dead_units"].dead.tolist() == [False] * 6
    assert stats["nonfinite"] == (0, 0, 0, values.size)


def test_a_mapped_scan_has_its_rows_together_and_its_iterations_apart():
    _, full = tt.observe(jax.vmap(scanned))(X)
    _, record = tt.observe(jax.vmap(scanned), reduce=REDUCERS)(X)
    assert full["h"].value.shape == (4, 5, 6)
    norms = [np.linalg.norm(full["h"].value[:, n]) for n in range(5)]
    np.testing.assert_allclose(record["h"].stats["norm"], norms, rtol=1e-5)


def test_nested_scans_keep_both_axes():
    def outer(x):
        return jax.lax.scan(lambda x, _: (scanned(x), None), x, None, length=3)[0]

    _, full = tt.observe(outer)(X)
    _, record = tt.observe(outer, reduce=REDUCERS)(X)
    norms = jnp.sqrt((full["h"].value ** 2).sum((-1, -2)))
    assert norms.shape == (3, 5)
    np.testing.assert_allclose(record["h"].stats["norm"], norms, rtol=1e-5)
    assert_stats(record.total()["h"].stats, full["h"].value)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_iterations_of_a_while_loop_are_together(wrap):
    _, full = tt.observe(looped, max_iterations=4)(X)
    _, record = tt.observe(wrap(looped), reduce=REDUCERS)(X)
    assert record["h"].count == 4
    assert_stats(record["h"].stats, full["h"].value)


def test_rows_of_a_mapped_while_loop_count_until_they_end():
    fn = jax.vmap(looped)
    _, full = tt.observe(fn, max_iterations=3)(X, LENGTHS)
    values = [full["h"].value[row, :n] for row, n in enumerate(LENGTHS.tolist())]
    _, record = tt.observe(fn, reduce=REDUCERS)(X, LENGTHS)
    assert_stats(record["h"].stats, np.concatenate(values))


def test_a_scan_in_a_mapped_while_loop_keeps_its_iterations_apart():
    def fn(x, times):
        body = lambda held: (held[0] + 1, scanned(held[1]))
        return jax.lax.while_loop(lambda held: held[0] < times, body, (0, x))[1]

    _, record = tt.observe(jax.vmap(fn), reduce=REDUCERS)(X, LENGTHS)
    assert record["h"].stats["moments"].count.tolist() == [36.0] * 5


def branched(x, is_first):
    return tt.cond(is_first, step, lambda x: tt.tap(x * 3, "other"), x)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_branch_that_is_not_taken_counts_for_nothing(wrap):
    _, record = tt.observe(wrap(branched), reduce=REDUCERS)(X, True)
    assert record["h"].taken
    assert_stats(record["h"].stats, tt.observe(step)(X)[1]["h"].value)
    assert not record["other"].taken
    assert record["other"].stats["moments"].count == 0


def test_a_branch_in_a_loop_counts_when_it_is_taken():
    def fn(x):
        body = lambda x, n: (branched(x, n % 2 == 0), None)
        return jax.lax.scan(body, x, jnp.arange(5))[0]

    _, record = tt.observe(fn, reduce=REDUCERS)(X)
    assert record["h"].stats["moments"].count.tolist() == [24, 0, 24, 0, 24]
    assert record.total()["other"].stats["moments"].count == 48

    def loop(x):
        body = lambda held: (held[0] + 1, branched(held[1], held[0] % 2 == 0))
        return jax.lax.while_loop(lambda held: held[0] < 5, body, (0, x))[1]

    _, again = tt.observe(loop, reduce=REDUCERS)(X)
    expected = found(record.total()["h"].stats)
    np.testing.assert_allclose(found(again["h"].stats), expected, rtol=1e-5)


def test_rows_of_a_mapped_branch_of_ours_count_where_they_took_it():
    mask = jnp.array([True, False, False, True])
    _, record = tt.observe(jax.vmap(branched), reduce=REDUCERS)(X, mask)
    assert_stats(record["h"].stats, (jnp.sin(X) * 1.5)[jnp.array([0, 3])])
    assert_stats(record["other"].stats, (X * 3)[1:3])


def test_a_value_that_is_the_same_for_all_rows_counts_once():
    def fn(x, is_first):
        return tt.cond(is_first, lambda x: x + tt.tap(jnp.ones(3), "one")[0], step, x)

    mask = jnp.array([True, False, False, True])
    _, record = tt.observe(jax.vmap(fn), reduce=REDUCERS)(X, mask)
    assert record["one"].stats["moments"].count == 3


# Gradients.


@pytest.mark.parametrize("fn", [step, scanned], ids=["once", "scan"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_gradients_have_statistics(fn, wrap):
    grad = wrap(jax.value_and_grad(lambda x: (jax.checkpoint(fn)(x) ** 2).sum()))
    _, full = tt.observe(grad, grads=True)(X)
    _, record = tt.observe(grad, grads=True, reduce=REDUCERS)(X)
    assert record["h"].grad is None
    total = record.total()["h"]
    assert_stats(total.grad_stats, full["h"].grad)
    assert_stats(total.stats, full["h"].value)


def test_values_and_gradients_are_kept_beside_their_statistics_on_request():
    grad = jax.grad(lambda x: scanned(x).sum())
    _, full = tt.observe(grad, grads=True)(X)
    _, record = tt.observe(grad, grads=True, values=True, reduce=REDUCERS)(X)
    np.testing.assert_allclose(record["h"].value, full["h"].value)
    np.testing.assert_allclose(record["h"].grad, full["h"].grad)
    assert_stats(record.total()["h"].grad_stats, full["h"].grad)


def test_a_value_that_the_loss_does_not_use_has_a_gradient_of_zeros():
    def loss(x):
        unused = jax.lax.scan(lambda x, _: (step(x), None), x, None, length=3)
        used = tt.tap(x * 2, "used").sum()
        return used + 0 * jax.lax.stop_gradient(unused[0]).sum()

    _, record = tt.observe(jax.grad(loss), grads=True, reduce=REDUCERS)(X)
    assert record["h"].grad_stats["norm"].tolist() == [0, 0, 0]
    assert record["h"].stats["norm"].shape == (3,)


def test_second_derivatives_have_statistics_by_order():
    fn = jax.grad(jax.grad(lambda x: step(x) ** 3))
    _, full = tt.observe(fn, grads=True)(0.3)
    _, record = tt.observe(fn, grads=True, reduce=[tt.AbsMax()])(0.3)
    orders = [stats["abs_max"] for stats in record["h"].grad_stats]
    np.testing.assert_allclose(orders, np.abs(full["h"].grad), rtol=1e-5)


def test_statistics_inside_a_differentiated_function_have_no_gradient():
    def loss(x):
        out, record = tt.observe(scanned, reduce=REDUCERS)(x)
        return out.sum() + record.total()["h"].stats["norm"], record

    grads, record = jax.grad(loss, has_aux=True)(X)
    np.testing.assert_allclose(grads, jax.grad(lambda x: scanned(x).sum())(X))
    assert record["h"].stats["norm"].shape == (5,)


# Shards.


def on_mesh(kind, value=X):
    mesh = mesh_of((4, 2), ("data", "model"), kind)
    placed = jax.device_put(value, jax.NamedSharding(mesh, jax.P("data", "model")))
    return mesh, placed


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_values_are_measured_where_they_are(kind):
    value = jnp.tile(X, (16, 8))
    mesh, placed = on_mesh(kind, value)
    with jax.set_mesh(mesh):
        compiled = jax.jit(tt.observe(scanned, reduce=MORE)).lower(placed).compile()
        _, record = compiled(placed)
    _, full = tt.observe(scanned)(value)
    assert_stats(record.total()["h"].stats, full["h"].value)
    gathered = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", compiled.as_text())
    sizes = [math.prod(map(int, filter(None, shape.split(",")))) for shape in gathered]
    # What each shard has counted, and units, may be gathered; values may not.
    assert max(sizes, default=0) <= value.shape[-1]
    assert value.size // 8 > value.shape[-1]


@pytest.mark.parametrize("reducer", MORE, ids=lambda reducer: reducer.name)
def test_nothing_of_the_size_of_a_value_is_written_out(reducer):
    def layers(x, weights):
        body = lambda x, w: (tt.tap(jnp.tanh(x @ w), "h"), None)
        return jax.lax.scan(body, x, weights)[0]

    args = jnp.ones((4, 32, 128)), jnp.ones((6, 128, 128))

    def temporaries(fn):
        compiled = jax.jit(fn).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    more = temporaries(tt.observe(layers, reduce=[reducer])) - temporaries(layers)
    sizes_and_places = 2 * isinstance(reducer, tt.TopK)  # it looks at them many times
    assert more < (0.1 + sizes_and_places) * args[0].nbytes


def test_shards_are_apart_and_can_be_put_together():
    mesh, placed = on_mesh(AxisType.Auto)
    spec = jax.P("data", "model")
    fn = jax.shard_map(scanned, mesh=mesh, in_specs=spec, out_specs=spec)
    _, full = tt.observe(scanned)(X)
    for wrap in (lambda f: f, jax.jit):
        _, record = tt.observe(wrap(fn), reduce=REDUCERS)(placed)
        assert record["h"].stats["norm"].shape == (8, 5)
        moments = record.total()["h"].stats["moments"]
        np.testing.assert_allclose(moments.mean, full["h"].value.mean(), rtol=1e-5)
        assert moments.count == full["h"].value.size


def test_what_is_the_same_on_several_shards_counts_once():
    mesh, placed = on_mesh(AxisType.Auto)

    def local(x):
        return step(jax.lax.psum(x, "model"))

    specs = {"in_specs": jax.P("data", "model"), "out_specs": jax.P("data")}
    fn = jax.shard_map(local, mesh=mesh, **specs)
    out, record = tt.observe(jax.jit(fn), reduce=REDUCERS)(placed)
    assert record.total()["h"].stats["moments"].count == out.size
    assert record["h"].reduced.seen.sum() == 4


def test_loops_and_branches_inside_shards():
    mesh, placed = on_mesh(AxisType.Auto)

    def local(x):
        return branched(looped(x), jax.lax.axis_index("data") == 0)

    spec = jax.P("data", "model")
    fn = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    _, record = tt.observe(jax.jit(fn), reduce=REDUCERS)(placed)
    total = record.total()
    assert total["h"].stats["moments"].count == 4 * X.size
    assert total["h#1"].stats["moments"].count == X.size / 4
    assert total["other"].stats["moments"].count == X.size * 3 / 4


# Custom rules, trees, models.


def test_values_inside_custom_rules_are_measured():
    @jax.custom_vjp
    def own(x):
        return step(x)

    own.defvjp(lambda x: (step(x), x), lambda x, g: (g * x,))
    for fn in (own, jax.jit(jax.grad(lambda x: own(x).sum()))):
        _, record = tt.observe(fn, reduce=REDUCERS)(X)
        assert_stats(record["h"].stats, jnp.sin(X) * 1.5)


def test_a_tree_has_statistics_leaf_by_leaf():
    def fn(x):
        return tt.tap({"a": x, "b": (x > 0, jax.random.key(0))}, "tree")["a"]

    for wrap in (lambda f: f, jax.jit):
        _, record = tt.observe(wrap(fn), reduce=[tt.AbsMax()])(X)
        stats = record["tree"].stats["abs_max"]
        assert stats["a"] == jnp.abs(X).max()
        assert stats["b"] == (1.0, None)


def test_a_value_that_is_no_array_has_none():
    class Odd(tt.Module):
        def __call__(self, x):
            return {"name": "odd", "x": x}

    _, record = tt.observe(Odd(), reduce=[tt.AbsMax()])(X)
    assert record[0].stats["abs_max"]["name"] is None
    assert record[0].stats["abs_max"]["x"] == jnp.abs(X).max()


def test_method_outputs_of_a_model_are_measured_by_selector():
    class Net(tt.Module):
        def __init__(self):
            self.layers = tt.List([Layer(2.0), Layer(3.0)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    step = tt.jit(lambda net, x: net(x))
    _, record = tt.observe(step, "layers/*", reduce=[tt.AbsMax()])(Net(), X)
    texts = ["layers/0:__call__", "layers/1:__call__"]
    assert [site.text for site in record] == texts
    assert record[1].stats["abs_max"] == jnp.abs(X).max() * 6
    assert "abs_max" in repr(record)


# Reducers of one's own; names.


def test_a_reducer_is_three_functions():
    span = tt.Reducer(
        lambda x: (x.min(), x.max()),
        lambda a, b: (jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1])),
        lambda state: state[1] - state[0],
        "span",
    )
    _, full = tt.observe(scanned)(X)
    for fn in (scanned, jax.jit(looped)):
        _, record = tt.observe(fn, reduce=[span])(X)
        assert record.total()["h"].stats["span"] > 0
    _, record = tt.observe(scanned, reduce=[span])(X)
    assert record["h"].stats["span"].shape == (5,)
    value = full["h"].value
    assert record.total()["h"].stats["span"] == value.max() - value.min()


def test_a_mapping_gives_names():
    both = {"coarse": tt.Histogram(4), "fine": tt.Histogram(16)}
    _, record = tt.observe(step, reduce=both)(X)
    assert list(record["h"].stats) == ["coarse", "fine"]


# Merging records.


def test_records_of_microbatches_merge_to_that_of_the_batch():
    watch = jax.jit(tt.observe(scanned, reduce=REDUCERS))
    parts = [watch(X[n : n + 1])[1] for n in range(4)]
    both = parts[0].merge(*parts[1:])
    _, full = tt.observe(scanned)(X)
    assert both["h"].stats["norm"].shape == (5,)
    assert_stats(both.total()["h"].stats, full["h"].value)


def test_a_record_may_be_carried_and_merged_in_a_scan():
    watch = tt.observe(scanned, reduce=REDUCERS)

    @jax.jit
    def run(x):
        first = watch(x[:1])[1]
        body = lambda held, x: (held.merge(watch(x[None])[1]), None)
        return jax.lax.scan(body, first, x[1:])[0]

    _, full = tt.observe(scanned)(X)
    assert_stats(run(X).total()["h"].stats, full["h"].value)


def test_records_stacked_by_a_scan_or_a_mapping_can_be_put_together():
    watch = tt.observe(scanned, reduce=REDUCERS)
    _, full = tt.observe(scanned)(X)
    stacked = jax.lax.map(lambda x: watch(x)[1], X)
    assert stacked["h"].stats["norm"].shape == (4, 5)
    assert_stats(stacked.total()["h"].stats, full["h"].value)
    mapped = jax.vmap(lambda x: watch(x)[1])(X)
    norms = jnp.linalg.norm(jax.vmap(tt.observe(scanned))(X)[1]["h"].value, axis=-1)
    np.testing.assert_allclose(mapped["h"].stats["norm"], norms, rtol=1e-5)


def test_flags_of_merged_records():
    watch = tt.observe(jax.jit(branched), reduce=REDUCERS)
    both = watch(X, True)[1].merge(watch(X, False)[1])
    assert both["h"].taken
    assert both["other"].taken
    assert_stats(both["other"].stats, X * 3)
    loops = tt.observe(looped, reduce=REDUCERS)
    assert loops(X, 2)[1].merge(loops(X, 3)[1])["h"].count == 5


def test_records_that_do_not_belong_together_are_not_merged():
    one = tt.observe(step, reduce=REDUCERS)(X)[1]
    with pytest.raises(tt.CaptureError, match="1 sites, another 2"):
        one.merge(tt.observe(branched, reduce=REDUCERS)(X, True)[1])
    with pytest.raises(tt.CaptureError, match="different sites"):
        one.merge(tt.observe(scanned, reduce=REDUCERS)(X)[1])
    with pytest.raises(tt.CaptureError, match="different sorts"):
        one.merge(tt.observe(step, reduce=[tt.Norm()])(X)[1])
    full = tt.observe(step)(X)[1]
    with pytest.raises(tt.CaptureError, match="has values"):
        full.merge(full)
    fn = jax.grad(lambda x: step(x).sum())
    values = tt.observe(fn, reduce=REDUCERS)(X)[1]
    grads = tt.observe(fn, grads=True, reduce=REDUCERS)(X)[1]
    with pytest.raises(tt.CaptureError, match="different structure"):
        values.merge(grads)


# Memory.


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["", "remat"])
def test_statistics_of_a_deep_scan_take_no_memory(wrap):
    weights, x = jnp.ones((48, 64, 64)) / 64, jnp.ones((32, 64))

    @wrap
    def block(x, w):
        return tt.tap(jnp.tanh(x @ w), "h"), None

    def memory(fn):
        used = jax.jit(fn).lower(weights, x).compile().memory_analysis()
        return used.temp_size_in_bytes + used.output_size_in_bytes

    grad = jax.grad(lambda w, x: jax.lax.scan(block, x, w)[0].sum())
    few = [*REDUCERS, tt.NonFinite()]
    reduced = memory(tt.observe(grad, reduce=few, grads=True))
    assert reduced < 1.1 * memory(grad)


def test_numbers_of_python_are_measured():
    def f(x):
        a, b = tt.tap((x, 2 * x), "pair")
        return a * b

    observed = tt.observe(jax.grad(f), grads=True, reduce=[tt.Norm()])
    _, record = observed(3.0)
    assert [float(x) for x in record["pair"].stats["norm"]] == [3.0, 6.0]
    assert [float(x) for x in record["pair"].grad_stats["norm"]] == [6.0, 3.0]


def test_a_sown_number_of_python_is_measured_and_kept():
    class Model(tt.Module):
        def __call__(self, x):
            self.sow(tt.Intermediate, "h", (-3.0, "text"))
            return x

    observed = tt.observe(Model(), "**:h", reduce=[tt.AbsMax()], values=True)
    _, record = observed(1.0)
    assert record["h"].value == (-3.0, "text")
    number, text = record["h"].reduced
    assert float(number.stats["abs_max"]) == 3.0
    assert text is None


@pytest.mark.parametrize(
    "dtype", ["int4", "uint4", "float8_e4m3fn", "bfloat16", "bool"]
)
def test_narrow_types_are_measured(dtype):
    reducers = [tt.Norm(), tt.Moments(), tt.AbsMax(), tt.Histogram(), tt.DeadUnits()]
    _, record = tt.observe(lambda x: tt.tap(x, "x"), reduce=reducers)(
        jnp.ones(4, dtype)
    )
    stats = record["x"].stats
    assert (float(stats["norm"]), float(stats["moments"].mean)) == (2.0, 1.0)


def test_units_of_nan_are_not_dead():
    x = jnp.array([[jnp.nan, 0.0, 1.0], [jnp.nan, 0.0, jnp.nan]])
    _, record = tt.observe(lambda x: tt.tap(x, "x"), reduce=[tt.DeadUnits()])(x)
    assert record["x"].stats["dead_units"].dead.tolist() == [False, True, False]


def test_the_total_of_a_loop_that_never_ran_has_seen_nothing():
    def fn(x):
        return jax.lax.scan(lambda x, _: (tt.tap(x, "h"), None), x, None, length=0)[0]

    _, record = tt.observe(fn, reduce=[tt.AbsMax()])(jnp.ones(2))
    total = record.total()["h"]
    assert total.stats["abs_max"].shape == ()
    assert not total.reduced.seen
