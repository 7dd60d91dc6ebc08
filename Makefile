# `make run` and `make test` do all the set-up on a fresh machine: the environment is in .venv.
PYTHON ?= python3.11
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup run test lint bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints/cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints/cpu.txt -e ".[dev]"
	touch $(STAMP)

run: setup
	$(BIN)/flowrl run pipelines/grpo_sync.yaml

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p flowrl
	$(BIN)/lint-imports
	$(BIN)/flowrl check pipelines/*.yaml

test: lint
	$(BIN)/python -m pytest

bench: setup
	$(BIN)/python benchmarks/step_vs_trl.py

clean:
	rm -rf .venv .bench runs
