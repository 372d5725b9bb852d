# SPDX-License-Identifier: Apache-2.0
"""A failure is told with the last line of the user's own code, and of nothing else."""

import json
import os

import jax
import numpy as np
import pytest

from treetap._cli import failures


@pytest.mark.parametrize(
    "file",
    [
        jax.__file__,
        np.__file__,
        json.__file__,
        failures.__file__,
        "/home/one/.local/lib/python3.12/site-packages/rich/console.py",
        "/usr/lib/python3/dist-packages/rich/console.py",
        "<frozen importlib._bootstrap>",
        "<string>",
    ],
)
def test_libraries_are_not_the_users(file):
    assert not failures.is_users(file)


@pytest.mark.parametrize("file", [__file__, "train.py", "/data/my-site-packages/a.py"])
def test_other_files_are(file):
    assert failures.is_users(file)


def run(folder, text):
    path = folder / "code.py"
    folder.mkdir(parents=True)
    path.write_text(text)
    exec(compile(text, str(path), "exec"), names := {})
    return names


def test_the_place_is_the_users_line_above_a_library(tmp_path, monkeypatch):
    packages = tmp_path / "lib" / "site-packages"
    library = run(packages, "def divide(x):\n    return x / 0\n")
    own = run(tmp_path / "own", "def f(divide):\n    return divide(1)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ZeroDivisionError) as caught:
        own["f"](library["divide"])
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # this test's line
    place = os.path.join("own", "code.py")
    assert failures.place_of(caught.value) == f"at {place}:2, in f: return divide(1)"
