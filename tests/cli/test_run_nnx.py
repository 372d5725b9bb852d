# SPDX-License-Identifier: Apache-2.0
"""Programs written for flax.nnx run unedited, and print what they print under flax.

`data/nnx_programs.json` has the lines each program of `nnx_programs` printed under flax
0.12.8 (JAX 0.10.2, CPU). Words are the same, hashes of initial parameters too, and
numbers to rounding.
"""

import json
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from command_line import passed, refused, run

from meshes import devices_of
from treetap._cli import run_nnx as running

pytestmark = pytest.mark.usefixtures("fully_compiled")

HERE = pathlib.Path(__file__).parent
PROGRAMS = HERE / "nnx_programs"
RECORDED = json.loads((HERE.parent / "data" / "nnx_programs.json").read_text())
QUICK = {
    *"checkpoints mixed_flax older_style own_variables plain_objects sharded".split(),
    *"filters_by_module generic_parts keywords".split(),
}
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?")


@pytest.fixture(autouse=True)
def as_a_program_finds_jax():
    with jax.numpy_rank_promotion("allow"):
        yield


def write(folder, text, name="program.py"):
    path = folder / name
    path.write_text(text)
    return str(path)


def words_and_numbers(line):
    return NUMBER.sub("#", line), [float(text) for text in NUMBER.findall(line)]


def cases():
    for name in RECORDED:
        marks = [] if name in QUICK else [pytest.mark.long]
        yield pytest.param(name, marks=marks)


def test_every_program_is_recorded():
    found = {path.stem for path in PROGRAMS.glob("*.py")} - {"fingerprints"}
    assert found == RECORDED.keys()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # older spellings, in them
@pytest.mark.parametrize("name", list(cases()))
def test_programs_print_what_they_print_under_flax(name, capsys):
    if name in ("sharded", "tensor_parallel"):
        devices_of(8)
    running.run(str(PROGRAMS / f"{name}.py"), [])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(RECORDED[name])
    # JAX 0.12 draws normal numbers that differ in the last bit from those recorded.
    is_exact = jax.default_backend() == "cpu" and jax.__version_info__ < (0, 12)
    for line, recorded in zip(lines, RECORDED[name], strict=True):
        if line.startswith("init") and not is_exact:
            continue
        words, numbers = words_and_numbers(line)
        recorded_words, recorded_numbers = words_and_numbers(recorded)
        assert words == recorded_words
        np.testing.assert_allclose(numbers, recorded_numbers, rtol=2e-4, atol=2e-5)


def test_a_program_is_main_with_its_arguments_and_folder(tmp_path, capsys):
    write(tmp_path, "NAME = 'beside'", "neighbour_of_program.py")
    text = (
        "import sys, neighbour_of_program\n"
        "print(__name__, sys.argv[1:], neighbour_of_program.NAME)\n"
        "print(sys.modules['__main__'].__dict__ is globals())\n"
    )
    script = write(tmp_path, text)
    argv, path, main = sys.argv, sys.path[:], sys.modules["__main__"]
    running.run(script, ["--rate", "0.1"])
    assert capsys.readouterr().out.splitlines() == [
        "__main__ ['--rate', '0.1'] beside",
        "True",
    ]
    assert sys.argv is argv
    assert sys.path == path
    assert sys.modules["__main__"] is main
    assert "flax" not in sys.modules


def test_a_module_runs_by_its_name(tmp_path, capsys, monkeypatch):
    package = tmp_path / "package_to_run"
    package.mkdir()
    write(package, "", "__init__.py")
    write(package, "import sys; print(__package__, sys.argv[1:])", "__main__.py")
    monkeypatch.chdir(tmp_path)
    running.run("package_to_run", ["x"], module=True)
    assert capsys.readouterr().out == "package_to_run ['x']\n"


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no luck')", 1, "no luck\n"),
    ],
)
def test_the_exit_code_is_the_programs(tmp_path, text, code, said):
    assert passed("run-nnx", write(tmp_path, text), code=code) == said


def shown_by(*args, code):
    """What is shown of a program that ends with a code."""
    result = run("run-nnx", *args)
    assert result.exit_code == code
    return result.stderr


def test_an_error_is_shown_with_the_programs_frames_alone(tmp_path):
    text = "def fail():\n    return 1 / 0\n\nfail()\n"
    script = write(tmp_path, text)
    shown = shown_by(script, code=1)
    assert shown.startswith(f'Traceback (most recent call last):\n  File "{script}"')
    assert "ZeroDivisionError" in shown
    assert "runpy" not in shown
    assert "running.py" not in shown


def test_a_program_with_an_error_of_syntax_is_shown_as_python_shows_it(tmp_path):
    shown = shown_by(write(tmp_path, "def ("), code=1)
    assert "program.py" in shown
    assert "SyntaxError" in shown
    assert "runpy" not in shown


def test_ctrl_c_in_a_program_is_an_interruption(tmp_path):
    script = write(tmp_path, "raise KeyboardInterrupt")
    assert "KeyboardInterrupt" in shown_by(script, code=130)


def test_what_is_not_there_is_named(tmp_path):
    script = write(tmp_path, "from flax import linen as nn\nnn.Dense(1)")
    shown = shown_by(script, code=1)
    assert "Dense is a class of Linen" in shown
    assert "treetap has NNX's Modules only" in shown


def test_a_missing_file_or_module_is_refused(tmp_path):
    text = refused("run-nnx", tmp_path / "absent.py")
    assert text.startswith("run-nnx: there is no file")
    text = refused("run-nnx", "-m", "absent_module_of_nobody")
    assert text.startswith("run-nnx: No module named")


def test_as_a_process_of_its_own(tmp_path):
    text = (
        "import sys\nfrom flax import nnx\n"
        "print(nnx.Linear(1, 2, rngs=nnx.Rngs(0)).kernel.shape, sys.argv[1:])\n"
        "raise SystemExit(3)\n"
    )
    call = "import sys; from treetap._cli.run_nnx import run; "
    call += f"sys.exit(run({write(tmp_path, text)!r}, ['a']))"
    done = subprocess.run(
        [sys.executable, "-c", call], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (3, "(1, 2) ['a']\n")
