# SPDX-License-Identifier: Apache-2.0
"""Random streams: a key and a counter, and named collections of them.

The n-th key of a stream (n = 0, 1, …) is `jax.random.fold_in(key, n)`; nothing else
enters into it. A counter only ever moves forward: copying a stream copies the counter.
"""

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp

from treetap._core.trees.filters import Filter, predicate_of
from treetap._core.trees.pytree import Pytree, attributes_of
from treetap._core.variables.kinds import RngCount, RngKey
from treetap._core.variables.operators import unboxed
from treetap._core.wording import near_to, typed
from treetap._modules.containers import ByName

C = TypeVar("C", bound=type)
Shape = int | tuple[int, ...]

SAMPLERS = """
    ball bernoulli beta binomial bits categorical cauchy chisquare choice dirichlet
    double_sided_maxwell exponential f gamma generalized_normal geometric gumbel laplace
    loggamma logistic lognormal maxwell multinomial multivariate_normal normal
    orthogonal pareto permutation poisson rademacher randint rayleigh t triangular
    truncated_normal uniform wald weibull_min
""".split()

INITIALIZERS = """
    delta_orthogonal glorot_normal glorot_uniform he_normal he_uniform kaiming_normal
    kaiming_uniform lecun_normal lecun_uniform variance_scaling xavier_normal
    xavier_uniform
""".split()


def _sampler(name: str) -> Callable[..., Any]:
    sample = getattr(jax.random, name)

    @functools.wraps(sample)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return sample(self(), *args, **kwargs)

    method.__doc__ = f"`jax.random.{name}` with the next key."
    return method


