"""MTP drafters on the target's K/V rows: graphs that ONNX Runtime runs step by step, or their weights in the kernels' own drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge_devices.errors import errors_as
from edge_runtime.backends.kernels.draft import ArrayRows, DraftLayer, DraftWeights, LevelMatrix, NativeDraft, SparseHeadWeights, can_draft
from edge_runtime.backends.onnx.devices import Call, Graph, SessionOptions, scalar, value_over
from edge_runtime.backends.onnx.kv_cache import MAX_ROWS, check_length
from edge_runtime.backends.onnx.static_target import StaticOrtTarget, small_arrays
from edge_runtime.backends.onnx.target import GraphTarget, OrtTarget, PairFiles, check_inputs, shared_inputs
from edge_runtime.bundle.bundle import read_part
from edge_runtime.bundle.manifest import CacheBuffer, CacheLayout
from edge_runtime.bundle.onnx_file import MAX_GRAPH_BYTES, Node, OnnxGraph, Tensor, read_graph
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.interfaces import DraftSampler, ShouldContinue

# Reads the weights out of a drafter's graph, as `edge_export.onnx.graphs.drafter` writes it, for the kernels' own drafter.
#
# Matrices, norms and factors are identified by their order. A wrong order could make drafts worse, but never change the output. Shapes are
# checked when the weights are packed (kernels/src/draft/model.cpp).

# TensorProto.DataType
_DTYPES: dict[int, type[np.generic]] = {1: np.float32, 2: np.uint8, 3: np.int8, 6: np.int32, 7: np.int64}
_BLOCKS = (128, 64, 32, 16)
_LAYER_MATRICES, _LAYER_NORMS = 4, 5
_FEED_FORWARD = "FeedForwardRows"
_PRODUCTS = {"MatMulRows", _FEED_FORWARD}


class OtherGraphError(Exception):
    """The kernels' drafter cannot compute this graph."""


def read_weights(path: Path, layout: CacheLayout) -> DraftWeights:
    """Returns the weights of the graph at `path`, which has passed `check_onnx`; source n is the n-th of `sources_of`.

    Raises OtherGraphError if the weights are not quantized in blocks, or if the number of nodes is not the expected one.
    """
    with _other_graphs():
        return _weights(_Graph(path), layout)


@contextmanager
def _other_graphs() -> Iterator[None]:
    """Raises OtherGraphError where a node lacks an input or attribute, or a constant has another shape than the exporter writes."""
    try:
        yield
    except (IndexError, KeyError, TypeError) as error:
        raise OtherGraphError from error


def _weights(graph: _Graph, layout: CacheLayout) -> DraftWeights:
    layers = len(layout.drafter_sources)
    sources, matrices, (vectors, factors, epsilon) = sources_of(layout), graph.matrices(), graph.norms()
    if len(matrices) != 3 + _LAYER_MATRICES * layers or len(vectors) != 1 + _LAYER_NORMS * layers or len(factors) != layers:
        raise OtherGraphError
    dims = {buffer.layer: buffer.head_dim for buffer in layout.buffers}
    drafter_layers = []
    for n, source in enumerate(layout.drafter_sources):
        query, output, gate_and_up, down = matrices[1 + _LAYER_MATRICES * n :][:_LAYER_MATRICES]
        own = DraftLayer(
            matrices=(query, output, *_halves(gate_and_up), down),
            norms=tuple(vectors[_LAYER_NORMS * n :][:_LAYER_NORMS]),
            dim=dims[source],
            factor=factors[n],
            source=sources.index(source),
        )
        if any(norm.shape != (own.dim if place == 1 else matrices[0].outputs,) for place, norm in enumerate(own.norms)):
            raise OtherGraphError
        drafter_layers.append(own)
    embedding, factor = graph.embedding()
    sparse = graph.sparse_head(matrices[-1])
    if vectors[-1].shape != (matrices[0].outputs,) or not drafter_layers:
        raise OtherGraphError
    return DraftWeights(
        heads=drafter_layers[0].matrices[0].outputs // drafter_layers[0].dim,
        epsilon=epsilon,
        before=matrices[0],
        after=matrices[-2],
        layers=tuple(drafter_layers),
        norm=vectors[-1],
        rows=matrices[-1] if sparse is None else graph.sparse_rows(sparse),
        sparse=sparse,
        embedding=embedding,
        factor=factor,
    )


