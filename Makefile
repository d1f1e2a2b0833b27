# Every target does its own set-up: `make demo` or `make test` is all a fresh clone needs.

PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
ZOO    := .venv-zoo
# With bytecode written, whatever the environment says: hundreds of tests start processes, each of which
# would compile all modules again. With threads that sleep while they wait: the tests of threads take
# half the time where two processes share two cores.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all quick sanitize lint types format golden bench zoo gpu-ahead gpu-check \
  gpu-bench dist clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## create .venv with everything development needs

# Depends on the C++ sources too: this is what builds them. With tools that stay where they are: those
# that pip would bring for one build lie in a folder of a new name each time, which ninja takes for
# other headers, and compiles everything again. setuptools builds the data of the demo, which come as
# sources; the one that a new environment holds may be too old to do it without the package wheel.
BUILD := 'scikit-build-core>=0.10' 'pybind11>=2.13' 'cmake>=3.20' ninja 'setuptools>=77'
$(READY): pyproject.toml constraints.txt $(wildcard csrc/CMakeLists.txt csrc/*.cpp csrc/*.h csrc/units/*.cpp)
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or later found; try: make PYTHON=/path/to/python"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt $(BUILD)
	$(BIN)/python -m pip install -c constraints.txt --no-build-isolation -e '.[dev]'
	@$(BIN)/python -c 'from recast.runtime import device as d; print("CPU kernels:", d.why_missing() or "built")'
	@touch $@

demo: $(READY)  ## train a DLRM and its optimised twin on real data; writes out/report.html, out/graph.svg
	$(BIN)/python examples/demo.py

test: $(READY)  ## run the tests (about 15 minutes on 2 cores)
	$(PYTEST) -n 2 --dist worksteal

test-all: $(READY)  ## run the long tests too (processes that die, wheels, dry runs), and every case of all
	$(PYTEST) -n 2 --dist worksteal --long

quick: $(READY)  ## run the tests except the slow ones
	$(PYTEST) -n 2 --dist worksteal -m "not slow"

sanitize: $(READY)  ## run the CPU kernels' tests under sanitizers, which must find planted faults (19 CPU minutes; 7 once built)
	$(BIN)/python tests/sanitize/run_sanitizers.py

lint: $(READY)  ## check style: ruff, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files -co --exclude-standard 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu' 'csrc/*.cuh' 'tests/*.cu' | xargs -r $(BIN)/clang-format --dry-run --Werror

types: $(READY)  ## check types: mypy, strict
	$(BIN)/mypy

format: $(READY)  ## fix the style that lint checks
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files -co --exclude-standard 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu' 'csrc/*.cuh' 'tests/*.cu' | xargs -r $(BIN)/clang-format -i

golden: $(READY)  ## rewrite expected dumps and the outputs in the documents; read the difference
	$(PYTEST) -n 2 --dist loadfile --regen

bench: $(READY)  ## time training steps beside every installed peer; writes benchmarks/results/
	$(BIN)/python benchmarks/peers --judged

zoo: $(ZOO)/.ready  ## judge and time the models of eight public libraries; writes benchmarks/results/
	OMP_NUM_THREADS=1 PYTHONPATH=. $(ZOO)/bin/python benchmarks/zoo.py

# The libraries get an environment of their own, in which the checkout runs without being installed.
$(ZOO)/.ready: pyproject.toml $(wildcard tests/zoo/*.txt)
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or later found; try: make PYTHON=/path/to/python"; exit 2; }
	test -x $(ZOO)/bin/python || $(PYTHON) -m venv $(ZOO)
	$(ZOO)/bin/python -m pip install -c constraints.txt -r tests/zoo/requirements.txt
	$(ZOO)/bin/python -m pip install --no-deps -r tests/zoo/libraries.txt
	@touch $@

gpu-ahead: $(READY)  ## compile ahead, without a GPU, what the next two need on one; into build/gpu-cache
	$(BIN)/python benchmarks/gpu_ahead.py

# For a bare machine with a GPU: they need torch, and nothing that this Makefile sets up.
gpu-check:  ## check everything on this machine's GPU (190 s on an H200, at most 8 minutes); writes benchmarks/results/
	$(PYTHON) benchmarks/gpu_check.py

gpu-bench:  ## time models and ops on this machine's GPU beside eager and torch.compile; writes benchmarks/results/
	$(PYTHON) benchmarks/gpu_bench.py

dist: $(READY)  ## build the wheel and the source distribution into dist/
	$(BIN)/python -m pip install -q build
	$(BIN)/python -m build --outdir dist

clean:  ## remove everything that the other targets made
	rm -rf $(VENV) $(ZOO) build dist out .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
