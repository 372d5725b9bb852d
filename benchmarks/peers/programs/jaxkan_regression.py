# SPDX-License-Identifier: Apache-2.0
"""Kolmogorov-Arnold networks of jaxKAN, their grid updated between steps."""

import jax
import optax
from flax import nnx
from jaxkan.models.KAN import KAN

x = jax.random.uniform(jax.random.key(0), (32, 2), minval=-1.0)
y = (x[:, :1] * x[:, 1:]) ** 2


@nnx.jit
def step(model, optimizer):
    loss, grads = nnx.value_and_grad(lambda m: ((m(x) - y) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


results = {}
for kind, options in {
    "spline": {"k": 3, "G": 3},
    "chebyshev": {"D": 4},
}.items():
    model = KAN([2, 4, 1], kind, options, seed=0)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    losses = [step(model, optimizer) for _ in range(2)]
    if kind == "spline":
        model.update_grids(x, 5)
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        losses.append(step(model, optimizer))
    results[kind] = losses, nnx.to_pure_dict(nnx.state(model)), model(x)
