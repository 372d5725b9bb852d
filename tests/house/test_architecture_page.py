# SPDX-License-Identifier: Apache-2.0
"""The page of the architecture and its drawing: what they name is there."""

import pathlib
import re

import pytest
from count_code import SOURCE
from test_structure import FOLDERS

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
DRAWING = ROOT / "docs" / "images" / "architecture.svg"
PAGES = [PAGE, ROOT / "docs" / "how-it-works.md", ROOT / "CONTRIBUTING.md"]
FILE = re.compile(r"`([\w/]+\.py)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_a_page_names_are_there(page):
    named = [name for name in FILE.findall(page.read_text("utf-8")) if "__" not in name]
    places = (SOURCE, ROOT)
    missing = [
        name for name in named if not any((place / name).is_file() for place in places)
    ]
    assert named
    assert missing == []


def test_every_folder_is_on_the_page_in_the_order_of_imports():
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text("utf-8"), re.M)
    assert rows == FOLDERS[::-1]


def test_every_folder_is_in_the_drawing_in_the_order_of_imports():
    names = re.findall(r'<text class="name"[^>]*>(\w+)</text>', DRAWING.read_text())
    assert names == [*FOLDERS[::-1], "JAX"]


def test_each_stop_of_the_drawing_is_a_step_of_the_page():
    stops = re.findall(r'<text class="number"[^>]*>(\d+)</text>', DRAWING.read_text())
    steps = re.findall(r"^(\d+)\. \*\*", PAGE.read_text("utf-8"), re.M)
    assert stops == steps
