# SPDX-License-Identifier: Apache-2.0
"""Where the reference of each output is: sites of our models, names of transformers'.

Tables for `compare`, which says how they are read. What `make_reference` left out as a
copy is named by what it is a copy of: a last projection is its module's output.
"""

from reference.compare import Source

GPT2: dict[str, Source] = {
    "tokens": "transformer.wte",
    "positions": "transformer.wpe",
    ":embedded": "hidden_states.0",
    "blocks/{i}": "transformer.h.{i}",
    "blocks/{i}/norm_{n}": "transformer.h.{i}.ln_{n}",
    "blocks/{i}/attn": "transformer.h.{i}.attn",
    "blocks/{i}/attn/query": ("transformer.h.{i}.attn.c_attn", 0, 3),
    "blocks/{i}/attn/key": ("transformer.h.{i}.attn.c_attn", 1, 3),
    "blocks/{i}/attn/value": ("transformer.h.{i}.attn.c_attn", 2, 3),
    "blocks/{i}/attn:attention_weights": "transformer.h.{i}.attn.weights",
    "blocks/{i}/attn/out": "transformer.h.{i}.attn",
    "blocks/{i}/mlp": "transformer.h.{i}.mlp",
    "blocks/{i}/mlp/up": "transformer.h.{i}.mlp.c_fc",
    "blocks/{i}/mlp/down": "transformer.h.{i}.mlp",
    "norm": "transformer.ln_f",
    "tokens:attend": "logits",
    "": "logits",
}

VIT: dict[str, Source] = {
    "patches/project": "vit.embeddings.patch_embeddings",
    "patches": "vit.embeddings",
    "blocks/{i}": "vit.layers.{i}",
    "blocks/{i}/norm_1": "vit.layers.{i}.layernorm_before",
    "blocks/{i}/attn": "vit.layers.{i}.attention",
    "blocks/{i}/attn/query": "vit.layers.{i}.attention.q_proj",
    "blocks/{i}/attn/key": "vit.layers.{i}.attention.k_proj",
    "blocks/{i}/attn/value": "vit.layers.{i}.attention.v_proj",
    "blocks/{i}/attn:attention_weights": "vit.layers.{i}.attention.weights",
    "blocks/{i}/attn/out": "vit.layers.{i}.attention",
    "blocks/{i}/norm_2": "vit.layers.{i}.layernorm_after",
    "blocks/{i}/mlp": "vit.layers.{i}.mlp",
    "blocks/{i}/mlp/up": "vit.layers.{i}.mlp.fc1",
    "blocks/{i}/mlp/down": "vit.layers.{i}.mlp",
    "norm": "vit.layernorm",
    "head": "logits",
    "": "logits",
}


def llama(layers: int, tied: bool) -> dict[str, Source]:
    """For a stack of layers: one site, whose leading axis counts them."""
    return {
        "tokens": "model.embed_tokens",
        "layers": "model.layers.{i}",
        "layers/norm_1": "model.layers.{i}.input_layernorm",
        "layers/attn": "model.layers.{i}.self_attn",
        "layers/attn/query": "model.layers.{i}.self_attn.q_proj",
        "layers/attn/key": "model.layers.{i}.self_attn.k_proj",
        "layers/attn/value": "model.layers.{i}.self_attn.v_proj",
        "layers/attn:attention_weights": "model.layers.{i}.self_attn.weights",
        "layers/attn/out": "model.layers.{i}.self_attn",
        "layers/norm_2": "model.layers.{i}.post_attention_layernorm",
        "layers/mlp": "model.layers.{i}.mlp",
        "layers/mlp/gate": "model.layers.{i}.mlp.gate_proj",
        "layers/mlp/up": "model.layers.{i}.mlp.up_proj",
        "layers/mlp/down": "model.layers.{i}.mlp",
        "layers:in_turn": f"model.layers.{layers - 1}",
        "norm": "model.norm",
        "tokens:attend" if tied else "head": "logits",
        "": "logits",
    }
