# SPDX-License-Identifier: Apache-2.0
"""Mutants: `observe(..., verify=True)` finds each small lie of what captures rest on.

A mutant is one change of one rule that still runs: of one entry of the table of
operations, of where an axis goes, of which branch a mask is of, of whose ticket it is.
Then all programs of `verified_programs` are observed and verified until one of them
raises: the mutant is caught. One that is not caught would be a hole in `verify`.

Left out are changes that no number tells of:

- `is_call`, `repeats`, `mesh` and `carried` of the table, and the order of `turns`:
  those who blame and count read them, not those who capture (of `turns` these read how
  many there are, which is a mutant here);
- how paths are found: they say where a value is;
- `run` of a checkpoint or a `custom_jvp` as if it were a plain call: captures come
  after the differentiation, and what is left are the same numbers;
- `is_repeated`, which says what is refused: of second derivatives, or pullbacks that
  are called twice;
- leaves of a derivative in another order (`moving`): all that follow go by that order;
- what is fed by `edit` and `perturb`: nothing is fed while one observes. Masks are, and
  are here;
- `shard_map`, second derivatives, and statistics in a `while`: `verify` refuses them;
- a loop among the mappings around it where its axis is put there, too: arrays have
  their axes in another order, and say so, and nothing but JAX's name stacks knows;
- names of tickets: the numbers of branches tell apart whatever one variable may hold;
- the entries of operations that JAX is about to have, which this one has not.
"""

import functools
import gc
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import ad, batching
from jax.interpreters import partial_eval as pe

import treetap as tt
from treetap._capture import calls, listener, marks, session
from treetap._capture.statistics import reduced
from treetap._capture.walk import (
    batched_branches,
    jaxpr_cache,
    operations,
    plans,
    run,
    spots,
    survey,
)
from verified_programs import programs

pytestmark = pytest.mark.long


class Mutant(NamedTuple):
    """One change.

    Attributes:
        of: What has it: a module, a class or a table.
        name: What of it is changed.
        change: From what it was to what it is now.
        first: The program to begin with: one that catches it.
    """

    of: Any
    name: Any
    change: Any
    first: str


MUTANTS: dict[str, Mutant] = {}


def mutant(of, name, first):
    """Takes a function from what was to what is instead; its name says the change."""

    def taken(change):
        said = change.__name__.replace("_", " ").strip()
        assert said not in MUTANTS, said
        MUTANTS[said] = Mutant(of, name, change, first)
        return change

    return taken


def entry(name, said, first, **changes):
    """A mutant of one entry of the table."""
    change = lambda was: replace(was, **changes)
    said = f"{name} {said}"
    assert said not in MUTANTS, said
    MUTANTS[said] = Mutant(operations.OPERATIONS, name, change, first)


def less(params_of):
    """One fewer of what a function of parameters gives."""
    return lambda params: params_of(params)[:-1]


def _forward(step, part):
    """A reversed scan run forward."""
    params = {**step.params, "reverse": False}
    return operations.SCAN.run(step._replace(params=params), part)


TABLE = operations.OPERATIONS
entry("scan", "adds no axis", "scan", turns=None)
entry("scan", "has a turn less", "grad of scan", turns=less(TABLE["scan"].turns))
entry("scan", "is a branch", "loop of loops", flag="taken")
entry("scan", "counts", "scan", flag="count")
entry("scan", "has rows", "vmap of grad of scan", rows=lambda params: (3,))
entry("scan", "runs forward", "scan", run=_forward)
entry("while", "does not count", "while", flag="")
entry("while", "is a branch", "while", flag="taken")
entry("while", "has no rows", "vmap of while", rows=lambda params: ())
entry(
    "while",
    "has its rows in another order",
    "rows of two mappings",
    rows=lambda params: operations.while_rows(params)[::-1],
)
entry("while", "has no body", "while", bodies=lambda params: [])
entry("cond", "has no mask", "cond", flag="")
entry("cond", "counts", "cond", flag="count")
entry("cond", "adds an axis", "cond", turns=lambda params: range(2))
entry(
    "cond",
    "has its branches in another order",
    "cond",
    bodies=lambda params: operations._branches(params)[::-1],
)
entry(
    "cond",
    "has one branch",
    "cond",
    bodies=lambda params: operations._branches(params)[:1],
)
entry(
    "cond",
    "gives its index to the branches",
    "scan of cond",
    bodies=lambda params: [
        body._replace(first=0) for body in operations._branches(params)
    ],
)
entry("jit", "adds an axis", "scan of cond", turns=lambda params: range(1))
entry("jit", "is a branch", "pulled later", flag="taken")
entry("jit", "is run as a cond", "scan of cond", run=operations._run_cond)
entry("remat2", "adds an axis", "grad of checkpoint", turns=lambda params: range(1))
entry("custom_jvp_call", "adds an axis", "rules in jit", turns=lambda params: range(1))
entry("custom_vjp_call", "adds an axis", "rules in jit", turns=lambda params: range(1))


