# SPDX-License-Identifier: Apache-2.0
"""Known defects of NNX's capture, each shown absent here: whom it hears, and where.

The number in a test's name is the defect's number in the project's list; those of the
values themselves are in `test_defects_captured_values`.
"""

import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from modes import ALL_MODES


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


def forward(model, x):
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


def test_c01_a_call_that_raises_leaves_nothing_behind():
    model = Failing()
    before = dict(vars(model)), jax.tree.structure(model)
    with pytest.raises(RuntimeError, match="stop"):
        tt.capture(model, tt.Intermediate, method_outputs=tt.Intermediate)(
            jnp.array(1.0)
        )
    assert (dict(vars(model)), jax.tree.structure(model)) == before
    with pytest.warns(DeprecationWarning), pytest.raises(RuntimeError):
        model(jnp.array(1.0))  # no capture is open any more


def test_c02_name_and_text_are_kept():
    wrapped = tt.capture(forward, tt.Intermediate)
    assert (wrapped.__name__, wrapped.__doc__) == ("forward", "Calls a model.")
    decorated = tt.capture(tt.Intermediate)(forward)
    assert (decorated.__name__, decorated.__doc__) == ("forward", "Calls a model.")
    assert tt.capture(Sower().run, tt.Intermediate).__name__ == "run"


def test_c03_a_module_among_the_keywords_is_found():
    out, state = tt.capture(forward, tt.Intermediate)(model=Parent(), x=jnp.array(1.0))
    assert float(out) == 2.0
    assert sown(state) == {"a": {"v": (1.0,)}}


def test_c04_a_module_that_is_not_first_is_found():
    model = Sower()
    out, state = tt.capture(lambda x, m: m(x), tt.Intermediate)(jnp.array(1.0), model)
    assert float(out) == 1.0
    assert sown(state) == {"v": (1.0,)}
    assert not hasattr(model, "v")


def test_c05_several_modules_are_called_by_their_arguments():
    def both(first, x, second):
        return first(x) + second(x + 1)

    first, second = Sower(), Parent()
    _, state = tt.capture(both, tt.Intermediate)(first, jnp.array(1.0), second)
    assert sown(state) == {"first": {"v": (1.0,)}, "second": {"a": {"v": (2.0,)}}}
    _, state = tt.capture(both, tt.Intermediate)(first, x=jnp.array(1.0), second=second)
    assert sown(state) == {"first": {"v": (1.0,)}, "second": {"a": {"v": (2.0,)}}}
    assert not hasattr(second.a, "v")


def test_c06_partials_are_resolved():
    model = Parent()
    _, state = tt.capture(functools.partial(model, jnp.array(1.0)), tt.Intermediate)()
    assert sown(state) == {"a": {"v": (1.0,)}}
    _, state = tt.capture(functools.partial(forward, model), tt.Intermediate)(
        jnp.array(2.0)
    )
    assert sown(state) == {"a": {"v": (2.0,)}}
    _, state = tt.capture(
        functools.partial(forward, x=jnp.array(3.0)), tt.Intermediate
    )(model)
    assert sown(state) == {"a": {"v": (3.0,)}}


def test_c07_jitted_methods_are_recognised():
    model = Sower()
    for _ in range(2):  # traced, then from the cache
        out, state = tt.capture(model.compiled, tt.Intermediate)(jnp.array(2.0))
        assert float(out) == 6.0
        assert sown(state) == {"v": (2.0,)}


def test_c08_method_outputs_imply_their_kind():
    out, state = tt.capture(Parent(), method_outputs=tt.Intermediate)(jnp.array(3.0))
    assert float(out) == 6.0
    calls = {"__call__": (6.0,), "a": {"__call__": (3.0,), "v": (3.0,)}}
    assert sown(state) == calls


def test_c09_method_outputs_of_a_kind_not_named_are_kept():
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


def test_c10_inherited_methods_are_heard():
    _, state = tt.capture(Heir(), method_outputs=tt.Intermediate)(jnp.array(1.0))
    assert sown(state) == {"__call__": (4.0,), "f": (3.0,)}


