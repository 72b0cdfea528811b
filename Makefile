PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --constraint constraints.txt

.PHONY: help demo test lint format types cover soak bench clean

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

demo: $(VENV)/.dev          ## train on handwritten digits, plain and wrapped, side by side; writes demo.png
	$(BIN)/python examples/digits.py

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

bench: $(VENV)/.bench       ## the benchmarks that need no accelerator; writes benchmarks/results
	$(BIN)/python -m benchmarks

clean:                      ## remove what was built
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage demo.png
