# SPDX-License-Identifier: Apache-2.0
"""Running commands in this process, as tests of the command line do."""

import json
import pathlib

from click.testing import CliRunner

from treetap._cli.main import cli

TARGETS = str(pathlib.Path(__file__).with_name("targets.py"))


def named(factory):
    """A factory of `targets.py` as a TARGET."""
    return f"{TARGETS}:{factory}"


def run(*args, columns=160, **env):
    """The result of a command; an exception that is no exit is raised."""
    env = {"COLUMNS": str(columns), "NO_COLOR": "1", **env}
    result = CliRunner().invoke(cli, [str(arg) for arg in args], env=env)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def passed(*args, code=0, **env):
    """What a command prints, which ends with a code."""
    result = run(*args, **env)
    assert result.exit_code == code, result.output
    return result.stdout


def loaded(*args, code=0):
    """The JSON that a command prints, and nothing else."""
    return json.loads(passed(*args, "--json", code=code))


def refused(*args, **env):
    """The message of a command that cannot be done: on stderr alone, no traceback."""
    result = run(*args, **env)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    begin = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(begin) == 1, result.stderr
    return result.stderr.partition("Error: ")[2]
