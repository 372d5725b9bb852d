# SPDX-License-Identifier: Apache-2.0
"""Known defects of NNX's capture, each shown absent here: what the values are.

The number in a test's name is the defect's number in the project's list; those of whom
a capture hears are in `test_defects_capture`.
"""

import time

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from modes import ALL_MODES, GRAPH, TREE, UPDATES
from treetap import nnx


class Sower(tt.Module):
    def __init__(self):
        self.w = tt.Param(jnp.array(2.0))

    def __call__(self, x):
        self.sow(tt.Intermediate, "v", x)
        return x * self.w


class Perturber(tt.Module):
    def __init__(self, how=lambda module, x: module.perturb("p", x)):
        self.how = how
        self.w = tt.Param(jnp.array(2.0))

    def __call__(self, x):
        return self.how(self, x)


def lists(tree):
    """A tree of arrays, or a State of them, as plain numbers and lists."""
    if isinstance(tree, tt.State):
        tree = tt.to_pure_dict(tree)
    return jax.tree.map(lambda x: x.tolist(), tree)


def test_c24_tuples_are_perturbed_leaf_by_leaf():
    model = Perturber()
    pair = (jnp.array(1.0), jnp.array([2.0, 3.0]))
    out, state = tt.capture(model, tt.Perturbation)(pair)
    assert lists(out) == (1.0, [2.0, 3.0])
    assert lists(state) == {"p": (0.0, [0.0, 0.0])}
    more = jax.tree.map(lambda x: x + 10, state)
    assert lists(tt.capture(model, init=more)(pair)) == (11.0, [12.0, 13.0])


def test_c25_dicts_are_perturbed_leaf_by_leaf():
    model, value = Perturber(), {"a": jnp.array(1.0)}
    out, state = tt.capture(model, tt.Perturbation)(value)
    assert (lists(out), lists(state)) == ({"a": 1.0}, {"p": {"a": 0.0}})
    more = jax.tree.map(lambda x: x + 10, state)
    assert lists(tt.capture(model, init=more)(value)) == {"a": 11.0}


def test_c26_one_name_with_two_shapes_is_an_error():
    def both(module, x):
        module.perturb("p", x)
        return module.perturb("p", x[0])

    with pytest.raises(tt.CaptureError, match=r"perturb: p .*different types"):
        tt.capture(Perturber(both), tt.Perturbation)(jnp.ones(3))


@pytest.mark.parametrize("shape", [(), (2,), (1, 3)])
def test_c27_init_of_another_shape_is_an_error(shape):
    init = tt.State({"p": tt.Perturbation(jnp.zeros(shape))})
    with pytest.raises(tt.CaptureError, match=r"`init` has at p values of shape"):
        tt.capture(Perturber(), init=init)(jnp.ones(3))


def test_c28_unknown_paths_and_raw_arrays_in_init_are_errors():
    model = Perturber()
    with pytest.raises(tt.CaptureError, match="nope:p"):
        tt.capture(model, init={"nope": {"p": tt.Perturbation(jnp.zeros(3))}})(
            jnp.ones(3)
        )
    with pytest.raises(tt.CaptureError, match="State of Variables"):
        tt.capture(model, init={"p": jnp.zeros(3)})(jnp.ones(3))


@ALL_MODES
def test_c29_a_scan_with_a_broadcast_module_stacks_values(mode):
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
def test_c30_a_fori_loop_with_known_bounds_stacks_values(mode):
    out, state = tt.capture(fori(mode), tt.Intermediate)(Sower(), jnp.array(1.0))
    assert float(out) == 8.0
    assert lists(state) == {"v": ([1.0, 2.0, 4.0],)}


@ALL_MODES
def test_c30_a_while_loop_gives_the_last_value(mode):
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
def test_c31_a_value_of_one_branch_is_there_or_zeros(mode, taken):
    def call(model, x, flag):
        other = lambda model, x: x
        return tt.cond(flag, lambda model, x: model(x), other, model, x, **mode)

    _, state = tt.capture(call, tt.Intermediate)(Sower(), jnp.array(3.0), taken)
    assert lists(state) == {"v": (3.0 if taken else 0.0,)}


@ALL_MODES
def test_c32_a_broadcast_module_under_vmap_gives_batches(mode):
    def call(model, xs):
        return tt.vmap(lambda model, x: model(x), in_axes=(None, 0), **mode)(model, xs)

    out, state = tt.capture(call, tt.Intermediate)(Sower(), jnp.arange(3.0))
    assert out.tolist() == [0.0, 2.0, 4.0]
    assert lists(state) == {"v": ([0.0, 1.0, 2.0],)}


def test_c33_plain_jit_with_the_module_as_argument_works():
    def call(model, x):
        return jax.jit(lambda model, x: model(x))(model, x)

    _, state = tt.capture(call, tt.Intermediate)(Sower(), jnp.array(3.0))
    assert lists(state) == {"v": (3.0,)}


def test_c34_hijax_variables_are_refused_and_not_lost():
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="hijax"):
        nnx.var_defaults(hijax=True)


