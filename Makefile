# Two commands matter: `make demo` and `make test`. Both set up what they need; a second run is quick.
#   PYTHON=python3.12 make demo        another Python (3.11 or newer)
#   K3LAB_SYSTEM_PYTHON=1 make demo    no virtual environment: PYTHON with its own torch and triton, as on a GPU host
#   VENV=/elsewhere make test          the virtual environment in another place

PYTHON ?= python3
VENV ?= .venv
ifeq ($(K3LAB_SYSTEM_PYTHON),1)
override VENV :=
endif

ifeq ($(strip $(VENV)),)
RUN := PYTHONPATH="$(CURDIR)/.lint$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON)
DEMO_READY := .lint/k3lab check-python
TEST_READY := .lint/k3lab check-python
else
RUN := $(VENV)/bin/python
DEMO_READY := $(VENV)/.k3lab-ready-run
TEST_READY := $(VENV)/.k3lab-ready-dev
endif
# several processes, but one where a GPU is timed or a host brings its own Python
SPREAD := $(if $(VENV),$(if $(findstring gpu,$(ARGS)),,-n auto --maxprocesses 8 --dist loadfile))
# a test that its own limit cannot reach, in machine code, ends its process: stacks are printed, the others go on
HELD := -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
INPUTS := pyproject.toml setup.py constraints.txt .ci/setup_venv

.PHONY: help demo test test-all lint gate format docs clean setup check-python
help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -5

demo: $(DEMO_READY)
	@$(RUN) -m k3lab.cli.main demo --out out/demo $(ARGS)

# the processes fill the CPUs by themselves: with more threads each they wait for one another, and take twice as long
test test-all: export OMP_NUM_THREADS := $(or $(OMP_NUM_THREADS),1)

test: $(TEST_READY)
	@$(RUN) -m pytest $(SPREAD) $(if $(SPREAD),$(HELD)) $(ARGS)

test-all: $(TEST_READY)
	@$(RUN) -m pytest $(SPREAD) -m "not gpu" $(ARGS)

lint: $(TEST_READY) .lint/k3lab
	@$(RUN) -m ruff check .
	@MYPYPATH=.lint $(RUN) -m mypy -p k3lab

# make gate BASE=main: spills, registers, shared memory and instructions of changed kernels; results that are no longer theirs
BASE ?= HEAD~1
gate: $(TEST_READY) .lint/k3lab
	@$(RUN) -m k3lab.cli.main gate --base $(BASE) --jobs 2

format: $(TEST_READY)
	@$(RUN) -m ruff format .
	@$(RUN) -m ruff check --fix .

docs: $(TEST_READY) .lint/k3lab
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

setup: $(TEST_READY)

check-python:
	@$(PYTHON) .ci/check_python

clean:
	rm -rf $(VENV) .lint build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# the folders under the name they are imported by, for the type checker and for a Python without our install
.lint/k3lab:
	@mkdir -p $@
	@for folder in kernels tuning traces decode cli; do ln -sfn ../../$$folder $@/$$folder; done

ifneq ($(strip $(VENV)),)
$(VENV)/.k3lab-ready-run: $(INPUTS)
	@PYTHON="$(PYTHON)" .ci/setup_venv "$(VENV)" run
	@touch $@

$(VENV)/.k3lab-ready-dev: $(INPUTS)
	@PYTHON="$(PYTHON)" .ci/setup_venv "$(VENV)" dev
	@touch $@ $(VENV)/.k3lab-ready-run
endif
