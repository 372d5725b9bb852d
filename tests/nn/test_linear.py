# SPDX-License-Identifier: Apache-2.0
"""Linear, LinearGeneral and Einsum against sums written out in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formulas import array, close, compiled, made, multihead, numbers, placed, ran, raw
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import treetap as tt
from meshes import mesh_of

P = PartitionSpec
X = (2, 3)


# Linear.


@pytest.mark.parametrize("shape", [(3,), X, (2, 5, 3)])
def test_linear_multiplies_the_last_axis_and_adds_the_bias(shape):
    layer = made(tt.Linear, 3, 4)
    expected = np.einsum("...i,io->...o", numbers(*shape), raw(layer.kernel))
    close(layer(array(*shape)), expected + raw(layer.bias))


def test_linear_without_bias():
    layer = made(tt.Linear, 3, 4, use_bias=False)
    assert layer.bias is None
    product = numbers(*X) @ raw(layer.kernel)
    close(layer(array(*X)), product)
    layer.bias = tt.Param(jnp.ones(4))
    close(layer(array(*X)), product + 1)


def test_no_features_are_no_error():
    layer = made(tt.Linear, 0, 4)
    close(layer(jnp.ones((2, 0))), np.zeros((2, 4)) + raw(layer.bias))
    assert made(tt.Linear, 3, 0)(array(*X)).shape == (2, 0)


def plain_dot_general(lhs, rhs, dimension_numbers, precision=None):
    return 2 * lax.dot_general(lhs, rhs, dimension_numbers, precision=precision)


def test_an_operation_of_the_user_need_not_know_newer_options():
    layer = made(tt.Linear, 3, 4, dot_general=plain_dot_general, use_bias=False)
    close(layer(array(*X)), 2 * numbers(*X) @ raw(layer.kernel))
    layer = made(tt.LinearGeneral, 3, 4, dot_general=plain_dot_general, use_bias=False)
    close(layer(array(*X)), 2 * numbers(*X) @ raw(layer.kernel))


class Recorder:
    """An operation that keeps the options it was called with."""

    def __init__(self, operation):
        self.operation, self.options = operation, []

    def __call__(self, *args, **options):
        self.options.append(options)
        return self.operation(*args, **options)


def test_precision_and_what_else_is_given_reach_the_operation():
    seen = Recorder(lax.dot_general)
    given = {"precision": "highest", "preferred_element_type": jnp.float32}
    made(tt.Linear, 3, 4, dot_general=seen, **given)(array(*X))
    made(tt.LinearGeneral, 3, 4, dot_general=seen, **given)(array(*X))
    assert seen.options == [given, given]
    seen = Recorder(jnp.einsum)
    made(tt.Einsum, "ab,bc->ac", (3, 4), einsum_op=seen, **given)(array(*X))
    assert seen.options == [given]


def test_a_class_of_operations_is_made_anew_for_each_call():
    times = []

    class Operation:
        def __init__(self):
            times.append(1)

        def __call__(self, *args, **options):
            return 3 * lax.dot_general(*args, **options)

    layer = made(tt.LinearGeneral, 3, 4, dot_general_cls=Operation, use_bias=False)
    close(layer(array(*X)), 3 * numbers(*X) @ raw(layer.kernel))
    layer(array(*X))
    assert len(times) == 2


@pytest.mark.parametrize("shape", [(2, 5), (), (3, 2)])
def test_linear_refuses_other_features(shape):
    layer = placed(made(tt.Linear, 3, 4))
    size = ",".join(map(str, shape))
    message = rf"Linear at blocks/1/up: expected inputs with 3 features .*\[{size}\]"
    with pytest.raises(tt.StructureError, match=message):
        layer(array(*shape))


# LinearGeneral.

GENERAL = [
    # in, out, axis, batch axes, inputs, the sum
    ((3,), (4,), (-1,), {}, (2, 3), "ai,io->ao"),
    ((3,), (4, 5), (-1,), {}, (2, 3), "ai,iop->aop"),
    ((2, 3), (4,), (-2, -1), {}, (6, 2, 3), "aij,ijo->ao"),
    ((3, 2), (4,), (2, 1), {}, (6, 2, 3), "aji,ijo->ao"),
    ((2, 3), (4, 5), (0, 2), {}, (2, 6, 3), "iaj,ijop->aop"),
    ((3, 2), (4,), (-1, 0), {}, (2, 6, 3), "jai,ijo->ao"),
    ((3,), (5,), (-1,), {0: 2}, (2, 7, 3), "nai,nio->nao"),
    ((3,), (5,), (1,), {0: 2}, (2, 3, 7), "nia,nio->nao"),
    ((3,), (4, 5), (-1,), {1: 6, 0: 2}, (2, 6, 7, 3), "nmai,nmiop->nmaop"),
    ((3,), (4,), (-1,), {0: 2}, (2, 3), "ni,nio->no"),
]


@pytest.mark.parametrize("case", GENERAL, ids=lambda case: case[-1])
def test_linear_general_sums_over_any_axes(case):
    in_features, out_features, axis, batch_axis, shape, text = case
    options = {"axis": axis, "batch_axis": batch_axis}
    layer = made(tt.LinearGeneral, in_features, out_features, **options)
    expected = np.einsum(text, numbers(*shape), raw(layer.kernel))
    batch = tuple(batch_axis[i] for i in range(len(batch_axis)))
    assert layer.kernel.shape == (*batch, *in_features, *out_features)
    assert layer.bias.shape == (*batch, *out_features)
    left = expected.ndim - layer.bias.ndim
    bias = raw(layer.bias).reshape(*batch, *(1,) * left, *out_features)
    close(layer(array(*shape)), expected + bias)


def test_linear_general_keeps_tuples_and_a_mapping_with_a_hash():
    layer = made(tt.LinearGeneral, 3, 4, batch_axis={0: 2})
    assert (layer.in_features, layer.out_features, layer.axis) == ((3,), (4,), (-1,))
    assert dict(layer.batch_axis) == {0: 2}
    assert hash(layer.batch_axis) == hash(
        made(tt.LinearGeneral, 3, 4, batch_axis={0: 2}).batch_axis
    )
    assert repr(layer.batch_axis) == "{0: 2}"


def test_linear_general_asks_initializers_for_flat_shapes():
    asked = []

    def init(key, shape, dtype):
        asked.append(shape)
        return jnp.zeros(shape, dtype)

    options = {"axis": (-2, -1), "batch_axis": {0: 5}, "bias_init": init}
    made(tt.LinearGeneral, (2, 3), (4, 6), kernel_init=init, **options)
    assert asked == [(5 * 2 * 3, 4 * 6), (5 * 4 * 6,)]


def test_linear_general_without_bias():
    layer = made(tt.LinearGeneral, 3, 4, use_bias=False)
    assert layer.bias is None
    close(layer(array(*X)), numbers(*X) @ raw(layer.kernel))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"axis": (-2, -1)}, r"in_features=\(3,\) and axis=\(-2, -1\)"),
        ({"batch_axis": {1: 2}}, r"batch axes are \(1,\), but must be the first"),
        ({"batch_axis": {0: 2, 2: 2}}, r"batch axes are \(0, 2\), but must be the"),
        (
            {"batch_axis": {0: -2}},
            "`batch_axis` must be a non-negative .*got -2",
        ),
    ],
)
def test_linear_general_refuses_arguments_that_do_not_fit(options, words):
    rngs = tt.Rngs(0)
    with pytest.raises(tt.StructureError, match=f"^LinearGeneral: .*{words}"):
        tt.LinearGeneral(3, 4, rngs=rngs, **options)
    assert int(rngs.default.count[...]) == 0


def test_linear_general_names_the_argument_that_is_no_size():
    with pytest.raises(tt.StructureError, match="out_features"):
        made(tt.LinearGeneral, 3, -4)


@pytest.mark.parametrize(
    ("options", "shape", "words"),
    [
        ({}, (2, 5), r"expected \(3,\) on the axes \(-1,\), got float32\[2,5\]"),
        ({}, (), r"the axes \(-1,\) are not different axes of an array of rank 0"),
        ({"axis": 2}, (2, 3), r"the axes \(2,\) are not different axes .* rank 2"),
        ({"batch_axis": {0: 2}}, (4, 3), r"after the batch axes \(2,\), got"),
        ({"batch_axis": {0: 3}, "axis": 0}, (3, 3), r"after the batch axes \(3,\)"),
    ],
)
def test_linear_general_refuses_inputs_that_do_not_fit(options, shape, words):
    layer = placed(made(tt.LinearGeneral, 3, 4, **options))
    with pytest.raises(
        tt.StructureError, match=f"LinearGeneral at blocks/1/up: .*{words}"
    ):
        layer(array(*shape))


# Einsum.


@pytest.mark.parametrize(
    ("text", "kernel", "bias", "shape", "over"),
    [
        ("ab,bc->ac", (3, 4), (4,), (2, 3), (1, 4)),
        ("nta,hab->nthb", (8, 2, 4), (8, 4), (3, 5, 2), (1, 1, 8, 4)),
        ("ab,bcd->adc", (3, 4, 5), (5, 4), (2, 3), (1, 5, 4)),
        ("abc,bc->ab", (3, 4), (3,), (2, 3, 4), (1, 3)),
        ("...b,bc->...c", (3, 4), (4,), (2, 5, 3), (1, 1, 4)),
        ("a...b,bc->a...c", (3, 4), (4,), (2, 5, 6, 3), (1, 1, 1, 4)),
        ("...b,bc->...c", (3, 4), (4,), (3,), (4,)),
        (" ab , bc -> ca ", (3, 4), (4,), (2, 3), (4, 1)),
        ("ab,bc->ac", (3, 4), None, (2, 3), None),
    ],
)
def test_einsum_multiplies_with_the_kernel_and_adds_the_bias(
    text, kernel, bias, shape, over
):
    layer = made(tt.Einsum, text, kernel, bias)
    text = text.replace(" ", "")
    expected = np.einsum(text, numbers(*shape), raw(layer.kernel))
    if bias is None:
        assert layer.bias is None
    else:
        expected = expected + raw(layer.bias).reshape(over)
    close(layer(array(*shape)), expected)


def test_einsum_with_a_bias_over_unnamed_axes_of_the_kernel_as_in_nnx():
    layer = made(tt.Einsum, "ab,...bc->a...c", (2, 3, 4), (2, 4))
    expected = np.einsum("ab,...bc->a...c", numbers(5, 3), raw(layer.kernel))
    close(layer(array(5, 3)), expected + raw(layer.bias))


def test_a_call_may_bring_its_own_string():
    layer = made(tt.Einsum, "ab,bc->ac", (3, 4), (4,))
    expected = (numbers(*X) @ raw(layer.kernel) + raw(layer.bias)).T
    close(layer(array(*X), "ab,bc->ca"), expected)


def plain_einsum(text, lhs, rhs, precision=None):
    return 2 * jnp.einsum(text, lhs, rhs, precision=precision)


def test_an_einsum_of_the_user_need_not_know_newer_options():
    layer = made(tt.Einsum, "ab,bc->ac", (3, 4), einsum_op=plain_einsum)
    close(layer(array(*X)), 2 * numbers(*X) @ raw(layer.kernel))


@pytest.mark.parametrize("text", ["ab,bc", "ab->ac", "a,b,c->abc", "ab,bc->ac->a"])
def test_einsum_refuses_strings_of_another_form(text):
    rngs = tt.Rngs(0)
    message = "^Einsum: .* is not the einsum of two operands"
    with pytest.raises(tt.StructureError, match=message):
        tt.Einsum(text, (3, 4), rngs=rngs)
    assert int(rngs.default.count[...]) == 0
    with pytest.raises(tt.StructureError, match="is not the einsum of two operands"):
        made(tt.Einsum, None, (3, 4))(array(*X), text)


def test_einsum_refuses_a_bias_that_does_not_fit():
    layer = placed(made(tt.Einsum, "ab,bc->ac", (3, 4), (3,)))
    message = r"Einsum at blocks/1/up: .*\(4,\) from the kernel, but .* is of \(3,\)"
    with pytest.raises(tt.StructureError, match=message):
        layer(array(*X))


@pytest.mark.parametrize(
    ("text", "shape"),
    [("ab,bc->ac", (2, 5)), ("ab,bc->ac", (3,)), ("ab,bcd->acd", X), ("ab,bc->az", X)],
    ids=["features", "rank", "kernel rank", "letter"],
)
def test_einsum_says_where_it_is_when_operands_do_not_fit(text, shape):
    layer = placed(made(tt.Einsum, text, (3, 4)))
    with pytest.raises(ValueError, match="Einsum at blocks/1/up"):
        layer(array(*shape))


# On an explicit mesh.


def sharded(*shape):
    return jax.device_put(array(*shape), P("data"))


@pytest.mark.parametrize(
    ("cls", "args", "spec"),
    [
        (tt.Linear, (4, 8), P("data", "model")),
        (tt.LinearGeneral, (4, (4, 2)), P("data", "model", None)),
        (tt.Einsum, ("ab,bc->ac", (4, 8), (8,)), P("data", "model")),
    ],
    ids=["Linear", "LinearGeneral", "Einsum"],
)
def test_results_are_sharded_as_asked(cls, args, spec):
    layer = made(cls, *args)
    expected = np.asarray(layer(array(2, 4)))
    with jax.set_mesh(mesh_of((2, 4), ("data", "model"), AxisType.Explicit)):
        layer = made(cls, *args)
        outputs = compiled(lambda x: layer(x, out_sharding=spec))(sharded(2, 4))
        assert jax.typeof(outputs).sharding.spec == spec
        close(outputs, expected)
        assert jax.typeof(layer(sharded(2, 4))).sharding.spec[1:] == (None,) * (
            len(spec) - 1
        )


def test_sharded_parameters_make_sharded_results():
    with jax.set_mesh(mesh_of((2, 4), ("data", "model"), AxisType.Explicit)):
        layer = made(
            tt.Linear,
            4,
            8,
            kernel_metadata={"out_sharding": (None, "model")},
            bias_metadata={"out_sharding": ("model",)},
        )
        outputs = layer(sharded(2, 4))
        assert jax.typeof(outputs).sharding.spec == P("data", "model")
        close(outputs, numbers(2, 4) @ raw(layer.kernel) + raw(layer.bias))


SHAPE = (2, 5, 4)


def attention(**options):
    return made(tt.MultiHeadAttention, 2, 4, **options)


def test_axes_to_sum_over_in_any_order():
    layer = made(tt.LinearGeneral, (3, 2), 4, axis=(-1, 1))
    expected = np.einsum("ajbi,ijo->abo", numbers(6, 2, 5, 3), raw(layer.kernel))
    close(ran(layer, array(6, 2, 5, 3)), expected + raw(layer.bias))


def test_an_einsum_without_a_string_takes_that_of_the_call():
    layer = made(tt.Einsum, None, (3, 4))
    assert layer.einsum_str is None
    close(layer(array(2, 3), "ab,bc->ac"), numbers(2, 3) @ raw(layer.kernel))
    with pytest.raises(tt.StructureError, match=r"no einsum string. Give one"):
        layer(array(2, 3))


def test_an_operation_need_not_know_about_shardings():
    def dot_general(lhs, rhs, dimension_numbers, precision=None):
        return lax.dot_general(lhs, rhs, dimension_numbers, precision=precision)

    def einsum(text, lhs, rhs, precision=None):
        return jnp.einsum(text, lhs, rhs, precision=precision)

    for layer in (
        made(tt.Linear, 3, 4, dot_general=dot_general),
        made(tt.LinearGeneral, 3, 4, dot_general=dot_general),
        made(tt.Einsum, "ab,bc->ac", (3, 4), (4,), einsum_op=einsum),
    ):
        expected = numbers(2, 3) @ raw(layer.kernel) + raw(layer.bias)
        close(ran(layer, array(2, 3)), expected)
    options = {"qkv_dot_general": dot_general, "out_dot_general": dot_general}
    layer = attention(**options)
    close(ran(layer, array(*SHAPE)), multihead(layer, numbers(*SHAPE)))
