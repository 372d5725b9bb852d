# SPDX-License-Identifier: Apache-2.0
"""The example models against transformers: every output, from Hugging Face's files."""

import functools
import importlib
import json
import pathlib
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import treetap as tt

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
gpt2, llama, vit = map(importlib.import_module, ("gpt2", "llama", "vit"))
comparing, sites = map(
    importlib.import_module, ("reference.compare", "reference.sites")
)

DATA = comparing.DATA
EXAMPLES = {"gpt2": gpt2, "llama": llama, "llama3": llama, "vit": vit}
every = pytest.mark.parametrize("name", EXAMPLES)


@tt.jit
def forward(model, *inputs):
    return model(*inputs)


def loaded(name):
    return EXAMPLES[name].load(DATA / name)


@functools.cache
def expected_of(name):
    return comparing.expected_of(DATA / name)


def inputs_of(name):
    expected = expected_of(name)
    if "pixel_values" in expected:
        return jnp.asarray(expected["pixel_values"].transpose(0, 2, 3, 1))
    return jnp.asarray(expected["input_ids"], jnp.int32)


def rows_of(name, model, run=forward, names=None):
    """The errors of all outputs of a run."""
    with jax.default_matmul_precision("highest"):
        _, record = tt.observe(run)(model, inputs_of(name))
    if names is None:
        llamas = sites.llama(model.config.layers, tied=name == "llama3")
        names = {"gpt2": sites.GPT2, "vit": sites.VIT}.get(name, llamas)
    return comparing.compare(record, expected_of(name), names)


def tensors_in(folder):
    files = sorted(folder.glob("model*.safetensors"))
    return {key: value for file in files for key, value in load_file(file).items()}


