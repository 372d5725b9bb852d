# SPDX-License-Identifier: Apache-2.0
"""What a model says while it runs: `tap`, and what `sow` and `perturb` do.

While nobody listens nothing is emitted: the program is the same as without.
"""

import warnings
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import find_top_trace, set_current_trace

from treetap._capture.edit_points import editable
from treetap._capture.listening import listening
from treetap._capture.marks import Label, bind_tap
from treetap._capture.module_paths import inside_once
from treetap._capture.sown_so_far import note, note_output
from treetap._capture.walk.witness import witnessed
from treetap._core.errors import CaptureError, StructureError
from treetap._core.settings import sow_capture_noop
from treetap._core.trace_level import Through, set_on_purpose
from treetap._core.trees.attributes import is_object
from treetap._core.variables.kinds import kind_of_name
from treetap._core.variables.metadata import MISSING
from treetap._core.variables.variable import Variable

T = TypeVar("T")
LEAF = jax.tree.structure(0)


def check_name(name: Any, what: str) -> None:
    """Refuses a name that is not a string, or could not stand in a path."""
    if not isinstance(name, str) or not name:
        raise CaptureError(
            f"{what}: a name is a string, not {name!r}. Use the string "
            f"{str(name)!r}, for instance."
        )


_CARRIED = jax.Array | np.ndarray | np.generic | bool | int | float | complex


def _is_carried(leaf: Any) -> bool:
    """Whether JAX can carry a value out of a traced function."""
    return isinstance(leaf, _CARRIED)


def _told(label: Label, leaves: list[Any], partly: bool = False) -> list[Any]:
    """Tells every capture of leaves; gives those that flow on.

    A capture that runs at this very level hears leaves of any sort, without a way
    through JAX. Those further out hear what JAX can carry to them.

    Args:
        label: What they are.
        leaves: The leaves; where they flow on, arrays.
        partly: Whether what cannot be carried is left out, instead of refused.
    """
    trace = find_top_trace(None)
    while isinstance(trace, Through):
        leaves = trace.hear(label, leaves)
        if trace.is_outermost:
            return leaves
        trace = trace.parent_trace
    if not all(map(_is_carried, leaves)):
        value = jax.tree.unflatten(label.tree, leaves)
        if not partly:
            raise CaptureError(
                f"{label.how}: the value {label.name!r} is a {type(value).__name__} "
                "that JAX cannot carry out of a traced function. Give arrays."
            )
        kept = jax.tree.map(lambda x: x if _is_carried(x) else None, value)
        leaves, tree = jax.tree.flatten(kept)
        label = label._replace(tree=tree)
    if partly and not leaves:
        return leaves
    arrays, asked = _as_arrays(leaves), listening.value
    with set_current_trace(trace):
        if asked.witness:
            arrays = witnessed(label, arrays, asked.witness > 1)
        return bind_tap(label, arrays) if asked.marks else arrays


def _flowing(
    label: Label, leaves: list[Any], is_edited: bool, is_heard: bool
) -> list[Any]:
    """Marks leaves that flow on, as far as somebody asks; gives those to use."""
    leaves = _as_arrays(leaves)
    if is_edited:
        leaves = editable(label, leaves)
    return _told(label, leaves) if is_heard else leaves


def _as_arrays(leaves: list[Any]) -> list[Any]:
    return [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in leaves]


def _flattened(value: Any) -> tuple[list[Any], Any]:
    return ([value], LEAF) if isinstance(value, jax.Array) else jax.tree.flatten(value)


def tap(value: T, name: str) -> T:
    """Marks a value, anywhere in any function, so that a capture can find it.

    Args:
        value: An array, or any tree of arrays.
        name: What to call it.

    Returns:
        The value; use it, so that gradients and edits reach it.

    Examples:
        >>> import jax, jax.numpy as jnp, treetap as tt
        >>> def f(x):
        ...     return tt.tap(jnp.sin(x), "sine") * 2
        >>> out, record = tt.observe(jax.jit(f))(0.0)
        >>> float(record["sine"].value)
        0.0
    """
    check_name(name, "tap")
    asked = listening.value
    if asked is None or not (asked.taps or asked.edits):
        return value
    if isinstance(value, jax.Array) and not asked.edits:  # the common case, quickly
        return _told(Label(name, None, "tap", LEAF), [value])[0]
    leaves, tree = _flattened(value)
    label = Label(name, None, "tap", tree)
    if leaves and all(map(_is_carried, leaves)):
        out = _flowing(label, leaves, asked.edits > 0, asked.taps)
        pairs = zip(leaves, out)
        kept = [
            x if asked.edits or isinstance(old, jax.Array) else old for old, x in pairs
        ]
        return jax.tree.unflatten(tree, kept)
    if asked.taps:
        _told(label, leaves)
    return value


def output(module: Any, name: str, value: Any) -> Any:
    """Marks the result of a method; what flows on is the marked value.

    A result that is not made of arrays alone flows on as it is.
    """
    asked = listening.value
    leaves, tree = _flattened(value)
    label = Label(name, None, "output", tree)
    flows = tree is LEAF or (
        bool(leaves)
        and all(isinstance(leaf, jax.Array) for leaf in leaves)
        and not any(map(is_object, jax.tree.leaves(value, is_leaf=is_object)))
    )
    is_heard = asked.outputs is not None
    if flows:
        leaves = _flowing(label, leaves, asked.edits > 1, is_heard)
        value = jax.tree.unflatten(tree, leaves)
    elif is_heard:
        _told(label, leaves, partly=True)
    if is_heard:
        note_output(module, name, value)
    return value


