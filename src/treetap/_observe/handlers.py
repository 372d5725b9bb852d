# SPDX-License-Identifier: Apache-2.0
"""Handlers: what is done around a call of a function that somebody wrapped.

`capture`, `observe`, `edit` and `blame` each have a `Handler`: it says what is to be
emitted, which values are wanted and what is fed into them. Its `around` is the one way
to run a function with ears open: a session is opened for the Modules of the call and
closed at the end, and what failed leaves Variables as they were.

`PureCall` is for those who trace a call instead of running it (`sites`, `blame`): it
makes the call a function of plain values, so that nothing of the caller's is changed.
"""

import contextlib
import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from treetap._capture.callee import callee_of, restored, roots_of
from treetap._capture.emit import LEAF
from treetap._capture.listener import listen
from treetap._capture.listening import Listening
from treetap._capture.selectors import site_text
from treetap._capture.session import Call, Session
from treetap._capture.walk.plans import Fed
from treetap._core.errors import CaptureError
from treetap._core.settings import Mode
from treetap._core.trees.attributes import Node
from treetap._transforms.lift.lift import Inside, Lift

Test = Callable[[Any], bool]

# Emits nothing: Modules open their scopes, and `sow` and `perturb` store nothing.
QUIET = Listening(frozenset(), None, False)


class Handler:
    """What one call asks for, and what becomes of what is heard; made for each call.

    Attributes:
        asked: Which taps are emitted.
        session: What was heard, while the block of `around` is open.
    """

    session: Session

    def __init__(self, asked: Listening):
        self.asked = asked

    def wants(self, call: Call) -> bool:
        """Whether the value of a call is recorded; by default, all are."""
        return True

    def feeds(self, call: Call) -> Fed | None:
        """What is fed into the value of a call; by default, nothing."""
        return None

    def heard(self, call: Call) -> None:
        """Called for each call that was recorded, once its value is there."""

    def hidden(self, call: Call) -> None:
        """Called for each call where the walk cannot go; by default, refuses it."""
        text = site_text(call.where.path, call.label.name, call.index)
        raise CaptureError(
            f"The tap {text} is inside {call.spot.hidden_in}, which a capture cannot "
            "enter. Move the tap outside it, or return the value and tap it there."
        )

    @contextlib.contextmanager
    def around(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        run: Callable[..., Any] = listen,
        **options: Any,
    ) -> Iterator[Any]:
        """Runs a function; a block with its result, in which the `Session` is open.

        If anything of it fails, the block included, in a way that `restored` knows,
        the Variables of the call are as they were before.

        Args:
            fn: The function.
            args: Its arguments.
            kwargs: Its keyword arguments.
            run: How: `listen`, or `leave_marked`.
            **options: Those of `Session`: gradients, values, a reduction, and so on.
        """
        self.session = Session(
            self.asked,
            roots_of(fn, args, kwargs),
            wants=self.wants,
            feeds=self.feeds,
            on_call=self.heard,
            on_hidden=self.hidden,
            **options,
        )
        with restored(fn, args, kwargs), contextlib.closing(self.session):
            yield run(self.session, fn, *args, **kwargs)


def owner_of(fn: Any) -> Node | None:
    """The Module that a function is, or is a method of; None for other functions."""
    owner, _ = callee_of(fn)
    return owner if owner is fn or inspect.ismethod(fn) else None


def with_owner(fn: Any, owner: Node) -> Callable[..., Any]:
    """A Module, or a method of one, with another object in the Module's place."""
    return types.MethodType(fn.__func__, owner) if inspect.ismethod(fn) else owner  # pyright: ignore[reportReturnType] - a Module that was called


def value_of(call: Call, leaves: Sequence[Any]) -> Any:
    """The value of a call from its leaves; most are one array, which needs no tree."""
    tree = call.label.tree
    return leaves[0] if tree is LEAF else jax.tree.unflatten(tree, leaves)


def without_partials(
    fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A function itself, and all its arguments, those of partials around it first."""
    while isinstance(fn, functools.partial):
        args, kwargs = (*fn.args, *args), {**fn.keywords, **kwargs}
        fn = fn.func
    return fn, args, {**kwargs}


class PureCall:
    """A call of a function of Modules, as one of the arrays that are in them.

    What partials bring along counts as arguments. Values that are not inputs are parts
    of the call, as flags are.

    Args:
        fn: The function: a Module, a method of one, or any other.
        args: Its arguments.
        kwargs: Its keyword arguments.
        name: The public function at work, for messages.
        is_input: Whether a value, of a Variable or by itself, is an input.

    Attributes:
        places: Which of all values are inputs.
        inputs: These values.
    """

    def __init__(self, fn: Any, args: Any, kwargs: Any, name: str, is_input: Test):
        self.fn, self.args, self.kwargs = without_partials(fn, args, kwargs)
        self.owner = owner_of(self.fn)
        self.lift = Lift(name, Mode.GRAPH)
        inputs = self.lift.inputs((self.owner, self.args), self.kwargs)
        self.definition = inputs.definition
        self.values, self.tree = jax.tree.flatten(inputs.values())
        self.places = [n for n, value in enumerate(self.values) if is_input(value)]
        self.inputs = [self.values[n] for n in self.places]

    def without_inputs(self) -> "PureCall":
        """The same call without the values of its inputs, to be kept."""
        bare, inputs = copy.copy(self), {*self.places}
        bare.args, bare.kwargs, bare.inputs = (), {}, []
        bare.values = [None if n in inputs else x for n, x in enumerate(self.values)]
        return bare

    def with_inputs(
        self, inputs: Sequence[Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[Any]]:
        """The same call of other objects, which have other inputs.

        Returns:
            The function, its arguments, its keyword arguments, and the Variables and
            other leaves in them.
        """
        held = dict(zip(self.places, inputs))
        values = [held.get(n, value) for n, value in enumerate(self.values)]
        inside = Inside(self.definition, self.tree.unflatten(values), self.lift)
        (owner, args), kwargs = inside.tree["args"], inside.tree["kwargs"]
        fn = self.fn if self.owner is None else with_owner(self.fn, owner)
        return fn, args, kwargs, inside.leaves
