# make demo: set up, then the main job.   make test: set up, then all tests.   make help: the rest.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Touched when the environment is complete: a second `make install` only compares dates.
STAMP  := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs-installed

# --no-compile: of torch's thousands of files a run imports a few; Python compiles those on first use, and must keep
# them then: without, every rank of every job would compile them anew, which takes longer than most jobs.
unexport PYTHONDONTWRITEBYTECODE
PIP    := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt

# Ranks find mpiexec, torchrun and horovodrun as they would in an activated environment
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help install demo test computes waits quick test-recipes test-install test-launchers test-versions test-dist lint types parity convergence convergence-known bench docs dist ci clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

install: $(STAMP)  ## build .venv: torch, mpi4py with MPICH, Horovod, the test tools

$(STAMP): setup.cfg pyproject.toml constraints.txt
	@test -x $(BIN)/pip || { echo "[1/3] $(VENV)"; rm -rf $(VENV); $(PYTHON) -m venv $(VENV); }
	@echo "[2/3] torch, mpi4py with MPICH, test tools (constraints.txt)"
	@$(PIP) -e '.[mpich,test]'
	@echo "[3/3] Horovod (the first build takes minutes, then it comes from the cache)"
	@$(BIN)/hvdbridge install-horovod
	@touch $@

demo: $(STAMP)  ## the main job: 3 launchers x 3 backends x 3 policies, a table, equal digests
	@$(BIN)/python examples/demo.py

# Tests use no GPU; benchmarks/cuda_check.py does
test computes waits quick test-recipes test-install test-launchers test-versions test-dist: export CUDA_VISIBLE_DEVICES :=
PYTEST := $(BIN)/python -m pytest -q

test: $(STAMP)  ## all tests and doctests
	@OMP_NUM_THREADS=1 $(PYTEST) -n auto --dist worksteal -m "not waits" hvdbridge tests/unit tests/policies  # one process each
	@$(MAKE) --no-print-directory -j2 computes waits  # beside each other

# MPI's and Horovod's ranks spin while they wait: two such jobs take longer beside each other than in turns
computes:
	@$(PYTEST) -m "not waits and not recipes and not network" tests/conformance tests/launch

waits:
	@$(PYTEST) -n 3 -m waits tests/unit tests/conformance tests/launch

quick: $(STAMP)  ## before each commit: the quick tests of units and policies, one cell of each backend
	@OMP_NUM_THREADS=1 $(PYTEST) -n auto --dist worksteal -m "not slow" hvdbridge tests/unit tests/policies
	@$(PYTEST) tests/launch/test_cells.py -k test_four_ranks

test-recipes: $(STAMP)  ## pages and recipes with Lightning, Accelerate, transformers and Ray (hundreds of MB)
	@$(PIP) -e '.[recipes]'
	@$(PYTEST) -m recipes tests/launch

test-install: $(STAMP)  ## pages that clone, install and build Horovod, in new environments and a new home (30 minutes)
	@$(PYTEST) -rs -m network -o faulthandler_timeout=7200 tests/launch

test-launchers: $(STAMP)  ## Slurm, Open MPI, Intel MPI and odd hosts; installs Debian's packages, as root (15 minutes)
	@$(BIN)/python tests/launchers/install.py
	@$(PYTEST) -rs tests/launchers

# Where the index's torch has CUDA, Horovod's build needs the CUDA toolkit of the same release (CUDA_HOME)
OLDEST := $(shell sed -n 's/^ *torch>=//p' setup.cfg)
OLDEST_PYTHON ?= $(shell sed -n 's/^python_requires *= *>=/python/p' setup.cfg)
test-versions:  ## the oldest Python and torch of setup.cfg (OLDEST_PYTHON=python3.10), then the newest torch (GB)
	@for name in oldest newest; do \
		torch=torch; python=$(PYTHON); env=.versions/$$name; \
		test $$name = newest || { torch='torch==$(OLDEST).*'; python=$(OLDEST_PYTHON); }; \
		echo "[$$name] $$torch on $$($$python -V), in an environment of its own"; \
		$$python -m venv --clear $$env \
		&& $$env/bin/pip install -qq --disable-pip-version-check "$$torch" -e '.[mpich,tools]' \
		&& $$env/bin/hvdbridge install-horovod \
		&& OMP_NUM_THREADS=1 $$env/bin/python -m pytest -q -n auto -m "not waits" tests/unit tests/policies \
		&& $$env/bin/python examples/demo.py --quick || exit 1; \
	done

lint: $(STAMP)  ## ruff
	@$(BIN)/ruff check .

types: $(STAMP)  ## mypy --strict
	@$(BIN)/mypy

parity: $(STAMP)  ## ResNet18, bit-equal to DistributedDataParallel on every backend
	@$(BIN)/python benchmarks/parity.py

convergence: $(STAMP)  ## what every policy does to the loss, written to docs/explanation/convergence.md
	@$(BIN)/python benchmarks/convergence.py
	@$(BIN)/python benchmarks/known_models.py

convergence-known: $(STAMP)  ## the part of convergence with a GPT and a ResNet: only runs whose results are not stored
	@$(BIN)/python benchmarks/known_models.py

bench: $(STAMP)  ## step times against each backend's native way
	@$(BIN)/hvdbridge bench --models bert-base,small --policies mean

# Warnings are errors: links, anchors, docstrings, pages without a place in the navigation
docs: $(DOCS_STAMP)  ## the site, in build/docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/docs/index.html"

$(DOCS_STAMP): $(STAMP)
	@$(PIP) -e '.[docs]'
	@touch $@

# build makes the wheel from the sdist, in an environment of its own; auditwheel names the oldest glibc that it works with
dist: $(STAMP)  ## the sdist and the wheel with compiled kernels, checked, in dist/
	@$(PIP) -e '.[dist]'
	@rm -rf dist build/dist
	@$(BIN)/python -m build -o build/dist > /dev/null
	@$(BIN)/auditwheel repair -w dist build/dist/*.whl
	@mv build/dist/*.tar.gz dist
	@$(BIN)/twine check --strict dist/*

# A fixture installs torch by pip, which may take longer than any test
test-dist: dist  ## what dist builds: both installed by pip in new environments, doctor and jobs of two ranks (GB)
	@$(PYTEST) -o faulthandler_timeout=1800 tests/artifacts

ci: lint types docs test  ## what must pass before a change is handed in

clean:  ## remove .venv and whatever was generated
	@rm -rf $(VENV) .versions build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find hvdbridge tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
