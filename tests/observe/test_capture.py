# SPDX-License-Identifier: Apache-2.0
"""capture: its forms, what it returns, and what may be given to begin with."""

import dataclasses
import functools
import threading
import time

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from modes import ALL_MODES, GRAPH, NAMED, TREE, UPDATES
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


def rows(fn, size=3):
    """A function for each of some rows of nothing."""
    return lambda: jax.vmap(lambda _: fn())(jnp.zeros(size))


def turns(fn):
    return lambda: jax.lax.scan(lambda c, _: (c, fn()), 0.0, None, length=5)[1]


@pytest.mark.parametrize(
    ("around", "shape"),
    [
        (rows, (3, 2)),
        (lambda fn: rows(jax.jit(fn)), (3, 2)),
        (lambda fn: rows(rows(fn, 4)), (3, 4, 2)),
        (lambda fn: rows(turns(fn)), (3, 5, 2)),
        (lambda fn: turns(rows(fn)), (5, 3, 2)),
        (lambda fn: rows(turns(rows(fn, 4))), (3, 5, 4, 2)),
    ],
)
@pytest.mark.parametrize("form", [lambda fn: fn, jax.jit])
def test_what_is_the_same_for_all_rows_has_their_axis(around, shape, form):
    layer, same = Layer(), jnp.array([1.0, 2.0])
    _, sown = tt.capture(form(around(lambda: layer(same))), I)()
    (value,) = jax.tree.leaves(sown)
    assert value.shape == shape
    assert jnp.all(value == jnp.broadcast_to(same, shape))


class Other(tt.Variable):
    """A kind of its own."""


class Sower(tt.Module):
    def __call__(self, x):
        """Sows what it is given."""
        self.sow(tt.Intermediate, "v", x)
        return x

    def run(self, x):
        return self(x) * 2

    @tt.jit
    def compiled(self, x):
        return self(x) * 3


class Parent(tt.Module):
    def __init__(self):
        self.a = Sower()
        self.w = tt.Param(jnp.array(2.0))

    def __call__(self, x):
        return self.a(x) * self.w


def call_of_model(model, x):
    """Calls a model."""
    return model(x)


def sown(state):
    """A State as plain numbers."""
    return jax.tree.map(float, tt.to_pure_dict(state))


def in_thread(fn):
    """Runs a function in a thread of its own; what it gives, or raises, is ours."""
    given = []

    def run():
        try:
            given.append(fn())
        except Exception as error:
            given.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    return given[0]


class Failing(tt.Module):
    def __call__(self, x):
        self.sow(tt.Intermediate, "v", x)
        raise RuntimeError("stop")


def test_a_call_that_raises_leaves_nothing_behind():
    model = Failing()
    before = dict(vars(model)), jax.tree.structure(model)
    with pytest.raises(RuntimeError, match="stop"):
        tt.capture(model, tt.Intermediate, method_outputs=tt.Intermediate)(
            jnp.array(1.0)
        )
    assert (dict(vars(model)), jax.tree.structure(model)) == before
    with pytest.warns(DeprecationWarning), pytest.raises(RuntimeError):
        model(jnp.array(1.0))  # no capture is open any more


def test_name_and_text_are_kept():
    wrapped = tt.capture(call_of_model, tt.Intermediate)
    assert (wrapped.__name__, wrapped.__doc__) == ("call_of_model", "Calls a model.")
    decorated = tt.capture(tt.Intermediate)(call_of_model)
    assert (decorated.__name__, decorated.__doc__) == (
        "call_of_model",
        "Calls a model.",
    )
    assert tt.capture(Sower().run, tt.Intermediate).__name__ == "run"


def test_a_module_among_the_keywords_is_found():
    out, state = tt.capture(call_of_model, tt.Intermediate)(
        model=Parent(), x=jnp.array(1.0)
    )
    assert float(out) == 2.0
    assert sown(state) == {"a": {"v": (1.0,)}}


def test_a_module_that_is_not_first_is_found():
    model = Sower()
    out, state = tt.capture(lambda x, m: m(x), tt.Intermediate)(jnp.array(1.0), model)
    assert float(out) == 1.0
    assert sown(state) == {"v": (1.0,)}
    assert not hasattr(model, "v")


