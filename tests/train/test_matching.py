# SPDX-License-Identifier: Apache-2.0
"""What does not fit a model is found by path, all of it, before anything changes."""

import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt
from treetap._train.matching import (
    gathered,
    leaves_of,
    misfit_of_arrays,
    misfit_of_values,
    raw_value,
    refuse_misfits,
)


def test_leaves_by_path_and_back():
    weight = tt.Param(jnp.ones(2))
    found = leaves_of({"a": {"w": weight}, "b": 1.0}, False, "test")
    assert found == {("a", "w"): weight, ("b",): 1.0}
    assert gathered(found) == tt.State({"a": {"w": weight}, "b": 1.0})
    bare = leaves_of(1.0, False, "test")
    assert bare == {(): 1.0}
    assert gathered(bare) == 1.0


def test_values_are_read_from_refs():
    assert raw_value(tt.Param(jnp.array(3.0), ref=True)) == 3.0
    assert raw_value(3.0) == 3.0


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (np.ones(2, np.float16), ""),
        (np.ones(3, np.float32), "shape (3,), expected (2,)"),
        (np.ones(2, np.complex64), "dtype complex64, expected float32"),
    ],
)
def test_arrays_of_another_shape_or_kind_of_number_do_not_fit(found, problem):
    assert misfit_of_arrays(np.ones(2, np.float32), found) == problem


def test_containers_fit_when_their_arrays_do():
    pair = tt.Param([np.ones(2), np.ones(3)])
    assert misfit_of_values(pair, [np.ones(2), np.ones(3)], misfit_of_arrays) == ""
    found = misfit_of_values(pair, [np.ones(2), np.ones(4)], misfit_of_arrays)
    assert found == "shape (4,), expected (3,)"
    found = misfit_of_values(pair, np.ones(2), misfit_of_arrays)
    assert found == "an array, expected a list"


def test_all_that_does_not_fit_is_listed():
    wanted, found = {("a",): 1, ("b", "c"): 2}, {("b", "c"): 3, ("d",): 4}
    message = r"^It; nothing was changed\.\n  - missing a\n  - b/c: 2, not 3\n"
    with pytest.raises(tt.StructureError, match=message + r"  - unexpected d\nDo this"):
        refuse_misfits(
            "It",
            wanted,
            found,
            compare=lambda one, two: f"{one}, not {two}",
            unexpected=[("d",)],
            remedy="Do this.",
        )


def test_what_fits_is_not_refused():
    refuse_misfits("It", {("a",): 1}, {("a",): 2, ("b",): 3}, remedy="")
