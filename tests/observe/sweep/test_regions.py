# SPDX-License-Identifier: Apache-2.0
"""Regions: a narrowed program gives the same, and computes only what is read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from treetap._capture.walk import jax_compat
from treetap._observe.sweep.flat import flattened
from treetap._observe.sweep.points import point
from treetap._observe.sweep.regions import narrowed
from treetap._observe.sweep.rows import run_once

X = jnp.arange(24.0).reshape(6, 4) / 7 - 1
A, B = jnp.arange(24.0).reshape(2, 3, 4) / 9, jnp.arange(40.0).reshape(2, 4, 5) / 8
TWO = jnp.int32(2)


def two_rows(y):
    return y[0] + y[2]


def whole_and_part(y, x):
    return y[0], y, x, 1.0


def types_of(args):
    return [jax.typeof(jnp.asarray(x)) for x in args]


def results(flat, args):
    env = run_once(flat, [jnp.asarray(x) for x in args])
    return [jnp.asarray(jax_compat.read(env, x)) for x in flat.results]


def computed(flat, name):
    """The shapes of what the operations of one name compute."""
    return [
        eqn.outvars[0].aval.shape for eqn in flat.eqns if eqn.primitive.name == name
    ]


def cost(flat):
    """How many numbers the program computes, beside those that it takes apart."""
    costly = [eqn for eqn in flat.eqns if "slice" not in eqn.primitive.name]
    return sum(np.prod(x.aval.shape) for eqn in costly for x in eqn.outvars)


def both(fn, args):
    """The program as it is written out, and what is left of it; with equal results."""
    as_list = lambda *xs: jax.tree.leaves(fn(*xs))
    whole = flattened(as_list, types_of(args))
    less = narrowed(whole)
    expected = map(jnp.asarray, as_list(*args))
    for found, wanted in zip(results(less, args), expected, strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    return whole, less


def of_parts(x):
    return jnp.concatenate([jnp.sin(x), jnp.cos(x)])


def mean_of_row(x):
    y = jnp.sin(x)
    return (y - y.mean(-1, keepdims=True))[-1]


def chosen(x):
    causal = jnp.tril(jnp.ones((6, 6), bool))
    return jnp.where(causal, jnp.sin(x) @ jnp.cos(x).T, -1.0)[-1]


# The function, its arguments, and what is computed by an operation of a name.
CASES = {
    "a row": (lambda x: jnp.sin(x)[-1], [X], {"sin": [(1, 4)]}),
    "a column from the end": (lambda x: jnp.sin(x)[:, -2], [X], {"sin": [(6, 1)]}),
    "a range from the end": (lambda x: jnp.sin(x)[-3:-1], [X], {"sin": [(2, 4)]}),
    "strides": (
        lambda x: lax.slice(jnp.sin(x), (1, 0), (6, 4), (2, 3)),
        [X],
        {"sin": [(5, 4)]},
    ),
    "a row of strides": (lambda x: jnp.sin(x)[::2][1], [X], {"sin": [(1, 4)]}),
    "some of strides": (lambda x: jnp.sin(x)[::2][1:], [X], {"sin": [(3, 4)]}),
    "two rows": (
        lambda x: two_rows(jnp.sin(x)),
        [X],
        {"sin": [(3, 4)]},
    ),
    "a traced index": (
        lambda x, n: lax.dynamic_index_in_dim(jnp.sin(x), n)[:, 1],
        [X, TWO],
        {"sin": [(6, 1)]},
    ),
    "one known and one traced": (
        lambda x, n: lax.dynamic_slice(jnp.sin(x), (n, 2), (2, 2))[1],
        [X, TWO],
        {"sin": [(6, 2)]},
    ),
    "one known that is too large": (
        lambda x, n: lax.dynamic_slice(jnp.sin(x), (9, n), (2, 1)),
        [X, TWO],
        {"sin": [(2, 4)]},
    ),
    "a computed index": (
        lambda x: lax.dynamic_slice(jnp.sin(x), (jnp.arange(4)[3], 0), (1, 2)),
        [X],
        {"sin": [(1, 2)]},
    ),
    "parts": (lambda x: jnp.split(jnp.sin(x), 2, 1)[1][-1], [X], {"sin": [(1, 4)]}),
    "all parts": (
        lambda x: [one[:2] for one in jnp.split(jnp.sin(x), 2, 1)],
        [X],
        {"sin": [(2, 4)]},
    ),
    "an axis that is split": (
        lambda x: jnp.sin(x).reshape(2, 3, 4)[1],
        [X],
        {"sin": [(3, 4)]},
    ),
    "inside of an axis that is split": (
        lambda x: jnp.sin(x).reshape(2, 3, 4)[1, 2],
        [X],
        {"sin": [(3, 4)]},
    ),
    "axes that are merged": (
        lambda a: jnp.sin(a).reshape(6, 4)[4, 1:2],
        [A],
        {"sin": [(2, 3, 1)]},
    ),
    "axes of one": (
        lambda x: jnp.sin(x).reshape(1, 6, 1, 4)[0, 3],
        [X],
        {"sin": [(1, 4)]},
    ),
    "axes that are merged, one of one": (
        lambda a: jnp.sin(a[:, None]).reshape(6, 1, 4)[1:, 0, 2],
        [A],
        {"sin": [(2, 1, 3, 1)]},
    ),
    "axes that are mixed": (
        lambda x: jnp.sin(x).reshape(4, 6)[1],
        [X],
        {"sin": [(6, 4)]},
    ),
    "a running sum along": (lambda x: jnp.cumsum(jnp.sin(x), 0)[2], [X], {}),
    "a running sum across": (
        lambda x: jnp.cumsum(jnp.sin(x), 0)[1:3, -1],
        [X],
        {"sin": [(6, 1)], "cumsum": [(6, 1)]},
    ),
    "the largest": (
        lambda x: jnp.argmax(jnp.sin(x), 1)[2:4],
        [X],
        {"sin": [(2, 4)], "argmax": [(2,)]},
    ),
    "a sum": (
        lambda x: jnp.sin(x).sum(0)[1],
        [X],
        {"sin": [(6, 1)], "reduce_sum": [(1,)]},
    ),
    "the second of two": (
        lambda x: of_parts(x)[-1],
        [X],
        {"sin": [], "cos": [(1, 4)]},
    ),
    "across two": (
        lambda x: of_parts(x)[4:8, 1:],
        [X],
        {"sin": [(2, 3)], "cos": [(2, 3)]},
    ),
    "a product": (
        lambda x: (jnp.sin(x) @ jnp.cos(x).T)[-1],
        [X],
        {"sin": [(1, 4)], "cos": [(6, 4)], "dot_general": [(1, 6)]},
    ),
    "a product of batches": (
        lambda a, b: jnp.einsum("nij,njk->nik", jnp.sin(a), jnp.cos(b))[1, -1, :2],
        [A, B],
        {"sin": [(1, 1, 4)], "cos": [(1, 4, 2)], "dot_general": [(1, 1, 2)]},
    ),
    "numbers of places": (
        lambda x: (jnp.sin(x) + lax.broadcasted_iota(jnp.float32, (6, 4), 0))[4:],
        [X],
        {"sin": [(2, 4)], "iota": [(2, 4)]},
    ),
    "turned": (
        lambda a: jnp.sin(a).transpose(2, 0, 1)[3, :, 1],
        [A],
        {"sin": [(2, 1, 1)]},
    ),
    "spread": (
        lambda x: jnp.broadcast_to(jnp.sin(x)[None, :, :1], (3, 6, 4))[1, 2],
        [X],
        {"sin": [(1, 1)]},
    ),
    "a mean": (mean_of_row, [X], {"sin": [(1, 4)]}),
    "chosen": (chosen, [X], {"sin": [(1, 4)], "dot_general": [(1, 6)]}),
    "limited": (lambda x: lax.clamp(0.0, jnp.sin(x), 0.5)[0], [X], {"sin": [(1, 4)]}),
    "other types": (
        lambda x: (jnp.sin(x) > 0).astype(jnp.int32)[3],
        [X],
        {"sin": [(1, 4)]},
    ),
    "no rule": (lambda x: jnp.sort(jnp.sin(x), 0)[-1], [X], {"sin": [(6, 4)]}),
    "a point": (
        lambda x: point(jnp.sin(x), 0)[2],
        [X],
        {"sin": [(1, 4)], "patch_point": [(1, 4)]},
    ),
}
# Where all is read after all, as the operation does not say more.
ALL_READ = {"axes that are mixed", "no rule", "a running sum along", "strides"}


@pytest.mark.parametrize("name", CASES)
def test_only_what_is_read_is_computed(name):
    fn, args, shapes = CASES[name]
    whole, less = both(fn, args)
    for operation, wanted in shapes.items():
        assert computed(whole, operation)
        assert computed(less, operation) == wanted
    if name not in ALL_READ:
        assert cost(less) < cost(whole)


def test_a_point_knows_its_region():
    _, less = both(lambda x: point(jnp.sin(x), 3)[2:5, 1], [X])
    (eqn,) = (eqn for eqn in less.eqns if eqn.primitive.name == "patch_point")
    assert (eqn.params["site"], eqn.params["region"]) == (3, ((2, 5), (1, 2)))


def test_what_is_a_result_is_computed_whole():
    whole, less = both(lambda x: whole_and_part(jnp.sin(x), x), [X])
    assert computed(whole, "sin") == computed(less, "sin") == [(6, 4)]


def test_operations_of_several_results_are_computed_whole():
    _, less = both(lambda x: lax.top_k(jnp.sin(x), 2)[1][3], [X])
    assert computed(less, "sin") == [(6, 4)]


def test_values_of_no_size():
    both(lambda x: jnp.sin(x)[:0], [X])
    both(lambda x: jnp.concatenate([jnp.sin(x[:0]), jnp.cos(x)])[-1], [X])
    both(lambda x: jnp.sin(x[:0]).reshape(0, 2, 2).sum(0), [X])


def test_random_keys_are_no_indices():
    def fn(x, seed):
        return x[0] + jax.random.normal(jax.random.wrap_key_data(seed), (6, 4))[1]

    both(fn, [X, jnp.array([1, 2], jnp.uint32)])


def test_a_long_chain():
    def fn(x, n):
        q, k, v = jnp.split(jnp.concatenate([x, x * 2, x**2], -1), 3, -1)
        heads = (q * jnp.cumsum(k, 0)).reshape(6, 2, 2).transpose(1, 0, 2)
        scores = jnp.einsum("hid,hjd->hij", heads, jnp.tanh(heads))
        mixed = jnp.einsum("hij,hjd->ihd", jax.nn.softmax(scores), heads)
        return mixed.reshape(6, 4)[-1] + lax.dynamic_index_in_dim(v, n, 0, False)

    whole, less = both(fn, [X, TWO])
    assert cost(less) < cost(whole)
    assert max(map(np.prod, computed(less, "exp"))) == 2 * 6
