"""A draft as one call of the kernels' library: the drafter's weights, packed once, on K/V rows where the engine has them.

The structures are those of src/draft/model.h and src/draft/stop_rule.h.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.kernels.loader import load_library, variant
from edge_runtime.errors import BackendError
from edge_runtime.interfaces import DraftSampler, ShouldContinue, StopNumbers, StopRule

_POINTER, _NUMBER, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
# enum RowType in src/draft/steps.h
FLOAT_ROWS, HALF_ROWS, Q8_ROWS, Q4_ROWS, INT8_ROWS = range(5)
_LEVELS, _GGUF = 1, 2
_CHOOSE = ctypes.CFUNCTYPE(_NUMBER, _NUMBER, _NUMBER)
# Ends a draft before a token; below it, a token that is the last one.
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
    """The K/V rows that some layers read; addresses and steps in bytes."""

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


def address(array: NDArray[Any]) -> int:
    """Where the first element of a contiguous array lies."""
    return int(array.__array_interface__["data"][0])


@dataclass(frozen=True, kw_only=True)
class LevelMatrix:
    """A matrix [outputs, inputs] as MatMulNBits stores it: `levels` uint8 of `bits` each, `scales` float32 [outputs, inputs / block]."""

    levels: NDArray[np.uint8]
    scales: NDArray[np.float32]
    outputs: int
    inputs: int
    bits: int
    block: int

    def described(self) -> _Matrix:
        return _Matrix(_LEVELS, self.bits, self.block, self.outputs, self.inputs, address(self.levels), address(self.scales))


@dataclass(frozen=True, kw_only=True)
class GgufMatrix:
    """A matrix [outputs, inputs] as a GGUF file has it, in the ggml type of that number. Floats are read while drafts are made."""

    type: int
    data: NDArray[np.uint8]
    outputs: int
    inputs: int

    def described(self) -> _Matrix:
        return _Matrix(_GGUF, self.type, self.data.nbytes // max(1, self.outputs), self.outputs, self.inputs, address(self.data), None)


Matrix = LevelMatrix | GgufMatrix


@dataclass(frozen=True, kw_only=True)
class DraftLayer:
    """A layer: matrices of queries, output, gates, values and down; norms before attention, of queries, behind attention, before and
    behind the feed-forward; the factor of its output; which source of K/V rows it reads."""

    matrices: tuple[Matrix, ...]
    norms: tuple[NDArray[np.float32], ...]
    dim: int
    factor: float
    source: int


@dataclass(frozen=True, kw_only=True)
class SparseHeadWeights:
    """Centroids [C, hidden], whose tokens' rows lie together in the head's matrix; `order` int32 [C, K]: whose they are."""

    centroids: Matrix
    order: NDArray[np.int32]
    top: int


@dataclass(frozen=True, kw_only=True)
class DraftWeights:
    """A drafter: projections [hidden, 2 target] and [target, hidden], layers, head.

    `embedding` is the target's [vocabulary, target], times `factor`; rows of a GGUF type are expanded by ggml's own function `read`.
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
    """Whether the library is there, has a variant for this processor, and is of this build."""
    return variant() is not None and hasattr(load_library(), "edge_draft_new")


