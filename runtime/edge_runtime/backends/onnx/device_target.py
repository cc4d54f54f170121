"""The target of graphs of dynamic shapes on a device that keeps the K/V rows: token ids go in; hidden rows, logits and the few K/V rows
that the drafter reads come out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.onnx.device_graph import CHOICE, FACTS, SUPPRESSED, device_graph, head_with_choices
from edge_runtime.backends.onnx.devices import OrtDevice, onnxruntime_module
from edge_runtime.backends.onnx.kv_cache import FULL, KeyValueCache
from edge_runtime.backends.onnx.loader import Call, Graph, SessionOptions, value_over
from edge_runtime.backends.onnx.target import Bindings, OrtTarget, PairFiles, shared_inputs
from edge_runtime.bundle.integrity import read_part
from edge_runtime.bundle.manifest import CacheLayout
from edge_runtime.bundle.onnx_file import MAX_GRAPH_BYTES
from edge_runtime.errors import BackendError, BundleError, RequestError
from edge_runtime.interfaces import KvRows

# A device keeps this target's rows if its provider runs the changed graph: onnxruntime's WebGPU plug-in was tried.
_KEEPING = {"WebGpuExecutionProvider"}
# onnxruntime-ep-webgpu 0.4.0, on SwiftShader at least: attention of 32 or more queries at once is wrong, of up to 31 right.
_CHUNK = 16
UNSOUND = "the target's logits hold NaN, or are all the same"


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
        self._memory = device.handle.memory_info(onnxruntime_module().OrtDeviceMemoryType.DEFAULT)
        self.on_device: dict[str, Any] = {name: self.placed(self.array(name)) for name in self.names}

    def placed(self, array: NDArray[Any]) -> Any:
        """A copy of the array in the device's memory."""
        make = onnxruntime_module().OrtValue.ortvalue_from_numpy
        return make(array, "gpu", self._memory.device_id, self._memory.device_vendor_id)

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

    def _open_head(self, path: Path, session: SessionOptions) -> Graph:
        """Opens the changed head. Raises BundleError if it gives no logits."""
        model = head_with_choices(read_part(path, MAX_GRAPH_BYTES, "graph"))
        if model is None:
            raise BundleError(f"{path} gives no logits; export the bundle again")
        self._choices: dict[int, Call] = {}
        self._mask, self._masked = np.zeros((1, 1, self._logits.shape[2]), np.float32), np.empty(0, np.intp)
        self._mask_on_device = self.cache.placed(self._mask)
        return Graph(path, session, model)

    def choose(self, tokens: Sequence[int], suppressed: NDArray[np.intp]) -> list[int]:
        """As `interfaces.ChoosingTarget.choose`: a token and three numbers come out for each row, in the place of its logits."""
        ids = self.checked(tokens)
        self.check_rows(len(ids), self.max_rows)
        with self._appending():
            self._forward(ids, None, len(ids))
            if (call := self._choices.get(len(ids))) is None:
                call = self._choices[len(ids)] = self.bind_head(len(ids), dict.fromkeys((CHOICE, *FACTS)))
            self._suppress(suppressed)
            call.run()
            chosen, largest, smallest, total = (values[0, :, 0] for values in call.outputs())
            if not (np.isfinite(total) & np.isfinite(largest) & (largest > smallest)).all():
                raise BackendError(f"{UNSOUND} on this device: check it with edge-run prove --device NAME, or leave --device out")
        self.take_hidden(self.hidden_rows[0, : len(ids)])
        return [int(token) for token in chosen]

    def bind_head(self, rows: int, outputs: Mapping[str, Any]) -> Call:
        hidden = value_over(self.hidden_rows[:, :rows])
        return self._graphs[1].bind({"hidden": hidden, SUPPRESSED: self._mask_on_device}, outputs, fixed=(SUPPRESSED,))

    def _suppress(self, tokens: NDArray[np.intp]) -> None:
        """Has these tokens never chosen; they seldom change, and so are kept on the device."""
        if not np.array_equal(tokens, self._masked):
            self._mask[...] = 0
            self._mask[..., tokens] = np.finfo(np.float32).min  # not infinite: shaders may be compiled as if nothing were
            self._masked = tokens.copy()
            self._mask_on_device.update_inplace(self._mask)

    def close(self) -> None:
        self._choices.clear()
        super().close()

    def bindings(self, graph: Graph) -> Bindings:  # noqa: ARG002
        values, results = self.cache.on_device, dict.fromkeys(output for _, output in self._rows.values())
        written = {output: values[buffer] for output, buffer in self._written.items()}
        return Bindings({**shared_inputs(self), **values}, written | results, frozenset({*values, *self.rotations.values}))

    def take_rows(self, call: Call, start: int) -> None:
        results = call.results()
        for buffer, (kind, output) in self._rows.items():
            self.cache.take(kind, buffer, results[output], start)
