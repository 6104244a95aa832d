# Turnwise. One word does each thing; the first of them sets everything up.
#   make train   train the default agent (installs what is missing first)
#   make test    lint, types and all tests
#   make extras  optional packages that some tests use (needs a C compiler)
#   make quick   the tests of the inner loop (under a minute)
#   make kernels compile every Triton kernel for GPUs, without one (fetches Triton: 600 MB)

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: train test extras quick kernels lint format docs bench learning seeds clean help

help:
	@sed -n 's/^#   //p' Makefile

train: $(READY)
	$(BIN)/turnwise train $(ARGS)

test: $(READY) lint
	$(BIN)/python -m pytest $(ARGS)

extras: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[reasoning]'

quick: $(READY)
	$(BIN)/python -m pytest -m "not slow" -x $(ARGS)

kernels: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/triton triton==3.6.0
	PYTHONPATH=$(VENV)/triton $(BIN)/python -m pytest tests/engines/test_compiled_kernels.py $(ARGS)

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks experiments examples
	$(BIN)/ruff format --check src
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format src
	$(BIN)/ruff check --fix src tests benchmarks experiments examples

docs: $(READY)
	$(BIN)/python -m turnwise.recipes.catalogue docs/methods.md

bench: $(READY)
	$(BIN)/python benchmarks/generation.py
	$(BIN)/python benchmarks/logprob_memory.py
	$(BIN)/python benchmarks/training_step.py

learning: $(READY)
	$(BIN)/python experiments/learning_sweep.py --table experiments/results/learning.jsonl experiments/results/offpolicy.jsonl experiments/results/methods.jsonl --write docs/learning.md

seeds: $(READY)
	$(BIN)/python experiments/default_seeds.py --write experiments/default_seeds.md

clean:
	rm -rf $(VENV) build dist src/*.egg-info

$(READY): pyproject.toml constraints.txt setup.sh
	@bash setup.sh $(PYTHON) $(VENV)
	@touch $(READY)
