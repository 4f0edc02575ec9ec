# Two commands for a newcomer: `make demo` searches something real, `make test` runs the tests.
# `make fuzz` tries damaged files and input on each target of tests/fuzz for a minute (FUZZ_SECONDS).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
FUZZ_SECONDS ?= 60
export OMP_WAIT_POLICY = PASSIVE

.PHONY: demo test fuzz lint docs

demo: $(VENV)/demo.stamp
	$(BIN)/python examples/demo.py demo-index

test: $(VENV)/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

fuzz: $(VENV)/dev.stamp
	OMP_NUM_THREADS=1 IRKIT_FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/python -m pytest -n auto tests/fuzz

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/docs.stamp
	$(BIN)/mkdocs build --strict

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/%.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[$*]"
	touch $@
