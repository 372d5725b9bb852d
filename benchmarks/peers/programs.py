# SPDX-License-Identifier: Apache-2.0
"""Programs on other people's NNX libraries, run on flax and on treetap, and compared.

Each file in `programs` is a script as a user of the library would write it, and ends
with a dict `results`: parameters, losses, outputs. It is run twice, in processes of its
own: as it is, and with `treetap.as_flax()` in force. All in `results` is compared
to the bit. `--suites DIR` runs the libraries' own tests as well, from their unpacked
source distributions in DIR. The table is that of docs/from-nnx.md.
"""

import argparse
import importlib.metadata
import json
import os
import pickle
import re
import runpy
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

FOLDER = Path(__file__).parent / "programs"
PACKAGES = {  # what a program is about, by the first word of its name
    "cax": "cax",
    "gpjax": "gpjax",
    "jaxkan": "jaxkan",
    "jraphx": "jraphx",
    "metrax": "google-metrax",
    "nnxppo": "nnx-ppo",
    "numpyro": "numpyro",
    "ott": "ott-jax",
    "qwix": "qwix",
    "spyx": "spyx",
}
GPJAX = ("dataset", "imports", "likelihoods", "mean_functions", "parameters", "scan")
SUITES = {  # tests in source distributions: the package, and what pytest is given
    "cax": ("cax", ["tests"]),
    "diffuse_jax": ("diffuse-jax", ["test"]),
    "gpjax": ("gpjax", [f"tests/test_{name}.py" for name in GPJAX]),
    "nnx_ppo": ("nnx-ppo", ["nnx_ppo/networks"]),
    "spyx": ("spyx", ["tests"]),
}
ROUNDING = 1e-4  # what is left of rounding after some steps of training
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu"}


def worker(program, on, path):
    """Runs a program and saves every array of its results, by its place in them."""
    if on == "treetap":
        import treetap as tt

        tt.as_flax()
    results = runpy.run_path(str(FOLDER / f"{program}.py"))["results"]
    import jax

    def array(leaf):
        is_key = jax.dtypes.issubdtype(
            getattr(leaf, "dtype", None), jax.dtypes.prng_key
        )
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    found = {
        jax.tree_util.keystr(steps): array(leaf)
        for steps, leaf in jax.tree_util.tree_leaves_with_path(results)
    }
    if not found:
        raise SystemExit(f"{program} has no results")
    Path(path).write_bytes(pickle.dumps(found))


def last_line(command, **options):
    """How a process ended, and the last line that it printed."""
    done = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, check=False, **options
    )
    lines = (done.stderr + done.stdout).strip().splitlines()
    return done.returncode, lines[-1] if lines else ""


def compared(program):
    """In words, whether a program gives the same on both."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for on in ("flax", "treetap"):
            path = f"{folder}/{on}"
            command = [sys.executable, __file__, "--worker", program, on, path]
            code, line = last_line(command)
            if code:
                return f"FAILS on {on}: {line}"
            results.append(pickle.loads(Path(path).read_bytes()))
    theirs, ours = results
    kinds = [{k: (v.dtype, v.shape) for k, v in found.items()} for found in results]
    if kinds[0] != kinds[1]:
        names = {name for name, _ in kinds[0].items() ^ kinds[1].items()}
        return f"DIFFERS in structure: {', '.join(sorted(names)[:4])}"
    if all(ours[k].tobytes() == theirs[k].tobytes() for k in ours):
        return f"agree to the bit ({len(ours)} arrays)"
    off = max(distance(ours[k], theirs[k]) for k in ours)
    return f"{'agree to rounding' if off < ROUNDING else 'DIFFER'}: {off:.1e}"


def distance(ours, theirs):
    """How far two arrays are apart, relative to the largest number."""
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    if not np.array_equal(np.isfinite(ours), np.isfinite(theirs)):
        return np.inf
    scale = max(np.max(np.abs(theirs), initial=0.0, where=np.isfinite(theirs)), 1e-30)
    return np.max(np.abs(np.nan_to_num(ours - theirs)), initial=0.0) / scale


def tested(folder, args):
    """How a library's own tests end, each by its name, on flax and on treetap."""
    theirs, ours = (
        outcomes(folder, args, first) for first in ([], ["-m", "treetap", "run-nnx"])
    )
    if "passed" not in theirs.values():
        return f"FAILS on flax: {', '.join(theirs)}"
    if theirs == ours:
        return f"same on both: {counts(theirs)}"
    names = sorted({name for name, _ in theirs.items() ^ ours.items()})
    return (
        f"DIFFER: {counts(theirs)} on flax, {counts(ours)} on treetap: "
        f"{', '.join(names)}"
    )


def outcomes(folder, args, first):
    """How each test ends, by its name, as pytest writes it down."""
    with tempfile.TemporaryDirectory() as place:
        path = f"{place}/tests.xml"
        options = ["-q", "-p", "no:cacheprovider", "--tb=no", f"--junitxml={path}"]
        command = [sys.executable, *first, "-m", "pytest", *options, *args]
        _, line = last_line(command, cwd=folder)
        if not Path(path).exists():
            return {line: "no tests"}
        cases = list(ElementTree.parse(path).iter("testcase"))
    words = {"failure": "failed", "error": "an error", "skipped": "skipped"}
    return {
        f"{case.get('classname')}.{case.get('name')}": next(
            (words[part.tag] for part in case if part.tag in words), "passed"
        )
        for case in cases
    }


def counts(found):
    """How many tests ended in which way, in words."""
    numbers = Counter(found.values())
    return ", ".join(f"{number} {how}" for how, number in sorted(numbers.items()))


def rows(names, suites):
    """Yields what was run, one row at a time."""
    for file in sorted(FOLDER.glob("*.py")):
        package = PACKAGES[file.stem.partition("_")[0]]
        if installed(package) and (not names or file.stem in names):
            yield row(package, file.stem, compared(file.stem))
    for name, (package, args) in SUITES.items() if suites else ():
        if names and name not in names:
            continue
        folder = Path(suites) / f"{name}-{installed(package)}"
        if folder.is_dir():
            yield row(package, "its own tests", tested(folder, args))


def row(package, what, result):
    version = installed(package)
    return {"package": f"{package} {version}", "program": what, "result": result}


def installed(package):
    """The version of a package, or nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="programs and suites; or all")
    parser.add_argument("--suites", metavar="DIR", help="unpacked source distributions")
    parser.add_argument("--json", metavar="FILE", help="where to write the table")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(*options.worker)
    versions = {name: installed(name) for name in ("flax", "jax")}
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print("| package | program | flax and treetap |\n|---|---|---|")
    found = []
    for item in rows(options.names, options.suites):
        found.append(item)
        print(f"| {' | '.join(item.values())} |", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(versions | {"rows": found}, indent=2))
    return any(re.match("DIFFER|FAILS", item["result"]) for item in found)


if __name__ == "__main__":
    sys.exit(main())
