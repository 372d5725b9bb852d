# SPDX-License-Identifier: Apache-2.0
"""What cannot be saved as weights is told at once, and nothing is written."""

import jax
import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file, save_file

import treetap as tt
from treetap import WeightsError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def test_everything_that_cannot_be_saved_is_told_at_once(path):
    gone = jnp.ones(2)
    model = {
        "abstract": tt.Param(jax.ShapeDtypeStruct((2,), jnp.float32)),
        "key": tt.Variable(jax.random.key(0)),
        "dict": tt.Variable({"a": 1}),
        "text": tt.Variable("a"),
        "int4": tt.Param(jnp.zeros(2, jnp.int4)),
        "gone": tt.Param(gone),
        "good": tt.Param(jnp.ones(2)),
    }
    gone.delete()
    with pytest.raises(WeightsError) as caught:
        tt.save_weights(path, model, rules={"nobody": "x"})
    text = str(caught.value)
    assert "nothing was written" in text
    assert "what cannot be saved (6)" in text
    assert "abstract (Param) is abstract" in text
    assert "key (Variable) holds key<fry>" in text
    assert "dict (Variable) holds a dict" in text
    assert "text (Variable) holds a str" in text
    assert "int4 (Param) is int4" in text
    assert "gone (Param) was donated or deleted" in text
    assert "rules that no Variable matched (1)" in text
    assert not path.exists()
    tt.save_weights(path, model, only=tt.PathContains("good"))
    assert list(load_file(path)) == ["good"]


def test_keys_are_refused_unless_left_out(path):
    model = {"rngs": tt.Rngs(0), "w": tt.Param(jnp.ones(1))}
    with pytest.raises(WeightsError, match=r"rngs/default/key \(RngKey\)"):
        tt.save_weights(path, model, only=...)
    tt.save_weights(path, model)
    with pytest.raises(WeightsError, match=r"rngs/default/key \(RngKey\)"):
        tt.load_weights(path, model, only=...)


def test_saving_and_loading_inside_a_transform(path):
    model = {"w": tt.Param(jnp.ones(1))}
    with pytest.raises(WeightsError, match="is being traced"):
        tt.jit(lambda model: tt.save_weights(path, model))(model)
    tt.save_weights(path, model)
    with pytest.raises(tt.TraceContextError):
        jax.jit(lambda: tt.load_weights(path, model).loaded)()
    assert model["w"][...].tolist() == [1]


@pytest.mark.parametrize(
    ("model", "rules", "reason"),
    [
        (
            {"q": (2, 2), "k": (2, 2)},
            {"q": tt.tensor("f").part(0, of=3), "k": tt.tensor("f").part(2, of=3)},
            r"'f': no Variable gives part \[1\] of 3; the others come from k, q",
        ),
        (
            {"q": (2, 2), "k": (2, 3)},
            {"q": tt.tensor("f").part(0, of=2), "k": tt.tensor("f").part(1, of=2)},
            "'f': its parts k, q differ in shape or dtype",
        ),
        (
            {"q": (2,), "k": (2,)},
            {"*": tt.tensor("f").part(0, of=2)},
            "are one part, and differ",
        ),
        ({"q": (2,)}, {"q": tt.tensor("f").transpose(0, 1)}, r"q \(2,\): .*2 axes"),
        ({"q": (2,)}, {"q": "__metadata__"}, "the format has that name"),
        ({"q": (2,), "k": (2,)}, {"*": "f"}, "would both be 'f', and differ"),
    ],
)
def test_rules_that_cannot_be_followed_backwards(path, model, rules, reason):
    made = {
        key: tt.Param(jnp.full(shape, float(index)))
        for index, (key, shape) in enumerate(model.items())
    }
    with pytest.raises(WeightsError, match=reason):
        tt.save_weights(path, made, rules=rules)
    assert not path.exists()


def test_paths_with_one_name_are_refused(path):
    same = tt.Param(jnp.ones(1)), tt.Param(jnp.ones(1))
    with pytest.raises(WeightsError, match=r"would both be 'a\.b'"):
        tt.save_weights(path, {"a": {"b": same[0]}, "a.b": same[1]})


def test_bare_values_and_other_wrong_arguments(path):
    for call in (tt.save_weights, tt.load_weights):
        save_file({}, path)
        with pytest.raises(WeightsError, match="a bare Param has no name"):
            call(path, tt.Param(jnp.ones(1)))
    with pytest.raises(TypeError, match="maps texts to texts"):
        tt.save_weights(path, {}, metadata={"a": 1})  # pyright: ignore[reportArgumentType] - wrong
    with pytest.raises(WeightsError, match="may be a pickle"):
        tt.save_weights(path.with_suffix(".bin"), {})
    with pytest.raises(FileNotFoundError):
        tt.load_weights(path.with_name("no.safetensors"), {})


def test_two_that_would_be_one_tensor_must_be_equal(path):
    rules = {"a": "shared", "b": "shared"}
    a, b = tt.Param(jnp.ones(2)), tt.Param(jnp.ones(3))
    with pytest.raises(WeightsError, match="would both be 'shared', and differ"):
        tt.save_weights(path, {"a": a, "b": b}, rules=rules)
    tt.save_weights(path, {"a": a, "b": tt.Param(jnp.ones(2))}, rules=rules)
    assert list(load_file(path)) == ["shared"]


def test_values_of_other_processes_are_told_and_nothing_is_written(path, monkeypatch):
    value = jnp.ones(2)
    elsewhere = property(lambda self: False)
    monkeypatch.setattr(type(value), "is_fully_addressable", elsewhere)
    with pytest.raises(WeightsError, match="devices of other processes: use `save_ch"):
        tt.save_weights(path, {"a": tt.Param(value)})
    assert not path.exists()
