# SPDX-License-Identifier: Apache-2.0
"""Summaries and tables of models."""

import dataclasses
import functools
import inspect
import json
import pickle
import re

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import treetap as tt
from treetap._report.rows import sizes_of
from treetap._report.summary import count_text

PLAIN = {"force_terminal": False, "width": 200}
NARROW = {"force_terminal": False, "width": 80}
X = jnp.ones((4, 32))


class Block(tt.Module):
    def __init__(self, rngs):
        self.linear = tt.Linear(32, 32, rngs=rngs)
        self.norm = tt.BatchNorm(32, rngs=rngs)
        self.dropout = tt.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return jax.nn.relu(self.dropout(self.norm(self.linear(x))))


class Net(tt.Module):
    def __init__(self, rngs):
        self.first = Block(rngs)
        self.blocks = tt.List([Block(rngs)])
        self.scale = tt.Param(jnp.ones((1, 32)))
        self.tied = self.first.linear

    def encode(self, x):
        return {"h": self.first(x), "aux": None}

    def __call__(self, x):
        h = self.blocks[0](self.encode(x)["h"])
        return self.tied(h) * self.scale


def net():
    return Net(tt.Rngs(0))


@functools.cache
def net_summary():
    return tt.summary(net(), X)


LINEAR = 32 * 32 + 32
BLOCK = LINEAR + 2 * 32
NET = 2 * BLOCK + 32


class Counter(tt.Module):
    """A model of which every number is known."""

    def __init__(self):
        self.w = tt.Param(jnp.ones((3, 3)))
        self.seen = tt.BatchStat(jnp.zeros(5, jnp.bfloat16))
        self.rngs = tt.Rngs(0)
        self.raw = jnp.zeros(7, jnp.int8)

    def __call__(self, x):
        return x @ self.w


# The figures.


def test_rows_are_in_the_order_of_calls_with_paths_and_methods():
    found = net_summary()
    assert [row.text for row in found.rows] == [
        "",
        ":encode",
        "first",
        "first/linear",
        "first/norm",
        "first/dropout",
        "blocks/0",
        "blocks/0/linear",
        "blocks/0/norm",
        "blocks/0/dropout",
    ]
    encode = found.rows[1]
    assert (encode.path, encode.method, encode.type) == ((), "encode", Net)
    assert encode.outputs == "h: float32[4,32]\naux: None"


def test_calls_with_the_same_types_are_one_row():
    found = net_summary()
    calls = {row.text: row.calls for row in found.rows}
    assert calls["first/linear"] == 2  # tied
    assert calls["blocks/0/linear"] == 1


def test_calls_with_other_types_are_other_rows():
    class Twice(tt.Module):
        def __init__(self):
            self.part = Counter()

        def __call__(self, x):
            return self.part(x), self.part(x[:1]), self.part(x)

    found = tt.summary(Twice(), jnp.ones((2, 3)))
    assert [(row.text, row.inputs, row.calls) for row in found.rows[1:]] == [
        ("part", "float32[2,3]", 2),
        ("part", "float32[1,3]", 1),
    ]


def test_sizes_are_of_a_module_and_what_it_holds():
    found = net_summary()
    rows = {row.text: row for row in found.rows}
    assert found.parameters == rows[""].parameters == NET
    assert found.nbytes == rows[""].nbytes == 4 * NET
    assert rows[""].own_parameters == 32
    assert rows["first"].parameters == BLOCK
    assert rows["first"].own_parameters == 0
    assert rows["first/linear"].own_parameters == LINEAR
    assert rows["first/dropout"].parameters == 0


def test_totals_are_by_kind_of_variable():
    found = tt.summary(Counter(), jnp.ones((1, 3)))
    assert {k: tuple(size) for k, size in found.totals.items()} == {
        "Array": (7, 7),
        "BatchStat": (5, 10),
        "Param": (9, 36),
        "RngState": (2, 12),
    }


def test_kinds_that_derive_from_param_are_parameters():
    class Extra(tt.Param):
        pass

    model = Counter()
    model.extra = Extra(jnp.ones(2))
    found = tt.summary(model, jnp.ones((1, 3)))
    assert found.parameters == 11
    assert tuple(found.totals["Extra"]) == (2, 8)


