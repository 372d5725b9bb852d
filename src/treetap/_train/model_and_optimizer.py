# SPDX-License-Identifier: Apache-2.0
"""ModelAndOptimizer: the deprecated pairing of a model with its optimizer.

NNX programs written before the two were parted still use it; `treetap.nnx` exports it,
and each construction warns. New programs keep a model and an `Optimizer` side by side.
"""

import warnings
from typing import Any

from treetap._core.trees.filters import Filter
from treetap._core.variables.kinds import Param
from treetap._train.optimizer import Optimization


class ModelAndOptimizer(Optimization):
    """Deprecated: a model with its optimizer in one object; use `Optimizer`.

    Args:
        model: The model; the attribute `model` afterwards.
        tx: An optax transformation.
        wrt: A filter: what is trained.
        graph: Keep shared references in the model instead of refusing them.

    Examples:
        >>> import warnings, optax, treetap as tt
        >>> from treetap._train.model_and_optimizer import ModelAndOptimizer
        >>> with warnings.catch_warnings(action="ignore"):
        ...     both = ModelAndOptimizer(tt.Dict(w=tt.Param(2.0)), optax.sgd(0.5))
        >>> _ = both.update({"w": 1.0})
        >>> float(both.model.w)
        1.5
    """

    def __init__(
        self, model: Any, tx: Any, *, wrt: Filter = Param, graph: bool | None = None
    ) -> None:
        depth = type(self).__mro__.index(ModelAndOptimizer)  # of `super().__init__`
        warnings.warn(
            "ModelAndOptimizer is deprecated; keep the model beside an `Optimizer` and "
            "call `optimizer.update(model, grads)`.",
            DeprecationWarning,
            stacklevel=3 + depth,
        )
        super().__init__(model, tx, wrt, graph)
        self.model = model

    def update(self, grads: Any, /, **kwargs: Any) -> Any:
        """As `Optimizer.update`, of the model inside."""
        return self._take_step(self.model, grads, kwargs)
