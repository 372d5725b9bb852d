# SPDX-License-Identifier: Apache-2.0
"""Figures of records: by site, flat for loggers, and written."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_loggers import read

import meshes
import treetap as tt

REDUCERS = [tt.Moments(), tt.AbsMax(), tt.Norm(), tt.NonFinite(), tt.Histogram()]
W = jnp.array([1.0, -2.0, 3.0])


def loss(x):
    def layer(x, w):
        return tt.tap(x * w, "h"), None

    return jnp.sum(jax.lax.scan(layer, x, W)[0]) + tt.tap(jnp.sum(x), "s")


def record_of(**options):
    x = jnp.array([[3.0, 0.0], [-4.0, 0.0]])
    return tt.observe(jax.grad(loss), grads=True, **options)(x)[1]


@pytest.mark.parametrize("reduce", [None, REDUCERS], ids=["values", "reduced"])
def test_a_record_has_the_figures_of_its_sites(reduce):
    record = record_of(reduce=reduce)
    found = record.figures()
    assert list(found) == [site.text for site in record] == ["h", "s"]
    value, grad = found["h"]
    assert value.norm == pytest.approx(5 * math.sqrt(1 + 4 + 36))
    assert [part.norm for part in value.parts] == pytest.approx([5.0, 10.0, 30.0])
    assert [part.mean for part in grad.parts] == pytest.approx([-6.0, 3.0, 1.0])
    assert value.nonfinite == grad.nonfinite == 0
    assert grad.dead is None
    assert found["s"][0].mean == pytest.approx(-1.0)
    site = record["h"]
    assert site.figures.norm == value.norm
    assert site.grad_figures.norm == grad.norm


def test_dead_units_of_values():
    assert record_of()["h"].figures.dead == 0.5
    assert record_of(reduce=[tt.DeadUnits()])["h"].figures.dead == 0.5
    assert record_of(reduce=[tt.DeadUnits()])["h"].grad_figures.dead is None


def test_all_figures_are_fetched_at_once(monkeypatch):
    fetched = []
    real = jax.device_get

    def get(tree):
        fetched.append(tree)
        return real(tree)

    record = record_of(reduce=REDUCERS)
    monkeypatch.setattr(jax, "device_get", get)
    record.figures()
    assert len(fetched) == 1


def test_without_gradients_there_are_no_figures_of_them():
    _, record = tt.observe(loss)(jnp.ones((2, 2)))
    assert record["h"].grad_figures is None
    assert record.figures()["h"][1] is None


def test_a_listing_has_no_figures():
    assert tt.sites(loss, jnp.ones((2, 2))).figures()["h"][0].count is None


def test_of_several_orders_the_first_gradient_is_measured():
    def f(x):
        return tt.tap(x * x, "h") ** 2

    watch = functools.partial(tt.observe, jax.grad(jax.grad(f)), grads=True)
    for options in ({}, {"reduce": [tt.AbsMax()]}):
        site = watch(**options)(3.0)[1]["h"]
        first = watch()(3.0)[1]["h"].grad[0]
        assert site.grad_figures.abs_max == abs(float(first))


def test_a_tuple_of_gradients_is_not_one_of_orders():
    def f(x):
        a, b = tt.tap((x, 2 * x), "pair")
        return a * b

    for options in ({}, {"reduce": [tt.Norm()]}):
        watch = tt.observe(jax.grad(f), grads=True, **options)
        site = watch(jnp.array(3.0))[1]["pair"]
        assert site.grad_figures.norm == pytest.approx(math.hypot(6.0, 3.0))


def test_a_branch_or_loop_that_did_not_run_has_no_numbers():
    def branch(flags):
        def body(x, flag):
            new = jax.lax.cond(flag, lambda x: tt.tap(x + 1, "h"), lambda x: x, x)
            return new, None

        return jax.lax.scan(body, 0.0, flags)[0]

    found = tt.observe(branch)(jnp.array([True, False, True]))[1]["h"].figures
    assert [part.count for part in found.parts] == [1, 0, 1]
    assert found.mean == 1.5

    def loop(x):
        return jax.lax.while_loop(lambda x: x < 3, lambda x: tt.tap(x + 1, "h"), x)

    assert tt.observe(loop)(5.0)[1]["h"].figures.count == 0
    assert tt.observe(loop)(1.0)[1]["h"].figures.mean == 3.0


def test_shards_are_parts():
    mesh = meshes.mesh_of((4,), ("i",))

    def local(x):
        return tt.tap(x, "h")

    specs = {"in_specs": jax.P("i"), "out_specs": jax.P("i")}
    spread = jax.jit(jax.shard_map(local, mesh=mesh, **specs))
    x = jnp.zeros((8, 2)).at[3, 0].set(5.0)
    for options in ({}, {"reduce": [tt.AbsMax(), tt.DeadUnits()]}):
        found = tt.observe(spread, **options)(x)[1]["h"].figures
        assert [part.abs_max for part in found.parts] == [0.0, 5.0, 0.0, 0.0]
        assert [part.dead for part in found.parts] == [1.0, 0.5, 1.0, 1.0]
        assert found.dead == 0.5


def test_errors_name_the_site():
    def inside(x):
        return tt.observe(loss)(x)[1]["h"].figures.mean

    with pytest.raises(tt.CaptureError, match=r"Site.figures: h: .*being traced"):
        jax.jit(inside)(jnp.ones((2, 2)))


@pytest.mark.parametrize("reduce", [None, REDUCERS], ids=["values", "reduced"])
def test_scalars_are_flat_and_finite(reduce):
    record = record_of(reduce=reduce)
    found = record.to_scalars()
    assert found["h/norm"] == record["h"].figures.norm
    assert found["h/grad/norm"] == record["h"].grad_figures.norm
    assert found["h/grad/ratio"] == found["h/grad/norm"] / found["h/norm"]
    assert found["s/nonfinite"] == 0.0
    assert ("h/low" in found) == (reduce is None)
    assert all(type(value) is float for value in found.values())
    assert not any("[" in tag for tag in found)
    prefixed = record.to_scalars("train")
    assert prefixed == {f"train/{tag}": value for tag, value in found.items()}
    assert record.to_scalars("train/") == prefixed


def test_scalars_of_parts():
    record = record_of()
    found = record.to_scalars(parts=True)
    assert found["h[1]/norm"] == 10.0
    assert found["h[1]/grad/norm"] == pytest.approx(6.0)
    assert found["h/norm"] == record["h"].figures.norm
    _, plain = tt.observe(loss)(jnp.ones((2, 2)))
    assert "h[2]/norm" in plain.to_scalars(parts=True)


def test_a_ratio_to_nothing_is_nan():
    _, record = tt.observe(jax.grad(lambda x: tt.tap(x, "x")), grads=True)(0.0)
    assert math.isnan(record.to_scalars()["x/grad/ratio"])


def test_a_record_is_logged_to_a_folder(tmp_path):
    record = record_of()
    for step in (3, 5):
        record.log(tmp_path, step, "train")
    events = read(tmp_path)
    scalars = record.to_scalars("train")
    assert sorted(events.Tags()["scalars"]) == sorted(scalars)
    for tag, value in scalars.items():
        found = [(event.step, event.value) for event in events.Scalars(tag)]
        assert found == [(step, np.float32(value)) for step in (3, 5)]
    bars = record["h"].figures.bars
    histogram = events.Histograms("train/h/values")[0].histogram_value
    assert list(histogram.bucket) == bars.counts.tolist()
    assert [histogram.min, *histogram.bucket_limit] == bars.edges.tolist()
    assert "train/h/grad/values" in events.Tags()["histograms"]


def test_a_record_is_logged_to_a_writer_or_a_function(tmp_path):
    record, told = record_of(reduce=REDUCERS), {}

    def log(data, step):
        told[step] = data

    record.log(log, 2)
    assert told == {2: record.to_scalars()}
    with tt.EventWriter(tmp_path) as writer:
        record.log(writer, 1, parts=True)
        record.log(writer, 2)  # it is still open
    assert "h[0]/values" in read(tmp_path).Tags()["histograms"]
    with pytest.raises(TypeError, match=r"Record.log: cannot write to a int"):
        record.log(3, 1)
