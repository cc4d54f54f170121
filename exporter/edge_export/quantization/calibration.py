"""Measures importance: runs a pair in transformers on a text and sums the squares of every matrix's inputs, or all their products.

With parity/reference.py the only module that imports torch and transformers, and only when it runs them.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edge_devices.files.limited_read import read_at_most
from edge_export.checkpoint.architecture import text_name
from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.errors import ExportError, ParityError
from edge_export.gguf.keys import gguf_name, stays_float32
from edge_export.parity.reference import DRAFT_LENGTH, Reference, ReferenceRows, draft_steps, inference, why_no_run
from edge_export.quantization.importance import ChannelSums, SecondMoments, Uncompensated, compensates, shared_name
from edge_runtime.bundle.manifest import ImportanceSource

if TYPE_CHECKING:
    from edge_export.quantization.layered_target import LayeredTarget, LayerRows

MAX_TEXT_BYTES = 64 << 20
# Tokens per forward (as llama-imatrix), and the most forwards of a long text, evenly spread over it.
CHUNK = 512
MAX_CHUNKS = 64
# Tokens of a chunk from one draft to the next.
DRAFT_EVERY = 32
# Attention, norms and what else is no product take about as long as the products.
PRODUCT_SHARE = 2.0
# Copies of the text's rows, and of a matrix's moments (in float64 while they are factored), that are in memory at once.
_ROW_COPIES, _MOMENT_COPIES = 4, 8
_HEAD = "token_embd.weight"
# Matrices whose output is normed at once, whole or by heads, and what Gemma's norms add to mean squares.
_NORMED, _NORMED_HEADS, _EPSILON = ("o_proj", "down_proj", "per_layer_projection"), ("q_proj", "k_proj"), 1e-6
# What they give goes through another matrix before it is normed.
_GATED = ("gate_proj", "up_proj")
# Tokens per character from which on a text falls into bytes: words have fewer tokens than characters, a byte each has two or three.
_SHREDDED = 1.5
Entries = dict[str, ChannelSums]


@dataclass(frozen=True, kw_only=True)
class CalibrationRequest:
    """The pair and the text. `with_drafter`: it is measured too. `moments` get the second moments of the inputs of the models that it
    names, target or drafter. `state` is a file from which a calibration that was stopped goes on, with the same moments. `notify` gets a
    sentence about a text that is of little use.
    """

    reference: Reference
    text: Path
    with_drafter: bool = True
    moments: Mapping[str, SecondMoments] = field(default_factory=dict)
    state: Path | None = None
    notify: Callable[[str], None] = lambda _: None


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Sums by GGUF tensor name; the drafter's are empty if none was given. `chunk` is in tokens."""

    source: ImportanceSource
    target: dict[str, ChannelSums]
    drafter: dict[str, ChannelSums]
    chunk: int


def read_text(path: Path, purpose: str = "calibration text") -> tuple[str, ImportanceSource]:
    """Returns a text of the user and its entry for the manifest. Raises ExportError if it is not text, empty, or far too long."""
    try:
        data = read_at_most(path, MAX_TEXT_BYTES)
    except OSError as error:
        raise ExportError(
            f"the {purpose} {path} cannot be read ({error.strerror or error}); give a text file, a few hundred kB are enough"
        ) from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ExportError(f"{path} is not UTF-8 text (byte {error.start}); give the {purpose} as plain text") from error
    if not text.strip():
        raise ExportError(f"the {purpose} {path} is empty; give text of the kind the model will read, a few hundred kB of it")
    digest = hashlib.sha256(data).hexdigest()
    return text, ImportanceSource(kind="calibration", name=path.name, bytes=len(data), sha256=digest)