def sources_of(layout: CacheLayout) -> list[int]:
    """Returns the target's layers whose K/V rows the drafter reads."""
    return sorted(set(layout.drafter_sources))


def channel_scales(path: Path, key: str, value: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns the scales float32 [kv_heads x head_dim] of int8 rows in the buffers `key` and `value`. Raises OtherGraphError."""
    names = [key.encode(), value.encode()]
    with _other_graphs():
        graph = _Graph(path)
        for node in graph.nodes("GroupQueryAttention"):
            if node.inputs[3:5] == names and len(node.inputs) == 14:
                return graph.array(node.inputs[12]).reshape(-1).copy(), graph.array(node.inputs[13]).reshape(-1).copy()
        scales = {node.inputs[0]: node.inputs[1] for node in graph.nodes("DequantizeLinear")}
        keys, values = (graph.array(scales.get(name, b"")).copy() for name in names)
    return keys, values


class _Graph:
    """A drafter's graph, read from its file: its nodes, those of its loop's body, and its constants."""

    def __init__(self, path: Path) -> None:
        whole = read_graph(read_part(path, MAX_GRAPH_BYTES, "graph"))
        bodies: list[OnnxGraph] = [node.graphs[b"body"] for node in whole.nodes if node.operator == "Loop" and b"body" in node.graphs]
        if len(bodies) != 1:
            raise OtherGraphError
        self._folder, self._files = path.parent, dict[str, NDArray[np.uint8]]()
        self._nodes = [*whole.nodes, *bodies[0].nodes]
        self._constants: dict[bytes, Tensor] = {**whole.constants, **bodies[0].constants}

    def nodes(self, operator: str) -> list[Node]:
        """Returns the nodes with this operator, in order."""
        return [node for node in self._nodes if node.operator == operator]

    def array(self, name: bytes) -> NDArray[Any]:
        """Returns the values of a constant; those in an external file are mapped. Raises OtherGraphError if there is no such constant."""
        constant = self._constants.get(name)
        if constant is None or constant.type not in _DTYPES:
            raise OtherGraphError
        dtype = np.dtype(_DTYPES[constant.type])
        if constant.external is None:
            if constant.raw is None or len(constant.raw) != prod(constant.shape) * dtype.itemsize:
                raise OtherGraphError
            return np.frombuffer(constant.raw, dtype).reshape(constant.shape)
        mapped, first = self._mapped(constant.external["location"]), int(constant.external.get("offset", 0))
        return mapped[first : first + prod(constant.shape) * dtype.itemsize].view(dtype).reshape(constant.shape)

    def _mapped(self, name: str) -> NDArray[np.uint8]:
        """Maps a file of weights, once, because each mapping takes a file descriptor. Raises BackendError if it cannot be mapped."""
        if name not in self._files:
            with errors_as(
                BackendError, f"{self._folder / name} cannot be mapped", "check the file, or free some memory", OSError, ValueError
            ):
                self._files[name] = np.asarray(np.memmap(self._folder / name, np.uint8, "r"))
        return self._files[name]

    def matrices(self) -> list[LevelMatrix]:
        """Returns the matrices of all products, in order."""
        found = []
        for node in self._nodes:
            if node.operator in _PRODUCTS:
                found.append(self._levels(node.inputs[1:3], node.numbers))
            if node.operator == _FEED_FORWARD:
                second = {name.removeprefix(b"second_"): number for name, number in node.numbers.items() if name.startswith(b"second_")}
                found.append(self._levels(node.inputs[3:], second))
        return found

    def norms(self) -> tuple[list[NDArray[Any]], list[float], float]:
        """Returns the weights of all norms, in order; the factor of each layer's output; and the epsilon of the first norm."""
        weights, factors, epsilon = list[bytes](), list[bytes](), 0.0
        for node in self._nodes:
            if node.operator == "NormRows":
                weights += node.inputs[1:]
                epsilon = epsilon or float(node.numbers.get(b"epsilon", 0))
            elif node.operator == "ResidualRows":
                weights += [node.inputs[2], *node.inputs[4:]]
                factors += node.inputs[3:4]
        numbers = [self.array(name) for name in factors if name]
        if any(number.size != 1 for number in numbers):
            raise OtherGraphError
        return [self.array(name).copy() for name in weights if name], [float(number.reshape(-1)[0]) for number in numbers], epsilon

    def _levels(self, names: list[bytes], numbers: Mapping[bytes, float]) -> LevelMatrix:
        """Returns the matrix whose levels and scales have these two `names`, with the attributes of its node, `numbers`."""
        if len(names) != 2:
            raise OtherGraphError
        levels, scales = map(self.array, names)
        outputs, columns, bits, block = (int(numbers.get(name, 0)) for name in (b"N", b"K", b"bits", b"block_size"))
        if block not in _BLOCKS or (levels.nbytes, scales.size) != (outputs * columns * bits // 8, outputs * columns // block):
            raise OtherGraphError
        scales = np.ascontiguousarray(scales, np.float32)
        return LevelMatrix(levels=levels, scales=scales, outputs=outputs, inputs=columns, bits=bits, block=block)

    def embedding(self) -> tuple[LevelMatrix, float]:
        """Returns the target's embedding table, and the factor of its rows."""
        (gathered, *_), factors = self.nodes("GatherBlockQuantized") or (None,), self.nodes("Mul")
        if gathered is None or len(gathered.inputs) != 3 or not factors or gathered.outputs[0] not in factors[0].inputs:
            raise OtherGraphError
        table, numbers = self._constants.get(gathered.inputs[0]), gathered.numbers
        if table is None or len(table.shape) != 2 or not numbers.get(b"bits"):
            raise OtherGraphError
        shape = {b"N": table.shape[0], b"K": table.shape[1] * 8 // numbers[b"bits"]}
        levels = self._levels([gathered.inputs[0], gathered.inputs[2]], {**numbers, **shape})
        factor = self.array(factors[0].inputs[1])
        if factor.size != 1:
            raise OtherGraphError
        return levels, float(factor.reshape(-1)[0])

    def sparse_head(self, centroids: LevelMatrix) -> SparseHeadWeights | None:
        """Returns the sparse head, None if the head scores all tokens."""
        best = self.nodes("TopK")
        if not best:
            return None
        top, order = self.array(best[0].inputs[1]), self.array(self._gathers()[0])
        if top.size != 1 or order.dtype != np.int32 or order.ndim != 2:
            raise OtherGraphError
        return SparseHeadWeights(centroids=centroids, order=order.copy(), top=int(top.reshape(-1)[0]))

    def _gathers(self) -> list[bytes]:
        """Returns the names of the three tables that are gathered by the best centroids: tokens, their rows transposed, scales of rows."""
        names = [node.inputs[0] for node in self.nodes("Gather") if node.inputs[0] in self._constants]
        if len(names) != 3:
            raise OtherGraphError
        return names

    def sparse_rows(self, head: SparseHeadWeights) -> LevelMatrix:
        """Returns the output rows [tokens, hidden size], grouped by centroid, in 8 bits with a scale for each row."""
        (_, rows_name, scales_name), hidden = self._gathers(), head.centroids.inputs
        rows, scales = self.array(rows_name), self.array(scales_name)
        count, each = head.order.shape
        if rows.shape != (count, hidden, each) or rows.itemsize != 1 or scales.size != count * each:
            raise OtherGraphError
        block = next((block for block in _BLOCKS if hidden % block == 0), 0)
        if not block:
            raise OtherGraphError
        levels = np.ascontiguousarray(rows.transpose(0, 2, 1)).view(np.uint8).reshape(count * each, hidden)
        if rows.dtype == np.int8:  # older exports: the zero point is 0
            levels ^= 128
        scales = np.repeat(scales.reshape(-1, 1).astype(np.float32), hidden // block, axis=1)
        return LevelMatrix(levels=levels, scales=scales, outputs=count * each, inputs=hidden, bits=8, block=block)


def _halves(both: LevelMatrix) -> tuple[LevelMatrix, LevelMatrix]:
    """Splits the matrix of the feed-forward's gate and up projections, which is one in the graph."""
    half, row = both.outputs // 2, both.inputs * both.bits // 8
    levels, scales = both.levels.reshape(-1)[: 2 * half * row].reshape(2, -1), both.scales.reshape(-1).reshape(2, -1)
    first, second = (
        LevelMatrix(levels=levels[n], scales=scales[n], outputs=half, inputs=both.inputs, bits=both.bits, block=both.block) for n in (0, 1)
    )
    return first, second


# The smallest positive threshold. The graph computes probabilities only if its threshold is above 0, and every token reaches this one.
_ANY = float(np.finfo(np.float32).tiny)
_OUTPUTS = ("drafts", "probabilities", "hidden_out", "scores", "candidates")

T = TypeVar("T", bound=GraphTarget)


class Step(NamedTuple):
    """The result of a draft step: the likeliest token, its probability, and `scores` [n] of all tokens, or of the `candidates` [n] only."""

    likeliest: int
    probability: float
    scores: NDArray[np.float32]
    candidates: NDArray[np.int64] | None


class GraphDrafter(ABC, Generic[T]):
    """A drafter whose graph runs once for each drafted token. Implements `interfaces.Drafter`."""

    stepwise = True

    def __init__(self, path: Path, target: T, session: SessionOptions) -> None:
        self._target = target
        graph = Graph(path, session)
        self._graph: Graph | None = graph
        self._call: Call | None = self._bind(graph, path)
        target.closers.append(self)

    def draft(
        self, last: int, draft_length: int, sampler: DraftSampler | None = None, should_continue: ShouldContinue | None = None
    ) -> list[int]:
        """Returns `draft_length` tokens after `last`, fewer where `sampler` or `should_continue` ends the draft.

        Returns no tokens if the target has no hidden row. All steps use the position of `last` and write nothing to the cache.
        """
        if self._call is None:
            raise RequestError("the drafter is closed; open the bundle again")
        check_length(draft_length)
        hidden = self._target.hidden_row
        if hidden is None or draft_length < 1:
            return []
        self._target.vocabulary.check(last)
        self._sampled = sampler is not None
        self._begin(hidden)
        tokens: list[int] = []
        while len(tokens) < draft_length:
            step = self._step(tokens[-1] if tokens else last, probability=should_continue is not None)
            chosen = step.likeliest if sampler is None else sampler(step.scores, step.candidates)
            if chosen is None:
                break
            tokens.append(chosen)
            if should_continue is not None and not should_continue(step.probability):
                break
        return tokens

    def assignments(self) -> dict[str, dict[str, int]]:
        """Returns how many nodes of each operator each execution provider runs."""
        return self._graph.assignments() if self._graph else {}

    @property
    def lacks_kernels(self) -> bool:
        """See `Graph.lacks_kernels`."""
        return self._graph is not None and self._graph.lacks_kernels

    def close(self) -> None:
        """Frees the session. Can be called twice."""
        self._graph = self._call = None

    def _run(self) -> Call:
        assert self._call is not None
        self._call.run()
        return self._call

    @abstractmethod
    def _bind(self, graph: Graph, path: Path) -> Call:
        """Prepares the call. Raises BackendError or BundleError if the graph does not fit the target."""

    @abstractmethod
    def _begin(self, hidden: NDArray[np.float32]) -> None:
        """Sets the inputs of a draft that follows the target's hidden row [hidden size]."""

    @abstractmethod
    def _step(self, token: int, *, probability: bool) -> Step:
        """Drafts the token after `token`. Keeps the drafter's hidden row for the next step.

        Without `probability`, that of the result may be wrong. The scores may be missing unless the draft is sampled.
        """


class OrtDrafter(GraphDrafter[OrtTarget]):
    """A drafter whose graph is a loop over draft steps. Each run takes one step only."""

    def _bind(self, graph: Graph, path: Path) -> Call:
        target, width = self._target, graph.inputs.get("hidden", (0,))[-1]
        if width != target.hidden_size:
            raise BackendError(f"{path.name} reads hidden rows of {width}, the model gives {target.hidden_size}; export the bundle again")
        self._inputs = graph.inputs
        self._token, token = scalar(np.int64, 1, 1)
        self._hidden, hidden = scalar(np.float32, 1, 1, target.hidden_size)
        self._length, length = scalar(np.int64)
        self._threshold, threshold = scalar(np.float32)
        self._with_scores, with_scores = scalar(np.bool_)
        self._position, position = scalar(np.int64, 1, 1)
        inputs = {
            "token": token,
            "hidden": hidden,
            "draft_length": length,
            "least_probability": threshold,
            "with_scores": with_scores,
            "position_ids": position,
            **shared_inputs(target),
            **target.cache.values,
        }
        return graph.bind({name: value for name, value in inputs.items() if name in graph.inputs}, dict.fromkeys(_OUTPUTS))

    def _begin(self, hidden: NDArray[np.float32]) -> None:
        target = self._target
        target.cache.set_counts(target.length)
        assert self._call is not None
        target.cache.place_drafter_rows(self._call, self._inputs, target.length)
        self._position[...], self._hidden[0, 0] = target.length, hidden

    def _step(self, token: int, *, probability: bool) -> Step:
        self._token[...], self._length[...] = token, 1
        self._threshold[...], self._with_scores[...] = _ANY if probability else 0.0, self._sampled
        drafts, probabilities, hidden, scored, candidates = self._run().outputs()
        self._hidden[...] = hidden
        return Step(int(drafts[0]), float(probabilities[0]), scored[0], candidates[0] if candidates.size else None)


class StaticOrtDrafter(GraphDrafter[StaticOrtTarget]):
    """A drafter whose graph is a single step with fixed shapes."""

    def _bind(self, graph: Graph, path: Path) -> Call:
        rows, width = self._target.rows, (1, 1, self._target.hidden_size)
        self._arrays = small_arrays(graph, path, rows)
        check_inputs(graph, {"embedded": width, "hidden": width}, path)
        read = {name: value for name, value in rows.values.items() if name in graph.inputs}
        check_inputs(graph, {name: rows.arrays[name].shape for name in read}, path)
        self.outputs = {name: np.zeros(shape, np.int64 if name == "candidates" else np.float32) for name, shape in graph.outputs.items()}
        inputs = {name: value_over(array) for name, array in self._arrays.items()}
        return graph.bind(inputs | read, {name: value_over(array) for name, array in self.outputs.items()})

    def _begin(self, hidden: NDArray[np.float32]) -> None:
        target = self._target
        target.rotate(self._arrays, target.length)
        for kind in target.rows.rows:
            if f"mask_{kind}" in self._arrays:
                target.rows.drafter_mask(kind, self._arrays[f"mask_{kind}"], target.length)
        self._next_hidden = hidden.reshape(1, 1, -1)

    def _step(self, token: int, *, probability: bool) -> Step:
        self._target.embedding.lookup(np.array([token]), self._arrays["embedded"])
        self._arrays["hidden"][...] = self._next_hidden
        self._run()
        self._next_hidden = self.outputs["hidden_out"]
        values, candidates = self.outputs["scores"], self.outputs.get("candidates")
        best = int(values.argmax())
        share = float(1 / np.exp(values - values[best]).sum()) if probability else 1.0
        return Step(best if candidates is None else int(candidates[best]), share, values, candidates)


def load_draft(path: Path, layout: CacheLayout, hidden_size: int, threads: int) -> NativeDraft:
    """Packs the weights of the graph at `path`, for a target of this hidden size.

    Raises OtherGraphError or ValueError if the kernels cannot compute this graph.
    """
    weights = read_weights(path, layout)
    if weights.after.outputs != hidden_size:
        raise OtherGraphError
    return NativeDraft(weights, longest=MAX_ROWS - 1, threads=threads)


class KernelDrafter:
    """The kernels' own drafter with the weights of the graph. It reads the target's K/V buffers. Implements `interfaces.Drafter`."""

    stepwise = True

    def __init__(self, path: Path, target: OrtTarget, layout: CacheLayout, draft: NativeDraft) -> None:
        """`draft` comes from `load_draft`. Raises OtherGraphError or ValueError if it cannot read the target's K/V rows."""
        self._target = target
        self._draft: NativeDraft | None = draft
        self._buffers = [next(buffer for buffer in layout.buffers if buffer.layer == layer) for layer in sources_of(layout)]
        try:
            self._sources = [self._source(number, buffer, path) for number, buffer in enumerate(self._buffers)]
        except BaseException:
            self.close()
            raise
        target.closers.append(self)

    def _source(self, number: int, buffer: CacheBuffer, path: Path) -> ArrayRows:
        cache, tables = self._target.cache, self._target.rotations.tables
        assert self._draft is not None
        scales = channel_scales(path, buffer.key, buffer.value) if buffer.dtype == "i8" else ()
        arrays = cache.array(buffer.key), cache.array(buffer.value)
        return ArrayRows(self._draft, number, arrays, (tables[f"cosine_{buffer.kind}"], tables[f"sine_{buffer.kind}"]), scales)

    def draft(
        self, last: int, draft_length: int, sampler: DraftSampler | None = None, should_continue: ShouldContinue | None = None
    ) -> list[int]:
        """See `GraphDrafter.draft`."""
        if self._draft is None:
            raise RequestError("the drafter is closed; open the bundle again")
        check_length(draft_length)
        target = self._target
        hidden = target.hidden_row
        if hidden is None or draft_length < 1:
            return []
        target.vocabulary.check(last)
        for source, buffer in zip(self._sources, self._buffers, strict=True):
            source.select(*target.cache.drafter_rows(buffer.kind, target.length), target.length)
        return self._draft.run(last, draft_length, hidden, sampler, should_continue)

    def assignments(self) -> dict[str, dict[str, int]]:
        """Returns nothing: no execution provider runs this drafter."""
        return {}

    def close(self) -> None:
        """Frees the weights. Can be called twice."""
        if self._draft is not None:
            self._draft.close()
            self._draft = None


AnyOrtDrafter = KernelDrafter | OrtDrafter | StaticOrtDrafter


class LoadingDraft:
    """Packs the weights of a drafter's graph in a thread while the target is opened. A context manager; leaving it joins the thread."""

    def __init__(self, files: PairFiles, session: SessionOptions) -> None:
        self._beside = ThreadPoolExecutor(1)
        self._result: Future[NativeDraft] | None = None
        if files.drafter is not None and files.static is None and session.device.is_cpu and can_draft():
            self._result = self._beside.submit(load_draft, files.drafter, files.layout, files.hidden_size, session.threads)

    def take(self) -> NativeDraft | None:
        """Returns the drafter to the first caller; None if the kernels cannot compute it. BackendError if the weights cannot be read."""
        result, self._result = self._result, None
        with suppress(OtherGraphError, ValueError):
            return None if result is None else result.result()
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._beside, suppress(BackendError):
            if (draft := self.take()) is not None:  # not taken: the target did not open, or does not use the kernels
                draft.close()


def open_drafter(
    path: Path, target: OrtTarget | StaticOrtTarget, session: SessionOptions, files: PairFiles, loading: LoadingDraft
) -> AnyOrtDrafter:
    """Opens the graph at `path` as the drafter of this target, in the kernels if they can compute it. Raises BackendError, BundleError."""
    if not isinstance(target, OrtTarget):
        return StaticOrtDrafter(path, target, session)
    if target.row_kernels and (draft := loading.take()) is not None:
        with suppress(OtherGraphError, ValueError):
            return KernelDrafter(path, target, files.layout, draft)
    return OrtDrafter(path, target, session)
