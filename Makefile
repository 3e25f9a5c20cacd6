# These are the commands that you type. `make demo` and `make test` install what is missing by themselves.

# Ordinary users run jobs from this environment (the tests' do): a Python below /root would shut them out.
PYTHON ?= $(firstword $(wildcard /usr/bin/python3.1[1-9]) python3)
BIN := .venv/bin
READY := .venv/ready
# uv then trusts the system's certificates, as pip does; uv's own ones lack those of a proxy that re-signs TLS.
ifneq ($(wildcard /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt),)
export UV_SYSTEM_CERTS := true
endif
PACKAGES := slurm-wlm munge iproute2 dataset-fashion-mnist python3-venv
TEST_PACKAGES := $(PACKAGES) slurmdbd mariadb-server chromium g++ rsync fish zsh xz-utils
INSTALL = ! dpkg-query -Wf '$${db:Status-Abbrev}\n' $(1) 2>&1 | grep -qv '^ii' || \
	{ printf "installing Debian's packages %s: " "$(1)"; apt-get update -qq && \
	said=$$(LC_ALL=C DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends $(1)) && \
	echo "$$said" | sed -n 's/^After this operation, \(.*\) of additional.*/\1/p' | grep . || echo done; }

# Byte code of our own packages. Without it (PYTHONDONTWRITEBYTECODE, a checkout of root's) each process would compile them.
COMPILE = $(BIN)/python -m compileall -q hpc jobs training

# A real Slurm needs root, to make the nodes' namespaces, and Debian's packages.
ROOT := $(shell [ "$$(id -u)" = 0 ] && command -v apt-get)
NO_ROOT := no root or no apt here: without a Slurm of our own, using --cluster local

.PHONY: demo drill bench gpu gpu-bundle test test-slow test-all test-wheel test-hard simulate coverage matrix docs pictures check format lock clean

# Trains, kills a rank, preempts the job, and compares the model with that of an undisturbed training.
demo: $(READY)
ifeq ($(ROOT),)
	@echo "$(NO_ROOT)"
	@$(BIN)/python -m benchmarks.demo --cluster local
else
	@$(call INSTALL,$(PACKAGES))
	$(BIN)/python -m hpc testbed up --nodes 4 --gpus-per-node 4
	@$(BIN)/python -m benchmarks.demo
endif

# Each drill on one small run, and what it cost. Ends the testbed that is up: it builds its own.
drill: $(READY)
	@$(call INSTALL,$(PACKAGES))
	$(BIN)/python -m benchmarks.drill

# Makes the tables of docs/explanation/performance.md. It takes about 3 hours on two idle cores (QUICK=1: a small form, 15
# minutes), and takes down the running testbed.
BENCHMARKS := recovery drill storm overhead speed host snapshots step_counter commands
QUICK :=
RIVALS := rivals/ready

bench: $(READY) $(RIVALS)
	@$(call INSTALL,$(TEST_PACKAGES))
	@$(COMPILE)
	@set -e; for name in $(BENCHMARKS); do echo "--- $$name ---"; $(BIN)/python -m benchmarks.$$name $(if $(QUICK),--small) $(FLAGS); done
	$(BIN)/python -m benchmarks.page

$(RIVALS): pyproject.toml
	$(PYTHON) -m venv rivals
	$(BIN)/uv pip install --quiet --compile-bytecode --python rivals/bin/python --group rivals --editable '.[classifier]'
	touch $@

# The tests, in tiers (CONTRIBUTING.md). Each worker has a machine of its own, hence a Slurm. Whole files go to a worker: their tests
# share data and runs. TESTS replaces the choice of a tier: make test TESTS=tests/runs/test_job.py
WORKERS := 4
MACHINES = --tx '$(WORKERS)*popen//python=tests/own-machine' --dist loadfile --no-loadscope-reorder
test: TIER := -m "not slow"
test-slow: TIER := -m slow
test-all: TIER :=

test test-slow test-all: $(READY)
ifeq ($(ROOT),)
	@echo "$(NO_ROOT), and skipping the tests that need one"
	$(BIN)/python -m pytest $(or $(TESTS),$(TIER))
else
	$(if $(filter /tmp/%,$(CURDIR)/),$(error move this checkout out of /tmp: the nodes of the testbed have a /tmp of their own))
	@$(call INSTALL,$(TEST_PACKAGES))
	@if apt-cache show apptainer >/dev/null 2>&1; then $(call INSTALL,apptainer); fi  # Debian 12 and 13 do not have it
	@$(COMPILE)
	$(BIN)/python -m pytest $(MACHINES) $(or $(TESTS),$(TIER))
endif

# Recovery in a simulated world, in thousands of schedules that nobody has seen: make simulate SEEDS=100000. One of them,
# with its timeline: .venv/bin/python -m tests.simulation --seed N
SEEDS := 1000
FIRST = $(shell date +%s)

simulate: $(READY)
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --first $(FIRST)

# The same tests under conditions that must not matter, for hours: make test-hard PARTS="processors order"
test-hard: $(READY)
	tests/hard $(PARTS)

# Runs benchmarks/gpu/__main__.py on one NVIDIA GPU, in about 20 minutes. Without a network, name what make gpu-bundle
# wrote (for the Python there: GPU_PYTHON_VERSION=3.12): GPU_BUNDLE=DIR.
GPU_PYTHON ?= $(if $(wildcard $(READY)),$(BIN)/python,python3)
GPU_BUNDLE ?=
export GPU_BUNDLE
PARTS :=

