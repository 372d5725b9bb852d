# SPDX-License-Identifier: Apache-2.0
"""Numbers in few letters, histograms in a line."""

import pytest

from treetap._cli.console import BLOCKS, number_text, share_text, spark
from treetap._core.wording import many


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (-1.23456, "-1.235"),
        (12.3456, "12.35"),
        (123.456, "123.5"),
        (-12345.6, "-12346"),
        (1e5, "1.0e+05"),
        (-1.26e-5, "-1.3e-05"),
        (0.001, "0.001"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_numbers(value, text):
    assert number_text(value) == text
    assert len(text) <= 8


def test_shares_and_counts():
    found = [share_text(x) for x in (None, 0.0, 0.004, 0.5, 1.0)]
    assert found == ["-", "0%", "<1%", "50%", "100%"]
    assert [many(n, "site") for n in (1, 2000)] == [
        "1 site",
        "2,000 sites",
    ]


def test_sparks():
    assert spark([0, 0], 4) == ""
    assert spark([0, 3, 0], 4) == "█"
    assert spark([0, 1, 8, 0, 4, 0], 4) == "▂█ ▅"
    assert spark([1, 1, 2, 2, 4, 4], 3, " .:#") == ".:#"
    assert len(spark(range(1, 65), 12)) == 12
    assert set(spark([1, 1000], 2)) == {BLOCKS[1], BLOCKS[-1]}  # what is rare is seen
