"""onnxruntime, which no other module imports: its version, the devices of its execution providers, and sessions on them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from edge_devices.errors import first_line
from edge_devices.machine.detection import board_name, driver_facts
from edge_devices.machine.device_package import how_to_get, installed_version
from edge_devices.machine.system import System
from edge_runtime.backends.interface import CPU, GPU, NPU
from edge_runtime.backends.kernels.loader import end_on_lost_files, kernels_path
from edge_runtime.bundle.onnx_graph import CONTRIB, KERNELS
from edge_runtime.errors import BackendError, RequestError

# A plug-in is a package whose library adds an execution provider to onnxruntime. Plug-ins are registered when a device other than the CPU
# is asked for. onnxruntime lists their devices, so a missing device is an error and never silently replaced by the CPU.

# All graphs run on 1.31.0 to 1.32.0, the newest version. 1.28 to 1.30 load them, but crash in attention without present outputs; 1.24
# rejects them.
FIRST_VERSION = (1, 31)
END_VERSION = (1, 33)
KINDS = (CPU, GPU, NPU)
_CPU_PROVIDER, _QNN = "CPUExecutionProvider", "QNNExecutionProvider"
# onnxruntime logs fatal errors only (4) to standard error; all others are raised.
SEVERITY = 4


@dataclass(frozen=True, kw_only=True)
class PlugIn:
    """A package that adds an execution provider, and the extra that installs it. `kind` is set if it supports only this kind of device.

    A plug-in with a `kind` reports the CPU as its device where software simulates the hardware.
    """

    provider: str
    module: str
    package: str
    extra: str
    kind: str | None = None


# The plug-ins that were tested.
PLUG_INS = (
    PlugIn(provider="OpenVINOExecutionProvider", module="onnxruntime_ep_openvino", package="onnxruntime-ep-openvino", extra="openvino"),
    PlugIn(provider=_QNN, module="onnxruntime_qnn", package="onnxruntime-qnn", extra="qnn", kind=NPU),
)
# The chip that QNN's simulator on other processors simulates: a Snapdragon 8 Gen 3.
_SIMULATED = {"soc_model": "57", "htp_arch": "75"}
# Providers that onnxruntime's own wheels contain. The one of onnxruntime-openvino is not listed, because it silently computes on the CPU if
# the device is missing.
_BUILT_IN = {
    "CoreMLExecutionProvider": GPU,
    "CUDAExecutionProvider": GPU,
    "DmlExecutionProvider": GPU,
    "MIGraphXExecutionProvider": GPU,
    "XnnpackExecutionProvider": CPU,
}


@dataclass(frozen=True, kw_only=True)
class OrtDevice:
    """A device: its display name ("qnn", "openvino:NPU"), its execution provider, and its kind, cpu, gpu or npu.

    `hardware` is the manufacturer's name for it. `driver` is one line that states what results depend on besides the hardware: versions of
    the plug-in and of drivers. `handle` is onnxruntime's object, None for a provider that needs no plug-in; `options` are the provider's.
    `software`: the CPU simulates the device, so it is used only if asked for by name, not by kind.
    """

    name: str = CPU
    provider: str = _CPU_PROVIDER
    kind: str = CPU
    hardware: str = ""
    driver: str = ""
    software: bool = False
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    handle: Any = field(default=None, compare=False, repr=False)

    @property
    def is_cpu(self) -> bool:
        """Whether it is onnxruntime's own CPU provider."""
        return self.provider == _CPU_PROVIDER


PROCESSOR = OrtDevice()


@cache
def onnxruntime_module() -> Any:
    """Imports onnxruntime. Raises BackendError if it is missing."""
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendError(f"onnxruntime is not installed ({error}); {how_to_get('onnx')}") from error
    end_on_lost_files()
    onnxruntime.set_default_logger_severity(SEVERITY)
    onnxruntime.disable_telemetry_events()  # in case a program imported onnxruntime before us, with telemetry on
    return onnxruntime


def library_version() -> str:
    """Returns onnxruntime's version, e.g. "1.31.1". Raises BackendError if it is missing."""
    return str(onnxruntime_module().__version__)


def check_version() -> None:
    """Raises BackendError unless this version of onnxruntime was tested."""
    version = library_version()
    if not FIRST_VERSION <= tuple(int(part) for part in version.split(".")[:2]) < END_VERSION:
        raise BackendError(f"onnxruntime {version} was not tested with these graphs, 1.31 and 1.32 were; {how_to_get('onnx')}")


