# SPDX-License-Identifier: Apache-2.0
"""Donation: what is written is given away, the rest stays, and losses have names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt
from treetap._core.variables.variable import pack_of


class Leaf(tt.Module):
    def __init__(self, value=1.0):
        self.w = tt.Param(jnp.full(2, value))


class Pair(tt.Module):
    def __init__(self):
        self.a, self.b = Leaf(1.0), Leaf(2.0)
        self.count = tt.Variable(jnp.zeros((), jnp.int32))


def count_pair(model):
    model.count[...] += 1
    return model.a.w.sum() + model.b.w.sum()


def grow_pair(model):
    model.a.w[...] += 1
    model.b.w[...] += 1
    return count_pair(model)


def test_donated_variables_with_one_buffer_are_our_error():
    step = tt.jit(grow_pair, donate_argnums=0)
    model = Pair()
    step(model), step(model)
    model.a.w.set_raw_value(model.b.w.get_raw_value())
    before = int(model.count)
    for run in (step, tt.jit(grow_pair, donate_argnums=0)):
        with pytest.raises(tt.StructureError, match="a/w and at args/0/b/w"):
            run(model)
    assert int(model.count) == before
    model.a.w.set_value(jnp.copy(model.b.w[...]))
    step(model)
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(model))


def test_donation_goes_the_quick_way_too():
    traces = []

    @tt.jit(donate_argnums=0)
    def step(model):
        traces.append(1)
        grow_pair(model)

    model = Pair()
    for _ in range(4):
        old = model.a.w[...]
        step(model)
    assert len(traces) == 1
    assert int(model.count) == 4
    assert old.is_deleted()


@pytest.mark.parametrize("pack", [False, True], ids=["", "packed"])
def test_what_is_donated_but_not_written_is_not_given_away(pack):
    step = tt.jit(count_pair, donate_argnums=0, pack=pack)
    model = Pair()
    model.a.w.set_raw_value(model.b.w.get_raw_value())  # of no harm then
    kept, count = model.a.w[...], model.count[...]
    for calls in range(1, 5):
        step(model)
        assert int(model.count) == calls
    assert count.is_deleted() or pack
    assert not kept.is_deleted()
    np.testing.assert_array_equal(model.a.w[...], kept)


@pytest.mark.parametrize("graph", [False, True])
def test_arrays_that_are_attributes_stay_where_a_model_is_donated(graph):
    class Scaled(tt.Module):
        def __init__(self):
            self.w, self.scale = tt.Param(jnp.ones(2)), tt.data(jnp.full(2, 2.0))

    @tt.jit(donate_argnums=(0, 1), graph=graph)
    def step(model, x):
        model.w[...] *= model.scale
        return x + 1

    model, x = Scaled(), jnp.ones(2)
    for _ in range(3):
        given, x = x, step(model, x)
        assert given.is_deleted()
    assert model.w[...].tolist() == [8.0, 8.0]
    assert model.scale.tolist() == [2.0, 2.0]
    with pytest.raises(tt.StructureError, match=r"args/1 and at args/0/scale, and is"):
        step(model, model.scale)


def test_an_array_that_is_donated_and_given_again_is_our_error():
    add = tt.jit(lambda x, y: x + y, donate_argnums=0)
    add(jnp.ones(2), jnp.ones(2))
    x = jnp.ones(2)
    with pytest.raises(tt.StructureError, match="at args/0 and at args/1"):
        add(x, x)
    assert not x.is_deleted()
    assert jax.jit(lambda x: add(x, x))(x).tolist() == [2.0, 2.0]


def fail(x):
    raise ValueError("on purpose")


def failing(model):
    kind = jax.ShapeDtypeStruct((2,), jnp.float32)
    model.a.w[...] = jax.pure_callback(fail, kind, model.a.w[...])
    model.count[...] += 1


def lost(error):
    """What our note in an error says is gone."""
    notes = getattr(error.value, "__notes__", ())
    found = [text for text in notes if "these were given away (donated)" in text]
    return found[0].split("gone: ")[1].split(". Give")[0] if found else ""


CALLS = {
    "jit": lambda model, how: tt.jit(failing, **how)(model),
    "stage": lambda model, how: tt.jit(failing, **how).lower(model).compile()(model),
    "partial": lambda model, how: tt.jit_partial(failing, model, **how)(),
}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="callbacks fail later")
@pytest.mark.parametrize("name", CALLS)
def test_a_program_that_fails_names_the_variables_it_took(name):
    model, safe = Pair(), Pair()
    with pytest.raises(Exception, match="on purpose") as failure:
        CALLS[name](model, {"donate_argnums": 0})
    assert lost(failure) == "args/0/a/w (Param), args/0/count (Variable)"
    with pytest.raises(Exception, match="on purpose") as failure:
        CALLS[name](safe, {})
    assert not lost(failure)
    assert int(safe.count) == 0


def test_arrays_that_are_gone_are_named_when_they_are_used():
    model = tt.List([Leaf() for _ in range(12)])
    step = tt.jit(lambda layers: sum(layer.w.sum() for layer in layers))
    assert step(model) == 24.0
    for layer in model[1:11]:
        layer.w[...].delete()
    with pytest.raises(Exception, match="deleted") as failure:
        step(model)
    assert lost(failure).startswith("args/0/1/w (Param), args/0/2/w")
    assert lost(failure).endswith("args/0/8/w (Param) and 2 more")


def test_packs_that_are_gone_are_named():
    model = Pair()
    step = tt.jit(grow_pair, pack=True, donate_argnums=0)
    for _ in range(3):
        step(model)
    for buffer in pack_of(model.a.w).contents.buffers:
        buffer.delete()
    with pytest.raises(Exception, match="deleted") as failure:
        step(model)
    assert lost(failure) == "args/0/a/w (Param), args/0/b/w (Param)"


def test_numbers_may_be_donated():
    assert tt.jit(lambda x, y: (x + 1, y + 1), donate_argnums=(0, 1))(1, 1) == (2, 2)


def test_paths_are_right_where_objects_are_shared():
    model, x = Pair(), jnp.ones(2)
    step = tt.jit(lambda pair, x, y: x + y, donate_argnums=(1, 2), graph=True)
    with pytest.raises(tt.StructureError, match="at args/1 and at args/2, and is don"):
        step([model, model], x, x)


def test_references_are_not_given_away():
    counter = tt.Variable(jnp.zeros(()), ref=True)

    @tt.jit(donate_argnums=0)
    def count(counter):
        counter[...] += 1

    for _ in range(3):  # JAX warns where a donated buffer is of no use
        count(counter)
    assert counter[...] == 3.0


def test_what_is_donated_may_be_written_for_some_shapes_only():
    @tt.jit(donate_argnums=0)
    def step(model, x):
        model.count[...] += 1
        if x.ndim:
            model.a.w[...] += x

    model = Pair()
    for calls, x in enumerate([jnp.ones(()), jnp.ones(2), jnp.ones(()), jnp.ones(2)]):
        step(model, x)
        assert int(model.count) == calls + 1
    np.testing.assert_array_equal(model.a.w[...], [3.0, 3.0])
