# SPDX-License-Identifier: Apache-2.0
"""Module: a Pytree with the surface people expect of a neural-network module.

A Module's public methods run under the name its parent holds it by (see `methods`),
and attributes such as `deterministic` can be set for a Module and everything inside it.
"""

import inspect
from collections.abc import Callable, Iterator
from itertools import product
from types import MappingProxyType
from typing import Any

from treetap._capture.listening import append, listening
from treetap._core.errors import StructureError
from treetap._core.paths import Key, Path
from treetap._core.settings import resolve_graph, set_graph_mode
from treetap._core.trace_level import set_on_purpose
from treetap._core.trees.attributes import Node, classify
from treetap._core.trees.filters import Any as AnyOf
from treetap._core.trees.filters import Filter
from treetap._core.trees.pytree import Pytree, opened
from treetap._core.trees.sharing import refuse_pytree_false
from treetap._core.trees.traverse import nodes_below
from treetap._core.variables.kinds import Perturbation
from treetap._core.variables.variable import Variable
from treetap._modules.methods import wrap_methods


class Module(Pytree):
    """Base class of neural-network modules.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> class Affine(tt.Module):
        ...     def __init__(self, size):
        ...         self.w = tt.Param(jnp.ones(size))
        ...         self.b = tt.Param(jnp.zeros(size))
        ...     def __call__(self, x):
        ...         return x * self.w + self.b
        >>> Affine(2)(jnp.arange(2.0))
        Array([0., 1.], dtype=float32)
    """

    _pytree__told_of = MappingProxyType(
        {
            "__captures__": " now: it is there while a capture runs. Call the Module "
            "as `capture(module, Intermediate)(...)`, and read it in a method."
        }
    )

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        wrap_methods(cls, _OWN_METHODS)

    @property
    def __captures__(self) -> tuple[Variable[Any], ...]:
        """What this Module has sown and perturbed so far, while a capture is open.

        A Variable for each kind that the capture collects, each with a dict by name;
        the outputs of methods are among them if it takes those. Without a capture the
        attribute is not there.
        """
        if listening.value is None:
            raise AttributeError("__captures__")
        from treetap._capture.sown_so_far import sown_so_far  # only under a capture

        return sown_so_far(self)

    def set_attributes(
        self,
        *filters: Filter,
        raise_if_not_found: bool = True,
        graph: bool | None = None,
        **attributes: Any,
    ) -> None:
        """Sets attributes on this Module and those inside it that have them.

        Either everything is set, or, when something is wrong, nothing is.

        Args:
            *filters: Which Modules; all without filters.
            raise_if_not_found: Whether an attribute that no Module has is an error.
            graph: False refuses shared references, as tree mode does; otherwise a
                shared Module is visited once.
            **attributes: Names and their new values.
        """
        # A Module met twice is set once, and there is nothing to decide. So tree mode
        # refuses it only where somebody has asked for it.
        graph = set_graph_mode.value_that_is_set() if graph is None else graph
        modules = nodes_below(self, Module, graph is not False, "set_attributes")
        assign(modules, filters, attributes, raise_if_not_found, "set_attributes")

    def train(self, **attributes: Any) -> None:
        """Sets `deterministic` and `use_running_average` to False wherever they are.

        Args:
            **attributes: More attributes to set; those two may be among them.
        """
        self._switch(False, attributes)

    def eval(self, **attributes: Any) -> None:
        """Sets `deterministic` and `use_running_average` to True wherever they are.

        Args:
            **attributes: More attributes to set; those two may be among them.
        """
        self._switch(True, attributes)

    def sow(  # noqa: PLR0917 - the arguments are those of NNX
        self,
        variable_type: Any,
        name: str,
        value: Any,
        reduce_fn: Callable[[Any, Any], Any] = append,
        init_fn: Callable[[], Any] = tuple,
        capture_noop: bool | None = None,
    ) -> bool:
        """Records a value; a `capture` of that kind of Variable collects it.

        Args:
            variable_type: The kind of Variable, or the name of one.
            name: What to call the value.
            value: An array, or any tree of arrays.
            reduce_fn: Adds a value to what was recorded before: to a tuple by default.
            init_fn: What to begin with.
            capture_noop: Whether to do nothing while no capture is open, instead of
                storing the value on the Module; `set_sow_outside_capture` by default.

        Returns:
            Whether somebody records it.
        """
        from treetap._capture.emit import sow  # for those who sow only

        reduce = (reduce_fn, init_fn)
        return sow(self, variable_type, name, value, reduce, capture_noop)

    def perturb(
        self,
        name: str,
        value: Any,
        variable_type: Any = Perturbation,
        capture_noop: bool | None = None,
    ) -> Any:
        """Adds to a value what a `capture` was given for it, zeros at first.

        The gradient with respect to what is added is that of the value.

        Args:
            name: What to call the value.
            value: An array, or any tree of arrays.
            variable_type: The kind of Variable, or the name of one.
            capture_noop: As for `sow`.

        Returns:
            The sum; use it in place of the value.
        """
        from treetap._capture.emit import perturb  # for those who perturb only

        return perturb(self, name, value, variable_type, capture_noop)

    def _switch(self, value: bool, attributes: dict[str, Any]) -> None:
        both = {"deterministic": value, "use_running_average": value}
        self.set_attributes(raise_if_not_found=False, **{**both, **attributes})


