# SPDX-License-Identifier: Apache-2.0
"""Optimizer: an optax transformation and its state, beside the model it trains.

optax works on States of plain arrays. The optimizer keeps what optax keeps in Variables
of its own: an `OptVariable` for what belongs to one parameter (with the parameter's
metadata, so that it is sharded alike), an `OptArray` for the rest. An update reads the
model's parameters and the gradients by path, computes everything, and then writes model
and state in one go: when anything does not fit, nothing is changed.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from treetap._core.errors import FilterError, StructureError
from treetap._core.paths import Path, is_container, open_container, show_path
from treetap._core.trace_level import is_foreign, refuse_foreign_variable
from treetap._core.trees.attributes import data
from treetap._core.trees.build import as_pure
from treetap._core.trees.filters import Filter, predicate_of
from treetap._core.trees.pytree import Pytree
from treetap._core.trees.split import is_variable
from treetap._core.trees.state import FlatState, State, from_items, is_branch, nested
from treetap._core.trees.update import misfit, update
from treetap._core.variables.kinds import Param
from treetap._core.variables.metadata import MISSING
from treetap._core.variables.placement import constrain_to_annotation, mesh_of
from treetap._core.variables.values import NUMERIC, is_buffer, is_key
from treetap._core.variables.variable import A, Variable
from treetap._train.comparable_functions import EqualFunctions
from treetap._train.matching import (
    Leaves,
    gathered,
    leaves_of,
    misfit_of_arrays,
    misfit_of_values,
    raw_value,
    refuse_misfits,
)

M = TypeVar("M")


class OptState(Variable[A]):
    """State of an optimizer."""


class OptArray(OptState[A]):
    """What an optimizer keeps for all parameters together, such as a count."""


class OptVariable(OptState[A]):
    """What an optimizer keeps for one parameter, with that parameter's metadata."""


# The state of optax in Variables.


class _Wrapping:
    """Put what optax keeps into Variables.

    optax keeps trees like the parameters as States, because it is given a State: those
    whose paths are paths of parameters hold OptVariables.
    """

    def __init__(self, params: Mapping[Path, Any]):
        self.params: Any = {} if () in params else nested(params.items())
        # Arrays that stand somewhere already: a buffer given twice cannot be donated.
        raw = map(raw_value, params.values())
        self.taken = {id(leaf): leaf for leaf in jax.tree.leaves(list(raw))}

    def any(self, value: Any, params: Any = MISSING) -> Any:
        """Wrap anything that optax keeps.

        Args:
            value: What to wrap.
            params: The parameter, or mapping of parameters, that it belongs to, if that
                is known.
        """
        is_start = params is MISSING and isinstance(value, State)
        if is_start and _is_like(value, self.params):
            value, params = value.raw_mapping, self.params
        if is_branch(params) and is_branch(value):
            pairs = value.items()
            return State({key: self.any(inner, params[key]) for key, inner in pairs})
        if isinstance(params, Variable) and jax.tree.leaves(value):
            return self.of_parameter(params, jax.tree.map(self.own, value))
        if is_container(value):
            opened = open_container(value)
            return opened.close([self.any(child) for child in opened.children])
        if isinstance(value, (*NUMERIC, jax.ShapeDtypeStruct)):
            return OptArray(self.own(value))
        return value

    def own(self, value: Any) -> Any:
        """Return an array in a buffer of its own, whose type is not weak."""
        if isinstance(value, jax.ShapeDtypeStruct):
            return value
        value = strong(value)
        if id(value) in self.taken and not isinstance(value, Tracer):
            value = value.copy()
        self.taken[id(value)] = value
        return value

    def of_parameter(self, param: Variable[Any], value: Any) -> OptVariable[Any]:
        """Wrap what optax keeps for one parameter, placed as it or its metadata say."""
        raw = raw_value(param)
        metadata = param.get_metadata()
        has_own = "optimizer_sharding" in metadata
        if has_own:
            metadata["out_sharding"] = metadata.pop("optimizer_sharding")
        is_alike = _shape(value) == _shape(raw)
        if metadata.get("out_sharding") and not is_alike:
            metadata |= _annotation(metadata.pop("out_sharding"), value, raw)
        sharding = _sharding_of(raw) if is_alike and not has_own else None
        if sharding is None and (has_own or mesh_of(metadata) is not None):
            return OptVariable(value, **metadata)
        if isinstance(value, jax.ShapeDtypeStruct) and sharding is not None:
            value = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
        elif sharding is not None and value.sharding != sharding:
            value = jax.device_put(value, sharding)
        # A value that is where it belongs is not placed again.
        if metadata["ref"]:
            value = jax.new_ref(value)
        return OptVariable.from_metadata(value, metadata)


