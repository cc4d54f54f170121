#!/bin/sh
# Makes a virtual environment and installs into it: setup.sh VENV [PROJECT [REQUIREMENT...]]; PROJECT is this checkout with its extras. With
# LOCK=FILE the project's dependencies are those of that file, by their hashes; what REQUIREMENT names is not.
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
# llama.cpp is compiled: some locks hold it, and the extras llama and export need it.
compiled=
case "$project" in *llama* | *[[,]export[],]*) compiled=yes ;; esac
if [ -n "${LOCK:-}" ] && grep -q '^llama-cpp-python==' "$LOCK"; then compiled=locked; fi
time="about a minute on 2 cores"
if [ -n "$compiled" ]; then
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

if [ "$compiled" = locked ]; then
    # The wheel that was compiled here has no hash in the lock; the source archive that it is made of does.
    mkdir -p build
    awk '/^[^ #]/ { kept = index($0, "llama-cpp-python==") != 1 } kept' "$LOCK" >"$venv/lock.txt"
    install --require-hashes --no-deps --requirement "$venv/lock.txt"
    wheel=$(scripts/setup/build_llama_cpp.sh "$venv" wheel)
    install --no-deps "$wheel"
elif [ -n "${LOCK:-}" ]; then
    install --require-hashes --no-deps --requirement "$LOCK"
fi
# Before the project, so that a pinned torch is there before a range asks for one; by pip, whose configuration says which build of torch it is.
for requirement in "$@"; do
    pip install "$requirement"
done
if [ -n "$project" ] && [ -n "${LOCK:-}" ]; then
    install --no-deps --editable "$project"
    pip check
elif [ -n "$project" ]; then
    install --editable "$project"
fi