def edited(folder, target, **changes):
    """A copy of a folder whose config has other entries; None takes one out."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    config = {k: v for k, v in {**config, **changes}.items() if v is not None}
    (target / "config.json").write_text(json.dumps(config))
    return target


# Every output.


@every
def test_every_output_agrees_with_the_reference(name):
    rows = rows_of(name, loaded(name))
    for row in rows:
        print(f"{row.site:40} {row.error:.1e}")
    assert max(row.error for row in rows) <= 1e-4
    # and nothing that the reference has is left out
    given = {"input_ids", "pixel_values", "continuation"}
    assert {row.reference for row in rows} == set(expected_of(name)) - given


def test_outputs_agree_when_the_model_is_not_compiled():
    rows = rows_of("llama", loaded("llama"), run=lambda model, ids: model(ids))
    assert max(row.error for row in rows) <= 1e-4
    assert len(rows) == 5 + 13 * 3


def test_capture_gives_scanned_layers_a_leading_axis():
    capture = tt.capture(forward, method_outputs=tt.Intermediate)
    _, found = capture(loaded("llama"), inputs_of("llama"))
    (stacked,) = found["layers"]["attn"]["__call__"]
    assert stacked.shape == (3, 2, 7, 32)
    for n, value in enumerate(stacked):
        reference = expected_of("llama")[f"model.layers.{n}.self_attn"]
        np.testing.assert_allclose(value, reference, atol=1e-4)


def test_an_error_shows_where_it_is_made():
    model = loaded("gpt2")
    model.blocks[1].mlp.down.bias[...] += 0.01
    rows = rows_of("gpt2", model)
    assert [row.site for row in rows if row.error > 1e-4][:3] == [
        "blocks/1/mlp/down:__call__",
        "blocks/1/mlp:__call__",
        "blocks/1:__call__",
    ]
    with pytest.raises(SystemExit, match="the largest error is"):
        comparing.show(rows, "a wrong model")


def test_one_wrong_layer_of_a_stack_shows_in_that_layer():
    model = loaded("llama")
    kernel = model.layers.mlp.up.kernel
    kernel[...] = kernel[...].at[1, 0, 0].add(0.1)
    wrong = [row.site for row in rows_of("llama", model) if row.error > 1e-4]
    assert wrong[0] == "layers/mlp/up:__call__[1]"


def test_nan_is_an_error_without_bound():
    model = loaded("gpt2")
    model.norm.bias[...] = jnp.full(32, jnp.nan)
    rows = rows_of("gpt2", model)
    assert max(row.error for row in rows) == float("inf")


def test_a_site_without_a_name_and_a_name_without_a_site_are_refused():
    names = {**sites.GPT2, "pooler": "logits"}
    del names["norm"]
    with pytest.raises(ValueError, match=r"'norm:__call__'.*pooler:__call__"):
        rows_of("gpt2", loaded("gpt2"), names=names)


# Loading and saving.


@every
def test_saving_with_the_rules_gives_the_file_back(name, tmp_path):
    example, model = EXAMPLES[name], loaded(name)
    file = tmp_path / "model.safetensors"
    tt.save_weights(file, model, rules=example.RULES)
    saved, original = load_file(file), tensors_in(DATA / name)
    assert saved.keys() == original.keys()
    for key, value in original.items():
        np.testing.assert_array_equal(saved[key], value, strict=True)

    shutil.copy(DATA / name / "config.json", tmp_path)
    again = example.load(tmp_path)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    jax.tree.map(np.testing.assert_array_equal, again, model)


def test_layers_of_a_new_stack_differ():
    sizes = {"width": 2, "hidden": 2, "heads": 1, "kv_heads": 1, "head_size": 2}
    config = llama.Config(vocabulary=2, layers=2, **sizes)
    layers = llama.Llama(config, rngs=tt.Rngs(0)).layers
    for part in (layers.attn.query, layers.attn.out, layers.mlp.up, layers.mlp.down):
        assert not jnp.allclose(part.kernel[0], part.kernel[1])


def test_every_parameter_of_every_layer_has_a_gradient():
    @tt.jit
    def gradients(model, ids):
        def loss(model):
            return jax.nn.logsumexp(model(ids), axis=-1).mean()

        return tt.state(tt.grad(loss)(model))

    found = gradients(loaded("llama3"), inputs_of("llama3"))
    for path, grad in tt.to_flat_state(found):
        value = np.asarray(grad[...])
        assert np.isfinite(value).all(), path
        assert all(map(np.any, value if path[0] == "layers" else value[None])), path


@every
def test_a_folder_without_weights_is_refused(name, tmp_path):
    shutil.copy(DATA / name / "config.json", tmp_path)
    with pytest.raises(tt.TreetapError, match=r"has no \.safetensors file"):
        EXAMPLES[name].load(tmp_path)


@every
def test_a_folder_without_a_config_is_refused(name, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        EXAMPLES[name].load(tmp_path)


@pytest.mark.parametrize(
    ("name", "other"), [("gpt2", "vit"), ("llama", "gpt2"), ("vit", "llama")]
)
def test_the_config_of_another_model_is_refused(name, other):
    with pytest.raises(ValueError, match=rf"'{other}'.*is for .*'{name}'"):
        EXAMPLES[name].load(DATA / other)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt2", {"activation_function": "relu"}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}),
        ("vit", {"hidden_act": "relu"}),
        ("vit", {"qkv_bias": False}),
    ],
)
def test_a_config_that_asks_for_more_is_refused(name, changes, tmp_path):
    folder = edited(DATA / name, tmp_path / "changed", **changes)
    with pytest.raises(ValueError, match="asks for"):
        EXAMPLES[name].load(folder)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt2", {"n_layer": 2}),
        ("llama", {"num_hidden_layers": 2}),
        ("llama", {"num_key_value_heads": 4}),
        ("llama3", {"attention_bias": False}),
        ("vit", {"num_hidden_layers": 4}),
        ("vit", {"patch_size": 8}),
    ],
)
def test_weights_of_another_size_are_refused(name, changes, tmp_path):
    folder = edited(DATA / name, tmp_path / "changed", **changes)
    with pytest.raises(tt.TreetapError, match="nothing was changed"):
        EXAMPLES[name].load(folder)


def test_gpt2_without_a_head_has_other_names_and_masks(tmp_path):
    folder = edited(DATA / "gpt2", tmp_path / "bare")
    tensors = tensors_in(folder)
    bare = {key.removeprefix("transformer."): value for key, value in tensors.items()}
    bare["h.0.attn.bias"] = np.tri(24, dtype=np.float32)[None, None]
    bare["lm_head.weight"] = bare["wte.weight"]
    save_file(bare, folder / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, gpt2.load(folder), loaded("gpt2"))


@pytest.mark.parametrize("name", ["llama", "llama3"])
def test_a_config_in_older_words_means_the_same(name, tmp_path):
    new = json.loads((DATA / name / "config.json").read_text())["rope_parameters"]
    theta, scaling = new.pop("rope_theta"), new if len(new) > 1 else None
    if scaling:
        scaling["type"] = scaling.pop("rope_type")
    old = {"rope_parameters": None, "rope_theta": theta, "rope_scaling": scaling}
    folder = edited(DATA / name, tmp_path / "old", **old)
    assert llama.Config.from_hf(folder) == llama.Config.from_hf(DATA / name)


def test_tied_logits_may_be_stored_again(tmp_path):
    model = loaded("llama3")
    assert model.head is None
    folder = edited(DATA / "llama3", tmp_path / "again")
    tensors = tensors_in(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, llama.load(folder), model)


def test_llama_in_bfloat16():
    model = llama.load(DATA / "llama", dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype("bfloat16")}
    cache = llama.KVCache(model.config, 2, 8)
    logits = forward(model, inputs_of("llama"), cache)
    assert logits.dtype == cache.keys.dtype == jnp.bfloat16
    expected = expected_of("llama")["logits"]
    np.testing.assert_allclose(logits.astype(jnp.float32), expected, atol=0.3)


# Generation.


@pytest.mark.parametrize("name", ["llama", "llama3"])
def test_generation_with_the_cache_is_the_argmax_of_a_full_run(name):
    model, ids = loaded(name), inputs_of(name)
    generated = llama.generate(model, ids, 8)
    np.testing.assert_array_equal(generated, expected_of(name)["continuation"])
    full = forward(model, generated)
    np.testing.assert_array_equal(full.argmax(-1)[:, 6:-1], generated[:, 7:])


def test_one_step_is_generated():
    generated = llama.generate(loaded("llama"), inputs_of("llama"), 1)
    expected = expected_of("llama")["continuation"]
    np.testing.assert_array_equal(generated, expected[:, :8])


@pytest.mark.parametrize(
    ("name", "parts"), [("llama", (4, 1, 1, 1)), ("llama3", (1,) * 7)]
)
def test_logits_with_the_cache_are_those_without(name, parts):
    model, ids = loaded(name), inputs_of(name)
    cache = llama.KVCache(model.config, 2, 8)
    ends = np.cumsum(parts)
    pieces = [forward(model, ids[:, e - n : e], cache) for e, n in zip(ends, parts)]
    found = jnp.concatenate(pieces, axis=1)
    np.testing.assert_allclose(found, forward(model, ids), atol=1e-5)
    assert cache.length[...].tolist() == [7] * model.config.layers


def test_a_full_cache_refuses_more_and_stays_as_it_was():
    model, ids = loaded("llama"), inputs_of("llama")
    cache = llama.KVCache(model.config, 2, 8)
    forward(model, ids, cache)
    before = jax.tree.map(np.array, cache)
    with pytest.raises(ValueError, match=r"2 more positions.*7 of 8 are taken"):
        model(ids[:, :2], cache)
    jax.tree.map(np.testing.assert_array_equal, cache, before)
    assert jnp.isfinite(forward(model, ids[:, :1], cache)).all()


def test_under_jit_what_no_longer_fits_the_cache_is_nan():
    model, ids = loaded("llama"), inputs_of("llama")
    cache = llama.KVCache(model.config, 2, 8)
    assert jnp.isfinite(forward(model, ids, cache)).all()
    assert jnp.isfinite(forward(model, ids[:, :1], cache)).all()
    assert jnp.isnan(forward(model, ids[:, :1], cache)).all()
    with pytest.raises(ValueError, match="0 of 4 are taken"):
        forward(model, ids, llama.KVCache(model.config, 2, 4))


def test_a_cache_for_another_batch_is_refused():
    model, ids = loaded("llama"), inputs_of("llama")
    with pytest.raises(ValueError, match="by a batch of 3"):
        model(ids, llama.KVCache(model.config, 3, 8))


@pytest.mark.parametrize("steps", [0, 18])
def test_generation_stays_within_the_positions(steps):
    with pytest.raises(ValueError, match="there are 24 positions"):
        llama.generate(loaded("llama"), inputs_of("llama"), steps)


# Inputs, and the programs.


def test_gpt2_refuses_more_tokens_than_positions():
    model = loaded("gpt2")
    assert tt.eval_shape(model, jnp.zeros((1, 24), int)).shape == (1, 24, 97)
    with pytest.raises(ValueError, match="25 tokens, and there are 24 positions"):
        model(jnp.zeros((1, 25), int))


@pytest.mark.parametrize("shape", [(2, 3, 16, 16), (2, 8, 16, 3), (16, 16, 3)])
def test_vit_refuses_images_of_another_shape(shape):
    with pytest.raises(ValueError, match="height, width, channels"):
        loaded("vit")(jnp.zeros(shape))


def test_a_program_prints_a_table(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["llama.py", str(DATA / "llama3")])
    llama.main()
    told = capsys.readouterr().out
    assert "max error" in told
    assert "31 outputs within 0.0001" in told


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit"])
def test_a_program_runs_on_a_folder_without_a_reference(
    name, capsys, monkeypatch, tmp_path
):
    folder = edited(DATA / name, tmp_path / "plain")
    (folder / "expected.safetensors").unlink()
    monkeypatch.setattr(sys, "argv", [f"{name}.py", str(folder)])
    EXAMPLES[name].main()
    assert "Record: " in capsys.readouterr().out


def test_the_reference_data_are_small():
    sizes = [path.stat().st_size for path in DATA.rglob("*") if path.is_file()]
    assert sum(sizes) < 1_000_000
