"""onnxruntime behind one door: version, sessions, values that alias numpy arrays. The only module that imports it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.kernels.loader import end_on_lost_files, kernels_path
from edge_runtime.backends.onnx.prepacked import PackingPlace, packed_graph, well_placed
from edge_runtime.backends.onnx.row_kernels import with_row_kernels
from edge_runtime.errors import BackendError, RequestError

CPU, OPENVINO = "CPUExecutionProvider", "OpenVINOExecutionProvider"
# 1.31.0 and 1.31.1, the newest version, run all graphs. 1.28 to 1.30 load them and crash in attention without present outputs; 1.24
# rejects them.
FIRST_VERSION = (1, 31)
END_VERSION = (1, 32)
# Graphs of plain operators run on 1.24 too, the newest there is for OpenVINO.
FIRST_STATIC_VERSION = (1, 24)
# GroupQueryAttention without its flash kernel: quicker for as few rows as a verify has. It is read while a session is made.
_NO_FLASH = "ORT_GQA_DISABLE_FLASH_ATTENTION"
# Bytes from which a saved graph's tensors lie outside it. onnxruntime begins a tensor without a packed form on a cache line, one with it
# wherever the last one's packed form ended: so scales, of which each matrix has some, have to lie between them. Shapes have to lie
# in the graph, long ones too that older bundles have: then more is tried.
_MIN_OUTSIDE_BYTES = ("128", "1024")
# Only what ends the process (4: fatal) is written to standard error; what fails is raised.
_SEVERITY = 4


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """How a graph is opened. `provider` is an execution provider's name; what it cannot run falls back to the CPU's.

    `device` is which of its devices it takes, if it has several (OpenVINO: CPU, GPU, NPU).

    `packing` is where packed weights are kept (None: nowhere); it is for the CPU's own provider only.
    """

    threads: int
    provider: str = CPU
    device: str | None = None
    packing: PackingPlace | None = None


@cache
def onnxruntime_module() -> Any:
    """The onnxruntime module. Raises BackendError if it is missing."""
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendError(f"onnxruntime is not installed ({error}); pip install 'edge-mtp[onnx]'") from error
    end_on_lost_files()
    onnxruntime.set_default_logger_severity(_SEVERITY)
    onnxruntime.disable_telemetry_events()  # for a program that imported onnxruntime before us: then nothing more is collected
    return onnxruntime


def check_version(*, static: bool) -> None:
    """Raises BackendError if this onnxruntime is not one that was tested with such graphs."""
    version = library_version()
    series = tuple(int(part) for part in version.split(".")[:2])
    if not (FIRST_STATIC_VERSION if static else FIRST_VERSION) <= series < END_VERSION:
        raise BackendError(f"onnxruntime {version} was not tested with these graphs, 1.31 was; pip install 'edge-mtp[onnx]'")


def execution_providers() -> list[str]:
    """Returns the execution providers of this onnxruntime by the names that `provider_and_device` takes. BackendError if it is missing."""
    return [name.removesuffix("ExecutionProvider").lower() for name in onnxruntime_module().get_available_providers()]


def library_version() -> str:
    """Returns onnxruntime's version, e.g. "1.31.1". BackendError if it is missing."""
    return str(onnxruntime_module().__version__)


def provider_and_device(name: str | None) -> tuple[str, str | None]:
    """Returns the full name of an execution provider given as "cpu", "openvino" or in full, and the device of "openvino:NPU".

    None is the CPU's. Raises RequestError, with those there are, if this onnxruntime has no such provider, or it has no choice of devices.
    """
    if name is None:
        return CPU, None
    short, _, device = name.partition(":")
    provider = _provider_named(short)
    if device and provider != OPENVINO:
        raise RequestError(f"{name!r} names a device, which {provider} has no choice of; leave out {':' + device!r}")
    return provider, device or None


def _provider_named(name: str) -> str:
    there: list[str] = onnxruntime_module().get_available_providers()
    for provider in there:
        if name.lower() in (provider.lower(), provider.removesuffix("ExecutionProvider").lower()):
            return provider
    raise RequestError(f"this onnxruntime has no execution provider {name!r}; it has {', '.join(execution_providers())}")


class Graph:
    """An opened ONNX graph."""

    def __init__(self, path: Path, options: SessionOptions) -> None:
        self._session, self.row_kernels = _open_fastest(path, options)
        self.name = path.name
        try:
            self.inputs = {value.name: tuple(value.shape) for value in self._session.get_inputs()}
            self.outputs = {value.name: tuple(value.shape) for value in self._session.get_outputs()}
        except UnicodeDecodeError as error:
            raise BackendError(f"{path.name} has an input or output whose name is not UTF-8; export the bundle again") from error

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Call:
        """Prepares a call on values that stay where they are; an output that is None is allocated by each run."""
        return Call(self._session, self.name, inputs, outputs)

    def assignments(self) -> dict[str, dict[str, int]]:
        """Per execution provider how many nodes of each operator it runs."""
        providers: dict[str, dict[str, int]] = {}
        for part in self._session.get_provider_graph_assignment_info():
            counts = providers.setdefault(part.ep_name, {})
            for node in part.get_nodes():
                counts[node.op_type] = counts.get(node.op_type, 0) + 1
        return providers


def _open_fastest(path: Path, options: SessionOptions) -> tuple[Any, int]:
    """Opens a graph on the project's own kernels, or with stock operators; returns how many nodes run on the kernels."""
    kernels = kernels_path() if options.provider == CPU and options.packing is None else None
    if kernels is not None:
        model, replaced = with_row_kernels(path.read_bytes())
        if replaced:
            # A model of bytes does not know where it lies, and so not its weights.
            place = {"session.model_external_initializers_file_folder_path": str(path.parent)}
            with suppress(BackendError):  # the stock operators say what is wrong with the graph
                return _open(path, options, place, model=model, kernels=kernels), replaced
    return _open(_packed(path, options), options), 0


