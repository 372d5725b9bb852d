# SPDX-License-Identifier: Apache-2.0
"""Compiled functions: what `jit` and `jit_partial` make, and its stages.

There is a `jax.jit` for each structure of the arguments; the values travel in two flat
lists, those to be donated and the rest: see `program`. Calls after the first are cached
calls: see `call_cache`. A call tries, in this order, the cached call that served last,
the other ones with the same signature, and the long way.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import jax

from treetap._core.bounded_cache import BoundedCache
from treetap._core.errors import StructureError
from treetap._core.paths import show_path
from treetap._core.trees.attributes import is_object
from treetap._core.trees.sharing import name_lost, places
from treetap._core.variables.variable import Variable, raw_values
from treetap._transforms.lift.arguments import (
    HOLE,
    NO_STATICS,
    Positions,
    StaticArguments,
    put_statics,
    take_statics,
)
from treetap._transforms.lift.call_cache import (
    NOT_APPLICABLE,
    CachedCall,
)
from treetap._transforms.lift.lift import Inputs, Lift, Options
from treetap._transforms.lift.prefixes import PrefixGroups, check_prefix, spread
from treetap._transforms.lift.program import (
    MAX_PROGRAMS,
    Key,
    Program,
)
from treetap._transforms.lift.results import Results

MAX_CACHED_CALLS = 16  # for arguments of the same types

P = ParamSpec("P")
R = TypeVar("R")


class JitOptions(Options, total=False):
    """The options of `jit` and `jit_partial`; see there."""

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
    pack: bool | int


class JittedFunctions(NamedTuple):
    """The functions of `jax.jit` that a compiled function is made of."""

    programs: Iterable[Program]

    def _cache_size(self) -> int:
        """How many programs were compiled, as each function of `jax.jit` counts."""
        compiled: list[Any] = [program.run for program in self.programs]
        return sum(run._cache_size() for run in compiled)


class Jit(Generic[P, R]):
    """A function compiled by `treetap.jit` or `jit_partial`.

    Args:
        fn: The function.
        lift: The lift.
        options: The options.
        fixed: The first arguments, if they are given once for all calls. Their
            structure is frozen: there are new objects around the caller's Variables.
    """

    def __init__(
        self, fn: Callable[P, R], lift: Lift, options: JitOptions, fixed: Any = ()
    ):
        functools.update_wrapper(self, fn)
        own = options.keys() - Options.__annotations__.keys()
        given = {k: options[k] for k in own if options[k] is not None}
        name, mode = lift.name, lift.mode
        self.fun = fn
        self.lift = lift
        self.options = options
        self.in_shardings = given.pop("in_shardings", None)
        self.out_shardings = given.pop("out_shardings", None)

        def chosen(kind: str, said: str) -> Positions:
            numbers = given.pop(f"{kind}_argnums", ())
            names = given.pop(f"{kind}_argnames", ())
            return Positions(fn, numbers, names, f"{name}: {said} arguments")

        self._statics = chosen("static", "static")
        self._donated = chosen("donate", "donated")
        self._options = given
        self._programs = BoundedCache[Key, Program](MAX_PROGRAMS, self._forget)
        # By the signature of a call, those used last first.
        self._cached_calls: dict[Any, list[CachedCall]] = {}
        self._make_packed: Callable[..., Any] | None = None
        if (pack := given.pop("pack", False)) is not False:
            from treetap._transforms.lift import packed_calls  # few ask for it

            self._make_packed = packed_calls.maker_for(pack, name)
        self._latest: CachedCall | None = None  # what served the last call
        self._fixed = lift.inputs(fixed, {}).with_plain({})["args"]
        # Whether there is more than what a call is given, or less.
        self._has_more = bool(self._statics or self._fixed)
        check_prefix(self.in_shardings, name, "in_shardings", mode)
        self._results = Results(self.out_shardings, mode, name, "out_shardings")

    @property
    def jitted_fn(self) -> "JittedFunctions":
        """What JAX compiled; NNX has this name for it."""
        return JittedFunctions(self._programs)

    def _traced(self, key: Key, values: Sequence[Any]) -> Any:
        """What JAX traces: the purified function."""
        fn = put_statics(self.fun, key.statics)
        choices = {"keep": key.kept(), "results": self._results}
        return self.lift.run(fn, key.definition, values, key.groups, **choices)

    def _new_program(self, key: Key, leaves: Sequence[Any]) -> Program:
        """A program for arguments of one structure."""
        options = dict(self._options)
        groups = key.groups
        if groups is not None:
            options["in_shardings"] = groups.by_leaf()
        if self.in_shardings is not None or self.out_shardings is not None:
            prefixes = tuple(groups.prefixes if groups else (None,))
            options["out_shardings"] = (prefixes, self._results.for_jax, None)
        traced: Any = functools.partial(self._traced)
        traced.__name__ = getattr(self.fun, "__name__", type(self.fun).__name__)
        numbers = _parted(leaves, range(len(leaves)))
        program = Program(key, *numbers, traced, options)
        if idle := program.find_idle(*_parted(leaves, raw_values(leaves))):
            # Given away, they would only have to come out again.
            donated = tuple(x and n not in idle for n, x in enumerate(key.donated))
            less = replace(key, donated=donated)
            program = Program(less, *numbers, traced, options)
        return program

    def _forget(self, program: Program) -> None:
        """Drops the cached calls of a program that is no longer kept."""
        self._latest = None
        for signature, calls in [*self._cached_calls.items()]:
            calls[:] = [cached for cached in calls if cached.program is not program]
            if not calls:
                self._cached_calls.pop(signature, None)

    def _given(self, args: Any, kwargs: Any) -> Any:
        """All arguments: as a tree without static ones, and the static ones."""
        args = (*self._fixed, *args)
        args, kwargs, statics = take_statics(self._statics, args, kwargs)
        return (args, kwargs), statics

    def _prepared(self, tree: Any, statics: Any) -> tuple[Inputs, Program, Any]:
        """Arguments taken apart the long way, and the program for them."""
        if self._fixed:
            self._refuse_variables(tree)
        inputs = self.lift.inputs(*tree)
        donated = self._donated_leaves(inputs)
        key = Key(inputs.definition, statics, donated, self._groups(inputs))
        make = functools.partial(self._new_program, key, inputs.leaves)
        program = self._programs.made(key, make)
        return inputs, program, program.parted(*_parted(inputs.leaves, inputs.values()))

    def _refuse_variables(self, tree: Any) -> None:
        """Refuses Variables in arguments that a call is given beside the fixed ones."""
        args, kwargs = tree
        given = {"args": args[len(self._fixed) :], "kwargs": kwargs}
        for path, value in places(given):
            if isinstance(value, Variable):
                raise StructureError(
                    f"{self.lift.name}: Found Variable in non-partial arguments: the "
                    f"{type(value).__name__} at {show_path(path)}. Fix it when the "
                    "function is made, or use `jit`."
                )

    def _donated_leaves(self, inputs: Inputs) -> tuple[bool, ...]:
        if not self._donated:
            return (False,) * len(inputs.leaves)
        chosen = self._donated.chosen(inputs.tree["args"], inputs.tree["kwargs"])
        flags = spread(chosen, inputs.tree, self.lift.name, "donate_argnums")
        # An object would be left with arrays that are gone; Variables get new ones.
        outside = {id(x) for x in jax.tree.leaves(inputs.tree, is_leaf=is_object)}
        return tuple(
            flag and (isinstance(leaf, Variable) or id(leaf) in outside)
            for flag, leaf in zip(flags, inputs.leaves)
        )

    def _groups(self, inputs: Inputs) -> PrefixGroups | None:
        if self.in_shardings is None:
            return None
        chosen = self.in_shardings
        if isinstance(chosen, tuple | list):
            left, args = iter(chosen), inputs.tree["args"]
            chosen = tuple(None if arg is HOLE else next(left) for arg in args)
        return inputs.spread({"args": chosen, "kwargs": None}, "in_shardings")

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the compiled function and writes changed Variables back."""
        return self._call_naming_lost_buffers(args, kwargs)

    def _call_naming_lost_buffers(
        self, args: Any, kwargs: Any, stage: Any = None
    ) -> Any:
        """Makes a call; an error gets a note of the arguments that were donated."""
        try:
            cached = self._latest
            if cached is not None and stage is None:  # what served last
                out = cached.again(args, kwargs, cached.program.run)
                if out is not NOT_APPLICABLE:
                    return out
            return self._call(args, kwargs, stage)
        except BaseException as error:
            given = {"args": (*self._fixed, *args), "kwargs": kwargs}
            name_lost(error, self.lift.name, given)
            raise

    def _call(self, args: Any, kwargs: Any, stage: Any) -> Any:
        """A cached call, or the long way; of a compiled stage if there is one."""
        tree, statics = (args, kwargs), NO_STATICS
        if self._has_more:
            tree, statics = self._given(args, kwargs)
        for cached in self._cached_calls.get(_call_signature(tree, statics), ()):
            if stage is not None and cached.program is not stage.program:
                continue
            out = cached(tree, (stage or cached.program).run)
            if out is not NOT_APPLICABLE:
                if stage is None and not self._has_more:
                    self._latest = cached
                return out
        return self._call_anew(tree, statics, stage)

    def _call_anew(self, tree: Any, statics: Any, stage: Any) -> Any:
        """A call the long way, which leaves a cached call."""
        inputs, program, given = self._prepared(tree, statics)
        if stage is not None:
            stage.check(program)
            program = stage.program
        # Before anything is written:
        cached = CachedCall.of(tree, inputs, program, self._make_packed)
        news, out, note = (stage or program).run(*given)
        out = inputs.finish(out, program.updates(news, note))
        if cached is not None:
            signature = _call_signature(tree, statics)
            calls = self._cached_calls.setdefault(signature, [])
            calls.insert(0, cached)
            del calls[MAX_CACHED_CALLS:]
        return out

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The result with abstract leaves; nothing is changed."""
        inputs, program, given = self._prepared(*self._given(args, kwargs))
        news, out, note = program.run.eval_shape(*given)
        return inputs.abstract().finish(out, program.updates(news, note))

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> "Stage":
        """JAX's traced stage."""
        _, program, given = self._prepared(*self._given(args, kwargs))
        return Stage(self, program.run.trace(*given), program)

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> "Stage":
        """JAX's lowered stage."""
        return self.trace(*args, **kwargs).lower()


