# The index of everything that one types. `make demo` and `make test` install what is missing by themselves.

# Ordinary users run the jobs too (on a cluster and in the tests): a Python below /root would shut them out.
PYTHON ?= $(firstword $(wildcard /usr/bin/python3.1[1-9]) python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
SYSTEM_PACKAGES := slurm-wlm slurmdbd mariadb-server munge iproute2 dataset-fashion-mnist

.PHONY: setup system demo test check format lock clean

setup: system $(READY)

# uv compiles the byte code: an ordinary user of the environment could not store it, and each import of torch would take 7 s instead of 2.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || apt-get install -y -qq python3-venv
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip sync --quiet --require-hashes --compile-bytecode --python $(BIN)/python requirements.lock
	$(BIN)/uv pip install --quiet --no-deps --no-build-isolation --python $(BIN)/python --editable .
	touch $@
