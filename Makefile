# Everything runs from a clean clone with no environment active; only `setup` needs the network.
PYTHON ?= python3
VENV ?= .venv
# Where pip finds a CPU build of torch, should its own index have none.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# Of `make chaos`: faults in all, and minutes after which either half begins none.
CHAOS_FAULTS ?= 200
CHAOS_MINUTES ?= 90

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
STAMP := $(VENV)/.leeway-installed
# Not into the environment: verl brings a package `tests`, which would hide ours from every process
# that a test starts.
PARITY := build/parity
PARITY_STAMP := $(PARITY)/.installed
SBOM_STAMP := build/sbom-tool/.installed
TORCH = $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements/cpu.txt)+cpu
LIGHT := tests/architecture tests/unit tests/contract

.DEFAULT_GOAL := help
.PHONY: help setup demo test quick helm-test browser chaos images sbom parity lint format types links requirements docs clean

help:  ## Say what there is.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Install everything into .venv (PYTHON=python3.12 picks another Python).

demo: setup  ## Train a search agent on this machine's CPU and watch it learn.
	$(BIN)/leeway train deploy/configs/demo.toml

test: setup lint types  ## Check everything, vLLM and Ray included; what CI runs.
	@# The rehearsal of the chart needs Helm, too.
	$(BIN)/python tests/helm/tools.py
	$(MAKE) sbom
	$(BIN)/python -m pytest -m "not gpu" --durations=30 --ignore=tests/parity --ignore=tests/helm --ignore=tests/browser
	$(MAKE) helm-test
	$(MAKE) browser
	$(MAKE) parity

quick: setup lint  ## Check what needs neither vLLM nor Ray.
	$(BIN)/python -m pytest -q -m "not gpu and not vllm and not ray" $(LIGHT)

browser: setup  ## Try the dashboard in the headless Chromium of this machine.
	$(BIN)/python -m pytest -q --browser tests/browser

chaos: setup  ## Kill, stop, starve and cut off a run 200 times (CHAOS_MINUTES=90 CHAOS_FAULTS=200).
	@# It goes on with build/chaos.json where an earlier call has ended.
	$(BIN)/python -m tests.chaos.campaign tests/chaos/chaos.toml --undisturbed 2 \
		--faults $(CHAOS_FAULTS) --minutes $(CHAOS_MINUTES)

images:  ## Build the three images and train with them; needs buildah, podman and mmdebstrap.
	deploy/docker/check.sh

sbom: $(SBOM_STAMP)  ## Write what each image contains to build/sbom, as CycloneDX.
	@mkdir -p build/sbom
	@for list in requirements/images/*.txt; do \
		PYTHONWARNINGS=ignore build/sbom-tool/bin/cyclonedx-py requirements $$list --pyproject pyproject.toml \
			--output-format JSON --output-file build/sbom/$$(basename $$list .txt).cdx.json; done

helm-test: setup  ## Check the chart with Helm 3 and 4 (fetches its tools into .cache, 600 MB).
	$(BIN)/python tests/helm/tools.py
	@# Where it cannot be built, it says why, and its tests skip.
	-$(BIN)/python -m tests.helm.api_server
	$(BIN)/python -m pytest -q --helm -m "not cluster" tests/helm

parity: $(PARITY_STAMP)  ## Compare objectives with verl's and TRL's, which it installs (300 MB).
	PYTHONPATH=$(PARITY) $(BIN)/python -m pytest -q --parity tests/parity

lint: setup  ## Check style and formatting.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup  ## Format, and repair what style can repair by itself.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup links  ## Check types.
	$(BIN)/basedpyright --pythonpath $(BIN)/python

# The parts lie beside each other; a type checker wants to see them inside a folder named leeway.
links:
	@mkdir -p build/typing/leeway
	@for part in actors learner replay services; do ln -sfn ../../../$$part build/typing/leeway/$$part; done

requirements: setup  ## Write requirements/cpu.txt again from pyproject.toml and what is installed.
	$(BIN)/python -m requirements.generate

docs: setup  ## Write docs/configuration.md again from the code.
	$(BIN)/leeway config schema --markdown > docs/configuration.md

clean:  ## Remove what builds and tests leave; .venv and runs stay.
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(STAMP): requirements/cpu.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' \
		|| { echo "Leeway needs Python 3.11 or 3.12: make setup PYTHON=python3.11"; exit 1; }
	@echo "Installing into $(VENV): three minutes or more, 4 GB."
	$(PYTHON) -m venv $(VENV)
	@# The index's own torch may be built for CUDA, whose libraries the list leaves out.
	@$(PIP) install --no-deps $(TORCH) 2>/dev/null \
		|| $(PIP) install --no-deps --index-url $(TORCH_INDEX) $(TORCH) \
		|| echo "No CPU build of torch here or on $(TORCH_INDEX): taking the index's own."
	$(PIP) install --no-deps -r requirements/cpu.txt
	$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

$(PARITY_STAMP): $(STAMP) requirements/parity.txt
	rm -rf $(PARITY)
	$(PIP) install --no-deps --target $(PARITY) -r requirements/parity.txt
	@touch $@

$(SBOM_STAMP):
	$(PYTHON) -m venv build/sbom-tool
	build/sbom-tool/bin/pip install --disable-pip-version-check --quiet cyclonedx-bom==7.5.0
	@touch $@
