# SPDX-License-Identifier: Apache-2.0
"""jit and its stages; eval_shape and make_jaxpr, which only look.

Statics and the description of the arguments are one static argument of one `jax.jit`;
the values travel in two flat lists, those to be donated and the rest.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, Unpack

import jax

from treetap._changes import Policy
from treetap._errors import StructureError
from treetap._grafts import Lanes, refuse_captured
from treetap._graphs import Apart
from treetap._lift import Inputs, Options, Updates, inputs_of, mode_of, run, transform
from treetap._metadata import MISSING
from treetap._placement import has_mesh, resolve_sharding
from treetap._prefixes import Spread, check_prefix, spread
from treetap._pytrees import variables_below
from treetap._regrowing import regrow
from treetap._results import WHOLE, Results, unpack
from treetap._settings import Mode
from treetap._specs import GraphDef

MAX_PROGRAMS = 256  # kept by a jit with shardings, one for each structure

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
        self.lanes: Lanes | None = lanes

    def _parts(self) -> Any:
        return self.definition, self.statics, self.donated, self.lanes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash((self.definition, self.statics, self.donated))

    def is_kept(self, number: int) -> bool:
        """Whether a leaf comes out unchanged, too: donated, or placed (NNX's way)."""
        if self.donated[number] or self.lanes is None:
            return self.donated[number]
        is_placed = self.lanes.prefixes[self.lanes.of_leaf[number]] is not None
        return is_placed and self.definition.graph is Mode.UPDATES

    def parted(self, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Values of leaves, those to be donated and the rest."""
        pairs = list(zip(values, self.donated))
        return [x for x, flag in pairs if flag], [x for x, flag in pairs if not flag]


class _Hole:
    """Stands in the arguments where a static one was taken out."""


jax.tree_util.register_static(_Hole)
HOLE = _Hole()


def positional(f: Any, args: Any, kwargs: Any, name: str, argument: str) -> Any:
    """All arguments by position, for a transform whose prefix counts those."""
    bound = inspect.signature(f).bind(*args, **kwargs)
    if bound.kwargs:
        raise TypeError(
            f"{name}: the arguments {sorted(bound.kwargs)} could not be resolved to "
            f"positions: they can only be passed by keyword, and `{argument}` has "
            "entries for positional arguments only."
        )
    return bound.args


def take_statics(
    statics: Positions | None, args: Any, kwargs: Any
) -> tuple[Any, Any, Any]:
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


class JitOptions(Options, total=False):
    """The options of `jit` and `jit_partial`."""

    in_shardings: Any
    out_shardings: Any
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Sequence[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Sequence[str] | None
    keep_unused: bool
    device: Any
    backend: str | None
    inline: bool


class Jit(Generic[P, R]):
    """A function compiled by `treetap.jit`."""

    _name = "jit"

    def __init__(self, fn: Callable[P, R], mode: Mode, options: JitOptions):
        functools.update_wrapper(self, fn)
        given: dict[str, Any] = {k: x for k, x in options.items() if x is not None}
        for name in Options.__annotations__:
            given.pop(name, None)
        self.fun = fn
        self.mode = mode
        self.in_shardings = given.pop("in_shardings", None)
        self.out_shardings = given.pop("out_shardings", None)
        self._statics, self._donated = (
            Positions(fn, given.pop(f"{x}_argnums", ()), given.pop(f"{x}_argnames", ()))
            for x in ("static", "donate")
        )
        self._options = given
        self._programs: dict[Any, Any] = {}
        check_prefix(self.in_shardings, self._name, "in_shardings", mode)
        self._results = Results(self.out_shardings, mode, self._name, "out_shardings")

    def _traced(self, key: _Key, donated: list[Any], kept: list[Any]) -> Any:
        """What JAX traces: values in their places, then the purified function."""
        sources = {True: iter(donated), False: iter(kept)}
        values = [next(sources[flag]) for flag in key.donated]
        return run(
            put_statics(self.fun, key.statics),
            key.definition,
            values,
            self._name,
            key.lanes,
            keep=key.is_kept,
            results=self._results,
        )

    def _program(self, key: _Key) -> Any:
        """The `jax.jit` to call; one for all keys unless shardings are given."""
        free = self.in_shardings is None and self.out_shardings is None
        program = self._programs.get(None if free else key)
        if program is not None:
            return program
        options = dict(self._options)
        lanes = key.lanes
        if lanes is not None:
            shardings = [lanes.prefixes[lane] for lane in lanes.of_leaf]
            options["in_shardings"] = key.parted(shardings)
        if not free:
            updates = Updates(tuple(lanes.prefixes if lanes else (None,)), None)  # pyright: ignore[reportArgumentType] - a prefix
            options["out_shardings"] = (self._results.for_jax, updates)
        program = jax.jit(self._traced, static_argnums=0, donate_argnums=1, **options)
        while len(self._programs) >= MAX_PROGRAMS:
            self._programs.pop(next(iter(self._programs)))
        self._programs[None if free else key] = program
        return program

    def _prepared(self, args: Any, kwargs: Any) -> tuple[Inputs, Any, Any]:
        args, kwargs, statics = take_statics(self._statics, args, kwargs)
        inputs = inputs_of(args, kwargs, self.mode, self._name)
        donated = self._donated_leaves(inputs)
        key = _Key(inputs.definition, statics, donated, self._lanes(inputs))
        return inputs, self._program(key), (key, *key.parted(inputs.values()))

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
        return tuple(spread(chosen, inputs.tree, self._name, "donate_argnums"))

    def _lanes(self, inputs: Inputs) -> Lanes | None:
        if self.in_shardings is None:
            return None
        chosen = self.in_shardings
        if isinstance(chosen, tuple | list):
            left = iter(chosen)
            args = inputs.tree["args"]
            chosen = tuple(None if arg is HOLE else next(left) for arg in args)
        return inputs.spread({"args": chosen, "kwargs": None}, "in_shardings")[1]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the compiled function and writes changed Variables back."""
        inputs, program, given = self._prepared(args, kwargs)
        return inputs.finish(*program(*given))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The result with abstract leaves; nothing is changed."""
        inputs, program, given = self._prepared(args, kwargs)
        copies, _ = regrow(inputs.definition, inputs.values())
        copied = Inputs(copies, self.mode, self._name)
        return copied.finish(*program.eval_shape(*given))

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
        return inputs.finish(*self._stage(donated, kept))


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
    **options: Unpack[Options],
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
        **options: `graph`: keep shared references in the arguments instead of refusing
            them. `graph_updates`: with `graph`, carry changes of structure out to the
            caller. `on_structure_change`: what to do when attributes change inside and
            that would be lost: `"error"`, `"warn"` or `"ignore"`; see
            `treetap.set_structure_policy`. Every transform takes these three.

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
    given = JitOptions(
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        keep_unused=keep_unused,
        device=device,
        backend=backend,
        inline=inline,
    )
    return Jit(fun, mode_of(options), given)


def _inspected(f: Any, mode: Mode, name: str, args: Any, kwargs: Any) -> Any:
    """The pure form of a function that is only looked at, and its inputs."""
    inputs_of(args, kwargs, Mode.TREE, name)  # what is shared is refused here
    inputs = inputs_of(args, kwargs, mode, name)

    def pure(values: list[Any]) -> Any:
        return run(f, inputs, values, name)[0]

    return pure, inputs.values()


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
        graph: As for `treetap.jit`.
        graph_updates: As for `treetap.jit`.
        on_structure_change: As for `treetap.jit`.
        **kwargs: Its keyword arguments.
    """
    mode: Any = graph
    if mode is Mode.UPDATES:
        return _with_shardings(_shape_with_updates(f, args, kwargs))
    pure, values = _inspected(f, mode, "eval_shape", args, kwargs)
    return _with_shardings(unpack(jax.eval_shape(pure, values), {}))


def _shape_with_updates(f: Any, args: Any, kwargs: Any) -> Any:
    """The abstract result when it may hold the arguments themselves: copies of them."""
    inputs = inputs_of(args, kwargs, Mode.UPDATES, "eval_shape")

    def pure(values: list[Any]) -> Any:
        tree, _ = regrow(inputs.definition, values)
        out = f(*tree["args"], **tree["kwargs"])
        walk = Apart(out, Mode.UPDATES, "eval_shape")
        packed = WHOLE.pack(out, walk, Spread("eval_shape", "the result"))
        refuse_captured(walk, "eval_shape")
        return packed

    return unpack(jax.eval_shape(pure, inputs.values()), {})


def _with_shardings(out: Any) -> Any:
    """Gives abstract Variables the sharding their metadata ask for, where they can."""
    for variable in variables_below(out):
        raw = variable._box[0]
        if not isinstance(raw, jax.ShapeDtypeStruct) or raw.sharding is not None:
            continue
        if not has_mesh(variable._metadata):
            continue
        sharding = resolve_sharding(variable._metadata)
        if sharding is not None:
            placed = jax.ShapeDtypeStruct(raw.shape, raw.dtype, sharding=sharding)
            variable.set_raw_value(placed)
    return out


@transform
def make_jaxpr(
    f: Callable[..., Any] = MISSING,
    *,
    static_argnums: int | Sequence[int] = (),
    **options: Unpack[Options],
) -> Callable[..., Any]:
    """A function that returns the jaxpr of `f` in its pure form.

    Args:
        f: The function; without it, a decorator.
        static_argnums: Arguments that are part of the program.
        **options: As for `treetap.jit`, without graph updates.
    """
    mode = mode_of(options)
    if mode is Mode.UPDATES:
        raise StructureError(
            "nnx.make_jaxpr does not support graph_updates=True. A jaxpr has no place "
            "for changes of structure; pass `graph_updates=False`."
        )
    statics = Positions(f, static_argnums, None)

    @functools.wraps(f)
    def made(*args: Any, **kwargs: Any) -> Any:
        args, kwargs, taken = take_statics(statics, args, kwargs)
        called = put_statics(f, taken)
        pure, values = _inspected(called, mode, "make_jaxpr", args, kwargs)
        return jax.make_jaxpr(pure)(values)

    return made
