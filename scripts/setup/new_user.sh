#!/bin/sh
# What a new user does, from a clone to the first tokens, with the seconds of each step: new_user.sh demo|onnx|llama [REPOSITORY]
# Everything is made anew in a temporary folder that is removed at the end: clone, home, virtual environment, no cache of pip's or ours.
set -eu
path=${1:?"demo or onnx (wheels only), or llama (compiles llama.cpp)"}
repository=${2:-$(cd "$(dirname "$0")/../.." && pwd)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/home"
export HOME="$work/home" PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
unset EDGE_MTP_CACHE XDG_CACHE_HOME PYTHONPATH VIRTUAL_ENV
begin=$(date +%s)

step() {
    echo "\$ $*"
    before=$(date +%s.%N)
    "$@" 2>&1
    awk -v a="$before" -v b="$(date +%s.%N)" 'BEGIN { printf "# %.1f s\n", b - a }'
}

cd "$work"
step git clone --quiet "$repository" edge-mtp
cd edge-mtp
case $path in
onnx)
    step python3 -m venv .venv
    PATH="$PWD/.venv/bin:$PATH"
    step pip install --quiet '.[onnx,export-onnx]'
    step edge-run doctor
    step edge-export reference --output my-bundle --format onnx
    step edge-run generate my-bundle 'class Stack:' --max-tokens 64
    ;;
demo)
    step make demo
    ;;
llama)
    step make demo BACKEND=llama
    step .venv/bin/edge-run doctor
    step .venv/bin/edge-run generate demo-bundle-llama 'class Stack:' --max-tokens 64
    ;;
*)
    echo "$path is none of demo, onnx and llama" >&2
    exit 2
    ;;
esac
echo "# together $(($(date +%s) - begin)) s"
