# SPDX-License-Identifier: Apache-2.0
"""Captures around, between and inside two nested transforms: the table, squared."""

import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt
from capture_cases import PAIRED, moving, shape_of
from capture_steps import OURS, PLAIN, block_by_hand, block_step, grad, grad_by_hand

PLACES = ("outside", "between", "inside")
NAMES = ("sown", "moved", "tapped", "seen")

ON_DEVICES = ("shard_map", "pmap")
REFUSED = {
    (outer, inner): "JAX maps over devices inside devices only with one mesh for both"
    for outer in ON_DEVICES
    for inner in ON_DEVICES
}
REFUSALS = "Reverse-mode differentiation does not work|The context mesh"

near = np.testing.assert_allclose


@pytest.fixture(autouse=True)
def quiet_outside():
    """Outside a capture the blocks of the table store nothing."""
    tt.set_sow_outside_capture("ignore")
    yield
    tt.set_sow_outside_capture("store")


def heard(step):
    """A step whose extras are all the values it marks."""

    def call(model, x):
        (y, _), record = tt.observe(step)(model, x)
        return y, {name: record[name].value for name in NAMES}

    return call


def place_capture(outer, inner, ns, place, capture):
    """Two transforms around a block, and a capture at one of three places."""
    if place == "outside":
        return capture(outer.wrap(ns, inner.wrap(ns, block_step)), (outer, inner))
    if place == "between":
        return outer.wrap(ns, capture(inner.wrap(ns, block_step), (inner,)))
    return outer.wrap(ns, inner.wrap(ns, capture(block_step, ())))


def by_hand(outer, inner, model, x, moved=0.0):
    hand = outer.hand(inner.hand(block_by_hand))
    return hand(model.w[...], x, jnp.full(shape_of(outer, inner), moved))


def check_values(outer, inner, ns, place):
    model, x = outer.inputs(inner)
    step = place_capture(outer, inner, ns, place, lambda step, _: heard(step))
    out, values = step(model, x)
    seen = by_hand(outer, inner, model, x)
    near(out, seen.out, rtol=1e-4)
    for name in NAMES:
        assert values[name].shape == seen.value.shape
        near(values[name], seen.value, rtol=1e-4)


def check_moved(outer, inner, ns, place):
    model, x = outer.inputs(inner)

    def capture(step, cases):
        return moving(step, shape_of(*cases))

    out, _ = place_capture(outer, inner, ns, place, capture)(model, x)
    near(out, by_hand(outer, inner, model, x, moved=1.0).out, rtol=1e-4)


def check_site(outer, inner, ns):
    """Of a capture around both: flags, and no value reported twice."""
    model, x = outer.inputs(inner)
    step = outer.wrap(ns, inner.wrap(ns, block_step))
    _, record = tt.observe(step)(model, x)
    seen, site = by_hand(outer, inner, model, x), record["tapped"]
    for found, wanted in [(site.taken, seen.taken), (site.count, seen.count)]:
        assert (found is None) == (wanted is None)
        if found is not None:
            np.testing.assert_array_equal(found, wanted)
    assert [site.index for site in record] == [0] * 5


def check_gradients(outer, inner, ns):
    """Of a capture around both, and around a differentiation if neither is one."""
    model, x = outer.inputs(inner)
    step = outer.wrap(ns, inner.wrap(ns, block_step))
    hand = outer.hand(inner.hand(block_by_hand))
    if not outer.differentiates and not inner.differentiates:
        step, hand = grad(ns, step), grad_by_hand(hand)
    if has_no_gradient(outer, inner):
        with pytest.raises(tt.CaptureError, match="tapped has no gradient"):
            tt.observe(step, "tapped", grads=True)(model, x)
        return
    (out, _), record = tt.observe(step, "tapped", grads=True)(model, x)
    seen, found = hand(model.w[...], x, jnp.zeros(shape_of(outer, inner))), record[0]
    near(out, seen.out, rtol=1e-4)
    given = found.grad if isinstance(found.grad, tuple) else (found.grad,)
    assert len(given) == len(seen.grads)
    for one, wanted in zip(given, seen.grads):
        near(one, wanted, rtol=1e-4, atol=1e-6)


def has_no_gradient(outer, inner):
    """Whether a custom rule stands between the value and every differentiation."""
    return bool(inner.no_grads or (outer.no_grads and not inner.differentiates))


