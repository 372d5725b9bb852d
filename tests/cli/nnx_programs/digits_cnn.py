# SPDX-License-Identifier: Apache-2.0
"""A convolutional classifier of noisy bars, with metrics, dropout and batch norm."""

from functools import partial

import fingerprints
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class CNN(nnx.Module):
    """Two convolutions and two dense layers."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 4, kernel_size=(3, 3), use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(4, rngs=rngs)
        self.conv2 = nnx.Conv(4, 8, kernel_size=(3, 3), use_bias=False, rngs=rngs)
        self.pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear1 = nnx.Linear(32, 16, rngs=rngs)
        self.dropout = nnx.Dropout(rate=0.2, rngs=rngs)
        self.linear2 = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        x = self.pool(nnx.relu(self.norm1(self.conv1(x))))
        x = self.pool(nnx.relu(self.conv2(x)))
        x = x.reshape(x.shape[0], -1)
        return self.linear2(nnx.relu(self.dropout(self.linear1(x))))


def loss_fn(model, batch):
    logits = model(batch["image"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return loss.mean(), logits


@nnx.jit
def train_step(model, optimizer, metrics, batch):
    grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = grad_fn(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)


@nnx.jit
def eval_step(model, metrics, batch):
    loss, logits = loss_fn(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])


def batches(count, seed):
    noise = np.random.default_rng(seed)
    for _ in range(count):
        label = noise.integers(0, 4, 16)
        image = noise.normal(0, 0.3, (16, 8, 8, 1)).astype(np.float32)
        for row, kind in enumerate(label):
            image[row, 2 * kind : 2 * kind + 2] += 1.0
        yield {"image": jnp.asarray(image), "label": jnp.asarray(label)}


def main():
    model = CNN(rngs=nnx.Rngs(0))
    print("init", fingerprints.of(model))
    optimizer = nnx.Optimizer(model, optax.adamw(0.005, 0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(
        accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
    )
    for step, batch in enumerate(batches(20, seed=0)):
        model.train()
        train_step(model, optimizer, metrics, batch)
        if step % 10 == 9:
            for name, value in metrics.compute().items():
                print("train", step, name, float(value))
            metrics.reset()
            model.eval()
            for test in batches(2, seed=1):
                eval_step(model, metrics, test)
            for name, value in metrics.compute().items():
                print("test", step, name, float(value))
            metrics.reset()
    model.eval()
    last = next(batches(1, seed=2))
    predictions = jax.jit(lambda x: 2 * x)(model(last["image"]).argmax(axis=1))
    print("predictions", *(predictions // 2).tolist())
    print("steps", int(optimizer.step[...]), float(model.norm1.mean[...].sum()))


if __name__ == "__main__":
    main()
