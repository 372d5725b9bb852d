# SPDX-License-Identifier: Apache-2.0
"""Control flow, custom rules, ensembles and partial application on modules."""

import fingerprints
import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Model(nnx.Module):
    """A dense layer that counts."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.count = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.count[...] += 1
        return self.linear(x)


model = Model(nnx.Rngs(0))
x = jax.random.normal(jax.random.key(1), (2, 3))


@nnx.jit
def branch(model, x, flag):
    return nnx.cond(flag, lambda m, x: m(x), lambda m, x: x * 2, model, x)


print("cond", float(branch(model, x, True).sum()), float(branch(model, x, False).sum()))
print("count", int(model.count[...]))
print(
    "switch", float(nnx.switch(1, [lambda m, x: x, lambda m, x: m(x)], model, x).sum())
)
result = nnx.while_loop(
    lambda carry: carry[0].count[...] < 8,
    lambda carry: (carry[0], jnp.tanh(carry[0](carry[1]))),
    (model, x),
)
print("while", float(result[1].sum()), int(model.count[...]))
_, y = nnx.fori_loop(
    0, 3, lambda i, carry: (carry[0], carry[0](carry[1]) + i), (model, x)
)
print("fori", float(y.sum()), int(model.count[...]))


@nnx.vmap(in_axes=0, out_axes=0)
def create(key):
    return Model(nnx.Rngs(key))


members = create(jax.random.split(jax.random.key(2), 4))
print("init members", fingerprints.of(members))


@nnx.vmap(in_axes=(0, None))
def predict(model, x):
    return model(x)


print("members", predict(members, x).shape, float(predict(members, x).sum()))


@nnx.vmap(in_axes=(0, None), out_axes=0)
def losses(model, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.sum(m(x) ** 2))(model)
    return loss, grads


values, grads = losses(members, x)
print("losses", *map(float, values), jax.tree.leaves(grads)[1].shape)


@nnx.custom_vjp
def clipped(model, x):
    return model(x)


def forward(model, x):
    return clipped(model, x), x


def backward(residual, gradients):
    updates, gradient = gradients
    model_updates, _ = updates
    return jax.tree.map(jnp.zeros_like, model_updates), jnp.clip(gradient, -0.5, 0.5)


clipped.defvjp(forward, backward)
print("custom", float(nnx.grad(lambda x, m: clipped(m, x).sum())(x, model).sum()))

optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


@nnx.jit
def train(model, optimizer, x):
    def loss_fn(model):
        return jnp.mean(model(x) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


step = nnx.cached_partial(train, model, optimizer)
print("cached", *(float(step(x)) for _ in range(3)))
print("updated", float(model.linear.kernel[...].sum()), int(optimizer.step[...]))


@nnx.jit(donate_argnums=0)
def donated(model, x):
    model.linear.kernel[...] *= 0.5
    return model(x)


print("donated", float(donated(model, x).sum()))
error, out = nnx.checkify(lambda m, x: m(x))(model, x)
print("checkify", error.get(), float(out.sum()))
print("jaxpr", type(nnx.eval_shape(lambda m, x: m(x), model, x)).__name__)


@nnx.jit
def grow(model):
    model.extra = nnx.Param(jnp.ones(2))
    model.linear2 = nnx.Linear(3, 1, rngs=nnx.Rngs(7))


grow(model)
print("grown", model.extra.shape, float(model.linear2.kernel[...].sum()))
shared = nnx.Linear(3, 3, rngs=nnx.Rngs(4))
tied = nnx.List([shared, shared])
graphdef, state = nnx.split(tied)
copied = nnx.merge(graphdef, state)
print("shared", copied[0] is copied[1], len(jax.tree.leaves(state)))
g = nnx.grad(lambda m: (m[0](x) + m[1](x)).sum())(tied)
print("shared grads", len(jax.tree.leaves(g)), float(jax.tree.leaves(g)[1].sum()))
twin = nnx.clone(model)
twin.linear.kernel[...] += 1
print("clone", float((twin.linear.kernel[...] - model.linear.kernel[...]).sum()))
