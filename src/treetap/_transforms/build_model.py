# SPDX-License-Identifier: Apache-2.0
"""build: a model made from its plan, instead of line by line.

The plan is a jaxpr, traced once. Each of its operations is compiled as a program of its
own, exactly what JAX runs for it eagerly: fused into fewer programs they would round
otherwise, and a seed would give other parameters. What the plan adds is foresight:
equal operations are compiled once, different ones at the same time, and what is to be
sharded is made in its shards, as is what it is made from, where that changes no bit.
"""

import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import chain
from operator import is_
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from treetap._capture.walk.jax_compat import (
    Body,
    bind,
    body_of,
    evaluate,
    key_of,
    read,
    rebind,
    setting_of,
)
from treetap._capture.walk.operations import operation_of
from treetap._core.bounded_cache import BoundedCache
from treetap._core.errors import StructureError
from treetap._core.paths import find_leaves, is_container, open_container
from treetap._core.settings import Mode
from treetap._core.trace_level import is_eager
from treetap._core.trees.attributes import is_object
from treetap._core.variables.placement import put
from treetap._core.variables.values import is_key
from treetap._transforms.lift.lift import Inputs, Lift, Parted

P = ParamSpec("P")
M = TypeVar("M")

MAX_PROGRAMS = 1024  # kept, for this and later builds
MAX_THREADS = 8  # that compile
_LIFT = Lift("build", Mode.UPDATES)
WIDE = 16  # elements: narrower loops were seen to round otherwise, on CPUs


def build(make: Callable[P, M], /, *args: P.args, **kwargs: P.kwargs) -> M:
    """Calls `make`, a class or a function that makes a model, by plan.

    The result is that of `make(*args, **kwargs)`, bit for bit: values, metadata, what
    is shared, numbers that are not arrays, and arrays of the arguments themselves. The
    arguments change as they would: random streams move on, and what becomes part of the
    model is the caller's own object. If `make` raises, nothing has changed.

    Under `jax.set_mesh`, Variables with `out_sharding` are made in their shards, of
    axes of either type. Elementwise operations, random draws with the default kind of
    keys, and changes of shape are done shard by shard. What would have other bits that
    way is whole before it is sharded, as without `build`: what went through something
    else, such as the decomposition of `orthogonal`, and on CPUs narrow shards.

    Every operation is compiled once for each shape, different ones at the same time; a
    second build of such a model compiles nothing. On one device that is all that is
    saved: running takes about the time and memory that it takes without `build`.

    Args:
        make: A class of Modules, or a function that returns a model. It is traced: it
            may not look at computed numbers (`float(x)`), and effects such as
            `jax.debug.print` happen when the plan is run. Objects that it changes have
            to be among the arguments. Inside a transform `make` is just called.
        *args: Its arguments, or trees of them.
        **kwargs: Its keyword arguments.

    Returns:
        The model.

    Examples:
        >>> import treetap as tt
        >>> model = tt.build(tt.Linear, 2, 3, rngs=tt.Rngs(0))
        >>> same = tt.Linear(2, 3, rngs=tt.Rngs(0))
        >>> bool((model.kernel[...] == same.kernel[...]).all())
        True
    """
    if not callable(make):
        raise StructureError(
            f"build: expected a class or a function that makes a model, got "
            f"{type(make).__name__}. Write `build(Model, ..., rngs=rngs)`."
        )
    if not is_eager():
        return make(*args, **kwargs)
    objects = find_leaves((args, kwargs), is_object)
    inputs = _LIFT.inputs((objects,), {})

    def called(renewed: list[Any]) -> M:
        made: Callable[..., M] = make
        others = dict(zip(map(id, objects), renewed))
        new_args, new_kwargs = _with_objects((args, kwargs), others)
        return made(*new_args, **new_kwargs)

    try:
        body, arrays, put_together = _planned(called, inputs)
    except jax.errors.JAXTypeError as error:
        error.add_note(
            "build: the model is traced before anything is computed. Make it without "
            "`build`, or compute with numpy what its structure depends on."
        )
        raise
    return inputs.finish(*put_together(_Run(body).results(arrays)))