def _shape(value: Any) -> tuple[int, ...]:
    """Return the shape of an array; nothing for a container."""
    return getattr(value, "shape", ())


def strong(value: Any) -> Any:
    """Return an array whose type is not weak: a weak one would be traced anew."""
    is_settled = isinstance(value, jax.Array) and not getattr(value, "weak_type", False)
    return value if is_settled else jnp.asarray(value, jnp.result_type(value))


def _is_like(values: Any, params: Any) -> bool:
    """Whether a mapping has the paths of parameters, or some of them."""
    if is_branch(values) and is_branch(params):
        return all(
            key in params and _is_like(inner, params[key])
            for key, inner in values.items()
        )
    return not is_branch(params) or not jax.tree.leaves(values)


def _annotation(annotation: Any, value: Any, param: Any) -> dict[str, Any]:
    """Return a parameter's sharding as metadata of an array with more axes, if any."""
    extra = len(_shape(value)) - len(_shape(param))
    is_names = isinstance(annotation, tuple | list | PartitionSpec)
    if extra < 0 or not is_names or _shape(value)[extra:] != _shape(param):
        return {}
    return {"out_sharding": PartitionSpec(*(None,) * extra, *annotation)}


def _sharding_of(value: Any) -> NamedSharding | None:
    """Return how a concrete or abstract array lies on a mesh, if it does."""
    is_known = is_buffer(value) or isinstance(value, jax.ShapeDtypeStruct)
    sharding = value.sharding if is_known else None
    return sharding if isinstance(sharding, NamedSharding) else None


def _left_in_place(leaf: Any, value: Any) -> Any:
    """Constrain a new value to the sharding that its Variable is annotated with."""
    if not isinstance(leaf, Variable) or leaf._metadata.get("out_sharding") is None:
        return value
    constrain = partial(constrain_to_annotation, metadata=leaf._metadata)
    return jax.tree.map(constrain, value)


# The optimizer.


