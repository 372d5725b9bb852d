# SPDX-License-Identifier: Apache-2.0
"""Every public name of NNX is where NNX has it, or is left out on purpose.

`tests/data/nnx_names.json` has the names that `dir()` shows in the modules of flax.nnx
0.12.8, without those that a module only imports.
"""

import copy
import importlib
import json
import pathlib
import pickle
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from treetap import nnx

DATA = pathlib.Path(__file__).parents[1] / "data" / "nnx_names.json"
NAMES = {
    module: names.split() for module, names in json.loads(DATA.read_text()).items()
}

# What is left out, by the reason.
LEFT_OUT = {
    "there is no Linen to bridge to": "bridge wrappers",
    "hijax Variables are not supported": """
        AbstractRef AbstractVariable Effect GetVariable HijaxVariable HijaxVariableMeta
        NewVariable PyTreeDef Ref SetVariable VariableEffect VariableQDD get_variable_p
        new_variable_p set_variable_p variable_effect
    """,
    "type variables, and types that only signatures name": """
        A B C F Fargs G HA HB K KeyT MA N P R S T TS V AttrType AxisFn IsLeafCallable
        KeepFn LeafType Leaves Names Node NodeDefType NodeImpl NodeStats OrderedDict
        RNNBase StrInt BwdFn FwdFn
    """,
    "how NNX takes objects apart": """
        ArrayRefDef ArrayRefOutput AuxData DataElem GRAPH_CONTEXT GRAPH_REGISTRY
        GenericPytree GraphContext GraphNodeImpl IndexMap IndexesPytreeDef
        JAX_PYTREE_REGISTRY LEAF_ATTR LeafAttr NODE_ATTR NO_UPDATE NoUpdate NodeAttr
        NodeImplBase PYTREE_NODE_IMPL PYTREE_REGISTRY PythonRefMap PytreeNodeImpl
        REPEATED RefMap Repeated StaticCache StaticElem TreeNodeDef UpdateContextManager
        config get_node_impl get_node_impl_for_type graph_pop is_node_module
        is_node_type register_graph_node_type register_pytree_node_type static_cache
        ModuleDefApply AttributeStatus BUILDING_DOCS DATA_REGISTRY DataAnnotation
        StaticAnnotation OBJECT_CONTEXT ObjectContext PytreeState create_path_filters
        VARIABLE_CONTEXT VarDefaultsContext VariableContext
    """,
    "how NNX's transforms work inside": """
        ExtractIndex GraphDefState Mask Opaque TreeState Updates apply_updates
        broadcast_prefix broadcast_prefix2 broadcast_prefix_map
        check_consistent_aliasing check_consistent_aliasing2 check_no_aliases
        check_prefix check_same_variables clear_non_graph_nodes copy_var_structure
        default_split_fn extract filter_kwargs find from_tree2 get_updates insert
        labeled mask_at merge_tree_node replace_at slice_at snapshot to_masked to_tree2
        treemap_copy_args update_carry_variables variable_changed resolve_kwargs
        Broadcasted LiftedModule ValueMetadata CustomVjpFnWrapper
        GradFn JitFn ShardMapFn PmapFn ScanFn VmapFn CheckifyFn ForiLoopBodyFn
        WhileLoopBodyFn WhileLoopCondFn
        SimpleBwdFn SimpleCheckifyFn SimpleCompiled SimpleCondFn SimpleCustomVjp
        SimpleCustomVjpFn SimpleEvalShapeFn SimpleForiLoopBodyFn SimpleFwdFn
        SimpleGradFn SimpleJitFn SimpleJitPartialFn SimpleJitPartialWrapped
        SimpleJitWrapped SimpleJvpFn SimpleLowered SimpleMakeJaxprFn
        SimplePartialCompiled SimplePartialLowered SimplePartialTraced SimplePmapFn
        SimpleRematFn SimpleScanFn SimpleShardMapFn SimpleTraced SimpleVjpFn
        SimpleVmapFn SimpleWhileLoopBodyFn SimpleWhileLoopCondFn
    """,
    "how NNX prints": """
        ArrayRepr MutableArrayRepr VariableRepr NestedStateRepr SimpleObjectRepr
        CallInfo ObjectInfo NoneDumper SizeBytes filter_rng_streams
        render_object_constructor COLOR Color NO_COLOR REPR_CONTEXT ReprContext
        colorized supports_color flax_config MappingReprMixin SequenceReprMixin
    """,
}
NOT_HERE = {name for names in LEFT_OUT.values() for name in names.split()}


