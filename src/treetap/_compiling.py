# SPDX-License-Identifier: Apache-2.0
"""jit and its stages; eval_shape and make_jaxpr, which only look.

Statics and the description of the arguments are one static argument of one `jax.jit`;
the values travel in two flat lists, those to be donated and the rest.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from treetap._changes import Policy
from treetap._errors import MetadataError
from treetap._graphs import GraphDef
from treetap._lift import (
    Inputs,
    Lanes,
    Updates,
    inputs_of,
    run,
    transform,
    unpack_output,
)
from treetap._metadata import MISSING
from treetap._placement import resolve_sharding
from treetap._prefixes import check_prefix, spread
from treetap._pytrees import variables_below

P = ParamSpec("P")
R = TypeVar("R")


def _as_tuple(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, tuple | list | set) else (given,)


class Positions:
    """Arguments chosen by number or by name, however they are passed."""

    def __init__(self, fn: Any, numbers: Any, names: Any):
        self.numbers = set(_as_tuple(numbers))
        self.names = set(_as_tuple(names))
        try:
            parameters = list(inspect.signature(fn).parameters.values())
        except (TypeError, ValueError):
            parameters = []  # a builtin without a signature
        positional = [
            p.name
            for p in parameters
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        self.numbers |= {i for i, name in enumerate(positional) if name in self.names}
        takes_more = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        for number in list(self.numbers):
            if 0 <= number < len(positional):
                self.names.add(positional[number])
            elif parameters and not takes_more and not -len(positional) <= number < 0:
                raise ValueError(
                    f"Argument number {number} was named, but the function has "
                    f"{len(positional)} positional arguments."
                )

    def __bool__(self) -> bool:
        return bool(self.numbers or self.names)

    def has(self, number: int, count: int) -> bool:
        """Whether the positional argument with this number is one of them."""
        return number in self.numbers or number - count in self.numbers


class _Key:
    """What a compiled program depends on beside the values' types; hashable."""

    __slots__ = ("definition", "donated", "lanes", "statics")

    def __init__(self, definition: GraphDef, statics: Any, donated: Any, lanes: Any):
        self.definition = definition
        self.statics = statics
        self.donated = donated
        self.lanes = lanes

    def _parts(self) -> Any:
        return self.definition, self.statics, self.donated, self.lanes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash((self.definition, self.statics, self.donated))


class _Hole:
    """Stands in the arguments where a static one was taken out."""


jax.tree_util.register_static(_Hole)
HOLE = _Hole()


