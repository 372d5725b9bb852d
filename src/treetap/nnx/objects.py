# SPDX-License-Identifier: Apache-2.0
"""Object and display: two names of NNX's that treetap itself does without.

An `Object` is a Pytree that JAX does not know; `display` shows values in a notebook or
a terminal. `treetap.nnx` exports both, and nothing else uses them.
"""

import contextlib
from typing import Any

from treetap._core.errors import AttributeStatusError
from treetap._core.trees.pytree import Pytree


class Object(Pytree, pytree=False):
    """A Pytree that stays out of JAX's registry."""

    def __init_subclass__(cls, *, pytree: bool = False, **kwargs: Any):
        if pytree:
            raise AttributeStatusError(
                f"{cls.__name__}: an Object is not a pytree. Derive from "
                "Pytree instead."
            )
        super().__init_subclass__(pytree=False, **kwargs)


def display(*objects: Any) -> None:
    """Shows objects: through treescope in a notebook, as text elsewhere."""
    in_notebook = False
    with contextlib.suppress(ImportError):
        from IPython.core.getipython import get_ipython  # pyright: ignore[reportMissingImports] - only in notebooks

        in_notebook = get_ipython() is not None
    show = print
    if in_notebook:
        from treescope import display as show
    for item in objects:
        show(item)
