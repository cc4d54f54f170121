"""Gets an export's importance from imatrix files of llama.cpp, or from a calibration, which runs the pair on a text in transformers.

A calibration sums the squares of every matrix's inputs, or the products of all pairs of them. It needs torch, which is imported only when
a calibration runs.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_devices.errors import errors_as
from edge_devices.files.limited_read import read_at_most
from edge_devices.option_fields import option
from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.errors import ExportError, ParityError
from edge_export.gguf.keys import gguf_name, stays_float32
from edge_export.output import prepare_state
from edge_export.parity.reference import DRAFT_LENGTH, Reference, ReferenceRows, draft_steps, inference, why_no_run
from edge_export.quantization.importance import (
    ChannelSums,
    Entries,
    Importance,
    SecondMoments,
    Uncompensated,
    compensates,
    fitted,
    read_imatrix,
    shared_name,
    write_imatrix,
)
from edge_runtime.bundle.manifest import ImportanceSource

if TYPE_CHECKING:
    from edge_export.quantization.measured_layers import LayeredTarget, LayerRows

SAVED = {"target": "target.imatrix.gguf", "drafter": "drafter.imatrix.gguf"}
# The smallest target that is calibrated by default. Smaller ones are for tests and demonstrations, whose export must take only seconds.
CALIBRATED_FROM = 100_000_000
CALIBRATION_TEXT = Path(__file__).with_name("calibration.txt")
LAYERS_FILE = "layers.npz"
MAX_TEXT_BYTES = 64 << 20
# Tokens per forward, as in llama-imatrix, and the largest number of forwards. On a long text they are spread evenly.
CHUNK = 512
MAX_CHUNKS = 64
# The distance between the drafts in a chunk, in tokens.
DRAFT_EVERY = 32
# The time of a whole run relative to its matrix products. Attention, norms and so on take about as long as the products.
PRODUCT_SHARE = 2.0
# How many copies are in memory at once of the text's rows, and of a matrix's moments, which are float64 while they are factored.
_ROW_COPIES, _MOMENT_COPIES = 4, 8
_HEAD = "token_embd.weight"
# With more tokens per character than this, the tokenizer split the text into bytes. A word has fewer tokens than characters, but a
# character that is split into bytes has two or three.
_SHREDDED = 1.5


@dataclass(frozen=True, kw_only=True)
class ImportanceSources:
    """Where importance comes from: imatrix files of the two models, or a text to calibrate on.

    Matrices that are computed from the text are saved in the folder `save`. With `by_default`, a target of at least CALIBRATED_FROM weights
    is calibrated on the package's own text if no source is given and the machine can run it.
    """

    calibrate: Path | None = option(
        metavar="TEXT",
        help="Weigh and compensate the errors of quantization by running the model and its drafter in transformers on this text file: a few"
        " hundred kB of the kind of text that the model will read.  [default: for the target a text that comes with this package]",
    )
    by_default: bool = option(
        "--no-calibrate",
        default=True,
        flag_value=False,
        show_default=False,
        help="Leave the calibration out: the export takes minutes less, and answers get worse (see docs/results.md).",
    )
    save: Path | None = option("--save-imatrix", metavar="FOLDER", help="Save the matrices of --calibrate here, in llama.cpp's format.")
    imatrix: Path | None = option(metavar="FILE", help="The target's importance matrix, as written by llama-imatrix.")
    drafter_imatrix: Path | None = option(metavar="FILE", help="The drafter's importance matrix.")

    @property
    def are_given(self) -> bool:
        """Whether the user gave a source."""
        return bool(self.imatrix or self.drafter_imatrix or self.calibrate)


def calibrated_by_default(
    sources: ImportanceSources, reference: Reference, roles: Mapping[str, Uncompensated], notify: Callable[[str], None]
) -> bool:
    """Whether to calibrate the target by default: it is a large enough checkpoint, its weight types gain by it, and it can run here."""
    target = reference.target
    parameters = target.checkpoint.parameters
    asked = sources.are_given or not sources.by_default
    if asked or roles.get("target") is None or target.gguf is not None or target.checkpoint.rounding or parameters < CALIBRATED_FROM:
        return False
    reason = why_no_calibration(reference, with_drafter=False, without=roles["target"])
    if reason is not None:
        notify(f"The model is not calibrated, so its answers get worse than they need to be: {reason}.")
    return reason is None


def importance_of_pair(
    sources: ImportanceSources,
    reference: Reference,
    roles: Mapping[str, Uncompensated],
    *,
    state: Path,
    progress: Callable[[int], None],
    notify: Callable[[str], None],
) -> dict[str, Importance]:
    """Returns the importance by role, for the roles in `roles`.

    `roles` holds the roles whose quantization uses importance, and for each whether and for which matrices errors are compensated. `state`
    is the folder for a calibration's results. A stopped calibration continues from it, and it must exist as long as the importance is used.
    `progress` gets the bytes of calibration text that are done; `notify` gets a sentence if the text is of little use. Raises ExportError
    if no quantization uses the importance, or if it does not fit the model.
    """
    files = {"target": sources.imatrix, "drafter": sources.drafter_imatrix}
    for role in [role for role, path in files.items() if path is not None and role not in roles]:
        raise ExportError(
            f"the {role} is not quantized here in a way that importance changes; leave {files[role]} out, or choose e.g. q4_0"
        )
    if sources.calibrate is not None and not roles:
        raise ExportError("neither model is quantized here in a way that importance changes; leave --calibrate out, or choose e.g. q4_0")
    models = {"target": reference.target.checkpoint, "drafter": reference.drafter.checkpoint}
    importance = {}
    for role, path in files.items():
        if path is not None:
            entries, source = read_imatrix(path)
            importance[role] = fitted(entries, models[role], source)
    if sources.calibrate is None:
        return importance
    target, drafter = reference.target, reference.drafter
    if target.gguf is not None or target.tokenizer is None:
        raise ExportError(f"calibration runs the target in transformers, and {target.origin} is a GGUF; give its checkpoint")
    with_drafter = drafter.gguf is None and ("drafter" in roles or sources.save is not None)
    plain = [(role, None if without is None else sorted(without)) for role, without in sorted(roles.items())]
    facts = (read_text(sources.calibrate)[1].sha256, plain, with_drafter, CHUNK, MAX_CHUNKS)
    prepare_state(state, facts, (target.path, drafter.path), "a calibration")
    moments = {role: SecondMoments(state / role, without) for role, without in roles.items() if without is not None}
    request = CalibrationRequest(
        reference=reference, text=sources.calibrate, with_drafter=with_drafter, moments=moments, state=state / LAYERS_FILE, notify=notify
    )
    made = calibrate(request, progress)
    for role, entries in (("target", made.target), ("drafter", made.drafter)):
        if role in roles:
            importance[role] = replace(fitted(entries, models[role], made.source), moments=moments.get(role))
        if sources.save is not None and entries:
            write_imatrix(sources.save / SAVED[role], entries, sources.calibrate.name, made.source.tokens or 0, made.chunk)
    return importance


@dataclass(frozen=True, kw_only=True)
class CalibrationRequest:
    """A pair to run, and the text to run it on.

    With `with_drafter`, the drafter is measured too. The `moments` of a role, if any, receive the second moments of that model's inputs.
    `state` is a file from which a stopped calibration continues, with the same moments. `notify` gets a sentence if the text is of little
    use.
    """

    reference: Reference
    text: Path
    with_drafter: bool = True
    moments: Mapping[str, SecondMoments] = field(default_factory=dict)
    state: Path | None = None
    notify: Callable[[str], None] = lambda _: None


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Sums by GGUF tensor name; the drafter's are empty if it was not measured. `chunk` is the length of a piece of text, in tokens."""

    source: ImportanceSource
    target: Entries
    drafter: Entries
    chunk: int


