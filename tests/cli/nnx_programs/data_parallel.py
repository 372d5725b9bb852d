# SPDX-License-Identifier: Apache-2.0
"""Data parallel steps: pmap, shard_map and a batch spread over devices."""

import fingerprints
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


class MLP(nnx.Module):
    """Three layers."""

    def __init__(self, rngs):
        self.first = nnx.Linear(1, 16, rngs=rngs)
        self.second = nnx.Linear(16, 16, rngs=rngs)
        self.third = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        return self.third(nnx.relu(self.second(nnx.relu(self.first(x)))))


mesh = Mesh(mesh_utils.create_device_mesh((4,), jax.devices()[:4]), ("data",))
model_sharding = NamedSharding(mesh, P())
data_sharding = NamedSharding(mesh, P("data"))
model = MLP(nnx.Rngs(0))
print("init", fingerprints.of(model))
optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
state = nnx.state((model, optimizer))
state = jax.device_put(state, model_sharding)
nnx.update((model, optimizer), state)


@nnx.jit
def train_step(model, optimizer, x, y):
    def loss_fn(model):
        return jnp.mean((model(x) - y) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


for number in range(4):
    x = jax.random.uniform(jax.random.key(number), (16, 1), minval=-2, maxval=2)
    x, y = jax.device_put((x, 0.8 * jnp.sin(3.14 * x)), data_sharding)
    print("loss", number, float(train_step(model, optimizer, x, y)))
print(
    "placed",
    model.first.kernel.sharding == model_sharding,
    len(model.first.kernel.sharding.device_set),
)


@nnx.shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
def apply(model, x):
    return model(x)


print("shard_map", float(apply(model, x).sum()))


@nnx.pmap(in_axes=(None, 0), out_axes=0, axis_size=4, devices=jax.devices()[:4])
def mapped(model, x):
    return model(x)


fresh = MLP(nnx.Rngs(0))
print("pmap", float(mapped(fresh, jnp.ones((4, 2, 1))).sum()))


@nnx.vmap(in_axes=(None, 0), out_axes=None, axis_name="batch")
def mean(model, x):
    return jax.lax.pmean(model(x), "batch")


print("pmean", float(mean(fresh, jnp.ones((4, 1)))[0]))
norm = nnx.BatchNorm(3, axis_name="batch", rngs=nnx.Rngs(0))


@nnx.vmap(in_axes=(nnx.StateAxes({...: None}), 0), out_axes=0, axis_name="batch")
def normed(norm, x):
    return norm(x)


y = normed(norm, jax.random.normal(jax.random.key(9), (4, 2, 3)))
print("batch norm", float(jnp.abs(y).sum()), *map(float, norm.mean[...]))
