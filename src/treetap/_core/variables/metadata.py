# SPDX-License-Identifier: Apache-2.0
"""Metadata: named facts that travel with a Variable.

Three of them every Variable has (`REQUIRED`); they are fixed when it is made. A
Variable without further metadata shares the one mapping `PLAIN`.

They are part of the structure that JAX compares. So metadata for which `==` of dicts is
not exact, or that may change in place, are `ExactMetadata`.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from treetap._core.errors import MetadataError
from treetap._core.static_values import Described, Snapshot, is_exact

A = TypeVar("A")

REQUIRED = ("hijax", "ref", "eager_sharding")
_RENAMED = {"sharding": "out_sharding", "sharding_names": "out_sharding"}
_HOOKS = {
    "on_get_value": "override `get_value` in a kind of your own",
    "on_set_value": "override `set_value` in a kind of your own",
    "on_create_value": "override `create_value` in a kind of your own",
    "on_add_axis": "change `out_sharding` with `transform_metadata`",
    "on_remove_axis": "change `out_sharding` with `transform_metadata`",
}
PLAIN: dict[str, Any] = {"hijax": False, "ref": False, "eager_sharding": True}


class ExactMetadata(Described, dict[str, Any]):
    """Metadata that compare as they were when they were described."""

    def __init__(self, metadata: Mapping[str, Any]):
        super().__init__(metadata)
        self.snapshot = Snapshot(*sorted(metadata.items()))

    def current(self) -> "ExactMetadata":
        """The same metadata as they are now."""
        return self if self.snapshot.watch.holds() else ExactMetadata(self)

    def as_described(self) -> "ExactMetadata":
        """The metadata as they were described: copies, if they have changed."""
        is_same = self.snapshot.watch.holds()
        return self if is_same else ExactMetadata(dict(self.snapshot.as_it_was()))

    def __reduce__(self) -> Any:
        return ExactMetadata, ({**self},)


def exact_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """Metadata in a form for which `==` is exact: mostly themselves, or `PLAIN`."""
    if type(metadata) is ExactMetadata:
        return metadata
    if metadata is PLAIN or metadata == PLAIN:
        return PLAIN
    is_plain = is_exact(x for name, x in metadata.items() if name not in REQUIRED)
    return metadata if is_plain else ExactMetadata(metadata)


class _Missing:
    """The default of arguments for which None is a value."""

    def __repr__(self) -> str:
        return "<missing>"


MISSING: Any = _Missing()


class VariableMetadata(Generic[A]):
    """What an initializer made by `with_metadata` returns: a value and its metadata."""

    __slots__ = ("metadata", "raw_value")

    def __init__(self, raw_value: A, metadata: Mapping[str, Any]):
        self.raw_value = raw_value
        self.metadata = dict(metadata)


def refuse_hook(kind: str, name: str) -> None:
    """Refuses a function that NNX would call when a Variable is used."""
    if name in _HOOKS:
        raise MetadataError(
            f"{kind}: the hook {name!r} would never be called: hooks are not "
            f"supported. Instead, {_HOOKS[name]}."
        )


def checked_names(
    kind: type, metadata: Mapping[str, Any], stacklevel: int = 3
) -> dict[str, Any]:
    """Metadata under their present names; one that could never be read is refused.

    A kind may define an attribute called like metadata of its own: its author decides
    what is read there.
    """
    checked: dict[str, Any] = {}
    (*_, variable, _mixin) = (c for c in kind.__mro__ if issubclass(c, MetadataMethods))
    for name, value in metadata.items():
        refuse_hook(kind.__name__, name)
        if name in _RENAMED:
            old, name = name, _RENAMED[name]  # noqa: PLW2901 - the new name stands for the old one
            text = f"the metadata name {old!r} is deprecated; use {name!r}."
            warnings.warn(f"{kind.__name__}: {text}", DeprecationWarning, stacklevel)
        if name not in PLAIN and hasattr(variable, name):
            raise MetadataError(
                f"{kind.__name__}: {name!r} cannot be the name of metadata: it is an "
                "attribute of every Variable. Choose another name."
            )
        checked[name] = value
    return checked


def special_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata that a plain Variable does not have, or has otherwise."""
    plain = PLAIN.items()
    return {name: fact for name, fact in metadata.items() if (name, fact) not in plain}


