# SPDX-License-Identifier: Apache-2.0
"""jit_partial and cached_partial: functions whose first arguments are fixed."""

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from modes import SIMPLE_MODES
from treetap import compat


class Counter(tt.Module):
    def __init__(self):
        self.n = tt.Variable(jnp.array(0))
        self.scale = tt.Param(jnp.array(2.0))
        self.kind = "plain"


def step(counter, x):
    counter.n[...] += 1
    return counter.scale * x


def test_values_go_in_and_come_back():
    counter = Counter()
    run = tt.jit_partial(step, counter)
    assert run(3.0) == 6.0
    counter.scale[...] = 5.0
    assert run(x=3.0) == 15.0
    assert counter.n[...] == 2


def test_the_structure_is_frozen():
    counter = Counter()
    run = tt.jit_partial(lambda counter: len(counter.kind), counter)
    counter.kind = "another"
    assert run() == 5
    counter.scale = tt.Param(jnp.array(7.0))
    assert tt.jit_partial(step, counter)(1.0) == 7.0


def test_calling_again_does_not_trace_again():
    traces = []

    def count(counter, x):
        traces.append(1)
        return step(counter, x)

    counter = Counter()
    run = tt.jit_partial(count, counter)
    run(1.0)
    counter.scale[...] = 3.0
    run(2.0)
    assert traces == [1]


def test_variables_among_the_other_arguments_are_refused():
    run = tt.jit_partial(step, Counter())
    message = "Found Variable in non-partial arguments: the Param at args/0"
    with pytest.raises(tt.StructureError, match=message):
        run(tt.Param(1.0))


def test_duplicates_are_refused_when_it_is_made():
    variable = tt.Param(jnp.array(1.0))
    with pytest.raises(tt.AliasError, match="jit_partial: Duplicate Param"):
        tt.jit_partial(lambda a, b: None, variable, variable)
    run = tt.jit_partial(lambda a, b: a + b, variable, variable, graph=True)
    assert run() == 2.0


def test_stages_keep_updating():
    counter = Counter()
    run = tt.jit_partial(step, counter)
    assert run.eval_shape(1.0).shape == ()
    traced = run.trace(1.0)
    compiled = run.lower(1.0).compile()
    assert "stablehlo" in traced.lower().as_text()
    assert compiled(3.0) == 6.0
    assert compiled(3.0) == 6.0
    assert counter.n[...] == 2


def test_donation_leaves_live_buffers():
    counter = Counter()
    run = tt.jit_partial(lambda counter, x: x, counter, donate_argnums=0)
    run(1.0)
    run(1.0)
    assert counter.scale[...] == 2.0


def test_graph_updates_are_refused():
    with pytest.raises(ValueError, match=r"jit_partial: the structure .* is frozen"):
        tt.jit_partial(step, Counter(), graph=True, graph_updates=True)


def test_functions_of_jax_itself_can_be_compiled():
    assert tt.jit(jax.lax.add)(1.0, 2.0) == 3.0


# cached_partial.


def test_cached_partial_sees_copies_around_the_same_variables():
    counter = Counter()
    seen = []

    @compat.jit
    def same(counter):
        counter.n[...] += 1
        return counter

    run = compat.cached_partial(same, counter)
    for _ in range(2):
        seen.append(run())
    assert seen[0] is seen[1]
    assert seen[0] is not counter
    assert seen[0].n is counter.n
    assert counter.n[...] == 2


def test_cached_partial_takes_further_arguments_and_traces_once():
    traces = []

    @compat.jit
    def run(counter, x, *, shift):
        traces.append(1)
        return step(counter, x) + shift

    counter = Counter()
    fixed = compat.cached_partial(run, counter)
    assert fixed(3.0, shift=1.0) == 7.0
    counter.scale[...] = 5.0
    assert fixed(3.0, shift=0.0) == 15.0
    assert counter.n[...] == 2
    assert traces == [1]


def test_cached_partial_does_not_see_later_changes_of_structure():
    counter = Counter()
    run = compat.cached_partial(compat.jit(lambda c: len(c.kind)), counter)
    counter.kind = "another"
    assert run() == 5


def test_cached_partial_keeps_shared_parts_shared():
    counter = Counter()
    pair = compat.jit(lambda one, two: [one is two[0], one.n is two[1]])
    run = compat.cached_partial(pair, counter, [counter, counter.n])
    assert [bool(x) for x in run()] == [True, True]


