# SPDX-License-Identifier: Apache-2.0
"""The house itself: imports go one way, files and functions stay small."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SOURCE = ROOT / "src" / "treetap"
FILES = sorted(SOURCE.rglob("*.py"))
ROOMS = {".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in FILES}
MODULES = {
    room: SOURCE.joinpath(*room.split(".")).with_suffix(".py")
    for room in ROOMS
    if not room.endswith(".__init__")  # a folder's own file says what is in it
}

# Rooms from the ground up: each may import only from rooms before it. The namespaces at
# the end are for users; nothing inside imports them.
ORDER = [
    "_errors",
    "_names",
    "_settings",
    "_traces",
    "_trees",
    "_marks",
    "_metadata",
    "_values",
    "_placement",
    "_operators",
    "_display",
    "_variables",
    "_packs",
    "_kinds",
    "_filters",
    "_attributes",
    "_layouts",
    "_functions",
    "_pytrees",
    "_states",
    "_sharing",
    "_specs",
    "_graphs",
    "_copies",
    "_splitting",
    "_applying",
    "_updates",
    "_traversals",
    "_walks",
    "_listening",
    "_taps",
    "_jaxprs",
    "_retaps",
    "_editable",
    "_feeding",
    "_counts",
    "_reducers",
    "_reductions",
    "_figures",
    "_summing",
    "_measuring",
    "_events",
    "_walk",
    "_walk_rules",
    "_scopes",
    "_calls",
    "_sessions",
    "_emitting",
    "_methods",
    "_modules",
    "_containers",
    "_views",
    "_randomness",
    "_reseeding",
    "_regrowing",
    "_prefixes",
    "_changes",
    "_grafts",
    "_results",
    "_lift",
    "_arguments",
    "_calling",
    "_programs",
    "_packing",
    "_compiling",
    "_inspecting",
    "_fixing",
    "_differentiating",
    "_custom_rules",
    "_axis_names",
    "_batching",
    "_looping",
    "_scanning",
    "_branching",
    "_contexts",
    "_selectors",
    "_capturing",
    "_records",
    "_observing",
    "_watching",
    "_leaving",
    "_foreign",
    "edits",
    "_editing",
    "_patching",
    "_faults",
    "_blaming",
    "_deprecated",
    "initializers",
    "_layers.parameters",
    "_layers.dtypes",
    "_layers.linear",
    "_layers.convolution",
    "_layers.embedding",
    "_layers.adapters",
    "_layers.activations",
    "_layers.pooling",
    "_layers.dropout",
    "_layers.moments",
    "_layers.normalization",
    "_layers.grouping",
    "_layers.reparametrization",
    "_layers.attention",
    "_layers.decoding",
    "_layers.multihead",
    "_layers.carries",
    "_layers.cells",
    "_layers.recurrence",
    "_sharding",
    "_building",
    "metrics",
    "_training.equal_functions",
    "_training.optimizer",
    "_training.model_and_optimizer",
    "_training.averaging",
    "_files.paths",
    "_files.tensors",
    "_files.layouts",
    "_files.rules",
    "_files.targets",
    "_files.incoming",
    "_files.outgoing",
    "_files.weights",
    "_files.checkpoints",
    "_report.texts",
    "_report.calls",
    "_report.flops",
    "_report.rows",
    "_report.tables",
    "_report.summary",
    "_report.payload",
    "_report.pictures",
    "_report.html",
    "_storing.descriptions",
    "_storing.records",
    "_storing.journals",
    "_storing.arrays",
    "_storing.axes",
    "_storing.contents",
    "_storing.writers",
    "_storing.stores",
    "_comparing.measures",
    "_comparing.sides",
    "_comparing.loops",
    "_comparing.alignment",
    "_comparing.limits",
    "_comparing.tables",
    "_comparing.comparison",
    "compat",
    "nnx",
    "_flax_parts",
    "_standing_in",
    "_cli.failures",
    "_cli.targets",
    "_cli.inputs",
    "_cli.programs",
    "_cli.showing",
    "_cli.options",
    "_cli.looking",
    "_cli.demo_model",
    "_cli.inspecting",
    "_cli.comparing",
    "_cli.running",
    "_cli.commands",
    "__init__",
    "__main__",
]

MAX_FILE = 500
MAX_FUNCTION = 50


NAMESPACES = ("__init__", "nnx")  # imports and names, which are lists and not code


def lists_names(node: ast.stmt) -> bool:
    is_all = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    return is_all or isinstance(node, ast.Import | ast.ImportFrom | ast.If)


def lines_in(node: ast.stmt) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def room_of(path: pathlib.Path) -> str:
    return str(path.relative_to(SOURCE).with_suffix(""))


def tree_of(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


def rooms_imported(path: pathlib.Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names if "treetap" in name.name}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "treetap"
        ):
            assert node.level == 0, f"{path.name}: a relative import"
            if node.module == "treetap":
                found |= {f"treetap.{name.name}" for name in node.names}
            else:
                found.add(str(node.module))
    return found


def test_every_room_has_a_place_in_the_order():
    assert sorted(ORDER) == sorted(MODULES)


@pytest.mark.parametrize("room", ORDER)
def test_imports_go_one_way(room):
    for imported in rooms_imported(MODULES[room]):
        assert imported != "treetap", f"{room} imports the root"
        name = imported.removeprefix("treetap.")
        assert name in ORDER, f"{room} imports {imported}, which is no room"
        assert ORDER.index(name) < ORDER.index(room), f"{room} imports {name} above it"


@pytest.mark.parametrize("path", FILES, ids=room_of)
def test_files_are_small(path):
    lines = len(path.read_text().splitlines())
    if room_of(path) in NAMESPACES:
        lines -= sum(map(lines_in, filter(lists_names, tree_of(path).body)))
    assert lines <= MAX_FILE, f"{path.name} has {lines} lines"


def code_lines(function: ast.AST, source: list[str]) -> int:
    """Lines of a function without its docstring, comments and blanks."""
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    first = function.body[0]
    start, end = first.lineno, function.end_lineno or 0  # the signature is not work
    skipped: set[int] = set()
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        skipped |= set(range(first.lineno, (first.end_lineno or 0) + 1))
    for number in range(start, end + 1):
        text = source[number - 1].strip()
        if not text or text.startswith("#"):
            skipped.add(number)
    return end - start + 1 - len(skipped)


@pytest.mark.parametrize("path", FILES, ids=room_of)
def test_functions_fit_on_a_screen(path):
    source = path.read_text().splitlines()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = code_lines(node, source)
            assert lines <= MAX_FUNCTION, f"{path.name}: {node.name} has {lines} lines"


@pytest.mark.parametrize("path", FILES, ids=room_of)
def test_only_public_jax_is_used(path):
    text = path.read_text()
    assert "jax._src" not in text
    assert "jaxlib" not in text


@pytest.mark.parametrize("path", FILES, ids=room_of)
def test_files_open_with_licence_and_purpose(path):
    text = path.read_text()
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
    docstring = ast.get_docstring(tree_of(path))
    assert docstring
    assert len(docstring.split()) >= 8


def test_suppressions_name_their_rule_and_reason():
    for path in FILES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for mark in ("# noqa", "# pyright: ignore"):
                if mark in line:
                    told = line.split(mark, 1)[1]
                    place = f"{path.name}:{number}"
                    assert told.startswith((":", "[")), f"{place} names no rule"
                    assert " - " in told, f"{place} gives no reason"
            assert "# type: ignore" not in line, f"{path.name}:{number}"


LIFT_AND_TRANSFORMS = [
    *("_changes", "_grafts", "_results", "_lift", "_arguments", "_programs"),
    *("_compiling", "_inspecting", "_fixing"),
    *("_differentiating", "_custom_rules", "_axis_names", "_batching"),
    *("_looping", "_scanning", "_branching"),
]


def lines_of_code(path: pathlib.Path) -> int:
    """Lines that are neither blank, nor a comment, nor part of a docstring."""
    texts: set[int] = set()
    for node in ast.walk(tree_of(path)):
        body = getattr(node, "body", None)
        if not isinstance(body, list) or not body or not isinstance(body[0], ast.Expr):
            continue
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            texts |= set(range(body[0].lineno, (body[0].end_lineno or 0) + 1))
    lines = enumerate(path.read_text().splitlines(), 1)
    kept = (line.strip() for n, line in lines if n not in texts)
    return sum(1 for line in kept if line and not line.startswith("#"))


def test_the_lift_and_the_transforms_stay_small():
    assert sum(lines_of_code(MODULES[name]) for name in LIFT_AND_TRANSFORMS) < 2_500


def test_who_writes_into_variables_says_so():
    """`set_box` is for new Variables: a write to one that is there must be noticed."""
    users = {
        room
        for room, path in MODULES.items()
        if any(
            isinstance(node, ast.ImportFrom)
            and any(alias.name == "set_box" for alias in node.names)
            for node in ast.walk(tree_of(path))
        )
    }
    assert users == {"_calling", "_packs"}
