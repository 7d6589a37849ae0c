# setup, demo, test, lint: each sets up what it needs first.

PYTHON ?= python3
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up

.PHONY: setup demo test torture test-sanitize test-threads lint docs docs-reference shape gauge roofline wheel clean
.DEFAULT_GOAL := help

.PHONY: help
help:
	@echo "make setup   a virtual environment in $(VENV) with everything in it"
	@echo "make demo    images to splats on the sample scene, and a picture to look at"
	@echo "make test    the tests"
	@echo "make torture all reliability harnesses at full length, for hours; the figures go to benchmarks/reliability.json"
	@echo "make test-sanitize, make test-threads   the kernels and the CPU library under gcc's sanitizers"
	@echo "make lint    ruff and mypy, for Linux and macOS"
	@echo "make shape   lines, modules, imports and the way from the command to the kernel"
	@echo "make gauge   instructions and traffic of the CUDA kernels, without a GPU: benchmarks/results/gauge.json"
	@echo "make roofline MODEL=RUN          how near the stages of a training step are to one core's limits (docs/cpu.md)"
	@echo "make docs-reference   the commands and settings in docs/cli.md and docs/settings.md, from their declarations"
	@echo "make docs    the documentation as a site, in build/site"
	@echo "make wheel   dist/*.whl for x86-64 and aarch64 with native libraries, CUDA from Turing on; FLAGS=--no-cuda without"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "splatcli needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	scripts/demo $(BIN)/splat

# Tests of one file stay together. WORKERS=0 runs one after the other, in this process.
WORKERS ?= 2

test: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# docs/reliability.md describes them. ONLY="fuzz_ply bit_flips" runs these alone.
ONLY ?=

torture: setup
	PYTHONPATH=. $(BIN)/python -m tests.torture.all $(ONLY)

# The kernels under the emulator and the CPU library, with every access and every shift checked.
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer

test-sanitize: setup
	PYTHONPATH=. CXX="g++ $(SANITIZE)" $(BIN)/python -c 'from splatcli.native import build; from tests.kernels.build_emulator import emulator_library; [build.cpu_library(isa) for isa in build.ISA_FLAGS]; emulator_library()'
	CXX="g++ $(SANITIZE)" LD_PRELOAD="$$(g++ -print-file-name=libasan.so):$$(g++ -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  $(BIN)/python -m pytest tests/kernels tests/rasterizer --ignore=tests/kernels/test_nvcc.py --ignore=tests/kernels/test_mutants.py

# The CPU library's threads, under ThreadSanitizer.
test-threads: setup
	CXX="g++ -fsanitize=thread" $(BIN)/python -c 'from splatcli.native import build; build.cpu_library("portable")'
	CXX="g++ -fsanitize=thread" LD_PRELOAD="$$(g++ -print-file-name=libtsan.so)" TSAN_OPTIONS="ignore_noninstrumented_modules=1" \
	  $(BIN)/python -m pytest -k portable tests/rasterizer/test_native_contract.py tests/rasterizer/test_regularisation.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin --no-warn-unreachable --cache-dir .mypy_cache/darwin splatcli

shape: setup
	$(BIN)/python scripts/shape.py

# nvcc and g++ are needed. FLAGS="--check --ours": benchmarks/gauge.py describes them.
FLAGS ?=

gauge: setup
	PYTHONPATH=.:scripts $(BIN)/python -m benchmarks.gauge $(FLAGS)

# MODEL: a run or its checkpoint; FLAGS="-r 2 1": benchmarks/cpu_roofline.py describes them.
roofline: setup
	PYTHONPATH=. $(BIN)/python -m benchmarks.cpu_roofline $(MODEL) $(FLAGS) --out benchmarks/results/cpu_roofline.json

docs-reference: setup
	PYTHONPATH=. $(BIN)/python scripts/docs_reference.py

# Links and anchors are checked; the tests of the site run where this was done once.
docs: $(VENV)/.docs-set-up
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(VENV)/.docs-set-up: $(STAMP)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[docs]'
	touch $@

# Libraries are built from these sources, travel in the wheels, and are not left in the checkout.
wheel: setup
	PYTHONPATH=. $(BIN)/python scripts/build_wheels.py $(FLAGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
