"""Records that anybody can make on a device of their own, and that others can check: the file, and its joules.

A record is the bundle's hashes with all raw records of a benchmark (`speed_records`) and, where there is a meter, the whole energy log and
the figures computed from it. Figures are never taken from the file: they are computed again, and a record whose figures differ is
refused."""

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from edge_bench.measure.energy import energy_figures
from edge_bench.measure.variants import PLAIN
from edge_devices.energy.report import EnergyReport, VariantEnergy
from edge_devices.energy.run_log import RunLog, read_log
from edge_devices.errors import EdgeError, errors_as
from edge_devices.files.atomic_write import write_text
from edge_devices.files.limited_read import read_at_most
from edge_devices.files.typed_json import from_json, to_json
from edge_runtime.bundle.manifest import MANIFEST_NAME, Manifest, ModelSource
from edge_runtime.errors import RequestError

KIND, SCHEMA = "edge-mtp energy record", 1
# Three hours of ten readings a second, with a kilobyte of raw text each, as the longest have; usual are 27 minutes.
MAX_BYTES, MAX_LOG_BYTES, MAX_LOG_LINES = 64 << 20, 128 << 20, 120_000
Part = TypeVar("Part")
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
    """All of a record. `figures`: [value, low, high] of joules per output token by variant; `log`: the energy log, deflated, base64.

    `runs`: the raw records of the benchmark, likewise; `sources`, `parity`: the manifest's. Without a meter `log` is empty, and so is
    `runs` in records of earlier versions.
    """

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
    sources: dict[str, ModelSource] = field(default_factory=dict)
    parity: dict[str, Any] | None = None
    runs_sha256: str = ""
    runs: str = ""


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


def make_record(
    log_path: Path | None, runs_path: Path, folder: Path, manifest: Manifest, *, settings: Mapping[str, Any], remarks: Sequence[str]
) -> EnergyRecord:
    """Returns the record of a benchmark of the bundle in `folder`, and of its energy log. Raises DeviceError if no repeat counts."""
    log = log_path.read_bytes() if log_path is not None else b""
    runs = runs_path.read_bytes()
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
        figures={} if log_path is None else _claims(energy_figures(read_log(log_path))),
        log_sha256=hashlib.sha256(log).hexdigest(),
        log=_deflated(log),
        sources=dict(manifest.sources),
        parity=manifest.parity,
        runs_sha256=hashlib.sha256(runs).hexdigest(),
        runs=_deflated(runs),
    )


def write_record(path: Path, record: EnergyRecord) -> None:
    """Writes a record."""
    write_text(path, [json.dumps(to_json(record), ensure_ascii=False, allow_nan=False, indent=1), "\n"])


def read_record(path: Path) -> bytes:
    """Returns the bytes of a record. Raises RequestError if the file cannot be read."""
    with errors_as(RequestError, f"{path} cannot be read", "give a file that edge-bench contribute wrote"):
        return read_at_most(path, MAX_BYTES)


def parsed_record(path: Path, data: bytes) -> EnergyRecord:
    """Returns the record of these bytes, nothing of which is checked yet but its structure. Raises RequestError."""
    try:
        record = from_json(EnergyRecord, json.loads(data.decode()), "record")
        if record.kind != KIND:
            raise ValueError(f"it is {record.kind[:40]!r}")
        if record.schema != SCHEMA:
            raise ValueError(f"schema {record.schema}; this version reads {SCHEMA}: upgrade edge-mtp")
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is no energy record ({error}); give a file that edge-bench contribute wrote") from error
    return record


def inflated(path: Path, text: str, sha256: str) -> bytes:
    """Returns what a deflated part of a record holds. Raises RequestError if it is damaged, too large or has another hash."""
    unpack = zlib.decompressobj()
    try:
        data = unpack.decompress(base64.b64decode(text, validate=True), MAX_LOG_BYTES)
        if not unpack.eof:
            raise ValueError(f"its log is incomplete, or larger than {MAX_LOG_BYTES >> 20} MiB")
    except (ValueError, binascii.Error, zlib.error) as error:
        raise RequestError(f"{path} is no energy record ({error}); give a file that edge-bench contribute wrote") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise RequestError(f"{path}: the log in it has another sha256 than it states; ask for the file again")
    return data


