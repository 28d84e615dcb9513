# Everything runs in a virtual environment of its own. `make quickstart` and `make test` need nothing prepared.
# With PYTHON=<interpreter> on the command line a target runs in that environment, as it is, and installs nothing.
SHELL := /bin/bash -o pipefail
BASE_PYTHON ?= python3
VENV := .venv
EMULATED := .venv-emulated
DEVICE ?= cpu
MINUTES ?= 8.5

ifeq ($(origin PYTHON),command line)
RUN := PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON)
CUDA_PYTHON := $(PYTHON)
else
RUN := PYTHONPATH=. $(VENV)/bin/python
CUDA_PYTHON := $(EMULATED)/bin/python
STACKS := test-stacks test-stacks-all
installed = $(VENV)/.$(1)
emulated = $(EMULATED)/.$(1)
endif

# NVIDIA's headers, which the device's own declarations are held against
HEADERS := 'nvidia-cuda-crt<13.1' 'nvidia-cuda-cccl<13.1' 'nvidia-cuda-runtime-cu12==12.6.*'

# Of pytest-xdist. Tests of two ranks start two processes each, so that more workers than half of the cores hardly help.
WORKERS ?= 2
PYTEST = $(RUN) -m pytest -n $(WORKERS) --dist loadgroup

on_the_emulated_device = PYTHONPATH=$(CURDIR) $(CUDA_PYTHON) -m adaptive_batching._dry_run.device --devices 2 \
	$(CUDA_PYTHON) -m pytest -n $(WORKERS) --dist loadgroup \
	tests/emulated tests/dry_run/test_libraries.py tests/integration/test_cuda_memory.py

# Types take one core for a minute: they are checked beside the tests, and what was found is said after them.
define tests_and_types
	@said=$$(mktemp); $(RUN) -m mypy >"$$said" 2>&1 & types=$$!; \
	$(PYTEST) $(1); tests=$$?; wait $$types; checked=$$?; cat "$$said"; rm "$$said"; exit $$((tests | checked))
endef

.PHONY: help quickstart check fix lint ruff-check ruff-format test test-wide test-all test-stacks test-stacks-all \
	test-emulated test-emulated-wide test-cuda \
	bench docs pictures dist test-dist clean

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 20

quickstart: $(call installed,torchtune)  ## Make a small model and real data, then probe, grow, train and recover
	$(RUN) -m adaptive_batching quickstart

check: ruff-check ruff-format  ## Lint, types, and the tests that start no run and are no long ones: under two minutes
	$(call tests_and_types,--ignore tests/integration -m 'not slow and not wide and not long')

fix: $(call installed,dev)  ## Mend what ruff can mend, and format
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

test: ruff-check ruff-format  ## Lint, types, and all tests but wide and slow ones
	$(call tests_and_types)

test-wide: ruff-check ruff-format  ## Lint, types, and all tests but slow ones, as in continuous integration
	$(call tests_and_types,-m 'not slow')

test-all: ruff-check ruff-format  ## Lint, types, and all tests
	$(call tests_and_types,-m '')
	$(if $(STACKS),$(MAKE) $(STACKS))

# Other versions of what Trainer needs, each in an environment over that of the tests, which has all else.
PINS_oldest := transformers==4.57.6 trl==0.24.0 accelerate==1.11.0
PINS_torch := torch==2.6.0
PINS_axolotl := transformers==5.16.1 trl==1.9.0 accelerate==1.13.0 peft==0.20.0 datasets==4.8.4 huggingface_hub==1.17.0
PINS_llamafactory := transformers==5.6.0 trl==0.24.0 accelerate==1.11.0 peft==0.18.1 datasets==4.0.0
PINS_swift := transformers==5.16.1 trl==0.29.1 accelerate==1.13.0 peft==0.20.0 datasets==4.8.4
STACK_TESTS := tests/transformers/test_versions.py \
	'tests/transformers/test_run.py::test_the_maximum_is_what_the_run_trains_with[2]' \
	tests/transformers/test_run.py::test_a_growing_run_follows_its_schedule_by_samples_and_goes_on_where_it_was_left
stacks = $(addprefix $(VENV)-,$(addsuffix /.$(1),$(2)))
run_stacks = @for stack in $^; do echo "$$stack"; PYTHONPATH=. $${stack%/.*}/bin/python -m pytest \
	-n $(WORKERS) --dist loadgroup $(1) || exit 1; done

# The frameworks themselves, without what needs a GPU, and what of the rest they import
OF_axolotl := addict art colorama einops evaluate==0.4.1 fastcore fire immutabledict langdetect mistral-common numba \
	posthog==6.7.11 pydantic==2.12.5 python-dotenv schedulefree==1.4.1 scipy torchao==0.17.0 triton typer wandb
OF_llamafactory := 'av<=16.0.0' einops fastapi fire matplotlib modelscope omegaconf pandas protobuf scipy sentencepiece \
	sse-starlette tiktoken 'tyro<0.9' uvicorn
OF_swift := addict aiohttp binpacking dacite einops fastapi importlib-metadata json-repair matplotlib modelscope nltk \
	openai pandas rouge simplejson sortedcontainers sentencepiece tiktoken uvicorn zstandard
ITSELF_axolotl := axolotl==0.19.0 axolotl-contribs-lgpl==0.0.7 axolotl-contribs-mit==0.0.6 \
	antlr4-python3-runtime==4.13.2 optimum==1.16.2
