# SPDX-License-Identifier: Apache-2.0
"""The house itself: imports go one way, files and functions stay small.

Each test looks at every file and fails with the list of all that is wrong.
"""

import ast
import graphlib
import pathlib
import re

import pytest
from count_code import SOURCE, code_lines, function_lengths

FILES = sorted(SOURCE.rglob("*.py"))

# Folders from the ground up, and in each its files and folders from the ground up. What
# comes later may import what comes before. A public file stands with the folder whose
# neighbours import it; it is written with a slash.
ORDER = {
    "_core": """
        public_names bounded_cache scopes wording display earlier_names errors
        static_values paths settings trace_level variables trees
    """,
    "_core.variables": """
        change_marks metadata operators values placement variable kinds
        packed_values
    """,
    "_core.trees": """
        attributes filters layout graphdef pickled_functions pytree sharing state
        flatten build split traverse update
    """,
    "_capture": """
        listening sown_so_far marks edit_points name_stacks statistics walk module_paths
        callee calls selectors session listener emit
    """,
    "_capture.walk": """
        jax_compat jaxpr_cache spots plans steps custom_rules operations survey run
        witness hoisting batched_branches self_check
    """,
    "_capture.statistics": "arithmetic figures reducers reduced measures",
    "_modules": "methods module containers random_streams random_rules views",
    "_transforms": """
        lift build_model cond custom_vjp grad inspect jit jit_partial loops scan
        sharding vmap
    """,
    "_transforms.lift": """
        arguments prefixes results structure_updates structure_watch lift axis_names
        carry differentiation program kept_traces call_cache packed_calls compiled
    """,
    "_observe": """
        handlers closures kept_programs around_compiled capture loggers records verify
        /edits observe blame edit sweep patch scope_exits tap_scopes watch
    """,
    "_observe.blame": "search origins blame",
    "_observe.sweep": "points flat regions rows batches",
    "_nn": """
        /initializers dtypes parameters activations attention rotary decoding dropout
        embedding linear adapters cells convolution normalization
        multihead pooling recurrence reparametrization
    """,
    "_train": "/metrics comparable_functions matching ema optimizer",
    "_io": """
        files record_descriptions safetensors_file record_file store weight_rules
        targets checkpoints weights
    """,
    "_io.store": "axes journals contents arrays stores backlog writers",
    "_report": "table texts calls flops pictures rows page summary",
    "_compare": "sources tolerances unroll align comparison",
    "nnx": """
        annotations defaults compat contexts states deprecated deprecations ids objects
        proxy_caller reprlib tracers private_names traversals flax_parts linen_names
        train_state bridge extract filterlib graphlib graph helpers module pytreelib
        rnglib spmd statelib summary variablelib visualization nn training transforms
        as_flax
    """,
    "nnx.nn": """
        activations attention dtypes initializers linear lora normalization recurrent
        stochastic
    """,
    "nnx.training": "ema metrics optimizer",
    "nnx.transforms": "autodiff compilation general iteration transforms",
    "_cli": """
        console demo failures run_nnx targets inputs programs figures command main
    """,
}
FOLDERS = [name for name in ORDER if "." not in name]
PUBLIC_FILES = {
    unit[1:]: folder
    for folder, units in ORDER.items()
    for unit in units.split()
    if unit.startswith("/")
}
MAX_FILE = 400
MAX_FUNCTION = 50


