# SPDX-License-Identifier: Apache-2.0
"""Event files that TensorBoard reads, and writers of other makes."""

import builtins

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import treetap as tt
from treetap._capture.statistics.figures import Bars
from treetap._observe.loggers import opened, write

BARS = Bars(np.array([3, 0, 2]), np.array([-1.0, 0.0, 1.0, 2.0]))


def read(folder):
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def test_tensorboard_reads_what_was_written(tmp_path):
    with tt.EventWriter(tmp_path / "run") as writer:
        for step, value in ((1, 0.5), (2, float("nan")), (7, -3.0)):
            writer.add_scalar("loss", value, step)
        writer.add_histogram("w", BARS, 7)
    events = read(tmp_path / "run")
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found[0] == (1, 0.5)
    assert found[1][0] == 2
    assert np.isnan(found[1][1])
    assert found[2] == (7, -3.0)
    (event,) = events.Histograms("w")
    histogram = event.histogram_value
    assert event.step == 7
    assert list(histogram.bucket) == [3.0, 0.0, 2.0]
    assert list(histogram.bucket_limit) == [0.0, 1.0, 2.0]
    assert (histogram.min, histogram.max, histogram.num) == (-1.0, 2.0, 5.0)
    assert (histogram.sum, histogram.sum_squares) == (1.5, 5.25)


def test_what_is_flushed_can_be_read_before_the_end(tmp_path):
    writer = tt.EventWriter(tmp_path)
    writer.add_scalar("a", 1.0, 0)
    writer.flush()
    assert read(tmp_path).Tags()["scalars"] == ["a"]
    writer.close()


def test_a_closed_writer_says_so(tmp_path):
    writer = tt.EventWriter(tmp_path)
    writer.close()
    writer.close()
    writer.flush()
    with pytest.raises(ValueError, match=r"is closed\. Open another"):
        writer.add_scalar("a", 1.0, 0)


def test_counts_and_edges_must_fit(tmp_path):
    with (
        tt.EventWriter(tmp_path) as writer,
        pytest.raises(ValueError, match=r"'w' has counts of shape \(2,\)"),
    ):
        writer.add_histogram("w", ([1, 2], [0.0, 1.0]), 0)


def test_without_tensorboard_the_error_names_the_extra(monkeypatch, tmp_path):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("tensorboard"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r'pip install "treetap\[tensorboard\]"'):
        tt.EventWriter(tmp_path)


class Torch:
    """As of PyTorch and tensorboardX."""

    def __init__(self):
        self.calls = []

    def add_scalar(self, tag, scalar_value, global_step=None, walltime=None):
        self.calls.append((tag, scalar_value, global_step))

    def add_histogram_raw(self, tag, *raw):
        self.calls.append((tag, *raw))


class Flax:
    """As of Flax."""

    def __init__(self):
        self.calls = []

    def scalar(self, tag, value, step):
        self.calls.append((tag, value, step))


class Clu:
    """As of CLU."""

    def __init__(self):
        self.calls = []

    def write_scalars(self, step, scalars):
        self.calls.append((step, scalars))


def test_each_writer_gets_what_it_takes():
    torch, flax, clu, told = Torch(), Flax(), Clu(), []

    def log(data, step):
        told.append((data, step))

    for writer in (torch, flax, clu, log):
        assert opened(writer, "f") is writer
        write(writer, 4, {"a": 1.0}, {"h": BARS})
    assert torch.calls[0] == ("a", 1.0, 4)
    # the order of PyTorch: min, max, num, sum, sum_squares, limits, counts, step
    ends = (-1.0, 2.0, 5.0, 1.5, 5.25)
    assert torch.calls[1] == ("h", *ends, [0.0, 1.0, 2.0], [3.0, 0.0, 2.0], 4)
    assert flax.calls == [("a", 1.0, 4)]
    assert clu.calls == [(4, {"a": 1.0})]
    assert told == [({"a": 1.0}, 4)]


def test_tensorboards_own_writer_gets_numbers(tmp_path):
    from tensorboard.summary import Writer

    writer = Writer(str(tmp_path))
    write(writer, 4, {"a": 1.5}, {"h": BARS})
    writer.close()
    events = read(tmp_path)
    (event,) = events.Tensors("a")
    assert event.step == 4
    assert event.tensor_proto.float_val == [1.5] or event.tensor_proto.tensor_content


@pytest.mark.parametrize("writer", [None, 3, {}, Torch])
def test_what_cannot_be_written_to_is_refused(writer):
    with pytest.raises(TypeError, match=r"f: cannot write to .*Give a folder"):
        opened(writer, "f")
