# Turnwise. One word does each thing; the first of them sets everything up.
#   make train   train the default agent (installs what is missing first)
#   make test    lint, types and tests, the same every time (8 minutes on two cores)
#   make thorough the other tests: kills, attacks, ranks, every method's run, properties with new examples (45 minutes)
#   make extras  optional packages that some tests use (needs a C compiler)
#   make docs    write the pages of methods and build the site in site/
#   make wheel   build the wheel, install it alone into a new environment, train and open the view there
#   make quick   the tests of the inner loop (under a minute)
#   make shape   lines, files, lengths of functions, and what one training step executes, beside other packages
#   make trial   try to break it: kills, attacks, bad inputs, fuzzed episodes (about an hour)
#   make vllm    publish to a real vLLM server on this CPU and train through it (installs it first: 4 GB)
#   make gpu     the tests that need a GPU, and all tests of kernels, on a machine that has one
#   make kernels compile every Triton kernel for GPUs, without one (fetches Triton: 600 MB)

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Bytecode is kept between runs: without it every test process compiles and rewrites all tests again (ten seconds each).
unexport PYTHONDONTWRITEBYTECODE
# Tests run in one process for each core, at most eight; WORKERS=0 runs them in one, for a debugger.
WORKERS ?= auto
PYTEST  := $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal
QUICK   := not thorough and not property and not slow and not integration and not gpu
LINT    := $(BIN)/ruff check src tests trials benchmarks experiments examples && $(BIN)/ruff format --check src && $(BIN)/mypy
# Seeds the examples that `make thorough` draws; the same number draws the same examples again.
SEED    ?= $(shell date +%s)
SEED    := $(SEED)

.PHONY: train test thorough wheel extras quick shape trial vllm gpu kernels lint format docs bench evidence seeds clean help

help:
	@sed -n 's/^#   //p' Makefile

train: $(READY)
	$(BIN)/turnwise train $(ARGS)

test: $(READY)
	@began=$$(date +%s); $(LINT) && $(PYTEST) -m "not thorough" $(ARGS); status=$$?; \
	  echo "make test: $$((($$(date +%s) - began) / 60)) min $$((($$(date +%s) - began) % 60)) s"; exit $$status

thorough: $(READY)
	@began=$$(date +%s); echo "make thorough: to repeat it, make thorough SEED=$(SEED)"; \
	  $(PYTEST) -m "thorough or property" --hypothesis-profile=thorough --hypothesis-seed=$(SEED) $(ARGS); status=$$?; \
	  echo "make thorough: $$((($$(date +%s) - began) / 60)) min; to repeat it, make thorough SEED=$(SEED)"; exit $$status

extras: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[reasoning,docs,agents,gymnasium,minigrid,open-spiel,textarena,quantized,rewards,grammar]'

wheel: $(READY)
	bash trials/wheel.sh $(PYTHON)

quick: $(READY)
	$(PYTEST) -m "$(QUICK)" -x $(ARGS)

shape: $(READY)
	$(BIN)/python -m trials.shape --step $(ARGS)

trial: $(READY)
	$(BIN)/python -m trials --write docs/trial.md $(ARGS)

vllm: $(READY)
	bash trials/vllm_environment.sh $(PYTHON) .venv-vllm
	$(BIN)/python -m trials.vllm --python .venv-vllm/bin/python $(ARGS)

gpu: $(READY)
	@$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("make gpu: torch finds no GPU here; install a CUDA build of torch")'
	$(BIN)/python -m pytest -m gpu $(ARGS)
	$(BIN)/python -m pytest tests/engines/test_kernels.py tests/engines/test_*_kernels.py $(ARGS)

kernels: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/triton triton==3.6.0
	PYTHONPATH=$(VENV)/triton $(BIN)/python -m pytest tests/engines/test_compiled_kernels.py $(ARGS)

lint: $(READY)
	$(LINT)

format: $(READY)
	$(BIN)/ruff format src
	$(BIN)/ruff check --fix src tests trials benchmarks experiments examples

docs: $(READY)
	@$(BIN)/python -c 'import mkdocs, material, mkdocstrings_handlers.python, latex2mathml' 2>/dev/null || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/python docs/hooks/method_pages.py docs/methods
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

bench: $(READY)
	$(BIN)/python benchmarks/generation.py
	$(BIN)/python benchmarks/logprob_memory.py
	$(BIN)/python benchmarks/training_step.py

evidence: $(READY)
	$(BIN)/turnwise evidence check
	$(BIN)/turnwise evidence table --write docs/evidence

seeds: $(READY)
	$(BIN)/python experiments/default_seeds.py --write experiments/default_seeds.md

clean:
	rm -rf $(VENV) build dist src/*.egg-info

$(READY): pyproject.toml constraints.txt setup.sh
	@bash setup.sh $(PYTHON) $(VENV)
	@touch $(READY)
