# SPDX-License-Identifier: Apache-2.0
"""compare: what is paired, in which order, what differs, what is told and refused."""

import json
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

import treetap as tt
from meshes import mesh_of
from treetap._compare.align import is_fold
from treetap._compare.comparison import compare
from treetap._io.record_file import save_record
from treetap._observe.records import Record, Site

ONES = np.ones((2, 3), np.float32)


def record_of(values, **about):
    """A Record from texts such as `blocks/0:name` to values."""
    sites = []
    for text, value in values.items():
        path, _, name = text.rpartition(":")
        keys = tuple(int(k) if k.isdigit() else k for k in path.split("/") if k)
        sites.append(Site(value, path=keys, name=name or "__call__", **about))
    return Record(tuple(sites))


class Layer(tt.Module):
    def __init__(self, by):
        self.by = tt.Param(jnp.full(3, by))

    def __call__(self, x):
        return jnp.sin(x * self.by)


class Net(tt.Module):
    def __init__(self, *by):
        self.layers = tt.List([Layer(each) for each in by])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def run(*by):
    return tt.observe(Net(*by))(jnp.arange(3.0))[1]


# The result.


def test_equal_runs_agree():
    comparison = compare(run(1.0, 2.0), run(1.0, 2.0))
    assert comparison
    assert comparison.first is None
    assert comparison.diverging == ()
    assert [each.site for each in comparison] == [
        "layers/0:__call__",
        "layers/1:__call__",
        "__call__",
    ]
    assert len(comparison) == 3
    assert repr(comparison) == "Comparison(3 sites compared, none differ)"


def test_the_first_to_differ_is_told():
    comparison = compare(run(1.0, 2.0, 3.0), run(1.0, 2.1, 3.0))
    assert not comparison
    assert comparison.first.site == "layers/1:__call__"
    assert comparison.first.diverges
    assert comparison.first.reason == "relative error"
    assert len(comparison.diverging) == 3
    assert comparison["layers/0:__call__"].max_abs == 0
    assert "first layers/1:__call__, relative" in repr(comparison)
    with pytest.raises(KeyError, match="no site 'x' was compared"):
        comparison["x"]


def test_the_order_is_that_of_the_first():
    a = record_of({"b:x": ONES, "a:x": ONES, "c:x": ONES})
    b = record_of({"c:x": 2 * ONES, "a:x": 2 * ONES, "b:x": ONES})
    assert [each.site for each in compare(a, b)] == ["b:x", "a:x", "c:x"]
    assert compare(a, b).first.site == "a:x"
    assert compare(b, a).first.site == "c:x"


def test_what_is_alone_is_told_and_no_agreement():
    a = record_of({"a:x": ONES, "b:x": ONES})
    b = record_of({"a:x": ONES, "c:x": ONES, "d:x": ONES})
    comparison = compare(a, b)
    assert not comparison
    assert comparison.first is None
    assert (comparison.only_a, comparison.only_b) == (("b:x",), ("c:x", "d:x"))
    assert "alone 1 and 2" in repr(comparison)
    assert "Only in a (1): b:x." in str(comparison)
    assert "Only in b (2): c:x, d:x." in str(comparison)
    assert compare(a, b, ignore=["b", "c", "d"])
    assert compare(a, b, ignore="**")
    assert not compare(a, b, ignore=["b", "c"])


def test_a_dict_that_json_can_hold():
    a = record_of({"a:x": ONES, "b:x": np.array([np.nan]), "c:x": ONES})
    b = record_of({"a:x": ONES, "b:x": np.array([1.0]), "c:x": ONES[:1]})
    told = json.loads(json.dumps(compare(a, b).to_dict(), allow_nan=False))
    assert (told["agrees"], told["first"]) == (False, "b:x")
    assert told["only_a"] == told["only_b"] == []
    first, second, third = told["differences"]
    assert (first["relative"], first["cosine"]) == (0, 1)
    assert first["shapes"] == [[2, 3], [2, 3]]
    assert first["dtypes"] == ["float32", "float32"]
    assert (second["max_abs"], second["reason"]) == ("inf", "not finite in one of them")
    assert (third["max_abs"], third["reason"]) == ("nan", "their shapes differ")