class NativeDraft:
    """A drafter in memory. `sources` name the K/V rows of the next call. `close` frees it; then no other method may be called."""

    def __init__(self, weights: DraftWeights, *, longest: int, threads: int = 1, name: str | None = None, library: Any = None) -> None:
        """`longest`: the most tokens of a draft; with `threads` above 1 a second one helps, and numbers stay the same.

        `name`: a variant, the chosen one if None; `library`: another build of the kernels.

        Raises ValueError, with a word of what, for weights that no kernel takes or that do not fit together.
        """
        self._library = cast("Any", library or load_library())
        self._library.edge_draft_new.restype = _POINTER
        self._library.edge_draft_run.restype = ctypes.c_char_p
        self._library.edge_draft_scores.restype = _NUMBER
        self._kept = weights
        self.sources = (KvSource * (1 + max(layer.source for layer in weights.layers)))()
        shape, reason = _described(weights, len(self.sources)), ctypes.c_char_p()
        shape.threads = threads
        pointer = self._library.edge_draft_new(name.encode() if name else None, ctypes.byref(shape), ctypes.byref(reason))
        if pointer is None:
            raise ValueError((reason.value or b"").decode())
        self._model: Any = _POINTER(pointer)
        self._tokens, self._probabilities = np.zeros(longest, np.int64), np.zeros(longest, np.float32)
        self._call = _Call(sources=ctypes.addressof(self.sources), tokens=address(self._tokens), probabilities=address(self._probabilities))
        self._reference = ctypes.byref(self._call)
        self._threshold, self._asked = 0.0, False  # as in `_call`
        self._rule = _Rule()
        self._rule_address = ctypes.addressof(self._rule)
        self._numbers: tuple[NDArray[np.float64], ...] = ()
        self._choose, self._likeliest = _CHOOSE(self._chosen), _CHOOSE()
        self._scores, self._candidates = self._views()
        self._sampler: DraftSampler | None = None
        self._should_continue: ShouldContinue | None = None
        self._rule_source: ShouldContinue | None = None  # what was asked last whether it is a rule, and the answer
        self._stop_rule: StopRule | None = None
        self._error: BaseException | None = None

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
        """Drafts behind the token `last` and its `hidden` row float32 [target], a view, on the rows that `sources` name.

        Without either of them a draft ends before a token that the drafter gives less than `min_probability`. Raises what they raise.
        """
        call = self._call
        call.token, call.steps, call.hidden = last, draft_length, address(hidden)
        threshold = min_probability if sampler is None and should_continue is None else 0.0
        if threshold != self._threshold:
            self._threshold = call.min_probability = threshold
        if should_continue is not self._rule_source:
            self._rule_source = should_continue
            self._stop_rule = should_continue if isinstance(should_continue, StopRule) else None
        rule = self._stop_rule if sampler is None else None
        call.rule = None if rule is None else self._handed_over(rule.numbers())
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

    def _handed_over(self, numbers: StopNumbers) -> int:
        """The address of a rule's numbers."""
        rule = self._rule
        if numbers.tables is not self._numbers:
            self._numbers = numbers.tables
            for name, table in zip(("bounds", "row_costs", "draft_costs", "accept", "transition", "further"), numbers.tables, strict=True):
                setattr(rule, name, address(table))
            rule.bins, rule.longest = len(numbers.tables[3]), len(numbers.tables[2]) - 1
        rule.rate, rule.any_prefix = numbers.rate, numbers.any_prefix
        return self._rule_address

    def _chosen(self, number: int, likeliest: int) -> int:
        """What DraftCall::choose returns. An error ends the draft: it cannot pass through C."""
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
        """Frees it. Harmless when done twice."""
        if self._model is not None:
            self._library.edge_draft_free(self._model)
            self._model = None


def _described(weights: DraftWeights, sources: int) -> _Shape:
    """The structure for C; arrays must stay where they are."""
    layers = (_Layer * len(weights.layers))()
    for to, layer in zip(layers, weights.layers, strict=True):
        to.matrices = (_Matrix * 5)(*(matrix.described() for matrix in layer.matrices))
        to.norms = (_POINTER * 5)(*map(address, layer.norms))
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
        norm=address(weights.norm),
        embedding=embedding.described(),
        factor=weights.factor,
    )
    shape._layers = layers  # kept until the call
    if sparse is not None:
        shape.centroids, shape.per_centroid = sparse.order.shape
        shape.top, shape.order, shape.centroid_rows = sparse.top, address(sparse.order), sparse.centroids.described()
    if weights.read is not None and isinstance(embedding, GgufMatrix):
        shape.read, shape.step = weights.read, embedding.data.nbytes // embedding.outputs
    return shape
