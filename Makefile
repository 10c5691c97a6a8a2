# Everything here sets up what it needs: a machine with Python 3.11 or 3.12, make and pip is enough.
# The first call installs (about 4 minutes); later calls start at once.

PYTHON ?= $(shell for p in python3 python3.12 python3.11; do $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && { echo $$p; break; }; done)
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1

.PHONY: help setup demo demo-fashion test test-fast lint check clean

help:  ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

setup: $(STAMP)  ## Create .venv and install the package with its test and lint tools

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "needs Python 3.11 or 3.12: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,lint]'
	@touch $(STAMP)

demo: $(STAMP)  ## A growth study on digits, about a minute on two idle cores
	$(BIN)/growth run search_spaces/jobs/digits.yaml

demo-fashion: $(STAMP)  ## A growth study on Fashion-MNIST with two workers a trial, under 25 minutes
	$(BIN)/growth run search_spaces/jobs/fashion_mnist.yaml

test: $(STAMP)  ## All tests: fast, then those on Ray, then those that kill processes
	$(BIN)/pytest -q -m 'not ray and not chaos and not browser'
	$(BIN)/pytest -q -m ray
	$(BIN)/pytest -q -m chaos

test-fast: $(STAMP)  ## Tests without Ray
	$(BIN)/pytest -q -m 'not ray and not chaos and not browser'

lint: $(STAMP)  ## Style, types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test  ## What CI runs

clean:  ## Remove caches (studies and the environment stay)
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
