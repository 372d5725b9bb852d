# SPDX-License-Identifier: Apache-2.0
"""Static values that change in place: a call sees them as they are, always."""

import copy
import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treetap as tt


@dataclasses.dataclass
class Config:
    rate: float = 2.0
    sizes: list = dataclasses.field(default_factory=lambda: [1, 2])
    table: np.ndarray = dataclasses.field(default_factory=lambda: np.array([1.0, 2.0]))
    dtype: object = jnp.float32


class Layer(tt.Module):
    def __init__(self, config):
        self.config = config
        self.w = tt.Param(jnp.ones(2))


class Model(tt.Module):
    def __init__(self, config):
        self.inner = Layer(config)
        self.calls = tt.Variable(jnp.zeros((), jnp.int32))


def run(model, x=1.0):
    config = model.inner.config
    factor = config.rate * len(config.sizes) * float(config.table.sum())
    return factor * jnp.sum(model.inner.w[...]) * x


def doubled(model, x=1.0):
    return jax.vmap(lambda _: run(model, x))(jnp.arange(2.0))[0]


WAYS = {
    "jit": lambda: tt.jit(run),
    "jax.jit": lambda: jax.jit(run),
    "jit graph": lambda: tt.jit(run, graph=True),
    "jit updates": lambda: tt.jit(run, graph=True, graph_updates=True),
    "jit of grad": lambda: tt.jit(lambda m, x=1.0: tt.value_and_grad(run)(m, x)[0]),
    "remat": lambda: tt.jit(tt.remat(run)),
    "vmap": lambda: (
        lambda m, x=1.0: tt.vmap(run, in_axes=(None, 0))(m, jnp.full(2, x))[0]
    ),
    "pmap": lambda: (
        lambda m, x=1.0: tt.pmap(run, in_axes=(None, 0))(m, jnp.full(1, x))[0]
    ),
    "scan": lambda: _scanned(),
    "observe": lambda: lambda m, x=1.0: tt.observe(tt.jit(run))(m, x)[0],
    "pack": lambda: tt.jit(run, pack=True),
    "donate": lambda: tt.jit(run, donate_argnums=0),
}


def _scanned():
    step = tt.scan(lambda m, x: (m, run(m, x)), in_axes=(tt.Carry, 0))
    return lambda m, x=1.0: step(m, jnp.full(2, x))[1][0]


def _reassign(config):
    config.rate = 3.0


CHANGES = [
    _reassign,
    lambda config: config.sizes.append(3),
    lambda config: config.table.__setitem__(0, 5.0),
    lambda config: setattr(config, "sizes", [1]),
    lambda config: setattr(config, "table", np.array([4.0])),
]


@pytest.mark.parametrize("way", WAYS)
def test_a_config_that_changes_is_seen_by_the_next_call(way):
    call = WAYS[way]()
    model = Model(Config())
    for change in CHANGES:
        for _ in range(2):
            np.testing.assert_allclose(call(model), run(model), rtol=1e-6)
        change(model.inner.config)
    np.testing.assert_allclose(call(model), run(model), rtol=1e-6)


def test_equal_configs_share_a_program_and_a_call_that_sees_no_change_traces_nothing():
    traces = []

    @tt.jit
    def step(model):
        traces.append(1)
        return run(model)

    models = [Model(Config()) for _ in range(3)]
    for model in models * 2:
        step(model)
    assert len(traces) == 1
    models[0].inner.config.rate = 2.0  # as it was
    step(models[0])
    assert len(traces) == 1
    models[0].inner.config.rate = 2  # equal, and an integer
    step(models[0])
    assert len(traces) == 2


def test_a_program_is_traced_again_with_the_config_it_was_made_for():
    """Not with what the object it was made of holds by now."""
    step = tt.jit(run)
    first, second = Model(Config()), Model(Config())
    step(first, 1.0)
    first.inner.config.rate = 7.0
    first.inner.config.sizes.append(5)
    x = jnp.ones(3)  # another shape: the program for the second is traced again
    np.testing.assert_allclose(step(second, x), run(second, x))
    np.testing.assert_allclose(step(first, x), run(first, x))


def test_what_a_program_returns_has_the_config_as_it_was_traced():
    make = tt.jit(lambda model: Layer(model.inner.config))
    model = Model(Config())
    assert make(model).config is model.inner.config
    model.inner.config.rate = 9.0
    again = make(Model(Config()))
    assert again.config.rate == 2.0


