#!/bin/sh
# Unpacks llama.cpp from llama-cpp-python's source archive (the version installed in VENV) and builds the tools we compare with:
# build_llama_cpp.sh VENV DIRECTORY [sources-only]. Leaves DIRECTORY/source and DIRECTORY/bin.
set -eu
venv=$1
directory=$2
version=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("llama-cpp-python"))')
mkdir -p "$directory"
if [ ! -f "$directory/source/convert_hf_to_gguf.py" ]; then
    "$venv/bin/python" -m pip download --quiet --no-binary :all: --no-deps --dest "$directory/archive" "llama-cpp-python==$version"
    rm -rf "$directory/unpacked" "$directory/source"
    mkdir -p "$directory/unpacked"
    tar -xzf "$directory"/archive/llama_cpp_python-"$version".tar.gz -C "$directory/unpacked"
    mv "$directory"/unpacked/llama_cpp_python-"$version"/vendor/llama.cpp "$directory/source"
    rm -rf "$directory/unpacked" "$directory/archive"
fi
[ "${3:-}" = sources-only ] && exit 0
# The same switches llama-cpp-python's own build uses, so that both sides run the same kernels; CMAKE_ARGS reaches both.
# shellcheck disable=SC2086
cmake -S "$directory/source" -B "$directory/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DLLAMA_CURL=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF ${CMAKE_ARGS:-} >"$directory/configure.log" ||
    { tail -20 "$directory/configure.log" >&2; exit 1; }
cmake --build "$directory/build" --config Release --parallel "$(getconf _NPROCESSORS_ONLN)" \
    --target llama-speculative-simple llama-bench llama-quantize >"$directory/build.log" 2>&1 ||
    { tail -20 "$directory/build.log" >&2; exit 1; }
ln -sfn build/bin "$directory/bin"
echo "llama.cpp's tools are in $directory/bin"
