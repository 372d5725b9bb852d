# SPDX-License-Identifier: Apache-2.0
"""LoRA put on a network and trained, then LoRA on quantised weights."""

import jax
import optax
import qwix
from flax import nnx


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(8, 16, rngs=rngs)
        self.out = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


def adapted(**options):
    provider = qwix.LoraProvider(module_path=".*", rank=2, alpha=1.0, **options)
    return qwix.apply_lora_to_model(net, provider, x, rngs=nnx.Rngs(params=3))


@nnx.jit
def step(model, optimizer):
    of = nnx.DiffState(0, nnx.LoRAParam)
    loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean(), argnums=of)(model)
    optimizer.update(model, grads)
    return loss


net = Net(nnx.Rngs(0))
x = jax.random.normal(jax.random.key(1), (3, 8))
model = adapted()
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)
losses = [step(model, optimizer) for _ in range(3)]
on_quantized = adapted(weight_qtype="nf4", tile_size=4)
results = {
    "params": nnx.to_pure_dict(nnx.state(model)),
    "losses": losses,
    "on quantized": on_quantized(x),
}