def calibrate(request: CalibrationRequest, progress: Callable[[int], None] = lambda _: None) -> Calibration:
    """Runs the pair on the text in float32; `progress` gets the bytes of text done since its last call.

    Raises ExportError if the text is unusable or too short, or if torch, transformers or the memory for the pair is missing.
    """
    text, source = read_text(request.text)
    reference = request.reference
    moments = request.moments.get("target")
    reason = why_no_calibration(reference, with_drafter=request.with_drafter, without=None if moments is None else moments.without)
    if reason is not None:
        raise ExportError(f"calibration runs the checkpoint in transformers, but {reason}; make an importance matrix elsewhere (--imatrix)")
    chunks = chunks_of(request, text)
    try:
        with inference(reference.threads):
            target, drafter = _run(request, chunks, lambda index, parts: progress(_share(source.bytes, index, parts)))
    except ParityError as error:
        raise ExportError(f"calibration failed: {error}") from error
    tokens = sum(len(chunk) for chunk in chunks)
    return Calibration(source=replace(source, tokens=tokens), target=target, drafter=drafter, chunk=len(chunks[0]))


def why_no_calibration(reference: Reference, *, with_drafter: bool, without: Uncompensated) -> str | None:
    """Returns the reason why the target cannot be calibrated here, or None. Its layers are in memory one at a time, the drafter whole."""
    checkpoint = reference.target.checkpoint
    model, tokens = checkpoint.architecture, CHUNK * MAX_CHUNKS
    layers: Counter[str] = Counter()
    for name, tensor in checkpoint.tensors.items():
        layers[name.partition("layers.")[2].partition(".")[0]] += prod(tensor.shape)
    largest = max(count for layer, count in layers.items() if layer)
    widths = {gguf_name(name): tensor.shape[-1] for name, tensor in checkpoint.tensors.items()}
    kept = (width for name, width in widths.items() if name is not None and without is not None and compensates(name, width, without))
    widest = max(kept, default=0)
    rows = _ROW_COPIES * tokens * (model.hidden_size + model.layers * model.per_layer_size)
    values = 2 * largest + rows + _MOMENT_COPIES * widest**2
    values += reference.drafter.checkpoint.parameters if with_drafter else 0
    return why_no_run(4 * values, "calibration")


def expected_minutes(reference: Reference, without: frozenset[str]) -> float:
    """About how long `expected_products` take, from a product of matrices measured here."""
    import torch

    with inference(reference.threads):
        square = torch.ones(1024, 1024)
        seconds = min(_seconds(lambda: square @ square) for _ in range(10))
    return PRODUCT_SHARE * expected_products(reference.target.checkpoint, without) * seconds / 1024**3 / 60


def expected_products(checkpoint: Checkpoint, without: frozenset[str]) -> int:
    """How many multiplications running a target on a long text takes, and compensating its errors but for matrices of kinds `without`."""
    shapes = {gguf_name(name): tensor.shape for name, tensor in checkpoint.tensors.items() if len(tensor.shape) == 2}
    matrices = {name: shape for name, shape in shapes.items() if name is not None and name.startswith("blk.")}
    kept = {name: shape for name, shape in shapes.items() if name is not None and compensates(name, shape[1], without)}
    moments = sum(columns**2 for name, (_, columns) in kept.items() if name in matrices and shared_name(name) == name)
    run = CHUNK * MAX_CHUNKS * (moments + sum(rows * columns for rows, columns in matrices.values()))
    return run + sum(rows * columns**2 for rows, columns in kept.values())


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _share(total: int, index: int, parts: int) -> int:
    """The size of the part with this index; all parts add up to `total`."""
    return total * (index + 1) // parts - total * index // parts


