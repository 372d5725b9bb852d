# SPDX-License-Identifier: Apache-2.0
"""Recording of calls: which methods run, where, with what, and how often."""

import collections
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt
from treetap._report.calls import recorded
from treetap._report.texts import arguments_text, text_of

X = jnp.ones((2, 3))


class Scale(tt.Module):
    def __init__(self, size=3):
        self.by = tt.Param(jnp.full((1, size), 2.0, jnp.float32))

    def __call__(self, x):
        return x * self.by

    def half(self, x):
        return x * self.by / 2


class Pair(tt.Module):
    def __init__(self, size=3):
        self.first, self.second = Scale(size), Scale(size)

    def __call__(self, x):
        return self.second(self.first(x))


class Run(tt.Module):
    """Calls a function with itself; holds what it is given."""

    def __init__(self, fn, **parts):
        self.fn = fn
        for name, part in parts.items():
            setattr(self, name, part)

    def __call__(self, *args, **kwargs):
        return self.fn(self, *args, **kwargs)


def told(model, *args, method="__call__", **kwargs):
    """Path, method and times of each call."""
    calls = recorded(model, method, args, kwargs, "test")
    return [
        ("/".join(map(str, call.path)), call.note.given.method, call.times)
        for call in calls
    ]


def paths(fn, **parts):
    """Path and times of the calls below a model whose call is `fn`."""
    return [(path, times) for path, _, times in told(Run(fn, **parts), X)[1:]]


def stacked(make, count):
    return tt.vmap(lambda _: make(), axis_size=count)(jnp.arange(count))


# Order, paths, methods.


def test_a_parent_comes_before_its_children_in_the_order_of_calls():
    model = Run(lambda m, x: m.b.half(m.a(x)), a=Pair(), b=Scale())
    assert told(model, X) == [
        ("", "__call__", 1),
        ("a", "__call__", 1),
        ("a/first", "__call__", 1),
        ("a/second", "__call__", 1),
        ("b", "half", 1),
    ]


def test_inputs_and_outputs_are_noted_by_type():
    model = Run(lambda m, x, *, scale=None: {"y": m.a(x), "n": None}, a=Scale())
    root, scale = recorded(model, "__call__", (X,), {"scale": 2}, "test")
    assert root.note.inputs == "- float32[2,3]\nscale: 2"
    assert root.note.outputs == "y: float32[2,3]\nn: None"
    assert (scale.note.inputs, scale.note.outputs) == ("float32[2,3]",) * 2
    assert scale.note.kind is Scale


def test_a_shared_module_has_one_path():
    one = Scale()
    found = told(Run(lambda m, x: m.b(m.a(x)), a=one, b=one), X)
    assert [path for path, _, _ in found] == ["", "a", "a"]


def test_modules_in_containers_and_arguments_have_paths():
    class Caller(tt.Module):
        def __init__(self):
            self.parts = tt.Dict(k=tt.List([Scale()]))

        def __call__(self, other, x):
            return other(self.parts["k"][0](x))

    assert [path for path, _, _ in told(Caller(), Pair(), X)] == [
        "",
        "parts/k/0",
        "other",
        "other/first",
        "other/second",
    ]


def test_a_call_through_super_is_told_once():
    class Child(Scale):
        def __call__(self, x):
            return super().__call__(x) + 1

    assert told(Child(), X) == [("", "__call__", 1)]


def test_methods_that_nobody_wraps_are_told_of_at_the_root():
    class Plain(tt.Pytree):
        def __init__(self):
            self.part = Scale()

        def run(self, x):
            return self.part(x)

    class Odd(tt.Module):
        def _hidden(self, x):
            return x

        @staticmethod
        def free(x):
            return x

    assert told(Plain(), X, method="run") == [("", "run", 1), ("part", "__call__", 1)]
    assert told(Odd(), X, method="_hidden") == [("", "_hidden", 1)]
    assert told(Odd(), X, method="free") == [("", "free", 1)]


def test_a_method_that_raised_has_no_result():
    class Fails(tt.Module):
        def __call__(self, x):
            raise KeyError("no")

    def forgiving(m, x):
        try:
            return m.a(x)
        except KeyError:
            return x

    _, call = recorded(Run(forgiving, a=Fails()), "__call__", (X,), {}, "test")
    assert call.note.outputs is None


def test_a_method_without_arrays_is_told_of():
    class Empty(tt.Module):
        def size(self):
            return 3

    def use(m, x):
        return jnp.broadcast_to(x[:, :, None], (2, 3, m.a.size()))  # not traced

    assert told(Run(use, a=Empty()), X)[1] == ("a", "size", 1)