def test_several_modules_are_called_by_their_arguments():
    def both(first, x, second):
        return first(x) + second(x + 1)

    first, second = Sower(), Parent()
    _, state = tt.capture(both, tt.Intermediate)(first, jnp.array(1.0), second)
    assert sown(state) == {"first": {"v": (1.0,)}, "second": {"a": {"v": (2.0,)}}}
    _, state = tt.capture(both, tt.Intermediate)(first, x=jnp.array(1.0), second=second)
    assert sown(state) == {"first": {"v": (1.0,)}, "second": {"a": {"v": (2.0,)}}}
    assert not hasattr(second.a, "v")


def test_partials_are_resolved():
    model = Parent()
    _, state = tt.capture(functools.partial(model, jnp.array(1.0)), tt.Intermediate)()
    assert sown(state) == {"a": {"v": (1.0,)}}
    _, state = tt.capture(functools.partial(call_of_model, model), tt.Intermediate)(
        jnp.array(2.0)
    )
    assert sown(state) == {"a": {"v": (2.0,)}}
    _, state = tt.capture(
        functools.partial(call_of_model, x=jnp.array(3.0)), tt.Intermediate
    )(model)
    assert sown(state) == {"a": {"v": (3.0,)}}


def test_jitted_methods_are_recognised():
    model = Sower()
    for _ in range(2):  # traced, then from the cache
        out, state = tt.capture(model.compiled, tt.Intermediate)(jnp.array(2.0))
        assert float(out) == 6.0
        assert sown(state) == {"v": (2.0,)}


def test_method_outputs_imply_their_kind():
    out, state = tt.capture(Parent(), method_outputs=tt.Intermediate)(jnp.array(3.0))
    assert float(out) == 6.0
    calls = {"__call__": (6.0,), "a": {"__call__": (3.0,), "v": (3.0,)}}
    assert sown(state) == calls


def test_method_outputs_of_a_kind_not_named_are_kept():
    _, state, others = tt.capture(Sower(), tt.Intermediate, method_outputs=Other)(
        jnp.array(3.0)
    )
    assert sown(state) == {"v": (3.0,)}
    assert sown(others) == {"__call__": (3.0,)}


class Base(tt.Module):
    def __call__(self, x):
        return self.f(x) + 1

    def f(self, x):
        return x * 3


class Heir(Base):
    pass


def test_inherited_methods_are_heard():
    _, state = tt.capture(Heir(), method_outputs=tt.Intermediate)(jnp.array(1.0))
    assert sown(state) == {"__call__": (4.0,), "f": (3.0,)}


def test_another_instance_of_the_class_is_unaffected():
    other = Base()

    def call(model, x):
        return model(x) + other(x)

    out, state = tt.capture(call, tt.Intermediate, method_outputs=tt.Intermediate)(
        Base(), jnp.array(1.0)
    )
    assert float(out) == 8.0
    assert vars(other) == vars(Base())
    assert sown(state)["__call__"] == (4.0,)


def test_the_same_from_another_thread_is_unaffected():
    model = Base()

    def call(model, x):
        assert float(in_thread(lambda: model(x + 1))) == 7.0
        return model(x)

    out, state = tt.capture(call, method_outputs=tt.Intermediate)(model, jnp.array(1.0))
    assert float(out) == 4.0
    assert sown(state) == {"__call__": (4.0,), "f": (3.0,)}


class Meeting(tt.Module):
    """Waits for another thread between two values."""

    def __init__(self, barrier):
        self.barrier = tt.static(barrier)

    def __call__(self, x):
        self.sow(tt.Intermediate, "v", x)
        self.barrier.wait(30)
        self.sow(tt.Intermediate, "v", x + 1)
        self.barrier.wait(30)
        return x


