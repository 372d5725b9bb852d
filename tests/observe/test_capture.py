# SPDX-License-Identifier: Apache-2.0
"""capture: its forms, what it returns, and what may be given to begin with."""

import functools

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from modes import ALL_MODES, NAMED
from treetap import nnx

I = tt.Intermediate  # noqa: E741 - short, as everywhere in these tests
P = tt.Perturbation
ONE = jnp.array(1.0)


class Special(I):
    """A kind derived from another."""


class Layer(tt.Module):
    def __init__(self, by=2.0):
        self.by = tt.Param(jnp.array(by))

    def __call__(self, x):
        self.sow(I, "x", x)
        return x * self.by

    def twice(self, x):
        return self(self(x))

    @tt.jit
    def compiled(self, x):
        return self(x)

    @functools.partial(tt.jit, static_argnames="add")
    def with_option(self, x, add):
        return self(x) + add

    @tt.capture(I)
    def captured(self, x):
        return self(x)


class Net(tt.Module):
    def __init__(self, count=2):
        self.layers = tt.List([Layer() for _ in range(count)])
        self.head = Layer(3.0)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def forward(model, x):
    return model(x)


def numbers(state):
    """A State as plain numbers."""
    return jax.tree.map(lambda x: jnp.asarray(x).tolist(), tt.to_pure_dict(state))


# Forms.


@pytest.mark.parametrize("first", ["kind", "name", "function"])
@pytest.mark.parametrize("what", ["module", "method", "function"])
def test_a_model_is_captured_in_every_form(first, what):
    layer = Layer()
    fn, args = {
        "module": (layer, (ONE,)),
        "method": (layer.__call__, (ONE,)),
        "function": (forward, (layer, ONE)),
    }[what]
    captured = {
        "kind": lambda: tt.capture(I)(fn),
        "name": lambda: tt.capture("intermediates")(fn),
        "function": lambda: tt.capture(fn, I),
    }[first]()
    out, state = captured(*args)
    assert float(out) == 2.0
    assert type(state) is tt.State
    assert numbers(state) == {"x": (1.0,)}
    assert type(state["x"]) is I


def test_the_form_with_a_kind_first_takes_all_kinds_and_options():
    class Both(tt.Module):
        def __call__(self, x):
            self.sow(I, "x", x)
            return self.perturb("p", x)

    decorator = tt.capture(P, I, init={"p": P(jnp.array(5.0))}, method_outputs=Special)
    out, zeros, sown, outputs = decorator(Both())(ONE)
    assert float(out) == 6.0
    assert numbers(zeros) == {"p": 5.0}
    assert numbers(sown) == {"x": (1.0,)}
    assert numbers(outputs) == {"__call__": (6.0,)}


@pytest.mark.parametrize("call", ["twice", "compiled"])
def test_bound_methods_have_their_owner_as_root(call):
    _, state = tt.capture(getattr(Layer(), call), I)(ONE)
    expected = {"twice": (1.0, 2.0), "compiled": (1.0,)}[call]
    assert numbers(state) == {"x": expected}


def test_jitted_methods_with_options_are_captured():
    out, state = tt.capture(Layer().with_option, I)(ONE, add=1)
    assert float(out) == 3.0
    assert numbers(state) == {"x": (1.0,)}


def test_capture_decorates_methods():
    layer = Layer()
    out, state = layer.captured(ONE)
    assert float(out) == 2.0
    assert numbers(state) == {"x": (1.0,)}
    assert Layer.captured.__name__ == "captured"


def test_a_decorated_method_of_a_child_has_the_child_as_root():
    net = Net()
    _, state = net.layers[1].captured(ONE)
    assert numbers(state) == {"x": (1.0,)}


@pytest.mark.parametrize(
    ("partial", "args"),
    [
        (lambda m: functools.partial(m), (ONE,)),
        (lambda m: functools.partial(m.twice, ONE), ()),
        (lambda m: functools.partial(forward, m), (ONE,)),
        (lambda m: functools.partial(forward, model=m), ()),
        (lambda m: functools.partial(functools.partial(forward, m), ONE), ()),
    ],
)
def test_partials_are_captured(partial, args):
    fn, kwargs = partial(Layer()), {}
    if "model" in fn.keywords:
        kwargs = {"x": ONE}
    _, state = tt.capture(fn, I)(*args, **kwargs)
    assert numbers(state)["x"][0] == 1.0
    assert list(state) == ["x"]