def printed(comparison, width):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - closed below
    with console.file, console.capture() as text:
        console.print(comparison)
    return [line.rstrip() for line in text.get().splitlines()]


def test_the_table_fits_where_it_is_shown():
    comparison = compare(run(1.0, 2.0), run(1.0, 2.1))
    wide = printed(comparison, 160)
    assert wide[0] == "3 sites compared, 2 differ"
    heads = "site  type  max abs  relative  cosine  ulp  limit"
    assert wide[1].split() == heads.split()
    assert "f32[3]" in wide[3]
    assert wide[4].endswith("relative error")
    assert wide[-1] == "First to differ: layers/1:__call__ (relative error)."
    for width in (80, 50, 30):
        narrow = printed(comparison, width)
        assert max(map(len, narrow)) <= width
        assert "cosine" not in narrow[1].split()
    assert str(comparison).startswith("3 sites compared, 2 differ")


def test_the_table_has_the_names_of_both_when_they_differ():
    comparison = compare(
        run(1.0),
        {"first": run(1.0)[0].value},
        rename={"layers/0": "first"},
        ignore="**",
    )
    assert "in b" in printed(comparison, 160)[1]
    assert "first" in printed(comparison, 160)[3]


# Limits.


@pytest.mark.parametrize(
    ("dtype", "error", "agrees"),
    [
        (jnp.float64, 1e-11, True),
        (jnp.float64, 1e-9, False),
        (jnp.float32, 1e-5, True),
        (jnp.float32, 1e-4, False),
        (jnp.float16, 2e-3, True),
        (jnp.float16, 1e-2, False),
        (jnp.bfloat16, 1e-2, True),
        (jnp.bfloat16, 1e-1, False),
        (jnp.float8_e5m2, 0.25, True),
    ],
)
def test_the_usual_tolerance_is_that_of_the_type(dtype, error, agrees):
    random = np.random.default_rng(0)
    value = random.normal(size=1000)
    other = value * (1 + error * np.sign(random.normal(size=1000)))
    a, b = value.astype(np.dtype(dtype)), other.astype(np.dtype(dtype))
    assert bool(compare({"x": a}, {"x": b})) == agrees
    assert bool(compare({"x": a}, {"x": other})) == agrees  # the coarser one counts


def test_tolerances_are_given_for_all_or_by_selector():
    a = record_of({"a:x": ONES, "b:x": ONES})
    b = record_of({"a:x": 1.01 * ONES, "b:x": 1.01 * ONES})
    assert not compare(a, b)
    assert compare(a, b, tolerance=0.1)
    assert compare(a, b, tolerance={"b": 0.1}).first.site == "a:x"
    assert compare(a, b, tolerance={"b": 0.1}).diverging[1:] == ()
    assert compare(a, b, absolute=0.02)
    assert not compare(a, b, absolute=0.001)


def test_one_number_far_off_is_no_rounding():
    random = np.random.default_rng(0)
    a = random.normal(size=100_000).astype(jnp.bfloat16)
    b = a.copy()
    b[7] = b[7] + 5
    comparison = compare({"x": a}, {"x": b})
    assert comparison.first.relative < comparison.first.limit
    assert comparison.first.reason == "one number far off"


def test_integers_must_be_equal():
    a, b = {"x": np.array([1, 2])}, {"x": np.array([1, 3])}
    assert compare(a, a)
    assert compare(a, b).first.ulp is None
    assert not compare(a, b)
    assert compare(a, b, absolute=1)


def test_noise_gives_the_limit_of_each_site():
    random = np.random.default_rng(0)
    exact = random.normal(size=1000)

    def rounded(error):
        return exact * (1 + error * random.normal(size=1000))

    a = {"x": rounded(1e-3), "y": rounded(1e-6)}
    b = {"x": rounded(1e-3), "y": rounded(1e-4)}
    noise = {"x": exact, "y": exact}
    assert compare(a, b).first.site == "x"
    comparison = compare(a, b, noise=noise)
    assert comparison.first.site == "y"
    assert comparison["x"].floor == pytest.approx(1e-3, rel=0.2)
    assert comparison["x"].limit == 8 * comparison["x"].floor
    assert compare(a, b, noise=noise, noise_factor=1000)
    assert not compare(a, b, noise=noise, noise_factor=1)


