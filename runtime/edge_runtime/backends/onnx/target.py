"""The target on onnxruntime: its tokenizer, a graph of its layers, a graph of its head, and the K/V rows they and the drafter share."""

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

# Text to token ids and back, with the bundle's tokenizer.json. The only module that imports tokenizers.

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
# Marks in Gemma 4's brackets mean something in a conversation, though they are visible in output.
_BRACKETED = re.compile(r"<\|[^<>]+>|<[^<>]+\|>")
_NO_TOKEN = -1


@contextlib.contextmanager
def _panics_as(kind: type[EdgeRuntimeError], what: str) -> Iterator[None]:
    """Turns errors of the library into `kind`, but not our own. A panic of its Rust code is a BaseException, not an Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, EdgeRuntimeError):
        raise
    except BaseException as error:
        raise kind(f"{what} ({first_line(error)}); copy the bundle again") from error


class TokenizerVocabulary(TokenRange):
    """A Gemma tokenizer: BPE with byte fallback. Implements `interfaces.Vocabulary`; `size` is the model's, `eog_tokens` end a text."""

    def __init__(self, path: Path, graphs: OnnxGraphs, size: int) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise BackendError(f"tokenizers is not installed ({error}); {how_to_get('onnx')}") from error
        with _panics_as(BundleError, f"{path} is no tokenizer"):
            self._tokenizer: Any = Tokenizer.from_buffer(read_tokenizer(path))
            # A checkpoint's file may say both: prompts would be cut off, or filled up to any length.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            check_parts(self._tokenizer, path)
            _keep_no_words(self._tokenizer.model)
        # Special tokens are found here: the tokenizer takes them by a state of its own, for which a short prompt would wait for a long one.
        self._tokenizer.encode_special_tokens = True
        self.size = size
        self.kept = {}
        self.eog_tokens = frozenset(graphs.eog_tokens)
        self.bos = _NO_TOKEN if graphs.bos_token is None else graphs.bos_token
        self.eos = _NO_TOKEN if graphs.eos_token is None else graphs.eos_token
        self._control = frozenset(graphs.control_tokens)
        added = self._tokenizer.get_added_tokens_decoder().items()
        self._bracketed = {token.content: index for index, token in added if _BRACKETED.fullmatch(token.content)}
        # Marks such as <|channel> are found in any text; the tokenizer itself tells no difference between them and control tokens.
        self._marks = {token.content: index for index, token in added if token.special and index not in self._control}
        self._special = {token.content: index for index, token in added if token.special}
        self._mark, self._any_special = _pattern(self._marks), _pattern(self._special)

    @cached_property
    def control_tokens(self) -> Mapping[str, int]:
        """Text -> id of the control tokens: of <|turn> and its like, and of what is visible in output but no text, as <|channel>."""
        listed = [(self._tokenizer.id_to_token(token), token) for token in sorted(self._control) if token < self.size]
        return {text: token for text, token in listed if text is not None} | self._bracketed

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        """Returns the token ids of `text`; a surrogate that is no half of a pair becomes U+FFFD.

        `parse_special` lets control tokens such as <|turn> in the text become those tokens; leave it off for foreign text.
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
    """Returns what splits a text at tokens, the longest of those that begin at a place; None without tokens."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None


def _keep_no_words(model: Any) -> None:
    """Turns off a BPE model's cache of 10,000 words: Gemma's tokenizer splits no text, so its words are whole prompts, 40 MB of them."""
    resize = getattr(model, "_resize_cache", None)  # not in every version
    if resize is not None:
        resize(0)


# Tokens per forward of a prefill, and how many times the context they may be: a float32 for each head.
PREFILL_ROWS, PREFILL_SCORES = 256, 1 << 18
# The target's input with the number of rows that end behind the last K and V.
SKIPPED_ROWS = "skipped_rows"


@dataclass(frozen=True, kw_only=True)
class OrtOptions:
    """How a pair is opened. `context` is in tokens."""

    context: int
    threads: int
    device: OrtDevice = PROCESSOR


@dataclass(frozen=True, kw_only=True)
class StaticParts:
    """What a pair of graphs of fixed shapes has besides: graphs of a prefill's rows and of one row, and the embeddings' NumPy files."""

    facts: StaticGraphs
    prefill: Path
    row: Path
    embedding: Path
    per_layer_embedding: Path | None


