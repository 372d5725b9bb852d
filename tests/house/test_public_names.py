# SPDX-License-Identifier: Apache-2.0
"""The public surface: sorted, complete, documented, typed."""

import inspect
import subprocess
import sys
import types

import pytest

import treetap
from treetap import nnx

PUBLIC_MODULES = ("compat", "edits", "initializers", "metrics", "nnx", "traversals")


def own_names(module: types.ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (not inspect.ismodule(value) or name in PUBLIC_MODULES)
    ]


def by_kind(name: str) -> tuple[bool, bool, str]:
    """Constants, then classes, then functions, each in order."""
    return not name.isupper(), not name[0].isupper(), name


def test_all_is_sorted_and_complete():
    for name in treetap.__all__:  # some are imported when they are asked for
        getattr(treetap, name)
    assert treetap.__all__ == sorted(own_names(treetap), key=by_kind)


def test_all_of_nnx_is_sorted_and_complete():
    for name in nnx.__all__:
        getattr(nnx, name)
    assert nnx.__all__ == sorted(own_names(nnx), key=by_kind)


def public_objects():
    for module in (treetap, nnx):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                yield f"{module.__name__}.{name}", value


def test_public_names_are_documented():
    problems = [
        name for name, value in public_objects() if not (value.__doc__ or "").strip()
    ]
    assert problems == []


def test_public_functions_are_typed():
    problems = []
    for name, value in public_objects():
        if inspect.isclass(value):
            continue
        signature = inspect.signature(value)
        problems += [
            f"{name}: {parameter.name}"
            for parameter in signature.parameters.values()
            if parameter.annotation is parameter.empty
        ]
        if signature.return_annotation is signature.empty:
            problems.append(f"{name}: what it returns")
    assert problems == []


def test_public_methods_are_documented():
    for name in treetap.__all__:
        value = getattr(treetap, name)
        if not inspect.isclass(value) or issubclass(value, Exception):
            continue
        for method, held in vars(value).items():
            if not method.startswith("_") and inspect.isfunction(held):
                assert held.__doc__, f"{name}.{method}"


def test_every_name_of_treetap_is_in_nnx_except_its_own_additions():
    additions = """
        AbsMax AliasError AllFinite AttributeStatusError Axis Bars Blame CaptureError
        Comparison CycleError DeadUnits DeadUnitsFound Difference EventWriter Figures
        FilterError Histogram HistogramFound MetadataError Moments MomentsFound
        NonFinite NonFiniteFound Norm PatchGrid PathIn Record Reducer Report Select Site
        Store StoreWriter StoredArray StructureError Summary TopK TopKFound
        TraceContextError TreetapError WeightsError as_flax attribution blame build
        compare edit edits flip_sequences guard is_variable load_record load_weights nnx
        observe patch_grid promote_dtype report restore_checkpoint save_checkpoint
        save_record save_weights set_sow_outside_capture set_structure_policy sites
        structure_policy summary tap tap_scopes tensor watch
    """
    assert set(treetap.__all__) - set(nnx.__all__) == {*additions.split()}


def test_version_is_that_of_the_package():
    from importlib.metadata import version

    assert treetap.__version__ == version("treetap")


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        treetap.nonsense


def test_importing_is_light():
    program = (
        "import sys, jax, jax.numpy; import treetap;"
        "heavy = {'optax', 'treescope', 'rich', 'flax', 'IPython'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_program_that_only_trains_does_not_wait_for_the_rest():
    code = (
        "import sys, treetap;"
        "late = {'treetap.nnx', 'treetap._capture.walk.run',"
        "        'treetap._observe.records', 'treetap._capture.marks'};"
        "assert not late & sys.modules.keys();"
        "assert treetap.jit and not late & sys.modules.keys();"
        "assert treetap.observe and treetap.nnx and treetap.compat"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
