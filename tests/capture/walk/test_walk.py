# SPDX-License-Identifier: Apache-2.0
"""The walk: each rule by itself, and what must come through it unharmed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.api_util import debug_info
from jax.experimental import io_callback
from jax.extend import linear_util
from jax.extend.core.primitives import call_p, closed_call_p
from jax.sharding import NamedSharding

import treetap as tt
from meshes import mesh_of
from treetap._capture.listening import Listening, listening
from treetap._capture.walk import jax_compat
from treetap._capture.walk.plans import Adding, Choice, Part
from treetap._capture.walk.run import Walk
from treetap._capture.walk.survey import taps_in

near = np.testing.assert_allclose
FLOAT = jax.ShapeDtypeStruct((), jnp.float32)


def marked(fn, *args):
    """The body of a function, with its taps."""
    with listening(Listening(None, None, True)):
        return jax_compat.body_of(jax.make_jaxpr(fn)(*args))


def h_of(fn, *args):
    """The site `h` of a call."""
    return tt.observe(fn, "h")(*args)[1]["h"]


# Survey and plan


def test_a_survey_lists_taps_in_order_of_execution():
    def call(x):
        x = tt.tap(x, "a")
        x = jax.jit(lambda x: tt.tap(x + 1, "b"))(x)
        return tt.tap(x, "c")

    spots = taps_in(marked(call, 1.0).jaxpr).spots
    assert [spot.name for spot in spots] == ["a", "b", "c"]


def test_a_plan_takes_one_value_and_feeds_another():
    def call(x):
        return tt.tap(tt.tap(x * 2, "a") * 3, "b")

    body = marked(call, 1.0)
    plan = Choice(False, Adding()), Choice(True)
    part = Part(body, taps_in(body.jaxpr).spots, plan, [[10.0], None])
    outs, found = Walk().run(part, [1.0])
    assert float(outs[0]) == 36.0
    assert found[0] is None
    assert float(found[1].leaves[0]) == 36.0


@pytest.mark.parametrize("keep", [False, True])
def test_taps_stay_only_for_a_capture_further_out(keep):
    body = marked(lambda x: jax.jit(lambda x: tt.tap(x, "a"))(x), 1.0)
    part = Part(body, taps_in(body.jaxpr).spots, (Choice(True),), [None])

    def again(x):
        return Walk(keep).run(part, [x])

    assert ("tap" in str(jax.make_jaxpr(again)(1.0))) == keep


# One rule each: the value, and the operations around it


def tapped(x):
    return tt.tap(x * 2, "h")


def in_jit(x):
    return jax.jit(tapped)(x)


def in_remat(x):
    return jax.checkpoint(tapped)(x)


def in_scan(x):
    return lax.scan(lambda x, _: (tapped(x), None), x, None, length=2)[0]


def in_while(x):
    return lax.while_loop(lambda x: x < 4, tapped, x)


def in_cond(x):
    return lax.cond(x > 0, tapped, lambda x: x, x)


def in_custom_jvp(x):
    fn = jax.custom_jvp(tapped)
    fn.defjvp(lambda primals, tangents: (primals[0] * 2, tangents[0] * 7))
    return jax.jit(fn)(x)


def in_custom_vjp(x):
    fn = jax.custom_vjp(tapped)
    fn.defvjp(lambda x: (tapped(x), None), lambda kept, g: (g * 7,))
    return jax.jit(fn)(x)


def in_shard_map(x):
    mesh = mesh_of((2,), ("i",))
    fn = jax.shard_map(tapped, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    return fn(x)


RULES = {
    in_jit: (2.0, ()),
    in_remat: (2.0, ()),
    in_scan: ([2.0, 4.0], ("scan",)),
    in_while: (4.0, ("while",)),
    in_cond: (2.0, ("cond",)),
    in_custom_jvp: (2.0, ()),
    in_custom_vjp: (2.0, ()),
    in_shard_map: ([2.0, 2.0], ("shard_map",)),
}

rules = pytest.mark.parametrize("fn", RULES, ids=lambda fn: fn.__name__)


@rules
def test_a_rule_gives_the_value_and_what_is_around_it(fn):
    value, wraps = RULES[fn]
    out, record = tt.observe(fn)(jnp.array(1.0))
    near(out, fn(jnp.array(1.0)))
    near(record["h"].value, value)
    assert record["h"].wraps == wraps


@rules
def test_a_rule_holds_under_jit_too(fn):
    value, wraps = RULES[fn]
    site = h_of(jax.jit(fn), jnp.array(1.0))
    near(site.value, value)
    assert site.wraps == wraps


@rules
def test_a_rule_is_surveyed_without_being_run(fn):
    listed = tt.sites(fn, jax.ShapeDtypeStruct((), jnp.float32))
    assert listed["h"].shape == np.shape(RULES[fn][0])


def test_a_loop_that_never_runs_counts_none():
    site = h_of(in_while, jnp.array(9.0))
    assert (int(site.count), float(site.value)) == (0, 0.0)


def test_rows_of_a_loop_under_vmap_are_counted_apart():
    def loop(n):
        def body(carry):
            return carry[0] + 1, tt.tap(carry[1] * 2, "h")

        return lax.while_loop(lambda carry: carry[0] < n, body, (0, jnp.ones(2)))

    site = h_of(jax.vmap(loop), jnp.array([1, 3]))
    np.testing.assert_array_equal(site.count, [1, 3])
    near(site.value, [[2.0, 2.0], [8.0, 8.0]])


def test_rows_of_a_branch_of_ours_under_vmap_are_told_apart():
    def call(is_on, x):
        return tt.cond(is_on, tapped, lambda x: x, x)

    site = h_of(tt.vmap(call), jnp.array([True, False]), jnp.array([1.0, 3.0]))
    np.testing.assert_array_equal(site.taken, [True, False])


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_a_branch_in_a_branch_is_taken_if_both_are(outer, inner):
    def below(x):
        return lax.cond(jnp.array(inner), tapped, lambda x: x, x)

    def call(x):
        return lax.cond(jnp.array(outer), below, lambda x: x, x)

    site = h_of(call, 1.0)
    assert bool(site.taken) == (outer and inner)
    assert float(site.value) == (2.0 if outer and inner else 0.0)


def test_a_value_that_is_the_same_for_all_rows_is_there_once():
    def call(w, xs):
        return jax.vmap(lambda x: x + tt.tap(w * 2, "h"))(xs)

    site = h_of(call, 3.0, jnp.ones(4))
    assert site.shape == ()
    near(site.value, 6.0)


def test_only_leaves_that_differ_from_row_to_row_have_the_axis():
    def call(w, xs):
        return jax.vmap(lambda x: sum(tt.tap((w, x), "h")))(xs)

    assert h_of(call, 3.0, jnp.ones(4)).shape == ((), (4,))


# Operations that cannot be entered


def in_condition(x):
    return lax.while_loop(lambda x: tt.tap(x, "h") < 4, lambda x: x + 1, x)


def in_linear_solve(x):
    def matvec(x):
        return tt.tap(2 * x, "h")

    return lax.custom_linear_solve(matvec, x, lambda _, b: b / 2, symmetric=True)


def in_composite(x):
    return lax.composite(tapped, name="my.op")(x)


def in_custom_vmap(x):
    fn = jax.custom_batching.custom_vmap(tapped)
    fn.def_vmap(lambda size, mapped, x: (x * 2, mapped[0]))
    return fn(x)


CLOSED = {
    in_condition: "the condition of a while loop",
    in_linear_solve: "the operation 'custom_linear_solve'",
    in_composite: "the operation 'composite'",
    in_custom_vmap: "the operation 'custom_vmap_call'",
}


WRAPS = {
    "bare": lambda fn: fn,
    "jit": jax.jit,
    "scan": lambda fn: lambda x: lax.scan(lambda c, _: (fn(c), None), x, length=1)[0],
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("fn", CLOSED, ids=lambda fn: fn.__name__)
def test_a_tap_where_the_walk_cannot_go_is_listed_and_refused_if_selected(fn, wrap):
    def whole(x):
        return tt.tap(fn(tt.tap(x, "before")), "after")

    whole, x = WRAPS[wrap](whole), jnp.array(1.0)
    out, record = tt.observe(whole)(x)
    assert out == whole(x)
    assert [site.text for site in record] == ["before", "after"]
    # A solver may hold its function twice.
    found = {(text.removesuffix("#1"), where) for text, where in record.unreachable}
    assert found == {("h", CLOSED[fn])}
    assert "unreachable" in repr(record)
    assert tt.sites(whole, x).unreachable == record.unreachable
    assert tt.observe(whole, ["before", "after"])(x)[1].unreachable == ()
    text = f"The tap h is inside {CLOSED[fn]}, which a capture cannot enter"
    with pytest.raises(tt.CaptureError, match=text):
        tt.observe(whole, "h")(x)
    with pytest.raises(tt.CaptureError, match=text):
        tt.edit(whole, {"h": tt.edits.zero()})(x)
    edited = tt.edit(whole, {"after": tt.edits.replace(7.0)})(x)
    assert edited == (7.0 if wrap != "scan" else edited)


def test_a_tap_that_jax_cannot_compile_is_refused_as_jax_does():
    def fn(x):
        return lax.reduce(x[None], 0.0, lambda a, b: tt.tap(a + b, "h"), (0,))

    with pytest.raises(NotImplementedError, match="reduce"):
        tt.observe(fn)(jnp.array(1.0))
    with pytest.raises(tt.CaptureError, match="h is inside the operation 'reduce'"):
        tt.observe(fn, "h")(jnp.array(1.0))


def test_values_next_to_unreachable_ones_have_gradients():
    def loss(x):
        held = lax.stop_gradient(x)
        again = lambda c: tt.tap(c[0] < 3, "asked")
        body = lambda c: (c[0] + 1, tt.tap(c[1] * held, "turn"))
        return tt.tap(lax.while_loop(again, body, (0, held))[1] * x, "h")

    _, record = tt.observe(jax.jit(jax.grad(loss)), grads=True)(jnp.array(2.0))
    assert record["h"].grad == 1
    assert record["turn"].count == 3
    assert record.unreachable == (("asked", "the condition of a while loop"),)


def test_nnx_values_that_a_capture_cannot_reach_are_refused():
    class Model(tt.Module):
        def __call__(self, x):
            def again(x):
                self.sow(tt.Intermediate, "h", x)
                return x < 4

            return lax.while_loop(again, lambda x: x + 1, x)

    with pytest.raises(tt.CaptureError, match="h is inside the condition of a while"):
        tt.capture(Model(), tt.Intermediate)(jnp.array(1.0))


# Values of every sort


def test_integers_come_out_and_have_no_gradient():
    def loss(x):
        both = tt.tap({"x": x * 2, "n": jnp.arange(2)}, "h")
        return both["x"] + jnp.sum(both["n"])

    _, record = tt.observe(jax.grad(jax.jit(loss)), "h", grads=True)(1.0)
    np.testing.assert_array_equal(record["h"].value["n"], [0, 1])
    assert float(record["h"].grad["x"]) == 1.0
    assert record["h"].grad["n"] is None


def key_in_scan(key):
    keys = jax.random.split(key, 3)
    return lax.scan(lambda c, key: (c, tt.tap(key, "h")), 0, keys)[1]


def key_in_while(key):
    def body(carry):
        return carry[0] + 1, tt.tap(carry[1], "h")

    return lax.while_loop(lambda carry: carry[0] < 2, body, (0, key))[1]


def key_in_cond(key):
    return lax.cond(jnp.array(True), lambda key: tt.tap(key, "h"), lambda key: key, key)


KEYED = [key_in_scan, key_in_while, key_in_cond]


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("fn", KEYED, ids=lambda fn: fn.__name__)
def test_random_keys_come_out_as_keys(fn, impl):
    key = jax.random.key(3, impl=impl)
    value = h_of(fn, key).value
    assert value.dtype == key.dtype
    np.testing.assert_array_equal(
        jax.random.key_data(value), jax.random.key_data(fn(key))
    )


@pytest.mark.parametrize("fn", [in_jit, in_scan, in_while, in_cond])
def test_weak_types_stay_weak(fn):
    found = tt.observe(fn)(1.0)[0]
    assert jax.typeof(found) == jax.typeof(fn(1.0))
    assert jax.typeof(found).weak_type


def ref_in_scan(ref):
    def body(carry, x):
        ref[...] += tt.tap(x * 2, "h")
        return carry, None

    lax.scan(body, 0, jnp.arange(3.0))


def ref_in_while(ref):
    def body(n):
        ref[...] += tt.tap(n * 2.0, "h")
        return n + 1

    lax.while_loop(lambda n: n < 3, body, 0)


def ref_in_cond(ref):
    def body(x):
        ref[...] += tt.tap(x * 2, "h")

    lax.cond(jnp.array(True), body, lambda x: None, 3.0)


def ref_in_jit(ref):
    def add(ref, x):
        ref[...] += tt.tap(x * 2, "h")

    jax.jit(add)(ref, 3.0)


REFS = {
    ref_in_scan: (6.0, [0.0, 2.0, 4.0]),
    ref_in_while: (6.0, 4.0),
    ref_in_cond: (6.0, 6.0),
    ref_in_jit: (6.0, 6.0),
}


@pytest.mark.parametrize("fn", REFS, ids=lambda fn: fn.__name__)
def test_a_ref_is_written_once(fn):
    ref = jax.new_ref(jnp.array(0.0))
    site = h_of(lambda: fn(ref))
    assert float(ref[...]) == REFS[fn][0]
    near(site.value, REFS[fn][1])


# Effects


def test_ordered_callbacks_run_once_and_in_order():
    said = []

    def body(x, _):
        h = tapped(x)
        io_callback(lambda x: said.append(float(x)), None, h, ordered=True)
        io_callback(lambda x: said.append(-float(x)), None, h, ordered=True)
        return h, None

    def call(x):
        return lax.scan(body, x, None, length=2)[0]

    out, record = tt.observe(jax.jit(call))(1.0)
    jax.effects_barrier()
    assert said == [2.0, -2.0, 4.0, -4.0]
    assert float(out) == 4.0
    near(record["h"].value, [2.0, 4.0])


def test_a_pure_callback_is_called():
    def call(x):
        return jax.pure_callback(lambda x: np.sin(x), FLOAT, tapped(x))

    near(tt.observe(jax.jit(call))(1.0)[0], np.sin(2.0), rtol=1e-6)


def test_debug_prints_come_through(capfd):
    @jax.jit
    def call(x):
        jax.debug.print("it is {x}", x=tapped(x))
        return x

    assert float(h_of(call, 1.0).value) == 2.0
    jax.effects_barrier()
    assert capfd.readouterr().out.count("it is 2.0") == 1


@pytest.mark.parametrize("collective", [lax.psum, lax.all_gather])
def test_collectives_of_a_mapped_axis_come_through(collective):
    def call(x):
        return collective(tapped(x), "i")

    mapped = jax.vmap(jax.jit(call), axis_name="i")
    out, record = tt.observe(mapped)(jnp.array([1.0, 5.0]))
    near(out, mapped(jnp.array([1.0, 5.0])))
    near(record["h"].value, [2.0, 10.0])


# What stays on the operations


def program_text(fn, *args):
    """The program of a captured call, with names and source lines."""
    lowered = jax.jit(lambda *args: tt.observe(fn)(*args)).lower(*args)
    return lowered.as_text(debug_info=True)


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda fn: fn])
def test_named_scopes_and_source_lines_survive(wrap):
    def call(x):
        with jax.named_scope("somewhere"):
            return jnp.sin(tapped(x))

    text = program_text(lambda x: wrap(call)(x), 1.0)
    assert "somewhere/sin" in text
    assert "test_walk.py" in text


def test_out_shardings_survive():
    mesh = mesh_of((2,), ("i",))
    split = NamedSharding(mesh, jax.P("i"))
    call = jax.jit(tapped, out_shardings=split)
    out, _ = tt.observe(call)(jnp.ones(4))
    assert out.sharding.is_equivalent_to(split, 1)


def test_an_operand_that_would_be_given_away_is_kept():
    call = jax.jit(lambda x: tt.tap(x, "h") + 1, donate_argnums=0)
    x = jnp.ones(4)
    site = h_of(call, x)
    near(x, np.ones(4))
    near(site.value, np.ones(4))


@pytest.mark.parametrize("fn", [in_custom_jvp, in_custom_vjp])
@pytest.mark.parametrize("place", ["outside", "inside"])
def test_a_rule_of_its_own_is_what_differentiates(fn, place):
    if place == "outside":
        assert float(tt.observe(jax.grad(fn))(1.0)[0]) == 7.0
    else:
        assert float(jax.grad(lambda x: tt.observe(fn)(x)[0])(1.0)) == 7.0


def test_forward_differentiation_gives_no_gradients():
    def call(x):
        return jax.jvp(tapped, (x,), (1.0,))

    with pytest.raises(tt.CaptureError, match="h has no gradient"):
        tt.observe(call, "h", grads=True)(1.0)


def test_a_linear_function_is_transposed_inside_a_capture():
    def call(x):
        return jax.linear_transpose(tapped, x)(x)

    assert float(tt.observe(call)(3.0)[0][0]) == 6.0


# Derivatives of what is marked


@pytest.mark.parametrize(
    "twice",
    [
        lambda fn: jax.jacfwd(jax.jacfwd(fn)),
        lambda fn: jax.jacrev(jax.jacfwd(fn)),
        lambda fn: jax.jacfwd(jax.grad(fn)),
        lambda fn: jax.jit(jax.jacfwd(jax.jacfwd(fn))),
        lambda fn: jax.jacfwd(jax.jit(jax.jacfwd(fn))),
    ],
)
def test_forward_derivatives_go_through_a_tap(twice):
    fn = twice(lambda x: tt.tap(x**3, "h"))
    out, record = tt.observe(fn)(2.0)
    assert float(out) == 12.0
    assert float(record["h"].value) == 8.0


def test_a_gradient_inside_a_capture_may_be_transposed():
    def call(x):
        _, pull = jax.vjp(tapped, x)
        return jax.linear_transpose(lambda g: pull(g)[0], 1.0)(1.0)[0]

    out, record = tt.observe(call)(3.0)
    assert float(out) == 2.0
    assert float(record["h"].value) == 6.0


@pytest.mark.parametrize("grad", [lambda fn: fn, jax.grad])
def test_a_program_compiled_ahead_of_time_runs_without_its_taps(grad):
    def call(x):
        return jax.jit(grad(tapped)).lower(x).compile()(x)

    out, record = tt.observe(call)(1.0)
    assert float(out) == 2.0
    assert len(record) == 0
    both = tt.edit(lambda x: (call(x), tt.tap(x, "other")), {"other": lambda x: x * 9})
    assert tuple(map(float, both(1.0))) == (2.0, 9.0)


def pulled_in_jit(x):
    """A backward pass that is compiled away from its forward pass."""
    _, pull = jax.vjp(lambda x: jnp.sin(tapped(x)), x)
    return jax.jit(pull)(1.0)[0]


def test_a_backward_pass_compiled_by_itself_gives_values_but_no_gradients():
    out, record = tt.observe(pulled_in_jit, "h")(1.0)
    near(out, 2 * np.cos(2.0), rtol=1e-6)
    assert float(record["h"].value) == 2.0
    with pytest.raises(tt.CaptureError, match="h has no gradient"):
        tt.observe(pulled_in_jit, "h", grads=True)(1.0)


def test_an_edit_cannot_follow_to_a_backward_pass_compiled_by_itself():
    with pytest.raises(tt.CaptureError, match=r"edit: 'h' is edited, and cannot be f"):
        tt.edit(pulled_in_jit, {"h": lambda value: value * 2})(1.0)
    both = lambda x: pulled_in_jit(x) + tt.tap(x, "other")
    out = tt.edit(both, {"other": lambda value: value * 10})(1.0)
    near(out, 2 * np.cos(2.0) + 10, rtol=1e-6)


def test_a_value_computed_again_in_a_compiled_backward_pass_is_heard_once():
    def call(x):
        fn = jax.checkpoint(lambda x, c: x * tt.tap(c * 2, "h"))
        _, pull = jax.vjp(lambda x: fn(x, 3.0), x)
        return jax.jit(pull)(1.0)[0]

    out, record = tt.observe(call, "h")(1.0)
    assert float(out) == float(record["h"].value) == 6.0


# Functions with rules


def ruled(forward):
    fn = jax.custom_vjp(tapped)
    fn.defvjp(lambda x: (forward(x), None), lambda kept, g: (g * 7,))
    return fn


def test_the_values_of_a_rule_without_taps_are_those_of_its_function():
    def call(x):
        out, record = tt.observe(ruled(lambda x: x * 2))(x)
        return out, record["h"].value

    slope, value = jax.grad(call, has_aux=True)(3.0)
    assert (float(slope), float(value)) == (7.0, 6.0)


def test_a_rule_with_other_taps_than_its_function_is_refused():
    fn = ruled(lambda x: tt.tap(x * 2, "other"))
    with pytest.raises(tt.CaptureError, match=r"has the taps \['other'\], its .*'h'"):
        jax.grad(lambda x: tt.observe(fn)(x)[0])(3.0)
    out, record = tt.observe(jax.grad(fn))(3.0)
    assert float(out) == 7.0
    assert [site.text for site in record] == ["other"]


def test_integers_among_the_operands_of_rules_have_no_tangents():
    def fn(x, n):
        return tt.tap(x, "h") * tt.tap(n, "n")

    forward = jax.custom_jvp(fn)
    forward.defjvp(lambda at, along: (fn(*at), along[0] * 7.0 * at[1]))
    backward = jax.custom_vjp(fn)
    backward.defvjp(lambda x, n: (fn(x, n), n), lambda n, g: (g * 7.0 * n, None))
    for ruled in (forward, backward):
        slope = jax.grad(lambda x, n, ruled=ruled: tt.observe(ruled)(x, n)[0])(1.0, 3)
        assert float(slope) == 21.0


def test_an_edit_with_an_array_of_its_own_goes_into_a_checkpoint():
    own = jnp.arange(3.0)
    fn = jax.checkpoint(lambda x: jnp.sin(tapped(x)))
    changed = tt.edit(fn, {"h": lambda value: value * own})
    near(changed(jnp.ones(3)), np.sin(2 * own), rtol=1e-6)
    slopes = jax.grad(lambda x: changed(x).sum())(jnp.ones(3))
    near(slopes, np.cos(2 * own) * 2 * own, rtol=1e-6)


@pytest.mark.parametrize("primitive", [call_p, closed_call_p], ids=["open", "closed"])
def test_a_function_that_jax_hands_over_as_a_call_is_entered(primitive):
    def call(x):
        if primitive.name == "eval_jaxpr":  # as newer releases have it
            return primitive.bind(x, call_jaxpr=jax.make_jaxpr(tapped)(x))[0]
        info = debug_info("call", tapped, (x,), {})
        fun = linear_util.wrap_init(lambda x: [tapped(x)], debug_info=info)
        return primitive.bind(x, subfuns=(fun,))[0]

    for fn in (call, jax.jit(call)):
        assert float(h_of(fn, 1.0).value) == 2.0
        assert float(tt.observe(jax.grad(fn), grads=True)(1.0)[1]["h"].grad) == 1.0