def _with_objects(value: Any, others: dict[int, Any]) -> Any:
    """A value with other objects in it, by identity; what holds none stays itself."""
    if is_object(value):
        return others[id(value)]
    if not is_container(value):
        return value
    opened = open_container(value)
    children = [_with_objects(child, others) for child in opened.children]
    is_same = all(map(is_, children, opened.children))
    return value if is_same else opened.close(children)


def _planned(
    called: Callable[[list[Any]], Any], inputs: Inputs
) -> tuple[Body, list[Any], Callable[[list[Any]], Any]]:
    """Traces a call. Only arrays are traced, so that a number remains a number.

    Returns:
        The operations, their inputs, and what puts their results together.
    """
    flat, structure = jax.tree.flatten(inputs.values())
    parts = Parted(flat, [not isinstance(x, jax.Array | jax.Ref) for x in flat])
    arrays = parts.handled(flat)
    found: list[Any] = []

    def pure(arrays: list[Any]) -> list[Any]:
        values = structure.unflatten(parts.all(arrays))
        leaves, tree = jax.tree.flatten(_LIFT.run(called, inputs, values))
        results = Parted(leaves, [not isinstance(leaf, Tracer) for leaf in leaves])
        found[:] = results.all, tree
        return results.handled(leaves)

    body = body_of(jax.make_jaxpr(pure)(arrays))

    def put_together(results: list[Any]) -> Any:
        every, tree = found
        return tree.unflatten(every(results))

    return body, arrays, put_together


class _Step(NamedTuple):
    """An operation of a plan, and how it is done."""

    eqn: Any
    goal: Any = None  # the sharding that it gives its operand, which has it already
    program: Any = None  # what does it; without one it is done as JAX does it eagerly


class _Run:
    """The operations of a plan that are needed, how each is done, and doing them."""

    def __init__(self, body: Body):
        self.jaxpr, self.consts = body.jaxpr, body.consts
        equations = _needed(self.jaxpr)
        goals = [_goal(eqn) for eqn in equations]
        atoms = chain(self.jaxpr.outvars, *(eqn.invars for eqn in equations))
        self.uses = Counter(_variables(atoms))
        self.shardings = self._shardings(equations, goals)
        self.steps = [self._step(*pair) for pair in zip(equations, goals)]

    def _step(self, eqn: Any, goal: NamedSharding | None) -> _Step:
        if goal is not None:
            return _Step(eqn, goal if eqn.invars[0] in self.shardings else None)
        sharding = self.shardings.get(eqn.outvars[0]) if eqn.outvars else None
        if sharding is None and not _is_worth_compiling(eqn):
            return _Step(eqn)
        avals = tuple(atom.aval for atom in eqn.invars)
        make = functools.partial(_Program, eqn, sharding)
        return _Step(eqn, program=_programs.made((key_of(eqn), avals, sharding), make))

    def results(self, inputs: list[Any]) -> list[Any]:
        """The results of the plan."""
        self._compile()
        env = dict(zip(self.jaxpr.constvars, self.consts))
        env.update(zip(self.jaxpr.invars, inputs))
        left = self.uses.copy()
        for step in self.steps:
            env.update(zip(step.eqn.outvars, self._done(step, env)))
            for atom in _variables(step.eqn.invars):
                left[atom] -= 1
                if not left[atom]:
                    env.pop(atom, None)  # its memory is free from here on
        return [_result(atom, env) for atom in self.jaxpr.outvars]

    def _done(self, step: _Step, env: dict[Any, Any]) -> list[Any]:
        """The results of one operation."""
        eqn = step.eqn
        if step.goal is not None:  # of a value that lies so already
            return [jax.device_put(env[eqn.invars[0]], step.goal)]
        if step.program is None:
            return rebind(eqn, [read(env, atom) for atom in eqn.invars])
        sharding = step.program.sharding
        if sharding is None:
            return step.program.run(_operands(eqn, env))
        with jax.set_mesh(sharding.mesh):
            places = self._places(eqn, sharding)
            return step.program.run([*map(put, _operands(eqn, env), places)])

    def _places(self, eqn: Any, sharding: Any) -> list[Any]:
        """Where the operands of a sharded operation lie."""
        everywhere = NamedSharding(sharding.mesh, PartitionSpec())
        return [
            everywhere if isinstance(x, Literal) else self.shardings.get(x, everywhere)
            for x in eqn.invars
        ]

    def _shardings(self, equations: list[Any], goals: list[Any]) -> dict[Any, Any]:
        """How variables are to lie from the start, on meshes whose axes are Auto.

        From each value with a goal it goes back, as long as operations can be done
        shard by shard and nothing else uses what they work on.
        """
        found: dict[Any, Any] = {}
        for eqn, goal in zip(reversed(equations), reversed(goals)):
            wished = [found.pop(out, None) for out in eqn.outvars]
            sharding: Any = None
            if goal is not None:
                sharding = _on_auto_axes(goal)
            elif len(wished) == 1 and wished[0] is not None and _is_local(eqn):
                sharding = found[eqn.outvars[0]] = wished[0]
            if sharding is not None:
                for atom in _variables(eqn.invars):
                    if self.uses[atom] == 1:
                        found[atom] = _before(eqn, atom.aval, sharding)
        for var in (*self.jaxpr.invars, *self.jaxpr.constvars):
            found.pop(var, None)  # what is there already
        return {var: sharding for var, sharding in found.items() if sharding}

    def _compile(self) -> None:
        """Compiles what is new, at the same time where there is more than one."""
        lowered: list[Any] = []
        for eqn, _, program in self.steps:
            if program is None or not program.is_new:
                continue
            program.is_new = False
            sharding = program.sharding
            places = sharding and self._places(eqn, sharding)
            specs = map(_spec, eqn.invars, places or [None] * len(eqn.invars))
            with jax.set_mesh(sharding.mesh) if sharding else nullcontext():
                lowered.append(program.run.lower([*specs]))
        if len(lowered) > 1:
            with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
                list(pool.map(lambda stage: stage.compile(), lowered))


