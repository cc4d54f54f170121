"""The drivers of a machine's GPUs and NPUs: what results of an accelerator depend on beside the hardware."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from edge_devices.machine.system import System

# Kernel modules of GPUs and NPUs; those with a version of their own have it in sysfs, others change with the kernel.
_MODULES = ("nvidia", "amdgpu", "i915", "xe", "nouveau", "panfrost", "panthor", "v3d", "msm", "intel_vpu", "amdxdna")
# Where Vulkan's loader looks for its drivers (Vulkan-Loader, docs/LoaderDriverInterface.md).
_VULKAN_FOLDERS = ("etc/vulkan/icd.d", "usr/share/vulkan/icd.d", "usr/local/share/vulkan/icd.d")
_VULKAN_VARIABLES = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")
_WINDOWS_QUERY = "Get-CimInstance Win32_VideoController | ForEach-Object { $_.Name + ' ' + $_.DriverVersion }"


def driver_facts(system: System) -> list[str]:
    """Returns a short text for each driver there is, such as "amdgpu (Linux 6.12.1)", "Vulkan: libvk_swiftshader.so, 5242880 bytes".

    On macOS drivers are part of the system: its version.
    """
    if system.platform == "darwin":
        return [f"macOS {platform.mac_ver()[0]}"]
    if system.platform == "win32":
        return system.run(["powershell", "-NoProfile", "-Command", _WINDOWS_QUERY]).text.splitlines()
    return [*_kernel_modules(system), *_vulkan_drivers(system)]


def board_name(system: System, address: str) -> str:
    """Returns the name of the GPU at a PCI address such as "0000:01:00.0", as NVIDIA's driver says it, else its numbers; empty if unknown.

    Numbers: sysfs-bus-pci (docs.kernel.org/admin-guide/abi), vendor and device in hexadecimal.
    """
    if not re.fullmatch(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]", address):
        return ""
    model = re.search(r"^Model:\s*(\S.*)$", system.text_or(f"proc/driver/nvidia/gpus/{address.lower()}/information"), re.MULTILINE)
    if model is not None:
        return model.group(1).strip()
    numbers = [system.text_or(f"sys/bus/pci/devices/{address.lower()}/{name}").removeprefix("0x") for name in ("vendor", "device")]
    return f"PCI {':'.join(numbers)}" if all(numbers) else ""


def _kernel_modules(system: System) -> Iterator[str]:
    kernel = system.text_or("proc/sys/kernel/osrelease")
    for module in _MODULES:
        if (system.root / "sys/module" / module).is_dir():
            yield f"{module} {system.text_or(f'sys/module/{module}/version') or f'(Linux {kernel})'}"


def _vulkan_drivers(system: System) -> Iterator[str]:
    named = next((os.environ[name] for name in _VULKAN_VARIABLES if os.environ.get(name)), None)
    if named is not None:
        files = [Path(part) for part in named.split(os.pathsep)]
    else:
        files = sorted(path for folder in _VULKAN_FOLDERS for path in (system.root / folder).glob("*.json"))
    for file in files:
        try:
            library = str(json.loads(file.read_text(encoding="utf-8"))["ICD"]["library_path"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        yield f"Vulkan: {Path(library).name}{_size(file, library)}"


def _size(manifest: Path, library: str) -> str:
    """The size of a driver's library, which another version of it hardly has; nothing where the system's loader would search for it."""
    path = manifest.parent / library if re.search(r"[/\\]", library) else None
    return f", {path.stat().st_size} bytes" if path is not None and path.is_file() else ""
