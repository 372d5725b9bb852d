# SPDX-License-Identifier: Apache-2.0
"""Laws of dtypes that every layer keeps: narrow, wide, and strict promotion.

What a program's types are is known without running it, so that is checked for all rows
of the `zoo`; numbers are compared for a few, and for all of them in the long runs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from zoo import FEW, ZOO, assert_close, hasty_compiling, rows, streams, values_of

import treetap as tt
from modes import NAMED

NARROW = jnp.bfloat16


@pytest.fixture(autouse=True, scope="module")
def hasty():
    with hasty_compiling():
        yield


def dtypes_of(tree, kinds=...):
    """The dtypes of the floating Variables of an object."""
    found = tt.to_flat_state(tt.state(tree, kinds))
    inexact = [v.dtype for _, v in found if jnp.issubdtype(v.dtype, jnp.inexact)]
    return {jnp.dtype(dtype) for dtype in inexact}


def result_dtypes(tree):
    return {jnp.dtype(leaf.dtype) for leaf in jax.tree.leaves(tree)}


def narrow_inputs(entry):
    """Inputs for a call in bfloat16: a layer without a dtype keeps theirs."""
    return entry.arrays(np.float32 if entry.has_dtype else NARROW)


def called(layer, entry, *inputs):
    """What the layer is after a call."""
    entry.call(layer, *inputs)
    return tt.clone(layer)


def options(entry, **dtypes):
    return dtypes if entry.has_dtype else {}


# bfloat16.


@rows()
def test_a_layer_computes_in_the_dtype_it_is_given(entry):
    layer = entry.make(**options(entry, dtype=NARROW))
    assert dtypes_of(layer, tt.Param) <= {jnp.dtype(jnp.float32)}
    result = tt.eval_shape(entry.call, layer, *narrow_inputs(entry))
    wanted = jnp.float32 if entry.is_widened else NARROW
    assert result_dtypes(result) == {jnp.dtype(wanted)}


@rows()
def test_parameters_have_the_dtype_they_are_given(entry):
    layer = entry.abstract(**options(entry, param_dtype=NARROW))
    assert dtypes_of(layer, tt.Param) <= {jnp.dtype(NARROW)}
    result = tt.eval_shape(entry.call, layer, *entry.arrays(NARROW))
    assert result_dtypes(result) == {jnp.dtype(NARROW)}


@rows(quick=["linear", "rnn_gru", "rnn_lstm"])
def test_a_layer_is_made_with_narrow_parameters(entry):
    layer = entry.factory(streams(), **options(entry, param_dtype=NARROW))
    assert dtypes_of(layer, tt.Param) <= {jnp.dtype(NARROW)}
    found = tt.to_flat_state(tt.state(layer, tt.Param))
    assert all(jnp.isfinite(param[...]).all() for _, param in found)


@rows(quick=FEW)
def test_bfloat16_is_close_to_float32(entry):
    wide, narrow = entry.make(), entry.make(**options(entry, dtype=NARROW))
    assert_close(values_of(narrow), values_of(wide), 0, 0)
    inputs = narrow_inputs(entry)
    widened = [x.astype(jnp.float32) if x.dtype == NARROW else x for x in inputs]
    wanted = tt.jit(entry.call)(wide, *widened)
    found = tt.jit(entry.call)(narrow, *inputs)
    assert_close(found, wanted, rtol=0.05, atol=0.05)
    assert_close(values_of(narrow), values_of(wide), rtol=0.05, atol=0.05)


@rows(quick=FEW)
def test_gradients_of_float32_parameters_are_float32(entry):
    layer = entry.make(**options(entry, dtype=NARROW))
    grads = tt.eval_shape(tt.grad(entry.loss), layer, *narrow_inputs(entry))
    assert dtypes_of(grads, tt.Param) == dtypes_of(layer, tt.Param)


# float64.


@rows()
def test_everything_can_be_float64(entry):
    with jax.enable_x64(True):
        layer = entry.make(**options(entry, param_dtype=jnp.float64))
        assert dtypes_of(layer) <= {jnp.dtype(jnp.float64)}
        result = tt.eval_shape(entry.call, layer, *entry.arrays(np.float64))
        assert result_dtypes(result) == {jnp.dtype(jnp.float64)}


@rows()
def test_float32_stays_float32_where_float64_is_allowed(entry):
    with jax.enable_x64(True):
        layer, inputs = entry.make(), entry.arrays()
        result = tt.eval_shape(entry.call, layer, *inputs)
        assert result_dtypes(result) == {jnp.dtype(jnp.float32)}
        after = tt.eval_shape(lambda layer: called(layer, entry, *inputs), layer)
        assert dtypes_of(after) <= {jnp.dtype(jnp.float32)}


# A wider draw gives other keys' worth of noise.
QUIET = [name for name, entry in ZOO.items() if not entry.is_noisy]


@rows(QUIET, quick=FEW)
def test_float64_is_close_to_float32(entry):
    layer = entry.make()
    wanted = tt.jit(entry.call)(layer, *entry.arrays())
    with jax.enable_x64(True):
        wide = entry.make(**options(entry, param_dtype=jnp.float64))
        found = tt.jit(entry.call)(wide, *entry.arrays(np.float64))
    assert_close(found, wanted)
    assert_close(values_of(wide), values_of(layer))


# Derivatives.


def pure_of(entry, layer):
    """The layer's function of parameters and floating inputs, which writes nothing."""
    graphdef, params, rest = tt.split(layer, tt.Param, ...)
    inputs = entry.arrays(np.float64)
    is_float = [jnp.issubdtype(x.dtype, jnp.inexact) for x in inputs]

    def pure(params, floats):
        floats = iter(floats)
        given = [next(floats) if f else x for f, x in zip(is_float, inputs)]
        model = tt.merge(graphdef, params, rest, copy=True)
        return entry.call(model, *given)

    floats = [x for f, x in zip(is_float, inputs) if f]
    return jax.jit(pure), (tt.as_pure(params), floats)


