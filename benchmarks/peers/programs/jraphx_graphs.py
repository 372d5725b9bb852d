# SPDX-License-Identifier: Apache-2.0
"""Graph networks of jraphx: convolution, attention, with norms and dropout."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jraphx.nn.models import GAT, GCN

x = jax.random.normal(jax.random.key(0), (6, 4))
edges = jnp.array([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]])
labels = jnp.array([0, 1, 0, 1, 0, 1])
common = {"in_features": 4, "hidden_features": 8, "num_layers": 2, "out_features": 2}


@nnx.jit
def step(model, optimizer):
    def loss_of(model):
        logits = model(x, edges)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


results = {}
for name, make in {"convolution": GCN, "attention": GAT}.items():
    model = make(**common, dropout_rate=0.3, norm="layer_norm", rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    losses = [step(model, optimizer) for _ in range(3)]
    model.eval()
    results[name] = losses, nnx.to_pure_dict(nnx.state(model)), model(x, edges)
