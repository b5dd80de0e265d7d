# Two commands for a stranger, `make demo` and `make test`; each prepares what it needs, once, in .venv.
SHELL := /bin/bash
PYTHON ?= python3
# Extra words for pip, such as --extra-index-url https://download.pytorch.org/whl/cpu (a smaller torch without CUDA).
PIP_FLAGS ?=
PYTEST_FLAGS ?=
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow check format docs clean

help:  ## say what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */  make \1\t/' | expand -t 20

demo: $(READY)  ## fetch a small model (94 MB) and watch it answer plainly, then speculatively
	$(BIN)/outrider demo

test: $(READY)  ## run the fast tests (minutes on two cores)
	$(BIN)/python -m pytest -q -n logical --dist worksteal $(PYTEST_FLAGS)

test-slow: $(READY)  ## run the slow tests only
	$(BIN)/python -m pytest -q -m slow --timeout 3600 $(PYTEST_FLAGS)

check: $(READY)  ## format, lint, types, layers
	$(BIN)/ruff format --check src tests
	$(BIN)/ruff check src tests
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)  ## put every file into shape
	$(BIN)/ruff format src tests
	$(BIN)/ruff check --fix src tests

docs: $(READY)  ## write docs/cli.md anew from the program's own help
	$(BIN)/python -m outrider.cli.reference > docs/cli.md

# The native kernels are compiled on first use. Where no C++ compiler is installed, a packaged one comes along.
$(READY): pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Outrider needs Python 3.11 or newer: make $(or $(MAKECMDGOALS),demo) PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints-cpu.txt -e ".[dev]"
	@for cxx in "$$CXX" c++ g++ clang++; do command -v "$$cxx" >/dev/null 2>&1 && exit 0; done; \
		$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints-cpu.txt ziglang || \
		echo "no C++ compiler and none could be installed: the slower plain kernels will serve" >&2
	@touch $@

clean:  ## remove everything that was made here (fetched models stay in the cache folder)
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
