# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: whole trees come back, on any mesh, or an error says what differs."""

import builtins
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import treetap as tt
from meshes import devices_of, mesh_of
from treetap import WeightsError


class Dense(tt.Module):
    def __init__(self, value):
        self.kernel = tt.Param(jnp.asarray(np.full((2, 3), value, np.float32)))
        self.bias = None
        self.activation = "relu"


class Net(tt.Module):
    def __init__(self, value):
        self.layers = tt.List([Dense(value), Dense(value + 1)])
        self.small = tt.Param(jnp.asarray(np.full(3, value), jnp.bfloat16))
        self.table = jnp.asarray(np.full(2, value, np.float32))
        self.calls = tt.Variable(int(value))
        self.held = tt.Variable({"a": np.full(2, value), "b": [0.5 * value]})
        self.rngs = tt.Rngs(int(value), dropout=3)
        self.nothing = tt.Param(None)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint"


def names_in(folder):
    return sorted(each.name for each in pathlib.Path(folder).iterdir())


def test_a_model_comes_back_as_a_new_object(path):
    model, target = Net(1.0), Net(5.0)
    before = tt.clone(target)
    tt.save_checkpoint(path, model)
    restored = tt.restore_checkpoint(path, target)
    assert type(restored) is Net
    assert restored.layers[0].activation == "relu"
    assert tt.state(restored) == tt.state(model)
    assert tt.graphdef(restored) == tt.graphdef(model)
    assert tt.state(target) == tt.state(before)
    assert restored.small is not target.small
    assert type(restored.calls[...]) is int
    assert isinstance(restored.held[...]["a"], np.ndarray)
    np.testing.assert_array_equal(
        restored.rngs.dropout.uniform((3,)), model.rngs.dropout.uniform((3,))
    )


def test_what_is_written_is_what_nnx_programs_write(path):
    tt.save_checkpoint(path, {"layers": [Dense(1.0)], "rngs": tt.Rngs(0), "n": 3})
    with ocp.StandardCheckpointer() as checkpointer:
        raw = checkpointer.restore(path)
    assert raw["layers"]["0"]["kernel"]["value"].shape == (2, 3)
    assert raw["n"] == 3
    key = raw["rngs"]["default"]["key"]["value"]
    assert key == jax.random.key(0)


def test_a_state_saved_with_orbax_and_one_without_the_level_of_variables(path):
    model = Net(1.0)
    for tree in (tt.state(model), tt.to_pure_dict(tt.state(model))):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, tree, force=True)
        restored = tt.restore_checkpoint(path, Net(5.0))
        assert tt.state(restored) == tt.state(model)


def test_tuples_saved_with_orbax(path):
    first, second = tt.state(Dense(1.0)), tt.state(Dense(2.0))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, (first, {"second": second}))
    target = (Dense(8.0), {"second": Dense(9.0)})
    restored = tt.restore_checkpoint(path, target)
    assert isinstance(restored, tuple)
    assert tt.state(restored[1]["second"]) == second


def test_model_optimizer_and_step_together(path):
    optax = pytest.importorskip("optax")

    def make(value):
        model = Dense(value)
        return {
            "model": model,
            "optimizer": tt.Optimizer(model, optax.adam(0.1), wrt=tt.Param),
            "step": int(value),
        }

    tree, target = make(3.0), make(0.0)
    tree["optimizer"].update(tree["model"], tt.state(tree["model"], tt.Param))
    tt.save_checkpoint(path, tree)
    restored = tt.restore_checkpoint(path, target)
    assert tt.state(restored) == tt.state(tree)
    assert restored["step"] == 3
    for each in (tree, restored):  # training goes on as if nothing had happened
        each["optimizer"].update(each["model"], tt.state(each["model"], tt.Param))
    assert tt.state(restored["model"]) == tt.state(tree["model"])


def test_abstract_targets_become_concrete(path):
    tt.save_checkpoint(path, Dense(3.0))
    restored = tt.restore_checkpoint(path, tt.eval_shape(lambda: Dense(0.0)))
    assert restored.kernel[...].tolist() == [[3.0] * 3] * 2


