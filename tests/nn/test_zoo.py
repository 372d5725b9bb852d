# SPDX-License-Identifier: Apache-2.0
"""Laws that every layer keeps: transforms, states, captures, copies and files of it.

Each law runs over the table in `zoo`. What costs much time runs for a few rows, and for
all of them in the long runs.
"""

import copy
import functools
import pickle

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export as jax_export
from test_activations import NAMES as ACTIVATIONS
from zoo import (
    FEW,
    FOLLOWING,
    SQUARE,
    ZOO,
    assert_close,
    hasty_compiling,
    raw,
    rows,
    streams,
    values_of,
    weighed,
)

import treetap as tt
from modes import ALL_MODES, NAMED

INDEPENDENT = [name for name in ZOO if name not in FOLLOWING]


@pytest.fixture(autouse=True, scope="module")
def hasty():
    with hasty_compiling():
        yield


class Holder(tt.Module):
    """A model with the layer inside."""

    def __init__(self, child):
        self.child = child

    def __call__(self, call, *inputs):
        return call(self.child, *inputs)


def unstacked(tree, place):
    return jax.tree.map(lambda leaf: leaf[place], tree)


def stacked(*trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def kinds_changed(layer, before):
    """The kinds of Variables whose values are others than they were."""
    return {
        type(variable)
        for path, variable in tt.to_flat_state(tt.state(layer))
        if not np.array_equal(before[path], raw(variable))
    }


def params_of(tree):
    """The parameters of a layer, or their gradients, by path."""
    return {path: raw(v) for path, v in tt.to_flat_state(tt.state(tree, tt.Param))}


def shapes_of(values):
    return {path: value.shape for path, value in values.items()}


@functools.cache
def eagerly(name):
    """Results of two calls, and what the Variables hold after each."""
    entry, layer, found = ZOO[name], ZOO[name].make(), []
    for _ in range(2):
        found.append((entry.call(layer, *entry.arrays()), values_of(layer)))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    return found


class Compiled:
    """A jitted call of a layer that counts how often it is traced."""

    def __init__(self, entry, mode):
        self.traces = 0
        self.entry = entry
        self.run = tt.jit(self.call, **mode)

    def call(self, layer, *inputs):
        self.traces += 1
        return self.entry.call(layer, *inputs)

    def __call__(self, layer):
        """The result of a call, and what the Variables hold after it."""
        return self.run(layer, *self.entry.arrays()), values_of(layer)


@functools.cache
def compiled(name, **mode):
    """The one program of a layer in a mode."""
    return Compiled(ZOO[name], mode)


@functools.cache
def derived(name, **mode):
    """Two gradients: with the results, what the Variables hold, and traces."""
    entry, layer, found, traces = ZOO[name], ZOO[name].make(), [], []

    def loss(layer, *inputs):
        traces.append(1)
        result = entry.call(layer, *inputs)
        return weighed(result), result

    run = tt.jit(tt.value_and_grad(loss, has_aux=True, **mode), **mode)
    for _ in range(2):
        (_, result), grads = run(layer, *entry.arrays())
        found.append((result, values_of(layer), params_of(grads)))
    return found, len(traces)


@functools.cache
def derived_by_hand(name):
    """The gradient of the pure function, by JAX."""
    entry = ZOO[name]
    graphdef, params, rest = tt.split(entry.make(), tt.Param, ...)

    def pure(params):
        model = tt.merge(graphdef, params, rest, copy=True)
        return entry.loss(model, *entry.arrays())

    return params_of(jax.jit(jax.grad(pure))(params))


def test_every_layer_is_in_the_zoo():
    names = [name for name in tt.__all__ if isinstance(getattr(tt, name), type)]
    layers = {
        cls
        for cls in (getattr(tt, name) for name in names)
        if issubclass(cls, tt.Module) and cls.__module__.startswith("treetap._nn")
    }
    found = set()
    for entry in ZOO.values():
        found |= {type(module) for _, module in tt.iter_modules(entry.abstract())}
    # RoPE stands in a function that attends, and has tests of its own.
    assert layers - {tt.RNNCellBase, tt.RoPE} <= found
    assert len(layers) > 20


# Transforms.


@rows(modes=NAMED)
def test_jit_is_the_eager_call(entry, mode):
    run, layer = compiled(entry.name, **mode), entry.make()
    before = values_of(layer)
    for wanted in eagerly(entry.name):
        assert_close(run(layer), wanted)
    assert kinds_changed(layer, before) == entry.writes
    assert run.traces == 1
    shapes = [leaf.shape for leaf in jax.tree.leaves(wanted[0])]
    assert (shapes == [entry.arrays()[0].shape]) == entry.is_square


@rows(modes=NAMED)
def test_a_compiled_gradient_is_finite_and_writes_as_the_eager_call(entry, mode):
    found, traces = derived(entry.name, **mode)
    for (result, values, _), wanted in zip(found, eagerly(entry.name)):
        assert_close((result, values), wanted)
    assert traces == 1
    params, grads = params_of(entry.make()), found[0][-1]
    assert shapes_of(grads) == shapes_of(params)
    assert all(np.isfinite(grad).all() for grad in grads.values())
    assert any(np.any(grad) for grad in grads.values()) == bool(params)


@rows(modes=NAMED, quick=FEW)
def test_grad_is_that_of_the_pure_function(entry, mode):
    found, _ = derived(entry.name, **mode)
    assert_close(found[0][-1], derived_by_hand(entry.name), rtol=1e-4)


@rows(modes=NAMED, quick=FEW)
def test_remat_changes_neither_values_nor_gradients(entry, mode):
    layer, inputs = entry.make(), entry.arrays()
    run = tt.value_and_grad(tt.remat(entry.loss, **mode), **mode)
    value, grads = tt.jit(run, **mode)(layer, *inputs)
    result, values, wanted = derived(entry.name, **mode)[0][0]
    assert_close(value, weighed(result), rtol=1e-4)
    assert_close((values_of(layer), params_of(grads)), (values, wanted), rtol=1e-4)


@rows(INDEPENDENT, modes=NAMED, quick=FEW)
def test_vmap_with_one_layer_for_all_slices_is_a_loop(entry, mode):
    layer = entry.make()
    batches = [entry.arrays(seed=seed) for seed in range(2)]
    axes = (None, *(0 for _ in entry.inputs))
    mapped = tt.jit(tt.vmap(entry.call, in_axes=axes, **mode), **mode)
    results = mapped(layer, *stacked(*batches))
    for place, inputs in enumerate(batches):
        alone = entry.make()  # every slice draws the same keys
        assert_close(unstacked(results, place), entry.call(alone, *inputs))
        assert_close(values_of(layer), values_of(alone))


@rows(FOLLOWING, modes=NAMED, quick=FEW)
def test_vmap_refuses_to_write_what_differs_from_slice_to_slice(entry, mode):
    layer = entry.make()
    before = values_of(layer)
    inputs = stacked(*(entry.arrays(seed=seed) for seed in range(2)))
    axes = (None, *(0 for _ in inputs))
    with pytest.raises(ValueError, match="axis None was given a value that differs"):
        tt.jit(tt.vmap(entry.call, in_axes=axes, **mode), **mode)(layer, *inputs)
    assert_close(values_of(layer), before, 0, 0)


def check_stack(entry, mode):
    """Checks that a stack made and called by vmap is so many layers."""
    divide = lambda: tt.split_rngs(streams(), splits=2)
    made = tt.jit(tt.vmap(entry.factory, **mode), **mode)(divide())
    inputs = [entry.arrays(seed=seed) for seed in range(2)]
    results = tt.jit(tt.vmap(entry.call, **mode), **mode)(made, *stacked(*inputs))
    for place in range(2):
        layer = entry.factory(unstacked(divide(), place))
        wanted = entry.call(layer, *inputs[place])
        assert_close(unstacked(results, place), wanted, rtol=1e-4)
        found = {path: value[place] for path, value in values_of(made).items()}
        assert_close(found, values_of(layer), rtol=1e-4)


@rows(quick=["attention_decode", "rnn_gru"])
def test_vmap_makes_and_calls_a_stack_of_layers(entry):
    check_stack(entry, NAMED["tree"])


@ALL_MODES
def test_vmap_makes_and_calls_a_stack_in_every_mode(mode):
    check_stack(ZOO["sequential"], mode)


@rows(SQUARE, modes=NAMED, quick=FEW)
def test_scan_over_a_stack_is_a_loop(entry, mode):
    layers = [entry.make(seed) for seed in range(3)]
    stack = stacked(*layers)
    first, *rest = entry.arrays()

    @tt.jit(**mode)
    @tt.scan(in_axes=(tt.Carry, 0), out_axes=tt.Carry, **mode)
    def run(x, layer):
        return entry.call(layer, x, *rest)

    found, wanted = run(first, stack), first
    for layer in layers:
        wanted = entry.call(layer, wanted, *rest)
    assert_close(found, wanted, rtol=1e-4)
    for place, layer in enumerate(layers):
        assert_close(values_of(unstacked(stack, place)), values_of(layer), rtol=1e-4)


@rows(modes=NAMED, quick=FEW)
def test_no_tracer_leaks_from_a_compiled_call(entry, mode):
    layer, inputs = entry.make(), entry.arrays()
    with jax.checking_leaks():
        jax.block_until_ready(tt.jit(entry.call, **mode)(layer, *inputs))


EXPORTED = """
    linear conv_2d batch_norm_eval dropout attention_causal rnn_lstm weight_norm
    sequential block
""".split()


@rows(EXPORTED, quick=FEW)
def test_an_exported_layer_is_the_eager_call(entry):
    pytest.importorskip("flatbuffers")  # JAX's format of files
    layer, inputs = entry.make(), entry.arrays()
    graphdef, state = tt.split(layer)
    leaves, structure = jax.tree.flatten(state)

    @jax.jit
    def pure(leaves, *inputs):
        model = tt.merge(graphdef, jax.tree.unflatten(structure, leaves))
        return entry.call(model, *inputs), jax.tree.leaves(tt.state(model))

    data = jax_export.export(pure)(leaves, *inputs).serialize()
    found, after = jax_export.deserialize(data).call(leaves, *inputs)
    assert_close(found, entry.call(layer, *inputs))
    written = jax.tree.unflatten(structure, after)
    assert_close(values_of(written), values_of(layer))


# Copies. None is traced anew, and none shares Variables with the layer.


def check_copy(entry, copied):
    """Checks that a copy of a layer gives what the layer gives."""
    layer, run = entry.make(), compiled(entry.name, **NAMED["tree"])
    before = values_of(layer)
    wanted = run(entry.make())
    twin = copied(layer)
    assert type(twin) is type(layer)
    assert_close(values_of(twin), before, 0, 0)
    traced = run.traces
    assert_close(run(twin), wanted, 0, 0)
    assert_close(values_of(layer), before, 0, 0)
    assert run.traces == traced


@rows()
def test_a_layer_that_was_split_and_merged_gives_the_same(entry):
    check_copy(entry, lambda layer: tt.merge(*tt.split(layer), copy=True))
    parts = (tt.Param, tt.RngState, ...)
    check_copy(entry, lambda layer: tt.merge(*tt.split(layer, *parts), copy=True))


@rows()
def test_a_state_restored_into_an_abstract_layer_gives_the_same(entry):
    def restored(layer):
        abstract = entry.abstract()
        assert tt.graphdef(abstract) == tt.graphdef(layer)
        tt.update(abstract, tt.clone(tt.state(layer)))
        return abstract

    check_copy(entry, restored)


@rows()
def test_a_clone_is_independent(entry):
    check_copy(entry, tt.clone)
    layer = entry.make()
    before, twin = values_of(layer), tt.clone(layer)
    for _, param in tt.to_flat_state(tt.state(twin, tt.Param)):
        param[...] = jnp.asarray(np.ones(param.shape), param.dtype)
    assert_close(values_of(layer), before, 0, 0)


def through_pickle(layer):
    return pickle.loads(pickle.dumps(layer))


@rows()
def test_deepcopy_copies_a_layer(entry):
    check_copy(entry, copy.deepcopy)


@rows()
def test_pickle_keeps_a_layer(entry):
    check_copy(entry, through_pickle)


@rows()
def test_cloudpickle_keeps_a_layer(entry):
    check_copy(entry, lambda layer: pickle.loads(cloudpickle.dumps(layer)))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("copied", [through_pickle, copy.deepcopy])
def test_a_model_with_an_activation_is_copied_with_the_same_one(name, copied):
    fn = getattr(tt, name)
    model = tt.Sequential(fn)
    twin = copied(model)
    assert twin.layers[0] is fn
    assert tt.graphdef(twin) == tt.graphdef(model)


@rows()
def test_every_layer_can_be_shown(entry):
    for layer in (entry.make(), entry.abstract()):
        for text in (repr(layer), str(layer)):
            assert type(layer).__name__ in text


# Captures.


@functools.cache
def observed(name):
    """The layer inside a model, called under jit: the result, sites, and the layer."""
    entry, model = ZOO[name], Holder(ZOO[name].make())
    compiled = tt.jit(lambda model, *inputs: model(entry.call, *inputs))
    result, record = tt.observe(compiled)(model, *entry.arrays())
    return result, record, model.child


@rows()
def test_a_capture_sees_the_result_of_a_layer_under_its_path(entry):
    result, record, layer = observed(entry.name)
    assert_close((result, values_of(layer)), eagerly(entry.name)[0])
    assert_close(record[f"child:{entry.method}"].value, result, 0, 0)


def node_at(model, path):
    for key in path:
        model = model[key] if isinstance(key, int) else getattr(model, key)
    return model


@rows()
def test_paths_of_sites_are_paths_of_the_model(entry):
    model = Holder(entry.make())
    call = lambda model, *inputs: model(entry.call, *inputs)
    for site in tt.sites(call, model, *entry.arrays()):
        assert type(node_at(model, site.path)).__name__ in site.module


@rows(name for name in ZOO if "attention" in name or name == "block")
def test_attention_shows_weights_that_sum_to_one(entry):
    _, record, _ = observed(entry.name)
    found = [site for site in record if site.name == "attention_weights"]
    assert len(found) == entry.shows_weights
    for site in found:
        place = ("child", "attention") if entry.name == "block" else ("child",)
        assert site.path == place
        np.testing.assert_allclose(site.value.sum(-1), 1, rtol=1e-5)
        assert site.value.min() >= 0


@rows(FEW)
def test_capture_collects_results_of_methods(entry):
    layer, inputs = entry.make(), entry.arrays()
    captured = tt.capture(tt.jit(entry.call), method_outputs=tt.Intermediate)
    result, state = captured(layer, *inputs)
    (value,) = state[entry.method].get_value()
    assert_close(value, result, 0, 0)


# Modes of a model.

MODEL = ZOO["sequential"]


def test_a_view_evaluates_and_shares_its_variables():
    model, (x,) = MODEL.make(), MODEL.arrays()
    evaluated = tt.view(model, deterministic=True, use_running_average=True)
    before = values_of(model)
    first, second = evaluated(x), evaluated(x)
    assert_close(first, second, 0, 0)
    assert_close(values_of(model), before, 0, 0)
    noisy = model(x)
    assert np.abs(noisy - first).max() > 0.01
    assert kinds_changed(model, before) == MODEL.writes
    assert_close(values_of(evaluated), values_of(model), 0, 0)
    assert np.abs(evaluated(x) - first).max() > 1e-4  # the statistics moved for both


def test_eval_and_train_set_the_mode_in_place():
    model, (x,) = MODEL.make(), MODEL.arrays()
    view = tt.view(model, deterministic=True, use_running_average=True)
    before = values_of(model)
    model.eval()
    assert_close(model(x), view(x), 0, 0)
    assert_close(values_of(model), before, 0, 0)
    model.train()
    model(x)
    assert kinds_changed(model, before) == MODEL.writes


@ALL_MODES
def test_a_view_is_compiled_apart_from_the_model(mode):
    model, (x,) = MODEL.make(), MODEL.arrays()
    view = tt.view(model, deterministic=True, use_running_average=True)
    compiled = tt.jit(MODEL.call, **mode)
    wanted = view(x)
    before = values_of(model)
    for _ in range(2):
        assert_close(compiled(view, x), wanted)
    assert_close(values_of(model), before, 0, 0)
    compiled(model, x)
    assert kinds_changed(model, before) == MODEL.writes
