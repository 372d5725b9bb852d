# SPDX-License-Identifier: Apache-2.0
"""What `treetap` can be asked to do: its commands.

Each command imports a TARGET, runs what is asked for, prints a table or JSON, and ends
with 0 if all is well, 1 if it found what it looks for, 2 if it could not be done.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from treetap._cli.command import (
    EAGER,
    GRADS,
    INPUTS,
    SELECT,
    TARGET,
    Request,
    command,
    flag,
    option,
    refuse_output,
    several,
)
from treetap._cli.console import number_text, progress_of, spark
from treetap._cli.demo import trained, written
from treetap._cli.failures import FOUND, Failure
from treetap._cli.figures import (
    Look,
    look_at,
    look_dict,
    look_shown,
    observed,
    site_dict,
    sites_listing,
)
from treetap._cli.programs import How
from treetap._compare.comparison import compare as compare_sides
from treetap._compare.tolerances import FACTOR
from treetap._core.display import readable_bytes
from treetap._core.wording import json_number, many
from treetap._io.record_file import save_record
from treetap._observe.blame.blame import blame as blame_fn
from treetap._observe.observe import observe
from treetap._observe.observe import sites as sites_of
from treetap._observe.records import Record
from treetap._report.page import report
from treetap._report.summary import summary as summary_of

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 96}
OUTPUTS = (".html", ".safetensors")
DEMO_STEPS = 240
DEMO_OUT = "treetap-report.html"


@click.group(context_settings=SETTINGS)
@click.version_option(package_name="treetap")
def cli() -> None:
    """See what flows through a JAX model, without editing it.

    Exit codes: 0 all is well, 1 found (a number that is not finite, a difference), 2
    could not be done, 130 interrupted.
    """


# inspect.


@command(
    "Figures of every value of a run.",
    click.Argument(["target"], required=False),
    *INPUTS,
    SELECT,
    GRADS,
    flag("--reduce", "Keep statistics only: they are taken where the values are."),
    EAGER,
    several(
        "--out",
        "FILE",
        "Write a report (.html), or the record (.safetensors). May be repeated.",
    ),
    option(
        "--steps",
        "How long the built-in model is trained.",
        type=click.IntRange(min=1),
        default=DEMO_STEPS,
        show_default=True,
    ),
)
def inspect(
    request: Request,
    target: str | None,
    *,
    select: Any,
    grads: bool,
    reduce: bool,
    how: How,
    out: tuple[str, ...],
    steps: int,
) -> int:
    """Show figures of every value on the way through a model.

    A row for each site: its histogram, mean, standard deviation, largest magnitude,
    and the share of units that are 0 throughout; with --grads the norm of the gradient
    and its ratio to that of the value. The first site that is not finite is named, and
    the exit code is 1 then.

    Without a loss, --grads differentiates the mean of squares of all floating outputs.
    Without a TARGET, a small built-in model is trained and shown, and a report written
    to treetap-report.html.
    """
    if target is None:
        if request.has_inputs or reduce or how == "eager":
            raise Failure(
                "Without a TARGET the built-in model is shown, which has inputs and "
                "weights of its own. Name a TARGET, or leave those options out."
            )
        return show_demo(request, steps, select, out or (DEMO_OUT,))
    for path in out:
        refuse_output(path, OUTPUTS)
    if reduce and any(path.endswith(".safetensors") for path in out):
        raise Failure(
            "--reduce keeps no values, and a record in a file is of values. Write an "
            ".html, or leave out --reduce."
        )
    with request.working(f"Running {target}"):
        program = request.program(target, grads=grads, how=how)
        look = observed(program, select, grads=grads, reduce=reduce)
    for path in out:
        write_output(path, [look.record], target)
    notes = [program.note] if program.note else []
    told = {"loss_of": program.loss or None, "notes": notes, "out": list(out)}
    title = f"{target}: {many(len(look.rows), 'site')}"
    title += f", {readable_bytes(sum(row.site.nbytes for row in look.rows))}"
    title += "" if look.loss is None else f", loss {number_text(look.loss)}"
    notes = [*notes, *(f"Wrote {path}." for path in out)]
    return answer_look(request, target, look, told, title, notes)


def answer_look(  # noqa: PLR0917 - all that there is to say
    request: Request,
    target: str | None,
    look: Look,
    told: dict[str, Any],
    title: str,
    notes: Sequence[str],
) -> int:
    """Tells of a look; gives the exit code."""
    found = {"target": target, **look_dict(look), **told}
    request.answer(found, *look_shown(look, title, notes))
    return FOUND if look.first is not None else 0


def write_output(
    path: str,
    records: Sequence[Record],
    title: str,
    steps: Sequence[int] | None = None,
) -> None:
    """Writes a report, or the last record, as the name of the file asks."""
    if Path(path).suffix == ".html":
        report(records, title=title, steps=steps).save(path)
    else:
        save_record(path, records[-1])


def show_demo(request: Request, steps: int, select: Any, out: tuple[str, ...]) -> int:
    """Trains the built-in model, and shows what it is like."""
    for path in out:
        refuse_output(path, OUTPUTS)
    with progress_of() as progress:
        task = progress.add_task("Training", total=steps, told="")

        def tell(step: int, loss: float) -> None:
            progress.update(task, completed=step, told=f"loss {loss:.3f}")

        found = trained(steps, request.seed, select, tell)
    with request.working("Writing"):
        for path in out:
            write_output(path, found.records, "A small poet", found.steps)
        text = written(found.model, "'Twas", 60)
        look = look_at(found.records[-1], found.losses[-1])
    told = {"losses": found.losses, "steps": found.steps, "written": text}
    first, last = found.losses[0], found.losses[-1]
    notes = [
        f"Loss {first:.2f} → {last:.2f}  {spark(found.losses, 24)}",
        f"It writes: {' / '.join(text.splitlines())}",
        f"Wrote {', '.join(out)}: open it in a browser.",
    ]
    title = f"A character transformer after {steps} steps on a poem"
    return answer_look(request, None, look, {**told, "out": list(out)}, title, notes)


# sites and summary.


@command("All sites, shapes and sizes.", TARGET, *INPUTS, SELECT, GRADS)
def sites(request: Request, target: str, *, select: Any, grads: bool) -> int:
    """List all sites with their shapes and sizes; nothing is computed."""
    with request.working(f"Tracing {target}"):
        program = request.program(target, grads=grads, how="traced")
        record = sites_of(program.fn, *program.args, select=select, **program.kwargs)
    listed = [site_dict(site) for site in record]
    note = "Gradients take as much again, where values are floating."
    request.answer(
        {"target": target, "bytes": record.nbytes, "sites": listed},
        sites_listing(record),
        note if grads else None,
    )
    return 0


@command(
    "What a model is made of.",
    TARGET,
    *INPUTS,
    option("--depth", "How long paths may be.", type=click.IntRange(min=0)),
)
def summary(request: Request, target: str, *, depth: int | None) -> int:
    """Show what a model is made of and does: calls, shapes, sizes, FLOPs."""
    with request.working(f"Tracing {target}"):
        case, inputs = request.prepared(target, abstract=True)
        if case.owner is None:
            raise Failure(
                f"{target} is a function, and a summary is of a Module. Return the "
                "Module from the factory; `treetap sites` also lists functions."
            )
        found = summary_of(
            case.owner,
            *inputs.args,
            method="__call__" if case.owner is case.call else case.call.__name__,
            depth=depth,
            **inputs.kwargs,
        )
    request.answer({"target": target, **found.to_dict()}, found)
    return 0


# blame.


@command(
    "Which operation made the first NaN.",
    TARGET,
    *INPUTS,
    GRADS,
    flag("--everywhere", "Also find what does not reach the results."),
)
def blame(request: Request, target: str, *, grads: bool, everywhere: bool) -> int:
    """Name the operation that makes the first NaN or infinity, and its line.

    With --grads the backward pass is looked at, too. The exit code is 1 if there is
    one.
    """
    from rich.text import Text

    with request.working(f"Running {target}"):
        program = request.program(target, grads=grads, how="eager")
        run = blame_fn(program.fn, everywhere=everywhere)
        found = run(*program.args, **program.kwargs)
    about = {key: json_number(value) for key, value in asdict(found).items()}
    told = {"target": target, "found": bool(found), "text": str(found)}
    request.answer(
        {**told, **about, "path": [*map(str, found.path)]},
        Text(str(found), "bold red" if found else "green"),
        Text(program.note) if program.note else None,
    )
    return FOUND if found else 0


# compare.


@command(
    "Two runs, and where they part first.",
    click.Argument(["a"], metavar="A"),
    click.Argument(["b"], metavar="B"),
    several(
        "--rename",
        "OURS=THEIRS",
        "What sites of A are called in B: 'blocks/{i}=encoder.layer.{i}'.",
    ),
    several(
        "--layout",
        "[SITES=]AXES",
        "How arrays of B are turned: 'NCHW->NHWC', 'stem=b (h w) c -> b h w c'.",
    ),
    several("--ignore", "SELECTOR", "Sites that may be alone."),
    several(
        "--tolerance",
        "[SITES=]NUMBER",
        "What the relative error may be; by default it depends on the dtype.",
    ),
    option(
        "--absolute",
        "A difference of numbers that never counts.",
        type=click.FloatRange(min=0),
        default=0.0,
    ),
    option(
        "--noise",
        "A third run that differs by rounding alone, in place of a tolerance.",
        metavar="RECORD|TARGET",
    ),
    option(
        "--noise-factor",
        "How often that may be.",
        type=click.FloatRange(min=0),
        default=FACTOR,
    ),
    *INPUTS,
    SELECT,
    GRADS,
    EAGER,
)
def compare(
    request: Request,
    a: str,
    b: str,
    *,
    rename: tuple[str, ...],
    layout: tuple[str, ...],
    ignore: tuple[str, ...],
    tolerance: tuple[str, ...],
    noise: str | None,
    grads: bool,
    how: How,
    **options: Any,
) -> int:
    """Compare two runs site by site, and name the first that differs.

    A and B are records, saved by `inspect --out FILE.safetensors` or by another
    program, such as PyTorch's hooks; or TARGETs, which are run on the same inputs. The
    exit code is 1 if they differ.
    """
    from rich.text import Text

    if without := [text for text in rename if "=" not in text]:
        raise Failure(f"--rename {without[0]!r} is written OURS=THEIRS.")
    limits = {
        key: number_of(text, "--tolerance")
        for key, text in pairs_of(tolerance, "--tolerance").items()
    }
    third = noise and side_from(request, noise, grads=grads, how=how)
    sides = [side_from(request, text, grads=grads, how=how) for text in (a, b)]
    layouts = pairs_of(layout, "--layout")
    with request.working("Comparing"):
        found = compare_sides(
            *sides,
            rename=dict(text.split("=", 1) for text in rename) or None,
            layout=layouts or None,
            ignore=list(ignore),
            tolerance=limits or None,
            noise=third,
            **options,
        )
    request.answer(
        {"a": a, "b": b, **found.to_dict()},
        Text(f"a: {a}\nb: {b}", "bold"),
        found,
        Text("They agree.", "green") if found else None,
    )
    return 0 if found else FOUND


def pairs_of(texts: Sequence[str], option: str) -> dict[str, str]:
    """`name=value`s as a mapping; what has no `=` is for all sites, and comes last."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        key, value = (name, value) if equals else ("**", text)
        if not value or key in found:
            raise Failure(f"{option} {text!r}: {'no value' if not value else 'twice'}.")
        found[key] = value
    return dict(sorted(found.items(), key=lambda pair: pair[0] == "**"))


def number_of(text: str, option: str) -> float:
    """A number as it is written."""
    try:
        return float(text)
    except ValueError as error:
        raise Failure(f"{option} {text!r}: that is no number.") from error


def side_from(request: Request, text: str, *, grads: bool, how: How) -> Any:
    """A record: in a file, or of a target that is run now."""
    is_file = text.endswith((".safetensors", ".safetensors.index.json"))
    if is_file or Path(text).is_dir():
        if not Path(text).exists():
            raise Failure(f"There is no file {text}.")
        return text
    if ":" not in text:
        raise Failure(
            f"{text!r} is neither a .safetensors file nor a TARGET such as "
            "`models.py:small`."
        )
    with request.working(f"Running {text}"):
        program = request.program(text, grads=grads, how=how)
        run = observe(program.fn, grads=grads)
        return run(*program.args, **program.kwargs)[1]


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


for _each in (inspect, sites, summary, blame, compare, run_nnx, completion):
    cli.add_command(_each)