def test_arrays_are_as_freely_placed_as_the_targets(path):
    device = devices_of(3)[2]
    tree = {"a": jnp.ones(2), "b": jnp.ones(2), "key": jax.random.key(0)}
    tt.save_checkpoint(path, tree)
    target = {**tree, "b": jax.device_put(jnp.zeros(2), device)}
    restored = tt.restore_checkpoint(path, target)
    assert not restored["a"].committed
    assert not restored["key"].committed
    assert restored["b"].sharding == SingleDeviceSharding(device)


def test_saved_on_one_mesh_restored_on_another(path):
    saved, other = mesh_of((4, 2), ("a", "b")), mesh_of((8,), ("z",))
    values = jnp.arange(64.0).reshape(8, 8)
    keys = jax.random.split(jax.random.key(0), 8)

    def placed(mesh, *names):
        return NamedSharding(mesh, PartitionSpec(*names))

    tree = {
        "kernel": tt.Param(jax.device_put(values, placed(saved, "a", "b"))),
        "keys": tt.RngKey(jax.device_put(keys, placed(saved, "a"))),
        "all": tt.Param(jax.device_put(values[0], placed(saved))),
    }
    tt.save_checkpoint(path, tree)

    def struct(like, sharding):
        return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)

    target = {
        "kernel": tt.Param(struct(values, placed(other, None, "z"))),
        "keys": tt.RngKey(struct(keys, placed(other, "z"))),
        "all": tt.Param(jax.device_put(jnp.zeros(8), devices_of(1)[0])),
    }
    restored = tt.restore_checkpoint(path, target)
    for name, variable in restored.items():
        assert variable[...].sharding == target[name].sharding, name
    np.testing.assert_array_equal(restored["kernel"][...], values)
    np.testing.assert_array_equal(restored["all"][...], values[0])
    data = jax.random.key_data(restored["keys"][...])
    np.testing.assert_array_equal(data, jax.random.key_data(keys))
    assert isinstance(target["kernel"].get_raw_value(), jax.ShapeDtypeStruct)


def test_annotated_models_are_placed_on_the_mesh_around(path):
    mesh = mesh_of((8,), ("a",))

    def make():
        return {"w": tt.Param(jnp.arange(8.0), out_sharding=("a",))}

    with jax.set_mesh(mesh):
        tt.save_checkpoint(path, make())
        restored = tt.restore_checkpoint(path, tt.eval_shape(make))
        target = tt.eval_shape(make)
    assert restored["w"][...].sharding == NamedSharding(mesh, PartitionSpec("a"))
    with pytest.raises(WeightsError, match=r"w belongs on .*set_mesh"):
        tt.restore_checkpoint(path, target)


def test_shared_variables_stay_shared(path):
    shared = tt.Param(jnp.ones(2))
    tt.save_checkpoint(path, {"a": shared, "b": [shared]})
    other = tt.Param(jnp.zeros(2))
    restored = tt.restore_checkpoint(path, {"a": other, "b": [other]})
    assert restored["a"] is restored["b"][0]
    assert restored["a"][...].tolist() == [1, 1]


def test_refs_are_saved_by_value_and_made_anew(path):
    tt.save_checkpoint(path, {"w": tt.Param(jnp.ones(2), ref=True)})
    target = {"w": tt.Param(jnp.zeros(2), ref=True)}
    restored = tt.restore_checkpoint(path, target)
    assert restored["w"].get_raw_value() is not target["w"].get_raw_value()
    restored["w"][...] = restored["w"] + 1
    assert restored["w"][...].tolist() == [2, 2]
    assert target["w"][...].tolist() == [0, 0]


# What does not fit.