def test_c35_captures_work_when_variables_are_refs():
    with pytest.warns(DeprecationWarning, match="var_defaults"):
        refs = nnx.var_defaults(ref=True)
    with refs:
        model = Sower()
        out, state = tt.capture(model, tt.Intermediate)(jnp.array(3.0))
        _, zeros = tt.capture(Perturber(), tt.Perturbation)(jnp.array(3.0))
    assert model.w.ref
    assert not state["v"].ref
    assert (float(out), lists(state), lists(zeros)) == (6.0, {"v": (3.0,)}, {"p": 0.0})


class Busy(tt.Module):
    def __call__(self, x, count):
        for _ in range(count):
            self.sow(tt.Intermediate, "v", x)
        return x


def test_c36_the_cost_of_sows_is_linear():
    model, x = Busy(), jnp.array(1.0)

    def seconds(count):
        start = time.perf_counter()
        _, state = tt.capture(model, tt.Intermediate)(x, count)
        assert len(state["v"][...]) == count
        return time.perf_counter() - start

    seconds(100)
    few = min(seconds(500) for _ in range(3))
    assert min(seconds(4000) for _ in range(3)) < 40 * few  # eightfold, not 64-fold


@pytest.mark.parametrize("differentiate", [jax.grad, tt.grad])
def test_c42_a_module_by_closure_inside_grad_works(differentiate):
    model, x = Perturber(lambda m, x: m.perturb("p", x) * m.w), jnp.array(3.0)
    _, zeros = tt.capture(model, tt.Perturbation)(x)
    gradient = differentiate(lambda p: tt.capture(model, init=p)(x))(zeros)
    assert lists(gradient) == {"p": 2.0}


def test_c43_kinds_may_be_given_by_name():
    _, state = tt.capture(Sower(), "intermediates")(jnp.array(3.0))
    assert lists(state) == {"v": (3.0,)}
    assert type(state["v"]) is tt.Intermediate


@pytest.mark.parametrize("name", [0, None, ("a",), 1.5, ["a"], ""])
def test_c44_names_must_be_strings(name):
    class Misnamed(tt.Module):
        def sows(self, x):
            self.sow(tt.Intermediate, name, x)

        def perturbs(self, x):
            self.perturb(name, x)

    model, x = Misnamed(), jnp.array(1.0)
    with pytest.raises(tt.CaptureError, match="sow: a name is a string"):
        tt.capture(model.sows, tt.Intermediate)(x)
    with pytest.raises(tt.CaptureError, match="perturb: a name is a string"):
        tt.capture(model.perturbs, tt.Perturbation)(x)
    with pytest.raises(tt.CaptureError, match="sow: a name is a string"):
        model.sows(x)


class Below(Sower):
    def __call__(self, x):
        return super().__call__(x) + 1


def test_c45_a_call_through_super_is_one_entry():
    _, state = tt.capture(Below(), method_outputs=tt.Intermediate)(jnp.array(1.0))
    assert lists(state) == {"__call__": (3.0,), "v": (1.0,)}


def test_c46_merging_equal_names_is_an_error():
    one, two = (
        tt.State({"a": {"b": tt.Intermediate(1)}}),
        tt.State({"a": {"b": tt.Intermediate(2)}}),
    )
    with pytest.raises(ValueError, match=r"a.*b"):
        tt.merge_state(one, two)
    with pytest.raises(ValueError, match="a"):
        tt.merge_state(one, tt.State({"a": tt.Intermediate(2)}))


def test_c46_merging_other_names_of_one_module_works():
    one, two = (
        tt.State({"a": {"b": tt.Intermediate(1)}}),
        tt.State({"a": {"c": tt.Intermediate(2)}}),
    )
    assert tt.to_pure_dict(tt.merge_state(one, two)) == {"a": {"b": 1, "c": 2}}


# The numbers of the gradient workflow, in all modes.


class Stage(tt.Module):
    def __call__(self, x):
        y = 3 * self.perturb("grad_of_x", x)
        self.sow(tt.Intermediate, "y", y)
        return y


class Stages(tt.Module):
    def __init__(self):
        self.foos = tt.List([Stage() for _ in range(3)])

    def __call__(self, x):
        for foo in self.foos:
            x = foo(x)
        return x


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", [TREE, GRAPH, UPDATES], ids=["tree", "graph", "upd"])
def test_the_four_steps_give_gradients_and_values(mode, compiled):
    model, x = Stages(), jnp.array(1.0)
    _, zeros = tt.capture(model, tt.Perturbation)(x)

    def loss(pert, model, x):
        return tt.capture(model, tt.Intermediate, init=pert)(x)

    step = tt.grad(loss, has_aux=True, **mode)
    gradients, values = (tt.jit(step, **mode) if compiled else step)(zeros, model, x)
    merged = lists(tt.merge_state(gradients, values))
    assert merged == {
        "foos": {
            i: {"grad_of_x": 3.0 ** (3 - i), "y": (3.0 ** (i + 1),)} for i in range(3)
        }
    }
