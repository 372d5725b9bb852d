# SPDX-License-Identifier: Apache-2.0
"""What a model says while it runs: `tap`, and what `sow` and `perturb` do.

While nobody listens nothing is emitted: the program is the same as without.
"""

import warnings
from contextlib import nullcontext
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import find_top_trace, set_current_trace

from treetap._capture.edit_points import editable
from treetap._capture.listening import listening
from treetap._capture.marks import Label, bind_tap, tap_p
from treetap._capture.module_paths import inside, is_inside
from treetap._core.errors import CaptureError, StructureError
from treetap._core.trace_level import Through, set_on_purpose
from treetap._core.trees.attributes import is_object
from treetap._core.variables.kinds import kind_of_name
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


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array)


def _is_number(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic | bool | int | float | complex)


def _bound(label: Label, leaves: list[Any]) -> list[Any]:
    arrays = [leaf if _is_array(leaf) else jnp.asarray(leaf) for leaf in leaves]
    trace = find_top_trace(None)
    if isinstance(trace, Through) and trace.is_outermost:
        return trace.hear(label, arrays)  # no need to go through JAX
    return bind_tap(label, arrays)


def _note(label: Label, leaves: list[Any], partly: bool = False) -> bool:
    """Keeps leaves of any sort, where a capture runs at this very level.

    A capture further out, behind a transform, hears what JAX can carry to it.
    """
    trace = find_top_trace(None)
    if not isinstance(trace, Through):
        return False
    heard_outside = False
    while isinstance(trace, Through):
        trace.hear(label, leaves)
        heard_outside = not trace.is_outermost
        trace = trace.parent_trace
    if heard_outside:
        with set_current_trace(trace):
            _emit(label, leaves, partly)
    return True


def _emit(label: Label, leaves: list[Any], partly: bool) -> None:
    """Marks leaves for a capture further out; `partly` leaves out what cannot go."""
    carried = [_is_array(leaf) or _is_number(leaf) for leaf in leaves]
    if not all(carried) and not partly:
        raise refuse_uncarried(label, leaves)
    kept = [leaf if flag else None for leaf, flag in zip(leaves, carried)]
    rest, shape = jax.tree.flatten(jax.tree.unflatten(label.tree, kept))
    if rest:
        _bound(label._replace(tree=shape), rest)


def refuse_uncarried(label: Label, leaves: list[Any]) -> CaptureError:
    """The error for a value that is not made of arrays, under a transform."""
    kind = type(jax.tree.unflatten(label.tree, leaves)).__name__
    return CaptureError(
        f"{label.how}: the value {label.name!r} is a {kind} that JAX cannot carry out "
        "of a traced function. Give arrays."
    )


def _editable(label: Label, leaves: list[Any]) -> list[Any]:
    """Leaves that flow on, marked so that they may be edited."""
    arrays = [leaf if _is_array(leaf) else jnp.asarray(leaf) for leaf in leaves]
    return editable(label, arrays)


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
    if asked.edits:
        value = _edited_tap(value, name)
        if not asked.taps:
            return value
    if _is_array(value):
        return _bound(Label(name, None, "tap", LEAF), [value])[0]
    leaves, tree = jax.tree.flatten(value)
    label = Label(name, None, "tap", tree)
    if not leaves or not all(_is_array(x) or _is_number(x) for x in leaves):
        if not _note(label, leaves):
            raise refuse_uncarried(label, leaves)
        return value
    out = _bound(label, leaves)
    kept = [new if _is_array(old) else old for old, new in zip(leaves, out)]
    return jax.tree.unflatten(tree, kept)


def _edited_tap(value: T, name: str) -> T:
    """A tapped value that may be edited, if it is made of arrays."""
    leaves, tree = jax.tree.flatten(value)
    if not leaves or not all(_is_array(x) or _is_number(x) for x in leaves):
        return value
    out = _editable(Label(name, None, "tap", tree), leaves)
    return jax.tree.unflatten(tree, out)


def output(name: str, value: Any) -> Any:
    """Marks the result of a method; what flows on is the marked value."""
    asked = listening.value
    if asked.edits > 1:
        value = _edited_output(name, value)
        if asked.outputs is None:
            return value
    if _is_array(value):
        return _bound(Label(name, None, "output", LEAF), [value])[0]
    leaves, tree = jax.tree.flatten(value)
    if not all(map(_is_array, leaves)):
        _record_only(name, leaves, tree)
        return value
    objects = jax.tree.leaves(value, is_leaf=is_object)
    if not leaves or any(map(is_object, objects)):
        _record_only(name, leaves, tree)
        return value
    return jax.tree.unflatten(tree, _bound(Label(name, None, "output", tree), leaves))


def _edited_output(name: str, value: Any) -> Any:
    """A result that may be edited, if it is made of arrays alone."""
    leaves, tree = jax.tree.flatten(value)
    objects = jax.tree.leaves(value, is_leaf=is_object)
    if not leaves or not all(map(_is_array, leaves)) or any(map(is_object, objects)):
        return value
    out = _editable(Label(name, None, "output", tree), leaves)
    return jax.tree.unflatten(tree, out)


