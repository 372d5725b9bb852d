# SPDX-License-Identifier: Apache-2.0
"""Pytree: an object whose attributes are a JAX tree.

Data attributes are its children, in sorted order; static ones are part of its
structure. Flattening must be quick, because every JAX call does it: an object keeps its
children and static part ready in a slot that JAX reads in C, and every write through
attributes drops it. An object that may change without such a write, because a static
value may change in place or because somebody holds `vars(obj)`, keeps them in another
slot, together with what to look at before they are used (`Watched`). Attributes that
appear behind `__setattr__` after construction (as `functools.cached_property` makes
them) are not part of the tree.

What the library keeps on an object is in slots, outside `vars(obj)`: see `Node`.
"""

import functools
import inspect
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter, is_, is_not
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import numpy as np
from jax.tree_util import register_pytree_with_keys

from treetap._core import display
from treetap._core.paths import is_container, open_container
from treetap._core.static_values import Statics, Watch, exact, is_cached, names_of
from treetap._core.trace_level import current_trace, is_foreign, refuse_foreign_object
from treetap._core.trees.attributes import (
    Node,
    check_statics,
    class_status,
    classify,
    has_data,
)
from treetap._core.trees.layout import Flat, Sealed, layout_of, structure_of
from treetap._core.trees.pickled_functions import by_name, found_by_name
from treetap._core.variables.change_marks import note_change
from treetap._core.variables.values import Marked
from treetap._core.variables.variable import Variable, none_if_empty

# The attributes of an object, without dropping what is cached.
attributes_of: Callable[[Node], dict[Any, Any]] = Node.__dict__["__dict__"].__get__
_set_attributes = Node.__dict__["__dict__"].__set__
set_flat = Node.__dict__["_pytree__flat"].__set__
# The cached children and structure; AttributeError when there are none.
cached_flat = Node.__dict__["_pytree__flat"].__get__
_drop_flat_slot = Node.__dict__["_pytree__flat"].__delete__
set_spec = Node.__dict__["_pytree__spec"].__set__
_set_watched = Node.__dict__["_pytree__watched"].__set__
_drop_watched_slot = Node.__dict__["_pytree__watched"].__delete__
_set_exposed = Node.__dict__["_pytree__exposed"].__set__
_set_place = Node.__dict__["_pytree__place"].__set__
replace_status = Node.__dict__["_pytree__status"].__set__
_set_trace = Node.__dict__["_pytree__trace"].__set__
_read_flat = attrgetter("_pytree__flat")


# Children and structure, and what must be looked at before they are used.
Watched = tuple[Flat, Watch]


# What an object keeps that may change unseen; None for all others.
watched_of: Callable[[Node], Watched | None]
watched_of = none_if_empty(Node.__dict__["_pytree__watched"].__get__)
_is_exposed = Node.__dict__["_pytree__exposed"].__get__


def drop_flat(node: Node) -> None:
    """Forgets the cached children of an object that has changed."""
    status = node._pytree__status
    if type(status) is Sealed:
        unseal(node, dict(status))


def unseal(node: Node, status: dict[Any, bool]) -> None:
    """Gives a changed object a status of its own, and forgets its children."""
    replace_status(node, status)
    set_spec(node, None)
    try:
        _drop_flat_slot(node)
    except AttributeError:
        if watched_of(node) is None:
            return
        _drop_watched_slot(node)
    note_change()


# Where an object is: the place of its parent, its key there (several, through plain
# containers), its own class, and whether it was rebuilt from another. A place never
# refers to an object, so a chain of places keeps nothing alive.
Place = list[Any]
_LEAVES = (Variable, jax.Array, np.ndarray, str, int, float, type(None))


def adopt(child: Any, key: Any, parent: Place) -> None:
    """Tells an object, or the objects in a container, where it is in its parent."""
    if isinstance(child, Node):
        place = child._pytree__place
        place[0], place[1] = parent, key
    elif not isinstance(child, _LEAVES) and is_container(child):
        container = open_container(child)
        keys = key if isinstance(key, tuple) else (key,)
        for name, item in zip(container.keys, container.children):
            adopt(item, (*keys, name), parent)


class PytreeMeta(ABCMeta):
    """Runs the full check when construction is over."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes an instance; what `__init__` left behind is classified and checked."""
        made = super().__call__(*args, **kwargs)
        if isinstance(made, Pytree) and made._pytree__is_pytree:
            made._settle()
        return made

    @property
    def __signature__(cls) -> inspect.Signature:
        """What a class is called with; `__call__` above would say that of all alike."""
        _, *parameters = inspect.signature(cls.__init__).parameters.values()
        return inspect.Signature(parameters)

    def __setattr__(cls, name: str, value: Any) -> None:
        if name == "__setattr__":  # a frozen dataclass: writes go past ours
            type.__setattr__(cls, "_pytree__cached", False)
        super().__setattr__(name, value)


