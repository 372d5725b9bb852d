# SPDX-License-Identifier: Apache-2.0
"""A model made sharded over a mesh of devices, from abstract shapes."""

import fingerprints
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec


class Sharded(nnx.Module):
    """Two matrices, split along different axes."""

    def __init__(self, width, hidden, rngs):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(
            width,
            hidden,
            kernel_init=nnx.with_partitioning(init, (None, "model")),
            use_bias=False,
            rngs=rngs,
        )
        self.down = nnx.Param(
            init(rngs.params(), (hidden, width)), sharding_names=("model", None)
        )
        self.scale = nnx.Param(jnp.ones(width))

    def __call__(self, x):
        return nnx.relu(self.up(x)) @ self.down * self.scale


mesh = jax.make_mesh(
    (2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
)


@nnx.jit
def create():
    model = Sharded(8, 16, nnx.Rngs(0))
    state = nnx.state(model)
    specs = nnx.get_partition_spec(state)
    nnx.update(model, jax.lax.with_sharding_constraint(state, specs))
    return model


with jax.set_mesh(mesh):
    abstract = nnx.eval_shape(lambda: Sharded(8, 16, nnx.Rngs(0)))
    for path, leaf in nnx.to_flat_state(nnx.state(abstract)):
        print("abstract", "/".join(path), leaf.shape, leaf.dtype)
    specs = nnx.get_partition_spec(nnx.state(abstract))
    for path, leaf in nnx.to_flat_state(specs):
        print(
            "spec",
            "/".join(path),
            leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf,
        )
    model = create()
    print("init", fingerprints.of(model))
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        print(
            "placed",
            "/".join(path),
            leaf.sharding.spec,
            leaf[...].addressable_shards[0].data.shape,
        )
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    print("moments", optimizer.opt_state[0].mu["down"].sharding.spec[0])
    data = jax.random.normal(jax.random.key(1), (8, 8))
    data = jax.device_put(data, NamedSharding(mesh, PartitionSpec("data", None)))

    @nnx.jit
    def step(model, optimizer, x):
        def loss_fn(model):
            return jnp.mean((model(x) - x) ** 2)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    for number in range(3):
        print("loss", number, float(step(model, optimizer, data)))
    print("still", model.down.sharding.spec)

shardings = nnx.get_named_sharding(nnx.state(abstract), mesh)
placed = jax.tree.map(lambda s: s.spec, jax.tree.leaves(shardings))
print("named", placed)
graphdef, state = nnx.get_abstract_model(lambda: Sharded(8, 16, nnx.Rngs(0)), mesh)
print("made", [a.sharding.spec for a in jax.tree.leaves(state)])
