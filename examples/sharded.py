# SPDX-License-Identifier: Apache-2.0
"""Trains a small Llama on many devices: one program, laid out in four ways.

    python examples/sharded.py --way fsdp
    python examples/sharded.py --way both --mesh explicit --folder checkpoints

A way is a shape of the mesh and a spec for each parameter; nothing else differs.
Without accelerators, eight devices are made of the CPU. With `--folder` a checkpoint is
saved every few steps, and the same command goes on from the last one. With `--store`
chosen activations are kept. Several processes are started with one command each:

    python examples/sharded.py --coordinator localhost:1234 --processes 2 --process 0
    python examples/sharded.py --coordinator localhost:1234 --processes 2 --process 1
"""

import argparse
import contextlib
import functools
import os
import pathlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import llama
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treetap as tt

WAYS = ("data", "fsdp", "tensor", "both")
CONFIG = llama.Config(
    vocabulary=64,
    positions=64,
    width=32,
    hidden=64,
    layers=2,
    heads=8,
    kv_heads=8,
    head_size=4,
    split=P("data"),
)
BATCH, LENGTH = 8, 16
SITES = ("**/tokens:__call__", "**/layers:__call__")  # what `--store` keeps


# The layout.


def mesh_for(way: str, kind: AxisType, devices: Sequence[Any]) -> Mesh:
    """All devices: those along `data` share the batch, along `tensor` each matrix."""
    count = len(devices)
    sizes = {"tensor": (1, count), "both": (2, count // 2)}.get(way, (count, 1))
    return jax.make_mesh(sizes, ("data", "tensor"), (kind, kind), devices=devices)


def spec_of(path: tuple[Any, ...], way: str) -> P:
    """How a parameter is split; with plain data parallelism it is everywhere whole."""
    if way == "data":
        return P()
    stacked = (None,) if "layers" in path else ()
    if path[-1] == "scale":
        return P(*stacked, "data")
    if {"out", "down", "tokens"} & set(path):  # these add up what is split
        return P(*stacked, "tensor", "data")
    return P(*stacked, "data", "tensor")


class Run(tt.Module):
    """What is trained, and all that a checkpoint has to hold."""

    def __init__(self, way: str):
        model = llama.Llama(CONFIG, rngs=tt.Rngs(0))
        self.model = tt.map(
            lambda path, x: tt.Param(x[...], out_sharding=spec_of(path, way)), model
        )
        adam = optax.adamw(1e-2, eps=1e-4)  # a smaller one magnifies rounding
        self.optimizer = tt.Optimizer(self.model, adam, wrt=tt.Param)


def batch_of(step: int, mesh: Mesh) -> jax.Array:
    """Rows that count in strides of their own; each process makes the rows it has."""
    random = np.random.default_rng(step)
    start, stride = random.integers(1, 8, (2, max(BATCH, mesh.shape["data"]), 1))
    rows = (start + stride * np.arange(LENGTH + 1)) % CONFIG.vocabulary
    rows = rows.astype(np.int32)
    sharding = NamedSharding(mesh, P("data"))
    return jax.make_array_from_callback(rows.shape, sharding, lambda cut: rows[cut])


# The step.


def loss_fn(model: llama.Llama, rows: jax.Array) -> jax.Array:
    scores = model(rows[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, rows[:, 1:])
    return losses.mean()


@tt.jit
def train_step(run: Run, rows: jax.Array) -> jax.Array:
    # on an explicit mesh too, the compiler finds out how values inside are split
    loss_of = jax.sharding.auto_axes(loss_fn, out_sharding=P())
    loss, grads = tt.value_and_grad(loss_of)(run.model, rows)
    run.optimizer.update(run.model, grads)
    return loss


# The loop.


def last_step(folder: pathlib.Path | None) -> int:
    """The step of the last checkpoint; 0 if there is none."""
    names = [path.name[5:] for path in folder.glob("step_*")] if folder else []
    return max((int(name) for name in names if name.isdigit()), default=0)


def train(options: argparse.Namespace, mesh: Mesh) -> Run:
    """Makes or restores a run, and takes its steps."""
    folder, first = options.folder, last_step(options.folder)
    make = functools.partial(Run, options.way)
    if first:
        run = tt.restore_checkpoint(folder / f"step_{first}", tt.eval_shape(make))
    else:
        run = tt.build(make)  # in its shards from the start
    with contextlib.ExitStack() as stack:
        writer = options.store and stack.enter_context(tt.StoreWriter(options.store))
        observed = tt.observe(train_step, SITES)
        for step in range(first, options.steps):
            rows = batch_of(step, mesh)
            if writer is None:
                loss = train_step(run, rows)
            else:
                loss, record = observed(run, rows)
                if step >= len(writer):  # else it is there since before the restart
                    writer.append(record, {"step": step})
            print(f"step {step + 1}: loss {float(loss):.6f}", flush=True)
            if folder and (step + 1) % options.save_every == 0:
                tt.save_checkpoint(folder / f"step_{step + 1}", run)
    return run


def start(options: argparse.Namespace) -> None:
    """Joins the other processes, and sees to it that there are devices."""
    if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 8 // (options.processes or 1))
    if options.coordinator or options.cluster:
        jax.distributed.initialize(
            options.coordinator,
            options.processes,
            options.process,
            heartbeat_timeout_seconds=options.patience,
        )


@contextlib.contextmanager
def told_at_once(folder: pathlib.Path | None) -> Iterator[None]:
    """Ends a process among several when it fails, without waiting for the others."""
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1:
            raise
        traceback.print_exc()
        what = "failed; its error is above"
        if isinstance(error, jax.errors.JaxRuntimeError):
            what = "failed, most likely because another one died"
        which = f"process {jax.process_index()} of {jax.process_count()}"
        print(f"{which} {what}. {remedy(folder)}", file=sys.stderr, flush=True)
        os._exit(1)  # or JAX waits for all to end, and they for this one


def remedy(folder: pathlib.Path | None) -> str:
    if folder is None:
        return "Nothing was saved: no `--folder` was given."
    return f"Start all again, and they go on after step {last_step(folder)}."


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--way", choices=WAYS, default="fsdp")
    parser.add_argument("--mesh", choices=("auto", "explicit"), default="auto")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--folder", type=pathlib.Path, help="for checkpoints")
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--store", type=pathlib.Path, help="for activations")
    parser.add_argument("--coordinator", help="host:port of process 0")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    parser.add_argument("--cluster", action="store_true", help="SLURM or TPUs tell all")
    parser.add_argument("--patience", type=int, default=20, help="seconds")
    options = parser.parse_args()
    start(options)
    kind = AxisType.Auto if options.mesh == "auto" else AxisType.Explicit
    mesh = mesh_for(options.way, kind, jax.devices())
    with told_at_once(options.folder), jax.set_mesh(mesh):
        train(options, mesh)


if __name__ == "__main__":
    main()