@mutant(operations, "OPERATIONS", "scan")
def no_scan_in_the_table(was):
    return {name: one for name, one in was.items() if name != "scan"}


# How the table's operations are run.


@mutant(operations, "_distinct", "scan")
def all_results_of_a_loop_are_its_first(was):
    def first(tree):
        distinct, places = was(tree)
        return distinct, jax.tree.map(lambda place: 0, places)

    return first


@mutant(operations, "_distinct", "scan")
def results_of_a_loop_are_exchanged(was):
    def exchanged(tree):
        distinct, places = was(tree)
        return distinct, jax.tree.map(lambda n: len(distinct) - 1 - n, places)

    return exchanged


@mutant(operations, "_distinct", "grad of scan")
def results_of_a_loop_with_one_type_are_one(was):
    def by_type(tree):
        kept = {}
        distinct = []

        def place(value):
            key = jax.typeof(value)
            if kept.setdefault(key, len(distinct)) == len(distinct):
                distinct.append(value)
            return kept[key]

        return distinct, jax.tree.map(place, tree)

    return by_type


@mutant(operations, "_scan_carried", "scan")
def carries_begin_one_later(was):
    return lambda params: range(was(params).start + 1, was(params).stop + 1)


@mutant(operations, "_scan_carried", "scan")
def a_carry_is_taken_for_a_constant(was):
    return lambda params: range(was(params).start + 1, was(params).stop)


@mutant(operations, "_scan_carried", "grad of scan")
def a_constant_is_taken_for_a_carry(was):
    return lambda params: range(max(0, was(params).start - 1), was(params).stop)


@mutant(operations, "while_rows", "vmap of while")
def rows_of_a_while_are_not_there(was):
    return lambda params: ()


@mutant(operations, "while_rows", "rows of two mappings")
def rows_of_a_while_are_exchanged(was):
    return lambda params: was(params)[::-1]


def _flag(change):
    def changed(was):
        return lambda flag, spot, found: was(change(flag), spot, found)

    return changed


@mutant(operations, "flagged", "cond")
def the_mask_of_a_branch_is_negated(was):
    return _flag(jnp.logical_not)(was)


@mutant(operations, "flagged", "cond")
def the_mask_of_a_branch_is_always_true(was):
    return _flag(jnp.ones_like)(was)


@mutant(operations, "flagged", "cond")
def no_mask_of_a_branch(was):
    return lambda flag, spot, found: found


@mutant(plans, "flagged", "while")
def a_while_counts_one_more(was):
    return _flag(lambda count: count + 1)(was)


@mutant(plans, "flagged", "vmap of while")
def a_while_does_not_count(was):
    return lambda flag, spot, found: found


@mutant(operations, "of_each", "two in a branch")
def what_came_out_of_branches_is_of_the_next_spot(was):
    return lambda do, *columns: was(do, *columns)[::-1]


# Where axes go.


@mutant(spots.Spot, "place", "scan")
def an_axis_goes_one_place_further_in(was):
    return lambda self, has: was(self, has) + 1


@mutant(spots.Spot, "place", "vmap of grad of scan")
def an_axis_goes_to_the_front(was):
    return lambda self, has: 0


@mutant(spots.Spot, "place", "scan of vmap")
def an_axis_goes_to_the_end_of_the_levels(was):
    return lambda self, has: len([n for n in has if self.levels[n].kind == spots.VMAP])


@mutant(plans.Part, "with_axis", "scan")
def the_axis_of_a_loop_is_reversed(was):
    def reversed_(self, found, put):
        return was(self, found, lambda value, n: jnp.flip(put(value, n), n))

    return reversed_