@cache
def devices() -> tuple[OrtDevice, ...]:
    """Registers the plug-ins and returns all devices, the CPU first. Raises BackendError if onnxruntime is missing."""
    ort = onnxruntime_module()
    built_in = ort.get_available_providers()
    plugged = [device for plug_in in PLUG_INS if plug_in_failure(plug_in) is None for device in _devices_of(plug_in)]
    own = [
        OrtDevice(name=_short(provider), provider=provider, kind=_BUILT_IN[provider], driver=_driver(library_version()))
        for provider in built_in
        if provider in _BUILT_IN
    ]
    return (PROCESSOR, *plugged, *own)


@cache
def plug_in_failure(plug_in: PlugIn) -> str | None:
    """Registers a plug-in. Returns None, or why that failed; "" if it is not installed."""
    if find_spec(plug_in.module) is None:
        return ""
    ort = onnxruntime_module()
    if plug_in.provider in ort.get_available_providers():
        return f"this onnxruntime has {plug_in.provider} built in: uninstall onnxruntime-{plug_in.extra}, then install onnxruntime"
    try:
        ort.register_execution_provider_library(plug_in.provider, import_module(plug_in.module).get_library_path())
    except Exception as error:  # noqa: BLE001  # the library does not load, or is of another version
        return first_line(error)
    return None


def device_named(name: str | None) -> OrtDevice:
    """Returns the device with this name, kind or provider. None is the CPU.

    Raises RequestError, which lists the devices, if there is none, or if several have that provider.
    """
    if name is None or name.lower() == CPU:
        return PROCESSOR
    asked = name.lower()
    for device in devices():
        if asked == device.name.lower() or (asked == device.kind and not device.software):
            return device
    of_provider = [each for each in devices() if asked in (each.provider.lower(), _short(each.provider))]
    if len(of_provider) > 1:
        raise RequestError(f"{name!r} has several devices; choose one of {_names(of_provider)}")
    if not of_provider:
        raise RequestError(_missing(asked, name))
    return of_provider[0]


def _missing(name: str, typed: str) -> str:
    """Returns a sentence: why there is no such device, and what to do."""
    missing = f"there is no device {typed!r} that onnxruntime computes on here; there are {_names(devices())}"
    meant = [each for each in PLUG_INS if name.partition(":")[0] in (each.extra, each.provider.lower()) or name == NPU]
    for plug_in in meant:
        failure, installed = plug_in_failure(plug_in), f"{plug_in.package} {installed_version(plug_in.package)}"
        if failure:
            return f"{missing}; {installed} cannot be used: {failure}"
        if failure is None and not any(device.provider == plug_in.provider for device in devices()):
            return f"{missing}; {installed} is installed and finds no device of its own on this machine"
    if meant and all(plug_in_failure(plug_in) == "" for plug_in in meant):
        return f"{missing}; {how_to_get(*(plug_in.extra for plug_in in meant))}"
    if name == GPU:
        return f"{missing}; llama.cpp computes on GPUs: export the bundle with --format gguf or both"
    return f"{missing}; edge-run doctor says which drivers are installed"


def _devices_of(plug_in: PlugIn) -> list[OrtDevice]:
    """Returns the devices of a registered plug-in. Virtual devices, which choose among others, have another `ep_name` and are left out."""
    handles = [each for each in onnxruntime_module().get_ep_devices() if each.ep_name == plug_in.provider]
    version = installed_version(plug_in.package) or "unknown"
    made: dict[str, OrtDevice] = {}
    for handle in handles:
        facts = {**handle.device.metadata, **handle.ep_metadata}
        hardware_kind = handle.device.type.name.lower()
        name, software = _short(plug_in.provider), plug_in.kind not in (None, hardware_kind)
        if plug_in.kind is None:
            name += f":{facts.get('ov_device') or hardware_kind.upper()}"
        made.setdefault(
            name,
            OrtDevice(
                name=name,
                provider=plug_in.provider,
                kind=plug_in.kind or hardware_kind,
                hardware=facts.get("FULL_DEVICE_NAME")
                or facts.get("Description")
                or handle.device.vendor
                or board_name(System(), facts.get("pci_bus_id", "")),
                driver=_driver(f"{plug_in.package} {version}", facts.get("DRIVER_VERSION")),
                software=software,
                options=_options(plug_in, software=software),
                handle=handle,
            ),
        )
    return list(made.values())


