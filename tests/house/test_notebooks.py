# SPDX-License-Identifier: Apache-2.0
"""The notebooks of the docs: their cells run, and show what they should."""

import ast
import json
import pathlib

import pytest

DOCS = pathlib.Path(__file__).parents[2] / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


def shown_by(source, scope):
    """Runs a cell as a notebook does, and gives what stands at its end."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), scope)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), scope)


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_and_show_pages(path):
    cells = json.loads(path.read_text())["cells"]
    scope, pages = {"__name__": "__main__"}, 0
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        kept = {key for out in cell["outputs"] for key in out.get("data", {})}
        value = shown_by("".join(cell["source"]), scope)
        html = getattr(value, "_repr_mimebundle_", dict)().get("text/html")
        html = html or getattr(value, "_repr_html_", str)()
        assert bool(html) == ("text/html" in kept), cell["source"]
        pages += bool(html)
    assert pages >= 3


def test_there_is_a_notebook():
    assert NOTEBOOKS
