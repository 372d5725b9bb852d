# SPDX-License-Identifier: Apache-2.0
"""Axes of captured values are those that transforms gave them, whatever they look like.

So are the branches and pullbacks that a gradient belongs to.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treetap as tt
from treetap._capture.walk import jax_compat

ROWS = jnp.arange(3.0)


def branching(x, flag):
    def first(x):
        return tt.tap(2 * x, "a") ** 2

    def second(x):
        return tt.tap(3 * x, "b") ** 3

    return jax.lax.cond(flag, first, second, x)


def kinds_of(site):
    return [(axis.kind, axis.size) for axis in site.axes]


@pytest.mark.parametrize("name", ["vmap", "transpose", "jvp", "@x", "vmap(x)"])
def test_a_scope_of_any_name_means_nothing(name):
    def fn(x):
        with jax.named_scope(name):
            return tt.tap(2 * x, "v")

    _, record = tt.observe(fn)(ROWS)
    assert kinds_of(record["v"]) == []
    _, record = tt.observe(jax.vmap(fn))(ROWS)
    assert kinds_of(record["v"]) == [("vmap", 3)]
    grad = jax.grad(lambda x: jax.vmap(fn)(x).sum())
    _, record = tt.observe(grad, grads=True)(ROWS)
    assert kinds_of(record["v"]) == [("vmap", 3)]
    assert record["v"].grad.tolist() == [1, 1, 1]


def test_a_constant_of_the_size_of_the_batch_has_no_axis_of_it():
    constant = jnp.array([1.0, 2.0, 3.0])

    def fn(x):
        return tt.tap({"x": x, "c": constant}, "v")["x"]

    _, record = tt.observe(jax.vmap(fn))(ROWS)
    assert {name: len(axes) for name, axes in record["v"].axes.items()} == {
        "c": 0,
        "x": 1,
    }
    assert record["v"].value["c"].shape == (3,)


def test_axes_are_in_order_from_the_outside():
    def step(carry, x):
        return carry + jax.vmap(lambda y: tt.tap(x * y, "v"))(ROWS).sum(), None

    def fn(x):
        return jax.lax.scan(step, 0.0, x * jnp.ones(4))[0]

    _, record = tt.observe(jax.vmap(fn, axis_name="i"))(jnp.ones(2))
    assert record["v"].value.shape == (2, 4, 3)
    assert kinds_of(record["v"]) == [("vmap", 2), ("scan", 4), ("vmap", 3)]
    assert record["v"].axes[0].name == "i"


WRAPS = {
    "grad": jax.grad,
    "jit of grad": lambda fn: jax.jit(jax.grad(fn)),
    "grad of jit": lambda fn: jax.grad(jax.jit(fn)),
    "grad of checkpoint": lambda fn: jax.grad(jax.checkpoint(fn)),
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_what_is_the_same_in_all_iterations_stays_in_its_loop(wrap):
    class Inner(tt.Module):
        def __call__(self, w):
            return tt.tap(jnp.sin(w), "v")

    class Outer(tt.Module):
        def __init__(self):
            self.inner = Inner()

        def __call__(self, w):
            def step(carry, _):
                return carry * self.inner(w), None

            return jax.lax.scan(step, 1.0, None, length=3)[0]

    model = Outer()
    fn = WRAPS[wrap](lambda w, model: model(w))
    _, record = tt.observe(fn, "**:v", grads=True)(0.5, model)
    (site,) = record
    assert "/".join(map(str, site.path)).endswith("inner")
    assert kinds_of(site) == [("scan", 3)]
    assert site.value == pytest.approx(np.full(3, np.sin(0.5)))
    assert site.grad == pytest.approx(np.full(3, np.sin(0.5) ** 2))


@pytest.mark.parametrize("flag", [True, False])
def test_gradients_in_branches(flag):
    _, record = tt.observe(jax.grad(branching), grads=True)(1.0, flag)
    taken, other = ("a", "b") if flag else ("b", "a")
    assert bool(record[taken].taken)
    assert record[taken].grad == (4.0 if flag else 27.0)
    assert not bool(record[other].taken)
    assert record[other].grad == 0


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_in_branches_of_rows(compiled):
    fn = jax.vmap(jax.grad(branching))
    x, flags = jnp.array([1.0, 2.0, 3.0]), jnp.array([True, False, True])
    _, record = tt.observe(jax.jit(fn) if compiled else fn, grads=True)(x, flags)
    assert record["a"].taken.tolist() == [True, False, True]
    assert record["a"].grad.tolist() == [4, 0, 12]
    assert record["b"].taken.tolist() == [False, True, False]
    assert record["b"].grad.tolist() == [0, 3 * 6**2, 0]


def test_gradients_in_branches_of_a_checkpointed_loop():
    def loss(x):
        def step(x, flag):
            return branching(x, flag), None

        return jax.lax.scan(step, x, jnp.array([True, False]))[0]

    _, record = tt.observe(jax.grad(jax.checkpoint(loss)), grads=True)(1.0)
    assert record["a"].taken.tolist() == [True, False]
    assert record["b"].taken.tolist() == [False, True]
    after = 4.0  # what the first iteration gives
    slope = 3 * (3 * after) ** 2
    assert record["b"].grad.tolist() == [0, slope]
    assert record["a"].grad.tolist() == [slope * 3 * 2 * 2, 0]


def test_an_edit_in_one_branch_leaves_the_other():
    edited = tt.edit(jax.grad(branching), {"a": tt.edits.scale(3.0)})
    assert edited(1.0, False) == jax.grad(branching)(1.0, False)
    assert edited(1.0, True) == 3 * 3 * 2 * 2 * 2


def square_with_pullback(x):
    return jax.vjp(lambda x: 2 * tt.tap(x * x, "v"), x)


def test_a_pullback_that_is_called_twice_is_refused():
    def twice(x):
        _, pull = square_with_pullback(x)
        return pull(1.0), pull(3.0)

    with pytest.raises(tt.CaptureError, match=r"'v' has more than one gradient.*once"):
        tt.observe(twice, grads=True)(2.0)

    def mapped(x):
        _, pull = square_with_pullback(x)
        return jax.vmap(pull)(jnp.array([1.0, 3.0]))

    _, record = tt.observe(mapped, grads=True)(2.0)
    assert record["v"].grad.tolist() == [2, 6]


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit])
def test_a_derivative_that_is_returned_is_refused(wrap):
    def linearized(x):
        return jax.linearize(lambda x: 2 * tt.tap(x * x, "v"), x)

    for fn in (square_with_pullback, linearized):
        with pytest.raises(tt.CaptureError, match="'v' is edited, and a derivative"):
            tt.edit(wrap(fn), {"v": tt.edits.scale(2.0)})(2.0)
    with pytest.raises(tt.CaptureError, match="v has no gradient"):
        tt.observe(wrap(square_with_pullback), grads=True)(2.0)
    _, record = tt.observe(wrap(square_with_pullback))(2.0)
    assert record["v"].value == 4


def test_a_second_gradient_that_nobody_computes_is_refused():
    def loss(x):
        return tt.tap(x**3, "v") ** 2

    twice = jax.grad(lambda x: jax.grad(loss)(x))
    _, record = tt.observe(twice, grads=True)(2.0)
    assert [float(x) for x in record["v"].grad] == [16, 24]
    with pytest.raises(tt.CaptureError, match="v has no gradient"):
        tt.observe(lambda x: jax.jvp(jax.grad(loss), (x,), (1.0,)), grads=True)(2.0)


def test_an_edit_of_one_iteration_of_what_is_the_same_in_all():
    def fn(w):
        def step(carry, _):
            return carry * tt.tap(jnp.sin(w), "v"), None

        return jax.lax.scan(step, 1.0, None, length=3)[0]

    edited = tt.edit(jax.grad(fn), {"v": tt.edits.scale(2.0).at(1)})
    assert edited(0.5) == pytest.approx(2 * jax.grad(fn)(0.5))


def tapped_sine(x):
    return tt.tap(jnp.sin(x), "v")


def with_jvp(fn):
    ruled = jax.custom_jvp(fn)
    ruled.defjvp(lambda primals, tangents: (ruled(*primals), 7.0 * tangents[0]))
    return ruled


def with_vjp(fn):
    ruled = jax.custom_vjp(fn)
    ruled.defvjp(lambda x: (ruled(x), None), lambda _, cotangent: (7.0 * cotangent,))
    return ruled


def with_root(fn):
    solve = lambda f, guess: fn(guess)
    tangent = lambda g, y: y / g(1.0)
    return lambda x: jax.lax.custom_root(lambda y: y - x, x, solve, tangent)


def in_branch(fn):
    return lambda x: jax.lax.cond(x > -9, fn, lambda x: x, x)


def in_loop(fn):
    turn = lambda carry: (carry[0] + 1, fn(carry[1]))
    return lambda x: jax.lax.while_loop(lambda carry: carry[0] < 1, turn, (0, x))[1]


HOLDING = {
    "jit": jax.jit,
    "cond": in_branch,
    "jit of cond": lambda fn: jax.jit(in_branch(fn)),
    "cond of cond": lambda fn: in_branch(in_branch(fn)),
    "while": in_loop,
    "jit of while": lambda fn: jax.jit(in_loop(fn)),
    "custom_vjp": with_vjp,
    "jit of custom_vjp": lambda fn: jax.jit(with_vjp(fn)),
    "cond of custom_vjp": lambda fn: in_branch(with_vjp(fn)),
    "checkpoint": jax.checkpoint,
}
RULED = {
    "custom_jvp": with_jvp,
    "jit of custom_jvp": lambda fn: jax.jit(with_jvp(fn)),
    "custom_root": with_root,
}
# Where JAX keeps a rule, see `hoisting`; those that are objects keep theirs.
KEPT = RULED if jax.__version_info__ >= (0, 12) else {}
if jax_compat.primitives_of_objects():
    KEPT |= {"custom_root": with_root}
HOLDING |= RULED
LEAVING = RULED.keys() - KEPT


def unused_sine(x):
    tt.tap(jnp.sin(x), "v")
    return jnp.sin(x)


# What nothing uses is lost in other ways: where branches, loops, rules are taken apart.
USED = [(tapped_sine, name) for name in HOLDING]
UNUSED = [(unused_sine, name) for name in ("jit of cond", "while", "custom_vjp")]


@pytest.mark.parametrize(("tapped", "name"), USED + UNUSED)
@pytest.mark.parametrize("wrap", WRAPS)
def test_operations_with_taps_stay_in_their_loop_or_are_refused(wrap, name, tapped):
    held = HOLDING[name](tapped)

    def fn(x):
        same = jax.lax.stop_gradient(x)
        step = lambda carry, _: (carry * held(same), None)
        return jax.lax.scan(step, x, None, length=3)[0]

    if name in LEAVING:
        with pytest.raises(tt.CaptureError, match="'v' is the same in all iterations"):
            tt.observe(WRAPS[wrap](fn))(0.5)
    else:
        _, record = tt.observe(WRAPS[wrap](fn))(0.5)
        assert kinds_of(record["v"]) == [("scan", 3)]
        assert record["v"].value == pytest.approx(np.full(3, np.sin(0.5)))


@pytest.mark.parametrize(
    "name", ["custom_vjp", *(RULED if jax.__version_info__ >= (0, 12) else ())]
)
def test_a_rule_is_kept_in_its_loop(name):
    """What stays is still differentiated by its rule, from further out."""
    held = HOLDING[name](tapped_sine)

    def slope(y):
        step = lambda carry, _: (carry * held(y), None)
        return jax.grad(lambda x: jax.lax.scan(step, x, None, length=3)[0])(0.5)

    expected = jax.jit(jax.grad(slope))(0.3)
    found, record = tt.observe(jax.jit(jax.grad(slope)))(0.3)
    assert found == pytest.approx(expected)
    assert kinds_of(record["v"]) == [("scan", 3)]


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_tap_on_shards_stays_in_its_loop(wrap):
    mesh = jax.make_mesh((1,), ("s",), axis_types=(jax.sharding.AxisType.Auto,))
    held = jax.shard_map(tapped_sine, mesh=mesh, in_specs=P("s"), out_specs=P("s"))

    def fn(x):
        same = jax.lax.stop_gradient(x)
        step = lambda carry, _: (carry * held(same), None)
        return jax.lax.scan(step, x, None, length=3)[0].sum()

    _, record = tt.observe(WRAPS[wrap](fn))(jnp.ones(2))
    assert kinds_of(record["v"]) == [("scan", 3), ("shard_map", 1)]


def test_a_function_without_arguments_cannot_stay_in_its_loop():
    ruled = jax.custom_vjp(lambda: tt.tap(jnp.ones(()), "v"))
    ruled.defvjp(lambda: (ruled(), None), lambda _, cotangent: ())

    def fn(x):
        step = lambda carry, _: (carry * ruled(), None)
        return jax.lax.scan(step, x, None, length=3)[0]

    with pytest.raises(tt.CaptureError, match="'v' is the same in all iterations"):
        tt.observe(jax.jit(jax.grad(fn)))(0.5)


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_while_in_a_checkpoint_is_told_once(wrap):
    def fn(x):
        turn = lambda c: tt.tap(c * 2, "w")
        start = jax.lax.stop_gradient(x)
        return x * jax.lax.while_loop(lambda c: c < 10, turn, start)

    grad, record = tt.observe(WRAPS[wrap](jax.checkpoint(fn)), verify=True)(1.0)
    assert grad == 16.0
    assert [site.text for site in record] == ["w"]
    assert record["w"].value == 16.0


def test_a_while_that_is_differentiated_in_a_checkpoint_is_refused():
    def fn(x):
        return jax.lax.while_loop(lambda c: c < 10, lambda c: tt.tap(c * 2, "w"), x)

    def slope(x):
        return jax.jvp(lambda x: x * fn(x), (x,), (1.0,))[1]

    with pytest.raises(tt.CaptureError, match="'w' is in a `while` loop that is diff"):
        tt.observe(jax.grad(jax.checkpoint(lambda x: x * fn(x))))(1.0)
    assert tt.observe(slope)(1.0)[0] == slope(1.0)
