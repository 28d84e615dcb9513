# Everything runs in a virtual environment of its own. `make quickstart` and `make test` need nothing prepared.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
QUICKSTART := recipes/configs/quickstart

.PHONY: help quickstart test test-all lint bench clean

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

quickstart: $(VENV)/.plots  ## Make a small model and real data, then probe, grow and train through `tune run`
	$(BIN)/python -m adaptive_batching.torchtune.quickstart --output_dir data/quickstart
	PYTHONPATH=. $(BIN)/tune run recipes/full_finetune_single_device.py --config $(QUICKSTART)/full_single_device.yaml

test: lint  ## Lint, types, and all tests but the slow ones
	$(BIN)/python -m pytest

test-all: lint  ## Lint, types, and all tests
	$(BIN)/python -m pytest -m ''

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.bench  ## Run every benchmark; results go to benchmarks/results
	$(BIN)/python benchmarks/probe_vs_peers.py
	$(BIN)/python benchmarks/epoch_time.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/distributed_overhead.py
	$(BIN)/python benchmarks/growth_quality.py

clean:  ## Remove the environment and what the quickstart made
	rm -rf $(VENV) data/quickstart outputs/quickstart

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# One stamp for each extra that has been installed
$(VENV)/.%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	touch $@
