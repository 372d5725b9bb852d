# SPDX-License-Identifier: Apache-2.0
"""metrax's metrics as NNX metrics, next to NNX's own, updated in a jitted step."""

import jax
import jax.numpy as jnp
import metrax.nnx
import optax
from flax import nnx


class Metrics(nnx.MultiMetric):
    def __init__(self):
        super().__init__(loss=nnx.metrics.Average("loss"))


model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
metrics = Metrics()
errors = {
    "mse": metrax.nnx.MSE(),
    "rmse": metrax.nnx.RMSE(),
    "r2": metrax.nnx.RSQUARED(),
}
precision = metrax.nnx.Precision()


@nnx.jit
def step(model, optimizer, metrics, x, y):
    def loss_of(model):
        predicted = model(x)[:, 0]
        return ((predicted - y) ** 2).mean(), predicted

    (loss, predicted), grads = nnx.value_and_grad(loss_of, has_aux=True)(model)
    optimizer.update(model, grads)
    metrics.update(loss=loss)
    return predicted


for key in jax.random.split(jax.random.key(1), 3):
    x = jax.random.normal(key, (16, 4))
    y = x.sum(1)
    predicted = step(model, optimizer, metrics, x, y)
    for metric in errors.values():
        metric.update(predictions=predicted, labels=y)
    precision.update(
        predictions=jax.nn.sigmoid(predicted), labels=(y > 0).astype(jnp.int32)
    )
results = {
    "params": nnx.to_pure_dict(nnx.state(model)),
    "metrics": metrics.compute(),
    "errors": {name: metric.compute() for name, metric in errors.items()},
    "precision": precision.compute(),
}