def test_flops_are_counted_unless_told_otherwise():
    found = tt.summary(Counter(), jnp.ones((2, 3)))
    assert found.flops == found.rows[0].flops == 36
    assert tt.summary(Counter(), jnp.ones((2, 3)), flops=False).flops is None


def test_depth_limits_the_paths_not_the_sizes():
    found = tt.summary(net(), X, depth=1)
    assert [row.text for row in found.rows] == ["", ":encode", "first"]
    assert found.parameters == NET
    assert [row.text for row in tt.summary(net(), X, depth=0).rows] == ["", ":encode"]


def test_another_method_may_be_called():
    found = tt.summary(net(), X, method="encode")
    assert found.rows[0].text == ":encode"


def test_stacked_layers_are_counted_once_and_shown_as_many():
    class Deep(tt.Module):
        def __init__(self):
            make = tt.vmap(lambda rngs: tt.Linear(8, 8, rngs=rngs))
            self.layers = make(tt.Rngs(0).split(12))

        def __call__(self, x):
            step = tt.scan(lambda x, f: f(x), in_axes=(tt.Carry, 0), out_axes=tt.Carry)
            return step(x, self.layers)

    found = tt.summary(Deep(), jnp.ones((1, 8)))
    row = found.rows[1]
    assert (row.text, row.calls, row.parameters) == ("layers", 12, 12 * 72)
    assert row.flops == 2 * 64 + 8
    assert 0 <= found.flops - 12 * row.flops <= 4
    assert "layers \N{MULTIPLICATION SIGN}12" in str(found)


@pytest.mark.parametrize("make", [net, lambda: tt.eval_shape(net, graph=True)])
def test_concrete_and_abstract_models_give_the_same(make):
    abstract = jax.ShapeDtypeStruct(X.shape, X.dtype)
    assert tt.summary(make(), abstract) == net_summary()


def test_models_in_bfloat16():
    layer = tt.Linear(3, 5, dtype="bfloat16", param_dtype="bfloat16", rngs=tt.Rngs(0))
    found = tt.summary(layer, jnp.ones((1, 3), jnp.bfloat16))
    assert (found.rows[0].outputs, found.nbytes) == ("bfloat16[1,5]", 2 * 20)


def test_the_model_is_left_as_it_was():
    model = net()
    count = int(model.first.dropout.rngs.count[...])
    mean = model.first.norm.mean[...]
    tt.summary(model, X)
    assert int(model.first.dropout.rngs.count[...]) == count
    assert model.first.norm.mean[...] is mean


def test_pytrees_that_are_no_modules_have_a_row():
    class Plain(tt.Pytree):
        def __init__(self):
            self.w = tt.Param(jnp.ones(3))

        def __call__(self, x):
            return x * self.w

    found = tt.summary(Plain(), jnp.ones(3))
    assert [(row.type, row.parameters) for row in found.rows] == [(Plain, 3)]


def test_a_module_that_came_as_an_argument_has_its_own_sizes():
    class Apply(tt.Module):
        def __call__(self, part, x):
            return part(x)

    found = tt.summary(Apply(), Counter(), jnp.ones((1, 3)))
    assert [(row.text, row.parameters) for row in found.rows] == [("", 0), ("part", 9)]
    assert found.parameters == 0


# The object.


def test_a_summary_is_a_frozen_value():
    found = net_summary()
    assert isinstance(found, tt.Summary)
    assert pickle.loads(pickle.dumps(found)) == found
    assert hash(found) == hash(tt.summary(net(), X))
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.parameters = 0  # pyright: ignore[reportAttributeAccessIssue] - refused
    found.totals.clear()
    assert found.totals


def test_a_summary_as_a_dict_is_json():
    found = tt.summary(Counter(), jnp.ones((2, 3))).to_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["sizes"]["Param"] == {"elements": 9, "bytes": 36}
    (row,) = found["rows"]
    assert row == {
        "path": "",
        "type": "Counter",
        "method": "__call__",
        "inputs": "float32[2,3]",
        "outputs": "float32[2,3]",
        "calls": 1,
        "parameters": 9,
        "own_parameters": 9,
        "bytes": 36,
        "sizes": found["sizes"],
        "flops": 36,
        "vjp_flops": None,
    }


