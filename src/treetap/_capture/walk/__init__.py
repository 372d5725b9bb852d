# SPDX-License-Identifier: Apache-2.0
"""The walk: programs that JAX has traced, run again with more inputs and outputs.

JAX hands a loop, a branch or a jitted function to a trace as one operation that holds a
*jaxpr*. A tap inside is out of reach; but the operation can be made anew so that it has
one more result. So: find the taps in the jaxpr and in those inside it (`survey`),
decide what is to be done at each (`plans`), and run the jaxpr by that plan (`run`),
where each operation that holds jaxprs is made anew in its own way (`operations`).

The files, in the order in which they stand on each other:

- `jax_compat`: jaxprs and their parameters, whatever the version of JAX.
- `jaxpr_cache`: what was made of a jaxpr, kept while that lives.
- `spots`: a tap, as seen from some jaxpr: what it is, its axes, the way of its ticket.
- `plans`: what is to be done at each spot, and what is fed there.
- `steps`, `custom_rules`: an operation to be run by a plan; those with rules of their
  own for derivatives.
- `operations`: the table of primitives that hold jaxprs. Whoever looks into programs
  asks it; one that JAX adds is one entry.
- `survey`: the spots of a jaxpr.
- `run`: a jaxpr run by a plan.
- `witness`: values told in a second way, for who compares.
- `hoisting`: taps that are the same in all iterations stay in their loop.
- `batched_branches`: what JAX is asked to do differently with programs that have marks.
- `self_check`: what all this relies on, tried on a JAX that is newer than those tested.
"""
