# SPDX-License-Identifier: Apache-2.0
"""What a run of the suite under `coverage` did not reach, and whether that will do.

The core is reached in every line, any other file in 95 of 100, and every `raise` in the
source by a test. Run it after the suite, with the file that `coverage combine` wrote:

    python tests/house/check_coverage.py .coverage

What is excluded in the configuration of coverage counts neither way. A file of the core
that is not there is an error: `tests/house/test_coverage.py` looks, too.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import coverage

SOURCE = Path(__file__).parents[2] / "src" / "treetap"
CORE = (
    "_transforms/lift/lift",
    "_transforms/lift/call_cache",
    "_transforms/lift/structure_updates",
    "_core/trees/flatten",
    "_transforms/lift/program",
    "_core/trees/build",
    "_transforms/lift/results",
    "_core/trees/graphdef",
    "_capture/walk/run",
    "_capture/walk/operations",
    "_core/trees/traverse",
    "_core/trees/filters",
    "_core/trees/state",
    "_core/variables/variable",
)
WHOLE, MOST = 100.0, 95.0  # per cent, of the core and of the rest


class Reached(NamedTuple):
    """How much of a file was run.

    Attributes:
        file: Its path below the package.
        share: How much, in per cent.
        missing: The lines that were not.
        raises: Those of them that raise.
    """

    file: Path
    share: float
    missing: list[int]
    raises: list[int]

    @property
    def wanted(self) -> float:
        """How much has to be."""
        return WHOLE if self.file.as_posix().removesuffix(".py") in CORE else MOST


def reached(data_file: str) -> Iterator[Reached]:
    """Every file of the package; one that was never imported is not reached at all."""
    import coverage

    measured = coverage.Coverage(data_file=data_file)
    measured.load()
    if not any(Path(each).is_relative_to(SOURCE) for each in _files_in(measured)):
        raise SystemExit(f"{data_file} says nothing of files in {SOURCE}.")
    for file in sorted(SOURCE.rglob("*.py")):
        _, statements, _, missing, _ = measured.analysis2(str(file))
        lines = {
            node.lineno
            for node in ast.walk(ast.parse(file.read_text("utf-8")))
            if isinstance(node, ast.Raise)
        }
        share = 100.0 * (1 - len(missing) / max(1, len(statements)))
        raises = [line for line in missing if line in lines]
        yield Reached(file.relative_to(SOURCE), share, missing, raises)


def _files_in(measured: "coverage.Coverage") -> set[str]:
    return measured.get_data().measured_files()


def unknown_files() -> list[str]:
    """Names in the list of the core that no file has."""
    return [name for name in CORE if not (SOURCE / f"{name}.py").is_file()]


def problems(found: Iterator[Reached]) -> Iterator[str]:
    """A line for each file with too little, and for each `raise` that never ran."""
    for each in found:
        if each.share < each.wanted:
            told = ", ".join(map(str, each.missing[:20]))
            more = ", …" if len(each.missing) > 20 else ""
            yield (
                f"{each.file}: {each.share:.1f} % of it is reached, and "
                f"{each.wanted:.0f} % is wanted; not reached: {told}{more}"
            )
        for line in each.raises:
            yield f"{each.file}:{line}: no test comes to this `raise`"


def main() -> int:
    """Prints what is missing; the exit code is 1 if anything is."""
    if unknown := unknown_files():
        raise SystemExit(f"CORE lists files that are not there: {', '.join(unknown)}.")
    lines = list(problems(reached(sys.argv[1] if len(sys.argv) > 1 else ".coverage")))
    print("\n".join(lines) or "All that has to be reached is reached.")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
