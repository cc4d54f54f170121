#!/bin/sh
# Makes a virtual environment and installs into it: setup.sh VENV PROJECT REQUIREMENT... ; PROJECT is this checkout with its extras. With
# LOCK=FILE the project's dependencies are those of that file, by their hashes; what REQUIREMENT names is not.
set -eu
venv=$1
shift
python=${PYTHON:-python3}

missing() {
    echo "setup: $1 is missing; $2" >&2
    exit 1
}

command -v "$python" >/dev/null 2>&1 || missing "Python 3.11 or newer" "install it (Debian, Ubuntu, Raspberry Pi OS: apt install python3 python3-venv; macOS: brew install python)"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    missing "Python 3.11 or newer" "$python is $("$python" --version); name a newer one with PYTHON=python3.12 make ..."
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing "Python's venv module" "install it (Debian, Ubuntu: apt install python3-venv)"
# llama.cpp is compiled: what is locked holds it, and the extras llama and export need it.
case "$1 ${LOCK:-}" in
*llama* | *[[,]export[],]* | *.txt)
    advice="; or run it without a compiler: make demo BACKEND=onnx"
    command -v cmake >/dev/null 2>&1 || missing "cmake" "install it (Debian, Ubuntu: apt install cmake; macOS: brew install cmake)$advice"
    if ! command -v c++ >/dev/null 2>&1 && ! command -v g++ >/dev/null 2>&1 && ! command -v clang++ >/dev/null 2>&1; then
        missing "a C++ compiler" "install one (Debian, Ubuntu: apt install g++; macOS: xcode-select --install)$advice"
    fi
    time="the first time, llama.cpp is compiled: about 4 minutes on 2 cores"
    ;;
*) time="about a minute on 2 cores" ;;
esac

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
project=$1
shift
echo "setup: installing into $venv ($time)"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade pip
install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

[ -z "${LOCK:-}" ] || install --require-hashes --no-deps --requirement "$LOCK"
# Before the project, so that a pinned torch is there before a range asks for one.
for requirement in "$@"; do
    install "$requirement"
done
if [ -n "${LOCK:-}" ]; then
    install --no-deps --editable "$project"
    "$venv/bin/python" -m pip check
else
    install --editable "$project"
fi
