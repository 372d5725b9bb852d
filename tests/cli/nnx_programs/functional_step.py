# SPDX-License-Identifier: Apache-2.0
"""NNX models in plain JAX: split and merge around jit, grad and lax.scan."""

import itertools

import fingerprints
import jax
import jax.numpy as jnp
import optax
from flax import nnx


class MLP(nnx.Module):
    """A small network with batch norm and dropout."""

    def __init__(self, sizes, *, rngs: nnx.Rngs):
        pairs = itertools.pairwise(sizes)
        self.layers = nnx.List(
            [nnx.Linear(a, b, use_bias=a > 2, rngs=rngs) for a, b in pairs]
        )
        self.norm = nnx.BatchNorm(sizes[1], momentum=0.9, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        *hidden, last = self.layers
        for number, layer in enumerate(hidden):
            x = layer(x)
            x = self.norm(x) if number == 0 else x
            x = self.drop(nnx.relu(x))
        return last(x)


model = MLP([2, 16, 16, 1], rngs=nnx.Rngs(params=0, dropout=1))
print("init", fingerprints.of(model))
graphdef, params, stats, rest = nnx.split(model, nnx.Param, nnx.BatchStat, ...)
tx = optax.adam(optax.cosine_decay_schedule(0.01, 100))
opt_state = tx.init(params)


def forward(params, stats, rest, x):
    model = nnx.merge(graphdef, params, stats, rest, copy=True)
    y = model(x)
    _, _, stats, rest = nnx.split(model, nnx.Param, nnx.BatchStat, ...)
    return y, (stats, rest)


@jax.jit
def train(params, stats, rest, opt_state, xs):
    def step(carry, x):
        params, stats, rest, opt_state = carry

        def loss_fn(params):
            y, new = forward(params, stats, rest, x)
            return jnp.mean((y[:, 0] - x.prod(axis=-1)) ** 2), new

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (stats, rest)), grads = grad_fn(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, stats, rest, opt_state), loss

    return jax.lax.scan(step, (params, stats, rest, opt_state), xs)


xs = jax.random.normal(jax.random.key(2), (30, 16, 2))
(params, stats, rest, opt_state), losses = train(params, stats, rest, opt_state, xs)
print("losses", *(float(loss) for loss in losses[::6]))
nnx.update(model, params, stats, rest)
model.eval()
print("eval", float(model(xs[0]).sum()), float(model.norm.var[...].mean()))
print("drawn", int(model.drop.rngs.count[...]))
doubled = jax.tree.map(lambda a: 2 * a, params)
print("norms", float(optax.global_norm(params)), float(optax.global_norm(doubled)))
paths = [
    jax.tree_util.keystr(path)
    for path, _ in jax.tree_util.tree_leaves_with_path(params)
]
print("paths", *paths)
print("items", params["layers"][0]["kernel"].shape, params.layers[1].bias.shape)
model2 = nnx.merge(graphdef, params, stats, rest)
model2.eval()
gd2, st2 = nnx.split(model2)
rows = jax.vmap(lambda x: nnx.merge(gd2, st2)(x[None])[0, 0])(xs[0])
print("rows", *map(float, rows[:4]))
jacobian = jax.jacrev(lambda x: nnx.merge(gd2, st2)(x[None])[0])(xs[0, 0])
print("jacobian", jacobian.shape, *map(float, jacobian[0]))
outputs, (_, updated) = gd2.apply(st2)(xs[0])
print("applied", float(outputs.sum()), len(jax.tree.leaves(updated)))
