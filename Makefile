# make run     the whole chain on SmolLM2: data to a measured, exported drafter, and a table at the end
# make test    all tests          make check   lint, format, types, import directions
# make prove   full-size proofs   make bench   training step, target shards, decoding: speed, memory
# make ui      MLflow on the runs in $(WORK)    make clean   build leftovers, never the work directory
# Each sets itself up first. Needs Python 3.11 or newer, make and git. PYTHON=python3.12 picks another interpreter.

PYTHON ?= python3
VENV ?= .venv
WORK ?= work
PORT ?= 5000
PYTEST_ARGS ?=
JOBS ?= 2
ARGS ?=

PY := $(VENV)/bin/python
READY := $(VENV)/ready
SMOLLM2 := work/models/smollm2-135m-instruct
DEMO := work/runs/smollm2
QUIET := OMP_NUM_THREADS=1 GOMP_SPINCOUNT=0

.DEFAULT_GOAL := run
.PHONY: run test check prove bench ui clean setup

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) tools/set_up.py $(VENV)
	@touch $@

$(SMOLLM2)/config.json: | $(READY)
	$(PY) -m tools.fetch_smollm2 $(SMOLLM2)

run: $(READY) $(SMOLLM2)/config.json
	$(VENV)/bin/dspark run -c configs/smollm2.yaml $(ARGS)

test: $(READY)
	$(QUIET) $(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

check: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(QUIET) $(PY) -m pytest -q tests/unit/test_imports.py

prove: $(READY) $(SMOLLM2)/config.json
	$(QUIET) $(PY) -m pytest --prove -m prove --proof-table $(WORK)/proofs $(PYTEST_ARGS)

bench: $(READY) $(SMOLLM2)/config.json
	$(QUIET) $(PY) -m tools.bench $(ARGS)
	$(QUIET) $(PY) -m tools.bench_targets --model $(SMOLLM2)
	@if [ -f $(DEMO)/train/manifest.json ]; \
	  then $(QUIET) $(PY) -m tools.bench_decoding -c configs/smollm2.yaml; \
	  else echo "decoding: not measured, there is no trained drafter ($(DEMO)/train); make run first"; fi

ui: $(READY)
	@test -f $(WORK)/mlflow.db || { echo "$(WORK)/mlflow.db: no run yet; make run"; exit 2; }
	@$(PY) -c "import socket; socket.create_server(('127.0.0.1', $(PORT)))" 2>/dev/null || \
	  { echo "port $(PORT) is in use: make ui PORT=another"; exit 2; }
	@echo "MLflow: http://127.0.0.1:$(PORT) (Ctrl-C ends it)"
	MLFLOW_DISABLE_TELEMETRY=true MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false $(VENV)/bin/mlflow server --workers 1 \
	  --host 127.0.0.1 --port $(PORT) --backend-store-uri sqlite:///$(abspath $(WORK))/mlflow.db

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -not -path './$(WORK)/*' -prune -exec rm -rf {} +
