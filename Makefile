# make demo, make test: each makes its own virtual environment in .venv first. Needs Python 3.10+ and a C++ compiler.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TRITON ?= triton==3.7.1
VENV211 ?= .venv-torch211
TORCH211 ?= torch==2.11.0
TRITON211 ?= triton==3.6.0
JOBS ?= 2
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PYTEST := -m pytest -q -n $(JOBS) $(PYTEST_ARGS)
INTERPRETED := tests/kernels
# without Triton's interpreter; the import directions have a target of their own
PLAIN := tests --ignore=tests/kernels --ignore=tests/gpu

.PHONY: help demo test lint types floors unit kernels test-torch211 quick-torch211 families gpu bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo           compile a model, compare it with eager and stock torch.compile"
	@echo "make test           lint, types, import directions, all tests on the CPU"
	@echo "make test-torch211  the tests on torch 2.11"
	@echo "make families       some 200 model families (about 40 minutes)"
	@echo "make gpu            tests/gpu on a CUDA device"
	@echo "make bench          the benchmarks on a CUDA device"

demo: $(VENV)/.made
	$(BIN)/python -m flash_fx demo

test: lint types floors unit kernels

lint: $(VENV)/.made
	$(BIN)/ruff check .

types: $(VENV)/.made
	$(BIN)/mypy

floors: $(VENV)/.made
	$(BIN)/python -m pytest -q tests/surface/test_floors.py

unit: $(VENV)/.made
	$(BIN)/python $(PYTEST) -m "not families" $(PLAIN)

# Triton decides at import whether kernels are interpreted
kernels: $(VENV)/.made
	TRITON_INTERPRET=1 $(BIN)/python $(PYTEST) $(INTERPRETED)

test-torch211: $(VENV211)/.made
	$(VENV211)/bin/python $(PYTEST) -m "not families" $(PLAIN)
	TRITON_INTERPRET=1 $(VENV211)/bin/python $(PYTEST) $(INTERPRETED)

quick-torch211: $(VENV211)/.made
	$(VENV211)/bin/python $(PYTEST) -m "not slow" tests/score tests/ops tests/match/test_zoo_verdicts.py tests/test_adversarial.py

families: $(VENV)/.made
	$(BIN)/python $(PYTEST) tests/test_families.py

gpu: $(VENV)/.made
	$(BIN)/python -m pytest -q tests/gpu $(PYTEST_ARGS)

bench: $(VENV)/.made
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/workloads.py
	$(BIN)/python benchmarks/models.py

clean:
	rm -rf $(VENV) $(VENV211)

$(VENV)/.made: pyproject.toml Makefile
	$(call make_venv,$(VENV),"$(TORCH)" "$(TRITON)")

$(VENV211)/.made: pyproject.toml Makefile
	$(call make_venv,$(VENV211),"$(TORCH211)" "$(TRITON211)")

# $(1) the folder, $(2) requirements of torch and Triton; the stamp is written last
define make_venv
	$(PYTHON) -c "import sys; sys.exit('Python 3.10 or newer is needed, this is ' + sys.version.split()[0] if sys.version_info < (3, 10) else 0)"
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install -q --disable-pip-version-check $(2)
	$(1)/bin/python -m pip install -q --disable-pip-version-check -e ".[test]"
	touch $@
endef
