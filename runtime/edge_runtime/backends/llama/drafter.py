"""Gemma 4's MTP drafter for a target in llama.cpp: llama.cpp's own, an MTP context on the target's KV cache, or the kernels' drafter."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.kernels.draft import DraftLayer, DraftWeights, GgufMatrix, NativeDraft, SparseHeadWeights, can_draft
from edge_runtime.backends.kernels.ggml import CellWatch, is_switched_on
from edge_runtime.backends.llama.context import (
    MAX_SEQUENCES,
    Batch,
    LlamaModel,
    LlamaOptions,
    context_params,
    decode_error,
    floats,
    open_context,
)
from edge_runtime.backends.llama.loader import LlamaLibrary, declare, llama_library
from edge_runtime.backends.llama.target import LlamaSequence, LlamaTarget
from edge_runtime.bundle.gguf_gemma4 import DRAFTER, check_gguf, check_model, rows_read
from edge_runtime.bundle.gguf_header import TENSOR_TYPES, GgufHeader
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.interfaces import DraftRequest, DraftSampler, ShouldContinue

Row = NDArray[np.float32]
# A drafted token or None, the drafter's probability of its likeliest token, and the carry for the next step.
Step = tuple[int | None, float, Row]


class LlamaDrafter(LlamaModel):
    """llama.cpp's own drafter, with a dense output head, on the target's KV cache. Implements `interfaces.Drafter`.

    `draft` serves the target's first sequence. `draft_all` serves several sequences; one forward computes a draft step of all of them.
    """

    stepwise = True

    def __init__(self, path: Path, target: LlamaTarget, options: LlamaOptions) -> None:
        super().__init__(path, DRAFTER, options)
        self._target = target
        self._max_draft_length = options.max_draft_length
        try:
            self._open(path, options)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, options: LlamaOptions) -> None:
        api, target_context = self._api, self._target.shared._pointer
        self._check_fit(path)
        params = context_params(self._library, options, options.sequences)
        # The drafter never gets a prompt, and buffers for a prompt batch would be most of its memory.
        params.n_batch = params.n_ubatch = MAX_SEQUENCES
        params.ctx_type = api.LLAMA_CONTEXT_TYPE_MTP
        params.ctx_other = target_context
        self._pointer = open_context(self._library, self._model, params, path)
        if self._library.staging.llama_get_ctx_other(self._pointer) != target_context:
            raise BackendError(f"llama.cpp gave {path.name} a KV cache of its own; this build cannot run Gemma 4's drafter, update it")
        self._library.staging.llama_set_embeddings_nextn(self._pointer, True, True)
        self._batch = Batch(api, options.sequences, self._target.hidden_size, sequences=options.sequences)
        self._target.shared.drafters.append(self)

    def set_threads(self, threads: int) -> None:
        """Sets the threads of a draft step. Raises RequestError if the drafter is closed."""
        if self._pointer is None:
            raise RequestError("the drafter is closed; open the bundle again")
        self._api.llama_set_n_threads(self._pointer, threads, threads)

    def draft(
        self, last: int, draft_length: int, sampler: DraftSampler | None = None, should_continue: ShouldContinue | None = None
    ) -> list[int]:
        """Returns `draft_length` tokens after `last`, fewer where `sampler` or `should_continue` ends the draft.

        Returns no tokens if the target has no hidden row (see `LlamaSequence.rollback`).
        """
        return self.draft_all([DraftRequest(0, last, draft_length, sampler, should_continue)])[0]

    def draft_all(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Returns the drafts of each request; no two requests are for the same sequence.

        All steps of a draft use the position of `last` and write nothing to the cache (common/speculative.cpp, is_mem_shared).
        """
        if self._pointer is None:
            raise RequestError("the drafter is closed; open the bundle again")
        drafts: list[list[int]] = [[] for _ in requests]
        carries: dict[int, Row] = {}
        for i, request in enumerate(requests):
            check_length(request, self._max_draft_length)
            hidden = self._sequence(request).hidden_row
            if hidden is not None and request.draft_length > 0:
                self._target.vocabulary.check(request.last)
                carries[i] = hidden
        while carries:
            steps = [(requests[i], drafts[i][-1] if drafts[i] else requests[i].last, carries[i]) for i in carries]
            for i, (token, confidence, carry) in zip(list(carries), self._step(steps), strict=True):
                if token is not None:
                    drafts[i].append(token)
                carries[i] = carry
                if token is None or _is_last(requests[i], confidence, len(drafts[i])):
                    del carries[i]
        return drafts

    def _sequence(self, request: DraftRequest) -> LlamaSequence:
        return self._target.shared.sequences[request.sequence]

    def _step(self, steps: Sequence[tuple[DraftRequest, int, Row]]) -> list[Step]:
        """Computes one draft step of each sequence from its newest token and the carry of the previous step.

        Returns the likeliest or sampled token, the confidence if `should_continue` needs it, and the next carry: the drafter's hidden row.
        """
        self._batch.clear()
        for request, token, embedding in steps:
            self._batch.add_step(token, embedding, self._sequence(request).length, request.sequence)
        self._library.log.clear()
        code: int = self._api.llama_decode(self._pointer, self._batch.structure)
        if code != 0:
            raise decode_error(self._library, "drafter", code, len(steps))
        hidden = self._library.staging.llama_get_embeddings_nextn(self._pointer)
        following = floats(hidden, len(steps), self._target.hidden_size)  # views until the next forward
        logits = floats(self._api.llama_get_logits(self._pointer), len(steps), self._target.vocabulary.size)
        return [
            (
                request.sampler(row) if request.sampler else int(row.argmax()),
                top_probability(row) if request.should_continue else 0.0,
                carry,
            )
            for (request, _, _), row, carry in zip(steps, logits, following, strict=True)
        ]

    def _check_fit(self, path: Path) -> None:
        """Raises BackendError if the drafter belongs to another target: llama.cpp itself would abort the process."""
        self._compare("the model's hidden size", self._api.llama_model_n_embd_out(self._model), self._target.hidden_size, path)
        vocabulary: int = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        self._compare("vocabulary size", vocabulary, self._target.vocabulary.size, path)
        self._compare("K/V heads and widths of its layers", *rows_read(self.header, self._target.shared.header), path)

    @staticmethod
    def _compare(name: str, own: object, expected: object, path: Path) -> None:
        if own != expected:
            raise BackendError(f"{path.name} is not a drafter of this model: {name} {own} against {expected}; export the bundle again")


