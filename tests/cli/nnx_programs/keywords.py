# SPDX-License-Identifier: Apache-2.0
"""Arguments by their names, where programs give them so, and captures of methods."""

import fingerprints
import jax
import jax.numpy as jnp
from flax import nnx


class Layer(nnx.Module):
    """Sows, and looks at what it has sown."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(in_features=2, out_features=2, rngs=rngs)

    def __call__(self, x):
        x = self.half(self.linear(x))
        self.sow(nnx.Intermediate, name="x", value=x)
        (held,) = self.__captures__
        print("so far", sorted(held.get_value()), len(held.get_value()["half"]))
        return x

    def half(self, x):
        return x / 2


rngs = nnx.Rngs(0, noise=1)
print(
    "keys",
    rngs.split(k=2).noise.key.shape,
    rngs.broadcast(k={"noise": 3})["noise"].key.shape,
)
stream = rngs["noise"]
print(
    "keys",
    stream.split(k=(2, 2)).key.shape,
    jax.random.key_data(stream.fork().key[...]),
)
model = Layer(rngs=rngs)
print("init", fingerprints.of(model))
average = nnx.EMA(params=model, decay=0.5, only=nnx.Param)
model.linear.kernel[...] += 1
average.update(updates=model)
print("average", average.apply_to(model=model).linear.kernel[...].tolist())
nnx.reseed(model, graph=True, policy="match_shape", dropout=3)
with nnx.split_rngs(rngs, splits=2, only="noise", squeeze=False):
    print("split", rngs["noise"].key.shape)
loss = nnx.metrics.Average(argname="loss")
loss.update(jnp.array([True, False]), loss=jnp.array([3.0, 100.0]))
print("loss", float(loss.compute()))
graphdef, state = nnx.split(model)
print("there", hasattr(model, "__captures__"))
capture = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)
out, found = capture(jnp.ones((1, 2)))
print("found", sorted(found), out.tolist(), found["half"].get_value()[0].tolist())
value = nnx.Param(value=jnp.zeros(2), role="x")
value.update_from_state(variable_state=nnx.Param(jnp.ones(2)))
made = nnx.Param.from_metadata(value=1.0, attributes=nnx.Param(0.0).get_metadata())
print("values", value[...].tolist(), made.get_value())
nnx.check_pytree(pytree=model)