def _initializer(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        from jax.nn import initializers  # takes a while to import

        initialize = getattr(initializers, name)(*args, **kwargs)
        return lambda *shape, **options: initialize(self(), *shape, **options)

    method.__name__ = name
    method.__doc__ = (
        f"`jax.nn.initializers.{name}`; the function returned draws a key at each use."
    )
    return method


def _add_draws(cls: C) -> C:
    """Adds the sampling and initializer methods to a class that gives keys."""
    for name in SAMPLERS:
        setattr(cls, name, _sampler(name))
    for name in INITIALIZERS:
        setattr(cls, name, _initializer(name))
    return cls


def _warn_of_fork(name: str) -> None:
    text = f"{name}.fork(split=...) is deprecated; use {name}.split(...)."
    warnings.warn(text, DeprecationWarning, stacklevel=3)


def as_key(key: Any) -> jax.Array:
    """A typed key array from a seed, a key, or raw key data."""
    key = unboxed(key)
    if isinstance(key, bool) or not isinstance(key, int | jax.Array):
        raise ValueError(
            f"RngStream: expected a seed (int) or a key array, got {key!r} of type "
            f"{type(key).__name__}."
        )
    if isinstance(key, int):
        return jax.random.key(key)
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    if key.dtype == jnp.uint32 and key.ndim > 0:
        return jax.random.wrap_key_data(key)
    raise ValueError(
        f"RngStream: expected a key, got an array of {typed(key)}. "
        "Pass an int as the seed, or make a key with `jax.random.key`."
    )


@_add_draws
class RngStream(Pytree):
    """A key and a counter.

    Args:
        key: A seed, a key array of any shape, or raw key data.
        tag: The stream's name, kept as metadata on key and counter.
    """

    def __init__(self, key: Any, *, tag: str):
        key = as_key(key)
        self.tag = tag
        self.key = RngKey(key, tag=tag)
        self.count = RngCount(jnp.zeros(key.shape, jnp.uint32), tag=tag)

    if TYPE_CHECKING:  # the samplers and initializers that `_add_draws` adds

        def __getattr__(self, name: str) -> Callable[..., Any]: ...

    def __call__(self) -> jax.Array:
        """The next key; the counter advances."""
        count = self.count[...]
        key = jax.random.fold_in(self.key[...], count)
        self.count[...] = count + jnp.uint32(1)
        return key

    def fork(self, *, split: Shape | None = None) -> "RngStream":
        """A new stream whose key is the next key of this one.

        Args:
            split: Deprecated; use `RngStream.split`.
        """
        if split is not None:
            _warn_of_fork("RngStream")
            return self.split(split)
        return type(self)(self(), tag=self.tag)

    def split(self, k: Shape) -> "RngStream":
        """A new stream with an array of keys, split from the next key of this one."""
        return type(self)(jax.random.split(self(), k), tag=self.tag)

    def broadcast(self, k: Shape) -> "RngStream":
        """A new stream whose keys are all the next key of this one."""
        key = self()
        shape = (k,) if isinstance(k, int) else tuple(k)
        return type(self)(jnp.broadcast_to(key, shape + key.shape), tag=self.tag)

    def copy(self, tag: str | None = None) -> "RngStream":
        """A stream with the same key and the same count, in Variables of its own.

        Args:
            tag: Its tag; by default the same.
        """
        same = type(self)(self.key.get_value(), tag=self.tag if tag is None else tag)
        same.count.set_value(self.count.get_value())
        return same


@functools.cache
def _meant(name: str, known: tuple[str, ...]) -> str | None:
    """The stream a mistyped name was probably meant to be."""
    return next(iter(near_to(name, known, 1, 0.85)), None)


Rules = Shape | Mapping[Filter, Shape | None] | None


@_add_draws
class Rngs(ByName):
    """Named random streams; a name without a stream is served by `default`.

    Args:
        default: Seed, key or stream of the stream `default`, or a mapping of streams.
        **streams: Seeds, keys or streams by name.

    Examples:
        >>> import treetap as tt
        >>> rngs = tt.Rngs(0, params=1)
        >>> sorted(name for name, _ in rngs.items()), "dropout" in rngs
        (['default', 'params'], False)
        >>> tt.Rngs(0).normal((2,)).shape
        (2,)
    """

    def __init__(self, default: Any = None, **streams: Any):
        if isinstance(default, Mapping):
            streams = {**default, **streams}
        elif default is not None:
            streams = {**streams, "default": default}
        for name, value in streams.items():
            is_stream = isinstance(value, RngStream)
            stream = value.copy(name) if is_stream else RngStream(value, tag=name)
            setattr(self, name, stream)

    def _stream(self, name: str, error: type[Exception]) -> RngStream:
        """The stream of a name, or the default one; an error of this type if none."""
        streams = attributes_of(self)
        if name in streams:
            return streams[name]
        # Who asks for a name with an underscore is probing, not drawing.
        if name.startswith("_") or "default" not in streams:
            raise error(
                f"No RngStream named {name!r} in Rngs, which has {list(self)}. "
                f"Give it one, `Rngs({name}=seed)`, or a default, `Rngs(seed)`."
            )
        if meant := _meant(name, tuple(streams)):
            warnings.warn(
                f"Rngs: there is no stream {name!r}, so `default` serves it; "
                f"did you mean {meant!r}?",
                stacklevel=3,
            )
        return streams["default"]

    def __getattr__(self, name: str) -> RngStream:
        if name == "_pytree__flat":
            return super().__getattr__(name)  # pyright: ignore[reportAttributeAccessIssue] - hidden from checkers
        return self._stream(name, AttributeError)

    def __getitem__(self, name: str) -> RngStream:
        return self._stream(name, KeyError)

    def __call__(self) -> jax.Array:
        """The next key of the stream `default`."""
        return self.default()

    def items(self) -> Iterator[tuple[str, RngStream]]:
        """Names and streams."""
        return iter(list(attributes_of(self).items()))

    def _mapped(self, change: Callable[[Any, Any], RngStream], rules: Any) -> "Rngs":
        """New Rngs: streams that a rule takes are changed, the others copied."""
        rules = rules if isinstance(rules, Mapping) else {...: rules}
        checked = [(predicate_of(filter), rule) for filter, rule in rules.items()]
        streams: dict[str, RngStream] = {}
        for name, stream in self.items():
            rule = next((r for takes, r in checked if takes((), stream)), None)
            streams[name] = stream.copy() if rule is None else change(stream, rule)
        return type(self)(streams)

    def fork(self, *, split: Rules = None) -> "Rngs":
        """New Rngs with every stream forked.

        Args:
            split: Deprecated; use `Rngs.split`.
        """
        if split is not None:
            _warn_of_fork("Rngs")
            return self.split(split)
        return self._mapped(lambda stream, _: stream.fork(), {...: True})

    def split(self, k: Rules = None) -> "Rngs":
        """New Rngs with arrays of keys.

        Args:
            k: A number or shape for every stream, or a mapping from filter to one; a
                stream that no filter takes, or whose rule is None, is copied with its
                counter.
        """
        return self._mapped(RngStream.split, k)

    def broadcast(self, k: Rules = None) -> "Rngs":
        """New Rngs with keys repeated; rules as for `split`."""
        return self._mapped(RngStream.broadcast, k)
