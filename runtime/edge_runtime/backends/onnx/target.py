"""The target on onnxruntime: its tokenizer, the graph of its layers, the graph of its head, and the K/V rows it shares with the drafter."""

from __future__ import annotations

import contextlib
import re
import struct
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edge_devices.errors import first_line
from edge_devices.machine.device_package import how_to_get
from edge_runtime.backends.committed_tokens import CommittedText, TokenRange, Tokens, well_formed
from edge_runtime.backends.kernels.packed_cache import PackedCache, PackedSource
from edge_runtime.backends.onnx.devices import PROCESSOR, Call, Graph, OrtDevice, SessionOptions, value_over, without_flash
from edge_runtime.backends.onnx.kv_cache import FULL, MAX_ROWS, SLIDING, KeyValueCache, Rotations, StaticRows
from edge_runtime.bundle.bundle import Bundle
from edge_runtime.bundle.manifest import CacheLayout, OnnxGraphs, StaticGraphs
from edge_runtime.bundle.onnx_graph import check_onnx
from edge_runtime.bundle.tokenizer_json import check_parts, read_tokenizer
from edge_runtime.errors import BackendError, BundleError, EdgeRuntimeError, RequestError
from edge_runtime.interfaces import KvRows, Logits

# The vocabulary, from the bundle's tokenizer.json. No other module imports tokenizers.

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
# Tokens in Gemma 4's brackets are control tokens of a conversation, although they are visible in output.
_BRACKETED = re.compile(r"<\|[^<>]+>|<[^<>]+\|>")
_NO_TOKEN = -1


@contextlib.contextmanager
def _panics_as(kind: type[EdgeRuntimeError], what: str) -> Iterator[None]:
    """Turns errors of the library into `kind`, except our own. A panic of its Rust code is a BaseException, not an Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, EdgeRuntimeError):
        raise
    except BaseException as error:
        raise kind(f"{what} ({first_line(error)}); copy the bundle again") from error


class TokenizerVocabulary(TokenRange):
    """A Gemma tokenizer: BPE with byte fallback. Implements `interfaces.Vocabulary`; `size` is that of the model's logits."""

    def __init__(self, path: Path, graphs: OnnxGraphs, size: int) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise BackendError(f"tokenizers is not installed ({error}); {how_to_get('onnx')}") from error
        with _panics_as(BundleError, f"{path} is no tokenizer"):
            self._tokenizer: Any = Tokenizer.from_buffer(read_tokenizer(path))
            # A checkpoint's file may ask for truncation or padding, which would cut off prompts or fill them up.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            check_parts(self._tokenizer, path)
            _keep_no_words(self._tokenizer.model)
        # `encode` finds special tokens by itself. The tokenizer would use a shared state for it, so short prompts would wait for long ones.
        self._tokenizer.encode_special_tokens = True
        self.size = size
        self.kept = {}
        self.eog_tokens = frozenset(graphs.eog_tokens)
        self.bos = _NO_TOKEN if graphs.bos_token is None else graphs.bos_token
        self.eos = _NO_TOKEN if graphs.eos_token is None else graphs.eos_token
        self._control = frozenset(graphs.control_tokens)
        added = self._tokenizer.get_added_tokens_decoder().items()
        self._bracketed = {token.content: index for index, token in added if _BRACKETED.fullmatch(token.content)}
        # Visible marks such as <|channel> are recognized in any text, other special tokens only if `parse_special` is set.
        self._marks = {token.content: index for index, token in added if token.special and index not in self._control}
        self._special = {token.content: index for index, token in added if token.special}
        self._mark, self._any_special = _pattern(self._marks), _pattern(self._special)

    @cached_property
    def control_tokens(self) -> Mapping[str, int]:
        """The texts of the control tokens, with their ids: <|turn> and the like, and visible marks in output such as <|channel>."""
        listed = [(self._tokenizer.id_to_token(token), token) for token in sorted(self._control) if token < self.size]
        return {text: token for text, token in listed if text is not None} | self._bracketed

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        """Returns the token ids of `text`; a lone surrogate becomes U+FFFD.

        `parse_special` turns control tokens that are written out in the text, such as <|turn>, into those tokens; never set it for
        untrusted text.
        """
        clean = well_formed(text)
        known, pattern = (self._special, self._any_special) if parse_special else (self._marks, self._mark)
        parts = [part for part in pattern.split(clean) if part] if pattern else [clean]
        tokens = [token for part in parts for token in ([known[part]] if part in known else self._plain(part))]
        return [self.bos, *tokens] if add_bos and self.bos >= 0 else tokens

    def _plain(self, part: str) -> list[int]:
        with _panics_as(BackendError, "the tokenizer failed"):
            tokens: list[int] = self._tokenizer.encode(part, add_special_tokens=False).ids
        return tokens

    def _bytes_of(self, token: int, *, special: bool) -> bytes:
        text: str | None = self._tokenizer.id_to_token(token)
        if text is None or (token in self._control and not special):
            return b""
        byte = _BYTE.fullmatch(text)
        return bytes([int(byte.group(1), 16)]) if byte else text.replace(_SPACE, " ").encode("utf-8")


