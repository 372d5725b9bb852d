# SPDX-License-Identifier: Apache-2.0
"""What a model says while it runs: `tap`, and what `sow` and `perturb` do.

While nobody listens nothing is emitted: the program is the same as without.
"""

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import find_top_trace, set_current_trace

from treetap._capture.edit_points import editable
from treetap._capture.listening import listening
from treetap._capture.marks import Label, bind_tap
from treetap._capture.module_paths import inside, is_inside
from treetap._capture.sown_so_far import note
from treetap._capture.walk.witness import witnessed
from treetap._core.errors import CaptureError, StructureError
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


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array)


_CARRIED = jax.Array | np.ndarray | np.generic | bool | int | float | complex


def _is_carried(leaf: Any) -> bool:
    """Whether JAX can carry a value out of a traced function."""
    return isinstance(leaf, _CARRIED)


def _bound(label: Label, leaves: list[Any]) -> list[Any]:
    arrays, asked = _as_arrays(leaves), listening.value
    if asked.witness:
        arrays = witnessed(label, arrays, asked.witness > 1)
        if not asked.marks:
            return arrays
    trace = find_top_trace(None)
    if isinstance(trace, Through) and trace.is_outermost:
        return trace.hear(label, arrays)  # no need to go through JAX
    return bind_tap(label, arrays)


def _flowing(
    label: Label, leaves: list[Any], is_edited: bool, is_heard: bool
) -> list[Any]:
    """Marks leaves that flow on, as far as somebody asks; gives those to use."""
    if is_edited:
        leaves = editable(label, _as_arrays(leaves))
    return _bound(label, leaves) if is_heard else leaves


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
    carried = list(map(_is_carried, leaves))
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


def _as_arrays(leaves: list[Any]) -> list[Any]:
    return [leaf if _is_array(leaf) else jnp.asarray(leaf) for leaf in leaves]


def _flattened(value: Any) -> tuple[list[Any], Any]:
    return ([value], LEAF) if _is_array(value) else jax.tree.flatten(value)


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
    if _is_array(value) and not asked.edits:  # the common case, made quickly
        return _bound(Label(name, None, "tap", LEAF), [value])[0]
    leaves, tree = _flattened(value)
    label = Label(name, None, "tap", tree)
    if leaves and all(map(_is_carried, leaves)):
        out = _flowing(label, leaves, asked.edits > 0, asked.taps)
        pairs = zip(leaves, out)
        kept = [new if asked.edits or _is_array(old) else old for old, new in pairs]
        return jax.tree.unflatten(tree, kept)
    if asked.taps and not _note(label, leaves):
        raise refuse_uncarried(label, leaves)
    return value


def output(name: str, value: Any) -> Any:
    """Marks the result of a method; what flows on is the marked value.

    A result that is not made of arrays alone flows on as it is.
    """
    asked = listening.value
    leaves, tree = _flattened(value)
    label = Label(name, None, "output", tree)
    flows = tree is LEAF or (
        bool(leaves)
        and all(map(_is_array, leaves))
        and not any(map(is_object, jax.tree.leaves(value, is_leaf=is_object)))
    )
    is_heard = asked.outputs is not None
    if flows:
        leaves = _flowing(label, leaves, asked.edits > 1, is_heard)
        return jax.tree.unflatten(tree, leaves)
    if is_heard:
        _record(label, leaves, partly=True)
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


def sow(module: Any, variable_type: Any, name: str, value: Any, reduce: Any) -> bool:
    """What `Module.sow` does."""
    check_name(name, "sow")
    kind = kind_given(variable_type, "sow")
    asked = listening.value
    if asked is None:
        return _sow_outside(module, kind, name, value, reduce)
    is_heard = asked.hears(kind)
    if not (is_heard or asked.edits):
        return False
    leaves, tree = _flattened(value)
    label = Label(name, kind, "sow", tree, reduce)
    with _scope_of(module):
        if asked.edits and leaves and all(map(_is_carried, leaves)):
            # It does not flow on: it is marked so that an edit of it can be refused.
            marked = label._replace(reduce=None, is_edit=True)
            bind_tap(marked, _as_arrays(leaves))
        if is_heard:
            _record(label, leaves)
            note(module, kind, name, reduce, value)
    return is_heard


def _scope_of(module: Any) -> AbstractContextManager[None]:
    return nullcontext() if is_inside(module) else inside(module)


def _record(label: Label, leaves: list[Any], partly: bool = False) -> None:
    """Records leaves that do not flow on; `partly` leaves out what cannot go out."""
    if not _note(label, leaves, partly):
        _emit(label, leaves, partly)


def perturb(module: Any, name: str, value: Any, variable_type: Any) -> Any:
    """What `Module.perturb` does."""
    check_name(name, "perturb")
    kind = kind_given(variable_type, "perturb")
    asked = listening.value
    if asked is None:
        return _perturb_outside(module, kind, name, value)
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
    with _scope_of(module):
        leaves = _flowing(label, leaves, asked.edits > 0, is_heard)
        out = jax.tree.unflatten(tree, leaves)
        note(module, kind, name, None, (value, out))
        return out


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
    held = getattr(module, name, MISSING)
    _check_held("sow", module, held, kind, name, type(held) is kind)
    _warn("sow")
    reduce_fn, init_fn = reduce
    if held is MISSING:
        _store(module, name, kind(reduce_fn(init_fn(), value)))
        return True
    held.set_value(reduce_fn(held.get_value(), value))
    return True


def _perturb_outside(module: Any, kind: Any, name: str, value: Any) -> Any:
    if _outside[0] == "ignore":
        return value
    held = getattr(module, name, MISSING)
    _check_held("perturb", module, held, kind, name, isinstance(held, kind))
    _warn("perturb")
    if held is MISSING:
        _store(module, name, held := kind(jax.tree.map(jnp.zeros_like, value)))
    return jax.tree.map(jnp.add, held.get_value(), value)


def _check_held(  # noqa: PLR0917 - what there is, and what is wanted
    what: str, module: Any, held: Any, kind: Any, name: str, is_kind: bool
) -> None:
    """Refuses an attribute that is something else than what would be stored."""
    if is_kind or held is MISSING:
        return
    is_variable = isinstance(held, Variable)
    wanted = f"of type '{kind.__name__}'" if is_variable else "a Variable"
    found = f"'{type(held).__name__}'" if is_variable else type(held).__name__
    raise StructureError(
        f"{type(module).__name__}.{what}: Expected '{name}' to be {wanted}, got "
        f"{found}. Choose another name."
    )