def test_everything_that_differs_is_told_at_once(path):
    tree = {
        "shape": tt.Param(jnp.ones((2, 3))),
        "dtype": tt.Param(jnp.ones(2)),
        "number": 3,
        "key": jax.random.key(0),
        "old": jnp.ones(1),
    }
    tt.save_checkpoint(path, tree)
    target = {
        "shape": tt.Param(jnp.ones((3, 2))),
        "dtype": tt.Param(jnp.ones(2, jnp.bfloat16)),
        "number": 0.5,
        "key": jax.random.key(0, impl="rbg"),
        "new": tt.BatchStat(jnp.ones(1)),
    }
    with pytest.raises(WeightsError) as caught:
        tt.restore_checkpoint(path, target)
    text = str(caught.value)
    assert f"{path} does not fit the target" in text
    assert "what the target has differently (4)" in text
    assert (
        "shape (Param): stored as float32(2, 3), the target has float32(3, 2)" in text
    )
    assert "dtype (Param): stored as float32(2,), the target has bfloat16(2,)" in text
    assert "number (float): stored as int64(), the target has a float" in text
    assert "key (PRNGKeyArray): stored as uint32(2,), the target has key<rbg>()" in text
    assert "in the target only (1):\n    - new (BatchStat)" in text
    assert "in the checkpoint only (1):\n    - old" in text


def test_two_leaves_of_the_target_that_read_alike_are_refused(path):
    one = tt.Param(jnp.ones(2))
    tt.save_checkpoint(path, {"x": {1: one}})
    target = {"x": {1: one, "1": tt.Param(jnp.zeros(2))}}
    with pytest.raises(WeightsError, match=r"in the target only \(1\):\n    - x/1 \("):
        tt.restore_checkpoint(path, target)


def test_keys_of_another_implementation_with_data_of_the_same_shape(path):
    tt.save_checkpoint(path, {"key": jax.random.key(0, impl="rbg")})
    with pytest.raises(WeightsError, match="implementation that was saved"):
        tt.restore_checkpoint(path, {"key": jax.random.key(0, impl="unsafe_rbg")})


def test_dtypes_that_jax_would_narrow_are_refused(path):
    tt.save_checkpoint(path, {"a": np.ones(2)})
    blank = {"a": jax.ShapeDtypeStruct((2,), np.float64)}
    with pytest.raises(WeightsError, match="needs `jax_enable_x64`"):
        tt.restore_checkpoint(path, blank)
    with pytest.raises(WeightsError, match="the target has a str"):
        tt.restore_checkpoint(path, {"a": "text"})


def test_everything_that_cannot_be_saved_is_told_at_once(path):
    gone = jnp.ones(2)
    tree = {
        "text": "a",
        "complex": 1j,
        "object": np.array([None]),
        "abstract": tt.Param(jax.ShapeDtypeStruct((2,), jnp.float32)),
        "gone": gone,
        "a.b": 1,
        "a": {"b": 2},
        "good": 3,
    }
    gone.delete()
    with pytest.raises(WeightsError) as caught:
        tt.save_checkpoint(path, tree)
    text = str(caught.value)
    assert "what cannot be saved (6)" in text
    assert "text is a str, not an array or a number" in text
    assert "complex is a complex" in text
    assert "object is a ndarray" in text
    assert "abstract is abstract" in text
    assert "gone was donated or deleted" in text
    assert "would both be 'a.b'" in text
    assert names_in(path.parent) == []


def test_saving_inside_a_transform(path):
    with pytest.raises(WeightsError, match="w is being traced"):
        tt.jit(lambda model: tt.save_checkpoint(path, model))(
            {"w": tt.Param(jnp.ones(1))}
        )
    assert not path.exists()


def test_bare_values_and_nothing_at_all(path):
    for call in (tt.save_checkpoint, tt.restore_checkpoint):
        with pytest.raises(WeightsError, match="a bare Param has no name"):
            call(path, tt.Param(jnp.ones(1)))
    with pytest.raises(WeightsError, match="there is nothing to save"):
        tt.save_checkpoint(path, {"a": None})


# Folders.


