# SPDX-License-Identifier: Apache-2.0
"""optax's transformations in an Optimizer, and steps inside the other transforms."""

import jax
import jax.numpy as jnp
import optax
import pytest
from linear_models import Linear, X, arrays, assert_close, loss_of, pure_loss, reference

import treetap as tt

BY_NAME = lambda params: jax.tree_util.tree_map_with_path(
    lambda path, _: "decay" if path[-1].key == "kernel" else "plain", params
)
IS_KERNEL = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)

TRANSFORMATIONS = {
    "adam": optax.adam(0.1),
    "adamw with clipping": optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(0.1, mask=IS_KERNEL)
    ),
    "a schedule": optax.sgd(optax.linear_schedule(0.1, 0.01, 3), momentum=0.9),
    "masked": optax.masked(optax.sgd(0.1, momentum=0.9), IS_KERNEL),
    "partition": optax.partition(
        {"decay": optax.adamw(0.1), "plain": optax.sgd(0.1)}, BY_NAME
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2),
    "schedule free": optax.contrib.schedule_free_adamw(0.1, warmup_steps=2),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 2),
    "muon": optax.contrib.muon(0.1),
    "lion": optax.lion(0.1),
    "stateless": optax.sgd(0.1),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations_do_as_in_plain_optax(name):
    tx = TRANSFORMATIONS[name]
    model = Linear(tt.Rngs(0))
    optimizer = tt.Optimizer(model, tx, wrt=tt.Param)
    traces = []

    @tt.jit
    def step(model, optimizer):
        traces.append(1)
        optimizer.update(model, tt.grad(loss_of)(model))

    for _ in range(3):
        step(model, optimizer)
    params, state = reference(tx, 3)
    assert_close(arrays(model), params)
    found = jax.tree.leaves(tt.as_pure(optimizer.opt_state))
    assert_close(found, jax.tree.leaves(state))
    assert len(traces) == 1


def test_a_line_search_gets_values_gradients_and_a_function():
    tx = optax.lbfgs()
    model = Linear(tt.Rngs(0))
    optimizer = tt.Optimizer(model, tx, wrt=tt.Param)
    traces = []

    @tt.jit
    def step(model, optimizer):
        traces.append(1)
        graphdef, _, rest = tt.split(model, tt.Param, ...)
        value, grads = tt.value_and_grad(loss_of)(model)
        optimizer.update(
            model,
            grads,
            value=tt.Variable(value),
            grad=grads,
            value_fn=lambda params: loss_of(tt.merge(graphdef, params, rest)),
        )
        return value

    values = [float(step(model, optimizer)) for _ in range(4)]
    extra = lambda value, grads: {"value": value, "grad": grads, "value_fn": pure_loss}
    params, _ = reference(tx, 4, extra)
    assert_close(arrays(model), params)
    assert values == sorted(values, reverse=True)
    assert len(traces) == 1


def test_a_rule_that_looks_at_the_loss():
    tx = optax.polyak_sgd()
    model = Linear(tt.Rngs(0))
    optimizer = tt.Optimizer(model, tx, wrt=tt.Param)
    for _ in range(3):
        value, grads = tt.value_and_grad(loss_of)(model)
        optimizer.update(model, grads, value=value)
    params, _ = reference(tx, 3, lambda value, grads: {"value": value})
    assert_close(arrays(model), params)


def test_a_learning_rate_can_be_read_and_set_between_steps():
    model = Linear(tt.Rngs(0))
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    optimizer = tt.Optimizer(model, tx, wrt=tt.Param)
    rate = optimizer.opt_state.hyperparams["learning_rate"]
    traces = []

    @tt.jit
    def step(model, optimizer):
        traces.append(1)
        optimizer.update(model, {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)})

    step(model, optimizer)
    assert float(rate) == pytest.approx(0.1)
    rate[...] = 0.5
    step(model, optimizer)
    assert model.bias[...].tolist() == pytest.approx([-0.6] * 3)
    assert len(traces) == 1


def test_gradients_are_accumulated_over_steps():
    model = {"w": tt.Param(jnp.array(0.0))}
    tx = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=2)
    optimizer = tt.Optimizer(model, tx, wrt=tt.Param)
    seen = []
    for grad in (1.0, 3.0, 5.0, 5.0):
        optimizer.update(model, {"w": grad})
        seen.append(float(model["w"]))
    assert seen == [0.0, -2.0, -2.0, -7.0]


