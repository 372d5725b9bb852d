# SPDX-License-Identifier: Apache-2.0
"""Experiments on a model of GPT-2's size, beside programs written by hand.

    python benchmarks/experiments.py --json PATH
    python benchmarks/experiments.py --small             a tiny model, for a CPU
    python benchmarks/experiments.py --memory            a sweep larger than the device

The floor of a sweep of patches is JAX by hand: the layers before a patch computed once,
and the scores of the last position alone. Beside it stand the same hand without that,
and PyTorch with hooks, batched, where torch and transformers are installed. The floor
of `attribution` is one `value_and_grad` of the metric; that of `observe` from outside
is `observe` inside of the compiled function.
"""

import argparse
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import timing

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
from gpt2 import GPT2, Config

import treetap as tt

SWEEP = "sweep of patches, warm"
FIRST = "sweep of patches, first call"
CPU_SWEEP = Config(512, 64, 64, 256, 4, 4)
LOWEST, TOLERANCE = 1e-12, 1e-4
Arrays = Any


# The model by hand.


def norm(p: Arrays, x: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    spread = jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
    return (x - mean) * spread * p["scale"] + p["bias"]


def attention(p: Arrays, x: jax.Array) -> jax.Array:
    parts = ("query", "key", "value")
    q, k, v = (
        jnp.einsum("td,dhk->thk", x, p[n]["kernel"]) + p[n]["bias"] for n in parts
    )
    scores = jnp.einsum("qhk,thk->hqt", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -1e30)
    mixed = jnp.einsum("hqt,thk->qhk", jax.nn.softmax(scores), v)
    return jnp.einsum("qhk,hkd->qd", mixed, p["out"]["kernel"]) + p["out"]["bias"]


def block(p: Arrays, x: jax.Array) -> jax.Array:
    x = x + attention(p["attn"], norm(p["norm_1"], x))
    up, down = p["mlp"]["up"], p["mlp"]["down"]
    y = jax.nn.gelu(norm(p["norm_2"], x) @ up["kernel"] + up["bias"], approximate=True)
    return x + y @ down["kernel"] + down["bias"]


def embedded(p: Arrays, ids: jax.Array) -> jax.Array:
    places = p["positions"]["embedding"][: len(ids)]
    return p["tokens"]["embedding"][ids] + places


def difference(p: Arrays, last: jax.Array) -> jax.Array:
    scores = norm(p["norm"], last) @ p["tokens"]["embedding"].T
    return scores[..., 0] - scores[..., 1]


def metric_by_hand(p: Arrays, ids: jax.Array) -> jax.Array:
    x = embedded(p, ids)
    for own in p["blocks"]:
        x = block(own, x)
    return difference(p, x[-1])


@jax.jit
def sweep_by_hand(p: Arrays, ids: jax.Array, clean: list[jax.Array]) -> jax.Array:
    """Effects of all patches: each layer runs the patches before it, all at once."""
    x, rows, count = embedded(p, ids), None, len(ids)
    for own, value in zip(p["blocks"], clean):
        x = block(own, x)
        if rows is not None:
            rows = jax.vmap(block, (None, 0))(own, rows)
        new = jnp.where(jnp.eye(count, dtype=bool)[:, :, None], value, x)
        rows = new if rows is None else jnp.concatenate([rows, new])
    effects = difference(p, rows[:, -1]) - difference(p, x[-1])
    return effects.reshape(len(clean), count)


@jax.jit
def sweep_unshared(p: Arrays, ids: jax.Array, clean: list[jax.Array]) -> jax.Array:
    """The same, every patch through the whole model, layer by layer in a batch."""
    count = len(ids)

    def one(layer: int, place: jax.Array) -> jax.Array:
        x = embedded(p, ids)
        for n, own in enumerate(p["blocks"]):
            x = block(own, x)
            if n == layer:
                at = jnp.arange(count)[:, None] == place
                x = jnp.where(at, clean[layer], x)
        return difference(p, x[-1])

    layers = range(len(clean))
    mapped = [jax.vmap(lambda t, n=n: one(n, t))(jnp.arange(count)) for n in layers]
    return jnp.stack(mapped) - metric_by_hand(p, ids)


def arrays_of(model: GPT2) -> Arrays:
    """The parameters as nested dicts and lists."""
    found = tt.to_pure_dict(tt.state(model))
    found["blocks"] = [found["blocks"][n] for n in sorted(found["blocks"])]
    return found


# The same with hooks of PyTorch, as an expert writes it: a batch for each layer.


def torch_sweep(config: Config, ids: np.ndarray, other: np.ndarray) -> Any:
    """A function that runs the sweep; None where torch is not installed."""
    try:
        import torch
        import transformers
    except ImportError:
        return None
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {
        "vocab_size": config.vocabulary,
        "n_positions": config.positions,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
    }
    made = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    model: Any = made.eval().to(device)
    prompt, worse = (torch.tensor(x, device=device) for x in (ids, other))
    count, rows = len(ids), torch.arange(len(ids), device=device)

    def first(out: Any) -> Any:
        return out[0] if isinstance(out, tuple) else out

    @torch.no_grad()
    def run() -> Any:
        kept: list[Any] = []
        layers = model.transformer.h
        hooks = [
            x.register_forward_hook(lambda *a: kept.append(first(a[2]))) for x in layers
        ]
        model(prompt[None])
        for hook in hooks:
            hook.remove()
        found = []
        for value, layer in zip(kept, layers):

            def put(module: Any, given: Any, out: Any, value: Any = value) -> Any:
                first(out)[rows, rows] = value[0]
                return out

            hook = layer.register_forward_hook(put)
            scores = model(worse[None].expand(count, -1)).logits[:, -1]
            hook.remove()
            found.append(scores[:, 0] - scores[:, 1])
        out = torch.stack(found)
        if device == "cuda":
            torch.cuda.synchronize()
        return out

    return run


def metric(scores: jax.Array) -> jax.Array:
    return scores[0, -1, 0] - scores[0, -1, 1]


def check(found: Any, expected: Any) -> None:
    """Refuses to time what does not agree."""
    scale = np.abs(expected).max() + LOWEST
    apart = np.abs(np.asarray(found) - np.asarray(expected)).max() / scale
    print(f"largest difference, relative to the largest effect: {apart:.1e}")
    if apart > 50 * TOLERANCE:  # two programs in TF32
        sys.exit("experiments: the sweeps do not agree")


def seconds(fn: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(fn())
    return time.perf_counter() - start


def sweeps(config: Config, length: int, rounds: int) -> list[timing.Row]:
    """The sweep of patches, and its estimate by a gradient."""
    model = GPT2(config, rngs=tt.Rngs(0))
    keys = jax.random.split(jax.random.key(1))
    ids, other = (jax.random.randint(k, (length,), 0, config.vocabulary) for k in keys)
    compiled = tt.jit(lambda model, ids: model(ids))
    _, record = tt.observe(compiled, "blocks/*:__call__")(model, ids[None])
    arrays, clean = arrays_of(model), [site.value[0] for site in record]

    def ours() -> Any:
        given = model, record, (other[None],), "**", metric
        return tt.patch_grid(*given, axis=1).effects

    def estimated() -> Any:
        given = model, record, (other[None],), "**", metric
        return tt.attribution(*given, axis=1).effects

    by_hand = lambda: sweep_by_hand(arrays, other, clean)
    firsts = {"by hand": seconds(by_hand), "treetap": seconds(ours)}
    with jax.default_matmul_precision("highest"):
        check(ours(), by_hand())
    first = firsts["treetap"] / firsts["by hand"]
    floor = timing.Row(FIRST, "by hand", firsts["by hand"] * 1e6, 1.0, None)
    rows = [floor, timing.Row(FIRST, "treetap", firsts["treetap"] * 1e6, first, 1.5)]
    contenders: dict[str, Any] = {
        "by hand": by_hand,
        "treetap": ours,
        "by hand, nothing shared": lambda: sweep_unshared(arrays, other, clean),
    }
    if torch_run := torch_sweep(config, np.asarray(ids), np.asarray(other)):
        contenders["PyTorch hooks, batched"] = torch_run
    rows += timing.compare(SWEEP, contenders, {"treetap": 1.2}, rounds)
    pull = jax.jit(jax.value_and_grad(metric_by_hand))
    contenders = {"value_and_grad": lambda: pull(arrays, other), "treetap": estimated}
    rows += timing.compare("attribution, warm", contenders, {"treetap": 1.3}, rounds)
    return rows


def observed(sites: int, rounds: int) -> list[timing.Row]:
    """`observe` around a compiled function and inside of it."""
    x = jnp.ones((8, 8))

    def fn(x: jax.Array) -> jax.Array:
        for n in range(sites):
            x = tt.tap(x @ x * 0.1, f"h{n}")
        return x

    inside, outside = jax.jit(tt.observe(fn)), tt.observe(jax.jit(fn))
    name = f"observe around jit, {sites} sites"
    contenders = {"inside": lambda: inside(x), "treetap": lambda: outside(x)}
    return timing.compare(name, contenders, {"treetap": 1.05}, rounds)


def beyond_memory() -> None:
    """A sweep whose patches at once need more than four times the device's memory."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    config = Config(512, 2048, 512, 2048, 8, 8)
    model, length = GPT2(config, rngs=tt.Rngs(0)), 1024
    ids = jnp.arange(length)[None] % 512
    _, record = tt.observe(model, "blocks/*:__call__")(ids)
    patches, hidden = length * config.layers, length * (config.hidden + config.width)
    print(f"hidden values of {patches} patches: {patches * hidden * 4 / 2**30:.0f} GiB")
    print(f"memory of the device: {(limit or 0) / 2**30:.0f} GiB")
    for _ in range(2):
        spent = seconds(
            lambda: (
                tt.patch_grid(
                    model, record, (ids[:, ::-1],), "**", metric, axis=1
                ).effects
            )
        )
        print(f"{spent:.1f} s")
    print(device.memory_stats())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    if options.memory:
        beyond_memory()
        return
    config, length, rounds = (CPU_SWEEP, 32, 5) if options.small else (Config(), 128, 9)
    rows = sweeps(config, length, rounds)
    print(timing.table(rows), flush=True)
    for sites in (20, 100 if options.small else 500):
        rows += observed(sites, rounds)
    print(timing.table(rows))
    timing.write(options.json, rows)


if __name__ == "__main__":
    main()
