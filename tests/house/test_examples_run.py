# SPDX-License-Identifier: Apache-2.0
"""Every example in a docstring, in the README and in the docs runs."""

import doctest
import importlib
import pathlib
import re
import subprocess
import sys

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[2]
SOURCE = ROOT / "src" / "treetap"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = [
    path
    for path in (*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")))
    if BLOCK.search(path.read_text())
]


# What takes seconds is left to `make test-all`.
HEAVY_PAGES = """
    costs editing layers logging many-devices porting quickstart statistics training
""".split()
HEAVY_EXAMPLES = "chars gpt2 llama sharded sparse_autoencoder steering vit".split()
# Options that make a long example short.
SHORTER = {"chars": ("--steps", "10", "--width", "16")}
# Run by a test of its own, which looks at what it finds.
LOOKED_AT = {"induction"}


def names_of_modules():
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        if ">>>" in path.read_text("utf-8"):
            yield ".".join(part for part in parts if part != "__init__")


@pytest.mark.parametrize("name", list(names_of_modules()))
def test_docstring_examples(name):
    module = importlib.import_module(name)
    failed, tried = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0
    assert tried > 0


def each_of(paths, heavy):
    """A case for each file; those with the heavy names are long."""
    return [
        pytest.param(
            path,
            id=str(path.relative_to(ROOT)),
            marks=[pytest.mark.long] if path.stem in heavy else [],
        )
        for path in paths
    ]


@pytest.mark.parametrize("page", each_of(PAGES, HEAVY_PAGES))
def test_code_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    with jax.numpy_rank_promotion("allow"):
        for code in BLOCK.findall(page.read_text()):
            exec(compile(code, str(page), "exec"), namespace)


EXAMPLES = [
    path
    for path in sorted((ROOT / "examples").glob("*.py"))
    if path.stem not in LOOKED_AT
]


@pytest.mark.parametrize("path", each_of(EXAMPLES, HEAVY_EXAMPLES))
def test_examples_run(path, tmp_path):
    done = subprocess.run(
        [sys.executable, str(path), *SHORTER.get(path.stem, ())],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_readme_has_code_and_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert len(BLOCK.findall(text)) >= 1
    assert "make demo" in text
    assert "make test" in text


def test_heavy_ones_are_there():
    pages, examples = ({path.stem for path in paths} for paths in (PAGES, EXAMPLES))
    assert {*HEAVY_PAGES} <= pages
    assert {*HEAVY_EXAMPLES} <= examples
