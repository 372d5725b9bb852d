# SPDX-License-Identifier: Apache-2.0
"""The tests themselves: none ends before it has looked at what it is about.

A test that returns early passes without a check. A case that cannot be checked is left
out of the cases, `hypothesis.assume` rejects an example, and two ways are two tests.
"""

import ast
import pathlib
from collections import Counter
from collections.abc import Iterator

TESTS = pathlib.Path(__file__).parents[1]


def own_statements(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """All that is in a function, without the functions and classes that it makes."""
    found: list[ast.AST] = [*function.body]
    while found:
        node = found.pop()
        if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            yield node
            found += ast.iter_child_nodes(node)


def returning(code: str) -> list[str]:
    """The tests that return from somewhere inside."""
    return [
        node.name
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and any(isinstance(each, ast.Return) for each in own_statements(node))
    ]


def test_no_test_returns():
    found = {
        str(path.relative_to(TESTS)): names
        for path in sorted(TESTS.rglob("test_*.py"))
        if (names := returning(path.read_text("utf-8")))
    }
    assert found == {}


def test_one_that_does_would_be_found():
    early = "def test_a(x):\n    if x:\n        return\n    assert x"
    inner = "def test_b(x):\n    def f():\n        return x\n    assert f()"
    assert returning(f"{early}\n\n{inner}") == ["test_a"]


def test_every_file_has_a_name_of_its_own():
    """Of two with one name, in folders that are no packages, one is not collected."""
    names = Counter(path.name for path in TESTS.rglob("*.py"))
    assert [name for name, count in names.items() if count > 1] == []
