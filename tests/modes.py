# SPDX-License-Identifier: Apache-2.0
"""The three modes of a transform, as options and as parameters of tests."""

import pytest

TREE = {"graph": False}
GRAPH = {"graph": True, "graph_updates": False}
UPDATES = {"graph": True, "graph_updates": True}

NAMED = {"tree": TREE, "graph": GRAPH, "updates": UPDATES}


def modes(*names):
    """Parametrises a test by some of the modes."""
    chosen = [NAMED[name] for name in names]
    return pytest.mark.parametrize("mode", chosen, ids=names)


ALL_MODES = modes(*NAMED)
SIMPLE_MODES = modes("tree", "graph")
GRAPH_MODES = modes("graph", "updates")