def test_noise_of_nothing_still_leaves_the_last_digit():
    a, b = np.ones(4, np.float32), np.full(4, np.nextafter(np.float32(1), 2))
    assert compare({"x": a}, {"x": b}, noise={"x": a})
    assert not compare({"x": a}, {"x": 1.001 * b}, noise={"x": a})


def test_noise_may_have_the_names_of_the_second():
    a, b = record_of({"a:__call__": ONES}), {"torch.a": ONES.T}
    options = {"rename": {"a": tt.tensor("torch.a").transpose()}}
    assert compare(a, b, noise={"torch.a": ONES.T}, **options)
    assert compare(a, b, noise=a, **options)
    with pytest.raises(tt.CaptureError, match=r"`noise` lacks 1 of the .*: a:__call__"):
        compare(a, b, noise={"other": ONES}, **options)


# Names.


def test_names_of_other_programs_are_paired_without_rules():
    a = record_of(
        {"blocks/0/attn:__call__": ONES, "blocks/0:h": ONES, ":__call__": ONES}
    )
    b = {"blocks.0.attn": ONES, "blocks.0.h": ONES, "__call__": ONES}
    comparison = compare(a, b)
    assert comparison
    assert [each.other for each in comparison] == list(b)
    assert compare(b, a)


def test_names_that_read_alike_are_paired_only_exactly():
    b = {"a/b": ONES, "a.b": 2 * ONES}
    assert compare({"a/b": ONES}, b, ignore="**")
    comparison = compare({"a:b": ONES, "a/b": ONES}, b)
    assert comparison.only_a == ("a:b",)
    assert comparison.only_b == ("a.b",)


def test_rules_rename():
    a = record_of(
        {
            "blocks/0/attn:__call__": 1 * ONES,
            "blocks/1/attn:__call__": 2 * ONES,
            "blocks/1/attn:weights": 3 * ONES,
            ":embedded": 4 * ONES,
            ":__call__": 5 * ONES,
        }
    )
    b = {
        "h.0.a": ONES,
        "h.1.a": 2 * ONES,
        "w.1": 3 * ONES,
        "e": 4 * ONES,
        "z": 5 * ONES,
    }
    rules = {
        "blocks/{i}/attn": "h.{i}.a",
        "blocks/{i}/attn:weights": "w.{i}",
        ":embedded": "e",
        "": "z",
    }
    assert compare(a, b, rename=rules)
    more = record_of({"net/0/attn:__call__": ONES, "net/1/attn:__call__": 2 * ONES})
    rules = {"blocks/{rest...}": "net/{rest}"}
    assert compare(a, more, rename=rules, select="blocks/*/attn:__call__")


def test_the_first_rule_that_matches_counts():
    a = record_of({"a/0:__call__": ONES})
    b = {"x": ONES, "y": 2 * ONES}
    assert compare(a, b, rename={"a/0": "x", "a/*": "y"}, ignore="**")
    assert not compare(a, b, rename={"a/*": "y"}, ignore="**")
    with pytest.raises(tt.CaptureError, match="only what an earlier rule takes"):
        compare(a, b, rename={"a/*": "y", "a/0": "x"})


def test_calls_keep_their_numbers():
    sites = [Site(n * ONES, path=("a",), name="__call__", index=n) for n in range(3)]
    b = {f"torch.a#{n}".removesuffix("#0"): n * ONES for n in range(3)}
    assert compare(Record(tuple(sites)), b, rename={"a": "torch.a"})
    b["other"] = b.pop("torch.a#2")
    rules = {"a#2": "other", "a": "torch.a"}
    assert compare(Record(tuple(sites)), b, rename=rules)


