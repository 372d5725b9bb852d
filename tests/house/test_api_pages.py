# SPDX-License-Identifier: Apache-2.0
"""The API pages: every public name is on one of them, once."""

import pathlib
import re
from collections import Counter

import jax
import jax.numpy as jnp

import treetap as tt

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))


def test_every_public_name_is_on_one_page():
    text = "".join(page.read_text() for page in PAGES)
    listed = Counter(re.findall(r"^::: treetap\.(\w+)$", text, re.M))
    of_jax = {
        name
        for name in tt.__all__
        if getattr(tt, name) is getattr(jax.nn, name, getattr(jnp, name, None))
    }
    assert {*listed} == {*tt.__all__} - of_jax - {"compat", "nnx"}
    assert [name for name, count in listed.items() if count > 1] == []


def test_every_page_is_in_the_navigation():
    shown = (ROOT / "mkdocs.yml").read_text()
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    assert [str(page) for page in pages if f": {page}\n" not in shown] == []
