"""The target of graphs of dynamic shapes on a device that keeps the K/V rows: token ids go in; hidden rows, logits and the few K/V rows
that the drafter reads come out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.onnx.device_graph import device_graph
from edge_runtime.backends.onnx.devices import OrtDevice, onnxruntime_module
from edge_runtime.backends.onnx.kv_cache import FULL, KeyValueCache
from edge_runtime.backends.onnx.loader import Call, Graph, SessionOptions
from edge_runtime.backends.onnx.target import Bindings, OrtTarget, PairFiles, shared_inputs
from edge_runtime.bundle.integrity import read_part
from edge_runtime.bundle.manifest import CacheLayout
from edge_runtime.bundle.onnx_file import MAX_GRAPH_BYTES
from edge_runtime.errors import RequestError
from edge_runtime.interfaces import KvRows

# A device keeps this target's rows if its provider runs the changed graph: onnxruntime's WebGPU plug-in was tried.
_KEEPING = {"WebGpuExecutionProvider"}
# onnxruntime-ep-webgpu 0.4.0, on SwiftShader at least: attention of 32 or more queries at once is wrong, of up to 31 right.
_CHUNK = 16


def keeps_rows(device: OrtDevice) -> bool:
    """Whether this device runs `DeviceTarget`."""
    return device.provider in _KEEPING


class DeviceCache(KeyValueCache):
    """Buffers of full capacity in the device's memory. Those of the host are as large; of them only rows that the drafter reads are always
    as on the device, the others where all rows are saved or restored."""

    # Rotations follow from the rows before (onnxruntime-ep-webgpu 0.4.0), whatever the positions say: row r has to be position r.
    moves = False

    def __init__(self, layout: CacheLayout, context: int, device: OrtDevice) -> None:
        self._lost = 0
        super().__init__(layout, context)
        ort = onnxruntime_module()
        make, memory = ort.OrtValue.ortvalue_from_numpy, device.handle.memory_info(ort.OrtDeviceMemoryType.DEFAULT)
        self.on_device: dict[str, Any] = {
            name: make(self.array(name), "gpu", memory.device_id, memory.device_vendor_id) for name in self.names
        }

    @property
    def chunk(self) -> int:
        return min(super().chunk, _CHUNK)

    def take(self, kind: str, name: str, rows: NDArray[np.float32], length: int) -> None:
        """Writes new rows [1, n, kv_heads x head_dim] behind `length` ones to the host's buffer."""
        array = self.array(name)
        first = length if kind == FULL else length - self.first
        split = rows.reshape(rows.shape[1], array.shape[1], array.shape[3])
        array[0, :, first : first + len(split)] = split.transpose(1, 0, 2)

    def place_rows(self, call: Call, length: int, new: int) -> None:
        """The device's graph reads and writes whole buffers."""

    def rows_from(self, first: int, length: int) -> KvRows:
        self._pull(self.names)
        return super().rows_from(first, length)

    def put_rows(self, rows: KvRows) -> None:
        super().put_rows(rows)
        self._push(self.names)

    @property
    def lost(self) -> int:
        return self._lost

    def restart(self) -> None:
        self._lost = 0

    def _sliding_places(self, first: int, length: int) -> slice:
        return slice(max(first, self._lost), length)

    def _set_held(self, length: int, held: int) -> None:
        self._lost = length - held

    def _pull(self, names: Iterable[str]) -> None:
        for name in names:
            self.array(name)[...] = self.on_device[name].numpy()

    def _push(self, names: Iterable[str]) -> None:
        for name in names:
            self.on_device[name].update_inplace(self.array(name))


class DeviceTarget(OrtTarget):
    """As `OrtTarget`, with the rows on the device. Its drafter runs on the CPU, on rows that each forward gives the host."""

    cache: DeviceCache

    def _new_cache(self, layout: CacheLayout, context: int, device: OrtDevice) -> DeviceCache:
        return DeviceCache(layout, context, device)

    def _open_layers(self, files: PairFiles, session: SessionOptions) -> Graph:
        """Opens the changed graph. Raises RequestError if it has attention or K/V rows that the device does not keep."""
        buffers, changed = files.layout.buffers, None
        if all(buffer.dtype == "f32" for buffer in buffers):
            changed = device_graph(read_part(files.target, MAX_GRAPH_BYTES, "graph"), set(files.layout.drafter_sources))
        if changed is None or set(changed.written.values()) != set(self.cache.names):
            raise RequestError(f"{session.device.name} cannot keep the K/V rows of {files.target}; export it again with --onnx-kv f32")
        kinds = {name: buffer.kind for buffer in buffers for name in (buffer.key, buffer.value)}
        self._written = changed.written
        self._rows = {buffer: (kinds[buffer], output) for buffer, output in changed.rows.items()}
        return Graph(files.target, session, changed.model)

    def bindings(self, graph: Graph) -> Bindings:  # noqa: ARG002
        values, results = self.cache.on_device, dict.fromkeys(output for _, output in self._rows.values())
        self._results = list(results)
        written = {output: values[buffer] for output, buffer in self._written.items()}
        return Bindings({**shared_inputs(self), **values}, written | results, frozenset({*values, *self.rotations.values}))

    def take_rows(self, call: Call, start: int) -> None:
        outputs = call.outputs()
        places = {output: outputs[len(outputs) - number] for number, output in enumerate(reversed(self._results), 1)}
        for buffer, (kind, output) in self._rows.items():
            self.cache.take(kind, buffer, places[output], start)