def _pattern(tokens: Collection[str]) -> re.Pattern[str] | None:
    """Returns a pattern that splits a text at these tokens and prefers longer ones; None without tokens."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None


def _keep_no_words(model: Any) -> None:
    """Turns off a BPE model's cache of 10,000 words. Gemma's tokenizer does not split a text, so it would keep whole prompts, 40 MB."""
    resize = getattr(model, "_resize_cache", None)  # missing in some versions
    if resize is not None:
        resize(0)


# The most tokens per forward of a prefill, and the most attention scores (tokens times context) per head, which are float32.
PREFILL_ROWS, PREFILL_SCORES = 256, 1 << 18
# The target's input that says how many rows are unread: for these it computes nothing after the last K and V.
SKIPPED_ROWS = "skipped_rows"


@dataclass(frozen=True, kw_only=True)
class OrtOptions:
    """How to open a pair. `context` is in tokens."""

    context: int
    threads: int
    device: OrtDevice = PROCESSOR


@dataclass(frozen=True, kw_only=True)
class StaticParts:
    """The additional files of a pair of graphs with fixed shapes: graphs for a prefill and for one row, and NumPy files of embeddings."""

    facts: StaticGraphs
    prefill: Path
    row: Path
    embedding: Path
    per_layer_embedding: Path | None


@dataclass(frozen=True, kw_only=True)
class PairFiles:
    """The files of a pair, and the facts from the manifest that are needed to open them. External data are in the graphs' folder.

    With `static`, the shapes are fixed: `target` is the graph for a verify, and there is no `target_head`.
    """

    target: Path
    target_head: Path | None
    drafter: Path | None
    tokenizer: Path
    layout: CacheLayout
    graphs: OnnxGraphs
    hidden_size: int
    vocab_size: int
    static: StaticParts | None = None
    # The sources of packed weights: all graphs of the bundle and their data, since a graph may read any of these files.
    sources: tuple[PackedSource, ...] = ()


class GraphTarget(CommittedText):
    """Base class of targets on onnxruntime. Implements `interfaces.Target`. Close it, or use it as a context manager."""

    def __init__(self, files: PairFiles, context: int, cache: KeyValueCache | StaticRows, *, chunk: int, longest_context: int) -> None:
        """`chunk`: the most tokens per forward of a prefill; `longest_context`: the longest context that the graphs support."""
        if context > longest_context:
            raise RequestError(f"context {context} is beyond the {longest_context} tokens of {files.target.name}; ask for at most that")
        super().__init__(context, TokenizerVocabulary(files.tokenizer, files.graphs, files.vocab_size), files.hidden_size)
        self.rewind_slack = files.layout.rewind_slack
        self.max_rows = MAX_ROWS
        self.hidden_rows = np.zeros((1, max(chunk, MAX_ROWS), files.hidden_size), np.float32)
        self._kv_rows, self._chunk = cache, chunk
        self.row_bytes, self.sliding_rows = cache.row_bytes, cache.sliding_rows
        self.kv_type = "-".join(sorted({buffer.dtype for buffer in files.layout.buffers}))
        self._drafts = files.drafter is not None
        self._logits = np.zeros((1, MAX_ROWS, files.vocab_size), np.float32)
        # By number of rows, views of a verify's hidden rows and logits.
        self._results_by_rows = [(self.hidden_rows[0, :rows], self._logits[0, :rows]) for rows in range(MAX_ROWS + 1)]
        self._graphs: list[Graph] = []
        self.closers: list[Any] = []

    @abstractmethod
    def _forward(self, ids: Tokens, soft: NDArray[np.float32] | None, rows_read: int) -> None:
        """Appends tokens, or soft rows, and writes the hidden rows of the last `rows_read` tokens to the beginning of `hidden_rows`.

        In a prefill, `rows_read` is 0 or 1.
        """

    @abstractmethod
    def _verify(self, tokens: Sequence[int]) -> None:
        """Appends tokens and writes their hidden rows and logits to the beginnings of `hidden_rows` and `_logits`."""

    def prefill(self, tokens: Sequence[int], *, rows_read: int = 1) -> None:
        """Appends tokens, if any, in chunks; computes no logits.

        Raises RequestError if they do not fit the context or the vocabulary, BackendError if onnxruntime fails; then nothing is appended.
        """
        if tokens:
            ids = self.checked(tokens)
            read = rows_read if self._drafts else 0
            with self._appending():
                self._in_chunks(ids, None, read)
            self.take_hidden(self.hidden_rows[0, :read])

    def prefill_rows(self, ids: Sequence[int], rows: NDArray[np.float32], *, whole: bool = False) -> None:
        """Appends the soft rows [n, hidden size] of an image or sound; negative `ids` stand for them. Raises as `prefill` does."""
        if whole:
            raise RequestError("the graphs of this bundle let tokens attend to earlier ones only; use llama.cpp for its images")
        values = self.checked_soft(ids, rows)
        with self._appending():
            self._in_chunks(values, rows, 0)

    def verify(self, tokens: Sequence[int]) -> Logits:
        """One forward over at most `max_rows` tokens; returns a view of the float32 logits [len(tokens), vocabulary].

        The view is valid until the next verify. Raises as `prefill` does.
        """
        self.check(tokens)
        rows, start = len(tokens), self.length
        self.check_rows(rows, self.max_rows)
        self.forget_hidden()
        try:
            self._verify(tuple(tokens))
        except BaseException:
            self.length = start
            raise
        hidden, logits = self._results_by_rows[rows]
        self.take_hidden(hidden)
        return logits

    @contextmanager
    def _appending(self) -> Iterator[None]:
        """Makes several forwards atomic: after an error, none of their tokens is appended."""
        start = self.length
        self.forget_hidden()
        try:
            yield
        except BaseException:
            self.length = start
            raise

    def _in_chunks(self, ids: NDArray[np.int64], rows: NDArray[np.float32] | None, rows_read: int) -> None:
        """Runs a prefill in chunks. The hidden rows of its last `rows_read` tokens will be read."""
        first = 0
        while first < len(ids):
            piece = slice(first, first + self._chunk_now())
            self._forward(ids[piece], None if rows is None else rows[piece], rows_read if piece.stop >= len(ids) else 0)
            first = piece.stop

    def _chunk_now(self) -> int:
        """Returns the most tokens for the next forward of a prefill."""
        return self._chunk

    def rollback(self, length: int) -> None:
        """Removes all rows from `length` on. The drafter continues from the hidden row of the last kept token.

        Only the newest forward has hidden rows. After a rollback to an earlier one, drafts are empty until the next verify or prefill.
        Raises RequestError if the sliding cache no longer holds the rows that a forward at `length` would attend to; then nothing has
        changed. Within `rewind_slack` rows of the greatest length so far, that never happens.
        """
        self.check_rollback(length)
        self.length = length
        if length == 0:
            self._kv_rows.restart()

    def state(self, first: int = 0) -> KvRows:
        """Returns the K/V rows from position `first` on; for the sliding layers, those of them that the cache still holds."""
        self.require_open()
        return self._kv_rows.rows_from(first, self.length)

    def restore(self, tokens: Sequence[int], rows: KvRows) -> None:
        """Replaces the contents of the cache by the saved `rows` of `tokens`. Drafting is unavailable until the next forward.

        Raises RequestError if the rows do not fit; then nothing has changed.
        """
        self.check_state(tokens, rows)
        self.forget_hidden()
        self.length = 0
        self._kv_rows.put_rows(rows)
        self.append(np.asarray(tokens, np.int64))

    @property
    @abstractmethod
    def skips_unread_rows(self) -> bool:
        """Whether a prefill computes only K and V of rows that are not read. Graphs of older exports compute all rows in full."""

    @property
    def row_kernels(self) -> bool:
        """Whether the project's own kernels compute the products in its layers."""
        return any(graph.row_kernels for graph in self._graphs)

    @property
    def lacks_kernels(self) -> bool:
        """Whether one of its graphs comes from an older export, which names no kernels."""
        return any(graph.lacks_kernels for graph in self._graphs)

    @property
    def rollback_floor(self) -> int:
        """The smallest length above 0 that `rollback` accepts now."""
        return self._kv_rows.rollback_floor

    def assignments(self) -> dict[str, dict[str, dict[str, int]]]:
        """Returns, for each graph, how many nodes of each operator each execution provider runs."""
        return {graph.name: graph.assignments() for graph in self._graphs}

    def close(self) -> None:
        """Frees the sessions. Can be called twice."""
        while self.closers:
            self.closers.pop().close()
        self._graphs.clear()
        self.forget_hidden()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def require_open(self) -> None:
        """Raises RequestError if the target is closed."""
        if not self._graphs:
            raise RequestError("the model is closed; open the bundle again")


