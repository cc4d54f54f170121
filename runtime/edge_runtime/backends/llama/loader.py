"""Loads llama.cpp and lists its devices. No other module of the runtime imports llama-cpp-python."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from edge_devices.machine.detection import driver_facts
from edge_devices.machine.device_package import how_to_get, this_package
from edge_devices.machine.system import System
from edge_runtime.backends.interface import CPU, GPU, NPU
from edge_runtime.backends.kernels import ggml
from edge_runtime.backends.kernels.loader import end_on_lost_files, variant
from edge_runtime.errors import BackendError, RequestError

# The MTP functions are staging API (src/llama-ext.h in llama.cpp) and change between releases, so the version is checked here. Importing
# their module fails if a symbol is missing. The library's log goes to a ring buffer instead of the screen.

PACKAGE = "llama_cpp"
FIRST_VERSION = (0, 3, 36)
END_VERSION = (0, 3, 37)
# enum ggml_log_level in ggml/include/ggml.h
_LOG_ERROR, _LOG_CONTINUED = 4, 5
_LOG_LINES = 200
# How often libgomp spins at a barrier before the thread sleeps: 5,000 turns are about 0.2 ms on x86. With its default of 300,000 (10 ms),
# on a busy machine a waiting thread keeps the processor from the very thread it waits for. On other processors a turn takes another time.
_SPINS = {"x86_64": "5000", "AMD64": "5000"}


class LogRing:
    """The last lines that llama.cpp logged, with their levels."""

    def __init__(self) -> None:
        self._lines: deque[tuple[int, str]] = deque(maxlen=_LOG_LINES)

    def add(self, level: int, text: str) -> None:
        """Appends a line; text of the level `continued` is joined to the line before."""
        if level == _LOG_CONTINUED and self._lines:
            before, start = self._lines.pop()
            self._lines.append((before, start + text))
        else:
            self._lines.append((level, text))

    def clear(self) -> None:
        """Forgets all lines. Call it before an operation whose errors will be quoted."""
        self._lines.clear()

    def error(self) -> str:
        """Returns the first error since `clear`, without the name of the C function, or "" if there was none.

        The first error is the cause; later ones only report that the callers failed too.
        """
        for level, text in self._lines:
            if level == _LOG_ERROR and text.strip():
                return re.sub(r"^\w+: ", "", text.strip())
        return ""


@dataclass(frozen=True, kw_only=True)
class LlamaLibrary:
    """The loaded library.

    `api` is llama_cpp's ctypes module, `staging` its module for the MTP functions, and `ggml` the shared library of tensors and graphs;
    all are untyped. `row_kernels` is the variant of the project's own kernels that multiplies. If it is None, `stock_reason` says why
    llama.cpp's kernels are used.
    """

    api: Any
    staging: Any
    ggml: Any
    version: str
    log: LogRing
    callback: Any
    row_kernels: str | None
    stock_reason: str | None

    def quoted_error(self) -> str:
        """Returns ": <the first logged error>", to be appended to a sentence, or "" if no error was logged."""
        error = self.log.error()
        return f": {error}" if error else ""


@cache
def llama_library() -> LlamaLibrary:
    """Loads and checks llama-cpp-python, once per process. Raises BackendError if it is missing, unsupported, or lacks a symbol."""
    _limit_spinning()
    try:
        version, api = _package_version(), _bindings("llama_cpp")
    except ImportError as error:
        raise BackendError(f"llama-cpp-python is not installed ({error}); {how_to_get('llama')}") from error
    except (OSError, RuntimeError) as error:
        raise BackendError(f"llama-cpp-python's shared library does not load ({error}); {how_to_get('llama')}") from error
    check_version(version)
    try:
        staging = _bindings("llama_cpp_ext")
    except (ImportError, AttributeError) as error:
        raise BackendError(f"llama-cpp-python {version} has no MTP interface ({error}); {how_to_get('llama')}") from error
    log, base = LogRing(), opened_beside(api, "ggml-base")
    callback = _route_log(api, log)
    _route_aborts(api._lib, base)
    end_on_lost_files()
    api.llama_backend_init()
    reason = ggml.register(api._lib)
    return LlamaLibrary(
        api=api,
        staging=staging,
        ggml=base,
        version=version,
        log=log,
        callback=callback,
        row_kernels=variant() if reason is None else None,
        stock_reason=reason,
    )


def _limit_spinning() -> None:
    """Makes waiting threads of a forward sleep sooner. libgomp reads the variable when it is loaded; a user's own setting is kept."""
    spins = _SPINS.get(platform.machine())
    if spins is not None and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", spins)


