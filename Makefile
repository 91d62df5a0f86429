# The whole tool in five targets: setup, report, test, lab, peer. Everything is installed into .venv/.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
NOTEBOOKS ?= 00_tour 02_sync_modes
REPORT_ARGS ?=
PYTEST_ARGS ?=
HAVE_GPU := $(shell [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null 2>&1 && echo yes)
comma := ,
GPU_EXTRA := $(if $(HAVE_GPU),$(comma)gpu,)
comma := ,
