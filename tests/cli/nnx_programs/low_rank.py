# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters over a frozen model; only the adapters are trained."""

import fingerprints
import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Base(nnx.Module):
    """What was trained before."""

    def __init__(self, rngs):
        self.first = nnx.Linear(6, 12, rngs=rngs)
        self.second = nnx.Linear(12, 3, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.tanh(self.first(x)))


def with_adapters(model, rank, rngs):
    for path, module in list(nnx.iter_modules(model)):
        if isinstance(module, nnx.Linear):
            parent = model
            for name in path[:-1]:
                parent = getattr(parent, name)
            adapted = nnx.LoRA(
                module.in_features,
                rank,
                module.out_features,
                base_module=module,
                rngs=rngs,
            )
            setattr(parent, path[-1], adapted)
    return model


model = Base(nnx.Rngs(0))
x = jax.random.normal(jax.random.key(1), (16, 6))
y = jnp.sin(x[:, :3])
before = model(x)
model = with_adapters(model, 2, nnx.Rngs(5))
print("init", fingerprints.of(model))
print("unchanged", bool(jnp.allclose(before, model(x))))
lora, rest = nnx.state(model, nnx.LoRAParam, ...)
print("sizes", sum(v.size for v in jax.tree.leaves(lora)), len(jax.tree.leaves(rest)))
optimizer = nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.LoRAParam)


@nnx.jit
def step(model, optimizer):
    def loss_fn(model):
        return jnp.mean(optax.l2_loss(model(x), y))

    wrt = nnx.DiffState(0, nnx.LoRAParam)
    loss, grads = nnx.value_and_grad(loss_fn, argnums=wrt)(model)
    optimizer.update(model, grads)
    return loss


for number in range(10):
    loss = step(model, optimizer)
    if number % 3 == 0:
        print("loss", number, float(loss))
kernel = model.first.base_module.kernel[...]
print("kernel", float(kernel.sum()))
print(
    "adapter", float(jnp.abs(model.first.lora_a[...] @ model.first.lora_b[...]).sum())
)

layer = nnx.LoRALinear(4, 5, lora_rank=2, rngs=nnx.Rngs(2))
print("init layer", fingerprints.of(layer))
print("layer", float(layer(jnp.ones((1, 4))).sum()), layer.lora.lora_a.shape)


def is_bias(path, value):
    return path[-1] == "bias"


biases = nnx.state(model, is_bias)
print("biases", sorted("/".join(path) for path, _ in nnx.to_flat_state(biases)))
merged = nnx.merge_state(lora, rest)
nnx.update(model, merged)
print("again", float(model(x).sum()))