def _options(plug_in: PlugIn, *, software: bool) -> tuple[tuple[str, str], ...]:
    """Returns the options that a provider needs.

    OpenVINO would round to bfloat16 on a CPU that supports it. QNN must know where its library for the NPU is, and computes in float16.
    """
    if plug_in.kind is None:
        return (("load_config", '{"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}'),)
    if plug_in.provider != _QNN:
        return ()
    settings = {"backend_path": import_module(plug_in.module).get_qnn_htp_path(), "enable_htp_fp16_precision": "1"}
    return tuple((settings | (_SIMULATED if software else {})).items())


def _driver(*versions: str | None) -> str:
    return "; ".join([*filter(None, versions), *driver_facts(System())])


def _short(provider: str) -> str:
    return provider.removesuffix("ExecutionProvider").lower()


def _names(available: Sequence[OrtDevice]) -> str:
    return ", ".join(device.name for device in available)


# The kernels' operators that multiply with weights quantized in blocks.
PRODUCTS = frozenset((KERNELS, name) for name in ("MatMulRows", "MatMulCapRows", "MatMulStatic", "FeedForwardRows"))
# Turns off the flash kernel of GroupQueryAttention, which is slower for the few rows of a verify. It is read when a session is created.
_NO_FLASH = "ORT_GQA_DISABLE_FLASH_ATTENTION"


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """How to open a graph. Nodes that the device's execution provider cannot run fall back to the CPU's."""

    threads: int
    device: OrtDevice = PROCESSOR


class Graph:
    """An opened ONNX graph."""

    def __init__(self, path: Path, options: SessionOptions) -> None:
        self._session, self._has_kernels = _open_fastest(path, options)
        self.name, self.device = path.name, options.device
        try:
            self.inputs = {value.name: tuple(value.shape) for value in self._session.get_inputs()}
            self.outputs = {value.name: tuple(value.shape) for value in self._session.get_outputs()}
        except UnicodeDecodeError as error:
            raise BackendError(f"{path.name} has an input or output whose name is not UTF-8; export the bundle again") from error

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Call:
        """Prepares a call on OrtValues, whose memory each run uses again. An output that is None is allocated by each run."""
        call = Call(self._session, self.name, inputs, outputs)
        if not self.device.is_cpu:
            call.copied = inputs
        return call

    @property
    def row_kernels(self) -> bool:
        """Whether the project's own kernels compute products in it."""
        return not PRODUCTS.isdisjoint(self._operators)

    @property
    def lacks_kernels(self) -> bool:
        """Whether the graph comes from an older export, so that stock operators compute products that the kernels could."""
        return self._has_kernels and (CONTRIB, "MatMulNBits") in self._operators and not any(name == KERNELS for name, _ in self._operators)

    @cached_property
    def _operators(self) -> set[tuple[str, str]]:
        """The domains and names of all operators that run."""
        return {(node.domain, node.op_type) for part in self._session.get_provider_graph_assignment_info() for node in part.get_nodes()}

    def assignments(self) -> dict[str, dict[str, int]]:
        """Returns how many nodes of each operator each execution provider runs."""
        providers: dict[str, dict[str, int]] = {}
        for part in self._session.get_provider_graph_assignment_info():
            counts = providers.setdefault(part.ep_name, {})
            for node in part.get_nodes():
                counts[node.op_type] = counts.get(node.op_type, 0) + 1
        return providers


def _open_fastest(path: Path, options: SessionOptions) -> tuple[Any, bool]:
    """Opens a graph, if possible with the project's own kernels for the operators that name them. Returns whether it has the kernels."""
    kernels = kernels_path() if options.device.is_cpu else None
    if kernels is not None:
        with suppress(BackendError):  # if the graph itself is wrong, opening it without the kernels reports the error
            return _open(path, options, kernels), True
    return _open(path, options), False


