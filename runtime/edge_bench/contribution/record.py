"""The file of a contributed measurement: the whole energy log with the bundle's hashes and the figures computed from it.

Figures are never taken from the file: they are computed again from the log in it, and a record whose figures differ is refused.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import hashlib
import json
import math
import tempfile
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_bench.measure.energy import energy_figures
from edge_devices.energy.report import EnergyReport
from edge_devices.energy.run_log import RunLog, read_log
from edge_devices.errors import DeviceError
from edge_devices.files.atomic_write import write_text
from edge_devices.files.limited_read import read_at_most
from edge_devices.files.typed_json import from_json, to_json
from edge_runtime.bundle.manifest import MANIFEST_NAME, Manifest
from edge_runtime.errors import RequestError

KIND, SCHEMA = "edge-mtp energy record", 1
# Three hours of ten readings a second, with a kilobyte of raw text each, as the longest have; usual are 27 minutes.
MAX_BYTES, MAX_LOG_BYTES, MAX_LOG_LINES = 64 << 20, 128 << 20, 120_000
TOLERANCE = 1e-6  # relative; the same arithmetic on another machine may round differently


@dataclass(frozen=True, kw_only=True)
class HashedFile:
    """One model file of the bundle."""

    role: str
    quantization: str | None
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class EnergyRecord:
    """All of a record. `figures`: [value, low, high] of joules per output token by variant; `log`: the energy log, deflated, base64."""

    kind: str
    schema: int
    created_at: str
    bundle: str
    target: str
    manifest_sha256: str
    files: tuple[HashedFile, ...]
    settings: dict[str, Any]
    remarks: tuple[str, ...]
    figures: dict[str, tuple[float, ...]]
    log_sha256: str
    log: str


@dataclass(frozen=True, kw_only=True)
class CheckedRecord:
    """A record whose figures follow from its readings."""

    path: Path
    record: EnergyRecord
    report: EnergyReport
    run_log: RunLog

    @property
    def device(self) -> str:
        """What the device calls itself."""
        known = self.run_log.environment
        return str(known.get("model") or known.get("soc") or known.get("processor") or known.get("profile") or "unknown")

    @property
    def weights(self) -> str:
        """A hash of all model files: records of equal ones compare."""
        return hashlib.sha256("".join(sorted(file.sha256 for file in self.record.files)).encode()).hexdigest()

    @property
    def windows(self) -> frozenset[str]:
        """A hash of each run's readings: records that share one hold the same measurement."""
        trace, hashes = self.run_log.trace, set()
        for run in self.run_log.runs:
            inside = trace.span(run.start_s, run.end_s)
            if inside:
                readings = array("d", [*trace.times[inside.start : inside.stop], *trace.values[inside.start : inside.stop]])
                hashes.add(hashlib.sha256(readings.tobytes()).hexdigest())
        return frozenset(hashes)

    @property
    def quantization(self) -> str:
        """The target's quantization."""
        return next((file.quantization or "" for file in self.record.files if file.role == "target"), "")


def make_record(log_path: Path, folder: Path, manifest: Manifest, *, settings: Mapping[str, Any], remarks: Sequence[str]) -> EnergyRecord:
    """Returns the record of an energy log of a bundle in `folder`. Raises DeviceError if no repeat counts."""
    data = log_path.read_bytes()
    source = manifest.sources.get("target")
    return EnergyRecord(
        kind=KIND,
        schema=SCHEMA,
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        bundle=folder.resolve().name,
        target=Path(source.origin).name if source else "",
        manifest_sha256=hashlib.sha256((folder / MANIFEST_NAME).read_bytes()).hexdigest(),
        files=tuple(HashedFile(role=f.role, quantization=f.quantization, bytes=f.bytes, sha256=f.sha256) for f in manifest.files),
        settings=dict(settings),
        remarks=tuple(remarks),
        figures=_claims(energy_figures(read_log(log_path))),
        log_sha256=hashlib.sha256(data).hexdigest(),
        log=base64.b64encode(zlib.compress(data, 9)).decode(),
    )


def write_record(path: Path, record: EnergyRecord) -> None:
    """Writes a record."""
    write_text(path, [json.dumps(to_json(record), ensure_ascii=False, allow_nan=False, indent=1), "\n"])


def read_record(path: Path) -> bytes:
    """Returns the bytes of a record. Raises RequestError if the file cannot be read."""
    try:
        return read_at_most(path, MAX_BYTES)
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error}); give a file that edge-bench contribute wrote") from error


def check_record(path: Path, data: bytes) -> CheckedRecord:
    """Reads the bytes of the record at `path` and computes its figures from its own readings.

    Raises RequestError where anything does not follow from them.
    """
    try:
        record = from_json(EnergyRecord, json.loads(data.decode()), "record")
        if record.kind != KIND:
            raise ValueError(f"it is {record.kind[:40]!r}")
        if record.schema != SCHEMA:
            raise ValueError(f"schema {record.schema}; this version reads {SCHEMA}: upgrade edge-mtp")
        inflated = _inflated(record.log)
    except (ValueError, RecursionError, binascii.Error, zlib.error) as error:
        raise RequestError(f"{path} is no energy record ({error}); give a file that edge-bench contribute wrote") from error
    if hashlib.sha256(inflated).hexdigest() != record.log_sha256:
        raise RequestError(f"{path}: the log in it has another sha256 than it states; ask for the file again")
    with tempfile.TemporaryDirectory() as folder:
        log_path = Path(folder) / "energy.jsonl"
        log_path.write_bytes(inflated)
        try:
            log = read_log(log_path, MAX_LOG_LINES)
            report = energy_figures(log)
        except DeviceError as error:
            raise RequestError(f"{path}: its log yields no figures ({str(error).replace(str(log_path), 'the log')})") from error
    claimed, computed = record.figures, _claims(report)
    if claimed.keys() != computed.keys() or not all(_close(claimed[name], computed[name]) for name in computed):
        raise RequestError(f"{path}: its figures do not follow from its readings; do not use it")
    return CheckedRecord(path=path, record=record, report=report, run_log=log)


def _claims(report: EnergyReport) -> dict[str, tuple[float, ...]]:
    return {
        variant.name: tuple(bound for bound in (joules.value, joules.low, joules.high) if math.isfinite(bound))
        for variant in report.variants
        if (joules := variant.joules_per_output_token)
    }


def _close(claimed: Sequence[float], computed: Sequence[float]) -> bool:
    if len(claimed) != len(computed):
        return False
    return all(math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE) for a, b in zip(claimed, computed, strict=True))


def _inflated(text: str) -> bytes:
    unpack = zlib.decompressobj()
    data = unpack.decompress(base64.b64decode(text, validate=True), MAX_LOG_BYTES)
    if not unpack.eof:
        raise ValueError(f"its log is incomplete, or larger than {MAX_LOG_BYTES >> 20} MiB")
    return data
