# SPDX-License-Identifier: Apache-2.0
"""treetap in flax's place: what imports give, what they refuse, and the way back."""

import importlib
import sys
import types

import jax
import jax.numpy as jnp
import optax
import pytest

import treetap as tt
from treetap import nnx
from treetap.nnx import as_flax


@pytest.fixture
def flax():
    with tt.as_flax():
        yield importlib.import_module("flax")


def run(code):
    space = {}
    exec(code, space)
    return space


def test_imports_give_treetap_and_are_undone():
    before = dict(sys.modules)
    with tt.as_flax():
        found = run(
            "import flax, flax.nnx as a\n"
            "from flax import nnx\n"
            "from flax.nnx import Linear, Rngs\n"
            "import flax.nnx.nn.linear as layers\n"
        )
        assert found["a"] is found["nnx"] is found["flax"].nnx
        assert found["Linear"] is found["layers"].Linear is tt.Linear
        assert found["nnx"].jit is nnx.jit
    assert not [name for name in sys.modules if name.startswith("flax")]
    assert sys.modules.keys() >= before.keys()
    assert as_flax.FINDER not in sys.meta_path


def test_a_plain_call_holds_until_it_is_undone():
    first, second = tt.as_flax(), tt.as_flax()
    first.undo()
    assert run("from flax import nnx")["nnx"].Param is tt.Param
    second.undo()
    second.undo()
    assert "flax" not in sys.modules
    assert as_flax.FINDER not in sys.meta_path


def test_an_imported_flax_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "flax", types.ModuleType("flax"))
    with pytest.raises(ImportError, match="flax is imported already"):
        tt.as_flax()
    assert as_flax.FINDER not in sys.meta_path


@pytest.mark.parametrize("path", sorted(as_flax.MODULES))
def test_every_module_can_be_imported(flax, path):
    module = importlib.import_module(path)
    for name in as_flax.MODULES[path]:
        assert hasattr(module, name)
    assert {name for name in dir(module) if name[0] != "_"} >= {
        name for name in as_flax.MODULES[path] if name[0] != "_"
    }


def test_submodules_are_attributes(flax):
    assert flax.nnx.spmd.get_partition_spec is nnx.get_partition_spec
    assert flax.nnx.training.optimizer.Optimizer is nnx.Optimizer
    assert flax.nnx.metrics.Accuracy is nnx.metrics.Accuracy
    assert flax.nnx.initializers.lecun_normal is nnx.initializers.lecun_normal
    assert flax.nnx.object is flax.nnx.pytreelib
    assert flax.nnx.filterlib.to_predicate(tt.Param)((), tt.Param(1))
    (only,) = flax.nnx.filterlib.filters_to_predicates([tt.Param])
    assert not only((), tt.Cache(1))


def test_modules_answer_after_the_undoing():
    with tt.as_flax():
        kept = importlib.import_module("flax.nnx")
    assert kept.spmd.PARTITION_NAME is nnx.PARTITION_NAME
    assert "flax" not in sys.modules


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("from flax.linen import scan", "no flax.linen.scan: treetap has NNX's"),
        ("import flax.linen.spmd", "no flax.linen.spmd: treetap has NNX's Modules"),
        ("from flax.nnx import bridge", "no flax.nnx.bridge: .*nothing to bridge"),
        ("from flax.nnx.bridge import ToNNX", "no flax.nnx.bridge"),
        ("import flax.serialization", "save with treetap.save_weights"),
        ("from flax.training import checkpoints", "treetap.save_checkpoint"),
        ("from flax.core import Scope", "only the functions on FrozenDicts"),
        ("from flax.nnx import Liner", "nearest name is flax.nnx.Linear"),
        ("from flax.nnx.statelib import zzz", r"`dir\(flax.nnx.statelib\)` lists"),
        ("from flax import nnnx", "nearest name is flax.nnx"),
    ],
)
def test_what_is_not_there_is_an_import_error(flax, code, text):
    with pytest.raises(ImportError, match=text):
        run(code)


def test_what_is_not_there_is_an_attribute_error(flax):
    with pytest.raises(AttributeError, match="treetap has NNX's Modules only"):
        flax.linen.while_loop
    with pytest.raises(AttributeError, match=r"name is flax\.nnx\.Linear"):
        flax.nnx.Liner
    assert not hasattr(flax.nnx, "__wrapped__")


LINEN = """
import abc
import flax.linen as nn
import flax.linen.dtypes
from flax.linen.initializers import lecun_normal
from flax.linen import Dense, Module

class Net(abc.ABC, nn.Module, kw_only=True):
    act: object = nn.leaky_relu
    kernel_init: object = nn.initializers.zeros

    @nn.compact
    def __call__(self, x) -> "nn.Variable[int]":
        return nn.Dense(1)(x)
"""


def test_linen_can_be_mentioned_where_it_is_not_used(flax):
    found = run(LINEN)
    nn, Net = found["nn"], found["Net"]
    assert nn.Dense is found["Dense"]
    assert issubclass(nn.Dense, nn.Module)
    assert found["Module"] is nn.Module is flax.linen.module.Module
    assert not isinstance(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nn.Module | nn.Dense)
    assert not isinstance(nnx.Param(1), nn.meta.AxisMetadata)
    assert nn.module._context.module_stack[-1] is None
    assert nn.Variable[int] is not None
    assert nn.unbox({"a": 1}) == {"a": 1}
    for cls in (Net, nn.Dense, nn.Module):
        with pytest.raises(NotImplementedError, match=f"{cls.__name__} is a class of"):
            cls(3)