def check_length(request: DraftRequest, longest: int) -> None:
    """Raises RequestError for a longer draft than the pair was opened for."""
    if request.draft_length > longest:
        raise RequestError(f"a draft of {request.draft_length} tokens is longer than the {longest} this bundle was opened for")


def top_probability(logits: Row) -> float:
    """Returns the softmax probability of the largest of `logits` [n]."""
    return float(1 / np.exp(logits - logits.max()).sum())


def _is_last(request: DraftRequest, confidence: float, drafted: int) -> bool:
    """Whether a draft is over. `should_continue` is called for every drafted token, the last one too."""
    more = request.should_continue is None or request.should_continue(confidence)
    return not more or drafted == request.draft_length


# Tensors of a memory-mapped GGUF file. Nothing is copied, and pages that are never read take no memory.

# The types that a matrix may have: ggml can expand and multiply their rows on every processor.
_FLOATS, _SIMPLE = ("f32", "f16", "bf16"), ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "iq4_xs")
MATRIX_TYPES = (*_FLOATS, *_SIMPLE, "q2_K", "q3_K", "q4_K", "q5_K", "q6_K")


class _TypeTraits(ctypes.Structure):
    """The first fields of ggml_type_traits in ggml/include/ggml.h."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("block_size", ctypes.c_int64),
        ("block_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
    )


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {"ggml_get_type_traits": (ctypes.POINTER(_TypeTraits), [ctypes.c_int])}


@dataclass(frozen=True, kw_only=True)
class MappedTensor:
    """One tensor: its ggml type number, its shape in ggml's order (the length of a row first), and its bytes in the mapped file."""

    kind: int
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def row_reader(self, library: LlamaLibrary) -> int | None:
        """Returns the address of ggml's function that expands a row (ggml_to_float_t); None for float32."""
        address: int | None = declare(library.ggml, _SIGNATURES).ggml_get_type_traits(self.kind).contents.to_float
        return address


