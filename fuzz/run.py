# SPDX-License-Identifier: Apache-2.0
"""Fuzzes one reader of files or texts, guided by coverage, and says what was found.

    python fuzz/run.py weights --seconds 60
    python fuzz/run.py --list

The readers, the damage done to their inputs and what counts as a finding are those of
`tests/trust/hostile.py`. Each finding is written to `fuzz/found/TARGET/`, the first of
each kind; the run goes on. The exit code is 1 if there are any.
"""

import argparse
import collections
import faulthandler
import hashlib
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time
import warnings

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "trust"))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import atheris  # noqa: E402 - before what it is to look at

ROOMS = """
    treetap._io treetap._io.store treetap._compare treetap._cli
    treetap._capture.selectors treetap._core.trees.filters treetap._observe.records
""".split()
with atheris.instrument_imports(include=ROOMS):
    import guards
    import hostile

FIGURES, LAST = "figures.json", "last"
LARGEST = 200_000  # bytes of an input
HANGING = 120  # seconds after which the program ends, with a traceback


def _kept(name, data):
    """Keeps an input that is a finding."""
    place = HERE / "found" / name
    place.mkdir(parents=True, exist_ok=True)
    (place / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)


class Session:
    """One run: what was tried, and what was found."""

    def __init__(self, name, folder):
        self.name, self.target = name, hostile.TARGETS[name]
        self.folder, self.seeds = folder, self.target.seeds()
        self.outcomes = collections.Counter()
        self.findings = {}
        self.counts = collections.Counter()
        self.slowest = 0.0
        self.last = pathlib.Path(folder).parent.with_name(LAST)

    def one(self, data):
        """Reads one input."""
        faulthandler.dump_traceback_later(HANGING, exit=True)
        self.last.write_bytes(data)  # for one that ends the program
        start = time.perf_counter()
        try:
            self.outcomes[guards.tried(self.target, data, self.folder)] += 1
        except guards.Finding as finding:
            self.outcomes["found"] += 1
            self._keep(str(finding), data)
        self.slowest = max(self.slowest, time.perf_counter() - start)

    def _keep(self, text, data):
        kind = re.sub(r"'[^']*'|\d+", "…", text)[:160]
        self.counts[kind] += 1
        if kind in self.findings:
            return
        self.findings[kind] = text
        _kept(self.name, data)
        print(f"FOUND {text}", file=sys.stderr, flush=True)

    def other(self, data, max_size, seed):
        """Another input: mostly one that knows the format."""
        source = random.Random(seed)
        how = source.random()
        if how < 0.2:
            return atheris.Mutate(data, max_size)
        if how < 0.5:  # what is small and broken early has won the corpus
            data = source.choice(self.seeds)
        for _ in range(source.choice([1, 1, 2, 3])):
            data = self.target.mutate(data, source)
        return data[:max_size]


def write_seeds(name):
    """Good inputs, as files."""
    place = HERE / "seeds" / name
    place.mkdir(parents=True, exist_ok=True)
    for data in hostile.TARGETS[name].seeds():
        (place / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    return place


def fuzz(name, seconds, seed):
    """Runs a target in a child, as libFuzzer ends the process; gives its figures."""
    with tempfile.TemporaryDirectory() as root:
        figures, log = pathlib.Path(root, FIGURES), pathlib.Path(root, "log")
        command = [sys.executable, __file__, name, "--within", root]
        command += ["--seconds", str(seconds), "--seed", str(seed)]
        with log.open("wb") as opened:
            done = subprocess.run(command, stdout=opened, stderr=opened, check=False)
        text = log.read_text(errors="replace")
        found = json.loads(figures.read_text()) if figures.exists() else {}
        covered = [int(n) for n in re.findall(r"cov: (\d+)", text)]
        if covered:
            found["edges"] = {"seeds": covered[0], "end": covered[-1]}
        if done.returncode or not found:
            found["crash"] = text[-5000:]
            last = pathlib.Path(root, LAST)
            if last.exists():
                _kept(name, last.read_bytes())
    return found


def fuzz_within(root, name, seconds, seed):
    """Runs a target in this process, and ends it."""
    faulthandler.enable()
    figures = pathlib.Path(root, FIGURES)
    inside = os.path.join(root, "room", "inside")
    os.makedirs(inside)
    warnings.simplefilter("error")
    session = Session(name, inside)
    corpus = os.path.join(root, "corpus")
    os.mkdir(corpus)
    start = time.time()

    def one(data):
        session.one(data)
        if time.time() - start > seconds:
            figures.write_text(
                json.dumps(
                    {
                        "inputs": sum(session.outcomes.values()),
                        "outcomes": session.outcomes,
                        "seconds": round(time.time() - start),
                        "slowest": round(session.slowest, 2),
                        "findings": {
                            text: session.counts[kind]
                            for kind, text in session.findings.items()
                        },
                    }
                )
            )
            os._exit(0)

    options = [
        sys.argv[0],
        corpus,
        str(write_seeds(name)),
        f"-seed={seed}",
        f"-max_len={LARGEST}",
        "-rss_limit_mb=0",
        f"-artifact_prefix={root}/",
        "-timeout=300",
        "-len_control=0",
    ]
    atheris.Setup(options, one, custom_mutator=session.other)
    atheris.Fuzz()


def main():
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", choices=[*hostile.TARGETS, []])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--input", help="read one file with the target, and stop")
    parser.add_argument("--within", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.list:
        print(*hostile.TARGETS, sep="\n")
        return 0
    if given.input:
        with tempfile.TemporaryDirectory() as root:
            place = os.path.join(root, "inside")
            os.mkdir(place)
            data = pathlib.Path(given.input).read_bytes()
            print(guards.tried(hostile.TARGETS[given.targets[0]], data, place))
        return 0
    if given.within:
        fuzz_within(given.within, given.targets[0], given.seconds, given.seed)
    is_bad = False
    for name in given.targets or hostile.TARGETS:
        found = fuzz(name, given.seconds, given.seed)
        print(json.dumps({"target": name, **found}), flush=True)
        is_bad |= bool(found.get("findings") or found.get("crash"))
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