def test_transformed_models_are_captured():
    layer = Layer()
    _, state = tt.capture(jax.vmap(layer), I)(jnp.arange(3.0))
    assert numbers(state) == {"x": ([0.0, 1.0, 2.0],)}
    _, state = tt.capture(jax.jit(layer), I)(ONE)
    assert numbers(state) == {"x": (1.0,)}
    _, state = tt.capture(tt.jit(forward), I)(layer, ONE)
    assert numbers(state) == {"x": (1.0,)}


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda m: (ONE, m), (1,)),
        (lambda m: [m], (0,)),
        (lambda m: {"net": m, "x": ONE}, ("net",)),
        (lambda m: {"deep": [ONE, {"er": m}]}, ("deep", 1, "er")),
    ],
)
def test_paths_start_with_the_keys_of_a_container(make, path):
    def call(tree):
        leaves = jax.tree.leaves(tree, is_leaf=is_layer)
        return next(filter(is_layer, leaves))(ONE)

    _, state = tt.capture(call, I)(make(Layer()))
    assert list(tt.to_flat_state(state).paths) == [(*path, "x")]


def is_layer(value):
    return isinstance(value, Layer)


def test_a_pytree_that_holds_modules_is_a_root():
    class Holder(tt.Pytree):
        def __init__(self):
            self.first = Layer()
            self.rest = tt.List([Layer()])

    _, state = tt.capture(lambda h: h.rest[0](h.first(ONE)), I)(Holder())
    assert numbers(state) == {"first": {"x": (1.0,)}, "rest": {0: {"x": (2.0,)}}}


def test_a_module_given_twice_is_reported_under_the_first_argument():
    layer = Layer()
    _, state = tt.capture(lambda a, b: a(b(ONE)), I)(layer, layer)
    assert numbers(state) == {"a": {"x": (1.0, 2.0)}}


def test_starred_arguments_are_called_by_name_and_position():
    def call(*models):
        return sum(model(ONE) for model in models)

    _, state = tt.capture(call, I)(Layer(), Layer())
    assert numbers(state) == {"models": {0: {"x": (1.0,)}, 1: {"x": (1.0,)}}}


# What comes back.


def test_without_kinds_the_result_is_alone():
    assert float(tt.capture(Layer())(ONE)) == 2.0


def test_a_tuple_stays_one_result():
    def pair(model, x):
        return model(x), x

    out, state = tt.capture(pair, I)(Layer(), ONE)
    assert [float(x) for x in out] == [2.0, 1.0]
    assert numbers(state) == {"x": (1.0,)}


def test_a_model_that_sows_nothing_gives_empty_states():
    out, first, second = tt.capture(lambda m: None, I, P)(Layer())
    assert out is None
    assert (dict(first), dict(second)) == ({}, {})


def test_layers_are_in_numerical_order_with_integer_keys():
    _, state = tt.capture(Net(12), I)(ONE)
    assert list(state) == ["head", "layers"]
    assert list(state["layers"]) == list(range(12))
    values = [state["layers"][n]["x"][0].item() for n in range(12)]
    assert values == [2.0**n for n in range(12)]


def test_keys_are_sorted_whatever_the_order_of_execution():
    class Unsorted(tt.Module):
        def __call__(self, x):
            for name in ("b", "c", "a"):
                self.sow(I, name, x)

    _, state = tt.capture(Unsorted(), I)(ONE)
    assert list(state) == ["a", "b", "c"]


def test_a_module_that_recorded_nothing_does_not_appear():
    _, state = tt.capture(lambda m, x: m.head(x), I)(Net(), ONE)
    assert numbers(state) == {"head": {"x": (1.0,)}}


def test_variables_of_a_state_are_new_and_plain():
    _, first = tt.capture(Layer(), I)(ONE)
    _, second = tt.capture(Layer(), I)(ONE)
    assert first["x"] is not second["x"]
    assert first["x"].get_metadata() == I(0).get_metadata()


def test_reduce_fn_and_init_fn_give_a_sum():
    class Sum(tt.Module):
        def __call__(self, x):
            for _ in range(3):
                self.sow(I, "sum", x, lambda a, b: a + b, lambda: 0)

    for call in (Sum(), jax.jit(Sum())):
        _, state = tt.capture(call, I)(jnp.array(2.0))
        assert numbers(state) == {"sum": 6.0}


def test_unknown_names_of_kinds_make_one():
    class Named(tt.Module):
        def __call__(self, x):
            return self.sow("test_capturing_kind", "x", x)

    out, state = tt.capture(Named(), "test_capturing_kind")(ONE)
    assert out is True
    assert type(state["x"]).__name__ == "test_capturing_kind"
    assert type(state["x"]).__bases__ == (tt.Variable,)


def test_sow_says_whether_somebody_records():
    class Telling(tt.Module):
        def __call__(self, x):
            return self.sow(I, "x", x), self.sow(P, "x", x), self.sow(Special, "x", x)

    assert tt.capture(Telling(), I)(ONE)[0] == (True, False, False)
    assert tt.capture(Telling(), P, Special)(ONE)[0] == (False, True, True)
    assert tt.capture(Telling())(ONE) == (False, False, False)


