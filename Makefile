# Every target does its own set-up on a fresh Debian or Ubuntu with python3 (3.10 or
# newer), gcc and make: system packages by apt-get when run as root (else a sentence
# names them), Python packages into .venv. The second time, set-up takes no time.

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
SHELL := /bin/bash

PYTHON ?= python3
JOBS ?= $(shell nproc)
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
RESULTS := build/results
$(shell mkdir -p $(RESULTS))
CTEST_FLAGS := --output-on-failure --no-tests=error

export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TF_CPP_MIN_LOG_LEVEL ?= 2
# Here warnings are errors, also when pip builds the package.
export TF_SMB_WERROR := ON

.PHONY: help
help: ## These lines
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

# --- Set-up ------------------------------------------------------------------

# $(call need,PROBE,PACKAGES): installs Debian's PACKAGES unless PROBE succeeds.
define need
@{ $(1); } >/dev/null 2>&1 || { \
  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
    echo "Installing $(2)"; \
    apt-get update -qq && \
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(2) >/dev/null; \
  else \
    echo "Not found, please install: sudo apt-get install $(2)" >&2; exit 1; \
  fi; }
endef

# $(call skip,WHAT AND WHY): a part that cannot run here. In CI that is a failure.
define skip
{ echo "SKIPPED: $(1)" | tee -a $(RESULTS)/skipped.txt; [ "$$CI" != true ]; }
endef

$(VENV)/.created:
	$(call need,$(PYTHON) -c 'import ensurepip; import venv',python3-venv)
	$(call need,test -f "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h",python3-dev)
	$(call need,command -v g++,g++)
	$(PYTHON) -m venv $(VENV)
	touch $@

# The package in place: .venv imports these files, and the native ones lie in tf_smb/.
$(VENV)/.installed: pyproject.toml setup.py $(VENV)/.created
	$(BIN)/python -m pip install -q 'setuptools>=80' cmake ninja pybind11 tensorflow
	$(BIN)/python -m pip install -q --no-build-isolation -e '.[test,dev]'
	touch $@

NATIVE_SOURCES := $(shell find cc -name '*.cc' -o -name '*.h' -o -name '*.bzl' -o -name CMakeLists.txt)

$(VENV)/.built: $(VENV)/.installed $(NATIVE_SOURCES)
	$(BIN)/python setup.py -q build_ext --inplace
	touch $@

.PHONY: package
package: $(VENV)/.built ## The package, built in place and installed in .venv

# --- Lint --------------------------------------------------------------------

# mypy reads the package as it is installed, with strategies/ inside tf_smb.
.PHONY: lint
lint: package ## ruff, mypy, and clang's thread-safety analysis
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@rm -rf build/mypy && $(BIN)/python setup.py -q build_py --build-lib build/mypy 2>build/mypy.log || \
	  { cat build/mypy.log; exit 1; }
	cd build/mypy && $(BIN)/mypy --config-file ../../pyproject.toml -p tf_smb
	$(call need,command -v clang++,clang)
	$(call cmake_build,clang,-DTF_SMB_BUILD_TESTS=OFF -DCMAKE_CXX_COMPILER=clang++)

# --- C++ ---------------------------------------------------------------------

# $(call cmake_build,NAME,OPTIONS): configures and builds build/NAME, with the tests
# unless the options say otherwise.
define cmake_build
@echo "Building build/$(1)"; $(BIN)/cmake -S cc -B build/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja \
  -DTF_SMB_BUILD_TESTS=ON -DPython_EXECUTABLE=$(BIN)/python $(2) >build/$(1).log 2>&1 || { cat build/$(1).log; exit 1; }
@$(BIN)/cmake --build build/$(1)
endef

# $(call ctest,NAME,PREFIX,FLAGS)
ctest = @$(2) $(BIN)/ctest --test-dir build/$(1) $(CTEST_FLAGS) $(3) \
  --output-junit $(CURDIR)/$(RESULTS)/cc-$(1).xml

# ThreadSanitizer maps its shadow at fixed addresses, which some kernels' address
# randomisation collides with; where the personality may be changed, it is off.
NO_ASLR = $$(setarch -R true 2>/dev/null && echo setarch -R)

