# `make demo` and `make test` are all a fresh clone needs: both make the environment first.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
WORKERS ?= 2
JOBS ?= 1
# The environment; `make test-newest` and `make test-oldest` have their own.
VENV ?= .venv
BIN := $(VENV)/bin
OUT ?= benchmarks/results/local
# The versions to install; CONSTRAINTS=other.txt for others, as the workflows do.
CONSTRAINTS ?= constraints.txt
# With UPGRADE=1 what is installed gives way to the newest that the constraints allow.
PIP = PYTHONUNBUFFERED=1 $(BIN)/python -m pip install --progress-bar off -c $(CONSTRAINTS) \
	$(if $(UPGRADE),--upgrade --upgrade-strategy eager)
# Of what pip prints: the large files and the end, with the seconds since it began.
SHORT = while read -r line; do case $$line in *Downloading*[MG]B*|*cached*[MG]B*|Installing\ collected*) \
	printf '  %4d s  %.100s\n' $$SECONDS "$$line";; esac; done
# $(call phase,NAME,COMMAND): a line when it begins, and its seconds when it ends.
phase = @echo "== $(1)"; $(2); code=$$?; echo "== $(1): $$SECONDS s"; exit $$code
LIBRARIES := torch triton transformers accelerate diffusers peft sentence-transformers timm torchao torchtitan
WORDS := $(wildcard *.md) .github docs examples attnops lowering graphs
# One file or more of every room, those that fail first when the room breaks, without their slow tests.
QUICK := tests/test_layers.py tests/test_size.py tests/test_imports.py tests/test_errors.py tests/test_select.py tests/test_plugins.py \
	tests/ops/test_records.py tests/ops/test_pages.py tests/test_packed.py tests/test_cache.py tests/test_rotary.py tests/test_cli.py \
	tests/hf/test_tiny.py tests/hf/test_attention.py tests/lowering/test_choose.py \
	tests/graphs/test_buckets.py tests/graphs/test_cuda_graphs.py tests/triton/test_grids.py tests/test_measured.py tests/test_tune.py \
	tests/test_bench_memory.py
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -p tests.progress
BENCH = $(PYTHON) -m attnops bench --device cuda --out "$(OUT)" --commit "$(COMMIT)" \
	--gpus "$$($(PYTHON) -c 'import torch; print(max(1, torch.cuda.device_count()))')"

# One thread a process: two workers share two cores, and sums in a fixed order give the same digits on every run.
demo pytest test-all test-quick docs docs-check census: export OMP_NUM_THREADS ?= 1
# Beside the code, so that a second run finds what the first one compiled.
demo pytest test-all test-quick docs docs-check census: export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/.cache/inductor
demo pytest test-all test-quick docs docs-check census: export TORCHINDUCTOR_COMPILE_THREADS ?= 1

# Python reads what it compiled before, also assertions that pytest rewrote.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-quick mutants test-newest test-oldest versions lint pytest docs docs-check dist census gpu-test gpu-bench gpu-tune gpu-sanitize

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.ready ## two small models before and after attnops.patch(model): tokens, speed, kernels
	@echo "== demo: two small models generate, before and after attnops.patch"
	@$(BIN)/attnops demo

test: lint pytest ## lint, types and the tests that need no GPU (a quarter of an hour of two cores)

test-all: lint ## the same with every case of the tests that sweep (half an hour of two cores)
	$(call phase,all tests,$(PYTEST))

test-quick: lint ## lint, types, and tests of every room (two minutes of two cores)
	$(call phase,quick tests,$(PYTEST) -m 'not slow' $(QUICK))

pytest: $(VENV)/.dev ## every test that needs no GPU, and of those that sweep every nth case
	$(call phase,tests,$(PYTEST) --part)

mutants: $(VENV)/.dev ## change one line of the package at a time and see a test fail, for every list of tests/mutants (an hour of one core; ONLY=text)
	$(BIN)/python tests/mutants/run.py $(if $(ONLY),--only $(ONLY))

# The two ends of the ranges in pyproject.toml, each in an environment of its own.
test-newest: ## the tests with the newest torch, transformers and other libraries that pip finds (20 minutes of two cores)
	@rm -f .venv-newest/.ready
	$(MAKE) VENV=.venv-newest CONSTRAINTS=.ci/newest.txt UPGRADE=1 versions pytest

