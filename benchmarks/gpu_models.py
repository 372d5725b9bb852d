# SPDX-License-Identifier: Apache-2.0
"""One decoder, four ways: by hand, as Modules of treetap and flax.nnx, and of equinox.

The arithmetic is written once, on arrays, so that contenders differ only in how they
hold parameters and how values leave the model. `contenders()` maps a name to a maker of
programs; a `Program` has state of its own, so that donated buffers are nobody else's.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import treetap as tt

try:
    from flax import nnx
except ImportError:
    nnx = None
try:
    import equinox as eqx
except ImportError:
    eqx = None

VOCABULARY = 1024
COMPUTE = jnp.bfloat16
RATE, DECAYS, EPSILON = 1e-4, (0.9, 0.95), 1e-8
TRAIN, VALUES, STATISTICS, TRAIN_VALUES = KINDS = (
    "train step",
    "forward, values kept",
    "forward, statistics",
    "train step, values kept",
)
FLOOR, AGAIN = "by hand", "the same again"
OUTSIDE = "treetap, observed from outside"
Tree = Any


@dataclasses.dataclass(frozen=True)
class Size:
    """The sizes of a decoder and of its batch."""

    width: int
    heads: int
    rows: int
    positions: int
    layers: int = 24


SMALL = 64
SIZES = {
    1024: Size(1024, 16, 8, 512),
    256: Size(256, 8, 8, 128),
    SMALL: Size(SMALL, 8, 2, 16, layers=4),
}


def initial(size: Size) -> Tree:
    """Parameters on the host, the same in every process."""
    draw = np.random.default_rng(0)
    width = size.width

    def normal(*shape: int) -> np.ndarray:
        return draw.standard_normal(shape, np.float32) * np.float32(shape[0] ** -0.5)

    def block() -> dict[str, Any]:
        return {
            "norm_1": np.ones(width, np.float32),
            "qkv": normal(width, 3 * width),
            "out": normal(width, width),
            "norm_2": np.ones(width, np.float32),
            "up": normal(width, 4 * width),
            "down": normal(4 * width, width),
        }

    return {
        "embedding": normal(VOCABULARY, width),
        "positions": normal(size.positions, width),
        "blocks": [block() for _ in range(size.layers)],
        "norm": np.ones(width, np.float32),
    }


def on_device(arrays: Tree) -> Tree:
    """Copies of arrays, which may be donated."""
    return jax.tree.map(jnp.array, arrays)


def batch(size: Size) -> jax.Array:
    draw = np.random.default_rng(1)
    shape = (size.rows, size.positions)
    return jnp.asarray(draw.integers(0, VOCABULARY, shape, np.int32))


# The arithmetic, the same for all.


def normalized(x: Any, scale: Any) -> Any:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide**2, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + 1e-6) * scale).astype(x.dtype)


def attended(x: Any, qkv: Any, out: Any, heads: int) -> Any:
    split = (*x.shape[:-1], heads, x.shape[-1] // heads)
    q, k, v = (
        part.reshape(split) for part in jnp.split(x @ qkv.astype(x.dtype), 3, -1)
    )
    seen = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
    return seen.reshape(x.shape) @ out.astype(x.dtype)


def fed_forward(x: Any, up: Any, down: Any) -> Any:
    return jax.nn.gelu(x @ up.astype(x.dtype)) @ down.astype(x.dtype)


def embedded(tokens: Any, embedding: Any, positions: Any) -> Any:
    return embedding.astype(COMPUTE)[tokens] + positions.astype(COMPUTE)


def read_out(x: Any, embedding: Any) -> Any:
    return x @ embedding.astype(x.dtype).T


def loss_of(logits: Any, tokens: Any) -> Any:
    """The mean negative log likelihood of the next token."""
    logs = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    return -jnp.take_along_axis(logs, tokens[:, 1:, None], -1).mean()


def statistics(x: Any) -> Any:
    """The mean and the largest magnitude, and the fraction of zeros."""
    size = jnp.abs(x).astype(jnp.float32)
    zeros = jnp.mean(x == 0, dtype=jnp.float32)
    return jnp.stack([size.mean(), size.max(), zeros])


def adam(params: list[Any], grads: list[Any], moments: Any) -> tuple[list[Any], Any]:
    """New parameters and moments; all are flat lists of arrays."""
    means, squares, count = moments
    count = count + 1
    first, second = DECAYS
    means = [first * m + (1 - first) * g for m, g in zip(means, grads)]
    squares = [second * s + (1 - second) * g**2 for s, g in zip(squares, grads)]
    rate = RATE * jnp.sqrt(1 - second**count) / (1 - first**count)
    stepped = [
        p - rate * m / (jnp.sqrt(s) + EPSILON)
        for p, m, s in zip(params, means, squares)
    ]
    return stepped, (means, squares, count)


def no_moments(params: Tree) -> Any:
    leaves = jax.tree.leaves(params)
    zeros = [[jnp.zeros_like(leaf) for leaf in leaves] for _ in range(2)]
    return (*zeros, jnp.zeros((), jnp.float32))


@dataclasses.dataclass
class Program:
    """A compiled function with the state it runs on.

    `run` is called as `run(*state, tokens)`, or with the tokens in front. If it trains,
    the first result is the loss; `keep` takes the new state out of a result, and
    returns what a user would look at.
    """

    run: Callable[..., Any]
    state: tuple[Any, ...]
    keep: Callable[["Program", Any], Any] | None = None
    tokens_first: bool = False

    def args(self, tokens: Any) -> tuple[Any, ...]:
        return (tokens, *self.state) if self.tokens_first else (*self.state, tokens)

    def __call__(self, tokens: Any) -> Any:
        out = self.run(*self.args(tokens))
        return out if self.keep is None else self.keep(self, out)

    def lower(self, tokens: Any) -> Any:
        """The program before it is compiled; None if that cannot be had."""
        lower = getattr(self.run, "lower", None)
        return None if lower is None else lower(*self.args(tokens))


Maker = Callable[[str, Size, Tree], Program]


# By hand.


def plain_forward(params: Tree, tokens: Any, heads: int) -> tuple[Any, list[Any]]:
    x = embedded(tokens, params["embedding"], params["positions"])
    kept = []
    for p in params["blocks"]:
        x = x + attended(normalized(x, p["norm_1"]), p["qkv"], p["out"], heads)
        x = x + fed_forward(normalized(x, p["norm_2"]), p["up"], p["down"])
        kept.append(x)
    return read_out(normalized(x, params["norm"]), params["embedding"]), kept


def plain(kind: str, size: Size, arrays: Tree) -> Program:
    params = on_device(arrays)
    if kind in (VALUES, STATISTICS):
        return Program(plain_forwards(kind, size.heads), (params,))

    def keep(program: Program, out: Any) -> Any:
        *seen, params, moments = out
        program.state = (params, moments)
        return seen

    step = plain_step(kind == TRAIN_VALUES, size.heads)
    return Program(step, (params, no_moments(params)), keep)


@functools.cache  # the same program again needs no other compilation
def plain_forwards(kind: str, heads: int) -> Any:
    @jax.jit
    def forward(params: Tree, tokens: Any) -> Any:
        logits, kept = plain_forward(params, tokens, heads)
        return logits, kept if kind == VALUES else [statistics(x) for x in kept]

    return forward


@functools.cache
def plain_step(keeps: bool, heads: int) -> Any:
    def loss_fn(params: Tree, tokens: Any) -> Any:
        logits, kept = plain_forward(params, tokens, heads)
        return loss_of(logits, tokens), kept if keeps else []

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Tree, moments: Any, tokens: Any) -> Any:
        grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, kept), grads = grad(params, tokens)
        leaves, tree = jax.tree.flatten(params)
        leaves, moments = adam(leaves, jax.tree.leaves(grads), moments)
        return loss, kept, jax.tree.unflatten(tree, leaves), moments

    return step


# Modules. treetap and flax.nnx have these names in common.


@functools.cache
def decoder_class(library: Any, sows: bool) -> Any:
    class Norm(library.Module):
        def __init__(self, scale: Any):
            self.scale = library.Param(scale)

        def __call__(self, x: Any) -> Any:
            return normalized(x, self.scale[...])

    class Attention(library.Module):
        def __init__(self, qkv: Any, out: Any, heads: int):
            self.qkv, self.out = library.Param(qkv), library.Param(out)
            self.heads = heads

        def __call__(self, x: Any) -> Any:
            return attended(x, self.qkv[...], self.out[...], self.heads)

    class FeedForward(library.Module):
        def __init__(self, up: Any, down: Any):
            self.up, self.down = library.Param(up), library.Param(down)

        def __call__(self, x: Any) -> Any:
            return fed_forward(x, self.up[...], self.down[...])

    class Block(library.Module):
        def __init__(self, p: Tree, heads: int):
            self.norm_1, self.norm_2 = Norm(p["norm_1"]), Norm(p["norm_2"])
            self.attention = Attention(p["qkv"], p["out"], heads)
            self.feed_forward = FeedForward(p["up"], p["down"])

        def __call__(self, x: Any) -> Any:
            x = x + self.attention(self.norm_1(x))
            x = x + self.feed_forward(self.norm_2(x))
            if sows:
                self.sow(library.Intermediate, "out", x)
            return x

    class Decoder(library.Module):
        def __init__(self, p: Tree, heads: int):
            self.embedding = library.Param(p["embedding"])
            self.positions = library.Param(p["positions"])
            self.blocks = library.List([Block(q, heads) for q in p["blocks"]])
            self.norm = Norm(p["norm"])

        def __call__(self, tokens: Any) -> Any:
            x = embedded(tokens, self.embedding[...], self.positions[...])
            for block in self.blocks:
                x = block(x)
            return read_out(self.norm(x), self.embedding[...])

    return Decoder


def call(model: Any, tokens: Any) -> Any:
    return model(tokens)


def loss_fn(model: Any, tokens: Any) -> Any:
    return loss_of(model(tokens), tokens)


def descend(library: Any, model: Any, grads: Any, moments: Any) -> Any:
    """Adam's step on a Module, in place; returns the new moments."""
    leaves, tree = jax.tree.flatten(library.state(model, library.Param))
    slopes = jax.tree.leaves(library.state(grads, library.Param))
    leaves, moments = adam(leaves, slopes, moments)
    library.update(model, jax.tree.unflatten(tree, leaves))
    return moments


