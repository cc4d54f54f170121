"""A whole draft in one call of the kernels' library, with weights that were packed once, on the K/V rows in the engine's own memory.

The structures are those of src/draft/model.h and src/draft/stop_rule.h.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.kernels.loader import address_of, load_library, variant
from edge_runtime.bundle.gguf_header import TENSOR_TYPES
from edge_runtime.errors import BackendError
from edge_runtime.interfaces import DraftSampler, ShouldContinue, StopNumbers, StopRule

_POINTER, _NUMBER, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
# enum RowType in src/draft/steps.h
FLOAT_ROWS, HALF_ROWS, Q8_ROWS, Q4_ROWS, INT8_ROWS = range(5)
_ROW_TYPES = {np.float32: FLOAT_ROWS, np.float16: HALF_ROWS, np.int8: INT8_ROWS}
_LEVELS, _GGUF = 1, 2
# Tables of a stop rule that may have entries for more than its longest draft.
_LONGER = ("row_costs", "further")
# The index of the query norm among the norms of a layer.
_QUERY_NORM = 1
_CHOOSE = ctypes.CFUNCTYPE(_NUMBER, _NUMBER, _NUMBER)
# Returned by `choose` to end the draft without a token; -2 - token ends it with that token.
_NO_TOKEN = -1


class _Matrix(ctypes.Structure):
    _fields_ = (
        *((name, _NUMBER) for name in ("kind", "type", "block", "outputs", "inputs")),
        ("data", _POINTER),
        ("scales", _POINTER),
    )


class _Layer(ctypes.Structure):
    _fields_ = (("matrices", _Matrix * 5), ("norms", _POINTER * 5), ("dim", _NUMBER), ("source", _NUMBER), ("factor", _REAL))


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, _NUMBER) for name in ("hidden", "target", "heads", "layers", "sources", "vocabulary", "centroids", "per_centroid", "top")),
        ("epsilon", _REAL),
        *((name, _Matrix) for name in ("before", "after", "centroid_rows", "rows")),
        *((name, _POINTER) for name in ("layer", "norm", "order")),
        ("embedding", _Matrix),
        ("read", _POINTER),
        ("step", _NUMBER),
        ("factor", _REAL),
        ("threads", _NUMBER),
    )


class KvSource(ctypes.Structure):
    """The K/V rows that some of the drafter's layers read; addresses and strides are in bytes."""

    _fields_ = (
        *((name, _NUMBER) for name in ("type", "kv_heads", "count")),
        *((name, _POINTER) for name in ("keys", "values")),
        *((name, _NUMBER) for name in ("key_step", "value_step", "key_head", "value_head")),
        *((name, _POINTER) for name in ("cells", "key_scales", "value_scales", "cosine", "sine")),
        *((name, _NUMBER) for name in ("key_turn", "value_turn")),
    )


class _Rule(ctypes.Structure):
    _fields_ = (
        *((name, _NUMBER) for name in ("longest", "any_prefix", "bins")),
        ("rate", _REAL),
        *((name, _POINTER) for name in ("bounds", "row_costs", "draft_costs", "accept", "transition", "further")),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, _NUMBER) for name in ("token", "steps")),
        *((name, _POINTER) for name in ("hidden", "sources")),
        ("min_probability", _REAL),
        ("rule", _POINTER),
        ("choose", _CHOOSE),
        *((name, _POINTER) for name in ("tokens", "probabilities")),
        *((name, _NUMBER) for name in ("drafted", "helped")),
    )


