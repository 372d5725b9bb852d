# SPDX-License-Identifier: Apache-2.0
"""Samples: products of cases, of which `make test` runs few and `make test-all` all."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def quick_of(*sizes: int) -> set[tuple[int, ...]]:
    """Some places in a table of such sizes: every row, column, ... has at least one."""
    longest, columns, step = sizes.index(max(sizes)), [], 1
    for n, size in enumerate(sizes):
        if n == longest:
            columns.append(list(range(size)))
        else:
            columns.append([turn // step % size for turn in range(max(sizes))])
            step *= size
    return set(zip(*columns))


def _named(value: Any) -> str:
    """A value as a part of the name of a test, the same in every process."""
    if isinstance(value, tuple):
        return " of ".join(map(_named, value))
    return getattr(value, "__name__", str(value))


def sampled(names: str, *values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrises a test by a product; what is not in the sample is `long`.

    Args:
        names: The names of the arguments, as `parametrize` takes them.
        *values: The values of each.
    """
    quick = quick_of(*map(len, values))
    cases = zip(
        itertools.product(*values), itertools.product(*map(range, map(len, values)))
    )
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(
                *case,
                id="-".join(map(_named, case)),
                marks=() if places in quick else pytest.mark.long,
            )
            for case, places in cases
        ],
    )