def read_text(path: Path, purpose: str = "calibration text") -> tuple[str, ImportanceSource]:
    """Returns the user's text and its entry for the manifest. Raises ExportError if it is not text, is empty, or is far too long."""
    with errors_as(ExportError, f"the {purpose} {path} cannot be read", "give a text file, a few hundred kB are enough"):
        data = read_at_most(path, MAX_TEXT_BYTES)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ExportError(f"{path} is not UTF-8 text (byte {error.start}); give the {purpose} as plain text") from error
    if not text.strip():
        raise ExportError(f"the {purpose} {path} is empty; give text of the kind the model will read, a few hundred kB of it")
    digest = hashlib.sha256(data).hexdigest()
    return text, ImportanceSource(kind="calibration", name=path.name, bytes=len(data), sha256=digest)


def calibrate(request: CalibrationRequest, progress: Callable[[int], None] = lambda _: None) -> Calibration:
    """Runs the pair on the text in float32. `progress` gets the bytes of text done since its last call.

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
    """Returns the reason why the target cannot be calibrated here, or None.

    One layer of the target is in memory at a time, and the whole drafter.
    """
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
    """Estimates how long a calibration takes, from `expected_products` and the measured speed of a matrix product here."""
    import torch

    with inference(reference.threads):
        square = torch.ones(1024, 1024)
        seconds = min(_seconds(lambda: square @ square) for _ in range(10))
    return PRODUCT_SHARE * expected_products(reference.target.checkpoint, without) * seconds / 1024**3 / 60


def expected_products(checkpoint: Checkpoint, without: frozenset[str]) -> int:
    """Returns the number of multiplications to run a target on a long text, and to compensate errors except in the kinds `without`."""
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
    """Returns the size of the part with this index. All parts add up to exactly `total`."""
    return total * (index + 1) // parts - total * index // parts


def chunks_of(request: CalibrationRequest, text: str) -> list[list[int]]:
    """Returns the text's tokens in pieces of equal length, each after the tokenizer's start tokens.

    From a long text, it takes pieces that are spread evenly. Raises ExportError if the text is too short.
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
    """Runs the pair. `done` is called with the index of each finished piece of work, and their number."""
    # Imported here because it imports torch.
    from edge_export.quantization.measured_layers import InputSums, LayeredTarget, collecting

    reference, moments = request.reference, request.moments.get("target")
    target, layers = LayeredTarget(reference.target), reference.architecture.layers
    if moments is not None:
        moments.check_space(_moment_bytes(reference.target.checkpoint, moments))
    start, entries = _read_state(request.state)
    for number in range(start.layers):
        done(number, layers)

    def collect(module: Any, name: str, run: Callable[[], Any]) -> Any:
        sums = InputSums(moments)
        with collecting(module, sums, f"{name}."):
            rows = run()
        entries.update(_finite(sums.entries(), request.text.name))
        return rows

    def behind(rows: LayerRows) -> None:
        if request.state is not None:
            _write_state(request.state, rows, entries)
        done(rows.layers - 1, layers)

    last = target.run(chunks, collect, behind, start)
    head = InputSums(moments)
    for rows in last.rows:
        head.add(_HEAD if reference.architecture.tied else "output.weight", rows)
    entries.update(_finite(head.entries(), request.text.name))
    return entries, _run_drafter(request, chunks, target, last) if request.with_drafter else {}


