# SPDX-License-Identifier: Apache-2.0
"""Strictness for all tests, and the devices that sharding tests need."""

import gc
import itertools
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import hypothesis
import jax
import pytest

import coming_jax
import leaks
from programs import forget_if_many
from treetap._core import settings

jax.config.update("jax_numpy_rank_promotion", "raise")
if jax.default_backend() != "cpu":  # whose products are rounded to fewer bits
    jax.config.update("jax_default_matmul_precision", "highest")
# The quick sample is the same each time, so that what fails is what was changed.
hypothesis.settings.register_profile(
    "quick", max_examples=30, deadline=None, derandomize=True
)
hypothesis.settings.register_profile("long", max_examples=500, deadline=None)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "quick")
hypothesis.settings.load_profile(PROFILE)
if PROFILE == "quick":  # most programs run once, so compiling them is what takes time
    jax.config.update("jax_disable_most_optimizations", True)

if jax.config.jax_check_tracer_leaks:  # by `make test-leaks`
    pytest_runtest_setup = pytest_runtest_call = leaks.leave_out_those_of_jax
if coming_jax.HAS_NEW_REMAT:  # by `make test-newest`
    pytest_runtest_makereport = coming_jax.leave_out_refusals


def pytest_collection_finish():
    """All that has been imported stays: collecting garbage need not look at it."""
    gc.freeze()


@pytest.fixture(scope="module")
def fully_compiled():
    """For files of tests that compare bits with what a usual run gives."""
    name = "jax_disable_most_optimizations"
    before = jax.config.values[name]
    jax.clear_caches()
    jax.config.update(name, False)
    yield
    jax.clear_caches()
    jax.config.update(name, before)


@pytest.fixture(autouse=True)
def settings_restored():
    """No test leaves a process-wide setting behind."""
    before = [(kind, list(kind._process)) for kind in settings.Setting.__subclasses__()]
    yield
    for kind, held in before:
        kind._process[:] = held


_finished = itertools.count(1)


@pytest.fixture(autouse=True)
def programs_forgotten():
    """No process compiles more than the system lets it have."""
    yield
    if next(_finished) % 50 == 0:  # looking costs some milliseconds
        forget_if_many()
