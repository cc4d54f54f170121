# Two commands for newcomers: `make demo` and `make test`. Each sets up a virtual environment first, from wheels alone.
VENV ?= .venv
SHORT_VENV ?= .venv-test
PYTHON ?= python3
# On Linux without a GPU, PIP_EXTRA_INDEX_URL can point pip at torch's CPU builds, which are far smaller.
TORCH ?= torch==2.13.0
# Number of test processes. Many tests wait for devices, servers and browsers: two processes share each of two processors.
WORKERS ?= 4
BIN := $(VENV)/bin
TOOLS := .venv-tools
TEST_EXTRAS := onnx,export-onnx,grammar,serve,sign,report,media,test
ALL_EXTRAS := $(TEST_EXTRAS),llama,export,package,verify,optimum,fleet,docs,dev
USER_EXTRAS := llama,onnx,export,grammar,serve,sign,report,media
comma := ,
# Locks hold for every Python and platform; torch is left out (requirements/README.md).
LOCK = $(or $(shell command -v uv),$(TOOLS)/bin/uv) pip compile --quiet --universal --python-version 3.11 --generate-hashes --custom-compile-command "make lock" \
	--override requirements/overrides.txt
extras = $(foreach e,$(subst $(comma), ,$(1)),--extra $(e))
# A change of the kernels compiles them anew.
KERNELS := $(wildcard $(addprefix runtime/edge_runtime/backends/kernels/,build.py src/* src/*/*))
BUILD := pyproject.toml hatch_build.py scripts/setup/setup.sh requirements/build.txt requirements/llama.txt $(KERNELS)
SETUP := PYTHON=$(PYTHON) scripts/setup/setup.sh
AUDIT = $(BIN)/python scripts/setup/check_dependencies.py --python $(BIN)/python --tools $(TOOLS)/bin \
	$(addprefix --lock requirements/,ci.txt runtime.txt build.txt llama.txt)
# Where it is set, as in containers, each of the thousands of processes that tests start compiles every module it imports: half of its start.
export PYTHONDONTWRITEBYTECODE :=
# The kernels are compiled for each environment and package, and each time for most of a minute: what did not change comes from here.
export ZIG_LOCAL_CACHE_DIR ?= $(CURDIR)/build/zig
export ZIG_GLOBAL_CACHE_DIR ?= $(CURDIR)/build/zig
DEMO_BUNDLE ?= demo-bundle
# make demo BACKEND=llama runs on llama.cpp, which is compiled; onnx needs wheels only.
BACKEND ?= onnx
DEMO_EXTRAS_onnx := onnx,export-onnx
DEMO_EXTRAS_llama := llama,export
DEMO_FORMAT_onnx := onnx
DEMO_FORMAT_llama := gguf

PLATFORMS := android-arm64 linux-arm64 linux-x64
.PHONY: help demo real test test-all test-times lint docs lock audit wheel-check release release-files dist packages \
	setup setup-llama setup-test setup-all try-versions llama-cpp clean

help:
	@echo "make demo       set up without a compiler, make a pair of a phone-sized model's cost, show what drafts bring (BACKEND=llama: on llama.cpp)"
	@echo "make real       a pair of real matrices in build/, on which quantization is judged; says which packages it needs"
	@echo "make test       set up without a compiler and run the tests that need nothing else and take under half a second each"
	@echo "make test-all   set up with a compiler and run all tests; SEED=n: in the order and with the examples of that run"
	@echo "make test-times measure the tests anew: which are the short ones"
	@echo "make lint       ruff, mypy, import-linter, hadolint, the issue forms"
	@echo "make docs       the documentation as a site, in build/site"
	@echo "make audit      licences of what is installed, advisories about what is locked"
	@echo "make release    audit, make packages, try what was made, print the commands that tag and upload; make wheel-check: the wheel alone"
	@echo "make release-files  make release without advisories and commands: a rehearsal"
	@echo "make dist       source archive, wheel and SBOM, in dist/; the wheel has the kernels of every platform"
	@echo "make packages   make dist, and the device packages of a release, of the wheel in dist/"
	@echo "make lock       choose the locked versions in requirements/ anew"
	@echo "make try-versions  try the newest llama-cpp-python and onnxruntime on copies of the checkout"
	@echo "make llama-cpp  build llama.cpp's own tools from llama-cpp-python's source archive, to compare with"
	@echo "make clean      remove .venv, build/ and the demo bundle"

