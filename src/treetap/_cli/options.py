# SPDX-License-Identifier: Apache-2.0
"""Options: what several commands ask in the same words, and how they end.

`guarded` runs a command so that whatever goes wrong is told in one message. `prepared`
makes of a TARGET and the options what is to be run.
"""

import contextlib
import functools
import json
import os
import pathlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import click

from treetap._cli.console import waiting
from treetap._cli.failures import (
    BAD,
    INTERRUPTED,
    Failure,
    message_of,
    place_of,
    print_traceback,
)
from treetap._cli.inputs import inputs_for, load_into
from treetap._cli.programs import How, Program, program_of
from treetap._cli.targets import Case, Inputs, case_of, refuse_misfit

F = TypeVar("F", bound=Callable[..., Any])
TARGET_HELP = """
A TARGET is `package.module:factory` or `path/to/file.py:factory`. The current folder is
importable; so is the folder of a file, as with `python file.py`.

The factory is called without arguments, and returns

\b
  model                    a Module, a method of one, or any function
  (model, inputs)          inputs: an array, a tuple or list of arguments,
                           or a dict of arguments by name
  (model, inputs, loss)    loss(model, *inputs) gives a single number

A Module may stand in place of the factory. A function that needs arguments is itself
what is called, with the inputs of --inputs or --shape. These take the place of those
that a factory returns.
"""


def together(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Several options as one."""

    def add(fn: F) -> F:
        for option in reversed(options):
            fn = option(fn)
        return fn

    return add


input_options = together(
    click.option(
        "--inputs",
        metavar="FILE",
        help="Inputs from a .npz or .safetensors file: arg0, arg1, … (or numpy's "
        "arr_0, …) by position, other arrays by name.",
    ),
    click.option(
        "--shape",
        "shapes",
        metavar="TYPE[SIZES]",
        multiple=True,
        help="An input that is drawn: 'float32[8,128]', 'int32[8,128]<50' (from 0 to "
        "49; without `<`, 0 and 1), 'mask=bool[8]' by name. May be repeated.",
    ),
    click.option(
        "--seed", type=int, default=0, show_default=True, help="For drawn inputs."
    ),
    click.option(
        "--weights", metavar="FILE", help="Read the model's weights from safetensors."
    ),
    click.option(
        "--cast", is_flag=True, help="Let weights be converted to the model's dtypes."
    ),
)
select_option = click.option(
    "--select",
    metavar="SELECTOR",
    multiple=True,
    help="Only some sites: 'blocks/*/attn', '**:attention_weights'. May be repeated.",
)
grads_option = click.option(
    "--grads", is_flag=True, help="Differentiate the loss, too."
)
eager_option = click.option(
    "--eager",
    is_flag=True,
    help="Do not compile: for models whose Python code looks at values.",
)
json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Write JSON to stdout, and nothing else there.",
)
debug_option = click.option(
    "--debug", is_flag=True, help="Show the traceback when something fails."
)


def guarded(command: Callable[..., int]) -> Callable[..., None]:
    """A command that ends with the exit code it returns, and with one message if it
    fails."""

    @functools.wraps(command)
    def run(*args: Any, debug: bool = False, **kwargs: Any) -> None:
        try:
            code = command(*args, **kwargs)
        except (click.ClickException, click.exceptions.Exit, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            code = INTERRUPTED
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and not place_of(error):
                raise  # rich's, when nobody reads on
            if debug:
                print_traceback(error)
            click.echo(f"Error: {message_of(error)}", err=True)
            code = BAD
        click.get_current_context().exit(code)

    return run


class Given(NamedTuple):
    """What options say of how a target is run."""

    inputs: str | None
    shapes: tuple[str, ...]
    seed: int
    weights: str | None
    cast: bool

    @property
    def is_default(self) -> bool:
        """Whether nothing was said, but perhaps the seed."""
        return not (self.inputs or self.shapes or self.weights or self.cast)


def with_targets(short: str, text: str) -> Any:
    """A command whose help says what a TARGET is."""
    text = textwrap.dedent(text).strip()
    return click.command(short_help=short, help=f"{text}\n{TARGET_HELP}")


def selector_of(texts: tuple[str, ...]) -> Any:
    """A selector of what any of several takes; None for all sites."""
    return texts[0] if len(texts) == 1 else list(texts) or None


def given_from(options: dict[str, Any]) -> Given:
    """The options of inputs, taken out of all options."""
    return Given(**{name: options.pop(name) for name in Given._fields})


def prepared(
    target: str, given: Given, *, abstract: bool = False
) -> tuple[Case, Inputs]:
    """Imports a TARGET, and makes its inputs ready."""
    case = case_of(target)
    if given.weights is not None:
        load_into(case, given.weights, cast=given.cast)
    inputs = inputs_for(case, given.inputs, given.shapes, given.seed, abstract=abstract)
    refuse_misfit(case, inputs)
    return case, inputs


def program_for(target: str, given: Given, *, grads: bool, how: How) -> Program:
    """What to run for a TARGET; from shapes alone if it is only traced."""
    case, inputs = prepared(target, given, abstract=how == "traced")
    return program_of(case, inputs, grads=grads, how=how)


@contextlib.contextmanager
def work(text: str, as_json: bool) -> Iterator[None]:
    """Long work: told on a terminal. What others print then is kept out of JSON."""
    with contextlib.ExitStack() as stack:
        if as_json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        stack.enter_context(waiting(text))
        yield


def print_json(value: Any) -> None:
    """Writes a value as JSON."""
    click.echo(json.dumps(value, allow_nan=False, ensure_ascii=False))


def refuse_output(path: str, suffixes: tuple[str, ...]) -> None:
    """Refuses a file that could not be written, before anything is computed."""
    file = pathlib.Path(path)
    if file.suffix not in suffixes:
        raise Failure(f"--out {path}: a name that ends in {' or '.join(suffixes)}.")
    if file.is_dir():
        raise Failure(f"--out: {path} is a folder; name a file in it.")
    if not file.parent.is_dir():
        raise Failure(f"--out: there is no folder {file.parent}.")
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise Failure(f"--out: nothing can be written in the folder {file.parent}.")
