# SPDX-License-Identifier: Apache-2.0
"""Tables that fit where they are shown, whatever is in them."""

import pytest
from rich.cells import cell_len
from rich.console import Console

from treetap._report.table import Column, Listing, short_types


def listing(name):
    rows = 3
    return Listing(
        [
            Column("site", [name] * rows, least=20, total="3 sites"),
            Column("memory", ["1.0 KB"] * rows, True, rank=3, total="1,023.0 KB"),
            Column("histogram", ["▁▂▃▄▅▆▇█▇▆▅▄"] * rows, rank=2),
            Column("mean", ["-1.3e-05"] * rows, True, rank=1),
        ],
        remedy="; ask elsewhere",
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
        assert f"Too narrow to show: {', '.join(left_out)}; ask elsewhere." in told
    order = ["mean", "histogram", "memory"]  # by what matters
    assert [head for head in order if head in heads] == order[: 3 - len(left_out)]


def test_a_long_name_is_folded_not_cut():
    text = drawn(listing("a" * 50), 40)
    assert text.replace("\n", "").count("a") - text.count("mean") >= 150


def test_names_are_not_markup():
    assert "[bold]x[/bold]" in drawn(listing("[bold]x[/bold]"), 80)


def test_short_types_are_those_of_jaxprs():
    given = (
        "float32[1] bfloat16[2] int8[] uint32[3] complex64[] bool[4] float8_e4m3fn[]"
    )
    short = "f32[1] bf16[2] i8[] u32[3] c64[] bool[4] f8_e4m3fn[]"
    assert short_types(given) == short