def _open(path: Path, options: SessionOptions, kernels: Path | None = None) -> Any:
    """Opens the graph at `path`. Operators of the library `kernels` replace the graph's functions of the same names."""
    ort = onnxruntime_module()
    settings = ort.SessionOptions()
    settings.log_severity_level = SEVERITY
    settings.intra_op_num_threads = options.threads
    settings.inter_op_num_threads = 1
    # Arrays grow with the text, and onnxruntime would keep a memory plan for each length forever.
    settings.enable_mem_pattern = False
    # Threads that spin after a run take cores away from the other graphs. A shared thread pool would also solve that, but onnxruntime has
    # one per process only: its size would be fixed, and other users of onnxruntime in the process would be refused.
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if kernels is not None:
        settings.register_custom_ops_library(str(kernels))
    providers = {"providers": list(dict.fromkeys((options.device.provider, PROCESSOR.provider)))}
    try:
        if options.device.handle is not None:
            settings.add_provider_for_devices([options.device.handle], dict(options.device.options))
            providers = {}
        with without_flash():
            return ort.InferenceSession(str(path), settings, **providers)
    except Exception as error:
        raise BackendError(f"onnxruntime cannot open {path.name} ({first_line(error)}); export the bundle again, or update it") from error


@contextmanager
def without_flash() -> Iterator[None]:
    """While this context is open, graphs open without the flash kernel of attention, unless the user has set the variable.

    It can be nested, and another thread may open a graph meanwhile: where the variable is set already, it is not changed.
    """
    if _NO_FLASH in os.environ:
        yield
        return
    os.environ[_NO_FLASH] = "1"
    try:
        yield
    finally:
        os.environ.pop(_NO_FLASH, None)


class PlacedRows(NamedTuple):
    """The address of a buffer [1, 1, rows, width], which must be kept alive; rows are `step` bytes apart."""

    address: int
    step: int
    kind: type[np.generic]
    before: tuple[int, ...]
    width: int

    @classmethod
    def of(cls, array: NDArray[Any]) -> Self:
        """Describes a contiguous buffer."""
        *before, _, width = array.shape
        return cls(array.ctypes.data, width * array.itemsize, array.dtype.type, tuple(before), width)


class Call:
    """A graph with its inputs and outputs bound."""

    def __init__(self, session: Any, name: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        self._name = name
        self._binding = session.io_binding()
        # The C++ objects behind binding and session. The Python methods create a device object in each call, which takes long right after a
        # run, when the CPU's caches are cold.
        self._bound, self._device = self._binding._iobinding, onnxruntime_module().OrtDevice.make("cpu", 0)._get_c_device()
        self._run = session._sess.run_with_iobinding
        for key, value in inputs.items():
            self._binding.bind_ortvalue_input(key, value)
        # Inputs on another device. Binding copies their values there, so they are bound again before each run.
        self.copied: Mapping[str, Any] = {}
        self._allocated = [key for key, value in outputs.items() if value is None]
        for key, value in outputs.items():
            if value is None:
                self._binding.bind_output(key, "cpu")
            else:
                self._binding.bind_ortvalue_output(key, value)

    def place_input(self, name: str, rows: PlacedRows, first: int, count: int) -> None:
        """Binds an input to `count` rows from row `first` on, for all later runs."""
        self._bound.bind_input(name, self._device, rows.kind, (*rows.before, count, rows.width), rows.address + first * rows.step)

    def place_output(self, name: str, rows: PlacedRows, first: int, count: int) -> None:
        """Binds an output to `count` rows from row `first` on, for all later runs."""
        self._bound.bind_output(name, self._device, rows.kind, (*rows.before, count, rows.width), rows.address + first * rows.step)

    def run(self) -> None:
        """Runs the graph. Raises BackendError with onnxruntime's message if it fails."""
        for key, value in self.copied.items():
            self._binding.bind_ortvalue_input(key, value)
        for key in self._allocated:
            self._binding.bind_output(key, "cpu")  # otherwise onnxruntime would use the last run's array again, whose size may differ
        try:
            self._run(self._bound, None)
        except Exception as error:
            raise BackendError(f"onnxruntime failed in {self._name}: {first_line(error)}") from error

    def outputs(self) -> list[NDArray[Any]]:
        """Returns the outputs in the order in which they were bound. Those over existing arrays are views that the next run overwrites."""
        return [value.numpy() for value in self._binding.get_outputs()]


def value_over(array: NDArray[Any]) -> Any:
    """Returns an OrtValue that shares the memory of `array`, which must be contiguous and kept alive."""
    value = onnxruntime_module().OrtValue.ortvalue_from_numpy(array)
    if value.data_ptr() != array.ctypes.data:
        raise BackendError("this onnxruntime copies arrays instead of using their memory; the K/V cache cannot be shared, update it")
    return value


def scalar(kind: type[np.generic], *shape: int) -> tuple[NDArray[Any], Any]:
    """Returns a small array of zeros and an OrtValue that shares its memory."""
    array = np.zeros(shape, kind)
    return array, value_over(array)
