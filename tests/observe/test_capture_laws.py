# SPDX-License-Identifier: Apache-2.0
"""Captures around and inside each transform: the values of the table, and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt
from capture_cases import HEARD, SINGLES, hearing, moving, shape_of
from capture_steps import OURS, PLAIN, block_by_hand, block_step, grad, grad_by_hand
from modes import ALL_MODES

SITES = {"sow": "sown", "perturb": "moved", "output": "seen", "tap": "tapped"}

near = np.testing.assert_allclose


def listed(keep=lambda case: True, every=1):
    """Cases under JAX's transforms and under ours; `make test` runs one in so many."""
    cells = [
        (name, case, ns)
        for name, case in SINGLES.items()
        for ns in (PLAIN, OURS)
        if keep(case) and not (ns is OURS and case.no_ours)
    ]
    return [
        pytest.param(
            case,
            ns,
            id=f"{name}-{ns.name}",
            marks=pytest.mark.long if n % every else (),
        )
        for n, (name, case, ns) in enumerate(cells)
    ]


def cells(keep=lambda case: True, every=1):
    """Every case under JAX's transforms and under ours, where there is one."""
    return pytest.mark.parametrize(("case", "ns"), listed(keep, every))


@pytest.fixture(autouse=True)
def quiet_outside():
    """Outside a capture the blocks of the table store nothing."""
    tt.set_sow_outside_capture("ignore")
    yield
    tt.set_sow_outside_capture("store")


@functools.cache
def by_hand(case, moved=0.0, with_grads=False):
    """What the program written by hand gives, with a perturbation of one number."""
    model, x = case.inputs()
    hand = case.hand(block_by_hand)
    if with_grads and not case.differentiates:
        hand = grad_by_hand(hand)
    return hand(model.w[...], x, jnp.full(shape_of(case), moved))


def expected(case, how):
    """The result and the value: a perturbation that nobody gave is zero."""
    seen = by_hand(case)
    return seen.out, jnp.zeros_like(seen.value) if how == "perturb" else seen.value


@pytest.mark.parametrize(
    ("case", "ns", "how"),
    [
        pytest.param(
            *cell.values,
            how,
            id=f"{cell.id}-{how}",
            marks=() if n % len(HEARD) == turn else pytest.mark.long,
        )
        for n, cell in enumerate(listed())
        for turn, how in enumerate(HEARD)
    ],
)
def test_a_capture_around_a_transform_gives_its_values(case, ns, how):
    model, x = case.inputs()
    (out, _), value = HEARD[how](case.wrap(ns, block_step))(model, x)
    wanted_out, wanted = expected(case, how)
    near(out, wanted_out, rtol=1e-5)
    assert value.shape == wanted.shape
    near(value, wanted, rtol=1e-5)


@cells()
def test_a_capture_inside_a_transform_gives_its_values(case, ns):
    model, x = case.inputs()
    out, values = case.wrap(ns, hearing(block_step))(model, x)
    for how, value in values.items():
        wanted_out, wanted = expected(case, how)
        near(out, wanted_out, rtol=1e-5)
        assert value.shape == wanted.shape
        near(value, wanted, rtol=1e-5)


@pytest.mark.parametrize("place", ["outside", "inside"])
@cells()
def test_a_given_perturbation_is_added_where_the_value_is(case, ns, place):
    model, x = case.inputs()
    if place == "outside":
        out, _ = moving(case.wrap(ns, block_step), shape_of(case))(model, x)
    else:
        out, _ = case.wrap(ns, moving(block_step, (2,)))(model, x)
    near(out, by_hand(case, moved=1.0).out, rtol=1e-5)


@cells()
def test_a_site_says_if_it_was_reached_and_how_often(case, ns):
    model, x = case.inputs()
    _, record = tt.observe(case.wrap(ns, block_step))(model, x)
    seen = by_hand(case)
    for name in SITES.values():
        site = record[name]
        for found, wanted in [(site.taken, seen.taken), (site.count, seen.count)]:
            assert (found is None) == (wanted is None)
            assert found is None or int(found) == int(wanted)
    assert [site.index for site in record] == [0] * 5  # nothing is reported twice


