# make demo   the main job on the default model        make test       linters, types, every test
# make quick  linters, and the tests that a change touches, in a minute (BASE=main: since that commit)
# make check  linters and types, then the tests        make gpu-check  on a machine with a CUDA GPU
# make bench  every benchmark, one after another       make lock       write constraints.txt again
# make bench-peers  beside llama.cpp, OpenVINO and transformers, which it installs
# make durations  how long the suites take, into CONTRIBUTING.md
# make docs   the documentation as a site, into site/; a warning is an error

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
# Hundreds of processes import the same modules: one compiles them for all.
unexport PYTHONDONTWRITEBYTECODE
# A CUDA build of torch brings the triton that it was built for; the CPU build brings none.
TRITON := $(BIN)/python -c 'import importlib.util as u; print("" if u.find_spec("triton") else "triton==3.9.0")'

# The oldest ipykernel that is supported, and one between: the tests run notebooks in these, too.
IPYKERNELS := 6.31.0 7.3.0

.PHONY: demo test quick durations lint check gpu-check bench bench-peers docs lock install clean

install: $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/python examples/run.py examples/01_quickstart.ipynb

test: lint
	$(PYTEST) $(PARALLEL) tests/unit tests/kernels tests/simulation
	$(PYTEST) $(PARALLEL) tests/process
	$(PYTEST) $(PARALLEL) tests/notebook

quick: $(VENV)/.installed-dev
	$(BIN)/python -m tests.tools.quick $(BASE)

# Each suite with the seconds that it takes by the clock, and with its report.
durations: $(VENV)/.installed-dev
	@set -e; mkdir -p build; arguments=; \
	for suite in "tests/unit tests/kernels tests/simulation" tests/process tests/notebook; do \
		report=build/junit_$$(echo $$suite | tr -c 'a-z\n' _).xml; begin=$$(date +%s); \
		$(PYTEST) $(PARALLEL) $$suite --junitxml=$$report; \
		set -- "$$@" "$$suite=$$(($$(date +%s) - begin)):$$report"; \
	done; $(BIN)/python -m tests.tools.durations "$$@"

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers $(WORKERS)

check: test

gpu-check:
	$(PYTHON) benchmarks/gpu_check.py

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/run_all.py

# Beside llama.cpp, OpenVINO and transformers, with weights of the default model (MODEL=file.gguf: of another).
bench-peers: $(VENV)/.installed-peers
	$(BIN)/python benchmarks/bench_peers.py $(if $(MODEL),--model $(MODEL)) --out docs/benchmarks/peers.json
	$(BIN)/python benchmarks/bench_quality.py $(if $(MODEL),--model $(MODEL)) --out docs/benchmarks/quality.json

# Material would tell everybody who builds a site that MkDocs 2 is another program; pyproject.toml excludes it.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing nbengine and what it needs into $(VENV) (about a minute)"
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e ".[notebook,server,structured]"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the development tools"
	$(PIP) install -c constraints.txt $$($(TRITON)) -e ".[dev]"
	for version in $(IPYKERNELS); do \
		$(PIP) install --no-deps --upgrade --target $(VENV)/ipykernels/$$version ipykernel==$$version || exit 1; done
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "installing what builds the site"
	$(PIP) install -c constraints.txt -e ".[docs]"
	@touch $@

$(VENV)/.installed-peers: $(VENV)/.installed-dev benchmarks/peers/requirements.txt
	@echo "installing the engines to compare with (llama.cpp is compiled: about five minutes)"
	$(PIP) install -c constraints.txt -r benchmarks/peers/requirements.txt
	@touch $@

lock:
	$(BIN)/python -m pip freeze --exclude-editable | grep -v -i -E '^(triton|nvidia-|cuda-)' | sed 's/+cpu$$//' > constraints.txt

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis examples/executed
