# SPDX-License-Identifier: Apache-2.0
"""Train steps and captures of a 24-layer decoder on a GPU: time and memory.

    python benchmarks/gpu.py --json PATH         both widths, all that is installed
    python benchmarks/gpu.py --seconds 0         memory alone
    python benchmarks/gpu.py --small             a tiny decoder, to try it on a CPU

Four programs (`gpu_models.KINDS`) by each contender, all from the same arrays; those
that do not agree with the one by hand are not timed. Times come from one process. Peak
memory cannot be reset, so each contender has a process of its own for that, and its
programs run there in the order of what they need. All share a cache of compilations.
"""

import argparse
import concurrent.futures
import functools
import gc
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import gpu_models as models
import jax
import jax.numpy as jnp
import timing

STEPS = 10  # between two waits, when steps are not waited for one by one
CHECKED = 3  # calls whose results are compared
TOLERANCE = 0.03  # of bfloat16 through 24 layers, relative to the norm
TARGETS = {1024: 1.01, 256: 1.05}
WITH_TARGET = (models.TRAIN, models.VALUES)
# from the smallest peak to the largest
BY_PEAK = (models.STATISTICS, models.VALUES, models.TRAIN, models.TRAIN_VALUES)
PROCESSES = 3
CACHE = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
Report = dict[str, Any]
Programs = dict[str, models.Program]


