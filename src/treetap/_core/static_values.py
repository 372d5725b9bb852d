# SPDX-License-Identifier: Apache-2.0
"""Static values: when two of them are the same, and whether one was changed in place.

A traced program depends on every static value that it was traced with, so two questions
must be answered without a guess. *Are these two the same?* Python's `==` says yes of 1,
True and 1.0, and of 0.0 and -0.0; and objects without an `__eq__` it does not compare.
*Is this one still what it was?* A config may be a list, a dict, a dataclass or any
object, and change in place. A `Snapshot` answers both. It has three parts:

**A key** describes a value: its type, and the keys of what is inside it, at every
depth. Keys are hashable, never change, and are equal if and only if the values are the
same. What is inside is: the items of a container; the attributes of an object, if these
are all there is of it; the bytes of a numpy array. An object that says itself when it
is equal, with `__eq__` and `__hash__`, is asked. All others count by identity: modules,
locks, arrays of JAX, Variables, whatever has state that Python does not see.

**A watch** looks quickly whether a value has changed. It has the containers and objects
in the value, and the very items that each of them held. While they hold these items
nothing has changed: an item either cannot change, or is in the watch itself. If they do
not, the value is described anew, and its key tells.

**A copy.** A description outlives what it describes, and objects are built from it
later, when the value may have changed. So what can change is copied when it is
described, and `as_it_was` gives it back. What counts by identity is not copied.
"""

import copy
import dis
import enum
import functools
import inspect
import sys
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any

import jax
import numpy as np

from treetap._core.errors import StructureError

MAX_PARTS = 10_000  # a value with more inside it counts by identity

# Two values of these types that are equal are of the same type; none can change.
_PLAIN = {type(None), str, bytes, type(...), types.FunctionType, jax.P}
_PLAIN |= {types.BuiltinFunctionType, type(jax.jit(len))}
_opaque: list[type] = [jax.Array, jax.Ref, types.ModuleType]
_opaque += [jax.custom_jvp, jax.custom_vjp]  # functions with rules, such as `relu`


def count_by_identity(kind: type) -> None:
    """Says that objects of a type, where they are inside static values, have no key."""
    _opaque.append(kind)


@functools.lru_cache(4096)
def is_atom(kind: type) -> bool:
    """Whether values of a type are the same when they are equal, and cannot change."""
    is_named = issubclass(kind, type | np.dtype | enum.Enum)
    return is_named or kind in _PLAIN or kind in (bool, int)


class FunctionHolder:
    """Base of what holds functions that are described by their code and closures."""

    __slots__ = ("value",)
    value: Any


