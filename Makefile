# Two commands for newcomers: `make demo` and `make test`. Both set up a virtual environment in .venv first.
VENV ?= .venv
PYTHON ?= python3
# On Linux without a GPU, PIP_EXTRA_INDEX_URL can point pip at torch's CPU builds, which are far smaller.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
DEMO_BUNDLE ?= demo-bundle
DEMO_PROMPT ?= class Stack:

.PHONY: help demo test lint docs setup setup-test llama-cpp clean

help:
	@echo "make demo       set up, export the shipped reference pair, run it with and without drafts"
	@echo "make test       set up and run all tests"
	@echo "make lint       ruff, mypy, import-linter"
	@echo "make docs       the documentation as a site, in build/site"
	@echo "make llama-cpp  build llama.cpp's own tools from llama-cpp-python's source archive, to compare with"
	@echo "make clean      remove .venv, build/ and the demo bundle"

setup: $(VENV)/.ready
setup-test: $(VENV)/.ready-test

$(VENV)/.ready: pyproject.toml scripts/setup.sh
	@PYTHON=$(PYTHON) scripts/setup.sh $(VENV) '.[llama,export]'
	@touch $@

$(VENV)/.ready-test: $(VENV)/.ready
	@PYTHON=$(PYTHON) scripts/setup.sh $(VENV) '.[llama,onnx,export,grammar,serve,sign,verify,optimum,report,docs,dev]' '$(TORCH)'
	@touch $@

demo: setup
	$(BIN)/edge-export --reference-pair --output $(DEMO_BUNDLE) --force
	$(BIN)/edge-run $(DEMO_BUNDLE) --compare --draft-length 3 --max-tokens 200 "$(DEMO_PROMPT)"

test: setup-test
	$(BIN)/python -m pytest

lint: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: setup-test
	$(BIN)/mkdocs build --strict
	@echo "the site is in build/site"

llama-cpp: setup
	scripts/build_llama_cpp.sh $(VENV) build/llama.cpp

clean:
	rm -rf $(VENV) build $(DEMO_BUNDLE)
