# SPDX-License-Identifier: Apache-2.0
"""Selectors: which sites a glob, a pattern, a class or a function means."""

import re

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from treetap._observe.records import Record, Site


class Mlp(tt.Module):
    def __call__(self, x):
        return tt.tap(x + 1, "hidden") * 2

    def extra(self, x):
        return x


class WideMlp(Mlp):
    pass


class Attention(tt.Module):
    def __init__(self):
        self.out = Mlp()

    def __call__(self, x):
        self.sow(tt.Intermediate, "weights", x)
        return self.out(self.perturb("scores", x))


class Block(tt.Module):
    def __init__(self):
        self.attn = Attention()
        self.mlp = WideMlp()

    def __call__(self, x):
        return self.mlp.extra(self.mlp(self.attn(x)))


class Model(tt.Module):
    def __init__(self):
        self.blocks = tt.List([Block(), Block()])
        self.head = Mlp()

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.head(x))


WHOLE = tt.observe(Model())(jnp.array(1.0))[1]
ALL = [site.text for site in WHOLE]


def chosen(select):
    """What a selector takes; in a run, and afterwards from a whole record."""
    _, record = tt.observe(jax.jit(lambda m, x: m(x)), select)(Model(), 1.0)
    found = [site.text for site in record]
    assert found == [site.text for site in WHOLE.select(select)]
    return found


def having(*parts):
    return [text for text in ALL if all(part in text for part in parts)]


def test_the_model_has_the_sites_these_tests_speak_of():
    assert len(ALL) == 2 * 9 + 5
    assert ALL[:4] == [
        "blocks/0/attn:weights",
        "blocks/0/attn:scores",
        "blocks/0/attn/out:hidden",
        "blocks/0/attn/out:__call__",
    ]


@pytest.mark.parametrize(
    ("glob", "expected"),
    [
        ("head", having("head:")),
        ("head:__call__", ["head:__call__", "head:__call__#1"]),
        ("head#1", ["head:hidden#1", "head:__call__#1"]),
        ("head:__call__#0", ["head:__call__"]),
        ("head:hidden#1", ["head:hidden#1"]),
        ("blocks/0/mlp", having("blocks/0/mlp:")),
        ("blocks/*/mlp:__call__", having("mlp:__call__")),
        ("blocks/*", having("blocks/0:") + having("blocks/1:")),
        ("blocks/0/**", having("blocks/0")),
        ("blocks/*/attn/**", having("attn")),
        ("**/mlp:__call__", having("mlp:__call__")),
        ("**/attn/**:__call__", having("attn", "__call__")),
        ("**/hidden", having("hidden")),
        ("**:hidden", having("hidden")),
        ("blocks/[1]/attn:w*", ["blocks/1/attn:weights"]),
        ("blocks/?/attn:scores", having("scores")),
        ("__call__", ["__call__"]),
        (":__call__", ["__call__"]),
        ("*:__call__", ["head:__call__", "head:__call__#1"]),
        ("**", ALL),
    ],
)
def test_globs(glob, expected):
    assert chosen(glob) == expected


@pytest.mark.parametrize("glob", ["block", "blocks", "mlp", "*/mlp", "Head", "head#2"])
def test_globs_match_whole_paths(glob):
    with pytest.raises(tt.CaptureError, match="matches none of"):
        chosen(glob)


def test_patterns_are_searched_in_path_and_name():
    assert chosen(re.compile(r"blocks/1/.*:hidden$")) == having("blocks/1", "hidden")
    assert chosen(re.compile("att")) == having("attn")


def test_classes_of_modules_match_subclasses_too():
    assert chosen(WideMlp) == having("/mlp:")
    assert chosen(Mlp) == [
        t for t in ALL if "/mlp:" in t or "out:" in t or "head:" in t
    ]
    assert chosen(tt.Module) == ALL


def test_classes_with_one_name_are_told_apart():
    def make(by):
        class Same(tt.Module):
            def __call__(self, x):
                return x * by

        return Same

    one, two = make(1.0), make(2.0)
    _, record = tt.observe(lambda a, b, x: a(x) + b(x), one)(one(), two(), 1.0)
    assert [site.text for site in record] == ["a:__call__"]


def test_kinds_of_variables_match_subclasses_too():
    assert chosen(tt.Perturbation) == having("scores")
    assert having("hidden")[0] not in chosen(tt.Intermediate)
    assert having("scores")[0] in chosen(tt.Intermediate)
    with pytest.raises(tt.CaptureError):
        chosen(tt.Param)


