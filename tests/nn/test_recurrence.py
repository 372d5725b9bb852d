# SPDX-License-Identifier: Apache-2.0
"""RNN and Bidirectional against loops in numpy over the equations of their cells."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cell_formulas import FORMULAS, over_time
from formulas import (
    array,
    close,
    compiled,
    counts_of,
    made,
    numbers,
    placed,
    ran,
    values_of,
)

import treetap as tt
from treetap._nn.recurrence import flip_sequences

X = (2, 5, 3)
LENGTHS = np.array([2, 5])
PAIRS = (tt.LSTMCell, tt.OptimizedLSTMCell)


def gru(**options):
    return tt.RNN(made(tt.GRUCell, 3, 4), **options)


def zeros(cls, *batch):
    one = np.zeros((*batch, 4))
    return (one, one) if cls in PAIRS else one


@pytest.mark.parametrize("cls", FORMULAS, ids=lambda cls: cls.__name__)
def test_a_cell_runs_over_time(cls):
    rnn = tt.RNN(made(cls, 3, 4), return_carry=True)
    carry, outputs = ran(rnn, array(*X))
    expected, whole = over_time(rnn.cell, zeros(cls, 2), numbers(*X))
    jax.tree.map(close, carry, expected)
    close(outputs, whole)


@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 5, 3), (2, 1, 3)])
def test_any_number_of_batch_axes(shape):
    rnn = gru(return_carry=True)
    carry, outputs = ran(rnn, array(*shape))
    expected, whole = over_time(
        rnn.cell, zeros(tt.GRUCell, *shape[:-2]), numbers(*shape)
    )
    close(carry, expected)
    close(outputs, whole)


def test_no_steps_leave_the_carry():
    rnn = gru(return_carry=True)
    carry, outputs = ran(rnn, array(2, 0, 3), initial_carry=array(2, 4))
    assert outputs.shape == (2, 0, 4)
    close(carry, numbers(2, 4))


def test_a_carry_to_begin_with():
    rnn = tt.RNN(made(tt.LSTMCell, 3, 4))
    begin = numbers(2, 4, seed=1), numbers(2, 4, seed=2)
    given = tuple(jnp.asarray(part, jnp.float32) for part in begin)
    _, whole = over_time(rnn.cell, begin, numbers(*X))
    close(ran(rnn, array(*X), initial_carry=given), whole)


def flipped(x, lengths):
    out = x.copy()
    for row, length in enumerate(lengths):
        out[row, :length] = x[row, :length][::-1]
    return out


NONE, SOME = None, np.array([0, 3])


@pytest.mark.parametrize(
    ("reverse", "keep_order", "time_major", "lengths"),
    [
        (False, False, False, SOME),
        (False, False, True, LENGTHS),
        (True, False, False, NONE),
        (True, False, False, LENGTHS),
        (True, True, False, SOME),
        (True, True, True, NONE),
        (True, True, True, LENGTHS),
        (False, True, False, NONE),
    ],
)
def test_directions_orders_and_lengths(reverse, keep_order, time_major, lengths):
    options = {"reverse": reverse, "keep_order": keep_order, "time_major": time_major}
    rnn = gru(return_carry=True)  # the options of the call beat those of the layer
    x = numbers(*X)
    ends = np.array([5, 5]) if lengths is None else lengths
    seen = flipped(x, ends) if reverse else x
    expected, whole = over_time(rnn.cell, zeros(tt.GRUCell, 2), seen)
    for row, end in enumerate(ends):
        expected[row] = whole[row, end - 1] if end else 0
    if reverse and keep_order:
        whole = flipped(whole, ends)
    inputs = array(*X)
    inputs = jnp.swapaxes(inputs, 0, 1) if time_major else inputs
    carry, outputs = ran(rnn, inputs, seq_lengths=lengths, **options)
    outputs = np.swapaxes(outputs, 0, 1) if time_major else np.asarray(outputs)
    close(carry, expected)
    for row, end in enumerate(ends):
        close(outputs[row, :end], whole[row, :end])
    assert outputs.shape == whole.shape


def test_options_of_the_layer():
    rnn = gru(reverse=True, keep_order=True, time_major=True, return_carry=True)
    plain = tt.RNN(rnn.cell)
    x = jnp.swapaxes(array(*X), 0, 1)
    options = {"reverse": True, "keep_order": True, "time_major": True}
    carry, outputs = ran(rnn, x)
    same, whole = ran(plain, x, return_carry=True, **options)
    close(outputs, whole)
    close(carry, same)
    close(ran(rnn, x, return_carry=False), outputs)


def test_lengths_with_several_batch_axes():
    rnn = gru(return_carry=True)
    shape, lengths = (2, 3, 5, 3), np.array([[1, 2, 3], [4, 5, 0]])
    carry, outputs = ran(rnn, array(*shape), seq_lengths=lengths)
    _, whole = over_time(rnn.cell, zeros(tt.GRUCell, 2, 3), numbers(*shape))
    for at in np.ndindex(2, 3):
        end = lengths[at]
        close(carry[at], whole[at][end - 1] if end else np.zeros(4))
    close(outputs, whole)
    back = ran(rnn, array(*shape), seq_lengths=lengths, reverse=True)[0]
    close(back[1, 1], ran(rnn, array(*shape)[1, 1], reverse=True)[0])


def test_unrolling_is_handed_on_and_changes_no_result():
    rnn, unrolled = gru(rngs=False), gru(unroll=5, rngs=False)
    close(ran(unrolled, array(*X)), ran(rnn, array(*X)))
    text = str(jax.make_jaxpr(unrolled)(array(*X)))
    assert "unroll=5" in text
    assert "unroll=1" in str(jax.make_jaxpr(rnn)(array(*X)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_carry_keeps_its_dtype(dtype):
    cell = made(tt.SimpleCell, 3, 4, dtype=dtype)
    rnn = tt.RNN(cell, return_carry=True, rngs=False)
    carry, outputs = jax.eval_shape(rnn, array(*X))
    assert (carry.dtype, outputs.dtype) == (jnp.float32, dtype)


# Cells with state, and with streams.


class Noisy(tt.RNNCellBase):
    """Counts its steps, keeps something for each, and adds noise."""

    def __init__(self, stream=None):
        self.steps = tt.BatchStat(jnp.zeros(()))
        self.kept = tt.Cache(jnp.arange(5.0))
        self.stream = tt.data(stream)

    @property
    def num_feature_axes(self):
        return 1

    def initialize_carry(self, input_shape, rngs=None, carry_init=None):
        if rngs is None:
            return jnp.zeros(input_shape)
        key = rngs.carry() if isinstance(rngs, tt.Rngs) else rngs()
        return jax.random.uniform(key, input_shape)

    def __call__(self, carry, x):
        self.steps[...] += 1
        drawn = 0.0 if self.stream is None else self.stream.uniform(())
        return carry + x, jnp.stack([self.steps[...], self.kept[...].sum(), drawn])


def test_state_of_a_cell_goes_from_step_to_step():
    rnn = tt.RNN(Noisy())
    outputs = ran(rnn, array(*X))
    np.testing.assert_array_equal(outputs[0], [1, 2, 3, 4, 5])
    rnn(array(*X))
    assert float(rnn.cell.steps[...]) == 10


def test_state_of_a_cell_may_have_an_axis_for_time():
    axes = {tt.Cache: 0, ...: tt.Carry}
    outputs = tt.RNN(Noisy(), state_axes=axes)(array(*X))
    np.testing.assert_array_equal(outputs[1], [0, 1, 2, 3, 4])
    np.testing.assert_array_equal(outputs[0], [1, 2, 3, 4, 5])
    outputs = tt.RNN(Noisy(), state_axes={tt.Cache: None, ...: tt.Carry})(array(*X))
    np.testing.assert_array_equal(outputs[1], [10] * 5)


def keys_of(stream, count):
    return [
        float(jax.random.uniform(jax.random.fold_in(stream, i))) for i in range(count)
    ]


def test_each_step_draws_its_own_key():
    rnn = tt.RNN(Noisy(tt.RngStream(3, tag="noise")))
    close(rnn(array(*X))[2], keys_of(jax.random.key(3), 5))
    assert int(rnn.cell.stream.count[...]) == 5


@pytest.mark.parametrize("filter", ["noise", ...])
def test_all_steps_of_a_sequence_draw_the_same_key(filter):
    rnn = tt.RNN(Noisy(tt.RngStream(3, tag="noise")), broadcast_rngs=filter)
    first, second = (np.asarray(rnn(array(*X))[2]) for _ in range(2))
    for i, drawn in enumerate((first, second)):
        key = jax.random.split(jax.random.fold_in(jax.random.key(3), i), 1)[0]
        close(drawn, keys_of(key, 1) * 5)
    stream = rnn.cell.stream
    assert int(stream.count[...]) == 2
    assert stream.key[...] == jax.random.key(3)


def test_other_streams_go_on():
    rnn = tt.RNN(Noisy(tt.RngStream(3, tag="noise")), broadcast_rngs="dropout")
    close(rnn(array(*X))[2], keys_of(jax.random.key(3), 5))


def test_where_the_stream_for_a_carry_comes_from():
    rngs = tt.Rngs(carry=3)
    forked = jax.random.fold_in(jax.random.key(3), 0)
    for given, key in (
        (True, jax.random.key(0)),
        (rngs, forked),
        (tt.Rngs(carry=3).carry, forked),
    ):
        rnn = tt.RNN(Noisy(), return_carry=True, rngs=given)
        assert rnn.rngs.tag == "carry"
        carry, _ = rnn(array(*X))
        drawn = jax.random.uniform(jax.random.fold_in(key, 0), (2, 3))
        close(carry, np.asarray(drawn) + numbers(*X).sum(1))
        assert counts_of(rnn.rngs) == {("count",): 1}
    assert int(rngs.carry.count[...]) == 1
    for given in (False, None):
        rnn = tt.RNN(Noisy(), return_carry=True, rngs=given)
        assert rnn.rngs is None
        close(rnn(array(*X))[0], numbers(*X).sum(1))


def test_a_call_may_bring_its_own_stream():
    rnn = tt.RNN(Noisy(), return_carry=True)
    key = jax.random.key(3)
    forked = jax.random.fold_in(key, 0)
    given = ((tt.Rngs(carry=3), forked), (tt.RngStream(3, tag="carry"), key))
    for rngs, key in given:
        begun = jax.random.uniform(jax.random.fold_in(key, 0), (2, 3))
        found = rnn(array(*X), rngs=rngs)[0]
        close(found, np.asarray(begun) + numbers(*X).sum(1))
    assert counts_of(rnn.rngs) == {("count",): 0}


# Flipping.


@pytest.mark.parametrize(
    ("time_major", "lengths"),
    [(True, None), (False, LENGTHS), (True, np.array([0, 1]))],
)
def test_sequences_are_flipped_within_their_lengths(time_major, lengths):
    x = numbers(*X)
    given = np.swapaxes(x, 0, 1) if time_major else x
    given = jnp.asarray(given, jnp.float32)
    found = compiled(lambda x: flip_sequences(x, lengths, 1, time_major))(given)
    found = np.swapaxes(found, 0, 1) if time_major else np.asarray(found)
    ends = [5, 5] if lengths is None else lengths
    for row, end in enumerate(ends):
        close(found[row, :end], x[row, :end][::-1])
        assert sorted(found[row].ravel()) == sorted(x[row].astype(np.float32).ravel())


# Both ways.


def both(**options):
    backwards = tt.RNN(made(tt.GRUCell, 3, 4, kernel_init=jax.nn.initializers.ones))
    return tt.Bidirectional(gru(), backwards, **options)


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_two_cells_run_from_both_ends(lengths):
    layer = both(return_carry=True)
    (ahead, back), outputs = ran(layer, array(*X), seq_lengths=lengths)
    options = {"seq_lengths": lengths, "return_carry": True}
    first, one = ran(layer.forward_rnn, array(*X), **options)
    second, two = ran(
        layer.backward_rnn, array(*X), reverse=True, keep_order=True, **options
    )
    close(outputs, np.concatenate([one, two], -1))
    close(ahead, first)
    close(back, second)


def test_options_of_both_ways():
    layer = both()
    begin = array(2, 4), array(2, 4, seed=1)
    x = array(*X)
    outputs = np.asarray(ran(layer, x, initial_carry=begin))
    close(outputs[..., :4], ran(layer.forward_rnn, x, initial_carry=begin[0]))
    major = tt.Bidirectional(layer.forward_rnn, layer.backward_rnn, time_major=True)
    found = ran(major, jnp.swapaxes(x, 0, 1), initial_carry=begin)
    close(np.swapaxes(found, 0, 1), outputs)
    merged = tt.Bidirectional(
        layer.forward_rnn, layer.backward_rnn, merge_fn=jnp.subtract
    )
    close(ran(merged, x, initial_carry=begin), outputs[..., :4] - outputs[..., 4:])
    carry, _ = ran(layer, x, return_carry=True)
    assert [part.shape for part in carry] == [(2, 4)] * 2


def test_one_object_for_both_ways_is_warned_of():
    rnn = gru()
    with pytest.warns(UserWarning, match="the same object"):
        tt.Bidirectional(rnn, rnn)


def test_both_ways_have_an_order():
    layer = placed(both())
    for options in ({"reverse": True}, {"keep_order": False}):
        with pytest.raises(tt.StructureError, match="Bidirectional at blocks/1/up: "):
            layer(array(*X), **options)
    assert ran(layer, array(*X), reverse=False, keep_order=True).shape == (2, 5, 8)


class Leaky(tt.Module):
    """A cell that derives from no base: it only has the methods of one."""

    num_feature_axes = 1

    def __init__(self):
        self.leak = tt.Param(jnp.asarray(0.5))

    def initialize_carry(self, input_shape, rngs=None):
        return {"sum": jnp.zeros(input_shape), "steps": jnp.zeros((), jnp.int32)}

    def __call__(self, carry, x):
        total = carry["sum"] * self.leak + x
        return {"sum": total, "steps": carry["steps"] + 1}, total


def test_anything_with_the_methods_of_a_cell_is_one():
    carry, outputs = tt.RNN(Leaky(), return_carry=True)(array(*X))
    expected = np.zeros((2, 3))
    for x in np.moveaxis(numbers(*X), 1, 0):
        expected = expected * 0.5 + x
    close(carry["sum"], expected)
    close(outputs[:, -1], expected)
    assert carry["steps"] == X[1]


def test_anything_that_is_called_like_an_rnn_goes_both_ways():
    class Running:
        def __call__(self, x, *, reverse, **options):
            order = slice(None, None, -1 if reverse else 1)
            return x[:, -1], jnp.cumsum(x[:, order], 1)[:, order]

    found = tt.Bidirectional(Running(), Running())(array(*X))
    ahead, back = numbers(*X).cumsum(1), numbers(*X)[:, ::-1].cumsum(1)[:, ::-1]
    close(found, np.concatenate([ahead, back], -1))


# Errors.


@pytest.mark.parametrize("wrong", [3, None, jnp.sin])
def test_a_cell_is_a_cell(wrong):
    message = "^RNN: `cell` must be a recurrent cell, .* got "
    with pytest.raises(TypeError, match=message):
        tt.RNN(wrong)


@pytest.mark.parametrize("rngs", [0, "carry", jax.random.key(0)], ids=type)
def test_streams_of_another_kind_are_refused(rngs):
    with pytest.raises(
        TypeError, match=r"^RNN: `rngs` must be an Rngs, an RngStream or"
    ):
        gru(rngs=rngs)
    with pytest.raises(TypeError, match=r"^Bidirectional: `rngs` must be an Rngs"):
        both(rngs=rngs)


@pytest.mark.parametrize(
    ("shape", "lengths", "words"),
    [
        ((3,), None, r"expected \[batch..., time, features\], got float32\[3\]"),
        (X, [1, 2, 3], r"`seq_lengths` .* batch \(2,\), got int32\[3\]"),
        (X, [1.0, 2.0], r"`seq_lengths` must be an integer .* got float32\[2\]"),
        (X, 3, r"`seq_lengths` .* got int32\[\]"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_and_draw_nothing(shape, lengths, words):
    rnn = placed(gru())
    before = values_of(rnn)
    lengths = None if lengths is None else jnp.asarray(lengths)
    with pytest.raises(tt.StructureError, match=f"RNN at blocks/1/up: .*{words}"):
        rnn(array(*shape), seq_lengths=lengths)
    assert values_of(rnn) == before


def test_an_error_of_the_cell_says_where_it_is():
    message = r"GRUCell at blocks/1/up/cell: expected inputs with 3 .*float32\[2,5,4\]"
    with pytest.raises(tt.StructureError, match=message):
        placed(gru())(array(2, 5, 4))


def test_an_error_of_the_cell_changes_nothing():
    rnn = gru()
    before = values_of(rnn)
    with pytest.raises(tt.StructureError):
        rnn(array(2, 5, 4))
    assert values_of(rnn) == before


@pytest.mark.parametrize("lengths", [[1, 9], [1, -1]])
def test_lengths_outside_the_array_are_refused(lengths):
    with pytest.raises(tt.StructureError, match="seq_lengths"):
        gru()(array(*X), seq_lengths=jnp.asarray(lengths))


ONE = (2, 4)
CARRIES = {
    "batch": (tt.GRUCell, (3, 4)),
    "features": (tt.GRUCell, (2, 3)),
    "a pair": (tt.GRUCell, (ONE, ONE)),
    "no pair": (tt.LSTMCell, ONE),
    "features of one": (tt.LSTMCell, ((2, 3), ONE)),
}


@pytest.mark.parametrize("name", CARRIES)
def test_a_carry_that_does_not_fit_is_refused(name):
    cls, shapes = CARRIES[name]
    rnn = placed(tt.RNN(made(cls, 3, 4)))
    if isinstance(shapes[0], tuple):
        carry = tuple(array(*shape) for shape in shapes)
    else:
        carry = array(*shapes)
    with pytest.raises(tt.StructureError, match=r"at blocks/1/up.*carry"):
        rnn(array(*X), initial_carry=carry)


@pytest.mark.parametrize("wrong", ["carry", "three", "parts"])
def test_both_ways_take_pairs(wrong):
    if wrong == "parts":
        with pytest.raises(TypeError, match=r"Bidirectional: .*forward_rnn"):
            tt.Bidirectional(3, 4)
    carry = array(2, 4) if wrong == "carry" else (array(2, 4),) * 3
    with pytest.raises(
        tt.StructureError, match=r"Bidirectional at blocks/1/up: .*pair"
    ):
        placed(both())(array(*X), initial_carry=carry)


def test_lengths_that_are_known_while_tracing_are_checked():
    layer = tt.RNN(tt.GRUCell(4, 3, rngs=tt.Rngs(0)))
    x = jax.random.normal(jax.random.key(0), (2, 5, 4))

    def run(layer, lengths):
        return tt.jit(lambda layer: layer(x, seq_lengths=lengths))(layer)

    lengths = jnp.array([2, 1])
    np.testing.assert_allclose(
        run(layer, lengths), layer(x, seq_lengths=lengths), rtol=1e-5, atol=1e-6
    )
    with pytest.raises(tt.StructureError, match="from 0 to the 5 steps"):
        run(layer, jnp.array([2, 6]))


def test_a_filter_without_a_hash_may_say_which_streams_are_kept():
    class Nothing:
        __hash__ = None

        def __call__(self, path, value):
            return False

    inputs = jnp.ones((1, 4, 2))
    cell = tt.LSTMCell(2, 3, rngs=tt.Rngs(0))
    found = tt.RNN(cell, broadcast_rngs=Nothing())(inputs)
    assert found.tolist() == tt.RNN(cell)(inputs).tolist()


def test_the_carry_of_sequences_in_two_batch_axes():
    rnn = gru(return_carry=True)
    lengths = np.array([[1, 2, 3], [4, 5, 2]])
    carry, outputs = ran(rnn, array(2, 3, 5, 3), seq_lengths=lengths)
    assert carry.shape == (2, 3, 4)
    for at in np.ndindex(2, 3):
        close(carry[at], outputs[at][lengths[at] - 1])


def test_an_rnn_without_streams_is_made_of_parameters():
    rnn = gru(rngs=False)
    graphdef, parameters = tt.split(rnn, tt.Param)
    same = tt.merge(graphdef, parameters)
    close(same(array(2, 5, 3)), rnn(array(2, 5, 3)))


def test_a_carry_of_zeros_needs_no_streams():
    rnn = gru(rngs=False)
    assert rnn.rngs is None
    assert jax.jit(lambda x: rnn(x))(array(2, 5, 3)).shape == (2, 5, 4)
    assert not rnn.cell.initialize_carry((2, 3)).any()