test-oldest: ## the tests with the oldest versions that pyproject.toml claims; wants PYTHON=python3.10
	$(MAKE) VENV=.venv-oldest CONSTRAINTS=.ci/oldest.txt versions pytest

# What the run proves, in the words of pip.
versions: $(VENV)/.dev
	@$(BIN)/python --version
	@$(BIN)/python -m pip list --disable-pip-version-check | grep -E '^($(subst $() ,|,$(LIBRARIES))) '

lint: $(VENV)/.dev ## ruff, its format, codespell, proselint, mypy, pyright
	$(call phase,ruff,$(BIN)/ruff check . && $(BIN)/ruff format --check .)
	$(call phase,words,$(BIN)/codespell $(WORDS) && $(BIN)/python docs/prose.py)
	$(call phase,types,$(BIN)/mypy & mypy=$$!; $(BIN)/pyright; code=$$?; wait $$mypy && (exit $$code))

SITE = $(BIN)/python -m sphinx -b html -W --keep-going -q -d build/doctrees docs build/docs

docs: $(VENV)/.dev ## write the generated tables of README and docs, run the tutorials, build the site (two minutes of one core)
	$(call phase,generated parts,$(BIN)/python docs/generate.py)
	$(call phase,site,$(SITE))
	@echo "The site is at build/docs/index.html"

docs-check: $(VENV)/.dev ## build the site of the pages as they are, without running the tutorials, which `make test` runs
	$(call phase,site,$(SITE) -D plot_gallery=0)
	@echo "The site is at build/docs/index.html"

dist: $(VENV)/.dev ## the sdist, and the wheel made from it, in dist/, checked as the package index does
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

census: $(VENV)/.dev ## every model type of transformers, patched against eager; docs/models.md (half an hour of one core; TESTS: a folder with transformers' tests)
	$(BIN)/python -m benchmarks.census.run --jobs $(JOBS) $(if $(TESTS),--tests $(TESTS)); code=$$?; $(BIN)/python docs/generate.py && exit $$code

# A GPU host brings its own torch and often has no network, so the targets below use its python3, not .venv.
gpu-test: ## tests on a CUDA device, with the system's python3; PART_S=450 for a part of so many seconds, again for the next
	$(PYTHON) tests/gpu/run.py $(if $(PART_S),--seconds $(PART_S))

gpu-sanitize: ## our own kernels on a CUDA device under compute-sanitizer
	$(PYTHON) tests/gpu/sanitize.py

gpu-bench: ## `attnops bench $(SUITES)` on all CUDA devices within eight minutes, with the system's python3; files go to $OUT
	timeout 475 $(BENCH) $(SUITES)

gpu-tune: ## the table of measured times of a CUDA device, and how well it chooses; files go to $OUT
	ATTNOPS_CACHE_DIR="$(OUT)" timeout 300 $(PYTHON) -m attnops tune --budget-s 190
	ATTNOPS_CACHE_DIR="$(OUT)" timeout 240 $(BENCH) --budget-s 180 regret

# torch comes from the constraint alone: an open range would take whatever the index holds that day. The build backend is
# installed the same way, because pip applies no constraints inside an isolated build.
$(VENV)/.ready: pyproject.toml $(CONSTRAINTS)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing attnops, torch and transformers into $(VENV), once. Files of a megabyte or more are listed as they come."
	@$(PIP) --upgrade setuptools setuptools-scm wheel | $(SHORT)
	@$(PIP) --no-build-isolation -e ".[hf,cli,triton]" | $(SHORT)
	@touch $@

$(VENV)/.dev: $(VENV)/.ready
	@echo "Installing the tools of tests, lint and docs into $(VENV), once."
	@$(PIP) --no-build-isolation -e ".[hf,cli,triton,dev,docs]" | $(SHORT)
# torchvision's wheels on PyPI are for CUDA. Beside a CPU's torch their library does not load, and transformers fails where it sees them:
# only the tests of their models look into this folder.
	@$(PIP) --no-deps --upgrade --target $(VENV)/vision torchvision timm | $(SHORT)
	@touch $@