def test_functions_of_a_site():
    assert chosen(lambda site: site.path[:2] == ("blocks", 1)) == having("blocks/1")
    assert chosen(lambda site: site.name == "hidden") == having("hidden")
    assert chosen(lambda site: site.index) == having("#1")


@pytest.mark.parametrize(
    "predicate",
    [
        lambda site: site.how == "sow",
        lambda site: site.text == "blocks/0/attn:weights",
        lambda site: site.shape == () and site.name == "weights",
    ],
    ids=["how", "text", "shape"],
)
def test_a_function_sees_the_same_site_in_a_run_and_in_a_record(predicate):
    assert having("weights")[0] in chosen(predicate)


def test_lists_mean_any_of_their_items():
    assert chosen(["head:hidden", tt.Perturbation]) == [
        t for t in ALL if "head:hidden" in t or "scores" in t
    ]
    assert chosen(("head:hidden",)) == having("head:hidden")


def test_selectors_combine():
    mlp, first = tt.Select("**:__call__"), tt.Select("blocks/0/**")
    assert chosen(mlp & first) == having("blocks/0", "__call__")
    assert chosen(mlp & "blocks/0/**") == having("blocks/0", "__call__")
    assert chosen(tt.Select("head") | tt.Perturbation) == [
        t for t in ALL if "head:" in t or "scores" in t
    ]
    assert chosen(~first) == [t for t in ALL if "blocks/0" not in t]
    assert chosen(tt.Select("**/attn/**") & ~tt.Select(Mlp)) == having("attn:")


def test_negation_binds_to_the_whole_of_what_is_negated():
    either = tt.Select("head") | "blocks/**"
    assert chosen(~either) == ["__call__"]
    assert repr(~either) == "Select(~('head' | 'blocks/**'))"


def test_a_call_index_may_be_given():
    assert chosen(tt.Select("head", call=1)) == having("head:", "#1")
    assert chosen(tt.Select(call=1)) == having("#1")
    assert chosen(tt.Select(Mlp, call=1)) == having("#1")


def test_selectors_print_what_they_are_made_of():
    assert repr(tt.Select("a/*")) == "Select('a/*')"
    assert repr(tt.Select("a", call=2)) == "Select('a', call=2)"
    assert repr(tt.Select("a") & "b") == "Select('a' & 'b')"


def test_a_printed_combination_keeps_its_brackets():
    both = (tt.Select("a") | "b") & "c"
    assert repr(both) != repr(tt.Select("a") | (tt.Select("b") & "c"))


@pytest.mark.parametrize("wrong", [3, None, 1.5, {"a": 1}])
def test_other_things_are_no_selectors(wrong):
    with pytest.raises(tt.CaptureError, match="A selector is a glob"):
        tt.Select(wrong)


@pytest.mark.parametrize("text", ["head#x", "head#-1", "#1.5"])
def test_a_call_index_that_is_no_number_is_refused(text):
    with pytest.raises(tt.CaptureError, match=r"call index .* is not a number"):
        tt.Select(text)


def test_near_misses_are_listed():
    with pytest.raises(tt.CaptureError) as caught:
        chosen("blocks/1/att:weights")
    lines = str(caught.value).split("\n")
    assert lines[0].startswith("observe: Select('blocks/1/att:weights') matches none")
    assert "  blocks/1/attn:weights" in lines
    assert 2 <= len(lines) <= 9


@pytest.mark.parametrize("index", ["²", "x", "9" * 5000, "-1"])
def test_a_call_index_is_a_number(index):
    with pytest.raises(tt.CaptureError, match="is not a number"):
        tt.Select(f"head#{index}")


def test_sites_that_were_meant_are_told_quickly_and_plainly():
    names = [f"\x1b[2J{n}" for n in range(3)] + ["a" * 100_000, "b" * 100_000]
    record = Record(tuple(Site(None, name=name) for name in names))
    with pytest.raises(tt.CaptureError) as caught:
        record.select("c" * 100_000)
    told = str(caught.value).partition("Near it are:")[2]
    assert "\x1b" not in told
    assert len(told) < 2000


def test_names_that_a_selector_can_take_are_known():
    one, two = tt.Select("a:x"), tt.Select("*:y")
    assert tt.Select(one).names == one.names == {"x"}
    assert (one & two).names == frozenset()
    assert (one & tt.Select("b:x")).names == {"x"}
    assert (one | two).names == {"x", "y"}
    assert (~one).names is None
