# SPDX-License-Identifier: BSD-3-Clause
# On a fresh machine `make test` and `make demo` set up all they need in .venv; `make help` lists more.

TORCH ?= torch==2.13.0
JOBS ?= 2
VENV ?= .venv
SYSTEM_PYTHON ?= python3

PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip --disable-pip-version-check install --quiet
WITH_TORCH = -DPOWERSGD_TORCH_DIR=$$($(PYTHON) -c 'import torch; print(torch.__path__[0])')
find_cpp = $(shell find $(1) -name '*.h' -o -name '*.inl' -o -name '*.cpp' -o -name '*.cu' \
  -o -name '*.cuh')
SOURCES := $(call find_cpp,csrc include)
CPP_FILES := $(SOURCES) $(call find_cpp,tests/cpp benchmarks)
PYTHON_FILES = setup.py setup_support python tests/python examples benchmarks docs .ci
TEXT_FILES = $(shell git ls-files ':!LICENSE' ':!docs/images' ':!benchmarks/results' \
  ':!.ci/check_text.py' ':!*/test_check_text.py')
# One call of .ci/system_packages names all that the goals need.
PACKAGES_FOR := $(if $(filter test-aarch64,$(MAKECMDGOALS)),aarch64,$(if \
  $(filter test test-cpp test-sanitized,$(MAKECMDGOALS)),tests,build))

export MAX_JOBS := $(JOBS)
# ccache, where there is one, also finds what another folder has compiled.
export PATH := $(abspath $(VENV))/bin:$(addsuffix :,$(wildcard /usr/lib/ccache))$(PATH)
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1
export CCACHE_SLOPPINESS := pch_defines,time_macros

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help env build tools wheel index sdist demo test test-cpp test-python test-quick test-long \
        test-sanitized test-aarch64 bench gpu gpu-programs lint docs format clean system-packages \
        FORCE

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16
	@echo "Variables: TORCH ($(TORCH)), JOBS ($(JOBS)), VENV ($(VENV)), SYSTEM_PYTHON ($(SYSTEM_PYTHON))"

env: $(VENV)/.ready  ## virtual environment with torch and the build tools

build: $(VENV)/.built  ## editable install of the package, compiled, in the environment

tools: $(VENV)/.tools  ## build, and the tools of the tests and of lint

# Files that an earlier build has left would go into the wheel as well.
wheel: env | system-packages  ## a wheel for the torch of the environment, in dist
	rm -rf build/lib.* build/bdist.*
	$(PYTHON) -m pip --disable-pip-version-check wheel --no-build-isolation --no-deps \
	  --wheel-dir dist .

index: env  ## pip's indexes of the wheels in dist, in build/index; BASE=https://host/wheels/
	cd dist && sha256sum *.whl | sed -E 's|^([0-9a-f]+) +(.*)|$(BASE)\2#sha256=\1|' | \
	  $(abspath $(PYTHON)) ../.ci/wheel_index.py ../build/index

sdist: env  ## an archive of the sources, in dist
	$(PYTHON) setup.py --quiet sdist

demo: build  ## train a small GPT twice, plain and compressed, and compare (about 6 minutes in all)
	$(PYTHON) examples/demo.py

test: test-cpp test-python  ## all tests

test-cpp: env | system-packages  ## GoogleTest
	cmake -S tests/cpp -B build/cpp -G Ninja $(WITH_TORCH)
	cmake --build build/cpp --parallel $(JOBS)
	ctest --test-dir build/cpp --parallel $(JOBS) --output-on-failure

test-python: tools  ## pytest
	$(PYTHON) -m pytest tests/python -n $(JOBS)

# What tests the product, without the programs, the libraries and the scripts around it.
QUICK := $(addprefix tests/python/,options backend training torch_features stats hostile)
test-quick: tools  ## one case of each Python test of the product, in 4 minutes
	$(PYTHON) -m pytest --quick $(QUICK) -n $(JOBS)

test-long: tools  ## the tests that take more than ten seconds each
	@$(PIP) 'torch-powersgd[test-long]'
	$(PYTHON) -m pytest tests/python -m long