class MappedGguf:
    """A mapped file with its header. The file stays mapped as long as one of its tensors is referenced."""

    def __init__(self, path: Path) -> None:
        """Raises BackendError if the file cannot be read, is no GGUF, or is shorter than its header requires."""
        self.path, self.header = path, check_gguf(path)
        self._places = {info.name: info for info in self.header.tensors}
        try:
            self._mapped = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError) as error:  # OSError also without free address space; ValueError for an empty file
            why = getattr(error, "strerror", None) or error
            raise BackendError(f"{path} cannot be mapped ({why}); check the file, or free some memory") from error
        if len(self._mapped) < max((info.offset + info.bytes for info in self.header.tensors), default=0):
            raise BackendError(f"{path} was cut while it was opened; check the file")

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape without trailing dimensions of 1; empty if there is no tensor of that name."""
        return _stripped(self._places[name].shape) if name in self._places else ()

    def tensor(self, name: str, shape: tuple[int, ...], types: Sequence[str] | None = MATRIX_TYPES) -> MappedTensor:
        """Returns the tensor. Raises BackendError unless it has this shape and one of these types (None: any type)."""
        info = self._places.get(name)
        if info is None:
            raise BackendError(f"{self.path.name} has no tensor {name}; export the bundle again")
        if self.shape(name) != _stripped(shape):
            raise BackendError(
                f"{self.path.name}: {name} has the shape {list(self.shape(name))}, not {list(shape)}; export the bundle again"
            )
        if types is not None and (kind := TENSOR_TYPES[info.type].name) not in types:
            raise BackendError(f"{self.path.name}: {name} is {kind}, not {' or '.join(types)}; export the bundle again")
        return MappedTensor(kind=info.type, shape=self.shape(name), data=self._mapped[info.offset : info.offset + info.bytes])


def _stripped(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


# The file of a drafter's sparse head, which scores only the tokens of the best centroids (transformers, Gemma4AssistantMaskedEmbedder).
#
# Gemma 4 E2B has 2048 centroids and searches the best 32 of them: 4096 of 262144 rows.

FORMAT_KEY, TOP_KEY = "drafter_head.format", "drafter_head.top_centroids"
# Format 2 has more matrices, which are no longer read.
FORMATS = (2, 3)


@dataclass(frozen=True, kw_only=True)
class HeadWeights:
    """The contents of a head file: C centroids of K tokens each, for a drafter of width H.

    `rows` [C, K, H]: output rows of the type that the drafter's file has; `token_ordering` int32 [C, K]: the token of each row;
    `centroids` [C, H] float16; `top_centroids`: how many centroids are searched.
    """

    rows: MappedTensor
    token_ordering: NDArray[np.int32]
    centroids: MappedTensor
    top_centroids: int


def read_head(path: Path, *, hidden_size: int, vocabulary: int) -> HeadWeights:
    """Maps the file of a drafter's head; `hidden_size` is the drafter's.

    Raises BackendError if the file is damaged, of another format or for another pair, or if `token_ordering` is no permutation.
    """
    file = MappedGguf(path)
    if file.header.keys.get(FORMAT_KEY) not in FORMATS:
        raise BackendError(f"{path} is no head file of this version ({FORMAT_KEY} {FORMATS[-1]}); export the bundle again")
    clusters = file.shape("token_ordering")
    if len(clusters) != 2 or clusters[0] * clusters[1] != vocabulary:
        raise BackendError(f"{path}: token_ordering has the shape {list(clusters)}, not {vocabulary} tokens; export the bundle again")
    per_centroid, centroids = clusters
    top = file.header.keys.get(TOP_KEY, 0)
    if not isinstance(top, int) or not 1 <= top <= centroids:
        raise BackendError(f"{path}: top_centroids is {top}, not a number from 1 to {centroids}; export the bundle again")
    order = file.tensor("token_ordering", clusters, ("i32",)).data.view(np.int32).reshape(centroids, per_centroid)
    _check_ordering(path, order, vocabulary)
    return HeadWeights(
        rows=file.tensor("rows", (hidden_size, per_centroid, centroids)),
        token_ordering=order,
        centroids=file.tensor("centroids", (hidden_size, centroids), ("f16",)),
        top_centroids=top,
    )


def _check_ordering(path: Path, ordering: NDArray[np.int32], vocabulary: int) -> None:
    if ordering.min() < 0 or ordering.max() >= vocabulary or np.bincount(ordering.ravel(), minlength=vocabulary).max() > 1:
        raise BackendError(f"{path}: token_ordering does not name each of {vocabulary} tokens once; export the bundle again")


EMBEDDING = "token_embd.weight"
_BEFORE, _AFTER, _NORM, _TURNS = "nextn.pre_projection.weight", "nextn.post_projection.weight", "output_norm.weight", "rope_freqs.weight"
_MATRICES = ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_NORMS = ("attn_norm", "attn_q_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
_FACTOR = "layer_output_scale"
# llama.cpp stores quantized rows after a Hadamard rotation. This is its width for V (src/llama-kv-cache.cpp, build_input_k_rot and _v_rot).
_VALUE_TURN = 64


def kernels_draft() -> bool:
    """Whether the row kernels run in llama.cpp's graphs and can draft."""
    return can_draft() and llama_library().row_kernels is not None and is_switched_on()


