# SPDX-License-Identifier: Apache-2.0
"""A policy trained on a toy environment, rollouts and updates inside scans."""

import dataclasses

import fingerprints
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Settings:
    """Numbers of the algorithm."""

    steps: int = 8
    actors: int = 4
    rate: float = 0.02
    discount: float = 0.9


class Policy(nnx.Module):
    """Action logits and a value."""

    def __init__(self, size: int, actions: int, *, rngs: nnx.Rngs):
        orthogonal = nnx.initializers.orthogonal(np.sqrt(2))
        self.trunk = nnx.Sequential(
            nnx.Linear(size, 16, kernel_init=orthogonal, rngs=rngs),
            nnx.tanh,
            nnx.Linear(16, 16, kernel_init=orthogonal, rngs=rngs),
            nnx.tanh,
        )
        self.actor = nnx.Linear(
            16, actions, bias_init=nnx.initializers.constant(0.0), rngs=rngs
        )
        self.critic = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, observation):
        hidden = self.trunk(observation)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


def environment(position, action):
    position = position + (action * 2 - 1)[:, None] * jnp.array([0.3, -0.1])
    return position, -jnp.abs(position).sum(-1)


def rollout(model, position, key, settings):
    def step(carry, key):
        position = carry
        logits, value = model(position)
        action = jax.random.categorical(key, logits)
        following, reward = environment(position, action)
        return following, (position, action, reward, value)

    return jax.lax.scan(step, position, jax.random.split(key, settings.steps))


@nnx.jit(static_argnums=(4,))
def update(model, optimizer, position, key, settings):
    final, (positions, actions, rewards, _values) = rollout(
        model, position, key, settings
    )

    def back(total, reward):
        total = reward + settings.discount * total
        return total, total

    _, returns = jax.lax.scan(back, model(final)[1], rewards, reverse=True)

    def loss_fn(model):
        logits, values = model(positions)
        chosen = jnp.take_along_axis(nnx.log_softmax(logits), actions[..., None], -1)[
            ..., 0
        ]
        gain = jax.lax.stop_gradient(returns - values)
        return -(chosen * gain).mean() + 0.5 * jnp.mean((returns - values) ** 2)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def epoch(carry, _):
        model, optimizer = carry
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return (model, optimizer), loss

    _, losses = epoch((model, optimizer), jnp.arange(3))
    return final, losses, rewards.mean()


settings = Settings()
model = Policy(2, 2, rngs=nnx.Rngs(42))
print("init actor", fingerprints.of(model.actor))
tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(settings.rate, eps=1e-5))
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
position = jnp.ones((settings.actors, 2))
for number, key in enumerate(jax.random.split(jax.random.key(0), 4)):
    position, losses, reward = update(model, optimizer, position, key, settings)
    print("update", number, *map(float, losses), float(reward))
print("optimizer", int(optimizer.step[...]))
target = nnx.clone(model)
averaged = jax.tree.map(
    lambda old, new: 0.9 * old + 0.1 * new,
    nnx.state(target, nnx.Param),
    nnx.state(model, nnx.Param),
)
nnx.update(target, averaged)
print("target", float(target(position)[1].sum()))
