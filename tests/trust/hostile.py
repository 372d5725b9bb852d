# SPDX-License-Identifier: Apache-2.0
"""Hostile inputs: every reader of files and texts, with damage made for it.

`TARGETS` has them by name. What is read is also used: printed, compared, written again.
Tests run some inputs of each; `fuzz/run.py` runs as many as there is time for.
"""

import collections
import functools
import io
import json
import os
import pathlib
import shutil
import tempfile
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import mutations
import numpy as np
from guards import Finding, Target, unwatched

import treetap as tt
from treetap._cli.command import several
from treetap._cli.failures import Failure
from treetap._cli.inputs import drawn, spec_of
from treetap._cli.inputs import read as read_inputs
from treetap._cli.main import by_site, numbers_by_site, renames
from treetap._cli.targets import case_of
from treetap._core.trees.filters import predicate_of
from treetap._io.record_file import ABOUT, ORDER
from treetap._observe.records import Record, Site

Pair = collections.namedtuple("Pair", "first second")


@functools.cache
def _files_of(make):
    """What a function writes into a folder, by path; made once."""
    with unwatched(), tempfile.TemporaryDirectory() as folder:
        make(pathlib.Path(folder))
        places = sorted(pathlib.Path(folder).rglob("*"))
        return {
            str(place.relative_to(folder)): place.read_bytes()
            for place in places
            if place.is_file()
        }


def _put(folder, files):
    """Exactly these files in a folder."""
    folder = pathlib.Path(folder)
    with unwatched():
        shutil.rmtree(folder, ignore_errors=True)
        for name, data in files.items():
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
    return folder


# Weights.


def _model():
    return {
        "w": tt.Param(jnp.ones((2, 3))),
        "layers": [tt.Param(jnp.zeros(4, jnp.bfloat16)), tt.Param(jnp.arange(2))],
        "n": 3,
    }


def _weights(folder):
    tt.save_weights(folder / "a.safetensors", _model(), metadata={"who": "me"})


def _weights_seeds():
    more = {
        "a": ("F8_E8M0", [2], b"ab"),
        "": ("C64", [0], b""),
        "w": ("U64", [], b"8" * 8),
    }
    return [*_files_of(_weights).values(), mutations.tensors_file(more)]


def _read_weights(data, folder):
    place = _put(folder, {"a.safetensors": data}) / "a.safetensors"
    _load(place)


def _load(place):
    model = _model()
    before = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(model)]
    try:
        tt.load_weights(place, model, cast=True, strict=False)
        tt.load_weights(place, model, rules={"{a...}": "{a}"}, ignore=["x*"])
    except ValueError:
        now = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(model)]
        types = [np.shape(leaf) for leaf in jax.tree.leaves(model)]
        if types != [np.shape(leaf) for leaf in jax.tree.leaves(_model())]:
            raise Finding("a value of another shape was loaded") from None
        if now != before and not _is_fit(place):
            raise Finding("the model is half changed") from None
        raise


def _is_fit(place):
    """Whether the first, lenient call succeeds, which may change a model."""
    try:
        tt.load_weights(place, _model(), cast=True, strict=False)
    except ValueError:
        return False
    return True


