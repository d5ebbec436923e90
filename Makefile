# make demo       install into .venv and watch a real model answer
# make test       install, lint, and run the tests (some minutes on two cores)
# make test-all   the slow tests too
# PYTHON=python3.12 chooses the interpreter; it gets a .venv of its own.

PYTHON ?= python3
VENV ?= $(if $(filter python3,$(PYTHON)),.venv,.venv-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
# processes of the tests, each with a file of them at a time
WORKERS ?= 2
TESTS = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

.PHONY: demo test test-all lint setup requirements

demo: setup
	$(BIN)/python decode.py --config=configs/smollm2.py

test: setup lint
	$(TESTS)

test-all: setup lint $(VENV)/engines
	$(TESTS) -m "slow or not slow"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

setup: $(VENV)/installed

# pip 24.1 and newer report how far a download is
$(VENV)/installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) does not run or is older than 3.11: make PYTHON=..."; \
	    exit 2; }
	@echo "installing into $(VENV): 1 GB, about a minute"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24.1"
	$(BIN)/python -m pip install --quiet -r requirements.txt
	@touch $@

# submitit and Ray (240 MB), for the tests that run them
$(VENV)/engines: $(VENV)/installed pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[sweep]'
	@touch $@

# pin anew what pyproject.toml asks for, for every supported Python at once
requirements: setup
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --upgrade \
	  --python-version 3.11 --no-emit-index-url --no-annotate --no-header \
	  --output-file requirements.txt