def _packed(path: Path, options: SessionOptions) -> Path:
    if options.packing is None or options.provider != CPU:
        return path

    def save(destination: Path, data_name: str) -> bool:
        for min_bytes in _MIN_OUTSIDE_BYTES:
            for file in destination.parent.iterdir():
                file.unlink()
            _open(
                path,
                options,
                {
                    "session.optimized_model_external_initializers_file_name": data_name,
                    "session.optimized_model_external_initializers_min_size_in_bytes": min_bytes,
                    "session.save_external_prepacked_constant_initializers": "1",
                },
                save_to=destination,
            )
            if well_placed(destination.read_bytes()) and _opens(destination, options):
                return True
        return False

    # At most all data files of the pair: which of their bytes a graph names, onnxruntime does not say.
    data_bytes = sum(file.stat().st_size for file in path.parent.glob("*.onnx_data"))
    return packed_graph(path, data_bytes, options.packing, onnxruntime_module().__version__, save)


def _opens(path: Path, options: SessionOptions) -> bool:
    try:
        _open(path, options)
    except BackendError:
        return False
    return True


def _open(
    path: Path,
    options: SessionOptions,
    entries: Mapping[str, str] | None = None,
    *,
    save_to: Path | None = None,
    model: bytes | None = None,
    kernels: Path | None = None,
) -> Any:
    """Opens the graph at `path`, or `model` in its place, which needs the operators of the library `kernels`."""
    ort = onnxruntime_module()
    settings = ort.SessionOptions()
    settings.log_severity_level = _SEVERITY
    settings.intra_op_num_threads = options.threads
    settings.inter_op_num_threads = 1
    # Arrays grow with the text; a plan of memory for each length would be kept for ever.
    settings.enable_mem_pattern = False
    # Threads that spin after a run take the cores from the other graphs. One pool for all would cure that too, but onnxruntime
    # has it for the whole process only: then whatever else runs graphs in it is refused, and its size is fixed once.
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    for key, value in (entries or {}).items():
        settings.add_session_config_entry(key, value)
    if save_to is not None:
        settings.optimized_model_filepath = str(save_to)
    if kernels is not None:
        settings.register_custom_ops_library(str(kernels))
    providers = [options.provider] if options.provider == CPU else [options.provider, CPU]
    details = [{"device_type": options.device} if options.device else {}, *[{}] * (len(providers) - 1)]
    try:
        with _environment(_NO_FLASH, "1"):
            return ort.InferenceSession(model or str(path), settings, providers=providers, provider_options=details)
    except Exception as error:
        raise BackendError(f"onnxruntime cannot open {path.name} ({_first_line(error)}); export the bundle again, or update it") from error


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """An environment variable for a while, unless the user has set it."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


class PlacedRows(NamedTuple):
    """Where the rows of a buffer [1, 1, rows, width] lie, which must stay alive; `step` bytes from row to row."""

    address: int
    step: int
    kind: type[np.generic]
    before: tuple[int, ...]
    width: int

    @classmethod
    def of(cls, array: NDArray[Any]) -> Self:
        """Those of a contiguous buffer."""
        *before, _, width = array.shape
        return cls(array.ctypes.data, width * array.itemsize, array.dtype.type, tuple(before), width)


class Call:
    """A graph with its inputs and outputs bound."""

    def __init__(self, session: Any, name: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        self._session, self._name = session, name
        self._binding = session.io_binding()
        # What the binding's own methods call, which make a device anew each time.
        self._bound, self._device = self._binding._iobinding, onnxruntime_module().OrtDevice.make("cpu", 0)._get_c_device()
        for key, value in inputs.items():
            self._binding.bind_ortvalue_input(key, value)
        self._allocated = [key for key, value in outputs.items() if value is None]
        for key, value in outputs.items():
            if value is None:
                self._binding.bind_output(key, "cpu")
            else:
                self._binding.bind_ortvalue_output(key, value)

    def place_input(self, name: str, rows: PlacedRows, first: int, count: int) -> None:
        """Has the graph read `count` rows from now on."""
        self._bound.bind_input(name, self._device, rows.kind, (*rows.before, count, rows.width), rows.address + first * rows.step)

    def place_output(self, name: str, rows: PlacedRows, first: int, count: int) -> None:
        """Has the graph write to `count` rows from now on."""
        self._bound.bind_output(name, self._device, rows.kind, (*rows.before, count, rows.width), rows.address + first * rows.step)

    def run(self) -> None:
        """Runs the graph. Raises BackendError in onnxruntime's words if it fails."""
        for key in self._allocated:
            self._binding.bind_output(key, "cpu")  # otherwise the last run's array would be used again, whose size may differ
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:
            raise BackendError(f"onnxruntime failed in {self._name}: {_first_line(error)}") from error

    def outputs(self) -> list[NDArray[Any]]:
        """The outputs as arrays, in the order in which they were bound; views, those given a place die with the next run."""
        return [value.numpy() for value in self._binding.get_outputs()]


def value_over(array: NDArray[Any]) -> Any:
    """A value that is the array's own memory: what is written to one is in the other. `array` is contiguous and must be kept alive."""
    value = onnxruntime_module().OrtValue.ortvalue_from_numpy(array)
    if value.data_ptr() != array.ctypes.data:
        raise BackendError("this onnxruntime copies arrays instead of using their memory; the K/V cache cannot be shared, update it")
    return value


def scalar(kind: type[np.generic], *shape: int) -> tuple[NDArray[Any], Any]:
    """A small array of zeros and the value over it."""
    array = np.zeros(shape, kind)
    return array, value_over(array)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
