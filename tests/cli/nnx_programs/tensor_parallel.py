# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism by hand: layers called in `shard_map` with shards of kernels."""

import fingerprints
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P


class MLP(nnx.Module):
    """Two layers; the width between them is split."""

    def __init__(self, size: int, hidden: int, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(size, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, size, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


model = MLP(4, 16, rngs=nnx.Rngs(5))
print("init", fingerprints.of(model))
axis_types = (jax.sharding.AxisType.Auto,)
mesh = jax.make_mesh((8,), ("model",), axis_types=axis_types)
x = jax.random.normal(jax.random.key(1), (6, 4))
whole = model(x)

graphdef, state = nnx.split(model)
specs = {"up": {"kernel": P(None, "model"), "bias": P("model")}}
specs["down"] = {"kernel": P("model", None)}
spec_of = lambda path, _: specs[path[0].key][path[1].key]
state_specs = jax.tree_util.tree_map_with_path(spec_of, nnx.to_pure_dict(state))
pure = nnx.to_pure_dict(state)


def forward(pure, x):
    """The model on one shard of its weights; partial sums are added up."""
    part = nnx.state(model)
    nnx.replace_by_pure_dict(part, pure)
    part = nnx.merge(graphdef, part)
    return jax.lax.psum(part(x), "model")


split = jax.shard_map(
    forward, mesh=mesh, in_specs=(state_specs, P()), out_specs=P(), check_vma=False
)
print("same result", bool(jnp.allclose(split(pure, x), whole, atol=1e-5)))


def loss_fn(pure):
    return jnp.mean((split(pure, x) - 1.0) ** 2)


tx = optax.sgd(0.1)
opt_state = tx.init(pure)
for step in range(3):
    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(pure)
    updates, opt_state = tx.update(grads, opt_state)
    pure = optax.apply_updates(pure, updates)
    print("step", step, float(loss))


@nnx.shard_map(mesh=mesh, in_specs=(P("model"), P("model")), out_specs=P("model"))
def scaled(scale: nnx.Param, x: jax.Array):
    """Writes to a Variable, shard by shard."""
    scale[...] = scale[...] * 2
    return x * scale[...]


scale = nnx.Param(jnp.arange(8.0))
print("scaled", float(jnp.sum(scaled(scale, jnp.ones(8)))), float(jnp.sum(scale[...])))
