# SPDX-License-Identifier: Apache-2.0
"""The Optimizer against plain optax, and what it does with what does not fit."""

import copy
import functools
import json

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from linear_models import Linear, Model, arrays, assert_close, loss_of, reference

import treetap as tt
from modes import ALL_MODES, GRAPH
from treetap import nnx
from treetap._train.optimizer import ModelAndOptimizer

# The same numbers as NNX, and the same paths.


def test_three_adam_steps_give_the_golden_numbers_bit_by_bit():
    wanted_kernel = [
        0.7267435789108276,
        -0.6557175517082214,
        -0.5388526320457458,
        -0.8457779288291931,
        -0.6894334554672241,
        0.4193664491176605,
    ]
    wanted_bias = [0.029989993199706078, 0.02998584881424904, 0.02998867630958557]
    model = Linear(tt.Rngs(0))
    optimizer = tt.Optimizer(model, optax.adam(1e-2), wrt=tt.Param)
    for _ in range(3):
        optimizer.update(model, tt.grad(loss_of)(model))
    exact = {"rtol": 0 if jax.default_backend() == "cpu" else 1e-6}
    np.testing.assert_allclose(model.kernel[...].ravel(), wanted_kernel, **exact)
    np.testing.assert_allclose(model.bias[...], wanted_bias, **exact)
    assert optimizer.step[...] == 3
    assert optimizer.step.dtype == jnp.uint32


def paths_of(tx):
    optimizer = tt.Optimizer(Linear(tt.Rngs(0)), tx, wrt=tt.Param)
    state = tt.to_flat_state(tt.state(optimizer))
    return {path: type(leaf) for path, leaf in state}


def test_the_paths_of_adam():
    assert paths_of(optax.adam(0.1)) == {
        ("opt_state", 0, "count"): tt.OptArray,
        ("opt_state", 0, "mu", "bias"): tt.OptVariable,
        ("opt_state", 0, "mu", "kernel"): tt.OptVariable,
        ("opt_state", 0, "nu", "bias"): tt.OptVariable,
        ("opt_state", 0, "nu", "kernel"): tt.OptVariable,
        ("step",): tt.OptState,
    }


