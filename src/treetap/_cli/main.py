# SPDX-License-Identifier: Apache-2.0
"""Commands: what `treetap` can be asked to do.

Each command imports a TARGET, runs what is asked for, prints a table or JSON, and ends
with 0 if all is well, 1 if it found what it looks for, 2 if it could not be done.
"""

from dataclasses import asdict
from typing import Any

import click

from treetap._cli.comparing import compare
from treetap._cli.console import console_of
from treetap._cli.failures import FOUND, Failure
from treetap._cli.inspecting import inspect
from treetap._cli.looking import site_dict, sites_listing
from treetap._cli.options import (
    debug_option,
    given_from,
    grads_option,
    guarded,
    input_options,
    json_option,
    prepared,
    print_json,
    program_for,
    select_option,
    selector_of,
    with_targets,
    work,
)
from treetap._core.trees.attributes import Node
from treetap._core.wording import json_number
from treetap._observe.blame.blame import blame as blame_fn
from treetap._observe.observe import sites as sites_of
from treetap._report.summary import summary as summary_of

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 96}


@click.group(context_settings=SETTINGS)
@click.version_option(package_name="treetap")
def cli() -> None:
    """See what flows through a JAX model, without editing it.

    Exit codes: 0 all is well, 1 found (a number that is not finite, a difference), 2
    could not be done, 130 interrupted.
    """


# sites and summary.


@with_targets(
    "All sites, shapes and sizes.",
    "List all sites with their shapes and sizes; nothing is computed.",
)
@click.argument("target")
@input_options
@select_option
@grads_option
@json_option
@debug_option
@guarded
def sites(
    target: str, *, select: tuple[str, ...], grads: bool, as_json: bool, **options: Any
) -> int:
    """The command; its help is above."""
    given = given_from(options)
    with work(f"Tracing {target}", as_json):
        program = program_for(target, given, grads=grads, how="traced")
        chosen = selector_of(select)
        record = sites_of(program.fn, *program.args, select=chosen, **program.kwargs)
    if as_json:
        listed = [site_dict(site) for site in record]
        print_json({"target": target, "bytes": record.nbytes, "sites": listed})
    else:
        console = console_of()
        console.print(sites_listing(record))
        if grads:
            console.print("Gradients take as much again, where values are floating.")
    return 0


@with_targets(
    "What a model is made of.",
    "Show what a model is made of and does: calls, shapes, sizes, FLOPs.",
)
@click.argument("target")
@input_options
@click.option("--depth", type=click.IntRange(min=0), help="How long paths may be.")
@json_option
@debug_option
@guarded
def summary(target: str, *, depth: int | None, as_json: bool, **options: Any) -> int:
    """The command; its help is above."""
    given = given_from(options)
    with work(f"Tracing {target}", as_json):
        case, inputs = prepared(target, given, abstract=True)
        method = getattr(case.call, "__name__", "__call__")
        model = getattr(case.call, "__self__", case.call)
        if not isinstance(model, Node):
            raise Failure(
                f"{target} is a function, and a summary is of a Module. Return the "
                "Module from the factory; `treetap sites` also lists functions."
            )
        found = summary_of(
            model,
            *inputs.args,
            method="__call__" if model is case.call else method,
            depth=depth,
            **inputs.kwargs,
        )
    if as_json:
        print_json({"target": target, **found.to_dict()})
    else:
        console_of().print(found)
    return 0


# blame.


@with_targets(
    "Which operation made the first NaN.",
    """
    Name the operation that makes the first NaN or infinity, and its line.

    With --grads the backward pass is looked at, too. The exit code is 1 if there is
    one.
    """,
)
@click.argument("target")
@input_options
@grads_option
@click.option(
    "--everywhere", is_flag=True, help="Also find what does not reach the results."
)
@json_option
@debug_option
@guarded
def blame(
    target: str, *, grads: bool, everywhere: bool, as_json: bool, **options: Any
) -> int:
    """The command; its help is above."""
    from rich.text import Text

    given = given_from(options)
    with work(f"Running {target}", as_json):
        program = program_for(target, given, grads=grads, how="eager")
        run = blame_fn(program.fn, everywhere=everywhere)
        found = run(*program.args, **program.kwargs)
    if as_json:
        about = {key: json_number(value) for key, value in asdict(found).items()}
        told = {"target": target, "found": bool(found), "text": str(found)}
        print_json({**told, **about, "path": [*map(str, found.path)]})
    else:
        console = console_of()
        console.print(Text(str(found), "bold red" if found else "green"))
        if program.note:
            console.print(Text(program.note))
    return FOUND if found else 0


# The rest.


@click.command(
    "run-nnx",
    short_help="Run a program written for flax.nnx.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("-m", "module", is_flag=True, help="SCRIPT is the name of a module.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_nnx(script: str, arguments: tuple[str, ...], module: bool) -> None:
    """Run a program that imports flax.nnx, with treetap in its place."""
    from treetap._cli.run_nnx import run

    code = run(script, list(arguments), module)
    click.get_current_context().exit(code)


@click.command(short_help="A script for your shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that completes commands and options in a SHELL.

    \b
    bash:  eval "$(treetap completion bash)"     in ~/.bashrc
    zsh:   eval "$(treetap completion zsh)"      in ~/.zshrc
    fish:  treetap completion fish | source      in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None, shell
    click.echo(found(cli, {}, "treetap", "_TREETAP_COMPLETE").source())


for _command in (inspect, sites, summary, blame, compare, run_nnx, completion):
    cli.add_command(_command)