def is_reversible(outer, inner):
    """Whether JAX can differentiate what is to be differentiated."""
    if inner.differentiates:
        return not (outer.differentiates and inner.no_reverse)
    return not inner.no_reverse and not outer.no_reverse


def check_refused(outer, inner, ns):
    """The pair fails without any capture."""
    model, x = outer.inputs(inner)
    with pytest.raises(Exception, match=REFUSALS):
        outer.wrap(ns, inner.wrap(ns, block_step))(model, x)


def nestings():
    for outer in PAIRED:
        for inner in PAIRED:
            for ns in (PLAIN, OURS):
                yield outer, inner, ns


# Every pair, each with JAX's transforms and with ours, each with three places of the
# capture. `make test` runs a sample in which every transform, outside and inside, meets
# both libraries and every place.


def is_sample(outer, inner, ns, place):
    names = list(PAIRED)
    first, turn = names.index(outer), PLACES.index(place)
    if (names.index(inner) - first) % len(names) != 4 + 4 * turn:
        return False
    is_ours = (first + turn) % 2 and not no_ours(outer, inner)
    return ns is (OURS if is_ours else PLAIN)


def no_ours(outer, inner):
    """Why treetap does not have both, from the table."""
    return PAIRED[outer].no_ours or PAIRED[inner].no_ours


def pairs(places, *, refused=False):
    """Cases of what JAX runs, or of what it refuses."""
    return [
        pytest.param(
            PAIRED[outer],
            PAIRED[inner],
            ns,
            place,
            id=f"{outer}-{inner}-{ns.name}-{place}",
            marks=() if is_sample(outer, inner, ns, place) else pytest.mark.long,
        )
        for outer, inner, ns in nestings()
        for place in places
        if not (ns is OURS and no_ours(outer, inner))
        and bool(refusal(PAIRED[outer], PAIRED[inner])) is refused
    ]


def refusal(outer, inner):
    """Why JAX itself does not run one transform in another; empty if it does."""
    if outer.differentiates and inner.no_reverse:
        return inner.no_reverse
    return REFUSED.get((name_of(outer), name_of(inner)), "")


def name_of(case):
    return next(name for name, one in PAIRED.items() if one is case)


@pytest.mark.parametrize(
    ("outer", "inner", "ns", "place"), pairs(["outside"], refused=True)
)
def test_what_jax_refuses_fails_without_a_capture(outer, inner, ns, place):
    check_refused(outer, inner, ns)


@pytest.mark.parametrize(("outer", "inner", "ns", "place"), pairs(PLACES))
def test_a_capture_of_two_transforms_gives_their_values(outer, inner, ns, place):
    check_values(outer, inner, ns, place)
    check_moved(outer, inner, ns, place)


@pytest.mark.parametrize(("outer", "inner", "ns", "place"), pairs(["outside"]))
def test_a_capture_around_two_transforms_gives_gradients(outer, inner, ns, place):
    check_site(outer, inner, ns)
    if is_reversible(outer, inner):
        check_gradients(outer, inner, ns)
    elif outer.no_grads:  # by the rule, it can
        grad(ns, outer.wrap(ns, inner.wrap(ns, block_step)))(*outer.inputs(inner))
    else:  # JAX itself cannot
        with pytest.raises(ValueError, match="Reverse-mode differentiation does not"):
            grad(ns, outer.wrap(ns, inner.wrap(ns, block_step)))(*outer.inputs(inner))


@pytest.mark.parametrize(
    ("outer", "inner", "ns", "place"), pairs(["between", "inside"])
)
def test_a_capture_inside_has_the_gradients_that_are_taken_inside(
    outer, inner, ns, place
):
    model, x = outer.inputs(inner)
    step = place_capture(outer, inner, ns, place, lambda step, _: with_gradient(step))
    if place == "between" and inner.differentiates and not inner.no_grads:
        out, gradient = step(model, x)
        seen = by_hand(outer, inner, model, x)
        near(out, seen.out, rtol=1e-4)
        if not outer.differentiates:  # else these are of the outer one, too
            near(gradient, seen.grads[0], rtol=1e-4, atol=1e-6)
    else:
        with pytest.raises(tt.CaptureError, match="tapped has no gradient"):
            step(model, x)


def with_gradient(step):
    def call(model, x):
        (out, _), record = tt.observe(step, "tapped", grads=True)(model, x)
        return out, record[0].grad

    return call