class Pytree(Node, display.Shown, metaclass=PytreeMeta):
    """Base class of objects whose attributes are a JAX tree.

    Declare a class with `pytree=False` to keep it out of JAX's registry and free of
    checks; its subclasses inherit that.

    Examples:
        >>> import jax, treetap as tt
        >>> class Point(tt.Pytree):
        ...     def __init__(self, x, name):
        ...         self.x = tt.data(x)
        ...         self.name = name
        >>> jax.tree.map(lambda x: x + 1, Point(1, "p")).x
        2
    """

    __slots__ = ()

    _display_colored = True
    _pytree__cached: ClassVar[bool] = True
    _pytree__ordered: ClassVar[bool] = False
    _pytree__class_status: ClassVar[dict[str, bool]] = {}
    _pytree__descriptors: ClassVar[frozenset[str]] = frozenset()
    _pytree__derived: ClassVar[frozenset[str]] = frozenset()
    # What is said of attributes that are not always there.
    _pytree__told_of: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __init_subclass__(cls, *, pytree: bool | None = None, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if "__slots__" in vars(cls):
            raise TypeError(
                f"{cls.__name__}: `__slots__` cannot be used in a subclass of Pytree; "
                "its attributes must be in its `__dict__`."
            )
        pytree = cls._pytree__is_pytree if pytree is None else pytree
        inherited: dict[str, bool] = {}
        for base in reversed(cls.__mro__[1:]):
            inherited.update(vars(base).get("_pytree__class_status", {}))
        cls._pytree__is_pytree = pytree
        cls._pytree__class_status = class_status(cls, inherited)
        # Names that the class answers itself when they are assigned, as properties do;
        # and those under which an object keeps what a `cached_property` gave.
        answered = names_of(cls, inspect.isdatadescriptor)
        own = (name for name in answered if not name.startswith("_pytree__"))
        cls._pytree__descriptors = frozenset(own)
        cls._pytree__derived = frozenset(names_of(cls, is_cached))
        # A class that writes attributes its own way is read afresh every time.
        cls._pytree__cached = pytree and getattr(cls.__setattr__, "keeps_flat", False)
        if pytree:
            _register(cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Makes a bare object that belongs to the current trace."""
        self = bare(cls)
        self._pytree__place[3] = False
        replace_status(self, {})
        return self

    # Attributes.

    def __setattr__(self, name: str, value: Any) -> None:
        cls = type(self)
        if name in cls._pytree__descriptors:
            object.__setattr__(self, name, value)
            if name == "__class__":
                drop_flat(self)
            return
        if is_foreign(self._pytree__trace):
            raise refuse_foreign_object(cls.__name__)
        status = self._pytree__status
        if type(status) is Sealed:
            status = dict(status)
        if cls._pytree__is_pytree:
            known = status.get(name, cls._pytree__class_status.get(name))
            if known is False or not isinstance(value, Variable):
                value, known = classify(cls.__name__, name, value, known)
                if known:
                    adopt(value, name, self._pytree__place)
            else:
                known = True
            status[name] = known
        else:
            value = value.value if isinstance(value, Marked) else value
            adopt(value, name, self._pytree__place)
        object.__setattr__(self, name, value)
        # Last, so that no other thread can cache children from before the write.
        if self._pytree__status is not status:
            unseal(self, status)

    __setattr__.keeps_flat = True  # pyright: ignore[reportFunctionMemberAccess] - a mark

    def __delattr__(self, name: str) -> None:
        self._check_trace()
        object.__delattr__(self, name)
        status = self._pytree__status
        unseal(self, {key: flag for key, flag in status.items() if key != name})

    if not TYPE_CHECKING:  # a type checker is to tell unknown attributes

        def __getattr__(self, name: str) -> Any:
            if name == "_pytree__flat":
                return self._refresh()
            told = self._pytree__told_of.get(name, "")
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{told}"
            )

    @property
    def __dict__(self) -> dict[str, Any]:  # pyright: ignore[reportGeneralTypeIssues, reportIncompatibleVariableOverride] - the same content
        """The attributes. Who holds them may change them, so they are watched."""
        _set_exposed(self, True)
        drop_flat(self)
        return attributes_of(self)

    def _check_trace(self) -> None:
        if is_foreign(self._pytree__trace):
            raise refuse_foreign_object(type(self).__name__)

    def _settle(self) -> None:
        """Classifies attributes that came past `__setattr__`, and checks the rest."""
        cls = type(self)
        attributes = attributes_of(self)
        status = self._pytree__status
        if status.keys() != attributes.keys() - cls._pytree__derived:
            own, preset, status = status, cls._pytree__class_status, {}
            for name, value in attributes.items():
                if name in cls._pytree__derived:
                    continue
                known = own.get(name)
                if known is None:
                    held, known = classify(cls.__name__, name, value, preset.get(name))
                    attributes[name] = held
                    if known:
                        adopt(held, name, self._pytree__place)
                status[name] = known
            unseal(self, status)
        check_statics(self, attributes, status)

    def _replace_child(self, key: Any, value: Any) -> None:
        """Puts another value where a data attribute stands; the status stays."""
        attributes_of(self)[key] = value
        adopt(value, key, self._pytree__place)
        drop_flat(self)

    def _remove_child(self, key: Any) -> None:
        """Removes a data attribute, of a class that forbids deletion, too."""
        Pytree.__delattr__(self, key)

    # The tree.

    def _refresh(self) -> Flat:
        """Reads children and statics from the attributes, and keeps them."""
        watched = watched_of(self)
        if watched is not None and watched[1].holds():
            return watched[0]
        attributes = attributes_of(self)
        if not type(self)._pytree__is_pytree:  # it keeps no status
            found = {name: bool(has_data(held)) for name, held in attributes.items()}
            return layout_of(found).flat(attributes)
        before = list(attributes.values())
        status = self._pytree__status
        if status.keys() != attributes.keys():
            self._settle()
            status = self._pytree__status
        if watched is not None or _is_exposed(self):
            check_statics(self, attributes, status)
        layout = layout_of(status, type(self)._pytree__ordered)
        flat = layout.flat(attributes)
        if type(self)._pytree__cached:
            keep_flat(self, flat)
            # A write in another thread may have come between reading and keeping.
            after = list(attributes.values())
            if len(before) != len(after) or any(map(is_not, before, after)):
                drop_flat(self)
        return flat

    # Copies.

    def __getstate__(self) -> Any:
        held = {name: by_name(value) for name, value in attributes_of(self).items()}
        return held, dict(self._pytree__status)

    def __setstate__(self, state: Any) -> None:
        held, status = state
        attributes = {name: found_by_name(value) for name, value in held.items()}
        attributes_of(self).update(attributes)
        unseal(self, dict(status))
        for name, value in attributes.items():
            adopt(value, name, self._pytree__place)

    def __reduce__(self) -> Any:
        return bare, (type(self),), self.__getstate__()

    # Display.

    def _display_parts(self) -> display.Parts:
        held, status = attributes_of(self), self._pytree__status
        names = [name for name in held if name[0] != "_" or status.get(name)]
        items = [(name, held[name]) for name in names]
        return display.Parts(counts(self), items, is_object=True)


def bare(cls: type[Any], trace: Any = None) -> Any:
    """An object without attributes, past `__new__` and `__init__`.

    `trace` saves asking JAX for it each time.
    """
    self = object.__new__(cls)
    _set_trace(self, current_trace() if trace is None else trace)
    _set_place(self, [None, None, cls, True])
    _set_exposed(self, False)
    set_spec(self, None)
    return self


_bare = bare  # its name in pickles of earlier versions


def keep_flat(node: Any, flat: Flat) -> None:
    """Keeps the children and structure of an object until it changes."""
    _, (layout, statics, _) = flat
    replace_status(node, layout.status)
    may_change = type(statics) is Statics and statics.can_change
    is_exposed = _is_exposed(node)
    if not (may_change or is_exposed):
        set_flat(node, flat)
        return
    watch = Watch()
    if type(statics) is Statics:
        watch.add(statics.snapshot.watch)
    attributes = attributes_of(node)
    watch.hold(attributes, attributes.values())
    _set_watched(node, (flat, watch))


def fill(node: Any, structure: Any, children: Iterable[Any]) -> None:
    """Gives a bare object its attributes: the inverse of flattening.

    The children's places are the caller's to set; see `adopt_all`.
    """
    layout, statics, _ = structure
    if type(statics) is Statics and not statics.snapshot.watch.holds():
        structure = structure_of(layout, statics.as_described())
        statics = structure[1]
    children = tuple(children)
    values = children + statics if statics else children
    _set_attributes(node, dict(zip(layout.status, layout.arrange(values))))
    if node._pytree__cached:
        keep_flat(node, (children, structure))
    else:
        replace_status(node, dict(layout.status))


def adopt_all(node: Any, structure: Any, children: Iterable[Any]) -> None:
    """Tells the children of an object where they are."""
    place = node._pytree__place
    for key, child in zip(structure[0].keys, children):
        if isinstance(child, Node):
            own = child._pytree__place
            own[0], own[1] = place, key
        elif not isinstance(child, Variable):
            adopt(child, key, place)


def _flatten_with_keys(node: Any) -> Any:
    children, structure = flat_of(node)
    return tuple(zip(structure[0].entries, children)), structure


def flat_of(node: Any) -> Flat:
    """The children and structure of an object, cached or fresh."""
    try:
        return cached_flat(node)
    except AttributeError:
        return node._refresh()


def look_behind(node: Any) -> bool:
    """Whether an object was written behind `__setattr__`; it then keeps no children.

    `object.__setattr__` tells nobody. So who relies on what an object keeps of itself,
    and runs a program with it, looks here before.
    """
    try:
        children, (layout, statics, kinds) = cached_flat(node)
    except AttributeError:
        watched = watched_of(node)
        if watched is None or watched[1].holds():
            return False
    else:
        attributes, derived = attributes_of(node), type(node)._pytree__derived
        names = attributes.keys() - derived if derived else attributes.keys()
        if names == layout.status.keys():
            now = layout.statics_of(attributes)
            is_same = all(map(is_, now, statics)) or exact(now) == (statics, kinds)
            if is_same and all(map(is_, layout.children_of(attributes), children)):
                return False
    drop_flat(node)
    node._settle()
    return True


def opened(value: Any) -> tuple[Iterable[Any], Iterable[Any]] | None:
    """Keys and children of an object of ours or a container; None for a leaf."""
    if isinstance(value, Node):
        children, (layout, *_) = flat_of(value)
        return layout.keys, children
    if isinstance(value, Variable) or not is_container(value):
        return None
    container = open_container(value)
    return container.keys, container.children


def closed(
    cls: type[Any], structure: Any, children: Iterable[Any], trace: Any = None
) -> Any:
    """An object around children: the inverse of `opened`."""
    node = bare(cls, trace)
    children = tuple(children)
    fill(node, structure, children)
    adopt_all(node, structure, children)
    return node


def _register(cls: type[Pytree]) -> None:
    # JAX may read the slot itself unless a class answers for unset ones its own way.
    own_answer = getattr(cls, "__getattr__", None) is vars(Pytree)["__getattr__"]
    flatten = _read_flat if own_answer else flat_of
    unflatten = functools.partial(closed, cls)
    register_pytree_with_keys(cls, _flatten_with_keys, unflatten, flatten)


def variables_below(root: Any) -> Iterator[Variable[Any]]:
    """The Variables below a value, each once; shared objects and cycles are fine."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Variable | Node):
            if id(value) in seen:
                continue
            seen.add(id(value))
        if isinstance(value, Variable):
            yield value
        elif inside := opened(value):
            waiting.extend(reversed(tuple(inside[1])))


def by_kind(leaves: Iterable[Any]) -> dict[str, list[Any]]:
    """What Variables hold by the kind they are counted as, and other arrays."""
    found: dict[str, list[Any]] = {}
    for leaf in leaves:
        raw = leaf.get_raw_value() if isinstance(leaf, Variable) else leaf
        if display.has_arrays(raw):
            found.setdefault(kind_name(leaf), []).append(raw)
    return found


def kind_name(value: Any) -> str:
    """What the values of a Variable, or an array that none holds, are counted as."""
    if not isinstance(value, Variable):
        return "Array"
    return value._counted_as or type(value).__name__


def counts(node: Pytree) -> str:
    """Elements and bytes per kind of Variable below an object, each counted once."""
    held = by_kind(variables_below(node))
    if len(held) > 1:
        held["Total"] = [*held.values()]
    return ", ".join(f"{kind}: {display.size_of(x)}" for kind, x in held.items())


def check_pytree(pytree: Pytree) -> None:
    """Checks every attribute again: static ones must not have come to hold data.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> class Bag(tt.Module):
        ...     def __init__(self):
        ...         self.names = ["a"]
        >>> tt.check_pytree(Bag())
    """
    if not isinstance(pytree, Pytree):
        raise TypeError(
            f"check_pytree: expected a Pytree object, got {type(pytree).__name__}."
        )
    if type(pytree)._pytree__is_pytree:
        pytree._settle()