# ThreadSanitizer has nothing to find in these, and is slow at it.
SINGLE_THREADED := 'exchange_kernel_test|corpus_test'

.PHONY: test-cc
test-cc: package ## C++ tests, gcc
	$(call need,test -f /usr/include/gtest/gtest.h,libgtest-dev)
	$(call cmake_build,gcc,-DTF_SMB_BUILD_PACKAGE=OFF)
	$(call ctest,gcc)

.PHONY: test-sanitizers
test-sanitizers: package ## C++ tests under ASan with UBSan, and under TSan
	$(call need,test -f /usr/include/gtest/gtest.h,libgtest-dev)
	$(call cmake_build,asan,-DTF_SMB_BUILD_PACKAGE=OFF -DTF_SMB_SANITIZE=address)
	$(call ctest,asan)
	$(call cmake_build,tsan,-DTF_SMB_BUILD_PACKAGE=OFF -DTF_SMB_SANITIZE=thread)
	$(call ctest,tsan,$(NO_ASLR),--exclude-regex $(SINGLE_THREADED))

# Debian's Bazel calls itself no_version; it is 4.2.3.
.PHONY: test-bazel
test-bazel: package ## Bazel builds every target of BUILD and runs its tests, without a network
	$(call need,test -f /usr/include/gtest/gtest.h,libgtest-dev)
	@if ! command -v bazel >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing bazel-bootstrap"; apt-get update -qq; \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends bazel-bootstrap >/dev/null; \
	fi; \
	if ! command -v bazel >/dev/null; then \
	  $(call skip,test-bazel: no bazel here; on Debian and Ubuntu: sudo apt-get install bazel-bootstrap); exit; \
	fi; \
	TF_SMB_PYTHON=$(BIN)/python bazel --batch test --symlink_prefix=build/bazel- --jobs=$(JOBS) \
	  --test_output=errors --noshow_progress --ui_event_filters=-info //:all && \
	for log in build/bazel-testlogs/*/test.xml; do \
	  cp -f "$$log" "$(RESULTS)/bazel-$$(basename "$$(dirname "$$log")").xml"; \
	done

# --- Python ------------------------------------------------------------------

PYTEST = $(BIN)/pytest --junitxml=$(RESULTS)/$(1).xml

.PHONY: test-python
test-python: package ## All Python and integration tests
	$(call PYTEST,python)

# TensorFlow 2.16 with the oldest supported Keras, and in it the wheel that was built
# against the newest TensorFlow: one op library for all of them.
.venv-tf216/.created: $(VENV)/.created
	$(PYTHON) -m venv .venv-tf216
	.venv-tf216/bin/python -m pip install -q keras==3.8.0 pytest pytest-timeout scikit-learn \
	  "$$([ "$$(uname -m)" = x86_64 ] && echo tensorflow-cpu || echo tensorflow)==2.16.2"
	touch $@

.PHONY: wheel
wheel: package ## The wheel, in build/wheel
	rm -rf build/wheel build/lib.* build/bdist.*
	$(BIN)/python -m pip wheel -q --no-build-isolation --no-deps -w build/wheel .

TF216_TESTS := tests/python
TF216_IGNORED := layers_test.py build_files_test.py

.PHONY: test-tf216
test-tf216: ## The quick Python tests and fit in TensorFlow 2.16 with Keras 3.8, fit with the newest Keras
	@if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info >= (3, 13))'; then \
	  echo "SKIPPED: test-tf216: TensorFlow 2.16 has no wheel for $$($(PYTHON) --version)" | \
	    tee -a $(RESULTS)/skipped.txt; \
	else $(MAKE) --no-print-directory test-tf216-run; fi

