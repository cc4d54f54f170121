# Two commands for newcomers: `make demo` and `make test`. Both set up a virtual environment in .venv first.
VENV ?= .venv
PYTHON ?= python3
# On Linux without a GPU, PIP_EXTRA_INDEX_URL can point pip at torch's CPU builds, which are far smaller.
TORCH ?= torch==2.13.0
# Number of test processes, each on its own processors.
WORKERS ?= 2
BIN := $(VENV)/bin
TOOLS := .venv-tools
TEST_EXTRAS := llama,onnx,export,grammar,serve,sign,verify,optimum,report,media,fleet,docs,dev
USER_EXTRAS := llama,onnx,export,grammar,serve,sign,report,media
comma := ,
# Locks hold for every Python and platform; torch is left out (requirements/README.md).
LOCK := $(TOOLS)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --custom-compile-command "make lock" \
	--override requirements/overrides.txt
AUDIT = $(BIN)/python scripts/setup/check_dependencies.py --python $(BIN)/python --tools $(TOOLS)/bin \
	--lock requirements/ci.txt --lock requirements/runtime.txt
DEMO_BUNDLE ?= demo-bundle
# make demo BACKEND=llama runs on llama.cpp, which is compiled; onnx needs wheels only.
BACKEND ?= onnx
DEMO_EXTRAS_onnx := onnx,export-onnx
DEMO_EXTRAS_llama := llama,export
DEMO_FORMAT_onnx := onnx
DEMO_FORMAT_llama := gguf

.PHONY: help demo setup-llama test test-random test-slow lint docs lock audit wheel-check release dist setup setup-test try-versions llama-cpp \
	clean

help:
	@echo "make demo       set up without a compiler, make a pair of a phone-sized model's cost, show what drafts bring (BACKEND=llama: on llama.cpp)"
	@echo "make test       set up and run the tests"
	@echo "make test-slow  the tests that take minutes, which make test omits, in random order"
	@echo "make test-random  the tests of make test in random order"
	@echo "make lint       ruff, mypy, import-linter, hadolint, the issue forms"
	@echo "make docs       the documentation as a site, in build/site"
	@echo "make audit      licences of what is installed, advisories about what is locked"
	@echo "make release    audit, then make dist: source archive, wheel and SBOM in dist/; make wheel-check tries the wheel on each Python there is"
	@echo "make lock       choose the locked versions in requirements/ anew"
	@echo "make try-versions  try the newest llama-cpp-python and onnxruntime on copies of the checkout"
	@echo "make llama-cpp  build llama.cpp's own tools from llama-cpp-python's source archive, to compare with"
	@echo "make clean      remove .venv, build/ and the demo bundle"

setup: $(VENV)/.ready-$(BACKEND)
setup-llama: $(VENV)/.ready-llama
setup-test: $(VENV)/.ready-test

$(VENV)/.ready-onnx $(VENV)/.ready-llama: $(VENV)/.ready-%: pyproject.toml scripts/setup/setup.sh
	@PYTHON=$(PYTHON) scripts/setup/setup.sh $(VENV) '.[$(DEMO_EXTRAS_$*)]'
	@touch $@

# CI's lock, in which everything but torch has its hash.
$(VENV)/.ready-test: pyproject.toml scripts/setup/setup.sh requirements/ci.txt
	@PYTHON=$(PYTHON) LOCK=requirements/ci.txt scripts/setup/setup.sh $(VENV) . '$(TORCH)'
	@touch $@

$(TOOLS)/.ready: requirements/tools.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements/tools.txt
	@touch $@

$(DEMO_BUNDLE)-$(BACKEND)/manifest.json: $(VENV)/.ready-$(BACKEND)
	$(BIN)/edge-export reference --widened --format $(DEMO_FORMAT_$(BACKEND)) --no-verify --output $(DEMO_BUNDLE)-$(BACKEND) --force

demo: $(DEMO_BUNDLE)-$(BACKEND)/manifest.json
	$(BIN)/edge-run demo $(DEMO_BUNDLE)-$(BACKEND)

test: setup-test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -p no:randomly -m "not slow"

# The same in random order, to find tests that depend on others. The seed is printed; SEED=n repeats an order.
test-random: setup-test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(if $(SEED),--randomly-seed=$(SEED)) -m "not slow"

# Statistics over thousands of samples, complete benchmarks on devices, and emulated phones and boards, in random order: a quarter of an hour.
test-slow: setup-test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(if $(SEED),--randomly-seed=$(SEED)) -m slow

lint: setup-test $(TOOLS)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(TOOLS)/bin/hadolint Dockerfile
	$(TOOLS)/bin/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml \
		.github/ISSUE_TEMPLATE/device.yml .github/ISSUE_TEMPLATE/feature.yml

docs: setup-test
	$(BIN)/mkdocs build --strict
	@echo "the site is in build/site"

lock: $(TOOLS)/.ready
	$(LOCK) $(foreach e,$(subst $(comma), ,$(TEST_EXTRAS)),--extra $(e)) pyproject.toml requirements/ci.in -o requirements/ci.txt
	$(LOCK) $(foreach e,$(subst $(comma), ,$(USER_EXTRAS)),--extra $(e)) pyproject.toml -o requirements/runtime.txt
	$(LOCK) requirements/tools.in -o requirements/tools.txt

audit: setup-test $(TOOLS)/.ready
	$(AUDIT)

wheel-check: $(TOOLS)/.ready
	scripts/setup/check_wheel.sh $(TOOLS)

# Where no advisory service answers, there is no release. The SBOM is of what a user gets: licences and who needs whom are read from it.
release: setup-test $(TOOLS)/.ready
	$(AUDIT) --require-advisories
	$(MAKE) dist

dist: $(TOOLS)/.ready
	rm -rf dist build/release
	$(TOOLS)/bin/python -m build --no-isolation --outdir dist
	$(PYTHON) -m venv build/release
	build/release/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements/runtime.txt
	build/release/bin/python -m pip install --quiet --disable-pip-version-check --no-deps dist/*.whl
	build/release/bin/python -m pip uninstall --quiet --yes pip setuptools
	$(TOOLS)/bin/cyclonedx-py environment build/release/bin/python --pyproject pyproject.toml --output-reproducible -o dist/sbom.json
	@ls -l dist

# Newer releases of the two libraries, tried on copies of the checkout; nothing here changes.
try-versions:
	PYTHON=$(PYTHON) scripts/setup/try_versions.sh llama-cpp-python
	PYTHON=$(PYTHON) scripts/setup/try_versions.sh onnxruntime

llama-cpp: setup-llama
	scripts/setup/build_llama_cpp.sh $(VENV) build/llama.cpp

clean:
	rm -rf $(VENV) $(TOOLS) build dist $(DEMO_BUNDLE)-*
