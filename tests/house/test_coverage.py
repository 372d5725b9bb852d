# SPDX-License-Identifier: Apache-2.0
"""What `make coverage` wants: files that there are, and what it says of the others."""

import pathlib

import check_coverage
from check_coverage import Reached


def test_the_files_of_the_core_are_there():
    assert check_coverage.unknown_files() == []
    assert len(set(check_coverage.CORE)) == len(check_coverage.CORE)


def test_the_core_is_reached_whole_and_the_rest_for_the_most_part():
    core = pathlib.Path(check_coverage.CORE[0]).with_suffix(".py")
    found = [
        Reached(core, 99.0, [3, 5], [5]),
        Reached(pathlib.Path("_nn/linear.py"), 96.0, [7], []),
        Reached(pathlib.Path("_nn/linear.py"), 90.0, [7], []),
    ]
    assert list(check_coverage.problems(iter(found))) == [
        f"{core}: 99.0 % of it is reached, and 100 % is wanted; not reached: 3, 5",
        f"{core}:5: no test comes to this `raise`",
        "_nn/linear.py: 90.0 % of it is reached, and 95 % is wanted; not reached: 7",
    ]
