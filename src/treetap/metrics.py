# SPDX-License-Identifier: Apache-2.0
"""Metrics: numbers gathered over batches, such as a mean loss or an accuracy.

A metric keeps sums and counts in Variables, so it is updated in place, inside any
transform too. `update` takes one batch by keyword, `compute` gives the result so far,
`reset` begins anew. A `mask` leaves out the entries where it is zero.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treetap._core.errors import StructureError
from treetap._core.trees.filters import Filter
from treetap._core.trees.pytree import Pytree, variables_below
from treetap._core.trees.split import split
from treetap._core.variables.operators import unboxed
from treetap._core.variables.variable import A, Snapshot, Variable

__all__ = [
    "Accuracy",
    "Average",
    "Metric",
    "MetricState",
    "MultiMetric",
    "Statistics",
    "Welford",
]


class MetricState(Variable[A]):
    """State of a metric."""


class Metric(Pytree):
    """Base class of metrics; a metric defines all methods but `split`.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> class Largest(tt.Metric):
        ...     def __init__(self):
        ...         self.value = tt.metrics.MetricState(jnp.array(-jnp.inf))
        ...     def reset(self):
        ...         self.value[...] = -jnp.inf
        ...     def update(self, *, values, **_):
        ...         self.value[...] = jnp.maximum(self.value, values.max())
        ...     def compute(self):
        ...         return self.value[...]
        >>> largest = Largest()
        >>> largest.update(values=jnp.array([1.0, 3.0]))
        >>> float(largest.compute())
        3.0
    """

    def __init__(self) -> None:
        raise _not_defined(self, "__init__")

    def reset(self) -> None:
        """Forget all batches."""
        raise _not_defined(self, "reset")

    def update(self, **kwargs: Any) -> None:
        """Take a batch into account.

        Args:
            **kwargs: What the metric needs, by name; other names are left alone.
        """
        raise _not_defined(self, "update")

    def compute(self) -> Any:
        """Return the result for all batches since the last `reset`."""
        raise _not_defined(self, "compute")

    def split(self, *filters: Filter) -> Any:
        """Split the metric, as `treetap.split(metric, *filters)` does."""
        return split(self, *filters)


def _not_defined(metric: Metric, method: str) -> NotImplementedError:
    """Return the error for a method that a metric has to define."""
    name = type(metric).__name__
    return NotImplementedError(f"{name}: Must override `{method}()` method.")


class _Batch:
    """The entries of a batch in at least float32, and which of them count.

    Args:
        name: The metric, for messages.
        values: An array, or one number.
        mask: An array that broadcasts against the values, or None.
    """

    def __init__(self, name: str, values: Any, mask: Any):
        values, mask = unboxed(values), unboxed(mask)
        is_number = isinstance(values, bool | int | float)
        if not (is_number or isinstance(values, jax.Array | np.ndarray | np.generic)):
            raise TypeError(
                f"{name}: the values are a {type(values).__name__}; give an array or a "
                "number."
            )
        if is_number and mask is not None:
            raise StructureError(
                f"{name}: with a mask, the values should be a jax array; they are the "
                f"number {values}. Leave the mask out."
            )
        values = jnp.asarray(values)
        if jnp.iscomplexobj(values):
            raise TypeError(f"{name}: the values are {values.dtype}; give real ones.")
        is_wide = values.dtype == jnp.float64
        self.values = values if is_wide else values.astype(jnp.float32)
        self.keep: Any = None  # for all
        self.size: Any = values.size
        if mask is None:
            return
        keep = jnp.asarray(mask) != 0
        try:
            self.values, self.keep = jnp.broadcast_arrays(self.values, keep)
        except ValueError:
            raise StructureError(
                f"{name}: a mask of shape {keep.shape} does not broadcast against "
                f"values of shape {values.shape}."
            ) from None
        self.size = self.keep.sum()

    def sum(self, values: jax.Array) -> jax.Array:
        """Return the sum of those values that count."""
        return values.sum(where=self.keep)


def _zero(dtype: Any) -> MetricState[Any]:
    """Return a state that begins at zero."""
    return MetricState(jnp.zeros((), dtype))


def _batch_of(name: str, argname: str, kwargs: Mapping[str, Any]) -> _Batch:
    """Return the batch in the keyword argument of a metric's `argname`."""
    if argname not in kwargs:
        raise TypeError(
            f"{name}: Expected keyword argument {argname!r}, got {sorted(kwargs)}."
        )
    return _Batch(name, kwargs[argname], kwargs.get("mask"))