def _needed(jaxpr: Any) -> list[Any]:
    """The operations that results or effects come from."""
    needed = set(_variables(jaxpr.outvars))
    kept: list[Any] = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            kept.append(eqn)
            needed.update(_variables(eqn.invars))
    return kept[::-1]


def _variables(atoms: Iterable[Any]) -> list[Any]:
    """What is computed, of operands or results; the others are numbers."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _number(literal: Any) -> Any:
    """A number of a plan, with its type; Python's own are weak."""
    array = np.asarray(literal.val, literal.aval.dtype)
    return array.item() if literal.aval.weak_type else array


def _result(atom: Any, env: dict[Any, Any]) -> Any:
    """A result of a plan, as the array that it would be."""
    if not isinstance(atom, Literal):
        return env[atom]
    number = _number(atom)
    return jnp.full((), number) if isinstance(number, np.ndarray) else jnp.array(number)


def _operands(eqn: Any, env: dict[Any, Any]) -> list[Any]:
    """The operands of a program. Numbers are given to it, as they are eagerly."""
    return [_number(x) if isinstance(x, Literal) else env[x] for x in eqn.invars]


def _spec(atom: Any, place: NamedSharding | None) -> Any:
    shape, dtype, weak = atom.aval.shape, atom.aval.dtype, atom.aval.weak_type
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak, sharding=place)


# Programs.


class _Program:
    """One operation, compiled; with a sharding, its result is made in its shards."""

    def __init__(self, eqn: Any, sharding: NamedSharding | None):
        self.is_new = True
        self.eqn = eqn
        self.sharding = sharding
        self.run: Any = jax.jit(functools.partial(rebind, eqn))
        if sharding is not None:
            in_shards = functools.partial(_bind_in_shards, eqn)
            self.run = jax.jit(in_shards, out_shardings=[sharding])


_programs: BoundedCache[Any, _Program] = BoundedCache(MAX_PROGRAMS)


def _is_worth_compiling(eqn: Any) -> bool:
    """Whether an operation is compiled ahead.

    Numbers and keys are many and small; effects happen in their order; and on a mesh
    JAX decides where results lie.
    """
    if eqn.effects or not jax.sharding.get_abstract_mesh().empty:
        return False
    return any(x.aval.shape and not is_key(x.aval) for x in eqn.outvars)


# Shards.

# Operations whose every element depends on one element of each operand, or on a key:
# any part of the result is the same, bit for bit, whoever computes it.
_LOCAL = """
    abs acos acosh add and asin asinh atan atan2 atanh bitcast_convert_type
    broadcast_in_dim cbrt ceil clamp clz complex conj convert_element_type copy copy_p
    cos cosh digamma div eq erf erf_inv erfc exp exp2 expand_dims expm1 floor ge gt imag
    integer_pow iota is_finite le lgamma log log1p logistic lt max min mul ne neg
    nextafter not or population_count pow random_clone random_fold_in random_unwrap
    random_wrap real reduce_precision rem reshape round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square squeeze
    stop_gradient sub tan tanh transpose xor
""".split()


