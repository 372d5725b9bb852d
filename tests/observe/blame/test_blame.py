# SPDX-License-Identifier: Apache-2.0
"""blame: planted NaNs and infinities are named by place, line and iteration."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import treetap as tt
from meshes import mesh_of
from small_models import Scaled

ONES = jnp.ones(3)


def line_of(fn, text):
    """The line of this file where a function says something."""
    lines, start = inspect.getsourcelines(fn)
    return next(start + n for n, line in enumerate(lines) if text in line)


def assert_at(found, fn, text, **expected):
    assert found
    assert found.file == __file__
    assert found.line == line_of(fn, text)
    assert text in found.source
    for name, value in expected.items():
        assert getattr(found, name) == value, name


BOTH = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])


# The planted ones.


def naive_softmax(x):
    powers = jnp.exp(x)
    return powers / powers.sum()


@BOTH
def test_an_overflow_in_a_softmax(wrap):
    found = tt.blame(wrap(naive_softmax))(jnp.array([1.0, 200.0]))
    assert_at(found, naive_softmax, "jnp.exp(x)", kind="inf", operation="exp")
    assert not found.backward
    assert found.inputs_finite
    assert found.largest_input == 200.0
    assert (found.index, found.count, found.shape) == ((1,), 1, (2,))
    assert found.function == "naive_softmax"


def entropy(p):
    logs = jnp.log(p)
    return -(p * logs).sum()


@BOTH
def test_a_logarithm_of_zero(wrap):
    found = tt.blame(wrap(entropy))(jnp.array([1.0, 0.0]))
    assert_at(found, entropy, "jnp.log(p)", kind="inf", operation="log", index=(1,))


def unit(x):
    length = jnp.sqrt((x * x).sum())
    return (x / jnp.maximum(length, 1e-6)).sum()


@BOTH
def test_the_backward_pass_of_a_norm(wrap):
    fn = wrap(jax.value_and_grad(unit))
    found = tt.blame(fn)(jnp.zeros(3))
    assert_at(found, unit, "jnp.sqrt", backward=True, operation="div")
    assert not tt.blame(wrap(unit))(jnp.zeros(3))


def deep(x, weights):
    def layer(x, weight):
        large = weight * 1e38
        return x + (large - weight * large), None

    return jax.lax.scan(layer, x, weights)[0]


BROKEN = jnp.ones(48).at[37].set(3.0)


@BOTH
@pytest.mark.parametrize("inner", [lambda f: f, jax.checkpoint], ids=["", "remat"])
def test_layer_37_of_a_scan(wrap, inner):
    found = tt.blame(wrap(inner(deep)))(ONES, BROKEN)
    assert_at(found, deep, "weight * large", kind="inf", iterations=(("scan", 37),))


def test_layer_37_of_the_backward_scan():
    def root(x, weights):
        def layer(x, weight):
            return x + jnp.sqrt(weight * x), None

        return jax.lax.scan(layer, x, weights)[0].sum()

    weights = jnp.ones(48).at[37].set(0.0)
    found = tt.blame(jax.jit(jax.grad(root)))(ONES, weights)
    assert_at(found, root, "jnp.sqrt", backward=True, iterations=(("scan", 37),))


def test_the_first_iteration_of_a_scan_that_goes_backwards():
    def fn(xs):
        body = lambda x, y: (x + jnp.log(y), None)
        return jax.lax.scan(body, 0.0, xs, reverse=True)[0]

    found = tt.blame(fn)(jnp.ones(9).at[jnp.array([2, 6])].set(-1.0))
    assert found.iterations == (("scan", 6),)


def test_scans_inside_scans():
    def fn(xs):
        inner = lambda x, y: (x * 1.0, jnp.log(y))
        outer = lambda x, ys: jax.lax.scan(inner, x, ys)
        return jax.lax.scan(outer, 1.0, xs)[1]

    found = tt.blame(jax.jit(fn))(jnp.ones((4, 5)).at[2, 3].set(-1.0))
    assert found.iterations == (("scan", 2), ("scan", 3))
    assert found.operation == "log"


def growing(x):
    def body(held):
        n, x = held
        return n + 1, x * 100

    return jax.lax.while_loop(lambda held: held[0] < 50, body, (0, x))[1]


@BOTH
def test_an_iteration_of_a_while_loop(wrap):
    found = tt.blame(wrap(growing))(ONES)
    assert_at(found, growing, "x * 100", operation="mul", iterations=(("while", 19),))


def test_a_while_loop_that_was_given_a_nan():
    def fn(x):
        start = jnp.log(x)
        return growing(start)

    found = tt.blame(fn)(-ONES)
    assert_at(found, fn, "jnp.log", kind="nan", iterations=())


def test_rows_of_a_mapped_while_loop():
    def fn(x, times):
        body = lambda held: (held[0] + 1, held[1] * 1e20)
        return jax.lax.while_loop(lambda held: held[0] < times, body, (0, x))[1]

    mapped = jax.vmap(fn)
    assert not tt.blame(mapped)(jnp.ones(3), jnp.array([0, 1, 1]))
    found = tt.blame(mapped)(jnp.ones(3), jnp.array([0, 1, 2]))
    assert found.operation == "mul"
    assert found.iterations == ()  # rows end one by one
    assert found.index is None
    assert "1 of 3 numbers are bad. What" in str(found)


def test_iterations_of_loops_inside_one_another():
    def inner(x, times):
        body = lambda held: (held[0] + 1, held[1] * 1e20)
        return jax.lax.while_loop(lambda held: held[0] < times, body, (0, x))[1]

    def outer(x, times):
        body = lambda held: (held[0] + 1, inner(held[1], held[0]) + 1)
        return jax.lax.while_loop(lambda held: held[0] < times, body, (0, x))[1]

    found = tt.blame(outer)(1.0, 4)  # times of the inner loop: 0, 1, 2
    assert_at(found, inner, "1e20", iterations=(("while", 2), ("while", 0)))

    def late(x, times):
        body = lambda held: (held[0] + 1, inner(1.0, held[0]) * x)
        return jax.lax.while_loop(lambda held: held[0] < times, body, (0, x))[1]

    found = tt.blame(late)(1.0, 4)
    assert_at(found, inner, "1e20", iterations=(("while", 2), ("while", 1)))


@pytest.mark.long
def test_values_without_the_rows_of_a_mapped_while_loop():
    weights = jnp.array([1.0, 2.0])

    def inner(x, times):
        def body(held):
            scaled = jax.lax.scan(lambda s, w: (s + jnp.sin(w), s * w), 0.0, weights)
            return held[0] + 1, held[1] * 1e20 + 0 * scaled[1].sum()

        return jax.lax.while_loop(lambda held: held[0] < times, body, (0, x))[1]

    def outer(x, times):
        body = lambda held: (held[0] + 1, inner(held[1], held[0]) + 1)
        return jax.lax.while_loop(lambda held: held[0] < times, body, (0, x))[1]

    for fn in (inner, outer):
        for shape in ((3,), (2, 3)):
            mapped = jax.vmap(fn) if len(shape) == 1 else jax.vmap(jax.vmap(fn))
            times = jnp.broadcast_to(jnp.array([0, 1, 4]), shape)
            assert not tt.blame(mapped)(jnp.ones(shape), jnp.minimum(times, 1))
            found = tt.blame(mapped)(jnp.ones(shape), times)
            assert found.operation == "mul"


def test_one_shard():
    mesh = mesh_of((8,), ("i",))

    def local(x):
        return jnp.log(x) * 2

    fn = jax.shard_map(local, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"))
    for wrap in (lambda f: f, jax.jit):
        found = tt.blame(wrap(fn))(jnp.ones(16).at[11].set(-1.0))
        assert_at(found, local, "jnp.log", shard=5, index=(1,), kind="nan")


def rooted(x):
    return jnp.sqrt(x).sum()


@BOTH
def test_only_the_backward_pass(wrap):
    found = tt.blame(wrap(jax.value_and_grad(rooted)))(jnp.array([0.0, 1.0]))
    assert_at(found, rooted, "jnp.sqrt", backward=True, kind="inf", index=(0,))
    assert not tt.blame(wrap(rooted))(jnp.array([0.0, 1.0]))


def test_a_masked_root_is_found_by_the_backward_pass():
    def fn(x):
        return jnp.where(x > 0, jnp.sqrt(x), 0.0).sum()

    assert not tt.blame(fn)(jnp.zeros(2))
    assert_at(tt.blame(jax.grad(fn))(jnp.zeros(2)), fn, "jnp.sqrt", backward=True)


# Branches, masks and constants.


def branched(x):
    return jax.lax.cond(x > 0, jnp.log, lambda x: 0.0 * x, x)


def test_a_branch_that_is_not_taken_is_no_alarm():
    assert not tt.blame(jax.vmap(branched))(jnp.array([0.0, 1.0]))
    assert not tt.blame(branched)(0.0)


def test_what_is_masked_is_marked_as_such_if_asked_for():
    for fn, x in ((jax.vmap(branched), jnp.array([0.0, 1.0])), (masked, ONES - 1)):
        found = tt.blame(fn, everywhere=True)(x)
        assert found.operation == "log"
        assert not found.reaches_result
        assert "may have masked it" in str(found)


def masked(x):
    return jnp.where(x > 0, jnp.log(x), 0.0)


def test_a_real_nan_is_found_behind_a_masked_one():
    def fn(x):
        fine = masked(x).sum()
        return fine + jnp.arccos(x + 2).sum()

    found = tt.blame(fn)(jnp.zeros(3))
    assert_at(found, fn, "jnp.arccos", kind="nan")


def test_a_branch_that_is_taken_is_entered():
    found = tt.blame(jax.jit(branched))(jnp.inf)
    assert found.argument == "x"

    def fn(x):
        return jax.lax.cond(x > 0, lambda x: x / 0.0, lambda x: x, x)

    assert_at(tt.blame(fn)(1.0), fn, "x / 0.0", operation="div")
    assert not tt.blame(fn)(-1.0)


def attention(scores, mask):
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
    return weights.sum()


def test_an_infinite_mask_is_no_alarm():
    mask = jnp.array([True, False, True])
    for everywhere in (False, True):
        found = tt.blame(attention, everywhere=everywhere)(ONES, mask)
        assert not found, found
    assert not tt.blame(jax.grad(attention))(ONES, mask)

    def biased(x):
        bias = jnp.where(x > 0, 0.0, -jnp.inf)
        return jax.nn.softmax(x + bias).sum()

    assert not tt.blame(biased, everywhere=True)(jnp.array([1.0, -1.0]))
    lowest = lambda x: jax.nn.softmax(jnp.where(x > 0, x, jnp.finfo(x.dtype).min))
    assert not tt.blame(lowest, everywhere=True)(jnp.array([1.0, -1.0]))


def test_a_nan_made_of_an_infinite_mask_is_one():
    found = tt.blame(attention)(ONES, jnp.zeros(3, bool))
    assert_at(found, attention, "jax.nn.softmax", kind="nan", inputs_finite=False)
    assert "Constants of the program that are not finite" in str(found)


def test_an_infinity_as_a_result_on_purpose_is_no_alarm():
    assert not tt.blame(lambda x: jnp.where(x > 0, x, -jnp.inf))(jnp.zeros(2))


TABLE = np.array([1.0, np.nan, 1.0], np.float32)


def with_a_table(x):
    return jnp.sum(x * TABLE)


def with_a_number(x):
    return jnp.sum(x * float("nan"))


def with_a_branch(x):
    return jnp.sum(jnp.where(x > 2, x, jnp.nan))


def in_a_loop(x):
    return jax.lax.scan(lambda held, x: (held + x * jnp.nan, None), 0.0, x)[0]


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (with_a_table, "x * TABLE"),
        (with_a_number, 'x * float("nan")'),
        (with_a_branch, "jnp.where"),
        (in_a_loop, "x * jnp.nan"),
    ],
)
def test_a_constant_that_is_nan_is_found_where_it_is_taken(fn, text):
    found = tt.blame(fn)(ONES)
    assert_at(found, fn, text, kind="nan", inputs_finite=False)
    assert "Constants of the program that are not finite" in str(found)


@pytest.mark.parametrize(
    "fn", [lambda x: (x, jnp.asarray(TABLE)), lambda x: (x, jnp.nan)]
)
def test_a_constant_that_is_a_result_is_named_as_such(fn):
    found = tt.blame(fn)(ONES)
    assert found.kind == "nan"
    assert "constants" in str(found)
    assert found.count == 1


# Arguments, Modules.


@pytest.mark.parametrize("make", [np.array, jnp.array], ids=["numpy", "jax"])
def test_an_argument_that_is_bad_already(make):
    fn = lambda params, scale=1.0: params["w"] * scale
    found = tt.blame(fn)({"w": make([1.0, np.nan])})
    assert (found.argument, found.kind, found.index) == ("params/w", "nan", (1,))
    assert "came in with the argument params/w" in str(found)
    assert tt.blame(fn)({"w": ONES}, scale=jnp.inf).argument == "scale"


class Net(tt.Module):
    def __init__(self, rngs):
        self.layers = tt.List([tt.Linear(3, 3, rngs=rngs) for _ in range(2)])
        self.norm = tt.LayerNorm(3, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def loss(net, x):
    return (net(x) ** 2).sum()


STEPS = {
    "forward": loss,
    "jit": tt.jit(loss),
    "gradient": tt.jit(tt.value_and_grad(loss)),
    "jax": jax.jit(jax.value_and_grad(loss)),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_parameter_that_is_bad_already(name):
    net = Net(tt.Rngs(0))
    assert not tt.blame(STEPS[name])(net, jnp.ones((2, 3)))
    kernel = net.layers[1].kernel
    kernel[...] = kernel[...].at[0, 1].set(jnp.nan)
    found = tt.blame(STEPS[name])(net, jnp.ones((2, 3)))
    assert found.argument == "net/layers/1/kernel"
    assert found.index == (0, 1)


@pytest.mark.parametrize("name", STEPS)
def test_an_overflow_in_a_module(name):
    net = Net(tt.Rngs(0))
    net.layers[1].kernel[...] *= 1e38
    found = tt.blame(STEPS[name])(net, 100 * jnp.ones((2, 3)))
    place = found.path[-2:]
    assert (found.operation, place) == ("dot_general", ("layers", 1))
    assert_at(found, Net, "x = layer(x)", function="__call__")
    assert "in the Module" in str(found)


def test_a_module_and_a_method_can_be_blamed():
    net = Net(tt.Rngs(0))
    net.layers[0].bias[...] = jnp.full(3, jnp.nan)
    for fn in (net, net.__call__):
        assert tt.blame(fn)(jnp.ones((2, 3))).argument == "layers/0/bias"


def test_updates_of_variables_are_results_and_are_not_made():
    class Counter(tt.Module):
        def __init__(self):
            self.total = tt.Variable(jnp.array(1.0))

        def __call__(self, x):
            self.total[...] = self.total[...] + jnp.log(x)
            return 0.0

    counter = Counter()
    for fn in (counter, tt.jit(lambda counter, x: counter(x))):
        args = (0.0,) if fn is counter else (counter, 0.0)
        found = tt.blame(fn)(*args)
        assert found.operation == "log"
        assert counter.total[...] == 1.0


def test_custom_rules_are_entered():
    @jax.custom_vjp
    def own(x):
        return jnp.log(x)

    own.defvjp(lambda x: (jnp.log(x), x), lambda x, g: (g / x,))
    assert tt.blame(own)(0.0).operation == "log"
    found = tt.blame(jax.grad(lambda x: own(x)))(0.0)
    assert (found.operation, found.backward) == ("div", True)
    assert not tt.blame(jax.jit(jax.nn.relu))(ONES)
    found = tt.blame(lambda x: jax.nn.relu(1 / x))(jnp.zeros(2))
    assert found.operation == "div"


# The object.


def test_nothing_to_blame_is_falsy_and_says_so():
    nothing = tt.blame(jnp.sin)(1.0)
    assert not nothing
    assert isinstance(nothing, tt.Blame)
    assert str(nothing) == "All is finite."
    assert not tt.blame(lambda x: x + 1)(1)  # no floats at all


def test_the_message_is_a_paragraph():
    text = str(tt.blame(jax.jit(deep))(ONES, BROKEN))
    assert "made by `mul`" in text
    assert "test_blame.py" in text
    assert "iteration 37 of a scan" in text
    assert "at most 3e+38 in magnitude" in text
    assert "\n" not in text


def test_a_program_is_traced_once_for_arguments_of_one_sort():
    traces = []

    def fn(x):
        traces.append(1)
        return jnp.log(x)

    blamed = tt.blame(fn)
    assert [bool(blamed(x)) for x in (1.0, 0.0, 2.0, 0.0)] == [0, 1, 0, 1]
    assert len(traces) == 1
    assert blamed.__name__ == "fn"


def test_what_can_change_unnoticed_is_looked_at_again():
    model = Scaled(1.0)
    blamed = tt.blame(lambda model, x: model(x))
    assert not blamed(model, ONES)
    model.options["scale"] = jnp.nan
    assert blamed(model, ONES)

    factors = {1.0}
    blamed = tt.blame(lambda x, factors: x * next(iter(factors)))
    assert not blamed(ONES, factors)
    factors.clear()
    factors.add(jnp.nan)
    assert blamed(ONES, factors)


def test_flags_and_texts_are_parts_of_the_program():
    def fn(x, mode, train=False):
        return jnp.log(x) if mode == "log" and train else x

    blamed = tt.blame(fn)
    assert blamed(0.0, "log", train=True).operation == "log"
    assert not blamed(0.0, "log")
    assert not blamed(0.0, "other", train=True)


def test_what_a_partial_brings_along_is_an_argument():
    def step(model, x):
        model.seen[...] += 1
        return jnp.log(x) * model.w[...]

    class Counting(tt.Module):
        def __init__(self):
            self.w = tt.Param(jnp.ones(2))
            self.seen = tt.Variable(jnp.zeros(()))

    model = Counting()
    blamed = tt.blame(functools.partial(step, model))
    assert not blamed(jnp.ones(2))
    model.w[...] = jnp.array([1.0, jnp.nan])
    assert blamed(jnp.ones(2)).argument == "model/w"
    assert float(model.seen[...]) == 0.0


def test_where_a_number_stands_is_part_of_the_program():
    blamed = tt.blame(lambda a, b: jnp.log(a - b + 0.5))
    assert blamed(2, 3.0)
    assert not blamed(3.0, 2)
    assert blamed(2.0, 3)


def test_what_can_change_and_did_not_is_not_traced_again():
    traces = []

    def fn(x, options):
        traces.append(1)
        return jnp.log(x) * options["scale"]

    blamed = tt.blame(fn)
    assert [bool(blamed(x, {"scale": 2})) for x in (1.0, 0.0)] == [False, True]
    model = Scaled(2.0)
    blamed = tt.blame(lambda model, x: [traces.append(2), model(x)][1])
    assert [bool(blamed(model, ONES)) for _ in range(3)] == [False] * 3
    assert traces == [1, 2]


def test_large_inputs_are_told_in_their_own_precision():
    with jax.enable_x64(True):
        found = tt.blame(jnp.exp)(jnp.array([1e300, 1.0]))
        assert found.largest_input == 1e300


def test_a_whole_training_step_can_be_blamed():
    net = Net(tt.Rngs(0))
    optimizer = tt.Optimizer(net, optax.adam(1e-3), wrt=tt.Param)

    @tt.jit
    def train(net, optimizer, x):
        rooted = lambda net: jnp.sqrt(net(x) * 0).sum()
        value, grads = tt.value_and_grad(rooted)(net)
        optimizer.update(net, grads)
        return value

    before = net.layers[0].kernel[...]
    found = tt.blame(train)(net, optimizer, jnp.ones((2, 3)))
    assert_at(found, test_a_whole_training_step_can_be_blamed, "jnp.sqrt(net")
    assert found.backward
    assert net.layers[0].kernel[...] is before
    assert optimizer.step[...] == 0


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_arrays(kind):
    mesh = mesh_of((4, 2), ("data", "model"), kind)
    x = jnp.ones((8, 4)).at[5, 1].set(-1.0)
    x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data", "model")))
    with jax.set_mesh(mesh):
        found = tt.blame(jax.jit(lambda x: jnp.log(x) * 2))(x)
    assert (found.operation, found.index) == ("log", (5, 1))


def test_only_functions_can_be_blamed():
    with pytest.raises(TypeError, match="blame"):
        tt.blame(3)


# Always on.


def test_guarded_sites_say_whether_they_are_finite():
    def fn(x, weights):
        body = lambda x, w: (tt.tap(x + jnp.log(w), "h"), None)
        return tt.tap(jax.lax.scan(body, x, weights)[0], "end").sum()

    guarded = jax.jit(tt.guard(fn, "h"))
    weights = jnp.ones(48)
    _, record = guarded(ONES, weights)
    assert record.first_nonfinite() is None
    _, record = guarded(ONES, weights.at[37].set(0.0))
    assert record.first_nonfinite() == "h at [37]"
    assert len(record) == 1


def test_guarded_gradients():
    def fn(x):
        return tt.tap(jnp.sqrt(tt.tap(x * 1.0, "in")), "out").sum()

    _, record = tt.guard(jax.grad(fn), grads=True)(jnp.array([0.0, 1.0]))
    assert record.first_nonfinite() == "gradient of in"


def test_a_record_without_the_bit_cannot_name_the_first_bad_site():
    _, record = tt.observe(lambda x: tt.tap(x, "h"), reduce=[tt.Norm()])(ONES)
    with pytest.raises(tt.CaptureError, match="Observe with `guard`"):
        record.first_nonfinite()


def test_code_without_a_file_is_blamed_without_its_text():
    scope = {"jnp": jnp}
    exec(compile("f = lambda x: jnp.log(x).sum()", "<typed>", "exec"), scope)
    text = str(tt.blame(scope["f"])(jnp.array([0.0, 1.0])))
    assert "at <typed>:1 in <lambda>. 1 of 2 numbers are bad" in text


def test_frames_of_frozen_code_are_nobodys():
    scope = {"jnp": jnp}
    exec(compile("f = lambda x: jnp.log(x).sum()", "<frozen f>", "exec"), scope)
    found = tt.blame(lambda x: scope["f"](x))(jnp.zeros(2))
    assert found.file == __file__
    assert found.source.startswith("found = tt.blame(")


def test_values_without_a_hash_are_parts_of_the_program():
    class Options:
        __hash__ = None
        base = 10.0

    def call(x, options):
        return jnp.log(x) / options.base

    blamed, options = tt.blame(call), Options()
    for _ in range(2):
        assert blamed(jnp.zeros(2), options).operation == "log"
    options.base = 0.0
    assert blamed(jnp.ones(2), options).operation == "div"


def test_a_bad_value_in_an_object_that_is_no_pytree():
    class Opaque(tt.Module, pytree=False):
        def __init__(self):
            self.w = tt.Param(jnp.array(jnp.nan))

    found = tt.blame(lambda model: model.w[...] * 2)(Opaque())
    assert found.kind == "nan"
    assert "came in with the argument model/w" in str(found)


def test_a_value_that_went_bad_in_a_loop_spoils_another_later():
    def call(x):
        def body(held):
            n, a, b = held
            return n + 1, jnp.log(a - 1.0), b + a

        return jax.lax.while_loop(lambda held: held[0] < 5, body, (0, x, 0.0))[2]

    found = tt.blame(call)(3.0)
    assert (found.operation, found.kind) == ("log", "nan")
    assert "in iteration 1 of a while" in str(found)


@pytest.mark.parametrize(
    "wrap", [jax.checkpoint, lambda fn: jax.checkpoint(jax.jit(fn))]
)
def test_what_a_checkpoint_computes_again_is_of_the_backward_pass(wrap):
    found = tt.blame(jax.grad(wrap(lambda x: jnp.sqrt(jnp.sum(x**2)))))(jnp.zeros(3))
    assert (found.operation, found.kind, found.backward) == ("div", "inf", True)


LOWEST = jnp.array([0.0, -jnp.inf, 0.0])


def test_a_mask_that_came_in_with_an_argument_is_harmless():
    def attend(x, mask):
        return jax.nn.softmax(x + mask)

    x = jnp.ones(3)
    assert not tt.blame(attend)(x, LOWEST)
    assert not tt.blame(jax.jit(attend))(x, mask=LOWEST)
    assert not tt.blame(jax.grad(lambda x, mask: attend(x, mask)[0]))(x, LOWEST)
    assert not tt.blame(attend, everywhere=True)(x, LOWEST)
    assert not tt.blame(lambda x, unused: x)(x, x * jnp.nan)
    lowest = tt.Variable(LOWEST)
    assert not tt.blame(lambda x, mask: attend(x, mask[...]))(x, lowest)


def test_a_carry_may_begin_at_infinity():
    def smallest(xs, start):
        return jax.lax.scan(lambda c, x: (jnp.minimum(c, x), None), start, xs)[0]

    assert not tt.blame(smallest)(jnp.ones(3), jnp.inf)


def test_what_a_loop_without_iterations_gives_is_what_it_began_with():
    def fn(x):
        return jax.lax.scan(lambda c, y: (c * y, None), x, jnp.zeros(0))[0]

    assert tt.blame(fn)(jnp.inf).argument == "x"


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_a_bad_argument_does_not_hide_an_operation(bad):
    def masked(x, y):
        return jnp.log(x) + jnp.where(jnp.isfinite(y), y, 0.0)

    def mixed(x, y):
        return jnp.log(x) + y

    for fn in (masked, mixed):
        for x in (jnp.array([-1.0, 1.0]), jnp.array([1.0, -1.0])):
            found = tt.blame(fn)(x, jnp.array([bad, 0.0]))
            assert (found.operation, found.argument) == ("log", "")
            assert found.inputs_finite
            assert found.arguments == ()


def test_an_argument_is_told_if_it_is_why():
    def times(x, y):
        return jnp.sin(x * y)

    found = tt.blame(times)(jnp.ones(2), jnp.array([0.0, jnp.nan]))
    assert (found.kind, found.argument, found.operation) == ("nan", "y", "")
    found = tt.blame(lambda x, y: x + y)(jnp.ones(2), jnp.array([0.0, jnp.inf]))
    assert (found.kind, found.argument) == ("inf", "y")
    # Of two bad arguments the one that is as bad as the result.
    found = tt.blame(lambda x, y: x + y)(jnp.array(jnp.inf), jnp.array(jnp.nan))
    assert found.argument == "y"


def test_an_operation_names_the_infinite_arguments_that_went_into_it():
    def attend(x, mask):
        return jax.nn.softmax(x + mask)

    found = tt.blame(attend)(jnp.ones(3), jnp.full(3, -jnp.inf))
    assert (found.kind, found.operation) == ("nan", "sub")
    assert found.arguments == ("mask",)
    assert not found.inputs_finite
    assert "What went into it comes from mask, which was not finite." in str(found)


def test_a_bad_value_that_is_written_is_a_result():
    class Counter(tt.Module):
        def __init__(self):
            self.total = tt.Variable(jnp.zeros(()))
            self.bound = tt.Variable(jnp.array(jnp.inf))

        def __call__(self, x):
            self.total[...] += jnp.log(x)
            return x

    assert tt.blame(Counter())(jnp.array(-1.0)).operation == "log"
    assert not tt.blame(Counter())(jnp.array(1.0))


def test_an_argument_is_followed_through_loops():
    def loop(xs, start):
        def body(carry, x):
            low, total = carry
            return (jnp.minimum(low, x), total + jnp.log(x)), None

        return jax.lax.scan(body, (start, 0.0), xs)[0]

    found = tt.blame(loop)(jnp.array([1.0, -1.0, 2.0]), jnp.inf)
    assert (found.operation, found.iterations) == ("log", (("scan", 1),))
    found = tt.blame(loop)(jnp.ones(3), jnp.nan)
    assert found.argument == "start"


def test_blame_inside_a_capture_is_not_heard():
    def f(x):
        found = tt.blame(lambda x: tt.tap(jnp.log(x), "inner"))(x)
        return tt.tap(x, "outer"), found

    (_, found), record = tt.observe(f)(jnp.array([-1.0]))
    assert found.operation == "log"
    assert [site.text for site in record] == ["outer"]