@pytest.mark.parametrize("transform", [compat.remat, compat.vmap, compat.grad])
def test_cached_partial_takes_every_transform_with_graph_updates(transform):
    def product(v, x):
        v[...] = v * 2
        return v * x

    v = tt.Param(jnp.array([1.0]) if transform is compat.vmap else jnp.array(1.0))
    compat.cached_partial(transform(product), v)(jnp.ones_like(v[...]))
    assert float(v.sum()) == 2.0


def grow(counter):
    counter.n[...] += 1
    counter.extra = tt.Param(jnp.array(1.0))


def rename(counter):
    counter.n[...] += 1
    counter.kind = "other"


@pytest.mark.parametrize("change", [grow, rename])
def test_cached_partial_refuses_another_structure_and_changes_nothing(change):
    counter = Counter()
    run = compat.cached_partial(compat.jit(change), counter)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"cached_partial: the structure .*chan"):
            run()
    assert counter.n[...] == 0
    assert sorted(vars(counter)) == sorted(vars(Counter()))


def test_cached_partial_allows_what_is_undone():
    def there_and_back(counter):
        counter.extra = tt.Param(jnp.array(1.0))
        counter.n[...] += 1
        del counter.extra

    counter = Counter()
    compat.cached_partial(compat.jit(there_and_back), counter)()
    assert counter.n[...] == 1


def test_cached_partial_stays_usable_after_an_exception():
    broken = [True]

    def maybe(counter):
        counter.n[...] += 1
        counter.kind = "other"
        if broken:
            raise KeyError("inside")
        counter.kind = "plain"

    counter = Counter()
    run = compat.cached_partial(compat.jit(maybe), counter)
    with pytest.raises(KeyError, match="inside"):
        run()
    broken.clear()
    run()
    assert counter.n[...] == 1


@SIMPLE_MODES
def test_cached_partial_is_for_graph_updates_only(mode):
    with pytest.raises(ValueError, match="cached_partial: it is for graph updates"):
        compat.cached_partial(compat.jit(step), Counter(), **mode)


class Model(tt.Module):
    def __init__(self):
        self.w = tt.Param(jnp.array(3.0))
        self.offset = tt.data(jnp.array(1.0))
        self.kind = "plain"

    def double(self):
        return self.w * 2


def test_cached_partial_refuses_a_plain_function_by_name():
    model = Model()
    text = r"cached_partial(.|\n)*double(.|\n)*not a function wrapped"
    for plain in (Model.double, tt.jit(Model.double), jax.jit(Model.double)):
        with pytest.raises(ValueError, match=text):
            compat.cached_partial(plain, model)
    assert float(compat.jit(Model.double)(model)) == 6.0  # nothing was left behind


def test_jit_partial_refuses_bound_methods():
    with pytest.raises(ValueError, match=r"jit_partial(.|\n)*bound methods"):
        tt.jit_partial(Model().double)


@SIMPLE_MODES
@pytest.mark.parametrize(
    "option", [{"donate_argnames": "m"}, {"donate_argnums": 0}], ids=["name", "number"]
)
def test_variables_given_to_jit_partial_may_be_donated(mode, option):
    def grow(m, x):
        m.w[...] += m.offset
        return m.w * x

    m = Model()
    given = m.w[...]
    f = tt.jit_partial(grow, m, **mode, **option)
    assert [float(f(2.0)), float(f(3.0))] == [8.0, 15.0]
    assert given.is_deleted()
    assert (float(m.w), float(m.offset)) == (5.0, 1.0)


@SIMPLE_MODES
@pytest.mark.parametrize("option", [{"static_argnames": "s"}, {"static_argnums": 3}])
def test_jit_partial_numbers_arguments_by_the_signature(mode, option):
    def f(a, b, x, s):
        return a * b + x if s else x

    call = tt.jit_partial(f, tt.Param(2.0), tt.Param(3.0), **mode, **option)
    assert float(call(1.0, True)) == 7.0
    assert float(call(1.0, False)) == 1.0
    assert float(call(1.0, s=True)) == 7.0


def test_alias_errors_of_jit_partial_name_it():
    v = tt.Param(1.0)
    with pytest.raises(ValueError, match="jit_partial: Duplicate Param"):
        tt.jit_partial(lambda a, b: a * b, v, v)
    call = tt.jit_partial(lambda v: v, v)
    with pytest.raises(ValueError, match="jit_partial: Duplicate Param"):
        call()
