"""The target of graphs of dynamic shapes on a device that keeps K/V rows and hidden rows: tokens go in, chosen tokens or logits come out.
A draft begins with what it needs of the rest: the last token's hidden row, and the drafter's K/V rows of the tokens that were kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.committed_tokens import Tokens
from edge_runtime.backends.onnx.device_graph import (
    CHOICE,
    HIDDEN,
    HIDDEN_INDEX,
    PICKED,
    POSITIONS,
    SUPPRESSED,
    device_graph,
    has_branches,
    head_with_choices,
    picking_graph,
)
from edge_runtime.backends.onnx.devices import OrtDevice, onnxruntime_module
from edge_runtime.backends.onnx.kv_cache import KeyValueCache
from edge_runtime.backends.onnx.loader import Call, Graph, SessionOptions, value_over
from edge_runtime.backends.onnx.target import Bindings, OrtOptions, OrtTarget, PairFiles, shared_inputs
from edge_runtime.bundle.integrity import read_part
from edge_runtime.bundle.manifest import CacheLayout
from edge_runtime.bundle.onnx_file import MAX_GRAPH_BYTES, read_graph
from edge_runtime.errors import BackendError, BundleError, RequestError
from edge_runtime.interfaces import KvRows

# A device keeps this target's rows if its provider runs the changed graph: onnxruntime's WebGPU plug-in was tried.
_KEEPING = {"WebGpuExecutionProvider"}
# onnxruntime-ep-webgpu 0.4.0 on SwiftShader: attention of 32 or more queries at once is wrong, of up to 31 right. On a GPU of NVIDIA it is
# right; the check before a device is trusted has such a prompt.
_CHUNK = 16
UNSOUND = "the target's logits hold NaN, or are all the same"


def keeps_rows(device: OrtDevice) -> bool:
    """Whether this device runs `DeviceTarget`."""
    return device.provider in _KEEPING


class DeviceCache(KeyValueCache):
    """Buffers of full capacity in the device's memory. Those of the host are as large, and hold what `DeviceTarget.hidden_row` has picked
    for the drafter, or all rows that were saved or restored: the first `on_host` are as on the device."""

    # Rotations follow from the rows before (onnxruntime-ep-webgpu 0.4.0), whatever the positions say: row r has to be position r.
    moves = False

    def __init__(self, layout: CacheLayout, context: int, device: OrtDevice) -> None:
        self._lost = self.on_host = 0
        super().__init__(layout, context)
        self._software = device.software
        self._memory = device.handle.memory_info(onnxruntime_module().OrtDeviceMemoryType.DEFAULT)
        self.on_device: dict[str, Any] = {name: self.placed(self.array(name)) for name in self.names}

    def placed(self, array: NDArray[Any]) -> Any:
        """A copy of the array in the device's memory."""
        make = onnxruntime_module().OrtValue.ortvalue_from_numpy
        return make(array, "gpu", self._memory.device_id, self._memory.device_vendor_id)

    @property
    def chunk(self) -> int:
        return min(super().chunk, _CHUNK) if self._software else super().chunk

    def take(self, name: str, rows: NDArray[np.float32], start: int) -> None:
        """Writes rows [1, kv_heads, n, head_dim] from position `start` on to the host's buffer."""
        self.array(name)[:, :, start : start + rows.shape[2]] = rows

    def make_room(self, length: int, rows: int) -> None:
        super().make_room(length, rows)
        self.on_host = min(self.on_host, length)

    def place_rows(self, call: Call, length: int, new: int) -> None:
        """The device's graph reads and writes whole buffers."""

    def rows_from(self, first: int, length: int) -> KvRows:
        self._pull(self.names)
        return super().rows_from(first, length)

    def put_rows(self, rows: KvRows) -> None:
        super().put_rows(rows)
        self.on_host = len(rows.full)
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
    """As `OrtTarget`, with all rows on the device. A drafter on the CPU gets rows that are picked when a draft begins."""

    cache: DeviceCache

    def __init__(self, files: PairFiles, options: OrtOptions, session: SessionOptions) -> None:
        self.draft_place = ""  # where drafts are made, and why, in one sentence
        self._hidden_values: dict[int, Any] = {}
        self._newest = 0, 0  # the length behind the newest forward, and how many hidden rows it gave
        super().__init__(files, options, session)
        sources = set(files.layout.drafter_sources)
        self._drafters = [name for buffer in files.layout.buffers if buffer.layer in sources for name in (buffer.key, buffer.value)]
        self._graphs.append(Graph(files.target.with_name("picked-rows.onnx"), session, picking_graph(self._drafters)))

    def _new_cache(self, layout: CacheLayout, context: int, device: OrtDevice) -> DeviceCache:
        return DeviceCache(layout, context, device)

    def _open_layers(self, files: PairFiles, session: SessionOptions) -> Graph:
        """Opens the changed graph. Raises RequestError if it has attention or K/V rows that the device does not keep."""
        changed, model = None, read_part(files.target, MAX_GRAPH_BYTES, "graph")
        # onnxruntime-ep-webgpu 0.4.0 takes values of the CPU inside of an If for its own, and fails.
        if has_branches(graph := read_graph(model)):
            raise RequestError(f"{session.device.name} does not run {files.target}, whose experts are branches; leave --device out")
        if floats := all(buffer.dtype == "f32" for buffer in files.layout.buffers):
            changed = device_graph(model, graph)
        if changed is None or set(changed.written.values()) != set(self.cache.names):
            again = "with this version" if floats else "with --onnx-kv f32"
            raise RequestError(f"{session.device.name} cannot run {files.target} as it was exported; export it again {again}")
        self._written = changed.written
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

    @property
    def hidden_row(self) -> NDArray[np.float32] | None:
        """As `CommittedText.hidden_row`, for a drafter: brings its K/V rows up to the text, too."""
        row = super().hidden_row
        if row is not None:
            row[...] = self._pick(min(self.cache.on_host, self.length - 1))
        return row

    @property
    def hidden_place(self) -> tuple[int, int] | None:
        """How many hidden rows the newest forward gave, and which of them is that of the last token; None if none is."""
        if super().hidden_row is None:
            return None
        end, given = self._newest
        return given, given + self.length - 1 - end

    def _pick(self, start: int) -> NDArray[np.float32]:
        """Copies the drafter's K/V rows from position `start` on to the host; returns the last token's hidden row."""
        given, place = self.hidden_place or (0, 0)
        index, positions = np.array([place]), np.arange(start, self.length)
        on_device = {HIDDEN: self.hidden_value(given)} | {name: self.cache.on_device[name] for name in self._drafters}
        inputs = {**on_device, HIDDEN_INDEX: value_over(index), POSITIONS: value_over(positions)}
        call = self._graphs[2].bind(inputs, dict.fromkeys([PICKED]), fixed=inputs)
        call.run()
        hidden, rows = np.split(call.outputs()[0], [self.hidden_size])
        for name in self._drafters:
            _, heads, _, width = self.cache.array(name).shape
            own, rows = np.split(rows, [heads * len(positions) * width])
            self.cache.take(name, own.reshape(1, heads, -1, width), start)
        self.cache.on_host = self.length
        return hidden

    def hidden_value(self, rows: int) -> Any:
        if rows not in self._hidden_values:
            self._hidden_values[rows] = self.cache.placed(np.zeros((1, rows, self.hidden_size), np.float32))
        return self._hidden_values[rows]

    def _forward(self, ids: Tokens, soft: NDArray[np.float32] | None, rows_read: int) -> None:
        super()._forward(ids, soft, rows_read)
        self._newest = self.length, max(rows_read, self._fewest_rows) if self.skips_unread_rows else len(ids)

    def choose(self, tokens: Sequence[int], suppressed: NDArray[np.intp]) -> list[int]:
        """As `interfaces.ChoosingTarget.choose`: a token and three numbers come out for each row, in the place of its logits."""
        ids = self.checked(tokens)
        self.check_rows(len(ids), self.max_rows)
        with self._appending():
            self._forward(ids, None, len(ids))
            if (call := self._choices.get(len(ids))) is None:
                call = self._choices[len(ids)] = self.bind_head(len(ids), dict.fromkeys([CHOICE]))
            self._suppress(suppressed)
            call.run()
            chosen, largest, smallest, total = call.outputs()[0][0].T
            if not (np.isfinite(total) & np.isfinite(largest) & (largest > smallest)).all():
                raise BackendError(f"{UNSOUND} on this device: check it with edge-run prove --device NAME, or leave --device out")
        self.take_hidden(self.hidden_rows[0, : len(ids)])
        return [int(token) for token in chosen]

    def bind_head(self, rows: int, outputs: Mapping[str, Any]) -> Call:
        inputs = {HIDDEN: self.hidden_value(rows), SUPPRESSED: self._mask_on_device}
        return self._graphs[1].bind(inputs, outputs, fixed=inputs)

    def _suppress(self, tokens: NDArray[np.intp]) -> None:
        """Has these tokens never chosen; they seldom change, and so are kept on the device."""
        if not np.array_equal(tokens, self._masked):
            self._mask[...] = 0
            self._mask[..., tokens] = np.finfo(np.float32).min  # not infinite: shaders may be compiled as if nothing were
            self._masked = tokens.copy()
            self._mask_on_device.update_inplace(self._mask)

    def close(self) -> None:
        self._choices.clear()
        self._hidden_values.clear()
        super().close()

    def bindings(self, graph: Graph) -> Bindings:  # noqa: ARG002
        values = self.cache.on_device
        written = {output: values[buffer] for output, buffer in self._written.items()}
        return Bindings({**shared_inputs(self), **values}, written, frozenset({*values, *self.rotations.values}))