def keep_moments(program: Program, out: Any) -> Any:
    *seen, moments = out
    program.state = (program.state[0], moments)
    return seen


def module_program(
    library: Any, forward: Any, step: Any, model: Any, options: dict[str, Any]
) -> Program:
    if step is None:
        return Program(library.jit(forward, **options), (model,))
    state = (model, no_moments(library.state(model, library.Param)))
    run = library.jit(step, donate_argnums=(0, 1), **options)
    return Program(run, state, keep_moments)


# What treetap looks at; its model says nothing of it.
BLOCKS = "blocks/*:__call__"


def observed_forward(model: Any, tokens: Any) -> Any:
    logits, record = tt.observe(model, BLOCKS)(tokens)
    return logits, [site.value for site in record]


def forward_statistics(model: Any, tokens: Any) -> Any:
    logits, record = tt.observe(model, BLOCKS)(tokens)
    return logits, [statistics(site.value) for site in record]


def step(model: Any, moments: Any, tokens: Any) -> Any:
    loss, grads = tt.value_and_grad(loss_fn)(model, tokens)
    return loss, [], descend(tt, model, grads, moments)


def observed_step(model: Any, moments: Any, tokens: Any) -> Any:
    grad = tt.observe(tt.value_and_grad(loss_fn), BLOCKS)
    (loss, grads), record = grad(model, tokens)
    moments = descend(tt, model, grads, moments)
    return loss, [site.value for site in record], moments


