# SPDX-License-Identifier: Apache-2.0
"""Observing: what people do with the values on the way through a model.

Every public function here wraps a function and gives one like it. When that is called,
a handler says what is to be heard (`handlers`), a session hears it (see `_capture`),
and what came out is put in the form that was asked for.

The road, in the order of the files:

- `handlers`: the one way to run a function with ears open, and to trace it instead.
- `closures`: what functions read beside their arguments, taken out of them.
- `kept_programs`: what was compiled for a call, kept for the next one like it.
- `around_compiled`: `observe` around a compiled function, compiled as a whole.
- `capture`: values as States, one for each kind of Variable; NNX's form.
- `loggers`: figures by tag, on their way to TensorBoard and other loggers.
- `records`: `Site` and `Record`, values and gradients in order of execution.
- `treetap.edits` (public): what can be put in the place of a value.
- `verify`: the same run in a slow way of its own, to compare a Record with.
- `observe`: a run with its Record; `sites` lists it without running.
- `blame`: which operation made the first number that is not finite, and `guard`.
- `edit`: a run with other values on the way, or up to a site only.
- `sweep`: a program run with many patches, computing once what they share.
- `patch`: the effects of many patches, and their estimate by a gradient.
- `scope_exits`, `tap_scopes`: models of other libraries, by their named scopes.
- `watch`: a training step that is observed now and then.

Layers, reports, comparisons and the command line import from here; nothing here knows
of them.
"""
