# SPDX-License-Identifier: Apache-2.0
"""Time and memory of making a model: with `build`, and line by line.

Run it alone: `python benchmarks/building.py`. Each figure is of a fresh process: the
first model, with everything that is compiled for it, a second one, and by how much the
process grew at its largest. `--shards 8` makes the same on a mesh of CPU devices.
"""

import argparse
import hashlib
import json
import os
import pathlib
import resource
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import treetap as tt

Report = dict[str, Any]


class Block(tt.Module):
    def __init__(self, width: int, **options: Any):
        rngs = options["rngs"]
        wide = {"kernel_metadata": {"out_sharding": (None, "model")}}
        self.norms = tt.List([tt.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.attention = tt.MultiHeadAttention(8, width, **options)
        self.up = tt.Linear(width, 4 * width, rngs=rngs, **wide)
        self.down = tt.Linear(4 * width, width, rngs=rngs, **wide)


class Model(tt.Module):
    """The parts of a GPT, the tables of words and places included."""

    def __init__(self, depth: int, width: int, *, rngs: tt.Rngs):
        split = {"embedding_metadata": {"out_sharding": ("model", None)}}
        heads = {"kernel_metadata": {"out_sharding": (None, "model", None)}}
        out = {"out_kernel_metadata": {"out_sharding": ("model", None, None)}}
        self.words = tt.Embed(32768, width, rngs=rngs, **split)
        self.places = tt.Embed(1024, width, rngs=rngs, **split)
        self.blocks = tt.List(
            [Block(width, rngs=rngs, **heads, **out) for _ in range(depth)]
        )
        self.norm = tt.LayerNorm(width, rngs=rngs)


def digest(model: Any) -> str:
    """A number for all bits of a model."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(model):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        found.update(np.asarray(jax.random.key_data(leaf) if is_key else leaf).data)
    return found.hexdigest()


def peak() -> float:
    """The largest size of this process so far, in MB."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e6


def seconds(depth: int, width: int, is_built: bool) -> tuple[float, Any]:
    """The time to make a model, and the model."""
    start = time.perf_counter()
    rngs = tt.Rngs(0)
    if is_built:
        model = tt.build(Model, depth, width, rngs=rngs)
    else:
        model = Model(depth, width, rngs=rngs)
    jax.block_until_ready(jax.tree.leaves(model))
    return time.perf_counter() - start, model


def one(depth: int, width: int, is_built: bool) -> Report:
    """What it takes to make one model, and another."""
    jax.block_until_ready(jax.random.normal(jax.random.key(0), (3,)))
    before = peak()
    first, model = seconds(depth, width, is_built)
    grown = peak() - before
    size = sum(x.nbytes for x in jax.tree.leaves(tt.state(model, tt.Param))) / 1e6
    bits = digest(model)
    del model
    second, _ = seconds(depth, width, is_built)
    return {
        "first": first,
        "second": second,
        "grown": grown,
        "size": size,
        "bits": bits,
    }


def measured(options: argparse.Namespace, depth: int, is_built: bool) -> Report:
    """`one` in a fresh process."""
    flags = os.environ.get("XLA_FLAGS", "")
    if options.shards > 1:
        flags += f" --xla_force_host_platform_device_count={options.shards}"
    command = [sys.executable, __file__, "--width", str(options.width)]
    command += ["--shards", str(options.shards), "--one", str(depth), str(is_built)]
    done = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "XLA_FLAGS": flags},
    )
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depths", type=int, nargs="+", default=[6, 24])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--one", nargs=2)
    options = parser.parse_args()
    if options.one:
        depth, is_built = options.one
        kinds = (AxisType.Auto,)
        mesh = jax.make_mesh((options.shards,), ("model",), axis_types=kinds)
        with jax.set_mesh(mesh) if options.shards > 1 else tt.use_eager_sharding(False):
            print(json.dumps(one(int(depth), options.width, is_built == "True")))
        return
    rows: list[Report] = []
    print("| blocks | MB | how | first, s | second, s | growth, MB | same bits |")
    print("|---:|---:|---|---:|---:|---:|:-:|")
    for depth in options.depths:
        found = {how: measured(options, depth, how == "build") for how in HOW}
        for how, row in found.items():
            same = "yes" if row["bits"] == found["line by line"]["bits"] else "NO"
            print(
                f"| {depth} | {row['size']:.0f} | {how} | {row['first']:.2f} "
                f"| {row['second']:.2f} | {row['grown']:.0f} | {same} |",
                flush=True,
            )
            rows.append({"blocks": depth, "how": how, **row})
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        report = {"jax": jax.__version__, "rows": rows}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


HOW = ("line by line", "build")

if __name__ == "__main__":
    main()