class Optimization(Pytree, Generic[M]):
    """Base of `Optimizer`: a transformation, its state, and the step they take."""

    def __init__(
        self, model: M, tx: Any, *, wrt: Filter, graph: bool | None = None
    ) -> None:
        if not (callable(getattr(tx, "init", None)) and hasattr(tx, "update")):
            raise TypeError(
                f"{type(self).__name__}: `tx` is a {type(tx).__name__}, which has no "
                "`init` and `update`. Pass an optax transformation, such as "
                "`optax.adam(1e-3)`."
            )
        self.graph = graph
        self._tx = EqualFunctions(tx)
        self._wrt = EqualFunctions(wrt)
        params, _ = self._parameters(model, type(self).__name__)
        _check_parameters(type(self).__name__, params, wrt)
        self._paths = tuple(params)
        pure = gathered({path: raw_value(leaf) for path, leaf in params.items()})
        is_abstract = jax.ShapeDtypeStruct in map(type, jax.tree.leaves(pure))
        step: Any = jax.ShapeDtypeStruct((), jnp.uint32)
        self.step = OptState(step if is_abstract else jnp.zeros((), jnp.uint32))
        made = jax.eval_shape(tx.init, pure) if is_abstract else tx.init(pure)
        self.opt_state = data(_Wrapping(params).any(made))

    @property
    def tx(self) -> Any:
        """The optax transformation."""
        return self._tx.value

    @property
    def wrt(self) -> Filter:
        """The filter that chooses what is trained."""
        return self._wrt.value

    def _parameters(self, model: Any, name: str) -> tuple[Leaves, Leaves]:
        """Return what of the model is trained, and all that it has, by path."""
        leaves = leaves_of(model, self.graph, name)
        wanted = predicate_of(self.wrt)
        chosen = {path: leaf for path, leaf in leaves.items() if wanted(path, leaf)}
        return chosen, leaves

    def _matched(self, grads: Any, params: Leaves, known: Leaves, name: str) -> Any:
        """Return the gradients of the parameters, as optax wants them.

        Args:
            grads: A Module, State, dict or other tree of Variables or arrays.
            params: The parameters' values by path.
            known: What the model has, by path; gradients of what is not trained are
                left out.
            name: The public method at work.
        """
        grads = grads.to_nested_state() if isinstance(grads, FlatState) else grads
        leaves = leaves_of(grads, self.graph, name)
        tree = from_items(leaves.items())
        inside = {path: _inside(tree, path) for path in params}
        found = {path: raw_value(g) for path, g in inside.items() if g is not MISSING}
        refuse_misfits(
            f"{name}: the gradients do not fit the parameters",
            params,
            found,
            compare=partial(misfit_of_values, compare=_misfit_of_gradient),
            unexpected=[path for path in leaves if not _is_below(path, known)],
            remedy="Pass the gradient of a loss with respect to the model: a Module, a "
            "State or nested dicts with the model's own paths.",
        )
        return gathered(found)

    def _take_step(self, model: Any, grads: Any, options: dict[str, Any]) -> Any:
        """Compute one step, then write it into the model and the state."""
        import optax

        name = f"{type(self).__name__}.update"
        params, leaves = self._parameters(model, name)
        known = dict.fromkeys(self._paths)
        refuse_misfits(
            f"{name}: the model does not have the parameters that the optimizer was "
            "made for",
            known,
            params,
            unexpected=[path for path in params if path not in known],
            remedy="Make a new optimizer for this model.",
        )
        raw = {path: raw_value(leaf) for path, leaf in params.items()}
        pure = gathered(raw)
        pure_options = {key: as_pure(value) for key, value in options.items()}
        if "grad" in options:  # a line search wants it in the form of the parameters
            pure_options["grad"] = self._matched(options["grad"], raw, leaves, name)
        held, structure = self._held(name)
        state = structure.unflatten(map(raw_value, held))
        grads = self._matched(grads, raw, leaves, name)
        updates, state = self.tx.update(grads, state, pure, **pure_options)
        changed = optax.apply_updates(pure, updates)
        changed = jax.tree.map(
            _left_in_place, gathered(params), changed, is_leaf=is_variable
        )
        try:
            values = structure.flatten_up_to(state)
        except ValueError as error:
            raise StructureError(
                f"{name}: the transformation returned a state of another structure "
                f"than it was given; nothing was changed. {error}"
            ) from None
        self._write(model, changed, held, values)
        return updates

    def _held(self, name: str) -> tuple[list[Any], Any]:
        """Return the Variables of the state, and the structure they stand in."""
        held, structure = jax.tree.flatten(self.opt_state, is_leaf=is_variable)
        if any(isinstance(leaf, NUMERIC) for leaf in held):
            raise StructureError(
                f"{name}: `opt_state` holds bare arrays, which cannot be changed in "
                "place. Write into the Variables that are there, for instance with "
                "`treetap.update(optimizer, state)`."
            )
        return held, structure

    def _write(self, model: Any, changed: Any, held: Any, values: Any) -> None:
        """Write the results; all that can fail comes first."""
        known, others = {}, []
        for number, (variable, value) in enumerate(zip(held, values)):
            if not isinstance(variable, Variable):
                continue
            value = jax.tree.map(strong, value)  # noqa: PLW2901 - the form that is kept
            value = _left_in_place(variable, value)  # noqa: PLW2901 - the same
            if not misfit(raw_value(variable), value):
                known[number] = value
            elif is_foreign(variable._trace):
                raise refuse_foreign_variable(type(variable).__name__)
            else:  # optax may change a dtype: it is optax's state
                others.append((variable, value))
        update(
            {"model": model, "step": self.step, "opt_state": held},
            {"model": changed, "step": self.step + jnp.uint32(1), "opt_state": known},
        )
        for variable, value in others:
            variable.set_value(value)


def _inside(tree: Any, path: Path) -> Any:
    """Return what stands at a path of nested mappings, or MISSING."""
    for key in path:
        tree = tree.get(key, MISSING) if is_branch(tree) else MISSING
    return tree


def _is_below(path: Path, known: Leaves) -> bool:
    """Whether a path is one of those known, or goes on from one."""
    return any(path[:end] in known for end in range(len(path) + 1))


