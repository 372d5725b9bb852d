# SPDX-License-Identifier: Apache-2.0
"""compare: two runs at the command line, and the first site where they part.

A side is a file, of this library or of another program, or a target that is run now.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from treetap._cli.console import console_of
from treetap._cli.failures import FOUND, Failure
from treetap._cli.options import (
    Given,
    debug_option,
    eager_option,
    given_from,
    grads_option,
    guarded,
    input_options,
    json_option,
    print_json,
    program_for,
    select_option,
    selector_of,
    with_targets,
    work,
)
from treetap._cli.programs import How
from treetap._compare.comparison import compare as compare_sides
from treetap._observe.observe import observe


def pairs_of(texts: Sequence[str], option: str) -> dict[str, str]:
    """`name=value`s as a mapping; what has no `=` is for all sites."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        key, value = (name, value) if equals else ("**", text)
        if not value or key in found:
            raise Failure(f"{option} {text!r}: {'no value' if not value else 'twice'}.")
        found[key] = value
    return found


def number_of(text: str, option: str) -> float:
    """A number as it is written."""
    try:
        return float(text)
    except ValueError as error:
        raise Failure(f"{option} {text!r}: that is no number.") from error


def side_from(text: str, given: Given, *, grads: bool, how: How, as_json: bool) -> Any:
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
    with work(f"Running {text}", as_json):
        program = program_for(text, given, grads=grads, how=how)
        run = observe(program.fn, grads=grads)
        return run(*program.args, **program.kwargs)[1]


@with_targets(
    "Two runs, and where they part first.",
    """
    Compare two runs site by site, and name the first that differs.

    A and B are records, saved by `inspect --out FILE.safetensors` or by another
    program, such as PyTorch's hooks; or TARGETs, which are run on the same inputs. The
    exit code is 1 if they differ.
    """,
)
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option(
    "--rename",
    metavar="OURS=THEIRS",
    multiple=True,
    help="What sites of A are called in B: 'blocks/{i}=encoder.layer.{i}'.",
)
@click.option(
    "--layout",
    metavar="[SITES=]AXES",
    multiple=True,
    help="How arrays of B are turned: 'NCHW->NHWC', 'stem=b (h w) c -> b h w c'.",
)
@click.option(
    "--ignore", metavar="SELECTOR", multiple=True, help="Sites that may be alone."
)
@click.option(
    "--tolerance",
    metavar="[SITES=]NUMBER",
    multiple=True,
    help="What the relative error may be; by default it depends on the dtype.",
)
@click.option(
    "--absolute",
    type=click.FloatRange(min=0),
    default=0.0,
    help="A difference of numbers that never counts.",
)
@click.option(
    "--noise",
    metavar="RECORD|TARGET",
    help="A third run that differs by rounding alone, in place of a tolerance.",
)
@click.option(
    "--noise-factor", type=click.FloatRange(min=0), help="How often that may be."
)
@input_options
@select_option
@grads_option
@eager_option
@json_option
@debug_option
@guarded
def compare(
    a: str,
    b: str,
    *,
    rename: tuple[str, ...],
    layout: tuple[str, ...],
    ignore: tuple[str, ...],
    tolerance: tuple[str, ...],
    absolute: float,
    noise: str | None,
    noise_factor: float | None,
    select: tuple[str, ...],
    grads: bool,
    eager: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """The command; its help is above."""
    given = given_from(options)
    if without := [text for text in rename if "=" not in text]:
        raise Failure(f"--rename {without[0]!r} is written OURS=THEIRS.")
    limits = pairs_of(tolerance, "--tolerance")
    more: dict[str, Any] = (
        {} if noise_factor is None else {"noise_factor": noise_factor}
    )
    if limits:
        numbers = {k: number_of(v, "--tolerance") for k, v in limits.items()}
        more["tolerance"] = dict(sorted(numbers.items(), key=lambda p: p[0] == "**"))
    run: Any = {"grads": grads, "how": "eager" if eager else "jit", "as_json": as_json}
    if noise is not None:
        more["noise"] = side_from(noise, given, **run)
    sides = [side_from(text, given, **run) for text in (a, b)]
    turned = pairs_of(layout, "--layout")
    with work("Comparing", as_json):
        found = compare_sides(
            *sides,
            rename=dict(text.split("=", 1) for text in rename) or None,
            layout=turned or None,
            select=selector_of(select),
            ignore=list(ignore),
            absolute=absolute,
            **more,
        )
    if as_json:
        print_json({"a": a, "b": b, **found.to_dict()})
    else:
        from rich.text import Text

        console = console_of()
        console.print(Text(f"a: {a}\nb: {b}", "bold"))
        console.print(found)
        if found:
            console.print(Text("They agree.", "green"))
    return 0 if found else FOUND
