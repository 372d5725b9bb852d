# SPDX-License-Identifier: Apache-2.0
"""A vision transformer and a small U-Net, with masks, taps and lists of stages."""

import itertools
from typing import Any

import fingerprints
import jax
import jax.numpy as jnp
import optax
from flax import nnx


class EncoderBlock(nnx.Module):
    """Pre-norm attention and a feed-forward network."""

    def __init__(
        self, width: int, heads: int, rate: float = 0.1, *, rngs: nnx.Rngs
    ) -> None:
        self.norm1 = nnx.LayerNorm(width, epsilon=1e-6, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=heads,
            in_features=width,
            dropout_rate=rate,
            broadcast_dropout=False,
            decode=False,
            deterministic=False,
            normalize_qk=True,
            rngs=rngs,
        )
        self.norm2 = nnx.LayerNorm(width, epsilon=1e-6, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(width, 2 * width, rngs=rngs),
            nnx.gelu,
            nnx.Dropout(rate, rngs=rngs),
            nnx.Linear(2 * width, width, rngs=rngs),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Vision(nnx.Module):
    """Patches, a class token, blocks and a head."""

    def __init__(self, width: int = 8, depth: int = 1, *, rngs: nnx.Rngs):
        self.patches = nnx.Conv(
            3, width, (4, 4), strides=(4, 4), padding="VALID", rngs=rngs
        )
        init = jax.nn.initializers.truncated_normal(stddev=0.02)
        self.places = nnx.Param(init(rngs.params(), (1, 5, width), jnp.float32))
        self.token = nnx.Param(jnp.zeros((1, 1, width)))
        self.blocks = nnx.Sequential(
            *[EncoderBlock(width, 2, rngs=rngs) for _ in range(depth)]
        )
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Einsum("bd,dc->bc", (width, 4), (4,), rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        token = jnp.tile(self.token, (x.shape[0], 1, 1))
        x = jnp.concat([token, x], axis=1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


class UNet(nnx.Module):
    """Down, up, and connections between."""

    def __init__(self, widths: list[int], *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        pairs = list(itertools.pairwise(widths))
        self.down = nnx.List([nnx.Conv(a, b, (3, 3), rngs=rngs) for a, b in pairs])
        self.norms = nnx.List(
            [nnx.GroupNorm(b, num_groups=2, rngs=rngs) for _, b in pairs]
        )
        self.up = nnx.List(
            [nnx.Conv(2 * b, a, (3, 3), dtype=dtype, rngs=rngs) for a, b in pairs[::-1]]
        )
        self.time = nnx.Embed(10, widths[-1], rngs=rngs)

    def __call__(self, x, time):
        kept = []
        for conv, norm in zip(self.down, self.norms, strict=True):
            x = nnx.silu(norm(conv(x)))
            kept.append(x)
            x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        x = x + self.time(time)[:, None, None, :]
        for conv in self.up:
            other = kept.pop()
            x = jax.image.resize(x, (*other.shape[:-1], x.shape[-1]), "nearest")
            x = conv(jnp.concatenate([x, other], axis=-1))
        return x


images = jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
model = Vision(rngs=nnx.Rngs(0))
print("init", fingerprints.of(model))
predict = nnx.jit(lambda model, images: model(images))
print("logits", *map(float, predict(model, images)[0]))
model.eval()
print("eval", *map(float, predict(model, images)[0]))
view = nnx.view(model, deterministic=False)
print(
    "view",
    model.blocks.layers[0].mlp.layers[2].deterministic,
    view.blocks.layers[0].mlp.layers[2].deterministic,
)
unet = UNet([2, 4], rngs=nnx.Rngs(1))
print("init unet", fingerprints.of(unet))
x = jax.random.normal(jax.random.key(1), (2, 8, 8, 2))
times = jnp.array([1, 4])
optimizer = nnx.Optimizer(unet, optax.lion(1e-3), wrt=nnx.Param)


@nnx.jit
def step(unet, optimizer, key):
    noise = jax.random.normal(key, x.shape)

    def loss_fn(unet):
        return jnp.mean((unet(x + noise, times) - noise) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(unet)
    optimizer.update(unet, grads)
    return loss


for number in range(3):
    print("loss", number, float(step(unet, optimizer, jax.random.key(number))))
for path, module in nnx.iter_modules(unet):
    print("module", ".".join(map(str, path)) or ".", type(module).__name__)
half = nnx.Linear(4, 4, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(3))
print("half", half(jnp.ones((1, 4))).dtype, half.kernel.dtype)
print(
    "pools",
    float(nnx.avg_pool(x, (3, 3), padding="SAME").sum()),
    float(nnx.min_pool(x, (2, 2)).sum()),
)
