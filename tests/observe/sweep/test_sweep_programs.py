# SPDX-License-Identifier: Apache-2.0
"""Sweeps give what the loop over single patches gives, whatever the program is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt

D, T = 8, 5
KEYS = jax.random.split(jax.random.key(0), 8)
W = [jax.random.normal(key, (D, D)) / 3 for key in KEYS]
CLEAN = jax.random.normal(KEYS[0], (T, D))
WORSE = jax.random.normal(KEYS[1], (T, D))


def attention(x, w):
    scores = (x @ w[0]) @ (x @ w[1]).T
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e9)
    return jax.nn.softmax(scores) @ (x @ w[2])


def block(x, name):
    x = x + tt.tap(attention(x, W), f"{name}/attn")
    mean = x.mean(-1, keepdims=True)
    y = (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
    return tt.tap(x + jax.nn.gelu(y @ W[3]) @ W[4], name)


def in_a_row(x):
    for n in range(2):
        x = block(x, f"b{n}")
    return x @ W[5]


def in_a_scan(x):
    def step(x, w):
        x = tt.tap(x + jnp.tanh(x @ w), "h")
        return x, tt.tap(x.sum(0), "s")

    x, ys = jax.lax.scan(step, x, jnp.stack(W[:3]))
    return x * ys.sum(0)[None]


def backwards(x):
    def step(x, w):
        x = tt.tap(jnp.sin(x @ w), "h")
        return x, x[0]

    x, ys = jax.lax.scan(step, x, jnp.stack(W[:3]), reverse=True)
    return x + ys[1][None]


def in_scans(x):
    def outer(x, ws):
        def inner(x, w):
            return tt.tap(jnp.tanh(x @ w), "i"), None

        x, _ = jax.lax.scan(inner, x, ws)
        return tt.tap(x * 2, "o"), None

    return jax.lax.scan(outer, x, jnp.stack(W[:4]).reshape(2, 2, D, D))[0]


def mapped(x):
    def row(v):
        return tt.tap(jnp.sin(v) * v, "r").sum()

    return jax.vmap(row)(tt.tap(x @ W[0], "x"))


def scan_in_vmap(x):
    def row(v):
        return jax.lax.scan(lambda c, w: (tt.tap(c * w, "c"), None), v, jnp.arange(3.0))

    return jax.vmap(row)(x + 1)[0]


def vmap_in_scan(x):
    def step(x, w):
        return jax.vmap(lambda v: tt.tap(jnp.tanh(v @ w), "v"))(x), None

    return jax.lax.scan(step, x, jnp.stack(W[:2]))[0]


def with_a_branch(x):
    x = tt.tap(jnp.sin(x), "before")
    x = jax.lax.cond(x.sum() > 0, lambda x: tt.tap(x * 2, "yes"), jnp.cos, x)
    return tt.tap(x @ W[0], "after")


def with_a_while(x):
    def step(state):
        n, x = state
        return n + 1, jnp.tanh(x @ W[0])

    x = tt.tap(x + 1, "before")
    _, x = jax.lax.while_loop(lambda state: state[0] < 3, step, (0, x))
    return tt.tap(x * 2, "after")


@jax.custom_vjp
def doubled(x):
    return tt.tap(x * 2, "inside")


doubled.defvjp(lambda x: (doubled(x), None), lambda _, g: (g * 2,))


def with_rules(x):
    return jax.nn.relu(jax.checkpoint(lambda y: tt.tap(jnp.sin(y), "kept"))(doubled(x)))


def of_a_gradient(x):
    def loss(v):
        return jnp.sum(tt.tap(v * v, "square") ** 2)

    return tt.tap(jax.grad(loss)(x), "gradient")


def pieces(x):
    q, k, v = jnp.split(tt.tap(jnp.concatenate([x, x * 2, x**2], -1), "all"), 3, -1)
    rolled = jnp.concatenate([v[1:], v[:1]])
    heads = (q * jnp.cumsum(k, 0)).reshape(T, 2, D // 2).transpose(1, 0, 2)
    return tt.tap(heads.reshape(2 * T, D // 2), "heads")[::2] + rolled[:, : D // 2]


PROGRAMS = [
    in_a_row,
    in_a_scan,
    backwards,
    in_scans,
    mapped,
    scan_in_vmap,
    vmap_in_scan,
    with_a_branch,
    with_a_while,
    with_rules,
    of_a_gradient,
    pieces,
]
METRICS = {
    "sum": jnp.sum,
    "last": lambda out: jnp.ravel(out[-1])[1 % jnp.size(out[-1])],
    "odds": lambda out: jax.nn.log_softmax(out[-1:].ravel() * 2)[0],
}


def one_by_one(fn, clean, metric):
    """The effects of all patches, each run by itself with the public `edit`.

    They come as a function of the axis. One program serves them all: in each run all
    sites but one are changed nowhere.
    """
    shapes = [site.value.shape[len(site.axes) :] for site in clean]
    scans = [tuple(x.size for x in site.axes if x.kind == "scan") for site in clean]

    @jax.jit
    def run(turn, masks):
        changes = {}
        for site, scan, mask in zip(clean, scans, masks):
            change = tt.edits.replace(site.value).where(mask)
            change = change.at(tuple(turn[: len(scan)])) if scan else change
            changes[lambda found, text=site.text: found.text == text] = change
        return metric(tt.edit(fn, changes)(WORSE))

    nowhere = [np.zeros(shape, bool) for shape in shapes]
    baseline, deepest = metric(fn(WORSE)), max(map(len, scans))

    def effects(axis):
        rows = []
        for n, shape in enumerate(shapes):
            for turn in np.ndindex(*scans[n]):
                padded = np.array([*turn, *[0] * (deepest - len(turn))], int)
                for place in range(1 if axis is None else shape[axis]):
                    mask = np.ones(shape, bool)
                    if axis is not None:
                        mask = np.moveaxis(np.zeros(shape, bool), axis, 0)
                        mask[place] = True
                        mask = np.moveaxis(mask, 0, axis)
                    masks = [*nowhere[:n], mask, *nowhere[n + 1 :]]
                    rows.append(run(padded, masks) - baseline)
        return np.stack(rows)

    return effects, baseline


WAYS = [(axis, batch_size) for axis in (None, 0) for batch_size in (None, 3)]
# One of each kind, in one way, for every change; all of them are for the long run.
QUICK = [
    (in_a_row, "odds", [(0, 3)]),
    (in_a_scan, "last", [(None, 3)]),
    (with_a_branch, "sum", [(None, 3)]),
    (pieces, "last", [(None, None)]),
]
EACH = [(fn, metric, WAYS) for fn in PROGRAMS for metric in METRICS]


@pytest.mark.parametrize(
    ("fn", "metric", "ways"),
    [
        pytest.param(*case, id=f"{case[0].__name__}-{case[1]}{end}", marks=marks)
        for cases, end, marks in ((QUICK, "-quick", ()), (EACH, "", pytest.mark.long))
        for case in cases
    ],
)
def test_effects_are_those_of_single_patches(fn, metric, ways):
    metric = METRICS[metric]
    _, clean = tt.observe(fn)(CLEAN)
    ranks = {site.value.ndim - len(site.axes) for site in clean}
    sizes = {site.value.shape[len(site.axes) :][:1] for site in clean}
    has_axis = min(ranks) > 0 and len(sizes) == 1
    expected, baseline = one_by_one(fn, clean, metric)
    ways = [way for way in ways if has_axis or way[0] is None]
    assert ways
    for axis, batch_size in ways:
        effects = expected(axis)
        found = tt.patch_grid(
            fn, clean, (WORSE,), "**", metric, axis=axis, batch_size=batch_size
        )
        np.testing.assert_allclose(found.baseline, baseline, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            found.effects.reshape(effects.shape), effects, rtol=1e-3, atol=1e-4
        )
