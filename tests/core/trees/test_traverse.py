# SPDX-License-Identifier: Apache-2.0
"""iter_graph, recursive_map, find_duplicates and copies."""

import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import treetap as tt


class Node(tt.Module):
    def __init__(self, **attributes):
        for name, value in attributes.items():
            setattr(self, name, value)


def test_iter_graph_is_post_order_with_the_root_last():
    inner = Node(w=tt.Param(1.0), n=3)
    root = Node(b=inner, a=tt.data([jnp.zeros(2), None]))
    paths = [path for path, _ in tt.iter_graph(root)]
    assert paths == [("a", 0), ("a", 1), ("a",), ("b", "w"), ("b",), ()]


def test_iter_graph_shows_statics_in_graph_mode():
    pairs = dict(tt.iter_graph(Node(n=3, w=tt.Param(1.0)), graph=True))
    assert pairs[("n",)] == 3
    assert ("n",) not in dict(tt.iter_graph(Node(n=3)))


def test_iter_graph_visits_shared_objects_once_in_graph_mode():
    shared = tt.Param(1.0)
    root = Node(a=shared, b=shared, c=Node(d=shared))
    root.c.root = root
    found = [v for _, v in tt.iter_graph(root, graph=True) if v is shared]
    assert len(found) == 1
    with pytest.raises(tt.AliasError, match="Duplicate Param found at paths a and b"):
        tt.iter_graph(root)


def test_refs_have_an_identity():
    ref = jax.new_ref(jnp.zeros(2))
    root = Node(a=ref, b=ref)
    with pytest.raises(tt.AliasError, match="found at paths a and b"):
        tt.split(root)
    with pytest.raises(tt.AliasError, match="found at paths a and b"):
        tt.iter_graph(root)
    with pytest.raises(tt.AliasError, match="found at paths a and b"):
        tt.clone(root)
    again = tt.merge(*tt.split(root, graph=True))
    assert again.a is again.b
    copied = tt.clone(root, graph=True, arrays=True)
    assert copied.a is copied.b
    assert copied.a is not ref
    assert len(list(tt.iter_graph(root, graph=True))) == 2


@pytest.mark.parametrize(
    "function",
    [
        tt.iter_graph,
        tt.iter_modules,
        tt.split,
        tt.state,
        tt.clone,
        tt.view,
        tt.graphdef,
        tt.flatten,
        tt.unpack,
        lambda node: tt.map(lambda path, leaf: leaf, node),
        lambda node: tt.recursive_map(lambda path, value: value, node),
    ],
)
def test_cycles_are_refused_in_tree_mode(function):
    direct = Node()
    direct.me = direct
    with pytest.raises(tt.CycleError, match=r"Cycle detected.* \(root\) and me"):
        function(direct)
    indirect = Node(a=Node(b=tt.data([1])))
    indirect.a.b.append(indirect.a)
    with pytest.raises(tt.CycleError, match="found at paths a and a/b/1"):
        function(indirect)


def test_recursive_map_replaces_from_the_leaves_up():
    root = Node(a=tt.Param(1.0), b=Node(c=jnp.zeros(2)))
    seen = []

    def replace(path, value):
        seen.append(path)
        if isinstance(value, tt.Param):
            return tt.BatchStat(value[...])
        return value

    made = tt.recursive_map(replace, root)
    assert seen == [("a",), ("b", "c"), ("b",), ()]
    assert isinstance(made.a, tt.BatchStat)
    assert isinstance(root.a, tt.Param)
    assert made.b.c is root.b.c


def test_recursive_map_keeps_results_shared_in_graph_mode():
    inner = Node(w=tt.Param(1.0))
    root = Node(a=inner, b=inner, n=1)
    calls = []

    def count(path, value):
        calls.append(path)
        return value + 1 if path == ("n",) else value

    made = tt.recursive_map(count, root, graph=True)
    assert made.a is made.b
    assert made.n == 2
    assert calls.count(("a",)) + calls.count(("b",)) == 1
    root.b = root
    with pytest.raises(tt.CycleError, match="recursive_map"):
        tt.recursive_map(count, root, graph=True)


def test_recursive_map_rebuilds_tuples_and_dicts():
    root = {"t": (tt.Param(1.0), 2), "d": {"b": 1, "a": 2}}
    made = tt.recursive_map(lambda path, v: v + 1 if isinstance(v, int) else v, root)
    assert made["t"][1] == 3
    assert list(made["d"].items()) == [("b", 2), ("a", 3)]


def test_find_duplicates_takes_a_filter():
    array = jnp.zeros(2)
    shared = Node(w=tt.Param(1.0), x=array)
    root = Node(a=shared, b=tt.data([shared]), c=array)
    found = tt.find_duplicates(root)
    assert found == [[("a",), ("b", 0)], [("a", "x"), ("c",)]]
    assert tt.find_duplicates(root, only=tt.Module) == [[("a",), ("b", 0)]]
    assert tt.find_duplicates(tt.clone(root, graph=True), only=tt.Param) == []


def test_clone_copies_arrays_when_asked():
    root = Node(
        w=tt.Param(jnp.zeros(2)), x=jnp.ones(2), d=tt.Variable({"k": jnp.ones(1)})
    )
    shared = tt.clone(root)
    assert shared.w is not root.w
    assert shared.w[...] is root.w[...]
    assert shared.x is root.x
    own = tt.clone(root, arrays=True)
    assert own.w[...] is not root.w[...]
    assert own.x is not root.x
    assert own.d["k"] is not root.d["k"]
    with pytest.raises(tt.StructureError, match="clone: `arrays=True` copies"):
        tt.clone(root, variables=False, arrays=True)