@pytest.mark.parametrize("place", NAMES, ids=lambda place: place or "nnx")
def test_every_name_is_where_nnx_has_it(place):
    module = importlib.import_module(f"treetap.nnx.{place}".rstrip("."))
    missing = {name for name in NAMES[place] if not hasattr(module, name)}
    assert missing <= NOT_HERE
    assert set(NAMES[place]) - missing <= set(dir(module))


@pytest.mark.parametrize("place", NAMES, ids=lambda place: place or "nnx")
def test_under_flax_the_names_are_the_same(place):
    ours = importlib.import_module(f"treetap.nnx.{place}".rstrip("."))
    with tt.as_flax():
        module = importlib.import_module(f"flax.nnx.{place}".rstrip("."))
        for name in {*NAMES[place]} - NOT_HERE:
            held, found = getattr(ours, name), getattr(module, name)
            is_module = isinstance(found, types.ModuleType)
            assert found.__name__.startswith("flax.nnx") if is_module else found is held


def test_nothing_is_left_out_twice_or_without_need():
    listed = [name for names in LEFT_OUT.values() for name in names.split()]
    assert len(listed) == len(set(listed))
    assert {*listed} <= {name for names in NAMES.values() for name in names}


@pytest.mark.parametrize("name", ["bridge", "wrappers", "HijaxVariable"])
def test_what_is_left_out_says_why(name):
    with pytest.raises(AttributeError, match=r"Linen|hijax"):
        getattr(nnx, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        nnx.nothing


def test_the_bridge_cannot_be_imported():
    with pytest.raises(ImportError, match="no Linen to bridge"):
        from treetap.nnx import bridge  # noqa: F401


def fresh(program):
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_treetap_loads_nothing_of_the_namespace():
    program = "import sys, treetap; print(*[m for m in sys.modules if 'nnx' in m])"
    assert fresh(program) == []


def test_the_namespace_loads_its_modules_when_they_are_used():
    program = """
import sys
from treetap import nnx
print("treetap.nnx.filterlib" in sys.modules, "treetap._nn.linear" in sys.modules)
nnx.filterlib
from treetap.nnx.nn.dtypes import promote_dtype
print("treetap.nnx.filterlib" in sys.modules, nnx.nn.dtypes.__name__)
"""
    assert fresh(program) == ["False", "False", "True", "treetap.nnx.nn.dtypes"]


def test_second_names_of_modules():
    assert nnx.object is nnx.pytreelib
    assert nnx.optimizer is nnx.training.optimizer
    assert nnx.graph.split is nnx.graphlib.split is nnx.split
    with pytest.warns(DeprecationWarning, match="VariableState"):
        assert nnx.VariableState is nnx.Variable


GENERIC = """
    GraphDef State PureState FlatState GraphState Variable Param LoRAParam List Dict
    Optimizer ModelAndOptimizer StateAxes TrainState VariableMetadata Data Static
"""


@pytest.mark.parametrize("kind", GENERIC.split())
def test_generics_are_subscriptable(kind):
    assert getattr(nnx, kind)[nnx.Linear] is not None


def test_a_subscripted_kind_makes_the_same():
    assert type(nnx.Param[jax.Array](jnp.ones(2))) is nnx.Param
    assert dict(nnx.State[str, int]({"a": 1})) == {"a": 1}
    graphdef = nnx.graphdef(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
    assert pickle.loads(pickle.dumps(graphdef)) == graphdef
    assert copy.copy(graphdef) == graphdef


@pytest.mark.parametrize("name", ["State", "Param", "TrainState", "GraphDef", "Rngs"])
def test_classes_pickle_by_the_place_that_defines_them(name):
    held = getattr(nnx, name)
    assert pickle.loads(pickle.dumps(held)) is held
