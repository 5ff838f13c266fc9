# Everything a newcomer needs: `make run`, `make test`. `make help` lists the rest.
# Each target sets up what it needs; a second call finds it done.

PYTHON ?= $(shell sh tools/find_python.sh)
VENV   ?= .venv
BIN    := $(VENV)/bin
BUF_VERSION := 1.75.0
BUF    := .buf/node_modules/.bin/buf
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet

# Work that the run and the benchmarks leave behind; `make clean` removes it.
RUN_DIR ?= .run
INPUT   ?= examples/requests.jsonl
OUTPUT  ?= $(RUN_DIR)/results.jsonl

# Without byte code every start of a worker compiles 4,700 modules again, which takes longer than the start.
unexport PYTHONDONTWRITEBYTECODE

# Under these, `python -m` takes services and client from build/compiled instead of the directory it runs in. With
# COMPILED=1 the targets that begin with $(MODULES) do.
FROM_COMPILED = PYTHONSAFEPATH=1 PYTHONPATH="$(abspath build/compiled):$(CURDIR)"
MODULES = $(if $(COMPILED),$(FROM_COMPILED))
PARTS = $(READY) $(if $(COMPILED),compiled)

READY := $(VENV)/.ready-$(shell cat requirements/*.txt pyproject.toml tools/install_cpu.sh 2>/dev/null | cksum | cut -d' ' -f1)

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets
	@awk -F':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(READY) ## Make the virtual environment with everything in it (vLLM's CPU build included)

$(READY):
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh tools/install_cpu.sh
	@rm -f $(VENV)/.ready-* && touch $@

.PHONY: run
run: $(PARTS) ## Start queue, scheduler and a vLLM worker, answer INPUT into OUTPUT, stop them; CONFIG=file.toml
	@mkdir -p $(RUN_DIR) $(dir $(OUTPUT))
	@$(MODULES) DATA_DIR_OPTION=RUN_DIR= $(BIN)/penstock run-batch --up $(if $(CONFIG),--config $(CONFIG)) --data-dir $(RUN_DIR) -i $(INPUT) -o $(OUTPUT)

.PHONY: test
test: $(READY) ## Run the tests
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile

.PHONY: test-long
test-long: $(READY) ## The tests that take too long for `test`
	@LONG_TESTS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m long

.PHONY: compiled
compiled: $(READY) ## Compile the services into build/compiled (a C compiler; minutes, unless nothing changed)
	@$(BIN)/python tools/compile_services.py

.PHONY: test-compiled
test-compiled: compiled ## The tests of queue, scheduler and worker, and 60 seeds of the simulation, with compiled services
	@PENSTOCK_COMPILED=1 LONG_TESTS=1 $(FROM_COMPILED) $(BIN)/python -m pytest -q -n 2 --dist loadfile -o pythonpath= $(or $(TESTS),tests/unit/queue tests/unit/scheduler tests/unit/worker tests/unit/rpc tests/unit/services tests/contract tests/properties tests/scenarios)
	@$(FROM_COMPILED) $(BIN)/python -m tests.simulation --fixed 60 --seeds 0

.PHONY: test-console
test-console: $(READY) ## Look at the console with Debian's Chromium (apt-get install chromium); pictures in build/console
	@CONSOLE_TESTS=1 $(BIN)/python -m pytest -q tests/integration/test_console.py tests/integration/test_console_states.py

.PHONY: check
check: lint types protos-check docs-check test ## Lint, types, proto drift, tests

.PHONY: lint
lint: $(READY) $(BUF) ## ruff and buf
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BUF) lint

.PHONY: types
types: $(READY) ## mypy, strict
	@$(BIN)/mypy setup.py penstock services tools benchmarks tests examples

.PHONY: protos
protos: $(READY) ## Generate the wire modules from protos/
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tools/generate_protos.py

.PHONY: protos-check
protos-check: $(READY) ## Fail if the wire modules are out of date
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tools/generate_protos.py --check

.PHONY: docs
docs: $(READY) ## Write the settings tables of docs/configuration.md, and deploy/penstock.toml
	@$(BIN)/python tools/document_settings.py

.PHONY: docs-check
docs-check: $(READY) ## Fail if one of them is out of date
	@$(BIN)/python tools/document_settings.py --check

SIM_ARGS = $(if $(FAULTS),--faults $(FAULTS)) $(if $(REQUESTS),--requests $(REQUESTS)) $(if $(PLANT),--plant $(PLANT)) $(if $(FIRST),--first $(FIRST))

.PHONY: sim
sim: $(READY) ## Simulate the whole fleet with faults: SEEDS=n plays n seeds, SEED=k replays one, PLANT=name looks for a bug
	@$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),200)) $(SIM_ARGS)

.PHONY: sim-ci
sim-ci: $(READY) ## 300 fixed seeds of the simulation, and 500 fresh ones
	@$(BIN)/python -m tests.simulation --fixed 300 --seeds $(or $(SEEDS),500)

.PHONY: chaos
chaos: $(PARTS) ## A batch on real vLLM while everything around it is killed, frozen, cut off and filled up; ARGS="--seed 2"
	@$(MODULES) $(BIN)/python -m tests.chaos --directory $(RUN_DIR)/chaos $(ARGS)

.PHONY: chaos-sim
chaos-sim: $(PARTS) ## The same for 100,000 requests on simulated engines
	@$(MODULES) $(BIN)/python -m tests.chaos --engine simulated --directory $(RUN_DIR)/chaos-sim $(ARGS)

.PHONY: gateway-kills
gateway-kills: $(READY) ## Files and batches while their gateway is killed at every stage, with the tests too long for `test`
	@GATEWAY_LINES=$(or $(LINES),8000) $(BIN)/python -m pytest -q tests/integration/test_gateway_kills.py tests/integration/test_gateway_batches.py

.PHONY: gateway-streams
gateway-streams: $(READY) ## A thousand clients that stream at once through one gateway
	@GATEWAY_STREAMS=$(or $(STREAMS),1000) $(BIN)/python -m pytest -q tests/integration/test_gateway.py -k many_streams

.PHONY: observability-check
observability-check: $(READY) ## Every query of dashboard and alerts, asked of a real Prometheus (Debian: prometheus)
	@$(BIN)/python -m tests.observability

.PHONY: trace-check
trace-check: $(READY) ## The traces of 10,000 requests, 1 % of which lose their worker, over a real OTLP receiver
	@$(BIN)/python -m tests.traces $(ARGS)

.PHONY: helm-check
helm-check: $(READY) ## Lint and render the Helm chart, and hold what comes out against schemas and services (npm)
	@$(BIN)/python -m tests.helm

.PHONY: node-check
node-check: $(READY) ## The example for Node.js, whose queue is killed under each of its streams (npm)
	@NODE_TESTS=1 $(BIN)/python -m pytest -q tests/integration/test_node_example.py

.PHONY: fuzz
fuzz: $(READY) ## Feed arbitrary bytes and lies to wire, services, batch reader and store: EXAMPLES=n of each test
	@FUZZ_EXAMPLES=$(or $(EXAMPLES),1000) $(BIN)/python -m pytest -q --timeout 0 tests/fuzz

.PHONY: bench-main
bench-main: $(PARTS) ## 2,000 requests with production lengths through the whole stack on real vLLM
	@$(MODULES) $(BIN)/python -m benchmarks.bench_main $(ARGS)

.PHONY: bench-ratio
bench-ratio: $(PARTS) ## The same requests through plain vLLM and through Penstock, alternating
	@$(MODULES) $(BIN)/python -m benchmarks.bench_ratio $(ARGS)

# What the control plane costs is said of what ships: compiled services, unless COMPILED says otherwise.
LIFECYCLE := $(if $(filter undefined,$(origin COMPILED)),1,$(COMPILED))

.PHONY: bench-lifecycle
bench-lifecycle: $(READY) $(if $(LIFECYCLE),compiled) ## The whole path of a request, against Redis Streams and NATS JetStream (Debian: redis-server nats-server); COMPILED= for the sources
	@$(if $(LIFECYCLE),$(FROM_COMPILED)) $(BIN)/python -m benchmarks.bench_lifecycle $(ARGS)

.PHONY: bench-instructions
bench-instructions: $(READY) $(if $(LIFECYCLE),compiled) ## Instructions per request of each service, for machines too noisy to time them (Debian: valgrind)
	@$(if $(LIFECYCLE),$(FROM_COMPILED)) $(BIN)/python -m benchmarks.bench_instructions $(ARGS)

.PHONY: bench-admission
bench-admission: $(PARTS) ## Admission policies on real vLLM, alternating; ARGS="--help" shows the choices
	@$(MODULES) $(BIN)/python -m benchmarks.admission.real $(ARGS)

.PHONY: bench-admission-sim
bench-admission-sim: $(PARTS) ## Admission policies and fleets on simulated engines, some twenty minutes; ARGS="..." for the first
	@$(MODULES) $(BIN)/python -m benchmarks.admission.sim $(or $(ARGS),--workload all --policies all --scale gpu --requests 600)
	@$(if $(ARGS),,$(MODULES) $(BIN)/python -m benchmarks.admission.makespan)

.PHONY: bench-keys
bench-keys: $(READY) ## What API keys and a quota cost the queue, alternating with a queue without
	@$(BIN)/python -m benchmarks.bench_keys $(ARGS)

.PHONY: bench-recovery
bench-recovery: $(READY) ## Time until submits, grants and lost requests go on after a kill -9; up to a million waiting
	@$(BIN)/python -m benchmarks.bench_recovery $(ARGS)

.PHONY: bench-overload
bench-overload: $(READY) ## Ten and a hundred times the load: refusals, memory, and the interactive channel beside it
	@$(BIN)/python -m benchmarks.bench_overload $(ARGS)

.PHONY: bench-gateway
bench-gateway: $(PARTS) ## vLLM's `bench serve` against the gateway and against vLLM's own server, alternating
	@$(MODULES) $(BIN)/python -m benchmarks.bench_gateway $(ARGS)

.PHONY: bench-isolation
bench-isolation: $(PARTS) ## A short request beside a backlog of long outputs on real vLLM, alternating with first come, first served
	@$(MODULES) $(BIN)/python -m benchmarks.bench_isolation $(ARGS)

.PHONY: bench-first-byte
bench-first-byte: $(READY) ## The first byte of a stream, alone and beside a large batch, alternating
	@$(BIN)/python -m benchmarks.bench_first_byte $(ARGS)

.PHONY: bench-batch-files
bench-batch-files: $(READY) ## A 150,000-line file through the gateway's files and batches: its memory, phase by phase
	@$(BIN)/python -m benchmarks.bench_batch_files $(ARGS)

.PHONY: bench-soak
bench-soak: $(READY) ## Memory of every process while clients do for minutes all that clients do; ARGS="--minutes 30"
	@$(BIN)/python -m benchmarks.bench_soak $(ARGS)

.PHONY: fit-engine
fit-engine: $(READY) ## Fit the engine model's step time to real vLLM on this machine: PROFILE=cpu-tiny or cpu-small
	@$(BIN)/python -m benchmarks.fit_engine --profile $(or $(PROFILE),cpu-tiny) $(ARGS)

# Packaging needs no vLLM: a small environment of its own.
SETUPTOOLS := $(shell sed -n 's/^setuptools==//p' requirements/worker-cpu.txt)
PACK := build/venv/bin/python
# A file of its own: the Python is there before its setuptools is, and stays when that could not be installed.
PACK_READY := build/venv/.ready-$(SETUPTOOLS)
$(PACK_READY):
	@$(PYTHON) -m venv --clear build/venv
	@$(PACK) -m pip --disable-pip-version-check install --quiet "setuptools==$(SETUPTOOLS)"
	@touch $@

.PHONY: dist
dist: $(PACK_READY) ## Make dist/: sdist, and the wheel built from it
	@$(PACK) tools/make_dist.py

LIGHT_IMAGES := queue scheduler gateway worker-simulated
IMAGES ?= $(LIGHT_IMAGES) worker-cpu

.PHONY: base-image
base-image: ## Make base images out of Debian packages, where no image registry is reachable (root, debootstrap)
	@deploy/docker/make_base.sh

.PHONY: images
images: dist ## Build the images and print their sizes: IMAGES="queue worker-cuda", BASE=image, BUILD_BASE=image, COMPILE=0
	@$(PACK) tools/fetch_wheels.py light compile $(if $(filter worker-cpu,$(IMAGES)),cpu) $(if $(filter worker-cuda,$(IMAGES)),cuda)
	@BASE="$(BASE)" BUILD_BASE="$(BUILD_BASE)" COMPILE="$(COMPILE)" deploy/docker/build.sh $(IMAGES)

.PHONY: compose-test
compose-test: $(READY) ## A batch through the composed stack of `make images`, every container killed twice; needs Docker
	@$(BIN)/python -m tests.compose $(ARGS)

.PHONY: format
format: $(READY) ## Format the code
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format --quiet .

$(BUF):
	@command -v npm >/dev/null || { echo "buf lint needs npm (Node.js 18 or newer) to install buf $(BUF_VERSION)"; exit 1; }
	@npm install --silent --no-save --prefix .buf @bufbuild/buf@$(BUF_VERSION) >/dev/null

.PHONY: clean
clean: ## Remove the queue's data, results and caches, keep the virtual environment
	@rm -rf $(RUN_DIR) .mypy_cache .ruff_cache .pytest_cache .hypothesis

.PHONY: distclean
distclean: clean ## Remove the virtual environment as well
	@rm -rf $(VENV) .buf build dist
