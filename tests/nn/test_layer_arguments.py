# SPDX-License-Identifier: Apache-2.0
"""Arguments of layers: kept as attributes, or landing as metadata on parameters."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from formulas import drawing, made

import treetap as tt
from treetap import nnx

HALF = jnp.float16


def promote(values, /, **options):
    return tt.promote_dtype(values, **options)


def operation(*args, **options):
    return jax.lax.dot_general(*args, **options)


def linear():
    return made(tt.Linear, 3, 4)


def gru():
    return made(tt.GRUCell, 3, 4)


TYPES = {"dtype": HALF, "param_dtype": HALF, "promote_dtype": promote}
LINEAR = {**TYPES, "precision": "highest", "preferred_element_type": jnp.float32}
NORM = {
    **TYPES,
    "epsilon": 0.5,
    "use_bias": False,
    "use_scale": False,
    "axis_name": "rows",
    "axis_index_groups": ((0, 1), (2, 3)),
    "use_fast_variance": False,
}
RMS = {name: value for name, value in NORM.items() if name != "use_bias"}
CELL = {**TYPES, "activation_fn": jnp.sin}
GATED = {**CELL, "gate_fn": jnp.cos}

# Each layer with arguments that are not the defaults: all that its signature has.
CASES = {
    tt.Linear: ((3, 4), {**LINEAR, "use_bias": False, "dot_general": operation}),
    tt.LinearGeneral: (
        ((3,), (4,)),
        {
            **LINEAR,
            "axis": (1,),
            "batch_axis": {0: 2},
            "use_bias": False,
            "dot_general": operation,
            "dot_general_cls": object,
        },
    ),
    tt.Einsum: (("ab,bc->ac", (3, 4), (4,)), {**LINEAR, "einsum_op": operation}),
    tt.Conv: (
        (4, 6, (3,), (2,)),
        {
            **LINEAR,
            "padding": "VALID",
            "input_dilation": 2,
            "kernel_dilation": (3,),
            "feature_group_count": 2,
            "use_bias": False,
            "conv_general_dilated": operation,
        },
    ),
    tt.ConvTranspose: (
        (4, 6, (3,), (2,)),
        {
            **LINEAR,
            "padding": ((1, 2),),
            "kernel_dilation": 3,
            "use_bias": False,
            "transpose_kernel": True,
        },
    ),
    tt.Embed: ((5, 3), TYPES),
    tt.LoRA: (
        (3, 2, 4),
        {**TYPES, "base_module": jnp.sin, "lora_param_type": tt.Param},
    ),
    tt.LoRALinear: (
        (3, 4),
        {"lora_rank": 2, "use_bias": False, "param_dtype": HALF, "rngs": tt.Rngs(0)},
    ),
    tt.PReLU: ((), TYPES),
    tt.BatchNorm: (
        (3,),
        {**NORM, "use_running_average": True, "axis": 1, "momentum": 0.5},
    ),
    tt.LayerNorm: ((3,), {**NORM, "reduction_axes": (0, 1), "feature_axes": 1}),
    tt.RMSNorm: ((3,), {**RMS, "reduction_axes": (0, 1), "feature_axes": 1}),
    tt.GroupNorm: ((6, 3, None), {**NORM, "reduction_axes": (1, 2)}),
    tt.InstanceNorm: ((3,), {**NORM, "feature_axes": (1,)}),
    tt.SpectralNorm: (
        (linear(),),
        {
            "n_steps": 3,
            "epsilon": 0.5,
            "dtype": HALF,
            "param_dtype": HALF,
            "error_on_non_matrix": True,
        },
    ),
    tt.WeightNorm: (
        (linear(),),
        {
            **TYPES,
            "feature_axes": (0, 1),
            "use_scale": False,
            "scale_init": jnp.sin,
            "epsilon": 0.5,
            "variable_filter": tt.Param,
        },
    ),
    tt.Dropout: (
        (0.5,),
        {"broadcast_dims": (0,), "deterministic": True, "rng_collection": "noise"},
    ),
    tt.MultiHeadAttention: (
        (4, 3, 8, 5, 2, 6),
        {
            "dtype": HALF,
            "param_dtype": HALF,
            "broadcast_dropout": False,
            "dropout_rate": 0.5,
            "deterministic": True,
            "precision": "highest",
            "use_bias": False,
            "attention_fn": operation,
            "decode": True,
            "normalize_qk": True,
            "qkv_promote_dtype": promote,
            "out_promote_dtype": promote,
            "ln_promote_dtype": promote,
            "qkv_dot_general": operation,
            "out_dot_general": operation,
            "qkv_dot_general_cls": object,
            "out_dot_general_cls": object,
            "implementation": "xla",
        },
    ),
    tt.LSTMCell: ((3, 4), GATED),
    tt.OptimizedLSTMCell: ((3, 4), GATED),
    tt.GRUCell: ((3, 4), GATED),
    tt.SimpleCell: ((3, 4), {**CELL, "residual": True}),
    tt.RNN: (
        (gru(),),
        {
            "time_major": True,
            "return_carry": True,
            "reverse": True,
            "keep_order": True,
            "unroll": 2,
            "state_axes": nnx.StateAxes({...: None}),
            "broadcast_rngs": "noise",
        },
    ),
    tt.Bidirectional: (
        (tt.RNN(gru()), tt.RNN(gru())),
        {"merge_fn": jnp.add, "time_major": True, "return_carry": True},
    ),
}

# Arguments that are no attributes: used up, or kept under another name.
NOT_KEPT = {
    tt.GroupNorm: {"num_features", "group_size"},
    tt.LoRA: {"lora_rank"},
    tt.LoRALinear: {"lora_rank"},
    tt.SpectralNorm: {"update_stats"},
    tt.Conv: {"mask"},  # told apart in the tests of convolutions
    tt.ConvTranspose: {"mask"},
}


def is_used_up(cls, name):
    ends = ("_init", "_initializer", "_metadata")
    kept = (cls, name) == (tt.WeightNorm, "scale_init")
    if name in {"self", "rngs", "keep_rngs", "kwargs"} or name in NOT_KEPT.get(cls, ()):
        return True
    return name.endswith(ends) and not kept


@pytest.mark.parametrize("cls", CASES, ids=lambda cls: cls.__name__)
def test_arguments_are_kept_as_attributes(cls):
    args, options = CASES[cls]
    layer = made(cls, *args, **options)
    signature = inspect.signature(cls.__init__)
    given = signature.bind_partial(layer, *args, **options).arguments
    given.update(given.pop("kwargs", {}))
    expected = {name for name in signature.parameters if not is_used_up(cls, name)}
    if cls is tt.LoRALinear:  # what it hands on is told in the tests of adapters
        expected = set(given) - {"self", "lora_rank", "rngs"}
    assert expected <= given.keys(), "the table leaves an argument out"
    for name in expected:
        found = getattr(layer, name)
        assert found is given[name] or found == given[name], name


# Public attributes as NNX has them.
RECORDED = {
    tt.Linear: "bias dot_general dtype in_features kernel out_features param_dtype "
    "precision preferred_element_type promote_dtype use_bias",
    tt.LinearGeneral: "axis batch_axis bias dot_general dot_general_cls dtype "
    "in_features kernel out_features param_dtype precision preferred_element_type "
    "promote_dtype use_bias",
    tt.Einsum: "bias bias_shape dtype einsum_op einsum_str kernel kernel_shape "
    "param_dtype precision preferred_element_type promote_dtype",
    tt.Conv: "bias conv_general_dilated dtype feature_group_count in_features "
    "input_dilation kernel kernel_dilation kernel_shape kernel_size mask out_features "
    "padding param_dtype precision preferred_element_type promote_dtype strides "
    "use_bias",
    tt.ConvTranspose: "bias dtype in_features kernel kernel_dilation kernel_shape "
    "kernel_size mask out_features padding param_dtype precision "
    "preferred_element_type promote_dtype strides transpose_kernel use_bias",
    tt.GroupNorm: "axis_index_groups axis_name bias dtype epsilon feature_axis "
    "group_size num_groups param_dtype promote_dtype reduction_axes scale use_bias "
    "use_fast_variance use_scale",
    tt.LoRA: "base_module dtype in_features lora_a lora_b lora_param_type out_features "
    "param_dtype promote_dtype",
    tt.SpectralNorm: "batch_stats dtype epsilon error_on_non_matrix layer_instance "
    "n_steps param_dtype use_running_average",
    tt.WeightNorm: "dtype epsilon feature_axes layer_instance param_dtype "
    "promote_dtype scale_init scales use_scale variable_filter",
    tt.Dropout: "broadcast_dims deterministic rate rng_collection rngs",
    tt.MultiHeadAttention: "attention_fn broadcast_dropout cache_index cached_key "
    "cached_value decode deterministic dropout_rate dtype head_dim in_features "
    "in_kv_features key key_ln ln_promote_dtype normalize_qk num_heads num_kv_heads "
    "out out_dot_general out_dot_general_cls out_features out_promote_dtype "
    "param_dtype precision qkv_dot_general qkv_dot_general_cls qkv_features "
    "qkv_promote_dtype query query_ln rngs use_bias value",
    tt.LSTMCell: "activation_fn carry_init dtype gate_fn hf hg hi hidden_features ho "
    "if_ ig ii in_features io param_dtype promote_dtype rngs",
    tt.SimpleCell: "activation_fn carry_init dense_h dense_i dtype hidden_features "
    "in_features param_dtype promote_dtype residual rngs",
    tt.RNN: "broadcast_rngs cell keep_order return_carry reverse rngs state_axes "
    "time_major unroll",
}


@pytest.mark.parametrize("cls", RECORDED, ids=lambda cls: cls.__name__)
def test_attributes_have_the_names_of_nnx(cls):
    args, options = CASES[cls]
    layer = made(cls, *args, **options)
    assert [name for name in RECORDED[cls].split() if not hasattr(layer, name)] == []


# Metadata, as argument of the layer, and of an initializer.

GATES = ("ii", "if_", "ig", "io")
METADATA = {
    tt.Linear: ((3, 4), {"kernel": ["kernel"], "bias": ["bias"]}),
    tt.LinearGeneral: (((3, 2), (4, 5)), {"kernel": ["kernel"], "bias": ["bias"]}),
    tt.Einsum: (
        ("ab,bc->ac", (3, 4), (4,)),
        {"kernel": ["kernel"], "bias": ["bias"]},
    ),
    tt.Conv: ((3, 4, 3), {"kernel": ["kernel"], "bias": ["bias"]}),
    tt.ConvTranspose: ((3, 4, 3), {"kernel": ["kernel"], "bias": ["bias"]}),
    tt.Embed: ((5, 3), {"embedding": ["embedding"]}),
    tt.LoRA: ((3, 2, 4), {"a": ["lora_a"], "b": ["lora_b"]}),
    tt.LoRALinear: ((3, 4), {"a": ["lora.lora_a"], "b": ["lora.lora_b"]}),
    tt.BatchNorm: ((3,), {"scale": ["scale"], "bias": ["bias"]}),
    tt.LayerNorm: ((3,), {"scale": ["scale"], "bias": ["bias"]}),
    tt.RMSNorm: ((3,), {"scale": ["scale"]}),
    tt.GroupNorm: ((6, 3), {"scale": ["scale"], "bias": ["bias"]}),
    tt.InstanceNorm: ((3,), {"scale": ["scale"], "bias": ["bias"]}),
    tt.MultiHeadAttention: (
        (2, 4),
        {
            "kernel": ["query.kernel", "key.kernel", "value.kernel"],
            "bias": ["query.bias", "key.bias", "value.bias"],
            "out_kernel": ["out.kernel"],
            "out_bias": ["out.bias"],
        },
    ),
    tt.LSTMCell: (
        (3, 4),
        {
            "kernel": [f"{gate}.kernel" for gate in GATES],
            "recurrent_kernel": ["hi.kernel", "hf.kernel", "hg.kernel", "ho.kernel"],
            "bias": ["hi.bias", "hf.bias", "hg.bias", "ho.bias"],
        },
    ),
    tt.OptimizedLSTMCell: (
        (3, 4),
        {
            "kernel": ["dense_i.kernel"],
            "recurrent_kernel": ["dense_h.kernel"],
            "bias": ["dense_h.bias"],
        },
    ),
    tt.GRUCell: (
        (3, 4),
        {
            "kernel": ["dense_i.kernel"],
            "recurrent_kernel": ["dense_h.kernel"],
            "bias": ["dense_i.bias"],
        },
    ),
    tt.SimpleCell: (
        (3, 4),
        {
            "kernel": ["dense_i.kernel"],
            "recurrent_kernel": ["dense_h.kernel"],
            "bias": ["dense_i.bias"],
        },
    ),
}
WITH_METADATA = pytest.mark.parametrize("cls", METADATA, ids=lambda cls: cls.__name__)
MORE = {tt.LinearGeneral: {"axis": (-2, -1)}, tt.LoRALinear: {"lora_rank": 2}}


def variables_of(layer):
    state = tt.to_flat_state(tt.state(layer, tt.Param))
    return {".".join(map(str, path)): variable for path, variable in state}


@WITH_METADATA
def test_metadata_land_on_the_parameter_they_are_for(cls):
    args, roles = METADATA[cls]
    given = {f"{role}_metadata": {"role": role} for role in roles}
    layer = made(cls, *args, **given, **MORE.get(cls, {}))
    found = {name: v.get_metadata() for name, v in variables_of(layer).items()}
    for role, names in roles.items():
        for name in names:
            assert found.pop(name)["role"] == role
    assert not any("role" in metadata for metadata in found.values())


@WITH_METADATA
def test_initializers_may_bring_metadata(cls):
    args, roles = METADATA[cls]
    end = "initializer" if cls in (tt.LoRA, tt.LoRALinear) else "init"
    given = {
        f"{role}_{end}": tt.with_metadata(drawing(), role=role, more=1)
        for role in roles
    }
    kept = {f"{role}_metadata": {"role": "other", "own": 2} for role in roles}
    found = variables_of(made(cls, *args, **given, **kept, **MORE.get(cls, {})))
    plain = variables_of(made(cls, *args, **MORE.get(cls, {})))
    for role, names in roles.items():
        for name in names:
            metadata = found[name].get_metadata()
            assert (metadata["role"], metadata["more"], metadata["own"]) == (role, 1, 2)
            assert found[name].shape == plain[name].shape


def test_metadata_of_attention_go_to_the_last_projection_unless_it_has_its_own():
    layer = made(tt.MultiHeadAttention, 2, 4, kernel_metadata={"role": 1})
    assert layer.out.kernel.role == 1
    own = {"out_kernel_metadata": {"other": 2}}
    layer = made(tt.MultiHeadAttention, 2, 4, kernel_metadata={"role": 1}, **own)
    assert "role" not in layer.out.kernel.get_metadata()


def test_metadata_of_normalised_queries_and_keys():
    options = {"query_ln_scale_metadata": {"a": 1}, "key_ln_scale_metadata": {"a": 2}}
    layer = made(tt.MultiHeadAttention, 2, 4, normalize_qk=True, **options)
    assert (layer.query_ln.scale.a, layer.key_ln.scale.a) == (1, 2)


def test_partitioned_initializers_annotate_reshaped_parameters():
    init = tt.with_partitioning(drawing(), (None, None, "model", None))
    with tt.use_eager_sharding(False):
        layer = made(tt.LinearGeneral, (2, 3), (4, 5), axis=(-2, -1), kernel_init=init)
    assert layer.kernel.shape == (2, 3, 4, 5)
    assert layer.kernel.out_sharding == (None, None, "model", None)


def test_what_an_initializer_returns_is_left_as_it_was():
    kept = tt.with_metadata(drawing(), role=1)(None, (6, 4))
    options = {"axis": (-2, -1), "kernel_init": lambda *_: kept}
    made(tt.LinearGeneral, (2, 3), 4, **options)
    assert kept.raw_value.shape == (6, 4)