def test_rules_have_steps():
    fused = np.arange(18.0).reshape(3, 6)
    a = record_of({"q:__call__": fused[:, :2], "k:__call__": fused[:, 2:4].T})
    rules = {
        "q": tt.tensor("qkv").part(0, of=3, axis=1),
        "k": tt.tensor("qkv").part(1, of=3, axis=1).transpose(),
    }
    comparison = compare(a, {"qkv": fused}, rename=rules)
    assert comparison
    assert comparison["q:__call__"].shapes == ((3, 2), (3, 6))
    absent = {"q": tt.tensor("lost").optional(), "k": rules["k"]}
    assert compare(a, {"qkv": fused}, rename=absent).only_a == ("q:__call__",)


def test_values_in_trees_are_paired_leaf_by_leaf():
    a = record_of({"a:__call__": (ONES, {"w": 2 * ONES}), "b:__call__": ONES})
    comparison = compare(
        a, {"a.0": ONES, "a.w": ONES, "b": ONES}, rename={"a.1.w": "a.w"}
    )
    assert [each.site for each in comparison] == [
        "a:__call__.0",
        "a:__call__.1.w",
        "b:__call__",
    ]
    assert comparison.first.site == "a:__call__.1.w"
    assert compare({"a": (ONES, ONES)}, {"a": (ONES, ONES, ONES)}).only_b == ("a.2",)


def test_a_selector_limits_what_is_compared():
    comparison = compare(run(1.0, 2.0), run(1.1, 2.0), select="layers/1")
    assert [each.site for each in comparison] == ["layers/1:__call__"]
    b = record_of({"layers/0:__call__": ONES, "layers/1:__call__": ONES})
    assert compare(b, b, select="layers/0")
    lost = compare(b, record_of({"layers/1:__call__": ONES}), select="**")
    assert lost.only_a == ("layers/0:__call__",)
    with pytest.raises(tt.CaptureError, match=r"compare: .*matches none of 3 sites"):
        compare(run(1.0, 2.0), run(1.0, 2.0), select="blocks/*")


# Layouts.


@pytest.mark.parametrize(
    "layout", [(0, 2, 3, 1), "NCHW->NHWC", "n c h w -> n h w c", np.array([0])]
)
def test_layouts_turn_axes(layout):
    value = np.random.default_rng(0).normal(size=(2, 3, 4, 5))
    if isinstance(layout, np.ndarray):
        layout = lambda array: np.moveaxis(array, 1, -1)
    a = record_of({"conv:__call__": value.transpose(0, 2, 3, 1), "b:__call__": ONES})
    b = {"conv": value, "b": ONES}
    comparison = compare(a, b, layout={"conv": layout})
    assert comparison, comparison
    assert comparison["conv:__call__"].shapes == ((2, 4, 5, 3), (2, 3, 4, 5))
    wrong = compare(a, b)
    assert wrong.first.reason == "their shapes differ"
    assert math.isnan(wrong.first.relative)


def test_axes_merged_in_one_side_are_no_difference():
    value = np.random.default_rng(0).normal(size=(2, 7, 4, 8))
    comparison = compare({"x": value}, {"x": value.reshape(2, 7, 32)})
    assert comparison
    assert comparison["x"].shapes == ((2, 7, 4, 8), (2, 7, 32))
    assert not compare({"x": value}, {"x": value.transpose(0, 1, 3, 2)})


@pytest.mark.parametrize(
    ("one", "other", "folds"),
    [
        ((), (), True),
        ((), (1, 1), True),
        ((6,), (2, 3), True),
        ((2, 3), (6,), True),
        ((2, 3), (3, 2), False),
        ((4, 6), (4, 2, 3), True),
        ((4, 6), (2, 2, 6), True),
        ((4, 6), (6, 4), False),
        ((4, 6), (2, 12), False),
        ((1, 4), (4, 1), True),
        ((0, 3), (0, 3), True),
        ((0, 3), (3, 0), False),
        ((2,), (3,), False),
    ],
)
def test_folds(one, other, folds):
    assert is_fold(one, other) == is_fold(other, one) == folds


# Loops.


def scanned(kernels, x):
    def body(x, kernel):
        x = tt.tap(jnp.sin(x @ kernel), "first")
        return tt.tap(jnp.cos(x @ kernel), "second"), None

    return tt.tap(jax.lax.scan(body, x, kernels)[0], "out")


