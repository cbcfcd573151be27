# make demo    train, evaluate and inspect a small model
# make check   lint, types and fast tests, about a minute
# make test    all checks and tests
# make bench   measure against other libraries (two hours, resumable; DATA=folder holds the
#              datasets and WEIGHTS=folder a DeiT-Ti/16 checkpoint; sections without them are skipped)
# make format  format the code with ruff
# make wheel   build the wheel and try it in an empty environment
# make test-cpus    numeric tests with other instruction sets, thread counts and a busy core
# make reproduction DATA=fashion_mnist.npz    the paper's experiments, an hour and a half
#
# Each target creates .venv and installs its dependencies. PYTHON selects the interpreter (3.11+).

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Each worker runs neighboring tests, which share fixtures and imports.
WORKERS := --numprocesses 2 --dist worksteal
export PYTHONWARNINGS :=

# Some tests need a browser or other shells and are skipped without them; CI installs them as root.
SYSTEM_PACKAGES := if [ -n "$$CI" ] && [ "$$(id -u)" = 0 ]; \
	then apt-get -qq update && apt-get -qq install --yes chromium zsh fish >/dev/null \
	|| echo "note: no Chromium, zsh or fish could be installed; their tests are skipped"; \
	else echo "note: without Chromium, tests of web pages are skipped"; fi

.PHONY: demo check test test-cpus bench wheel reproduction format clean

demo: .venv/base
	$(BIN)/vitrail demo --out demo

check: .venv/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/pytest $(WORKERS) -m "not slow"

test: .venv/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/pytest $(WORKERS)

test-cpus: .venv/dev
	$(BIN)/python scripts/test_cpus.py

bench: .venv/bench
	DATA='$(DATA)' WEIGHTS='$(WEIGHTS)' $(BIN)/python benchmarks/run.py

wheel:
	$(PYTHON) scripts/smoke.py

reproduction: .venv/base
	$(BIN)/vitrail reproduce all --data $(DATA) --docs reproduction

format: .venv/dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv demo dist .pytest_cache .ruff_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/base: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing vitrail into .venv"
	$(INSTALL) --editable .
	@touch $@

.venv/dev: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing vitrail and its test dependencies into .venv (a few minutes the first time)"
	$(INSTALL) --editable '.[dev]'
	@command -v chromium >/dev/null || $(SYSTEM_PACKAGES)
	@touch $@

.venv/bench: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing vitrail and the libraries it is compared with into .venv (a few minutes the first time)"
	$(INSTALL) --editable '.[bench]'
	@touch $@
