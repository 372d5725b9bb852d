# SPDX-License-Identifier: Apache-2.0
"""A Bayesian network: a prior over the parameters of a Module, sampled by NUTS."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from flax import nnx
from numpyro.contrib.module import random_nnx_module
from numpyro.infer import MCMC, NUTS


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(1, 4, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.tanh(self.hidden(x)))


net = Net(nnx.Rngs(0))
x = jnp.linspace(-1.0, 1.0, 16)[:, None]


def model(x, y=None):
    prior = {
        "hidden.kernel": dist.Normal(),
        "hidden.bias": dist.Cauchy(),
        "out.kernel": dist.Normal(0.0, 2.0),
        "out.bias": dist.Normal(),
    }
    mean = random_nnx_module("net", net, prior=prior)(x)
    numpyro.sample("y", dist.Normal(mean, 0.1), obs=y)


sampler = MCMC(NUTS(model), num_warmup=10, num_samples=10, progress_bar=False)
sampler.run(jax.random.key(0), x, jnp.sin(x))
results = {"samples": sampler.get_samples()}
