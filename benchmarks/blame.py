# SPDX-License-Identifier: Apache-2.0
"""Planted NaNs: what `blame`, `jax.debug_nans` and checkify say; and what they cost.

The cost is that of a gradient step of a small transformer whose blocks are one scan,
compiled, relative to the same step without a check.
"""

import argparse
import json
import os
import pathlib
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import streaming
import timing
from jax.experimental import checkify
from jax.sharding import AxisType

import treetap as tt

ONES = jnp.ones(3)


def softmax(x: Any) -> Any:
    powers = jnp.exp(x)
    return powers / powers.sum()


def entropy(p: Any) -> Any:
    return -(p * jnp.log(p)).sum()


def unit(x: Any) -> Any:
    return (x / jnp.maximum(jnp.sqrt((x * x).sum()), 1e-6)).sum()


def deep(x: Any, weights: Any) -> Any:
    def layer(x: Any, weight: Any) -> Any:
        large = weight * 1e38
        return x + (large - large), None

    return jax.lax.scan(layer, x, weights)[0]


def growing(x: Any) -> Any:
    def body(held: Any) -> Any:
        return held[0] + 1, held[1] * 100 - held[1] * 99

    more = lambda held: held[0] < 50
    grown = jax.lax.while_loop(more, lambda held: (held[0] + 1, held[1] * 100), (0, x))[
        1
    ]
    return jax.lax.while_loop(more, body, (0, grown))[1]


def on_shards(x: Any) -> Any:
    mesh = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))
    local = lambda x: jnp.log(x) * 2
    specs = {"in_specs": jax.P("i"), "out_specs": jax.P("i")}
    return jax.shard_map(local, mesh=mesh, **specs)(x)


def rooted(x: Any) -> Any:
    return jnp.sqrt(x).sum()


PLANTED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "overflow in a softmax": (softmax, (jnp.array([1.0, 200.0]),)),
    "log of zero": (entropy, (jnp.array([1.0, 0.0]),)),
    "backward pass of a norm": (jax.value_and_grad(unit), (jnp.zeros(3),)),
    "inf - inf in layer 37 of 48": (deep, (ONES, jnp.ones(48).at[37].set(1e3))),
    "one shard of eight": (on_shards, (jnp.ones(16).at[11].set(-1.0),)),
    "a while loop": (growing, (ONES,)),
    "only backward: sqrt at 0": (jax.value_and_grad(rooted), (jnp.array([0.0, 1.0]),)),
}


def first_line(error: Any) -> str:
    return str(error).strip().split("\n", maxsplit=1)[0][:110]


def debug_nans(fn: Any, args: Any) -> str:
    with jax.debug_nans(True):
        try:
            jax.block_until_ready(jax.jit(fn)(*args))
        except Exception as error:
            return first_line(error)
    return "(nothing)"


def checked(fn: Any, args: Any) -> str:
    errors = checkify.float_checks
    try:
        found, _ = jax.jit(checkify.checkify(fn, errors=errors))(*args)
    except Exception as error:
        return f"fails: {first_line(error)}"
    return first_line(found.get() or "(nothing)")


def verdicts() -> list[dict[str, str]]:
    return [
        {
            "planted": name,
            "blame": str(tt.blame(jax.jit(fn))(*args)).replace(
                str(pathlib.Path(__file__).parent) + "/", ""
            ),
            "jax.debug_nans": debug_nans(fn, args),
            "checkify": checked(fn, args),
        }
        for name, (fn, args) in PLANTED.items()
    ]


def costs() -> list[timing.Row]:
    model = streaming.Transformer(12, rngs=tt.Rngs(0))
    tokens = streaming.batch()
    step = jax.value_and_grad(streaming.loss)
    plain = jax.jit(step)
    guarded = jax.jit(tt.guard(step, "Block:__call__"))
    full, every = tt.blame(step), tt.blame(step, everywhere=True)
    by_checkify = jax.jit(checkify.checkify(step, errors=checkify.float_checks))
    contenders = {
        "step": lambda: plain(model, tokens),
        "guard, blocks": lambda: guarded(model, tokens)[1],
        "blame": lambda: full(model, tokens),
        "blame everywhere": lambda: every(model, tokens),
        "checkify": lambda: by_checkify(model, tokens)[1],
    }
    targets = {"guard, blocks": 1.03, "blame": 1.3}
    return timing.compare("gradient step", contenders, targets, rounds=15)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    found = verdicts()
    for row in found:
        print("\n".join(f"{key}: {value}" for key, value in row.items()), "\n")
    rows = costs()
    print(timing.table(rows))
    if given.json:
        held = {"verdicts": found, "costs": [row._asdict() for row in rows]}
        given.json.write_text(json.dumps(held, indent=1) + "\n")


if __name__ == "__main__":
    main()