def treetap(kind: str, size: Size, arrays: Tree) -> Program:
    model = decoder_class(tt, False)(on_device(arrays), size.heads)
    forwards = {VALUES: observed_forward, STATISTICS: forward_statistics}
    steps = {TRAIN: step, TRAIN_VALUES: observed_step}
    return module_program(tt, forwards.get(kind), steps.get(kind), model, {})


def treetap_outside(kind: str, size: Size, arrays: Tree) -> Program:
    """The compiled functions as they are, looked into by their caller."""
    model = decoder_class(tt, False)(on_device(arrays), size.heads)
    made = module_program(tt, call, step if kind == TRAIN_VALUES else None, model, {})
    made.run = tt.observe(made.run, BLOCKS)

    def keep(program: Program, out: Any) -> Any:
        result, record = out
        kept = [site.value for site in record]
        if kind == VALUES:
            return result, kept
        loss, _, moments = result
        return keep_moments(program, (loss, kept, moments))

    made.keep = keep
    return made


def nnx_program(kind: str, size: Size, arrays: Tree, *, options: Any) -> Program:
    assert nnx is not None

    def kept_of(sown: Any) -> list[Any]:
        return [sown["blocks"][i]["out"][0] for i in range(size.layers)]

    def forward(model: Any, tokens: Any) -> Any:
        logits, sown = nnx.capture(call, nnx.Intermediate)(model, tokens)
        kept = kept_of(sown)
        return logits, kept if kind == VALUES else [statistics(x) for x in kept]

    def sown_loss(model: Any, tokens: Any) -> Any:
        logits, sown = nnx.capture(call, nnx.Intermediate)(model, tokens)
        return loss_of(logits, tokens), kept_of(sown)

    def step(model: Any, moments: Any, tokens: Any) -> Any:
        if kind == TRAIN:
            loss, grads = nnx.value_and_grad(loss_fn, **options)(model, tokens)
            return loss, [], descend(nnx, model, grads, moments)
        grad = nnx.value_and_grad(sown_loss, has_aux=True, **options)
        (loss, kept), grads = grad(model, tokens)
        return loss, kept, descend(nnx, model, grads, moments)

    trains = kind in (TRAIN, TRAIN_VALUES)
    made = decoder_class(nnx, kind != TRAIN)
    model = made(on_device(arrays), size.heads)
    return module_program(nnx, forward, step if trains else None, model, options)


