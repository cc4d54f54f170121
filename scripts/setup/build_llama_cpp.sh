#!/bin/sh
# llama.cpp from the locked source archive of llama-cpp-python, compiled once for this processor:
# build_llama_cpp.sh VENV wheel|tools|server|sources
#   wheel    builds llama-cpp-python's wheel if EDGE_MTP_WHEELS (build/wheels) has none for this version and processor; prints its path
#   tools    builds the tools we compare with from the wheel's own objects: build/llama.cpp/bin, and the sources as below
#   server   builds llama-server and llama-cli into build/llama.cpp/server/bin: some minutes more
#   sources  unpacks the archive: build/llama.cpp/source is llama.cpp
# VENV has pip, cmake, ninja and scikit-build-core (requirements/llama.txt). CMAKE_ARGS reaches the build.
set -eu
venv=$1
cd "$(dirname "$0")/../.."
lock=requirements/ci.txt
version=$(sed -n 's/^llama-cpp-python==\([0-9.]*\).*/\1/p' $lock)
build=$PWD/build/llama.cpp
unpacked=$build/llama_cpp_python-$version
case $venv in
/*) ;;
*) venv=$PWD/$venv ;;
esac
PATH="$venv/bin:$PATH"
mkdir -p "$build"

run() { # LOG COMMAND...
    log=$build/$1.log
    shift
    "$@" >"$log" 2>&1 || { tail -20 "$log" >&2; exit 1; }
}

sources() {
    if [ ! -f "$unpacked/CMakeLists.txt" ]; then
        awk '/^[^ #]/ { kept = index($0, "llama-cpp-python==") == 1 } kept' $lock >"$build/lock.txt"
        run download python -m pip download --no-binary llama-cpp-python --no-build-isolation --no-deps --require-hashes \
            --dest "$build/archive" --requirement "$build/lock.txt"
        tar -xzf "$build/archive/llama_cpp_python-$version.tar.gz" -C "$build"
        # It points to a git folder that the archive leaves out, for which ninja would configure again and again.
        rm -rf "$build/archive" "$build/tree" "$unpacked/vendor/llama.cpp/.git"
    fi
    ln -sfn "$unpacked/vendor/llama.cpp" "$build/source"
}

# What decides the machine code: the processor, the compiler and the switches.
processor() {
    {
        uname -sm
        grep -m 1 -E '^(flags|Features)' /proc/cpuinfo 2>/dev/null || sysctl -n machdep.cpu.brand_string 2>/dev/null || true
        "${CXX:-c++}" --version | head -n 1
        echo "${CMAKE_ARGS:-}"
    } | cksum | cut -d ' ' -f 1
}

wheel() {
    folder=${EDGE_MTP_WHEELS:-$PWD/build/wheels}/llama-cpp-python-$version-$(processor)
    if [ ! -d "$folder" ]; then
        sources
        rm -rf "$folder.partial"
        unity="-DCMAKE_PROJECT_llama.cpp_INCLUDE='$PWD/exporter/edge_export/device_package/unity.cmake'"
        run wheel env CMAKE_ARGS="${CMAKE_ARGS:-} $unity" python -m pip wheel --no-build-isolation --no-deps --wheel-dir "$folder.partial" \
            -C "build-dir=$build/tree" "$unpacked"
        mv -T "$folder.partial" "$folder" 2>/dev/null || mv "$folder.partial" "$folder"
    fi
    ls "$folder"/*.whl
}

tools() {
    [ -d "$build/tree" ] || EDGE_MTP_WHEELS="$build/wheels" wheel >/dev/null
    sources
    # The same tree with the same switches, so that both sides run the same kernels; mtmd is the wheel's own folder twice otherwise.
    run configure cmake -S "$unpacked" -B "$build/tree" -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_EXAMPLES=ON -DLLAMA_BUILD_SERVER=OFF
    run build cmake --build "$build/tree" --target llama-speculative-simple llama-bench llama-quantize llama-perplexity
    ln -sfn "$build/tree/bin" "$build/bin"
    echo "llama.cpp's tools are in $build/bin"
}

server() {
    sources
    # Not by its link: llama.cpp names git's index by ../.., which ninja takes for the folder above the link.
    run configure-server cmake -S "$unpacked/vendor/llama.cpp" -B "$build/server" -G Ninja -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_TESTS=OFF \
        -DLLAMA_BUILD_EXAMPLES=OFF
    run build-server cmake --build "$build/server" --target llama-server llama-cli
    echo "llama.cpp's programs are in $build/server/bin"
}

"${2:-tools}"
