# make install | demo | test | test-long | mutations | third-party | lint | docs | dist | bench | gpu | clean. Needs only Python 3.11+, pip and make.
PYTHON ?= python3
# Twice the cores of a small machine: half of the time tests wait, for other processes and for their starts.
JOBS ?= 4
BENCH_ARGS ?=
GPU_ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
# What .venv has: the package itself, with the tests, with what checks and builds it, with what it is measured beside.
BASE := .venv/.base
TEST := .venv/.test
DEV := .venv/.dev
BENCH := .venv/.bench
DOCS := .venv/.docs
# Kernels of one thread: ranks share the cores, and sums come out the same on every machine.
export OMP_NUM_THREADS ?= 1
# Compiled once, also where the environment says otherwise: tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install demo test test-long mutations third-party lint format docs dist bench gpu clean

install: $(TEST)

$(BASE): pyproject.toml constraints.txt
	@echo "installing Terrazzo and torch into .venv: once, some minutes, mostly the download of torch ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@rm -f $@; { $(PIP) -e . && touch $@; } | sed -un '/^ *Downloading .*whl (/p; /^Installing/p'; test -f $@

$(TEST): $(BASE)
	$(PIP) -e '.[test]'
	@touch $@

$(DEV): $(TEST)
	$(PIP) -e '.[dev]'
	@touch $@

demo: $(BASE)
	@echo "training a small language model on two processes: two minutes on a quiet laptop, longer on a busy machine ..."
	@$(BIN)/terrazzo train examples/quickstart.yaml

test: install
	$(BIN)/python -m pytest -q -m "not gpu and not long" -n $(JOBS) $(PYTEST_ARGS)

# All of `make test`, whole grids, the soaks, 25 times as many faults, kills and examples, and random programs: hours.
test-long: export TERRAZZO_EXAMPLES ?= 25
test-long: export TERRAZZO_FAULTS ?= 25
test-long: export TERRAZZO_SOAK_KILLS ?= 20
test-long: export TERRAZZO_PROGRAMS ?= 0:1000
test-long: install
	$(BIN)/python -m pytest -q -m "not gpu" -n $(JOBS) --timeout 7200 $(PYTEST_ARGS)

# Faults put in on purpose, each of which `make test` must find.
mutations: install
	$(BIN)/python -m tools.mutations $(MUTATIONS)

# Scripts of other libraries as they are and on Terrazzo; CHECKOUTS is a folder of clones (tools/third_party). PAGE is
# written: docs/guides/third-party.md.
third-party: install
	@test -n "$(CHECKOUTS)" || { echo "make third-party CHECKOUTS=folder: with clones of what tools/third_party/scripts.toml names"; exit 2; }
	$(BIN)/python -m tools.third_party $(CHECKOUTS) $(SCRIPTS) $(if $(PAGE),--page $(PAGE))

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tools.lint src/terrazzo benchmarks tools hostcuda

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation as a site, in site/; a broken link, a page outside the nav or any warning ends it.
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(DOCS)
	$(BIN)/python -m mkdocs build --quiet --strict

$(DOCS): $(BASE)
	$(PIP) -e '.[docs]'
	@touch $@

# A wheel and a source distribution, from the same commit the same bytes.
dist: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 1577836800)
dist: $(DEV)
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

bench: $(BENCH)
	$(BIN)/terrazzo bench $(BENCH_ARGS)

# DeepSpeed comes as source, and building it asks for the torch that is installed already.
$(BENCH): $(TEST)
	$(PIP) setuptools wheel hatchling editables
	$(PIP) --no-build-isolation -e '.[bench]'
	@touch $@

# The first half hour on a GPU: one table, and one record to send back. See docs/performance.md.
gpu: $(BENCH)
	$(BIN)/python -m benchmarks.gpu.first $(GPU_ARGS)

clean:
	rm -rf .venv build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis benchmarks/out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
