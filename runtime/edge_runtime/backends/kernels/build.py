"""Compiles the kernels with zig's C++ compiler, which installs as a wheel and compiles for every target.

    python runtime/edge_runtime/backends/kernels/build.py [TARGET [FOLDER]]

The project's own build calls it (hatch_build.py), and so does `edge-export package` for a device. The output depends only on the sources
and the compiler's version.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
LIBRARIES = Path(__file__).parent / "lib"
# The sources for any processor of the architecture; and those that need a newer one, each with the processor that it is compiled for.
_COMMON = (
    *(
        "c_api.cpp",
        "lost_files.cpp",
        "packed_file.cpp",
        "race.cpp",
        "source_pages.cpp",
        "variants.cpp",
        "ggml/attention.cpp",
        "ggml/elementwise.cpp",
        "ggml/feed_forward.cpp",
        "ggml/multiply.cpp",
        "ggml/read_rows.cpp",
        "ggml/visible_cells.cpp",
    ),
    "ggml/register.cpp",
    *("draft/model.cpp", "draft/helper.cpp"),
    *("onnxruntime/domain.cpp", "onnxruntime/product.cpp", "onnxruntime/matmul_rows.cpp", "onnxruntime/feed_forward.cpp"),
    *("onnxruntime/matmul_static.cpp", "onnxruntime/matmul_halves.cpp", "onnxruntime/norms.cpp"),
    *("onnxruntime/attention.cpp", "onnxruntime/attend_rows.cpp", "onnxruntime/attend_buffers.cpp"),
)
_VARIANTS = {
    "x86_64": {
        # they need float16 instructions; called only if a variant can run
        "pack.cpp": "x86_64_v3",
        "ggml/weights.cpp": "x86_64_v3",
        "x86/rows_avx2.cpp": "x86_64_v3",
        "x86/rows_avxvnni.cpp": "x86_64_v3+avxvnni",
        "x86/rows_avx512vnni.cpp": "x86_64_v4+avx512vnni",
    },
    "aarch64": {
        "pack.cpp": "cortex_a53",
        "ggml/weights.cpp": "cortex_a53",
        "arm/rows_neon.cpp": "cortex_a53",
        "arm/rows_dotprod.cpp": "cortex_a76",
        "arm/rows_i8mm.cpp": "cortex_a76+i8mm",
    },
}
_BASE = {"x86_64": "x86_64_v2", "aarch64": "cortex_a53"}
# The oldest supported systems: glibc 2.17 is that of manylinux2014 wheels; macOS 11 is the first on ARM.
TARGETS = {
    ("Linux", "x86_64"): "x86_64-linux-gnu.2.17",
    ("Linux", "aarch64"): "aarch64-linux-gnu.2.17",
    ("Darwin", "arm64"): "aarch64-macos.11.0",
    ("Darwin", "x86_64"): "x86_64-macos.11.0",
}
# Contraction is off, so that every processor rounds alike: a product and a sum are fused only where the source calls fma.
_FLAGS = (
    *("-std=c++20", "-O2", "-g0", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-nostdinc++"),
    *("-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics", "-fvisibility=hidden", "-fno-sanitize=all", "-Wall", "-Wextra", "-Werror"),
)


def host_target() -> str | None:
    """Returns the target for this machine, None if it is not supported."""
    return TARGETS.get((platform.system(), platform.machine()))


def library_name(target: str) -> str:
    """Returns the file name of the library for a target, which `loader` looks for there."""
    system, machine = next(place for place, name in TARGETS.items() if name == target)
    return f"libedge_rows-{system.lower()}-{machine}{'.dylib' if system == 'Darwin' else '.so'}"


def variants(target: str) -> tuple[str, ...]:
    """Returns the names of the variants in the library for a target, the simplest first; `loader.usable_variants` has the same names."""
    sources = [Path(name).stem for name in _VARIANTS[target.partition("-")[0]]]
    return tuple(name.removeprefix("rows_") for name in sources if name.startswith("rows_"))


def build(
    target: str, folder: Path, flags: Sequence[str] = (), *, cache: Path | None = None, report: Callable[[float], None] = lambda _: None
) -> Path:
    """Compiles the library for `target` into `folder`, with additional `flags`; returns its path.

    `cache` is a folder that keeps zig's results for the next build, unless zig's own variables name another one. `report` gets the share
    that is done. Raises RuntimeError with the compiler's message if a file does not compile.
    """
    processor = _BASE[target.partition("-")[0]]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / library_name(target)
    with tempfile.TemporaryDirectory(prefix="edge-mtp-kernels-") as scratch:
        cache = cache or Path(scratch)
        objects = compile_objects(target, Path(scratch), flags, cache=cache, report=report)
        # Not linked to a C library, since the loading process has one: zig would first compile its own, which takes a minute.
        system = ["-undefined", "dynamic_lookup"] if "macos" in target else ["-Wl,-z,max-page-size=16384"]
        partial = f"{scratch}/{path.name}"
        run_compiler(["-target", target, f"-mcpu={processor}", "-shared", "-s", "-nostdlib", *system, *objects, "-o", partial], cache)
        # Replaced rather than overwritten, so that a running program keeps the old library.
        fresh = path.with_suffix(".new")
        fresh.write_bytes(Path(partial).read_bytes())
        fresh.replace(path)
    return path


def compile_objects(
    target: str,
    folder: Path,
    flags: Sequence[str] = (),
    without: Sequence[str] = (),
    *,
    cache: Path | None = None,
    report: Callable[[float], None] = lambda _: None,
) -> list[str]:
    """Compiles the library's sources into object files in `folder`; returns their paths. Skips paths with a prefix in `without`.

    `cache` (default: `folder`) and `report` are as in `build`. Raises RuntimeError with the compiler's message if a file does not compile.
    """
    architecture = target.partition("-")[0]
    jobs = [(name, _BASE[architecture]) for name in _COMMON] + list(_VARIANTS[architecture].items())
    jobs = [job for job in jobs if not job[0].startswith(tuple(without))]

    def compile_job(job: tuple[str, str]) -> str:
        source, processor = job
        output = f"{folder}/{source.replace('/', '-')}.o"
        run_compiler(
            [*_FLAGS, *flags, f"-I{SOURCES}", "-target", target, f"-mcpu={processor}", "-c", str(SOURCES / source), "-o", output],
            cache or folder,
        )
        return output

    outputs = []
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for output in pool.map(compile_job, jobs):
            outputs.append(output)
            report(len(outputs) / len(jobs))
    return outputs


def run_compiler(arguments: Sequence[str], cache: Path) -> None:
    """Runs zig's C++ compiler, with its caches in `cache` unless zig's own variables name others. Raises RuntimeError if it fails."""
    environment = {"ZIG_LOCAL_CACHE_DIR": f"{cache}/local", "ZIG_GLOBAL_CACHE_DIR": f"{cache}/global"} | os.environ
    result = subprocess.run(
        [sys.executable, "-P", "-m", "ziglang", "c++", *arguments], capture_output=True, text=True, env=environment, check=False
    )
    if result.returncode:
        raise RuntimeError(f"the kernels do not compile: {result.stderr.strip()[-2000:]}")


def main() -> None:
    """Compiles for the target and into the folder of the command line; by default for this machine and into the package."""
    target = sys.argv[1] if len(sys.argv) > 1 else host_target()
    if target is None:
        sys.exit(f"Error: there are no kernels for {platform.system()} on {platform.machine()}")
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else LIBRARIES
    print(build(target, folder))


if __name__ == "__main__":
    main()
