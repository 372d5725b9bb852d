# SPDX-License-Identifier: Apache-2.0
"""Targets: a model that is named at the command line, imported and made.

What a TARGET is says `case_of`, in the words that `--help` shows. It is the only code
that a command runs, and it is run as Python would.
"""

import difflib
import importlib
import importlib.util
import inspect
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from treetap._cli.failures import Failure
from treetap._core.trees.attributes import Node
from treetap._core.wording import quoted, shown
from treetap._observe.handlers import owner_of

DEEPEST = 50  # packages inside one another; Python looks for each in the one before
RETURNS = "A factory returns a model, (model, inputs) or (model, inputs, loss)."
FORM = (
    "A TARGET is `package.module:factory` or `path/to/file.py:factory`, such as "
    "`models.py:small`."
)


class Inputs(NamedTuple):
    """The arguments of a call."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}


NONE = Inputs()


class Case(NamedTuple):
    """What a TARGET stands for.

    Attributes:
        name: The TARGET, as it was written.
        call: What is called: a Module, or a function.
        inputs: What it is called with.
        loss: `loss(call, *inputs)`, a single number; None if there is none.
    """

    name: str
    call: Callable[..., Any]
    inputs: Inputs = NONE
    loss: Callable[..., Any] | None = None

    @property
    def owner(self) -> Node | None:
        """The Module that is called, or a method of; None for other functions."""
        return owner_of(self.call)


def case_of(target: str) -> Case:
    """Imports a TARGET and makes what it stands for.

    A TARGET is `package.module:factory` or `path/to/file.py:factory`. The current
    folder is importable; so is the folder of a file, as with `python file.py`.

    The factory is called without arguments, and returns

    \b
      model                    a Module, a method of one, or any function
      (model, inputs)          inputs: an array, a tuple or list of arguments,
                               or a dict of arguments by name
      (model, inputs, loss)    loss(model, *inputs) gives a single number

    A Module may stand in place of the factory. A function that needs arguments is
    itself what is called, with the inputs of --inputs or --shape. These take the place
    of those that a factory returns.
    """
    place, colon, name = target.rpartition(":")
    if not (colon and place and name):
        raise Failure(f"{target!r} names no factory. {FORM}")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    is_file = place.endswith(".py") or os.sep in place
    module = _from_file(place) if is_file else _from_package(place)
    found = _attribute(module, place, name)
    call = _callable(found, target, "is")
    if isinstance(found, type) and _needs_arguments(found):
        raise Failure(
            f"{target} is a class that takes {inspect.signature(found)}. Name a "
            "function without arguments that makes one."
        )
    if isinstance(found, Node) or _needs_arguments(found):
        return Case(target, call)  # it is what is looked at, and no factory
    return _case_from(found(), target)


def _from_file(place: str) -> ModuleType:
    path = pathlib.Path(place.partition("\0")[0]).resolve()
    if "\0" in place or not path.is_file():
        raise Failure(f"There is no file {shown(place)}.")
    if path.suffix != ".py":
        raise Failure(f"{place} is not a Python file. {FORM}")
    name = f"_treetap_target_{abs(hash(path)):x}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_package(place: str) -> ModuleType:
    if place.count(".") > DEEPEST:
        raise Failure(f"{quoted(place)} is no name of a module. {FORM}")
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # something that the module itself wants
        raise Failure(
            f"There is no module {error.name!r}, neither in {os.getcwd()} nor among "
            f"the installed packages. {FORM}"
        ) from error
    except (TypeError, ValueError) as error:
        if place.startswith(".") or not place.strip():
            raise Failure(f"{place!r} is no name of a module. {FORM}") from error
        raise


def _attribute(module: ModuleType, place: str, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise Failure(f"{place} has no {name!r}.{_near(module, name)}")
        found = getattr(found, part)
    return found


def _near(module: ModuleType, name: str) -> str:
    """What may have been meant: what is alike, or what the module itself defines."""
    fns = {key: value for key, value in vars(module).items() if callable(value)}
    own = {k for k, x in fns.items() if getattr(x, "__module__", "") == module.__name__}
    near = difflib.get_close_matches(name, sorted(own), n=4) or sorted(own)[:8]
    return f" It has {', '.join(near)}." if near else " It defines no function."


def _needs_arguments(fn: Any) -> bool:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # of some written in C
        return False
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(p.default is p.empty and p.kind not in free for p in parameters)


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


def _callable(value: Any, target: str, how: str) -> Any:
    if callable(value):
        return value
    if isinstance(value, Node):
        raise Failure(
            f"{target} {how} {_kind(value)}, whose class has no `__call__`. Return the "
            "method that is meant, such as `model.encode`."
        )
    raise Failure(f"{target} {how} {_kind(value)}, which cannot be called. {RETURNS}")


def _case_from(returned: Any, target: str) -> Case:
    parts = returned if isinstance(returned, tuple) else (returned,)
    if not 1 <= len(parts) <= 3:
        raise Failure(f"{target} returned a tuple of {len(parts)}. {RETURNS}")
    call, inputs, loss = (*parts, None, None)[:3]
    call = _callable(call, target, "returned")
    if loss is not None and not callable(loss):
        raise Failure(
            f"{target} returned {_kind(loss)} as the loss, which is a function "
            "`loss(model, *inputs)`."
        )
    return Case(target, call, _inputs_from(inputs, target), loss)


def _inputs_from(inputs: Any, target: str) -> Inputs:
    if inputs is None:
        return NONE
    if isinstance(inputs, tuple | list):
        return Inputs(tuple(inputs))
    if isinstance(inputs, Mapping):
        if not all(isinstance(key, str) for key in inputs):
            raise Failure(
                f"{target} returned inputs with the keys {list(inputs)}, which are "
                "names of arguments. For a dict as the argument, return `(batch,)`."
            )
        return Inputs((), dict(inputs))
    if isinstance(inputs, int | float | complex) or hasattr(inputs, "shape"):
        return Inputs((inputs,))
    raise Failure(
        f"{target} returned {_kind(inputs)} as inputs, which are an array, a tuple of "
        "arguments, or a dict of them by name."
    )


def refuse_misfit(case: Case) -> None:
    """Refuses inputs that a call does not take, before it is called."""
    args, kwargs = case.inputs
    try:
        signature = inspect.signature(case.call)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = [f"{len(args)} by position"] if args else []
        given += [f"{key!r}" for key in kwargs]
        names = ", ".join(given) or "none"
        raise Failure(
            f"{case.name}: the call takes {signature}, and the inputs do not fit "
            f"({error}; given: {names}). Return `(model, inputs)` from the factory, or "
            "give them with --shape 'float32[8,128]' or --inputs FILE."
        ) from error
