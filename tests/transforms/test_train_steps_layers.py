# SPDX-License-Identifier: Apache-2.0
"""The usual train step with layers and an Optimizer, in all modes; what comes after.

A small classifier has everything that makes a step hard: statistics that move, noise,
and parameters that alone are trained.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export as jax_export

import treetap as tt
from modes import ALL_MODES, NAMED
from treetap import nnx

STEPS = 12
LABELS = jnp.arange(8) % 3


def images():
    """Images whose brightest pair of rows is their label, and noise."""
    noise = np.random.default_rng(0).normal(size=(8, 6, 6, 1))
    rows = np.repeat(np.eye(3), 2, axis=0)[:, np.asarray(LABELS)].T
    return jnp.asarray(0.3 * noise + 2 * rows[:, :, None, None], jnp.float32)


IMAGES = images()


class Classifier(tt.Module):
    def __init__(self, rngs):
        # A bias would have a gradient of zero: the norm takes it away.
        self.conv = tt.Conv(1, 4, (3, 3), use_bias=False, rngs=rngs)
        self.norm = tt.BatchNorm(4, momentum=0.8, rngs=rngs)
        self.dropout = tt.Dropout(0.2, rngs=rngs)
        self.head = tt.Linear(36, 3, rngs=rngs)

    def __call__(self, x):
        x = tt.relu(self.norm(self.conv(x)))
        x = tt.avg_pool(x, (2, 2), (2, 2))
        return self.head(self.dropout(x.reshape(x.shape[0], -1)))


def loss_of(model, x, y):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
    return losses.mean()


def rule():
    return optax.adam(0.02)


def made(namespace=tt):
    model = Classifier(namespace.Rngs(0))
    return model, namespace.Optimizer(model, rule(), wrt=namespace.Param)


def step_in(mode, namespace=tt):
    """One step, not compiled."""

    def step(model, optimizer, x, y):
        loss, grads = namespace.value_and_grad(loss_of, **mode)(model, x, y)
        optimizer.update(model, grads)
        return loss

    return step


def run(step, model, optimizer, steps):
    return [float(step(model, optimizer, IMAGES, LABELS)) for _ in range(steps)]


def values_of(tree):
    """What the Variables of an object hold, by path; keys as their numbers."""
    found = {}
    for path, variable in tt.to_flat_state(tt.state(tree)):
        value = variable.get_value()
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        found[path] = np.asarray(jax.random.key_data(value) if is_key else value)
    return found


def assert_close(found, wanted, rtol=1e-4, atol=1e-5):
    assert found.keys() == wanted.keys()
    for path, value in found.items():
        np.testing.assert_allclose(value, wanted[path], rtol, atol, err_msg=str(path))


class Compiled:
    """The compiled step of a mode, which counts how often it is traced."""

    def __init__(self, mode):
        self.traces = 0
        self.inner = step_in(mode)
        self.run = tt.jit(self.step, **mode)

    def step(self, *args):
        self.traces += 1
        return self.inner(*args)

    def __call__(self, *args):
        return self.run(*args)


COMPILED = {name: Compiled(mode) for name, mode in NAMED.items()}


@functools.cache
def trained(name):
    """Losses, model and optimizer after training in a mode."""
    model, optimizer = made()
    return run(COMPILED[name], model, optimizer, STEPS), model, optimizer


def evaluating(model):
    return tt.view(model, deterministic=True, use_running_average=True)


EVERY_MODE = pytest.mark.parametrize("name", NAMED)


@EVERY_MODE
def test_the_loss_falls_and_the_step_is_traced_once(name):
    losses, model, _ = trained(name)
    assert losses[-1] < losses[0] / 2
    run(COMPILED[name], *made(), 1)  # equal models and optimizers are one structure
    assert COMPILED[name].traces == 1
    accuracy = (evaluating(model)(IMAGES).argmax(-1) == LABELS).mean()
    assert accuracy == 1


@EVERY_MODE
def test_everything_moves_that_should(name):
    _, model, optimizer = trained(name)
    start = values_of(Classifier(tt.Rngs(0)))
    for path, value in values_of(model).items():
        is_key = path[-1] == "key"
        assert np.array_equal(value, start[path]) == is_key, path
    assert int(model.dropout.rngs.count) == STEPS
    assert int(optimizer.step) == STEPS
    kept = {path for path, _ in tt.to_flat_state(tt.state(model, tt.Param))}
    moments = {path[3:] for path in values_of(optimizer) if "mu" in path}
    assert moments == kept  # statistics and streams are not trained


@pytest.mark.parametrize("name", ["graph", "updates"])
def test_all_modes_give_the_same(name):
    losses, model, optimizer = trained(name)
    wanted, other, other_optimizer = trained("tree")
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
    assert_close(values_of(model), values_of(other), rtol=1e-6)
    assert_close(values_of(optimizer), values_of(other_optimizer), rtol=1e-6)


@EVERY_MODE
def test_an_eager_step_is_the_compiled_one(name):
    eager, compiled = made(), made()
    wanted = run(step_in(NAMED[name]), *eager, 2)
    np.testing.assert_allclose(run(COMPILED[name], *compiled, 2), wanted, rtol=1e-5)
    for one, other in zip(compiled, eager):
        assert_close(values_of(one), values_of(other))


def reference(steps):
    """Losses and Variables after some steps of plain JAX and optax."""
    graphdef, params, rest = tt.split(Classifier(tt.Rngs(0)), tt.Param, ...)
    optimizer = rule()
    kept = optimizer.init(tt.as_pure(params))

    def loss(params, rest):
        model = tt.merge(graphdef, params, rest, copy=True)
        value = loss_of(model, IMAGES, LABELS)
        return value, tt.as_pure(tt.state(model, tt.Not(tt.Param)))

    @jax.jit
    def step(params, rest, kept):
        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, rest)
        changes, kept = optimizer.update(grads, kept, params)
        return value, optax.apply_updates(params, changes), rest, kept

    params, rest, losses = tt.as_pure(params), tt.as_pure(rest), []
    for _ in range(steps):
        value, params, rest, kept = step(params, rest, kept)
        losses.append(float(value))
    return losses, tt.merge(graphdef, params, rest)


def test_training_is_that_of_plain_jax():
    losses, model, _ = trained("tree")
    wanted, other = reference(STEPS)
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    assert_close(values_of(model), values_of(other), rtol=1e-3, atol=1e-4)


def test_the_same_step_in_the_words_of_nnx():
    model, optimizer = made(nnx)
    losses = run(nnx.jit(step_in({}, nnx)), model, optimizer, STEPS)
    wanted, other, _ = trained("updates")
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
    assert_close(values_of(model), values_of(other), rtol=1e-6)


@ALL_MODES
def test_a_scan_over_batches_is_a_loop_over_steps(mode):
    inner = step_in(mode)
    # With graph updates a stream that is not carried has the same keys in every step.
    carried = nnx.StateAxes({tt.RngState: tt.Carry, ...: None})
    axes = carried if mode.get("graph_updates") else None

    @tt.jit(**mode)
    @tt.scan(in_axes=(axes, None, 0, 0), out_axes=0, **mode)
    def epoch(model, optimizer, x, y):
        return inner(model, optimizer, x, y)

    model, optimizer = made()
    losses = epoch(
        model, optimizer, jnp.stack([IMAGES] * STEPS), jnp.stack([LABELS] * STEPS)
    )
    wanted, other, _ = trained("tree")
    np.testing.assert_allclose(losses, wanted, rtol=1e-3)
    assert_close(values_of(model), values_of(other), rtol=1e-2, atol=1e-3)
    assert int(model.dropout.rngs.count) == int(optimizer.step) == STEPS


@ALL_MODES
def test_donated_buffers_are_replaced(mode):
    model, optimizer = made()
    before = model.head.kernel.get_raw_value()
    step = tt.jit(step_in(mode), donate_argnums=(0, 1), **mode)
    losses = run(step, model, optimizer, STEPS)
    np.testing.assert_allclose(losses, trained("tree")[0], rtol=1e-5)
    assert before.is_deleted()


@ALL_MODES
def test_evaluating_a_view_changes_nothing(mode):
    _, model, _ = trained("tree")
    before = values_of(model)
    view = evaluating(model)
    evaluate = tt.jit(lambda model, x: model(x), **mode)
    first = evaluate(view, IMAGES)
    np.testing.assert_array_equal(evaluate(view, IMAGES), first)
    np.testing.assert_allclose(first, view(IMAGES), rtol=1e-4, atol=1e-5)
    alone = evaluate(view, IMAGES[:1])  # of no batch to take statistics from
    np.testing.assert_allclose(alone, first[:1], rtol=1e-4, atol=1e-5)
    after = values_of(model)
    assert all(np.array_equal(after[path], before[path]) for path in before)
    assert not model.dropout.deterministic
    assert not model.norm.use_running_average


@EVERY_MODE
def test_a_view_sees_every_step_that_is_made(name):
    model, optimizer = made()
    view = evaluating(model)
    losses = []
    for _ in range(STEPS):
        run(COMPILED[name], model, optimizer, 1)
        losses.append(float(loss_of(view, IMAGES, LABELS)))
    assert losses[-1] < losses[0] / 2
    assert int(model.dropout.rngs.count) == STEPS  # evaluations draw nothing


@pytest.mark.parametrize("batch", [8, "batch"], ids=["fixed", "any"])
def test_a_trained_model_is_exported_and_runs_again(batch, tmp_path):
    pytest.importorskip("flatbuffers")  # JAX's format of files
    _, model, _ = trained("tree")
    view = evaluating(model)
    graphdef, state = tt.split(view, tt.Not(tt.RngState), ...)[:2]
    leaves, structure = jax.tree.flatten(state)
    streams = tt.state(view, tt.RngState)

    @jax.jit
    def predict(leaves, x):
        state = jax.tree.unflatten(structure, leaves)
        return tt.merge(graphdef, state, streams)(x)

    shape = jax_export.symbolic_shape(f"{batch}, 6, 6, 1")
    given = jax.ShapeDtypeStruct(shape, jnp.float32)
    path = tmp_path / "model.bin"
    path.write_bytes(jax_export.export(predict)(leaves, given).serialize())
    again = jax_export.deserialize(bytearray(path.read_bytes()))
    wanted = view(IMAGES)
    np.testing.assert_allclose(again.call(leaves, IMAGES), wanted, rtol=1e-4, atol=1e-5)
    if batch != 8:
        few = again.call(leaves, IMAGES[:3])
        np.testing.assert_allclose(few, wanted[:3], rtol=1e-4, atol=1e-5)


def test_a_model_with_its_weights_inside_is_exported_as_one_function():
    pytest.importorskip("flatbuffers")
    _, model, _ = trained("tree")
    view = evaluating(model)
    data = jax_export.export(jax.jit(view))(IMAGES).serialize()
    found = jax_export.deserialize(data).call(IMAGES)
    np.testing.assert_allclose(found, view(IMAGES), rtol=1e-4, atol=1e-5)
