# `make` lists what there is. Everything is installed into .venv here; nothing else on the machine is touched.

VENV := .venv
# What pip builds and installs is what the lock says, the build backend too (which newer pips ask another variable for).
LOCKED := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1

# The first of these that is Python 3.11 or newer and can make virtual environments; or say PYTHON=/path/to/python3.
PYTHON ?= python3.13 python3.12 python3.11 python3
WORKERS ?= 2
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help run test test-deep test-vllm check bench clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

run: $(VENV)/.ready-run ## install, then start `weir demo` (ARGS="…" are handed on)
	@exec $(VENV)/bin/weir demo $(ARGS)

test: $(VENV)/.ready-test ## all quick tests, on WORKERS=2 processes
	$(VENV)/bin/pytest -n $(WORKERS) -m "not deep and not vllm" $(ARGS)

test-deep: $(VENV)/.ready-test ## the thorough runs too: many more examples, longer histories
	HYPOTHESIS_PROFILE=deep $(VENV)/bin/pytest -n $(WORKERS) -m "not vllm" --timeout 1800 $(ARGS)

test-vllm: $(VENV)/.ready-test ## against a real vLLM on the CPU (Linux, Python 3.11, 2.1 GB)
	$(VENV)/bin/pytest -m vllm -s --timeout 1800 tests/vllm $(ARGS)

check: $(VENV)/.ready-test ## format, lint, types, direction of imports
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

bench: $(VENV)/.ready-bench ## what the proxy costs, beside a direct call, in one run
	$(VENV)/bin/python bench/overhead.py $(ARGS)

clean: ## remove the virtual environment, caches and what was built
	rm -rf $(VENV) $(VENV)-vllm build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One environment, and a stamp for each set of extras that is in it.
$(VENV)/.ready-run: EXTRAS :=
$(VENV)/.ready-test: EXTRAS := [postgres,test]
$(VENV)/.ready-bench: EXTRAS := [postgres,bench]
$(VENV)/.ready-%: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing tokenweir$(EXTRAS) into $(VENV), about half a minute …"
	@$(LOCKED) $(VENV)/bin/python -m pip install --quiet -e '.$(EXTRAS)'
	@touch $@ $(VENV)/.ready-run

$(VENV)/bin/python:
	@for python in $(PYTHON); do \
	    "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	    echo "Making $(VENV) with $$("$$python" --version) …"; \
	    "$$python" -m venv --clear $(VENV) && exit 0; \
	    rm -rf $(VENV); exit 1; \
	done; \
	echo "No Python 3.11 or newer that can make a virtual environment was found (looked for: $(PYTHON))." >&2; \
	echo "Debian, Ubuntu: apt install python3 python3-venv. macOS: brew install python. Or: make PYTHON=/path/to/python3." >&2; \
	exit 1
