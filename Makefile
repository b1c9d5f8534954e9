# `make` alone lists all targets; `make demo` and `make test` are all that a newcomer needs.
#
#   make demo ARGS='--help'            arguments for the program behind a target
#   make test PYTHON=python3.13        another interpreter (after `make clean`)
#   make quick PYTHON=python3.13       the quick tests on another interpreter, beside .venv

PYTHON ?= python3
ARGS   ?=
VENV   := .venv
BIN    := $(VENV)/bin

# Only pip is needed, and it installs no file of which constraints/hashes.txt doesn't have the hash.
INSTALL = $(BIN)/python scripts/install.py

# Scripts that write pages, or parts of them, from the code; the tests run each with --check.
WRITTEN = licences traits commands errors_page timing_tables figures proof_figures

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo quick test full changed busy pythons lowest next proof format lint types layers unit wheel docs pictures dist audit coverage bench servers clean

help: ## List all targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## Demonstrate elections and queues (ARGS='...')
	@$(BIN)/tenure demo $(ARGS)

ifeq ($(origin PYTHON),command line)
quick: ## Run the checks that take a minute, before each commit: format, lint, layers, types, tests without servers
	@$(PYTHON) scripts/pythons.py $$(command -v $(PYTHON) || echo $(PYTHON)) -- $(ARGS)
else
quick: $(VENV)/.dev
	@$(BIN)/python scripts/stages.py format lint layers types quick
endif

test: $(VENV)/.dev servers ## Check a change: format, lint, layers, types, wheel, tests
	@$(BIN)/python scripts/stages.py format lint layers types wheel tests

full: $(VENV)/.dev servers ## Run what takes long, after `make test`: the site, clusters, cut networks, kills, foreign clients, examples
	@$(BIN)/python scripts/stages.py docs full

changed: $(VENV)/.dev servers ## Run the tests that your change can reach (ARGS='--base HEAD~3 -- -x'; --list, --why FILE)
	@$(BIN)/python -m scripts.changed $(ARGS)

busy: $(VENV)/.dev servers ## Run the tests beside eight busy processes (ARGS='make full'; `make test` by default)
	@$(BIN)/python scripts/busy.py $(or $(ARGS),$(MAKE) test)

pythons: | $(BIN)/python ## Run the quick tests on every installed Python from 3.11 to 3.14 (ARGS='3.12 3.13 -- -x')
	@$(BIN)/python scripts/pythons.py $(ARGS)

lowest: $(VENV)/.dev servers ## Run the tests of all stores with the lowest versions that pyproject.toml allows
	@$(BIN)/python scripts/pythons.py --lowest -- $(ARGS)

next: $(VENV)/.dev ## Run the tests of Service Bus with the newest azure-servicebus, pre-releases included
	@$(BIN)/python scripts/pythons.py --next -- $(ARGS)

proof: $(VENV)/.dev servers ## Run the long tests: simulations, fuzz, kills, soak; resumable (ARGS='--elections 1000000 --soak 3600')
	@$(BIN)/python -m tests.proof $(ARGS)

format: $(VENV)/.dev ## Format the code, and fix what ruff can fix
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

lint: $(VENV)/.dev ## Check format and lint (ruff), the workflow files (zizmor), and that tests write out no short durations
	@$(BIN)/python scripts/stages.py format lint

types: $(VENV)/.dev ## Check types: mypy strict inside, pyright on the public API
	@$(BIN)/python scripts/stages.py types

layers: $(VENV)/.dev ## Check that modules import downwards only (import-linter)
	@$(BIN)/python scripts/stages.py layers

unit: $(VENV)/.dev ## Run the tests alone (ARGS='-k lease -x')
	@$(BIN)/python -m pytest $(ARGS)

wheel: $(VENV)/.dev ## Build the wheel, install it without extras, time its import
	@$(BIN)/python scripts/stages.py wheel

docs: $(VENV)/.dev ## Build the site of the documentation into build/site, without network; a dead link fails
	@rm -rf build/site
	@set -e; for name in $(WRITTEN); do $(BIN)/python -m scripts.$$name; done
	@$(BIN)/python scripts/stages.py docs
	@echo "Open build/site/index.html"

pictures: $(VENV)/.dev servers ## Make the pictures of screens in docs/images anew, in Chromium; they differ each time
	@set -e; for name in demo_picture pictures; do $(BIN)/python -m scripts.$$name; done

dist: $(VENV)/.dev ## Build what is published, and check it: metadata, contents, bytes, extras, its own tests (ARGS='contents')
	@$(BIN)/python -m scripts.check_dist $(ARGS)

audit: $(VENV)/.dev ## Look for known vulnerabilities of all packages that are pinned; asks the package index
	@$(BIN)/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r constraints/dev.txt -r constraints/bench.txt

coverage: $(VENV)/.dev ## Run the tests and show which lines and branches they miss
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest $(ARGS)
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report

bench: $(VENV)/.bench ## Measure tenure beside other libraries, and write docs/performance.md anew (ARGS='NAME' for others)
	@$(BIN)/python -m benchmarks $(ARGS)

servers: $(VENV)/.dev ## Install the servers that the tests start (Redis, PostgreSQL, etcd, …), unless they are installed
	@$(BIN)/python scripts/servers.py

clean: ## Remove everything that make has created, .venv too
	rm -rf $(VENV) $(VENV)-3.* .servers dist sbom build htmlcov .coverage .coverage.* coverage.xml
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One environment; each stamp names what is installed, and is out of date when the file that pins it changes.

$(VENV)/.demo: pyproject.toml constraints/hashes.txt | $(BIN)/python
	@echo "Installing tenure into $(VENV)"
	@$(INSTALL) cli dashboard
	@touch $@

$(VENV)/.dev: pyproject.toml constraints/hashes.txt | $(BIN)/python
	@echo "Installing tenure and its development tools into $(VENV) (about a minute, once)"
	@$(INSTALL) all dev
	@touch $(VENV)/.demo $@

# Without hashes: these are other libraries, for measurements by hand.
$(VENV)/.bench: constraints/bench.txt $(VENV)/.dev
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
	    -c constraints/dev.txt -c constraints/bench.txt -e '.[all,dev,bench]'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "tenure needs Python 3.11 or newer, and '$(PYTHON)' is not; try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); \
	    echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 1; }