def read_part(path: Path, data: bytes, read: Callable[[Path], Part], wrong: str, name: str) -> Part:
    """Returns what `read` makes of a file with a part of the record at `path`. Raises RequestError: what is `wrong`, and why."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "part.jsonl"
        file.write_bytes(data)
        try:
            return read(file)
        except EdgeError as error:
            raise RequestError(f"{path}: {wrong} ({str(error).replace(str(file), name)})") from error


def check_record(path: Path, record: EnergyRecord) -> CheckedRecord:
    """Computes the joules of the record at `path` from its own readings. Raises RequestError where anything does not follow from them."""

    def figures_of(file: Path) -> tuple[RunLog, EnergyReport]:
        log = read_log(file, MAX_LOG_LINES)
        return log, energy_figures(log)

    log, report = read_part(path, inflated(path, record.log, record.log_sha256), figures_of, "its log yields no figures", "the log")
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


def _deflated(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode() if data else ""


SUFFIX = ".json"
MIN_REPEATS = 3
MAX_REFUSED_SHARE = 1 / 3
MAX_HALF_WIDTH = 0.25  # of the figure
WATTS = (0.05, 3000.0)
RULES = (
    f"at least {MIN_REPEATS} repeats of every variant count, and at most a third do not",
    f"plain decoding is among the variants, with an interval of at most ± {MAX_HALF_WIDTH:.0%}",
    "idle power was measured before and after",
    "the measurement was not stopped, and power, speed and temperature were steady before it",
    "the joules of the phases add up, where they were calibrated",
    f"mean power is within {WATTS[0]:g} to {WATTS[1]:g} W",
    "other programs used no more than 15 % of the processors, and programs waited for one in no more than 15 % of the time",
)
COLUMNS = (
    "device",
    "bundle",
    "",
    "meter",
    "J/output token [95%]",
    "above idle",
    "over plain",
    "tok/s",
    "prompt tokens",
    "J/prompt token",
    "signed",
)


def invalid(checked: CheckedRecord) -> list[str]:
    """Returns why a record is not pooled; an empty list if it is. Estimates follow the same rules, but for their intervals."""
    report, reasons = checked.report, []
    if PLAIN not in {variant.name for variant in report.variants}:
        reasons.append("plain decoding was not measured")
    if report.idle is None or report.idle.windows < 2:
        reasons.append("idle power was not measured before and after")
    reasons += [text for text in checked.run_log.warnings if text.startswith(("stopped", "power, speed and temperature"))]
    for variant in report.variants:
        reasons += [f"{variant.name}: {text}" for text in _of_variant(variant, estimate=report.estimate)]
    if not checked.run_log.others:
        reasons.append("how busy the machine was is not in its log")
    return reasons + [f"busy: {load.sentence()}" for load in checked.run_log.others if load.is_busy]


def mlperf_fields(checked: CheckedRecord, variant: VariantEnergy) -> dict[str, Any]:
    """Returns a variant's figures under the names proposed for MLPerf Inference (github.com/mlcommons/inference, issue 2558).

    None: not measured. Repeats that do not count are left out of the counts as of the means.
    """
    log, per_token = checked.run_log, variant.joules_per_output_token
    left_out = {int(text.split(":")[0].removeprefix("repeat ")) for text in variant.refused}
    runs = [run for run in log.runs if run.variant == variant.name and run.repeat not in left_out]
    requests = sum(run.requests for run in runs)
    begin = min((start for start, _ in log.idles), default=None)
    return {
        "variant": variant.name,
        "energy_per_token_joules": per_token and {"mean": per_token.value, "std": _finite(per_token.error * math.sqrt(per_token.n))},
        "total_energy_joules": variant.joules_per_request and variant.joules_per_request.value * requests,
        "power_draw_watts": variant.watts and {"mean": variant.watts.value, "peak": None},
        "output_token_count": sum(run.emitted_tokens for run in runs),
        "batch_size": 1,
        "input_sequence_length": variant.prompt_tokens,
        "output_sequence_length": sum(run.emitted_tokens for run in runs) / requests if requests else None,
        "scenario": "singlestream",
        "measurement_method": checked.report.meter,
        "sampling_rate_hz": 1 / checked.report.refresh_s if checked.report.refresh_s else None,
        "thermal_stabilization_seconds": runs[0].start_s - begin if runs and begin is not None else None,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _of_variant(variant: VariantEnergy, *, estimate: bool) -> list[str]:
    reasons, joules = [], variant.joules_per_output_token
    if variant.n < MIN_REPEATS:
        reasons.append(f"{variant.n} repeats count, {MIN_REPEATS} are needed")
    if len(variant.refused) > MAX_REFUSED_SHARE * (variant.n + len(variant.refused)):
        reasons.append(f"{len(variant.refused)} of {variant.n + len(variant.refused)} repeats do not count")
    if joules is None:
        reasons.append("no joules per token")
    elif not estimate and variant.name == PLAIN and not 0 < joules.half <= MAX_HALF_WIDTH * joules.value:
        reasons.append(f"an interval of ± {joules.half / joules.value:.0%} is too wide" if joules.value else "no energy was used")
    if variant.watts and not WATTS[0] <= variant.watts.value <= WATTS[1]:
        reasons.append(f"a mean power of {variant.watts.value:.3g} W is not plausible")
    if not variant.closes:
        reasons.append("the joules of the phases do not add up")
    return reasons
