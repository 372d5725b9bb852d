# SPDX-License-Identifier: Apache-2.0
"""Named scopes of functions that know nothing of treetap, as sites."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import treetap as tt
from meshes import mesh_of

WEIGHTS = jnp.stack([jnp.eye(4) * scale for scale in (0.2, 0.4, 0.6)])
X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)


def layer(w, x):
    with jax.named_scope("linear"):
        return jnp.dot(x, w)


def block(w, x):
    with jax.named_scope("block"):
        hidden = checkpoint_name(jnp.tanh(layer(w, x)), "hidden")
        return x + hidden


def looped(ws, x):
    for w in ws:
        x = block(w, x)
    return x.sum()


def scanned(ws, x):
    with jax.named_scope("stack"):
        x, _ = jax.lax.scan(lambda x, w: (jax.checkpoint(block)(w, x), None), x, ws)
    return x.sum()


def by_hand(ws, x):
    """The values of the sites of `looped`, by name."""
    found = {"block/linear:out": [], "block:hidden": [], "block:out": []}
    for w in ws:
        found["block/linear:out"].append(x @ w)
        found["block:hidden"].append(jnp.tanh(x @ w))
        x = x + jnp.tanh(x @ w)
        found["block:out"].append(x)
    return found


def texts(record):
    return [site.text for site in record]


def assert_same(one, two):
    np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


FORMS = {
    "eager": lambda fn: tt.tap_scopes(fn),
    "jit": lambda fn: jax.jit(tt.tap_scopes(fn)),
    "of jit": lambda fn: tt.tap_scopes(jax.jit(fn)),
    "of jit of grad": lambda fn: tt.tap_scopes(jax.jit(jax.grad(jax.jit(fn)))),
    "jit of grad": lambda fn: jax.jit(jax.grad(tt.tap_scopes(fn))),
}


@pytest.mark.parametrize("form", FORMS)
def test_scopes_and_checkpoint_names_are_sites(form):
    fn = FORMS[form](looped)
    out, record = tt.observe(fn)(WEIGHTS, X)
    assert_same(out, fn(WEIGHTS, X))
    expected = by_hand(WEIGHTS, X)
    names = ("block/linear:out", "block:hidden", "block:out")
    marks = ("", "#1", "#2")
    assert texts(record) == [name + mark for mark in marks for name in names]
    for name in names:
        for value, mark in zip(expected[name], marks):
            assert_same(record[name + mark].value, value)
    assert [site.how for site in record[:3]] == ["scope", "checkpoint_name", "scope"]


@pytest.mark.parametrize("form", FORMS)
def test_scan_and_remat(form):
    fn = FORMS[form](scanned)
    out, record = tt.observe(fn)(WEIGHTS, X)
    assert_same(out, fn(WEIGHTS, X))
    expected = {f"stack/{k}": jnp.stack(v) for k, v in by_hand(WEIGHTS, X).items()}
    assert texts(record) == [*expected, "stack:out"]
    for name, value in expected.items():
        assert_same(record[name].value, value)
        assert record[name].wraps == ("scan",)


def test_sites_lists_them_without_running():
    record = tt.sites(tt.tap_scopes(scanned), WEIGHTS, X)
    assert record["stack/block:out"].shape == (3, 2, 4)
    assert texts(record) == texts(tt.observe(tt.tap_scopes(scanned))(WEIGHTS, X)[1])


@pytest.mark.parametrize("fn", [looped, scanned])
def test_nobody_listens_and_the_program_is_the_same(fn):
    plain, tapped = (jax.make_jaxpr(f)(WEIGHTS, X) for f in (fn, tt.tap_scopes(fn)))
    assert str(plain) == str(tapped)


def test_gradients():
    def with_added(added):
        x = X
        for w, one in zip(WEIGHTS, added):
            x = x + jnp.tanh(x @ w) + one
        return x.sum()

    expected = jax.grad(with_added)(jnp.zeros((3, 2, 4)))
    for fn, name in ((looped, "block:hidden"), (scanned, "stack/block:hidden")):
        step = jax.jit(jax.value_and_grad(tt.tap_scopes(fn)))
        _, record = tt.observe(step, name, grads=True)(WEIGHTS, X)
        found = [site.grad for site in record]
        assert_same(jnp.stack(found) if len(found) == 3 else found[0], expected)


def test_a_gradient_needs_tap_scopes_inside():
    step = tt.tap_scopes(jax.jit(jax.grad(looped)))
    with pytest.raises(tt.CaptureError, match="Put it inside"):
        tt.observe(step, "block:out", grads=True)(WEIGHTS, X)


def test_a_scope_entered_twice_in_a_row_is_two_visits():
    def fn(x):
        return layer(WEIGHTS[1], layer(WEIGHTS[0], x))

    _, record = tt.observe(tt.tap_scopes(fn))(X)
    assert texts(record) == ["linear:out", "linear:out#1"]
    assert_same(record[0].value, X @ WEIGHTS[0])


def test_several_values_leave_in_the_order_they_are_computed():
    def fn(x):
        with jax.named_scope("both"):
            first = jnp.sin(x)
            inside = jnp.cos(first)
            second = inside + 1
        return second * first

    _, record = tt.observe(tt.tap_scopes(fn))(X)
    first, second = record["both:out"].value
    assert_same(first, jnp.sin(X))
    assert_same(second, jnp.cos(jnp.sin(X)) + 1)


def test_what_is_handed_on_or_not_used_is_no_site():
    def fn(x):
        with jax.named_scope("identity"):
            y = x
        with jax.named_scope("unused"):
            jnp.sin(x)
        with jax.named_scope("used"):
            return jnp.cos(y)

    assert texts(tt.sites(tt.tap_scopes(fn), X)) == ["used:out"]


def test_scopes_are_split_and_keep_their_text():
    def fn(x):
        with jax.named_scope("a/b"), jax.named_scope("0"), jax.named_scope("f.<x>|;~"):
            return jnp.sin(x)

    sites = tt.sites(tt.tap_scopes(fn), X)
    assert [site.path for site in sites] == [
        ("a", "b"),
        ("a", "b", "0"),
        ("a", "b", "0", "f.<x>|;~"),
    ][::-1]


def test_vmap_outside_has_the_axis_in_front_and_inside_is_told():
    xs = jnp.stack([X, 2 * X, 3 * X])
    for fn, shape in ((looped, (3, 2, 4)), (scanned, (3, 3, 2, 4))):
        mapped = jax.vmap(tt.tap_scopes(fn), (None, 0))
        _, record = tt.observe(mapped)(WEIGHTS, xs)
        assert record["**/block:out" if fn is scanned else "block:out"].shape == shape
    _, record = tt.observe(tt.tap_scopes(jax.vmap(looped, (None, 0))))(WEIGHTS, xs)
    assert texts(record)[:3] == [
        "vmap(block)/linear:out",
        "vmap(block):hidden",
        "vmap(block):out",
    ]


def test_a_scope_in_a_jit_in_a_vmap_is_told():
    def fn(xs):
        with jax.named_scope("outer"):
            return jax.vmap(jax.jit(layer), (None, 0))(WEIGHTS[0], xs)

    record = tt.sites(tt.tap_scopes(fn), X)
    assert all("vmap" in site.text for site in record if site.text != "outer:out")
    assert len(record) == 2


def test_mappings_around_and_inside():
    def fn(x):
        def one(row):
            out, _ = jax.lax.scan(
                lambda c, _: (layer(WEIGHTS[0], c), None), row, None, 5
            )
            return out

        return jax.vmap(one)(x)

    xs = jnp.stack([X, 2 * X, 3 * X])
    _, record = tt.observe(jax.vmap(jax.jit(tt.tap_scopes(fn))))(xs)
    assert record[0].shape == (3, 5, 2, 4)
    assert_same(record[0].value[2, 0], 3 * X @ WEIGHTS[0])


def test_branches_say_whether_they_were_taken():
    def fn(flag, x):
        return jax.lax.cond(
            flag, lambda x: layer(WEIGHTS[0], x), lambda x: block(WEIGHTS[1], x), x
        )

    _, record = tt.observe(tt.tap_scopes(fn))(jnp.array(True), X)
    assert record["linear:out"].taken
    assert not record["block:out"].taken
    assert_same(record["linear:out"].value, X @ WEIGHTS[0])


def test_while_loops_count():
    def fn(x):
        def step(carry):
            with jax.named_scope("step"):
                return carry[0] + 1, layer(WEIGHTS[0], carry[1])

        return jax.lax.while_loop(lambda carry: carry[0] < 3, step, (0, x))

    _, record = tt.observe(tt.tap_scopes(fn), max_iterations=4)(X)
    assert int(record["step/linear:out"].count) == 3
    assert_same(record["step/linear:out"].value[1], X @ WEIGHTS[0] @ WEIGHTS[0])


def test_shards():
    mesh = mesh_of((2,), ("data",))
    mapped = jax.shard_map(
        lambda x: layer(WEIGHTS[0], x),
        mesh=mesh,
        in_specs=jax.P("data"),
        out_specs=jax.P("data"),
    )
    out, record = tt.observe(jax.jit(tt.tap_scopes(mapped)))(X)
    assert_same(out, X @ WEIGHTS[0])
    assert record["linear:out"].shape == (2, 1, 4)


@jax.custom_jvp
def with_rule(x):
    return layer(WEIGHTS[0], x)


with_rule.defjvp(lambda primals, tangents: (with_rule(*primals), 7 * tangents[0]))


@jax.custom_vjp
def with_reverse_rule(x):
    return layer(WEIGHTS[0], x)


with_reverse_rule.defvjp(
    lambda x: (with_reverse_rule(x), None), lambda kept, given: (7 * given,)
)


@pytest.mark.parametrize("fn", [with_rule, with_reverse_rule])
def test_functions_with_rules_keep_them(fn):
    tapped = tt.tap_scopes(fn)
    _, record = tt.observe(tapped)(X)
    assert_same(record["linear:out"].value, X @ WEIGHTS[0])
    step = jax.grad(lambda x: tapped(x).sum())
    out, _ = tt.observe(step)(X)
    assert_same(out, jnp.full_like(X, 7.0))


def test_statistics_are_taken_in_loops():
    watched = tt.observe(tt.tap_scopes(scanned), "**/linear", reduce=[tt.AbsMax()])
    _, record = watched(WEIGHTS, X)
    expected = max(jnp.abs(v).max() for v in by_hand(WEIGHTS, X)["block/linear:out"])
    assert_same(record[0].total().stats["abs_max"], expected)


@pytest.mark.parametrize("fn", [looped, scanned])
def test_edits(fn):
    tapped = jax.jit(tt.tap_scopes(fn))
    edits = {"**/block:hidden": tt.edits.zero()}
    assert_same(tt.edit(tapped, edits)(WEIGHTS, X), X.sum())
    gradient = jax.grad(tt.edit(tapped, edits), 1)(WEIGHTS, X)
    assert_same(gradient, jnp.ones_like(X))
    doubled = tt.edit(tapped, {"**/block:out": tt.edits.scale(2.0)})
    assert_same(
        tt.edit(tapped, {"**/block:out": lambda x: x * 2})(WEIGHTS, X),
        doubled(WEIGHTS, X),
    )


class Scaled(tt.Module):
    def __init__(self):
        self.w = tt.Param(jnp.eye(4))

    def __call__(self, x):
        with jax.named_scope("inside"):
            return jnp.dot(x, self.w[...])


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit])
def test_modules_among_scopes_have_their_paths(wrap):
    def fn(model, x):
        with jax.named_scope("around"):
            return wrap(lambda model, x: model(x) + 1)(model, x)

    _, record = tt.observe(tt.tap_scopes(fn))(Scaled(), X)
    assert sorted(texts(record)) == ["__call__", "around:out", "inside:out"]


def test_arguments_and_results_may_be_anything():
    def fn(x, *, mode, times):
        with jax.named_scope(mode):
            out = x * times
        return {"out": out, "mode": mode, "same": np.ones(2), "none": None}

    out, record = tt.observe(tt.tap_scopes(fn))(X, mode="train", times=2)
    assert (out["mode"], out["none"]) == ("train", None)
    assert isinstance(out["same"], np.ndarray)
    assert_same(record["train:out"].value, 2 * X)


def test_functions_that_look_at_values_are_refused_by_jax():
    tapped = tt.tap_scopes(lambda x: x if x.sum() > 0 else -x)
    tapped(X)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        tt.observe(tapped)(X)


def test_functions_that_write_are_refused():
    count = tt.Variable(jnp.array(0))

    def fn(x):
        count[...] = count[...] + 1
        return x

    with pytest.raises(tt.TraceContextError):
        tt.observe(tt.tap_scopes(fn))(X)
    assert int(count[...]) == 0


def test_a_selector_that_takes_nothing_tells_what_is_near():
    with pytest.raises(tt.CaptureError, match="block/linear:out"):
        tt.observe(tt.tap_scopes(looped), "block/linar")(WEIGHTS, X)


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="tap_scopes: expected a Module"):
        tt.tap_scopes(3)  # pyright: ignore[reportArgumentType] - refused


def test_a_capture_of_nnx_does_not_trace():
    calls = []

    def fn(x):
        calls.append(type(x))
        return x

    tt.capture(tt.tap_scopes(fn), tt.Intermediate)(X)
    assert calls == [type(X)]


def test_a_capture_in_a_capture():
    def outer(ws, x):
        out, record = tt.observe(tt.tap_scopes(looped), "block:out#2")(ws, x)
        return out, record[0].value

    (_, inner), record = tt.observe(outer)(WEIGHTS, X)
    assert len(record) == 9
    assert_same(record["block:out#2"].value, inner)


def test_a_gradient_compiled_inside_has_no_scopes_of_its_own():
    slope = jax.jit(jax.grad(lambda x: jnp.sin(x) * x))

    def call(x):
        with jax.named_scope("last"):
            return slope(x) * 2

    out, record = tt.observe(tt.tap_scopes(call))(1.0)
    np.testing.assert_allclose(out, 2 * (np.sin(1.0) + np.cos(1.0)), rtol=1e-6)
    assert [site.text for site in record] == ["last:out"]
