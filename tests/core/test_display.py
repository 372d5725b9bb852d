# SPDX-License-Identifier: Apache-2.0
"""How objects print."""

import jax
import jax.numpy as jnp
import numpy as np
import treescope

import treetap as tt
from treetap._core.display import color_of, readable_bytes


class Model(tt.Module):
    def __init__(self):
        self.w = tt.Param(jnp.zeros((2, 3)), role="kernel")
        self.stat = tt.BatchStat(np.zeros(5, np.float32))
        self.rngs = tt.Rngs(0)
        self.size = 4
        self._secret = "x"
        self._hidden = tt.Param(jnp.zeros(1))
        self.f = jnp.sin
        self.items = tt.data([jnp.zeros(7), (1,)])


def test_a_variable_prints_its_size_value_and_metadata():
    assert repr(tt.Param(jnp.zeros(3), role="k")) == (
        "Param( # 3 (12 B)\n  value=Array([0., 0., 0.], dtype=float32),\n  role='k'\n)"
    )
    assert len(repr(tt.Param(jnp.zeros((100, 100))))) < 1000
    assert repr(tt.Param(2.0)) == "Param(\n  value=2.0\n)"


def test_required_metadata_show_only_when_unusual():
    assert "eager_sharding" not in repr(tt.Param(1.0))
    assert "eager_sharding=False" in repr(tt.Param(1.0, eager_sharding=False))
    assert "ref=True" in repr(tt.Param(jnp.zeros(2), ref=True))


def test_the_first_line_counts_each_kind_and_the_total():
    first = repr(Model()).splitlines()[0]
    assert set(first.removeprefix("Model( # ").split(", ")) == {
        "Param: 7 (28 B)",
        "BatchStat: 5 (20 B)",
        "RngState: 2 (12 B)",
        "Total: 14 (60 B)",
    }


def test_private_statics_are_hidden_and_private_data_shown():
    text = repr(Model())
    assert "_secret" not in text
    assert "_hidden=Param(" in text
    assert "Array(shape=(7,), dtype=dtype('float32'))" in text


def test_numbers_are_shown_outside_of_modules_and_types_of_arrays_inside():
    class Small(tt.Module):
        def __init__(self):
            self.w = tt.Param(jnp.zeros(2))
            self.state = tt.data(tt.State({"x": jnp.zeros(2)}))
            self.dtype, self.other = jnp.float32, np.float16

    text, numbers = repr(Small()), "Array([0., 0.], dtype=float32)"
    assert text.count("Array(shape=(2,), dtype=dtype('float32'))") == 2
    assert numbers not in text
    assert "dtype=float32,\n  other=float16" in text
    for held in (tt.state(Small()), tt.List([jnp.zeros(2)]), tt.Dict(a=jnp.zeros(2))):
        assert numbers in repr(held)
    assert "Array(shape" in repr(tt.List([tt.data(Small())]))
    assert numbers in repr(tt.Param(jnp.zeros(2)))  # as before


def test_cycles_and_repetitions_end():
    model = tt.Dict(a=tt.Param(jnp.zeros(3)))
    model.me = model
    assert "Dict(...)" in repr(model)
    assert repr(model).splitlines()[0] == "Dict({"


def test_shared_variables_are_counted_once():
    shared = tt.Param(jnp.zeros(3))
    model = tt.Sequential(shared, shared)
    assert repr(model).splitlines()[0] == "Sequential( # Param: 3 (12 B)"


def test_containers_print_like_python():
    assert repr(tt.List([1, "a"])) == "List([\n  1,\n  'a'\n])"
    assert repr(tt.Dict(a=1)) == "Dict({\n  'a': 1\n})"
    assert repr(tt.Dict()) == "Dict({})"
    assert "'a': 1" in repr(tt.State({"a": 1}))
    assert "(('a', 'b'), 1)" in repr(tt.to_flat_state({"a": {"b": 1}}))


def test_graphdefs_print_as_outlines():
    shared = tt.Param(jnp.zeros(3), role="x")
    model = tt.Dict(a=shared, b=tt.data([shared, jnp.zeros(1)]), n=3)
    text = repr(tt.graphdef(model, graph=True))
    assert "GraphDef(graph, 2 leaves" in text
    assert "(root): Dict(n=3)" in text
    assert "a: Param{'role': 'x'}" in text
    assert "0: the same as number 1" in text
    assert "1: leaf" in text


def test_abstract_values_print():
    abstract = jax.eval_shape(lambda: Model())
    assert "ShapeDtypeStruct" in repr(abstract)


def test_bytes_are_readable():
    assert readable_bytes(999) == "999 B"
    assert readable_bytes(1500) == "1.5 KB"
    assert readable_bytes(999_999) == "1.0 MB"
    assert readable_bytes(2_500_000) == "2.5 MB"
    assert readable_bytes(3 * 10**9) == "3.0 GB"
    assert readable_bytes(5 * 10**12) == "5.0 TB"


def test_treescope_renders_models_and_states():
    for value in (Model(), tt.state(Model()), tt.List([1]), tt.Param(jnp.zeros(2))):
        html = treescope.render_to_html(value, compressed=False)
        assert type(value).__name__ in html
    assert "role" in treescope.render_to_text(Model())


def test_notebooks_show_models_states_and_variables():
    for value in (Model(), tt.state(Model()), tt.List([1]), tt.Param(jnp.zeros(2))):
        shown = value._repr_mimebundle_(include=None, exclude=None)
        assert shown["text/plain"] == repr(value)
        assert "treescope" in shown["text/html"]


def test_notebooks_show_models_while_they_are_traced():
    shown = []
    tt.jit(lambda model: shown.append(model._repr_mimebundle_()))(Model())
    assert "treescope" in shown[0]["text/html"]


def test_colours_are_stable():
    assert color_of("Linear") == color_of("Linear")
    assert color_of("Linear") != color_of("Conv")
