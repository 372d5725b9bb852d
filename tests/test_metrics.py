# SPDX-License-Identifier: Apache-2.0
"""Metrics against numpy, masks included, in every transform."""

import copy
import pickle

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp

import treetap as tt
from modes import ALL_MODES
from treetap.metrics import Accuracy, Average, MetricState, Statistics, Welford

# Average.


def test_an_average_over_arrays_and_numbers():
    average = Average()
    average.update(values=3)
    average.update(values=jnp.array([1.0, 2.0]))
    average.update(values=np.array([[1], [2]]))
    average.update(values=True)
    average.update(values=np.float32(0.5))
    average.update(values=tt.Variable(jnp.array(0.5)))
    assert float(average.total) == 11.0
    assert int(average.count) == 8
    assert float(average.compute()) == 1.375
    assert average.total.dtype == jnp.float32
    assert average.count.dtype == jnp.int32


def test_an_average_of_nothing_is_nan_and_reset_begins_anew():
    average = Average("loss")
    assert jnp.isnan(average.compute())
    total = average.total
    average.update(loss=jnp.ones(3), other="left alone")
    average.reset()
    assert average.total is total
    assert jnp.isnan(average.compute())
    average.update(loss=jnp.zeros((0,)))
    assert int(average.count) == 0


MASKS = {
    "full": np.array([[True, False, True], [False, False, True]]),
    "column": np.array([[True], [False]]),
    "row": np.array([True, False, True]),
    "one": np.array(True),
    "integers": np.array([[1], [0]]),
    "floats": np.array([[1.0], [0.0]], np.float32),
    "wider": np.array([[[True]], [[True]]]),
    "nothing": np.zeros((2, 3), bool),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_broadcast(name):
    values = np.arange(6.0, dtype=np.float32).reshape(2, 3) ** 2
    keep, shown = np.broadcast_arrays(MASKS[name].astype(bool), values)
    average, welford = Average(), Welford()
    for metric in (average, welford):
        metric.update(values=jnp.asarray(values), mask=jnp.asarray(MASKS[name]))
    assert int(average.count) == int(welford.count) == keep.sum()
    if keep.any():
        kept = shown[keep]
        np.testing.assert_allclose(average.compute(), kept.mean(), rtol=1e-6)
        found = welford.compute()
        np.testing.assert_allclose(found.mean, kept.mean(), rtol=1e-6)
        np.testing.assert_allclose(found.standard_deviation, kept.std(), rtol=1e-5)


def test_what_is_masked_out_does_not_count_even_when_it_is_nan():
    values, mask = jnp.array([1.0, jnp.nan, 3.0]), jnp.array([True, False, True])
    average, welford = Average(), Welford()
    for metric in (average, welford):
        metric.update(values=values, mask=mask)
    assert float(average.compute()) == 2.0
    assert float(welford.compute().standard_deviation) == 1.0


def test_low_precision_is_summed_in_float32():
    average = Average()
    average.update(values=jnp.ones(1000, jnp.bfloat16))
    average.update(values=jnp.ones(1000, jnp.float16))
    assert float(average.total) == 2000.0
    average.reset()
    average.update(values=jnp.full(3, 2**30, jnp.int32))  # too much for an int32
    assert float(average.total) == 3 * 2**30


REFUSED = [
    ({"mask": jnp.ones(2), "values": 1.0}, ValueError, "should be a jax array"),
    ({"mask": jnp.ones(3), "values": jnp.ones(2)}, tt.StructureError, "not broadcast"),
    ({"values": [1.0]}, TypeError, "the values are a list"),
    ({"values": "a"}, TypeError, "the values are a str"),
    ({"values": jnp.array(1j)}, TypeError, "complex64; give real"),
    ({"loss": 1.0}, TypeError, "Expected keyword argument 'values', got .'loss'."),
]


@pytest.mark.parametrize("kind", [Average, Welford])
@pytest.mark.parametrize(("given", "error", "match"), REFUSED)
def test_wrong_values_change_nothing(kind, given, error, match):
    metric = kind()
    metric.update(values=2.0)
    before = [leaf[...] for _, leaf in tt.to_flat_state(tt.state(metric))]
    with pytest.raises(error, match=match):
        metric.update(**given)
    after = [leaf[...] for _, leaf in tt.to_flat_state(tt.state(metric))]
    assert all(one is two for one, two in zip(before, after))


# Welford.


FLOATS = st.floats(-1000.0, 1000.0, width=32)
BATCH = hnp.arrays(np.float32, st.integers(0, 12), elements=FLOATS)


@given(st.lists(st.tuples(BATCH, st.integers(0, 2**12 - 1)), max_size=4))
def test_merged_batches_have_the_statistics_of_all_values(batches):
    welford, kept = Welford(), []
    for values, bits in batches:
        mask = np.array([bool(bits >> n & 1) for n in range(len(values))], bool)
        welford.update(values=values, mask=mask)
        kept.extend(values[mask].astype(np.float64))
    found = welford.compute()
    assert int(welford.count) == len(kept)
    if kept:
        scale = 1 + np.abs(kept).max()
        np.testing.assert_allclose(found.mean, np.mean(kept), atol=1e-5 * scale)
        np.testing.assert_allclose(
            found.standard_deviation, np.std(kept), atol=1e-4 * scale
        )


def test_a_large_mean_does_not_drown_the_deviation():
    values = 10_000.0 + np.tile(np.array([-0.5, 0.5], np.float32), 500)
    whole, parts = Welford(), Welford()
    whole.update(values=values)
    for part in np.split(values, 10):
        parts.update(values=part)
    for metric in (whole, parts):
        assert float(metric.compute().standard_deviation) == pytest.approx(0.5, 1e-4)


def test_statistics_of_single_numbers():
    welford = Welford("x")
    for value in (1.0, 2.0, 3.0, 5):
        welford.update(x=value)
    found = welford.compute()
    assert float(found.mean) == 2.75
    assert float(found.standard_deviation) == pytest.approx(np.std([1, 2, 3, 5]))
    error = np.std([1, 2, 3, 5]) / 2
    assert float(found.standard_error_of_mean) == pytest.approx(error)
    assert float(welford.m2) == pytest.approx(8.75)
    welford.reset()
    assert int(welford.count) == 0
    assert float(welford.mean) == float(welford.m2) == 0.0


def test_statistics_of_nothing():
    found = Welford().compute()
    assert float(found.mean) == 0.0
    assert jnp.isnan(found.standard_deviation)
    assert jnp.isnan(found.standard_error_of_mean)


def test_statistics_are_a_tree():
    statistics = Statistics(1.0, 2.0, 3.0)
    assert jax.tree.leaves(statistics) == [1.0, 2.0, 3.0]
    assert statistics.replace(mean=5.0) == Statistics(5.0, 2.0, 3.0)


# Accuracy.

LOGITS = jnp.array([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0], [0.0, 3.0, 1.0]])
INTEGERS = [jnp.int8, jnp.int16, jnp.int32, jnp.uint8, jnp.uint16, jnp.uint32, bool]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_accuracy_takes_labels_of_any_integer_type(dtype):
    accuracy, binary = Accuracy(), Accuracy(threshold=0.5)
    accuracy.update(logits=LOGITS, labels=jnp.array([0, 1, 1], dtype), extra=1)
    assert float(accuracy.compute()) == pytest.approx(2 / 3)
    binary.update(logits=jnp.array([0.5, 0.4, 0.9]), labels=jnp.array([1, 0, 0], dtype))
    assert float(binary.compute()) == pytest.approx(2 / 3)


