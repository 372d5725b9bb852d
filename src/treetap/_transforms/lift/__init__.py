# SPDX-License-Identifier: Apache-2.0
"""The lift: how every transform handles Variables, in one place.

A call goes this way, file by file:

- `arguments`: static arguments are taken out, by number or by name.
- `lift`: `Inputs` takes the rest apart into values; `Lift.run` builds the arguments
  anew inside the function that JAX traces, calls the user's function, and collects what
  changed; `Inputs.finish` writes that into the caller's Variables.
- `prefixes`: an axis or a sharding for a whole argument becomes one for each leaf, and
  leaves with the same one form a group.
- `structure_watch` refuses changes of structure that would be lost;
  `structure_updates` carries them out to the caller, with graph updates.
- `results`: what the function returns, on its way through JAX.

What several transforms need stands beside it: `axis_names` (names of axes that follow a
mapped axis), `carry` (what a loop hands on), `differentiation` (what is
differentiated).

Compiled functions have a way of their own, for they are called most:

- `compiled` is what `jit` makes, and its stages.
- `program` is a `jax.jit` for arguments of one structure.
- `call_cache` makes the calls after the first one cheap.
- `packed_calls` lets small Variables travel in one buffer.

And `kept_traces` keeps what `cond`, `scan`, the other loops and `remat` give to JAX, so
that it traces a function once.

It imports `_core`, and of `_capture` what tells whether somebody listens. The
transforms import it; so do the parts of `_observe`, `_report` and `nnx` that take
arguments apart as a transform does.
"""
