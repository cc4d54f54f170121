#!/usr/bin/env bash
# Tries a wheel in clean environments, on each Python from 3.11 to 3.13 that this machine has: check_wheel.sh TOOLS_VENV [WHEEL]
# Without WHEEL it builds one, with this machine's kernels alone.
# From wheels only: the ONNX half, so that nothing is compiled per Python; llama.cpp is what the test-suite runs on.
set -euo pipefail
cd "$(dirname "$0")/../.."
tools=${1:?usage: check_wheel.sh TOOLS_VENV [WHEEL]}
wheel=${2:+$(realpath "$2")}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "$wheel" ]; then
    "$tools/bin/python" -m build --no-isolation --wheel --outdir "$work/dist" >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
    wheel=$(echo "$work"/dist/*.whl)
fi
echo "wheel: $(basename "$wheel"), $(stat -c %s "$wheel" 2>/dev/null || stat -f %z "$wheel") bytes"

# A Python by its version: from the PATH, or where pyenv keeps it.
find_python() {
    local candidate
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
        if "$candidate" -c "import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
}

uv=$(command -v uv || echo "$PWD/$tools/bin/uv")
cd "$work" # so that nothing of the checkout is imported

try_python() { # PYTHON VERSION
    local bin=$work/$2/bin
    "$1" -m venv "$work/$2"
    local install=("$uv" pip install --quiet --python "$bin/python")
    mkdir "$work/run-$2"
    cd "$work/run-$2"
    export EDGE_MTP_CACHE=$work/cache-$2
    "${install[@]}" "$wheel"
    for command in edge-run edge-bench edge-devices; do
        "$bin/$command" --version >/dev/null
    done
    { "$bin/edge-export" reference --output refused 2>&1 || true; } | grep -q "^Error: edge-export needs .*edge-mtp\[export\]"
    "$bin/edge-run" doctor --json | "$bin/python" -c 'import json, sys; found = json.load(sys.stdin); assert not found["ready"] and found["install"], found'
    "${install[@]}" "$wheel[onnx,export-onnx,grammar,serve]"
    "$bin/edge-run" doctor --json | "$bin/python" -c 'import json, sys; found = json.load(sys.stdin); assert found["ready"], found'
    "$bin/edge-export" reference --output bundle --format onnx --no-verify --force >/dev/null 2>&1
    "$bin/edge-run" generate bundle --json --max-tokens 32 "class Stack:" 2>/dev/null |
        "$bin/python" -c 'import json, sys; run = json.load(sys.stdin); assert run["stats"]["tokens"] == 32, run'
    "$bin/python" -m pip check >/dev/null
    echo "Python $("$bin/python" -c 'import platform; print(platform.python_version())'): installs, exports and runs"
}

# At once: each waits for the index most of the time.
tried=() jobs=()
for version in 3.11 3.12 3.13; do
    python=$(find_python "$version")
    if [ -z "$python" ]; then
        echo "Python $version: not here, the wheel was not tried on it"
        continue
    fi
    (set -e && try_python "$python" "$version") &
    jobs+=($!)
    tried+=("$version")
done
for job in "${jobs[@]}"; do
    wait "$job"
done
[ ${#tried[@]} -gt 0 ] || { echo "no Python from 3.11 to 3.13 was found; the wheel was not tried"; exit 1; }
echo "the wheel was tried on Python ${tried[*]}"
