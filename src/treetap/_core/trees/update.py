# SPDX-License-Identifier: Apache-2.0
"""update, pop and their kin: changing an object in place, all of it or not at all.

Every function here plans first and writes afterwards. What does not fit is found while
nothing has changed yet, and the writes themselves cannot fail.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from treetap._core.errors import AliasError, MetadataError, StructureError
from treetap._core.paths import (
    Key,
    Path,
    copy_containers,
    is_container,
    show_path,
    sorted_keys,
)
from treetap._core.trace_level import current_trace, refuse_foreign_variable
from treetap._core.trees.attributes import Node, has_data
from treetap._core.trees.build import rebuilt
from treetap._core.trees.filters import All, Filter, grouped
from treetap._core.trees.pytree import Pytree, attributes_of, flat_of, opened
from treetap._core.trees.sharing import find_duplicates, places
from treetap._core.trees.state import (
    FlatState,
    State,
    from_items,
    is_branch,
    nested,
    one_or_all,
)
from treetap._core.variables.metadata import (
    MISSING,
    REQUIRED,
    checked_names,
    required_of,
)
from treetap._core.variables.values import Marked, is_ref, without_ref
from treetap._core.variables.variable import (
    Variable,
    write_boxes,
)
from treetap._core.wording import first_few


class _Plan:
    """The writes of one update, gathered before any is made.

    Args:
        fits: Whether values must fit: names must be there, shapes and dtypes agree.
    """

    def __init__(self, fits: bool) -> None:
        self.fits = fits
        self.trace = current_trace()
        self.variables: list[Variable[Any]] = []
        self.values: list[Any] = []
        self.others: list[Callable[[], None]] = []
        self.problems: list[str] = []

    def any(self, value: Any, new: Any, path: Path) -> None:
        """Plans the writes that bring `value` to what `new` says."""
        if isinstance(value, Variable):
            if problem := self.variable(value, new):
                self.problems.append(show_path(path) + problem)
            return
        if not is_branch(new):
            found = f"a {type(new).__name__} where a {type(value).__name__} stands"
            self.problems.append(f"{show_path(path)}: {found}")
            return
        known = attributes_of(value) if isinstance(value, Node) else value
        if type(known) is not dict:
            known = dict(zip(*(opened(value) or ())))
        for key, inner in new.items():
            child = known.get(key, MISSING)
            if isinstance(child, Variable):
                if problem := self.variable(child, inner):
                    self.problems.append(show_path((*path, key)) + problem)
            elif isinstance(child, Node):
                self.any(child, inner, (*path, key))
            else:
                self.plain(value, known, key, inner, (*path, key))

    def plain(self, owner: Any, known: Any, key: Key, new: Any, path: Path) -> None:
        """Plans for what is neither a Variable nor an object of ours."""
        if not self.fits and self.may_set(owner, known, key, new):
            owner._check_trace()
            self.others.append(lambda: setattr(owner, key, new))
        elif key not in known:
            has = f"{type(owner).__name__} has {sorted_keys(known)}"
            self.problems.append(f"unexpected {show_path(path)}: {has}")
        elif isinstance(owner, Node) and key not in flat_of(owner)[1][0].keys:
            self.problems.append(f"{show_path(path)} is static")
        elif is_container(known[key]):
            self.any(known[key], new, path)
        else:
            self.leaf(owner, key, known[key], new, path)

    def may_set(self, owner: Any, known: Any, key: Key, new: Any) -> bool:
        """Whether to set an attribute: a new one to a Variable, a static one."""
        if not isinstance(owner, Pytree) or not isinstance(key, str):
            return False
        if key not in known:
            return isinstance(new, Variable)
        is_static = key not in flat_of(owner)[1][0].keys
        return is_static and not is_branch(new) and not has_data(new)

    def variable(self, variable: Variable[Any], new: Any) -> str:
        """Plans a write into a Variable, from a Variable or a bare value.

        Returns:
            What is wrong, to be said after the Variable's path; empty if nothing is.
        """
        own = variable._metadata
        # A Ref may be written from anywhere: that is what it is for.
        if variable._trace is not self.trace and not own["ref"]:
            raise refuse_foreign_variable(type(variable).__name__)
        if isinstance(new, Variable):
            if new._metadata is not own:
                metadata = {**new._metadata, **required_of(own)}
                self.others.append(lambda: variable._replace_metadata(metadata))
            new = new._box[0]
        raw = variable._box[0]
        if raw is new:
            return ""
        if not same_aval(raw, new):
            new = without_ref(new)
            if self.fits and (difference := misfit(raw, new)):
                return f": {difference}"
            new = _fitted(raw, copy_containers(new))
        if own["ref"]:
            self.others.append(lambda: variable.set_value(new))
        else:
            self.variables.append(variable)
            self.values.append(new)
        return ""

    def leaf(self, owner: Any, key: Key, old: Any, new: Any, path: Path) -> None:
        """Plans the replacement of a leaf that is not a Variable."""
        if new is old:
            return
        is_node = isinstance(owner, Pytree)
        difference = misfit(old, new) if self.fits else ""
        if isinstance(new, Variable):
            difference = f"a {type(new).__name__} where a plain value stands"
        elif not difference and not (is_node or isinstance(owner, list | dict)):
            difference = f"a {type(owner).__name__} cannot be changed"
        if difference:
            self.problems.append(f"{show_path(path)}: {difference}")
            return
        if is_node:
            owner._check_trace()
        new = _fitted(old, new)
        put = owner._replace_child if is_node else owner.__setitem__
        self.others.append(lambda: put(key, new))

    def write(self) -> None:
        """Makes the planned writes."""
        write_boxes(self.variables, zip(self.values))
        for change in self.others:
            change()


def same_aval(old: Any, new: Any) -> bool:
    """Whether two values are arrays of the same type: the quick answer to fitting."""
    try:
        return type(old) is type(new) and old.aval == new.aval
    except AttributeError:
        return False


def misfit(old: Any, new: Any) -> str:
    """How `new` cannot stand for `old`; empty when it fits."""
    if isinstance(new, Marked):
        return f"{new!r} where a value belongs"
    if not (hasattr(old, "shape") and hasattr(old, "dtype")):
        return ""  # containers and numbers may change
    is_number = isinstance(new, bool | int | float | complex)
    if not is_number and not (hasattr(new, "shape") and hasattr(new, "dtype")):
        return f"a {type(new).__name__} where an array stands"
    if np.shape(new) != old.shape:
        return f"shape {np.shape(new)}, expected {old.shape}"
    dtype = jnp.result_type(old.dtype, new) if is_number else new.dtype
    if dtype != old.dtype:
        return f"dtype {dtype}, expected {old.dtype}"
    return ""


def _fitted(old: Any, new: Any) -> Any:
    """A value that fits, as an array where the old one is an array."""
    is_number = isinstance(new, bool | int | float | complex)
    return jnp.asarray(new, old.dtype) if is_number and hasattr(old, "dtype") else new


def update(node: Any, state: Any, /, *states: Any) -> None:
    """Writes a State into an object, in place.

    The State may be partial. A name the object does not have, or an array of another
    shape or dtype is an error, and then nothing is changed. (To change a shape on
    purpose, use `variable.set_value`.) Variables keep their kind.

    Args:
        node: The object to change.
        state: A State, a FlatState or nested dicts; Variables give value and metadata,
            bare values give the value.
        *states: More of the same.

    Examples:
        >>> import treetap as tt
        >>> model = {"w": tt.Param(1.0)}
        >>> tt.update(model, {"w": 2.0})
        >>> model["w"][...]
        2.0
    """
    write_states(node, (state, *states), fits=True)


def write_states(node: Any, states: tuple[Any, ...], fits: bool) -> None:
    """Writes States into an object, in place; see `update`.

    Args:
        node: The object.
        states: The States.
        fits: Whether they must fit. If not, values may have another shape or dtype, a
            Variable may be new, and a static attribute may be set.
    """
    if opened(node) is None and not isinstance(node, Variable):
        raise TypeError(
            f"update: a {type(node).__name__} cannot be changed in place. Pass a "
            "Module, a Variable, or a container of them."
        )
    plan = _Plan(fits)
    for given in states:
        new = from_items(given) if isinstance(given, FlatState) else given
        plan.any(node, new.raw_mapping if isinstance(new, State) else new, ())
    if plan.problems:
        shown = first_few(plan.problems, 12, before="  - ", end="\n")
        raise StructureError(
            "update: the state does not fit the object; nothing was changed.\n"
            f"{shown}\nTo change shapes or types, set the value of each Variable "
            "(`variable.set_value(x)`), or map over the object itself: "
            "`jax.tree.map(lambda x: x.astype(...), model)`."
        )
    plan.write()


def pop(node: Any, *filters: Filter) -> Any:
    """Removes the values that filters take, and returns them as States.

    Every reference to a removed Variable goes. One filter gives a State, several give
    a tuple.

    Examples:
        >>> import treetap as tt
        >>> model = {"w": tt.Param(1.0), "seen": tt.Intermediate(2.0)}
        >>> tt.pop(model, tt.Intermediate).seen[...], list(model)
        (2.0, ['w'])
    """
    if not filters:
        raise TypeError("pop: expected at least one filter.")
    if opened(node) is None:
        raise TypeError(f"pop: cannot take anything out of a {type(node).__name__}.")
    held = dict(places(node))
    owned = [(path, value) for path, value in held.items() if opened(value) is None]
    groups = grouped(owned, filters)
    states: list[State] = []
    taken: set[Any] = set()
    for group in groups:
        first: dict[Any, tuple[Path, Any]] = {}
        for path, value in group:
            first.setdefault(_identity(path, value), (path, value))
        taken |= first.keys()
        states.append(State(nested(first.values())))
    _remove([(held[p[:-1]], p) for p, value in owned if _identity(p, value) in taken])
    return one_or_all(states)


def _identity(path: Path, value: Any) -> Any:
    """What a value goes by: a plain one has no identity, and goes by its path."""
    has_identity = isinstance(value, Variable) or is_ref(value)
    return id(value) if has_identity else path


def _remove(removals: list[tuple[Any, Path]]) -> None:
    """Removes what stands at paths from its owners, all or none."""
    for owner, path in removals:
        if not isinstance(owner, Pytree | dict):
            raise StructureError(
                f"pop: {show_path(path)} stands in a {type(owner).__name__}, which has "
                "to keep its length. Use `treetap.List`, or a dict."
            )
        if isinstance(owner, Pytree):
            owner._check_trace()
    for owner, path in reversed(removals):  # from the end: positions stay valid
        is_node = isinstance(owner, Pytree)
        remove = owner._remove_child if is_node else owner.__delitem__
        remove(path[-1])


def set_metadata(node: Any, /, only: Filter = Variable, **metadata: Any) -> None:
    """Sets metadata on every Variable below `node` that a filter takes, in place.

    Examples:
        >>> import treetap as tt
        >>> model = {"w": tt.Param(1.0)}
        >>> tt.set_metadata(model, tt.Param, group="decay")
        >>> model["w"].group
        'decay'
    """
    if fixed := [name for name in REQUIRED if name in metadata]:
        raise MetadataError(
            f"set_metadata: {', '.join(fixed)} are fixed when a Variable is made. "
            "Use `with_vars` for a copy with other ones."
        )
    wanted = All(Variable, only)
    chosen = {id(value): value for path, value in places(node) if wanted(path, value)}
    for variable in chosen.values():
        checked_names(type(variable), metadata)
        variable._check_trace()
    for variable in chosen.values():
        variable.set_metadata(**metadata)


def with_vars(
    node: Any,
    /,
    *,
    hijax: bool | None = None,
    ref: bool | None = None,
    mutable: bool | None = None,
    only: Filter = ...,
    allow_duplicates: bool = False,
) -> Any:
    """A copy of `node` in which chosen Variables hold their value in a Ref, or do not.

    Variables that are so already are shared with the original.

    Args:
        node: Any tree of Modules and Variables.
        hijax: Only False is supported.
        ref: What the Variables are to be.
        mutable: Not supported; Variables are always mutable.
        only: Which Variables.
        allow_duplicates: Keep shared Variables shared instead of refusing them.
    """
    if hijax or mutable is not None:
        what = "hijax" if hijax else "mutable"
        raise MetadataError(
            f"with_vars: `{what}` is not supported. Variables are plain mutable boxes; "
            "`ref=True` makes plain `jax.jit` propagate their writes."
        )
    wanted = All(Variable, only)
    chosen = {path: value for path, value in places(node) if wanted(path, value)}
    twice = () if allow_duplicates else find_duplicates(node, only=wanted)
    for first, second, *_ in twice:
        paths = show_path(first), show_path(second)
        kind = type(chosen[first]).__name__
        text = (
            f"with_vars: Found duplicate at path {paths[1]}: the same {kind} is at "
            f"{paths[0]}. Say `allow_duplicates=True` to keep it shared."
        )
        raise AliasError(text, "with_vars", kind, paths)
    identities = set(map(id, chosen.values()))

    def convert(variable: Variable[Any]) -> Variable[Any]:
        changes = ref is not None and variable._metadata["ref"] != ref
        changes &= id(variable) in identities
        return variable.copy(ref=ref) if changes else variable

    return rebuilt(node, True, "with_vars", variable=convert)
