# SPDX-License-Identifier: Apache-2.0
"""Recurrence: a cell run over a sequence, forwards, backwards, or both.

Inputs are `[batch..., time, features]`, or `[time, batch..., features]` if time is
major. Sequences may be shorter than the array that holds them (`seq_lengths`): the
carry that is returned is then the one of each sequence's own last step.
"""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from treetap._core.errors import StructureError
from treetap._core.trees.filters import Filter, predicate_of
from treetap._core.trees.traverse import nodes_below
from treetap._core.wording import typed
from treetap._modules.module import Module
from treetap._modules.random_rules import SplitBackups, StreamBackup
from treetap._modules.random_streams import Rngs, RngStream
from treetap._nn.cells import Cell, RNNCellBase
from treetap._nn.dropout import forked
from treetap._nn.parameters import Array, where
from treetap._transforms.lift.prefixes import StateAxes
from treetap._transforms.scan import Carry, scan

Streams = Rngs | RngStream | bool


def own_stream(layer: Any, rngs: Any) -> Any:
    """Return the stream a layer keeps to begin its carry with."""
    if rngs is True:
        return RngStream(0, tag="carry")
    return forked(layer, None if rngs is False else rngs, "carry")


def flip_sequences(
    inputs: jax.Array,
    seq_lengths: jax.Array | None,
    num_batch_dims: int,
    time_major: bool,
) -> jax.Array:
    """Reverse sequences, each within its own length; padding stays behind.

    Args:
        inputs: The sequences.
        seq_lengths: Their lengths, with a number for each of the batch.
        num_batch_dims: How many batch axes there are.
        time_major: Whether time is the first axis.
    """
    axis = 0 if time_major else num_batch_dims
    if seq_lengths is None:
        return jnp.flip(inputs, axis=axis)
    shape = inputs.shape[: num_batch_dims + 1]
    lengths = jnp.expand_dims(jnp.asarray(seq_lengths, jnp.int32), axis)
    # What is put at a position comes from as far before the end of its sequence. The
    # padding, which that does not reach, is counted from the end of the array.
    position = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    source = (lengths - 1 - position) % shape[axis]
    source = jnp.reshape(source, source.shape + (1,) * (inputs.ndim - source.ndim))
    return jnp.take_along_axis(inputs, source, axis=axis)


