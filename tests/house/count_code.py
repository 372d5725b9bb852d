# SPDX-License-Identifier: Apache-2.0
"""How many lines of code there are, by folder: docs, comments and imports are free.

    python tests/house/count_code.py            the library, folder by folder
    python tests/house/count_code.py --files    file by file

A cap that counted prose would make people cut prose, so only lines that do something
count.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "treetap"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def is_docstring(node: ast.stmt) -> bool:
    """Whether a statement is a text on its own."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def free_nodes(tree: ast.AST) -> Iterator[ast.stmt]:
    """Docstrings and imports below a node."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, DOCUMENTED) and node.body and is_docstring(node.body[0]):
            yield node.body[0]


def lines_of(node: ast.AST, text: list[str], start: int, end: int) -> int:
    """Lines of code between two lines of a file, below a node of it."""
    free = {
        line
        for each in free_nodes(node)
        for line in range(each.lineno, (each.end_lineno or 0) + 1)
    }
    return sum(
        1
        for number in range(start, end + 1)
        if number not in free
        and text[number - 1].strip()
        and not text[number - 1].strip().startswith("#")
    )


def code_lines(path: Path) -> int:
    """Lines of code in a file."""
    source = path.read_text("utf-8")
    text = source.splitlines()
    return lines_of(ast.parse(source), text, 1, len(text))


def function_lengths(path: Path) -> Iterator[tuple[str, int]]:
    """Every function of a file with its lines of code; its signature is not work."""
    source = path.read_text("utf-8")
    text = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            end = node.end_lineno or 0
            yield node.name, lines_of(node, text, node.body[0].lineno, end)


def by_place(depth: int) -> Counter[str]:
    """Lines of code by folder (depth 1), or by file."""
    found: Counter[str] = Counter()
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).parts
        found["/".join(parts[:depth])] += code_lines(path)
    return found


def main() -> None:
    """Prints the table, its sum, and how long functions are."""
    found = by_place(9 if "--files" in sys.argv else 1)
    for place, count in found.items():
        print(f"{count:7,}  {place}")
    lengths = sorted(
        length for path in SOURCE.rglob("*.py") for _, length in function_lengths(path)
    )
    print(f"{sum(found.values()):7,}  in all")
    longest, tenth = lengths[-1], lengths[len(lengths) * 9 // 10]
    print(
        f"Functions: {len(lengths):,}; one in ten over {tenth}, the longest {longest}."
    )


if __name__ == "__main__":
    main()
