# SPDX-License-Identifier: Apache-2.0
"""Modules: the classes that people derive their models from, and random streams.

- `module` is the base class: a Pytree whose modes can be set for all that is inside it,
  and which records values for a capture (`sow`, `perturb`).
- `methods` runs each public method under the name by which its parent holds the Module.
  This is where paths in profiles and in captures come from.
- `containers` are Modules that hold others: `List`, `Dict`, `Sequential`.
- `views` are copies around the same Variables, with other modes.
- `random_streams` gives keys by name and counts them; `random_rules` splits, forks and
  reseeds the streams that are inside other objects.

It imports `_core`, and of `_capture` what tells whether somebody listens. Everything
from `_transforms` on may import it.
"""


def __getattr__(name: str) -> object:
    """`Module`, which pickles of earlier versions look for here."""
    if name != "Module":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from treetap._modules.module import Module

    return Module