@mutant(plans.Part, "outers", "leaves in a loop by rows")
def axes_of_values_go_as_those_of_their_first_leaf(was):
    def first(self):
        return [
            one and one._replace(leaves=one.leaves[:1] * len(one.leaves))
            for one in was(self)
        ]

    return first


def _wrapped(outer):
    """A loop is put among the levels as if others were further out."""

    def changed(was):
        def wrapped(self, wrap, number=0):
            moved = self._replace(outer=outer(self))
            return was(moved, wrap, number)._replace(outer=self.outer)

        return wrapped

    return changed


@mutant(spots.Spot, "wrapped", "vmap of while")
def a_loop_is_the_outermost_level(was):
    return _wrapped(lambda spot: 0)(was)


@mutant(spots.Spot, "wrapped", "scan of vmap")
def a_loop_is_the_innermost_level(was):
    return _wrapped(lambda spot: len(spot.levels))(was)


@mutant(spots.Spot, "wrapped", "scan of vmap")
def a_loop_is_one_level_further_in(was):
    return _wrapped(lambda spot: min(spot.outer + 1, len(spot.levels)))(was)


@mutant(spots.Spot, "wrapped", "switch by a number")
def a_branch_has_no_number(was):
    return lambda self, wrap, number=0: was(self, wrap, 0)


@mutant(spots.Spot, "wrapped", "vmap of while")
def masks_are_said_to_have_no_axes(was):
    def wrapped(self, wrap, number=0):
        spot = was(self, wrap, number)
        return spot._replace(flags_have=((),) * len(spot.flags))

    return wrapped


@mutant(spots.Spot, "wrapped", "rows of one mapping")
def leaves_of_a_loop_have_the_axes_of_others(was):
    def wrapped(self, wrap, number=0):
        spot = was(self, wrap, number)
        return spot._replace(has=spot.has[::-1])

    return wrapped


@mutant(survey, "mappings_in", "vmap of while")
def one_more_mapping_is_further_in(was):
    return lambda stack: was(stack) + 1


@mutant(spots.Spot, "row_levels", "vmap of while")
def rows_are_of_no_level(was):
    return lambda self, rows: ()


@mutant(spots.Spot, "row_levels", "rows of one mapping")
def rows_are_of_the_outermost_levels(was):
    return lambda self, rows: tuple(range(len(was(self, rows))))


@mutant(spots.Spot, "row_levels", "rows of the outer mapping")
def rows_are_of_the_innermost_levels(was):
    return lambda self, rows: tuple(range(self.outer))[self.outer - len(rows) :]


@mutant(spots.Spot, "keeping", "iterations of a while")
def kept_iterations_have_no_axis(was):
    return lambda self, iterations: self


def _spot(change):
    def changed(was):
        def spot_of(*args):
            return change(was(*args))

        return spot_of

    return changed


@mutant(survey, "spot_of", "rows of one mapping")
def levels_are_in_another_order(was):
    return _spot(lambda spot: spot._replace(levels=spot.levels[::-1]))(was)


@mutant(survey, "spot_of", "rows of one mapping")
def leaves_of_a_tap_have_the_axes_of_others(was):
    return _spot(lambda spot: spot._replace(has=spot.has[::-1]))(was)


@mutant(listener, "spot_of", "leaves mapped and not")
def leaves_of_a_tap_have_the_axes_of_others_outside_of_jit(was):
    return _spot(lambda spot: spot._replace(has=spot.has[::-1]))(was)


@mutant(listener, "spot_of", "three mappings")
def levels_are_in_another_order_outside_of_jit(was):
    return _spot(lambda spot: spot._replace(levels=spot.levels[::-1]))(was)


def _other_leaves(spot):
    leaves = spot.leaves
    return spot if leaves is None else spot._replace(leaves=leaves[::-1])


@mutant(survey, "spot_of", "leaves in a loop")
def gradients_are_of_other_leaves(was):
    return _spot(_other_leaves)(was)


@mutant(listener, "spot_of", "leaves mapped and not")
def gradients_are_of_other_leaves_outside_of_jit(was):
    return _spot(_other_leaves)(was)


@mutant(survey, "spot_of", "vmap of scan of cond")
def masks_of_a_tap_have_no_axes(was):
    return _spot(lambda spot: spot._replace(flags_have=((),) * len(spot.flags)))(was)


