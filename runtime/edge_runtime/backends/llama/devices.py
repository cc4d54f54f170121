"""The devices that the installed build of llama.cpp computes on: the CPU, and those of its GPU backends (Metal, Vulkan, CUDA, OpenCL).

llama.cpp by itself puts all layers on such devices as soon as a build has them. Here they are asked for by name or kind.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from edge_devices.machine.device_package import how_to_get, this_package
from edge_devices.machine.graphics import driver_facts
from edge_devices.machine.system import System
from edge_runtime.backends.interface import CPU, GPU, NPU
from edge_runtime.backends.llama.loader import library_version, llama_library, opened_beside
from edge_runtime.errors import BackendError, RequestError

# ggml's own variable: the path of a backend that was built alone, such as libggml-vulkan.so (ggml/src/ggml-backend-reg.cpp).
PLUG_IN_VARIABLE = "GGML_BACKEND_PATH"
# enum ggml_backend_dev_type (ggml/include/ggml-backend.h): graphics boards, and GPUs that share the processor's memory.
_GPU_TYPES = (1, 2)
# The registry of Qualcomm's NPU, whose devices are "GPUs" to ggml.
_NPU_REGISTRIES = {"HTP"}
# What brings GPUs into llama-cpp-python; on macOS Metal is there by itself.
_BUILD = "CMAKE_ARGS=-DGGML_VULKAN=ON pip install --force-reinstall --no-deps --no-binary llama-cpp-python llama-cpp-python"


@dataclass(frozen=True, kw_only=True)
class LlamaDevice:
    """A device: ggml's name for it in small letters ("vulkan0", "metal"), its kind, gpu or npu, and its maker's name as `hardware`.

    `driver` is what its results depend on beside the hardware, in one line. `handle` is ggml's own.
    """

    name: str
    kind: str
    hardware: str
    driver: str
    handle: int = field(compare=False, repr=False)

    def free_bytes(self) -> int | None:
        """Its memory that is free now; None if its driver states none."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        _function("ggml_backend_dev_memory", None)(ctypes.c_void_p(self.handle), ctypes.byref(free), ctypes.byref(total))
        return free.value if total.value else None


@cache
def devices() -> tuple[LlamaDevice, ...]:
    """Returns the devices beside the CPU. Raises BackendError if the library is missing, or if a plug-in that is named does not load."""
    _load_plug_in()
    count = _function("ggml_backend_dev_count", ctypes.c_size_t)()
    handles = [_function("ggml_backend_dev_get", ctypes.c_void_p)(ctypes.c_size_t(number)) for number in range(count)]
    kind = _function("ggml_backend_dev_type", ctypes.c_int)
    return tuple(_device(handle) for handle in handles if kind(ctypes.c_void_p(handle)) in _GPU_TYPES)


def device_named(name: str) -> LlamaDevice:
    """Returns the device of that name, or the first of that kind. Raises RequestError, with those there are, if there is none."""
    asked, there = name.lower(), devices()
    for device in there:
        if asked in (device.name, device.kind):
            return device
    names = ", ".join([CPU, *(device.name for device in there)])
    one = "no device package has one that has" if this_package() else f"{_BUILD}=={library_version()} builds one with Vulkan"
    build = "" if there or asked != GPU else f"; this build has no GPU, {one}"
    raise RequestError(f"there is no device {name!r} that llama.cpp computes on here; there are {names}{build}")


def offloaded_to(name: str) -> ctypes.Array[ctypes.c_void_p]:
    """Returns the list that `llama_model_params.devices` points to: this device, or none, which is the CPU. It has to be kept alive."""
    handles = [] if name == CPU else [device_named(name).handle]
    return (ctypes.c_void_p * (len(handles) + 1))(*handles, None)


def layers_that_fit(free: int | None, weights: int, beside: int, layers: int) -> int:
    """Returns how many of the last `layers`, of `weights` bytes in all, fit into free bytes next to `beside` ones that go with them.

    -1 is all, with the head. Where the memory is not known all are tried.
    """
    if free is None or weights + beside <= free:
        return -1
    return max(0, min(layers, int(layers * (free - beside) / max(1, weights))))


def _device(handle: int) -> LlamaDevice:
    pointer = ctypes.c_void_p(handle)
    registry = _function("ggml_backend_dev_backend_reg", ctypes.c_void_p)(pointer)
    name, hardware = (_text(f"ggml_backend_dev_{fact}", pointer) for fact in ("name", "description"))
    maker = _text("ggml_backend_reg_name", ctypes.c_void_p(registry))
    return LlamaDevice(
        name=name.lower(),
        kind=NPU if maker in _NPU_REGISTRIES else GPU,
        hardware=hardware,
        driver="; ".join([f"{maker} in llama-cpp-python {library_version()}", *driver_facts(System())]),
        handle=handle,
    )


def _load_plug_in() -> None:
    path = os.environ.get(PLUG_IN_VARIABLE)
    if path and not _function("ggml_backend_load", ctypes.c_void_p)(os.fsencode(Path(path))):
        raise BackendError(f"{path}, which ${PLUG_IN_VARIABLE} names, is no backend of this llama.cpp; build it from the same sources")


def _text(name: str, pointer: Any) -> str:
    text: bytes | None = _function(name, ctypes.c_char_p)(pointer)
    return (text or b"").decode("utf-8", "replace").strip()


def _function(name: str, result: Any) -> Any:
    """A function of ggml. Raises BackendError if the build does not export it."""
    for library in _libraries():
        if (function := getattr(library, name, None)) is not None:
            function.restype = result
            return function
    raise BackendError(f"this build of llama.cpp has no {name}, which devices need; {how_to_get('llama')}")


@cache
def _libraries() -> Sequence[Any]:
    library = llama_library()
    return opened_beside(library.api, "ggml"), library.ggml
