# One word for each task: the demo, the tests, the checks. `make` alone lists all words.

.DEFAULT_GOAL := help
.PHONY: help demo shop relay saga docs docs-build test lint style types format bench bench-full bench-commits costs chaos chaos-mutants simulate simulate-mutants
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
# Hide pip's remarks (a newer pip, a missing index); show pip's errors.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input

BENCH = $(BIN)/python -m benchmarks --database "$(DATABASE)" --only "$(ONLY)" --scenario "$(SCENARIO)"

DATABASE ?=
ONLY ?=
ARGS ?=
SEED ?=
SCENARIO ?=
REASON ?=

help: ## list all words
	@echo 'outboxio, a transactional outbox for asyncio'
	@echo
	@sed -n 's/^\([a-z-]*\):.*## /  make \1|/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "%-21s%s\n", $$1, $$2 }'

demo: $(VENV)/.with-demo ## show the wallet example at work; DATABASE=postgresql://... (or mysql, mariadb) on your own server
	@$(BIN)/outboxio demo $(if $(DATABASE),--database "$(DATABASE)")

shop: $(VENV)/.with-shop ## open a shop on FastAPI and SQLAlchemy; DATABASE=<url> on your own server, ARGS=--serve leaves it open
	@cd examples/shop && DATABASE="$(DATABASE)" $(abspath $(BIN))/python -m story $(ARGS)

relay: $(VENV)/.with-dev ## send events from a shop to a warehouse through NATS or RabbitMQ, and prove that each came once, in order; ARGS=--private
	@$(BIN)/python -m examples.relay $(ARGS)

saga: $(VENV)/.with-demo ## cancel orders over two services, and give the money back; DATABASE=postgresql://... on your own server
	@$(BIN)/python -m examples.saga $(if $(DATABASE),"$(DATABASE)") $(ARGS)

docs: $(VENV)/.with-docs ## build the documentation site and serve it; ARGS='--port 8001', ARGS='--version 1.2' for a release
	@$(BIN)/python -m website --serve $(ARGS)

docs-build: $(VENV)/.with-docs ## build the documentation site into build/site, and check its links
	@$(BIN)/python -m website $(ARGS)

test: $(VENV)/.with-dev ## run all tests; ONLY=quick for the fast tests, ONLY=postgres for one dialect; SEED=7 in random order, ARGS='-k inbox' for pytest
	@$(if $(filter-out quick,$(ONLY))$(ARGS),$(if $(ONLY),OUTBOXIO_TEST_ONLY="$(ONLY:quick=sqlite)") $(BIN)/python -m pytest $(if $(SEED),--random-order --random-order-seed=$(SEED)) $(ARGS),$(BIN)/python -m tests $(if $(filter quick,$(ONLY)),--quick) $(if $(SEED),--seed $(SEED)))

lint: style types ## check format, style, types and imports
	@echo 'All is well.'

style: $(VENV)/.with-dev
	@echo 'format'  && $(BIN)/ruff format --check --quiet --diff .
	@echo 'style'   && $(BIN)/ruff check --quiet .
	@echo 'imports' && $(BIN)/lint-imports --no-logo

types: $(VENV)/.with-dev
	@echo 'types'   && $(BIN)/mypy --no-error-summary && PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

bench: $(VENV)/.with-bench ## measure the speed beside bare SQL and other projects, and compare with the kept ratios; DATABASE=<url>, SCENARIO=drain,execute, ARGS=--strict
	@$(BENCH) --size quick $(ARGS)

bench-full: $(VENV)/.with-bench ## measure in large sizes, less than an hour; ARGS=--write writes docs/reference/performance.md and the figures of all pages
	@$(BENCH) --size full $(ARGS)

bench-commits: $(VENV)/.with-bench ## measure commits in turn; OLD=ee733e2, NEW=. for this tree, ARGS='--rounds 9 --scenario drain'
	@$(BIN)/python -m benchmarks.commits $(or $(OLD),HEAD~1) $(or $(NEW),.) $(ARGS)

costs: $(VENV)/.with-dev ## count what an event costs, and write tests/costs/costs.toml; REASON="..." if a figure rose
	@$(BIN)/python -m tests.costs $(if $(REASON),--reason "$(REASON)") $(ARGS)

chaos: $(VENV)/.with-dev ## kill processes, stop servers, and check the promises; ARGS='--seed 7 --seconds 20'
	@$(BIN)/python -m tests.chaos --database $(or $(ONLY),all) --runs 2 --seconds 15 $(ARGS)

chaos-mutants: $(VENV)/.with-dev ## break promises on purpose, and check that the chaos runs notice
	@$(BIN)/python -m tests.chaos.mutation $(ARGS)

simulate: $(VENV)/.with-dev ## run all scenarios in simulated worlds with new seeds; ARGS='--seeds 100000', ARGS='--scenario ordered --seed 17'
	@$(BIN)/python -m tests.simulation $(ARGS)

simulate-mutants: $(VENV)/.with-dev ## break promises on purpose, and count the simulated worlds until one notices
	@$(BIN)/python -m tests.simulation.mutation $(ARGS)

format: $(VENV)/.with-dev ## format the code
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .

# --- setting up: done once, and again when pyproject.toml changes --------------------------------

$(VENV)/.with-demo: pyproject.toml | $(VENV)/.made
	@echo 'Installing outboxio into $(VENV) ...'
	@$(PIP) -e '.[cli,postgres,mysql]'
	@touch $@

$(VENV)/.with-shop: pyproject.toml | $(VENV)/.made
	@echo 'Installing outboxio and the packages of the shop into $(VENV) ...'
	@$(PIP) -e '.[shop]'
	@touch $(VENV)/.with-demo $@

$(VENV)/.with-docs: pyproject.toml | $(VENV)/.made
	@echo 'Installing outboxio and the maker of the documentation into $(VENV) ...'
	@$(PIP) -e '.[all,docs]'
	@touch $(VENV)/.with-demo $@

# The developers' packages include those of the demo, of the shop and of the documentation, so this rule sets all stamps.
$(VENV)/.with-dev: pyproject.toml | $(VENV)/.made
	@echo 'Installing outboxio and its tools into $(VENV), a minute the first time ...'
	@$(PIP) -e '.[dev]'
	@touch $(VENV)/.with-demo $(VENV)/.with-shop $(VENV)/.with-docs $@

# The chart needs more packages than the tests.
$(VENV)/.with-bench: $(VENV)/.with-dev
	@echo 'Installing the packages of the benchmarks ...'
	@$(PIP) -e '.[bench]'
	@touch $@

# A python3.13 on the PATH may be a stand-in of pyenv, or have no venv module, so each candidate is asked.
$(VENV)/.made:
	@for python in python3.13 python3.12 python3.11 python3; do \
	  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	  $$python -c 'import venv, ensurepip' 2>/dev/null || { half=$$python; continue; }; \
	  echo "Making $(VENV) with $$($$python --version) ..."; \
	  $$python -m venv $(VENV) && touch $@; exit; \
	done; \
	if [ "$$half" ]; then \
	  echo "$$half is here, but its venv module is not: on Debian and Ubuntu, apt-get install $$half-venv" >&2; \
	else \
	  echo 'outboxio needs Python 3.11 or newer, and none was found as python3.13, python3.12, python3.11 or python3.' >&2; \
	  echo 'Install one from https://www.python.org/downloads/ or with your package manager, then run make again.' >&2; \
	fi; exit 1
