# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of flax.nnx restored by treetap, and the other way round.

The same model is built with both libraries from the same lines. Each case prints OK, or
FAIL with the paths that differ; the exit status counts the failures.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import treetap as tt


def build(lib, seed):
    class Block(lib.Module):
        def __init__(self, rngs):
            self.norm = lib.LayerNorm(8, rngs=rngs)
            self.mix = lib.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
            self.up = lib.Linear(8, 16, rngs=rngs, param_dtype=jnp.bfloat16)
            self.drop = lib.Dropout(0.5, rngs=rngs)

    class Net(lib.Module):
        def __init__(self, rngs):
            self.embed = lib.Embed(16, 8, rngs=rngs)
            self.blocks = lib.List([Block(rngs) for _ in range(2)])
            self.norm = lib.BatchNorm(8, rngs=rngs)
            self.heads = lib.Dict(left=lib.Linear(8, 8, rngs=rngs))

    return Net(lib.Rngs(seed, dropout=seed + 1))


def numbers(tree):
    """Values by path, without the level of the Variables."""
    found = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        names = [str(getattr(k, "key", getattr(k, "idx", ""))) for k in keys]
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        data = jax.random.key_data(leaf) if is_key else leaf
        found["/".join(name for name in names if name)] = np.asarray(data)
    return found


def check(case, expected, restored):
    first, second = numbers(expected), numbers(restored)
    wrong = sorted(first.keys() ^ second.keys())
    for path in first.keys() & second.keys():
        one, other = first[path], second[path]
        if one.dtype != other.dtype or not np.array_equal(one, other):
            wrong.append(path)
    told = f"FAIL {wrong[:5]}" if wrong else f"OK   {len(first)} arrays"
    print(f"{told:<16} {case}")
    return bool(wrong)


def save(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def restore(path, target):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


def abstract(state):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), state
    )


def optimizer(lib, model):
    made = lib.Optimizer(model, optax.adam(1e-3), wrt=lib.Param)
    gradients = jax.tree.map(jnp.ones_like, lib.state(model, lib.Param))
    made.update(model, gradients)
    return made


def models(folder):
    theirs = build(nnx, 0)
    state = nnx.state(theirs)
    save(folder / "state", state)
    restored = tt.restore_checkpoint(folder / "state", build(tt, 5))
    yield "nnx.state -> treetap", state, tt.state(restored)
    blank = tt.eval_shape(lambda: build(tt, 5))
    restored = tt.restore_checkpoint(folder / "state", blank)
    yield "nnx.state -> treetap, abstract", state, tt.state(restored)
    pure = nnx.to_pure_dict(state)
    save(folder / "pure", pure)
    restored = tt.restore_checkpoint(folder / "pure", build(tt, 5))
    yield "nnx.to_pure_dict -> treetap", state, tt.state(restored)
    with ocp.CheckpointManager(folder / "steps") as manager:
        manager.save(3, args=ocp.args.StandardSave(state))
    restored = tt.restore_checkpoint(folder / "steps" / "3" / "default", build(tt, 5))
    yield "CheckpointManager -> treetap", state, tt.state(restored)

    ours = build(tt, 1)
    tt.save_checkpoint(folder / "ours", ours)
    graphdef, other = nnx.split(build(nnx, 6))
    read = nnx.merge(graphdef, restore(folder / "ours", abstract(other)))
    yield "treetap -> nnx", tt.state(ours), nnx.state(read)


def training(folder):
    theirs = build(nnx, 0)
    both = {"model": nnx.state(theirs), "opt": nnx.state(optimizer(nnx, theirs))}
    save(folder / "training", both)
    ours = build(tt, 7)
    target = {"model": ours, "opt": tt.Optimizer(ours, optax.adam(1e-3), wrt=tt.Param)}
    restored = tt.restore_checkpoint(folder / "training", target)
    yield "nnx model and Optimizer -> treetap", both, tt.state(restored)

    ours = build(tt, 2)
    made = {"opt": optimizer(tt, ours), "model": ours}
    tt.save_checkpoint(folder / "training_ours", made)
    fresh = build(nnx, 8)
    blank = {"model": nnx.state(fresh), "opt": nnx.state(optimizer(nnx, fresh))}
    read = restore(folder / "training_ours", abstract(blank))
    yield "treetap model and Optimizer -> nnx", tt.state(made), read


def sharded(folder):
    saved = jax.make_mesh((4, 2), ("a", "b"))
    other = jax.make_mesh((8,), ("z",))
    values = jnp.arange(128.0).reshape(16, 8)
    kernel = jax.device_put(values, NamedSharding(saved, PartitionSpec("a", "b")))
    placed = NamedSharding(other, PartitionSpec("z"))
    target = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=placed)
    save(folder / "mesh", nnx.State({"kernel": nnx.Param(kernel)}))
    restored = tt.restore_checkpoint(folder / "mesh", {"kernel": tt.Param(target)})
    assert restored["kernel"][...].sharding == placed
    yield "nnx on a mesh -> treetap on another", {"kernel": kernel}, restored

    tt.save_checkpoint(folder / "mesh_ours", {"kernel": tt.Param(kernel)})
    read = restore(folder / "mesh_ours", nnx.State({"kernel": nnx.Param(target)}))
    assert read["kernel"][...].sharding == placed
    yield "treetap on a mesh -> nnx on another", {"kernel": kernel}, read


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        cases = [*models(folder), *training(folder), *sharded(folder)]
        return sum(check(*case) for case in cases)


if __name__ == "__main__":
    sys.exit(main())
