# SPDX-License-Identifier: Apache-2.0
"""Where a value may be edited: an identity, and how its derivatives follow an edit.

While somebody edits, a value that flows on is marked by a tap of its own, which gives a
ticket, and then goes through `edit_p`, an identity that holds the ticket. The walk puts
a function in the place of the identity.

*Recipes.* When the walk comes to a program it may have been differentiated already, as
in `edit(jax.grad(loss), ...)`: what was one identity is now several operations, in the
forward and the backward pass, and an edit must go into all of them, each time with the
derivative that belongs there. If `edit_p` were differentiated as an identity is, this
would be lost: the derivative of the identity does not know what will be in its place.

So it is differentiated by name only. A derivative of `edit_p` is another `edit_p`, with
one more step in its `recipe`: `Forward` for a derivative along tangents, `Backward` for
the transpose. Its operands are those before, and what the step adds (tangents, or
cotangents in the place of what it is linear in). The invariant: *an `edit_p` computes
what its recipe makes of the function at the edit point, from its operands.* `derived`
reads the recipe with any function f, of leaves to as many leaves: first f, then for
each step `jax.jvp` or `jax.vjp` of what there is so far. With the identity that is the
program as it was; with an edit it is the edited program, whose derivatives are JAX's
own. It is sound because derivatives of a composition depend on a part of it only by the
values and derivatives of that part, which are what the recipe asks for. It costs
operands that an identity would not need: they are kept only while somebody edits.

All operands of a recipe have the type of some leaf of the value, since tangents and
cotangents have (`Derived.ins`, `Derived.outs`): so a result's type is known unasked.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from treetap._capture.marks import Label, Maps, bind_new, mark, moving

Function = Callable[..., list[Any]]
Places = tuple[int, ...]


class Derived(NamedTuple):
    """A function made by a recipe.

    Attributes:
        call: The function, from a list of values to a list of values.
        ins: For each operand, the leaf of the edited value whose type it has.
        outs: The same for each result.
    """

    call: Function
    ins: Places
    outs: Places


class Forward(NamedTuple):
    """A step of a recipe: the derivative along tangents, which are operands too.

    Attributes:
        moved: The operands that have tangents.
        outs: The results that have tangents; others are not numbers.
    """

    moved: Places
    outs: Places

    def of(self, held: Derived) -> Derived:
        """The derivative of a function."""
        count = len(held.ins)

        def call(*values: Any) -> list[Any]:
            given = dict(enumerate(values[:count]))

            def along(*parts: Any) -> list[Any]:
                return held.call(*(given | dict(zip(self.moved, parts))).values())

            at = [values[n] for n in self.moved]
            tangents = jax.jvp(along, at, list(values[count:]))[1]
            return [tangents[n] for n in self.outs]

        ins = (*held.ins, *(held.ins[n] for n in self.moved))
        return Derived(call, ins, tuple(held.outs[n] for n in self.outs))


class Backward(NamedTuple):
    """A step of a recipe: from cotangents to those of operands it is linear in.

    Attributes:
        linear: These operands; in their place cotangents come last.
    """

    linear: Places

    def of(self, held: Derived) -> Derived:
        """The transpose of a function."""
        rest = [n for n in range(len(held.ins)) if n not in self.linear]
        ins = (*(held.ins[n] for n in rest), *held.outs)
        outs = tuple(held.ins[n] for n in self.linear)

        def call(*values: Any) -> list[Any]:
            def at(*parts: Any) -> list[Any]:
                given = dict(zip(rest, values)) | dict(zip(self.linear, parts))
                return held.call(*map(given.get, range(len(held.ins))))

            zeros = [jnp.zeros_like(values[ins.index(leaf)]) for leaf in outs]
            _, pull = jax.vjp(at, *zeros)
            return list(pull(list(values[len(rest) :])))

        return Derived(call, ins, outs)


Recipe = tuple[Forward | Backward, ...]


def derived(fn: Function, recipe: Recipe, count: int) -> Derived:
    """What a recipe makes of a function of so many leaves to as many."""
    made = Derived(fn, tuple(range(count)), tuple(range(count)))
    for step in recipe:
        made = step.of(made)
    return made


def _identity(*values: Any) -> list[Any]:
    return list(values)


def unedited(*values: Any, **params: Any) -> list[Any]:
    """What `edit_p` gives where nothing is edited."""
    count = params["label"].tree.num_leaves
    return derived(_identity, params["recipe"], count).call(*values[:-1])


def editable(label: Label, values: Sequence[Any]) -> list[Any]:
    """Marks values that flow on, so that they may be edited; gives those to use."""
    label = label._replace(is_edit=True, reduce=None)
    *held, ticket = bind_new(label, values)
    return edit_p.bind(*held, ticket, label=label, maps=(), branches=(), recipe=())


def _type_of(*avals: Any, label: Label, recipe: Recipe, **params: Any) -> Any:
    made = derived(_identity, recipe, label.tree.num_leaves)
    return [avals[made.ins.index(leaf)] for leaf in made.outs], set()


def rows_of(maps: Maps) -> int:
    """How many axes of mappings the operands of an `edit_p` have, all the same."""
    return sum(one.mapped[0] for one in maps)


def _jvp(edit_p: Any, primals: Any, tangents: Any, **params: Any) -> Any:
    out = edit_p.bind(*primals, **params)
    moved = moving(tangents[:-1])
    outs = tuple(n for n, x in enumerate(out) if jnp.issubdtype(x.dtype, jnp.inexact))
    params["recipe"] = (*params["recipe"], Forward(moved, outs))
    given = [tangents[n] for n in moved]
    found = edit_p.bind(*primals[:-1], *given, primals[-1], **params)
    still = [np.zeros(jnp.shape(x), jax.dtypes.float0) for x in out]
    return out, [*(dict(enumerate(still)) | dict(zip(outs, found))).values()]


def _transpose(cotangents: Any, *values: Any, **params: Any) -> Any:
    operands = values[:-1]
    linear = tuple(n for n, x in enumerate(operands) if ad.is_undefined_primal(x))
    given = map(ad.instantiate_zeros, cotangents)
    known = [value for n, value in enumerate(operands) if n not in linear]
    params["recipe"] = (*params["recipe"], Backward(linear))
    found = dict(zip(linear, edit_p.bind(*known, *given, values[-1], **params)))
    return [found.get(n) for n in range(len(values))]


edit_p = mark("tap_edit", unedited, _type_of, _jvp, _transpose)
