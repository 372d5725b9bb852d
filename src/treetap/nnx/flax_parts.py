# SPDX-License-Identifier: Apache-2.0
"""The small parts of flax, besides nnx, that NNX programs use.

Dataclasses that are pytrees (`flax.struct`), dicts that cannot be changed
(`flax.core`), dicts flattened to paths (`flax.traverse_util`) and a TrainState. They
are here for `as_flax` alone, which offers them under flax's names while it stands
in; nothing else in the library uses them.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast, dataclass_transform

import jax
from jax.tree_util import DictKey

from treetap.nnx.traversals import empty_node, flatten_mapping, unflatten_mapping

T = TypeVar("T")


def field(
    pytree_node: bool = True,
    *,
    metadata: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """A dataclass field; with `pytree_node=False` it is static."""
    told = {**(metadata or {}), "pytree_node": pytree_node}
    return dataclasses.field(metadata=told, **kwargs)


def replaced(self: T, **updates: Any) -> T:
    """A copy with other values in the fields named."""
    return dataclasses.replace(cast(Any, self), **updates)


@dataclass_transform(field_specifiers=(field,))
def dataclass(cls: Any = None, **kwargs: Any) -> Any:
    """Makes a class a frozen dataclass and a pytree, with a method `replace`."""
    if cls is None:
        return lambda decorated: dataclass(decorated, **kwargs)
    if "_is_flax_dataclass" in vars(cls):
        return cls
    made = dataclasses.dataclass(frozen=True, **kwargs)(cls)
    given = [item for item in dataclasses.fields(made) if item.init]
    nodes = [item.name for item in given if item.metadata.get("pytree_node", True)]
    static = [item.name for item in given if item.name not in nodes]
    made._is_flax_dataclass = True
    made.replace = replaced
    return jax.tree_util.register_dataclass(made, nodes, static)


@dataclass_transform(field_specifiers=(field,))
class PyTreeNode:
    """A base whose subclasses are dataclasses and pytrees, as by `dataclass`."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__()
        dataclass(cls, **kwargs)


class TrainState(PyTreeNode):
    """A step count, parameters, and the state of an optax transformation."""

    step: Any
    apply_fn: Any = field(pytree_node=False)
    params: Any
    tx: Any = field(pytree_node=False)
    opt_state: Any

    @classmethod
    def create(cls, *, apply_fn: Any, params: Any, tx: Any, **kwargs: Any) -> Any:
        """A state at step 0."""
        make = cast(Callable[..., Any], cls)
        given = {"apply_fn": apply_fn, "params": params, "tx": tx, **kwargs}
        return make(step=0, opt_state=tx.init(params), **given)

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> Any:
        """The state one step later."""
        import optax

        updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        params = optax.apply_updates(self.params, updates)
        return replaced(
            self, step=self.step + 1, params=params, opt_state=opt_state, **kwargs
        )


# Functions of `flax.core`; a FrozenDict has them as methods, too.


def unfreeze(x: Any) -> Any:
    """A FrozenDict, or dicts with some inside, as plain dicts."""
    if not isinstance(x, FrozenDict | dict):
        return x
    held = x._held if isinstance(x, FrozenDict) else x
    return {key: unfreeze(value) for key, value in held.items()}


def copy(x: Any, add_or_replace: Mapping[Any, Any] | None = None) -> Any:
    """A dict or FrozenDict with more entries; of the same type."""
    return type(x)({**x, **(add_or_replace or {})})


def pop(x: Any, key: Any) -> tuple[Any, Any]:
    """What is left of a dict or FrozenDict without `key`, and its value."""
    return type(x)({name: value for name, value in x.items() if name != key}), x[key]


@jax.tree_util.register_pytree_with_keys_class
class FrozenDict(Mapping[Any, Any]):
    """A dict that cannot be changed, nor can those inside it."""

    __slots__ = ("_held",)

    def __init__(self, *args: Any, **kwargs: Any):
        self._held = {key: unfreeze(x) for key, x in dict(*args, **kwargs).items()}

    def __getitem__(self, key: Any) -> Any:
        value = self._held[key]
        return FrozenDict(value) if isinstance(value, dict) else value

    def __setitem__(self, key: Any, value: Any) -> None:
        raise ValueError(
            f"FrozenDict: {key!r} cannot be set. Make a changed one with "
            f"`.copy({{...}})`, or a dict with `.unfreeze()`."
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __hash__(self) -> int:
        return hash(frozenset(self.items()))

    def __repr__(self) -> str:
        return f"FrozenDict({self._held!r})"

    copy, pop, unfreeze = copy, pop, unfreeze

    def tree_flatten_with_keys(self) -> tuple[Any, tuple[Any, ...]]:
        """For JAX: the values in order of their keys, and the keys."""
        keys = tuple(sorted(self._held))
        return tuple((DictKey(key), self._held[key]) for key in keys), keys

    @classmethod
    def tree_unflatten(cls, keys: tuple[Any, ...], values: Any) -> "FrozenDict":
        """For JAX: the inverse."""
        made = cls.__new__(cls)
        made._held = dict(zip(keys, values, strict=True))  # whatever JAX puts there
        return made


def freeze(xs: Mapping[Any, Any]) -> FrozenDict:
    """Nested dicts as a FrozenDict."""
    return FrozenDict(xs)


def flatten_dict(
    xs: Mapping[Any, Any],
    keep_empty_nodes: bool = False,
    is_leaf: Callable[..., bool] | None = None,
    sep: str | None = None,
) -> dict[Any, Any]:
    """As `nnx.traversals.flatten_mapping`."""
    return flatten_mapping(
        xs, keep_empty_nodes=keep_empty_nodes, is_leaf=is_leaf, sep=sep
    )


def unflatten_dict(xs: Mapping[Any, Any], sep: str | None = None) -> dict[Any, Any]:
    """As `nnx.traversals.unflatten_mapping`."""
    return unflatten_mapping(xs, sep=sep)


def path_aware_map(
    f: Callable[..., Any], nested_dict: Mapping[Any, Any]
) -> dict[Any, Any]:
    """Nested dicts with `f(path, value)` in place of every value."""
    flat = flatten_mapping(nested_dict, keep_empty_nodes=True)
    mapped = {
        path: value if value is empty_node else f(path, value)
        for path, value in flat.items()
    }
    return unflatten_mapping(mapped)