setup: $(VENV)/.ready-$(BACKEND)
setup-llama: $(VENV)/.ready-llama
setup-test: $(SHORT_VENV)/.ready
setup-all: $(VENV)/.ready-all

# By locks, in which everything but torch has its hash, also what builds this project (requirements/build.txt).
$(VENV)/.ready-onnx $(VENV)/.ready-llama: $(VENV)/.ready-%: requirements/demo-%.txt $(BUILD)
	@LOCK=$< $(SETUP) $(VENV) .
	@touch $@

$(SHORT_VENV)/.ready: requirements/test.txt $(BUILD)
	@LOCK=requirements/test.txt $(SETUP) $(SHORT_VENV) .
	@touch $@

$(VENV)/.ready-all: requirements/ci.txt scripts/setup/build_llama_cpp.sh $(BUILD)
	@LOCK=requirements/ci.txt $(SETUP) $(VENV) . '$(TORCH)'
	@touch $@

$(TOOLS)/.ready: requirements/tools.txt requirements/uv.txt
	@LOCK=requirements/tools.txt $(SETUP) $(TOOLS)
	@touch $@

$(DEMO_BUNDLE)-$(BACKEND)/manifest.json: $(VENV)/.ready-$(BACKEND)
	$(BIN)/edge-export reference --widened --format $(DEMO_FORMAT_$(BACKEND)) --no-verify --output $(DEMO_BUNDLE)-$(BACKEND) --force

demo: $(DEMO_BUNDLE)-$(BACKEND)/manifest.json
	$(BIN)/edge-run demo $(DEMO_BUNDLE)-$(BACKEND)
	@echo "These commands are in $(BIN). To have them on your PATH: . $(BIN)/activate"

# What quantization costs is decided on it. Its weights are Google's (Gemma Terms of Use): nothing here installs or ships them.
real: setup-all
	$(BIN)/python scripts/pairs/real_matrices.py

RUN_TESTS := -m pytest -n $(WORKERS) --dist loadfile
test: setup-test
	$(SHORT_VENV)/bin/python $(RUN_TESTS) --short -rfE -m "not slow"

# The slow tests are statistics over thousands of samples, complete benchmarks on devices, and emulated phones and boards: their files come
# first, and they are in random order always. Property tests draw new examples in each run; pytest prints the seed of both.
test-all: setup-all
	seed=$${SEED:-$$(date +%s)}; echo "SEED=$$seed make test-all draws the same examples again"; \
	$(BIN)/python $(RUN_TESTS) --durations=40 --durations-min=5 --no-loadscope-reorder --hypothesis-seed=$$seed --randomly-seed=$$seed \
		$(if $(SEED),,--randomly-dont-reorganize)

# Writes tests/data/long_tests.txt: what takes half a second of processor time or more. make test leaves it out, test-all begins with its files.
test-times: setup-all
	$(BIN)/python $(RUN_TESTS) -rfE -m "not slow" \
		--measure $$($(BIN)/python -m pytest -q --collect-only | sed -n 's/^\([0-9]*\) tests collected.*/\1/p')

lint: setup-all $(TOOLS)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(TOOLS)/bin/hadolint Dockerfile
	$(TOOLS)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/release.yml
	$(TOOLS)/bin/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml \
		.github/ISSUE_TEMPLATE/device.yml .github/ISSUE_TEMPLATE/feature.yml

docs: setup-all
	$(BIN)/zensical build --strict --config-file mkdocs.yml
	@echo "the site is in build/site"