def _write(metric: Metric, **values: Any) -> None:
    """Write the states of a metric, by name, when all of them have been computed."""
    for name, value in values.items():
        getattr(metric, name)[...] = value


class Average(Metric):
    """Average all values.

    Args:
        argname: The keyword argument of `update` that has the values.

    Attributes:
        total: The sum so far.
        count: How many entries it is the sum of.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> loss = tt.metrics.Average("loss")
        >>> loss.update(loss=jnp.array([1.0, 2.0]), mask=jnp.array([True, False]))
        >>> loss.update(loss=4.0)
        >>> float(loss.compute())
        2.5
    """

    def __init__(self, argname: str = "values") -> None:
        self.argname = argname
        self.total = _zero(jnp.float32)
        self.count = _zero(jnp.int32)

    def reset(self) -> None:
        """Forget all batches."""
        _write(self, total=0.0, count=0)

    def update(self, mask: Any = None, **kwargs: Any) -> None:
        """Add values.

        Args:
            mask: Which of the values count: an array that broadcasts against them.
            **kwargs: The values under the metric's `argname`, an array or a number.
        """
        kwargs |= {} if mask is None else {"mask": mask}
        self._add(_batch_of("Average.update", self.argname, kwargs))

    def _add(self, batch: _Batch) -> None:
        total = self.total + batch.sum(batch.values)
        _write(self, total=total, count=self.count + batch.size)

    def compute(self) -> jax.Array:
        """Return the mean; nan when nothing was counted."""
        return self.total / self.count


class Accuracy(Average):
    """Average how often the prediction is right.

    Args:
        threshold: For binary classification: logits from here on mean yes. Without it
            the class with the largest logit is the prediction.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> accuracy = tt.metrics.Accuracy()
        >>> logits = jnp.array([[2.0, 1.0], [0.0, 1.0]])
        >>> accuracy.update(logits=logits, labels=jnp.array([0, 0]))
        >>> float(accuracy.compute())
        0.5
    """

    def __init__(self, threshold: float | None = None) -> None:
        if threshold is not None and not isinstance(threshold, float):
            raise TypeError(
                "Accuracy: Expected threshold to be a float, got "
                f"{type(threshold).__name__}."
            )
        super().__init__()
        self.threshold = threshold

    def update(  # pyright: ignore[reportIncompatibleMethodOverride] - given by name
        self, *, logits: Any, labels: Any, mask: Any = None, **_: Any
    ) -> None:
        """Add predictions.

        Args:
            logits: Scores; the last axis has the classes, unless there is a threshold.
            labels: The right classes, integers; with a threshold, positive means yes.
            mask: Which entries count, an array that broadcasts against the labels.
            **_: Arguments of other metrics.
        """
        logits, labels = jnp.asarray(logits), jnp.asarray(labels)
        is_whole = jnp.issubdtype(labels.dtype, jnp.integer) or labels.dtype == bool
        if not is_whole:
            raise ValueError(
                f"Accuracy.update: Expected labels to be integers, got {labels.dtype}."
            )
        if self.threshold is None:
            _check_shapes("multi-class", logits, labels, class_axes=1)
            correct = logits.argmax(axis=-1) == labels
        else:
            _check_shapes("binary", logits, labels, class_axes=0)
            correct = (logits >= self.threshold) == (labels > 0)
        self._add(_Batch("Accuracy.update", correct, mask))


