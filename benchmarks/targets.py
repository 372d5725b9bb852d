# SPDX-License-Identifier: Apache-2.0
"""Every target in one table: all the parts in one run, peers beside them.

    python benchmarks/targets.py --json PATH --plot PATH
    python benchmarks/targets.py --gpu          what a GPU is needed for, too

Each part is a program of its own, in which contenders take turns: `eager.py`,
`calls.py`, `capture.py`, `stores.py`, `experiments.py` and `gpu.py`. Run by `make
bench`. The exit code is 1 if a target is missed.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import calls
import timing

HERE = pathlib.Path(__file__).parent
OURS = "treetap"
AGAIN = "the same again"
HEAD = "| what | floor | again | treetap | target | met | peers |"
Report = dict[str, Any]


def measured(part: str, *more: str) -> Report:
    """What one part finds."""
    print(f"{part} ...", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "found.json"
        command = [sys.executable, HERE / f"{part}.py", "--json", path, *more]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        if not path.exists():
            sys.exit(f"{part}.py ended without a result")
        return json.loads(path.read_text())


def shown_time(microseconds: float) -> str:
    if microseconds < 1e4:
        return f"{microseconds:,.0f} µs"
    return f"{microseconds / 1e3:,.0f} ms"


def lines_of(group: list[timing.Row]) -> list[str]:
    """A line for each of our contenders in a group that has a target."""
    floor, *others = group
    again = [f"{row.ratio:.2f}x" for row in others if row.name == AGAIN]
    peers = ", ".join(
        f"{row.name} {row.ratio:.1f}x"
        for row in others
        if OURS not in row.name and row.name != AGAIN
    )
    lines = []
    for row in others:
        if row.target:
            variant = row.name.removeprefix(OURS).strip(" ,")
            what = f"{row.group} ({variant})" if variant else row.group
            cells = [what, shown_time(floor.microseconds), "".join(again)]
            cells += [f"{row.ratio:.2f}x", f"≤ {row.target:g}x", met(row), peers]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def met(row: timing.Row) -> str:
    return "yes" if row.target is None or row.ratio <= row.target else "NO"


def table(rows: list[timing.Row]) -> str:
    groups: dict[str, list[timing.Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    lines = [line for group in groups.values() for line in lines_of(group)]
    return "\n".join([HEAD, "|---|---:|---:|---:|---:|:-:|---|", *lines])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--plot", type=pathlib.Path, help="calls, as an SVG file")
    options = parser.parse_args()
    plot = ["--plot", str(options.plot)] if options.plot else []
    reports = [measured("eager"), measured("calls", *plot), measured("capture")]
    reports.append(measured("stores"))
    reports.append(measured("experiments", *([] if options.gpu else ["--small"])))
    if options.gpu:
        reports.append(measured("gpu"))
    rows = [timing.Row(**row) for report in reports for row in report["rows"]]
    found = [one for report in reports for one in report.get("figures", ())]
    figures = [timing.Figure(**figure) for figure in found]
    called = [row for row in rows if row.group.startswith(calls.CALLS)]
    print(f"\n{table(rows)}\n\n{timing.figure_table(figures)}\n\n{calls.lines(called)}")
    timing.write(options.json, rows, figures)
    missed = [row for row in rows if met(row) == "NO"]
    return 1 if missed or any(one.found > one.target for one in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