def test_the_paths_of_nested_transformations():
    masked = optax.masked(optax.trace(0.9), tt.State({"kernel": True, "bias": False}))
    assert set(paths_of(masked)) == {
        ("opt_state", "inner_state", "trace", "kernel"),
        ("step",),
    }
    steps = set(paths_of(optax.MultiSteps(optax.sgd(0.1), 2)))
    assert steps == {
        ("opt_state", "acc_grads", "bias"),
        ("opt_state", "acc_grads", "kernel"),
        ("opt_state", "gradient_step"),
        ("opt_state", "mini_step"),
        ("step",),
    }
    injected = paths_of(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    assert injected["opt_state", "hyperparams", "learning_rate"] is tt.OptArray
    labels = tt.State({"kernel": "a", "bias": "b"})
    rules = {"a": optax.trace(0.9), "b": optax.sgd(0.1)}
    assert set(paths_of(optax.partition(rules, labels))) == {
        ("opt_state", "inner_states", "a", "inner_state", "trace", "kernel"),
        ("step",),
    }


def test_metadata_of_a_parameter_are_those_of_its_state():
    model = {"w": tt.Param(jnp.ones(2), tag="decay"), "b": tt.Param(jnp.ones(2))}
    optimizer = tt.Optimizer(model, optax.adam(0.1), wrt=tt.Param)
    assert optimizer.opt_state[0].mu.w.tag == "decay"
    assert not optimizer.opt_state[0].mu.b.has_metadata("tag")
    assert not optimizer.opt_state[0].count.has_metadata("tag")


# Gradients in every form, in every mode.


FORMS = {
    "as given": lambda grads: grads,
    "State of Variables": lambda grads: tt.state(grads, tt.Param),
    "whole State": lambda grads: tt.state(grads),
    "GraphState": lambda grads: tt.unpack(grads, tt.Param, ...)[0],
    "FlatState": lambda grads: tt.to_flat_state(tt.state(grads, tt.Param)),
    "State of arrays": lambda grads: tt.State(
        tt.to_pure_dict(tt.state(grads, tt.Param))
    ),
    "dict of arrays": lambda grads: tt.to_pure_dict(tt.state(grads, tt.Param)),
    "pure Module": lambda grads: tt.as_pure(grads),
}


@functools.cache
def after_adam(steps):
    return reference(optax.adam(0.1), steps)[0]


@ALL_MODES
@pytest.mark.parametrize("form", ["as given", "dict of arrays"])
def test_a_jitted_step(form, mode):
    model = Model(tt.Rngs(0))
    optimizer = tt.Optimizer(model, optax.adam(0.1), wrt=tt.Param)
    traces = []

    @tt.jit(**mode)
    def step(model, optimizer):
        traces.append(1)
        grads = tt.grad(loss_of, **mode)(model)
        updates = optimizer.update(model, FORMS[form](grads))
        assert type(updates) is tt.State
        return updates["layer"]["kernel"]

    before = model.layer.kernel[...]
    changed = step(model, optimizer)
    np.testing.assert_allclose(model.layer.kernel[...], before + changed, rtol=1e-6)
    step(model, optimizer)
    assert_close(arrays(model)["layer"], after_adam(2))
    assert len(traces) == 1
    assert int(model.calls) == int(optimizer.step) == 2


@ALL_MODES
@pytest.mark.parametrize("form", FORMS)
def test_gradients_in_every_form(form, mode):
    model = Model(tt.Rngs(0))
    optimizer = tt.Optimizer(model, optax.adam(0.1), wrt=tt.Param)
    variables = [model.layer.kernel, optimizer.opt_state[0].mu.layer.kernel]
    for _ in range(2):
        grads = tt.grad(loss_of, **mode)(model)
        optimizer.update(model, FORMS[form](grads))
    assert_close(arrays(model)["layer"], after_adam(2))
    assert model.layer.kernel is variables[0]
    assert optimizer.opt_state[0].mu.layer.kernel is variables[1]


def test_only_what_wrt_takes_is_trained():
    model = Model(tt.Rngs(0))
    optimizer = tt.Optimizer(model, optax.sgd(0.1), wrt=tt.PathContains("bias"))
    grads = tt.grad(loss_of)(model)
    kernel = model.layer.kernel[...]
    assert list(optimizer.update(model, grads)["layer"]) == ["bias"]
    assert model.layer.kernel[...] is kernel
    assert_close(model.layer.bias[...], -0.1 * grads.layer.bias)
    optimizer.update(model, {"layer": {"bias": grads.layer.bias}})
    assert_close(model.layer.bias[...], -0.2 * grads.layer.bias)


def test_arrays_can_be_trained_when_wrt_is_a_path():
    model = {"w": jnp.array([1.0, 2.0]), "n": jnp.array(3)}
    optimizer = tt.Optimizer(
        model, optax.trace(0.9), wrt=lambda path, _: path == ("w",)
    )
    optimizer.update(model, {"w": jnp.array([1.0, 1.0])})
    assert model["w"].tolist() == [2.0, 3.0]
    assert type(optimizer.opt_state.trace.w) is tt.OptArray


def test_a_bare_variable_is_a_model_too():
    weight = tt.Param(jnp.array([1.0, 2.0]))
    optimizer = tt.Optimizer(weight, optax.sgd(1.0, momentum=0.5), wrt=tt.Param)
    for _ in range(2):
        optimizer.update(weight, tt.grad(lambda w: (w**2).sum() / 2)(weight))
    assert weight[...].tolist() == [-0.5, -1.0]


def test_numbers_containers_and_refs_inside_variables():
    model = {
        "number": tt.Param(2.0),
        "both": tt.Param({"a": jnp.ones(2), "b": [jnp.zeros(1)]}),
        "ref": tt.Param(jnp.ones(2), ref=True),
        "ragged": tt.Param([jnp.ones(2), jnp.ones((1, 3))]),
    }
    optimizer = tt.Optimizer(model, optax.sgd(0.5, momentum=0.5), wrt=tt.Param)
    assert optimizer.opt_state[0].trace.both["a"].shape == (2,)
    ref = model["ref"].get_raw_value()
    grads = {
        "number": 1.0,
        "both": tt.Param({"a": jnp.ones(2), "b": [jnp.ones(1)]}),
        "ref": jnp.ones(2),
        "ragged": tt.Param([jnp.ones(2), jnp.ones((1, 3))]),
    }
    optimizer.update(model, grads)
    assert model["ragged"][1].tolist() == [[0.5, 0.5, 0.5]]
    assert float(model["number"]) == 1.5
    assert model["both"]["a"].tolist() == [0.5, 0.5]
    assert model["both"]["b"][0].tolist() == [-0.5]
    assert ref[...].tolist() == [0.5, 0.5]
    assert optimizer.opt_state[0].trace.ref[...].tolist() == [1.0, 1.0]


def test_what_is_no_array_in_the_state_is_left_alone():
    named = optax.GradientTransformation(
        lambda params: ("a name", jnp.zeros(())),
        lambda grads, state, params: (grads, (state[0], state[1] + 1)),
    )
    model = {"w": tt.Param(jnp.zeros(2))}
    optimizer = tt.Optimizer(model, named, wrt=tt.Param)
    optimizer.update(model, {"w": jnp.ones(2)})
    name, count = optimizer.opt_state
    assert name == "a name"
    assert float(count) == 1.0


def test_shared_weights_are_one_parameter_in_graph_mode():
    model = Linear(tt.Rngs(0))
    model.again = model.kernel
    with pytest.raises(tt.AliasError, match="again and kernel"):
        tt.Optimizer(model, optax.sgd(0.1), wrt=tt.Param)
    optimizer = tt.Optimizer(model, optax.sgd(0.1), wrt=tt.Param, graph=True)

    @tt.jit(**GRAPH)
    def step(model, optimizer):
        loss = lambda model: model.kernel.sum() + model.again.sum()
        optimizer.update(model, tt.grad(loss, **GRAPH)(model))

    before = model.kernel[...]
    step(model, optimizer)
    assert model.again is model.kernel
    np.testing.assert_allclose(model.kernel[...], before - 0.2, rtol=1e-6)
    with tt.set_graph_mode(True):  # the setting does as well
        tt.Optimizer(model, optax.sgd(0.1), wrt=tt.Param).update(
            model, tt.grad(lambda model: model.again.sum(), **GRAPH)(model)
        )


# Copies and files.


def trained():
    model = Linear(tt.Rngs(0))
    optimizer = tt.Optimizer(model, optax.adam(0.1), wrt=tt.Param)
    optimizer.update(model, tt.grad(loss_of)(model))
    return model, optimizer


def by_file(optimizer):
    saved = json.dumps(jax.tree.map(np.ndarray.tolist, flat_of(optimizer)))
    fresh = tt.Optimizer(Linear(tt.Rngs(1)), optax.adam(0.1), wrt=tt.Param)
    state = tt.state(fresh)
    numbers = jax.tree.map(
        lambda old, new: np.asarray(new, old.dtype),
        flat_of(fresh),
        json.loads(saved),
    )
    flat = {tuple(json.loads(path)): value for path, value in numbers.items()}
    tt.replace_by_pure_dict(state, tt.from_flat_state(flat, cls=dict))
    tt.update(fresh, state)
    return fresh


def flat_of(optimizer):
    flat = tt.to_flat_state(tt.state(optimizer))
    return {json.dumps(path): np.asarray(leaf[...]) for path, leaf in flat}


COPIES = {
    "clone": tt.clone,
    "deepcopy": copy.deepcopy,
    "split": lambda optimizer: tt.merge(*tt.split(optimizer), copy=True),
    "tree": lambda optimizer: jax.tree.map(lambda x: x, optimizer),
    "cloudpickle": lambda optimizer: cloudpickle.loads(cloudpickle.dumps(optimizer)),
    "file": by_file,
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_go_on_from_the_same_state_on_their_own(name):
    model, optimizer = trained()
    twin, other = tt.clone(model), COPIES[name](optimizer)
    for one, two in ((model, optimizer), (twin, other)):
        two.update(one, tt.grad(loss_of)(one))
    assert_close(arrays(twin), arrays(model))
    assert tt.state(other) == tt.state(optimizer)
    other.update(twin, tt.grad(loss_of)(twin))
    assert int(other.step) == int(optimizer.step) + 1


# What does not fit.


def unchanged(model, optimizer, call, error, match):
    """Checks that a call raises and leaves everything as it was."""
    before = [leaf[...] for _, leaf in tt.to_flat_state(tt.state([model, optimizer]))]
    with pytest.raises(error, match=match):
        call()
    after = [leaf[...] for _, leaf in tt.to_flat_state(tt.state([model, optimizer]))]
    assert all(one is two for one, two in zip(before, after))


GOOD = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}
BAD = {
    "missing": ({"bias": jnp.ones(3)}, "missing kernel"),
    "none at all": ({}, "missing bias\n.*missing kernel"),
    "unexpected": ({**GOOD, "scale": jnp.ones(3)}, "unexpected scale"),
    "nested": ({**GOOD, "bias": {"a": jnp.ones(3)}}, "bias: a dict, expected an array"),
    "shape": (
        {**GOOD, "kernel": jnp.ones((3, 2))},
        r"kernel: shape \(3, 2\), expected \(2, 3\)",
    ),
    "scalar": ({**GOOD, "bias": 1.0}, r"bias: shape \(\), expected \(3,\)"),
    "complex": ({**GOOD, "bias": 1j * jnp.ones(3)}, "bias: dtype complex64"),
    "text": ({**GOOD, "bias": "abc"}, "bias: a str where an array belongs"),
    "no derivative": (
        {**GOOD, "bias": np.zeros(3, jax.dtypes.float0)},
        "bias: no gradient",
    ),
    "everything": (
        {"bias": jnp.ones(2), "weight": jnp.ones(1)},
        r"nothing was changed\.\n  - bias: .*\n  - missing kernel\n  - unexpected we",
    ),
    "a bare array": (jnp.ones(3), "missing bias"),
}


@pytest.mark.parametrize("name", BAD)
def test_gradients_that_do_not_fit_are_named(name):
    grads, match = BAD[name]
    model, optimizer = trained()
    call = lambda: optimizer.update(model, grads)
    unchanged(model, optimizer, call, tt.StructureError, match)
    call = lambda: optimizer.update(model, GOOD, grad=grads)
    unchanged(model, optimizer, call, tt.StructureError, match)


def test_long_lists_of_problems_are_cut():
    model = {str(n): tt.Param(jnp.ones(1)) for n in range(20)}
    optimizer = tt.Optimizer(model, optax.sgd(0.1), wrt=tt.Param)
    with pytest.raises(tt.StructureError, match="and 8 more"):
        optimizer.update(model, {})


def test_a_model_with_other_parameters_is_refused():
    model, optimizer = trained()
    model.scale = tt.Param(jnp.ones(3))
    call = lambda: optimizer.update(model, {**GOOD, "scale": jnp.ones(3)})
    unchanged(model, optimizer, call, tt.StructureError, "unexpected scale")
    del model.scale, model.bias
    call = lambda: optimizer.update(model, GOOD)
    unchanged(model, optimizer, call, tt.StructureError, "missing bias")


def test_an_error_of_the_transformation_changes_nothing():
    def fail(grads, state, params):
        raise RuntimeError("no step today")

    model = Linear(tt.Rngs(0))
    tx = optax.chain(optax.adam(0.1), optax.GradientTransformation(lambda _: (), fail))
    optimizer = tt.Optimizer(model, tx, wrt=tt.Param)
    call = lambda: optimizer.update(model, GOOD)
    unchanged(model, optimizer, call, RuntimeError, "no step today")


def test_a_transformation_that_changes_its_structure_or_shapes_is_refused():
    grows = optax.GradientTransformation(
        lambda params: (jnp.zeros(1),),
        lambda grads, state, params: (grads, (*state, jnp.zeros(1))),
    )
    model = Linear(tt.Rngs(0))
    optimizer = tt.Optimizer(model, grows, wrt=tt.Param)
    call = lambda: optimizer.update(model, GOOD)
    unchanged(model, optimizer, call, tt.StructureError, "another structure")

    widens = optax.stateless(
        lambda grads, params: jax.tree.map(lambda g: jnp.stack([g, g]), grads)
    )
    optimizer = tt.Optimizer(model, widens, wrt=tt.Param)
    with jax.numpy_rank_promotion("allow"):
        call = lambda: optimizer.update(model, GOOD)
        unchanged(model, optimizer, call, tt.StructureError, "model/kernel: shape")


def test_a_model_or_optimizer_from_another_trace_is_refused():
    model, optimizer = trained()
    with_model = lambda model: optimizer.update(model, GOOD)
    with_optimizer = lambda optimizer: optimizer.update(model, GOOD)
    for call in (
        lambda: tt.jit(with_model)(model),
        lambda: tt.jit(with_optimizer)(optimizer),
    ):
        unchanged(model, optimizer, call, tt.TraceContextError, "trace level")


def test_a_state_whose_dtype_changes_is_not_written_from_another_trace():
    model = {"w": tt.Param(jnp.ones(3, jnp.bfloat16))}
    optimizer = tt.Optimizer(model, optax.trace(0.9), wrt=tt.Param)
    wide = {"w": jnp.ones(3)}
    call = lambda: tt.jit(lambda model: optimizer.update(model, wide))(model)
    unchanged(model, optimizer, call, tt.TraceContextError, "OptVariable")


def test_bare_arrays_in_the_state_are_refused():
    model, optimizer = trained()
    optimizer.opt_state = tt.data(tt.as_pure(optimizer.opt_state))
    with pytest.raises(tt.StructureError, match="bare arrays"):
        optimizer.update(model, GOOD)


def test_wrong_arguments():
    model = Model(tt.Rngs(0))
    with pytest.raises(TypeError, match="'wrt'"):
        tt.Optimizer(model, optax.adam(0.1))
    with pytest.raises(TypeError, match="function, which has no `init`"):
        tt.Optimizer(model, optax.adam, wrt=tt.Param)
    with pytest.raises(tt.FilterError, match="takes nothing of the model"):
        tt.Optimizer(model, optax.adam(0.1), wrt=tt.Cache)
    with pytest.raises(tt.StructureError, match="rngs/default/key, a RngKey of key<"):
        tt.Optimizer(model, optax.sgd(0.1), wrt=...)
    optimizer = tt.Optimizer(model, optax.adam(0.1), wrt=tt.Param)
    with pytest.raises(TypeError, match="'grads'"):
        optimizer.update(tt.grad(loss_of)(model))
    with pytest.raises(AttributeError, match=r"update\(model, grads\)"):
        optimizer.model
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        optimizer.nonsense
    with pytest.raises(AttributeError):
        optimizer.tx = optax.sgd(0.1)


def test_integers_are_named_when_they_have_no_gradient():
    model = Model(tt.Rngs(0))
    wrt = lambda path, leaf: path == ("calls",) or isinstance(leaf, tt.Param)
    optimizer = tt.Optimizer(model, optax.sgd(0.1), wrt=wrt)
    call = lambda: optimizer.update(model, tt.grad(loss_of)(model))
    with pytest.raises(tt.StructureError, match="calls: no gradient: int32 has none"):
        call()
    assert int(optimizer.step) == 0


def test_settings_can_be_read():
    tx = optax.adam(0.1)
    optimizer = tt.Optimizer(Linear(tt.Rngs(0)), tx, wrt=tt.Param)
    assert optimizer.tx is tx
    assert optimizer.wrt is tt.Param
    assert optimizer.graph is None


# The older pairing. NNX says nothing of it.


@pytest.mark.parametrize("kind", [ModelAndOptimizer, nnx.ModelAndOptimizer])
def test_the_pairing_trains_parameters(kind):
    assert kind(Linear(tt.Rngs(0)), optax.adam(0.1)).wrt is tt.Param


def test_a_model_and_its_optimizer_in_one():
    both = ModelAndOptimizer(Linear(tt.Rngs(0)), optax.adam(0.1))

    @tt.jit
    def step(both):
        return both.update(tt.grad(loss_of)(both.model))

    assert sorted(step(both)) == ["bias", "kernel"]
    both.update(tt.grad(loss_of)(both.model))
    assert_close(arrays(both.model), after_adam(2))
    assert ("model", "kernel") in tt.to_flat_state(tt.state(both)).paths
    ModelAndOptimizer(both.model, optax.adam(0.1), wrt=tt.PathContains("bias"))
    with pytest.raises(tt.StructureError, match=r"^ModelAndOptimizer\.update: "):
        both.update({})


def test_update_takes_its_arguments_by_name():
    models = [tt.Linear(2, 2, rngs=tt.Rngs(0)) for _ in range(2)]
    optimizers = [tt.Optimizer(m, optax.sgd(0.1), wrt=tt.Param) for m in models]
    grads = tt.grad(lambda model: model(jnp.ones((1, 2))).sum())(models[0])
    optimizers[0].update(models[0], grads)
    optimizers[1].update(model=models[1], grads=grads)
    np.testing.assert_array_equal(models[0].kernel[...], models[1].kernel[...])


class DroppingModel(tt.Module):
    def __init__(self):
        self.w = tt.Param(jnp.array([1.0, 2.0]))
        self.calls = tt.Variable(jnp.array(0))
        self.noise = tt.Rngs(0).noise.fork()

    def __call__(self, x):
        self.calls[...] += 1
        return (self.w * x * self.noise.bernoulli(0.5, (2,))).sum()


@pytest.mark.parametrize("make", [dict, tt.State], ids=["dict", "State"])
@ALL_MODES
def test_gradients_may_be_plain_arrays_under_a_type_filter(make, mode):
    model = DroppingModel()
    optimizer = tt.Optimizer(model, optax.adam(0.1), wrt=tt.Param)

    @tt.jit(**mode)
    def step(model, optimizer):
        optimizer.update(model, make({"w": jnp.ones(2)}))

    step(model, optimizer)
    np.testing.assert_allclose(model.w[...], [0.9, 1.9], rtol=1e-5)
    with pytest.raises(tt.StructureError, match="missing w"):
        optimizer.update(model, make({}))


def optimizer_with(rate):
    return tt.Optimizer(
        DroppingModel(), optax.adam(rate), wrt=lambda path, _: path == ("w",)
    )


def test_optimizers_with_equal_settings_have_equal_descriptions():
    first, second = optimizer_with(1e-3), optimizer_with(1e-3)
    for graph in (False, True):
        one, two = tt.graphdef(first, graph=graph), tt.graphdef(second, graph=graph)
        assert one == two
        assert hash(one) == hash(two)
        assert one != tt.graphdef(optimizer_with(1e-4), graph=graph)
    one, two = map(jax.tree.structure, (first, second))
    assert one == two
    assert one != jax.tree.structure(optimizer_with(1e-4))


@ALL_MODES
def test_a_step_is_traced_once_for_optimizers_made_alike(mode):
    traces = []

    @tt.jit(**mode)
    def step(model, optimizer, rate):
        traces.append(1)
        optimizer.update(model, {"w": jnp.ones(2)})

    changes = []
    for rate in (1e-3, 1e-3, 1e-4, 1e-3):
        model, optimizer = DroppingModel(), optimizer_with(rate)
        step(model, optimizer, 1.0)
        changes.append(1.0 - float(model.w[0]))
    assert len(traces) == 2
    np.testing.assert_allclose(changes, [1e-3, 1e-3, 1e-4, 1e-3], rtol=1e-2)


def test_plain_jit_traces_once_too():
    traces = []

    @jax.jit
    def step(model, optimizer):
        traces.append(1)
        optimizer.update(model, {"w": jnp.ones(2)})
        return model, optimizer

    for _ in range(2):
        _, optimizer = step(DroppingModel(), optimizer_with(1e-3))
    assert int(optimizer.step) == 1
    assert len(traces) == 1