def chunks_of(request: CalibrationRequest, text: str) -> list[list[int]]:
    """The text's tokens in pieces of equal length, each after the tokenizer's start tokens; of a long text only some, from all over it.

    Raises ExportError if the text is too short.
    """
    tokenizer = request.reference.tokenizer()
    begin: list[int] = tokenizer.encode("", add_special_tokens=True)
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    length = min(CHUNK, request.reference.architecture.context) - len(begin)
    if len(tokens) < length:
        raise ExportError(f"the calibration text {request.text} has {len(tokens)} tokens, at least {length} are needed; give a longer one")
    if len(tokens) > _SHREDDED * len(text):
        request.notify(
            f"{request.text.name} falls into {len(tokens)} tokens for {len(text)} characters: the tokenizer has no words of its language,"
            " so calibrating on it may bring little. Text in a language that the model knows brings more."
        )
    count = min(len(tokens) // length, MAX_CHUNKS)
    starts = np.linspace(0, len(tokens) - length, count).astype(int)
    return [[*begin, *tokens[start : start + length]] for start in starts]


def _run(request: CalibrationRequest, chunks: list[list[int]], done: Callable[[int, int], None]) -> tuple[Entries, Entries]:
    """Runs the pair; `done` gets the number of every piece of work that is done, and how many there are."""
    # Imported here, as it imports torch.
    from edge_export.quantization.layered_target import LayeredTarget

    reference, moments = request.reference, request.moments.get("target")
    target, layers = LayeredTarget(reference.target), reference.architecture.layers
    if moments is not None:
        moments.check_space(_moment_bytes(reference.target.checkpoint, moments))
    start, entries = _read_state(request.state)
    for number in range(start.layers):
        done(number, layers)

    def collect(module: Any, name: str, run: Callable[[], Any]) -> Any:
        sums = _Sums(moments)
        with _collecting(module, sums, f"{name}."):
            rows = run()
        entries.update(_finite(sums.entries(), request.text.name))
        return rows

    def behind(rows: LayerRows) -> None:
        if request.state is not None:
            _write_state(request.state, rows, entries)
        done(rows.layers - 1, layers)

    last = target.run(chunks, collect, behind, start)
    head = _Sums(moments)
    for rows in last.rows:
        head.add(_HEAD if reference.architecture.tied else "output.weight", rows)
    entries.update(_finite(head.entries(), request.text.name))
    return entries, _run_drafter(request, chunks, target, last) if request.with_drafter else {}


def _finite(entries: Entries, text: str) -> Entries:
    """The entries as they are. Raises ExportError if one holds a value that is not finite."""
    for name, entry in entries.items():
        if not np.isfinite(entry.sums).all():
            raise ExportError(f"the model computes values at {name} that are not finite, on {text}; check the checkpoint's weights")
    return entries


def _run_drafter(request: CalibrationRequest, chunks: list[list[int]], target: LayeredTarget, last: LayerRows) -> Entries:
    """Drafts along the texts, from the target's rows."""
    drafter = request.reference.load_drafter()
    # The dense head has the same input row as the sparse one.
    drafter.config.use_ordered_embeddings = False
    tied = drafter.lm_head.weight is drafter.get_input_embeddings().weight
    sums, window = _Sums(request.moments.get("drafter")), request.reference.architecture.window - 1
    with _collecting(drafter, sums, "", head=_HEAD if tied else None):
        for index, tokens in enumerate(chunks):
            here = slice(index, index + 1)
            shared = {kind: (keys[here], values[here]) for kind, (keys, values) in last.shared.items()}
            _draft(drafter, ReferenceRows(target.embed, last.rows[here], shared, window), tokens)
    return _finite(sums.entries(), request.text.name)


def _moment_bytes(checkpoint: Checkpoint, moments: SecondMoments) -> int:
    """How many bytes the second moments of a target's matrices take."""
    widths = {gguf_name(name): tensor.shape[1] for name, tensor in checkpoint.tensors.items() if len(tensor.shape) == 2}
    kept = [width for name, width in widths.items() if name is not None and moments.takes(name, width) and not stays_float32(name, 2)]
    return sum(4 * width**2 for width in kept)


def _read_state(path: Path | None) -> tuple[LayerRows, Entries]:
    """The rows behind the last layer that a stopped calibration finished, and its sums."""
    import torch

    from edge_export.quantization.layered_target import LayerRows

    if path is None or not path.is_file():
        return LayerRows(), {}
    with np.load(path, allow_pickle=False) as file:
        parts = {name: file[name] for name in file.files}
    shared = {kind: tuple(torch.from_numpy(parts[f"{part}/{kind}"]) for part in ("keys", "values")) for kind in _kinds(parts, "keys")}
    entries = {name: ChannelSums(sums=parts[f"sums/{name}"], counts=parts[f"counts/{name}"]) for name in _kinds(parts, "sums")}
    return LayerRows(layers=int(parts["layers"]), rows=torch.from_numpy(parts["rows"]), shared=shared), entries


def _kinds(parts: Mapping[str, object], kind: str) -> list[str]:
    return [name.partition("/")[2] for name in parts if name.startswith(f"{kind}/")]


def _write_state(path: Path, rows: LayerRows, entries: Entries) -> None:
    parts = {"layers": np.array(rows.layers), "rows": rows.rows.numpy()}
    for kind, (keys, values) in rows.shared.items():
        parts |= {f"keys/{kind}": keys.numpy(), f"values/{kind}": values.numpy()}
    for name, entry in entries.items():
        parts |= {f"sums/{name}": entry.sums, f"counts/{name}": entry.counts}
    unfinished = path.with_suffix(".unfinished.npz")
    np.savez(unfinished, **parts)
    unfinished.replace(path)


def _draft(drafter: Any, rows: ReferenceRows, tokens: list[int]) -> None:
    """Drafts greedily as decoding does: each step continues with its own token and hidden row, at the position of the first."""
    for position in range(DRAFT_EVERY, len(tokens), DRAFT_EVERY):
        steps = draft_steps(drafter, rows, tokens[position], position)
        logits = next(steps)
        for _ in range(DRAFT_LENGTH - 1):
            logits = steps.send(int(logits.argmax()))


class _Sums:
    """Adds up the squares of rows, by GGUF tensor name, and all products of their channels for the matrices that `moments` keep."""

    def __init__(self, moments: SecondMoments | None) -> None:
        self._moments = moments
        self._products: dict[str, Any] = {}
        self._sums: dict[str, NDArray[np.float64]] = {}
        self._counts: dict[str, NDArray[np.float64]] = {}

    def add(self, name: str, rows: Any, expert: int | None = None, experts: int = 1) -> None:
        """Adds rows [..., K] that were multiplied with this matrix, or with this expert of it, which has no moments."""
        flat = rows.reshape(-1, rows.shape[-1]).float()
        place, width = expert or 0, flat.shape[1]
        if name not in self._sums:
            self._sums[name], self._counts[name] = np.zeros((experts, width)), np.zeros(experts)
        self._sums[name][place] += (flat * flat).sum(0).double().numpy()
        self._counts[name][place] += len(flat)
        if self._moments is not None and expert is None and self._moments.takes(name, width):
            if name not in self._products:
                self._products[name] = flat.new_zeros(width, width)
            self._products[name].addmm_(flat.T, flat)

    def entries(self) -> Entries:
        """All that was added; the means of the products go to the moments."""
        for name in list(self._products):
            assert self._moments is not None
            self._moments.add(name, (self._products.pop(name) / self._counts[name][0]).numpy())
        return {name: ChannelSums(sums=self._sums[name].reshape(-1), counts=self._counts[name]) for name in self._sums}


@contextmanager
def _collecting(model: Any, sums: _Sums, prefix: str, head: str | None = None) -> Iterator[None]:
    """Hooks `sums` to the inputs of every matrix that a GGUF quantizes, of a module whose names in the whole model have this prefix.

    The rows of `lm_head` count for `head`, if it is given.
    """
    import torch

    hooks = []
    values = set()
    for name, module in model.named_modules():
        if hasattr(module, "v_norm"):
            matrix, projection = ("k_proj", module.k_proj) if module.v_proj is None else ("v_proj", module.v_proj)
            values.add(projection)
            short = gguf_name(_text_name(f"{prefix}{name}.{matrix}.weight"))
            assert short is not None, "attention has names in a GGUF"
            hooks += _value_hooks(sums, short, module, projection)
        elif isinstance(module, torch.nn.Linear) and module not in values:
            short = head if name == "lm_head" else gguf_name(_text_name(f"{prefix}{name}.weight"))
            if short is not None and not stays_float32(short, 2):
                behind, width = _normed_behind(model, name, module)
                hooks.append(behind.register_forward_hook(partial(_add_inputs, sums, short, width)))
        elif name.rpartition(".")[2] == "experts" and hasattr(module, "gate_up_proj"):
            names = tuple(gguf_name(_text_name(f"{prefix}{name}.{weight}")) or "" for weight in ("gate_up_proj", "down_proj"))
            hooks.append(module.register_forward_pre_hook(partial(_add_inputs_experts, sums, names)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _normed_behind(model: Any, name: str, module: Any) -> tuple[Any, int | None]:
    """The module with a matrix's inputs whose outputs are normed at once, and how many of them together; None if there is none."""
    parent, _, matrix = name.rpartition(".")
    if matrix in _GATED:
        feed_forward = model.get_submodule(parent)
        return feed_forward, feed_forward.down_proj.out_features
    if matrix in _NORMED_HEADS:
        return module, model.get_submodule(parent).head_dim
    return module, module.out_features if matrix in _NORMED else None


def _add_inputs(sums: _Sums, name: str, width: int | None, _module: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Adds a matrix's inputs; where `width` outputs are normed together, an error in a row counts beside the length of that row."""
    sums.add(name, inputs[0] if width is None else _counted(inputs[0], _inverse_squares(output, width)))


def _inverse_squares(rows: Any, width: int) -> Any:
    """The inverse mean squares of each `width` values of rows [..., N], and of these the mean [...]."""
    return (rows.unflatten(-1, (-1, width)).square().mean(-1) + _EPSILON).reciprocal().mean(-1)


def _counted(rows: Any, counts: Any) -> Any:
    """Rows [..., K] whose squares count as `counts` [...] say: 1 on average, so that sums over rows stay those of as many."""
    return rows * (counts / counts.mean()).sqrt()[..., None]


def _value_hooks(sums: _Sums, name: str, attention: Any, projection: Any) -> list[Any]:
    """Hooks the inputs of the matrix that V comes from, on the text's own rows.

    An error in a row of V counts by the squares of the attention that it gets, beside the length of the row, which is normed. So most
    counts the first token's, which most attention goes to where there is nothing to attend to, and whose V is short.
    """
    kept: list[Any] = []

    def keep(_module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        kept[:] = inputs[0], output

    def add(_module: Any, _inputs: tuple[Any, ...], outputs: tuple[Any, Any]) -> None:
        rows, made = kept
        sums.add(name, _counted(rows, outputs[1].square().sum((1, 2)) * _inverse_squares(made, attention.head_dim)))

    return [projection.register_forward_hook(keep), attention.register_forward_hook(add)]


def _add_inputs_experts(sums: _Sums, names: tuple[str, ...], module: Any, inputs: tuple[Any, ...]) -> None:
    """Experts are one module with 3-D weights, so the inputs of their second matrix are computed here again."""
    from torch.nn.functional import linear

    rows, chosen = inputs[0], inputs[1]
    experts = len(module.gate_up_proj)
    for expert in chosen.unique().tolist():
        selected = rows[(chosen == expert).any(dim=-1)]
        gate, up = linear(selected, module.gate_up_proj[expert]).chunk(2, dim=-1)
        sums.add(names[0], selected, expert, experts)
        sums.add(names[1], module.act_fn(gate) * up, expert, experts)


def _text_name(name: str) -> str:
    """The name that a weight of transformers' model has in a text-only one."""
    return text_name(name, multimodal=False) or name
