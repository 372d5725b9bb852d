# SPDX-License-Identifier: Apache-2.0
"""No `*("a", "b"),` in a display: a literal is unpacked only to steer the formatter.

Such a tuple says nothing that its items do not say. A long list of words is written
`"a b c".split()`, anything else as a line for each item.
"""

import ast
import pathlib
import re
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("src", "tests", "docs", "examples", "benchmarks", "fuzz")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def programs() -> Iterator[tuple[str, str]]:
    """The text of each program, with where it stands."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text("utf-8")
        for path in sorted((ROOT / folder).rglob("*.md")):
            for number, code in enumerate(BLOCK.findall(path.read_text("utf-8"))):
                yield f"{path.relative_to(ROOT)}, block {number}", code


def star_tuples(code: str) -> list[int]:
    """The lines where a literal is unpacked in place."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Starred)
        and isinstance(node.value, ast.Tuple | ast.List | ast.Set)
    ]


def test_no_literal_is_unpacked_in_place():
    found = [
        f"{place}:{line}" for place, code in programs() for line in star_tuples(code)
    ]
    assert found == []


def test_those_that_are_there_would_be_found():
    assert star_tuples("x = [1, *(2, 3), *y]\nf(*[4])") == [1, 2]
