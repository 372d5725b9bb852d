# SPDX-License-Identifier: Apache-2.0
"""`tap` inside models of other libraries: Equinox and Linen, captured as they are."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp

import treetap as tt


class EquinoxNet(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.first = eqx.nn.Linear(3, 4, key=keys[0])
        self.second = eqx.nn.Linear(4, 1, key=keys[1])

    def __call__(self, x):
        return self.second(tt.tap(jax.nn.relu(self.first(x)), "hidden"))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(tt.tap(nn.relu(nn.Dense(4)(x)), "hidden"))


def check(name, loss, params, hidden):
    step = jax.jit(jax.value_and_grad(loss))
    plain = step(params)
    seen, record = tt.observe(step, grads=True)(params)
    site = record["hidden"]
    assert jax.tree.all(jax.tree.map(jnp.array_equal, plain, seen))
    assert jnp.allclose(site.value, hidden(params))
    assert site.grad.shape == site.value.shape
    assert jnp.any(site.grad != 0)
    print(f"{name}: hidden {site.value.shape}, its gradient too")


def main():
    x = jnp.ones((5, 3))
    model = EquinoxNet(jax.random.key(0))
    check(
        "equinox",
        lambda model: (jax.vmap(model)(x) ** 2).sum(),
        model,
        lambda model: jax.nn.relu(jax.vmap(model.first)(x)),
    )
    net = LinenNet()
    params = net.init(jax.random.key(0), x)
    check(
        "linen",
        lambda params: (net.apply(params, x) ** 2).sum(),
        params,
        lambda params: nn.relu(
            x @ params["params"]["Dense_1"]["kernel"]
            + params["params"]["Dense_1"]["bias"]
        ),
    )


if __name__ == "__main__":
    main()