def _package_version() -> str:
    """Returns the version that the package's source states, or "". Raises ImportError if the package is not installed."""
    text = Path(_package().origin or "").read_text(encoding="utf-8")
    stated = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return stated[1] if stated else ""


def _package() -> ModuleSpec:
    spec = find_spec(PACKAGE)
    if spec is None or not spec.has_location:
        raise ImportError(f"No module named {PACKAGE!r}")
    return spec


def _bindings(name: str) -> Any:
    """Imports a module of ctypes bindings without the rest of llama-cpp-python, which takes ten times as long to import.

    Afterwards a program can still import the whole package; it then shares these modules.
    """
    if PACKAGE in sys.modules:
        return import_module(f"{PACKAGE}.{name}")
    bare = ModuleType(PACKAGE)
    bare.__path__ = list(_package().submodule_search_locations or ())
    sys.modules[PACKAGE] = bare
    try:
        return import_module(f"{PACKAGE}.{name}")
    finally:
        del sys.modules[PACKAGE]


def media_library(library: LlamaLibrary) -> Any:
    """Returns llama-cpp-python's module for libmtmd, with its log in our ring. Raises BackendError if libmtmd was not built."""
    try:
        media = _bindings("mtmd_cpp")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise BackendError(f"this build of llama.cpp has no libmtmd, which encodes media ({error}); {how_to_get('llama')}") from error
    media.mtmd_log_set(library.callback, ctypes.c_void_p(0))
    return media


def declare(library: Any, signatures: Mapping[str, tuple[Any, list[Any]]]) -> Any:
    """Declares result and argument types of functions, and returns `library`. Without them ctypes would cut pointers to 32 bits.

    Raises BackendError, with the function's name, if the library lacks one.
    """
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name, None)
        if function is None:
            raise BackendError(f"this build of llama.cpp has no {name}, which drafters and sound need; {how_to_get('llama')}")
        function.restype, function.argtypes = result, arguments
    return library


def check_version(version: str) -> None:
    """Raises BackendError unless `version` is in the supported range."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if not FIRST_VERSION <= numbers < END_VERSION:
        first = ".".join(map(str, FIRST_VERSION))
        raise BackendError(f"llama-cpp-python is {version}, but the MTP interface is supported for {first} only; {how_to_get('llama')}")


def library_version() -> str:
    """Returns the version of llama-cpp-python, e.g. "0.3.36"."""
    return llama_library().version


def system_info() -> str:
    """Returns llama.cpp's own line about the instruction sets that it uses."""
    text: bytes = llama_library().api.llama_print_system_info()
    return text.decode("utf-8", "replace").strip()


def opened_beside(api: Any, name: str) -> Any:
    """Opens a library of ggml that is in libllama's folder and was loaded with it."""
    try:
        return api.load_shared_library(name, api._base_path)
    except (OSError, RuntimeError) as error:
        raise BackendError(f"llama-cpp-python's {name} library does not load ({error}); {how_to_get('llama')}") from error


def _route_log(api: Any, log: LogRing) -> Any:
    def keep(level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
        log.add(level, text.decode("utf-8", "replace"))

    callback = api.llama_log_callback(keep)
    api.llama_log_set(callback, ctypes.c_void_p(0))
    return callback


def _route_aborts(*libraries: Any) -> None:
    """Makes a failed check in ggml end the process with one sentence and exit code 1, instead of a backtrace and SIGABRT."""
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # for uncaught C++ exceptions such as std::bad_alloc
    # A wheel has copies instead of symbolic links: the ggml that libllama loaded may be another file than ours. So both are set.
    for library in libraries:
        if hasattr(library, "ggml_set_abort_callback"):
            library.ggml_set_abort_callback.restype = ctypes.c_void_p
            library.ggml_set_abort_callback(_ABORT_CALLBACK)


def _end_process(message: bytes) -> None:
    text = message.decode("utf-8", "replace").rpartition("/")[2]
    os.write(2, f"Error: llama.cpp cannot go on ({text}); free some memory, or export the bundle again\n".encode())
    os._exit(1)


# A global, because C keeps its address.
_ABORT_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_end_process)


