# SPDX-License-Identifier: Apache-2.0
"""TrainState: a model in parts, with an optimizer, as one tree that does not change.

It is older than `Optimizer`, and programs still use it: `apply_gradients` returns the
state of the next step. Subclasses add fields, which may hold Variables or arrays.
"""

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, cast

import jax
import jax.numpy as jnp

from treetap._core.trees.graphdef import GraphDef
from treetap._core.trees.split import call
from treetap.nnx.flax_parts import PyTreeNode, field, replaced

M = TypeVar("M")


class TrainState(PyTreeNode, Generic[M]):
    """A GraphDef, its parameters, the state of an optax transformation, and a step."""

    graphdef: GraphDef
    params: Any
    opt_state: Any
    step: jax.Array
    tx: Any = field(pytree_node=False)

    @classmethod
    def create(
        cls, graphdef: GraphDef, *, params: Any, tx: Any, step: int = 0, **kwargs: Any
    ) -> Self:
        """A state at its beginning.

        Args:
            graphdef: What `split` gave.
            params: The State of what is trained.
            tx: An optax transformation.
            step: The number of steps done.
            **kwargs: The fields that a subclass adds.
        """
        parts = {"graphdef": graphdef, "params": params, "tx": tx}
        steps = jnp.asarray(step)
        make = cast(Callable[..., Self], cls)
        return make(**parts, opt_state=tx.init(params), step=steps, **kwargs)

    def apply(self, state: Any, *states: Any) -> Any:
        """A proxy that calls methods of the merged model; see `call`.

        Args:
            state: A State, or the name of a field that holds one.
            *states: More of the same.
        """
        named = [
            getattr(self, s) if isinstance(s, str) else s for s in (state, *states)
        ]
        return call((self.graphdef, *named))

    def apply_gradients(self, grads: Any, **kwargs: Any) -> Self:
        """The state one step later.

        Args:
            grads: Gradients, a State like `params`.
            **kwargs: Other fields to change.
        """
        import optax

        updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        params = optax.apply_updates(self.params, updates)
        changes = {"params": params, "opt_state": opt_state, "step": self.step + 1}
        return replaced(self, **changes, **kwargs)
