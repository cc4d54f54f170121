"""A target whose graphs have fixed shapes: one for a prefill, one for a verify, one for a single row. Shorter forwards are padded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_devices.errors import first_line
from edge_runtime.backends.committed_tokens import Tokens
from edge_runtime.backends.onnx.devices import Call, Graph, SessionOptions, value_over
from edge_runtime.backends.onnx.kv_cache import FULL, MAX_ROWS, StaticRows, rotary_tables
from edge_runtime.backends.onnx.target import GraphTarget, PairFiles, check_inputs
from edge_runtime.errors import BundleError

_MAX_PREFILL_ROWS = 4096
# The version of NumPy's file format that numpy.save uses for our tables.
_NPY_VERSION = (1, 0)


class Embedding:
    """A memory-mapped embedding table, whose rows are scaled by a factor when they are read."""

    def __init__(self, path: Path, rows: int, columns: int, factor: float) -> None:
        try:
            with path.open("rb") as file:
                # Later versions state the length of the header in 4 bytes, and NumPy would read up to 4 GB at once.
                if (version := np.lib.format.read_magic(file)) != _NPY_VERSION:
                    raise ValueError(f"of version {version}")
            table = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # NumPy parses the header as a Python literal, which can raise many errors
            raise BundleError(f"{path} is no NumPy array ({first_line(error)}); export the bundle again") from error
        if table.ndim != 2 or table.shape[0] < rows or table.shape[1] != columns or table.dtype not in (np.float32, np.float16):
            raise BundleError(f"{path} holds {table.dtype} {list(table.shape)}, not {rows} rows of {columns}; export the bundle again")
        self._table, self._factor = table, np.float32(factor)

    def lookup(self, tokens: NDArray[np.integer], out: NDArray[np.float32]) -> None:
        """Writes the scaled rows of `tokens` [n] to the first n rows of `out` [1, n or more, columns]."""
        np.multiply(self._table[tokens], self._factor, out=out[0, : len(tokens)], dtype=np.float32)


class StaticOrtTarget(GraphTarget):
    """A target whose graphs have fixed shapes."""

    def __init__(self, files: PairFiles, context: int, session: SessionOptions) -> None:
        assert files.static is not None
        facts = files.static.facts
        if not 0 < facts.verify_rows <= MAX_ROWS or not facts.verify_rows <= facts.prefill_rows <= _MAX_PREFILL_ROWS:
            raise BundleError(f"{facts.prefill_rows} and {facts.verify_rows} tokens for a prompt and a step are not sound; export again")
        self.rows = StaticRows(files.layout)
        longest_context = min(self.rows.rows[FULL], files.graphs.context)
        super().__init__(files, context, self.rows, chunk=facts.prefill_rows, longest_context=longest_context)
        self.embedding = Embedding(files.static.embedding, files.vocab_size, files.hidden_size, facts.embedding_scale)
        # The padding of a forward may reach past the context.
        self._rotations = rotary_tables(files.graphs.rotations, context + facts.prefill_rows)
        paths = {1: files.static.row, facts.verify_rows: files.target, facts.prefill_rows: files.static.prefill}
        self._static = {rows: _StaticForward(Graph(path, session), path, self, rows) for rows, path in sorted(paths.items())}
        self._graphs = [forward.graph for forward in self._static.values()]
        self._verify_rows = sorted({1, facts.verify_rows})
        if any(not {"hidden", "logits"} <= self.outputs(rows).keys() for rows in self._verify_rows):
            raise BundleError(f"{files.target} or {files.static.row} does not give hidden rows and logits; export the bundle again")
        self._per_layer: Embedding | None = None
        if files.static.per_layer_embedding is not None and facts.per_layer_scale is not None:
            width = self._static[1].arrays["per_layer"].shape[2]
            self._per_layer = Embedding(files.static.per_layer_embedding, 1, width, facts.per_layer_scale)

    def rotate(self, arrays: dict[str, NDArray[np.float32]], start: int) -> None:
        """Writes cosines and sines from position `start` on to the arrays [1, rows, 1, head_dim/2] with their names."""
        for name, table in self._rotations.items():
            if name in arrays:
                arrays[name][0, :, 0] = table[start : start + arrays[name].shape[1]]

    @property
    def skips_unread_rows(self) -> bool:
        return "hidden" not in self.outputs(self._chunk)

    def outputs(self, rows: int) -> dict[str, NDArray[np.float32]]:
        """Returns all outputs of the newest forward of the graph with `rows` rows. They are views, valid until its next forward."""
        return self._static[rows].outputs

    def close(self) -> None:
        self._static.clear()
        super().close()

    def _forward(self, ids: Tokens, soft: NDArray[np.float32] | None, rows_read: int) -> None:
        ids = np.asarray(ids, np.int64)
        forward = self._run(ids, list(self._static), soft)
        if rows_read:
            self.hidden_rows[0, 0] = self._last_hidden(ids[-1:]) if "hidden" not in forward.outputs else forward.hidden[0, len(ids) - 1]

    def _last_hidden(self, last: NDArray[np.int64]) -> NDArray[np.float32]:
        """Computes the last committed token again to get its hidden row, which the prefill graph does not give. Keeps its K/V rows."""
        forward = self._static[1]
        self.length -= 1
        try:
            forward.run(last, self._per_layer)
        finally:
            self.length += 1
        row: NDArray[np.float32] = forward.hidden[0, 0]
        return row

    def _verify(self, tokens: Sequence[int]) -> None:
        """Verifies in several forwards if there are more tokens than rows in the verify graph."""
        ids = np.asarray(tokens, np.int64)
        max_rows = self._verify_rows[-1]
        for first in range(0, len(ids), max_rows):
            piece = ids[first : first + max_rows]
            forward = self._run(piece, self._verify_rows)
            self._logits[0, first : first + len(piece)] = forward.logits[0, : len(piece)]
            self.hidden_rows[0, first : first + len(piece)] = forward.hidden[0, : len(piece)]

    def _run(self, ids: NDArray[np.int64], sizes: Sequence[int], soft: NDArray[np.float32] | None = None) -> _StaticForward:
        """Runs the smallest graph among `sizes` that has enough rows for `ids`, and stores their K/V rows."""
        forward = self._static[next(size for size in sizes if size >= len(ids))]
        forward.run(ids, self._per_layer, soft)
        self.rows.write(forward.new_rows, self.length, len(ids))
        self.append(ids)
        return forward


class _StaticForward:
    """A graph with a fixed number of rows, whose arrays are bound once."""

    def __init__(self, graph: Graph, path: Path, target: StaticOrtTarget, rows: int) -> None:
        self.graph, self._target = graph, target
        check_inputs(graph, {name: array.shape for name, array in target.rows.arrays.items()}, path)
        check_inputs(graph, {"embedded": (1, rows, target.hidden_size)}, path)
        self.arrays = small_arrays(graph, path, target.rows)
        self.outputs = outputs = {name: np.zeros(shape, np.float32) for name, shape in graph.outputs.items()}
        self.new_rows = {name.removeprefix("new_"): array for name, array in outputs.items() if name.startswith("new_")}
        shapes = {name: (1, array.shape[1], rows, array.shape[3]) for name, array in target.rows.arrays.items()}
        if {name: array.shape for name, array in self.new_rows.items()} != shapes:
            raise BundleError(f"{path} does not give the rows that the manifest's buffers hold; export the bundle again")
        nothing = np.zeros((1, 0, 0), np.float32)
        self.hidden, self.logits = outputs.get("hidden", nothing), outputs.get("logits", nothing)
        inputs = {name: value_over(array) for name, array in self.arrays.items()}
        self._call: Call = graph.bind(inputs | target.rows.values, {name: value_over(array) for name, array in outputs.items()})

    def run(self, ids: NDArray[np.int64], per_layer: Embedding | None, soft: NDArray[np.float32] | None = None) -> None:
        """Runs a forward over `ids`, or over soft rows. The remaining rows of the graph compute old contents, whose results are unused."""
        target, start = self._target, self._target.length
        if soft is None:
            target.embedding.lookup(ids, self.arrays["embedded"])
        else:
            self.arrays["embedded"][0, : len(soft)] = soft
        if per_layer is not None:
            # Soft rows get the per-layer embedding of token 0.
            per_layer.lookup(ids if soft is None else np.zeros_like(ids), self.arrays["per_layer"])
        target.rotate(self.arrays, start)
        for kind in target.rows.rows:
            target.rows.mask(kind, self.arrays[f"mask_{kind}"], start)
        self._call.run()


def small_arrays(graph: Graph, path: Path, rows: StaticRows) -> dict[str, NDArray[Any]]:
    """Returns arrays of zeros for all inputs of a graph except the K/V buffers. Raises BundleError if a shape is not fixed."""
    arrays: dict[str, NDArray[Any]] = {}
    for name, shape in graph.inputs.items():
        if not all(type(size) is int and size > 0 for size in shape):
            raise BundleError(f"{path}: the input {name!r} {list(shape)} has no fixed shape; export the bundle again")
        if name not in rows.arrays:
            arrays[name] = np.zeros(shape, np.float32)
    return arrays
