# SPDX-License-Identifier: Apache-2.0
"""Captures of whole programs: what comes out, what it costs, what it leaves behind."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt
from capture_cases import HEARD, SINGLES, shape_of
from capture_steps import PLAIN, block_by_hand, block_step
from meshes import mesh_of
from modes import ALL_MODES

near = np.testing.assert_allclose


@pytest.fixture(autouse=True)
def quiet_outside():
    """Outside a capture the models here store nothing."""
    tt.set_sow_outside_capture("ignore")
    yield
    tt.set_sow_outside_capture("store")


# Programs of their own


class Layer(tt.Module):
    def __init__(self, w):
        self.w = tt.Param(jnp.full(2, w))

    def __call__(self, x):
        return tt.tap(x * self.w, "h")


class Tower(tt.Module):
    def __init__(self, depth):
        self.blocks = tt.List([Layer(1.0 + n / depth) for n in range(depth)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


ONES = jnp.ones(2)


def test_sibling_blocks_are_stacked_inside_a_capture():
    def call(model, x):
        whole = jax.tree.map(lambda *leaves: jnp.stack(leaves), *model.blocks)
        return jax.lax.scan(lambda x, block: (block(x), None), x, whole)[0]

    out, record = tt.observe(call, "**:h")(Tower(3), ONES)
    factors = np.cumprod([1, 4 / 3, 5 / 3])
    near(out, ONES * factors[-1])
    near(record[0].value, np.stack([factors, factors], 1), rtol=1e-6)


def test_an_average_of_two_models_is_made_inside_a_capture():
    def call(old, new, x):
        mixed = jax.tree.map(lambda a, b: 0.5 * a + 0.5 * b, old, new)
        return mixed(x)

    out, record = tt.observe(call, "**:h")(Layer(1.0), Layer(3.0), ONES)
    near(out, [2.0, 2.0])
    near(record[0].value, [2.0, 2.0])


def test_one_jitted_block_serves_24_blocks_by_one_trace_and_24_sites():
    traces = []

    @jax.jit
    def run(block, x):
        traces.append(None)
        return block(x)

    def call(model, x):
        for block in model.blocks:
            x = run(block, x)
        return x

    model = Tower(24)
    _, record = tt.observe(call, "**:h")(model, ONES)
    assert len(traces) == 1
    assert len({site.text for site in record}) == 24
    factors = np.cumprod([1 + n / 24 for n in range(24)])
    near([site.value[0] for site in record], factors, rtol=1e-5)


def test_a_block_picked_inside_jit_has_its_path():
    picked = jax.jit(lambda m, x: m.blocks[3](x))
    _, record = tt.observe(picked)(Tower(4), ONES)
    assert {site.path for site in record} == {("blocks", 3)}


def test_a_block_passed_alone_through_jit_has_no_wrong_path():
    run = jax.jit(lambda block, x: block(x))
    _, record = tt.observe(lambda m, x: run(m.blocks[3], x), "**:h")(Tower(4), ONES)
    assert record[0].path == ("Layer",)


ROWS = jnp.array([[1.0, 2.0], [3.0, 5.0]])


def sharded(fn, **options):
    specs = {"in_specs": (jax.P(), jax.P("shard")), "out_specs": jax.P()}
    return jax.shard_map(fn, mesh=mesh_of((2,), ("shard",)), **specs | options)


def test_a_sum_over_shards_is_heard_from_each():
    def local(model, x):
        return jax.lax.psum(model(x[0]), "shard")

    out, record = tt.observe(sharded(local), "h")(Layer(2.0), ROWS)
    near(out, [8.0, 14.0])
    near(record["h"].value, 2 * ROWS)


def test_a_replicated_value_is_heard_from_each_shard():
    def local(model, x):
        return tt.tap(jax.lax.psum(model(x[0]), "shard"), "sum")

    _, record = tt.observe(sharded(local), "sum")(Layer(2.0), ROWS)
    near(record["sum"].value, [[8.0, 14.0], [8.0, 14.0]])


def test_the_gradient_of_a_replicated_parameter_is_whole():
    def loss(model, x):
        def local(model, x):
            return jax.lax.psum(jnp.sum(model(x[0]) ** 2), "shard")

        return sharded(local)(model, x)

    grads, record = tt.observe(jax.grad(loss), "h", grads=True)(Layer(2.0), ROWS)
    near(grads.w[...], [2 * 2 * (1 + 9), 2 * 2 * (4 + 25)])
    near(record["h"].grad, 2 * 2 * ROWS)


def test_a_mesh_axis_may_stay_automatic():
    mesh = mesh_of((2, 2), ("shard", "auto"))
    specs = {"in_specs": (jax.P(), jax.P("shard")), "out_specs": jax.P("shard")}
    options = {"mesh": mesh, "axis_names": {"shard"}} | specs

    @jax.jit
    def call(model, x):
        return jax.shard_map(lambda m, x: m(x[0])[None], **options)(model, x)

    out, record = tt.observe(call, "h")(Layer(2.0), ROWS)
    near(out, 2 * ROWS)
    near(record["h"].value, 2 * ROWS)


def test_remat_around_and_inside_a_scan_reports_once_with_gradients():
    def loss(w, x):
        @jax.checkpoint
        def layer(x, w):
            return tt.tap(x * w, "h"), None

        whole = jax.checkpoint(lambda w, x: jnp.sum(jax.lax.scan(layer, x, w)[0]))
        return whole(w, x)

    w = jnp.array([2.0, 3.0, 5.0])
    grads, record = tt.observe(jax.grad(loss), grads=True)(w, jnp.array(1.0))
    near(grads, [15.0, 10.0, 6.0])
    assert [site.text for site in record] == ["h"]
    near(record["h"].value, [2.0, 6.0, 30.0])
    near(record["h"].grad, [15.0, 5.0, 1.0])


def test_a_branch_under_remat_has_its_gradient():
    def loss(x):
        def on(x):
            return jnp.sin(tt.tap(x * 2, "h"))

        branch = jax.checkpoint(lambda x: jax.lax.cond(x > 0, on, lambda x: x, x))
        return branch(x)

    _, record = tt.observe(jax.grad(loss), "h", grads=True)(1.0)
    near(record["h"].grad, np.cos(2.0), rtol=1e-6)


def test_eager_code_may_look_at_its_values():
    def call(x):
        h = tt.tap(x * 2, "h")
        if h > 3:
            h = tt.tap(h + np.asarray(h), "large")
        return float(h)

    out, record = tt.observe(call)(jnp.array(2.0))
    assert out == 8.0
    assert [site.text for site in record] == ["h", "large"]
    assert len(tt.observe(call)(jnp.array(1.0))[1]) == 1


# Zero cost


class Full(tt.Module):
    """A model full of marks."""

    def __init__(self):
        self.w = tt.Param(jnp.ones((4, 4)))

    def __call__(self, x):
        h = tt.tap(jnp.tanh(x @ self.w), "h")
        self.sow(tt.Intermediate, "sown", h * 2)
        h = self.perturb("moved", h)
        return tt.tap((h @ self.w, h), "pair")[0]


class Bare(tt.Module):
    def __init__(self):
        self.w = tt.Param(jnp.ones((4, 4)))

    def __call__(self, x):
        return jnp.tanh(x @ self.w) @ self.w


def compiled_figures(fn, *args):
    compiled = jax.jit(fn).lower(*args).compile()
    text = compiled.as_text()
    cost = compiled.cost_analysis()
    return {
        "flops": cost["flops"],
        "bytes": cost["bytes accessed"],
        "memory": compiled.memory_analysis().temp_size_in_bytes,
        "instructions": sum(" = " in line for line in text.splitlines()),
    }


@pytest.mark.parametrize("is_gradient", [False, True])
def test_marks_cost_nothing_when_nobody_listens(is_gradient):
    def loss(model, x):
        return jnp.sum(model(x))

    fn = jax.grad(loss) if is_gradient else loss
    x = jnp.ones((3, 4))
    bare = compiled_figures(fn, Bare(), x)
    assert compiled_figures(fn, Full(), x) == bare
    assert bare["flops"] > 0
    assert bare["instructions"] > 0


def test_a_tap_leaves_the_program_as_it_is():
    def marked(x):
        return tt.tap(jnp.sin(x), "sine") * 2

    def bare(x):
        return jnp.sin(x) * 2

    assert str(jax.make_jaxpr(marked)(1.0)) == str(jax.make_jaxpr(bare)(1.0))


# Captured values are values


@pytest.mark.parametrize("name", ["jit", "remat", "scan_layers", "remat_of_scan"])
def test_a_loss_made_of_captured_values_is_differentiated(name):
    case = SINGLES[name]
    model, x = case.inputs()

    def loss(model, x):
        _, value = HEARD["sow"](case.wrap(PLAIN, block_step))(model, x)
        return jnp.sum(value**2)

    def loss_by_hand(w):
        seen = case.hand(block_by_hand)(w, x, jnp.zeros(shape_of(case)))
        return jnp.sum(seen.value**2)

    found = jax.jit(jax.grad(loss))(model, x)
    near(found.w[...], jax.grad(loss_by_hand)(model.w[...]), rtol=1e-5)


def test_nested_captures_get_what_each_asked_for():
    model, x = SINGLES["jit"].inputs()
    inner = HEARD["tap"](jax.jit(block_step))
    (out, tapped), sown = HEARD["sow"](lambda m, x: inner(m, x))(model, x)
    assert set(out[0].shape) == {2}
    near(tapped, model.w * x)
    near(sown, model.w * x)
    _, record = tt.observe(lambda m, x: inner(m, x))(model, x)
    names = ["sown", "moved", "tapped", "seen", "__call__"]
    assert [site.text for site in record] == names


def test_an_inner_capture_does_not_widen_an_outer_one():
    model, x = SINGLES["jit"].inputs()
    inner = HEARD["output"](jax.jit(block_step))
    _, state = tt.capture(lambda m, x: inner(m, x), tt.Intermediate)(model, x)
    assert set(state) == {"sown"}


def test_threads_do_not_see_each_other():
    ready, done = threading.Event(), threading.Event()

    def other():
        ready.wait(10)
        found.append(str(jax.make_jaxpr(lambda x: tt.tap(x, "b"))(1.0)))
        tt.tap(jnp.ones(()), "c")
        done.set()

    def call(x):
        ready.set()
        assert done.wait(10)
        return tt.tap(x, "a")

    found = []
    thread = threading.Thread(target=other)
    thread.start()
    _, record = tt.observe(call)(1.0)
    thread.join()
    assert [site.text for site in record] == ["a"]
    assert "tap" not in found[0]


@pytest.mark.parametrize("how", ["sow", "output", "tap"])
def test_repeated_captures_trace_and_compile_nothing_new(how, caplog):
    traces = []

    def step(model, x):
        traces.append(None)
        y, _ = SINGLES["scan_layers"].wrap(PLAIN, block_step)(model, x)
        return y, ()

    model, x = SINGLES["scan_layers"].inputs()
    jitted = jax.jit(step)
    first = HEARD[how](jitted)(model, x)
    with caplog.at_level("WARNING"), jax.log_compiles():
        second = HEARD[how](jitted)(model, x)
    assert len(traces) == 1
    assert caplog.messages == []
    near(first[1], second[1])


class Stateful(tt.Module):
    def __init__(self):
        self.n = tt.Variable(jnp.array(0))

    def __call__(self, x):
        self.sow(tt.Intermediate, "x", x)
        return jnp.log(self.perturb("p", x))


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
def test_a_capture_leaves_nothing_behind_when_the_function_raises(wrap):
    def call(model, x):
        model(x)
        raise RuntimeError("no")

    model = Stateful()
    before = jax.tree.structure(model), set(vars(model)), dict(vars(Stateful))
    with pytest.raises(RuntimeError, match="no"):
        tt.capture(wrap(call), method_outputs=tt.Intermediate)(model, 1.0)
    assert (jax.tree.structure(model), set(vars(model)), dict(vars(Stateful))) == before
    assert str(jax.make_jaxpr(lambda x: tt.tap(x, "a"))(1.0)).count("tap") == 0
    _, state = tt.capture(wrap(lambda m, x: m(x)), tt.Intermediate)(model, 1.0)
    assert list(state) == ["x"]
    assert len(state["x"].get_raw_value()) == 1


# The four-step workflow for gradients, by its numbers (transforms §5.5)


class Triple(tt.Module):
    def __call__(self, x):
        x = self.perturb("grad_of_x", x)
        self.sow(tt.Intermediate, "activations", x)
        return 3 * x


class Stages(tt.Module):
    def __init__(self):
        self.foos = tt.List([Stage() for _ in range(3)])

    def __call__(self, x):
        for foo in self.foos:
            x = foo(x)
        return x


class Stage(tt.Module):
    def __call__(self, x):
        x = self.perturb("x", x)
        y = 3 * x
        self.sow(tt.Intermediate, "y", y)
        return y


def workflow(model, x, mode):
    """The perturbations, their gradients and the sown values, and all together."""
    _, pert = tt.capture(model, tt.Perturbation)(x)

    def loss(model, pert):
        return tt.capture(model, tt.Intermediate, init=pert)(x)

    by_both = tt.grad(loss, argnums=(0, 1), has_aux=True, **mode)
    (_, grads), sown = by_both(model, pert)
    return pert, grads, sown, tt.merge_state(grads, sown)


@ALL_MODES
def test_a_perturbed_input_has_its_gradient_beside_its_value(mode):
    pert, grads, _, merged = workflow(Triple(), jnp.array(1.0), mode)
    assert float(pert["grad_of_x"][...]) == 0.0
    assert float(grads["grad_of_x"][...]) == 3.0
    assert set(merged) == {"grad_of_x", "activations"}
    assert float(merged["activations"][0]) == 1.0


@ALL_MODES
def test_stages_in_a_list_have_a_gradient_each(mode):
    _, grads, sown, _ = workflow(Stages(), jnp.array(1.0), mode)
    stages = range(3)
    assert [float(grads["foos"][n]["x"][...]) for n in stages] == [27.0, 9.0, 3.0]
    assert [float(sown["foos"][n]["y"][0]) for n in stages] == [3.0, 9.0, 27.0]


class Weighed(tt.Module):
    def __init__(self, w):
        self.w = tt.Param(w)

    def __call__(self, x):
        return self.perturb("x", x) * self.w


@ALL_MODES
def test_scanned_layers_have_a_gradient_each(mode):
    axes = {"in_axes": (tt.Carry, 0), "out_axes": tt.Carry}

    def call(model, x):
        return tt.scan(lambda x, layer: layer(x), **axes, **mode)(x, model)

    model, x = Weighed(jnp.full((3, 2), 2.0)), jnp.ones(2)
    _, pert = tt.capture(call, tt.Perturbation)(model, x)
    assert pert["x"].shape == (3, 2)

    def loss(pert, model):
        return jnp.sum(tt.capture(call, init=pert)(model, x))

    grads = tt.grad(loss, **mode)(pert, model)
    near(grads["x"][...], [[8, 8], [4, 4], [2, 2]])


class Dot(tt.Module):
    def __init__(self):
        self.w = tt.Param(jnp.array([1.0, 2.0, 3.0, 4.0]))

    def __call__(self, x):
        y = jnp.dot(self.perturb("x", x), self.w[...])
        self.sow(tt.Intermediate, "y", y)
        return y


@ALL_MODES
def test_a_mapped_perturbation_has_a_gradient_for_each_example(mode):
    model, xs = Dot(), jnp.ones((3, 4))

    def zeros(model, x):
        return tt.capture(model, tt.Perturbation)(x)[1]

    def loss(model, pert, x):
        return tt.capture(model, tt.Intermediate, init=pert)(x)

    pert = tt.vmap(zeros, in_axes=(None, 0), **mode)(model, xs)
    by_pert = tt.grad(loss, argnums=1, has_aux=True, **mode)
    rows = tt.vmap(by_pert, in_axes=(None, 0, 0), **mode)
    grads, sown = rows(model, pert, xs)
    near(grads["x"][...], [[1, 2, 3, 4]] * 3)
    assert len(sown["y"].get_raw_value()) == 1
    near(sown["y"][0], [10.0] * 3)