# The devices of the installed build of llama.cpp: the CPU, and those of its GPU backends (Metal, Vulkan, CUDA, OpenCL).
#
# By default llama.cpp puts all layers on any such device. Here a device is used only if it is asked for, by name or kind.

# ggml's own variable: the path of a separately built backend, such as libggml-vulkan.so (ggml/src/ggml-backend-reg.cpp).
PLUG_IN_VARIABLE = "GGML_BACKEND_PATH"
# enum ggml_backend_dev_type (ggml/include/ggml-backend.h): discrete GPUs, and GPUs that share the processor's memory.
_GPU_TYPES = (1, 2)
# ggml calls the devices of Qualcomm's NPU GPUs too; the name of their registry tells them apart.
_NPU_REGISTRIES = {"HTP"}
# Builds llama-cpp-python with Vulkan. On macOS, Metal is always included.
_BUILD = "CMAKE_ARGS=-DGGML_VULKAN=ON pip install --force-reinstall --no-deps --no-binary llama-cpp-python llama-cpp-python"


@dataclass(frozen=True, kw_only=True)
class LlamaDevice:
    """A device: `name` is ggml's in lower case ("vulkan0", "metal"), `kind` is gpu or npu, `hardware` the manufacturer's name for it.

    `driver` is one line that states what results depend on besides the hardware. `handle` is ggml's pointer.
    """

    name: str
    kind: str
    hardware: str
    driver: str
    handle: int = field(compare=False, repr=False)

    def free_bytes(self) -> int | None:
        """Returns the device's free memory; None if the driver does not report it."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        _function("ggml_backend_dev_memory", None)(ctypes.c_void_p(self.handle), ctypes.byref(free), ctypes.byref(total))
        return free.value if total.value else None


@cache
def devices() -> tuple[LlamaDevice, ...]:
    """Returns the devices other than the CPU. Raises BackendError if the library is missing, or the plug-in of $GGML_BACKEND_PATH fails."""
    _load_plug_in()
    count = _function("ggml_backend_dev_count", ctypes.c_size_t)()
    handles = [_function("ggml_backend_dev_get", ctypes.c_void_p)(ctypes.c_size_t(number)) for number in range(count)]
    kind = _function("ggml_backend_dev_type", ctypes.c_int)
    return tuple(_device(handle) for handle in handles if kind(ctypes.c_void_p(handle)) in _GPU_TYPES)


def device_named(name: str) -> LlamaDevice:
    """Returns the device of this name, or the first of this kind. Raises RequestError, which lists the devices, if there is none."""
    requested, available = name.lower(), devices()
    for device in available:
        if requested in (device.name, device.kind):
            return device
    names = ", ".join([CPU, *(device.name for device in available)])
    one = "no device package has one that has" if this_package() else f"{_BUILD}=={library_version()} builds one with Vulkan"
    build = "" if available or requested != GPU else f"; this build has no GPU, {one}"
    raise RequestError(f"there is no device {name!r} that llama.cpp computes on here; there are {names}{build}")


def offloaded_to(name: str) -> ctypes.Array[ctypes.c_void_p]:
    """Returns the array for `llama_model_params.devices`, empty for the CPU. The caller keeps it alive until the model is loaded."""
    handles = [] if name == CPU else [device_named(name).handle]
    return (ctypes.c_void_p * (len(handles) + 1))(*handles, None)


def layers_that_fit(free: int | None, weights: int, beside: int, layers: int) -> int:
    """Returns how many of the last layers fit on a device with `free` bytes; -1 means all layers and the head.

    All `layers` have `weights` bytes in total; `beside` bytes are needed in any case. If `free` is unknown (None), all are tried.
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
    """Returns a function of ggml. Raises BackendError if the build does not export it."""
    for library in _libraries():
        if (function := getattr(library, name, None)) is not None:
            function.restype = result
            return function
    raise BackendError(f"this build of llama.cpp has no {name}, which devices need; {how_to_get('llama')}")


@cache
def _libraries() -> Sequence[Any]:
    library = llama_library()
    return opened_beside(library.api, "ggml"), library.ggml