def _is_local(eqn: Any) -> bool:
    """Whether an operation can be done shard by shard without changing a bit."""
    name, params = eqn.primitive.name, eqn.params
    if eqn.effects or any(any(x.spec) for x in _given_shardings(params).values()):
        return False
    operation = operation_of(eqn.primitive, eqn.params)
    if operation.is_call:
        (body,) = operation.bodies(params)
        return all(map(_is_local, body.jaxpr.eqns))
    if name == "random_bits":
        is_default = str(eqn.invars[0].aval.dtype) == "key<fry>"
        return setting_of(eqn, "threefry_partitionable") and is_default
    return name in _LOCAL


def _given_shardings(params: dict[str, Any]) -> dict[str, NamedSharding]:
    names = ("sharding", "out_sharding")
    return {name: params[name] for name in names if params.get(name) is not None}


def _bind_in_shards(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Does a local operation in shards; draws are the same wherever they are made."""
    with jax.threefry_partitionable(True):
        return _bind_freely(eqn, values)


def _bind_freely(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Does a local operation whatever mesh it was traced for."""
    operation = operation_of(eqn.primitive, eqn.params)
    if not operation.is_call:
        free = dict.fromkeys(_given_shardings(eqn.params))
        return bind(eqn.primitive, values, {**eqn.params, **free})
    (body,) = operation.bodies(eqn.params)
    return evaluate(body, values, _bind_freely)


def _goal(eqn: Any) -> NamedSharding | None:
    """The sharding on a mesh of devices that an operation gives its operand."""
    name, params = eqn.primitive.name, eqn.params
    sharding = params["dst_sharding"] if name == "reshard" else None
    if name == "sharding_constraint" and params["layout"] is None:
        sharding = params["sharding"]
    if not isinstance(sharding, NamedSharding):
        return None
    mesh = sharding.mesh
    if isinstance(mesh, AbstractMesh):
        mesh = jax.sharding.get_mesh()
        if mesh.empty or mesh.axis_names != sharding.mesh.axis_names:
            return None
    free = PartitionSpec.UNCONSTRAINED
    spec = PartitionSpec(*(None if x is free else x for x in sharding.spec))
    return NamedSharding(mesh, spec)


def _on_auto_axes(sharding: NamedSharding) -> NamedSharding:
    """The same places, on a mesh whose axes the compiler may use."""
    mesh: Any = sharding.mesh
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    free = Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
    return NamedSharding(free, sharding.spec)


def _before(eqn: Any, aval: Any, sharding: Any) -> NamedSharding | None:
    """How an operand lies best, so that the result can lie as it should."""
    result = eqn.outvars[0].aval.shape
    spec = [*sharding.spec] + [None] * (len(result) - len(sharding.spec))
    if is_key(aval) or not aval.shape:
        return None
    if eqn.primitive.name == "transpose":
        places = eqn.params["permutation"]
        spec = [spec[places.index(axis)] for axis in range(len(places))]
    elif eqn.primitive.name == "reshape":
        spec = _before_reshape(spec, result, aval.shape)
    elif aval.shape != result:
        return None
    before = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    try:
        last = before.shard_shape(aval.shape)[-1]
    except ValueError:  # it does not divide
        return None
    if sharding.mesh.devices.flat[0].platform != "cpu":
        return before
    # What is left over from a loop over vectors is computed otherwise than the rest.
    is_alike = last >= WIDE and (last == aval.shape[-1] or last % WIDE == 0)
    return before if is_alike else None


def _before_reshape(
    spec: list[Any], result: Sequence[int], shape: Sequence[int]
) -> list[Any]:
    """The spec of what is reshaped: an axis is split where its first part is.

    Axes belong together when the axes before them have as many elements.
    """
    starts = {math.prod(result[:i]): spec[i] for i, n in enumerate(result) if n > 1}
    return [
        starts.pop(math.prod(shape[:i]), None) if n > 1 else None
        for i, n in enumerate(shape)
    ]