def _record_only(name: str, leaves: list[Any], tree: Any) -> None:
    """Records a result that flows on as it is; what JAX cannot carry is left out."""
    if _note(Label(name, None, "output", tree), leaves, partly=True):
        return
    _emit(Label(name, None, "output", tree), leaves, partly=True)


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


def sow(module: Any, variable_type: Any, name: str, value: Any, reduce: Any) -> bool:
    """What `Module.sow` does."""
    check_name(name, "sow")
    kind = kind_given(variable_type, "sow")
    asked = listening.value
    if asked is None:
        return _sow_outside(module, kind, name, value, reduce)
    if asked.edits:
        with nullcontext() if is_inside(module) else inside(module):
            _mark_sown(name, kind, value)
    if not asked.hears(kind):
        return False
    leaves, tree = ([value], LEAF) if _is_array(value) else jax.tree.flatten(value)
    label = Label(name, kind, "sow", tree, reduce)
    if is_inside(module):
        _say(label, leaves)
    else:
        with inside(module):
            _say(label, leaves)
    return True


def _mark_sown(name: str, kind: Any, value: Any) -> None:
    """Marks what does not flow on, so that an edit of it can be refused."""
    leaves, tree = jax.tree.flatten(value)
    if leaves and all(_is_array(leaf) or _is_number(leaf) for leaf in leaves):
        label = Label(name, kind, "sow", tree, is_edit=True)
        tap_p.bind(*map(jnp.asarray, leaves), label=label, order=0, rows=0)


def _say(label: Label, leaves: list[Any]) -> None:
    """Records leaves that do not flow on."""
    if not _note(label, leaves):
        _emit(label, leaves, partly=False)


def perturb(module: Any, name: str, value: Any, variable_type: Any) -> Any:
    """What `Module.perturb` does."""
    check_name(name, "perturb")
    kind = kind_given(variable_type, "perturb")
    asked = listening.value
    if asked is None:
        return _perturb_outside(module, kind, name, value)
    if not asked.hears(kind) and not asked.edits:
        return value
    leaves, tree = jax.tree.flatten(value)
    if not all(_is_array(leaf) or _is_number(leaf) for leaf in leaves):
        raise CaptureError(
            f"perturb: the value {name!r} of {type(module).__name__} is a "
            f"{type(value).__name__}; only arrays can be perturbed."
        )
    label = Label(name, kind, "perturb", tree)
    with nullcontext() if is_inside(module) else inside(module):
        if asked.edits:
            leaves = _editable(label, leaves)
        if asked.hears(kind):
            leaves = _bound(label, leaves)
        return jax.tree.unflatten(tree, leaves)


# Outside a capture: NNX's former way, an attribute on the Module.

_outside: list[str] = ["store"]


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
    _outside[0] = policy


def _warn(what: str) -> None:
    warnings.warn(
        f"`{what}` outside a capture is deprecated: it stores values in attributes of "
        "the Module. Call the model through `capture`, or say "
        "`set_sow_outside_capture('ignore')`.",
        DeprecationWarning,
        stacklevel=5,
    )


def _store(module: Any, name: str, variable: Any) -> None:
    noted = set_on_purpose.get()
    if noted is not None:
        noted.add((id(module), name))  # dropped by a transform, without a complaint
    setattr(module, name, variable)


def _sow_outside(module: Any, kind: Any, name: str, value: Any, reduce: Any) -> bool:
    if _outside[0] == "ignore":
        return False
    _warn("sow")
    reduce_fn, init_fn = reduce
    if not hasattr(module, name):
        _store(module, name, kind(reduce_fn(init_fn(), value)))
        return True
    held = getattr(module, name)
    _check_held(module, held, kind, name, exact=True)
    held.set_value(reduce_fn(held.get_value(), value))
    return True


def _perturb_outside(module: Any, kind: Any, name: str, value: Any) -> Any:
    if _outside[0] == "ignore":
        return value
    _warn("perturb")
    if not hasattr(module, name):
        _store(module, name, kind(jax.tree.map(jnp.zeros_like, value)))
    held = getattr(module, name)
    _check_held(module, held, kind, name, exact=False)
    return jax.tree.map(jnp.add, held.get_value(), value)


def _check_held(module: Any, held: Any, kind: Any, name: str, exact: bool) -> None:
    """Refuses an attribute that is something else than what would be stored."""
    where = f"{type(module).__name__}.{name}"
    if not isinstance(held, Variable):
        raise StructureError(
            f"Expected {where} to be a Variable, got {type(held).__name__}. Choose "
            "another name."
        )
    if type(held) is not kind if exact else not isinstance(held, kind):
        raise StructureError(
            f"Expected {where} to be of type {kind.__name__}, got "
            f"{type(held).__name__}. Choose another name."
        )
