"""Measures importance: runs a pair in transformers on a text and sums the squares of every matrix's inputs, or all their products.

With parity/reference.py the only module that imports torch and transformers, and only when it runs them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_devices.files.limited_read import read_at_most
from edge_export.checkpoint.architecture import text_name
from edge_export.errors import ExportError, ParityError
from edge_export.gguf.tensor_names import gguf_name, stays_float32
from edge_export.parity.reference import (
    DRAFT_LENGTH,
    Reference,
    ReferenceRows,
    draft_steps,
    inference,
    run_target,
    why_no_reference,
)
from edge_export.quantization.importance import MAX_CHANNELS, ChannelSums, SecondMoments, shared_name
from edge_runtime.bundle.manifest import ImportanceSource

MAX_TEXT_BYTES = 64 << 20
# Tokens per forward (as llama-imatrix), and the most forwards of a long text, evenly spread over it.
CHUNK = 512
MAX_CHUNKS = 64
# Tokens of a chunk from one draft to the next.
DRAFT_EVERY = 32
# Second moments that are added up in memory at once; a model with more of them runs on the text several times.
MOMENT_BYTES = 2 << 30
# Attention, norms and what else is no product take about as long as the products.
PRODUCT_SHARE = 2.0
_HEAD = "token_embd.weight"


@dataclass(frozen=True, kw_only=True)
class CalibrationRequest:
    """The pair and the text. `with_drafter`: it is measured too. `moments` get the second moments of the inputs of the models that it
    names, target or drafter.
    """

    reference: Reference
    text: Path
    with_drafter: bool = True
    moments: Mapping[str, SecondMoments] = field(default_factory=dict)


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
    reason = why_no_reference(reference.parameters if request.with_drafter else reference.target.checkpoint.parameters)
    if reason is not None:
        raise ExportError(f"calibration runs the checkpoint in transformers, but {reason}; make an importance matrix elsewhere (--imatrix)")
    chunks = _chunks(request, text)
    try:
        with inference(reference.threads):
            sums = _run(request, chunks, lambda index, parts: progress(_share(source.bytes, index, parts)))
    except ParityError as error:
        raise ExportError(f"calibration failed: {error}") from error
    tokens = sum(len(chunk) for chunk in chunks)
    return Calibration(source=replace(source, tokens=tokens), target=sums[0].entries(), drafter=sums[1].entries(), chunk=len(chunks[0]))


def expected_minutes(reference: Reference) -> float:
    """About how long it takes to run the target on a long text and to compensate its errors, from a product of matrices measured here."""
    import torch

    with inference(reference.threads):
        square = torch.ones(1024, 1024)
        seconds = min(_seconds(lambda: square @ square) for _ in range(3))
    shapes = {gguf_name(name): tensor.shape for name, tensor in reference.target.checkpoint.tensors.items() if len(tensor.shape) == 2}
    matrices = {name: shape for name, shape in shapes.items() if name is not None and name.startswith("blk.")}
    moments = sum(columns**2 for name, (_, columns) in matrices.items() if shared_name(name) == name and columns <= MAX_CHANNELS)
    run = CHUNK * MAX_CHUNKS * (moments + sum(rows * columns for rows, columns in matrices.values()))
    compensated = sum(rows * columns**2 for name, (rows, columns) in shapes.items() if columns <= MAX_CHANNELS)
    return PRODUCT_SHARE * (run + compensated) * seconds / 1024**3 / 60


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _share(total: int, index: int, parts: int) -> int:
    """The size of the part with this index; all parts add up to `total`."""
    return total * (index + 1) // parts - total * index // parts


def _chunks(request: CalibrationRequest, text: str) -> list[list[int]]:
    """The text's tokens in pieces of equal length, each after the tokenizer's start tokens."""
    tokenizer = request.reference.tokenizer()
    begin: list[int] = tokenizer.encode("", add_special_tokens=True)
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    length = min(CHUNK, request.reference.architecture.context) - len(begin)
    if len(tokens) < length:
        raise ExportError(f"the calibration text {request.text} has {len(tokens)} tokens, at least {length} are needed; give a longer one")
    count = min(len(tokens) // length, MAX_CHUNKS)
    starts = np.linspace(0, len(tokens) - length, count).astype(int)
    return [[*begin, *tokens[start : start + length]] for start in starts]


def _run(request: CalibrationRequest, chunks: list[list[int]], done: Callable[[int, int], None]) -> tuple[_Sums, _Sums]:
    """Runs the pair; `done` gets the number of every piece of work that is done, and how many there are."""
    target, drafter = request.reference.load_target(), None
    if request.with_drafter:
        drafter = request.reference.load_drafter()
        # The dense head has the same input row as the sparse one.
        drafter.config.use_ordered_embeddings = False
    runs = _runs(target, request.moments.get("target"), MOMENT_BYTES)
    parts = len(runs) * len(chunks)
    # A drafter is small.
    sums = _Sums(runs[0]), _Sums(_runs(drafter, request.moments.get("drafter"), None)[0])
    for index, tokens in enumerate(chunks):
        with _collecting(target, sums[0]), _collecting(drafter, sums[1]):
            rows = _rows(target, tokens, request.reference.architecture.window, sums[0])
            if drafter is not None:
                _draft(drafter, rows, tokens)
        done(index, parts)
    for role, moments in request.moments.items():
        sums[role == "drafter"].move_moments(moments)
    for run, names in enumerate(runs[1:], 1):
        more = _Sums(names)
        with _collecting(target, more):
            for index, tokens in enumerate(chunks):
                _rows(target, tokens, request.reference.architecture.window, more)
                done(run * len(chunks) + index, parts)
        more.move_moments(request.moments["target"])
    return sums


def _rows(target: Any, tokens: list[int], window: int, sums: _Sums) -> ReferenceRows:
    """Runs the target on a piece of text."""
    _, rows = run_target(target, tokens, 1, window - 1)
    # The head ran on one row only: all logits of a chunk would be hundreds of megabytes.
    sums.add(_HEAD if _tied(target) else "output.weight", rows.hidden)
    return rows


def _runs(model: Any, moments: SecondMoments | None, max_bytes: int | None) -> list[set[str]]:
    """The matrices whose second moments are added up, in sets that need at most so many bytes at once.

    Raises ExportError if the disk has no room for them.
    """
    import torch

    runs: list[set[str]] = [set()]
    used = total = 0
    for name, module in model.named_modules() if moments is not None else ():
        if not isinstance(module, torch.nn.Linear) or module.in_features > MAX_CHANNELS:
            continue
        short = _HEAD if name == "lm_head" and _tied(model) else gguf_name(_text_name(f"{name}.weight"))
        if short is None or shared_name(short) != short:
            continue
        size = 4 * int(module.in_features) ** 2
        if max_bytes is not None and used + size > max_bytes:
            runs.append(set())
            used = 0
        runs[-1].add(short)
        used, total = used + size, total + size
    if moments is not None:
        moments.check_space(total)
    return runs


def _draft(drafter: Any, rows: ReferenceRows, tokens: list[int]) -> None:
    """Drafts greedily as decoding does: each step continues with its own token and hidden row, at the position of the first."""
    for position in range(DRAFT_EVERY, len(tokens), DRAFT_EVERY):
        steps = draft_steps(drafter, rows, tokens[position], position)
        logits = next(steps)
        for _ in range(DRAFT_LENGTH - 1):
            logits = steps.send(int(logits.argmax()))


class _Sums:
    """Adds up the squares of rows, by GGUF tensor name, and all products of their channels for the matrices in `names`."""

    def __init__(self, names: Collection[str] = ()) -> None:
        self._names = names
        self._products: dict[str, Any] = {}
        self._sums: dict[str, NDArray[np.float64]] = {}
        self._counts: dict[str, NDArray[np.float64]] = {}

    def add(self, name: str, rows: Any, expert: int = 0, experts: int = 1) -> None:
        """Adds rows [..., K] that were multiplied with this matrix, or with this expert of it."""
        flat = rows.reshape(-1, rows.shape[-1]).float()
        if name not in self._sums:
            self._sums[name], self._counts[name] = np.zeros((experts, flat.shape[1])), np.zeros(experts)
        self._sums[name][expert] += (flat * flat).sum(0).double().numpy()
        self._counts[name][expert] += len(flat)
        if name in self._names:
            if name not in self._products:
                self._products[name] = flat.new_zeros(flat.shape[1], flat.shape[1])
            self._products[name].addmm_(flat.T, flat)

    def entries(self) -> dict[str, ChannelSums]:
        """All that was added."""
        return {name: ChannelSums(sums=self._sums[name].reshape(-1), counts=self._counts[name]) for name in self._sums}

    def move_moments(self, moments: SecondMoments) -> None:
        """Moves the means of the products there."""
        for name in list(self._products):
            moments.add(name, (self._products.pop(name) / self._counts[name][0]).numpy())


@contextmanager
def _collecting(model: Any, sums: _Sums) -> Iterator[None]:
    """Hooks `sums` to the inputs of every matrix that a GGUF of the model quantizes; a tied head's rows count for the embedding."""
    import torch

    hooks = []
    for name, module in model.named_modules() if model is not None else ():
        if isinstance(module, torch.nn.Linear):
            short = gguf_name(_text_name(f"{name}.weight"))
            if name == "lm_head":
                # A drafter's head runs on every row that counts, a target's does not (see _run).
                short = _HEAD if _tied(model) and hasattr(model, "pre_projection") else None
            if short is not None and not stays_float32(short, 2):
                hooks.append(module.register_forward_pre_hook(partial(_add_inputs, sums, short)))
        elif name.endswith(".experts") and hasattr(module, "gate_up_proj"):
            names = tuple(gguf_name(_text_name(f"{name}.{weight}")) or "" for weight in ("gate_up_proj", "down_proj"))
            hooks.append(module.register_forward_pre_hook(partial(_add_inputs_experts, sums, names)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _add_inputs(sums: _Sums, name: str, _module: Any, inputs: tuple[Any, ...]) -> None:
    sums.add(name, inputs[0])


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


def _tied(model: Any) -> bool:
    return bool(model.lm_head.weight is model.get_input_embeddings().weight)