def test_accuracy_honours_a_mask():
    accuracy = Accuracy()
    labels, mask = jnp.array([0, 1, 1]), jnp.array([True, False, True])
    accuracy.update(logits=LOGITS, labels=labels, mask=mask)
    assert float(accuracy.compute()) == 1.0
    assert int(accuracy.count) == 2
    batch = jnp.stack([LOGITS, LOGITS])
    each = jnp.stack([labels, labels])
    accuracy.update(logits=batch, labels=each, mask=jnp.array([[True], [False]]))
    assert int(accuracy.count) == 5
    assert float(accuracy.total) == 4.0
    accuracy.reset()
    assert jnp.isnan(accuracy.compute())


@pytest.mark.parametrize(
    ("threshold", "logits", "labels", "match"),
    [
        (None, (2, 2), (2, 2), "For multi-class classification, expected"),
        (None, (3, 2), (2,), "For multi-class classification, logits of shape"),
        (None, (3, 2), (1,), "For multi-class classification, logits of shape"),
        (0.5, (3, 2), (3,), "For binary classification, expected"),
        (0.5, (3,), (1,), "For binary classification, logits of shape"),
    ],
)
def test_accuracy_refuses_shapes_that_do_not_go_together(
    threshold, logits, labels, match
):
    accuracy = Accuracy(threshold)
    with pytest.raises(ValueError, match=match):
        accuracy.update(logits=jnp.zeros(logits), labels=jnp.zeros(labels, jnp.int32))
    assert int(accuracy.count) == 0