def room_of(path: pathlib.Path) -> str:
    """A file by its place, as in `_core.trees.split`; a folder's own file by its."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {room_of(path): path for path in FILES}


def place_of(room: str) -> tuple[int, ...]:
    """Where a room stands in the order: of folders, then of what is in them."""
    parts = room.split(".")
    if room in PUBLIC_FILES:
        parts = [PUBLIC_FILES[room], f"/{room}"]
    if parts[0] not in FOLDERS:
        return (len(FOLDERS),)  # the root, and the program
    place = [FOLDERS.index(parts[0])]
    for depth in range(1, len(parts)):
        units = ORDER[".".join(parts[:depth])].split()
        assert parts[depth] in units, f"{room} has no place in the order"
        place.append(units.index(parts[depth]))
    return tuple(place)


def tree_of(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def rooms_imported(path: pathlib.Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names if "treetap" in each.name}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: a relative import"
            module = node.module or ""
            if module.split(".")[0] != "treetap":
                continue
            base = module.removeprefix("treetap").lstrip(".")
            for each in node.names:
                full = f"{base}.{each.name}".lstrip(".")
                found.add(full if full in MODULES else base)
    return found


def test_there_are_twelve_folders_and_the_public_files():
    names = {path.name for path in SOURCE.iterdir()} - {"__pycache__"}
    assert {name for name in names if (SOURCE / name).is_dir()} == {*FOLDERS}
    files = {name for name in names if not (SOURCE / name).is_dir()}
    of_package = {"__init__.py", "__init__.pyi", "__main__.py", "py.typed"}
    assert files == of_package | {f"{name}.py" for name in PUBLIC_FILES}
    assert len(FOLDERS) == 12


def test_the_order_lists_what_there_is():
    listed = {
        f"{folder}.{unit}".replace(f"{folder}./", "")
        for folder, units in ORDER.items()
        for unit in units.split()
    }
    assert {*MODULES} - {"", "__main__", *FOLDERS} == listed


def is_against_the_order(room: str, imported: str) -> bool:
    if imported not in MODULES:
        return True
    is_page = MODULES[room].name == "__init__.py" and room in ORDER
    if is_page and imported.startswith(f"{room}."):
        return False  # a folder's own file may name what is in it
    return place_of(imported) >= place_of(room)


def test_imports_go_one_way():
    problems = [
        f"{room} imports {imported}"
        for room, path in MODULES.items()
        for imported in sorted(rooms_imported(path))
        if is_against_the_order(room, imported)
    ]
    assert problems == []


def test_no_imports_go_in_a_circle():
    """Nor do those inside functions. A file also needs the page of its own folder."""
    needed = {room: rooms_imported(path) for room, path in MODULES.items()}
    for room, imported in needed.items():
        folder = room.rpartition(".")[0]
        if folder and not any(each.startswith(f"{folder}.") for each in needed[folder]):
            imported.add(folder)
    graphlib.TopologicalSorter(needed).prepare()  # raises a CycleError that names them


def test_sibling_transforms_do_not_import_each_other():
    siblings = {f"_transforms.{unit}" for unit in ORDER["_transforms"].split()}
    siblings.remove("_transforms.lift")
    edges = [
        (room, other)
        for room in sorted(siblings)
        for other in sorted(rooms_imported(MODULES[room]) & siblings)
    ]
    assert edges == []


def test_files_are_small():
    lines = {room: code_lines(path) for room, path in MODULES.items()}
    assert {room: count for room, count in lines.items() if count > MAX_FILE} == {}


def test_functions_fit_on_a_screen():
    too_long = {
        f"{room}: {name}": lines
        for room, path in MODULES.items()
        for name, lines in function_lengths(path)
        if lines > MAX_FUNCTION
    }
    assert too_long == {}


def test_only_public_jax_is_used():
    private = re.compile(r"jax\._src|jaxlib")
    assert [path for path in FILES if private.search(path.read_text())] == []


def test_files_open_with_licence_and_purpose():
    licence = "# SPDX-License-Identifier: Apache-2.0\n"
    problems = []
    for room, path in MODULES.items():
        if not path.read_text().startswith(licence):
            problems.append(f"{room}: no licence in the first line")
        if len((ast.get_docstring(tree_of(path)) or "").split()) < 8:
            problems.append(f"{room}: does not say what it is for")
    assert problems == []


def test_a_folders_page_names_every_file_of_it():
    problems = []
    for folder, units in ORDER.items():
        page = ast.get_docstring(tree_of(MODULES[folder])) or ""
        problems += [
            f"{folder}: says nothing of {unit}"
            for unit in units.split()
            if not re.search(rf"\b{unit.strip('/')}\b", page)
        ]
    assert problems == []


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


# Lines of code at most: of Variables, Modules and transforms; of capture; of all.
BUDGETS = {
    ("_core", "_modules", "_transforms", "nnx"): 8_660,
    ("_capture", "_observe", "edits"): 6_470,
    ("",): 23_327,
}


@pytest.mark.parametrize("places", BUDGETS, ids=str)
def test_the_house_stays_small(places):
    count = sum(
        code_lines(path)
        for room, path in MODULES.items()
        if any(room.startswith(place) for place in places)
    )
    assert count <= BUDGETS[places]


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
    assert users == {"_transforms.lift.call_cache", "_core.variables.packed_values"}
