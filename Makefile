# make demo   train the digits model on 2 servers and 2 workers
# make test   run the tests
# make docs   build the site of the documentation into build/site
# make check  lint, format, types, generated code (for contributors)
# make proto  generate paramserver/v1 again after a change in protos/ (for contributors)
# make docker-image  build the image for docker-compose, with the wheels in docker/wheels if there are any
# make docker-wheels  fetch these wheels, so that the image builds without a network
# make docker-hashes write docker/hashes.txt anew, after a change of constraints.txt (needs uv)
# make test-compose  build the image and test real clusters of containers (needs Docker and docker-compose)
# make test-machines  train on six emulated machines, with faults and strangers (needs root and iproute2)
# make test-jitter  the cluster and contract tests with random switch intervals of the interpreter, which find races (10 minutes)
# make test-processors  the tests within one process, with the instructions of other processors (three times as long)
# make test-soak  the long variants of tests about overload and leaks: a hundred thousand contributions and the like
# make test-long   more runs of real processes, which take longer
# make test-behaviour N=1000   random scripts against plain torch, with other seeds after FIRST=5000 (docs/testing.md)
# make test-scale  a run with 32 workers
# make test-faults  the crash matrix, 200 random faults, 100 kills; writes docs/reliability.md (an hour or more)
# make test-low  unit and contract tests with the lowest versions of grpcio, protobuf, redis and torch (for contributors)
# make test-trackers  what the real packages of trackers take (for contributors; installs them)
# make test-frameworks  accelerate, Transformers, Lightning, datasets, torchdata and Ray (for contributors; installs them)
# make test-monitoring  the alert rules, and the queries of the dashboard for Grafana, by a real Prometheus (of Debian's package prometheus)
# make test-gpu  what only a machine with a GPU can test (for contributors; uses the python on PATH)
# make screenshots  pictures of the page of three real runs, in build/screenshots; one goes into README.md (needs chromium)
# make clean  remove caches and build outputs; make clean-all also the environments

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# Compiled modules are kept: the next run of the tests collects them in half the time, and processes start sooner.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
BIN := .venv/bin
# For two cores. A third of the time of a test in one process is waiting for timers; tests of real processes fill the cores.
TEST_PROCESSES ?= 4
RUN_PROCESSES ?= 3
PROTOS := $(wildcard protos/paramserver/v1/*.proto)
# The lowest versions that pyproject.toml allows of what we depend on most.
LOWEST_TORCH := 2.6.0
LOWEST := grpcio==1.76.0 protobuf==6.31.1 redis==5.0.0 torch==$(LOWEST_TORCH)
# Old enough that the code it makes imports under protobuf 6 and 7; in an environment of its own, since it needs < 7.
PROTO_TOOLS := grpcio-tools==1.76.0 grpcio==1.76.0 protobuf==6.33.6 setuptools==80.9.0
PROTOC = .proto-venv/bin/python -m grpc_tools.protoc -I protos

.PHONY: help demo docs test test-long test-behaviour test-jitter test-processors test-soak test-scale test-faults test-low test-trackers test-frameworks test-monitoring test-gpu screenshots check format proto proto-check clean clean-all \
	docker-image docker-wheels docker-hashes docker-base test-compose test-machines

help:
	@sed -n 's/^# make/make/p' Makefile

.venv/.stamp: pyproject.toml constraints.txt hatch_build.py paramserver/kernels/kernels.c
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[local,demo,dev]'
	touch $@

.proto-venv/.stamp: Makefile
	$(PYTHON) -m venv .proto-venv
	.proto-venv/bin/python -m pip install --quiet --disable-pip-version-check $(PROTO_TOOLS)
	touch $@

.low-venv/.stamp: pyproject.toml constraints.txt Makefile hatch_build.py paramserver/kernels/kernels.c
	$(PYTHON) -m venv .low-venv
	@test "$$(uname -sm)" != 'Linux x86_64' \
		|| .low-venv/bin/python -m pip index versions torch 2> /dev/null | grep -F '$(LOWEST_TORCH)+cpu' > /dev/null \
		|| { echo 'pip finds no CPU build of torch $(LOWEST_TORCH), and the build for GPUs takes gigabytes: set pip up for the CPU index of PyTorch' \
		'(PIP_EXTRA_INDEX_URL), or give it the wheel of torch $(LOWEST_TORCH)+cpu (PIP_FIND_LINKS)'; exit 1; }
	grep -vE '^(grpcio|protobuf|redis|torch|sympy)==' constraints.txt > .low-venv/constraints.txt
	.low-venv/bin/python -m pip install --quiet --disable-pip-version-check -c .low-venv/constraints.txt \
		-e '.[local,demo,dev]' $(LOWEST)
	touch $@

demo: .venv/.stamp
	$(BIN)/paramserver run workers/digits.py --servers 2 --workers 2

# No page is left out, no link is broken, and nothing comes from the network.
docs: .venv/.stamp
	$(BIN)/sphinx-build --quiet --fresh-env --fail-on-warning --keep-going -c docs -d build/site-cache . build/site
	@echo 'open build/site/index.html'

test: .venv/.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --one-core --dist loadfile -m 'not long' \
		tests/unit tests/contract tests/cluster tests/behaviour
	$(BIN)/python -m pytest -q -n $(RUN_PROCESSES) --dist loadfile -m 'not long' tests/integration

test-long: .venv/.stamp
	@bad=0; OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist loadfile -m long \
		tests/unit tests/contract tests/cluster tests/behaviour || bad=1; \
	$(BIN)/python -m pytest -q -m long tests/integration || bad=1; exit $$bad

screenshots: .venv/.stamp
	$(BIN)/python -m tests.support.integration.screenshots build/screenshots

N ?= 1000
FIRST ?= 0
test-behaviour: .venv/.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.behaviour.run --scripts $(N) --first $(FIRST)

test-jitter: .venv/.stamp
	$(BIN)/python -m pytest -p tests.support.jitter -n 2 --dist loadfile -m 'not long' tests/cluster tests/contract

# torch and oneDNN choose their arithmetic by the processor. Each line is a processor with fewer instructions than this one.
PROCESSORS := 'ATEN_CPU_CAPABILITY=default' 'ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2' 'ONEDNN_MAX_CPU_ISA=AVX512_CORE'
test-processors: .venv/.stamp
	@bad=0; for processor in $(PROCESSORS); do echo "$$processor"; \
	env $$processor OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --one-core --dist loadfile -m 'not long' \
		tests/unit tests/contract tests/cluster tests/behaviour || bad=1; done; exit $$bad

test-soak: .venv/.stamp
	SOAK_MEMBERS=1000 SOAK_REJECTED=100000 SOAK_CONTRIBUTIONS=100000 SOAK_PULL_MIB=500 OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -q -s -o timeout=1800 tests/cluster/test_hygiene.py tests/cluster/test_overload.py \
		tests/cluster/test_overload_network.py
	$(BIN)/python -m pytest -q -s tests/soak

test-scale: .venv/.stamp
	MANY_WORKERS=32 $(BIN)/python -m pytest -q -s tests/integration/test_many_workers.py

# What has gone well stays in build/faults and is not run again: `rm -r build/faults` for a fresh start.
test-faults: .venv/.stamp
	@bad=0; $(BIN)/python -m pytest -q -s tests/faults || bad=1; \
	$(BIN)/python -m tests.faults.matrix document; exit $$bad

test-low: .low-venv/.stamp
	OMP_NUM_THREADS=1 .low-venv/bin/python -m pytest -q -n $(TEST_PROCESSES) --dist loadfile tests/unit tests/contract \
		tests/cluster/test_reads.py

test-trackers: .trackers-venv/.stamp
	OMP_NUM_THREADS=1 .trackers-venv/bin/python -m pytest -q tests/trackers

.trackers-venv/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .trackers-venv
	.trackers-venv/bin/python -m pip install --quiet --disable-pip-version-check '.[local,demo,dev,trackers]'
	touch $@

test-frameworks: .frameworks-venv/.stamp
	OMP_NUM_THREADS=1 .frameworks-venv/bin/python -m pytest -q tests/frameworks

.frameworks-venv/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .frameworks-venv
	.frameworks-venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[local,demo,dev,finetune,huggingface,lightning,ray]' 'datasets>=5' 'torchdata>=0.11'
	touch $@

test-monitoring: .venv/.stamp
	@command -v prometheus > /dev/null && command -v promtool > /dev/null || { echo 'there is no prometheus: install it (on Debian the package prometheus)'; exit 1; }
	$(BIN)/python -m pytest -q tests/monitoring

test-gpu:
	$(PYTHON) -m pytest -q -s -p no:cacheprovider tests/gpu

docker-image:
	docker build -f docker/Dockerfile -t paramserver:latest .

docker-wheels: docker/wheels/.stamp

# async-timeout: redis-py asks for it where Python is older than 3.11.3, and pip does not see that from a newer one.
docker/wheels/.stamp: pyproject.toml constraints.txt docker/requirements.py
	rm -rf docker/wheels/.new
	mkdir docker/wheels/.new
	$(PYTHON) docker/requirements.py --build dashboard demo > docker/wheels/.new/requirements.txt
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --only-binary :all: --python-version 3.11 \
		--dest docker/wheels/.new -c constraints.txt -r docker/wheels/.new/requirements.txt async-timeout
	@! compgen -G 'docker/wheels/.new/nvidia*.whl' || { rm -r docker/wheels/.new; \
		echo 'This torch is for GPUs. Set pip up for the CPU index of PyTorch: PIP_EXTRA_INDEX_URL'; exit 1; }
	rm -f docker/wheels/*.whl
	mv docker/wheels/.new/*.whl docker/wheels
	rm -r docker/wheels/.new
	touch $@

# The hashes of all archives of each version that the image installs, for all platforms. uv asks the index of UV_DEFAULT_INDEX
# and UV_INDEX, and looks for wheels in UV_FIND_LINKS: one of them has to have torch for CPUs. Their addresses are not written.
docker-hashes:
	@command -v uv > /dev/null || { echo 'there is no uv: install it (pip install uv)'; exit 1; }
	sed -n '/^#/p' docker/hashes.txt > docker/hashes.new
	{ $(PYTHON) docker/requirements.py dashboard demo; echo async-timeout; } | uv pip compile - --quiet -c constraints.txt \
		--generate-hashes --python-version 3.11 --no-build --no-annotate --no-header --no-emit-index-url --no-emit-find-links \
		>> docker/hashes.new
	mv docker/hashes.new docker/hashes.txt

# Stand-ins where the real images can neither be found nor pulled; only for tests.
docker-base:
	docker/base-images.sh

test-compose: .venv/.stamp docker-base docker/wheels/.stamp
	$(BIN)/python -m pytest -q -s tests/compose

test-machines: .venv/.stamp
	@for tool in ip tc bridge; do command -v $$tool > /dev/null || { echo "there is no $$tool: install iproute2"; exit 1; }; done
	@test "$$(id -u)" = 0 || { echo 'it makes network namespaces: run it as root'; exit 1; }
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s tests/machines

check: .venv/.stamp proto-check
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: .venv/.stamp
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

proto: .proto-venv/.stamp
	$(PROTOC) --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

proto-check: .proto-venv/.stamp
	@out=$$(mktemp -d); trap 'rm -rf "$$out"' EXIT; \
	$(PROTOC) --python_out="$$out" --pyi_out="$$out" --grpc_python_out="$$out" $(PROTOS); \
	diff -r -x __init__.py -x __pycache__ "$$out/paramserver/v1" paramserver/v1 \
		|| { echo 'paramserver/v1 is not what protos/ gives: run make proto'; exit 1; }

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find paramserver tests workers -name __pycache__ -prune -exec rm -rf {} +

clean-all: clean
	rm -rf .venv .proto-venv .low-venv .trackers-venv .frameworks-venv
