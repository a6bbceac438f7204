# make demo         train a network on the digits with every method; picture and table, into demo-output/ (a minute or two)
# make test         lint, types, then every test that is not slow, on as many cores as there are
# make test-slow    the tests that take minutes
# make test-oldest  the tests with the oldest versions that pyproject.toml admits, in an environment of their own
# make test-newest  the tests with the newest versions that pip finds, without pins, in an environment of their own
# make lint         ruff check, ruff format --check and mypy
# make docs         build the documentation site into site/, with warnings as errors, and check its links
# make wheel        build the wheel and the source archive into dist/
# make release-check  build both, install each into an empty environment, and run the blocks of README.md there
# make publish-docs add the site of this version to the branch gh-pages, beside those of earlier versions
# make clean        remove everything that was made here except the environments
#
# Each of them first makes .venv with the pinned versions of constraints.txt and what it needs itself, once, and again when
# pyproject.toml or constraints.txt change. Nothing is compiled. PYTHON chooses the interpreter (make test PYTHON=python3.12),
# VENV the folder of the environment, TESTS what pytest is told (make test TESTS="tests/core -k lanczos").

PYTHON ?= python3
VENV ?= .venv
TESTS ?= tests
OLDEST ?= .venv-oldest
OLDEST_PYTHON ?= python3.11
NEWEST ?= .venv-newest
NEWEST_PYTHON ?= python3
BIN := $(VENV)/bin
PYTEST := python -m pytest -n auto --dist worksteal
unexport PYTHONDONTWRITEBYTECODE  # the tests start many processes, which would compile the package each

.PHONY: demo test test-slow test-oldest test-newest lint docs wheel release-check publish-docs clean

demo: $(VENV)/.lab
	$(BIN)/sanc demo --out demo-output

test: lint
	$(BIN)/$(PYTEST) -m "not slow" $(TESTS)

test-slow: $(VENV)/.dev
	$(BIN)/$(PYTEST) -m slow $(TESTS)

test-oldest: $(OLDEST)/.oldest
	$(OLDEST)/bin/$(PYTEST) -m "not slow" $(TESTS)

test-newest:
	$(NEWEST_PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/pip install --prefer-binary -e '.[test]'
	$(NEWEST)/bin/pip list
	$(NEWEST)/bin/$(PYTEST) -m "not slow" $(TESTS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean
	$(BIN)/python tools/links.py site

wheel: $(VENV)/.dev
	$(BIN)/python -m build

release-check: $(VENV)/.dev
	$(BIN)/python tools/release.py check

publish-docs: $(VENV)/.docs
	PATH="$(abspath $(BIN)):$$PATH" NO_MKDOCS_2_WARNING=1 \
		mike deploy --push --update-aliases $$($(BIN)/sanc --version | cut -d' ' -f2) latest  # it runs mkdocs of the PATH
	$(BIN)/mike set-default --push latest

clean:
	rm -rf build dist demo-output site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name ".venv*" -prune -o -name __pycache__ -type d -print | xargs rm -rf

$(VENV)/.lab $(VENV)/.dev $(VENV)/.docs: $(VENV)/.%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --prefer-binary -c constraints.txt -e '.[$*]'
	touch $@

$(OLDEST)/.oldest: pyproject.toml tools/oldest.py
	$(OLDEST_PYTHON) -m venv --clear $(OLDEST)
	$(OLDEST_PYTHON) tools/oldest.py pyproject.toml > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/pip install --prefer-binary -c $(OLDEST)/constraints.txt -e '.[test]'
	touch $@