def scans(change=0.0):
    kernels = np.random.default_rng(0).normal(size=(4, 3, 3))
    kernels[2, 1, 1] += change
    return tt.observe(jax.jit(scanned))(jnp.asarray(kernels, jnp.float32), jnp.eye(3))[
        1
    ]


def test_loops_are_compared_iteration_by_iteration():
    comparison = compare(scans(), scans(0.1))
    texts = [each.site for each in comparison]
    assert texts[:3] == ["first[0]", "second[0]", "first[1]"]
    assert texts[-1] == "out"
    assert comparison.first.site == "first[2]"
    assert comparison.first.other == "first[2]"


def test_a_loop_is_compared_with_layers_apart():
    a = scans()
    b = {f"h.{n}.{name}": a[name].value[n] for n in range(4) for name in ("first",)}
    b["h.3.first"] = b["h.3.first"] + 1
    rules = {"first": tt.tensor("h.{i}.first").stack()}
    comparison = compare(a, b, rename=rules, select="first")
    assert [each.other for each in comparison] == [f"h.{n}.first" for n in range(4)]
    assert comparison.first.site == "first[3]"
    del b["h.3.first"]
    with pytest.raises(tt.CaptureError, match=r"first: h\.3\.first \(near it: h\.2"):
        compare(a, b, rename=rules, select="first")


def test_loops_over_very_many_are_compared_whole():
    def long(count):
        site = Site(np.zeros((count, 2, 0)), name="x", wraps=("scan", "scan"))
        return Record((site,))

    assert len(compare(long(3), long(3))) == 6
    assert len(compare(long(4096), long(4096))) == 4096
    assert len(compare(long(2**40), long(2**40))) == 1


def test_loops_in_loops():
    def run(change):
        def inner(x, n):
            return tt.tap(jnp.sin(x + change * (n == 5)), "x"), None

        def outer(x, start):
            return jax.lax.scan(inner, x, start + jnp.arange(3))[0], None

        def fn(x):
            return jax.lax.scan(outer, x, jnp.array([0, 3]))[0]

        return tt.observe(fn)(jnp.ones(2))[1]

    comparison = compare(run(0.0), run(1.0))
    texts = [each.site for each in comparison]
    assert texts == [f"x[{n}][{m}]" for n in range(2) for m in range(3)]
    assert comparison.first.site == "x[1][2]"


# Gradients, flags, keys.


def gradients(*by):
    loss = jax.grad(lambda model, x: model(x).sum())
    return tt.observe(loss, grads=True)(Net(*by), jnp.arange(3.0))[1]


def test_gradients_follow_in_the_order_of_the_backward_pass():
    comparison = compare(gradients(1.0, 2.0), gradients(1.0, 2.0))
    assert [each.site for each in comparison] == [
        "layers/0:__call__",
        "layers/1:__call__",
        "__call__",
        "__call__@grad",
        "layers/1:__call__@grad",
        "layers/0:__call__@grad",
    ]
    assert comparison
    assert len(compare(gradients(1.0), run(1.0))) == 2  # only one has them
    assert compare(gradients(1.0), run(1.0))
    assert compare(run(1.0), gradients(1.0))


def test_a_wrong_gradient_is_found_where_it_comes_in():
    @jax.custom_vjp
    def wrong(x):
        return x

    wrong.defvjp(lambda x: (x, None), lambda _, grad: (2 * grad,))

    def run(middle):
        def loss(x):
            x = tt.tap(jnp.sin(x), "a")
            x = middle(tt.tap(jnp.sin(x), "b"))
            return tt.tap(jnp.sin(x), "c").sum()

        return tt.observe(jax.grad(loss), grads=True)(jnp.arange(3.0))[1]

    comparison = compare(run(wrong), run(lambda x: x))
    assert [each.site for each in comparison.diverging] == ["b@grad", "a@grad"]
    assert comparison.first.relative == pytest.approx(1)