@mutant(survey, "spot_of", "vmap of scan of cond")
def masks_of_a_tap_are_not_told(was):
    return _spot(lambda spot: spot._replace(flags=(), flags_have=()))(was)


# Branches under `vmap`.


@mutant(batched_branches, "Guarding", "vmap of grad of switch")
def all_marks_are_in_the_first_branch(was):
    return lambda number: was(0)


@mutant(batched_branches, "_batch_cond", "vmap of cond")
def masks_are_those_of_other_branches(was):
    def batch(axis, values, dims, *, branches, **params):
        own = len(branches)
        if all(value.dtype == bool for value in values[-own:]):
            values = [*values[:-own], *values[-own:][::-1]]
        return was(axis, values, dims, branches=branches, **params)

    return batch


@mutant(batched_branches, "_with_guards", "vmap of cond")
def branches_under_vmap_have_no_masks(was):
    def unguarded(branch, number, count):
        body = batched_branches.body_of(branch)
        inputs = len(body.jaxpr.invars)
        avals = [var.aval for var in body.jaxpr.invars]
        masks = [jax.ShapeDtypeStruct((), bool)] * count
        compat = batched_branches.jax_compat
        fn = lambda *x: compat.evaluate(body, x[:inputs])
        return compat.traced(fn, [*avals, *masks])

    return unguarded


def _guarded(change):
    def changed(was):
        def guarded(self, primitive, params, values, mask):
            return change(functools.partial(was, self), primitive, params, values, mask)

        return guarded

    return changed


@mutant(plans.Guarding, "guarded", "vmap of grad of cond")
def gradients_of_branches_are_not_masked(was):
    def unmasked(own, primitive, params, values, mask):
        is_gradient = primitive is marks.gradient_p
        return own(primitive, params, values, mask | is_gradient)

    return _guarded(unmasked)(was)


@mutant(plans.Guarding, "guarded", "vmap of grad of cond")
def gradients_of_branches_are_masked_the_other_way(was):
    def inverted(own, primitive, params, values, mask):
        is_gradient = primitive is marks.gradient_p
        return own(primitive, params, values, mask ^ is_gradient)

    return _guarded(inverted)(was)


@mutant(plans.Guarding, "guarded", "vmap of cond")
def values_of_branches_are_masked_the_other_way(was):
    def inverted(own, primitive, params, values, mask):
        return own(primitive, params, values, mask ^ (primitive is marks.tap_p))

    return _guarded(inverted)(was)


@mutant(plans.Guarding, "places", "loop in a branch")
def masks_are_sliced_by_the_loops_in_a_branch(was):
    return lambda self, spot: [0]


# What a `while` keeps.


@mutant(plans.Kept, "renewed", "iterations of a while")
def iterations_are_kept_one_later(was):
    def later(self, before, after, counter):
        return was(self, before, after, counter + 1)

    return later


@mutant(plans.Kept, "renewed", "while")
def the_first_iteration_is_kept(was):
    def first(self, before, after, counter):
        new = was(self, before, after, counter)
        if self.asked.iterations or self.rows:
            return new
        return jax.tree.map(lambda x, y: jnp.where(counter == 0, x, y), new, before)

    return first


@mutant(plans.Kept, "renewed", "while")
def nothing_is_kept(was):
    return lambda self, before, after, counter: before


@mutant(plans.Kept, "rows_first", "rows of one mapping")
def rows_stay_where_they_are(was):
    return lambda self, found: found


@mutant(plans.Kept, "ended", "rows of one mapping")
def rows_do_not_go_back(was):
    def ended(self, found, counter):
        return plans.flagged(counter, self.spot, found)

    return ended


@mutant(plans.Kept, "levels", "rows of one mapping")
def rows_kept_are_of_the_outermost_levels(was):
    return property(lambda self: tuple(range(len(was.fget(self)))))


# What came out, and whose it is.


def _split(change):
    def changed(was):
        def split(self, outs):
            return was(self, change(self, list(outs)))

        return split

    return changed


@mutant(plans.Rewritten, "split", "iterations of a while")
def results_are_split_one_too_early(was):
    return _split(lambda self, outs: outs[1:] + outs[:1])(was)


@mutant(plans.Rewritten, "split", "scan of cond")
def what_came_out_is_in_reverse(was):
    def change(self, outs):
        num_outs = self.tree.children()[0].num_leaves
        return outs[:num_outs] + outs[num_outs:][::-1]

    return _split(change)(was)


