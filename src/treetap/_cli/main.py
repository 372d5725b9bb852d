# SPDX-License-Identifier: Apache-2.0
"""The commands of `treetap`.

Each command imports a TARGET, does its work, prints a table or JSON, and ends
with 0 if all is well, 1 if it found what it looks for, 2 if it could not be done.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

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
from treetap._cli.programs import How, Program
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

Texts = tuple[str, ...]
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 96}
OUTPUTS = (".html", ".safetensors")
FROM_0 = click.FloatRange(min=0)


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
        click.IntRange(min=1),
        default=240,
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
    out = out or (() if target else ("treetap-report.html",))
    for path in out:
        refuse_output(path, OUTPUTS)
    given = request.inputs or request.shape or request.weights or request.cast
    if target is None and (given or reduce or how == "eager"):
        raise Failure(
            "Without a TARGET the built-in model is shown, which has inputs and "
            "weights of its own. Name a TARGET, or leave those options out."
        )
    if reduce and any(path.endswith(".safetensors") for path in out):
        raise Failure(
            "--reduce keeps no values, and a record in a file is of values. Write an "
            ".html, or leave out --reduce."
        )
    if target is None:
        seen = run_demo(request, steps, select)
    else:
        with request.working(f"Running {target}"):
            program = request.program(target, grads=grads, how=how)
            look = observed(program, select, grads=grads, reduce=reduce)
            seen = seen_of(look, program, target)
    with request.working("Writing"):
        for path in out:
            write_output(path, seen, target or "A small poet")
    notes = [*seen.notes, *(f"Wrote {path}." for path in out)]
    found = {"target": target, **look_dict(seen.look), **seen.extra, "out": list(out)}
    request.answer(found, *look_shown(seen.look, seen.title, notes))
    return 0 if seen.look.first is None else FOUND


class Seen(NamedTuple):
    """What `inspect` shows.

    Attributes:
        look: The figures.
        title: What it is of.
        notes: Lines for people, at the end.
        extra: More for JSON.
        records: What a report is of; the last one is the look's.
        steps: When each was made, in a training.
    """

    look: Look
    title: str
    notes: list[str]
    extra: dict[str, Any]
    records: Sequence[Record]
    steps: Sequence[int] | None = None


def seen_of(look: Look, program: Program, target: str) -> Seen:
    """What to show of a look at a program that was run."""
    notes = [program.note] if program.note else []
    extra = {"loss_of": program.loss or None, "notes": notes}
    title = f"{target}: {many(len(look.rows), 'site')}"
    title += f", {readable_bytes(sum(row.site.nbytes for row in look.rows))}"
    title += "" if look.loss is None else f", loss {number_text(look.loss)}"
    return Seen(look, title, notes, extra, [look.record])


def run_demo(request: Request, steps: int, select: Any) -> Seen:
    """Trains the built-in model, and looks at it."""
    with progress_of() as progress:
        task = progress.add_task("Training", total=steps, state="")

        def show(step: int, loss: float) -> None:
            progress.update(task, completed=step, state=f"loss {loss:.3f}")

        found = trained(steps, request.seed, select, show)
    with request.working("Writing a poem"):
        text = written(found.model, "'Twas", 60)
        look = look_at(found.records[-1], found.losses[-1])
    first, last = found.losses[0], found.losses[-1]
    notes = [
        f"Loss {first:.2f} → {last:.2f}  {spark(found.losses, 24)}",
        f"It writes: {' / '.join(text.splitlines())}",
        "A report is a page to open in a browser.",
    ]
    extra = {"losses": found.losses, "steps": found.steps, "written": text}
    title = f"A character transformer after {steps} steps on a poem"
    return Seen(look, title, notes, extra, found.records, found.steps)


def write_output(path: str, seen: Seen, title: str) -> None:
    """Writes a report, or the last record, as the name of the file asks."""
    if Path(path).suffix == ".html":
        report(seen.records, title=title, steps=seen.steps).save(path)
    else:
        save_record(path, seen.records[-1])


# sites and summary.


@command("All sites, shapes and sizes.", TARGET, *INPUTS, SELECT, GRADS)
def sites(request: Request, target: str, *, select: Any, grads: bool) -> int:
    """List all sites with their shapes and sizes; nothing is computed."""
    with request.working(f"Tracing {target}"):
        program = request.program(target, grads=grads, how="traced")
        record = sites_of(program.fn, *program.args, select=select, **program.kwargs)
    listed = [site_dict(site) for site in record]
    request.answer(
        {"target": target, "bytes": record.nbytes, "sites": listed},
        sites_listing(record),
        "Gradients take as much again, where values are floating." if grads else None,
    )
    return 0


@command(
    "What a model is made of.",
    TARGET,
    *INPUTS,
    option("--depth", "How long paths may be.", click.IntRange(min=0)),
)
def summary(request: Request, target: str, *, depth: int | None) -> int:
    """Show what a model is made of and does: calls, shapes, sizes, FLOPs."""
    with request.working(f"Tracing {target}"):
        case = request.case(target, abstract=True)
        if case.owner is None:
            raise Failure(
                f"{target} is a function, and a summary is of a Module. Return the "
                "Module from the factory; `treetap sites` also lists functions."
            )
        method = "__call__" if case.owner is case.call else case.call.__name__
        args, kwargs = case.inputs
        found = summary_of(case.owner, *args, method=method, depth=depth, **kwargs)
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
    verdict = {"target": target, "found": bool(found), "text": str(found)}
    request.answer(
        {**verdict, **about, "path": [*map(str, found.path)]},
        Text(str(found), "bold red" if found else "green"),
        Text(program.note) if program.note else None,
    )
    return FOUND if found else 0


# compare.


def renames(_: click.Context, option: click.Parameter, texts: Texts) -> dict[str, str]:
    """`OURS=THEIRS`s as a mapping."""
    for text in texts:
        if "=" not in text:
            raise Failure(f"{option.opts[0]} {text!r} is written OURS=THEIRS.")
    return dict(text.split("=", 1) for text in texts)


def by_site(_: click.Context, option: click.Parameter, texts: Texts) -> dict[str, str]:
    """`SITES=VALUE`s as a mapping; a VALUE alone is for all sites, and comes last."""
    found: dict[str, str] = {}
    for text in texts:
        sites, equals, value = text.partition("=")
        key, value = (sites, value) if equals else ("**", text)
        if not value or key in found:
            reason = "twice" if value else "no value"
            raise Failure(f"{option.opts[0]} {text!r}: {reason}.")
        found[key] = value
    return dict(sorted(found.items(), key=lambda pair: pair[0] == "**"))


def numbers_by_site(context: Any, option: Any, texts: Texts) -> dict[str, float]:
    """The same, of numbers."""
    found: dict[str, float] = {}
    for key, text in by_site(context, option, texts).items():
        try:
            found[key] = float(text)
        except ValueError as error:
            raise Failure(f"{option.opts[0]} {text!r}: that is no number.") from error
    return found


@command(
    "Two runs, and where they part first.",
    click.Argument(["a"], metavar="A"),
    click.Argument(["b"], metavar="B"),
    several(
        "--rename",
        "OURS=THEIRS",
        "What sites of A are called in B: 'blocks/{i}=encoder.layer.{i}'.",
        callback=renames,
    ),
    several(
        "--layout",
        "[SITES=]AXES",
        "How arrays of B are turned: 'NCHW->NHWC', 'stem=b (h w) c -> b h w c'.",
        callback=by_site,
    ),
    several("--ignore", "SELECTOR", "Sites that may be alone."),
    several(
        "--tolerance",
        "[SITES=]NUMBER",
        "What the relative error may be; by default it depends on the dtype.",
        callback=numbers_by_site,
    ),
    option(
        "--absolute", "A difference of numbers that never counts.", FROM_0, default=0.0
    ),
    option(
        "--noise",
        "A third run that differs by rounding alone, in place of a tolerance.",
        metavar="RECORD|TARGET",
    ),
    option("--noise-factor", "How often that may be.", FROM_0, default=FACTOR),
    *INPUTS,
    SELECT,
    GRADS,
    EAGER,
)
def compare(
    request: Request, a: str, b: str, *, noise: Any, grads: bool, how: How, **more: Any
) -> int:
    """Compare two runs site by site, and name the first that differs.

    A and B are records, saved by `inspect --out FILE.safetensors` or by another
    program, such as PyTorch's hooks; or TARGETs, which are run on the same inputs. The
    exit code is 1 if they differ.
    """
    from rich.text import Text

    third = noise and side_from(request, noise, grads=grads, how=how)
    sides = [side_from(request, text, grads=grads, how=how) for text in (a, b)]
    with request.working("Comparing"):
        found = compare_sides(*sides, noise=third, **more)
    request.answer(
        {"a": a, "b": b, **found.to_dict()},
        Text(f"a: {a}\nb: {b}", "bold"),
        found,
        Text("They agree.", "green") if found else None,
    )
    return 0 if found else FOUND


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
        return observe(program.fn, grads=grads)(*program.args, **program.kwargs)[1]


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

    run(script, list(arguments), module)


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
