# Waybill. `make help` lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo up test unit integration e2e lint format types bench docs clean lock coverage test-containers

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
CODE := shared services deploy bench tests clients/python
# Side by side, a file whole at one worker. More workers than cores: many tests wait for a timeout or an outage.
WORKERS ?= 3
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-16s %s\n", $$1, $$2}'

setup: $(READY) ## make the environment in .venv, with exactly the locked packages

$(READY): requirements.lock requirements-bootstrap.lock pyproject.toml clients/python/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'Python 3.11 or newer is needed: make PYTHON=python3.11 …' >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-bootstrap.lock
	$(BIN)/uv pip sync --quiet --compile-bytecode --require-hashes requirements.lock requirements-bootstrap.lock
	$(BIN)/uv pip install --quiet --no-deps --no-build-isolation -e . -e clients/python
	$(BIN)/python -c 'from pathlib import Path; from deploy.local import jars; jars.fetch(jars.cache_folder(Path(".state/cache")))'
	@touch $@

demo: setup ## 5,000 messages through everything while parts are killed, and a verdict
	$(BIN)/waybill demo

up: setup ## all of Waybill on this machine, until Ctrl-C
	$(BIN)/waybill up

test: setup ## all tests, WORKERS files at a time
	$(PYTEST)

unit: setup ## tests without services
	$(PYTEST) tests/unit

integration: setup ## tests on real Postgres, Kafka and Redis
	$(PYTEST) tests/integration

e2e: setup ## tests of all services together
	$(PYTEST) tests/e2e

test-containers: setup ## the integration tests on containers; starts an engine of its own, needs root
	$(BIN)/python -m tests.containers.run

coverage: setup ## all tests, with what they covered
	$(PYTEST) --cov --cov-report=
	$(BIN)/coverage report --skip-covered --sort=cover

lint: setup ## style, import contracts, dependencies
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/lint-imports
	$(BIN)/deptry .
	cd clients/python && ../../$(BIN)/deptry .

format: setup ## put the code into its format
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

types: setup ## the strict type checker
	$(BIN)/mypy

bench: setup ## measure, side by side with the reference, and write docs/performance.md
	$(BIN)/waybill bench send --keep
	$(BIN)/waybill bench e2e --keep
	$(BIN)/waybill bench relay --deep 5000000 --keep
	$(BIN)/waybill bench gateway --keep

docs: setup ## write the generated reference anew
	$(BIN)/python -m deploy.reference

lock: $(READY) ## resolve the locked packages anew
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate --no-header --no-emit-package waybill-client --extra local --extra dev pyproject.toml -o requirements.lock
	echo uv | $(BIN)/uv pip compile --quiet --generate-hashes --no-emit-index-url --no-annotate --no-header - -o requirements-bootstrap.lock

clean: ## remove what was made, the environment and the state of `waybill up` included
	rm -rf .venv .state .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache .coverage .coverage.* build dist
