# make demo   the main job on the default model        make test       what CI runs
# make check  linters and types, then the tests        make gpu-check  on a machine with a CUDA GPU
# make bench  every benchmark, one after another       make lock       write constraints.txt anew

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PYTEST := $(BIN)/python -m pytest
# Tests of one file share their engines, and stay in one process.
WORKERS ?= 2
PARALLEL := -n $(WORKERS) --dist loadfile
# As the engine does for its own processes: two torch programs on one machine would spin in each other's way.
export GOMP_SPINCOUNT ?= 1000
# A CUDA build of torch brings the triton that it was built for; the CPU build brings none.
TRITON := $(BIN)/python -c 'import importlib.util as u; print("" if u.find_spec("triton") else "triton==3.9.0")'

# The oldest ipykernel that is supported, and one between: the tests run notebooks in these, too.
IPYKERNELS := 6.31.0 7.3.0

.PHONY: demo test lint check gpu-check bench lock install clean

install: $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/python examples/run.py examples/01_quickstart.ipynb

test: lint
	$(PYTEST) $(PARALLEL) tests/unit tests/kernels
	$(PYTEST) $(PARALLEL) tests/process
	$(PYTEST) $(PARALLEL) tests/notebook

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: test

gpu-check:
	$(PYTHON) benchmarks/gpu_check.py

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/run_all.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing nbengine and what it needs into $(VENV) (about a minute)"
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e ".[notebook,structured]"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the development tools"
	$(PIP) install -c constraints.txt $$($(TRITON)) -e ".[dev]"
	for version in $(IPYKERNELS); do \
		$(PIP) install --no-deps --upgrade --target $(VENV)/ipykernels/$$version ipykernel==$$version || exit 1; done
	@touch $@

lock:
	$(BIN)/python -m pip freeze --exclude-editable | grep -v -i -E '^(triton|nvidia-|cuda-)' | sed 's/+cpu$$//' > constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis examples/executed