class RNN(Module):
    """Run a cell over sequences.

    Args:
        cell: The cell: an `RNNCellBase`, or anything else that has its methods.
        time_major: Whether time is the first axis of the inputs.
        return_carry: Whether to return the last carry as well, before the outputs.
        reverse: Whether to go from the end to the beginning.
        keep_order: Whether outputs are in the order of the inputs then.
        unroll: As for `jax.lax.scan`.
        state_axes: For Variables of the cell, by filter, how steps share them: `Carry`
            (from one to the next), None (all alike), or an axis. `Carry` without it.
        broadcast_rngs: Streams of the cell that give every step the same keys.
        rngs: Random streams, or a stream, for the carry; True for one of its own, False
            for none.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> rnn = tt.RNN(tt.GRUCell(3, 4, rngs=tt.Rngs(0)))
        >>> rnn(jnp.ones((2, 7, 3))).shape
        (2, 7, 4)
    """

    def __init__(
        self,
        cell: RNNCellBase | Any,
        *,
        time_major: bool = False,
        return_carry: bool = False,
        reverse: bool = False,
        keep_order: bool = False,
        unroll: int = 1,
        state_axes: Mapping[Filter, Any] | None = None,
        broadcast_rngs: Filter = None,
        rngs: Streams = True,
    ):
        has_axes = isinstance(cell, RNNCellBase) or hasattr(cell, "num_feature_axes")
        if not (callable(cell) and has_axes):
            raise TypeError(
                "RNN: `cell` must be a recurrent cell, with `num_feature_axes` and "
                f"called with a carry and an input; got {type(cell).__name__}."
            )
        if not isinstance(unroll, bool) and unroll < 1:
            raise StructureError(f"RNN: `unroll` must be at least 1, got {unroll!r}.")
        self.cell: Any = cell
        self.time_major = time_major
        self.return_carry = return_carry
        self.reverse = reverse
        self.keep_order = keep_order
        self.unroll = unroll
        self.rngs = own_stream(self, rngs)
        self.state_axes = StateAxes({...: Carry} if state_axes is None else state_axes)
        self.broadcast_rngs = broadcast_rngs

    def __call__(
        self,
        inputs: Array,
        *,
        initial_carry: Any = None,
        seq_lengths: Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        rngs: Rngs | RngStream | None = None,
    ) -> Any:
        """Return the outputs of all steps; before them the last carry, if asked for.

        Args:
            inputs: The sequences.
            initial_carry: The carry to begin with, instead of the cell's.
            seq_lengths: How long each sequence is; as long as the array without it.
            return_carry: Whether to return the last carry, instead of the layer's own.
            time_major: Whether time is the first axis, instead of the layer's own.
            reverse: Whether to go backwards, instead of the layer's own.
            keep_order: Whether outputs are in the order of the inputs then, instead of
                the layer's own.
            rngs: Random streams, or a stream, for the carry.
        """
        return_carry = self.return_carry if return_carry is None else return_carry
        time_major = self.time_major if time_major is None else time_major
        reverse = self.reverse if reverse is None else reverse
        keep_order = self.keep_order if keep_order is None else keep_order
        inputs = jnp.asarray(inputs)
        batch_dims = inputs.ndim - self.cell.num_feature_axes - 1
        if batch_dims < 0:
            raise StructureError(
                f"{where(self)}: expected [batch..., time, features], got "
                f"{typed(inputs)}."
            )
        axis = 0 if time_major else batch_dims
        step_shape = (*inputs.shape[:axis], *inputs.shape[axis + 1 :])
        batch = step_shape[:batch_dims]
        lengths = self._checked_lengths(seq_lengths, batch, inputs.shape[axis])
        if isinstance(self.cell, Cell):
            self.cell._check_inputs(inputs)
            if initial_carry is not None:
                self.cell._check_carry(initial_carry, batch)
        if initial_carry is None:
            rngs = self.rngs if rngs is None else rngs
            if isinstance(rngs, Rngs):
                rngs = rngs.carry.fork()
            initial_carry = self.cell.initialize_carry(step_shape, rngs)

        def flip(x: jax.Array) -> jax.Array:
            return flip_sequences(x, lengths, batch_dims, time_major)

        if reverse:
            inputs = flip(inputs)
        carry, outputs = self._run(initial_carry, inputs, lengths, axis)
        if reverse and keep_order:
            outputs = jax.tree.map(flip, outputs)
        return (carry, outputs) if return_carry else outputs

    def _checked_lengths(self, lengths: Any, batch: Any, steps: int) -> Any:
        if lengths is None:
            return None
        lengths = jnp.asarray(lengths)
        if lengths.shape != batch or not jnp.issubdtype(lengths.dtype, jnp.integer):
            raise StructureError(
                f"{where(self)}: `seq_lengths` must be an integer for each sequence of "
                f"the batch {batch}, got {typed(lengths)}."
            )
        known = np.asarray([] if isinstance(lengths, Tracer) else lengths)
        if np.any((known < 0) | (known > steps)):
            raise StructureError(
                f"{where(self)}: `seq_lengths` must be from 0 to the {steps} steps "
                f"there are, got {lengths}."
            )
        return lengths

    def _run(self, carry: Any, inputs: Any, lengths: Any, axis: int) -> Any:
        """Return the last carry and all outputs."""
        settings = (axis, self.unroll, self.broadcast_rngs, self.state_axes)
        try:
            run = _scanned(*settings)
        except TypeError:  # a filter without a hash
            run = _scanned.__wrapped__(*settings)
        steps = jnp.arange(inputs.shape[axis], dtype=jnp.int32)
        carry = jax.tree.map(jnp.asarray, carry)
        streams = _streams_of(self.cell, self.broadcast_rngs)
        with streams:
            for stream, _, count in streams:
                stream.key.set_value(jax.random.split(stream(), 1)[0])
                stream.count.set_value(jnp.zeros_like(count))
            (_, last), outputs = run(self.cell, (carry, carry), lengths, steps, inputs)
        for stream, _, count in streams:  # of which a call that fails draws nothing
            stream.count.set_value(count + jnp.uint32(1))
        return last, outputs


# JAX traces a function that it knows only once, so the functions are kept.
@functools.lru_cache(128, typed=True)
def _scanned(axis: int, unroll: int, broadcast: Filter, axes: StateAxes) -> Any:
    """Return the scan of an RNN with these settings."""

    def step(cell: Any, carries: Any, lengths: Any, at: Any, x: Any) -> Any:
        running, last = carries
        with _streams_of(cell, broadcast):
            new, out = cell(running, x)
        new = jax.tree.map(lambda n, r: jnp.asarray(n, r.dtype), new, running)
        last = new if lengths is None else _kept(at < lengths, new, last)
        return (new, last), out

    is_plain = axes == StateAxes({...: Carry})
    return scan(
        step,
        in_axes=(None if is_plain else axes, Carry, None, 0, axis),
        out_axes=(Carry, axis),
        unroll=unroll,
        graph=True,
        graph_updates=not is_plain,
    )