def lines_at(width, table):
    console = Console(width=width, force_terminal=False, file=None, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_a_wide_table_has_all_columns_and_a_total():
    lines = lines_at(120, net_summary())
    assert lines[0].strip() == "Net summary"
    head = re.split(r"\W+", lines[2].strip(" │"))
    assert head == "path type inputs outputs params size FLOPs".split()
    (total,) = [line for line in lines if "Total" in line]
    assert f"{NET:,}" in total
    assert "9.1 KB" in total
    assert lines[-1].strip() == "BatchStat: 128 (512 B), RngState: 4 (24 B)"


def test_figures_are_aligned_at_the_right():
    lines = lines_at(120, net_summary())
    rows = [line.split("│") for line in lines if "│" in line]
    for column in (5, 6, 7):
        figures = [row[column] for row in rows if row[column].strip()]
        assert len(figures) == 12  # head, ten rows, total
        assert all(figure[-1] == " " != figure[-2] for figure in figures)


def test_a_narrow_table_is_compact_and_fits():
    lines = lines_at(80, net_summary())
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "f32[4,32]" in text
    assert "float32" not in text
    assert "\nfirst " in text
    assert "\n  linear \N{MULTIPLICATION SIGN}2 " in text  # below what holds it
    assert "2,272" in text


def test_long_names_of_classes_are_broken_before_a_capital():
    class VeryLongNameOfALayer(Block):
        pass

    lines = lines_at(60, tt.summary(VeryLongNameOfALayer(tt.Rngs(0)), X))
    assert any(" VeryLong" in line for line in lines)
    assert max(map(len, lines)) <= 60


def test_text_of_a_summary_is_plain(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    found = net_summary()
    assert "\x1b" not in str(found)
    assert str(found) == repr(found)
    assert "first/linear" in str(found)


def test_markup_in_texts_is_not_read():
    class Odd(tt.Module):
        def __call__(self, x, name):
            return x

    found = tt.summary(Odd(), X, "[bold]x[/nothing]")
    assert "[bold]x[/nothing]" in "\n".join(lines_at(120, found))


def test_html_is_escaped():
    class Odd(tt.Module):
        def __call__(self, x, name):
            return x

    text = tt.summary(Odd(), X, "<b>&")._repr_html_()
    assert "&lt;b&gt;&amp;" in text
    assert text.count("<tr>") == 3
    assert "float32[4,32]<br>" in text


def test_unknown_figures_are_shown_as_such():
    class Wait(tt.Module):
        def __init__(self):
            self.part = Counter()

        def __call__(self, x):
            return jax.lax.while_loop(lambda x: x.sum() < 9, self.part, x)

    found = tt.summary(Wait(), jnp.ones((2, 3)), flops=False)
    assert "part \N{MULTIPLICATION SIGN}?" in str(found)
    assert re.search(r"Total .* - *\W*$", str(found), re.MULTILINE)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"),
        (0, "0"),
        (999, "999"),
        (1_000, "1.0 K"),
        (999_949, "999.9 K"),
        (999_960, "1.0 M"),
        (3_100_000_000, "3.1 G"),
        (2.5e12, "2.5 T"),
        (1e18, "1000.0 P"),
    ],
)
def test_numbers_of_operations_are_readable(count, text):
    assert count_text(count) == text


# tabulate.


def cells(table):
    """The lines of a table as lists of cells."""
    found = [line for line in table.splitlines() if "│" in line or "┃" in line]
    return [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in found]


def test_a_table_has_a_column_for_each_kind_of_variable():
    table = tt.tabulate(net(), X, console_kwargs=PLAIN)
    head, root, *rest = cells(table)
    assert head == "path type inputs outputs BatchStat Param RngState".split()
    # `__call__` calls `encode` with its own inputs: that one returns first.
    types = ["float32[4,32]", "h: float32[4,32]"]
    assert root[:5] == ["encode", "Net", *types, "128 (512 B)"]
    assert root[5] == "scale: float32[1,32]"  # its own, then the size of all
    assert rest[0][5] == ""
    assert rest[1][5] == "2,272 (9.1 KB)"
    linear = [row[5] for row in rest if row[5] and "linear" in row[0]]
    assert linear == ["bias: float32[32]"] * 2
    assert "kernel: float32[32,32]" in table
    assert "1,056 (4.2 KB)" in table
    assert "mean: float32[32]" in table
    assert rest[-1][3:] == ["Total", "128 (512 B)", "2,272 (9.1 KB)", "4 (24 B)"]
    assert "Net Summary" in table.splitlines()[0]