@mutant(plans.Part, "by", "grad of checkpoint")
def a_body_has_the_plan_of_the_first(was):
    return lambda self, plan, feeds: was(self._replace(start=0), plan, feeds)


@mutant(run, "recorded", "leaves mapped and not")
def leaves_come_out_in_reverse(was):
    def recorded(values, choice, spot):
        count = len(spot.own)
        return was(values[:count][::-1] + values[count:], choice, spot)

    return recorded


@mutant(run, "recorded", "vmap of cond")
def masks_come_out_negated(was):
    def recorded(values, choice, spot):
        found = was(values, choice, spot)
        if found is None:
            return found
        return found._replace(flags=[jnp.logical_not(x) for x in found.flags])

    return recorded


@mutant(calls.Call, "fill", "cond")
def a_call_has_no_flags(was):
    return lambda self, found: was(self, found._replace(flags=[]))


@mutant(calls.Call, "fill", "cond in while")
def a_call_has_its_flags_in_reverse(was):
    return lambda self, found: was(self, found._replace(flags=found.flags[::-1]))


@mutant(calls, "_both", "cond in cond")
def of_two_masks_the_first_counts(was):
    return lambda first, second, levels: first


@mutant(calls, "_both", "cond in cond")
def of_two_masks_the_second_counts(was):
    return lambda first, second, levels: second


@mutant(calls.Call, "fill_gradient", "leaves mapped and not")
def gradients_are_filled_to_other_leaves(was):
    def fill(self, spot, found):
        was(self, _other_leaves(spot), found)

    return fill


@mutant(calls.Call, "fill_gradient", "grad")
def gradients_are_filled_twice(was):
    def fill(self, spot, found):
        was(self, spot, jax.tree.map(lambda x: x * 2, found))

    return fill


@mutant(session.Session, "tap_of", "grad")
def a_ticket_is_of_the_first_that_is_here(was):
    def tap_of(self, spot, ins, here):
        found = was(self, spot, ins, here)
        return found if found is None or not here else here[0]

    return tap_of


@mutant(session.Session, "tap_of", "scan of cond")
def a_ticket_is_of_the_last_that_is_here(was):
    def tap_of(self, spot, ins, here):
        found = was(self, spot, ins, here)
        taps = [one for one in here if one.spot.is_tap]
        return taps[-1] if found is not None and taps else found

    return tap_of


@mutant(session.Session, "tap_of", "grad of scan")
def a_ticket_is_of_the_first_that_is_known(was):
    def tap_of(self, spot, ins, here):
        if len(spot.flow.of) == 1:
            return was(self, spot, ins, here)
        known = [one for held in self.tickets.values() for one in held]
        return known[0] if known else None

    return tap_of


@mutant(session.Session, "tap_of", "grad")
def no_ticket_is_known(was):
    return lambda self, spot, ins, here: None


@mutant(session.Session, "remember", "grad")
def tickets_are_forgotten(was):
    return lambda self, ticket, known: None


@mutant(session, "_of_its_own", "grad")
def tickets_are_no_arrays_of_their_own(was):
    return lambda ticket: ticket


@mutant(spots.Spot, "is_of", "vmap of grad of switch")
def tickets_do_not_heed_branches(was):
    return lambda self, other: self.label == other.label


@mutant(spots.Flow, "shifted", "grad of scan")
def tickets_come_one_operand_further(was):
    return lambda self, base, first: was(self, base, first + 1)


@mutant(spots.Flow, "shifted", "grad in cond")
def tickets_come_from_the_first_branch(was):
    return lambda self, base, first: was(self, 0, first)


@mutant(survey.Taps, "handed_on", "pulled through others")
def bodies_hand_no_tickets_on(was):
    return property(lambda self: [], lambda self, pairs: None)


@mutant(survey, "is_like_ticket", "vmap of grad of cond")
def operations_hand_no_tickets_on(was):
    return lambda aval: False


# Marks.


def _batched(primitive, change, first):
    """The rule of `vmap` for a mark, with other operands, or another result."""

    def changed(was):
        def rule(axis, values, dims, **params):
            return change(was, axis, values, dims, params)

        return rule

    said = change.__name__.replace("_", " ") + f" of a {primitive.name}"
    MUTANTS[said] = Mutant(batching.fancy_primitive_batchers, primitive, changed, first)


