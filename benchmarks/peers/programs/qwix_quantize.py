# SPDX-License-Identifier: Apache-2.0
"""Weights and activations of a network quantised after training, and while training."""

import jax
import jax.numpy as jnp
import qwix
from flax import nnx


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.hidden = nnx.Linear(8, 16, rngs=rngs)
        self.out = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.conv(x)).mean((1, 2))
        return self.out(nnx.relu(self.hidden(x)))


net = Net(nnx.Rngs(0))
x = jax.random.normal(jax.random.key(1), (3, 8, 8, 3))
results = {}
for name, where, acts in [("weights", "hidden|out", None), ("both", ".*", jnp.int8)]:
    rule = qwix.QuantizationRule(
        module_path=where, weight_qtype=jnp.int8, act_qtype=acts
    )
    quantized = qwix.quantize_model(net, qwix.PtqProvider([rule]), x)
    params = nnx.to_pure_dict(nnx.state(quantized))
    results[name] = params, quantized(x), nnx.jit(lambda m, x: m(x))(quantized, x)
rule = qwix.QtRule(module_path=".*", weight_qtype=jnp.int8, act_qtype=jnp.int8)
trained = qwix.quantize_model(net, qwix.QtProvider([rule]), x)
loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(trained)
results["training"] = loss, nnx.to_pure_dict(grads)