def test_c11_another_instance_of_the_class_is_unaffected():
    other = Base()

    def call(model, x):
        return model(x) + other(x)

    out, state = tt.capture(call, tt.Intermediate, method_outputs=tt.Intermediate)(
        Base(), jnp.array(1.0)
    )
    assert float(out) == 8.0
    assert vars(other) == vars(Base())
    assert sown(state)["__call__"] == (4.0,)


def test_c12_the_same_from_another_thread_is_unaffected():
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


def test_c13_two_threads_capture_one_module():
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
def test_c14_captures_nest(inner_of):
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
def test_c14_an_inner_capture_in_a_method_takes_nothing_from_the_outer(wrap):
    _, state = tt.capture(wrap(forward), tt.Intermediate)(Auxiliary(), jnp.array(1.0))
    assert sown(state) == {"a": {"v": (1.0,)}, "b": {"v": (2.0,)}}


def test_c15_an_inner_capture_leaves_method_outputs_of_the_outer_alone():
    inside = []

    def call(model, x):
        inside.append(tt.capture(model, tt.Intermediate)(x)[1])
        return model(x + 1)

    _, state = tt.capture(call, Other, method_outputs=Other)(Sower(), jnp.array(1.0))
    assert sown(inside[0]) == {"v": (1.0,)}
    assert sown(state) == {"__call__": (1.0, 2.0)}


def test_c15_both_captures_have_method_outputs_of_their_own_kind():
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


def test_c16_a_name_that_is_also_a_childs_is_an_error():
    with pytest.raises(tt.CaptureError, match=r"'?c'? is both the name"):
        tt.capture(Namesake(), tt.Intermediate)(jnp.array(1.0))


class Twice(tt.Module):
    def __call__(self, x):
        self.sow(tt.Intermediate, "same", x)
        self.sow(Other, "same", x + 1)
        return self.perturb("bent", x)


def test_c17_one_name_under_two_kinds_is_in_both():
    _, first, second = tt.capture(Twice(), tt.Intermediate, Other)(jnp.array(1.0))
    assert sown(first) == {"same": (1.0,)}
    assert sown(second) == {"same": (2.0,)}


def test_c18_kinds_are_exact():
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


def test_c19_static_and_class_methods_stay_callable():
    out, state = tt.capture(Odd(), method_outputs=tt.Intermediate)(jnp.array(1.0))
    assert float(out) == 9.0
    assert sown(state) == {"__call__": (9.0,)}


def test_c20_a_class_used_as_an_attribute_stays_one():
    kinds = []
    tt.capture(lambda m: kinds.append(m.Inner), method_outputs=tt.Intermediate)(Odd())
    assert kinds == [Odd.Inner]


@ALL_MODES
def test_c21_c22_what_is_asked_is_part_of_the_trace(mode):
    f = tt.jit(forward, **mode)
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


def test_c23_a_module_by_closure_leaks_no_tracer():
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


def test_c37_frozen_dataclasses_work():
    out, state = tt.capture(Frozen(), tt.Intermediate)(jnp.array(1.0))
    assert float(out) == 2.0
    assert sown(state) == {"v": (1.0,)}


def test_c38_a_clone_made_inside_has_nothing_of_the_capture():
    def call(model, x):
        model(x)
        return tt.clone(model)

    model = Parent()
    copy, _ = tt.capture(call, tt.Intermediate)(model, jnp.array(1.0))
    assert jax.tree.structure(copy) == jax.tree.structure(model)
    assert vars(copy.a) == {}


@ALL_MODES
def test_c39_a_gradient_taken_inside_has_nothing_of_the_capture(mode):
    def call(model, x):
        return tt.grad(forward, **mode)(model, x)

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
def test_c40_sown_integers_do_not_disturb_gradients(mode):
    def call(model, x):
        model(x)
        return tt.grad(forward, **mode)(model, x)

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
def test_c41_a_module_at_two_paths_is_reported_once_under_the_first(graph):
    with tt.set_graph_mode(graph):
        _, state = tt.capture(Shared(), tt.Intermediate)(jnp.array(1.0))
    assert sown(state) == {"a": {"v": (1.0, 2.0)}}