def test_functions_of_linen_on_arrays_are_there(flax):
    from flax import linen

    assert linen.relu is linen.activation.relu is nnx.relu
    assert linen.initializers.lecun_normal is tt.initializers.lecun_normal
    first, none = linen.dtypes.promote_dtype(jnp.ones(2, jnp.bfloat16), None)
    assert (first.dtype, none) == (jnp.bfloat16, None)
    assert linen.dtypes.canonicalize_dtype(None, jnp.int32(1)) == jnp.float32


def test_what_a_program_sets_stays_with_the_stand_in(flax):
    flax.nnx.Linear = None
    assert nnx.Linear is tt.Linear


def test_config_reads_and_sets_the_settings(flax):
    assert flax.config.nnx_graph_mode is True
    flax.config.update("nnx_graph_mode", False)
    assert nnx.set_graph_mode.current_value() is False
    assert flax.config.nnx_graph_mode is False
    flax.config.update("nnx_sow_capture_noop", True)
    assert flax.nnx.Module().sow(flax.nnx.Intermediate, "x", 1.0) is False
    flax.config.update("flax_filter_frames", False)
    assert flax.config.flax_filter_frames is False
    flax.config.update("flax_hijax_variable", False)
    with pytest.raises(ValueError, match="flax_hijax_variable is False in treetap"):
        flax.config.update("flax_hijax_variable", True)
    with pytest.raises(AttributeError, match="no option 'flax_nonsense'"):
        flax.config.update("flax_nonsense", 1)


def test_struct_dataclasses_are_pytrees(flax):
    @flax.struct.dataclass
    class Point:
        x: int
        name: str = flax.struct.field(pytree_node=False, default="a")

    class Both(flax.struct.PyTreeNode, kw_only=True):
        first: int = 1
        second: int

    point = Point(1)
    assert jax.tree.leaves(point) == [1]
    assert point.replace(x=2) == Point(2)
    assert flax.struct.dataclass(Point) is Point
    with pytest.raises(AttributeError):
        point.x = 3
    (path, _), *_ = jax.tree_util.tree_leaves_with_path(point)
    assert jax.tree_util.keystr(path) == ".x"
    assert jax.tree.map(lambda x: x + 1, Both(second=4)) == Both(first=2, second=5)
    assert flax.struct.dataclass(kw_only=True)(type("Empty", (), {}))() is not None


def test_frozen_dicts(flax):
    frozen = flax.core.freeze({"b": {"c": 1}, "a": 2})
    assert frozen == {"a": 2, "b": {"c": 1}}
    assert hash(frozen) == hash(flax.core.FrozenDict(a=2, b={"c": 1}))
    assert isinstance(frozen["b"], flax.core.FrozenDict)
    assert frozen.copy({"z": 1})["z"] == 1
    rest, value = frozen.pop("a")
    assert (sorted(rest), value) == (["b"], 2)
    assert type(frozen.unfreeze()["b"]) is dict
    assert flax.core.unfreeze({"x": frozen})["x"] == frozen.unfreeze()
    assert flax.core.copy({"a": 1}, {"b": 2}) == {"a": 1, "b": 2}
    assert flax.core.pop({"a": 1, "b": 2}, "b") == ({"a": 1}, 2)
    assert jax.tree.map(lambda x: x * 2, frozen) == {"a": 4, "b": {"c": 2}}
    (path, _), *_ = jax.tree_util.tree_leaves_with_path(frozen)
    assert jax.tree_util.keystr(path) == "['a']"
    assert jax.tree.leaves(frozen) == [2, 1]
    assert repr(frozen) == "FrozenDict({'b': {'c': 1}, 'a': 2})"
    with pytest.raises(ValueError, match="'a' cannot be set"):
        frozen["a"] = 3


def test_paths_of_dicts(flax):
    util = flax.traverse_util
    nested = {"a": {"b": 1, "e": {}}, "c": 2}
    assert util.flatten_dict(nested) == {("a", "b"): 1, ("c",): 2}
    assert util.flatten_dict(nested, sep="/") == {"a/b": 1, "c": 2}
    kept = util.flatten_dict(nested, keep_empty_nodes=True)
    assert kept["a", "e"] is util.empty_node
    assert util.unflatten_dict(kept) == nested
    mapped = util.path_aware_map(lambda path, value: "/".join(path), nested)
    assert mapped == {"a": {"b": "a/b", "e": {}}, "c": "c"}


def test_a_train_state_takes_steps(flax):
    TrainState = run("from flax.training.train_state import TrainState")["TrainState"]
    params = {"w": jnp.ones(2)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.5))
    state = jax.jit(lambda s: s.apply_gradients(grads={"w": jnp.ones(2)}))(state)
    assert int(state.step) == 1
    assert state.params["w"].tolist() == [0.5, 0.5]
