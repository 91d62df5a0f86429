# setup, report, test, lab, peer. Everything is installed into .venv/.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
NOTEBOOKS ?=
REPORT_ARGS ?=
LAB_ARGS ?=
PYTEST_ARGS ?=
TEST_WORKERS ?= 2
PARALLEL = $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile
BROWSER_ARGS ?=
EXHAUSTIVE_ARGS ?=
FAULTS_ARGS ?=
HAVE_GPU := $(shell { [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi; } >/dev/null 2>&1 && echo yes)
comma := ,
GPU_EXTRA := $(if $(HAVE_GPU),$(comma)gpu$(comma)cupti,)

.PHONY: help setup report test test-slow test-exhaustive test-faults test-gpu test-browser sanitize wheel lint bench lab peer peer-cuda models readme recorded clean

help:
	@echo "make report   environment, tiny models, notebooks -> reports/*.html, speedup table;  NOTEBOOKS='00_tour 04_plans'"
	@echo "make test     all quick tests, of what is long a little;  make test-slow  more"
	@echo "make test-exhaustive  all of it and full products of toggles: hours, recorded"
	@echo "make test-faults  which of many planted faults the tests see: an hour, recorded"
	@echo "make lab      JupyterLab on the notebooks;  LAB_ARGS='--no-browser --port 8888' on a remote machine"
	@echo "make setup    only prepare .venv/, with the workbench command in it"
	@echo "make lint     ruff and mypy;  make bench  benchmarks, recorded;  make peer  compare with llama.cpp"
	@echo "make peer-cuda  compare with llama.cpp on this GPU, recorded;  PEER=llama-bench MODELS=... ROUNDS=5"
	@echo "make test-gpu the GPU tests, recorded;  make sanitize  parts of them under compute-sanitizer, recorded"
	@echo "make test-browser the panel in JupyterLab, and pages, in Chromium, recorded"
	@echo "make wheel    the wheel, built and tried outside of the checkout"
	@echo "make readme   fill README.md from data/results;  make recorded  test that all of it agrees, noted"

setup: .venv/.lab
	@echo "ready: $(BIN)/workbench --help"

# By uv where there is one, else by the standard library, and uv is put into it, if that can be had.
# What is missing is said in one line.
.venv/bin/python:
	@if command -v uv >/dev/null 2>&1; then uv venv -q --seed --python '>=3.11' .venv; \
	elif $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	  $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	    echo "missing: the venv module of $(PYTHON); install it (Debian: python3-venv), or uv"; exit 1; }; \
	  $(PYTHON) -m venv .venv && \
	  { $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt uv >/dev/null 2>&1 || true; }; \
	else echo "missing: Python 3.11 or later, or uv; install either, or name one: make PYTHON=..."; exit 1; fi

# uv is several times as fast as pip. Where it fails (no uv for this machine, or an index that only pip
# knows), pip tries; what pip writes on stderr is shown only where it fails, too. uv leaves it to the
# first import to compile a module, unless Python is told not to keep what it compiles.
UV = $(or $(shell command -v uv),$(BIN)/uv)
COMPILED = $(if $(PYTHONDONTWRITEBYTECODE),--compile-bytecode)
INSTALL = $(UV) pip install -q $(COMPILED) --python $(BIN)/python -c constraints.txt -e '.[$(1)]' 2>/dev/null || { \
    log=$$(mktemp); \
    $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[$(1)]' 2>$$log || \
      { cat $$log >&2; rm -f $$log; exit 1; }; rm -f $$log; }

.venv/.lab: .venv/bin/python pyproject.toml constraints.txt
	@echo "installing into .venv/ (a minute or two the first time)"
	@$(call INSTALL,lab$(comma)serve$(GPU_EXTRA))
	@touch $@

.venv/.dev: .venv/.lab
	@echo "installing what the tests need"
	@$(call INSTALL,lab$(comma)serve$(comma)dev$(GPU_EXTRA))
	@touch $@

report: .venv/.lab
	@$(strip $(BIN)/workbench report $(NOTEBOOKS) $(REPORT_ARGS))

test: .venv/.dev
	$(PARALLEL) --durations=25 $(PYTEST_ARGS)

test-slow: .venv/.dev
	$(PARALLEL) -m "(slow or long or hypothesis) and not gpu and not exhaustive and not browser" \
	  --hypothesis-profile=slow --durations=25 $(PYTEST_ARGS)

test-exhaustive: .venv/.dev
	$(BIN)/python -m tests.exhaustive $(EXHAUSTIVE_ARGS)

test-faults: .venv/.dev
	$(BIN)/python -m tests.faults $(FAULTS_ARGS)

test-browser: .venv/.dev
	$(BIN)/python -m tests.browser.record $(BROWSER_ARGS)

test-gpu: .venv/.dev
	$(BIN)/python tests/gpu/record.py

sanitize: .venv/.dev
	$(BIN)/python -m tests.gpu.sanitize

wheel: .venv/.dev
	$(BIN)/python -m tests.wheel

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check workbench data/measure tests
	$(BIN)/mypy

bench: .venv/.dev
	$(BIN)/python -m tests.bench.record

lab: models
	$(BIN)/jupyter lab --notebook-dir=notebooks $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_ARGS)

models: .venv/.lab
	@$(BIN)/workbench model tiny

peer: .venv/.dev
	@echo "llama-cpp-python is built in .venv-peer/ (needs a C++ compiler; minutes the first time)"
	$(BIN)/python -m tests.peer.compare
	$(BIN)/python -m tests.peer.files

peer-cuda: .venv/.dev
	$(BIN)/python -m tests.peer.cuda $(MODELS) $(if $(PEER),--peer "$(PEER)") \
	  $(if $(ROUNDS),--rounds $(ROUNDS)) $(PEER_ARGS)

readme: .venv/.dev
	$(BIN)/python -m data.measure.readme

recorded: .venv/.dev
	$(BIN)/python -m tests.measure.checked

clean:
	rm -rf .venv .venv-peer reports data/runs data/models