class Identity:
    """The key of what counts by identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is Identity and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class _Empty:
    """What stands in the key for a cell of a closure or a slot that has no value."""


@dataclass(slots=True, eq=False)
class _Parts:
    """What is in the slots of an object, or in cells of closures, as in a container."""

    places: tuple[Any, ...]
    read: Callable[[Any], Any]

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[Any]:
        return map(self.read, self.places)


@dataclass(slots=True, eq=False)
class Watch:
    """What could change in a value, and what it was.

    Attributes:
        holders: Containers and views of them, each with the items it had.
        objects: Objects, each with its class and its attribute dict (None if it has
            none), both of which may be replaced.
        buffers: Numpy arrays and the like, each with its facts.
    """

    holders: list[tuple[Any, tuple[Any, ...]]] = field(default_factory=list)
    objects: list[tuple[Any, type, Any]] = field(default_factory=list)
    buffers: list[tuple[Any, tuple[Any, ...]]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.holders or self.objects or self.buffers)

    def add(self, other: "Watch") -> None:
        """Watches what another watch does, too."""
        self.holders += other.holders
        self.objects += other.objects
        self.buffers += other.buffers

    def hold(self, *holders: Iterable[Any]) -> None:
        """Watches the items of containers."""
        self.holders += [(holder, tuple(holder)) for holder in holders]

    def holds(self) -> bool:
        """Whether nothing has changed."""
        for holder, before in self.holders:
            if len(holder) != len(before) or not all(map(is_, holder, before)):
                return False
        for value, kind, held in self.objects:
            if type(value) is not kind or getattr(value, "__dict__", None) is not held:
                return False
        return not self.buffers or all(
            facts_of(buffer) == before for buffer, before in self.buffers
        )


def _content_of(cell: types.CellType) -> Any:
    """What is in a cell of a closure."""
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned yet, or it was deleted
        return _Empty


def facts_of(buffer: Any) -> tuple[Any, ...]:
    """What two equal numpy arrays or scalars have in common, or byte arrays.

    Of an array of objects these are their addresses, which tell for as long as the
    objects live.
    """
    dtype, shape = getattr(buffer, "dtype", None), getattr(buffer, "shape", None)
    content = bytes(buffer) if dtype is None else buffer.tobytes()
    return type(buffer), dtype, shape, content


class _TooLarge(Exception):
    """A value has too many parts to be described."""


@dataclass(slots=True, eq=False)
class _End:
    """Stands behind what is inside a value, in what is still to be described."""

    value: Any


Opened = tuple[Any, list[Any]]  # a head, and what is inside


@dataclass(slots=True, eq=False)
class _Description:
    """One description: a key is made, and what could change is noted on the way.

    A key is flat, so that depth is no limit: for each value in turn a head and how many
    values are inside, which come next. That is as good as nested tuples.
    """

    watch: Watch = field(default_factory=Watch)
    fixed: dict[int, Any] = field(default_factory=dict)  # what is not to be copied
    _opening: int = 0  # in how many holders of functions we are
    # Each function that was opened, by the identity of its closure.
    functions: dict[int, types.FunctionType] = field(default_factory=dict)

    def key(self, value: Any) -> tuple[Any, ...]:
        """The key of a value."""
        found: list[Any] = []
        around: dict[int, int] = {}  # the values that we are inside of, by identity
        waiting = [value]
        while waiting:
            value = waiting.pop()
            kind = type(value)
            if kind is _End:
                around.pop(id(value.value))
                self._opening -= isinstance(value.value, FunctionHolder)
            elif is_atom(kind) and not (self._opening and kind is types.FunctionType):
                found.append((kind, value))
            elif kind is float or kind is complex:
                found.append((kind, repr(value)))  # which knows -0.0, and nan as nan
            elif id(value) in around:
                found.append(("inside itself", around[id(value)]))
            else:
                head, inside = self._opened(kind, value)
                found.append((kind, head, len(inside)))
                if len(found) > MAX_PARTS:
                    raise _TooLarge
                around[id(value)] = len(around)
                waiting += [_End(value), *reversed(inside)]
        return tuple(found)

    def _identity(self, value: Any) -> Opened:
        self.fixed[id(value)] = value
        return Identity(value), []

    def _opened(self, kind: Any, value: Any) -> Opened:
        """What tells a value from others of its type, beside what is inside it."""
        if isinstance(value, tuple(_opaque)):
            return self._identity(value)
        if isinstance(value, np.generic):
            return facts_of(value), []
        if isinstance(value, np.ndarray | bytearray):
            return self._buffer(value)
        if kind is types.FunctionType:
            return self._function(value)
        if isinstance(value, FunctionHolder):
            self.fixed[id(value)] = value
            self._opening += 1
            return None, [value.value]
        if kind is types.MethodType:
            self.fixed[id(value.__self__)] = value.__self__
            owner = value.__self__ if self._opening else None
            head = None if self._opening else Identity(value.__self__)
            return head, [value.__func__, owner]
        if kind is functools.partial:
            return None, [value.func, value.args, value.keywords, vars(value)]
        if kind is slice:
            return None, [value.start, value.stop, value.step]
        return self._container(kind, value)

    def _buffer(self, value: Any) -> Opened:
        """The numbers in an array or a byte array, or the objects in an array."""
        facts = facts_of(value)
        self.watch.buffers.append((value, facts))
        inside = self._attributes(value)
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            # A list is watched, and so it keeps the objects whose addresses are facts.
            return (value.dtype, value.shape), [[value.tolist()], *inside]
        return facts, inside

    def _function(self, value: Any) -> Opened:
        """The code of a function, and what is in its closure."""
        closure = value.__closure__ or ()
        self.functions[id(closure)] = value
        contents = map(_content_of, closure)
        head = value.__code__, Identity(value.__globals__)
        return head, [*contents, value.__defaults__, value.__kwdefaults__]

    def _container(self, kind: Any, value: Any) -> Opened:
        """The items of a container, and the attributes of any object."""
        if isinstance(value, dict | types.MappingProxyType):
            self.watch.hold(value, value.values())
            return len(value), [*value, *value.values(), *self._attributes(value)]
        if isinstance(value, list | deque | set):
            self.watch.hold(value)
        if isinstance(value, set | frozenset):
            inner = frozenset(map(self.key, value))
            return inner, self._attributes(value)
        if isinstance(value, tuple | list | deque):
            head = len(value), getattr(value, "maxlen", None)
            return head, [*value, *self._attributes(value)]
        if _compares_itself(kind) and not hasattr(kind, "__dataclass_fields__"):
            self.fixed[id(value)] = value
            return value, []
        if not _is_transparent(kind):
            return self._identity(value)
        return None, self._attributes(value)

    def _attributes(self, value: Any) -> list[Any]:
        """The attributes of an object: names and values, in order of the names."""
        kind, held = type(value), getattr(value, "__dict__", None)
        slots = _slots(kind)
        if held is None and not slots:
            return []
        self.watch.objects.append((value, kind, held))
        found: dict[str, Any] = {}
        if slots:
            contents = _Parts(slots, lambda name: getattr(value, name, _Empty))
            self.watch.hold(contents)
            found |= zip(slots, contents)
        if held is not None:
            self.watch.hold(held, held.values())
            cached = {name for name in held if is_cached(getattr(kind, name, None))}
            found |= {x: y for x, y in held.items() if x not in cached}
        return [part for name in sorted(found) for part in (name, found[name])]


def _cells_to_watch(functions: list[types.FunctionType]) -> Iterator[types.CellType]:
    """The cells of closures into which somebody may put another value.

    That is a function with a `nonlocal`, or the call that the closures were made in, if
    it is not over. Most are over, as those of optax, and then nobody else has a
    reference to the cell. An empty cell tells what having it here adds to the count.
    """
    probe = types.CellType()
    cells = {id(cell): cell for fn in functions for cell in fn.__closure__ or ()}
    known = Counter(id(cell) for fn in functions for cell in fn.__closure__ or ())
    counts = {id(cell): sys.getrefcount(cell) for cell in (*cells.values(), probe)}
    rebound = {
        id(cell)
        for fn in functions
        for cell, name in zip(fn.__closure__ or (), fn.__code__.co_freevars)
        if name in _rebound_in(fn.__code__)
    }
    for identity, cell in cells.items():
        others = counts[identity] - known[identity] - counts[id(probe)]
        if others > 0 or identity in rebound:
            yield cell


@functools.lru_cache(4096)
def _rebound_in(code: types.CodeType) -> frozenset[str]:
    """The free variables that a function, or one inside it, gives other values."""
    inner = [_rebound_in(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    stores = ("STORE_DEREF", "DELETE_DEREF")
    own = {x.argval for x in dis.get_instructions(code) if x.opname in stores}
    return frozenset(own.union(*inner) & {*code.co_freevars})


def is_cached(held: Any) -> bool:
    """Whether what a class holds keeps what it computes as an attribute of objects."""
    return isinstance(held, functools.cached_property)


def names_of(kind: type, is_wanted: Callable[[Any], bool]) -> tuple[str, ...]:
    """The names under which a class and its bases hold what is wanted."""
    items = (item for base in kind.__mro__ for item in vars(base).items())
    return tuple(name for name, held in items if is_wanted(held))


def _compares_itself(kind: Any) -> bool:
    """Whether objects of a type say when they are equal, and can be hashed."""
    eq, how = kind.__eq__, kind.__hash__
    return eq is not object.__eq__ and how not in (None, object.__hash__)


@functools.lru_cache(1024)
def _slots(kind: type) -> tuple[str, ...]:
    """The names of the slots that a class and its bases have."""
    return names_of(kind, inspect.ismemberdescriptor)


@functools.lru_cache(1024)
def _is_transparent(kind: type) -> bool:
    """Whether all there is of an object of a class is in attributes and slots.

    An object of a class that is not written in Python takes more room than these do.
    """
    slots = [f"slot{n}" for n in range(len(_slots(kind)))]
    slots += ["__dict__"] if kind.__dictoffset__ else []
    slots += ["__weakref__"] if kind.__weakrefoffset__ else []
    like = type("Like", (), {"__slots__": slots})
    return bool(slots) and _sizes_of(kind) == _sizes_of(like)


_sizes_of = attrgetter("__basicsize__", "__itemsize__")


class Snapshot:
    """Values as they are now; see the module's text.

    Attributes:
        key: Equal for values that are the same.
        watch: What could change in them; false if nothing could.
    """

    __slots__ = ("_copies", "_fixed", "_problem", "key", "watch")

    def __init__(self, *values: Any):
        self.watch = Watch()
        self._fixed: dict[int, Any] = {}
        self.key = tuple(map(self._key_of, values))
        self._copies: Any = None
        self._problem = ""
        if self.watch:
            try:
                self._copies = copy.deepcopy(values, dict(self._fixed))
            except Exception as error:  # whatever the copying of an object raises
                self._problem = f" ({type(error).__name__}: {error})"

    def _key_of(self, value: Any) -> Any:
        work = _Description()
        try:
            key = work.key(value)
        except _TooLarge:
            self._fixed[id(value)] = value
            return Identity(value)
        if cells := tuple(_cells_to_watch(list(work.functions.values()))):
            work.watch.hold(_Parts(cells, _content_of))
        self.watch.add(work.watch)
        self._fixed |= work.fixed
        return key

    def as_it_was(self) -> tuple[Any, ...]:
        """Copies of the values as they were."""
        if not self._problem:
            found = copy.deepcopy(self._copies, dict(self._fixed))
            if Snapshot(*found).key == self.key:
                return found
        raise StructureError(
            "A static value was changed in place after a program was traced with it, "
            f"and cannot be copied{self._problem}: the program cannot be traced again. "
            "Replace the value instead of changing it, or let `copy.deepcopy` copy it."
        )


class Described:
    """Mixin of values that compare as they were when they were described."""

    snapshot: Snapshot

    @property
    def can_change(self) -> bool:
        """Whether any of the values could be changed in place."""
        return bool(self.snapshot.watch)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return type(other) is type(self) and self.snapshot.key == other.snapshot.key

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.snapshot.key)


class Statics(Described, tuple[Any, ...]):
    """Static values that compare as they were when they were described."""

    def __new__(cls, values: Iterable[Any]) -> "Statics":
        """Describes values."""
        self = super().__new__(cls, values)
        self.snapshot = Snapshot(*self)
        return self

    def as_described(self) -> tuple[Any, ...]:
        """The values as they were: themselves, or copies if they have changed."""
        return self if self.snapshot.watch.holds() else self.snapshot.as_it_was()

    def __reduce__(self) -> Any:
        return Statics, (tuple(self),)


def exact(values: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Static values and their kinds: a pair for which `==` is exact."""
    try:
        kinds = _kinds_of(values)
    except RecursionError:  # tuples in tuples in tuples
        kinds = None
    return (Statics(values), ()) if kinds is None else (values, kinds)


def _kinds_of(values: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What makes `==` of static values exact; None if they need a description.

    Equal atoms are the same value if they are of one type. So an atom has its type here
    (or None, if its type is one of `_PLAIN`), and a tuple has the kinds of its items.
    Numbers of one type may be equal and differ, as 0.0 and -0.0 do; a number that may
    be one of those has its text.
    """
    kinds: list[Any] = []
    for value in values:
        kind: Any = type(value)
        if kind in _PLAIN:
            kind = None
        elif kind is tuple:
            kind = _kinds_of(value)
            if kind is None:
                return None
        elif kind is float or kind is complex:
            if value != value:  # noqa: PLR0124 - nan, which is unequal to itself
                return None
            kind = kind if kind is float and value else repr(value)
        elif not is_atom(kind):
            return None
        kinds.append(kind)
    return tuple(kinds)


def is_exact(values: Iterable[Any]) -> bool:
    """Whether `==` alone is exact for static values."""
    return all(
        type(value) in _PLAIN or (type(value) is tuple and is_exact(value))
        for value in values
    )