@dataclass(frozen=True, kw_only=True)
class PairFiles:
    """The files of a pair and what must be known of them; external data lies beside the graphs.

    With `static` the shapes are fixed: `target` is the graph of a verify, and there is no `target_head`.
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
    # What the weights are packed from: all of the bundle's graphs and their data, as a graph may read any of it.
    sources: tuple[PackedSource, ...] = ()


class GraphTarget(CommittedText):
    """What targets have in common, whatever their graphs. Implements `interfaces.Target`. Close it, or use it as a context manager."""

    def __init__(self, files: PairFiles, context: int, cache: KeyValueCache | StaticRows, *, chunk: int, longest_context: int) -> None:
        """`chunk`: the most tokens of a forward of a prefill; `longest_context`: the longest context that the graphs were made for."""
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
        # What a verify of so many rows gives.
        self._results_by_rows = [(self.hidden_rows[0, :rows], self._logits[0, :rows]) for rows in range(MAX_ROWS + 1)]
        self._graphs: list[Graph] = []
        self.closers: list[Any] = []

    @abstractmethod
    def _forward(self, ids: Tokens, soft: NDArray[np.float32] | None, rows_read: int) -> None:
        """Appends tokens, or soft rows, and puts the hidden rows of the last `rows_read` into the first of `hidden_rows`.

        Of a prefill that is at most one.
        """

    @abstractmethod
    def _verify(self, tokens: Sequence[int]) -> None:
        """As `_forward`, with their logits into the first of `_logits`."""

    def prefill(self, tokens: Sequence[int], *, rows_read: int = 1) -> None:
        """Appends tokens, if any, in chunks; no logits are computed.

        Raises RequestError if they do not fit the context or the vocabulary, BackendError if onnxruntime fails; then nothing was appended.
        """
        if tokens:
            ids = self.checked(tokens)
            read = rows_read if self._drafts else 0
            with self._appending():
                self._in_chunks(ids, None, read)
            self.take_hidden(self.hidden_rows[0, :read])

    def prefill_rows(self, ids: Sequence[int], rows: NDArray[np.float32], *, whole: bool = False) -> None:
        """Appends the soft rows [n, hidden size] of an image or sound, which negative `ids` stand for. Raises as `prefill` does."""
        if whole:
            raise RequestError("the graphs of this bundle let tokens attend to earlier ones only; use llama.cpp for its images")
        values = self.checked_soft(ids, rows)
        with self._appending():
            self._in_chunks(values, rows, 0)

    def verify(self, tokens: Sequence[int]) -> Logits:
        """One verify of at most `max_rows` tokens; returns a view of the float32 logits [len(tokens), vocabulary].

        The next verify overwrites it. Raises as `prefill` does.
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
        """Appends all that is appended in it, or nothing."""
        start = self.length
        self.forget_hidden()
        try:
            yield
        except BaseException:
            self.length = start
            raise

    def _in_chunks(self, ids: NDArray[np.int64], rows: NDArray[np.float32] | None, rows_read: int) -> None:
        """Runs a prefill whose last `rows_read` hidden rows are read."""
        first = 0
        while first < len(ids):
            piece = slice(first, first + self._chunk_now())
            self._forward(ids[piece], None if rows is None else rows[piece], rows_read if piece.stop >= len(ids) else 0)
            first = piece.stop

    def _chunk_now(self) -> int:
        """Tokens of the next forward of a prefill."""
        return self._chunk

    def rollback(self, length: int) -> None:
        """Forgets all rows from `length` on. The drafter goes on from the hidden row of the last kept token.

        Before the newest batch there is no such row: then drafts are empty until the next verify or prefill. Raises RequestError
        if the sliding cache no longer holds what a forward at `length` would attend to: never within `rewind_slack` rows of
        the greatest length so far. After such a refusal nothing has changed.
        """
        self.check_rollback(length)
        self.length = length
        if length == 0:
            self._kv_rows.restart()

    def state(self, first: int = 0) -> KvRows:
        """Returns the K/V rows from position `first` on; of the sliding layers those that are still there."""
        self.require_open()
        return self._kv_rows.rows_from(first, self.length)

    def restore(self, tokens: Sequence[int], rows: KvRows) -> None:
        """Replaces all rows by `rows`, made of `tokens`. There are no drafts until the next forward.

        Raises RequestError if they do not fit; then nothing has changed.
        """
        self.check_state(tokens, rows)
        self.forget_hidden()
        self.length = 0
        self._kv_rows.put_rows(rows)
        self.append(np.asarray(tokens, np.int64))

    @property
    @abstractmethod
    def skips_unread_rows(self) -> bool:
        """Whether a prefill computes no more than K and V of rows that are not read; older graphs compute all rows."""

    @property
    def row_kernels(self) -> bool:
        """Whether the project's own kernels multiply in its layers."""
        return any(graph.row_kernels for graph in self._graphs)

    @property
    def lacks_kernels(self) -> bool:
        """Whether one of its graphs is of an earlier version and names no kernels."""
        return any(graph.lacks_kernels for graph in self._graphs)

    @property
    def rollback_floor(self) -> int:
        """The smallest length above 0 that `rollback` can go back to now."""
        return self._kv_rows.rollback_floor

    def assignments(self) -> dict[str, dict[str, dict[str, int]]]:
        """Per graph and execution provider how many nodes of each operator it runs."""
        return {graph.name: graph.assignments() for graph in self._graphs}

    def close(self) -> None:
        """Frees the sessions. Harmless when done twice."""
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
    """The target of graphs of dynamic shapes."""

    def __init__(self, files: PairFiles, context: int, session: SessionOptions, packed: PackedCache | None = None) -> None:
        self.cache = KeyValueCache(files.layout, context)
        chunk = min(PREFILL_ROWS, self.cache.chunk)
        # Weights are packed while the tokenizer is read, which takes a good part of a second for 262,144 tokens.
        with without_flash(), ThreadPoolExecutor(1) as beside:
            opening = beside.submit(self._open_graphs, files, session, packed)
            super().__init__(files, context, self.cache, chunk=chunk, longest_context=files.graphs.context)
            self._graphs = opening.result()
        graph = self._graphs[0]
        check_inputs(graph, {name: self.cache.array(name).shape for name in self.cache.names}, files.target)
        # A drafter is at the position behind the text.
        halved = any(buffer.dtype == "f16" for buffer in files.layout.buffers)
        self.rotations = Rotations(files.graphs.rotations, context + 1, halved=halved)
        self._skips_unread_rows = SKIPPED_ROWS in graph.inputs
        self._forwards: dict[tuple[int, int, bool], Forward] = {}
        self._heads: dict[int, Call] = {}
        # The CPU's operators take tensors without rows; others were not tried.
        self._fewest_rows = 0 if session.device.is_cpu else 1

    def _open_graphs(self, files: PairFiles, session: SessionOptions, packed: PackedCache | None) -> list[Graph]:
        """Opens the graphs of the layers and of the head; their weights come from the packed cache, if there is one."""
        assert files.target_head is not None  # only graphs of fixed shapes have none
        with contextlib.nullcontext() if packed is None else packed.loading(*files.sources):
            return [self._open_layers(files, session), Graph(files.target_head, session)]

    def _open_layers(self, files: PairFiles, session: SessionOptions) -> Graph:
        """Opens the graph of the layers, and checks that it gives all rows."""
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
        """Scores of a full layer, rows times context for each head, take memory."""
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
        # Before the run: behind it, with cold caches, all that is done is dear.
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
    """A forward of a fixed number of tokens, or of soft rows, bound once; hidden rows are of the last `rows_read`, or of all."""

    def __init__(self, graph: Graph, target: OrtTarget, rows: int, rows_read: int, *, soft: bool) -> None:
        if soft and "soft_rows" not in graph.inputs:
            raise RequestError("the model's graph takes text only; export the bundle again with --media f16")
        # Graphs for text only have neither.
        self._soft, self._is_soft = np.zeros((1, rows if soft else 1, target.hidden_size), np.float32), np.full((1, 1, 1), soft)
        self._rows = rows
        # Token ids and positions, written at once.
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
    """The inputs of attention that target and drafter have in common."""
    counts, values = target.cache.counts, dict(target.rotations.values)
    for kind in (FULL, SLIDING):
        values |= {f"last_row_{kind}": counts[kind].last, f"rows_{kind}": counts[kind].rows}
    return values


def buffer_outputs(graph: Graph) -> dict[str, str]:
    """Returns the graph's outputs that are buffers, with their names. Layers that only read one may give it back too, with a suffix."""
    return {name: name.removeprefix("present_").split("@")[0] for name in graph.outputs if name.startswith("present_")}


def pair_of(bundle: Bundle, *, drafter: bool) -> PairFiles:
    """The ONNX files of a bundle, with or without the drafter's; raises BundleError if it has none, or one that is not to be opened."""
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
    """Raises BundleError if the graph takes arrays of other shapes; sizes it leaves open fit."""
    for name, declared in shapes.items():
        shape = graph.inputs.get(name, ())
        if len(shape) != len(declared) or any(type(size) is int and size != own for size, own in zip(shape, declared, strict=False)):
            raise BundleError(
                f"{path}: the manifest's input {name!r} is {list(declared)}, the graph's {list(shape)}; export the bundle again"
            )