def axes_are_not_moved(was, axis, values, dims, params):
    flat = [None if dim is None else 0 for dim in dims]
    return was(axis, values, flat, **params)


def mappings_are_exchanged(was, axis, values, dims, params):
    with pytest.MonkeyPatch.context() as patch:
        exchanged = lambda size, name, mapped: mapping(size, name, mapped[::-1])
        mapping = marks.Mapping
        patch.setattr(marks, "Mapping", exchanged)
        return was(axis, values, dims, **params)


_batched(marks.tap_p, axes_are_not_moved, "columns")
_batched(marks.gradient_p, axes_are_not_moved, "columns of cotangents")
_batched(marks.tap_p, mappings_are_exchanged, "leaves mapped and not")
_batched(marks.gradient_p, mappings_are_exchanged, "leaves in a loop by rows")


@mutant(marks, "Mapping", "vmap")
def all_mappings_have_one_more_row(was):
    return lambda size, name, mapped: was(size + 1, name, mapped)


def _transposed(change):
    def changed(was):
        def rule(cotangents, *values, **params):
            return change(was, cotangents, values, params)

        return rule

    said = change.__name__.replace("_", " ")
    table = ad.primitive_transposes
    MUTANTS[said] = Mutant(table, marks.linear_p, changed, "leaves mapped and not")


def cotangents_are_not_marked(was, cotangents, values, params):
    return [*cotangents, None]


def cotangents_are_of_other_leaves(was, cotangents, values, params):
    return was(cotangents, *values, **{**params, "leaves": params["leaves"][::-1]})


for one in (cotangents_are_not_marked, cotangents_are_of_other_leaves):
    _transposed(one)


@mutant(ad.primitive_jvps, marks.tap_p, "grad")
def taps_are_not_differentiated(was):
    def rule(primals, tangents, **params):
        return marks._identity_jvp(marks.tap_p, primals, [*tangents, None], **params)

    return rule


@mutant(pe.partial_eval_jaxpr_custom_rules, marks.tap_p, "grad of checkpoint")
def values_that_are_computed_again_are_marked_again(was):
    def rule(saveable, unknown, is_there, eqn):
        first, _, *rest = was(saveable, unknown, is_there, eqn)
        return (first, eqn, *rest)

    return rule


@mutant(batched_branches.jax_compat, "is_hoisting", "the same in all turns")
def what_is_the_same_in_all_turns_leaves_its_loop(was):
    return lambda: False


# Statistics.


@mutant(reduced.Reduction, "measure", "statistics of branches")
def rows_of_other_branches_are_measured(was):
    return lambda self, leaves, guards, spot: was(self, leaves, [], spot)


@mutant(reduced, "merged", "statistics")
def of_two_statistics_the_first_counts(was):
    return lambda first, second: first


@mutant(calls.Call, "fill_gradient", "statistics")
def statistics_of_gradients_are_those_of_nothing(was):
    def fill(self, spot, found):
        zeros = jax.tree.map(jnp.zeros_like, found.states)
        was(self, spot, found._replace(states=zeros))

    return fill


def forget():
    """Empties what JAX and treetap keep of programs."""
    jax.clear_caches()
    for held in gc.get_objects():
        if isinstance(held, jaxpr_cache.JaxprCache):
            held._held.clear()
    survey._spotless.clear()
    operations._plain.clear()


@pytest.fixture(autouse=True)
def nothing_is_kept_of_mutants():
    forget()
    yield
    forget()


def caught_by(first):
    """The first program in which something is found, and what; None if in none."""
    made = programs()
    for name in (first, *made):
        fn, args, options = made[name]
        try:
            _, record = tt.observe(fn, verify=True, **options)(*args)
            jax.block_until_ready([site.value for site in record])
        except Exception as error:
            return name, error
    return None


@pytest.mark.parametrize("change", MUTANTS)
def test_a_mutant_is_caught(change, monkeypatch):
    of, name, change, first = MUTANTS[change]
    if isinstance(of, dict):
        monkeypatch.setitem(of, name, change(of[name]))
    else:
        was = vars(of).get(name) or getattr(of, name, None)
        monkeypatch.setattr(of, name, change(was), raising=was is not None)
    assert caught_by(first) is not None


def test_without_a_mutant_nothing_is_caught():
    assert caught_by("plain") is None
