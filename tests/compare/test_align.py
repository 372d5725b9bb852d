# SPDX-License-Identifier: Apache-2.0
"""Odd partners: what cannot be paired, read or told in numbers is said so."""

import io
import json

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

import treetap as tt
from treetap._compare.comparison import compare
from treetap._observe.records import Record, Site

ONES = np.ones((2, 3), np.float32)


def test_a_rule_that_cannot_be_followed_names_what_it_would_need_first():
    rules = {"x": tt.tensor("lost.{i}").stack()}
    with pytest.raises(tt.CaptureError, match=r"(?s)what was looked for.*x: lost\.0"):
        compare({"x": np.float32(1.0)}, {"other": ONES}, rename=rules)


def test_a_layout_that_gives_another_shape_is_told_as_such():
    comparison = compare({"x": ONES}, {"x": ONES}, layout=lambda value: value[:1])
    assert comparison.first.reason == "their shapes differ"
    assert comparison.first.shapes == ((2, 3), (1, 3))


def test_iterations_of_a_loop_inside_a_while_stay_together():
    def run(by):
        site = Site(ONES[None] * by, name="x", wraps=("scan", "while"))
        return Record((site,))

    assert [each.site for each in compare(run(1), run(1))] == ["x[0]"]
    inside = Site(ONES, name="x", wraps=("while", "scan"))
    assert [each.site for each in compare(Record((inside,)), Record((inside,)))] == [
        "x"
    ]


def test_values_of_other_processes_are_refused(monkeypatch):
    value = jnp.ones(2)
    elsewhere = property(lambda self: False)
    monkeypatch.setattr(type(value), "is_fully_addressable", elsewhere)
    with pytest.raises(tt.CaptureError, match="x lies on devices of other processes"):
        compare({"x": value}, {"x": np.ones(2)})


def test_a_file_of_types_that_jax_does_not_have_is_refused(tmp_path):
    file = tmp_path / "a.safetensors"
    about = {"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}
    text = json.dumps(about).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"\0")
    with pytest.raises(tt.CaptureError, match=r"'x' in .* is F4, which JAX does not"):
        compare(file, {"x": ONES})


def test_whole_numbers_have_no_steps_between_them():
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(compare({"x": np.arange(3)}, {"x": np.arange(3) + 1}))
    heads, _, row = console.export_text().splitlines()[1:4]
    assert heads.split()[-2:] == ["ulp", "limit"]
    assert row.split()[-4:] == ["-", "0", "relative", "error"]


def test_a_folder_of_many_files_is_compared_by_names(tmp_path):
    for name in ("x", "y"):
        save_file({name: ONES}, tmp_path / f"{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    places = {name: f"{name}.safetensors" for name in ("x", "y")}
    index.write_text(json.dumps({"weight_map": places}))
    comparison = compare(index, {"x": ONES, "y": ONES + 1})
    assert comparison.first.site == "y"
    with pytest.raises(tt.WeightsError, match="is not from `save_record`"):
        tt.load_record(index)


def test_dicts_without_an_order_are_refused_wherever_they_come_from():
    odd = {"x": {1: ONES, "one": ONES}}
    record = Record((Site({1: ONES, "one": ONES}, name="x"),))
    for given in (odd, record):
        with pytest.raises(tt.CaptureError, match=r"x has a dict .* have no order"):
            compare(given, {"x": ONES})