def required_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the metadata that is fixed."""
    return {name: metadata[name] for name in REQUIRED}


class MetadataMethods:
    """Mixin: reading and changing the metadata of a Variable."""

    __slots__ = ()

    _metadata: dict[str, Any]  # never edited: it may be shared

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for name in vars(cls):
            refuse_hook(cls.__name__, name)

    if TYPE_CHECKING:

        def _replace_metadata(self, metadata: dict[str, Any]) -> None: ...

    def get_metadata(
        self,
        name: str | None = None,
        default: Any = MISSING,
        *,
        exclude_required: bool | None = None,
    ) -> Any:
        """Returns one metadata value, or a copy of all.

        Args:
            name: Which one; all of them without it.
            default: What to return when there is none of that name.
            exclude_required: Leave out `hijax`, `ref` and `eager_sharding`.
        """
        if name is None:
            if default is not MISSING:
                raise TypeError("get_metadata: `default` needs a `name`.")
            left_out = REQUIRED if exclude_required else ()
            return {k: v for k, v in self._metadata.items() if k not in left_out}
        if exclude_required is not None:
            raise TypeError("get_metadata: `exclude_required` goes without a `name`.")
        if name not in self._metadata and default is MISSING:
            raise KeyError(
                f"{type(self).__name__} has no metadata {name!r}; "
                f"it has {sorted(self._metadata)}."
            )
        return self._metadata.get(name, default)

    def set_metadata(self, *args: Any, **metadata: Any) -> None:
        """Sets metadata: `set_metadata({...})` all, `(name, value)` or keywords some.

        Examples:
            >>> import treetap as tt
            >>> v = tt.Param(1.0, tag="a")
            >>> v.set_metadata(tag="b")
            >>> v.tag
            'b'
        """
        if bool(args) == bool(metadata) or len(args) > 2:
            raise TypeError(
                "set_metadata: give one mapping, a name and a value, or keywords."
            )
        if len(args) == 1 and not isinstance(args[0], Mapping):
            raise TypeError(
                f"set_metadata: expected a mapping, got {type(args[0]).__name__}."
            )
        if len(args) == 1:
            given, kept = dict(args[0]), required_of(self._metadata)
        else:
            given, kept = dict([args]) if args else metadata, self._metadata
        for name in REQUIRED:
            if name in given and given[name] != self._metadata[name]:
                raise MetadataError(
                    f"set_metadata: {name!r} of a {type(self).__name__} is fixed when "
                    "it is made. Make a new one with `v.copy()` or `with_vars`."
                )
        self._replace_metadata({**kept, **checked_names(type(self), given)})

    def has_metadata(self, name: str) -> bool:
        """Whether there is metadata of that name."""
        return name in self._metadata

    def del_metadata(self, name: str) -> None:
        """Removes metadata by name."""
        if name in REQUIRED:
            raise MetadataError(
                f"del_metadata: {name!r} of a {type(self).__name__} is required."
            )
        if name not in self._metadata:
            raise KeyError(f"{type(self).__name__} has no metadata {name!r}.")
        self._replace_metadata({k: v for k, v in self._metadata.items() if k != name})


def with_metadata(
    initializer: Callable[..., Any], **metadata: Any
) -> Callable[..., VariableMetadata[Any]]:
    """Wraps an initializer so that the Variable made from it gets `metadata`.

    Examples:
        >>> import jax, treetap as tt
        >>> init = tt.with_metadata(jax.nn.initializers.zeros, role="bias")
        >>> tt.Param(init(jax.random.key(0), (2,))).role
        'bias'
    """

    def initialize(*args: Any, **kwargs: Any) -> VariableMetadata[Any]:
        made = initializer(*args, **kwargs)
        if isinstance(made, VariableMetadata):
            return VariableMetadata(made.raw_value, {**metadata, **made.metadata})
        return VariableMetadata(made, metadata)

    return initialize
