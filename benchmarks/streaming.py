# SPDX-License-Identifier: Apache-2.0
"""What statistics of all layers cost: memory and time, beside a capture of everything.

A transformer whose 48 blocks are one scan, forward and as a training step. Memory is
what the compiled program says of itself, relative to the same program unobserved: at
its peak it has arguments, temporaries and results; the last two are also given alone.
The numbers are checked against those of the full capture.
"""

import argparse
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import timing

import treetap as tt

LAYERS, BATCH, LENGTH, WIDTH, HEADS, VOCABULARY = 48, 4, 64, 64, 4, 256
REDUCERS = [tt.Moments(), tt.AbsMax(), tt.Norm(), tt.NonFinite()]


class Block(tt.Module):
    def __init__(self, *, rngs: tt.Rngs):
        self.first = tt.LayerNorm(WIDTH, rngs=rngs)
        self.qkv = tt.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out = tt.Linear(WIDTH, WIDTH, rngs=rngs)
        self.second = tt.LayerNorm(WIDTH, rngs=rngs)
        self.up = tt.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = tt.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def attend(self, x: Any) -> Any:
        shape = (*x.shape[:2], HEADS, -1)
        q, k, v = (part.reshape(shape) for part in jnp.split(self.qkv(x), 3, axis=-1))
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))[None, None]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return self.out(mixed.reshape(x.shape))

    def __call__(self, x: Any) -> Any:
        x = x + self.attend(self.first(x))
        return x + self.down(jax.nn.gelu(self.up(self.second(x))))


class Transformer(tt.Module):
    def __init__(self, layers: int = LAYERS, *, rngs: tt.Rngs, remat: bool = False):
        self.embed = tt.Embed(VOCABULARY, WIDTH, rngs=rngs)
        made = [Block(rngs=rngs) for _ in range(layers)]
        self.blocks = jax.tree.map(lambda *x: jnp.stack(x), *made)
        self.remat = remat

    def __call__(self, tokens: Any) -> Any:
        call = lambda x, block: (block(x), None)
        if self.remat:
            call = jax.checkpoint(call)
        x, _ = jax.lax.scan(call, self.embed(tokens), self.blocks)
        return self.embed.attend(x)


def loss(model: Any, tokens: Any) -> Any:
    logits = jax.nn.log_softmax(model(tokens[:, :-1]))
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))


def forward(model: Any, tokens: Any) -> Any:
    return model(tokens[:, :-1])


def batch() -> Any:
    return jax.random.randint(jax.random.key(0), (BATCH, LENGTH + 1), 0, VOCABULARY)


def memory(compiled: Any) -> tuple[int, int]:
    """All that the program has at its peak, and what of it is not its arguments."""
    used = compiled.memory_analysis()
    made = used.temp_size_in_bytes + used.output_size_in_bytes
    return used.argument_size_in_bytes + made, made


def check(statistics: Any, full: Any) -> None:
    """The same numbers as of all the values."""
    for site in full:
        moments = statistics[site.text].stats["moments"]
        values = np.asarray(site.value, np.float64).reshape(len(moments.mean), -1)
        np.testing.assert_allclose(moments.mean, values.mean(1), rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(moments.variance, values.var(1), rtol=1e-3)


def measure(name: str, fn: Any, model: Any, **options: Any) -> list[dict[str, Any]]:
    tokens = batch()
    block, inner = "Block:__call__", "Block/**"  # blocks' results, those of all layers
    contenders = {
        "unobserved": fn,
        "statistics of blocks": tt.observe(fn, block, reduce=REDUCERS, **options),
        "statistics of all layers": tt.observe(fn, inner, reduce=REDUCERS, **options),
        "all values": tt.observe(fn, inner, **options),
    }
    programs = {
        key: jax.jit(one).lower(model, tokens).compile()
        for key, one in contenders.items()
    }
    results = {key: program(model, tokens) for key, program in programs.items()}
    check(results["statistics of all layers"][1], results["all values"][1])
    calls = {key: lambda p=p: p(model, tokens) for key, p in programs.items()}
    times = {row.name: row for row in timing.compare(name, calls, rounds=7)}
    floor = memory(programs["unobserved"])
    return [
        {
            "program": name,
            "contender": key,
            "bytes": memory(program)[0],
            "memory": memory(program)[0] / floor[0],
            "made": memory(program)[1] / floor[1],
            "time": times[key].ratio,
        }
        for key, program in programs.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    rows = measure("forward", forward, Transformer(rngs=tt.Rngs(0)))
    grad = jax.value_and_grad(loss)
    for name, remat in (("gradient", False), ("gradient, remat", True)):
        model = Transformer(rngs=tt.Rngs(0), remat=remat)
        rows += measure(name, grad, model, grads=True)
    head = ["program", "contender", "MiB", "peak memory", "without arguments", "time"]
    print(f"| {' | '.join(head)} |\n|---|---|---:|---:|---:|---:|")
    for row in rows:
        print(
            f"| {row['program']} | {row['contender']} | {row['bytes'] / 2**20:.1f} "
            f"| {row['memory']:.2f}x | {row['made']:.2f}x | {row['time']:.2f}x |"
        )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