def has_grads(case):
    return not case.no_reverse and not case.no_grads


@cells(has_grads)
def test_one_pass_gives_the_gradient_of_every_value(case, ns):
    model, x = case.inputs()
    step = case.wrap(ns, block_step)
    if not case.differentiates:
        step = grad(ns, step)
    names = [SITES[how] for how in ("perturb", "output", "tap")]
    (out, _), record = tt.observe(step, names, grads=True)(model, x)
    seen = by_hand(case, with_grads=True)
    near(out, seen.out, rtol=1e-5)
    for name in names:
        near(record[name].value, seen.value, rtol=1e-5)
        assert record[name].grad.shape == seen.value.shape
        near(record[name].grad, seen.grads[0], rtol=1e-5)


@cells(has_grads, every=5)
def test_a_sown_value_has_no_gradient(case, ns):
    model, x = case.inputs()
    step = grad(ns, case.wrap(ns, block_step))
    with pytest.raises(tt.CaptureError, match=r"sown is sown, and .* does not flow on"):
        tt.observe(step, "sown", grads=True)(model, x)


@cells(lambda case: case.no_grads)
@pytest.mark.parametrize("how", ["perturb", "output", "tap"])
def test_a_value_inside_a_custom_rule_has_no_gradient(case, ns, how):
    model, x = case.inputs()
    step = grad(ns, case.wrap(ns, block_step))
    with pytest.raises(tt.CaptureError, match=f"{SITES[how]} has no gradient"):
        tt.observe(step, SITES[how], grads=True)(model, x)


@cells(lambda case: case.no_grads)
def test_a_custom_rule_is_kept_under_a_capture(case, ns):
    model, x = case.inputs()
    (out, _), record = tt.observe(grad(ns, case.wrap(ns, block_step)))(model, x)
    near(out, 10 * jnp.ones(2))
    near(record["tapped"].value, model.w * x)


@cells(lambda case: case.no_reverse)
def test_jax_itself_does_not_differentiate_a_while_loop(case, ns):
    model, x = case.inputs()
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        grad(ns, case.wrap(ns, block_step))(model, x)


@pytest.mark.parametrize("how", HEARD)
@cells(lambda case: not case.no_reverse)
def test_a_capture_inside_a_differentiation_has_no_gradients(case, ns, how):
    model, x = case.inputs()

    def step(model, x):
        out, record = tt.observe(block_step, SITES[how], grads=True)(model, x)
        return out[0], record[SITES[how]].grad

    with pytest.raises(tt.CaptureError, match=SITES[how]):
        grad(ns, case.wrap(ns, step))(model, x)


# Perturbations where they are easily lost


class Moved(tt.Module):
    """A function with a rule of its own, of a value that is perturbed."""

    def __init__(self, wrap):
        self.wrap = wrap

    def __call__(self, x):
        return self.wrap(self)(x)


def with_jvp(model):
    fn = jax.custom_jvp(lambda x: model.perturb("p", x * 2))
    fn.defjvp(lambda x, dx: (model.perturb("p", x[0] * 2), dx[0] * 7))
    return fn


def with_vjp(model):
    fn = jax.custom_vjp(lambda x: model.perturb("p", x * 2))
    fn.defvjp(lambda x: (model.perturb("p", x * 2), None), lambda kept, g: (g * 7,))
    return fn


def with_quiet_vjp(model):
    fn = jax.custom_vjp(lambda x: model.perturb("p", x * 2))
    fn.defvjp(lambda x: (x * 2, None), lambda kept, g: (g * 7,))
    return fn


@pytest.mark.parametrize("wrap", [with_jvp, with_vjp])
def test_a_perturbation_reaches_a_function_with_a_rule_of_its_own(wrap):
    given = tt.State({"p": tt.Perturbation(jnp.array(10.0))})

    def call(x):
        return tt.capture(Moved(wrap), init=given)(x)

    value, slope = jax.value_and_grad(call)(1.0)
    assert float(call(1.0)) == 12.0
    assert (float(value), float(slope)) == (12.0, 7.0)


