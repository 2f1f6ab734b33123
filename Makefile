# make demo   run the main job on whatever is here        make test   run the tests
#
# Both need only Python 3.11+ and make: they create .venv on first use and keep it. `make help` lists the rest.
# To use an interpreter that has everything already, without a venv:  make gpu-evidence NO_VENV=1 PYTHON=python3

SHELL := /bin/bash
VENV ?= .venv

# The first Python that is new enough: Ubuntu 22.04 calls 3.10 python3.
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
endif
ifeq ($(strip $(PYTHON)),)
$(error cufa needs Python 3.11 or newer. Fix: apt-get install python3, or name one: make PYTHON=/path/to/python3.12)
endif

# A driver means a GPU to run on: then CuPy is installed too, for the CUDA version of the driver (13 from 580 on).
DRIVER := $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)
CUDA := $(if $(DRIVER),$(shell [ "$(firstword $(subst ., ,$(DRIVER)))" -ge 580 ] 2>/dev/null && echo cuda13 || echo cuda12))

ifdef NO_VENV
PY := $(PYTHON)
BASE :=
DEV :=
else
PY := $(VENV)/bin/python
BASE := $(VENV)/.stamp-base $(if $(CUDA),$(VENV)/.stamp-$(CUDA))
DEV := $(VENV)/.stamp-dev $(if $(CUDA),$(VENV)/.stamp-$(CUDA))
endif
CUFA := $(PY) -m cufa
PYTEST := $(PY) -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo docs dashboard test test-nightly emulate-test gpu-test gpu-evidence stamp readme bench bench-pages bench-promises compile-all compile-nightly sanitize lint format typecheck size wheel mutants clean print-python

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(BASE)  ## FA1, FA2 and naive attention side by side, on the GPU if there is one, else on the CPU
	$(CUFA) demo $(ARGS)

dashboard: $(DEV)  ## the dashboard, in a browser on this machine
	$(CUFA) dashboard $(ARGS)

# Workers share the machine, so each keeps its BLAS to one thread; in which process a test runs, tests/conftest.py says.
# Compiled modules are kept, whatever the environment says: some forty processes import them.
test: export OPENBLAS_NUM_THREADS ?= 1
test: $(DEV)  ## the tests that can run here, of large products of parameters a daily sample; GPU tests skip without a GPU
	env -u PYTHONDONTWRITEBYTECODE $(PYTEST) -n auto --dist loadscope --no-loadscope-reorder $(ARGS)

test-nightly: $(DEV)  ## the same with every case, which takes an hour
	$(MAKE) --no-print-directory test ARGS="--every-case $(ARGS)"

mutants: $(DEV)  ## wrong versions of cufa, one at a time: do the tests notice each? Recorded in tests/planted/mutants.txt; an hour
	$(PY) tests/planted/mutants.py $(ARGS)

lint: $(DEV)  ## ruff: rules and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(DEV)  ## rewrite in ruff's format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

typecheck: $(DEV)  ## mypy, strict: cufa and the dashboard
	$(PY) .ci/typecheck.py $(ARGS)

size:  ## the size budget: lines, headers, stamps, recorded data
	$(PYTHON) tests/size.py

compile-all: $(DEV)  ## build every kernel for every architecture, every two choices together, without a GPU
	$(CUFA) compile $(ARGS)

compile-nightly: $(DEV)  ## the same with every combination of choices, which takes hours
	$(CUFA) compile --all $(ARGS)

docs: $(DEV)  ## reference pages from the docstrings, in build/docs
	$(PY) -c "import cufa, pdoc, pathlib; [getattr(cufa, name) for name in cufa.__all__]; \
		pdoc.render.configure(docformat='numpy', show_source=False); \
		pdoc.pdoc('cufa', '!cufa[.].*', 'cufa.masks', 'cufa.train', output_directory=pathlib.Path('build/docs'))"

bench: $(BASE)  ## time the kernels here
	$(CUFA) bench $(ARGS)

bench-promises: $(DEV)  ## the bounds on time that the package is held to, on a machine that does nothing else
	$(PY) -m tests.evidence.promises

gpu-test: $(DEV)  ## only the tests that need a GPU, on all cores
	$(PY) -m tests.evidence tests $(ARGS)

emulate-test: $(DEV)  ## execute every kernel on the CPU, looking for races and other mistakes (needs a C++ compiler)
	$(PYTEST) -m emulate $(ARGS)

gpu-evidence: $(DEV)  ## GPU tests, and benchmarks that are missing or stale, into cufa/records/ (ARGS=--all: all of them)
	$(PY) -m tests.evidence record $(ARGS)

bench-pages: $(DEV)  ## how long the dashboard makes people wait, in a real Chromium; recorded under cufa/records/pages
	$(PY) tests/pages/bench_pages.py $(ARGS)

stamp: $(DEV)  ## compile the builds of recorded measurements: which give the same machine code? (ARGS=--check: only tell)
	$(PY) -m tests.evidence stamp $(ARGS)

readme: $(BASE)  ## write the recorded tables into README.md
	$(PY) -m tests.evidence readme README.md

sanitize: $(DEV)  ## compute-sanitizer's tools over every kernel (needs a GPU and the CUDA toolkit)
	$(PY) tests/kernels/sanitize.py $(ARGS)

WHEEL_DIR ?= dist
wheel: $(DEV)  ## build dist/*.whl
	$(PY) -m build --wheel --no-isolation --outdir $(WHEEL_DIR)

print-python:
	@echo $(PYTHON)

clean:  ## remove .venv and everything built
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) .ci/make_venv.py $(VENV)

# One stamp per set of dependencies, redone when pyproject.toml changes.
$(VENV)/.stamp-base: pyproject.toml | $(VENV)/bin/python
	$(PY) -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.stamp-cuda%: pyproject.toml | $(VENV)/bin/python
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[cuda$*]'
	touch $@

$(VENV)/.stamp-dev: pyproject.toml | $(VENV)/bin/python
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@ $(VENV)/.stamp-base
