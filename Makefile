# deltarelay: `make demo` shows it, `make test` proves it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SECONDS_EACH ?= 600

.PHONY: setup demo test check bench slow fuzz clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all]'
	$(BIN)/deltarelay models pull
	$(BIN)/deltarelay cloud --check
	touch $(READY)

demo: setup
	$(BIN)/deltarelay demo

test: setup
	$(BIN)/python -m pytest

slow: setup
	$(BIN)/python -m pytest -m slow

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/lint-imports

fuzz: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	set -e; for name in $$($(BIN)/python -c 'from tests.fuzz import TARGETS; print(*TARGETS)'); do \
	  $(BIN)/python -m tests.fuzz $$name --seconds $(SECONDS_EACH); done

bench: setup
	$(BIN)/deltarelay bench relay --json
	$(BIN)/deltarelay bench link --json
	$(BIN)/deltarelay bench edge --json
	$(BIN)/deltarelay bench fleet --json

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
