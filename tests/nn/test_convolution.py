# SPDX-License-Identifier: Apache-2.0
"""Conv and ConvTranspose against sums over windows written out in numpy.

Two tables have outputs of NNX: the kernel is 1, 10, 100, ... so that the digits of an
output tell which inputs it was made of.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formulas import array, close, compiled, drawing, made, numbers, placed, raw
from jax.sharding import AxisType, PartitionSpec

import treetap as tt
from meshes import mesh_of

P = PartitionSpec


def convolved(x, kernel, strides, pads, *, apart=1, dilation=1, groups=1):
    """The sum over each window, with zeros around and between the inputs."""
    axes = kernel.ndim - 2
    spread = np.zeros(
        (x.shape[0], *((n - 1) * apart + 1 for n in x.shape[1:-1]), x.shape[-1])
    )
    spread[(slice(None), *(slice(None, None, apart),) * axes)] = x
    spread = np.pad(spread, [(0, 0), *pads, (0, 0)])
    spans = [(k - 1) * dilation + 1 for k in kernel.shape[:axes]]
    sizes = [(n - w) // s + 1 for n, w, s in zip(spread.shape[1:], spans, strides)]
    out = np.zeros((x.shape[0], *sizes, kernel.shape[-1]))
    share = kernel.shape[-1] // groups
    for at in np.ndindex(*sizes):
        window = tuple(
            slice(i * s, i * s + w, dilation) for i, s, w in zip(at, strides, spans)
        )
        seen = spread[(slice(None), *window)]
        for group in range(groups):
            ins = seen[..., group * kernel.shape[-2] :][..., : kernel.shape[-2]]
            weights = kernel[..., group * share : (group + 1) * share]
            over = list(range(1, axes + 2)), list(range(axes + 1))
            made_here = np.tensordot(ins, weights, over)
            out[(slice(None), *at, slice(group * share, (group + 1) * share))] = (
                made_here
            )
    return out


def same(n, k, s, low=False):
    """What is padded so that each stride has one output."""
    total = max((-(-n // s) - 1) * s + k - n, 0)
    return (total - total // 2, total // 2) if low else (total // 2, total - total // 2)


CASES = {
    "window of 1 axis": ((3,), {}, (2, 5, 2), [same(5, 3, 1)]),
    "an even window": ((2,), {}, (2, 5, 2), [same(5, 2, 1)]),
    "padded low": ((2,), {"padding": "SAME_LOWER"}, (2, 5, 2), [same(5, 2, 1, True)]),
    "strides": ((3,), {"strides": 2}, (2, 6, 2), [same(6, 3, 2)]),
    "2 axes": ((3, 2), {}, (1, 4, 5, 2), [same(4, 3, 1), same(5, 2, 1)]),
    "a stride each": (
        (2, 3),
        {"strides": (2, 1), "padding": "VALID"},
        (1, 5, 4, 2),
        [(0, 0), (0, 0)],
    ),
    "a number": ((3,), {"padding": 2}, (2, 5, 2), [(2, 2)]),
    "numbers": ((3, 3), {"padding": [1, 2]}, (1, 4, 4, 2), [(1, 1), (2, 2)]),
    "pairs": ((3,), {"padding": [(0, 2)]}, (2, 5, 2), [(0, 2)]),
    "both": ((2, 2), {"padding": (1, (0, 2))}, (1, 4, 4, 2), [(1, 1), (0, 2)]),
    "cropped": ((2,), {"padding": -1}, (2, 5, 2), "cropped"),
    "dilation": (
        (3,),
        {"kernel_dilation": 2, "padding": 1},
        (2, 7, 2),
        [(1, 1)],
    ),
    "spread": ((3,), {"input_dilation": 2, "padding": 1}, (2, 4, 2), [(1, 1)]),
    "groups": (
        (3,),
        {"feature_group_count": 2, "padding": 0},
        (2, 5, 4),
        [(0, 0)],
    ),
    "none is one": (
        (3,),
        {"strides": None, "kernel_dilation": None, "input_dilation": None},
        (2, 5, 2),
        [same(5, 3, 1)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_option_against_the_sum(name):
    size, options, shape, pads = CASES[name]
    layer = made(tt.Conv, shape[-1], 6, size, **options)
    x, strides = numbers(*shape), options.get("strides") or 1
    if pads == "cropped":
        x, pads = x[:, 1:-1], [(0, 0)]
    expected = convolved(
        x,
        raw(layer.kernel),
        strides if isinstance(strides, tuple) else (strides,) * len(size),
        pads,
        apart=options.get("input_dilation") or 1,
        dilation=options.get("kernel_dilation") or 1,
        groups=options.get("feature_group_count", 1),
    )
    close(layer(array(*shape)), expected + raw(layer.bias))


def test_one_number_is_a_window_of_one_axis():
    layer = made(tt.Conv, 2, 6, 3)
    assert (layer.kernel_size, layer.kernel_shape) == ((3,), (3, 2, 6))
    assert layer.kernel.shape == (3, 2, 6)
    grouped = made(tt.Conv, 4, 6, (3, 2), feature_group_count=2)
    assert grouped.kernel.shape == grouped.kernel_shape == (3, 2, 2, 6)


@pytest.mark.parametrize("cls", [tt.Conv, tt.ConvTranspose])
def test_any_number_of_batch_axes(cls):
    layer = made(cls, 2, 6, 3)
    x = array(2, 3, 5, 2)
    outputs = np.asarray(layer(x))
    assert outputs.shape == (2, 3, 5, 6)
    close(layer(x[0]), outputs[0])
    close(layer(x[0, 0]), outputs[0, 0])
    assert layer(x[:0]).shape == (0, 3, 5, 6)


@pytest.mark.parametrize("cls", [tt.Conv, tt.ConvTranspose])
def test_a_convolution_without_bias(cls):
    layer = made(cls, 2, 6, 3)
    expected = np.asarray(layer(array(2, 5, 2))) - raw(layer.bias)
    layer = made(cls, 2, 6, 3, use_bias=False)
    assert layer.bias is None
    close(layer(array(2, 5, 2)), expected)


def digits(key, shape, dtype):
    return jnp.asarray(10.0 ** np.arange(shape[0]).reshape(shape), dtype)


def run_digits(cls, inputs, *args, **options):
    options |= {"use_bias": False, "kernel_init": digits, "rngs": tt.Rngs(0)}
    layer = cls(1, 1, *args, **options)
    x = jnp.arange(1.0, inputs + 1).reshape(1, -1, 1)
    return " ".join(str(int(y)) for y in np.ravel(jax.jit(layer)(x)))


@pytest.mark.parametrize(
    ("padding", "size", "strides", "dilation", "expected"),
    [
        ("CIRCULAR", 1, 1, 1, "1 2 3 4 5"),
        ("CIRCULAR", 2, 1, 1, "21 32 43 54 15"),
        ("CIRCULAR", 3, 1, 1, "215 321 432 543 154"),
        ("CIRCULAR", 4, 1, 1, "3215 4321 5432 1543 2154"),
        ("CIRCULAR", 3, 2, 1, "215 432 154"),
        ("CIRCULAR", 3, 1, 2, "314 425 531 142 253"),
        ("CIRCULAR", 2, 2, 2, "25 42 14"),
        ("CIRCULAR", 4, 1, 2, "4253 5314 1425 2531 3142"),
        ("REFLECT", 2, 1, 1, "21 32 43 54 45"),
        ("REFLECT", 3, 1, 1, "212 321 432 543 454"),
        ("REFLECT", 4, 1, 1, "3212 4321 5432 4543 3454"),
        ("REFLECT", 3, 2, 1, "212 432 454"),
        ("REFLECT", 4, 1, 2, "4224 5313 4422 3531 2442"),
        ("CAUSAL", 1, 1, 1, "1 2 3 4 5"),
        ("CAUSAL", 4, 1, 1, "1000 2100 3210 4321 5432"),
        ("CAUSAL", 3, 2, 1, "100 321 543"),
        ("CAUSAL", 3, 1, 2, "100 200 310 420 531"),
    ],
)
def test_padding_of_our_own(padding, size, strides, dilation, expected):
    options = {"padding": padding, "kernel_dilation": dilation}
    assert run_digits(tt.Conv, 5, size, strides, **options) == expected


def test_padding_by_repetition_on_two_axes():
    layer = made(tt.Conv, 2, 6, (3, 2), padding="CIRCULAR")
    x = np.pad(numbers(1, 4, 5, 2), [(0, 0), (1, 1), (0, 1), (0, 0)], mode="wrap")
    expected = convolved(x, raw(layer.kernel), (1, 1), [(0, 0)] * 2)
    close(layer(array(1, 4, 5, 2)), expected + raw(layer.bias))


# Transposed.

FOLDED = [
    # window, strides, dilation, transpose_kernel, outputs
    (1, 1, 1, False, "1 2 3"),
    (1, 3, 1, False, "1 0 0 2 0 0 3 0 0"),
    (2, 1, 1, False, "13 21 32"),
    (2, 1, 1, True, "12 23 31"),
    (2, 2, 1, False, "10 1 20 2 30 3"),
    (2, 2, 2, False, "13 0 21 0 32 0"),
    (2, 2, 2, True, "0 12 0 23 0 31"),
    (2, 3, 1, True, "1 10 0 2 20 0 3 30 0"),
    (3, 1, 1, False, "213 321 132"),
    (3, 1, 1, True, "312 123 231"),
    (3, 1, 2, False, "312 123 231"),
    (3, 2, 1, False, "103 10 201 20 302 30"),
    (3, 2, 1, True, "10 102 20 203 30 301"),
    (3, 2, 2, True, "312 0 123 0 231 0"),
    (4, 1, 1, False, "2132 3213 1321"),
    (4, 1, 2, True, "1321 2132 3213"),
    (4, 2, 1, False, "103 2010 201 3020 302 1030"),
    (4, 2, 1, True, "3010 102 1020 203 2030 301"),
    (4, 3, 1, False, "1003 100 10 2001 200 20 3002 300 30"),
    (6, 1, 1, False, "321321 132132 213213"),
    (6, 1, 2, True, "213213 321321 132132"),
    (6, 3, 1, True, "300100 1002 10020 100200 2003 20030 200300 3001 30010"),
]


@pytest.mark.parametrize(
    ("size", "strides", "dilation", "mirrored", "expected"), FOLDED
)
def test_outputs_beyond_the_edges_are_folded(
    size, strides, dilation, mirrored, expected
):
    options = {"kernel_dilation": dilation, "transpose_kernel": mirrored}
    found = run_digits(
        tt.ConvTranspose, 3, size, strides, padding="CIRCULAR", **options
    )
    assert found == expected


def painted(x, kernel, strides, dilation, mirrored):
    """Each input paints a window; also how far a window reaches on each axis."""
    axes = kernel.ndim - 2
    spans = [(k - 1) * dilation + 1 for k in kernel.shape[:axes]]
    kernel = np.swapaxes(kernel, -1, -2) if mirrored else np.flip(kernel, range(axes))
    sizes = [n * s + max(w - s, 0) for n, s, w in zip(x.shape[1:], strides, spans)]
    out = np.zeros((x.shape[0], *sizes, kernel.shape[-1]))
    for at in np.ndindex(*x.shape[1:-1]):
        window = tuple(
            slice(i * s, i * s + w, dilation) for i, s, w in zip(at, strides, spans)
        )
        here = x[(slice(None), *at)]
        stroke = np.tensordot(here, kernel, ([1], [axes]))
        out[(slice(None), *window)] += stroke
    return out, spans


def cropped(out, spans, shape, strides, padding):
    """The part of what is painted that a padding keeps."""
    if padding == "VALID":
        return out
    for axis, (span, n, s) in enumerate(zip(spans, shape, strides), 1):
        if padding == "SAME":
            before = span - 1 if s > span - 1 else math.ceil((span + s - 2) / 2)
            length = n * s
        else:
            before, after = padding[axis - 1]
            length = (n - 1) * s + 1 + before + after - span + 1
        kept = range(span - 1 - before, span - 1 - before + length)
        out = np.take(out, kept, axis)
    return out


@pytest.mark.parametrize(
    ("size", "strides", "padding", "dilation", "mirrored"),
    [
        ((3,), (1,), "SAME", 1, False),
        ((3,), (2,), "SAME", 1, True),
        ((2,), (3,), "SAME", 1, False),
        ((3,), (2,), "VALID", 2, False),
        ((2,), (3,), "VALID", 1, True),
        ((3,), (2,), [(1, 2)], 1, False),
        ((2, 3), (2, 1), "SAME", 1, False),
    ],
)
def test_a_transposed_convolution_paints_windows(
    size, strides, padding, dilation, mirrored
):
    options = {"kernel_dilation": dilation, "transpose_kernel": mirrored}
    layer = made(tt.ConvTranspose, 2, 6, size, strides, padding=padding, **options)
    assert layer.kernel.shape == (*size, *((6, 2) if mirrored else (2, 6)))
    shape = (2, *(4, 5)[: len(size)], 2)
    out, spans = painted(
        numbers(*shape), raw(layer.kernel), strides, dilation, mirrored
    )
    expected = cropped(out, spans, shape[1:-1], strides, padding)
    close(jax.jit(layer)(array(*shape)), expected + raw(layer.bias))


def test_the_transpose_with_a_mirrored_kernel_is_the_transpose_of_conv():
    forth = made(tt.Conv, 2, 6, 3, 2, padding="VALID", use_bias=False)
    options = {"padding": "VALID", "transpose_kernel": True, "use_bias": False}
    back = made(tt.ConvTranspose, 6, 2, 3, 2, **options)
    back.kernel = forth.kernel
    x, y = array(1, 7, 2), array(1, 3, 6)
    there = float(jnp.vdot(forth(x), y))
    assert there == pytest.approx(float(jnp.vdot(x, back(y))), rel=1e-5)


@pytest.mark.parametrize("padding", [1, (1,), [(1, 1)]])
def test_padding_of_a_transpose_by_number(padding):
    layer = made(tt.ConvTranspose, 2, 6, 3, padding=padding)
    out, spans = painted(numbers(2, 4, 2), raw(layer.kernel), (1,), 1, False)
    expected = cropped(out, spans, (4,), (1,), [(1, 1)])
    close(layer(array(2, 4, 2)), expected + raw(layer.bias))


# Masks, operations, errors.


@pytest.mark.parametrize("cls", [tt.Conv, tt.ConvTranspose])
@pytest.mark.parametrize("dtype", [bool, np.float32])
def test_a_mask_multiplies_the_kernel_and_is_no_leaf(cls, dtype):
    mask = (numbers(3, 2, 6) > 0).astype(dtype)
    layer, plain = made(cls, 2, 6, 3, mask=mask), made(cls, 2, 6, 3)
    plain.kernel[...] = plain.kernel[...] * mask
    close(layer(array(2, 5, 2)), plain(array(2, 5, 2)))
    np.testing.assert_array_equal(layer.mask, mask)
    assert {path[0] for path, _ in tt.to_flat_state(tt.state(layer))} == {
        "kernel",
        "bias",
    }
    mask[...] = 0
    assert layer.mask.any()
    assert plain.mask is None


def test_layers_with_equal_masks_have_one_structure():
    masks = [np.ones((3, 2, 6)), np.ones((3, 2, 6)), np.zeros((3, 2, 6))]
    init = drawing()
    layers = [made(tt.Conv, 2, 6, 3, mask=m, kernel_init=init) for m in masks]
    first, second, third = (jax.tree.structure(layer) for layer in layers)
    assert first == second
    assert first != third


@pytest.mark.parametrize("cls", [tt.Conv, tt.ConvTranspose])
def test_a_mask_of_another_shape_is_refused(cls):
    rngs = tt.Rngs(0)
    message = rf"^{cls.__name__}: `mask` must have .* \(3, 2, 6\), got float64\[3,2\]"
    with pytest.raises(tt.StructureError, match=message):
        cls(2, 6, 3, mask=np.ones((3, 2)), rngs=rngs)
    assert int(rngs.default.count[...]) == 0
    with pytest.raises(tt.StructureError, match=r"must be known .* traced"):
        jax.jit(lambda mask: made(cls, 2, 6, 3, mask=mask).kernel[...])(
            jnp.ones((3, 2, 6))
        )


def test_an_operation_of_the_user_need_not_know_newer_options():
    seen = []

    def operation(  # noqa: PLR0917 - as JAX's own
        lhs,
        rhs,
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        dimension_numbers,
        feature_group_count,
        precision,
    ):
        seen.append((window_strides, padding, lhs_dilation, rhs_dilation, precision))
        return jnp.zeros((*lhs.shape[:-1], 6))

    options = {"conv_general_dilated": operation, "precision": "highest"}
    layer = made(tt.Conv, 2, 6, 3, **options)
    close(layer(array(2, 5, 2)), np.zeros((2, 5, 6)) + raw(layer.bias))
    assert seen == [((1,), "SAME", (1,), (1,), "highest")]


@pytest.mark.parametrize("cls", [tt.Conv, tt.ConvTranspose])
@pytest.mark.parametrize("shape", [(2, 5, 4), (2,), ()])
def test_inputs_that_do_not_fit_are_refused(cls, shape):
    layer = placed(made(cls, 2, 6, 3))
    size = ",".join(map(str, shape))
    message = rf"{cls.__name__} at blocks/1/up: .*got float32\[{size}\]"
    with pytest.raises(tt.StructureError, match=message):
        layer(array(*shape))


PADDINGS = ["FULL", None, [(1, 1), (1, 1)], [(1, 2, 3)], (), [1, 2]]


@pytest.mark.parametrize("cls", [tt.Conv, tt.ConvTranspose])
def test_padding_of_another_form_is_refused(cls):
    for padding in PADDINGS:
        message = rf"{cls.__name__} at blocks/1/up: `padding` must be one of SAME, "
        with pytest.raises(tt.StructureError, match=message):
            placed(made(cls, 2, 6, 3, padding=padding))(array(2, 5, 2))


def test_padding_that_windows_or_transposes_cannot_have_is_refused():
    x = array(1, 4, 5, 2)
    for cls in (tt.Conv, tt.ConvTranspose):
        message = rf"{cls.__name__} at blocks/1/up: CAUSAL .* one axis, this one has 2"
        with pytest.raises(tt.StructureError, match=message):
            placed(made(cls, 2, 6, (3, 3), padding="CAUSAL"))(x)
    with pytest.raises(
        tt.StructureError, match=r"at blocks/1/up: .* REFLECT.* CIRCULAR"
    ):
        placed(made(tt.ConvTranspose, 2, 6, 3, padding="REFLECT"))(x)


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        *itertools.product([tt.Conv, tt.ConvTranspose], ["strides", "kernel_dilation"]),
        (tt.Conv, "input_dilation"),
    ],
)
def test_numbers_for_another_number_of_axes_are_refused(cls, name):
    layer = placed(made(cls, 2, 6, 3, **{name: (1, 2)}))
    message = rf"{cls.__name__} at blocks/1/up: `{name}` .*\(1, 2\)"
    with pytest.raises(tt.StructureError, match=message):
        layer(array(2, 5, 2))


@pytest.mark.parametrize(("ins", "outs", "groups"), [(3, 4, 2), (4, 3, 2), (4, 4, 0)])
def test_groups_that_do_not_divide_the_features_are_refused(ins, outs, groups):
    message = rf"^Conv: feature_group_count={groups} must divide in_features={ins}"
    with pytest.raises(tt.StructureError, match=message):
        made(tt.Conv, ins, outs, 3, feature_group_count=groups)


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_names_of_jax_in_small_letters_are_taken_as_in_nnx(padding):
    layer = made(tt.Conv, 2, 6, 3, padding=padding)
    upper = made(tt.Conv, 2, 6, 3, padding=padding.upper())
    close(layer(array(2, 5, 2)), upper(array(2, 5, 2)))


@pytest.mark.parametrize("name", ["strides", "padding", "kernel_dilation"])
@pytest.mark.parametrize("cls", [tt.Conv, tt.ConvTranspose])
def test_numbers_of_numpy_are_numbers(cls, name):
    layer = made(cls, 2, 6, 3, **{name: np.int64(2)})
    close(layer(array(2, 5, 2)), made(cls, 2, 6, 3, **{name: 2})(array(2, 5, 2)))


@pytest.mark.parametrize(
    "options",
    [
        {"strides": 0},
        {"strides": -1},
        {"strides": 1.5},
        {"kernel_dilation": 0},
        {"kernel_size": -1},
        {"kernel_size": 2.0},
        {"kernel_size": None},
        {"padding": [None]},
    ],
    ids=str,
)
@pytest.mark.parametrize("cls", [tt.Conv, tt.ConvTranspose])
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_sizes_of_windows_that_make_no_sense_are_refused(cls, options):
    options = {"kernel_size": 3, **options}
    with pytest.raises(ValueError, match=f"{cls.__name__}.*`{[*options][-1]}`"):
        placed(made(cls, 2, 6, **options))(array(2, 5, 2))


def test_results_are_sharded_as_asked():
    expected = np.asarray(made(tt.Conv, 2, 8, 3)(array(2, 5, 2)))
    with jax.set_mesh(mesh_of((2, 4), ("data", "model"), AxisType.Explicit)):
        layer, spec = made(tt.Conv, 2, 8, 3), P("data", None, "model")
        x = jax.device_put(array(2, 5, 2), P("data"))
        outputs = compiled(lambda x: layer(x, out_sharding=spec))(x)
        assert jax.typeof(outputs).sharding.spec == spec
        close(outputs, expected)


def test_gradients_reach_what_a_mask_lets_through():
    mask = numbers(3, 2, 6) > 0
    layer = made(tt.Conv, 2, 6, 3, mask=mask)
    grads = tt.grad(lambda layer: jnp.sum(layer(array(2, 5, 2))))(layer)
    found = np.asarray(grads.kernel[...])
    np.testing.assert_array_equal(found != 0, mask)


@pytest.mark.parametrize(
    ("size", "strides", "dilation"), [(3, 1, 1), (2, 3, 1), (3, 2, 2)]
)
def test_a_transposed_convolution_can_be_causal(size, strides, dilation):
    options = {"padding": "CAUSAL", "kernel_dilation": dilation}
    layer = made(tt.ConvTranspose, 2, 6, size, strides, **options)
    x = array(1, 5, 2)
    outputs = layer(x)
    assert outputs.shape == (1, 5 * strides, 6)
    changed = np.asarray(layer(x.at[:, 3].add(1.0)) != outputs).any((0, 2))
    assert not changed[: 3 * strides].any()
    assert changed[3 * strides]
    kernel = np.flip(raw(layer.kernel), 0)
    expected = np.zeros((5 * strides + 2 * size * dilation, 6))
    for i in range(5):
        for j in range(size):
            expected[i * strides + j * dilation] += numbers(1, 5, 2)[0, i] @ kernel[j]
    close(outputs[0], expected[: 5 * strides] + raw(layer.bias))


def test_the_mask_of_a_convolution_is_no_leaf_and_averages_go_on():
    mask = np.tri(3, 12, dtype=bool).reshape(3, 2, 6)
    layer = made(tt.Conv, 2, 6, 3, mask=mask)
    assert {path for path, _ in tt.to_flat_state(tt.state(layer))} == {
        ("kernel",),
        ("bias",),
    }
    average, before = tt.EMA(layer, 0.5), raw(layer.kernel)
    layer.kernel[...] = layer.kernel[...] + 1.0
    average.update(layer)
    close(average.params["kernel"][...], before + 0.5)


def test_groups_that_do_not_divide_are_a_value_error():
    with pytest.raises(ValueError, match="feature_group_count=2 must divide"):
        made(tt.Conv, 3, 4, 3, feature_group_count=2)