def take_statics(statics: Positions, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """The arguments with static ones replaced by a hole, and those, hashable."""
    if not statics:
        return args, kwargs, ()
    taken: list[tuple[Any, Any]] = []
    rest = list(args)
    for number, value in enumerate(args):
        if statics.has(number, len(args)):
            taken.append((number, value))
            rest[number] = HOLE
    named = dict(kwargs)
    for name in kwargs:
        if name in statics.names:
            taken.append((name, named[name]))
            named[name] = HOLE
    for where, value in taken:
        try:
            hash(value)
        except TypeError:
            raise ValueError(
                f"The static argument {where!r} is a {type(value).__name__}, which "
                "cannot be hashed. Pass something hashable, such as a tuple."
            ) from None
    return tuple(rest), named, tuple(taken)


def put_statics(fn: Callable[..., Any], statics: Any) -> Callable[..., Any]:
    """`fn` with static arguments put back into their places."""
    if not statics:
        return fn

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        places = list(args)
        for where, value in statics:
            if isinstance(where, int):
                places[where] = value
            else:
                kwargs[where] = value
        return fn(*places, **kwargs)

    return call


class Jit(Generic[P, R]):
    """A function compiled by `treetap.jit`."""

    def __init__(self, fn: Callable[P, R], graph: bool, options: dict[str, Any]):
        functools.update_wrapper(self, fn)
        self.fun = fn
        self.graph = graph
        self._name = options.pop("name", "jit")
        self.in_shardings = options.pop("in_shardings", None)
        self.out_shardings = options.pop("out_shardings", None)
        self._statics = Positions(
            fn, options.pop("static_argnums"), options.pop("static_argnames")
        )
        self._donated = Positions(
            fn, options.pop("donate_argnums"), options.pop("donate_argnames")
        )
        self._options = options
        self._programs: dict[Any, Any] = {}
        check_prefix(self.in_shardings, "jit", "in_shardings")
        check_prefix(self.out_shardings, "jit", "out_shardings")

    def _traced(self, key: _Key, donated: list[Any], kept: list[Any]) -> Any:
        """What JAX traces: values in their places, then the purified function."""
        sources = {True: iter(donated), False: iter(kept)}
        values = [next(sources[flag]) for flag in key.donated]
        return run(
            put_statics(self.fun, key.statics),
            key.definition,
            values,
            name=self._name,
            lanes=key.lanes,
            count=max(key.lanes, default=0) + 1,
            keep=lambda number: key.donated[number],
        )

    def _program(self, key: _Key, prefixes: Sequence[Any], lanes: Lanes) -> Any:
        """The `jax.jit` to call; one for all keys unless shardings are given."""
        free = self.in_shardings is None and self.out_shardings is None
        program = self._programs.get(None if free else key)
        if program is not None:
            return program
        options = dict(self._options)
        if self.in_shardings is not None:
            flags = zip(key.donated, prefixes)
            pairs = [(flag, prefix) for flag, prefix in flags]
            options["in_shardings"] = (
                [prefix for flag, prefix in pairs if flag],
                [prefix for flag, prefix in pairs if not flag],
            )
        if not free:
            updates = Updates(tuple(lanes.prefixes) or (None,), None)  # pyright: ignore[reportArgumentType] - a prefix
            options["out_shardings"] = (self.out_shardings, updates)
        program = jax.jit(self._traced, static_argnums=0, donate_argnums=1, **options)
        self._programs[None if free else key] = program
        return program

    def _prepared(self, args: Any, kwargs: Any) -> tuple[Inputs, Any, Any]:
        args, kwargs, statics = take_statics(self._statics, args, kwargs)
        inputs = inputs_of(args, kwargs, self.graph, self._name)
        donated = self._donated_leaves(inputs)
        prefixes = self._prefixes(args, kwargs)
        lanes = Lanes(prefixes or [None] * len(inputs.leaves))
        key = _Key(inputs.definition, statics, donated, tuple(lanes.of_leaf))
        program = self._program(key, prefixes, lanes)
        values = inputs.values()
        given = [value for value, flag in zip(values, donated) if flag]
        kept = [value for value, flag in zip(values, donated) if not flag]
        return inputs, program, (key, given, kept)

    def _donated_leaves(self, inputs: Inputs) -> tuple[bool, ...]:
        if not self._donated:
            return (False,) * len(inputs.leaves)
        args, kwargs = inputs.tree["args"], inputs.tree["kwargs"]
        chosen = {
            "args": tuple(
                self._donated.has(number, len(args)) for number in range(len(args))
            ),
            "kwargs": {name: name in self._donated.names for name in kwargs},
        }
        return tuple(spread(chosen, inputs.tree, "jit", "donate_argnums"))

    def _prefixes(self, args: Any, kwargs: Any) -> list[Any]:
        if self.in_shardings is None:
            return []
        chosen = self.in_shardings
        if isinstance(chosen, tuple | list):
            left = iter(chosen)
            chosen = tuple(None if arg is HOLE else next(left) for arg in args)
        tree = {"args": tuple(args), "kwargs": kwargs}
        return spread({"args": chosen, "kwargs": None}, tree, "jit", "in_shardings")

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the compiled function and writes changed Variables back."""
        inputs, program, given = self._prepared(args, kwargs)
        out, updates = program(*given)
        inputs.write_back(updates)
        return unpack_output(out)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The result with abstract leaves; nothing is changed."""
        _, program, given = self._prepared(args, kwargs)
        return unpack_output(program.eval_shape(*given)[0])

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> "Stage":
        """JAX's traced stage."""
        _, program, given = self._prepared(args, kwargs)
        return Stage(self, program.trace(*given), given[0])

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> "Stage":
        """JAX's lowered stage."""
        _, program, given = self._prepared(args, kwargs)
        return Stage(self, program.lower(*given), given[0])


class Stage:
    """A stage of compilation: JAX's own, callable with the original arguments.

    Whatever JAX's stage offers is offered here; `lower` and `compile` lead to the next
    stage, and a compiled one can be called like the function itself.
    """

    def __init__(self, jit: Jit[..., Any], stage: Any, key: Any):
        self._jit = jit
        self._stage = stage
        self._key = key

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def lower(self, **options: Any) -> "Stage":
        """The lowered stage of a traced one."""
        return Stage(self._jit, self._stage.lower(**options), self._key)

    def compile(self, compiler_options: Any = None) -> "Stage":
        """The compiled stage of a lowered one."""
        compiled = self._stage.compile(compiler_options)
        return Stage(self._jit, compiled, self._key)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a compiled stage and writes changed Variables back."""
        inputs, _, (key, donated, kept) = self._jit._prepared(args, kwargs)
        if key != self._key:
            raise TypeError(
                f"{self._jit._name}: the compiled program was made for arguments of "
                "another structure, other static arguments or other metadata. Lower "
                "it again for these."
            )
        out, updates = self._stage(donated, kept)
        inputs.write_back(updates)
        return unpack_output(out)


@transform
def jit(
    fun: Callable[P, R] = MISSING,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    keep_unused: bool = False,
    device: Any = None,
    backend: str | None = None,
    inline: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    on_structure_change: Policy | None = None,
) -> Jit[P, R]:
    """Compiles a function; Variables it changes in its arguments change outside.

    Args:
        fun: The function; without it, a decorator.
        in_shardings: A sharding for all, or one for each argument that is not static;
            a prefix of the arguments.
        out_shardings: As `in_shardings`, for the result.
        static_argnums: Arguments, by number, that are part of the program.
        static_argnames: The same, by name.
        donate_argnums: Arguments, by number, whose buffers may be reused. Variables in
            them always end with live buffers.
        donate_argnames: The same, by name.
        keep_unused: As for `jax.jit`.
        device: As for `jax.jit`.
        backend: As for `jax.jit`.
        inline: As for `jax.jit`.
        graph: Allow shared references in the arguments.
        graph_updates: Only False is supported.
        on_structure_change: What to do when attributes change inside: `"error"`,
            `"warn"` or `"ignore"`; see `treetap.set_structure_policy`.

    Examples:
        >>> import treetap as tt
        >>> @tt.jit
        ... def count(counter):
        ...     counter[...] += 1
        >>> counter = tt.Variable(0)
        >>> count(counter)
        >>> int(counter)
        1
    """
    options: dict[str, Any] = {
        "in_shardings": in_shardings,
        "out_shardings": out_shardings,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "keep_unused": keep_unused,
        "inline": inline,
    }
    placed = {"device": device, "backend": backend}
    options |= {name: value for name, value in placed.items() if value is not None}
    mode = bool(graph)
    return Jit(fun, mode, options)


@transform
def eval_shape(
    f: Callable[..., R],
    *args: Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    on_structure_change: Policy | None = None,
    **kwargs: Any,
) -> R:
    """The result of `f` with abstract leaves; nothing is computed or changed.

    Args:
        f: The function.
        *args: Its arguments, concrete or abstract.
        graph: Keep shared references in the result.
        graph_updates: Only False is supported.
        on_structure_change: As for `treetap.jit`.
        **kwargs: Its keyword arguments.
    """
    mode = bool(graph)
    inputs_of(args, kwargs, False, "eval_shape")  # what is shared is refused here
    inputs = inputs_of(args, kwargs, mode, "eval_shape")

    def pure(values: list[Any]) -> Any:
        return run(f, inputs.definition, values, name="eval_shape")[0]

    return _with_shardings(unpack_output(jax.eval_shape(pure, inputs.values())))


def _with_shardings(out: Any) -> Any:
    """Gives abstract Variables the sharding their metadata ask for, where they can."""
    for variable in variables_below(out):
        raw = variable._box[0]
        if not isinstance(raw, jax.ShapeDtypeStruct) or raw.sharding is not None:
            continue
        try:
            sharding = resolve_sharding(variable._metadata)
        except MetadataError:
            continue  # there is no mesh
        if sharding is not None:
            placed = jax.ShapeDtypeStruct(raw.shape, raw.dtype, sharding=sharding)
            variable.set_raw_value(placed)
    return out


@transform
def make_jaxpr(
    f: Callable[..., Any] = MISSING,
    *,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    on_structure_change: Policy | None = None,
    static_argnums: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """A function that returns the jaxpr of `f` in its pure form.

    Args:
        f: The function; without it, a decorator.
        graph: Allow shared references in the arguments.
        graph_updates: Only False is supported.
        on_structure_change: As for `treetap.jit`.
        static_argnums: Arguments that are part of the program.
    """
    mode = bool(graph)
    statics = Positions(f, static_argnums, None)

    @functools.wraps(f)
    def made(*args: Any, **kwargs: Any) -> Any:
        args, kwargs, taken = take_statics(statics, args, kwargs)
        inputs_of(args, kwargs, False, "make_jaxpr")  # what is shared is refused here
        inputs = inputs_of(args, kwargs, mode, "make_jaxpr")

        def pure(values: list[Any]) -> Any:
            called = put_statics(f, taken)
            return run(called, inputs.definition, values, name="make_jaxpr")[0]

        return jax.make_jaxpr(pure)(inputs.values())

    return made