def test_a_config_that_cannot_be_copied_is_told_when_it_is_needed():
    class Held:
        rate, sizes, table = 1.0, (1,), np.ones(1)

        def __deepcopy__(self, memo):
            raise TypeError("a live connection")

    def held(rate):
        value = Held()
        value.rate = rate
        return value

    step = tt.jit(run)
    first, second = Model(held(1.0)), Model(held(1.0))
    step(first, 1.0)
    first.inner.config.rate = 2.0
    np.testing.assert_allclose(step(first, 1.0), run(first))
    with pytest.raises(tt.StructureError, match=r"changed in place .*live connection"):
        step(second, jnp.ones(4))


def test_the_class_of_a_module_or_a_config_may_change():
    class Tripled(Layer):
        pass

    class Other(Config):
        pass

    @tt.jit
    def step(model):
        inner = model.inner
        return type(inner).__name__ == "Tripled", type(inner.config) is Other

    model = Model(Config())
    assert step(model) == step(model) == (False, False)
    model.inner.__class__ = Tripled
    assert step(model) == (True, False)
    model.inner.config.__class__ = Other
    assert step(model) == (True, True)


def test_writes_through_a_kept_attribute_dict_are_seen():
    step = tt.jit(run)
    model = Model(Config())
    kept = vars(model.inner)
    for _ in range(3):
        np.testing.assert_allclose(step(model), run(model))
    kept["w"] = tt.Param(jnp.full(2, 4.0))
    np.testing.assert_allclose(step(model), run(model))
    np.testing.assert_allclose(jax.jit(run)(model), run(model))
    kept["config"] = Config(rate=8.0)
    np.testing.assert_allclose(step(model), run(model))
    kept["config"] = tt.Param(1.0)
    with pytest.raises(
        tt.AttributeStatusError, match=r"Layer\.config.*unexpected data"
    ):
        step(model)


class Tagged(tt.Module):
    def __init__(self, **metadata):
        self.v = tt.Param(jnp.ones(2), **metadata)


def test_metadata_that_change_in_place_are_seen():
    def told(model):
        return jnp.sum(model.v[...]) * len(model.v.tags)

    calls = [
        tt.jit(told),
        jax.jit(told),
        tt.jit(told, graph=True),
        tt.jit(tt.remat(told)),
    ]
    model = Tagged(tags=["a"])
    for count in (1, 2, 3):
        for call in calls * 2:
            assert float(call(model)) == 2 * count
        model.v.tags.append("b")
    alone = tt.jit(lambda v: len(v.tags))
    assert alone(model.v) == 4
    model.v.tags.append("c")
    assert alone(model.v) == 5
    copied = copy.deepcopy(model)
    copied.v.tags.append("d")
    assert (alone(model.v), alone(copied.v)) == (5, 6)


@pytest.mark.parametrize("pair", [(1, True), (1, 1.0), (0.0, -0.0), ([1], [True])])
def test_metadata_that_are_equal_may_differ(pair):
    seen = []

    def told(model):
        seen.append(repr(model.v.flag))
        return model.v[...]

    for call in (tt.jit(told), jax.jit(told)):
        seen.clear()
        for flag in pair * 2:
            call(Tagged(flag=flag))
        assert seen == [repr(flag) for flag in pair]
    one, two = (tt.graphdef(Tagged(flag=flag)) for flag in pair)
    assert one != two
    assert one == tt.graphdef(Tagged(flag=copy.deepcopy(pair[0])))


def test_the_closure_of_an_optimizer_is_what_it_is_now():
    settings = {"rate": 1.0}
    model = Layer(None)
    optimizer = tt.Optimizer(
        model, optax.sgd(lambda step: settings["rate"]), wrt=tt.Param
    )

    @tt.jit
    def step(model, optimizer):
        grads = tt.grad(lambda m: jnp.sum(m.w[...]))(model)
        optimizer.update(model, grads)

    for rate, wanted in ((1.0, 0.0), (1.0, -1.0), (0.5, -1.5), (2.0, -3.5)):
        settings["rate"] = rate
        step(model, optimizer)
        np.testing.assert_allclose(model.w[...], [wanted] * 2)


def test_objects_of_any_kind_may_be_static():
    class Bag(tt.Module):
        def __init__(self, value):
            self.value = value
            self.w = tt.Param(1.0)

    values = [[1], {"a": [1]}, {1, 2}, bytearray(b"a"), types.SimpleNamespace(a=1)]
    values += [Config(), object(), iter([1]), slice(1), np.random.default_rng(0)]
    for value in values:
        model = Bag(value)
        seen = []
        for call in (tt.jit(lambda m: seen.append(m.value)), jax.jit(lambda m: m.w)):  # noqa: B023 - called in this turn
            call(model)
            call(model)
        assert len(seen) == 1
        assert seen[0] is value
        assert tt.merge(*tt.split(model)).value is value
        assert tt.clone(model).value is value
        assert tt.graphdef(model) == tt.graphdef(tt.clone(model))
