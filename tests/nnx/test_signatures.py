# SPDX-License-Identifier: Apache-2.0
"""What NNX's callables take, ours take by the same names, at the same places.

`data/nnx_signatures.json` has the signatures of flax 0.12.12; see `signatures`.
"""

import json
import re

import pytest
import signatures

RECORDED = json.loads(signatures.NAMES.with_name("nnx_signatures.json").read_text())

# What differs, as regular expressions, by the reason.
KNOWN = {
    "filters are called by place": r"""
        .*(All|Any|Everything|Not|Nothing|OfType|PathContains|PathIn|WithTag|NotKey
        |is_tree_node)(\.__call__)?:\ no\ x
    """,
    "called by operators": r".*(__getitem__|__setitem__):\ .*",
    "hooks are left out": r"(VariableMetadata|with_metadata):\ .*",
    "programs get these, and do not make them": r"""
        (.*\.)?(GraphDef|GraphState|NodeStates|\w+Context|NodeDef|NodeRef|VariableDef
        |SplitBackups|CustomVjp|Compiled|JitWrapped|Lowered|Traced|FlatState)
        (\.from_states)?:\ .*
    """,
    "index maps are left out": r"""
        (.*\.)?(un)?flatten:\ no\ (index_ref|ref_index|ref_outer_index
        |outer_index_outer_ref|copy_variables)
    """,
    "deprecated methods, called by place": r"""
        State\.(map|replace_by_pure_dict|to_pure_dict):\ .*
    """,
    "`compat` and `checkify` fill in the same": r"""
        (compat\..*|checkify):\ .*\ here\ .*='None'
    """,
    "modes are given by name": r"checkify:\ graph(_updates)?\ not\ at\ place\ .",
    "JAX's own, of another version": r"""
        (one_hot|(RngStream|Rngs)\.\w+|spmd\.PartitionSpec|.*Traced\.lower):
        \ no\ (out_sharding|method|unreduced_kind|lowering_platforms)
    """,
    "the same by another way": r"""
        BatchNorm\.sow:\ init_fn=.*|Dict:\ no\ \*args|set_graph_mode\.__call__:\ no\ f
        |.*Accuracy:\ no\ \*.*|module\.tuple_reduce:\ .*
        |nn\.attention\.dot_product_attention_weights:\ .*
        |graph\.(is_pytree_node|Static|is_array_ref):\ .*
    """,
}


@pytest.fixture(scope="module")
def here():
    return signatures.callables("treetap.nnx")


def test_calls_are_written_as_in_nnx(here):
    found = [
        f"{name}: {difference}"
        for name, text in RECORDED.items()
        if name in here
        for difference in signatures.differences(text, here[name])
    ]
    patterns = [re.compile(pattern, re.VERBOSE) for pattern in KNOWN.values()]
    assert [f for f in found if not any(p.fullmatch(f) for p in patterns)] == []
    for reason, pattern in zip(KNOWN, patterns, strict=True):
        is_used = any(pattern.fullmatch(difference) for difference in found)
        assert is_used or "another version" in reason, reason


def test_most_callables_of_nnx_are_compared(here):
    assert len(RECORDED.keys() & here.keys()) > 600


def twin(a, b=1, *, c=None):
    return a, b, c


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a, b='1', *, c='None'", []),
        ("a, /", []),
        ("a, b='2'", ["b='2', here b='1'"]),
        ("b='1', a='2'", ["b not at place 0", "a not at place 1", "a='2', here a"]),
        ("a, d", ["no d"]),
        ("a, b, c, d, /", ["no argument at place 2", "no argument at place 3"]),
        ("a, *more", ["no *more"]),
        ("a, **options", ["no **options"]),
    ],
)
def test_what_counts_as_a_difference(text, found):
    assert signatures.differences(text, twin) == found


def test_a_keyword_that_must_be_given_is_a_difference():
    assert signatures.differences("a", lambda a, *, c: 0) == ["needs c"]
    assert signatures.differences("a", lambda a, /: 0) == ["a by place only"]
