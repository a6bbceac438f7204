# make demo       train a network on the digits with every method; picture and table, into demo-output/ (half a minute)
# make test       lint, then every test that is not slow
# make test-slow  the tests that take minutes
# make lint       ruff check, ruff format --check and mypy
# make wheel      build the wheel and the source archive into dist/
# make clean      remove everything that was made here except .venv
#
# Each of them first makes .venv with the pinned versions of constraints.txt, once, and again when pyproject.toml or
# constraints.txt change. PYTHON chooses the interpreter: make test PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test test-slow lint wheel clean

demo: $(STAMP)
	$(BIN)/python -m sanc.lab.demo --out demo-output

test: lint
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

wheel: $(STAMP)
	$(BIN)/python -m build

clean:
	rm -rf build dist demo-output site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -print | xargs rm -rf

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -c constraints.txt -e '.[dev]'
	touch $@
