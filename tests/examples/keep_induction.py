# SPDX-License-Identifier: Apache-2.0
"""The trained model of `examples/induction.py`, kept in a file for the tests.

Training takes most of the time of these tests, so they begin with its result. To make
the file anew, after a change of the example:

    python tests/examples/keep_induction.py
"""

import pathlib
import sys

import treetap as tt

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))
import induction

DATA = pathlib.Path(__file__).parents[1] / "data"
FILE = DATA / "induction.safetensors"


def kept() -> induction.Model:
    """The model of the file."""
    model = induction.Model(rngs=tt.Rngs(0))
    tt.load_weights(FILE, model)
    return model


if __name__ == "__main__":
    tt.save_weights(FILE, induction.trained())
