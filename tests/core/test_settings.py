# SPDX-License-Identifier: Apache-2.0
"""Settings: for the process, for a block, for a function, from the environment."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import pytest

import treetap as tt
from treetap import nnx
from treetap._core import settings

SETTINGS = [
    tt.set_graph_mode,
    tt.set_graph_updates,
    tt.use_eager_sharding,
    settings.sow_capture_noop,
]
each_setting = pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.__name__)


def test_the_defaults_of_the_two_namespaces_differ():
    assert tt.set_graph_mode.current_value() is False
    assert tt.set_graph_updates.current_value() is False
    assert nnx.set_graph_mode.current_value() is True
    assert nnx.set_graph_updates.current_value() is True
    assert tt.use_eager_sharding.current_value() is True


@each_setting
def test_a_call_changes_the_process(setting):
    for value in (True, False):
        setting(value)
        assert setting.current_value() is value
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(setting.current_value).result() is value


@each_setting
def test_a_block_changes_only_itself(setting):
    before = setting.current_value()
    with setting(not before):
        assert setting.current_value() is not before
        with setting(before):
            assert setting.current_value() is before
        assert setting.current_value() is not before
    assert setting.current_value() is before


def test_a_block_is_left_by_an_exception_too():
    with pytest.raises(KeyError), tt.set_graph_mode(True):
        raise KeyError
    assert tt.set_graph_mode.current_value() is False


def test_a_block_is_not_seen_by_other_threads():
    with tt.set_graph_mode(True), ThreadPoolExecutor(1) as pool:
        assert pool.submit(tt.set_graph_mode.current_value).result() is False
        assert tt.set_graph_mode.current_value() is True


def test_a_block_wins_over_the_process():
    with tt.set_graph_mode(False):
        tt.set_graph_mode(True)
        assert tt.set_graph_mode.current_value() is False
    assert tt.set_graph_mode.current_value() is True


def test_a_decorator_holds_while_the_function_runs():
    @tt.set_graph_mode(True)
    def inside(x, *, y):
        """Text."""
        return tt.set_graph_mode.current_value(), x, y

    assert tt.set_graph_mode.current_value() is False
    assert inside(1, y=2) == (True, 1, 2)
    assert inside.__doc__ == "Text."
    assert tt.set_graph_mode.current_value() is False


def test_a_decorated_function_may_raise_and_recurse():
    @tt.set_graph_mode(True)
    def inside(n):
        assert tt.set_graph_mode.current_value() is True
        if n == 0:
            raise KeyError
        with tt.set_graph_mode(False):
            inside(n - 1)

    with pytest.raises(KeyError):
        inside(3)
    assert tt.set_graph_mode.current_value() is False


def test_one_setting_object_may_be_entered_again():
    mode = tt.set_graph_mode(True)
    with mode:
        with mode:
            assert tt.set_graph_mode.current_value() is True
        assert tt.set_graph_mode.current_value() is True
    assert tt.set_graph_mode.current_value() is False


def test_a_setting_object_used_again_leaves_the_process_alone():
    mode = tt.set_graph_mode(True)
    with mode:
        pass
    tt.set_graph_mode(True)
    with mode:
        pass
    assert tt.set_graph_mode.current_value() is True
    mode(lambda: None)
    assert tt.set_graph_mode.current_value() is True


def test_a_setting_object_may_be_entered_in_two_threads():
    mode = tt.set_graph_mode(True)
    entered, left = threading.Event(), threading.Event()

    def first():
        try:
            with mode:
                entered.wait(10)
        finally:
            left.set()
        return tt.set_graph_mode.current_value()

    def second():
        with mode:
            entered.set()
            left.wait(10)
            return tt.set_graph_mode.current_value()

    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(first), pool.submit(second)]
        assert [result.result() for result in results] == [False, True]


@each_setting
@pytest.mark.parametrize("value", [None, 1, "true"])
def test_only_booleans_are_accepted(setting, value):
    before = setting.current_value()
    with pytest.raises(
        TypeError, match=f"{setting.__name__}: expected True or False, got {value!r}"
    ):
        setting(value)
    assert setting.current_value() is before


def test_a_setting_of_one_namespace_counts_in_the_other():
    nnx.set_graph_mode(False)
    assert tt.set_graph_mode.current_value() is False
    with tt.set_graph_mode(True):
        assert nnx.set_graph_mode.current_value() is True
    assert nnx.set_graph_mode.current_value() is False


def test_an_argument_wins_over_the_setting():
    with tt.set_graph_mode(True), tt.set_graph_updates(True):
        assert settings.resolve_graph(None) is True
        assert settings.resolve_graph(False) is False
        assert settings.resolve_mode(None, None) is settings.Mode.UPDATES
        assert settings.resolve_mode(None, False) is settings.Mode.GRAPH
        assert settings.resolve_mode(False, None) is settings.Mode.TREE


def test_functions_follow_the_setting():
    shared = tt.Param(1.0)
    with tt.set_graph_mode(True):
        assert tt.graphdef([shared, shared]).num_leaves == 1
    with pytest.raises(tt.AliasError):
        tt.graphdef([shared, shared])
    assert nnx.graphdef([shared, shared]).num_leaves == 1


def test_eager_sharding_can_be_read():
    with tt.use_eager_sharding(False):
        assert tt.using_eager_sharding() is False
    assert tt.using_eager_sharding() is True


@pytest.mark.parametrize(
    ("text", "value"),
    [(word, True) for word in ("y", "Yes", "t", "TRUE", "on", "1")]
    + [(word, False) for word in ("n", "No", "f", "FALSE", "off", "0")],
)
def test_flags_are_read_from_the_environment(monkeypatch, text, value):
    monkeypatch.setenv("A_FLAG", text)
    assert settings.read_flag("A_FLAG") is value


def test_a_flag_that_is_not_set_is_none(monkeypatch):
    monkeypatch.delenv("A_FLAG", raising=False)
    assert settings.read_flag("A_FLAG") is None


@pytest.mark.parametrize("text", ["maybe", "", "2"])
def test_other_words_are_refused(monkeypatch, text):
    monkeypatch.setenv("A_FLAG", text)
    with pytest.raises(ValueError, match=f"variable A_FLAG is {text!r}. Use one of y,"):
        settings.read_flag("A_FLAG")


def in_process(program, **variables):
    """Runs a program in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_environment_presets_both_namespaces():
    program = (
        "import treetap as tt\n"
        "for space in (tt, tt.nnx):\n"
        "    print(space.set_graph_mode.current_value(),"
        " space.set_graph_updates.current_value())\n"
        "with tt.set_graph_mode(False): print(tt.set_graph_mode.current_value())"
    )
    ran = in_process(program, NNX_GRAPH_MODE="yes", NNX_GRAPH_UPDATES="0")
    assert ran.stdout.split("\n")[:3] == ["True False", "True False", "False"]


