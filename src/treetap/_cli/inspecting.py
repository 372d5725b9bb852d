# SPDX-License-Identifier: Apache-2.0
"""inspect: figures of every value of a run, as a table, a report, a record or JSON.

Without a target the built-in model is trained and shown, so that there is something to
see before anyone has written a model.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from treetap._cli.console import console_of, many, number_text, progress_of, spark
from treetap._cli.demo import trained, written
from treetap._cli.failures import FOUND, Failure
from treetap._cli.looking import Look, figures_listing, look_at, look_dict, observed
from treetap._cli.options import (
    debug_option,
    eager_option,
    given_from,
    grads_option,
    guarded,
    input_options,
    json_option,
    print_json,
    program_for,
    refuse_output,
    select_option,
    selector_of,
    with_targets,
    work,
)
from treetap._core import display
from treetap._io.record_file import save_record
from treetap._observe.records import Record
from treetap._report.html import report

OUTPUTS = (".html", ".safetensors")
DEMO_STEPS = 240
DEMO_OUT = "treetap-report.html"


@with_targets(
    "Figures of every value of a run.",
    """
    Show figures of every value on the way through a model.

    A row for each site: its histogram, mean, standard deviation, largest magnitude,
    and the share of units that are 0 throughout; with --grads the norm of the gradient
    and its ratio to that of the value. The first site that is not finite is named, and
    the exit code is 1 then.

    Without a loss, --grads differentiates the mean of squares of all floating outputs.
    Without a TARGET, a small built-in model is trained and shown, and a report written
    to treetap-report.html.
    """,
)
@click.argument("target", required=False)
@input_options
@select_option
@grads_option
@click.option(
    "--reduce",
    is_flag=True,
    help="Keep statistics only: they are taken where the values are.",
)
@eager_option
@click.option(
    "--out",
    metavar="FILE",
    multiple=True,
    help="Write a report (.html), or the record (.safetensors). May be repeated.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=DEMO_STEPS,
    show_default=True,
    help="How long the built-in model is trained.",
)
@json_option
@debug_option
@guarded
def inspect(
    target: str | None,
    *,
    select: tuple[str, ...],
    grads: bool,
    reduce: bool,
    eager: bool,
    out: tuple[str, ...],
    steps: int,
    as_json: bool,
    **options: Any,
) -> int:
    """The command; its help is above."""
    given, chosen = given_from(options), selector_of(select)
    if target is None:
        if not given.is_default or reduce or eager:
            raise Failure(
                "Without a TARGET the built-in model is shown, which has inputs and "
                "weights of its own. Name a TARGET, or leave those options out."
            )
        return show_demo(steps, given.seed, chosen, out or (DEMO_OUT,), as_json)
    for path in out:
        refuse_output(path, OUTPUTS)
    if reduce and any(path.endswith(".safetensors") for path in out):
        raise Failure(
            "--reduce keeps no values, and a record in a file is of values. Write an "
            ".html, or leave out --reduce."
        )
    with work(f"Running {target}", as_json):
        how = "eager" if eager else "jit"
        program = program_for(target, given, grads=grads, how=how)
        look = observed(program, chosen, grads=grads, reduce=reduce)
    for path in out:
        write_output(path, [look.record], target)
    notes = [program.note] if program.note else []
    if as_json:
        found = {"target": target, **look_dict(look), "loss_of": program.loss or None}
        print_json({**found, "notes": notes, "out": list(out)})
    else:
        title = f"{target}: {many(len(look.rows), 'site')}"
        title += f", {display.readable_bytes(sum(row.nbytes for row in look.rows))}"
        title += "" if look.loss is None else f", loss {number_text(look.loss)}"
        show_look(look, title, [*notes, *(f"Wrote {path}." for path in out)])
    return FOUND if look.first is not None else 0


def write_output(
    path: str,
    records: Sequence[Record],
    title: str,
    steps: Sequence[int] | None = None,
) -> None:
    """Writes a report, or the last record, as the name of the file asks."""
    if Path(path).suffix == ".html":
        given = records[0] if steps is None else list(records)
        report(given, title=title, steps=None if steps is None else list(steps)).save(
            path
        )
    else:
        save_record(path, records[-1])


def show_look(look: Look, title: str, notes: Sequence[str]) -> None:
    """Prints a look: a title, the table, the verdict, what else there is to know."""
    from rich.text import Text

    console = console_of()
    console.print(Text(title, "bold"))
    console.print(figures_listing(look, ascii_only=console.options.ascii_only))
    if look.first is None:
        console.print(Text("All is finite.", "green"))
    else:
        told = f"First not finite: {look.first}."
        if look.first.part == "gradient":
            told = f"All values are finite. {told}"
        console.print(Text(told, "bold red"))
        console.print(Text("`treetap blame` names the operation that made it.", "dim"))
    for note in notes:
        console.print(Text(note))


def show_demo(
    steps: int, seed: int, select: Any, out: tuple[str, ...], as_json: bool
) -> int:
    """Trains the built-in model, and shows what it is like."""
    for path in out:
        refuse_output(path, OUTPUTS)
    with progress_of() as progress:
        task = progress.add_task("Training", total=steps, told="")

        def tell(step: int, loss: float) -> None:
            progress.update(task, completed=step, told=f"loss {loss:.3f}")

        found = trained(steps, seed, select, tell)
    with work("Writing", as_json):
        for path in out:
            write_output(path, found.records, "A small poet", found.steps)
        text = written(found.model, "'Twas", 60)
        look = look_at(found.records[-1], found.losses[-1])
    if as_json:
        told = {"losses": found.losses, "steps": found.steps, "written": text}
        print_json({"target": None, **look_dict(look), **told, "out": list(out)})
        return FOUND if look.first is not None else 0
    first, last = found.losses[0], found.losses[-1]
    title = f"A character transformer after {steps} steps on a poem"
    notes = [
        f"Loss {first:.2f} → {last:.2f}  {spark(found.losses, 24)}",
        f"It writes: {' / '.join(text.splitlines())}",
        f"Wrote {', '.join(out)}: open it in a browser.",
    ]
    show_look(look, title, notes)
    return FOUND if look.first is not None else 0
