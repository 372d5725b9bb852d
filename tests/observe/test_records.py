# SPDX-License-Identifier: Apache-2.0
"""Records: indexing, trees, tables and States of what was heard."""

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from small_models import Layer


class Net(tt.Module):
    def __init__(self):
        self.layers = tt.List([Layer(2.0), Layer(3.0)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return tt.tap(self.layers[0](x), "end")


def record_of(*args, **options):
    return tt.observe(Net(), *args, **options)(jnp.ones(2))[1]


TEXTS = [
    "layers/0:__call__",
    "layers/1:__call__",
    "layers/0:__call__#1",
    "end",
    "__call__",
]


def test_a_record_is_a_sequence_of_sites():
    record = record_of()
    assert len(record) == 5
    assert [site.text for site in record] == TEXTS
    assert record[0] is record.sites[0]
    assert record[-1] is record.sites[4]
    with pytest.raises(IndexError):
        record[5]


def test_a_slice_is_a_record():
    part = record_of()[1:3]
    assert type(part) is tt.Record
    assert [site.text for site in part] == TEXTS[1:3]


@pytest.mark.parametrize("text", TEXTS)
def test_a_site_is_found_by_its_text(text):
    record = record_of()
    assert record[text].text == text
    assert text in record
    assert f"{text}x" not in record


def test_a_site_is_found_by_what_only_it_matches():
    record = record_of()
    assert record["layers/1"].text == "layers/1:__call__"
    assert record["layers/0#1"].text == "layers/0:__call__#1"
    assert record["**/end"].text == "end"


def test_an_ambiguous_text_is_an_error_that_lists_sites():
    with pytest.raises(tt.CaptureError) as caught:
        record_of()["layers/*"]
    message = str(caught.value)
    assert message.startswith("'layers/*' stands for 3 sites: layers/0:__call__, ")
    assert "`record.select`" in message


def test_an_unknown_text_is_an_error_with_near_misses():
    with pytest.raises(tt.CaptureError, match=r"matches none of 5(.|\n)*layers/1:"):
        record_of()["layer/1:__call__"]


def test_select_gives_a_record():
    record = record_of()
    part = record.select("layers/0")
    assert type(part) is tt.Record
    assert [site.text for site in part] == [TEXTS[0], TEXTS[2]]
    assert part.select(lambda site: site.index == 1)[0] is record[2]


def test_sites_know_shape_type_and_size():
    site = record_of()["end"]
    assert (site.shape, site.dtype, site.nbytes) == ((2,), jnp.float32, 8)
    assert (site.path, site.name, site.index) == ((), "end", 0)


def test_sites_of_trees_have_trees_of_shapes():
    def fn(x):
        return tt.tap({"a": x, "b": (x.astype(jnp.bfloat16),)}, "tree")

    site = tt.observe(fn)(jnp.ones((2, 3)))[1]["tree"]
    assert site.shape == {"a": (2, 3), "b": ((2, 3),)}
    assert site.dtype == {"a": jnp.float32, "b": (jnp.bfloat16,)}
    assert site.nbytes == 24 + 12


def test_the_size_of_a_record_is_that_of_its_values():
    assert record_of().nbytes == 5 * 8
    assert tt.Record(()).nbytes == 0


def test_a_record_is_a_tree():
    record = record_of()
    doubled = jax.tree.map(lambda x: x * 2, record)
    assert type(doubled) is tt.Record
    assert [site.text for site in doubled] == TEXTS
    assert doubled["end"].value.tolist() == [24.0, 24.0]
    assert len(jax.tree.leaves(record)) == 5


def test_a_record_comes_out_of_jit():
    net = Net()
    observed = jax.jit(lambda x: tt.observe(net)(x)[1])
    for _ in range(2):
        record = observed(jnp.ones(2))
        assert [site.text for site in record] == TEXTS
        assert record["end"].value.tolist() == [12.0, 12.0]


def test_a_record_goes_into_jit():
    traces = []

    @jax.jit
    def total(record):
        traces.append(1)
        return record["end"].value.sum()

    assert float(total(record_of())) == 24.0
    total(record_of())
    assert len(traces) == 1


def test_a_record_is_batched_by_vmap():
    net = Net()
    record = jax.vmap(lambda x: tt.observe(net)(x)[1])(jnp.ones((3, 2)))
    assert record["end"].shape == (3, 2)


def test_gradients_are_leaves_too():
    def loss(w):
        return tt.tap(w * 2, "h") ** 2

    _, record = tt.observe(jax.grad(loss), grads=True)(1.0)
    assert [float(leaf) for leaf in jax.tree.leaves(record)] == [2.0, 4.0]


def test_to_state_nests_by_path_with_calls_in_tuples():
    state = record_of().to_state()
    assert type(state) is tt.State
    assert list(state) == ["layers", "end", "__call__"]
    calls = state["layers"][0]["__call__"]
    assert [value.tolist() for value in calls] == [[2.0, 2.0], [12.0, 12.0]]
    assert len(state["end"]) == 1


@pytest.mark.parametrize("first", [True, False])
def test_to_state_refuses_a_name_that_is_also_a_childs(first):
    class Clash(tt.Module):
        def __init__(self):
            self.c = Layer()

        def __call__(self, x):
            if first:
                tt.tap(x, "c")
            x = self.c(x)
            return x if first else tt.tap(x, "c")

    _, record = tt.observe(Clash())(jnp.ones(2))
    with pytest.raises(tt.CaptureError, match=r"Record\.to_state: .*c"):
        record.to_state()


def test_a_record_prints_as_a_table():
    def fn(xs):
        return jax.lax.scan(lambda c, x: (c, tt.tap(x, "x")), 0.0, xs)

    assert repr(tt.observe(fn)(jnp.ones(3))[1]) == (
        "Record: 1 sites, 12 B\n"
        "site  how  type        size  under\n"
        "x     tap  float32[3]  12 B  scan"
    )
    lines = repr(record_of()).split("\n")
    assert len(lines) == 2 + 5
    assert lines[2].split() == ["layers/0:__call__", "output", "float32[2]", "8", "B"]


def test_a_record_without_values_prints_too():
    _, record = tt.observe(Net(), values=False)(jnp.ones(2))
    lines = repr(record).split("\n")
    assert lines[0] == "Record: 5 sites, 0 B"
    assert lines[5].split() == ["end", "tap", "0", "B"]


def test_a_site_prints_on_one_line():
    assert repr(record_of()["end"]) == "Site('end', tap, float32[2], 8 B)"


def test_html_has_a_row_for_each_site_and_escapes_names():
    _, record = tt.observe(lambda x: tt.tap(x, "<b>&\"'"))(1.0)
    html = record._repr_html_()
    assert "<b>" not in html
    assert "&lt;b&gt;&amp;" in html
    assert html.count("<tr>") == 2
    assert html.startswith("<table>")
    assert html.endswith("</table>")


def test_html_escapes_paths_and_types():
    model = tt.Dict({"<i>": Layer()})
    _, record = tt.observe(lambda m, x: m["<i>"](x))(model, 1.0)
    assert record[0].path == ("<i>",)
    assert "<i>" not in record._repr_html_()


def test_sites_are_frozen():
    site = record_of()["end"]
    with pytest.raises(AttributeError):
        site.value = 1
