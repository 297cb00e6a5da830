# The commands of this repository. `make` alone lists them.
# Every target that needs Python packages sets up .venv itself, once per content of the lock.

BIN := .venv/bin
# Tests on all cores, but four processes at most, because each collects all tests.
PARALLEL := --numprocesses=auto --maxprocesses=4
# Folders of tests/unit, without three whose tests install, train or simulate: `make quick PKG=drafter`.
QUICK := $(or $(PKG),$(filter-out binaries drafter simulator __pycache__,$(notdir $(wildcard tests/unit/*))))

.DEFAULT_GOAL := help
.PHONY: help setup setup-lab demo test test-all test-unit test-lab test-vllm quick quick-lint quick-types quick-layers quick-tests check \
	lint-release crds bench bundle site lock clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' Makefile | awk -F'|' '{ printf "  make %-12s %s\n", $$1, $$2 }'

setup: ## make .venv hold what requirements/dev.txt names (every target below does this itself)
	@python3 scripts/setup.py

setup-lab:
	@python3 scripts/setup.py --lab

demo: $(if $(CLUSTER),setup,setup-lab) ## show Aerie on a real Kubernetes cluster on this machine; ENGINE=vllm or vllm-in-place: with real vLLM on CPU; CLUSTER=kind or k3d: in containers, with your Docker; SHOW=refresh: a drafter is trained further on recorded prompts; KEEP=1: keep the cluster
	@$(BIN)/aerie-lab demo $(if $(ENGINE),--engine "$(ENGINE)") $(if $(CLUSTER),--cluster "$(CLUSTER)") $(if $(SHOW),--show "$(SHOW)") $(if $(KEEP),--keep)

quick: setup ## format, lint, types, layers, words and the fast unit tests, in a minute; PKG=folder of tests/unit: its tests alone
	@$(MAKE) --no-print-directory --jobs --keep-going --output-sync=target quick-lint quick-types quick-layers quick-tests

quick-lint:
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/python scripts/check_words.py

quick-types:
	@$(BIN)/mypy

quick-layers:
	@$(BIN)/lint-imports --no-logo

quick-tests:
	@HYPOTHESIS_PROFILE=quick $(BIN)/pytest -q -m "not slow" $(PARALLEL) --dist=worksteal $(QUICK:%=tests/unit/%)

test: setup-lab ## run the tests: the lab's, real vLLM's and the unit tests, side by side
	@$(BIN)/python scripts/run_tests.py

test-all: setup-lab ## the same with more seeds, sizes and faults, as every night (hours)
	@$(BIN)/python scripts/run_tests.py --all

test-unit: setup ## run the tests that need no cluster (minutes)
	@$(BIN)/pytest $(PARALLEL) --dist=loadfile --no-loadscope-reorder tests/unit

test-lab: setup-lab ## run the tests against two clusters of the lab (minutes)
	@$(BIN)/pytest --numprocesses=2 --dist=loadfile tests/lab

test-vllm: setup-lab ## run the tests against real vLLM on CPU
	@$(BIN)/pytest tests/vllm

check: setup ## format, lint, types, import layers, generated files, commands named in the README, words
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python -m scripts.generate --check
	@$(BIN)/python scripts/check_readme.py
	@$(BIN)/python scripts/check_words.py

lint-release: setup ## lint the workflows, the rendered chart and the examples; builds actionlint and kubeconform the first time
	@$(BIN)/python -m scripts.release.lint

crds: setup ## write what is generated: crds/, pages of the reference, the chart's definition and tables
	@$(BIN)/python -m scripts.generate

bench: setup ## run one benchmark: make bench NAME=lab; SAVE=1 keeps the figures in benchmarks/results
	@$(BIN)/python -m benchmarks "$(NAME)" $(if $(SAVE),--save)

bundle: setup ## train the shipped target and drafters anew (OUT=folder: put them there instead)
	@OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 $(BIN)/python -m bundle $(if $(OUT),--out "$(OUT)")

site: setup ## build the documentation site: build/site/html/index.html
	@$(BIN)/python scripts/site.py

lock: ## pin all packages anew, by hash (needs uv; UPGRADE=1 moves to new releases)
	@python3 scripts/lock.py $(if $(UPGRADE),--upgrade)

clean: ## remove .venv and what the tools leave in this folder (the lab's cache stays)
	@rm -rf .venv .venv.lock dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