gpu:
	$(GPU_PYTHON) -m benchmarks.gpu $(PARTS) $(FLAGS)

gpu-bundle: $(READY)
	@$(call INSTALL,$(PACKAGES))
	$(BIN)/python -m benchmarks.gpu.bundle $(or $(GPU_BUNDLE),gpu-bundle) $(addprefix --python-version=,$(GPU_PYTHON_VERSION))

# A script and the main job on a real Slurm, by the wheel in two environments of its own: alone, and with the classifier.
WHEEL := build/wheel
WHEEL_INSTALL = $(BIN)/uv pip install --quiet --constraint requirements.lock

test-wheel: $(READY)
	@$(call INSTALL,$(PACKAGES))
	rm -rf $(WHEEL) build/lib
	$(BIN)/uv build --quiet --wheel --no-build-isolation --out-dir $(WHEEL) --python $(BIN)/python
	$(PYTHON) -m venv $(WHEEL)/light && $(PYTHON) -m venv $(WHEEL)/classifier
	$(WHEEL_INSTALL) --python $(WHEEL)/light/bin/python $(WHEEL)/torchrelay-*.whl
	$(WHEEL_INSTALL) --python $(WHEEL)/classifier/bin/python "$$(echo $(WHEEL)/torchrelay-*.whl)[classifier]"
	tests/own-machine tests/wheel.py $(WHEEL)/light $(WHEEL)/classifier

# The tests on the Slurm, on that of other releases of Debian: make matrix SLURM=24.11 TESTS=tests/runs/test_job.py
SLURM := 22.05 24.11 26.05
RELEASE_22.05 := bookworm
RELEASE_24.11 := trixie
RELEASE_26.05 := sid
CACHE := /var/cache/torchrelay

# make matrix TORCH=2.11: the quick tests with another torch, in a copy of this checkout.
TORCH :=
# make matrix SCRIPT_TORCH=2.6: torchrun and relay with another torch, which a user's own script may have.
SCRIPT_TORCH :=
SCRIPT_ENV := $(CACHE)/script-torch-$(SCRIPT_TORCH)

matrix: $(if $(SCRIPT_TORCH),$(READY))
ifneq ($(SCRIPT_TORCH),)
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(SCRIPT_ENV)
	$(BIN)/uv pip install --quiet --python $(SCRIPT_ENV)/bin/python "torch==$(SCRIPT_TORCH).*" torchvision
	PYTHONPATH=$$(echo $(SCRIPT_ENV)/lib/*/site-packages) \
		$(BIN)/python -m pytest -n 2 -m "not slurm" tests/jobs/ranks tests/training/relay
else ifneq ($(TORCH),)
	@$(call INSTALL,rsync)
	mkdir -p $(CACHE)/torch-$(TORCH)
	rsync -a --delete --exclude=/.venv --exclude=/runs --exclude=/build ./ $(CACHE)/torch-$(TORCH)/
	$(MAKE) --no-print-directory -C $(CACHE)/torch-$(TORCH) test
else
	@$(call INSTALL,debootstrap rsync)
	@set -e; for release in $(foreach version,$(SLURM),$(RELEASE_$(version))); do \
		TORCHRELAY_REQUIRE_SLURM=1 tests/on-debian $$release $(CACHE) make test TESTS="-m slurm $(TESTS)"; done
endif

# Lists the modules of which the tests run less than 80 % of the lines, in any process. It takes longer than make test-all.
COVERAGE := build/coverage

coverage: $(READY)
	$(if $(ROOT),@$(call INSTALL,$(TEST_PACKAGES)))
	rm -rf $(COVERAGE) && install -d -m 1777 $(COVERAGE)  # tests run as other users, too
	-$(BIN)/coverage run -m pytest $(if $(ROOT),$(MACHINES)) $(TESTS)
	$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report --sort=cover | awk '/^TOTAL/ || $$NF + 0 < 80'

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -q tests/test_house.py
	$(BIN)/mypy
	$(BIN)/mypy --explicit-package-bases benchmarks --exclude '^benchmarks/(exactness/.*_run|recovery/rivals/)'  # not installed here

# The site: build/site/docs/index.html. A warning, such as a link to a page, section or file that does not exist, is an error.
docs: $(READY)
	$(BIN)/sphinx-build -W --keep-going -q -c docs/site . build/site
	@echo "open build/site/docs/index.html"

# Those of README and docs, from results and from a run on a Slurm of its own.
pictures: $(READY)
	@$(call INSTALL,$(TEST_PACKAGES))
	tests/own-machine docs/site/pictures.py

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# uv compiles the byte code: a user who may not write here would compile torch at every import, 7 s instead of 2.
$(READY): requirements.lock pyproject.toml
ifneq ($(ROOT),)
	@$(call INSTALL,$(PACKAGES))
endif
	@printf "installing Python's packages into .venv: "
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@$(BIN)/uv pip sync --quiet --require-hashes --compile-bytecode --python $(BIN)/python requirements.lock
	$(if $(TORCH),$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python "torch==$(TORCH).*" torchvision)
	@$(BIN)/uv pip install --quiet --no-deps --no-build-isolation --python $(BIN)/python --editable .
	@du -sh .venv | cut -f1
	@touch $@

# Hashes but no index addresses, so that it installs from any mirror.
lock: $(READY)
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
		--extra classifier --extra export --extra wandb --extra mlflow --extra sweep --extra timm --group dev --output-file requirements.lock pyproject.toml

clean:
	rm -rf .venv rivals build *.egg-info .mypy_cache .pytest_cache .ruff_cache
