# SPDX-License-Identifier: Apache-2.0
"""Parameters as pure dicts: written to a file, read into a fresh model."""

import pathlib
import tempfile

import fingerprints
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx, traverse_util


class Tower(nnx.Module):
    """Layers in a list and a dict, with statistics."""

    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(3)])
        self.heads = nnx.Dict(
            {"a": nnx.Linear(4, 1, rngs=rngs), "b": nnx.Linear(4, 2, rngs=rngs)}
        )
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = nnx.relu(block(x))
        x = self.drop(self.norm(x))
        return self.heads.a(x), self.heads["b"](x)


def outputs(model):
    return [float(y.sum()) for y in model(jnp.ones((2, 4)))]


with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    model = Tower(nnx.Rngs(3))
    model(jax.random.normal(jax.random.key(0), (8, 4)))
    model.eval()
    print("init", fingerprints.of(model))
    print("outputs", *outputs(model))
    _, params, rest = nnx.split(model, nnx.Any(nnx.Param, nnx.BatchStat), ...)

    pure = nnx.to_pure_dict(params)
    flat = {
        "/".join(map(str, path)): value
        for path, value in nnx.traversals.flatten_mapping(pure).items()
    }
    print("names", *sorted(flat))
    np.savez(folder / "weights.npz", **flat)

    fresh = nnx.eval_shape(lambda: Tower(nnx.Rngs(0)))
    graphdef, abstract, others = nnx.split(
        fresh, nnx.Any(nnx.Param, nnx.BatchStat), ...
    )
    with np.load(folder / "weights.npz") as held:
        nested = traverse_util.unflatten_dict(dict(held), sep="/")
    nested = nnx.restore_int_paths(nested)
    nnx.replace_by_pure_dict(abstract, nested)
    _, _, streams = nnx.split(
        Tower(nnx.Rngs(9)), nnx.Any(nnx.Param, nnx.BatchStat), ...
    )
    restored = nnx.merge(graphdef, abstract, streams)
    restored.eval()
    print("restored", *outputs(restored))

    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(folder / "state", pure)
    checkpointer.wait_until_finished()
    read = checkpointer.restore(folder / "state")
    other = Tower(nnx.Rngs(4))
    state = nnx.state(other, nnx.Param, nnx.BatchStat)
    whole = nnx.merge_state(*state)
    nnx.replace_by_pure_dict(whole, nnx.restore_int_paths(read))
    nnx.update(other, whole)
    other.eval()
    print("orbax", *outputs(other))

    state = nnx.state(model, nnx.Param)
    checkpointer.save(folder / "params", state)
    checkpointer.wait_until_finished()
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.state(other, nnx.Param))
    back = checkpointer.restore(folder / "params", target)
    nnx.update(other, back)
    print("state", type(back).__name__, *outputs(other))
