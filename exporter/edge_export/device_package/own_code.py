"""A package's own code: our packages as they are imported here, with their metadata, and the commands, scripts for any POSIX shell."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from edge_export.device_package.inventory import Component, keep_licence, write_file
from edge_export.device_package.platforms import PYTHON, SITE, Platform
from edge_export.device_package.wheels import DISTRIBUTION, own_licence, own_requirements

# Of the benchmark a device runs the part that measures; reports are made where its records go.
_LIGHT = ("edge_bench/measure", "edge_runtime", "edge_devices")
# The row kernels come alone (row_kernels.py); their sources are not needed on a device.
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "libedge_rows*", "*.cpp", "*.h")
# The folder is found from the script's own path, with symbolic links followed, so that it may be anywhere.
_HERE = """\
self=$0
[ -L "$self" ] && self=$(readlink -f -- "$self")
case $self in */*) here=${self%/*}/.. ;; *) here=.. ;; esac
here=$(CDPATH= cd -- "$here" && pwd -P) || exit 127
"""
_PYTHON = """\
#!SHELL
# The Python of this folder, run by its own loader on its own libraries; what the system has of either is not used.
HERECHOICE# Libraries and settings of another Python would be loaded into this one. Nothing of this is exported to programs that it starts.
unset LD_LIBRARY_PATH LD_PRELOAD LD_AUDIT PYTHONHOME PYTHONPATH PYTHONSTARTUP BLIS_ARCH_TYPE
# onnxruntime reports to its makers unless it is told not to before it is loaded.
export ORT_DISABLE_TELEMETRY=1
HOMES# To its children, too, Python is this script: without its loader it would not start.
exec "$here/lib/LOADER" --inhibit-cache --library-path "LIBRARIES$here/lib" \\
    --argv0 "$here/bin/edge-python" "$here/bin/pythonVERSION" -s "$@"
"""
# A phone's shell user has no writable home and no /tmp.
_ANDROID_HOMES = """\
if [ -z "$HOME" ] || [ ! -w "$HOME" ]; then export HOME="$here/home"; mkdir -p "$HOME"; fi
if [ -z "$TMPDIR" ] || [ ! -w "$TMPDIR" ]; then export TMPDIR="$here/tmp"; mkdir -p "$TMPDIR"; fi
"""
# The commands and their entry points.
_COMMANDS = {"edge-run": "edge_run", "edge-bench": "edge_bench_on_device", "edge-devices": "edge_devices"}
_COMMAND = """\
#!SHELL
HEREexec "SHELL" "$here/bin/edge-python" -P -c 'from edge_devices.entry_points import FUNCTION; FUNCTION()' "$@"
"""


def write_launchers(folder: Path, platform: Platform, backends: Sequence[str]) -> None:
    """Writes bin/edge-python and the commands that use it."""
    llama = "llama" in backends
    texts = {"edge-python": _PYTHON}
    for name, function in _COMMANDS.items():
        texts[name] = _COMMAND.replace("FUNCTION", function)
    for name, text in texts.items():
        text = (
            text.replace("HOMES", _ANDROID_HOMES if platform.name.startswith("android") else "")
            .replace("CHOICE", _choice(platform) if llama else "")
            .replace("HERE", _HERE)
            .replace("SHELL", platform.shell)
            .replace("LOADER", platform.loader)
            .replace("LIBRARIES", f"$here/lib/llama-$cpu:$here/{SITE}/llama_cpp/lib:" if llama else "")
            .replace("VERSION", PYTHON)
        )
        write_file(folder / "bin" / name, text.encode(), executable=True)


def _choice(platform: Platform) -> str:
    """Sets $cpu to the newest build of llama.cpp's CPU library that the processor can run, by the features in /proc/cpuinfo."""
    lines = [
        "flags=",
        f'while read -r key _ rest; do case $key in {platform.cpuinfo_key}) flags=" $rest "; break ;; esac; done </proc/cpuinfo',
        'has() { for flag do case $flags in *" $flag "*) ;; *) return 1 ;; esac; done; }',
    ]
    for place, processors in enumerate(platform.processors):
        if processors.features:
            lines.append(f"{'elif' if place else 'if'} has {' '.join(processors.features)}; then cpu={processors.name}")
        else:
            lines.append(f"else cpu={processors.name}; fi")
    return "\n".join(lines) + "\n"


def add_own_code(folder: Path, extras: Sequence[str]) -> Component:
    """Copies what a device runs, nothing of the exporter; `extras` are those whose libraries are in the package. Raises PackageError."""
    copy_packages(folder / SITE)
    installed = version(DISTRIBUTION)
    about = folder / SITE / f"{DISTRIBUTION.replace('-', '_')}-{installed}.dist-info"
    # Commands read the version from the distribution's metadata, and the doctor what should be there; the rest describes the exporter.
    lines = [f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {installed}\n"]
    for extra in extras:
        lines.append(f"Provides-Extra: {extra}\n")
        lines += [f'Requires-Dist: {requirement}; extra == "{extra}"\n' for requirement in own_requirements(extra)]
    write_file(about / "METADATA", "".join(lines).encode())
    text = keep_licence(folder, f"{DISTRIBUTION}/LICENSE", own_licence())
    return Component(name=DISTRIBUTION, version=installed, source="this program", licence="Apache-2.0", texts=(text,))


def copy_packages(folder: Path) -> None:
    """Copies what a device imports of this program."""
    for path in _LIGHT:
        shutil.copytree(str(files(path.replace("/", "."))), folder / path, ignore=_LEFT_OUT)
