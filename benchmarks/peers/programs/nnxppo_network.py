# SPDX-License-Identifier: Apache-2.0
"""The actor and critic of nnx-ppo, called on observations."""

import jax
import jax.numpy as jnp
from flax import nnx
from nnx_ppo.networks.factories import make_mlp_actor_critic

model = make_mlp_actor_critic(5, 2, [16, 16], [16], rngs=nnx.Rngs(0))
observations = jax.random.normal(jax.random.key(0), (4, 5))
state = model.initialize_state(4)
first = model(state, observations)
second = nnx.jit(lambda model, state, x: model(state, x))(model, state, observations)
results = {
    "params": nnx.to_pure_dict(nnx.state(model)),
    "outputs": [
        x for x in jax.tree.leaves((first, second)) if isinstance(x, jnp.ndarray)
    ],
}