SHARP = [name for name in ZOO if name != "attention_fused"]


@rows(SHARP, quick=FEW)
def test_derivatives_are_those_of_finite_differences(entry):
    with jax.enable_x64(True):
        layer = entry.make(**options(entry, param_dtype=jnp.float64))
        if isinstance(layer, tt.SpectralNorm):
            for _ in range(60):  # singular vectors count as found
                layer(*entry.arrays(np.float64), update_stats=True)
        function, point = pure_of(entry, layer)
        check_grads(function, point, order=1, atol=1e-5, rtol=1e-5, eps=1e-6)


def test_derivatives_of_fused_attention_are_those_of_the_plain_one():
    # JAX computes it in float32, which is too coarse for finite differences.
    found = []
    for name in ("attention_fused", "attention_causal"):
        layer, inputs = ZOO[name].make(), ZOO[name].arrays()
        grads = tt.jit(tt.grad(ZOO[name].loss, argnums=(0, 1)))(layer, *inputs)
        found.append((values_of(grads[0]), grads[1]))
    assert_close(*found, rtol=1e-4)


# Strict promotion.


@rows(modes=NAMED)
def test_strict_promotion_is_no_obstacle(entry, mode):
    layer, inputs = entry.make(), entry.arrays()
    derived = tt.value_and_grad(entry.loss, **mode)
    with jax.numpy_dtype_promotion("strict"):
        result = tt.eval_shape(entry.call, layer, *inputs)
        tt.eval_shape(derived, layer, *inputs)
    assert result_dtypes(result) == {jnp.dtype(jnp.float32)}


@rows(quick=FEW)
def test_strict_promotion_gives_the_same_numbers(entry):
    wanted = entry.call(entry.make(), *entry.arrays())
    with jax.numpy_dtype_promotion("strict"):
        eager = entry.call(entry.make(), *entry.arrays())
        compiled = tt.jit(entry.call)(entry.make(), *entry.arrays())
    assert_close(eager, wanted, 1e-5, 1e-6)
    assert_close(compiled, wanted)
