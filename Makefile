# Everything runs in .venv, which each target creates when it is missing: nothing needs to be done before.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: validate test lint docs browser clean

validate: .venv/installed
	$(BIN)/rwsim validate

test: .venv/tested
	$(BIN)/python -m pytest -m "not slow and not gpu" -n auto --dist worksteal $(PYTEST_ARGS)

lint: .venv/tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Warnings are errors, inside links are checked. DERIVE=T3 runs that derivation alone for the page of them (all: half a minute);
# DOCS_ARGS="-D nb_execution_mode=off" shows notebooks without what their cells print and draw.
DERIVE ?=
docs: .venv/documented
	$(BIN)/python docs/readme.py derivations $(DERIVE)
	rm -rf docs/_build/html
	$(BIN)/python -m sphinx -W --keep-going -q -b html -c docs $(DOCS_ARGS) . docs/_build/html
	$(BIN)/python docs/links.py docs/_build/html

# The browser that the tests of pages drive, as Debian packages it; without one they are skipped.
browser:
	command -v chromium > /dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; }

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt torch -e .
	touch $@

# pip older than 25.1 knows no dependency groups, so the list is read from pyproject.toml by the interpreter.
.venv/tested: .venv/installed
	$(BIN)/python -c "import tomllib; g = tomllib.load(open('pyproject.toml', 'rb'))['dependency-groups']; print(*[d for n in ('peers', 'dev') for d in g[n] if isinstance(d, str)], sep='\n')" > .venv/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -r .venv/dev.txt
	touch $@

.venv/documented: .venv/tested
	$(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['dependency-groups']['docs'], sep='\n')" > .venv/docs.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -r .venv/docs.txt
	touch $@

clean:
	rm -rf .venv dist rwsim-validate docs/_build docs/derivations.md