def _misfit_of_gradient(param: Any, grad: Any) -> str:
    """Return why an array cannot be the gradient of another."""
    if not isinstance(grad, NUMERIC):
        return f"a {type(grad).__name__} where an array belongs"
    if getattr(grad, "dtype", None) == jax.dtypes.float0:
        dtype = jnp.result_type(param)
        return f"no gradient: {dtype} has none. Choose fewer Variables with `wrt`"
    return misfit_of_arrays(param, grad)


def _check_parameters(name: str, params: Mapping[Path, Any], wrt: Filter) -> None:
    """Refuse a choice of nothing, and of what cannot be trained."""
    if not params:
        raise FilterError(
            f"{name}: wrt={wrt!r} takes nothing of the model, so there is nothing to "
            "train. Give a filter that does, such as `Param`."
        )
    for path, leaf in params.items():
        for value in jax.tree.leaves(raw_value(leaf)):
            if is_key(value):
                raise StructureError(
                    f"{name}: wrt={wrt!r} takes {show_path(path)}, a "
                    f"{type(leaf).__name__} of {value.dtype}, which cannot be trained. "
                    "Choose fewer Variables, for instance `wrt=Param`."
                )


class Optimizer(Optimization[M]):
    """An optax transformation and its state, for the parameters of one model.

    Optimizers with equal settings have equal GraphDefs: a jitted step is traced once
    for all of them.

    Args:
        model: A Module, or any tree of Modules and Variables; it is not kept.
        tx: An optax transformation.
        wrt: A filter: what is trained, usually `Param`.
        graph: Keep shared references in the model instead of refusing them.

    Attributes:
        step: How many updates were made.
        opt_state: What optax keeps, in `OptVariable`s and `OptArray`s.

    Examples:
        >>> import optax, treetap as tt
        >>> model = tt.Dict(w=tt.Param(2.0))
        >>> optimizer = tt.Optimizer(model, optax.sgd(0.5), wrt=tt.Param)
        >>> @tt.jit
        ... def step(model, optimizer):
        ...     grads = tt.grad(lambda model: model.w * model.w)(model)
        ...     optimizer.update(model, grads)
        >>> step(model, optimizer)
        >>> float(model.w), int(optimizer.step)
        (0.0, 1)
    """

    def update(self, model: M, grads: Any, **kwargs: Any) -> Any:
        """Take one step: change the model and the state, in place.

        Args:
            model: The model, of the structure the optimizer was made for.
            grads: Its gradients: what `grad` gives in any mode, a State or nested dicts
                of Variables or arrays. Gradients of what is not trained are left out.
            **kwargs: Passed on to optax, Variables unwrapped: `value`, `grad` and
                `value_fn` for line searches. `value_fn` is called with a State of
                arrays.

        Returns:
            The updates that were added to the parameters, a State of arrays.
        """
        return self._take_step(model, grads, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "model":
            raise AttributeError(
                "Optimizer has no attribute 'model': it does not keep the model. Pass "
                "it to `update(model, grads)`."
            )
        return super().__getattr__(name)  # pyright: ignore[reportAttributeAccessIssue] - hidden from type checkers


class ModelAndOptimizer(Optimization[M]):
    """A model with its optimizer in one object; new programs use `Optimizer`.

    NNX programs written before the two were parted still use it.

    Args:
        model: The model; the attribute `model` afterwards.
        tx: An optax transformation.
        wrt: A filter: what is trained.
        graph: Keep shared references in the model instead of refusing them.

    Examples:
        >>> import optax, treetap as tt
        >>> from treetap._train.optimizer import ModelAndOptimizer
        >>> both = ModelAndOptimizer(tt.Dict(w=tt.Param(2.0)), optax.sgd(0.5))
        >>> _ = both.update({"w": 1.0})
        >>> float(both.model.w)
        1.5
    """

    def __init__(
        self, model: Any, tx: Any, *, wrt: Filter = Param, graph: bool | None = None
    ) -> None:
        super().__init__(model, tx, wrt=wrt, graph=graph)
        self.model = model

    def update(self, grads: Any, /, **kwargs: Any) -> Any:
        """Take one step, as `Optimizer.update` does, of the model inside."""
        return self._take_step(self.model, grads, kwargs)