lock: $(TOOLS)/.ready
	$(LOCK) $(call extras,$(ALL_EXTRAS)) pyproject.toml requirements/ci.in -o requirements/ci.txt
	$(LOCK) -c requirements/ci.txt requirements/build.in -o requirements/build.txt
	$(LOCK) -c requirements/ci.txt requirements/llama.in -o requirements/llama.txt
	$(LOCK) $(call extras,$(TEST_EXTRAS)) -c requirements/ci.txt pyproject.toml -o requirements/test.txt
	$(LOCK) $(call extras,$(DEMO_EXTRAS_onnx)) -c requirements/ci.txt pyproject.toml -o requirements/demo-onnx.txt
	$(LOCK) $(call extras,$(DEMO_EXTRAS_llama)) -c requirements/ci.txt pyproject.toml -o requirements/demo-llama.txt
	$(LOCK) $(call extras,$(USER_EXTRAS)) pyproject.toml -o requirements/runtime.txt
	$(LOCK) requirements/tools.in -o requirements/tools.txt
	$(LOCK) requirements/uv.in -o requirements/uv.txt

audit: setup-all $(TOOLS)/.ready
	$(AUDIT)

wheel-check: $(TOOLS)/.ready
	scripts/setup/check_wheel.sh $(TOOLS)

# Where no advisory service answers, there is no release.
release: setup-all $(TOOLS)/.ready
	$(AUDIT) --require-advisories
	$(MAKE) release-files
	@scripts/setup/release_commands.sh

# What a release uploads, tried: all of it but the advisories, for a rehearsal where their services cannot be reached.
release-files: packages
	scripts/setup/check_wheel.sh $(TOOLS) dist/*.whl
	[ "$$(uname -sm)" != "Linux x86_64" ] || build/release-packages/linux-x64/bin/edge-run doctor
	cd dist && sha256sum * >SHA256SUMS

# What a phone or a board needs, for those who build nothing; each is built whole or not at all, and its own list has every file's hash. By
# the released wheel's own code, with its kernels; the other wheels are those of the lock, for the packages' Python.
packages: setup-all dist
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "make packages needs Python 3.11: PYTHON=python3.11" >&2; exit 1; }
	rm -rf build/release-packages
	mkdir -p build/release-packages
	$(BIN)/python -m zipfile --extract dist/*.whl build/release-packages/wheel
	set -e; for platform in $(PLATFORMS); do \
		PYTHONPATH=build/release-packages/wheel PIP_CONSTRAINT=$(CURDIR)/requirements/runtime.txt \
			$(BIN)/edge-export package $$platform --output build/release-packages/$$platform; \
		tar --create --gzip --owner 0 --group 0 --sort name --directory build/release-packages --file dist/edge-mtp-$$platform.tar.gz $$platform; \
	done

# The SBOM is of what a user gets: licences and who needs whom are read from it. llama.cpp comes from the wheel that setup-all compiled,
# which has no hash in the lock; the source archive that it is made of does.
dist: setup-all $(TOOLS)/.ready
	rm -rf dist build/release
	EDGE_MTP_KERNELS_FOR=all $(TOOLS)/bin/python -m build --no-isolation --outdir dist
	$(PYTHON) -m venv build/release
	awk '/^[^ #]/ { kept = index($$0, "llama-cpp-python==") != 1 } kept' requirements/runtime.txt >build/release/lock.txt
	build/release/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r build/release/lock.txt
	build/release/bin/python -m pip install --quiet --disable-pip-version-check --no-deps dist/*.whl \
		"$$(scripts/setup/build_llama_cpp.sh $(VENV) wheel)"
	build/release/bin/python -m pip uninstall --quiet --yes pip setuptools
	$(TOOLS)/bin/cyclonedx-py environment build/release/bin/python --pyproject pyproject.toml --output-reproducible -o dist/sbom.json
	@ls -l dist

# Newer releases of the two libraries, tried on copies of the checkout; nothing here changes. Each ends with a line of verdict.
try-versions:
	status=0; for library in llama-cpp-python onnxruntime; do \
		PYTHON=$(PYTHON) scripts/setup/try_versions.sh $$library || status=1; done; exit $$status

llama-cpp: setup-all
	scripts/setup/build_llama_cpp.sh $(VENV) tools

clean:
	rm -rf $(VENV) $(SHORT_VENV) $(TOOLS) build dist $(DEMO_BUNDLE)-*
