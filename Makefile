# Everything runs in .venv; each target sets it up first. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The adapters are checked against FlashInfer's sources, read from its unopened wheel: no CPU build of
# torch can import it, and what it depends on would fetch a CUDA build. 101 MB, once.
FLASHINFER := $(VENV)/wheels/flashinfer_python-0.7.4-py3-none-any.whl

# With an NVIDIA GPU pip's default torch is the right one. Without, the CPU release is enough; where
# pip would still fetch a CUDA build, TORCH_ARGS can name another index (see README).
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo 1)
ifeq ($(HAS_GPU),1)
TORCH := "torch>=2.11,<2.15"
EXTRAS := dev,gpu
else
TORCH := torch==2.13.0
EXTRAS := dev
endif
TORCH_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test gpu-test lint types audit fmt clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Tetrad needs Python 3.11 or newer; set PYTHON=python3.12 or the like." if sys.version_info < (3, 11) else 0)'
	@echo "Setting up $(VENV) (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH_ARGS) $(TORCH)
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]"
	@touch $@

demo: $(READY) ## Serve the embedded model, ask it a question, benchmark it
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/demo.sh

$(FLASHINFER): | $(READY)
	$(BIN)/python -m pip download --quiet --no-deps --dest $(@D) flashinfer-python==0.7.4

test: $(READY) $(FLASHINFER) ## Run every test that needs no GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" -n 2 --dist loadfile

gpu-test: $(READY) ## Run the tests that need a GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "gpu and not alone" -n auto --maxprocesses 16 \
	  --dist worksteal
	$(BIN)/python -m pytest -m alone

lint: $(READY) ## Check style (ruff)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## Check types (mypy, strict)
	$(BIN)/mypy

# A report: advisories change without a commit, and may be out of reach.
audit: $(READY) ## Ask the advisories about installed packages (a report, never a failure)
	@{ test -x $(VENV)/audit/bin/pip-audit || { $(PYTHON) -m venv $(VENV)/audit && \
	  $(VENV)/audit/bin/python -m pip install --quiet "pip-audit>=2.9,<3"; }; } && \
	  timeout 120 $(VENV)/audit/bin/pip-audit --progress-spinner off --skip-editable \
	  --path $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	  || echo "audit: the report above has findings, or the advisories could not be asked"

fmt: $(READY) ## Format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
