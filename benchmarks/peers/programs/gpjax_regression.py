# SPDX-License-Identifier: Apache-2.0
"""Gaussian process regression: hyperparameters fitted, then a prediction."""

import gpjax as gpx
import jax
import jax.numpy as jnp
import optax
from flax import nnx

jax.config.update("jax_enable_x64", True)
x = jnp.linspace(-3.0, 3.0, 30)[:, None]
y = jnp.sin(2 * x) + 0.1 * jax.random.normal(jax.random.key(0), x.shape)
data = gpx.Dataset(X=x, y=y)
kernel = gpx.kernels.RBF() + gpx.kernels.Matern32(lengthscale=0.5)
prior = gpx.gps.Prior(mean_function=gpx.mean_functions.Constant(), kernel=kernel)
posterior = prior * gpx.likelihoods.Gaussian(num_datapoints=len(x))
fitted, history = gpx.fit(
    model=posterior,
    objective=lambda p, d: -gpx.objectives.conjugate_mll(p, d),
    train_data=data,
    optim=optax.adam(0.05),
    num_iters=20,
    key=jax.random.key(1),
    verbose=False,
)
predicted = fitted(jnp.linspace(-1.0, 1.0, 5)[:, None], data)
results = {
    "params": nnx.to_pure_dict(nnx.state(fitted)),
    "history": history,
    "predicted": (predicted.mean, predicted.covariance()),
}
