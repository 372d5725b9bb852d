# SPDX-License-Identifier: Apache-2.0
"""Transforms: what JAX does with a function, done with functions of models.

Each file here is one transform, or a few that are alike: a function of JAX's and a
statement of where the Variables' changes sit in its result. What they have in common
they have from `lift`, which is the place to begin reading. No transform imports
another.

- `lift` takes Variables out of the arguments, and writes back what changed.
- `jit` compiles; `jit_partial` does so with the first arguments fixed once, and has
  `cached_partial`.
- `grad` has `grad`, `value_and_grad`, `vjp`, `jvp` and `remat`; `custom_vjp` is for
  functions with a reverse rule of their own.
- `vmap` maps over axes, and over devices with `pmap` and `shard_map`.
- `scan` and `loops` (`while_loop`, `fori_loop`) repeat a function; `cond` chooses one
  (`cond`, `switch`), or lets one fail (`checkify`).
- `inspect` only looks at a function: `eval_shape`, `make_jaxpr`.
- `build_model` makes a model from its plan: `treetap.build`.
- `sharding` reads the shardings of a whole model off its annotations.

It imports `_core`, nothing of `_modules`, and of `_capture` what tells whether somebody
listens and how jaxprs are read. Everything from `_observe` on may import it.
"""