@dataclass(frozen=True, kw_only=True)
class LevelMatrix:
    """A matrix [outputs, inputs] in the format of MatMulNBits: `levels` of `bits` bits, packed in uint8, and `scales` float32
    [outputs, inputs / block].
    """

    levels: NDArray[np.uint8]
    scales: NDArray[np.float32]
    outputs: int
    inputs: int
    bits: int
    block: int

    def described(self) -> _Matrix:
        """Returns the structure for C. Raises ValueError if levels or scales have another type or size."""
        elements = self.outputs * self.inputs
        levels = address_of(self.levels, np.uint8, elements * self.bits // 8)
        scales = address_of(self.scales, np.float32, elements // max(1, self.block))
        return _Matrix(_LEVELS, self.bits, self.block, self.outputs, self.inputs, levels, scales)


@dataclass(frozen=True, kw_only=True)
class GgufMatrix:
    """A matrix [outputs, inputs] in the ggml type of that number, as in a GGUF file. Quantized ones are packed once; floats are read in
    place at each draft.
    """

    type: int
    data: NDArray[np.uint8]
    outputs: int
    inputs: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row. Raises ValueError for an unknown type."""
        if self.type not in TENSOR_TYPES:
            raise ValueError("the type of a matrix")
        stored = TENSOR_TYPES[self.type]
        return self.inputs // stored.weights * stored.bytes

    def described(self) -> _Matrix:
        """Returns the structure for C. Raises ValueError if the data have another type or size."""
        data = address_of(self.data, np.uint8, self.outputs * self.row_bytes)
        return _Matrix(_GGUF, self.type, self.row_bytes, self.outputs, self.inputs, data, None)


Matrix = LevelMatrix | GgufMatrix


@dataclass(frozen=True, kw_only=True)
class DraftLayer:
    """A layer of the drafter.

    - `matrices`: query, attention output, and of the feed-forward gate, up and down.
    - `norms`: before attention, of queries, after attention, before and after the feed-forward.
    - `dim`: width of a head; `factor`: scale of the layer's output; `source`: which source of K/V rows it reads.
    """

    matrices: tuple[Matrix, ...]
    norms: tuple[NDArray[np.float32], ...]
    dim: int
    factor: float
    source: int


@dataclass(frozen=True, kw_only=True)
class SparseHeadWeights:
    """A head that scores only the tokens of the `top` best centroids.

    `centroids` is [C, hidden]. The head's rows are grouped by centroid; `order` int32 [C, K] has the token of each row.
    """

    centroids: Matrix
    order: NDArray[np.int32]
    top: int


@dataclass(frozen=True, kw_only=True)
class DraftWeights:
    """The weights of a drafter.

    `before` [hidden, 2 x target] and `after` [target, hidden] project from and to the target's width. `rows` is the output head.
    `embedding` [vocabulary, target] is the target's table, scaled by `factor`; `read` is the address of ggml's function that expands one of
    its rows, if it is of a GGUF type.
    """

    heads: int
    epsilon: float
    before: Matrix
    after: Matrix
    layers: tuple[DraftLayer, ...]
    norm: NDArray[np.float32]
    rows: Matrix
    sparse: SparseHeadWeights | None
    embedding: Matrix
    factor: float
    read: int | None = None


def can_draft() -> bool:
    """Whether the library exists, has a variant for this processor, and is new enough to draft."""
    return variant() is not None and hasattr(load_library(), "edge_draft_new")


class NativeDraft:
    """A drafter in memory. `sources` describe the K/V rows for the next call. After `close`, no other method may be called."""

    def __init__(self, weights: DraftWeights, *, longest: int, threads: int = 1, name: str | None = None, library: Any = None) -> None:
        """`longest`: the most tokens of a draft. If `threads` is above 1, one more thread helps, with the same results.

        `name`: a variant of the kernels (None: the one in use); `library`: another build of the kernels.

        Raises ValueError, which names the part, if no kernel supports the weights or if they do not fit together.
        """
        self._library = cast("Any", library or load_library())
        self._library.edge_draft_new.restype = _POINTER
        self._library.edge_draft_run.restype = ctypes.c_char_p
        self._library.edge_draft_scores.restype = _NUMBER
        self._kept = weights
        self.sources = (KvSource * (1 + max(layer.source for layer in weights.layers)))()
        self._dims = {layer.source: layer.dim for layer in weights.layers}
        if any(self._dims[layer.source] != layer.dim for layer in weights.layers):
            raise ValueError("the heads of a layer")
        shape, reason = _described(weights, len(self.sources)), ctypes.c_char_p()
        shape.threads = threads
        pointer = self._library.edge_draft_new(name.encode() if name else None, ctypes.byref(shape), ctypes.byref(reason))
        if pointer is None:
            raise ValueError((reason.value or b"").decode())
        self._model: Any = _POINTER(pointer)
        self._longest, self._width = longest, weights.after.outputs
        self._tokens, self._probabilities = np.zeros(longest, np.int64), np.zeros(longest, np.float32)
        self._call = _Call(
            sources=ctypes.addressof(self.sources),
            tokens=address_of(self._tokens, np.int64, longest),
            probabilities=address_of(self._probabilities, np.float32, longest),
        )
        self._reference = ctypes.byref(self._call)
        self._threshold, self._asked = 0.0, False  # what `_call` contains
        self._rule = _Rule()
        self._rule_address = ctypes.addressof(self._rule)
        self._numbers: tuple[NDArray[np.float64], ...] = ()
        self._choose, self._likeliest = _CHOOSE(self._chosen), _CHOOSE()
        self._scores, self._candidates = self._views()
        self._sampler: DraftSampler | None = None
        self._should_continue: ShouldContinue | None = None
        self._rule_source: ShouldContinue | None = None  # the newest `should_continue`, and below the same if it is a StopRule
        self._stop_rule: StopRule | None = None
        self._error: BaseException | None = None

    def rotations(self, number: int, *tables: NDArray[np.float32]) -> tuple[int, ...]:
        """Returns the addresses of cosines or sines [..., dim / 2] float32, for the layers that read source `number`.

        Raises ValueError for tables of another type or width.
        """
        if any(table.shape[-1] != self._dims[number] // 2 for table in tables):
            raise ValueError("the rotations of the KV cache")
        return tuple(address_of(table, np.float32, table.size) for table in tables)

    def _views(self) -> tuple[NDArray[np.float32], NDArray[np.int32] | None]:
        scores, candidates = _POINTER(), _POINTER()
        count = self._library.edge_draft_scores(self._model, ctypes.byref(scores), ctypes.byref(candidates))
        array = np.frombuffer((ctypes.c_float * count).from_address(scores.value or 0), np.float32)
        if not candidates.value:
            return array, None
        return array, np.frombuffer((ctypes.c_int32 * count).from_address(candidates.value), np.int32)

    def run(
        self,
        last: int,
        draft_length: int,
        hidden: NDArray[np.float32],
        sampler: DraftSampler | None = None,
        should_continue: ShouldContinue | None = None,
        *,
        min_probability: float = 0.0,
    ) -> list[int]:
        """Drafts after the token `last` and a `hidden` row float32 [target], with the K/V rows in `sources`.

        `hidden` is the target's hidden row of the token before `last`. `min_probability` counts only without `sampler` and
        `should_continue`: the draft then ends before a less likely token. Raises what these callbacks raise, and ValueError for a hidden
        row of another type or size, or for a draft longer than `longest`.
        """
        call = self._call
        if draft_length > self._longest:
            raise ValueError(f"a draft of {draft_length} tokens, at most {self._longest}")
        call.token, call.steps, call.hidden = last, draft_length, address_of(hidden, np.float32, self._width)
        threshold = min_probability if sampler is None and should_continue is None else 0.0
        if threshold != self._threshold:
            self._threshold = call.min_probability = threshold
        if should_continue is not self._rule_source:
            self._rule_source = should_continue
            self._stop_rule = should_continue if isinstance(should_continue, StopRule) else None
        rule = self._stop_rule if sampler is None else None
        call.rule = None if rule is None else self._rule_for(rule.numbers())
        asked = sampler is not None or (should_continue is not None and rule is None)
        if asked is not self._asked:
            self._asked, call.choose = asked, self._choose if asked else self._likeliest
        if asked:
            self._sampler, self._should_continue = sampler, should_continue
        wrong = self._library.edge_draft_run(self._model, self._reference)
        if asked:
            self._sampler = self._should_continue = None
            if (error := self._error) is not None:
                self._error = None
                raise error
        if wrong:
            raise BackendError(f"the drafter does not take {wrong.decode()}; export the bundle again")
        if rule is not None:
            rule.take(self._probabilities[: call.drafted].tolist())
        tokens: list[int] = self._tokens[: call.drafted].tolist()
        return tokens

    def _rule_for(self, numbers: StopNumbers) -> int:
        """Copies a rule's numbers into the structure for C, and returns its address."""
        rule = self._rule
        if numbers.tables is not self._numbers:
            self._numbers, bins, lengths = numbers.tables, len(numbers.tables[3]), len(numbers.tables[2])
            sizes = {
                **{"bounds": bins - 1, "row_costs": lengths, "draft_costs": lengths},
                **{"accept": bins, "transition": bins**2, "further": lengths * bins},
            }
            for (name, size), table in zip(sizes.items(), numbers.tables, strict=True):
                setattr(rule, name, address_of(table, np.float64, size, more=name in _LONGER))
            rule.bins, rule.longest = bins, lengths - 1
        rule.rate, rule.any_prefix = numbers.rate, numbers.any_prefix
        return self._rule_address

    def _chosen(self, number: int, likeliest: int) -> int:
        """Implements DraftCall::choose. An exception cannot pass through C, so it ends the draft and is raised again in `run`."""
        try:
            token: int | None = likeliest
            if self._sampler is not None:
                token = self._sampler(self._scores, self._candidates)
            if token is None:
                return _NO_TOKEN
            more = self._should_continue is None or self._should_continue(float(self._probabilities[number]))
        except BaseException as error:  # noqa: BLE001
            self._error = error
            return _NO_TOKEN
        return token if more else _NO_TOKEN - 1 - token

    def close(self) -> None:
        """Frees the weights. Can be called twice."""
        if self._model is not None:
            self._library.edge_draft_free(self._model)
            self._model = None


class ArrayRows:
    """K/V rows [1, kv_heads, rows, dim] in two arrays as a source of a drafter, and the tables [positions, dim / 2] that rotate queries."""

    def __init__(
        self,
        draft: NativeDraft,
        number: int,
        arrays: tuple[NDArray[Any], NDArray[Any]],
        rotations: tuple[NDArray[np.float32], NDArray[np.float32]],
        scales: tuple[NDArray[np.float32], ...] = (),
    ) -> None:
        """`arrays`: keys and values; `rotations`: cosines and sines; `scales` [kv_heads x dim] of both, for int8 rows only.

        Raises ValueError if the drafter's layers cannot read the rows.
        """
        kind, dim = arrays[0].dtype.type, draft._dims[number]
        if kind not in _ROW_TYPES or any(array.shape != arrays[0].shape or array.shape[3] != dim for array in arrays):
            raise ValueError("the K/V rows")
        if len(scales) != (2 if kind is np.int8 else 0):
            raise ValueError("the scales of K/V rows")
        _, heads, self._rows, _ = arrays[0].shape
        self._positions, self._kept = min(map(len, rotations)), (*arrays, *rotations, *scales)
        self._source = source = draft.sources[number]
        self._keys, self._values = (address_of(array, kind, heads * self._rows * dim) for array in arrays)
        self._cosine, self._sine = draft.rotations(number, *rotations)
        self._step, self._turn = dim * arrays[0].itemsize, dim // 2 * np.dtype(np.float32).itemsize
        source.type, source.kv_heads = _ROW_TYPES[kind], heads
        source.key_step = source.value_step = self._step
        source.key_head = source.value_head = self._rows * self._step
        if scales:
            source.key_scales, source.value_scales = (address_of(part, np.float32, heads * dim) for part in scales)

    def select(self, first: int, count: int, position: int) -> None:
        """Makes the next draft read `count` rows from `first` on, at position `position`.

        Raises ValueError for rows or a position outside the arrays.
        """
        if first < 0 or first + count > self._rows or not 0 <= position < self._positions:
            raise ValueError(f"{count} rows from {first} on at {position}")
        source = self._source
        source.count = count
        source.keys, source.values = self._keys + first * self._step, self._values + first * self._step
        source.cosine, source.sine = self._cosine + position * self._turn, self._sine + position * self._turn


def _described(weights: DraftWeights, sources: int) -> _Shape:
    """Returns the structure for C. It has addresses of the weights' arrays, which the caller keeps alive."""
    layers = (_Layer * len(weights.layers))()
    for to, layer in zip(layers, weights.layers, strict=True):
        to.matrices = (_Matrix * 5)(*(matrix.described() for matrix in layer.matrices))
        sizes = (layer.dim if place == _QUERY_NORM else weights.before.outputs for place in range(5))
        to.norms = (_POINTER * 5)(*(address_of(norm, np.float32, size) for norm, size in zip(layer.norms, sizes, strict=True)))
        to.dim, to.source, to.factor = layer.dim, layer.source, layer.factor
    before, after, rows, embedding, sparse = weights.before, weights.after, weights.rows, weights.embedding, weights.sparse
    shape = _Shape(
        hidden=before.outputs,
        target=after.outputs,
        heads=weights.heads,
        layers=len(layers),
        sources=sources,
        vocabulary=rows.outputs,
        epsilon=weights.epsilon,
        before=before.described(),
        after=after.described(),
        rows=rows.described(),
        layer=ctypes.addressof(layers),
        norm=address_of(weights.norm, np.float32, before.outputs),
        embedding=embedding.described(),
        factor=weights.factor,
    )
    shape._layers = layers  # keeps the array alive as long as the structure
    if sparse is not None:
        shape.centroids, shape.per_centroid = sparse.order.shape
        shape.top, shape.centroid_rows = sparse.top, sparse.centroids.described()
        shape.order = address_of(sparse.order, np.int32, rows.outputs)
    if weights.read is not None and isinstance(embedding, GgufMatrix):
        shape.read, shape.step = weights.read, embedding.row_bytes
    return shape
