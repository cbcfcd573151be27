# make demo    see what vitrail does      make test    every check and test
# make bench   measure against the peers  make format  let ruff lay out the code
#              (four hours; resumes where it was stopped; DATA=folder holds the datasets and
#              WEIGHTS=folder a DeiT-Ti/16 checkpoint; what is absent is skipped)
# make wheel   build it, and use it in an empty environment
# make test-cpus    the numeric tests with other instruction sets, thread counts and a busy core
# make reproduction DATA=fashion_mnist.npz    the paper's experiments, an hour and a half
#
# Each makes .venv and installs what it needs. PYTHON chooses the interpreter (3.11 or newer).

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
export PYTHONWARNINGS :=

.PHONY: demo test test-cpus bench wheel reproduction format clean

demo: .venv/base
	$(BIN)/vitrail demo --out demo

test: .venv/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/pytest --numprocesses 2

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
	@echo "installing vitrail and what its tests need into .venv (a few minutes the first time)"
	$(INSTALL) --editable '.[dev]'
	@touch $@

.venv/bench: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing vitrail and its peers into .venv (a few minutes the first time)"
	$(INSTALL) --editable '.[bench]'
	@touch $@
