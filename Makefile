# Everything a newcomer needs: `make demo`, `make test`. Both set up what is missing and nothing that is there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Touched once the environment matches the project file and the lock.
READY := $(VENV)/.ready

.PHONY: help setup demo test soak lint types check clean

help:
	@sed -n 's/^## //p' Makefile

## make setup   make .venv with everything in it
setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Lengthwise needs Python 3.11 or newer; try make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[worker,server,plot,dev]'
	touch $(READY)

## make demo    label 600 sample tickets here and now
demo: setup
	$(BIN)/lengthwise demo

## make test    run every test
test: setup
	$(BIN)/python -m pytest

## make soak    kill, stop and cut off workers for minutes, and audit every ticket; SEEDS="1 2 3" for more than one
SEEDS ?= 1
soak: setup
	$(BIN)/python -m tests.soak --real --seeds $(SEEDS)

## make lint    ruff
lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

## make types   mypy --strict
types: setup
	$(BIN)/mypy

## make check   lint, types, tests
check: lint types test

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
