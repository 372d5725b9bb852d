# SPDX-License-Identifier: Apache-2.0
"""Capture: how a value comes out of a running program, or goes into it.

A model marks values while it runs; a mark is an operation of the program, so it goes
through every transform of JAX with the value it marks. Whoever wants values runs the
model under a trace that stops at marks. Where JAX has already made a program of a part
of the model, that program is run again with more results, or more inputs. Nothing is
ever written on a Module or a class, and while nobody listens there are no marks.

The road of a value, file by file; a program that is not observed loads only the first,
`name_stacks` and `module_paths`:

- `listening`: whether somebody listens, and to what; part of the key of JAX's caches.
- `sown_so_far`: what Modules have sown until now, for `module.__captures__`.
- `marks`: the primitives that mark a value, and the *ticket* that joins a value with
  its gradients.
- `edit_points`: the primitive in whose place an edit can be put, and the *recipe* that
  makes derivatives follow it.
- `name_stacks`: what an operation's name stack says of where it was traced.
- `statistics`: what is measured of a value instead of taking it out whole.
- `walk`: a traced program, run again so that marked values come out, or go in.
- `module_paths`: scopes, and which Module of the model each leads to.
- `callee`: what is being captured: the Module that is called, those it is given.
- `calls`: `Call`, a value that was heard, with its gradients.
- `selectors`: which sites are meant by a glob, a class or a function.
- `session`: what one capture asks for and has heard; follows tickets.
- `listener`: the trace that a function is run under, and `listen`, which runs it.
- `emit`: `tap`, and what `sow`, `perturb` and the outputs of methods do.

The core is below. Modules emit marks from here, the transforms carry scopes along, and
everything that looks into models (`_observe`, `_io`, `_report`, `_compare`) stands on
`session` and on the table in `walk.operations`.
"""