def versions() -> dict[str, str]:
    found = {}
    for name in ("jax", "flax", "equinox"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write(report: Report, path: pathlib.Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")


# Times, in one process.


class Part:
    """One kind of program at one width: made, compiled, checked and timed.

    A contender that fails is left out, and the report says why.
    """

    def __init__(self, kind: str, width: int, names: list[str], report: Report):
        self.kind = kind
        self.width = width
        self.size = models.SIZES[width]
        self.names = [name for name in names if models.takes_part(name, kind)]
        self.report = report
        self.tokens = models.batch(self.size)
        self.programs: Programs = {}

    def attempt(self, name: str, fn: Callable[..., Any], *args: Any) -> Any:
        try:
            return fn(*args)
        except Exception as error:
            if name == models.FLOOR:
                raise
            self.programs.pop(name, None)
            what = f"{type(error).__name__}: {error}"[:2000]
            failure = {"width": self.width, "kind": self.kind, "name": name}
            self.report["failures"].append({**failure, "error": what})
            print(f"  left out: {name}: {what}", flush=True)
            return None

    def make(self, arrays: Any) -> None:
        makers = models.contenders()
        for name in self.names:
            made = self.attempt(name, makers[name], self.kind, self.size, arrays)
            if made is not None:
                self.programs[name] = made

    def compile(self) -> None:
        """Fills the cache: the floor by itself, as it chooses kernels; then the rest.

        The call that follows finds the result there.
        """
        lowered = {
            name: self.attempt(name, program.lower, self.tokens)
            for name, program in list(self.programs.items())
        }
        floor = lowered.pop(models.FLOOR)
        self.analyze(models.FLOOR, floor.compile())
        lowered.pop(models.AGAIN, None)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            waiting = {
                name: pool.submit(one.compile)
                for name, one in lowered.items()
                if one is not None
            }
            for name, future in waiting.items():
                compiled = self.attempt(name, future.result)
                if compiled is not None:
                    self.analyze(name, compiled)

    def analyze(self, name: str, compiled: Any) -> None:
        inner = getattr(compiled, "compiled", compiled)  # equinox wraps it
        found = self.attempt(name, inner.memory_analysis)
        if found is None:
            return
        sizes = {
            part: getattr(found, f"{part}_size_in_bytes")
            for part in ("argument", "output", "temp", "alias")
        }
        total = sum(sizes.values()) - 2 * sizes["alias"]
        place = {"width": self.width, "kind": self.kind, "name": name}
        self.report["compiled"].append({**place, **sizes, "total": total})

    def check(self) -> None:
        expected = self.results(models.FLOOR)
        for name in list(self.programs):
            if name != models.FLOOR:
                self.attempt(name, self.compare, name, expected)

    def results(self, name: str) -> list[Any]:
        program = self.programs[name]
        first, kept = program(self.tokens)
        others = [program(self.tokens)[0] for _ in range(CHECKED - 1)]
        return [first, *others, *kept]

    def compare(self, name: str, expected: list[Any]) -> None:
        found = self.results(name)
        if len(found) != len(expected):
            raise ValueError(f"{len(found)} results instead of {len(expected)}")
        worst = max(map(difference, found, expected))
        if not worst <= TOLERANCE:
            raise ValueError(f"differs from the one by hand by {worst:.3g}")
        if self.kind in (models.TRAIN, models.TRAIN_VALUES) and found[1] >= found[0]:
            raise ValueError(f"does not train: {found[:CHECKED]}")
        place = {"width": self.width, "kind": self.kind, "name": name}
        self.report["differences"].append({**place, "difference": worst})

    def time(self, rounds: int) -> list[timing.Row]:
        group = f"width {self.width}: {self.kind}"
        targets = {}
        if self.kind in WITH_TARGET and self.width in TARGETS:
            targets = {"treetap": TARGETS[self.width]}
        waiting = {
            name: functools.partial(run, program, self.tokens, 1)
            for name, program in self.programs.items()
        }
        several = {
            name: functools.partial(run, program, self.tokens, STEPS)
            for name, program in self.programs.items()
        }
        rows = timing.compare(group, waiting, targets, rounds)
        group = f"{group}, {STEPS} steps a wait"
        rows += [
            row._replace(microseconds=row.microseconds / STEPS)
            for row in timing.compare(group, several, targets, max(3, rounds // 2))
        ]
        return rows


def run(program: models.Program, tokens: Any, steps: int) -> None:
    out = None
    for _ in range(steps):
        out = program(tokens)
    jax.block_until_ready(out)


def difference(found: jax.Array, expected: jax.Array) -> float:
    """The norm of the difference, relative to what is expected."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise ValueError(f"{jax.typeof(found)} instead of {jax.typeof(expected)}")
    found, expected = (x.astype(jnp.float32) for x in (found, expected))
    return float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected))


def measure_time(options: argparse.Namespace) -> Report:
    """All kinds at all widths, the most important first, until the time is over."""
    device = jax.local_devices()[0]
    report: Report = {
        "device": device.device_kind,
        "versions": versions(),
        "has_peak": "peak_bytes_in_use" in (device.memory_stats() or {}),
        "rows": [],
        "compiled": [],
        "peaks": [],
        "differences": [],
        "failures": [],
        "skipped": [],
    }
    arrays = {width: models.initial(models.SIZES[width]) for width in options.width}
    start = time.monotonic()
    for kind in options.kinds:
        for width in options.width:
            before = time.monotonic()
            if before - start > options.seconds:
                report["skipped"].append({"width": width, "kind": kind})
                continue
            part = Part(kind, width, names_of(options), report)
            part.make(arrays[width])
            part.compile()
            part.check()
            ready = time.monotonic()
            rows = part.time(options.rounds)
            report["rows"] += [row._asdict() for row in rows]
            del part
            gc.collect()
            write(report, options.json)
            print(timing.table(rows, 3))
            took = f"{ready - before:.0f} s to compile and check"
            print(f"({took}, {time.monotonic() - ready:.0f} s to time)\n", flush=True)
    write(report, options.json)
    return report


# Peak memory, in a process for each contender.


def measure_memory(options: argparse.Namespace) -> Report:
    """The peak after each kind of program, for one contender at one width."""
    (width,), (name,) = options.width, options.only
    size = models.SIZES[width]
    arrays, tokens = models.initial(size), models.batch(size)
    device = jax.local_devices()[0]
    peaks = []
    last = 0
    for kind in BY_PEAK:
        if not models.takes_part(name, kind):
            continue
        program = models.contenders()[name](kind, size, arrays)
        for _ in range(CHECKED):
            run(program, tokens, 1)
        del program
        gc.collect()
        peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
        # a peak that has not grown is that of the program before
        found = {"peak": peak, "is_bound": peak is not None and peak <= last}
        peaks.append({"width": width, "kind": kind, "name": name, **found})
        last = peak or 0
    report = {"peaks": peaks}
    write(report, options.json)
    print(json.dumps(report), flush=True)
    return report


def child(
    options: argparse.Namespace, measure: str, path: pathlib.Path, *more: str
) -> list[str]:
    kept = ["--measure", measure, "--json", str(path)]
    rounds = ["--rounds", str(options.rounds), "--seconds", str(options.seconds)]
    return [sys.executable, __file__, *kept, *rounds, *more]


def peaks_of(
    options: argparse.Namespace, environment: dict[str, str], folder: pathlib.Path
) -> Iterator[Report]:
    """Peaks of all contenders, or what went wrong."""

    def one(width: int, name: str) -> Report:
        path = folder / f"{width} {name}.json"
        command = child(options, "memory", path, "--only", name, "--width", str(width))
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return json.loads(path.read_text())
        place = {"width": width, "kind": "peak memory", "name": name}
        return {"failures": [{**place, "error": done.stderr[-2000:]}]}

    asked = [
        (width, name)
        for width in options.width
        for name in names_of(options)
        if name != models.AGAIN
    ]
    with concurrent.futures.ThreadPoolExecutor(PROCESSES) as pool:
        yield from pool.map(one, *zip(*asked))


def measure_all(options: argparse.Namespace) -> Report:
    """Times, then peaks, each in other processes than this, which needs no GPU."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        path = options.json or folder / "times.json"
        cache = {**CACHE, "JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}
        environment = {**os.environ, **cache}
        widths = map(str, options.width)
        only = ["--only", *options.only] if options.only else []
        only += ["--kinds", *options.kinds]
        command = child(options, "time", path, "--width", *widths, *only)
        subprocess.run(command, env=environment, check=True)
        report = json.loads(path.read_text())
        if report["has_peak"]:
            environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
            for found in peaks_of(options, environment, folder):
                for key, values in found.items():
                    report[key] += values
    report["seconds"] = time.monotonic() - start
    write(report, options.json)
    return report


# The report.


def memory_table(report: Report) -> str:
    """Megabytes of compiled programs, and peaks of processes that run them."""

    def key(row: Report) -> tuple[Any, ...]:
        return row["width"], row["kind"], row["name"]

    compiled = {key(row): row for row in report["compiled"]}
    peaks = {key(row): row for row in report["peaks"]}
    lines = [
        "| program | contender | arguments | results | temporary | in all | peak |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for place in dict.fromkeys([*compiled, *peaks]):
        width, kind, name = place
        floor = (width, kind, models.FLOOR)
        row, base = compiled.get(place, {}), compiled.get(floor, {})
        cells = [megabytes(row, part) for part in ("argument", "output", "temp")]
        cells.append(megabytes(row, "total", base))
        peak = megabytes(peaks.get(place, {}), "peak", peaks.get(floor, {}))
        bound = "≤ " if peaks.get(place, {}).get("is_bound") else ""
        texts = [f"width {width}: {kind}", name, *cells, bound + peak]
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines)


def megabytes(row: Report, part: str, base: Report | None = None) -> str:
    if row.get(part) is None:
        return ""
    text = f"{row[part] / 2**20:,.1f}"
    if base and base.get(part):
        text += f" ({row[part] / base[part]:.3f}x)"
    return text


def markdown(report: Report) -> str:
    """The whole report, in the order of widths."""
    rows = [timing.Row(**row) for row in report["rows"]]
    named = ", ".join(f"{name} {is_}" for name, is_ in report["versions"].items())
    bound = "MiB; results that take an argument's place are in all once."
    parts = [
        f"{report['device']}; {named}.",
        timing.table(rows, 3),
        f"Memory in {bound}\n\n{memory_table(report)}",
    ]
    for title in ("failures", "skipped"):
        if report[title]:
            lines = [" · ".join(map(str, row.values())) for row in report[title]]
            parts.append("\n".join([f"{title.capitalize()}:", "", *lines]))
    return "\n\n".join(parts)


def names_of(options: argparse.Namespace) -> list[str]:
    found = list(models.contenders())
    if options.only and options.measure == "memory":
        return options.only
    if options.only:
        return [name for name in found if name in (models.FLOOR, *options.only)]
    return found


def parse() -> argparse.Namespace:
    names = list(models.contenders())
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--width", type=int, nargs="+", choices=list(models.SIZES))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--small", action="store_true", help="only a tiny decoder")
    parser.add_argument("--only", nargs="+", choices=names, help="and the floor")
    parser.add_argument("--kinds", nargs="+", choices=models.KINDS, help="of program")
    parser.add_argument("--measure", choices=["all", "time", "memory"], default="all")
    parser.add_argument("--json", type=pathlib.Path, help="written after each part")
    parser.add_argument("--markdown", type=pathlib.Path, help="tables go there too")
    parser.add_argument(
        "--seconds", type=float, default=400, help="nothing more is timed after that"
    )
    options = parser.parse_args()
    options.kinds = options.kinds or list(models.KINDS)
    options.width = options.width or ([models.SMALL] if options.small else [1024, 256])
    if options.measure == "memory" and [
        *map(len, (options.width, options.only or []))
    ] != [1, 1]:
        parser.error("--measure memory takes one --width and one --only")
    return options


def main() -> int:
    options = parse()
    if options.measure == "memory":
        measure_memory(options)
        return 0
    if options.measure == "time":
        measure_time(options)
        return 0
    report = measure_all(options)
    text = markdown(report)
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n")
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
