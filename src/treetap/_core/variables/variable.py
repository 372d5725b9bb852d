# SPDX-License-Identifier: Apache-2.0
"""Variable: a mutable box that holds one value and says what kind of value it is.

The class of a Variable is its kind (`Param`, `BatchStat`, …); metadata are named facts
that travel with it and take part in its pytree structure. A Variable is one pytree node
with one child, the raw value, under the key `value`.

Three rules hold everywhere:

* a Variable changes only at the trace level it was made at;
* writing never changes an object somebody else holds: items are set in a copy;
* metadata are replaced, never edited, so one mapping may serve many Variables. A
  value in them, such as a list, may change in place. A Variable with such metadata
  keeps them outside of its slot (`_changeable`) and looks, each time it is asked,
  whether they are still what they were.
"""

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, ClassVar, Generic, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import GetAttrKey, register_pytree_with_keys

from treetap._core import display
from treetap._core.errors import MetadataError, StructureError
from treetap._core.paths import copy_containers, find_leaves
from treetap._core.settings import using_eager_sharding
from treetap._core.static_values import count_by_identity
from treetap._core.trace_level import current_trace, is_foreign, refuse_foreign_variable
from treetap._core.variables.change_marks import last_values, note_change
from treetap._core.variables.metadata import (
    MISSING,
    PLAIN,
    REQUIRED,
    ExactMetadata,
    MetadataMethods,
    VariableMetadata,
    checked_names,
    exact_metadata,
    required_of,
    special_of,
)
from treetap._core.variables.operators import ValueOperators
from treetap._core.variables.placement import place
from treetap._core.variables.values import (
    Marked,
    is_ref,
    with_item,
    without_ref,
    write_ref,
)

A = TypeVar("A")

_VALUE_KEY = GetAttrKey("value")
_ARRAY_ATTRIBUTES = frozenset(name for name in dir(jax.Array) if name[0] != "_")


array_types: set[type] = set()  # of concrete arrays met so far
# Attributes that neither metadata nor values have: by name, how to get them.
further_attributes: dict[str, Callable[[Any], Any]] = {}
_SLOTS = ("_metadata", "_pack", "_trace")


class _Defaults:
    """The flags new Variables get when their maker names none (see `var_defaults`)."""

    ref: ClassVar[bool] = False


class VariableMeta(type):
    """Gives every kind empty `__slots__`, so that Variables stay small and closed."""

    def __new__(
        mcs, name: str, bases: tuple[type, ...], body: dict[str, Any], **kwargs: Any
    ) -> "VariableMeta":
        body.setdefault("__slots__", ())
        return super().__new__(mcs, name, bases, body, **kwargs)


