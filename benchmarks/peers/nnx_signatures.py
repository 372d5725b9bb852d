# SPDX-License-Identifier: Apache-2.0
"""How the public callables of flax.nnx are called, and where treetap's differ.

    python nnx_signatures.py record FILE     # where flax is
    python nnx_signatures.py compare FILE    # where treetap is

What is recorded is what `inspect.signature` says of each public function, class and
method, in every module that `tests/data/nnx_names.json` lists: the names of the
arguments, in order, how they can be given, and their defaults. A difference is what
makes a call that flax takes mean something else, or be refused, in treetap; more
arguments are none. `tests/data/nnx_signatures.json` was recorded so from flax 0.12.12
(Python 3.12, JAX 0.12), and `tests/nnx/test_signatures.py` compares on every run.
"""

import json
import pathlib
import sys

TESTS = pathlib.Path(__file__).parents[2] / "tests" / "nnx"


def main(action, path):
    """Records the signatures of flax in a file, or compares treetap's with it."""
    sys.path.insert(0, str(TESTS))
    import signatures

    file = pathlib.Path(path)
    if action == "record":
        file.write_text(json.dumps(signatures.record("flax.nnx"), indent=0) + "\n")
        return
    here, recorded = signatures.callables("treetap.nnx"), json.loads(file.read_text())
    for name, text in recorded.items():
        if name in here:
            for found in signatures.differences(text, here[name]):
                print(f"{name}: {found}")
    missing = [name for name in recorded if name not in here]
    print(f"{len(recorded)} callables; not here: {' '.join(missing)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