class OrtTarget(GraphTarget):
    """A target whose graphs have dynamic shapes."""

    def __init__(self, files: PairFiles, context: int, session: SessionOptions, packed: PackedCache | None = None) -> None:
        self.cache = KeyValueCache(files.layout, context)
        chunk = min(PREFILL_ROWS, self.cache.chunk)
        # A thread packs the weights while this one reads the tokenizer, which takes most of a second for 262,144 tokens.
        with without_flash(), ThreadPoolExecutor(1) as beside:
            opening = beside.submit(self._open_graphs, files, session, packed)
            super().__init__(files, context, self.cache, chunk=chunk, longest_context=files.graphs.context)
            self._graphs = opening.result()
        graph = self._graphs[0]
        check_inputs(graph, {name: self.cache.array(name).shape for name in self.cache.names}, files.target)
        # One more position than the context, because a drafter uses the position after the text.
        halved = any(buffer.dtype == "f16" for buffer in files.layout.buffers)
        self.rotations = Rotations(files.graphs.rotations, context + 1, halved=halved)
        self._skips_unread_rows = SKIPPED_ROWS in graph.inputs
        self._forwards: dict[tuple[int, int, bool], Forward] = {}
        self._heads: dict[int, Call] = {}
        # The CPU's operators accept tensors with 0 rows; those of other devices were not tried.
        self._fewest_rows = 0 if session.device.is_cpu else 1

    def _open_graphs(self, files: PairFiles, session: SessionOptions, packed: PackedCache | None) -> list[Graph]:
        """Opens the graphs of the layers and of the head, with weights from the packed cache if there is one."""
        assert files.target_head is not None  # only pairs with fixed shapes have none
        with contextlib.nullcontext() if packed is None else packed.loading(*files.sources):
            return [self._open_layers(files, session), Graph(files.target_head, session)]

    def _open_layers(self, files: PairFiles, session: SessionOptions) -> Graph:
        """Opens the graph of the layers, and checks that its outputs are all K/V rows of the manifest's buffers."""
        graph = Graph(files.target, session)
        new = {name.removeprefix("new_") for name in graph.outputs if name.startswith("new_")}
        if set(buffer_outputs(graph).values()) != set(self.cache.values) or new != self.cache.read_by_rows.keys():
            raise BundleError(f"{files.target} does not give the rows that the manifest's buffers hold; export the bundle again")
        return graph

    @property
    def skips_unread_rows(self) -> bool:
        return self._skips_unread_rows

    def close(self) -> None:
        self._forwards.clear()
        self._heads.clear()
        super().close()

    def _chunk_now(self) -> int:
        """Limits the memory of a full layer's attention scores: rows times context for each head."""
        return max(MAX_ROWS, min(self._chunk, PREFILL_SCORES // (self.length + self._chunk)))

    def _forward(self, ids: Tokens, soft: NDArray[np.float32] | None, rows_read: int) -> None:
        rows, rows_read, start = len(ids), max(rows_read, self._fewest_rows), self.length
        key = rows, rows_read, soft is not None
        forward = self._forwards.get(key)
        if forward is None:
            forward = Forward(self._graphs[0], self, rows, rows_read, soft=soft is not None)
            if rows <= MAX_ROWS or rows == self._chunk:
                self._forwards[key] = forward
        self.cache.make_room(start, rows)
        # Done before the run, because right after it the CPU's caches are cold and everything takes longer.
        self.append(ids)
        forward.run(ids, start, soft)
        if rows_read < rows and not self.skips_unread_rows:
            self.hidden_rows[0, :rows_read] = self.hidden_rows[0, rows - rows_read : rows]

    def _verify(self, tokens: Sequence[int]) -> None:
        rows = len(tokens)
        if (head := self._heads.get(rows)) is None:
            hidden, logits = value_over(self.hidden_rows[:, :rows]), value_over(self._logits[:, :rows])
            head = self._heads[rows] = self._graphs[1].bind({"hidden": hidden}, {"logits": logits})
        self._forward(tokens, None, rows)
        head.run()


class Forward:
    """A forward of a fixed number of tokens, or of soft rows, whose arrays are bound once.

    It gives the hidden rows of the last `rows_read` tokens, or of all if the graph cannot skip unread rows.
    """

    def __init__(self, graph: Graph, target: OrtTarget, rows: int, rows_read: int, *, soft: bool) -> None:
        if soft and "soft_rows" not in graph.inputs:
            raise RequestError("the model's graph takes text only; export the bundle again with --media f16")
        # Inputs for images and sound; a graph for text only has neither.
        self._soft, self._is_soft = np.zeros((1, rows if soft else 1, target.hidden_size), np.float32), np.full((1, 1, 1), soft)
        self._rows = rows
        # Token ids and positions in one array, so that one call of struct.pack_into writes both.
        numbers = np.zeros((2, rows), np.int64)
        self._numbers, self._layout = numbers.data, struct.Struct(f"={2 * rows}q")
        self._cache, buffers = target.cache, target.cache.values
        inputs = {"input_ids": value_over(numbers[:1]), "position_ids": value_over(numbers[1:]), **shared_inputs(target), **buffers}
        inputs |= {"soft_rows": value_over(self._soft), "is_soft": value_over(self._is_soft)}
        written = {name: buffers[buffer] for name, buffer in buffer_outputs(graph).items()}
        given = rows_read if target.skips_unread_rows else rows
        self._skipped = np.array([rows - given], np.int64)
        inputs[SKIPPED_ROWS] = value_over(self._skipped)
        self._call = graph.bind(
            {name: value for name, value in inputs.items() if name in graph.inputs},
            {"hidden": value_over(target.hidden_rows[:, :given]) if given else None, **written},
        )

    def run(self, ids: Tokens, start: int, soft: NDArray[np.float32] | None = None) -> None:
        if soft is not None:
            self._soft[0], ids = soft, (0,) * self._rows
        self._cache.place_rows(self._call, start, self._rows)
        self._layout.pack_into(self._numbers, 0, *ids, *range(start, start + self._rows))
        self._call.run()


def shared_inputs(target: OrtTarget) -> dict[str, Any]:
    """Returns the inputs that the attention of both target and drafter reads: rotations and row counts."""
    counts, values = target.cache.counts, dict(target.rotations.values)
    for kind in (FULL, SLIDING):
        values |= {f"last_row_{kind}": counts[kind].last, f"rows_{kind}": counts[kind].rows}
    return values


def buffer_outputs(graph: Graph) -> dict[str, str]:
    """Returns the graph's outputs that are K/V buffers, each with the buffer's name.

    Layers that only read another layer's buffer may have an output for it too, with a suffix.
    """
    return {name: name.removeprefix("present_").split("@")[0] for name in graph.outputs if name.startswith("present_")}


def pair_of(bundle: Bundle, *, drafter: bool) -> PairFiles:
    """Returns the ONNX files of a bundle, with or without the drafter's. Raises BundleError if they are missing or not safe to open."""
    manifest = bundle.manifest
    if manifest.onnx is None or not bundle.has("target", "onnx"):
        raise BundleError(f"{bundle.folder}: the bundle has no ONNX model; export it again with --format onnx or both")
    for entry in manifest.files:
        if entry.format == "onnx":
            check_onnx(bundle.folder / entry.path, {file.path for file in manifest.files})
    static = None
    if manifest.static is not None:
        per_layer = manifest.static.per_layer_scale is not None
        static = StaticParts(
            facts=manifest.static,
            prefill=bundle.path("target_prefill", "onnx"),
            row=bundle.path("target_row", "onnx"),
            embedding=bundle.path("embedding", "npy"),
            per_layer_embedding=bundle.path("per_layer_embedding", "npy") if per_layer else None,
        )
    return PairFiles(
        target=bundle.path("target", "onnx"),
        target_head=None if static else bundle.path("target_head", "onnx"),
        drafter=bundle.path("drafter", "onnx") if drafter else None,
        tokenizer=bundle.path("tokenizer"),
        layout=manifest.cache_layout,
        graphs=manifest.onnx,
        hidden_size=manifest.architecture.hidden_size,
        vocab_size=manifest.architecture.vocab_size,
        static=static,
        sources=tuple(
            PackedSource(path=bundle.folder / entry.path, sha256=entry.sha256)
            for entry in manifest.files
            if entry.format in ("onnx", "onnx_data")
        ),
    )


def check_inputs(graph: Graph, shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Raises BundleError if the graph expects other shapes; a size that it leaves open always fits."""
    for name, declared in shapes.items():
        shape = graph.inputs.get(name, ())
        if len(shape) != len(declared) or any(type(size) is int and size != own for size, own in zip(shape, declared, strict=False)):
            raise BundleError(
                f"{path}: the manifest's input {name!r} is {list(declared)}, the graph's {list(shape)}; export the bundle again"
            )
