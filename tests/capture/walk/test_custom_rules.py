# SPDX-License-Identifier: Apache-2.0
"""Operations that are objects with rules of their own, as JAX will have them.

Where JAX has no such setting yet, the same holds for the operations that it has.
"""

import jax
import jax.numpy as jnp
import pytest

import treetap as tt


@pytest.fixture(params=[False, True])
def is_new(request):
    names = [x for x in ("jax_custom_jvp3", "jax_remat3") if hasattr(jax.config, x)]
    if jax.__version_info__ < (0, 12):  # there they are trials: a rule runs twice
        names = []
    before = {name: getattr(jax.config, name) for name in names}
    for name in names:
        jax.config.update(name, request.param)
    yield request.param and "jax_remat3" in names
    for name, value in before.items():
        jax.config.update(name, value)


def with_rule():
    @jax.custom_jvp
    def fn(x):
        return tt.tap(jnp.sin(x), "h")

    @fn.defjvp
    def _(primals, tangents):
        return tt.tap(jnp.sin(primals[0]), "h"), 7.0 * tangents[0]

    return fn


@pytest.mark.parametrize("around", [lambda fn: fn, jax.jit, jax.checkpoint, jax.vmap])
def test_a_rule_is_kept_under_a_capture_that_is_differentiated(is_new, around):
    fn = around(with_rule())
    x = jnp.ones(2) if around is jax.vmap else 1.0
    slope = jax.grad(lambda x: jnp.sum(tt.observe(fn)(x)[0]))(x)
    assert jnp.all(slope == 7.0)


def test_a_tap_under_a_rule_is_heard_once(is_new):
    fn = with_rule()
    for call in (fn, jax.jit(fn), jax.grad(fn), jax.jit(jax.grad(fn))):
        _, record = tt.observe(call)(1.0)
        assert [site.text for site in record] == ["h"]
        assert float(record["h"].value) == float(jnp.sin(1.0))


@pytest.mark.parametrize("form", [lambda fn: fn, jax.jit])
def test_an_edit_under_a_rule_goes_in(is_new, form):
    edited = tt.edit(form(with_rule()), {"h": lambda value: value + 1})
    assert float(edited(0.0)) == 1.0


WEIGHTS = jnp.arange(12.0).reshape(3, 4)


def with_forward_rule():
    fn = jax.custom_jvp(lambda x: tt.tap(x @ WEIGHTS, "h"))
    fn.defjvp(lambda at, along: (at[0] @ WEIGHTS[::-1], along[0] @ WEIGHTS * 7))
    return fn


def with_constants_kept():
    fn = jax.custom_vjp(lambda x: tt.tap(x @ WEIGHTS, "h"))
    fn.defvjp(lambda x: (fn(x), WEIGHTS), lambda kept, g: (g @ kept.T * 7,))
    return fn


def with_operands_kept():
    fn = jax.custom_vjp(lambda x: tt.tap(x @ WEIGHTS, "h"))
    fn.defvjp(lambda x: (x @ WEIGHTS[::-1], x), lambda x, g: (x * jnp.sum(g),))
    return fn


RULED = [with_forward_rule, with_constants_kept, with_operands_kept]


@pytest.mark.parametrize("around", [lambda fn: fn, jax.jit])
@pytest.mark.parametrize("make", RULED, ids=lambda make: make.__name__)
def test_a_rule_may_use_arrays_from_outside(is_new, make, around):
    fn, x = around(make()), jnp.ones(3)
    slope = lambda fn: jax.grad(lambda x: jnp.sum(fn(x)))(x)
    for tapped in (fn, tt.tap_scopes(fn)):
        observed = slope(lambda x, tapped=tapped: tt.observe(tapped)(x)[0])
        assert jnp.array_equal(observed, slope(fn))


def checkpointed(x):
    return jax.checkpoint(lambda x: jnp.sin(tt.tap(jnp.sin(x), "h") * 2))(x)


@pytest.mark.parametrize("form", [lambda fn: fn, jax.jit])
def test_a_checkpoint_is_told_once_or_refused(is_new, form):
    _, record = tt.observe(form(checkpointed))(1.0)
    assert [site.text for site in record] == ["h"]
    slope = jax.grad(lambda x: tt.observe(form(checkpointed))(x)[0])(1.0)
    assert slope == pytest.approx(float(jax.grad(checkpointed)(1.0)))
    call = tt.observe(form(jax.grad(checkpointed)), grads=True)
    if is_new:
        with pytest.raises(tt.CaptureError, match=r"jax_remat3.*or turn the setting"):
            call(1.0)
    else:
        assert [site.text for site in call(1.0)[1]] == ["h"]