def test_accuracy_refuses_other_types():
    with pytest.raises(ValueError, match="labels to be integers, got float32"):
        Accuracy().update(logits=LOGITS, labels=jnp.zeros(3))
    for threshold in (1, "a", True):
        with pytest.raises(TypeError, match="threshold to be a float"):
            Accuracy(threshold)
    with pytest.raises(TypeError, match="labels"):
        Accuracy().update(logits=LOGITS)


# MultiMetric.


def several():
    return tt.MultiMetric(
        loss=Average("loss"), accuracy=Accuracy(), spread=Welford("loss")
    )


BATCHES = [
    (jnp.array([1.0, 2.0, 3.0]), jnp.array([0, 1, 1])),
    (jnp.array([3.0, 4.0, 5.0]), jnp.array([0, 2, 1])),
]


def check(found):
    assert float(found["loss"]) == 3.0
    assert float(found["accuracy"]) == pytest.approx(5 / 6)
    deviation = found["spread"].standard_deviation
    assert float(deviation) == pytest.approx(np.std([1, 2, 3, 3, 4, 5]))


@ALL_MODES
def test_metrics_inside_jit(mode):
    metrics = several()
    traces = []

    @tt.jit(**mode)
    def step(metrics, loss, labels):
        traces.append(1)
        metrics.update(loss=loss, logits=LOGITS, labels=labels)
        return metrics.compute()

    for loss, labels in BATCHES:
        found = step(metrics, loss, labels)
    check(found)
    check(metrics.compute())
    assert len(traces) == 1
    tt.jit(lambda metrics: metrics.reset(), **mode)(metrics)
    assert jnp.isnan(metrics.compute()["loss"])
    assert int(metrics.spread.count) == 0


@ALL_MODES
def test_metrics_in_a_scan(mode):
    metrics = several()

    def step(batch, metrics):
        loss, labels = batch
        metrics.update(loss=loss, logits=LOGITS, labels=labels)
        return metrics.loss.compute()

    batches = jax.tree.map(lambda *xs: jnp.stack(xs), *BATCHES)
    scan = tt.scan(step, in_axes=(0, None), out_axes=0, **mode)
    assert scan(batches, metrics).tolist() == [2.0, 3.0]
    check(metrics.compute())


def test_metrics_under_vmap():
    stacked = tt.vmap(lambda _: several())(jnp.arange(2))
    losses, labels = (jnp.stack(parts) for parts in zip(*BATCHES))
    step = lambda metrics, loss, labels: metrics.update(
        loss=loss, logits=LOGITS, labels=labels
    )
    tt.vmap(step)(stacked, losses, labels)
    assert tt.vmap(lambda metrics: metrics.loss.compute())(stacked).tolist() == [2, 4]
    stacked.reset()
    assert stacked.loss.count[...].tolist() == [0, 0]


