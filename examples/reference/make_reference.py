# SPDX-License-Identifier: Apache-2.0
"""Small random checkpoints made with `transformers`, and what every layer puts out.

Writes a folder per model: `config.json` and `model.safetensors` as
`save_pretrained` makes them, and `expected.safetensors` with an input, the output of
every submodule under its Hugging Face name, and the logits. All parameters are random,
biases and norms too: an error in any of them shows. The tests and the examples read
these files and need neither torch nor transformers; to make them again:

    python -m venv .venv-reference
    .venv-reference/bin/pip install torch==2.13.0 transformers==5.18.0 safetensors numpy
    .venv-reference/bin/python examples/reference/make_reference.py
"""

import argparse
import pathlib
import shutil
from typing import Any

import torch  # pyright: ignore[reportMissingImports] - only this script needs it
import transformers  # pyright: ignore[reportMissingImports] - only this script needs it
from safetensors.torch import save_file

OUT = pathlib.Path(__file__).parents[2] / "tests" / "data" / "models"
BATCH, LENGTH, STEPS = 2, 7, 8


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=97,
        n_positions=24,
        n_embd=32,
        n_layer=3,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=24,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


def llama3() -> Any:
    """As Llama 3.2, with scaled frequencies and tied logits; and biases besides."""
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 50.0,  # so small that all three bands of the scaling are met
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 2.0,
        "original_max_position_embeddings": 24,
    }
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=12,
        max_position_embeddings=96,
        rope_parameters=scaling,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
    )
    return transformers.LlamaForCausalLM(config)


def vit() -> Any:
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_channels=3,
        num_labels=5,
    )
    return transformers.ViTForImageClassification(config)


MODELS = {"gpt2": gpt2, "llama": llama, "llama3": llama3, "vit": vit}


def randomise(model: Any, generator: torch.Generator) -> None:
    """Draws every parameter anew: default biases are 0 and default norms are 1."""
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = 0.25 * torch.randn(parameter.shape, generator=generator)
            is_scale = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(1 + noise if is_scale else noise)


def inputs_of(model: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    if model.main_input_name == "pixel_values":
        size, channels = model.config.image_size, model.config.num_channels
        shape = (BATCH, channels, size, size)
        return {"pixel_values": torch.randn(shape, generator=generator)}
    shape = (BATCH, LENGTH)
    ids = torch.randint(model.config.vocab_size, shape, generator=generator)
    return {"input_ids": ids}


def outputs_of(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One run: what each submodule returns, by name, and the weights of attention."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, args: Any, out: Any) -> None:
            first, *rest = out if isinstance(out, tuple) else (out,)
            if rest:
                found[f"{name}.weights"] = rest[0]
            if isinstance(first, torch.Tensor):
                assert name not in found, f"{name} was called twice"
                found[name] = first.clone()

        return hook

    skipped = ("Dropout", "Activation", "Rotary", "Conv2d")
    handles = [
        module.register_forward_hook(keep(name))
        for name, module in model.named_modules()
        if name and not any(word in type(module).__name__ for word in skipped)
    ]
    with torch.no_grad():
        out = model(**inputs, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    states = {f"hidden_states.{n}": x for n, x in enumerate(out.hidden_states)}
    return without_copies({"logits": out.logits, **found, **states})


def without_copies(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leaves out what is there already under a shorter name: a last projection is its
    module's output, and most hidden states are the outputs of layers."""
    kept: dict[str, torch.Tensor] = {}
    is_state = {name: name.startswith("hidden_states") for name in found}
    for name in sorted(found, key=lambda name: (is_state[name], len(name), name)):
        if not any(torch.equal(found[name], other) for other in kept.values()):
            kept[name] = found[name]
    return kept


def continuation(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The likeliest next tokens, each found by a run over all that came before."""
    with torch.no_grad():
        for _ in range(STEPS):
            logits = model(input_ids=ids, use_cache=False).logits[:, -1]
            top = logits.topk(2).values
            assert (top[:, 0] - top[:, 1]).min() > 1e-3, (
                "nearly a tie: take another seed"
            )
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids


def make(name: str, folder: pathlib.Path) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = MODELS[name]().float().eval()
    model.set_attn_implementation("eager")
    randomise(model, generator)
    inputs = inputs_of(model, generator)
    expected = {**inputs, **outputs_of(model, inputs)}
    if name.startswith("llama"):
        expected["continuation"] = continuation(model, inputs["input_ids"])

    shutil.rmtree(folder, ignore_errors=True)
    # the tied one in several files, as large checkpoints come
    model.save_pretrained(folder, max_shard_size="40KB" if name == "llama3" else "1GB")
    (folder / "generation_config.json").unlink(missing_ok=True)
    tensors = {key: value.contiguous().clone() for key, value in expected.items()}
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    made_by = {"made_by": versions}
    save_file(tensors, folder / "expected.safetensors", metadata=made_by)
    for path in folder.iterdir():
        path.chmod(0o644)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{name}: {len(tensors)} tensors expected, {size / 1024:.0f} KB in {folder}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the reference data.")
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    out = parser.parse_args().out
    torch.set_num_threads(1)  # sums in one order: the same files each time
    for name in MODELS:
        make(name, out / name)


if __name__ == "__main__":
    main()
