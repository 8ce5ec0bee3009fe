# Two commands on a fresh machine: make demo, make test. Each completes a set-up that was interrupted.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -q
# pip would compile 21,000 modules one after the other, on one core; packages hold a few that no Python compiles.
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
# Shows the elapsed time while the command behind it runs: pip is silent for minutes. Ends with the shell.
define TICK
( s=0; while sleep 2 && kill -0 $$$$ 2>/dev/null; do s=$$((s + 2)); \
  if [ -t 1 ]; then printf '\r  %d:%02d ' $$((s / 60)) $$((s % 60)); \
  elif [ $$((s % 10)) -eq 0 ]; then printf '  %d:%02d\n' $$((s / 60)) $$((s % 60)); fi; done ) & \
tick=$$!; trap 'kill $$tick 2>/dev/null' EXIT INT TERM;
endef
# The versions that were tested together; CONSTRAINTS= takes the newest instead.
CONSTRAINTS ?= constraints.txt
PINS := $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
TESTS ?=
WORKERS ?= auto

.DEFAULT_GOAL := help
.PHONY: help env test-env demo test test-slow test-slurm slurm-lab slurm-lab-stop test-soak notebooks gpu gpu-1 gpu-2 gpu-3 lint types check docs surface constraints release clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; type make PYTHON=python3.12 (or wherever a newer one is)")'
	$(PYTHON) -m venv $(VENV)

# The stamps are touched last: an install that was cut short is done again.
$(VENV)/.base: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "installing (about three minutes and 5 GB the first time; docs/install.md: a smaller one without CUDA)"
	@$(TICK) $(PIP) $(PINS) -e .
	@$(COMPILE)
	@touch $@

$(VENV)/.test: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "installing the suite and the test tools (minutes, the first time)"
	@$(TICK) $(PIP) $(PINS) -e ".[test]"
	@$(COMPILE)
	@touch $(VENV)/.base $@

env: $(VENV)/.base  ## create the environment and install the suite

test-env: $(VENV)/.test  ## the same with everything the tests use

demo: $(VENV)/.base  ## train a Mamba on digits whose blocks 2..8 see half the tokens
	$(BIN)/python experiments/run.py backbone=mamba route=2-8

test: $(VENV)/.test  ## the tests (minutes)
	$(BIN)/python -m pytest -n $(WORKERS) $(TESTS)

test-slow: $(VENV)/.test  ## the tests marked slow
	$(BIN)/python -m pytest -n $(WORKERS) --maxschedchunk=1 -m "slow and not slurm and not gpu and not soak" --durations=25 $(TESTS)

test-slurm: $(VENV)/.test  ## the tests on a real Slurm cluster (apt install slurm-wlm munge)
	$(BIN)/python -m pytest -m "slurm and not soak" -o cache_dir=.pytest_cache/slurm --durations=25 $(TESTS)

slurm-lab:  ## a Slurm cluster on this machine, two nodes with fake GPUs (docs/cluster.md)
	@tests/tools/start-slurm.sh start

slurm-lab-stop:  ## end it, its jobs too, and remove what it wrote
	@tests/tools/start-slurm.sh wipe

test-soak: $(VENV)/.test  ## the long kill and leak tests (hours)
	$(BIN)/python -m pytest -m soak $(TESTS)

notebooks: $(VENV)/.test  ## run the notebooks again, with outputs (RUNS=folder: on these runs)
	$(BIN)/python -m analysis notebooks $(if $(RUNS),--runs $(RUNS))

gpu: $(VENV)/.test  ## on a CUDA machine: its tests, benchmark and a study, as a page under results/gpu (30 minutes)
	$(BIN)/python -m experiments.benchmark.gpu_report

gpu-1 gpu-2 gpu-3: $(VENV)/.test  # one of its three parts, of at most ten minutes
	$(BIN)/python -m experiments.benchmark.gpu_report part=$(@:gpu-%=%)

lint: $(VENV)/.test  ## ruff
	$(BIN)/ruff check .

types: $(VENV)/.test  ## mypy over what is public
	$(BIN)/mypy

check: lint types test  ## what a change must pass before it is pushed

docs: $(VENV)/.test  ## draw the documentation's pictures and build the site strictly (build/site)
	$(BIN)/python docs/pictures.py
	$(BIN)/python docs/explainer.py
	$(BIN)/python -m mkdocs build --strict

surface: $(VENV)/.test  ## write down keys, public names and --help after a change on purpose
	REGENERATE=1 $(BIN)/python -m pytest -q tests/test_surface.py -k 'agreed or documentation'

# What the oldest Python that is supported gets today: the newer ones have wheels of it, not the other way round.
# Without local versions (+cu132) and the CUDA packages, of which each build of torch asks for its own.
# pymdown-extensions is the one that older patches of Python 3.11 cannot have.
constraints:  ## write constraints.txt anew from today's newest versions (PYTHON=python3.11)
	$(PYTHON) -m venv --clear build/constraints
	build/constraints/bin/python -m pip install --disable-pip-version-check -q ".[test]"
	{ sed '/^[^#]/,$$d' constraints.txt; \
	  build/constraints/bin/python -m pip freeze --disable-pip-version-check | sed 's/+.*//' \
	  | grep -vE '^(nvidia|cuda|tread)|@' | sort -f \
	  | sed "s/^pymdown-extensions==.*/&; python_full_version >= '3.11.5'/"; } > build/constraints.txt
	mv build/constraints.txt constraints.txt
	rm -rf build/constraints

# From what is committed, so that nothing else gets in.
release: $(VENV)/.base  ## make the sdist and the wheel in dist/, and check what they say of themselves
	$(PIP) build twine
	rm -rf build/release dist && mkdir -p build/release dist
	git archive HEAD | tar -x -C build/release
	$(BIN)/python -m build --outdir dist build/release
	$(BIN)/python -m twine check --strict dist/*

clean:  ## remove caches (runs stay)
	rm -rf .pytest_cache .mypy_cache .ruff_cache build *.egg-info
