# SPDX-License-Identifier: Apache-2.0
"""The parts of flax around nnx: dataclasses, frozen dicts, paths and a TrainState."""

from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct, traverse_util
from flax.core import FrozenDict, freeze, unfreeze
from flax.nnx.nn.linear import Linear
from flax.training import train_state
from flax.typing import Dtype


@struct.dataclass
class Batch:
    """A batch, with its name."""

    x: jax.Array
    y: jax.Array
    name: str = struct.field(pytree_node=False, default="plain")


class Options(struct.PyTreeNode):
    """Numbers of the training."""

    rate: float = 0.1
    steps: int = struct.field(pytree_node=False, default=4)


class TrainState(train_state.TrainState):
    """The state of NNX's parts."""

    rest: Any = None
    graphdef: Any = struct.field(pytree_node=False, default=None)


class Net(nnx.Module):
    """Two layers."""

    def __init__(self, dtype: Dtype, *, rngs: flax.nnx.Rngs):
        self.first = Linear(2, 8, param_dtype=dtype, rngs=rngs)
        self.second = Linear(8, 1, param_dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.swish(self.first(x)))


options = Options().replace(rate=0.05)
graphdef, params, rest = nnx.split(Net(jnp.float32, rngs=nnx.Rngs(0)), nnx.Param, ...)
pure = nnx.to_pure_dict(params)
mask = traverse_util.path_aware_map(lambda path, _: path[-1] == "kernel", pure)
tx = optax.chain(optax.add_decayed_weights(0.01, mask=mask), optax.sgd(options.rate))


def apply(pure, x):
    state = nnx.clone(params)
    nnx.replace_by_pure_dict(state, pure)
    return nnx.merge(graphdef, state, rest)(x)


state = TrainState.create(
    apply_fn=apply, params=pure, tx=tx, rest=rest, graphdef=graphdef
)


@jax.jit
def step(state, batch):
    def loss_fn(params):
        return jnp.mean((state.apply_fn(params, batch.x) - batch.y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


x = jax.random.normal(jax.random.key(1), (16, 2))
batch = Batch(x, x.sum(axis=-1, keepdims=True))
for number in range(options.steps):
    state, loss = step(state, batch)
    print("loss", number, float(loss), int(state.step))
print("batch", batch.name, len(jax.tree.leaves(batch)), len(jax.tree.leaves(options)))
flat = traverse_util.flatten_dict(state.params, sep=".")
print("flat", *flat, float(flat["second.kernel"].sum()))
frozen = freeze(state.params)
print(
    "frozen",
    isinstance(frozen, FrozenDict),
    sorted(frozen),
    type(frozen["first"]).__name__,
)
print("copied", sorted(frozen.copy({"extra": 1})), sorted(frozen.pop("first")[0]))
print(
    "unfrozen", type(unfreeze(frozen)["first"]).__name__, len(jax.tree.leaves(frozen))
)
try:
    frozen["first"] = 1
except ValueError:
    print("cannot be set")
nested = traverse_util.unflatten_dict(flat, sep=".")
print(
    "nested",
    sorted(nested),
    jax.tree.structure(nested) == jax.tree.structure(unfreeze(frozen)),
)