def test_a_kind_does_not_collect_its_subclasses():
    class Derived(tt.Module):
        def __call__(self, x):
            self.sow(Special, "x", x)
            self.sow(I, "y", x)

    _, base, special = tt.capture(Derived(), I, Special)(ONE)
    assert (list(base), list(special)) == (["y"], ["x"])


def test_strings_and_none_may_be_sown_eagerly():
    class Talking(tt.Module):
        def __call__(self, x):
            self.sow(I, "word", "hello")
            self.sow(I, "word", None)
            self.sow(I, "tree", {"a": x, "b": (x, 2)})

    _, state = tt.capture(Talking(), I)(ONE)
    assert state["word"][...] == ("hello", None)
    assert state["tree"][0] == {"a": ONE, "b": (ONE, 2)}


@pytest.mark.parametrize("compiler", [jax.jit, tt.jit])
def test_strings_sown_under_jit_are_an_error(compiler):
    class Talking(tt.Module):
        def __call__(self, x):
            self.sow(I, "word", "hello")
            return x

    fn = compiler(lambda m, x: m(x))
    with pytest.raises(tt.CaptureError, match="sow: the value 'word' is a str"):
        tt.capture(fn, I)(Talking(), ONE)


def test_kinds_that_are_none_are_refused():
    for wrong in (3, int, None):
        with pytest.raises(tt.CaptureError, match="expected a kind of Variable"):
            tt.capture(Layer(), wrong)
    with pytest.raises(tt.CaptureError, match="expected a kind of Variable"):
        tt.capture(Layer(), method_outputs=int)
    with pytest.raises(tt.CaptureError, match="sow: expected a kind of Variable"):
        tt.capture(lambda m: m.sow(int, "x", 1), I)(Layer())


def test_two_kinds_alike_are_both_returned():
    _, first, second = tt.capture(Layer(), I, I)(ONE)
    assert numbers(first) == numbers(second) == {"x": (1.0,)}


# Modes, jit inside and outside, both namespaces.


@pytest.mark.parametrize("library", [tt, nnx], ids=["treetap", "nnx"])
@ALL_MODES
def test_capture_works_around_and_inside_jit(library, mode):
    net = Net()
    expected = {"head": {"x": (4.0,)}, "layers": {0: {"x": (1.0,)}, 1: {"x": (2.0,)}}}

    def inside(net, x):
        return library.capture(net, library.Intermediate)(x)

    around = library.capture(library.jit(forward, **mode), library.Intermediate)
    for fn in (library.jit(inside, **mode), around):
        for _ in range(2):
            out, state = fn(net, ONE)
            assert float(out) == 12.0
            assert numbers(state) == expected


@pytest.mark.parametrize("name", NAMED)
def test_writes_to_variables_reach_the_model_once(name):
    class Count(tt.Module):
        def __init__(self):
            self.n = tt.Variable(jnp.array(0))

        def __call__(self, x):
            self.n[...] += 1
            self.sow(I, "n", self.n[...])
            return x

    model = Count()
    fn = tt.jit(forward, **NAMED[name])
    for n in (1, 2, 3):
        _, state = tt.capture(fn, I, method_outputs=Special)(model, ONE)[:2]
        assert (int(model.n), int(state["n"][0])) == (n, n)
    assert list(vars(model)) == ["n"]


def test_a_captured_call_again_traces_nothing():
    traces = []

    @tt.jit
    def counted(model, x):
        traces.append(1)
        return model(x)

    net = Net()
    for _ in range(3):
        tt.capture(counted, I)(net, ONE)
    assert len(traces) == 1
    tt.capture(counted, I)(Net(), ONE)
    assert len(traces) == 1


def test_arguments_of_a_function_without_a_signature_are_called_by_number():
    one, two = Layer(1.0), Layer(2.0)
    key = lambda layer: float(layer(ONE))
    found, record = tt.observe(max, "**:__call__")(one, two, key=key)
    assert found is two
    assert [site.text for site in record] == ["0:__call__", "1:__call__"]


def test_a_refused_call_gives_metadata_back_too():
    class Tagging(tt.Module):
        def __init__(self):
            self.v = tt.Param(1.0, tag="old")

        def __call__(self, x):
            self.v[...] = 5.0
            self.v.set_metadata(tag="new")
            return x

    model = Tagging()
    with pytest.raises(tt.CaptureError, match="matches none"):
        tt.observe(model, "nothing")(ONE)
    assert (model.v[...], model.v.get_metadata("tag")) == (1.0, "old")