def test_gradients_in_files(tmp_path):
    a = gradients(1.0, 2.0)
    save_record(tmp_path / "a.safetensors", a)
    assert compare(a, tmp_path / "a.safetensors")
    tensors = {"layers.0": a[0].value, "layers.0@grad": a[0].grad}
    order = json.dumps(["layers.0", "layers.0@grad"])
    arrays = {key: np.asarray(value) for key, value in tensors.items()}
    save_file(arrays, tmp_path / "b.safetensors", {"treetap.order": order})
    assert len(compare(a, tmp_path / "b.safetensors", select="layers/0")) == 2
    back = compare(tmp_path / "b.safetensors", str(tmp_path / "a.safetensors"))
    assert [each.site for each in back] == ["layers.0", "layers.0@grad"]


def test_a_file_tells_the_order_of_its_tensors(tmp_path):
    tensors = {name: np.full(2, n, np.float32) for n, name in enumerate("cab")}
    for text, wanted in ((json.dumps(["c", "x", "a", 3]), "cab"), ("{", "abc")):
        save_file(tensors, tmp_path / "x.safetensors", {"treetap.order": text})
        comparison = compare(tmp_path / "x.safetensors", tensors)
        assert [each.site for each in comparison] == list(wanted)


def test_flags_and_keys_are_compared():
    def run(flag, seed):
        def fn(x):
            tt.tap(jax.random.key(seed), "key")
            return jax.lax.cond(x > flag, lambda: tt.tap(x, "a"), lambda: x)

        return tt.observe(fn)(jnp.array(1.0))[1]

    assert compare(run(0.0, 1), run(0.0, 1))
    assert compare(run(0.0, 1), run(0.0, 2)).first.site == "key"
    comparison = compare(run(0.0, 1), run(2.0, 1))
    assert [each.site for each in comparison.diverging] == ["a", "a@taken"]

    one, other = Site(ONES, name="x", taken=np.True_), Site(ONES, name="x")
    flagged = Site(ONES, name="y", taken=np.True_)
    assert compare(Record((one, flagged)), Record((other, flagged)))
    rules = {"x": "x", "y": "y"}
    assert compare(Record((one, flagged)), Record((other, flagged)), rename=rules)


def test_sharded_arrays_are_compared():
    sharding = jax.sharding.NamedSharding(
        mesh_of((2,), ("a",)), jax.sharding.PartitionSpec("a")
    )
    assert compare({"x": jax.device_put(ONES, sharding)}, {"x": ONES})


# Refusals.


def test_nothing_in_common_is_refused_with_a_rule_to_begin_with():
    a = record_of({"blocks/0/attn:__call__": ONES})
    b = {"transformer.h.0.attn": ONES, "logits": ONES}
    with pytest.raises(tt.CaptureError) as caught:
        compare(a, b)
    assert str(caught.value).splitlines() == [
        "compare: no site of `a` has the name of one of `b`.",
        "  a (1): blocks/0/attn:__call__",
        "  b (2): transformer.h.0.attn, logits",
        "Say with `rename` what sites of `a` are called in `b`: "
        "`rename={'blocks/0/attn:__call__': 'transformer.h.0.attn'}`.",
    ]


def test_many_and_long_and_unprintable_names_are_refused_quickly():
    a = {f"a{n}{'x' * 5000}": ONES for n in range(300)}
    b = {f"b{n}{'y' * 5000}": ONES for n in range(300)}
    start = time.monotonic()
    with pytest.raises(tt.CaptureError) as caught:
        compare({"\x1b[2J": ONES, **a}, b)
    assert time.monotonic() - start < 5
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 3000


def test_numbers_in_names_may_have_any_number_of_digits():
    many = "9" * 5000
    names = {f"h.{many}": ONES, f"h#{many}": ONES}
    assert compare(names, names)


def test_a_dict_whose_keys_have_no_order_is_refused():
    record = Record((Site({1: ONES, "1": ONES}, name="x"),))
    with pytest.raises(tt.CaptureError, match=r"x has a dict .* have no order"):
        compare(record, record)