def _kept(is_valid: jax.Array, new: Any, last: Any) -> Any:
    """Return the new carry for sequences that are still going, or else the last one."""

    def choose(new: jax.Array, last: jax.Array) -> jax.Array:
        shape = is_valid.shape + (1,) * (new.ndim - is_valid.ndim)
        return jnp.where(jnp.reshape(is_valid, shape), new, last)

    return jax.tree.map(choose, new, last)


def _streams_of(cell: Any, filter: Filter) -> SplitBackups:
    """Return the streams of a cell that give every step of a sequence the same keys.

    At the end of a `with` block they get back the keys and counts that they have now.
    """
    if filter is None:
        return SplitBackups()
    wanted = predicate_of(filter)
    return SplitBackups(
        StreamBackup(stream, stream.key.get_value(), stream.count.get_value())
        for path, stream in nodes_below(cell, RngStream, True, "RNN")
        if wanted(path, stream)
    )


def concatenate(first: jax.Array, second: jax.Array) -> jax.Array:
    """Put two outputs side by side, on the last axis."""
    return jnp.concatenate([first, second], axis=-1)


class Bidirectional(Module):
    """Run two RNNs over the same sequences, one from each end.

    Args:
        forward_rnn: The one from the beginning.
        backward_rnn: The one from the end.
        merge_fn: What puts the outputs of both together, each step's at its place.
        time_major: Whether time is the first axis of the inputs.
        return_carry: Whether to return the last carries as well, as a pair.
        rngs: Random streams, or a stream, for both carries; True for one of its own,
            False for none.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> rngs = tt.Rngs(0)
        >>> forwards = tt.RNN(tt.GRUCell(3, 4, rngs=rngs))
        >>> backwards = tt.RNN(tt.GRUCell(3, 4, rngs=rngs))
        >>> tt.Bidirectional(forwards, backwards)(jnp.ones((2, 7, 3))).shape
        (2, 7, 8)
    """

    def __init__(
        self,
        forward_rnn: RNN,
        backward_rnn: RNN,
        *,
        merge_fn: Callable[[jax.Array, jax.Array], Any] = concatenate,
        time_major: bool = False,
        return_carry: bool = False,
        rngs: Streams = True,
    ):
        for name, rnn in (("forward_rnn", forward_rnn), ("backward_rnn", backward_rnn)):
            if not callable(rnn):
                raise TypeError(
                    f"Bidirectional: `{name}` must be an RNN, got {type(rnn).__name__}."
                )
        if forward_rnn is backward_rnn:
            warnings.warn(
                "Bidirectional: forward_rnn and backward_rnn are the same object, so "
                "they share their parameters. Make two, unless that is meant.",
                UserWarning,
                stacklevel=2,
            )
        self.forward_rnn = forward_rnn
        self.backward_rnn = backward_rnn
        self.merge_fn = merge_fn
        self.time_major = time_major
        self.return_carry = return_carry
        self.rngs = own_stream(self, rngs)

    def __call__(
        self,
        inputs: Array,
        *,
        initial_carry: tuple[Any, Any] | None = None,
        rngs: Rngs | RngStream | None = None,
        seq_lengths: Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
    ) -> Any:
        """Return the outputs of all steps; before them both carries, if asked for.

        Args:
            inputs: The sequences.
            initial_carry: The carries to begin with.
            rngs: Random streams, or a stream, for the carries.
            seq_lengths: How long each sequence is.
            return_carry: Instead of the layer's own.
            time_major: Instead of the layer's own.
            reverse: Not for an RNN that goes both ways.
            keep_order: The order is always that of the inputs.
        """
        if reverse or keep_order is False:
            raise StructureError(
                f"{where(self)}: an RNN that goes both ways has no `reverse`, and "
                "keeps the order of the inputs."
            )
        return_carry = self.return_carry if return_carry is None else return_carry
        rngs = self.rngs if rngs is None else rngs
        options = {
            "rngs": rngs.carry if isinstance(rngs, Rngs) else rngs,
            "seq_lengths": seq_lengths,
            "return_carry": True,
            "time_major": self.time_major if time_major is None else time_major,
        }
        carries: Any = (None, None) if initial_carry is None else initial_carry
        if not isinstance(carries, tuple | list) or len(carries) != 2:
            raise StructureError(
                f"{where(self)}: `initial_carry` must be a pair, of the carries of "
                f"both RNNs; got {type(carries).__name__}."
            )
        ahead, back = carries
        ahead, first = self.forward_rnn(
            inputs, initial_carry=ahead, reverse=False, **options
        )
        options["keep_order"] = True
        back, second = self.backward_rnn(
            inputs, initial_carry=back, reverse=True, **options
        )
        outputs = jax.tree.map(self.merge_fn, first, second)
        return ((ahead, back), outputs) if return_carry else outputs