def _shards(folder):
    for name, model in (("a", {"w": jnp.ones((2, 3))}), ("b", {"n": jnp.int32(3)})):
        tt.save_weights(folder / f"{name}.safetensors", model)
    places = {"w": "a.safetensors", "n": "b.safetensors"}
    index = {"metadata": {"total_size": 28}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


INDEX = "model.safetensors.index.json"


def _read_index(data, folder):
    place = _put(folder, {**_files_of(_shards), INDEX: data})
    for path in (place, place / INDEX):
        model = {"w": tt.Param(jnp.zeros((2, 3))), "n": tt.Param(jnp.int32(0))}
        tt.load_weights(path, model)


# Records.


def _record(number=0):
    rows = 1 + number % 2
    wide = jnp.full((rows, 3), number, jnp.float32)
    tree = {"a": [jnp.arange(rows)], "b": Pair(np.ones((rows, 2), bool), None)}
    scalars = {
        "key": jax.random.key(number),
        "number": 2.5,
        "small": jnp.ones((rows, 2), jnp.int4),
    }
    return Record(
        (
            Site(wide, path=("blocks", 0), how="output", grad=wide, name="__call__"),
            Site(tree, path=("blocks", (1, "x"), None), name="tree", module="m.Net"),
            Site(jnp.ones((4, rows)), name="s", wraps=("scan",), count=np.int32(2)),
            Site(scalars, name="scalars", index=1, kind=tt.Param),
        )
    )


def _save_record(folder):
    tt.save_record(folder / "a.safetensors", _record(), metadata={"who": "me"})


def _record_seeds():
    node = {"named": "A", "fields": [["a", {"leaf": 0}], ["b", {"leaf": 0}]]}
    site = {"path": [1], "name": "x", "index": 0, "how": "tap", "module": ""}
    site |= {"wraps": ["scan"], "value": node, "taken": {"leaf": 0, "python": "int"}}
    about = {"version": 1, "sites": [site], "leaves": [{"tensor": "x"}]}
    tensors = {"x": ("F32", [], b"\0\0\xc0\x7f")}
    small = mutations.tensors_file(tensors, {ABOUT: json.dumps(about)})
    return [*_files_of(_save_record).values(), small]


def _read_record(data, folder):
    place = _put(folder, {"a.safetensors": data}) / "a.safetensors"
    record = tt.load_record(place)
    try:
        jax.tree.leaves(record)
    except ValueError:  # a dict with keys of several types, which JAX does not take
        return
    repr(record)
    for site in record:
        repr(site), site.text, site.shape, site.dtype
    again = place.with_name("again.safetensors")
    tt.save_record(again, record)
    assert len(tt.load_record(again)) == len(record)


# Stores.


def _batch(number):
    """A smaller Record: each array is a folder of files."""
    first, tree, *_ = _record(number)
    loss = Site({"key": jax.random.key(number), "n": 2.5}, name="loss")
    return Record((replace(first, grad=None), tree, loss))


def _store(folder, compression=0):
    with tt.StoreWriter(folder, compression=compression) as writer:
        for number in range(2):
            writer.append(_batch(number), {"number": number})


def _tight_store(folder):
    _store(folder, compression=3)


class _StoreFile(NamedTuple):
    """One file of a store, of which all others are as they were."""

    make: object
    end: str  # of the file's name

    @property
    def name(self):
        return next(name for name in _files_of(self.make) if name.endswith(self.end))

    def seeds(self):
        return [_files_of(self.make)[self.name]]

    def read(self, data, folder):
        files = {**_files_of(self.make), self.name: data}
        # in a folder of the folder: a writer also sees to the one above its own
        place = _put(folder, {f"runs/{n}": d for n, d in files.items()}) / "runs"
        store = tt.Store(place)
        repr(store)
        for text in store.names:
            array = store[text]
            repr(array), array.nbytes
            array[0:1], array[:2], np.asarray(array)
            if 0 < len(array) < 1000:
                for _ in store.shuffled(text, 2):
                    pass
        for number in range(min(len(store), 4)):
            repr(store.batch(number))
        with tt.StoreWriter(place) as writer:
            writer.append(_batch(0))
        assert len(tt.Store(place)) == len(store) + 1


def _store_target(make, end, mutate):
    file = _StoreFile(make, end)
    allowed = (*DOCUMENTED, tt.StructureError, MemoryError)
    return Target(file.seeds, mutate, file.read, allowed, is_bound=False)


# Inputs of the command line.


def _npz_seeds():
    seeds = []
    for save in (np.savez, np.savez_compressed):
        made = io.BytesIO()
        save(made, arg0=np.ones((2, 3), np.float32), mask=np.ones(2, bool))
        seeds.append(made.getvalue())
    return seeds


def _read_npz(data, folder):
    _arguments(_put(folder, {"a.npz": data}) / "a.npz")


def _arguments(place):
    inputs = read_inputs(str(place))
    for value in (*inputs.args, *inputs.kwargs.values()):
        assert isinstance(value, jax.Array)


def _read_tensor_inputs(data, folder):
    _arguments(_put(folder, {"a.safetensors": data}) / "a.safetensors")


# Comparing.


def _dump(folder):
    from safetensors.numpy import save_file

    arrays = {"blocks.0": np.ones((1, 3)), "s": np.ones((4, 1)), "h.0@grad": np.ones(3)}
    save_file(arrays, folder / "a.safetensors", {ORDER: json.dumps([*arrays])})


def _dump_seeds():
    return [*_files_of(_dump).values(), *_record_seeds()]


@functools.cache
def _run():
    return _record()


def _read_dump(data, folder):
    place = _put(folder, {"a.safetensors": data}) / "a.safetensors"
    found = tt.compare(place, place, ignore="**")
    str(found), repr(found), json.dumps(found.to_dict())
    for rename in (
        None,
        {"blocks/{i}": "blocks.{i}"},
        {"s": tt.tensor("s").transpose()},
    ):
        found = tt.compare(_run(), place, rename=rename, select=["blocks/**", "s"])
        str(found), json.dumps(found.to_dict())
    stacked = {"{a}": tt.tensor("{a}.{n}", "{n}.{a}").stack("n").optional()}
    tt.compare(place, _run(), rename=stacked, layout={"s": "a b->b a"})


# Texts: rules, layouts, selectors, shapes.


def _rule_seeds():
    steps = [["transpose", 1, 0], ["rearrange", "d (h k) -> d h k", {"k": 2}]]
    more = [["part", 0, 3, 1], ["stack", None, None, 0], ["concat", "n", ["a"], 0]]
    rules = [["{a...}/w", ["{a}.w", "{a}.v"], steps], ["**", ["x{n}"], more]]
    plain = [["w", ["w"], [["transpose", 1, 0]]], ["*/{i}", ["layers.{i}"], []]]
    layouts = ["NCHW->NHWC", "b (h w) c -> b h w c", "a b->b a"]
    seeds = [{"rules": r, "layouts": layouts} for r in (rules, plain)]
    return [json.dumps(seed).encode() for seed in seeds]


def _whole(value):
    return value if type(value) is int else 0


def _text(value):
    return value if isinstance(value, str) else str(value)[:50]


def _listed(value):
    return value if isinstance(value, list) else []


def _stepped(tensor, step):
    name, *more = [*_listed(step), None, None, None, None][:4]
    if name == "transpose":
        return tensor.transpose(*map(_whole, _listed(step)[1:]))
    if name == "rearrange":
        sizes = more[1] if isinstance(more[1], dict) else {}
        return tensor.rearrange(
            _text(more[0]), **{str(k): _whole(v) for k, v in sizes.items()}
        )
    if name == "part":
        of = [*map(_whole, more[1])] if isinstance(more[1], list) else _whole(more[1])
        return tensor.part(_whole(more[0]), of=of, axis=_whole(more[2]))
    over = None if more[1] is None else [*map(_text, _listed(more[1]))]
    field = None if more[0] is None else _text(more[0])
    if name == "stack":
        return tensor.stack(field, over=over, axis=_whole(more[2]))
    if name == "concat":
        return tensor.concat(_text(more[0]), over=over or [], axis=_whole(more[2]))
    return tensor.optional()


def _read_rules(data, folder):
    given = _json(data)
    rules = {}
    for rule in _listed(given.get("rules"))[:20]:
        pattern, names, steps = [*_listed(rule), "w", [], []][:3]
        texts = [*map(_text, _listed(names))] or [_text(names)]
        tensor = tt.tensor(*texts)
        for step in _listed(steps)[:6]:
            tensor = _stepped(tensor, step)
        repr(tensor)
        rules[_text(pattern)] = tensor
    place = _put(folder, _files_of(_weights))
    model = _model()
    tt.load_weights(place, model, rules=rules, strict=False)
    tt.save_weights(place / "b.safetensors", model, rules=rules)
    layouts = [*map(_text, _listed(given.get("layouts")))]
    arrays = {"w": np.ones((2, 3)), "layers/0": np.ones(4), "x0": np.ones((1, 2, 3, 4))}
    tt.compare(arrays, arrays, rename=rules, ignore="**")
    for layout in layouts[:5]:
        if "->" not in layout:  # what is none at all is a TypeError
            continue
        str(tt.compare(arrays, arrays, layout={"**": layout}))


def _json(data):
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return given if isinstance(given, dict) else {}


def _text_seeds():
    selectors = ["blocks/*/attn/**", "**:s#1", "s", "blocks/0", "[a-c]*:?", "**/**/x"]
    shapes = ["float32[8,128]", "int32[8,128]<50", "mask=bool[8]", "bf16[]", "u8[2,]"]
    pairs = ["blocks=1e-3", "**=2", "0.5", "nan"]
    targets = ["zz_none.py:f", "zz_none.a.b:f.g", "./x.py:f", "zz:f"]
    seed = {"selectors": selectors, "shapes": shapes, "pairs": pairs}
    return [json.dumps({**seed, "targets": targets}).encode()]


def _read_texts(data, folder):
    given = _json(data)
    refused = []

    def attempt(kind, fn, *allowed):
        for text in map(_text, _listed(given.get(kind))[:20]):
            try:
                fn(text)
            except allowed as error:
                if kind != "targets":  # which are shown as they were written
                    refused.append(error)

    attempt("selectors", _select, tt.CaptureError)
    attempt("shapes", spec_of, Failure)
    attempt("shapes", lambda text: drawn([text], 0, abstract=True), Failure)
    option = several("--option", "TEXT", "")
    for read in (renames, by_site, numbers_by_site):
        attempt("pairs", lambda text, read=read: read(None, option, [text]), Failure)
    # what does not begin so might be a module, which would be run; and no argument of
    # a command has a lone surrogate that stands for no byte
    attempt("targets", _target, Failure, OSError)
    if refused:
        raise Failure(str(refused[0]))


def _target(text):
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return
    case_of(f"zz_{text}")


def _select(text):
    chosen = tt.Select(text)
    both = chosen & ~tt.Select([text] and "s") | text
    repr(both)
    for site in _run():
        chosen(site), both(site)
    predicate_of(text)(("a", 1), 3)
    _run().select(text)


DOCUMENTED = (tt.WeightsError,)
TARGETS = {
    "weights": Target(_weights_seeds, mutations.safetensors, _read_weights, DOCUMENTED),
    "index": Target(
        lambda: [_files_of(_shards)[INDEX]],
        mutations.json_text,
        _read_index,
        (*DOCUMENTED, FileNotFoundError),
    ),
    "record": Target(_record_seeds, mutations.safetensors, _read_record, DOCUMENTED),
    "journal": _store_target(_store, ".jsonl", mutations.journal),
    "arrays": _store_target(_store, "zarr.json", mutations.json_text),
    "chunks": _store_target(_store, "c/0/0", mutations.chunk),
    "packed": _store_target(_tight_store, "c/0/0", mutations.chunk),
    "npz": Target(_npz_seeds, mutations.npz, _read_npz, (Failure,)),
    "inputs": Target(
        _weights_seeds,
        mutations.safetensors,
        _read_tensor_inputs,
        (Failure, *DOCUMENTED),
    ),
    "compare": Target(
        _dump_seeds, mutations.safetensors, _read_dump, (*DOCUMENTED, tt.CaptureError)
    ),
    "rules": Target(
        _rule_seeds, mutations.json_text, _read_rules, (*DOCUMENTED, tt.CaptureError)
    ),
    "texts": Target(
        _text_seeds, mutations.json_text, _read_texts, (tt.CaptureError, Failure)
    ),
}