def test_the_environment_may_silence_sow():
    program = "import treetap as tt; print(tt.Module().sow(tt.Intermediate, 'x', 1.0))"
    ran = in_process(program, NNX_SOW_CAPTURE_NOOP="1")
    assert (ran.stdout, ran.stderr) == ("False\n", "")


def test_a_wrong_environment_fails_at_import():
    ran = in_process("import treetap", NNX_GRAPH_MODE="perhaps")
    assert ran.returncode != 0
    assert "ValueError: The environment variable NNX_GRAPH_MODE is 'perhaps'" in (
        ran.stderr
    )


def test_the_graph_mode_holds_in_all_threads():
    found = []

    def read():
        found.append(tt.set_graph_mode.current_value())

    def in_a_thread():
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()

    tt.set_graph_mode(True)
    in_a_thread()
    with tt.set_graph_mode(False):
        in_a_thread()
    assert found == [True, True]  # a block belongs to the thread that runs it


def shared_product(a, b):
    return a * b


@pytest.mark.parametrize(
    "make",
    [
        lambda: tt.scan(in_axes=0, out_axes=0),
        lambda: tt.jit(),
        lambda: tt.vmap(),
        lambda: tt.remat(),
    ],
    ids=["scan", "jit", "vmap", "remat"],
)
def test_a_decorator_takes_the_mode_where_its_options_are_given(make):
    v = tt.Param(jnp.arange(3.0))
    with tt.set_graph_mode(True):
        decorator = make()
    assert decorator(shared_product)(v, v).tolist() == [0.0, 1.0, 4.0]
    decorator = make()
    with tt.set_graph_mode(True):
        f = decorator(shared_product)
    with pytest.raises(ValueError, match="Duplicate Param"):
        f(v, v)


class Tied(tt.Module):
    def __init__(self):
        self.a = self.b = tt.Param(1.0)

    def add(self, x):
        self.a[...] += x
        return self.b[...]


def seen_in_a_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_a_mode_set_by_a_call_holds_in_every_thread():
    current = tt.set_graph_mode.current_value
    tt.set_graph_mode(True)
    assert seen_in_a_thread(current) is True
    assert len(tt.split(Tied())[1]) == 1
    assert seen_in_a_thread(lambda: len(tt.split(Tied())[1])) == 1


def test_a_mode_set_by_a_call_does_not_mask_a_later_call():
    current = tt.set_graph_mode.current_value
    tt.set_graph_mode(True)
    seen_in_a_thread(lambda: tt.set_graph_mode(False))
    assert current() is False
    assert nnx.set_graph_mode.current_value() is False


def test_a_mode_set_for_a_block_holds_in_its_thread_only():
    current = tt.set_graph_mode.current_value
    with tt.set_graph_mode(True):
        assert current() is True
        assert seen_in_a_thread(current) is False
        tt.set_graph_mode(True)
        with tt.set_graph_mode(False):
            assert current() is False
            assert seen_in_a_thread(current) is True
    assert current() is True


def test_blocks_begun_by_two_threads_at_once_leave_nothing_behind():
    first = tt.set_graph_mode(True)
    second = seen_in_a_thread(lambda: tt.set_graph_mode(True))
    for block in (first, second):  # both made before either is entered
        with block:
            assert tt.set_graph_mode.current_value() is True
    assert tt.set_graph_mode.current_value() is False
