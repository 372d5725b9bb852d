# SPDX-License-Identifier: Apache-2.0
"""Many calls, with models made and dropped all the while: memory and traces stay flat.

python benchmarks/soak.py --calls 100000
"""

import argparse
import gc
import resource
import weakref

import jax.numpy as jnp
import optax

import treetap as tt

traces = 0


def loss(model: tt.Linear, x: object) -> object:
    return (model(x) ** 2).mean()


@tt.jit
def step(model: tt.Linear, optimizer: tt.Optimizer, x: object) -> None:
    global traces  # noqa: PLW0603 - counts what is traced
    traces += 1
    optimizer.update(model, tt.grad(loss)(model, x))


def memory() -> float:
    """Megabytes in use now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100_000)
    calls = parser.parse_args().calls
    x = jnp.ones((2, 8))
    alive: set[weakref.ref] = set()  # of dead models it keeps nothing
    made = 0
    model = optimizer = None
    for number in range(calls):
        if number % 10 == 0:
            model = tt.Linear(8, 8, rngs=tt.Rngs(number))
            optimizer = tt.Optimizer(model, optax.sgd(0.1), wrt=tt.Param)
            alive.add(weakref.ref(model, alive.discard))
            made += 1
        step(model, optimizer, x)
        if number % (calls // 10) == calls // 10 - 1:
            gc.collect()
            print(
                f"{number + 1:8d} calls  {memory():8.1f} MB  traces {traces}  "
                f"models made {made}, alive {len(alive)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
