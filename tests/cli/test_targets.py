# SPDX-License-Identifier: Apache-2.0
"""Targets: what can be named, and what is said of what cannot."""

import sys
import textwrap

import pytest
from command_line import loaded, named, passed, refused, run

FILE = """
import jax.numpy as jnp
import beside
import treetap as tt


def model():
    return (lambda x: tt.tap(x * beside.FACTOR, "scaled")), jnp.ones(3)


if __name__ == "__main__":
    raise SystemExit("it was run")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if name == "beside" or name.startswith(("user_", "_treetap_target")):
            del sys.modules[name]


def test_a_file_is_imported_with_its_folder(folder):
    inner = folder / "inner"
    inner.mkdir()
    (inner / "mine.py").write_text(FILE)
    (inner / "beside.py").write_text("FACTOR = 2.0")
    found = loaded("inspect", "inner/mine.py:model")
    assert [(s["site"], s["value"]["mean"]) for s in found["sites"]] == [("scaled", 2)]
    assert "mine" not in sys.modules


def test_a_module_of_the_current_folder_is_imported(folder):
    package = folder / "user_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "nets.py").write_text(FILE)
    (folder / "beside.py").write_text("FACTOR = 3.0")
    found = loaded("inspect", "user_package.nets:model")
    assert found["sites"][0]["value"]["mean"] == 3


@pytest.mark.parametrize(
    ("factory", "sites"),
    [("with_inputs", 9), ("with_loss", 9), ("by_name", 9), ("method", 5)],
)
def test_what_a_factory_may_return(factory, sites):
    assert len(loaded("inspect", named(factory))["sites"]) == sites


def test_a_module_may_stand_in_place_of_the_factory():
    assert len(loaded("inspect", named("net"), "--shape", "f32[2,4]")["sites"]) == 9


def test_a_class_without_arguments_is_a_factory():
    assert len(loaded("inspect", named("Net"), "--shape", "f32[2,4]")["sites"]) == 9


def test_a_function_that_needs_arguments_is_itself_called():
    found = loaded("inspect", named("length"), "--shape", "f32[5]")
    assert [site["site"] for site in found["sites"]] == ["squares"]


def test_a_function_may_be_returned():
    assert [s["site"] for s in loaded("sites", named("function"))["sites"]] == [
        "squares"
    ]


@pytest.mark.parametrize("target", ["model", "model.py", "model.py:", ":model"])
def test_what_names_no_factory(target):
    text = refused("inspect", target)
    assert "names no factory" in text
    assert "`models.py:small`" in text


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("nowhere.py:model", "There is no file nowhere.py."),
        ("no\0where.py:model", r"There is no file 'no\x00where.py'."),
        ("no_such.module:model", "There is no module 'no_such'"),
        ("json.no_such:model", "There is no module 'json.no_such'"),
        ("./text.txt:model", "is not a Python file"),
        ("..up:model", "is no name of a module"),
        ("a.b" * 1_000 + ":model", "is no name of a module"),
    ],
)
def test_what_cannot_be_imported(target, text, folder):
    (folder / "text.txt").write_text("")
    assert text in refused("inspect", target)


def test_an_error_in_the_file_is_shown_with_its_line(folder):
    (folder / "user_bad.py").write_text("import math\n\nmath.sqrt(-1)\n")
    for target in ("user_bad.py:model", "user_bad:model"):
        text = refused("inspect", target)
        assert text.startswith("ValueError: ")
        assert "at user_bad.py:3: math.sqrt(-1)" in text


def test_a_module_that_the_file_lacks_is_the_users_error(folder):
    (folder / "user_lacks.py").write_text("import no_such_module\n")
    text = refused("inspect", "user_lacks:model")
    assert text.startswith("ModuleNotFoundError: No module named 'no_such_module'")
    assert "at user_lacks.py:1: import no_such_module" in text


def test_a_syntax_error_is_shown_with_its_line(folder):
    (folder / "user_typo.py").write_text("x = 1\ny = (\n")
    text = refused("inspect", "user_typo.py:model")
    assert text.startswith("SyntaxError: '(' was never closed")
    assert "at user_typo.py:2: y = (" in text


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        ("wit_loss", "has no 'wit_loss'. It has with_loss"),
        ("Net.nothing", "has no 'Net.nothing'."),
        ("number", "is an int, which cannot be called"),
        ("gives_a_list", "returned a list, which cannot be called"),
        ("gives_four", "returned a tuple of 4. A factory returns a model, (model,"),
        ("gives_bad_inputs", "returned a str as inputs"),
        ("gives_bad_keys", "the keys [0], which are names of arguments"),
        ("gives_bad_loss", "returned an int as the loss"),
        ("mute", "returned a Mute, whose class has no `__call__`"),
        ("Block", "is a class that takes (size, rngs)"),
    ],
)
def test_what_is_no_factory(factory, text):
    assert text in refused("inspect", named(factory))


def test_a_factory_that_raises_is_shown_with_its_line():
    text = refused("inspect", named("raises"))
    assert text.startswith("RuntimeError: no luck today\n  at ")
    assert 'in raises: raise RuntimeError("no luck today")' in text


def test_a_factory_that_exits_is_an_error():
    assert refused("inspect", named("leaves")).startswith("SystemExit: bye")


def test_debug_shows_the_traceback():
    result = run("inspect", named("raises"), "--debug")
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr
    assert "Error: RuntimeError: no luck today" in result.stderr


def test_inputs_that_do_not_fit_are_told_before_the_call():
    text = refused("inspect", named("alone"))
    assert "the call takes (x), and the inputs do not fit" in text
    assert "missing a required argument: 'x'; given: none" in text
    assert "--shape" in text
    text = refused("inspect", named("alone"), "--shape", "y=f32[3,4]")
    assert "given: 'y'" in text
    text = refused("sites", named("alone"), *["--shape", "f32[3,4]"] * 2)
    assert "too many positional arguments; given: 2 by position" in text


def test_a_wrong_shape_is_shown_with_the_line_of_the_model():
    text = refused("inspect", named("alone"), "--shape", "f32[3,5]")
    assert "Linear at blocks/0/up: expected inputs with 4 features" in text
    assert "targets.py:" in text
    assert "in Block.__call__: return x + self.down" in text


def test_what_a_factory_prints_is_kept_out_of_json():
    result = run("inspect", named("chatty"), "--json")
    assert "hello from the factory" not in result.stdout
    assert "hello from the factory" in result.stderr
    assert "hello from the factory" in passed("inspect", named("chatty"))


def user_file(folder, text):
    """A user's file, as the beginning of a TARGET."""
    file = folder / "user_file.py"
    file.write_text(f"import jax.numpy as jnp\nimport treetap as tt\n\n{text}")
    return file


def test_a_key_that_is_missing_is_shown_as_the_user_wrote_it(folder):
    file = user_file(folder, "def model():\n    return {'a': 1}['size of it']\n")
    text = refused("inspect", f"{file}:model")
    assert text.startswith("KeyError: size of it\n  at user_file.py:5, in model")


def test_what_has_no_signature_is_called_without_arguments():
    assert "max expected at least 1 argument" in refused("sites", "builtins:max")


def test_a_call_without_a_signature_is_not_checked_before(folder):
    text = "def model():\n    return max, (jnp.float32(1.0), jnp.float32(2.0))\n"
    found = loaded("inspect", f"{user_file(folder, text)}:model", "--eager")
    assert found["finite"]
    assert found["sites"] == []


def test_a_function_of_a_module_is_differentiated_by_it(folder):
    text = """
    def call(model, count):
        return tt.tap(model.kernel[...] * count, "scaled")

    def factory():
        return call, (tt.Linear(2, 3, rngs=tt.Rngs(0)), 2)
    """
    file = user_file(folder, textwrap.dedent(text))
    (site,) = loaded("inspect", f"{file}:factory", "--grads")["sites"]
    assert site["gradient"]["norm"] == pytest.approx(site["value"]["norm"] / 3)
