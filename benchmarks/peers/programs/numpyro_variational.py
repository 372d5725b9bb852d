# SPDX-License-Identifier: Apache-2.0
"""A network with running statistics inside a NumPyro model, fitted by SVI."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from flax import nnx
from numpyro.contrib.module import nnx_module
from numpyro.infer import SVI, Trace_ELBO


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(1, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.layers = nnx.List(
            [nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)]
        )

    def __call__(self, x):
        x = nnx.tanh(self.norm(self.hidden(x)))
        for layer in self.layers:
            x = layer(x)
        return x


net = Net(nnx.Rngs(0))
x = jnp.linspace(-1.0, 2.0, 16)[:, None]


def model(x, y):
    mean = nnx_module("net", net)(x)
    numpyro.sample("y", dist.Normal(mean, 0.1), obs=y)


svi = SVI(model, lambda x, y: None, numpyro.optim.SGD(1e-5), Trace_ELBO())
found = svi.run(jax.random.key(0), 10, x, jnp.sin(x), progress_bar=False)
results = {
    "params": found.params,
    "state": found.state.mutable_state,
    "loss": found.losses,
}