def _check_shapes(what: str, logits: Any, labels: Any, class_axes: int) -> None:
    """Refuse logits that do not go with labels."""
    if logits.ndim != labels.ndim + class_axes:
        rank = "labels.ndim+1" if class_axes else "labels.ndim"
        raise ValueError(
            f"Accuracy.update: For {what} classification, expected "
            f"logits.ndim=={rank}, got {logits.ndim} and {labels.ndim}."
        )
    if logits.shape[: labels.ndim] != labels.shape:
        raise ValueError(
            f"Accuracy.update: For {what} classification, logits of shape "
            f"{logits.shape} do not go with labels of shape {labels.shape}."
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistics:
    """What `Welford` computes.

    Attributes:
        mean: The mean.
        standard_error_of_mean: The standard deviation over the root of the count.
        standard_deviation: That of the values as a whole population.
    """

    mean: Any
    standard_error_of_mean: Any
    standard_deviation: Any

    def replace(self, **changes: Any) -> "Statistics":
        """Return a copy with other values in some fields."""
        return dataclasses.replace(self, **changes)


class Welford(Metric):
    """Compute mean and standard deviation of all values, by Welford's algorithm.

    Batches are merged by their own mean and sum of squared deviations, so that a large
    mean does not drown the deviations.

    Args:
        argname: The keyword argument of `update` that has the values.

    Attributes:
        count: How many values there were.
        mean: Their mean.
        m2: The sum of their squared deviations from it.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> welford = tt.metrics.Welford()
        >>> welford.update(values=jnp.array([1.0, 3.0]))
        >>> welford.update(values=jnp.array([2.0, 2.0]))
        >>> found = welford.compute()
        >>> round(float(found.mean), 3), round(float(found.standard_deviation), 3)
        (2.0, 0.707)
    """

    def __init__(self, argname: str = "values") -> None:
        self.argname = argname
        self.count = _zero(jnp.int32)
        self.mean = _zero(jnp.float32)
        self.m2 = _zero(jnp.float32)

    def reset(self) -> None:
        """Forget all batches."""
        _write(self, count=0, mean=0.0, m2=0.0)

    def update(self, **kwargs: Any) -> None:
        """Add values.

        Args:
            **kwargs: The values under the metric's `argname`, an array or a number;
                and `mask`, an array that broadcasts against them.
        """
        batch = _batch_of("Welford.update", self.argname, kwargs)
        size = jnp.asarray(batch.size, jnp.float32)
        mean = batch.sum(batch.values) / jnp.maximum(size, 1)
        squares = batch.sum((batch.values - mean) ** 2)
        before = self.count.astype(jnp.float32)
        share = size / jnp.maximum(before + size, 1)
        delta = mean - self.mean
        m2 = self.m2 + squares + delta**2 * before * share
        mean = self.mean + delta * share
        _write(self, count=self.count + batch.size, mean=mean, m2=m2)

    def compute(self) -> Statistics:
        """Return the statistics; the deviations are nan when nothing was counted."""
        count = self.count.astype(jnp.float32)
        deviation = jnp.sqrt(self.m2 / count)
        return Statistics(self.mean[...], deviation / jnp.sqrt(count), deviation)


class MultiMetric(Metric):
    """Put several metrics together: each an attribute, all updated at once.

    Args:
        **metrics: The metrics by name.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> both = tt.MultiMetric(
        ...     loss=tt.metrics.Average("loss"), accuracy=tt.metrics.Accuracy()
        ... )
        >>> logits, labels = jnp.eye(2), jnp.array([0, 1])
        >>> both.update(loss=0.5, logits=logits, labels=labels)
        >>> {name: float(value) for name, value in both.compute().items()}
        {'loss': 0.5, 'accuracy': 1.0}
    """

    def __init__(self, **metrics: Metric) -> None:
        self._metric_names = tuple(metrics)
        for name, metric in metrics.items():
            if name in dir(MultiMetric) or name.startswith("_"):
                raise StructureError(
                    f"MultiMetric: {name!r} cannot be the name of a metric: it is, or "
                    "may become, an attribute of MultiMetric itself. Choose another."
                )
            if not isinstance(metric, Metric):
                raise TypeError(
                    f"MultiMetric: {name!r} is a {type(metric).__name__}, not a Metric."
                )
            setattr(self, name, metric)

    def _metrics(self) -> dict[str, Any]:
        """Return the metrics by name."""
        return {name: getattr(self, name) for name in self._metric_names}

    def reset(self) -> None:
        """Forget all batches, in all metrics."""
        for metric in self._metrics().values():
            metric.reset()

    def update(self, **kwargs: Any) -> None:
        """Hand a batch to every metric; when one refuses it, none has taken it.

        Args:
            **kwargs: What the metrics need, together. `mask` is an array for all, or a
                mapping from some metrics' names to theirs.
        """
        metrics = self._metrics()
        masks = kwargs.pop("mask", None)
        if not isinstance(masks, Mapping):
            masks = dict.fromkeys(metrics, masks)
        if unknown := sorted(masks.keys() - metrics.keys()):
            raise StructureError(
                f"MultiMetric.update: `mask` has entries for {unknown}; the metrics "
                f"are {list(metrics)}."
            )
        with Snapshot(variables_below(self)):
            for name, metric in metrics.items():
                mask = masks.get(name)
                metric.update(**kwargs, **({} if mask is None else {"mask": mask}))

    def compute(self) -> dict[str, Any]:
        """Return the results by name."""
        return {name: metric.compute() for name, metric in self._metrics().items()}
