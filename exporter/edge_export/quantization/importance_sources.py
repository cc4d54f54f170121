"""The sources of an export's importance: imatrix files of llama.cpp, or a calibration text on which the pair is run.

Both formats of llama.cpp's files are read, with checks; the newer is written. Source of the facts: llama.cpp, common/imatrix-loader.cpp and
tools/imatrix/imatrix.cpp. The newer is a GGUF with two float32 tensors per matrix, NAME.in_sum2 (squares of the inputs, summed) and
NAME.counts (over how many rows, for all experts or each). The older is int32 count, then per entry int32 length, name, int32 calls,
int32 values, float32 values; they are means times calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_devices.files.limited_read import read_at_most
from edge_devices.option_fields import option
from edge_export.checkpoint.checkpoint import read_gguf_header
from edge_export.errors import CheckpointError, ExportError
from edge_export.output import prepare_state
from edge_export.parity.reference import Reference
from edge_export.quantization.calibration import CHUNK, MAX_CHUNKS, CalibrationRequest, calibrate, read_text, why_no_calibration
from edge_export.quantization.importance import ChannelSums, Importance, SecondMoments, Uncompensated, fitted
from edge_runtime.bundle.gguf_header import TensorInfo
from edge_runtime.bundle.manifest import ImportanceSource

SAVED = {"target": "target.imatrix.gguf", "drafter": "drafter.imatrix.gguf"}
MAX_BYTES = 256 << 20
# Smaller targets are for tests and demonstrations, which have to be exported in seconds.
CALIBRATED_FROM = 100_000_000
CALIBRATION_TEXT = Path(__file__).with_name("calibration.txt")
LAYERS_FILE = "layers.npz"
_MAX_NAME = 1 << 10
_SUMS, _COUNTS = ".in_sum2", ".counts"
_F32 = 0
_Entries = dict[str, ChannelSums]


@dataclass(frozen=True, kw_only=True)
class ImportanceSources:
    """Where importance comes from: imatrix files of the two models, or a text to calibrate on.

    `save` is a folder that gets the matrices computed from the text. `by_default`: a target of CALIBRATED_FROM weights is calibrated on
    the text that comes with the package, where nothing else is given and the machine can run it.
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
        """Whether there is any source."""
        return bool(self.imatrix or self.drafter_imatrix or self.calibrate)


def calibrated_by_default(
    sources: ImportanceSources, reference: Reference, roles: Mapping[str, Uncompensated], notify: Callable[[str], None]
) -> bool:
    """Whether the target is calibrated though nobody asked for it: a language model, in types that gain by it, where it runs."""
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
    """Returns the importance by role, of the roles in `roles` only: those whose quantization uses it, and how far it uses moments too.

    `state` is the folder of what a calibration computes: one that was stopped goes on from it, and it stays as long as the importance is
    used. `progress` gets the bytes of calibration text done, `notify` a sentence about a text of little use. Raises ExportError if no
    quantization uses it, or if it does not fit the model.
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


def read_imatrix(path: Path) -> tuple[_Entries, ImportanceSource]:
    """Returns the sums by GGUF tensor name, and the file's entry for the manifest. Raises ExportError if it is not one, or is damaged."""
    try:
        data = read_at_most(path, MAX_BYTES)
    except OSError as error:
        raise ExportError(f"{path} cannot be read ({error.strerror or error}); give an importance matrix made by llama-imatrix") from error
    entries = _read_gguf(path, data) if data[:4] == b"GGUF" else _read_older(path, data)
    digest = hashlib.sha256(data).hexdigest()
    return entries, ImportanceSource(kind="imatrix", name=path.name, bytes=len(data), sha256=digest, tokens=None)


def write_imatrix(path: Path, entries: _Entries, dataset: str, tokens: int, chunk: int) -> None:
    """Writes the newer format, which llama-imatrix and llama-quantize read too; `chunk` is the tokens per piece of text."""
    # Imported here, as only writing needs gguf.
    from edge_export.gguf.writer import array_tensor, write_raw_gguf

    tensors = []
    for name, entry in sorted(entries.items()):
        rows = entry.counts.size
        for ending, values in ((_SUMS, entry.sums), (_COUNTS, entry.counts)):
            tensors.append(array_tensor(name + ending, (rows, values.size // rows), "f32", partial(values.astype, "<f4")))
    keys: list[Any] = [
        ("general.type", "string", "imatrix"),
        ("imatrix.datasets", "array", [dataset]),
        ("imatrix.chunk_count", "uint32", max(1, tokens // chunk)),
        ("imatrix.chunk_size", "uint32", chunk),
    ]
    write_raw_gguf(path, "imatrix", keys, tensors, lambda _: None)


def _read_gguf(path: Path, data: bytes) -> _Entries:
    try:
        header = read_gguf_header(path)
    except CheckpointError as error:
        raise ExportError(f"{error} (it was given as an importance matrix)") from error
    tensors = {tensor.name: tensor for tensor in header.tensors}
    names = sorted({name.removesuffix(_SUMS) for name in tensors if name.endswith(_SUMS)})
    if not names:
        raise ExportError(f"{path} is a GGUF without importance ({_SUMS} tensors); give one made by llama-imatrix")
    entries = {}
    for name in names:
        sums, counts = tensors[name + _SUMS], tensors.get(name + _COUNTS)
        if counts is None or sums.type != _F32 or counts.type != _F32:
            raise ExportError(f"{path} is damaged: {name} has no {_COUNTS}, or values that are not float32; make the file again")
        entries[name] = ChannelSums(sums=_values(data, sums), counts=_values(data, counts))
    return entries


def _values(data: bytes, tensor: TensorInfo) -> NDArray[np.float64]:
    return np.frombuffer(data, "<f4", count=tensor.bytes // 4, offset=tensor.offset).astype(np.float64)


def _read_older(path: Path, data: bytes) -> _Entries:
    """Fields are never read past the end; data after the entries is ignored."""
    at = 0

    def wrong(what: str) -> ExportError:
        return ExportError(f"{path} is no importance matrix of llama.cpp, or is damaged: {what}; make it again with llama-imatrix")

    def read(count: int) -> bytes:
        nonlocal at
        if count > len(data) - at:
            raise wrong(f"it ends at byte {len(data)}, {at + count} are announced")
        at += count
        return data[at - count : at]

    def number(what: str, maximum: int, minimum: int = 1) -> int:
        value = int.from_bytes(read(4), "little", signed=True)
        if not minimum <= value <= maximum:
            raise wrong(f"it claims {value} {what}")
        return value

    entries: _Entries = {}
    for _ in range(number("entries", len(data) // 16)):
        name = read(number("letters of a name", _MAX_NAME)).decode("utf-8", "replace")
        # Older files have 0 here.
        calls = number("calls", (1 << 31) - 1, minimum=0)
        values = np.frombuffer(read(4 * number("values", len(data) // 4)), "<f4").astype(np.float64)
        if name in entries:
            raise ExportError(f"{path} is damaged: {name} comes twice; make the file again")
        entries[name] = ChannelSums(sums=values, counts=np.array([max(calls, 1)], np.float64))
    return entries
