# SPDX-License-Identifier: Apache-2.0
"""A sparse variational Gaussian process for classification."""

import gpjax as gpx
import jax
import jax.numpy as jnp
import optax
from flax import nnx

jax.config.update("jax_enable_x64", True)
x = jax.random.uniform(jax.random.key(0), (40, 1), minval=-1.0)
data = gpx.Dataset(X=x, y=(jnp.sin(4 * x) > 0).astype(jnp.float64))
prior = gpx.gps.Prior(
    mean_function=gpx.mean_functions.Zero(), kernel=gpx.kernels.Matern52()
)
posterior = prior * gpx.likelihoods.Bernoulli(num_datapoints=len(x))
family = gpx.variational_families.VariationalGaussian(
    posterior=posterior, inducing_inputs=jnp.linspace(-1.0, 1.0, 6)[:, None]
)
fitted, history = gpx.fit(
    model=family,
    objective=lambda q, d: -gpx.objectives.elbo(q, d),
    train_data=data,
    optim=optax.adam(0.05),
    num_iters=10,
    key=jax.random.key(1),
    batch_size=8,
    verbose=False,
)
results = {"params": nnx.to_pure_dict(nnx.state(fitted)), "history": history}
