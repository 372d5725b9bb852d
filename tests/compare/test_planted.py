# SPDX-License-Identifier: Apache-2.0
"""Differences planted in the example models are found where they are."""

import functools
import importlib
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt
from treetap._compare.comparison import compare
from treetap._io.record_file import save_record

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
gpt2, llama, vit = map(importlib.import_module, ("gpt2", "llama", "vit"))
tables = importlib.import_module("reference.sites")
DATA = importlib.import_module("reference.compare").DATA
EXAMPLES = {"gpt2": gpt2, "llama": llama, "vit": vit}
every = pytest.mark.parametrize("name", EXAMPLES)
INPUTS = ["input_ids", "pixel_values", "continuation"]


@tt.jit
def forward(model, x):
    return model(x)


def dump_of(name):
    return DATA / name / "expected.safetensors"


@functools.cache
def inputs_of(name):
    from safetensors.numpy import load_file

    found = load_file(dump_of(name))
    if "pixel_values" in found:
        return found["pixel_values"].transpose(0, 2, 3, 1)
    return found["input_ids"].astype(np.int32)


def run(name, model, dtype=None):
    """A run, in the dtype of the inputs or another."""
    inputs = inputs_of(name)
    if dtype is not None and inputs.dtype == np.float32:
        inputs = inputs.astype(dtype)
    with jax.default_matmul_precision("highest"):
        return tt.observe(forward)(model, jnp.asarray(inputs))[1]


@functools.cache
def right(name):
    return run(name, EXAMPLES[name].load(DATA / name))


@functools.cache
def in_float64(name):
    """The same computation, nearly without rounding."""
    with jax.enable_x64(True):
        if name == "llama":
            model = llama.load(DATA / name, dtype=jnp.float64)
        else:
            model = EXAMPLES[name].load(DATA / name)
            model = jax.tree.map(lambda x: x.astype(jnp.float64), model)
        return run(name, model, np.float64)


def layer_of(name, model, number):
    return model.layers if name == "llama" else model.blocks[number]


def change(name, variable, number, edit):
    """Edits the parameter of one layer; in a stack, its part."""
    value = variable[...]
    if name == "llama":
        variable[...] = value.at[number].set(edit(value[number]))
    else:
        variable[...] = edit(value)


def site(name, number, path):
    if name == "llama":
        return f"layers/{path}:__call__[{number}]"
    return f"blocks/{number}/{path}:__call__"


def turned(kernel):
    """A matrix the other way round, whatever axes it is split into."""
    flat = kernel.reshape(kernel.shape[0], -1)
    return flat.T.reshape(kernel.shape)


def rounded(kernel):
    return kernel.astype(jnp.bfloat16).astype(kernel.dtype)


@every
@pytest.mark.parametrize(
    ("path", "parameter", "number", "edit"),
    [
        ("attn/query", "kernel", 2, turned),
        ("attn/key", "kernel", 1, rounded),
        ("mlp/down", "kernel", 0, rounded),
        ("norm_1", "scale", 1, jnp.ones_like),
        ("norm_2", "scale", 2, lambda scale: scale.at[3].mul(1.01)),
    ],
    ids=["transposed", "rounded key", "rounded mlp", "no scale", "one channel"],
)
def test_a_wrong_parameter_shows_in_its_layer(name, path, parameter, number, edit):
    model = EXAMPLES[name].load(DATA / name)
    owner = layer_of(name, model, number)
    for key in path.split("/"):
        owner = getattr(owner, key)
    change(name, getattr(owner, parameter), number, edit)
    comparison = compare(run(name, model), right(name))
    assert not comparison
    assert comparison.first.site == site(name, number, path)
    assert all(not each.diverges for each in comparison.differences[:3])


@every
def test_a_wrong_epsilon_stands_out_from_rounding(name):
    model = EXAMPLES[name].load(DATA / name)
    number = 0 if name == "llama" else 1  # one epsilon for all of a stack
    norm = layer_of(name, model, number).norm_2
    norm.epsilon = norm.epsilon + 1e-4
    wrong = run(name, model)
    usual = compare(wrong, right(name)).first  # found too late, or not at all
    assert usual is None or usual.site != site(name, number, "norm_2")
    for pair in ((wrong, right(name)), (right(name), wrong)):
        comparison = compare(*pair, noise=in_float64(name))
        assert comparison.first.site == site(name, number, "norm_2")
        assert comparison.first.relative > 8 * comparison.first.floor
    assert compare(right(name), in_float64(name))


def unscaled(query, key, value, *args, **kwargs):
    size = query.shape[-1]
    return tt.dot_product_attention(query * size**0.5, key, value, *args, **kwargs)


def test_attention_without_its_scale_shows_in_the_weights():
    model = gpt2.load(DATA / "gpt2")
    model.blocks[1].attn.attention_fn = unscaled
    comparison = compare(run("gpt2", model), right("gpt2"))
    texts = [each.site for each in comparison.diverging[:3]]
    assert texts[0] in ("blocks/1/attn:attention_weights", "blocks/1/attn/out:__call__")
    assert comparison["blocks/1/attn/value:__call__"].relative == 0


def test_a_run_in_bfloat16_is_the_same_but_for_rounding():
    model = llama.load(DATA / "llama", dtype=jnp.bfloat16)
    found = run("llama", model)
    comparison = compare(found, right("llama"))
    assert {each.dtypes for each in comparison} == {("bfloat16", "float32")}
    assert comparison, comparison
    assert comparison["__call__"].relative > 1e-3
    strict = compare(found, right("llama"), tolerance=1e-4)
    assert strict.first.site == "tokens:__call__"
    kernel = model.layers.mlp.gate.kernel
    kernel[...] = kernel[...].at[1].set(-kernel[1])
    wrong = compare(run("llama", model), right("llama"))
    assert wrong.first.site == "layers/mlp/gate:__call__[1]"


# Against what PyTorch's hooks gave.


def renames(name, layers=3):
    """The tables of the examples, as rules."""
    if name == "llama":
        table = tables.llama(layers, False)
        return {
            key: tt.tensor(source).stack() if "{i}" in source else source
            for key, source in table.items()
        }
    table = tables.GPT2 if name == "gpt2" else tables.VIT
    found = {}
    for key, source in table.items():
        if isinstance(source, tuple):
            text, part, parts = source
            source = tt.tensor(text).part(part, of=parts, axis=2)
            source = source.rearrange("b t (h k) -> b t h k")
        found[key] = source
    return found


@every
def test_ports_agree_with_the_dumps_of_their_originals(name):
    comparison = compare(
        right(name), dump_of(name), rename=renames(name), ignore=INPUTS
    )
    assert comparison, comparison
    assert len(comparison) >= 41
    noisy = compare(
        right(name),
        dump_of(name),
        rename=renames(name),
        ignore=INPUTS,
        noise=in_float64(name),
    )
    assert noisy, noisy
    worst = max(each.relative / max(each.floor, 6e-8) for each in noisy)
    assert worst < 4  # so the usual factor leaves room, and finds what is above it


@every
def test_a_mistake_in_a_port_is_found_from_the_dump(name, tmp_path):
    model = EXAMPLES[name].load(DATA / name)
    change(name, layer_of(name, model, 1).mlp.up.kernel, 1, rounded)
    save_record(tmp_path / "port.safetensors", run(name, model))
    comparison = compare(
        tmp_path / "port.safetensors",
        dump_of(name),
        rename=renames(name),
        ignore=INPUTS,
    )
    assert comparison.first.site == site(name, 1, "mlp/up")
    if name == "llama":
        assert comparison.first.other == "model.layers.1.mlp.up_proj"
