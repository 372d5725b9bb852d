# SPDX-License-Identifier: Apache-2.0
"""Commands: what all of them have in common, their options and how they end.

`command` makes one of a function, whose result is the exit code. What the shared
options ask for comes to it as a `Request`, which imports the TARGET, makes its inputs
ready, and writes the answer for people or as JSON. Whatever goes wrong ends in one
message.
"""

import contextlib
import functools
import inspect
import json
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import click

from treetap._cli.console import console_of, waiting
from treetap._cli.failures import (
    INTERRUPTED,
    Failure,
    message_of,
    place_of,
)
from treetap._cli.inputs import drawn, load_into, read
from treetap._cli.programs import How, Program, program_of
from treetap._cli.targets import Case, case_of, refuse_misfit
from treetap._io.files import require_place


def option(name: str, text: str, kind: Any = None, **settings: Any) -> click.Option:
    """An option with its help, and the type of its value, if that is no text."""
    return click.Option([name], help=text, type=kind, **settings)


def several(name: str, metavar: str, text: str, **settings: Any) -> click.Option:
    """An option that may be repeated."""
    return option(name, text, metavar=metavar, multiple=True, **settings)


def flag(name: str, text: str, *variable: str, **settings: Any) -> click.Option:
    """An option that is there or not; the function may know it by another name."""
    return click.Option([name, *variable], is_flag=True, help=text, **settings)


TARGET = click.Argument(["target"])
SELECT = several(
    "--select",
    "SELECTOR",
    "Only some sites: 'blocks/*/attn', '**:attention_weights'. May be repeated.",
    callback=lambda _, __, texts: texts[0] if len(texts) == 1 else list(texts) or None,
)
GRADS = flag("--grads", "Differentiate the loss, too.")
EAGER = flag(
    "--eager",
    "Do not compile: for models whose Python code looks at values.",
    "how",
    callback=lambda _, __, is_eager: "eager" if is_eager else "jit",
)
INPUTS = [
    option(
        "--inputs",
        "Inputs from a .npz or .safetensors file: arg0, arg1, … (or numpy's arr_0, …) "
        "by position, other arrays by name.",
        metavar="FILE",
    ),
    several(
        "--shape",
        "TYPE[SIZES]",
        "An input that is drawn: 'float32[8,128]', 'int32[8,128]<50' (from 0 to 49; "
        "without `<`, 0 and 1), 'mask=bool[8]' by name. May be repeated.",
    ),
    option("--seed", "For drawn inputs.", int, default=0, show_default=True),
    option("--weights", "Read the model's weights from safetensors.", metavar="FILE"),
    flag("--cast", "Let weights be converted to the model's dtypes."),
]
ENDS = [
    flag("--json", "Write JSON to stdout, and nothing else there.", "as_json"),
    flag("--debug", "Show the traceback when something fails."),
]


class Request(NamedTuple):
    """The values of the options that all commands have.

    Attributes:
        inputs: A file of inputs.
        shape: Inputs that are drawn.
        seed: What they are drawn from.
        weights: A file of weights.
        cast: Whether weights may be converted.
        as_json: Whether the answer is JSON.
    """

    inputs: str | None
    shape: tuple[str, ...]
    seed: int
    weights: str | None
    cast: bool
    as_json: bool

    def case(self, target: str, *, abstract: bool = False) -> Case:
        """Imports a TARGET, and makes its inputs ready."""
        case = case_of(target)
        if self.weights is not None:
            load_into(case, self.weights, cast=self.cast)
        if self.inputs is not None and self.shape:
            raise Failure(
                "--inputs and --shape both say what the inputs are. Give one."
            )
        if self.inputs is not None:
            case = case._replace(inputs=read(self.inputs))
        elif self.shape:
            case = case._replace(inputs=drawn(self.shape, self.seed, abstract=abstract))
        refuse_misfit(case)
        return case

    def program(self, target: str, *, grads: bool, how: How) -> Program:
        """What to run for a TARGET; from shapes alone if it is only traced."""
        case = self.case(target, abstract=how == "traced")
        return program_of(case, grads=grads, how=how)

    @contextlib.contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Shows on a terminal what is going on; keeps what others print out of JSON."""
        aside = contextlib.redirect_stdout(sys.stderr)
        with aside if self.as_json else contextlib.nullcontext(), waiting(text):
            yield

    def answer(self, found: Mapping[str, Any], *shown: Any) -> None:
        """Writes what was found as JSON, or prints it for people.

        Args:
            found: All of it, for JSON.
            *shown: What rich prints; None is left out.
        """
        if self.as_json:
            click.echo(json.dumps(found, allow_nan=False, ensure_ascii=False))
            return
        console = console_of()
        for part in shown:
            if part is not None:
                console.print(part)


def command(short: str, *options: click.Parameter) -> Callable[..., click.Command]:
    """Makes a command of a function of a Request and of its own options by name.

    Its help is the function's docstring, and the part on TARGETs of that of `case_of`.

    Args:
        short: What it does, for the list of commands.
        *options: Its own arguments and options.
    """

    _, _, about_targets = (inspect.getdoc(case_of) or "").partition("\n\n")

    def made(fn: Callable[..., int]) -> click.Command:
        def run(**given: Any) -> int:
            shared = {name: given.pop(name) for name in Request._fields}
            return fn(Request(**shared), **given)

        return click.Command(
            fn.__name__,
            callback=guarded(run),
            params=[*options, *ENDS],
            help=f"{inspect.getdoc(fn)}\n\n{about_targets}",
            short_help=short,
        )

    return made


def guarded(run: Callable[..., int]) -> Callable[..., None]:
    """A function that ends with the exit code it returns, and with one message if it
    fails."""

    @functools.wraps(run)
    def call(*args: Any, debug: bool = False, **kwargs: Any) -> None:
        try:
            code = run(*args, **kwargs)
        except (click.UsageError, click.exceptions.Exit, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            code = INTERRUPTED
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and not place_of(error):
                raise  # rich's, when nobody reads on
            if debug:
                traceback.print_exception(error)
            raise Failure(message_of(error)) from error
        click.get_current_context().exit(code)

    return call


def refuse_output(path: str, suffixes: tuple[str, ...]) -> None:
    """Refuses a file that could not be written, before anything is computed."""
    file = pathlib.Path(path)
    if file.suffix not in suffixes:
        raise Failure(f"--out {path}: a name that ends in {' or '.join(suffixes)}.")
    require_place(file, "--out")
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise Failure(f"--out: nothing can be written in the folder {file.parent}.")