def test_the_state_keeps_the_dtype_that_optax_gives_it():
    model = {"w": tt.Param(jnp.ones(3, jnp.bfloat16))}
    optimizer = tt.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=tt.Param)
    optimizer.update(model, {"w": jnp.ones(3, jnp.float32)})
    assert optimizer.opt_state[0].trace.w.dtype == jnp.float32
    assert model["w"].dtype == jnp.bfloat16
    assert optimizer.step[...] == 1


# Through the other transforms.


def test_steps_in_a_scan():
    looped, scanned = Linear(tt.Rngs(0)), Linear(tt.Rngs(0))
    one = tt.Optimizer(looped, optax.adam(0.1), wrt=tt.Param)
    two = tt.Optimizer(scanned, optax.adam(0.1), wrt=tt.Param)

    def step(x, model, optimizer):
        loss, grads = tt.value_and_grad(loss_of)(model, x)
        optimizer.update(model, grads)
        return loss

    batches = jnp.stack([X, 2 * X, -X])
    losses = [float(step(x, looped, one)) for x in batches]
    found = tt.scan(step, in_axes=(0, None, None), out_axes=0)(batches, scanned, two)
    assert_close(found, losses)
    assert_close(arrays(scanned), arrays(looped))
    assert int(two.step) == 3


def test_an_ensemble_is_trained_under_vmap():
    @tt.vmap
    def make(key):
        model = Linear(tt.Rngs(key))
        return model, tt.Optimizer(model, optax.adam(0.1), wrt=tt.Param)

    models, optimizers = make(jax.random.split(jax.random.key(0), 3))
    assert optimizers.opt_state[0].mu.kernel.shape == (3, 2, 3)

    @tt.jit
    @tt.vmap
    def step(model, optimizer):
        optimizer.update(model, tt.grad(loss_of)(model))

    single = jax.tree.map(lambda x: x[1], models)
    alone = tt.Optimizer(single, optax.adam(0.1), wrt=tt.Param)
    for _ in range(2):
        step(models, optimizers)
        alone.update(single, tt.grad(loss_of)(single))
    assert_close(jax.tree.map(lambda x: x[1], arrays(models)), arrays(single))
    assert optimizers.step[...].tolist() == [2, 2, 2]


@pytest.mark.parametrize("name", ["adam", "schedule free", "apply_if_finite"])
def test_buffers_of_model_and_optimizer_can_be_donated(name):
    model = Linear(tt.Rngs(0))
    optimizer = tt.Optimizer(model, TRANSFORMATIONS[name], wrt=tt.Param)

    @tt.jit(donate_argnums=(0, 1))
    def step(model, optimizer):
        optimizer.update(model, tt.grad(loss_of)(model))

    for _ in range(2):
        step(model, optimizer)
    assert_close(arrays(model), reference(TRANSFORMATIONS[name], 2)[0])


def test_no_buffer_of_the_state_is_one_of_the_model():
    keeps = optax.GradientTransformation(
        lambda params: (params, params, jnp.zeros(2)),
        lambda grads, state, params: (grads, state),
    )
    model = {"w": tt.Param(jnp.ones(3))}
    optimizer = tt.Optimizer(model, keeps, wrt=tt.Param)
    first, second, _ = optimizer.opt_state
    held = [model["w"], first.w, second.w]
    assert len({v[...].unsafe_buffer_pointer() for v in held}) == 3


def test_an_abstract_model_has_an_abstract_optimizer():
    model = tt.eval_shape(lambda: Linear(tt.Rngs(0)))
    optimizer = tt.Optimizer(model, optax.adam(0.1), wrt=tt.Param)
    leaves = jax.tree.leaves(optimizer)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    real = tt.Optimizer(Linear(tt.Rngs(0)), optax.adam(0.1), wrt=tt.Param)
    assert tt.graphdef(real) == tt.graphdef(optimizer)
    made = tt.eval_shape(
        lambda: tt.Optimizer(Linear(tt.Rngs(0)), optax.adam(0.1), wrt=tt.Param)
    )
    assert jax.tree.leaves(made) == leaves
