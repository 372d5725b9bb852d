# SPDX-License-Identifier: Apache-2.0
"""What NNX's modules have beside names of treetap: small functions and classes."""

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from treetap import nnx
from treetap.nnx import graphlib, helpers, ids, proxy_caller, reprlib, spmd, tracers
from treetap.nnx.deprecations import deprecated
from treetap.nnx.nn import attention, dtypes, linear, lora, recurrent
from treetap.nnx.training.optimizer import to_opt_state
from treetap.nnx.transforms import general


def test_numbers_are_given_once():
    one, two = ids.uuid(), ids.uuid()
    assert one != two
    assert one == ids.UUID(one.id)
    assert len({one, two, ids.UUID(one.id)}) == 2
    assert repr(ids.UUID(3)) == "UUID(3)"


def test_a_deprecated_function_names_the_new_one():
    with pytest.warns(DeprecationWarning, match="Use abs instead"):
        assert deprecated(abs)(-1) == 1


def test_paths_of_calls():
    proxy = proxy_caller.CallableProxy(lambda path, *args: (path, args))
    path, args = proxy.blocks[1].attend(2)
    assert args == (2,)
    assert path.actions == (
        proxy_caller.GetAttr("blocks"),
        proxy_caller.GetItem(1),
        proxy_caller.GetAttr("attend"),
    )
    assert proxy_caller.DelayedAccessor().a["b"](nnx.Dict(a={"b": 3})) == 3
    for each in (proxy, path):
        with pytest.raises(AttributeError):
            each.__missing__


class Shown(reprlib.Representable):
    def __nnx_repr__(self):
        yield reprlib.Object(type(self), comment="# hi")
        yield reprlib.Attr("a", 1)
        yield reprlib.Attr("b", "text", use_raw_value=True)


class Empty(reprlib.Representable):
    def __nnx_repr__(self):
        yield reprlib.Object("Empty")


class Line(reprlib.Representable):
    def __nnx_repr__(self):
        yield reprlib.Object("", "<", ">", same_line=True)
        yield reprlib.Attr("a", 1)
        yield reprlib.Attr("b", 2)


def test_objects_print_an_attribute_a_line():
    assert repr(Shown()) == str(Shown()) == "Shown(# hi\n  a=1,\n  b=text\n)"
    assert reprlib.get_repr(Empty()) == "Empty()"
    assert repr(Line()) == "<a=1, b=2>"
    pretty = reprlib.PrettyMapping({"a": Empty()})
    assert repr(pretty) == "PrettyMapping({\n  'a': Empty()\n})"
    assert repr(reprlib.PrettySequence([1, 2])) == "PrettySequence([\n  1,\n  2\n])"


def test_what_cannot_print_so_is_refused():
    with pytest.raises(TypeError, match="expected a Representable, got int"):
        reprlib.get_repr(1)
    with pytest.raises(NotImplementedError, match="has no `__nnx_repr__`"):
        repr(type("Bare", (reprlib.Representable,), {})())


def test_trace_states_know_their_level():
    here = tracers.TraceState()
    assert here.is_valid()
    assert "TraceState" in repr(here)
    inside = []
    jax.make_jaxpr(lambda x: inside.append(here.is_valid()) or x)(1.0)
    assert inside == [False]
    assert tracers.current_jax_trace() == here.jax_trace


def test_what_is_a_node():
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    leaves = (model.kernel, jnp.ones(2))
    assert [graphlib.is_node(x) for x in (model, [1], {}, None)] == [True] * 4
    assert [graphlib.is_node(x) for x in (*leaves, 1, "a")] == [False] * 4
    assert graphlib.is_graph_node(model)
    assert not graphlib.is_graph_node([1])
    assert not graphlib.is_pytree_node(model)
    assert [graphlib.is_node_leaf(x) for x in (*leaves, 1)] == [True, True, False]
    keys = (jax.tree_util.GetAttrKey("a"), jax.tree_util.SequenceKey(1))
    assert graphlib.jax_to_nnx_path(keys) == ("a", 1)


