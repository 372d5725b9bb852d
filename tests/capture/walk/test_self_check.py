# SPDX-License-Identifier: Apache-2.0
"""The self-check on newer versions of JAX: it passes here, and sees what is broken."""

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from treetap._capture.marks import tap_p
from treetap._capture.walk import batched_branches, self_check

NEWER = (99, 1, 2)


@pytest.fixture(autouse=True)
def checkpoint_as_it_is():
    """What is checked of `jax.checkpoint` is that of the setting JAX has by default."""
    name = "jax_remat3"
    before = getattr(jax.config, name, None)
    if before is not None:
        jax.config.update(name, False)
    yield
    if before is not None:
        jax.config.update(name, before)


@pytest.fixture
def newer(monkeypatch):
    self_check.check_newer_jax.cache_clear()
    monkeypatch.setattr(jax, "__version_info__", NEWER)
    yield monkeypatch
    self_check.check_newer_jax.cache_clear()


def tapped(x):
    return tt.tap(2 * x, "h")


def test_all_holds_on_this_version():
    tt.observe(tapped)(1.0)  # from then on JAX's rules are those of captures
    assert self_check.failures() == []


def test_it_runs_at_the_first_capture_on_a_newer_version_and_once(newer):
    times = []
    checks = (lambda: times.append(1) is None,)
    newer.setattr(self_check, "CHECKS", checks)
    for _ in range(3):
        assert tt.observe(jax.jit(tapped))(jnp.ones(2))[1]["h"].shape == (2,)
    assert len(times) == 1


def test_nothing_is_checked_on_versions_that_were_tested(monkeypatch):
    self_check.check_newer_jax.cache_clear()
    monkeypatch.setattr(self_check, "failures", lambda: ["never asked"])
    self_check.check_newer_jax(self_check.NEWEST_TESTED)
    self_check.check_newer_jax((*self_check.NEWEST_TESTED, 1))


def nothing_in_name_stacks(monkeypatch):
    monkeypatch.setattr(self_check, "scopes_in", lambda stack: ())


def no_mappings(monkeypatch):
    monkeypatch.setattr(self_check, "mappings_in", lambda stack: 0)


def all_forward(monkeypatch):
    monkeypatch.setattr(self_check, "is_transposed", lambda eqn: False)


def taps_leave_loops(monkeypatch):
    rules = batched_branches.pe.custom_partial_eval_rules
    monkeypatch.delitem(rules, tap_p)


def taps_without_effects(monkeypatch):
    def types(*avals, **params):
        return [*avals, jax.typeof(jnp.zeros((), jnp.uint32))], set()

    monkeypatch.setattr(tap_p, "abstract_eval", types)


def kept_instead_of_computed_again(monkeypatch):
    rules = batched_branches.pe.partial_eval_jaxpr_custom_rules
    monkeypatch.delitem(rules, tap_p)


def no_program_runs(monkeypatch):
    def fail(*args):
        raise RuntimeError("gone")

    monkeypatch.setattr(self_check, "bind_tap", fail)


BROKEN = {
    nothing_in_name_stacks: "Scopes are in name stacks",
    no_mappings: "Scopes are in name stacks",
    all_forward: "Operations of the way back",
    taps_leave_loops: "is not taken out of the loop",
    taps_without_effects: "is in the program, and once",
    kept_instead_of_computed_again: "has `again_p` in its place",
    no_program_runs: "RuntimeError: gone",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda fn: fn.__name__)
def test_what_no_longer_holds_is_an_error_that_names_the_versions(broken, newer):
    with newer.context() as patch:
        broken(patch)
        jax.clear_caches()
        with pytest.raises(tt.CaptureError, match=r"JAX 99\.1\.2") as error:
            tt.observe(jax.jit(tapped))(jnp.ones(2))
    jax.clear_caches()
    tested = ".".join(map(str, self_check.NEWEST_TESTED))
    assert f"up to JAX {tested}" in str(error.value)
    assert BROKEN[broken] in str(error.value)
