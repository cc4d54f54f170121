"""onnxruntime, its version, and the devices that it and its plug-ins compute on. The only module that imports it.

A plug-in is a package beside onnxruntime whose library adds an execution provider; it is registered when a device beside the CPU is asked
for. Their devices are named by onnxruntime, so one that is not there is never replaced in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from edge_devices.errors import first_line
from edge_devices.machine.device_package import how_to_get
from edge_devices.machine.facts import installed_version
from edge_devices.machine.graphics import board_name, driver_facts
from edge_devices.machine.system import System
from edge_runtime.backends.interface import CPU, GPU, NPU
from edge_runtime.backends.kernels.loader import end_on_lost_files
from edge_runtime.errors import BackendError, RequestError

# 1.31.0 to 1.32.0, the newest version, run all graphs. 1.28 to 1.30 load them and crash in attention without present outputs; 1.24
# rejects them.
FIRST_VERSION = (1, 31)
END_VERSION = (1, 33)
KINDS = (CPU, GPU, NPU)
_CPU_PROVIDER, _QNN = "CPUExecutionProvider", "QNNExecutionProvider"
# Only what ends the process (4: fatal) is written to standard error; what fails is raised.
SEVERITY = 4


@dataclass(frozen=True, kw_only=True)
class PlugIn:
    """A package that adds an execution provider, and the extra that installs it; `kind` if it computes on this kind alone.

    Such a plug-in names the processor as its device where software stands in for the hardware.
    """

    provider: str
    module: str
    package: str
    extra: str
    kind: str | None = None


# Those that were run.
PLUG_INS = (
    PlugIn(provider="OpenVINOExecutionProvider", module="onnxruntime_ep_openvino", package="onnxruntime-ep-openvino", extra="openvino"),
    PlugIn(provider=_QNN, module="onnxruntime_qnn", package="onnxruntime-qnn", extra="qnn", kind=NPU),
)
# Which chip QNN's simulator for other processors is: a Snapdragon 8 Gen 3.
_SIMULATED = {"soc_model": "57", "htp_arch": "75"}
# Providers inside of onnxruntime's own wheels that compute on other devices than the CPU. That of onnxruntime-openvino is none of them:
# it computes on the CPU, and says nothing, where the device is missing.
_BUILT_IN = {
    "CoreMLExecutionProvider": GPU,
    "CUDAExecutionProvider": GPU,
    "DmlExecutionProvider": GPU,
    "MIGraphXExecutionProvider": GPU,
    "XnnpackExecutionProvider": CPU,
}


@dataclass(frozen=True, kw_only=True)
class OrtDevice:
    """A device: its name for people ("qnn", "openvino:NPU"), its execution provider and its kind, cpu, gpu or npu.

    `hardware` is its maker's name. `driver` is what its results depend on beside the hardware, in one line: versions of the plug-in and of
    drivers. `handle` is onnxruntime's own, None for a provider that needs no plug-in; `options` are the provider's. `software`: a processor
    computes in its place, so it is taken by its name only.
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
    """The onnxruntime module. Raises BackendError if it is missing."""
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendError(f"onnxruntime is not installed ({error}); {how_to_get('onnx')}") from error
    end_on_lost_files()
    onnxruntime.set_default_logger_severity(SEVERITY)
    onnxruntime.disable_telemetry_events()  # for a program that imported onnxruntime before us: then nothing more is collected
    return onnxruntime


def library_version() -> str:
    """Returns onnxruntime's version, e.g. "1.31.1". BackendError if it is missing."""
    return str(onnxruntime_module().__version__)


def check_version() -> None:
    """Raises BackendError if this onnxruntime is not one that was tested."""
    version = library_version()
    if not FIRST_VERSION <= tuple(int(part) for part in version.split(".")[:2]) < END_VERSION:
        raise BackendError(f"onnxruntime {version} was not tested with these graphs, 1.31 and 1.32 were; {how_to_get('onnx')}")


@cache
def devices() -> tuple[OrtDevice, ...]:
    """Returns the devices there are, the CPU first; registers the plug-ins. BackendError if onnxruntime is missing."""
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
    """Registers a plug-in; returns why that failed, an empty text if it is not installed, None if it is registered."""
    if find_spec(plug_in.module) is None:
        return ""
    ort = onnxruntime_module()
    if plug_in.provider in ort.get_available_providers():
        return f"this onnxruntime has {plug_in.provider} built in: uninstall onnxruntime-{plug_in.extra}, then install onnxruntime"
    try:
        ort.register_execution_provider_library(plug_in.provider, import_module(plug_in.module).get_library_path())
    except Exception as error:  # noqa: BLE001  # a library that does not load, or of another version
        return first_line(error)
    return None


def device_named(name: str | None) -> OrtDevice:
    """Returns a device by its name, its kind, or its provider's name. None is the CPU.

    Raises RequestError, with those there are, if there is none, or if several have that provider.
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
    """Why there is no such device, and what to do."""
    there = f"there is no device {typed!r} that onnxruntime computes on here; there are {_names(devices())}"
    meant = [each for each in PLUG_INS if name.partition(":")[0] in (each.extra, each.provider.lower()) or name == NPU]
    for plug_in in meant:
        failure, installed = plug_in_failure(plug_in), f"{plug_in.package} {installed_version(plug_in.package)}"
        if failure:
            return f"{there}; {installed} cannot be used: {failure}"
        if failure is None and not any(device.provider == plug_in.provider for device in devices()):
            return f"{there}; {installed} is installed and finds no device of its own on this machine"
    if meant and all(plug_in_failure(plug_in) == "" for plug_in in meant):
        return f"{there}; {how_to_get(*(plug_in.extra for plug_in in meant))}"
    if name == GPU:
        return f"{there}; llama.cpp computes on GPUs: export the bundle with --format gguf or both"
    return f"{there}; edge-run doctor says which drivers are installed"


def _devices_of(plug_in: PlugIn) -> list[OrtDevice]:
    """The devices of a plug-in that is registered; those that choose among others by themselves are left out."""
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
                hardware=facts.get("FULL_DEVICE_NAME") or facts.get("Description") or handle.device.vendor or _board(facts),
                driver=_driver(f"{plug_in.package} {version}", facts.get("DRIVER_VERSION")),
                software=software,
                options=_options(plug_in, software=software),
                handle=handle,
            ),
        )
    return list(made.values())


def _board(facts: Mapping[str, str]) -> str:
    return board_name(System(), facts.get("pci_bus_id", ""))


def _options(plug_in: PlugIn, *, software: bool) -> tuple[tuple[str, str], ...]:
    """What a provider must be set to.

    OpenVINO's processor: not to round to bfloat16, which it does where the processor can. QNN: where its library for the NPU is, and to
    compute in float16.
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


def _names(there: Sequence[OrtDevice]) -> str:
    return ", ".join(device.name for device in there)