def test_keyword_arguments():
    assert helpers.has_keyword_arg(lambda a, b=1: a, "b")
    assert helpers.has_keyword_arg(lambda **kw: kw, "b")
    assert not helpers.has_keyword_arg(lambda a: a, "b")


def test_names_of_axes_are_put_in_and_taken_out():
    kernel = nnx.Param(jnp.ones(2), out_sharding=("a",), eager_sharding=False)
    tree = {"kernel": kernel}
    names = {nnx.PARTITION_NAME: "x"}
    spmd.add_axis(tree, 0, names)
    assert kernel.out_sharding == ("x", "a")
    assert spmd.get_var_pspec(kernel) == jax.sharding.PartitionSpec("x", "a")
    with pytest.raises(tt.MetadataError, match="expected 'y' at axis 0"):
        spmd.remove_axis(tree, 0, {nnx.PARTITION_NAME: "y"})
    spmd.remove_axis(tree, 0, names)
    assert kernel.out_sharding == ("a",)


def test_weights_of_attention():
    query, key = (
        jax.random.normal(jax.random.key(n), (2, 3 + n, 4, 8)) for n in (0, 1)
    )
    weights = attention.dot_product_attention_weights(query, key)
    assert weights.shape == (2, 4, 3, 4)
    assert jnp.allclose(weights.sum(-1), 1.0)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights, key)
    assert jnp.allclose(out, nnx.dot_product_attention(query, key, key), atol=1e-6)


def test_dtypes_and_defaults_of_layers():
    assert dtypes.canonicalize_dtype(jnp.ones(1, jnp.bfloat16), None) == jnp.bfloat16
    assert dtypes.canonicalize_dtype(1) == jnp.float32
    assert dtypes.canonicalize_dtype(1, inexact=False) == jnp.int32
    with pytest.raises(ValueError, match="floating or complex"):
        dtypes.canonicalize_dtype(1, dtype=jnp.int32)
    key = jax.random.key(0)
    for init in (lora.default_b_initializer, linear.default_bias_init):
        assert init(key, (2,), jnp.float32).tolist() == [0.0, 0.0]
    assert lora.default_a_initializer(key, (2, 3), jnp.float32).shape == (2, 3)
    assert (
        recurrent.modified_orthogonal(key, (2, 2), jnp.bfloat16).dtype == jnp.bfloat16
    )


def test_padding():
    assert linear.canonicalize_padding("SAME", 2) == "SAME"
    assert linear.canonicalize_padding(2, 2) == [(2, 2), (2, 2)]
    assert linear.canonicalize_padding([(1, 2), 3], 2) == [(1, 2), (3, 3)]
    with pytest.raises(ValueError, match="2 of them"):
        linear.canonicalize_padding((1,), 2)


def test_optimizer_state():
    kept = to_opt_state({"a": nnx.Param(jnp.ones(1), note=1), "b": (2.0, None)})
    assert (type(kept["a"]), kept["a"].note) == (nnx.OptVariable, 1)
    assert type(kept["b"][0]) is nnx.OptArray
    assert kept["b"][1] is None


@pytest.mark.parametrize("options", [{}, {"ctxtag": "mine"}])
def test_any_transform_takes_objects(options):
    @general.split_inputs(**options)
    @jax.jit
    @general.merge_inputs(**options)
    def double(model, x):
        model.kernel[...] *= 2
        model.count = nnx.Variable(jnp.array(1))
        return model(x)

    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    before = model.kernel[...]
    out = double(model, jnp.ones((1, 1)))
    assert jnp.array_equal(model.kernel[...], 2 * before)
    assert jnp.array_equal(out, 2 * before)
    assert int(model.count[...]) == 1
    bare = general.split_inputs(general.merge_inputs(lambda m: m.count[...] + 0))
    assert int(bare(model)) == 1
