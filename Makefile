# Bare `make` lists the targets: those whose line ends with a double-hash comment.

PYTHON  ?=
# PYTHON=python3.13 uses an environment of its own, beside that of the default Python.
VENV    := .venv$(if $(PYTHON),-$(notdir $(PYTHON)))
BIN     := $(VENV)/bin
# Stamps of the two sizes of an environment: for serving only, and with the development tools.
SERVING := $(VENV)/.serving
STAMP   := $(VENV)/.installed
ARGS    ?=
NAME    ?= memory
ROWS    ?=
FULL    ?=
MUTANTS ?=
SEED    ?=
# One more than there are cores on a small machine: many tests wait for a process or a disk.
WORKERS ?= 3

.DEFAULT_GOAL := help
.PHONY: help serve test check fix bench parity score docs package sim services env clean static

help:
	@awk 'BEGIN {FS = ":.*## "} /^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The large environment can serve, too, and is not replaced by the small one.
serve: $(if $(wildcard $(STAMP)),$(STAMP),$(SERVING)) ## create a small environment if there is none and start Penstock (ARGS=… goes to `penstock serve`)
	@$(BIN)/penstock serve $(ARGS)

test: static services ## everything `make check` does, then every test (ARGS=… goes to pytest, WORKERS=1 runs one at a time)
	$(BIN)/python -m pytest $(if $(filter-out 1,$(WORKERS)),-n $(WORKERS)) $(ARGS)

check: static ## check format, lint, types, layers and style, without running a test

fix: env ## format the code and fix what the linter can fix
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

bench: env ## run one benchmark and print its table (NAME=memory)
	$(BIN)/python -m benchmarks.$(NAME) $(ARGS)

parity: env ## ask every SQS server that can be had for the rules of Amazon SQS, and write docs/reference/parity*.md (minutes; ARGS=--pages only writes)
	@$(BIN)/python -m benchmarks.parity $(ARGS)

score: env services ## run the tests of the scorecard and print it (ROWS="13 15" for some, FULL=1 for the large figures; MUTANTS=1 or MUTANTS="core journal" shows that rows find breakages)
	$(BIN)/python -m $(if $(MUTANTS),tools.mutants $(filter-out 1,$(MUTANTS)),tools.score $(ROWS) $(if $(FULL),--full))

docs: env ## build the site of the documentation into build/site
	@$(BIN)/python -m tools.site

package: env ## build the wheel and the source archive into dist, and try the wheel in an empty environment
	@$(BIN)/python -m tools.package

sim: env ## simulate the cluster with 200 seeds, beginning with a random one (SEED=7 repeats one, FULL=1 runs 100,000)
	$(BIN)/python -m tests.simulation.simulate $(if $(SEED),--seed $(SEED)) $(if $(FULL),--seeds 100000) $(ARGS)

services: ## install the Debian packages the tests need (tools/services.txt)
	@tools/services.sh

env: $(STAMP) ## create .venv with the development tools, again only when pyproject.toml changes (PYTHON=… chooses the Python)
	@:

clean: ## remove caches and build output; .venv stays
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage htmlcov
	find src tests tools benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(SERVING): pyproject.toml tools/environment.sh
	@PYTHON="$(PYTHON)" tools/environment.sh $(VENV) serving
	@touch $@

$(STAMP): pyproject.toml tools/environment.sh
	@PYTHON="$(PYTHON)" tools/environment.sh $(VENV) development
	@touch $@

static: env
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python -m tools.tidy