def test_two_threads_capture_one_module():
    model = Meeting(threading.Barrier(2))
    found = {}

    def run(start):
        found[start] = sown(tt.capture(model, tt.Intermediate)(jnp.array(start))[1])

    threads = [threading.Thread(target=run, args=(start,)) for start in (1.0, 10.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {1.0: {"v": (1.0, 2.0)}, 10.0: {"v": (10.0, 11.0)}}


@pytest.mark.parametrize("inner_of", [lambda m: m, lambda m: m.a], ids=["same", "part"])
def test_captures_nest(inner_of):
    inside = []

    def call(model, x):
        _, state = tt.capture(inner_of(model), tt.Intermediate)(x + 1)
        inside.append(state)
        return model(x)

    model = Parent()
    _, state = tt.capture(call, tt.Intermediate)(model, jnp.array(1.0))
    expected = {"a": {"v": (2.0,)}} if inner_of(model) is model else {"v": (2.0,)}
    assert sown(inside[0]) == expected
    assert sown(state) == {"a": {"v": (2.0, 1.0)}}
    assert not hasattr(model.a, "v")


class Auxiliary(tt.Module):
    """Adds what its children sow to its result."""

    def __init__(self):
        self.a, self.b = Sower(), Sower()

    def __call__(self, x):
        y, first = tt.capture(self.a, tt.Intermediate)(x)
        z, second = tt.capture(self.b, tt.Intermediate)(x + 1)
        return y + z + first["v"][0] + second["v"][0]


@pytest.mark.parametrize(
    "wrap",
    [lambda f: f, jax.jit, tt.jit, tt.remat, lambda f: lambda m, x: jax.vjp(f, m, x)],
    ids=["eager", "jax.jit", "tt.jit", "remat", "vjp"],
)
def test_an_inner_capture_in_a_method_takes_nothing_from_the_outer(wrap):
    _, state = tt.capture(wrap(call_of_model), tt.Intermediate)(
        Auxiliary(), jnp.array(1.0)
    )
    assert sown(state) == {"a": {"v": (1.0,)}, "b": {"v": (2.0,)}}


def test_an_inner_capture_leaves_method_outputs_of_the_outer_alone():
    inside = []

    def call(model, x):
        inside.append(tt.capture(model, tt.Intermediate)(x)[1])
        return model(x + 1)

    _, state = tt.capture(call, Other, method_outputs=Other)(Sower(), jnp.array(1.0))
    assert sown(inside[0]) == {"v": (1.0,)}
    assert sown(state) == {"__call__": (1.0, 2.0)}


def test_both_captures_have_method_outputs_of_their_own_kind():
    inside = []

    def call(model, x):
        inside.append(tt.capture(model, method_outputs=tt.Intermediate)(x)[1])
        return x

    _, state = tt.capture(call, method_outputs=Other)(Heir(), jnp.array(1.0))
    assert sown(inside[0]) == {"__call__": (4.0,), "f": (3.0,)}
    assert sown(state) == {"__call__": (4.0,), "f": (3.0,)}
    assert type(state["f"]) is Other


class Namesake(tt.Module):
    def __init__(self):
        self.c = Sower()

    def __call__(self, x):
        self.sow(tt.Intermediate, "c", x)
        return self.c(x)


def test_a_name_that_is_also_a_childs_is_an_error():
    with pytest.raises(tt.CaptureError, match="c is a value and also the start of c/v"):
        tt.capture(Namesake(), tt.Intermediate)(jnp.array(1.0))


class Twice(tt.Module):
    def __call__(self, x):
        self.sow(tt.Intermediate, "same", x)
        self.sow(Other, "same", x + 1)
        return self.perturb("bent", x)


def test_one_name_under_two_kinds_is_in_both():
    _, first, second = tt.capture(Twice(), tt.Intermediate, Other)(jnp.array(1.0))
    assert sown(first) == {"same": (1.0,)}
    assert sown(second) == {"same": (2.0,)}


def test_kinds_are_exact():
    _, first, second = tt.capture(Twice(), tt.Intermediate, tt.Perturbation)(
        jnp.array(1.0)
    )
    assert (sown(first), sown(second)) == ({"same": (1.0,)}, {"bent": 0.0})
    _, none = tt.capture(Twice(), tt.Variable)(jnp.array(1.0))
    assert sown(none) == {}


class Odd(tt.Module):
    class Inner:
        """A class used as an attribute."""

        def __init__(self, x):
            self.x = x

    @staticmethod
    def double(x):
        return x * 2

    @classmethod
    def named(cls, x):
        return x + len(cls.__name__)

    @property
    def three(self):
        return 3.0

    def __call__(self, x):
        return self.named(self.double(x)) + self.Inner(x).x + self.three


def test_static_and_class_methods_stay_callable():
    out, state = tt.capture(Odd(), method_outputs=tt.Intermediate)(jnp.array(1.0))
    assert float(out) == 9.0
    assert sown(state) == {"__call__": (9.0,)}


def test_a_class_used_as_an_attribute_stays_one():
    kinds = []
    tt.capture(lambda m: kinds.append(m.Inner), method_outputs=tt.Intermediate)(Odd())
    assert kinds == [Odd.Inner]


@ALL_MODES
def test_what_is_asked_is_part_of_the_trace(mode):
    f = tt.jit(call_of_model, **mode)
    model, x = Parent(), jnp.array(1.0)
    plain = {"a": {"v": (1.0,)}}
    full = {"__call__": (2.0,), "a": {"__call__": (1.0,), "v": (1.0,)}}
    for _ in range(2):
        assert sown(tt.capture(f, tt.Intermediate)(model, x)[1]) == plain
        assert (
            sown(
                tt.capture(f, tt.Intermediate, method_outputs=tt.Intermediate)(
                    model, x
                )[1]
            )
            == full
        )
        assert sown(tt.capture(f, tt.Intermediate)(model, x)[1]) == plain


def test_a_module_by_closure_leaks_no_tracer():
    def call(m, x):
        return jax.jit(lambda x: m(x))(x)

    _, state = tt.capture(call, tt.Intermediate)(Parent(), jnp.array(1.0))
    assert sown(state) == {"a": {"v": (1.0,)}}


@dataclasses.dataclass(frozen=True)
class Frozen(tt.Module):
    scale: float = 2.0

    def __call__(self, x):
        self.sow(tt.Intermediate, "v", x)
        return x * self.scale


def test_frozen_dataclasses_work():
    out, state = tt.capture(Frozen(), tt.Intermediate)(jnp.array(1.0))
    assert float(out) == 2.0
    assert sown(state) == {"v": (1.0,)}


def test_a_clone_made_inside_has_nothing_of_the_capture():
    def call(model, x):
        model(x)
        return tt.clone(model)

    model = Parent()
    copy, _ = tt.capture(call, tt.Intermediate)(model, jnp.array(1.0))
    assert jax.tree.structure(copy) == jax.tree.structure(model)
    assert vars(copy.a) == {}


@ALL_MODES
def test_a_gradient_taken_inside_has_nothing_of_the_capture(mode):
    def call(model, x):
        return tt.grad(call_of_model, **mode)(model, x)

    gradient, state = tt.capture(call, tt.Intermediate)(Parent(), jnp.array(3.0))
    assert [float(leaf) for leaf in jax.tree.leaves(gradient)] == [3.0]
    assert sown(state) == {"a": {"v": (3.0,)}}


class Counting(tt.Module):
    def __init__(self):
        self.w = tt.Param(jnp.array(2.0))

    def __call__(self, x):
        self.sow(tt.Intermediate, "n", jnp.array(7))
        return x * self.w


@ALL_MODES
def test_sown_integers_do_not_disturb_gradients(mode):
    def call(model, x):
        model(x)
        return tt.grad(call_of_model, **mode)(model, x)

    gradient, state = tt.capture(call, tt.Intermediate)(Counting(), jnp.array(3.0))
    assert [float(leaf) for leaf in jax.tree.leaves(gradient)] == [3.0]
    assert [int(n) for n in state["n"][...]] == [7, 7]


class Shared(tt.Module):
    def __init__(self):
        self.a = Sower()
        self.b = self.a

    def __call__(self, x):
        return self.a(x) + self.b(x + 1)


@pytest.mark.parametrize("graph", [False, True])
def test_a_module_at_two_paths_is_reported_once_under_the_first(graph):
    with tt.set_graph_mode(graph):
        _, state = tt.capture(Shared(), tt.Intermediate)(jnp.array(1.0))
    assert sown(state) == {"a": {"v": (1.0, 2.0)}}


class WeightedSower(tt.Module):
    def __init__(self):
        self.w = tt.Param(jnp.array(2.0))

    def __call__(self, x):
        self.sow(tt.Intermediate, "v", x)
        return x * self.w


class Perturber(tt.Module):
    def __init__(self, how=lambda module, x: module.perturb("p", x)):
        self.how = how
        self.w = tt.Param(jnp.array(2.0))

    def __call__(self, x):
        return self.how(self, x)


def lists(tree):
    """A tree of arrays, or a State of them, as plain numbers and lists."""
    if isinstance(tree, tt.State):
        tree = tt.to_pure_dict(tree)
    return jax.tree.map(lambda x: x.tolist(), tree)


def test_plain_jit_with_the_module_as_argument_works():
    def call(model, x):
        return jax.jit(lambda model, x: model(x))(model, x)

    _, state = tt.capture(call, tt.Intermediate)(WeightedSower(), jnp.array(3.0))
    assert lists(state) == {"v": (3.0,)}


def test_hijax_variables_are_refused_and_not_lost():
    with pytest.raises(ValueError, match="hijax"):
        nnx.var_defaults(hijax=True)


def test_captures_work_when_variables_are_refs():
    with nnx.var_defaults(ref=True):
        model = WeightedSower()
        out, state = tt.capture(model, tt.Intermediate)(jnp.array(3.0))
        _, zeros = tt.capture(Perturber(), tt.Perturbation)(jnp.array(3.0))
    assert model.w.ref
    assert not state["v"].ref
    assert (float(out), lists(state), lists(zeros)) == (6.0, {"v": (3.0,)}, {"p": 0.0})


class Busy(tt.Module):
    def __call__(self, x, count):
        for _ in range(count):
            self.sow(tt.Intermediate, "v", x)
        return x


def test_the_cost_of_sows_is_linear():
    model, x = Busy(), jnp.array(1.0)

    def seconds(count):
        start = time.perf_counter()
        _, state = tt.capture(model, tt.Intermediate)(x, count)
        assert len(state["v"][...]) == count
        return time.perf_counter() - start

    seconds(100)
    few = min(seconds(500) for _ in range(3))
    assert min(seconds(4000) for _ in range(3)) < 40 * few  # eightfold, not 64-fold


@pytest.mark.parametrize("differentiate", [jax.grad, tt.grad])
def test_a_module_by_closure_inside_grad_works(differentiate):
    model, x = Perturber(lambda m, x: m.perturb("p", x) * m.w), jnp.array(3.0)
    _, zeros = tt.capture(model, tt.Perturbation)(x)
    gradient = differentiate(lambda p: tt.capture(model, init=p)(x))(zeros)
    assert lists(gradient) == {"p": 2.0}


def test_kinds_may_be_given_by_name():
    _, state = tt.capture(WeightedSower(), "intermediates")(jnp.array(3.0))
    assert lists(state) == {"v": (3.0,)}
    assert type(state["v"]) is tt.Intermediate


@pytest.mark.parametrize("name", [0, None, ("a",), 1.5, ["a"], ""])
def test_names_must_be_strings(name):
    class Misnamed(tt.Module):
        def sows(self, x):
            self.sow(tt.Intermediate, name, x)

        def perturbs(self, x):
            self.perturb(name, x)

    model, x = Misnamed(), jnp.array(1.0)
    with pytest.raises(tt.CaptureError, match="sow: a name is a string"):
        tt.capture(model.sows, tt.Intermediate)(x)
    with pytest.raises(tt.CaptureError, match="perturb: a name is a string"):
        tt.capture(model.perturbs, tt.Perturbation)(x)
    with pytest.raises(tt.CaptureError, match="sow: a name is a string"):
        model.sows(x)


class Below(WeightedSower):
    def __call__(self, x):
        return super().__call__(x) + 1


def test_a_call_through_super_is_one_entry():
    _, state = tt.capture(Below(), method_outputs=tt.Intermediate)(jnp.array(1.0))
    assert lists(state) == {"__call__": (3.0,), "v": (1.0,)}


def test_merging_equal_names_is_an_error():
    one, two = (
        tt.State({"a": {"b": tt.Intermediate(1)}}),
        tt.State({"a": {"b": tt.Intermediate(2)}}),
    )
    with pytest.raises(ValueError, match=r"a.*b"):
        tt.merge_state(one, two)
    with pytest.raises(ValueError, match="a"):
        tt.merge_state(one, tt.State({"a": tt.Intermediate(2)}))


def test_merging_other_names_of_one_module_works():
    one, two = (
        tt.State({"a": {"b": tt.Intermediate(1)}}),
        tt.State({"a": {"c": tt.Intermediate(2)}}),
    )
    assert tt.to_pure_dict(tt.merge_state(one, two)) == {"a": {"b": 1, "c": 2}}


class Stage(tt.Module):
    def __call__(self, x):
        y = 3 * self.perturb("grad_of_x", x)
        self.sow(tt.Intermediate, "y", y)
        return y


class Stages(tt.Module):
    def __init__(self):
        self.foos = tt.List([Stage() for _ in range(3)])

    def __call__(self, x):
        for foo in self.foos:
            x = foo(x)
        return x


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", [TREE, GRAPH, UPDATES], ids=["tree", "graph", "upd"])
def test_the_four_steps_give_gradients_and_values(mode, compiled):
    model, x = Stages(), jnp.array(1.0)
    _, zeros = tt.capture(model, tt.Perturbation)(x)

    def loss(pert, model, x):
        return tt.capture(model, tt.Intermediate, init=pert)(x)

    step = tt.grad(loss, has_aux=True, **mode)
    gradients, values = (tt.jit(step, **mode) if compiled else step)(zeros, model, x)
    merged = lists(tt.merge_state(gradients, values))
    assert merged == {
        "foos": {
            i: {"grad_of_x": 3.0 ** (3 - i), "y": (3.0 ** (i + 1),)} for i in range(3)
        }
    }
