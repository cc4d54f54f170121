#!/usr/bin/env bash
# Tries another release of llama.cpp or onnxruntime on a copy of the checkout:
#   try_versions.sh llama-cpp-python|onnxruntime [VERSION]
# VERSION left out: the newest on the index. Builds it, runs the tests of its backend, compares our GGUF files with the reference byte for
# byte, and counts outputs that drafts change. The last line is the verdict; the exit code is 0 if all is as before. Nothing of the checkout
# or its .venv is changed.
set -euo pipefail
cd "$(dirname "$0")/../.."
library=${1:?usage: try_versions.sh llama-cpp-python|onnxruntime [VERSION]}
newest() { "${PYTHON:-python3}" -m pip index versions "$1" 2>/dev/null | sed -n '1s/.*(\(.*\))/\1/p'; }
version=${2:-$(newest "$library")}
now=$(sed -n "s/^$library==\([0-9.]*\).*/\1/p" requirements/ci.txt)
if [ -z "${2:-}" ] && [ "$version" = "$now" ]; then
    echo "verdict: $library $now is the newest release; nothing to try"
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git ls-files -z | xargs -0 tar -cf - | tar -xf - -C "$work"
cd "$work"
"${PYTHON:-python3}" -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check click
.venv/bin/python scripts/setup/move_pin.py "$library" "$version" --keep-older
failed=
step() { # NAME COMMAND...: one line per step
    local name=$1 begin=$SECONDS
    shift
    if "$@" >"$work/step.log" 2>&1; then
        echo "ok      $name ($((SECONDS - begin)) s)"
    else
        echo "FAILED  $name ($((SECONDS - begin)) s)"
        tail -n 20 "$work/step.log"
        failed=${failed:-$name}
    fi
}
verdict() {
    if [ -z "$failed" ]; then
        echo "verdict: $library $version runs as the locked version does"
        exit 0
    fi
    echo "verdict: $library $version cannot be used; the first step that failed is: $failed"
    exit 1
}
export EDGE_MTP_CACHE=$work/cache
# Everything else as it is locked: otherwise other new releases would be tried too, and pip searches for minutes.
awk -v name="$library" '/^[^ #]/ { kept = index($0, name "==") != 1 } kept' requirements/ci.txt >lock.txt
torch=$(sed -n 's/^TORCH ?= //p' Makefile)
setup() { env EDGE_MTP_WHEELS="${EDGE_MTP_WHEELS:-$OLDPWD/build/wheels}" LOCK=lock.txt scripts/setup/setup.sh .venv . "$torch" "$@"; }
step "build and install $library $version" setup "$library==$version"
[ -z "$failed" ] || verdict
case $library in
    llama-cpp-python)
        tests=(tests/runtime/backends/test_contract.py tests/runtime/backends/llama tests/runtime/backends/kernels tests/runtime/session)
        format=gguf backend=llama
        ;;
    onnxruntime)
        tests=(tests/runtime/backends/test_contract.py tests/runtime/backends/onnx tests/exporter/onnx tests/test_telemetry.py)
        format=onnx backend=onnx
        ;;
esac
step "tests of the backend and its contract" .venv/bin/python -m pytest -q -p no:randomly -m "not slow" "${tests[@]}"
step "files equal to the reference, byte for byte" .venv/bin/python -m pytest -q -p no:randomly tests/exporter/gguf tests/exporter/quantization
step "export of the reference pair" .venv/bin/edge-export reference --format "$format" --output "$work/bundle"
step "$backend runs it" .venv/bin/edge-run generate "$work/bundle" --backend "$backend" --raw --max-tokens 32 "def area(r):"
step "drafts change no output" .venv/bin/edge-run prove "$work/bundle" --backend "$backend"
verdict