_OWN_METHODS = {"iter_modules", "iter_children", "set_view"}
_OWN_METHODS |= {name for name in vars(Module) if name[0] != "_"}


def assign(
    modules: list[tuple[Path, Any]],
    filters: tuple[Filter, ...],
    attributes: dict[str, Any],
    raise_if_not_found: bool,
    name: str,
) -> None:
    """Sets attributes on the Modules that filters take and that have them."""
    wanted = AnyOf(*filters) if filters else AnyOf(...)
    chosen = [module for path, module in modules if wanted(path, module)]
    planned = [pair for pair in product(chosen, attributes) if hasattr(*pair)]
    missing = sorted(attributes.keys() - {key for _, key in planned})
    if missing and raise_if_not_found:
        raise StructureError(
            f"{name}: Could not find at least one instance of the following "
            f"attributes: {missing}. Nothing was set."
        )
    for module, key in planned:
        _check_assignment(module, key, attributes[key])
    noted = set_on_purpose.get()
    for module, key in planned:
        if noted is not None:
            noted.add((id(module), key))
        setattr(module, key, attributes[key])


def _check_assignment(module: Module, key: str, value: Any) -> None:
    """Raises what `setattr(module, key, value)` would raise, and changes nothing."""
    cls = type(module)
    module._check_trace()
    if key in cls._pytree__descriptors:
        held = inspect.getattr_static(cls, key)
        if isinstance(held, property) and held.fset is None:
            raise AttributeError(
                f"set_attributes: {cls.__name__}.{key} is a property without a setter."
            )
    elif cls._pytree__is_pytree:
        status = module._pytree__status.get(key, cls._pytree__class_status.get(key))
        classify(cls.__name__, key, value, status)


def iter_modules(
    module: Any, /, *, graph: bool | None = None
) -> Iterator[tuple[Path, Module]]:
    """Visits every Module inside, with its path; children before parents.

    Args:
        module: A Module, or any tree of Modules.
        graph: Visit a shared Module once, at its first path, instead of refusing it.

    Examples:
        >>> import treetap as tt
        >>> class Leaf(tt.Module):
        ...     pass
        >>> class Tree(tt.Module):
        ...     def __init__(self):
        ...         self.b, self.a = Leaf(), Leaf()
        >>> [path for path, _ in tt.iter_modules(Tree())]
        [('a',), ('b',), ()]
    """
    return iter(nodes_below(module, Module, resolve_graph(graph), "iter_modules"))


def iter_children(
    node: Any, /, *, graph: bool | None = None
) -> Iterator[tuple[Key, Module]]:
    """The Modules that are direct children of an object, with their keys.

    Args:
        node: A Module or another Pytree object.
        graph: Tree mode refuses an object whose class is declared with `pytree=False`.
    """
    if not isinstance(node, Node):
        raise StructureError(
            "iter_children: expected a Module or another Pytree object, got "
            f"{type(node).__name__}."
        )
    if not (node._pytree__is_pytree or resolve_graph(graph)):
        raise refuse_pytree_false("iter_children", node, node)
    pairs = zip(*(opened(node) or ()))
    return ((key, child) for key, child in pairs if isinstance(child, Module))


iter_module_children = iter_children