def kind_given(variable_type: Any, what: str) -> Any:
    """A kind of Variable from itself or its collection name."""
    if isinstance(variable_type, str):
        return kind_of_name(variable_type, allow_register=True)
    if not (isinstance(variable_type, type) and issubclass(variable_type, Variable)):
        raise CaptureError(
            f"{what}: expected a kind of Variable or the name of one, got "
            f"{variable_type!r}."
        )
    return variable_type


def sow(  # noqa: PLR0917 - as `Module.sow` is given them
    module: Any, variable_type: Any, name: str, value: Any, reduce: Any, noop: Any
) -> bool:
    """What `Module.sow` does."""
    check_name(name, "sow")
    kind = kind_given(variable_type, "sow")
    asked = listening.value
    if asked is None:
        return not _is_noop(noop) and _sow_outside(module, kind, name, value, reduce)
    is_heard = asked.hears(kind)
    if not (is_heard or asked.edits):
        return False
    leaves, tree = _flattened(value)
    label = Label(name, kind, "sow", tree, reduce)
    with inside_once(module):
        if asked.edits and leaves and all(map(_is_carried, leaves)):
            # It does not flow on: it is marked so that an edit of it can be refused.
            editable(label, _as_arrays(leaves))
        if is_heard:
            _told(label, leaves)
            note(module, kind, name, reduce, value)
    return is_heard


def perturb(module: Any, name: str, value: Any, variable_type: Any, noop: Any) -> Any:
    """What `Module.perturb` does."""
    check_name(name, "perturb")
    kind = kind_given(variable_type, "perturb")
    asked = listening.value
    if asked is None:
        is_noop = _is_noop(noop)
        return value if is_noop else _perturb_outside(module, kind, name, value)
    is_heard = asked.hears(kind)
    if not (is_heard or asked.edits):
        return value
    leaves, tree = jax.tree.flatten(value)
    if not all(map(_is_carried, leaves)):
        raise CaptureError(
            f"perturb: the value {name!r} of {type(module).__name__} is a "
            f"{type(value).__name__}; only arrays can be perturbed."
        )
    label = Label(name, kind, "perturb", tree)
    with inside_once(module):
        leaves = _flowing(label, leaves, asked.edits > 0, is_heard)
        out = jax.tree.unflatten(tree, leaves)
        note(module, kind, name, None, (value, out))
        return out


# Outside a capture: NNX's former way, an attribute on the Module.


def set_sow_outside_capture(policy: Literal["store", "ignore"]) -> None:
    """Sets what `sow` and `perturb` do when no capture is open.

    Args:
        policy: `"store"` keeps values in attributes of the Module, as NNX does, with a
            DeprecationWarning; `"ignore"` does nothing.
    """
    if policy not in ("store", "ignore"):
        raise ValueError(
            f"What sow does outside a capture is 'store' or 'ignore', not {policy!r}."
        )
    sow_capture_noop(policy == "ignore")


def _is_noop(asked: bool | None) -> bool:
    return sow_capture_noop.current_value() if asked is None else bool(asked)


def _sow_outside(module: Any, kind: Any, name: str, value: Any, reduce: Any) -> bool:
    held = _held_outside("sow", module, kind, name)
    reduce_fn, init_fn = reduce
    if held is None:
        _store(module, name, kind(reduce_fn(init_fn(), value)))
    else:
        held.set_value(reduce_fn(held.get_value(), value))
    return True


def _perturb_outside(module: Any, kind: Any, name: str, value: Any) -> Any:
    held = _held_outside("perturb", module, kind, name)
    if held is None:
        held = _store(module, name, kind(jax.tree.map(jnp.zeros_like, value)))
    return jax.tree.map(jnp.add, held.get_value(), value)


def _held_outside(what: str, module: Any, kind: Any, name: str) -> Any:
    """The Variable that values are stored in, with a warning; None if there is none."""
    held = getattr(module, name, MISSING)
    fits = type(held) is kind or (what == "perturb" and isinstance(held, kind))
    if held is not MISSING and not fits:
        is_variable = isinstance(held, Variable)
        wanted = f"of type '{kind.__name__}'" if is_variable else "a Variable"
        found = f"'{type(held).__name__}'" if is_variable else type(held).__name__
        raise StructureError(
            f"{type(module).__name__}.{what}: Expected '{name}' to be {wanted}, got "
            f"{found}. Choose another name."
        )
    warnings.warn(
        f"`{what}` outside a capture is deprecated: it stores values in attributes of "
        "the Module. Call the model through `capture`, or say "
        "`set_sow_outside_capture('ignore')`.",
        DeprecationWarning,
        stacklevel=5,
    )
    return None if held is MISSING else held


def _store(module: Any, name: str, variable: Any) -> Any:
    noted = set_on_purpose.get()
    if noted is not None:
        noted.add((id(module), name))  # dropped by a transform, without a complaint
    setattr(module, name, variable)
    return variable