ITSELF_llamafactory := llamafactory==0.9.5
ITSELF_swift := ms-swift==4.6.0 attrdict cpm-kernels oss2 transformers-stream-generator

.SECONDARY:
test-stacks: $(call stacks,stack,oldest axolotl torch)  ## Tests of Trainer with older versions, and with the oldest torch
	$(call run_stacks,-m 'not slow' $(STACK_TESTS))
	PYTHONPATH=. $(VENV)-torch/bin/python -m pytest -n $(WORKERS) --dist loadgroup tests/loop/test_step.py tests/test_state.py

test-stacks-all: $(call stacks,framework,axolotl llamafactory swift)  ## axolotl, LLaMA-Factory and ms-swift themselves
	$(call run_stacks,-m '' tests/transformers/test_frameworks.py)

# LLaMA-Factory imports torchaudio, which it does not use for text.
$(VENV)-%/.framework: $(VENV)-%/.stack
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(OF_$*)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(ITSELF_$*)
	cd $(@D)/lib/python3*/site-packages && mkdir -p torchaudio && echo '__version__ = "0"' > torchaudio/__init__.py
	touch $@

$(VENV)-%/.stack: pyproject.toml Makefile $(call installed,dev)
	$(BASE_PYTHON) -m venv $(@D)
	$(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/under.pth"
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(PINS_$*)
	touch $@

test-emulated: $(call emulated,dev)  ## The tests on an emulated CUDA device: no GPU, but a CUDA build of torch (5 GB)
	$(on_the_emulated_device)

test-emulated-wide: $(call emulated,dev)  ## All of them but slow ones, as in continuous integration
	$(on_the_emulated_device) -m 'not slow'

# Each result is written as it comes, and all end within nine minutes.
test-cuda: $(call installed,dev)  ## The tests that a GPU is needed for, with results in outputs/test-cuda.txt
	@mkdir -p outputs
	PYTHONUNBUFFERED=1 timeout --verbose --signal INT --kill-after 15 $(MINUTES)m \
		env $(RUN) -m pytest tests/integration/test_cuda.py \
		tests/integration/test_cuda_memory.py tests/integration/test_cuda_trainers.py -m cuda -v -rs | tee outputs/test-cuda.txt

lint: ruff-check ruff-format  ## Lint and types
	$(RUN) -m mypy

ruff-check: $(call installed,dev)  ## Lint alone, as before each commit
	$(RUN) -m ruff check .

ruff-format: $(call installed,dev)  ## The format alone, as before each commit
	$(RUN) -m ruff format --check .

ifeq ($(DEVICE),cuda)
bench: $(call installed,bench)  ## Run every benchmark, or with DEVICE=cuda the one for a GPU; results go to benchmarks/results
	$(RUN) benchmarks/gpu.py --minutes $(MINUTES)
else
bench: $(call installed,bench)
	$(RUN) benchmarks/probe_vs_peers.py
	$(RUN) benchmarks/epoch_time.py
	$(RUN) benchmarks/epoch_time.py --recipe dpo kd
	$(RUN) benchmarks/first_minutes.py
	$(RUN) benchmarks/overhead.py
	$(RUN) benchmarks/distributed_overhead.py
	$(RUN) benchmarks/growth_quality.py
	$(RUN) benchmarks/trainer_vs_peers.py
	$(RUN) benchmarks/generated.py
endif

docs: $(call installed,docs)  ## The pages as a site, with the interface from docstrings, in outputs/docs; a broken link is an error
	$(RUN) -m sphinx --quiet --fail-on-warning --keep-going -c docs/site . outputs/docs

pictures:  ## Draw the pictures of the pages anew
	$(BASE_PYTHON) benchmarks/pictures.py

dist: $(call installed,release)  ## Build wheel and sdist in dist/, and check them
	rm -rf dist
	$(RUN) -m build --quiet
	$(RUN) -m twine check --strict dist/*

# What a wheel or an sdist shows on its first screen, and the examples, run where nothing else of the checkout is. PINS are
# of what it needs, or more packages, whose examples run as well.
DIST ?= $(firstword $(wildcard dist/*.whl))
PINS ?= trl peft sentence-transformers
test-dist:  ## Install DIST (the wheel in dist/) with PINS in an empty environment, and run what its README shows, and examples
	rm -rf $(VENV)-dist
	$(BASE_PYTHON) -m venv $(VENV)-dist
	$(VENV)-dist/bin/python -m pip install --quiet --disable-pip-version-check '$(abspath $(DIST))[transformers]' $(PINS)
	cd "$$(mktemp -d)" && cp -r $(CURDIR)/tests/support/first_screen.py $(CURDIR)/examples . && \
		$(abspath $(VENV)-dist)/bin/python first_screen.py examples

clean:  ## Remove the environment and what the quickstart made
	rm -rf $(VENV) $(VENV)-* data/quickstart outputs/quickstart outputs/docs dist

$(VENV)/bin/python:
	$(BASE_PYTHON) -m venv $(VENV)

# `===` takes the build for CUDA where one for the CPU would match as well.
$(EMULATED)/.dev: pyproject.toml
	$(BASE_PYTHON) -m venv $(EMULATED)
	$(EMULATED)/bin/python -m pip install --quiet --disable-pip-version-check 'torch===2.13.0'
	$(EMULATED)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' $(HEADERS)
	touch $@

# Of Ludwig the benchmark calls one module, which needs none of the ninety packages that Ludwig asks for.
$(VENV)/.bench: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]'
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps ludwig
	touch $@

# One stamp for each extra that has been installed
$(VENV)/.%: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	touch $@
