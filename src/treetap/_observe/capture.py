# SPDX-License-Identifier: Apache-2.0
"""capture: what `sow`, `perturb` and methods gave, as one State per kind.

Nothing is written on a Module or a class: values come out of the run itself, under any
transform, JAX's own included.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treetap._capture.callee import keep_name, refuse_uncallable
from treetap._capture.emit import kind_given
from treetap._capture.listening import Listening, append
from treetap._capture.selectors import site_text
from treetap._capture.session import Call
from treetap._capture.sown_so_far import taking_notes
from treetap._capture.statistics.reduced import arranged
from treetap._capture.walk import jax_compat
from treetap._capture.walk.plans import Adding, Fed
from treetap._capture.walk.spots import VMAP
from treetap._core.errors import CaptureError, StructureError
from treetap._core.paths import Path, show_path
from treetap._core.trace_level import current_trace
from treetap._core.trees.state import State, flat_items, nested
from treetap._core.variables.metadata import PLAIN
from treetap._core.variables.variable import Variable, make
from treetap._observe.handlers import Handler, value_of


def capture(
    fn: Any,
    *var_types: Any,
    init: Any = None,
    method_outputs: Any = None,
) -> Any:
    """Runs a model and collects what it sows, perturbs and returns on the way.

    Args:
        fn: A Module, a method or any function of Modules; or a kind of Variable, for a
            decorator.
        *var_types: Kinds of Variable to collect, or their names.
        init: A State of Variables to begin with: `perturb` adds them to its values,
            `sow` continues from them.
        method_outputs: Also collect the results of all public methods, as this kind of
            Variable.

    Returns:
        A function with the result of `fn`, followed by one State for each kind. Values
        under a loop or a mapping have its axis in front; what `sow` gives has it also
        if it is the same for all rows of a `vmap`.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> class Double(tt.Module):
        ...     def __call__(self, x):
        ...         self.sow(tt.Intermediate, "x", x)
        ...         return x * 2
        >>> out, sown = tt.capture(Double(), tt.Intermediate)(jnp.array(3.0))
        >>> float(out), float(sown["x"][0])
        (6.0, 3.0)
    """
    if isinstance(fn, str) or (isinstance(fn, type) and issubclass(fn, Variable)):
        kinds = (fn, *var_types)
        return lambda fn: capture(fn, *kinds, init=init, method_outputs=method_outputs)
    refuse_uncallable(fn, "capture")
    kinds = [kind_given(kind, "capture") for kind in var_types]
    given = method_outputs
    outputs = None if given is None else kind_given(given, "capture")
    if outputs not in (None, *kinds):
        kinds.append(outputs)

    def captured(*args: Any, **kwargs: Any) -> Any:
        work = _Capture(kinds, init, outputs)
        with taking_notes(kinds, outputs), work.around(fn, args, kwargs) as out:
            states = work.states()
        return (out, *states) if kinds else out

    return keep_name(captured, fn)


Key = tuple[Path, str, type]


class _Capture(Handler):
    """One call of a captured function."""

    def __init__(self, kinds: list[type], init: Any, outputs: type | None):
        self.kinds = kinds
        self.init: dict[Key, Variable[Any]] = {}
        for path, value in flat_items({} if init is None else init):
            if not isinstance(value, Variable) or not path:
                raise CaptureError(
                    f"capture: `init` has a {type(value).__name__} at "
                    f"{show_path(path)}; it must be a State of Variables, as a capture "
                    "gives."
                )
            self.init[path[:-1], str(path[-1]), type(value)] = value
        self.unused = {**self.init}
        self.perturbed: dict[Key, Call] = {}  # the first call of each
        heard = frozenset(kinds) | {kind for _, _, kind in self.init}
        super().__init__(Listening(heard, outputs, False))

    def wants(self, call: Call) -> bool:
        """Whether a value is recorded: not what `perturb` is called with."""
        if call.label.how == "perturb":
            return False
        self.unused.pop(key_of(call), None)
        return call.label.kind in self.kinds

    def feeds(self, call: Call) -> Fed | None:
        """What `perturb` adds to a value."""
        if call.label.how != "perturb":
            return None
        key, types = key_of(call), _types(call.spot.avals)
        known = _types(self.perturbed.setdefault(key, call).spot.avals)
        if known != types:
            raise CaptureError(
                f"perturb: {site_text(*key[:2])} is called with values of different "
                f"types, {known} and {types}. One name has one perturbation; use two "
                "names."
            )
        self.unused.pop(key, None)
        if key not in self.init:
            return None
        leaves, tree = jax.tree.flatten(self.init[key].get_raw_value())
        if tree != call.label.tree or _types(leaves) != types:
            raise CaptureError(
                f"capture: `init` has at {site_text(*key[:2])} values of shape and "
                f"type {_types(leaves)}, the value there has {types}. Make `init` by a "
                "capture of the same call."
            )
        return Fed(Adding(), leaves)

    def states(self) -> list[State]:
        """One State for each kind that was asked for."""
        if self.unused:
            shown = ", ".join(site_text(path, name) for path, name, _ in self.unused)
            raise CaptureError(
                f"capture: nothing in the call uses what `init` gives for {shown}. "
                "`perturb` and `sow` must name it, with the same kind of Variable."
            )
        found = {key: variable.get_raw_value() for key, variable in self.init.items()}
        for key, call in self.perturbed.items():
            if key not in found:
                zeros = [jax_compat.zeros_of(aval) for aval in call.spot.avals]
                found[key] = value_of(call, zeros)
        for call in self.session.calls:
            key = key_of(call)
            reduce_fn, init_fn = call.label.reduce or (append, tuple)
            before = found[key] if key in found else init_fn()
            if reduce_fn is append and not isinstance(before, tuple):
                raise CaptureError(
                    f"capture: `init` has at {site_text(*key[:2])} a "
                    f"{type(before).__name__}, and `sow` adds to a tuple there."
                )
            found[key] = reduce_fn(before, value_of(call, _with_all_rows(call)))
        return [_state(found, kind) for kind in self.kinds]


def _with_all_rows(call: Call) -> list[Any]:
    """The leaves of a value, each with the axes of all mappings around it.

    A leaf that is the same for all rows of a `vmap` comes out without them.
    """
    levels = call.spot.levels
    if not levels:
        return call.values
    mappings = {n for n, axis in enumerate(levels) if axis.kind == VMAP}

    def with_rows(leaf: Any, has: Sequence[int]) -> Any:
        wanted = sorted(mappings.union(has))
        return arranged(leaf, has, wanted, [levels[n].size for n in wanted])

    return list(map(with_rows, call.values, call.spot.has))


def _types(values: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Shapes and types of arrays, or of abstract ones."""
    return [(np.shape(value), jnp.result_type(value)) for value in values]


def key_of(call: Call) -> Key:
    """What tells the entries of a State apart."""
    return call.where.path, call.label.name, call.label.kind or Variable


def _state(found: dict[Key, Any], kind: type) -> State:
    """A State of the entries of one kind, nested by path and sorted."""
    trace = current_trace()
    entries = [
        ((*path, name), make(kind, value, PLAIN, trace))
        for (path, name, other), value in found.items()
        if other is kind
    ]
    try:
        return State(nested(flat_items(nested(entries))))  # in the order of the keys
    except StructureError as error:
        raise CaptureError(
            f"capture: {error} Use another name in `sow` or `perturb`."
        ) from None