def _call_signature(tree: Any, statics: StaticArguments) -> tuple[Any, ...]:
    """What tells calls apart at a glance: types, names, static arguments."""
    args, kwargs = tree
    return (*map(type, args), *kwargs, statics)


def _parted(leaves: Sequence[Any], items: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Of items for each leaf, those that are for Variables, and the others."""
    pairs = [(item, isinstance(leaf, Variable)) for item, leaf in zip(items, leaves)]
    return [x for x, own in pairs if own], [x for x, own in pairs if not own]


class Stage:
    """A stage of compilation: JAX's own, callable with the original arguments.

    Whatever JAX's stage offers is offered here; `lower` and `compile` lead to the next
    stage, and a compiled one can be called like the function itself.
    """

    def __init__(self, jit: Jit[..., Any], stage: Any, program: Program):
        self._jit = jit
        self.run = stage
        self.program = program

    def __getattr__(self, name: str) -> Any:
        return getattr(self.run, name)

    def lower(self, **options: Any) -> "Stage":
        """The lowered stage of a traced one."""
        return Stage(self._jit, self.run.lower(**options), self.program)

    def compile(self, compiler_options: Any = None) -> "Stage":
        """The compiled stage of a lowered one."""
        return Stage(self._jit, self.run.compile(compiler_options), self.program)

    def check(self, program: Program) -> None:
        """Refuses arguments that another program is for."""
        if program.key != self.program.key:
            raise TypeError(
                f"{self._jit.lift.name}: the compiled program was made for arguments "
                "of another structure, other static arguments or other metadata. "
                "Lower it again for these."
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a compiled stage and writes changed Variables back."""
        return self._jit._call_naming_lost_buffers(args, kwargs, self)