def test_a_checkpoint_is_replaced_only_when_asked(path):
    tt.save_checkpoint(path, {"a": 1})
    with pytest.raises(FileExistsError, match="overwrite=True"):
        tt.save_checkpoint(path, {"a": 2})
    assert tt.restore_checkpoint(path, {"a": 0}) == {"a": 1}
    tt.save_checkpoint(path, {"a": 2}, overwrite=True)
    assert tt.restore_checkpoint(path, {"a": 0}) == {"a": 2}
    assert names_in(path.parent) == ["checkpoint"]


def test_only_checkpoints_are_replaced(path):
    path.write_text("precious")
    with pytest.raises(
        FileExistsError, match="not a checkpoint, so it is not replaced"
    ):
        tt.save_checkpoint(path, {"a": 1}, overwrite=True)
    assert path.read_text() == "precious"
    path.unlink()
    path.mkdir()
    (path / "thesis.txt").write_text("precious")
    with pytest.raises(
        FileExistsError, match="not a checkpoint, so it is not replaced"
    ):
        tt.save_checkpoint(path, {"a": 1}, overwrite=True)
    assert names_in(path) == ["thesis.txt"]
    (path / "thesis.txt").unlink()
    tt.save_checkpoint(path, {"a": 1}, overwrite=True)  # an empty folder may go
    assert tt.restore_checkpoint(path, {"a": 0}) == {"a": 1}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_that_fails_leaves_the_old_one_and_nothing_else(
    path, monkeypatch, overwrite
):
    if overwrite:
        tt.save_checkpoint(path, {"a": 1})
    rename = pathlib.Path.rename

    def fail(self, place):
        if str(self).endswith(".new"):
            raise OSError("the disk is gone")
        return rename(self, place)

    with monkeypatch.context() as patched:
        patched.setattr(pathlib.Path, "rename", fail)
        with pytest.raises(OSError, match="the disk is gone"):
            tt.save_checkpoint(path, {"a": 2}, overwrite=overwrite)
    assert names_in(path.parent) == (["checkpoint"] if overwrite else [])
    if overwrite:
        assert tt.restore_checkpoint(path, {"a": 0}) == {"a": 1}


def test_relative_paths_and_folders_that_are_not_there_yet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tt.save_checkpoint("runs/one/last", {"a": 1})
    assert tt.restore_checkpoint("runs/one/last", {"a": 0}) == {"a": 1}


def test_no_checkpoint_there(path):
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        tt.restore_checkpoint(path, {"a": 0})
    path.with_name("checkpoint.orbax-checkpoint-tmp").mkdir()
    with pytest.raises(FileNotFoundError, match="was not finished"):
        tt.restore_checkpoint(path, {"a": 0})
    path.write_text("")
    with pytest.raises(WeightsError, match="is a file; a checkpoint is a folder"):
        tt.restore_checkpoint(path, {"a": 0})


def test_a_folder_above_checkpoints_names_them(path):
    tt.save_checkpoint(path / "3", {"a": 1})
    with pytest.raises(WeightsError, match=r"no _METADATA\. It holds some: 3"):
        tt.restore_checkpoint(path, {"a": 0})


@pytest.mark.parametrize("lost", ["_METADATA", "manifest.ocdbt", "d"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_half_a_checkpoint(path, lost):
    tt.save_checkpoint(path, {"a": 1, "b": jnp.ones(2)})
    gone = path / lost
    shutil.rmtree(gone) if gone.is_dir() else os.remove(gone)
    with pytest.raises(WeightsError, match=r"incomplete|is broken") as caught:
        tt.restore_checkpoint(path, {"a": 0, "b": jnp.zeros(2)})
    assert str(path) in str(caught.value)


def test_orbax_is_asked_for_by_name(path, monkeypatch):
    original = builtins.__import__

    def absent(name, *rest, **options):
        if name.startswith("orbax"):
            raise ImportError(name)
        return original(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    for call in (tt.save_checkpoint, tt.restore_checkpoint):
        with pytest.raises(ImportError, match=r"pip install treetap\[orbax\]"):
            call(path, {"a": 1})
