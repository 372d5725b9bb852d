# SPDX-License-Identifier: Apache-2.0
"""Leaks that JAX's check reports of JAX itself; `test_leaks` has them without treetap.

With `JAX_CHECK_TRACER_LEAKS=1` a test that meets one of these, and nothing else, is
left out: `make test-leaks` counts it among the skipped ones.
"""

import re

import pytest

OF_JAX = {
    ".effect_handles": "effects in a loop that is differentiated",
    "weakref.finalize": "constants of a shard_map that is differentiated in a trace",
}


def of_jax(text: str) -> str | None:
    """What JAX keeps itself, if that is all that a message is about."""
    if "Leaked trace" not in text:
        return None
    chains = [
        part for part in re.split(r"\n\s*\n", text) if "is referred to by" in part
    ]
    found = {next((x for x in OF_JAX if x in chain), None) for chain in chains}
    return None if None in found or not found else OF_JAX[sorted(found)[0]]


def first_leak(error: BaseException) -> str:
    """The text of the leak that was found first; an error keeps tracers, too."""
    text, seen = str(error), set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        text = str(error) if "Leaked trace" in str(error) else text
        error = error.__cause__ or error.__context__
    return text


@pytest.hookimpl(wrapper=True)
def leave_out_those_of_jax():
    """Skips a test in which JAX keeps something, and we do not."""
    try:
        return (yield)
    except Exception as error:
        if (what := of_jax(first_leak(error))) is None:
            raise
        pytest.skip(f"JAX keeps {what}")