if eqx is not None:

    class EqxBlock(eqx.Module):
        norm_1: Any
        qkv: Any
        out: Any
        norm_2: Any
        up: Any
        down: Any
        heads: int = eqx.field(static=True)

        def __call__(self, x: Any) -> Any:
            x = x + attended(normalized(x, self.norm_1), self.qkv, self.out, self.heads)
            return x + fed_forward(normalized(x, self.norm_2), self.up, self.down)

    class EqxDecoder(eqx.Module):
        embedding: Any
        positions: Any
        blocks: list[EqxBlock]
        norm: Any

        def __call__(self, tokens: Any) -> tuple[Any, list[Any]]:
            x = embedded(tokens, self.embedding, self.positions)
            kept = []
            for block in self.blocks:
                x = block(x)
                kept.append(x)
            return read_out(normalized(x, self.norm), self.embedding), kept


def equinox(kind: str, size: Size, arrays: Tree) -> Program:
    assert eqx is not None
    params = on_device(arrays)
    blocks = [EqxBlock(**p, heads=size.heads) for p in params.pop("blocks")]
    model = EqxDecoder(**params, blocks=blocks)

    def forward(tokens: Any, model: Any) -> Any:
        logits, kept = model(tokens)
        return logits, kept if kind == VALUES else [statistics(x) for x in kept]

    def loss_and_kept(model: Any, tokens: Any) -> Any:
        logits, kept = model(tokens)
        return loss_of(logits, tokens), kept if kind == TRAIN_VALUES else []

    def step(tokens: Any, model: Any, moments: Any) -> Any:
        grad = eqx.filter_value_and_grad(loss_and_kept, has_aux=True)
        (loss, kept), grads = grad(model, tokens)
        leaves, tree = jax.tree.flatten(eqx.filter(model, eqx.is_inexact_array))
        leaves, moments = adam(leaves, jax.tree.leaves(grads), moments)
        return loss, kept, jax.tree.unflatten(tree, leaves), moments

    if kind in (VALUES, STATISTICS):
        return Program(eqx.filter_jit(forward), (model,), tokens_first=True)

    def keep(program: Program, out: Any) -> Any:
        *seen, model, moments = out
        program.state = (model, moments)
        return seen

    run = eqx.filter_jit(step, donate="all-except-first")
    return Program(run, (model, no_moments(model)), keep, tokens_first=True)


def contenders() -> dict[str, Maker]:
    """Those that are installed; the first is the floor."""
    found: dict[str, Maker] = {
        FLOOR: plain,
        AGAIN: plain,
        "treetap": treetap,
        OUTSIDE: treetap_outside,
    }
    if nnx is not None:
        tree = {"graph": False}
        found["nnx tree"] = functools.partial(nnx_program, options=tree)
        found["nnx default"] = functools.partial(nnx_program, options={})
    if eqx is not None:
        found["equinox"] = equinox
    return found


def takes_part(name: str, kind: str) -> bool:
    """Only what keeps values can be watched from outside."""
    return name != OUTSIDE or kind in (VALUES, TRAIN_VALUES)