# Under transforms.


def test_layers_in_a_scan_are_counted_and_keep_their_path():
    def run(m, x):
        step = tt.scan(lambda x, b: b(x), in_axes=(tt.Carry, 0), out_axes=tt.Carry)
        return step(x, m.blocks)

    def plain(m, x):
        return jax.lax.scan(lambda x, b: (b(x), None), x, m.blocks)[0]

    expected = [("blocks", 4), ("blocks/first", 4), ("blocks/second", 4)]
    assert paths(run, blocks=stacked(Pair, 4)) == expected
    assert paths(plain, blocks=stacked(Pair, 4)) == expected


def test_stacks_are_told_apart_by_shapes_and_numbers():
    def run(m, x):
        for stack in (m.a, m.b):
            x, _ = jax.lax.scan(lambda x, b: (b(x), None), x, stack)
        return jax.lax.scan(lambda x, b: (b(x), None), jnp.ones((1, 5)), m.c)[0]

    found = paths(run, a=stacked(Scale, 2), b=stacked(Scale, 4), c=stacked(wide, 2))
    assert found == [("a", 2), ("b", 4), ("c", 2)]


def wide():
    return Scale(5)


def test_what_could_be_several_is_called_by_its_class():
    def run(m, x):
        for stack in (m.a, m.b):
            x, _ = jax.lax.scan(lambda x, b: (b(x), None), x, stack)
        return x

    assert paths(run, a=stacked(Scale, 2), b=stacked(Scale, 2)) == [("Scale", 2)] * 2


def test_a_function_that_is_traced_once_tells_of_each_call():
    step = jax.jit(lambda block, x: block(x))

    def run(m, x):
        for block in m.blocks:
            x = step(block, x)
        return x

    blocks = tt.List([Scale() for _ in range(3)])
    assert paths(run, blocks=blocks) == [("Scale", 1)] * 3
    assert paths(run, blocks=tt.List([Scale()])) == [("blocks/0", 1)]


def test_rows_of_mappings_are_counted():
    assert paths(lambda m, x: jax.vmap(m.a)(x[:, None]), a=Scale()) == [("a", 2)]

    def ensemble(m, x):
        over_rows = jax.vmap(lambda a, x: a(x), in_axes=(None, 0))
        return tt.vmap(over_rows, in_axes=(0, None))(m.a, x[:, None])

    assert paths(ensemble, a=stacked(Scale, 5)) == [("a", 10)]


def test_loops_multiply():
    def run(m, x):
        return jax.lax.fori_loop(0, 3, lambda i, x: jax.vmap(m.a)(x[:, None])[:, 0], x)

    assert paths(run, a=Scale()) == [("a", 6)]


def test_what_depends_on_values_is_not_counted():
    def run(m, x):
        return jax.lax.while_loop(lambda x: m.a(x).sum() < 9, m.b, x)

    assert paths(run, a=Scale(), b=Scale()) == [("a", None), ("b", None)]


@pytest.mark.parametrize(
    "run",
    [
        lambda m, x: tt.remat(lambda a, x: a(x))(m.a, x),
        lambda m, x: jax.checkpoint(m.a)(x),
        lambda m, x: jax.grad(lambda x: m.a(x).sum())(x),
        lambda m, x: jax.jit(m.a)(x),
        lambda m, x: jax.lax.cond(x.sum() > 0, m.a, lambda x: x, x),
        lambda m, x: tt.cond(x.sum() > 0, lambda a, x: a(x), lambda a, x: x, m.a, x),
        lambda m, x: jax.lax.custom_linear_solve(
            lambda v: m.a(v), x, solve=lambda f, b: b, symmetric=True
        ),
    ],
)
def test_other_transforms_are_looked_into(run):
    assert ("a", 1) in paths(run, a=Scale())


def test_models_that_capture_are_looked_into_and_hear_only_their_own():
    heard = []

    def run(m, x):
        out, record = tt.observe(m.a)(x)
        heard.extend(site.text for site in record)
        out, found = tt.capture(m.a, method_outputs=tt.Intermediate)(out)
        heard.extend(found)
        return out

    assert paths(run, a=Scale()) == [("a", 1), ("a", 1)]
    assert heard == ["__call__", "__call__"]


def test_recording_inside_a_capture_adds_nothing_to_it():
    found = []

    def run(m, x):
        found.append(told(m.a, x))
        return m.a(x)

    _, record = tt.observe(Run(run, a=Scale()))(X)
    assert found == [[("", "__call__", 1)]]
    assert [site.text for site in record] == ["a:__call__", "__call__"]


# What is left as it was.


