# make install | demo | test | lint | bench | gpu | clean. Needs only Python 3.11+, pip and make.
PYTHON ?= python3
JOBS ?= 2
BENCH_ARGS ?=
BIN := .venv/bin
STAMP := .venv/.installed
BENCH_STAMP := .venv/.bench-installed
# Kernels of one thread: ranks share the cores, and sums come out the same on every machine.
export OMP_NUM_THREADS ?= 1

.PHONY: install demo test lint format bench gpu clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: install
	$(BIN)/terrazzo train examples/quickstart.yaml

test: install
	$(BIN)/python -m pytest -q -m "not gpu" -n $(JOBS) $(PYTEST_ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/lint_structure.py src/terrazzo benchmarks tools

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(BENCH_STAMP)
	$(BIN)/terrazzo bench $(BENCH_ARGS)

# DeepSpeed comes as source, and building it asks for the torch that is installed already.
$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check setuptools wheel hatchling editables
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt \
	  -e '.[bench]'
	touch $@

gpu: $(BENCH_STAMP)
	$(BIN)/python -m pytest -q -m gpu $(PYTEST_ARGS)
	$(BIN)/python -m benchmarks.gpu

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis benchmarks/out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