def test_a_mask_for_all_or_for_some():
    metrics = tt.MultiMetric(a=Average("a"), b=Average("b"))
    values = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([3.0, 4.0])}
    metrics.update(**values, mask=jnp.array([True, False]))
    assert metrics.compute() == {"a": 1.0, "b": 3.0}
    metrics.reset()
    metrics.update(**values, mask={"a": jnp.array([False, True])})
    assert metrics.compute() == {"a": 2.0, "b": 3.5}
    with pytest.raises(tt.StructureError, match=r"entries for \['c'\]"):
        metrics.update(**values, mask={"c": jnp.array([True, True])})
    assert int(metrics.a.count) == 1


def test_groups_can_be_nested():
    metrics = tt.MultiMetric(train=tt.MultiMetric(loss=Average("loss")), n=Average("n"))
    metrics.update(loss=1.0, n=2.0)
    assert metrics.compute() == {"train": {"loss": 1.0}, "n": 2.0}


def test_when_one_metric_refuses_none_has_taken_the_batch():
    metrics = several()
    with pytest.raises(ValueError, match="For multi-class"):
        metrics.update(loss=jnp.ones(3), logits=LOGITS, labels=jnp.zeros((3, 3), int))
    assert int(metrics.loss.count) == 0
    assert float(metrics.loss.total) == 0.0


@pytest.mark.parametrize(
    "name", ["update", "compute", "reset", "split", "_private", "__dict__"]
)
def test_names_that_would_hide_a_method_are_refused(name):
    with pytest.raises(tt.StructureError, match=f"'{name}' cannot be the name"):
        tt.MultiMetric(**{name: Average()})


def test_other_names_are_fine():
    names = ("register", "mro", "values", "mask", "items")
    metrics = tt.MultiMetric(**{name: Average("values") for name in names})
    metrics.update(values=1.0)
    assert list(metrics.compute()) == list(names)


def test_only_metrics_are_taken():
    with pytest.raises(TypeError, match="'a' is a int, not a Metric"):
        tt.MultiMetric(a=3)


def test_a_group_is_split_and_hashable():
    metrics = several()
    graphdef, state = metrics.split()
    assert hash(graphdef) == hash(several().split()[0])
    assert graphdef == several().split()[0]
    assert state.accuracy.count is metrics.accuracy.count
    assert tt.merge(graphdef, state).loss.total is metrics.loss.total
    assert list(tt.clone(metrics).compute()) == ["loss", "accuracy", "spread"]
    _, states, rest = metrics.split(MetricState, ...)
    assert len(tt.to_flat_state(states)) == 7
    assert not rest


@pytest.mark.parametrize(
    "copied",
    [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy, tt.clone],
    ids=["pickle", "deepcopy", "clone"],
)
def test_copies_go_on_on_their_own(copied):
    metrics = several()
    batches = [
        {"loss": loss, "logits": LOGITS, "labels": labels} for loss, labels in BATCHES
    ]
    metrics.update(**batches[0])
    other = copied(metrics)
    other.update(**batches[1])
    check(other.compute())
    assert float(metrics.compute()["loss"]) == 2.0
    tt.update(metrics, tt.state(other))
    check(metrics.compute())


# Metrics of one's own.


def test_a_metric_defines_its_methods():
    with pytest.raises(NotImplementedError, match="Must override `__init__"):
        tt.Metric()

    class Empty(tt.Metric):
        def __init__(self):
            pass

    for name in ("reset", "update", "compute"):
        with pytest.raises(NotImplementedError, match=f"Empty: Must override `{name}"):
            getattr(Empty(), name)()


def test_metrics_are_not_changed_from_another_trace():
    metrics = several()
    with pytest.raises(tt.TraceContextError, match="MetricState"):
        jax.jit(lambda loss: metrics.loss.update(loss=loss))(jnp.ones(2))
    assert int(metrics.loss.count) == 0


def test_an_average_counts_the_broadcast_mask():
    average = Average()
    values = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    average.update(values=values, mask=jnp.array([[True], [False]]))
    assert int(average.count) == 2
    assert float(average.compute()) == 1.5


def test_welford_honours_a_mask():
    welford = Welford()
    mask = jnp.array([True, True, False])
    welford.update(values=jnp.array([1.0, 3.0, 100.0]), mask=mask)
    found = welford.compute()
    assert float(found.mean) == 2.0
    assert float(found.standard_deviation) == 1.0
