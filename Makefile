# `make demo` and `make test` do all the set-up themselves; PYTHON names the interpreter to use.
PYTHON ?= python3
BIN := .venv/bin
SET_UP := .venv/.done

.PHONY: build clean demo format lint test test-all
.DELETE_ON_ERROR:

$(SET_UP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one with: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(SET_UP)
	$(BIN)/python examples/demo.py

lint: $(SET_UP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(SET_UP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: lint
	$(BIN)/pytest -m "not slow" --numprocesses 2 --dist worksteal

test-all: lint
	$(BIN)/pytest

build: $(SET_UP)
	$(BIN)/python -m build --outdir dist

clean:
	rm -rf .venv dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