def _finite(entries: Entries, text: str) -> Entries:
    """Returns the entries unchanged. Raises ExportError if a value is not finite."""
    for name, entry in entries.items():
        if not np.isfinite(entry.sums).all():
            raise ExportError(f"the model computes values at {name} that are not finite, on {text}; check the checkpoint's weights")
    return entries


def _run_drafter(request: CalibrationRequest, chunks: list[list[int]], target: LayeredTarget, last: LayerRows) -> Entries:
    """Runs the drafter along the texts, on the target's rows."""
    from edge_export.quantization.measured_layers import InputSums, collecting

    drafter = request.reference.load_drafter()
    # The dense head is simpler to hook and has the same input row as the sparse one.
    drafter.config.use_ordered_embeddings = False
    tied = drafter.lm_head.weight is drafter.get_input_embeddings().weight
    sums, window = InputSums(request.moments.get("drafter")), request.reference.architecture.window - 1
    with collecting(drafter, sums, "", head=_HEAD if tied else None):
        for index, tokens in enumerate(chunks):
            here = slice(index, index + 1)
            shared = {kind: (keys[here], values[here]) for kind, (keys, values) in last.shared.items()}
            _draft(drafter, ReferenceRows(target.embed, last.rows[here], shared, window), tokens)
    return _finite(sums.entries(), request.text.name)


def _moment_bytes(checkpoint: Checkpoint, moments: SecondMoments) -> int:
    """Returns the size of the second moments of a target's matrices, in bytes."""
    widths = {gguf_name(name): tensor.shape[1] for name, tensor in checkpoint.tensors.items() if len(tensor.shape) == 2}
    kept = [width for name, width in widths.items() if name is not None and moments.takes(name, width) and not stays_float32(name, 2)]
    return sum(4 * width**2 for width in kept)


def _read_state(path: Path | None) -> tuple[LayerRows, Entries]:
    """Returns the rows after the last layer that a stopped calibration finished, and its sums so far."""
    import torch

    from edge_export.quantization.measured_layers import LayerRows

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
    """Drafts greedily, as decoding does. Each step continues with its own token and hidden row, at the position of the first step."""
    for position in range(DRAFT_EVERY, len(tokens), DRAFT_EVERY):
        steps = draft_steps(drafter, rows, tokens[position], position)
        logits = next(steps)
        for _ in range(DRAFT_LENGTH - 1):
            logits = steps.send(int(logits.argmax()))