def test_clone_keeps_ref_variables_apart():
    root = Node(w=tt.Param(jnp.zeros(2), ref=True))
    copied = tt.clone(root)
    copied.w[...] = 1.0
    assert root.w[0] == 0.0


def test_as_pure_strips_variables_and_refs_everywhere():
    root = Node(w=tt.Param(jnp.zeros(2), ref=True), d=tt.Variable({"k": tt.Param(1.0)}))
    made = tt.as_pure({"m": root, "r": jax.new_ref(jnp.ones(2))})
    assert isinstance(made["m"].w, jax.Array)
    assert made["m"].d == {"k": 1.0}
    assert isinstance(made["r"], jax.Array)


def test_containers_of_other_libraries_are_walked():
    import collections

    Point = collections.namedtuple("Point", "x y")
    root = {"p": Point(tt.Param(1.0), 2), "o": collections.OrderedDict(a=tt.Param(3.0))}
    paths = [path for path, _ in tt.to_flat_state(tt.state(root))]
    assert paths == [("o", "a"), ("p", "x"), ("p", "y")]
    again = tt.merge(*tt.split(root))
    assert isinstance(again["p"], Point)
    assert isinstance(again["o"], collections.OrderedDict)


def test_mixed_keys_at_one_level_are_sorted():
    state = tt.state({"a": tt.Param(1.0), 3: tt.Param(2.0)})
    assert tt.to_flat_state(state).paths == ((3,), ("a",))


@pytest.mark.parametrize(
    "function", [tt.iter_graph, lambda node: tt.recursive_map(lambda _, x: x, node)]
)
def test_a_shared_object_of_plain_arrays_is_refused_in_tree_mode(function):
    inner = Node(x=jnp.zeros(2))
    with pytest.raises(tt.AliasError, match="Duplicate Node found at paths a and b"):
        function(Node(a=inner, b=inner))
    empty = Node()
    function(Node(a=empty, b=empty))  # nothing in it could go two ways


class Opaque(tt.Module, pytree=False):
    def __init__(self):
        self.w = tt.Param(1.0)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (tt.iter_graph, "iter_graph"),
        (lambda node: tt.recursive_map(lambda _, x: x, node), "recursive_map"),
        (tt.iter_modules, "iter_modules"),
        (tt.view, "view"),
    ],
)
def test_objects_that_are_no_pytrees_are_refused_in_tree_mode(function, name):
    root = Node(a=tt.data([Opaque()]))
    message = f"{name}: Opaque is declared with pytree=False.* at path a/0"
    with pytest.raises(tt.StructureError, match=message):
        function(root)
    assert next(path for path, _ in tt.iter_graph(root, graph=True)) == ("a", 0, "w")


def test_errors_about_sharing_say_who_met_what_and_where():
    shared = tt.Param(1.0)
    with pytest.raises(tt.AliasError) as caught:
        tt.split({"a": [shared], "b": shared})
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.name, error.kind, error.paths) == ("split", "Param", ("a/0", "b"))
        assert str(error).startswith("split: Duplicate Param found at paths a/0 and b:")


def test_the_second_place_may_lie_in_an_object_that_is_met_again():
    class Holder(tt.Module):
        def __init__(self, part):
            self.part = tt.data(part)

    inner = Holder([tt.Param(1.0)])
    with pytest.raises(tt.AliasError, match="at paths a/part/0 and b/part/0"):
        tt.split({"a": inner, "b": inner})


class Free(tt.Module):
    """A Module whose attributes the tests give it."""

    def __init__(self, **attributes):
        for name, value in attributes.items():
            setattr(self, name, value)


WALKS = {
    "iter_graph": lambda node: list(tt.iter_graph(node, graph=False)),
    "iter_modules": lambda node: list(tt.iter_modules(node, graph=False)),
    "split": lambda node: tt.split(node, graph=False),
    "clone": lambda node: tt.clone(node, graph=False),
    "view": lambda node: tt.view(node, graph=False),
    "recursive_map": lambda node: tt.recursive_map(lambda p, v: v, node, graph=False),
}


@pytest.mark.parametrize("walk", WALKS)
def test_an_object_in_itself_is_a_cycle_error(walk):
    node = Free()
    node.me = node
    outer = {"part": node}
    message = f"{walk}: Cycle detected: the Free found at paths part and part/me.*graph"
    for _ in range(3):  # and nothing is the worse for it
        with pytest.raises(tt.CycleError, match=message):
            WALKS[walk](outer)
    assert jax.tree.map(lambda x: x + 1, {"a": [1]}) == {"a": [2]}
    assert len(list(tt.iter_graph(node, graph=True))) == 1


def test_an_object_in_itself_may_be_put_into_a_list():
    program = (
        "import jax, treetap as tt\n"
        "class Node(tt.Module): pass\n"
        "node = Node()\n"
        "node.me = node\n"
        "node.parts = tt.data([node])\n"
        "assert tt.clone(node, graph=True).parts[0].me is not node\n"
        "jax.numpy.ones(2, int)\n"
    )  # in a process of its own: a failure leaves JAX unusable
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]