def test_flops_are_columns_when_asked_for():
    layer = tt.Linear(3, 3, rngs=tt.Rngs(0))
    table = tt.tabulate(
        layer,
        jnp.ones((4, 3)),
        compute_flops=True,
        compute_vjp_flops=True,
        console_kwargs=PLAIN,
    )
    head, row, *_ = cells(table)
    assert head[4:6] == ["flops", "vjp_flops"]
    assert row[4:6] == ["84", "237"]
    assert cells(table)[-1][5] == "Total"


def test_metadata_are_shown_with_the_variable():
    model = Counter()
    model.w.set_metadata(role="kernel", out_sharding=(None, "model"))
    table = tt.tabulate(model, jnp.ones((1, 3)), console_kwargs=PLAIN)
    column = [row[6] for row in cells(table)]
    assert column[1:5] == [
        "w:",
        "out_sharding: (None, 'model')",
        "role: kernel",
        "value: float32[3,3]",
    ]


def test_variables_in_containers_are_those_of_the_module():
    class Mixture(tt.Module):
        def __init__(self):
            self.weights = tt.List([tt.Param(jnp.ones(3)), tt.Param(jnp.ones(3))])
            self.more = tt.data({"bias": tt.Param(jnp.ones(3))})
            self.part = Counter()

        def __call__(self, x):
            return x * self.weights[0] + self.more["bias"]

    table = tt.tabulate(Mixture(), jnp.ones(3), console_kwargs=PLAIN)
    column = [row[6] for row in cells(table)]
    assert column[1:6] == [
        "more/bias: float32[3]",
        "weights/0: float32[3]",
        "weights/1: float32[3]",
        "",
        "18 (72 B)",
    ]
    assert tt.summary(Mixture(), jnp.ones(3)).rows[0].own_parameters == 9


def test_rows_may_be_chosen():
    def only_linear(row):
        return row.type is tt.Linear

    table = tt.tabulate(net(), X, row_filter=only_linear, console_kwargs=PLAIN)
    assert {row[1] for row in cells(table)[1:-1]} == {"Linear", ""}
    assert "Total Parameters: 2,272" in table


def test_depth_and_method_are_passed_on():
    table = tt.tabulate(net(), X, depth=0, method="encode", console_kwargs=PLAIN)
    paths = [row[0] for row in cells(table) if row[1] == "Net"]
    assert paths == ["encode"]


def test_tabulate_writes_paths_and_inputs_as_nnx_does():
    traced = []

    class Half(tt.Module):
        def forward(self, x, mask=None, options=None):
            traced.append("half")
            return x / 2, None, {}

    class Whole(tt.Module):
        def __init__(self):
            self.half = Half()

        def __call__(self, x):
            x, _, _ = self.half.forward(x, mask=None, options={})
            return self.half.forward(x, mask=None, options={})[0]

    table = tt.tabulate(Whole(), X, console_kwargs=PLAIN)
    text = str(X.shape).replace(" ", "")[1:-1]
    rows = [row[:4] for row in cells(table) if row[0] or row[1]]
    assert ["half/forward", "Half", f"- float32[{text}]", f"- float32[{text}]"] in rows
    for line in ("mask: None", "options: {}", "- None", "- {}"):
        assert line in table
    assert "half/forward " in table
    assert len(traced) == 2  # the two calls, each traced once
    table = tt.tabulate(Whole(), X, depth=1, console_kwargs=PLAIN)
    assert "forward" not in table
    assert "half:forward" in str(tt.summary(Whole(), X, depth=1))


def test_tabulate_has_one_row_for_equal_inputs_whatever_the_methods():
    class Inner(tt.Module):
        def __call__(self, x):
            return self.forward(x)

        def forward(self, x):
            return x

    class Outer(tt.Module):
        def __init__(self):
            self.first, self.second = tt.data(Inner()), tt.data(Inner())

        def __call__(self, x, mode):
            self.first(x)
            self.second.forward(x)
            return self.second(x) + self.first(x[:1])

    table = tt.tabulate(Outer(), X, "yes", console_kwargs=PLAIN)
    rows = [row[0] for row in cells(table)[1:-1] if row[1]]
    assert rows == ["", "first/forward", "second/forward", "first/forward"]
    assert "- yes " in table
    assert len(tt.summary(Outer(), X, "yes").rows) == 7


