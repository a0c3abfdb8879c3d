# One target per task. `make` alone lists the targets.

.DEFAULT_GOAL := help
.PHONY: help demo service relay saga docs docs-build test lint style types format bench bench-full bench-commits costs chaos chaos-mutants simulate simulate-mutants
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
# Hide pip's notices (a newer pip, a missing index) but show its errors.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input

BENCH = $(BIN)/python -m benchmarks --database "$(DATABASE)" --only "$(ONLY)" --scenario "$(SCENARIO)"

DATABASE ?=
ONLY ?=
ARGS ?=
SEED ?=
SCENARIO ?=
REASON ?=

help: ## list the targets
	@echo 'outboxio, a transactional outbox for asyncio'
	@echo
	@sed -n 's/^\([a-z-]*\):.*## /  make \1|/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "%-21s%s\n", $$1, $$2 }'

demo: $(VENV)/.with-demo ## run the wallet example; DATABASE=postgresql://... (or mysql, mariadb) uses your server
	@$(BIN)/outboxio demo $(if $(DATABASE),--database "$(DATABASE)")

service: $(VENV)/.with-service ## run a production-like service with web, worker, webhook and dashboard; DATABASE=<url> uses your server, ARGS=--serve keeps it running
	@cd examples/service && DATABASE="$(DATABASE)" $(abspath $(BIN))/python demo.py $(ARGS)

relay: $(VENV)/.with-dev ## send events from a shop to a warehouse through NATS or RabbitMQ, once and in order; ARGS=--private starts a broker
	@$(BIN)/python -m examples.relay $(ARGS)

saga: $(VENV)/.with-demo ## cancel orders across two services and refund them; DATABASE=postgresql://... uses your server
	@$(BIN)/python -m examples.saga $(if $(DATABASE),"$(DATABASE)") $(ARGS)

docs: $(VENV)/.with-docs ## build the documentation site and serve it; ARGS='--port 8001', ARGS='--version 1.2' for a release
	@$(BIN)/python -m website --serve $(ARGS)

docs-build: $(VENV)/.with-docs ## build the documentation site in build/site and check its links
	@$(BIN)/python -m website $(ARGS)

test: $(VENV)/.with-dev ## run all tests; ONLY=quick the fast ones, ONLY=postgres one dialect, SEED=7 random order, ARGS='-k inbox' for pytest
	@$(if $(filter-out quick,$(ONLY))$(ARGS),$(if $(ONLY),OUTBOXIO_TEST_ONLY="$(ONLY:quick=sqlite)") $(BIN)/python -m pytest $(if $(SEED),--random-order --random-order-seed=$(SEED)) $(ARGS),$(BIN)/python -m tests $(if $(filter quick,$(ONLY)),--quick) $(if $(SEED),--seed $(SEED)))

lint: style types ## check formatting, style, types and imports
	@echo 'No problems found.'

style: $(VENV)/.with-dev
	@echo 'format'  && $(BIN)/ruff format --check --quiet --diff .
	@echo 'style'   && $(BIN)/ruff check --quiet .
	@echo 'imports' && $(BIN)/lint-imports --no-logo

types: $(VENV)/.with-dev
	@echo 'types'   && $(BIN)/mypy --no-error-summary && PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

bench: $(VENV)/.with-bench ## benchmark against bare SQL and other projects, and compare with the recorded ratios; DATABASE=<url>, SCENARIO=drain,execute, ARGS=--strict
	@$(BENCH) --size quick $(ARGS)

bench-full: $(VENV)/.with-bench ## run the full benchmark, under an hour; ARGS=--write updates benchmarks/results and the figures in all pages
	@$(BENCH) --size full $(ARGS)

bench-commits: $(VENV)/.with-bench ## compare two commits; OLD=ee733e2, NEW=. for the working tree, ARGS='--rounds 9 --scenario drain'
	@$(BIN)/python -m benchmarks.commits $(or $(OLD),HEAD~1) $(or $(NEW),.) $(ARGS)

costs: $(VENV)/.with-dev ## count the cost of an event, and write tests/costs/costs.toml; REASON="..." if a figure increased
	@$(BIN)/python -m tests.costs $(if $(REASON),--reason "$(REASON)") $(ARGS)

chaos: $(VENV)/.with-dev ## kill processes, stop servers, and check the guarantees; ARGS='--seed 7 --seconds 20'
	@$(BIN)/python -m tests.chaos --database $(or $(ONLY),all) --runs 2 --seconds 15 $(ARGS)

chaos-mutants: $(VENV)/.with-dev ## break guarantees on purpose, and check that the chaos runs detect it
	@$(BIN)/python -m tests.chaos.mutation $(ARGS)

simulate: $(VENV)/.with-dev ## run all simulated scenarios with new seeds; ARGS='--seeds 100000', ARGS='--scenario ordered --seed 17'
	@$(BIN)/python -m tests.simulation $(ARGS)

simulate-mutants: $(VENV)/.with-dev ## break guarantees on purpose, and count the seeds until a simulation detects it
	@$(BIN)/python -m tests.simulation.mutation $(ARGS)

format: $(VENV)/.with-dev ## format the code
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .

# --- setup: runs once, and again when pyproject.toml changes ---------------------------

$(VENV)/.with-demo: pyproject.toml | $(VENV)/.made
	@echo 'Installing outboxio into $(VENV) ...'
	@$(PIP) -e '.[cli,postgres,mysql]'
	@touch $@

$(VENV)/.with-service: pyproject.toml | $(VENV)/.made
	@echo 'Installing outboxio and the packages for the service into $(VENV) ...'
	@$(PIP) -e '.[service]'
	@touch $(VENV)/.with-demo $@

$(VENV)/.with-docs: pyproject.toml | $(VENV)/.made
	@echo 'Installing outboxio and the documentation tools into $(VENV) ...'
	@$(PIP) -e '.[all,docs]'
	@touch $(VENV)/.with-demo $@

# The development packages include those for the demo, the service and the documentation, so this rule sets all stamps.
$(VENV)/.with-dev: pyproject.toml | $(VENV)/.made
	@echo 'Installing outboxio and its tools into $(VENV); the first time takes about a minute ...'
	@$(PIP) -e '.[dev]'
	@touch $(VENV)/.with-demo $(VENV)/.with-service $(VENV)/.with-docs $@

# The chart needs more packages than the tests.
$(VENV)/.with-bench: $(VENV)/.with-dev
	@echo 'Installing the packages for the benchmarks ...'
	@$(PIP) -e '.[bench]'
	@touch $@

# A python3.13 on the PATH may be a pyenv shim or lack the venv module, so each candidate is tried.
$(VENV)/.made:
	@for python in python3.13 python3.12 python3.11 python3; do \
	  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	  $$python -c 'import venv, ensurepip' 2>/dev/null || { half=$$python; continue; }; \
	  echo "Creating $(VENV) with $$($$python --version) ..."; \
	  $$python -m venv $(VENV) && touch $@; exit; \
	done; \
	if [ "$$half" ]; then \
	  echo "$$half has no venv module: on Debian and Ubuntu, apt-get install $$half-venv" >&2; \
	else \
	  echo 'outboxio needs Python 3.11 or later, but none was found as python3.13, python3.12, python3.11 or python3.' >&2; \
	  echo 'Install one from https://www.python.org/downloads/ or with your package manager, then run make again.' >&2; \
	fi; exit 1
