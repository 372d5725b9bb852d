# Every target makes the environment it needs when it is missing. `.venv` grows as it is
# asked for: treetap as users have it, then what its tests need, then the linters.
PYTHON ?= python3
# A newer Python for `test-newest`: on the PATH, or where pyenv keeps them.
NEWEST ?= $(firstword $(foreach v,3.12 3.13,$(shell \
	for p in python$(v) $$HOME/.pyenv/versions/$(v).*/bin/python; do \
	$$p -c "" 2>/dev/null && echo $$p && break; done)))
BIN := .venv/bin
READY := .venv/.ready
TEST_READY := .venv/.ready-test
LINT_READY := .venv/.ready-lint
DOCS_READY := .venv/.ready-docs
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
NEWEST_READY := .venv-newest/.ready
PEERS_READY := .venv-peers/.ready
# Two workers suit a laptop and a small CI machine alike.
WORKERS ?= 2

.PHONY: demo test test-all test-leaks test-newest coverage newest-python lint format bench docs clean

demo: $(READY)
	$(BIN)/treetap inspect

test: $(TEST_READY)
	$(BIN)/python -m pytest -n $(WORKERS) -m "not long"

test-all: $(TEST_READY)
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -n $(WORKERS)

# JAX's own check for tracers that outlive their trace, in every test.
test-leaks: $(TEST_READY)
	JAX_CHECK_TRACER_LEAKS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "not long and not keeps_traces"

# Once more with the settings that JAX will have by default, where it has them.
test-newest: CAPTURES = tests/capture tests/observe/test_axes.py
test-newest: $(NEWEST_READY)
	.venv-newest/bin/python -m pytest -n $(WORKERS) -m "not long"
	JAX_REMAT3=1 JAX_CUSTOM_JVP3=1 .venv-newest/bin/python -m pytest -n $(WORKERS) -m "not long" $(CAPTURES)

# Python 3.12 tells of lines at little cost.
coverage: $(NEWEST_READY)
	.venv-newest/bin/python -m pip install --quiet --group coverage
	rm -rf .coverage-data && mkdir .coverage-data
	COVERAGE_CORE=sysmon .venv-newest/bin/python -m pytest -n $(WORKERS) -m "not long" --cov --cov-report=
	.venv-newest/bin/python tests/house/check_coverage.py .coverage-data/of

newest-python:
	@echo $(NEWEST)

lint: $(LINT_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

format: $(LINT_READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(PEERS_READY)
	.venv-peers/bin/python benchmarks/targets.py --json benchmarks/results/targets.json --plot benchmarks/results/calls.svg
	.venv-peers/bin/python benchmarks/peers/taps_elsewhere.py
	.venv-peers/bin/python benchmarks/peers/checkpoints.py

docs: $(DOCS_READY)
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf .venv .venv-newest .venv-peers .coverage-data dist site .pytest_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "treetap needs Python 3.11 or later; run: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(INSTALL)
	@touch $@

$(TEST_READY): $(READY)
	$(INSTALL) --group test
	@touch $@

$(LINT_READY): $(TEST_READY)
	$(INSTALL) --group lint
	@touch $@

$(DOCS_READY): $(READY)
	$(INSTALL) --group docs
	@touch $@

$(NEWEST_READY): pyproject.toml
	@test -n "$(NEWEST)" || { echo "no Python 3.12 or later was found; run: make NEWEST=/path/to/python test-newest"; exit 1; }
	$(NEWEST) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.venv-newest/bin/python -m pip install --quiet --upgrade --editable . --group test
	@touch $@

$(PEERS_READY): pyproject.toml constraints.txt benchmarks/peers/requirements.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.venv-peers/bin/python -m pip install --quiet --constraint constraints.txt --editable . --requirement benchmarks/peers/requirements.txt
	@touch $@