def test_a_perturbation_that_a_rule_does_not_have_is_refused():
    given = tt.State({"p": tt.Perturbation(jnp.array(10.0))})

    def call(x):
        return tt.capture(Moved(with_quiet_vjp), init=given)(x)

    with pytest.raises(tt.CaptureError, match="p"):
        jax.value_and_grad(call)(1.0)


@pytest.mark.parametrize("kind", [jnp.bfloat16, jnp.int32])
def test_a_perturbation_of_another_type_is_added_or_refused(kind):
    class Model(tt.Module):
        def __call__(self, x):
            return self.perturb("p", x) * 2

    call = jax.jit(lambda model, x: model(x))
    for given in (jnp.ones(2), jnp.ones(2, kind)):
        init = tt.State({"p": tt.Perturbation(given)})
        try:
            out = tt.capture(call, init=init)(Model(), jnp.ones(2))
        except tt.CaptureError:
            continue
        near(out, [4.0, 4.0])


class Sower(tt.Module):
    def __init__(self):
        self.w = tt.Param(jnp.array(2.0))

    def __call__(self, x):
        self.sow(tt.Intermediate, "v", x)
        return x * self.w


def lists(tree):
    """A tree of arrays, or a State of them, as plain numbers and lists."""
    if isinstance(tree, tt.State):
        tree = tt.to_pure_dict(tree)
    return jax.tree.map(lambda x: x.tolist(), tree)


@ALL_MODES
def test_a_scan_with_a_broadcast_module_stacks_values(mode):
    def call(model, xs):
        def step(model, carry, x):
            return carry + model(x), x

        axes = (None, tt.Carry, 0)
        scanned = tt.scan(step, in_axes=axes, out_axes=(tt.Carry, 0), **mode)
        return scanned(model, jnp.array(0.0), xs)[0]

    out, state = tt.capture(call, tt.Intermediate)(Sower(), jnp.arange(3.0))
    assert float(out) == 6.0
    assert lists(state) == {"v": ([0.0, 1.0, 2.0],)}


def fori(mode):
    def call(model, x):
        def body(i, carry):
            model, x = carry
            return model, model(x)

        return tt.fori_loop(0, 3, body, (model, x), **mode)[1]

    return call


@ALL_MODES
def test_a_fori_loop_with_known_bounds_stacks_values(mode):
    out, state = tt.capture(fori(mode), tt.Intermediate)(Sower(), jnp.array(1.0))
    assert float(out) == 8.0
    assert lists(state) == {"v": ([1.0, 2.0, 4.0],)}


@ALL_MODES
def test_a_while_loop_gives_the_last_value(mode):
    def call(model, x):
        def body(carry):
            model, x = carry
            return model, model(x)

        return tt.while_loop(lambda carry: carry[1] < 10, body, (model, x), **mode)[1]

    out, state = tt.capture(call, tt.Intermediate)(Sower(), jnp.array(1.0))
    assert float(out) == 16.0
    assert lists(state) == {"v": (8.0,)}


@ALL_MODES
@pytest.mark.parametrize("taken", [True, False])
def test_a_value_of_one_branch_is_there_or_zeros(mode, taken):
    def call(model, x, flag):
        other = lambda model, x: x
        return tt.cond(flag, lambda model, x: model(x), other, model, x, **mode)

    _, state = tt.capture(call, tt.Intermediate)(Sower(), jnp.array(3.0), taken)
    assert lists(state) == {"v": (3.0 if taken else 0.0,)}


@ALL_MODES
def test_a_broadcast_module_under_vmap_gives_batches(mode):
    def call(model, xs):
        return tt.vmap(lambda model, x: model(x), in_axes=(None, 0), **mode)(model, xs)

    out, state = tt.capture(call, tt.Intermediate)(Sower(), jnp.arange(3.0))
    assert out.tolist() == [0.0, 2.0, 4.0]
    assert lists(state) == {"v": ([0.0, 1.0, 2.0],)}