class Variable(
    ValueOperators, MetadataMethods, display.Shown, Generic[A], metaclass=VariableMeta
):
    """A mutable box with one value and metadata.

    Args:
        value: Anything: an array, a number, a pytree, an abstract array. A
            `VariableMetadata` is unpacked; its metadata win over the keywords.
        ref: Hold the value in a JAX `Ref`, so that plain `jax.jit` sees writes.
        eager_sharding: Place the value as `out_sharding` says; the setting
            `use_eager_sharding` is the default.
        hijax: Accepted for NNX programs; only False is supported.
        **metadata: Named facts; part of the pytree structure.

    Examples:
        >>> import treetap as tt
        >>> count = tt.Variable(1)
        >>> count[...] += 2
        >>> count[...], count + 0.5
        (3, 3.5)
    """

    __slots__ = ("__weakref__", "_box", "_metadata", "_pack", "_trace")
    _counted_as: ClassVar[str | None] = None  # the kind under which sizes are summed up

    _box: tuple[A]  # as JAX wants the children of a node; none while it is packed
    _pack: Any  # what holds the value then
    _metadata: dict[str, Any]
    _trace: Any

    def __init__(
        self,
        value: A | VariableMetadata[A],
        *,
        hijax: bool | None = None,
        ref: bool | None = None,
        eager_sharding: bool | None = None,
        **metadata: Any,
    ):
        is_plain = not (metadata or hijax or ref or _Defaults.ref)
        is_plain &= eager_sharding is None and type(value) in array_types
        if is_plain and using_eager_sharding():  # the common case, made quickly
            set_box(self, (self.create_value(value),))
            _set_metadata(self, PLAIN)
            _set_trace(self, current_trace())
            return
        given = {"hijax": hijax, "ref": ref, "eager_sharding": eager_sharding}
        if isinstance(value, VariableMetadata):
            metadata = {**metadata, **value.metadata}
            for name in REQUIRED:
                own = metadata.pop(name, None)
                if own is not None and given[name] not in (None, own):
                    raise MetadataError(
                        f"{type(self).__name__}: the initializer says {name}={own}, "
                        f"the call says {name}={given[name]}. Give it once."
                    )
                given[name] = own if given[name] is None else given[name]
            value = value.raw_value
        if given["hijax"]:
            raise MetadataError(
                f"{type(self).__name__}: hijax Variables are not supported. "
                "Leave `hijax` out; `ref=True` gives a Variable whose writes plain "
                "`jax.jit` propagates."
            )
        self._fill(value, given["ref"], given["eager_sharding"], metadata)

    def _fill(
        self, value: Any, ref: bool | None, eager: bool | None, metadata: dict[str, Any]
    ) -> None:
        """Makes the value and stores it, once the arguments are known to be good."""
        if isinstance(value, jax.Array):
            if not isinstance(value, Tracer):
                array_types.add(type(value))
        elif isinstance(value, Marked):
            raise MetadataError(
                f"{type(self).__name__}: the value is {value!r}. `data` and `static` "
                "mark attributes; give the value itself."
            )
        elif find_leaves(value, is_ref, (Variable,)):
            raise StructureError(
                f"{type(self).__name__}: the value is, or contains, a jax.Ref. "
                "Pass the array and say `ref=True`."
            )
        ref = _Defaults.ref if ref is None else ref
        eager = using_eager_sharding() if eager is None else eager
        checked = checked_names(type(self), metadata, 4)
        metadata = {**PLAIN, "ref": ref, "eager_sharding": eager, **checked}
        value = self.create_value(value)
        value = copy_containers(value)  # the caller's container stays the caller's
        if eager and metadata.get("out_sharding"):
            value = place(value, metadata)
        if ref:
            value = jax.new_ref(jnp.asarray(value))
        set_box(self, (value,))
        give_metadata(self, exact_metadata(metadata))
        _set_trace(self, current_trace())

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        _register(cls)

    # Reading and writing.

    def create_value(self, value: Any) -> Any:
        """Override to change a value when the Variable is made."""
        return value

    def get_value(self, *, index: Any = MISSING) -> A:
        """Returns the value, or the part of it at `index`.

        Containers are copied (their items are not), so that editing the result does not
        edit the Variable; a container found at an index is the one inside, except from
        another trace. Override to change what reading gives.
        """
        value: Any = self._box[0]
        if self._metadata["ref"] and is_ref(value):
            return value[...] if index is MISSING else value[index]
        if index is MISSING or index is Ellipsis:
            return copy_containers(value)
        part = value[index]
        if type(part) in (dict, list) and is_foreign(self._trace):
            return copy_containers(part)  # a write into it must not reach the Variable
        return part

    def set_value(self, value: Any, *, index: Any = MISSING) -> None:
        """Replaces the value, or the part of it at `index`.

        Without an index shape, dtype and structure may change. With one (`...`
        included) the value keeps its shape, dtype and sharding. Override to change what
        writing does.
        """
        value = value.get_value() if isinstance(value, Variable) else value
        current: Any = self._box[0]
        if self._metadata["ref"] and is_ref(current):
            write_ref(current, ... if index is MISSING else index, value)
            return
        self._check_trace()  # before anything is computed
        value = copy_containers(value)
        if index is not MISSING:
            value = with_item(current, index, value)
        write_boxes((self,), ((value,),))

    def _check_trace(self) -> None:
        if is_foreign(self._trace):
            raise refuse_foreign_variable(type(self).__name__)

    def get_raw_value(self) -> Any:
        """Returns what is stored: no copy, no override; the Ref when there is one."""
        return self._box[0]

    def set_raw_value(self, value: Any) -> None:
        """Stores `value` as it is, past `set_value` overrides; the trace is checked."""
        self._check_trace()
        write_boxes((self,), ((value,),))

    def __getitem__(self, index: Any) -> Any:
        return self.get_value(index=index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.set_value(value, index=index)

    def __delitem__(self, index: Any) -> None:
        value: Any = copy.copy(self.get_value())
        del value[index]
        self.set_value(value)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        value: Any = self._box[0]
        return np.shape(value)

    def __getattr__(self, name: str) -> Any:
        # Reached only when the class knows no such name, or a slot is empty.
        if name == "_box":
            return self._pack.read(self)
        if name == "_metadata" and id(self) in _changeable:
            return _current_metadata(self)
        if name in _SLOTS or (name[:2] == name[-2:] == "__"):
            raise AttributeError(name)
        metadata = self._metadata
        if name in metadata and name not in _ARRAY_ATTRIBUTES:
            return metadata[name]
        value: Any = self._box[0]
        if type(value) in (dict, list) and is_foreign(self._trace):
            value = copy_containers(value)  # `append` must not reach the Variable
        try:
            return getattr(value, name)
        except AttributeError:
            if name in metadata:
                return metadata[name]
            if name in further_attributes:
                return further_attributes[name](self)
            is_old = name in ("value", "raw_value")  # NNX has it, and `treetap.nnx`
            instead = " Read and write the value with `v[...]`." if is_old else ""
            raise AttributeError(
                f"{type(self).__name__}: no metadata and no attribute of the value "
                f"(a {type(value).__name__}) is called {name!r}.{instead}"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        held = getattr(type(self), name, None)
        is_settable = hasattr(held, "__set__") and name[0] != "_"
        if is_settable or isinstance(held, property):
            object.__setattr__(self, name, value)
            return
        raise AttributeError(
            f"{type(self).__name__}: attributes cannot be set. Write `v[...] = x` for "
            f"the value, `v.set_metadata({name}=...)` for metadata."
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(
            f"{type(self).__name__}: attributes cannot be deleted. "
            f"Use `v.del_metadata({name!r})` for metadata."
        )

    # Metadata; the rest is in `MetadataMethods`.

    def _replace_metadata(self, metadata: dict[str, Any]) -> None:
        self._check_trace()
        give_metadata(self, exact_metadata(metadata))
        note_change()

    def add_axis(self, axis_index: int, axis_name: str | None) -> None:
        """Override to follow an axis that a mapping transform added."""

    def remove_axis(self, axis_index: int, axis_name: str | None) -> None:
        """Override to follow an axis that a mapping transform removed."""

    # Copies.

    def copy(self, value: Any = MISSING, **metadata: Any) -> Self:
        """Returns a new Variable of the same kind, with some things changed.

        Args:
            value: The value of the copy; this one's by default, arrays shared.
            **metadata: Metadata to change in the copy.
        """
        given = self if value is MISSING else value
        raw = given._box[0] if isinstance(given, Variable) else given
        raw = copy_containers(without_ref(raw))
        full = self._metadata
        if metadata.get("hijax"):
            raise MetadataError(f"{type(self).__name__}: hijax is not supported.")
        if metadata:
            full = {**full, **checked_names(type(self), metadata)}
        return _unpickle(type(self), raw, full)

    replace = copy

    def copy_from(self, other: "Variable[A]") -> None:
        """Takes the value and metadata of another Variable of the same kind."""
        if type(other) is not type(self):
            raise StructureError(
                f"copy_from: cannot copy a {type(other).__name__} into a "
                f"{type(self).__name__}. Use `update_from_state` to cross kinds."
            )
        self.update_from_state(other)

    def update_from_state(self, variable_state: "Variable[Any]") -> None:
        """Takes the value and metadata of another Variable, `ref` staying one's own."""
        kept = required_of(self._metadata)
        metadata = variable_state._metadata
        if any(metadata[name] != kept[name] for name in REQUIRED):
            metadata = {**metadata, **kept}
        raw = copy_containers(without_ref(variable_state.get_raw_value()))
        write = self.set_value if is_ref(self._box[0]) else self.set_raw_value
        write(raw)
        if metadata is not self._metadata:
            self._replace_metadata(metadata)

    @classmethod
    def from_metadata(cls, value: A, attributes: Mapping[str, Any]) -> Self:
        """Makes a Variable from a raw value and complete metadata, past all checks."""
        return make(cls, value, exact_metadata({**PLAIN, **attributes}))

    def __copy__(self) -> Self:
        return self.copy()

    def __reduce__(self) -> Any:  # for pickles, and for deep copies
        return _unpickle, (type(self), without_ref(self._box[0]), self._metadata)

    # Display.

    def _display_parts(self) -> display.Parts:
        value: Any = self._box[0]
        comment = str(display.size_of(value)) if display.has_arrays(value) else ""
        shown = [("value", value), *special_of(self._metadata).items()]
        return display.Parts(comment, shown)


# C-level access for code that handles many Variables. `set_box` is for new ones.
set_box: Callable[[Variable[Any], tuple[Any]], None] = Variable.__dict__["_box"].__set__
get_metadata: Callable[[Variable[Any]], Any] = attrgetter("_metadata")
get_trace: Callable[[Variable[Any]], Any] = attrgetter("_trace")


def write_boxes(variables: Iterable[Any], boxes: Iterable[tuple[Any]]) -> None:
    """Writes into Variables, in one call: all or nothing. See `change_marks`."""
    last_values[None] = None
    deque(map(set_box, variables, boxes), 0)
    last_values[None] = None


class Snapshot:
    """What Variables hold at a moment, values and metadata, to go back to.

    As a block, it goes back if the block fails.

    Args:
        variables: The Variables.

    Attributes:
        boxes: Their values, each in the tuple that holds it.
    """

    def __init__(self, variables: Iterable[Any]):
        self._variables = list(variables)
        self.boxes = [variable._box for variable in self._variables]
        self._metadata = [variable._metadata for variable in self._variables]

    def restore(self) -> None:
        """Makes the Variables what they were."""
        write_boxes(self._variables, self.boxes)
        for variable, metadata in zip(self._variables, self._metadata):
            if variable._metadata is not metadata:
                variable._replace_metadata(metadata)

    def __enter__(self) -> None:
        """Begins a block."""

    def __exit__(self, kind: Any, *exception: object) -> None:
        if kind is not None:
            self.restore()


# Of packed Variables: see `Pack`.
set_pack: Callable[[Any, Any], None] = Variable.__dict__["_pack"].__set__
del_box: Callable[[Any], None] = Variable.__dict__["_box"].__delete__


def none_if_empty(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same way to read a slot, but giving None where nothing is in it."""

    def read_or_none(holder: Any) -> Any:
        try:
            return read(holder)
        except AttributeError:
            return None

    return read_or_none


# The box of a Variable, None while it has none of its own; the pack it belongs to.
own_box = none_if_empty(Variable.__dict__["_box"].__get__)
pack_of = none_if_empty(Variable.__dict__["_pack"].__get__)


_set_metadata: Callable[[Any, Any], None] = Variable.__dict__["_metadata"].__set__
_del_metadata: Callable[[Any], None] = Variable.__dict__["_metadata"].__delete__
# By the identity of a Variable: a reference to it, and metadata that may change.
_changeable: dict[int, tuple[weakref.ref[Any], ExactMetadata]] = {}


def give_metadata(variable: Any, metadata: dict[str, Any]) -> None:
    """Gives a Variable metadata, as `exact_metadata` makes them."""
    identity = id(variable)
    _set_metadata(variable, metadata)
    _changeable.pop(identity, None)
    if type(metadata) is ExactMetadata and metadata.can_change:
        known = weakref.ref(variable, lambda _: _changeable.pop(identity, None))
        _changeable[identity] = known, metadata
        _del_metadata(variable)


def _current_metadata(variable: Any) -> ExactMetadata:
    known, metadata = _changeable[id(variable)]
    current = metadata.current()
    if current is not metadata:
        _changeable[id(variable)] = known, current
        note_change()
    return current


_set_trace: Callable[[Any, Any], None] = Variable.__dict__["_trace"].__set__


def make(
    kind: type[Any], value: Any, metadata: dict[str, Any], trace: Any = None
) -> Any:
    """Makes a Variable around a raw value: no hooks, no placement, no copies.

    `metadata` is shared, not copied; `trace` saves asking JAX for it each time.
    """
    variable = object.__new__(kind)
    set_box(variable, (value,))
    if type(metadata) is ExactMetadata:
        give_metadata(variable, metadata.as_described())
    else:
        _set_metadata(variable, metadata)
    _set_trace(variable, current_trace() if trace is None else trace)
    return variable


def _unpickle(kind: type[Any], value: Any, metadata: dict[str, Any]) -> Any:
    """A Variable around a value that was copied; pickles know the name."""
    metadata = exact_metadata(metadata)
    if metadata["ref"]:
        value = jax.new_ref(jnp.asarray(value))
    return make(kind, value, metadata)


def _flatten_with_key(variable: Variable[Any]) -> Any:
    return ((_VALUE_KEY, variable._box[0]),), variable._metadata


def _register(kind: type[Variable[Any]]) -> None:
    def unflatten(metadata: dict[str, Any], box: Any) -> Variable[Any]:
        (value,) = box
        return make(kind, value, metadata)

    flatten = attrgetter("_box", "_metadata")  # in C: every JAX call does it
    register_pytree_with_keys(kind, _flatten_with_key, unflatten, flatten)


_register(Variable)
count_by_identity(Variable)


def raw_values(leaves: Iterable[Any]) -> list[Any]:
    """The raw values of Variables, and plain values as they are."""
    return [x._box[0] if isinstance(x, Variable) else x for x in leaves]
