"""A package's README: how it gets onto the device, and the first three things to do there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from edge_export.device_package.inventory import write_file
from edge_export.device_package.platforms import Platform

NAME = "README.md"
_TEXT = """\
# edge-mtp VERSION for PLATFORM

This folder runs bundles on a device where nothing is installed. A bundle is a folder that `edge-export`
made of a model and its drafter; it must have FORMATS files. A small one to begin with:
`edge-export reference --chat --format FORMAT -o my-bundle`.

Copy this folder and a bundle to the device:

    COPY

Then, on the deviceSHELL, chat:

    PACKAGE/bin/edge-run chat my-bundle

Serve on the local network; the page is at http://ADDRESS:8080, the OpenAI API at http://ADDRESS:8080/v1:

    PACKAGE/bin/edge-run serve my-bundle --host 0.0.0.0 --api-key CHOOSE-A-KEY

Measure what drafts bring; `edge-bench report runs.jsonl` shows the records on a computer with edge-mtp:

    PACKAGE/bin/edge-bench run my-bundle --runs runs.jsonl

`PACKAGE/bin/edge-run doctor` says what works on the device. KERNELS
"""
_COPY = {
    "android-arm64": "adb push PACKAGE my-bundle /data/local/tmp/",
    "linux-arm64": "scp -r PACKAGE my-bundle pi@raspberrypi:",
    "linux-x64": "scp -r PACKAGE my-bundle USER@HOST:",
}


def copy_command(platform: Platform, package: str) -> str:
    """Returns the command that copies a package of that name, and a bundle, to a device."""
    return _COPY[platform.name].replace("PACKAGE", shlex.quote(package))


def write_readme(folder: Path, platform: Platform, package: str, version: str, backends: tuple[str, ...], kernels: tuple[str, ...]) -> None:
    """Writes the README of a package that will be a folder of the name `package`."""
    formats = [format for backend, format in (("onnx", "ONNX"), ("llama", "GGUF")) if backend in backends]
    values = {
        "COPY": copy_command(platform, package),
        "PACKAGE": shlex.quote(package),
        "VERSION": version,
        "PLATFORM": platform.name,
        "FORMATS": " or ".join(formats),
        "FORMAT": formats[0].lower(),
        "SHELL": " (`adb shell`, then `cd /data/local/tmp`)" if platform.name.startswith("android") else "",
        "KERNELS": f"{kernels_sentence(kernels)}.",
    }
    write_file(folder / NAME, re.sub("|".join(values), lambda word: values[word[0]], _TEXT).encode())


def kernels_sentence(kernels: tuple[str, ...]) -> str:
    """Returns which kernels multiply, without a full stop."""
    return f"Row kernels: {', '.join(kernels)}; the processor decides which runs" if kernels else "No row kernels: standard operators"