class LlamaKernelDrafter:
    """The drafter in the row kernels, on the K/V rows of a target in llama.cpp. Implements `interfaces.Drafter`.

    It must know which cells of the KV cache the last token attends to. They are known after each forward in which the kernels compute
    attention. Otherwise there are no drafts: llama.cpp's own drafter cannot take over, because it opens only on an empty cache.
    """

    stepwise = True

    def __init__(self, path: Path, head: Path | None, target: LlamaTarget, target_path: Path) -> None:
        """`head` is the file of a sparse head; without it all tokens are scored.

        Raises ValueError if the kernels cannot compute this drafter, and BackendError if a file cannot be used.
        """
        library, shared, options = llama_library(), target.shared, target.shared.options
        self._target = target
        self._max_draft_length = options.max_draft_length
        header = check_model(path, DRAFTER)
        if not kernels_draft():
            raise ValueError("they do not run here")
        if len(set(map(str, rows_read(header, shared.header)))) != 1:
            raise ValueError("its rows")
        try:
            weights = _read(library, header, path, head, target, target_path, options)
            self._rotations = [_Rotation(header, path, sliding=sliding) for sliding in (True, False)]
        except KeyError as error:  # for which llama.cpp may have a default
            raise ValueError(f"it has no {error.args[0]}") from error
        self._draft: NativeDraft | None = NativeDraft(weights, longest=max(1, options.max_draft_length), threads=options.threads)
        self._tables = [self._draft.rotations(number, *rotation.tables) for number, rotation in enumerate(self._rotations)]
        if options.kv_type != "f16":
            self._turns = [_turns(rotation.dim) for rotation in self._rotations]
        else:
            self._turns = [(0, 0), (0, 0)]
        layers = library.api.llama_model_n_layer(shared._model)
        shared.watch = CellWatch((layers - 2, layers - 1), library.api.llama_n_ctx(shared._pointer))
        shared.drafters.append(self)

    def set_threads(self, threads: int) -> None:
        """Does nothing: the calling thread and one helper compute a draft."""

    def draft(
        self, last: int, draft_length: int, sampler: DraftSampler | None = None, should_continue: ShouldContinue | None = None
    ) -> list[int]:
        """See `LlamaDrafter.draft`."""
        return self.draft_all([DraftRequest(0, last, draft_length, sampler, should_continue)])[0]

    def draft_all(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Returns the drafts of each request; no two requests are for the same sequence."""
        if self._draft is None:
            raise RequestError("the drafter is closed; open the bundle again")
        for request in requests:
            check_length(request, self._max_draft_length)
        return [self._drafts(self._draft, request) for request in requests]

    def _drafts(self, draft: NativeDraft, request: DraftRequest) -> list[int]:
        sequence = self._target.shared.sequences[request.sequence]
        hidden = sequence.hidden_row
        if hidden is None or request.draft_length < 1:
            return []
        self._target.vocabulary.check(request.last)
        visible = sequence.visible_cells()
        if visible is None:
            return []
        for place, (rotation, turns) in enumerate(zip(self._rotations, self._turns, strict=True)):
            draft.sources[place] = visible.sources[place]
            source = draft.sources[place]
            rotation.turn_to(sequence.length)
            source.cosine, source.sine = self._tables[place]
            source.key_turn, source.value_turn = turns
        return draft.run(request.last, request.draft_length, hidden, request.sampler, request.should_continue)

    def close(self) -> None:
        """Frees the weights. Can be called twice."""
        if self._draft is not None:
            self._draft.close()
            self._draft = None
        if self._target.shared.watch is not None:
            self._target.shared.watch.close()
            self._target.shared.watch = None


class _Rotation:
    """The rotary embedding of one kind of layer: `tables` are the cosines and sines of a position."""

    def __init__(self, header: GgufHeader, path: Path, *, sliding: bool) -> None:
        """Raises ValueError if the model scales positions."""
        keys, prefix, ending = header.keys, header.architecture, "_swa" * sliding
        if keys.get(f"{prefix}.rope.scaling.type", "none") != "none":
            raise ValueError("its rotation")
        self.dim = int(keys[f"{prefix}.attention.key_length{ending}"])
        turned = int(keys.get(f"{prefix}.rope.dimension_count{ending}", self.dim))
        base = float(keys[f"{prefix}.rope.freq_base{ending}"])
        self._frequencies = np.zeros(self.dim // 2)
        self._frequencies[: turned // 2] = base ** (-np.arange(0, turned, 2) / turned)
        if not sliding:
            file = MappedGguf(path)
            if file.shape(_TURNS):
                self._frequencies /= file.tensor(_TURNS, (self.dim // 2,), ("f32",)).data.view(np.float32)[: len(self._frequencies)]
        self.tables = np.zeros(self.dim // 2, np.float32), np.zeros(self.dim // 2, np.float32)

    def turn_to(self, position: int) -> None:
        """Writes the cosines and sines [dim / 2] of a position into `tables`."""
        angles = self._frequencies * position
        self.tables[0][:], self.tables[1][:] = np.cos(angles), np.sin(angles)


def _turns(dim: int) -> tuple[int, int]:
    """Returns the widths of llama.cpp's Hadamard rotations of K and of V, for heads of this width."""
    if dim % _VALUE_TURN:
        raise ValueError("the width of its heads")
    return dim & -dim, _VALUE_TURN


def _read(
    library: LlamaLibrary, header: GgufHeader, path: Path, head: Path | None, target: LlamaTarget, target_path: Path, options: LlamaOptions
) -> DraftWeights:
    """Maps the drafter's weights in `path`, those of its head, and the target's embedding table."""
    keys, prefix = header.keys, header.architecture
    pattern = keys[f"{prefix}.attention.sliding_window_pattern"]
    blocks = [[f"blk.{n}.{name}.weight" for name in (*_MATRICES, *_NORMS, _FACTOR)] for n in range(len(pattern))]
    file = MappedGguf(path)
    hidden, vocabulary = target.hidden_size, target.vocabulary.size
    width = int(keys[f"{prefix}.embedding_length"])
    before = _matrix(file, _BEFORE)
    if (before.outputs, before.inputs) != (width, 2 * hidden):
        raise ValueError("its width")
    layers = []
    for sliding, names in zip(pattern, blocks, strict=True):
        dim = int(keys[f"{prefix}.attention.key_length{'_swa' * sliding}"])
        sizes = [width, dim, width, width, width]
        layers.append(
            DraftLayer(
                matrices=tuple(_matrix(file, name) for name in names[: len(_MATRICES)]),
                norms=tuple(_vector(file, name, size) for name, size in zip(names[len(_MATRICES) : -1], sizes, strict=True)),
                dim=dim,
                factor=float(_vector(file, names[-1], 1)[0]),
                source=0 if sliding else 1,
            )
        )
    sparse, rows = None, _matrix(file, EMBEDDING)
    if head is not None:
        parts = read_head(head, hidden_size=width, vocabulary=vocabulary)
        rows, sparse = _sparse(parts, options.max_candidates, width)
    embedding = MappedGguf(target_path).tensor(EMBEDDING, (hidden, vocabulary))
    return DraftWeights(
        heads=int(keys[f"{prefix}.attention.head_count"]),
        epsilon=float(keys[f"{prefix}.attention.layer_norm_rms_epsilon"]),
        before=before,
        after=_matrix(file, _AFTER),
        layers=tuple(layers),
        norm=_vector(file, _NORM, width),
        rows=rows,
        sparse=sparse,
        embedding=_described(embedding),
        factor=sqrt(hidden),
        read=embedding.row_reader(library),
    )


def _sparse(head: HeadWeights, max_candidates: int | None, width: int) -> tuple[GgufMatrix, SparseHeadWeights]:
    centroids, each = head.token_ordering.shape
    top = head.top_centroids if max_candidates is None else min(head.top_centroids, max_candidates // each)
    if top < 1:
        raise RequestError(
            f"max_candidates is {max_candidates}, but the head's smallest choice is one cluster of {each} tokens; ask for more"
        )
    rows = GgufMatrix(type=head.rows.kind, data=head.rows.data, outputs=centroids * each, inputs=width)
    return rows, SparseHeadWeights(centroids=_described(head.centroids), order=np.array(head.token_ordering), top=top)


def _matrix(file: MappedGguf, name: str) -> GgufMatrix:
    if len(shape := file.shape(name)) != 2:
        raise ValueError(name)
    return _described(file.tensor(name, shape, None))


def _described(tensor: MappedTensor) -> GgufMatrix:
    inputs, outputs = tensor.shape
    return GgufMatrix(type=tensor.kind, data=tensor.data, outputs=outputs, inputs=inputs)


def _vector(file: MappedGguf, name: str, size: int) -> NDArray[np.float32]:
    values: NDArray[np.float32] = file.tensor(name, (size,), ("f32",)).data.view(np.float32).copy()
    return values
