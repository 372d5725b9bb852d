# SPDX-License-Identifier: Apache-2.0
"""The program `treetap`, which is also run by `python -m treetap`."""

import io
import sys

from treetap._cli.main import cli


def main() -> None:
    """Runs the command line; the exit code is that of the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # it may not know every letter
            stream.reconfigure(errors="replace")
    cli(prog_name="treetap")


if __name__ == "__main__":
    main()