# AddressSanitizer and UndefinedBehaviorSanitizer over all C++ tests, then ThreadSanitizer over those
# of the layers that have threads, and of the CUDA kernels. torch itself is not compiled with them.
test-sanitized: env | system-packages  ## GoogleTest under sanitizers
	for sanitizers in address,undefined thread; do \
	  folder=build/sanitized-$${sanitizers%,*} && \
	  cmake -S tests/cpp -B $$folder -G Ninja -DPOWERSGD_SANITIZE=$$sanitizers $(WITH_TORCH) && \
	  cmake --build $$folder --parallel $(JOBS) && \
	  ctest --test-dir $$folder --parallel $(JOBS) --output-on-failure || exit 1; \
	done

test-aarch64: env | system-packages  ## the CPU kernels' tests on 64-bit ARM, which qemu emulates
	cmake -S tests/cpp -B build/aarch64 -G Ninja -DCMAKE_TOOLCHAIN_FILE=aarch64.cmake
	cmake --build build/aarch64 --parallel $(JOBS) --target kernels
	ctest --test-dir build/aarch64 --parallel $(JOBS) --output-on-failure --tests-regex kernels

bench: build  ## measure again what has changed of what the docs quote; PART=stages: one part
	$(PYTHON) benchmarks/bench_all.py $(PART)

# It uses the python at hand (PYTHON=...) and no environment of its own, so it downloads nothing.
# CALL=second goes on where the first call has ended.
gpu:  ## build, test and measure on a machine with an NVIDIA GPU, in 8 minutes; CALL=second: 4 more
	$(if $(filter command line,$(origin PYTHON)),$(PYTHON),python3) .ci/gpu $(CALL)

gpu-programs:  ## what runs on a GPU without Python, in build/gpu-programs; needs nvcc and no GPU
	JOBS=$(JOBS) .ci/gpu_programs

# Old tools have all that lint needs, so that lint compiles no changed source.
lint: $(if $(wildcard $(VENV)/.tools),,tools)  ## formats, words, spelling, types, and clang-tidy
	@echo clang-format; clang-format --dry-run --Werror $(CPP_FILES)
	ruff check $(PYTHON_FILES)
	ruff format --check $(PYTHON_FILES)
	$(PYTHON) .ci/check_text.py
	@echo codespell; codespell --builtin clear,rare,en-GB_to_en-US $(TEXT_FILES)
	mypy
	$(PYTHON) .ci/tidy.py $(JOBS)

docs: $(VENV)/.docs  ## the documentation as a site, in build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --site-dir build/site

format: $(if $(wildcard $(VENV)/.tools),,tools)  ## rewrite the sources as lint wants them
	@echo clang-format; clang-format -i $(CPP_FILES)
	ruff check --fix $(PYTHON_FILES)
	ruff format $(PYTHON_FILES)

clean:  ## remove what was built, and the environment
	rm -rf build dist $(VENV) demo_output python/*.egg-info python/torch_powersgd/_C*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find python tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

# Rewritten only when TORCH is another than last time, which then renews all that depends on it.
$(VENV)/.torch: FORCE | system-packages
	@test -x $(PYTHON) || $(SYSTEM_PYTHON) -m venv $(VENV)
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

# A package that was built against another torch goes first, because it requires that one.
$(VENV)/.ready: $(VENV)/.torch
	@$(PYTHON) -m pip uninstall --quiet --yes torch-powersgd 2>/dev/null
	@echo "installing $(TORCH) into $(VENV)"
	@$(PIP) '$(TORCH)' ninja numpy 'setuptools>=77'
	@touch $@

# setup.py shows its progress, and pip shows none. pip then finds all compiled, and links again.
$(VENV)/.built: $(VENV)/.ready setup.py setup_support/*.py pyproject.toml $(SOURCES)
	@echo "compiling the extension: the first time takes 4 minutes of processor time"
	@$(PYTHON) setup.py --quiet build_ext --inplace
	@$(PIP) --no-build-isolation --editable '.[bench,demo]'
	@touch $@

# The package is installed already, so that this installs its extras alone.
$(VENV)/.tools: $(VENV)/.built
	@echo "installing what the tests and lint need"
	@$(PIP) 'torch-powersgd[test,lint]'
	@touch $@

# The sources are parsed and not imported, so nothing is compiled.
$(VENV)/.docs: $(VENV)/.torch
	@echo "installing what the documentation needs"
	@$(PIP) mkdocs-material 'mkdocstrings[python]' ruff
	@touch $@

system-packages:
	@SYSTEM_PYTHON='$(SYSTEM_PYTHON)' .ci/system_packages $(PACKAGES_FOR)
