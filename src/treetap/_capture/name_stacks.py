# SPDX-License-Identifier: Apache-2.0
"""Name stacks: what an operation's own name stack says of where it was traced.

JAX gives every operation of a jaxpr the stack of names it was traced in, outermost
first. Its parts are of two sorts, told apart by their class:

- *scopes*, from `jax.named_scope`. Those that Modules open have a `ModuleScope` for a
  name, which says where the Module is (see `module_paths`); all others are of the user,
  or of another library;
- *transforms*: `vmap`, `jvp`, `transpose`, left by the transforms that the operation
  went through. A mapping is an axis in front of the operation's values. What was
  `transpose`d, or is computed again for that (the scope `rematted_computation`), is on
  the way back of a differentiation.

A stack begins anew in every function that JAX traces on its own. So the whole story of
an operation is that of the operations around it, followed by its own.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from treetap._core.paths import Path

AGAIN = "rematted_computation"


class Scope(NamedTuple):
    """What the scope of a Module says; see `module_paths`.

    Attributes:
        places: For each capture, a base and the keys from there.
        kind: The class of the Module, with `!` if no Module of that class is inside it;
            empty for a scope that no Module opened.
    """

    places: tuple[tuple[int | str | None, Path], ...]
    kind: str

    def place_in(self, number: int) -> tuple[int | str | None, Path]:
        """A base and keys for a capture; one that opened later knows the last's."""
        return self.places[min(number, len(self.places) - 1)]


class ModuleScope(str):
    """The name of a scope that a Module opened: what to show, and where it is.

    Attributes:
        where: What it says, a `Scope`.
    """

    where: Any

    def __new__(cls, shown: str, where: Any) -> "ModuleScope":
        """Makes a name."""
        self = str.__new__(cls, shown)
        self.where = where
        return self


def is_transform(part: Any) -> bool:
    """Whether a part of a name stack is the mark of a transform, and no scope."""
    return type(part).__name__ == "Transform"


def is_of_module(part: Any) -> bool:
    """Whether a part of a name stack is a scope that a Module opened."""
    return isinstance(part.name, ModuleScope)


def scopes_in(name_stack: Any) -> tuple[Any, ...]:
    """What the scopes in a name stack say that Modules opened."""
    return tuple(part.name.where for part in name_stack.stack if is_of_module(part))


def mappings_in(name_stack: Any) -> int:
    """How many mappings (`vmap`) a name stack speaks of."""
    return _transforms_in(name_stack).count("vmap")


def _transforms_in(name_stack: Any) -> list[str]:
    return [part.name for part in name_stack.stack if is_transform(part)]


def is_transposed(eqn: Any) -> bool:
    """Whether an operation was made by transposing another."""
    return "transpose" in _transforms_in(eqn.source_info.name_stack)


def is_differentiated(eqn: Any) -> bool:
    """Whether an operation went through a forward differentiation."""
    return "jvp" in _transforms_in(eqn.source_info.name_stack)


def is_backward(eqn: Any) -> bool:
    """Whether an operation is on the way back of a differentiation."""
    return any(map(_is_back, eqn.source_info.name_stack.stack))


def is_computed_again(name_stack: Any) -> bool:
    """Whether a name stack is that of what a backward pass computes again."""
    parts = name_stack.stack
    return any(part.name == AGAIN and not is_transform(part) for part in parts)


def _is_back(part: Any) -> bool:
    return part.name == ("transpose" if is_transform(part) else AGAIN)


def scopes_forward(eqn: Any) -> Iterator[tuple[int, Any]]:
    """The scopes around an operation, with how much of its name stack they close.

    They end where the way back begins.
    """
    for depth, part in enumerate(eqn.source_info.name_stack.stack, 1):
        if _is_back(part):
            return
        if not is_transform(part):
            yield depth, part


def path_in(stack: Sequence[Any]) -> Path:
    """The scopes of other libraries in a name stack, below the innermost Module.

    `vmap` stays in the path as JAX writes it, because such a value has one more axis;
    `jvp` is left out.
    """
    path: list[str] = []
    transforms: list[str] = []
    for part in stack:
        if is_transform(part):
            transforms += [part.name] if part.name != "jvp" else []
        elif is_of_module(part):
            path, transforms = [], []
        else:
            first, *rest = [text for text in part.name.split("/") if text] or [""]
            path += [_within(transforms, first), *rest]
            transforms = []
    return (*path, *([_within(transforms, "")] if transforms else []))


def _within(transforms: Sequence[str], text: str) -> str:
    """A scope as JAX writes it after transforms, the outermost first."""
    return "".join(f"{name}(" for name in transforms) + text + ")" * len(transforms)
