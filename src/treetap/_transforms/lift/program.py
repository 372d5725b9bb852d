# SPDX-License-Identifier: Apache-2.0
"""Programs: a `jax.jit` for each structure of the arguments of a function.

**The idea.** `jax.jit` looks at the structure of what it is given in each call. A model
of a thousand objects would be walked each time; two flat lists of arrays are not. So
the structure is a `Key`, which is looked up once, and a `Program` takes and returns
lists.

**The invariant.** A key is everything that tracing a function depends on beside the
types of the values: the description of the arguments, static arguments, what is
donated, and prefixes. Equal keys give the same program. A static value that changes in
place does not change a key, which has it as it was described: see `static_values`. The
arguments are described anew when it has changed, and that makes another key.

**Donation.** What is donated stands in the first list, Variables first in both. A
donated Variable that the function does not write would only have to come out again; so
the function is traced once to see which ones those are (`find_idle`), and they are not
donated.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import Any

import jax

from treetap._capture.listening import listening
from treetap._core.errors import StructureError
from treetap._core.paths import show_path
from treetap._core.settings import Mode
from treetap._core.trees.graphdef import (
    GraphDef,
    can_change,
    leaf_paths,
)
from treetap._core.variables.values import is_buffer
from treetap._transforms.lift.arguments import StaticArguments
from treetap._transforms.lift.lift import Updates, Written
from treetap._transforms.lift.prefixes import PrefixGroups

MAX_PROGRAMS = 256  # kept for a function, one for each structure of its arguments


@dataclass(frozen=True)
class Key:
    """What a compiled program depends on beside the values' types; hashable.

    Attributes:
        definition: The description of the arguments.
        statics: The static arguments.
        donated: For each leaf, whether it is donated.
        groups: The leaves by prefix; None if they have none.
    """

    definition: GraphDef
    statics: StaticArguments
    donated: tuple[bool, ...]
    groups: PrefixGroups | None = field(hash=False)

    @property
    def lasts(self) -> bool:
        """Whether it stands for all equal arguments: no static value can change.

        While somebody listens, where the arguments are matters, too.
        """
        return listening.value is None and not can_change(self.definition.spec)

    def kept(self) -> Collection[int]:
        """Leaves that come out unchanged, too: donated, or placed (NNX's way)."""
        groups = self.groups
        found = {number for number, flag in enumerate(self.donated) if flag}
        if groups is not None and self.definition.graph is Mode.UPDATES:
            found |= {n for n, x in enumerate(groups.by_leaf()) if x is not None}
        return found


@dataclass(eq=False)
class Program:
    """A `jax.jit` for arguments of one structure.

    It takes two flat lists, of what is donated and of the rest, with the values of
    Variables first in each. It returns changed values, the result, and a note: the
    number of an entry of `written`, which says whose values have changed.

    Attributes:
        key: What it depends on.
        own: Which leaves, by number, are Variables, in the order of their values.
        others: Which are not.
        traced: A function of the key and all values, in the order of the numbers. Its
            name is that of the program, in profiles and logs.
        options: Of `jax.jit`, for the two lists; with `in_shardings` by leaf.
    """

    key: Key
    own: list[int]
    others: list[int]
    traced: Any
    options: dict[str, Any]

    def __post_init__(self) -> None:
        key, own, others, traced = self.key, self.own, self.others, self.traced
        options, flags = dict(self.options), key.donated
        self.written: list[Written] = []
        self._idle: list[int] = []
        self._donates = any(flags)
        self._donated = [flags[n] for n in own + others]
        self._kept = [not flag for flag in self._donated]
        donated, kept = self._apart(own, others)
        self._numbers = donated + kept

        def run(donated: list[Any], kept: list[Any]) -> Any:
            values = dict(zip(self._numbers, [*donated, *kept]))
            out, updates = traced(key, [values[number] for number in sorted(values)])
            if self._donates:
                pairs = zip(updates.written.groups, updates.values)
                news = chain.from_iterable(zip(*pair) for pair in pairs)
                changed = {n for (n, _), new in news if new is not values.get(n)}
                self._idle = [n for n in own if flags[n] and n not in changed]
            # Which ones were written is static. The number of a note of it stands for
            # it, as so many empty tuples: JAX makes those without a call into Python.
            # Variables come first, as they do among what is donated: JAX lets outputs
            # take over buffers in order, so each stays where it is.
            return updates.values, out, ((),) * self.note(updates.written)

        run.__name__ = run.__qualname__ = traced.__name__
        if "in_shardings" in options:
            given = options["in_shardings"]
            pair = [given[n] for n in donated], [given[n] for n in kept]
            options["in_shardings"] = pair
        self.run = jax.jit(run, donate_argnums=0, **options)

    def note(self, written: Written) -> int:
        """The number of a note of what was written; the same for equal ones."""
        if written not in self.written:
            self.written.append(written)
        return self.written.index(written)

    def updates(self, values: Any, note: tuple[Any, ...]) -> Updates:
        """What the program returned beside the result."""
        return Updates(values, self.written[len(note)])

    def parted(self, values: list[Any], plain: list[Any]) -> tuple[Any, Any]:
        """The two lists, of the values of Variables and of other leaves."""
        if not self._donates:
            return [], values + plain
        donated, kept = self._apart(values, plain)
        self._refuse_donated_twice(donated, kept)
        return donated, kept

    def _apart(self, values: list[Any], plain: list[Any]) -> tuple[Any, Any]:
        """What is donated and what is kept; in each, what is of Variables first."""
        every = values + plain
        return [*compress(every, self._donated)], [*compress(every, self._kept)]

    def find_idle(self, values: list[Any], plain: list[Any]) -> list[int]:
        """Donated Variables that the function does not write; it is traced to see."""
        if self._donates:
            self.run.trace(*self._apart(values, plain))
        return self._idle

    def _refuse_donated_twice(self, donated: list[Any], kept: list[Any]) -> None:
        """Refuses an array that is donated and stands somewhere else, too."""
        given = set(map(id, donated))
        if len(given) == len(donated) and given.isdisjoint(map(id, kept)):
            return
        seen: dict[int, int] = {}
        for number, value in zip(self._numbers, chain(donated, kept)):
            first = seen.setdefault(id(value), number)
            if first != number and id(value) in given and is_buffer(value):
                paths = [*map(show_path, leaf_paths(self.key.definition.spec))]
                raise StructureError(
                    f"jit: the same array is at {paths[first]} and at {paths[number]}, "
                    "and is donated. Give each its own (`jnp.copy`), or do not donate "
                    "it."
                )
