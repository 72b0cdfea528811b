PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --constraint constraints.txt

.PHONY: help demo test lint format types cover soak bench gpu docs dist clean

help:                       ## this list
	@sed -n 's/^\([a-z]*\):.*##/\1\t/p' Makefile

$(VENV)/.dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable ".[dev]"
	touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) --editable ".[bench]"
	touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(PIP) --editable ".[docs]"
	touch $@

demo: $(VENV)/.dev          ## train on handwritten digits, plain and wrapped, side by side; writes demo.png
	$(BIN)/python examples/digits.py

# Ordinary tests and benchmarks compare runs on the CPU, also on a machine with an accelerator; `make gpu` is for that one.
test cover soak bench: export CUDA_VISIBLE_DEVICES :=

test: lint types            ## lint, types and every test
	$(BIN)/python -m pytest

lint: $(VENV)/.dev          ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev        ## mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.dev         ## mypy, strict, on src
	$(BIN)/mypy

cover: $(VENV)/.dev         ## the tests with branch coverage
	$(BIN)/python -m pytest --cov --cov-report=term-missing:skip-covered

soak: $(VENV)/.dev          ## the long load tests
	$(BIN)/python -m pytest -m soak

bench: $(VENV)/.bench       ## the benchmarks that need no accelerator; writes benchmarks/results and the READMEs' tables
	$(BIN)/python -m benchmarks

# With the torch that is installed where it runs, and nothing from a network: `make gpu GPU_PYTHON=...` for another interpreter.
# Its options are the Makefile's own, since plugins that the other tests use may be missing there.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

gpu: export PYTHONPATH := src:.:$(PYTHONPATH)
gpu:                        ## tests and benchmarks that need CUDA, with the installed torch
	@$(GPU_PYTHON) -c "import sys, torch; torch.cuda.is_available() or sys.exit('make gpu: torch finds no CUDA device')"
	$(GPU_PYTHON) -m pytest -q -c /dev/null --rootdir=. -m gpu tests/test_on_gpu.py
	for name in shapes reading ablation; do $(GPU_PYTHON) -m benchmarks.$$name || exit 1; done
	$(GPU_PYTHON) -m benchmarks.report --tables

docs: $(VENV)/.docs         ## the documentation, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dist: $(VENV)/.dev          ## wheel and source distribution, into dist/
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist

clean:                      ## remove what was built
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage demo.png
