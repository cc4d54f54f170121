#!/bin/sh
# Makes a virtual environment and installs what LOCK=FILE lists, by its hashes: setup.sh VENV [PROJECT [REQUIREMENT...]]; PROJECT is this
# checkout, which requirements/build.txt builds. What REQUIREMENT names is not locked.
# uv installs: the one on the PATH, or the locked one, which goes to .venv-tools; where neither can be had, pip does, which is slower.
set -eu
venv=$1
project=${2:-}
[ $# -lt 2 ] || shift
shift
python=${PYTHON:-python3}
tools=.venv-tools

missing() {
    echo "setup: $1 is missing; $2" >&2
    exit 1
}

command -v "$python" >/dev/null 2>&1 || missing "Python 3.11 or newer" "install it (Debian, Ubuntu, Raspberry Pi OS: apt install python3 python3-venv; macOS: brew install python)"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    missing "Python 3.11 or newer" "$python is $("$python" --version); name a newer one with PYTHON=python3.12 make ..."
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing "Python's venv module" "install it (Debian, Ubuntu: apt install python3-venv)"
# llama.cpp is compiled: some locks hold it.
compiled=
time="about a minute on 2 cores"
if grep -q '^llama-cpp-python==' "$LOCK"; then
    compiled=yes
    advice="; or run it without a compiler: make demo BACKEND=onnx, make test"
    if ! command -v c++ >/dev/null 2>&1 && ! command -v g++ >/dev/null 2>&1 && ! command -v clang++ >/dev/null 2>&1; then
        missing "a C++ compiler" "install one (Debian, Ubuntu: apt install g++; macOS: xcode-select --install)$advice"
    fi
    time="the first time, llama.cpp is compiled: about 4 minutes on 2 cores"
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo "setup: installing into $venv ($time)"
pip() {
    "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"
}

uv=$(command -v uv || true)
if [ -z "$uv" ]; then
    uv=$tools/bin/uv
    if [ ! -x "$uv" ]; then
        [ -x $tools/bin/python ] || "$python" -m venv $tools
        $tools/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps --requirement requirements/uv.txt || uv=
    fi
fi
install() {
    if [ -n "$uv" ]; then
        # This project always anew: its build compiles the kernels into the checkout.
        "$uv" pip install --quiet --python "$venv/bin/python" --reinstall-package edge-mtp "$@"
    else
        pip install "$@"
    fi
}

locked() {
    install --require-hashes --no-deps --requirement "$1" ${project:+--requirement requirements/build.txt} \
        ${compiled:+--requirement requirements/llama.txt}
}

if [ -n "$compiled" ]; then
    # The wheel that was compiled here has no hash in the lock; the source archive that it is made of does.
    mkdir -p build
    awk '/^[^ #]/ { kept = index($0, "llama-cpp-python==") != 1 } kept' "$LOCK" >"$venv/lock.txt"
    locked "$venv/lock.txt"
    wheel=$(scripts/setup/build_llama_cpp.sh "$venv" wheel)
    install --no-deps "$wheel"
else
    locked "$LOCK"
fi
# Before the project, so that a pinned torch is there before a range asks for one; by pip, whose configuration says which build of torch it is.
for requirement in "$@"; do
    pip install "$requirement"
done
if [ -n "$project" ]; then
    install --no-deps --no-build-isolation --editable "$project"
    pip check
fi