.PHONY: test-tf216-run
test-tf216-run: wheel .venv-tf216/.created
	.venv-tf216/bin/python -m pip install -q --no-deps --force-reinstall build/wheel/*.whl
	cd build && ../.venv-tf216/bin/python -m pytest -c ../pyproject.toml --rootdir .. -m "not slow" \
	  -p no:cacheprovider --junitxml=$(CURDIR)/$(RESULTS)/tf216.xml \
	  $(TF216_IGNORED:%=--ignore=../tests/python/%) $(TF216_TESTS:%=../%)
	cd build && ../.venv-tf216/bin/python -m pytest -c ../pyproject.toml --rootdir .. \
	  -p no:cacheprovider --junitxml=$(CURDIR)/$(RESULTS)/tf216-fit.xml -k fit_in_many_ways \
	  ../tests/integration/strategy_test.py
	.venv-tf216/bin/python -m pip install -q --upgrade --no-deps --target build/newest-keras keras
	cd build && PYTHONPATH=$(CURDIR)/build/newest-keras ../.venv-tf216/bin/python -m pytest -c ../pyproject.toml \
	  --rootdir .. -p no:cacheprovider --junitxml=$(CURDIR)/$(RESULTS)/tf216-newest-keras.xml \
	  -k fit_in_many_ways ../tests/integration/strategy_test.py

# --- Longer -------------------------------------------------------------------

SOAK_FLAGS ?= --kills 2000
.PHONY: soak
soak: package ## Kills workers at random, for minutes; prints its seed (SOAK_FLAGS)
	$(BIN)/python tests/soak/soak.py $(SOAK_FLAGS)

FUZZ_SECONDS ?= 600
.PHONY: fuzz
fuzz: package ## libFuzzer on headers, control blocks and messages, FUZZ_SECONDS each
	$(call need,command -v clang++,clang)
	$(call cmake_build,fuzz,-DTF_SMB_BUILD_TESTS=OFF -DTF_SMB_BUILD_PACKAGE=OFF -DTF_SMB_BUILD_FUZZERS=ON -DCMAKE_CXX_COMPILER=clang++)
	@for subject in segment messages; do found=build/fuzz/found/$$subject; mkdir -p $$found; \
	  build/fuzz/$${subject}_fuzzer -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 \
	    -artifact_prefix=$$found- $$found tests/fuzz/corpus/$$subject || exit 1; \
	done

# --- Whole runs --------------------------------------------------------------

.PHONY: check
check: lint test-cc ## Every day: lint, C++ tests, Python tests that are not slow
	$(call PYTEST,check) -m "not slow"

.PHONY: test
test: ## All that a change must pass
	@rm -rf $(RESULTS) && mkdir -p $(RESULTS)
	@for stage in lint test-cc test-sanitizers test-bazel test-tf216 test-python; do \
	  echo "=== $$stage"; started=$$SECONDS; \
	  $(MAKE) --no-print-directory $$stage || exit 1; \
	  echo "=== $$stage: $$((SECONDS - started)) s" | tee -a $(RESULTS)/times.txt; \
	done
	@$(BIN)/python tests/summary.py $(RESULTS)

# --- Demo and benchmark ------------------------------------------------------

# A Python with the packages of .venv and without tf_smb: the path file adds the
# folder, and path files in that folder (the editable install) are not followed.
build/plain/.created: $(VENV)/.installed
	$(PYTHON) -m venv --without-pip build/plain
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  >"$$(build/plain/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/tensorflow.pth"
	touch $@

DEMO_OUT := build/demo
# MNIST as an .npz file; none: Keras' download, else scikit-learn's small digits.
MNIST ?= $(wildcard ../shared/data/mnist.npz)
DEMO_DATA := $(if $(MNIST),--data $(abspath $(MNIST)))

.PHONY: demo
demo: package build/plain/.created ## Two workers train on digits; the export loads without tf_smb
	rm -rf $(DEMO_OUT)
	$(BIN)/tf-smb run -n 2 --output all -- $(BIN)/python examples/digits.py --export $(DEMO_OUT) $(DEMO_DATA)
	@cd build && if plain/bin/python -c 'import tf_smb' 2>/dev/null; then \
	  echo "The plain Python can import tf_smb: the check below would prove nothing." >&2; exit 1; fi
	cd build && plain/bin/python ../examples/load_export.py $(CURDIR)/$(DEMO_OUT) $(DEMO_DATA)

.PHONY: bench
bench: package ## Measures all that the box does and writes docs/benchmarks.md
	$(call need,command -v mpicc,openmpi-bin libopenmpi-dev)
	$(BIN)/tf-smb bench all $(BENCH_FLAGS)

.PHONY: clean
clean: ## Removes what was built; the environments stay (rm -r .venv*)
	rm -rf build dist *.egg-info tf_smb/*.so $(VENV)/.built
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
