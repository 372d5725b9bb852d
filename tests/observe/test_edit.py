# SPDX-License-Identifier: Apache-2.0
"""edit: every program with an edit is the program with the edit written into it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.meshes import mesh_of

import treetap as tt
from treetap import edits

X = jnp.array([0.3, -0.7, 1.1])
V = jnp.array([0.2, 0.4, -0.5])


def bend(h, p):
    return jnp.tanh(h) * p + h**2


# Each edit, and the same as a function.
KINDS = {
    "zero": (edits.zero(), jnp.zeros_like),
    "replace": (edits.replace(V), lambda h: V),
    "add": (edits.add(V), lambda h: h + V),
    "scale": (edits.scale(V), lambda h: h * V),
    "mean": (edits.mean(0), lambda h: jnp.full(h.shape, jnp.mean(h))),
    "apply": (edits.apply(bend, 2.0), lambda h: bend(h, 2.0)),
    "where": (
        edits.zero().where(V > 0),
        lambda h: jnp.where(V > 0, 0.0, h),
    ),
}


def plain(mark):
    return lambda x: jnp.sum(jnp.sin(mark(x * 2)) * x)


def jitted(mark):
    inner = jax.jit(lambda x: jnp.sin(mark(x * 2)) * x)
    return jax.jit(lambda x: jnp.sum(inner(x) ** 2))


def scanned(mark):
    def step(carry, w):
        return jnp.sin(mark(carry * w)) + carry, jnp.sum(carry)

    def fn(x):
        out, sums = jax.lax.scan(step, x, jnp.array([1.0, 2.0, 3.0, 0.5]))
        return jnp.sum(out) + jnp.sum(sums)

    return fn


def mapped(mark):
    def one(x, w):
        return jnp.sin(mark(x * w)) * x

    def fn(x):
        rows = jax.vmap(one, (None, 0))(x, jnp.array([1.0, 2.0]))
        return jnp.sum(rows**2)

    return fn


def mapped_scan(mark):
    def one(x, w):
        step = lambda c, k: (jnp.sin(mark(c * k)) + w, None)
        return jax.lax.scan(step, x, jnp.array([1.0, 2.0, 3.0]))[0]

    return lambda x: jnp.sum(jax.vmap(one, (None, 0))(x, jnp.array([1.0, 2.0])))


def rematted(mark):
    @jax.checkpoint
    def inner(x):
        return jnp.sin(mark(jnp.cos(x) * 2)) * x

    return lambda x: jnp.sum(inner(inner(x)) ** 2)


def rematted_scan(mark):
    return jax.checkpoint(scanned(mark))


def scanned_remat(mark):
    @jax.checkpoint
    def step(carry, w):
        return jnp.sin(mark(carry * w)) + carry, None

    def fn(x):
        return jnp.sum(jax.lax.scan(step, x, jnp.array([1.0, 2.0, 3.0]))[0])

    return jax.jit(fn)


def branched(mark):
    def fn(x):
        yes = lambda x: jnp.sin(mark(x * 3))
        return jnp.sum(jax.lax.cond(x[0] > 0, yes, jnp.cos, x) * x)

    return fn


def counted(mark):
    def fn(x):
        step = lambda n, x: jnp.sin(mark(x * 2))
        return jnp.sum(jax.lax.fori_loop(0, 3, step, x))

    return fn


def twice(mark):
    return lambda x: jnp.sum(mark(jnp.sin(mark(x))) * x)


def sharded(mark):
    spec = jax.P("a")

    def local(x):
        return jnp.sin(mark(x * 2)) * jax.lax.psum(x, "a")

    def fn(x):
        run = jax.shard_map(
            local, mesh=mesh_of((2,), ("a",)), in_specs=(spec,), out_specs=spec
        )
        return jnp.sum(run(jnp.concatenate([x, 2 * x])))

    return jax.jit(fn)


PROGRAMS = [
    plain,
    jitted,
    scanned,
    mapped,
    mapped_scan,
    rematted,
    rematted_scan,
    scanned_remat,
    branched,
    counted,
    twice,
    sharded,
]

SECOND = {plain, scanned, mapped_scan, scanned_remat, branched, sharded}

WAYS = {
    "value": (lambda f: f, False),
    "inside": (jax.grad, False),
    "outside": (jax.grad, True),
    "jitted": (lambda f: jax.jit(jax.grad(f)), False),
    "forward": (lambda f: lambda x: jax.jvp(f, (x,), (x + 1,))[1], False),
    "hessian": (lambda f: jax.jit(jax.hessian(f)), False),
    "twice": (lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2)), False),
}


def tapped(h):
    return tt.tap(h, "h")


def is_quick(program, way):
    """A sample in which each program, and each way with most kinds of programs, is."""
    turn = PROGRAMS.index(program) + [*WAYS].index(way)
    return turn % 4 == 0 or (program in {plain, scanned} and way == "value")


CASES = [
    pytest.param(
        program,
        way,
        id=f"{program.__name__}-{way}",
        marks=() if is_quick(program, way) else pytest.mark.long,
    )
    for program in PROGRAMS
    for way in WAYS
    if way not in {"hessian", "twice"} or program in SECOND
]


@pytest.mark.parametrize(("program", "way"), CASES)
def test_an_edited_program_is_the_one_with_the_edit_written_in(program, way):
    transform, is_outside = WAYS[way]
    is_small = program in {plain, jitted, scanned} and way in {"value", "jitted"}
    for name in KINDS if is_small else ["apply"]:
        change, by_hand = KINDS[name]
        expected = transform(program(by_hand))(X)
        if is_outside:
            found = transform(tt.edit(program(tapped), {"h": change}))(X)
        else:
            found = tt.edit(transform(program(tapped)), {"h": change})(X)
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-5, err_msg=name)


def test_another_value_is_not_another_program():
    traces = []

    @jax.jit
    def fn(x):
        traces.append(1)
        return jnp.sum(tapped(x * 2) ** 2)

    for n in range(20):
        found = tt.edit(fn, {"h": edits.replace(jnp.full(3, float(n)))})(X)
        assert found == 3 * n**2
    assert len(traces) == 1

    compiled = []

    @jax.jit
    def sweep(x, change):
        compiled.append(1)
        return tt.edit(fn, {"h": change})(x)

    for n in range(1000):
        sweep(X, edits.add(jnp.full(3, float(n))))
    assert len(compiled) == 1
    assert len(traces) <= 2


def test_vmap_over_edits_is_a_grid():
    fn = scanned(tapped)
    change = edits.apply(bend, 2.0)
    grid = jax.vmap(lambda k: tt.edit(fn, {"h": change.at(k)})(X))(jnp.arange(4))
    loop = [tt.edit(fn, {"h": change.at(k)})(X) for k in range(4)]
    np.testing.assert_allclose(grid, jnp.stack(loop), rtol=1e-6)
    assert len(set(np.asarray(grid).tolist())) == 4

    values = jnp.arange(6.0).reshape(2, 3)
    rows = jax.vmap(lambda e: tt.edit(plain(tapped), {"h": e})(X))(
        edits.replace(values)
    )
    expected = [plain(lambda h, v=v: v)(X) for v in values]
    np.testing.assert_allclose(rows, jnp.stack(expected), rtol=1e-6)


@pytest.mark.parametrize(
    "program",
    [
        scanned,
        *(
            pytest.param(program, marks=pytest.mark.long)
            for program in (scanned_remat, mapped_scan, sharded)
        ),
    ],
)
def test_gradients_flow_to_the_arrays_of_an_edit(program):
    def by_edit(v):
        return tt.edit(program(tapped), {"h": edits.apply(bend, v)})(X)

    def by_hand(v):
        return program(lambda h: bend(h, v))(X)

    np.testing.assert_allclose(
        jax.grad(by_edit)(V), jax.grad(by_hand)(V), rtol=1e-5, atol=1e-6
    )

    by_edit = lambda v: jnp.sum(
        tt.edit(jax.grad(program(tapped)), {"h": edits.apply(bend, v)})(X) ** 2
    )
    by_hand = lambda v: jnp.sum(jax.grad(program(lambda h: bend(h, v)))(X) ** 2)
    np.testing.assert_allclose(
        jax.grad(by_edit)(V), jax.grad(by_hand)(V), rtol=1e-4, atol=1e-5
    )


def unrolled(changes):
    """`scanned` with another function for each iteration."""

    def fn(x):
        sums = 0.0
        for change, w in zip(changes, [1.0, 2.0, 3.0, 0.5]):
            sums += jnp.sum(x)
            x = jnp.sin(change(x * w)) + x
        return jnp.sum(x) + sums

    return fn


@pytest.mark.parametrize("number", [0, 2, -1])
def test_an_edit_of_one_iteration_leaves_the_others(number):
    change, by_hand = KINDS["apply"]
    changes = [lambda h: h] * 4
    changes[number] = by_hand
    for transform in (lambda f: f, jax.grad):
        expected = transform(unrolled(changes))(X)
        found = tt.edit(transform(scanned(tapped)), {"h": change.at(number)})(X)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_an_array_with_the_axis_of_a_loop_has_a_part_for_each_iteration():
    values = jnp.arange(12.0).reshape(4, 3)
    expected = jax.grad(unrolled([lambda h, v=v: h * v for v in values]))(X)
    found = tt.edit(jax.grad(scanned(tapped)), {"h": edits.scale(values)})(X)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_swap_brings_the_value_of_another_run():
    fn = scanned(tapped)
    _, record = tt.observe(fn)(X + 1)
    found = tt.edit(fn, {"h": edits.swap(record["h"])})(X)
    expected = unrolled([lambda h, v=v: v for v in record["h"].value])(X)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(tt.edit(fn, {"h": record["h"]})(X), expected, rtol=1e-6)
    whole = tt.edit(mapped_scan(tapped), {"h": edits.zero()})
    same, seen = tt.observe(mapped_scan(tapped))(X)
    again = tt.edit(mapped_scan(tapped), {"h": seen["h"]})(X)
    np.testing.assert_allclose(again, same, rtol=1e-6)
    assert whole(X) != same


def test_observation_and_edit_in_one_pass_either_way_round():
    change, by_hand = KINDS["apply"]
    grad = jax.grad(scanned(tapped))
    expected = jax.grad(scanned(by_hand))(X)
    _, by_hand_record = tt.observe(
        jax.grad(scanned(lambda h: tapped(by_hand(h)))), grads=True
    )(X)
    for fn in (
        tt.observe(tt.edit(grad, {"h": change}), grads=True),
        tt.edit(tt.observe(grad, grads=True), {"h": change}),
    ):
        out, record = fn(X)
        np.testing.assert_allclose(out, expected, rtol=1e-5)
        wanted = by_hand_record["h"]
        np.testing.assert_allclose(record["h"].value, wanted.value, rtol=1e-5)
        np.testing.assert_allclose(record["h"].grad, wanted.grad, rtol=1e-5)


def test_edits_inside_one_another_come_one_after_the_other():
    fn = jax.grad(scanned(tapped))
    expected = jax.grad(scanned(lambda h: bend(h, 2.0) * 3.0))(X)
    both = [edits.apply(bend, 2.0), edits.scale(3.0)]
    nested = tt.edit(tt.edit(fn, {"h": both[0]}), {"h": both[1]})
    np.testing.assert_allclose(nested(X), expected, rtol=1e-4)
    np.testing.assert_allclose(tt.edit(fn, {"h": both})(X), expected, rtol=1e-4)


def test_a_call_index_chooses_one_call():
    h = lambda n: lambda h: h * n
    for index, factors in (("h#1", (1.0, 5.0)), ("h#0", (5.0, 1.0)), ("h", (5.0, 5.0))):
        found = tt.edit(jax.grad(twice(tapped)), {index: edits.scale(5.0)})(X)
        first, second = map(h, factors)
        expected = jax.grad(lambda x: jnp.sum(second(jnp.sin(first(x))) * x))(X)  # noqa: B023 - used at once
        np.testing.assert_allclose(found, expected, rtol=1e-5)


class Layer(tt.Module):
    def __init__(self, w):
        self.w = tt.Param(jnp.array(w))

    def __call__(self, x):
        self.sow(tt.Intermediate, "inputs", x)
        return {"out": jnp.tanh(self.w * x), "twice": 2 * x}


class Net(tt.Module):
    def __init__(self):
        self.layers = tt.List([Layer(1.0), Layer(2.0)])
        self.calls = tt.Variable(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        for layer in self.layers:
            x = self.perturb("x", sum(layer(x).values()))
        return x


def test_outputs_of_methods_are_edited_as_the_trees_they_are():
    model = Net()
    swapped = edits.apply(lambda tree: {"out": tree["twice"], "twice": tree["out"] * 0})
    out = tt.edit(model, {"layers/0": swapped})(X)
    first = 2 * X
    np.testing.assert_allclose(out, jnp.tanh(2 * first) + 2 * first, rtol=1e-6)
    assert model.calls[...] == 1

    parts = edits.replace({"out": V, "twice": -V})
    np.testing.assert_allclose(tt.edit(model, {"layers/1": parts})(X), 0 * X)
    loss = lambda model, x: jnp.sum(model(x))
    grads = tt.edit(tt.grad(loss), {"layers/1:__call__": parts})(model, X)
    assert grads.layers[0].w[...] == 0.0
    assert grads.layers[1].w[...] == 0.0
    assert jnp.all(tt.edit(model, {"x": edits.zero()})(X) == 0)


def test_a_run_ends_at_a_site():
    model, seen = Net(), []

    def after(h):
        seen.append(1)
        return h

    fn = lambda x: after(jnp.sin(tapped(x)))
    out = tt.edit(fn, {"h": edits.scale(2.0)}, stop_at="h")(X)
    np.testing.assert_allclose(out, 2 * X)
    assert not seen
    found = tt.edit(jax.jit(lambda m, x: m(x)), {}, stop_at="layers/0:__call__")(
        model, X
    )
    np.testing.assert_allclose(found["twice"], 2 * X)
    with pytest.raises(tt.CaptureError, match=r"stop_at: .*'g'.* matches none"):
        tt.edit(fn, {}, stop_at="g")(X)


def while_loop(mark):
    def fn(x):
        body = lambda c: (c[0] + 1, jnp.sin(mark(c[1] * 2)))
        return jnp.sum(jax.lax.while_loop(lambda c: c[0] < 3, body, (0, x))[1])

    return fn


def test_edits_in_while_loops_and_their_forward_derivatives():
    change, by_hand = KINDS["apply"]
    for transform in (lambda f: f, jax.jit, WAYS["forward"][0]):
        found = tt.edit(transform(while_loop(tapped)), {"h": change})(X)
        np.testing.assert_allclose(
            found, transform(while_loop(by_hand))(X), rtol=1e-5, atol=1e-6
        )
    mapped = lambda mark: jax.vmap(while_loop(mark))
    rows = jnp.stack([X, 2 * X])
    found = tt.edit(mapped(tapped), {"h": change})(rows)
    np.testing.assert_allclose(found, mapped(by_hand)(rows), rtol=1e-5, atol=1e-6)
    with pytest.raises(tt.CaptureError, match="iterations of a `while` have no numb"):
        tt.edit(while_loop(tapped), {"h": edits.zero().at(1)})(X)


def branched_rows(mark):
    """Rows take branches of their own, which JAX all runs."""

    def row(x):
        first = lambda x: jnp.sin(mark(x * 2)) * x
        return jax.lax.cond(x > 0, first, lambda x: x**2, x)

    step = lambda x, w: (jax.vmap(row)(x * w), None)
    return lambda x: jax.lax.scan(step, x, jnp.array([1.0, -0.5]))[0].sum()


@pytest.mark.parametrize("kind", ["scale", "apply"])
def test_edits_in_branches_that_rows_take(kind):
    change = {"scale": edits.scale(3.0), "apply": KINDS["apply"][0]}[kind]
    by_hand = {"scale": lambda h: h * 3.0, "apply": KINDS["apply"][1]}[kind]
    transforms = lambda f: f, jax.jit, jax.grad, lambda f: jax.jit(jax.grad(f))
    for transform in transforms:
        found = tt.edit(transform(branched_rows(tapped)), {"h": change})(X)
        wanted = transform(branched_rows(by_hand))(X)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_edits_of_trees_with_numbers_in_branches_that_rows_take():
    def first(x, change=None):
        tree = tt.tap({"a": x, "b": 0.3}, "t") if change is None else change(x, 0.3)
        return tree["a"] + 0.1 * tree["b"]

    by_hand = lambda a, b: {"a": bend(a, 2.0), "b": bend(b, 2.0)}
    change = edits.apply(lambda tree: by_hand(**tree))
    row = lambda x, *given: jax.lax.cond(
        x > 0, lambda x: first(x, *given), lambda x: x, x
    )
    found = tt.edit(jax.vmap(row), {"t": change})(X)
    np.testing.assert_allclose(found, jax.vmap(lambda x: row(x, by_hand))(X), rtol=1e-5)


def with_rule(mark, taps_in_rule=True):
    @jax.custom_vjp
    def inner(x):
        return jnp.sin(mark(x * 2))

    def fwd(x):
        h = (mark if taps_in_rule else lambda h: h)(x * 2)
        return jnp.sin(h), h

    inner.defvjp(fwd, lambda h, g: (7.0 * h * g,))
    return lambda x: jnp.sum(inner(x))


def test_in_a_function_with_a_rule_the_rule_is_edited():
    change, by_hand = KINDS["apply"]
    for transform in (lambda f: f, jax.grad, lambda f: jax.grad(jax.jit(f))):
        expected = transform(with_rule(by_hand))(X)
        found = tt.edit(transform(with_rule(tapped)), {"h": change})(X)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        found = transform(tt.edit(with_rule(tapped), {"h": change}))(X)
        np.testing.assert_allclose(found, expected, rtol=1e-5)

    def learned(v, x):
        return tt.edit(with_rule(tapped), {"h": edits.add(v)})(x)

    with pytest.raises(
        tt.CaptureError, match=r"no derivative\s+with respect to the ed"
    ):
        jax.grad(learned, (0, 1))(V, X)
    lost = tt.edit(with_rule(tapped, False), {"h": change})
    with pytest.raises(tt.CaptureError, match=r"`edit` of 'h' is in a custom_vjp"):
        jax.grad(lost)(X)


class Linear(tt.Module):
    def __init__(self):
        self.w = tt.Param(jnp.ones((3, 3)))

    def __call__(self, x):
        self.sow(tt.Intermediate, "inputs", x)
        return x @ self.w


def test_bad_edits_say_where_and_what():
    fn, model = jax.jit(scanned(tapped)), Linear()

    def refused(change, text, fn=fn, key="h"):
        with pytest.raises(tt.CaptureError, match=text):
            tt.edit(fn, {key: change})(X)

    refused(edits.zero(), "`tap` or `perturb`", model, "inputs")
    refused(edits.replace(jnp.ones(4)), r"at h has the shape \(3,\), \(4, 3\).*\(4,\)")
    refused(edits.add(jnp.ones(3, jnp.complex64)), "type float32; .*complex64")
    refused(edits.apply(lambda h: h[:2]), r"gives float32\[2\], .* float32\[3\]")
    refused(edits.apply(lambda h: h > 0), r"gives bool\[3\], .* float32\[3\]")
    refused(edits.apply(lambda h: (h, h)), "gives what it gets")
    refused(
        edits.zero(), r"edit: Select\('g'\) matches none of 1 sites.*\n  h", key="g"
    )
    refused(edits.zero().at(4), "has 4 iterations, and number 4")
    refused(edits.zero().at((1, 1)), "2 iterations are given for h")
    refused(edits.replace({"a": V}), "Give the same structure")
    refused(edits.zero().at(1.5), r"of h is float32\[\]. Give an integer")
    refused(edits.zero().at(True), r"of h is bool\[\]. Give an integer")
    refused(3.0, "expected an edit, got a float")


def test_rows_and_iterations_of_one_number_are_not_mixed_up():
    fn = jax.vmap(scanned(tapped))
    rows = jnp.stack([X] * 4)
    change = jnp.arange(12.0).reshape(4, 3)
    with pytest.raises(tt.CaptureError, match=r"Give it the axes of both: \(4, 4, 3\)"):
        tt.edit(fn, {"h": edits.add(change)})(rows)
    for whole in (change[:, None], change[None]):
        added = edits.add(jnp.broadcast_to(whole, (4, 4, 3)))
        assert tt.edit(fn, {"h": added})(rows).shape == fn(rows).shape
    with_rows = tt.edit(fn, {"h": edits.add(change[:2])})(rows[:2])
    both = jnp.broadcast_to(change[:2, None], (2, 4, 3))
    same = tt.edit(fn, {"h": edits.add(both)})(rows[:2])
    assert jnp.array_equal(with_rows, same)


def test_one_array_is_for_leaves_of_any_shape():
    def fn(x):
        def step(carry, w):
            held = tt.tap({"a": carry * w, "b": jnp.outer(carry, carry)}, "h")
            return carry + 0.1, held["a"].sum() + held["b"].sum()

        return jax.lax.scan(step, x, jnp.arange(1.0, 4.0))[1]

    for array in (jnp.ones(()), jnp.arange(2.0)):
        one = tt.edit(fn, {"h": edits.replace(array)})(jnp.ones(2))
        each = {"a": array, "b": array}
        assert jnp.array_equal(
            one, tt.edit(fn, {"h": edits.replace(each)})(jnp.ones(2))
        )
    mask = jnp.array([True, False])
    masked = tt.edit(fn, {"h": edits.zero().where(mask)})(jnp.ones(2))
    split = edits.apply(lambda h: jax.tree.map(lambda x: jnp.where(mask, 0, x), h))
    assert jnp.array_equal(masked, tt.edit(fn, {"h": split})(jnp.ones(2)))


def test_what_cannot_be_an_edit_is_refused_at_once():
    with pytest.raises(tt.CaptureError, match="expected a mapping"):
        tt.edit(plain(tapped), "h")
    with pytest.raises(tt.CaptureError, match="swap: expected a site"):
        edits.swap(V)
    with pytest.raises(tt.CaptureError, match="there is no value"):
        edits.replace(None)
    with pytest.raises(tt.CaptureError, match="not made of arrays"):
        edits.add("text")
    with pytest.raises(tt.CaptureError, match="apply: expected a function"):
        edits.apply(3)
    with pytest.raises(tt.CaptureError, match="no meaning outside the loop"):
        edits.zero().at(1)(V)


def test_an_edit_that_is_refused_leaves_the_model_as_it_was():
    model = Net()
    with pytest.raises(tt.CaptureError):
        tt.edit(model, {"layers/7": edits.zero()})(X)
    assert model.calls[...] == 0


def test_a_value_that_the_walk_cannot_reach_is_refused_by_name():
    def fn(x):
        again = lambda x: tapped(jnp.sum(x)) < 9.0
        return jax.lax.while_loop(again, lambda x: x + 1, x)

    with pytest.raises(tt.CaptureError, match="h is inside the condition of a while"):
        tt.edit(jax.jit(fn), {"h": edits.zero()})(X)


def test_captures_around_one_another_call_a_module_the_same():
    model = Net()
    names = [site.text for site in tt.observe(model)(X)[1]]
    change = {"layers/0:__call__": edits.zero()}
    for fn in (tt.observe(tt.edit(model, change)), tt.edit(tt.observe(model), change)):
        out, record = fn(X)
        assert [site.text for site in record] == names
        assert jnp.all(out == 0)


def test_a_name_that_nothing_has_is_refused_with_what_there_is():
    with pytest.raises(tt.CaptureError, match=r"(?s)matches none of 1 sites.*  h$"):
        tt.edit(lambda x: tapped(x), {"**:nothing": edits.zero()})(X)


def test_values_that_are_no_arrays_cannot_be_edited_and_pass():
    class Chooser(tt.Module):
        def __call__(self, x):
            return self.side(x), tt.tap("a text", "note"), tapped(x)

        def side(self, x):
            return "left"

    side, note, h = tt.edit(Chooser(), {"*": edits.scale(3.0)})(X)
    assert (side, note) == ("left", "a text")
    np.testing.assert_allclose(h, 3 * X, rtol=1e-6)


def test_one_array_may_stand_for_all_leaves_of_a_tree():
    def fn(x):
        return tt.tap({"a": x, "b": 2 * x}, "h")

    found = tt.edit(fn, {"h": edits.add(jnp.ones(3))})(X)
    np.testing.assert_allclose(found["a"], X + 1, rtol=1e-6)
    np.testing.assert_allclose(found["b"], 2 * X + 1, rtol=1e-6)

    def uneven(x, _):
        return x, tt.tap((x, x[0]), "h")

    scan = lambda x: jax.lax.scan(uneven, x, None, length=3)[1]
    with pytest.raises(tt.CaptureError, match=r"one array of shape \(3,\) cannot stan"):
        tt.edit(scan, {"h": edits.add(jnp.ones(3))})(X)


def test_an_array_may_have_the_axis_of_a_mapping_or_of_a_loop_alone():
    def row(x):
        return jax.lax.scan(lambda x, _: (tapped(x), None), x, None, length=4)[0]

    rows = jnp.stack([X, X])
    for shape, expected in (((2, 1), [[0.0], [4.0]]), ((4, 1), [[6.0], [6.0]])):
        amounts = jnp.arange(float(shape[0]))[:, None] * jnp.ones((1, 3))
        found = tt.edit(jax.vmap(row), {"h": edits.add(amounts)})(rows)
        np.testing.assert_allclose(found, rows + jnp.array(expected), rtol=1e-5)


def test_an_edit_of_no_sort_does_nothing_by_itself():
    with pytest.raises(NotImplementedError, match="Take one of those"):
        edits.Edit()(X)
    with pytest.raises(NotImplementedError, match="Take one of those"):
        tt.edit(tapped, {"h": edits.Edit()})(X)


def test_random_keys_are_edited():
    def fn(key):
        return jax.random.normal(tt.tap(key, "k"))

    key, other = jax.random.split(jax.random.key(0))
    _, record = tt.observe(fn)(other)
    for edit in (tt.edits.replace(other), tt.edits.swap(record["k"])):
        assert tt.edit(fn, {"k": edit})(key) == jax.random.normal(other)
    folded = tt.edits.apply(lambda key: jax.random.fold_in(key, 3))
    keys = jax.random.split(key, 4)
    wanted = [jax.random.normal(jax.random.fold_in(key, 3)) for key in keys]
    assert tt.edit(jax.vmap(fn), {"k": folded})(keys).tolist() == wanted
    step = lambda carry, key: (carry, fn(key))
    scanned = lambda keys: jax.lax.scan(step, 0, keys)[1]
    assert tt.edit(scanned, {"k": folded})(keys).tolist() == wanted
    one = tt.edit(scanned, {"k": tt.edits.replace(other).at(2)})(keys)
    assert (one == scanned(keys)).tolist() == [True, True, False, True]
    assert one[2] == jax.random.normal(other)
    rows = tt.edits.replace(keys[::-1])
    assert tt.edit(scanned, {"k": rows})(keys).tolist() == scanned(keys)[::-1].tolist()


@pytest.mark.parametrize("edit", [tt.edits.add(1), tt.edits.scale(2), tt.edits.mean()])
def test_random_keys_are_no_numbers(edit):
    fn = lambda key: jax.random.normal(tt.tap(key, "k"))
    with pytest.raises(tt.CaptureError, match=r"value at k is of type key<fry>.*apply"):
        tt.edit(fn, {"k": edit})(jax.random.key(0))


def test_numbers_are_no_random_keys():
    fn = lambda key: jax.random.normal(tt.tap(key, "k"))
    with pytest.raises(tt.CaptureError, match=r"is of type key<fry>; an array.*int32"):
        tt.edit(fn, {"k": tt.edits.replace(1)})(jax.random.key(0))
    with pytest.raises(tt.CaptureError, match="Shapes and types must be the same"):
        tt.edit(fn, {"k": tt.edits.apply(jax.random.key_data)})(jax.random.key(0))


def test_a_mean_of_integers_is_refused():
    fn = lambda x: tt.tap(x, "i") + 1
    with pytest.raises(tt.CaptureError, match=r"edits.mean: the value at i is of type"):
        tt.edit(fn, {"i": tt.edits.mean()})(jnp.arange(4))
