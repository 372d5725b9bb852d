# SPDX-License-Identifier: Apache-2.0
"""Texts in messages: short, printable; names found again among many."""

import time

from treetap._core.wording import near_to, printable, quoted, shown, words_of


def test_names_that_a_line_can_take_are_as_they_are():
    assert shown("blocks/0:attn") == "blocks/0:attn"
    assert quoted("blocks/0") == "'blocks/0'"


def test_others_are_quoted_and_cut():
    assert shown("\x1b[2J") == r"'\x1b[2J'"
    assert shown("\ud800").isascii()
    assert len(shown("a" * 10_000)) < 130
    assert shown("a" * 500 + "end").endswith("end'")


def test_what_steers_a_terminal_is_replaced():
    assert printable("a\x1b[31mb\n") == "a\ufffd[31mb\ufffd"


def test_what_another_library_says_is_printable_and_cut():
    assert words_of(ValueError("no such key")) == "no such key"
    assert words_of(ValueError("a\x7fb\ud800")) == "a\ufffdb\ufffd"
    long = words_of(OSError("a" * 10_000 + "the end"))
    assert len(long) == 600
    assert long.endswith("athe end")


def test_the_likest_comes_first():
    names = ["blocks/0/attn", "blocks/0/mlp", "head"]
    assert near_to("blocks/0/atn", names, 2) == ["blocks/0/attn", "blocks/0/mlp"]
    assert near_to("nothing alike", ["xyz"], 3) == []


def test_many_and_long_names_take_bounded_time():
    start = time.process_time()
    near_to("a" * 10**6, ["a" * 10**6] * 100, 1)
    near_to("a" * 150, (f"{n:150}" for n in range(10**9)), 1, 0.3)
    assert time.process_time() - start < 20
