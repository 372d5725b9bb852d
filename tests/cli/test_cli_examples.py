# SPDX-License-Identifier: Apache-2.0
"""inspect on the example models of this repository, made small."""

import pytest
from command_line import loaded, named

EXAMPLES = ("chars", "gpt2", "llama", "spirals", "vit")


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples(name):
    grads = ["--grads"] if name in ("chars", "spirals") else []
    found = loaded("inspect", named(name), *grads)
    assert found["finite"]
    rows = {row["site"]: row for row in found["sites"]}
    assert len(rows) >= 4
    assert all(row["value"]["std"] is not None for row in rows.values())
    norms = [row["gradient"]["norm"] for row in rows.values() if row["gradient"]]
    assert len(norms) == (len(rows) if grads else 0)
    if name == "llama":
        assert len(rows["layers/attn:__call__"]["value"]["parts"]) == 3
