# SPDX-License-Identifier: Apache-2.0
"""Embed: rows by number, and scores of a vector for each row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formulas import array, close, compiled, made, numbers, placed, raw
from jax.sharding import AxisType, PartitionSpec

import treetap as tt
from meshes import mesh_of

P = PartitionSpec
NUMBERS = np.array([[0, 4], [2, 1]])


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.int16])
def test_rows_are_looked_up_by_number(dtype):
    table = made(tt.Embed, 5, 3)
    assert table.embedding.shape == (5, 3)
    close(table(jnp.asarray(NUMBERS, dtype)), raw(table.embedding)[NUMBERS])


def test_numbers_may_come_in_any_form():
    table = made(tt.Embed, 5, 3)
    rows = raw(table.embedding)
    close(table([0, 4]), rows[[0, 4]])
    close(table(2), rows[2])
    close(table(np.int64(3)), rows[3])


def test_numbers_past_the_end_give_nan_and_negative_ones_count_from_it():
    table = made(tt.Embed, 5, 3)
    found = np.asarray(table(jnp.array([5, -1, -5, -6])))
    assert np.isnan(found[[0, 3]]).all()
    close(found[[1, 2]], raw(table.embedding)[[4, 0]])


def test_a_table_of_one_row_is_repeated():
    table = made(tt.Embed, 1, 3)
    expected = np.broadcast_to(raw(table.embedding)[0], (2, 2, 3))
    close(table(jnp.asarray(NUMBERS)), expected)


def test_the_dtype_of_results():
    assert made(tt.Embed, 5, 3).dtype == jnp.float32
    assert made(tt.Embed, 5, 3, param_dtype=jnp.float16).dtype == jnp.float16
    table = made(tt.Embed, 5, 3, dtype=jnp.bfloat16)
    assert (table.dtype, table.embedding.dtype) == (jnp.bfloat16, jnp.float32)
    assert table(jnp.asarray(NUMBERS)).dtype == jnp.bfloat16
    assert table.attend(array(2, 3)).dtype == jnp.bfloat16


def test_a_table_may_hold_whole_numbers():
    options = {"param_dtype": jnp.int32, "embedding_init": jax.nn.initializers.ones}
    found = made(tt.Embed, 5, 3, **options)(jnp.asarray(NUMBERS))
    assert found.dtype == jnp.int32


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 4, 3)])
def test_scores_of_a_vector_for_each_row(shape):
    table = made(tt.Embed, 5, 3)
    close(table.attend(array(*shape)), numbers(*shape) @ raw(table.embedding).T)


def test_numbers_with_a_point_are_refused():
    table = placed(made(tt.Embed, 5, 3))
    for wrong in (jnp.ones(2), jnp.ones(2, bool), 1.5):
        message = r"Embed at blocks/1/up: rows .* whole numbers, not by (float|bool)"
        with pytest.raises(tt.StructureError, match=message):
            table(wrong)


@pytest.mark.parametrize("shape", [(2, 4), ()])
def test_scores_need_the_features_of_the_table(shape):
    table = placed(made(tt.Embed, 5, 3))
    message = r"Embed at blocks/1/up: expected inputs with 3 features .* got float32"
    with pytest.raises(tt.StructureError, match=message):
        table.attend(array(*shape))


def test_results_are_sharded_as_asked():
    plain = made(tt.Embed, 5, 8)
    ids = jnp.asarray(NUMBERS)
    rows, scores = np.asarray(plain(ids)), np.asarray(plain.attend(array(2, 8)))
    with jax.set_mesh(mesh_of((2, 4), ("data", "model"), AxisType.Explicit)):
        table, spec = made(tt.Embed, 5, 8), P("data", None, "model")
        ids = jax.device_put(ids, P("data"))
        outputs = compiled(lambda ids: table(ids, out_sharding=spec))(ids)
        assert jax.typeof(outputs).sharding.spec == spec
        close(outputs, rows)
        query = jax.device_put(array(2, 8), P("data", "model"))
        outputs = table.attend(query, out_sharding=P("data", None))
        assert jax.typeof(outputs).sharding.spec == P("data", None)
        close(outputs, scores)


def test_results_of_a_table_of_one_row_are_sharded_as_asked():
    with jax.set_mesh(mesh_of((2, 4), ("data", "model"), AxisType.Explicit)):
        table, spec = made(tt.Embed, 1, 8), P("data", None, "model")
        outputs = table(jax.device_put(jnp.asarray(NUMBERS), P("data")), spec)
        assert jax.typeof(outputs).sharding.spec == spec


@pytest.mark.parametrize(
    ("table_spec", "expected"),
    [(P(), P("data", None, None)), (P(None, "model"), P("data", None, "model"))],
)
def test_rows_lie_as_the_numbers_where_there_is_no_choice(table_spec, expected):
    plain, ids = made(tt.Embed, 5, 8), jnp.asarray(NUMBERS)
    rows = np.asarray(plain(ids))
    with jax.set_mesh(mesh_of((2, 4), ("data", "model"), AxisType.Explicit)):
        table = made(tt.Embed, 5, 8, embedding_metadata={"out_sharding": table_spec})
        ids = jax.device_put(ids, P("data"))
        for run in (table, compiled(lambda ids: table(ids))):
            outputs = run(ids)
            assert jax.typeof(outputs).sharding.spec == expected
            close(outputs, rows)


@pytest.mark.parametrize("spec", [P("model"), P(None, "data")])
def test_rows_that_are_split_or_split_twice_need_to_be_told_how_to_lie(spec):
    with jax.set_mesh(mesh_of((2, 4), ("data", "model"), AxisType.Explicit)):
        table = made(tt.Embed, 8, 8, embedding_metadata={"out_sharding": spec})
        ids = jax.device_put(jnp.asarray(NUMBERS), P("data"))
        with pytest.raises(Exception, match="out_sharding="):
            table(ids)
        assert table(ids, out_sharding=P("data")).shape == (*ids.shape, 8)


def test_the_gradient_of_a_row_counts_how_often_it_was_looked_up():
    table = made(tt.Embed, 5, 3)
    ids = jnp.array([0, 2, 2])
    grads = tt.grad(lambda table: jnp.sum(table(ids)))(table)
    np.testing.assert_array_equal(grads.embedding[:, 0], [1, 0, 2, 0, 0])