def test_rules_and_layouts_that_match_nothing_are_refused():
    a, b = run(1.0), run(1.0)
    with pytest.raises(tt.CaptureError, match=r"'layer/{i}' in `rename` takes no site"):
        compare(a, b, rename={"layer/{i}": "x.{i}"})
    with pytest.raises(tt.CaptureError, match=r"compare: `layout`.*matches none of 2"):
        compare(a, b, layout={"conv": (1, 0)})
    with pytest.raises(tt.CaptureError, match=r"names that `b` does not.*\n.*\n.*lost"):
        compare(a, b, rename={"layers/0": "lost"})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layout": {"**": 3}}, TypeError, "a layout is axes"),
        ({"layout": "NCHW"}, TypeError, "a layout is axes"),
        ({"layout": (0, 0)}, ValueError, "no order of 2 axes"),
        ({"rename": {3: "x"}}, TypeError, "a pattern of `rename` is a text"),
        ({"rename": [("a", "b")]}, TypeError, "`rules` maps patterns"),
        ({"rename": {"{i": "x"}}, ValueError, "has braces"),
        ({"tolerance": -1}, ValueError, "a tolerance is a number from 0"),
        ({"tolerance": {"a": "x"}}, ValueError, "a tolerance is a number from 0"),
        ({"absolute": float("nan")}, ValueError, "a tolerance is a number from 0"),
        ({"noise": 3}, TypeError, "`noise` is a Record"),
    ],
)
def test_bad_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        compare({"a": ONES}, {"a": ONES}, **options)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (3, TypeError, "`b` is a Record, a mapping"),
        ({3: ONES}, TypeError, "3 is no name"),
        ({}, ValueError, "`b` has no values"),
        ({"x": jax.ShapeDtypeStruct((2,), jnp.float32)}, ValueError, "x is abstract"),
        ({"x": "text"}, ValueError, "no array of numbers"),
        ("none.safetensors", FileNotFoundError, "there is no file"),
        ("model.pt", ValueError, "may be a pickle"),
    ],
)
def test_what_cannot_be_compared_is_refused(given, error, message):
    with pytest.raises(error, match=f"compare: .*{message}"):
        compare({"x": ONES}, given)


def test_traced_and_deleted_values_are_refused():
    with pytest.raises(tt.CaptureError, match="`a`: x is being traced"):
        jax.jit(lambda x: compare({"x": x}, {"x": ONES}))(ONES)
    gone = jnp.ones(2)
    gone.delete()
    with pytest.raises(tt.CaptureError, match="x was donated or deleted"):
        compare({"x": gone}, {"x": ONES})


def test_a_function_for_a_layout_and_steps_are_not_mixed():
    rules = {"x": tt.tensor("y").transpose()}
    with pytest.raises(tt.CaptureError, match="put the steps into the function"):
        compare({"x": ONES}, {"y": ONES.T}, rename=rules, layout=lambda x: x)


def test_steps_that_do_not_fit_are_told_in_the_line():
    rules = {"x": tt.tensor("y").transpose(0, 2, 1)}
    comparison = compare({"x": ONES}, {"y": ONES}, rename=rules)
    assert "is for 3 axes, and there are 2" in comparison.first.reason
    rules = {"x": tt.tensor("y").part(0, of=2)}
    comparison = compare({"x": ONES}, {"y": ONES}, rename=rules)
    assert "y has (2, 3), and (4, 3) is needed" in comparison.first.reason
    rules = {"x": tt.tensor("{p}").concat("p", over=["u", "v"], sizes=[1, 5])}
    comparison = compare({"x": ONES}, {"u": ONES, "v": ONES}, rename=rules)
    assert "cannot give an axis of 2" in comparison.first.reason
    assert comparison.only_b == ("v",)


def test_the_shape_of_a_single_number_is_told_as_it_is():
    comparison = compare({"x": np.ones(1)}, {"x": np.ones(())})
    assert comparison["x"].shapes == ((1,), ())


def test_layers_of_a_stack_of_stacks_have_their_own_names():
    value = np.arange(24.0).reshape(2, 3, 4)
    a = Record((Site(value, path=("h",), name="__call__", wraps=("scan", "scan")),))
    names = [f"g.{i}.h.{j}" for i in range(2) for j in range(3)]
    b = dict(zip(names, value.reshape(6, 4)))
    rules = {"h": tt.tensor("g.{i}.h.{j}").stack("j").stack("i")}
    comparison = compare(a, b, rename=rules)
    assert comparison
    assert [each.other for each in comparison] == names
