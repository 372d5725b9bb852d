# SPDX-License-Identifier: Apache-2.0
"""How the public callables of a package of NNX's shape are called.

Needs nothing but Python, since it also looks at packages that are not here: see
`benchmarks/peers/nnx_signatures.py`.
"""

import importlib
import inspect
import json
import pathlib
import re

NAMES = pathlib.Path(__file__).parents[1] / "data" / "nnx_names.json"
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
SPECIAL = ("__call__", "__getitem__", "__setitem__")
OF_PYTHON = (int, float, str, bytes, tuple, dict, list, BaseException)
EMPTY = inspect.Parameter.empty
IN_PLACE = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def default_text(value):
    """A default as text: the same for equal functions, classes and arrays."""
    if isinstance(value, str):
        return value
    if isinstance(value, type):
        return "nothing given" if value.__name__ == "Missing" else value.__name__
    if isinstance(value, tuple):
        return f"({', '.join(map(default_text, value))})"
    if callable(value):
        return "a function"
    text = ADDRESS.sub("", repr(value)).replace("mappingproxy", "FrozenDict")
    return "nothing given" if "missing" in text.lower() else text


def signature_of(fn):
    """The arguments of a callable, without `self` and annotations, as Python text."""
    if isinstance(fn, type) and fn.__init__ is not object.__init__:
        fn = fn.__init__  # a metaclass may hide it behind `*args, **kwargs`
    try:
        arguments = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return None
    kept = [
        one.replace(
            annotation=EMPTY,
            default=EMPTY if one.default is EMPTY else default_text(one.default),
        )
        for one in arguments
        if one.name not in ("self", "cls")
    ]
    return str(inspect.Signature(kept))[1:-1]


def parts(name, value):
    """A callable and, if it is a class, its public methods, each with a name."""
    found = {name: value}
    if isinstance(value, type) and not issubclass(value, OF_PYTHON):
        for owner in value.__mro__:
            if owner.__module__.split(".")[0] in ("flax", "treetap"):
                names = (n for n in vars(owner) if n[0] != "_" or n in SPECIAL)
                of = {f"{name}.{n}": getattr(value, n, None) for n in sorted(names)}
                found = {
                    n: method
                    for n, method in of.items()
                    if callable(method) and not isinstance(method, type)
                } | found
    return found


def callables(root):
    """What can be called under a package, by module and name."""
    found = {}
    for module, names in json.loads(NAMES.read_text()).items():
        try:
            namespace = importlib.import_module(f"{root}.{module}".strip("."))
        except ImportError:
            continue
        for name in sorted(names.split()):
            value = getattr(namespace, name, None)
            if callable(value) and getattr(value, "__module__", "") != "typing":
                found |= parts(f"{module}.{name}".strip("."), value)
    return found


def record(root):
    """The signatures of what can be called, each once, under the first of its names."""
    found, seen = {}, []
    for name, value in callables(root).items():
        mark = (name.rpartition(".")[2], id(value))
        text = signature_of(value)
        if mark not in seen and text is not None:
            found[name] = text
            seen.append(mark)
    return found


def differences(theirs, fn):
    """Where a call by a recorded signature means something else to a function."""
    ours = signature_of(fn)
    if ours is None:
        return []
    ours, theirs = (
        inspect.signature(eval(f"lambda {text}: 0")).parameters
        for text in (ours, theirs)
    )
    kinds = {one.kind for one in ours.values()}
    places = [name for name, one in ours.items() if one.kind in IN_PLACE]
    found = []
    for place, (name, one) in enumerate(theirs.items()):
        here = ours.get(name)
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            found += [] if one.kind in kinds else [f"no {one}"]
        elif one.kind == one.POSITIONAL_ONLY:
            is_there = place < len(places) or one.VAR_POSITIONAL in kinds
            found += [] if is_there else [f"no argument at place {place}"]
        elif here is None:
            is_taken = one.kind == one.KEYWORD_ONLY and one.VAR_KEYWORD in kinds
            found += [] if is_taken or name[0] == "_" else [f"no {name}"]
        else:
            if here.kind == here.POSITIONAL_ONLY:
                found.append(f"{name} by place only")
            if one.kind in IN_PLACE and places[place : place + 1] != [name]:
                found.append(f"{name} not at place {place}")
            if one.default not in (EMPTY, here.default):
                found.append(f"{one}, here {here}")
    needed = (
        name
        for name, one in ours.items()
        if one.default is EMPTY and one.kind == one.KEYWORD_ONLY
    )
    return found + [f"needs {name}" for name in needed if name not in theirs]
