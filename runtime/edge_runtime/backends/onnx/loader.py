"""Sessions of onnxruntime on a device, and values that alias numpy arrays."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from edge_devices.errors import first_line
from edge_runtime.backends.kernels.loader import kernels_path
from edge_runtime.backends.onnx.devices import PROCESSOR, SEVERITY, OrtDevice, onnxruntime_module
from edge_runtime.bundle.onnx_graph import CONTRIB, KERNELS
from edge_runtime.errors import BackendError

# The kernels' products with weights in blocks.
PRODUCTS = frozenset((KERNELS, name) for name in ("MatMulRows", "MatMulCapRows", "MatMulStatic", "FeedForwardRows"))
# GroupQueryAttention without its flash kernel: quicker for as few rows as a verify has. It is read while a session is made.
_NO_FLASH = "ORT_GQA_DISABLE_FLASH_ATTENTION"


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """How a graph is opened. What the device's execution provider cannot run falls back to the CPU's."""

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
        """Prepares a call on values that stay where they are; an output that is None is allocated by each run."""
        call = Call(self._session, self.name, inputs, outputs)
        if not self.device.is_cpu:
            call.copied = inputs
        return call

    @property
    def row_kernels(self) -> bool:
        """Whether the project's own kernels multiply in it."""
        return not PRODUCTS.isdisjoint(self._operators)

    @property
    def lacks_kernels(self) -> bool:
        """Whether products with block weights run on stock operators though kernels could run them, as in graphs of earlier versions."""
        return self._has_kernels and (CONTRIB, "MatMulNBits") in self._operators and not any(name == KERNELS for name, _ in self._operators)

    @cached_property
    def _operators(self) -> set[tuple[str, str]]:
        """Domain and name of all operators that run."""
        return {(node.domain, node.op_type) for part in self._session.get_provider_graph_assignment_info() for node in part.get_nodes()}

    def assignments(self) -> dict[str, dict[str, int]]:
        """Per execution provider how many nodes of each operator it runs."""
        providers: dict[str, dict[str, int]] = {}
        for part in self._session.get_provider_graph_assignment_info():
            counts = providers.setdefault(part.ep_name, {})
            for node in part.get_nodes():
                counts[node.op_type] = counts.get(node.op_type, 0) + 1
        return providers


def _open_fastest(path: Path, options: SessionOptions) -> tuple[Any, bool]:
    """Opens a graph with the project's own kernels for the operators that name them, or with stock ones; returns whether with kernels."""
    kernels = kernels_path() if options.device.is_cpu else None
    if kernels is not None:
        with suppress(BackendError):  # the stock operators say what is wrong with the graph
            return _open(path, options, kernels), True
    return _open(path, options), False


def _open(path: Path, options: SessionOptions, kernels: Path | None = None) -> Any:
    """Opens the graph at `path`; operators of the library `kernels` run in the place of the functions of their names."""
    ort = onnxruntime_module()
    settings = ort.SessionOptions()
    settings.log_severity_level = SEVERITY
    settings.intra_op_num_threads = options.threads
    settings.inter_op_num_threads = 1
    # Arrays grow with the text; a plan of memory for each length would be kept for ever.
    settings.enable_mem_pattern = False
    # Threads that spin after a run take the cores from the other graphs. One pool for all would cure that too, but onnxruntime
    # has it for the whole process only: then whatever else runs graphs in it is refused, and its size is fixed once.
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
    """Graphs that are opened meanwhile have attention without its flash kernel, unless the user's environment says something else.

    Nests: a thread that opens a graph beside others finds it set, and does not change what they may be reading.
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
        self._name = name
        self._binding = session.io_binding()
        # What the methods of the binding and the session call, which make a device anew each time: behind a run all code is dear to reach.
        self._bound, self._device = self._binding._iobinding, onnxruntime_module().OrtDevice.make("cpu", 0)._get_c_device()
        self._run = session._sess.run_with_iobinding
        for key, value in inputs.items():
            self._binding.bind_ortvalue_input(key, value)
        # Inputs that binding copies to another device, as they are then.
        self.copied: Mapping[str, Any] = {}
        self._allocated = {key: number for number, (key, value) in enumerate(outputs.items()) if value is None}
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
        for key, value in self.copied.items():
            self._binding.bind_ortvalue_input(key, value)
        for key in self._allocated:
            self._binding.bind_output(key, "cpu")  # otherwise the last run's array would be used again, whose size may differ
        try:
            self._run(self._bound, None)
        except Exception as error:
            raise BackendError(f"onnxruntime failed in {self._name}: {first_line(error)}") from error

    def results(self) -> dict[str, NDArray[Any]]:
        """The outputs that the run allocated. Others stay where they are: a view of what lies on a device would copy all of it."""
        values = self._binding.get_outputs()
        return {key: values[number].numpy() for key, number in self._allocated.items()}

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