def test_options_reach_rich():
    table = tt.tabulate(
        net(),
        X,
        table_kwargs={"title": "Mine", "show_lines": False},
        column_kwargs={"justify": "right"},
        console_kwargs=PLAIN,
    )
    assert table.splitlines()[0].strip() == "Mine"
    assert "\n├" in table  # before the total only
    assert table.count("\n├") == 1
    assert "│           linear" not in table
    assert re.search(r"│ +first ", table)


def test_colours_are_on_unless_told_otherwise():
    assert "\x1b[" in tt.tabulate(net(), X)
    assert "\x1b[" not in tt.tabulate(net(), X, console_kwargs=PLAIN)


def test_a_narrow_table_of_variables_fits():
    table = tt.tabulate(net(), X, console_kwargs=NARROW)
    assert max(map(len, table.splitlines())) <= 80
    assert "kernel:" in table
    assert "f32[32,32]" in table
    assert "(9.1 KB)" in table


def test_the_signature_is_that_of_nnx():
    names = list(inspect.signature(tt.tabulate).parameters)
    assert " ".join(names) == (
        "obj args depth method row_filter table_kwargs column_kwargs console_kwargs "
        "compute_flops compute_vjp_flops kwargs"
    )


# What is refused.


@pytest.mark.parametrize("name", ["summary", "tabulate"])
def test_what_is_no_object_is_refused(name):
    with pytest.raises(TypeError, match=f"{name}: expected a Module .* got a list"):
        getattr(tt, name)([net()], X)


@pytest.mark.parametrize("name", ["summary", "tabulate"])
def test_an_unknown_method_is_refused(name):
    with pytest.raises(AttributeError, match=f"{name}: Net has no method 'decode'"):
        getattr(tt, name)(net(), X, method="decode")


def test_a_negative_depth_is_refused():
    with pytest.raises(ValueError, match=r"summary: `depth` is -1"):
        tt.summary(net(), X, depth=-1)


def test_variables_without_arrays_have_no_size():
    bare = tt.Dict(w=tt.Param(jnp.ones(3)))
    noted = tt.Dict(w=tt.Param(jnp.ones(3)), note=tt.Variable("a text"))
    assert sizes_of(noted) == sizes_of(bare)
    assert [kind for kind, _ in sizes_of(noted)] == ["Param"]


ROWS = jnp.ones((2, 3))


def test_total_parameters_counts_params_only():
    class Model(tt.Module):
        def __init__(self):
            self.norm = tt.BatchNorm(3, rngs=tt.Rngs(0))
            self.dropout = tt.Dropout(0.5, rngs=tt.Rngs(0))

        def __call__(self, x):
            return self.dropout(self.norm(x))

    text = tt.tabulate(Model(), ROWS, console_kwargs={"force_terminal": False})
    lines = [line.strip() for line in text.splitlines()]
    assert "Total Parameters: 6 (24 B)" in lines
    assert "BatchStat: 6 (24 B)" in lines
    assert "RngState: 2 (12 B)" in lines
    assert tt.summary(Model(), ROWS).parameters == 6


@pytest.mark.parametrize("name", ["summary", "tabulate"])
def test_a_method_that_raises_leaves_everything_as_it_was(name):
    class Fails(tt.Module):
        def __init__(self):
            self.linear = tt.Linear(3, 3, rngs=tt.Rngs(0))
            self.dropout = tt.Dropout(0.5, rngs=tt.Rngs(0))

        def __call__(self, x):
            self.dropout(self.linear(x))
            raise RuntimeError("on purpose")

    model = Fails()
    classes = (Fails, tt.Linear, tt.Dropout, tt.RngStream)
    before = [dict(vars(cls)) for cls in classes]
    with pytest.raises(RuntimeError, match="on purpose"):
        getattr(tt, name)(model, ROWS)
    assert [dict(vars(cls)) for cls in classes] == before
    assert int(model.dropout.rngs.count[...]) == 0
    assert set(vars(model)) == {"linear", "dropout"}
    with tt.set_graph_mode(False):
        assert tt.summary(model.linear, ROWS).parameters == 12
