# SPDX-License-Identifier: Apache-2.0
"""Tables that fit, numbers in few letters, histograms in a line."""

import pytest
from rich.cells import cell_len
from rich.console import Console

from treetap._cli.console import (
    BLOCKS,
    Column,
    Listing,
    many,
    number_text,
    share_text,
    spark,
)


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


def listing(name):
    rows = 3
    return Listing(
        [
            Column("site", [name] * rows, 0, False, 20, "3 sites"),
            Column("memory", ["1.0 KB"] * rows, 3, total="1,023.0 KB"),
            Column("histogram", ["▁▂▃▄▅▆▇█▇▆▅▄"] * rows, 2, False),
            Column("mean", ["-1.3e-05"] * rows, 1),
        ]
    )


def drawn(table, width):
    console = Console(width=width, color_system=None, file=None)
    with console.capture() as text:
        console.print(table)
    return text.get()


@pytest.mark.parametrize("width", range(20, 90, 3))
@pytest.mark.parametrize("name", ["short", "blocks/10/attention/query:__call__#3"])
def test_tables_fit_and_say_what_is_left_out(width, name):
    text = drawn(listing(name), width)
    assert max(map(cell_len, text.splitlines())) <= width
    assert "…" not in text
    heads = text.splitlines()[0].split()
    told = " ".join(text.split())
    left_out = [head for head in ("memory", "histogram", "mean") if head not in heads]
    assert ("Too narrow" in told) == bool(left_out)
    if left_out:
        assert f"Too narrow to show: {', '.join(left_out)};" in told
    order = ["mean", "histogram", "memory"]  # by what matters
    assert [head for head in order if head in heads] == order[: 3 - len(left_out)]


def test_a_long_name_is_folded_not_cut():
    text = drawn(listing("a" * 50), 40)
    assert text.replace("\n", "").count("a") - text.count("mean") >= 150


def test_names_are_not_markup():
    assert "[bold]x[/bold]" in drawn(listing("[bold]x[/bold]"), 80)