def test_each_method_is_traced_once_for_each_call():
    count = collections.Counter()

    class Counted(Scale):
        def __call__(self, x):
            count["calls"] += 1
            return super().__call__(x)

    class Twice(tt.Module):
        def __init__(self):
            self.a, self.b = Counted(), Counted()

        def __call__(self, x):
            return self.a(self.b(self.b(x)))

    told(Twice(), X)
    assert count["calls"] == 3


def test_nothing_is_changed_and_nothing_is_run():
    class Stateful(tt.Module):
        def __init__(self):
            self.rngs = tt.Rngs(0)
            self.seen = tt.Variable(jnp.array(0))

        def __call__(self, x):
            jax.debug.callback(lambda: ran.append(1))
            self.seen[...] += 1
            self.sow(tt.Intermediate, "x", x)
            return self.perturb("y", x) + self.rngs.normal(x.shape)

    ran = []
    model = Stateful()
    before = jax.tree.map(np.asarray, tt.as_pure(tt.state(model, tt.Not(tt.RngKey))))
    method = vars(Stateful)["__call__"]
    told(model, X)
    after = tt.as_pure(tt.state(model, tt.Not(tt.RngKey)))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert vars(Stateful)["__call__"] is method
    assert set(vars(model)) == {"rngs", "seen"}
    assert not ran


def test_abstract_models_and_arguments_will_do():
    model = tt.eval_shape(Pair)
    found = recorded(
        model, "__call__", (jax.ShapeDtypeStruct((4, 3), "bfloat16"),), {}, "test"
    )
    assert [call.note.inputs for call in found] == [
        "bfloat16[4,3]",
        "bfloat16[4,3]",
        "float32[4,3]",
    ]


def test_variables_with_refs_and_containers_will_do():
    model = tt.with_vars(Pair(), ref=True)
    assert len(told(model, X)) == 3
    held = tt.Param({"a": jnp.ones((1, 3)), "n": 2})
    run = Run(lambda m, x: x * m.held["a"] * m.held["n"], held=held)
    assert told(run, X) == [("", "__call__", 1)]


# Texts.


class Point(typing.NamedTuple):
    x: object
    y: object


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (X, "float32[2,3]"),
        (np.zeros(2, np.int8), "int8[2]"),
        (jax.random.key(0), "key<fry>[]"),
        (None, "None"),
        ({}, "{}"),
        ((), "()"),
        ((2, 3), "(2, 3)"),
        ("text", "'text'"),
        ("x" * 60, f"'{'x' * 36}..."),
        (jax.nn.relu, "relu"),
        (jnp.float32, "float32"),
        ((X, {}), "- float32[2,3]\n- {}"),
        ({"b": X, "a": [X]}, "b: float32[2,3]\na: - float32[2,3]"),
        ([(X, X)], "- - float32[2,3]\n  - float32[2,3]"),
        ({"a": {"b": X, "c": 1}}, "a:\n  b: float32[2,3]\n  c: 1"),
        (Point(X, 1), "x: float32[2,3]\ny: 1"),
        (tt.Param(X), "Param float32[2,3]"),
        (Scale(), "Scale"),
        (tt.State({"a": X}), "State\n  a: float32[2,3]"),
    ],
)
def test_values_are_shown_by_type(value, text):
    assert text_of(value) == text


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((), {}, ""),
        ((X,), {}, "float32[2,3]"),
        ((X,), {"mask": None}, "float32[2,3]"),
        ((None,), {}, "None"),
        ((X, True), {}, "- float32[2,3]\n- True"),
        ((), {"x": X}, "x: float32[2,3]"),
    ],
)
def test_arguments_are_shown_a_line_each(args, kwargs, text):
    assert arguments_text(args, kwargs) == text


def test_static_arguments_stay_what_they_are():
    def run(m, x, flag, *, power, activation):
        assert flag is True
        return activation(x) ** power

    call = functools.partial(recorded, Run(run), "__call__", (X, True))
    (found,) = call({"power": 2, "activation": jax.nn.relu}, "test")
    assert found.note.outputs == "float32[2,3]"


class Numbered(Scale):
    """A Scale with a number that is an array only while it is traced."""

    def __init__(self, size=3):
        super().__init__(size)
        self.number = tt.Variable(2.0)


def test_a_number_is_no_part_of_an_array():
    step = jax.jit(lambda block, x: block(x))
    call = lambda m, x: step(m.blocks[0], x)
    assert paths(call, blocks=tt.List([Scale()])) == [("blocks/0", 1)]
    assert paths(call, blocks=tt.List([Numbered()])) == [("Numbered", 1)]
