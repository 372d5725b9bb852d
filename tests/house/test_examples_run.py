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
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


# Options that make a long example short.
SHORTER = {"chars": ("--steps", "10", "--width", "16")}


def module_names():
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__")


@pytest.mark.parametrize("name", list(module_names()))
def test_docstring_examples(name):
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def blocks():
    for page in PAGES:
        yield pytest.param(page, id=str(page.relative_to(ROOT)))


@pytest.mark.parametrize("page", list(blocks()))
def test_code_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    with jax.numpy_rank_promotion("allow"):
        for code in BLOCK.findall(page.read_text()):
            exec(compile(code, str(page), "exec"), namespace)


# Run by a test of its own, which looks at what it finds.
LOOKED_AT = {"induction"}
EXAMPLES = [
    path
    for path in sorted((ROOT / "examples").glob("*.py"))
    if path.stem not in LOOKED_AT
]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
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
