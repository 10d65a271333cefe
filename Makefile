# make install | demo | test | test-long | mutations | lint | docs | bench | gpu | clean. Needs only Python 3.11+, pip and make.
PYTHON ?= python3
JOBS ?= 2
BENCH_ARGS ?=
GPU_ARGS ?=
BIN := .venv/bin
STAMP := .venv/.installed
BENCH_STAMP := .venv/.bench-installed
DOCS_STAMP := .venv/.docs-installed
# Kernels of one thread: ranks share the cores, and sums come out the same on every machine.
export OMP_NUM_THREADS ?= 1
# Compiled once, also where the environment says otherwise: tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install demo test test-long mutations lint format docs bench gpu clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: install
	$(BIN)/terrazzo train examples/quickstart.yaml

test: install
	$(BIN)/python -m pytest -q -m "not gpu and not long" -n $(JOBS) $(PYTEST_ARGS)

# All of `make test`, whole grids, the soaks, ten times as many faults and kills, and random programs: hours.
test-long: export TERRAZZO_FAULTS ?= 10
test-long: export TERRAZZO_SOAK_KILLS ?= 20
test-long: export TERRAZZO_PROGRAMS ?= 0:1000
test-long: install
	$(BIN)/python -m pytest -q -m "not gpu" -n $(JOBS) --timeout 7200 $(PYTEST_ARGS)

# Faults put in on purpose, each of which `make test` must find.
mutations: install
	$(BIN)/python -m tools.mutations $(MUTATIONS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/lint_structure.py src/terrazzo benchmarks tools hostcuda

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation as a site, in site/; a broken link, a page outside the nav or any warning ends it.
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(DOCS_STAMP)
	$(BIN)/python -m mkdocs build --quiet --strict

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

bench: $(BENCH_STAMP)
	$(BIN)/terrazzo bench $(BENCH_ARGS)

# DeepSpeed comes as source, and building it asks for the torch that is installed already.
$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check setuptools wheel hatchling editables
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt \
	  -e '.[bench]'
	touch $@

# The first half hour on a GPU: one table, and one record to send back. See docs/performance.md.
gpu: $(BENCH_STAMP)
	$(BIN)/python -m benchmarks.gpu.first $(GPU_ARGS)

clean:
	rm -rf .venv build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis benchmarks/out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
