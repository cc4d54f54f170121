"""Energy records that anybody can make on a device of their own, and that others can check and pool.

A record is the whole energy log with the bundle's hashes and the figures computed from it. Figures are never taken from the file: they are
computed again from the log in it, and a record whose figures differ is refused."""

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
from edge_bench.measure.variants import PLAIN
from edge_bench.report.tables import NONE, PROMPT_JOULES, TextTable, joules, scope_tables
from edge_devices.energy.intervals import mean_interval
from edge_devices.energy.report import EnergyReport, VariantEnergy, ratio_text
from edge_devices.energy.run_log import RunLog, read_log
from edge_devices.errors import DeviceError, EdgeError, errors_as, printable
from edge_devices.files.atomic_write import write_text
from edge_devices.files.limited_read import read_at_most
from edge_devices.files.typed_json import from_json, to_json
from edge_runtime.bundle.manifest import MANIFEST_NAME, Manifest
from edge_runtime.bundle.signature import check_file_signature
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
    with errors_as(RequestError, f"{path} cannot be read", "give a file that edge-bench contribute wrote"):
        return read_at_most(path, MAX_BYTES)


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


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Records by what became of them: pooled, read but not valid (with reasons), and refused (with the sentence)."""

    valid: tuple[CheckedRecord, ...]
    not_valid: tuple[tuple[CheckedRecord, tuple[str, ...]], ...]
    refused: tuple[str, ...]
    signed: bool

    def to_json(self) -> dict[str, Any]:
        records = [
            {
                "file": str(checked.path),
                "device": checked.device,
                "weights": checked.weights,
                "environment": checked.run_log.environment,
                "mlperf": [mlperf_fields(checked, variant) for variant in checked.report.variants],
                **checked.report.to_json(),
            }
            for checked in self.valid
        ]
        not_valid = [{"file": str(checked.path), "reasons": list(reasons)} for checked, reasons in self.not_valid]
        return {"records": records, "not_valid": not_valid, "refused": list(self.refused)}


def pool_records(places: Sequence[Path], public_key: Path | None = None) -> Pool:
    """Checks all records in files and folders; of those that share readings, the first valid one counts.

    With `public_key`, unsigned ones are refused.

    Raises RequestError where there is no file at all.
    """
    files = [file for place in places for file in (sorted(place.rglob(f"*{SUFFIX}")) if place.is_dir() else [place])]
    if not files:
        raise RequestError(f"no {SUFFIX} file below {', '.join(map(str, places))}; give files of edge-bench contribute")
    valid, not_valid, refused = [], [], []
    counted: set[str] = set()
    for file in files:
        try:
            if file not in places and not file.is_file():  # a pipe, which nobody may ever write to
                raise RequestError(f"{file} is no file")
            data = read_record(file)
            if public_key is not None:  # before strangers' readings are computed with
                check_file_signature(file, data, public_key)
            checked = check_record(file, data)
        except EdgeError as error:
            refused.append(str(error))
            continue
        if counted & checked.windows:
            refused.append(f"{file}: the same measurement is there already")
        elif reasons := invalid(checked):
            not_valid.append((checked, tuple(reasons)))
        else:
            counted |= checked.windows
            valid.append(checked)
    return Pool(valid=tuple(valid), not_valid=tuple(not_valid), refused=tuple(refused), signed=public_key is not None)


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


def pool_tables(pool: Pool) -> list[TextTable]:
    """Returns one table per scope, with estimates apart, then the records that do not count."""
    groups: dict[tuple[bool, str], list[CheckedRecord]] = {}
    for checked in pool.valid:
        groups.setdefault((checked.report.estimate, str(checked.report.scope)), []).append(checked)
    rows = [
        (scope, estimate, tuple(map(printable, cells)))
        for (estimate, scope), records in sorted(groups.items())
        for cells in [*(row for checked in records for row in _rows(checked, signed=pool.signed)), *_means(records)]
    ]
    left_out = [(printable(str(checked.path)), printable("; ".join(reasons))) for checked, reasons in pool.not_valid]
    left_out += [("", printable(text)) for text in pool.refused]
    note = "The rules: " + "; ".join(RULES) + "."
    left = [TextTable(name="left-out", title="Left out", columns=("record", "why"), rows=tuple(left_out), note=note)] if left_out else []
    return scope_tables("joules", "Joules", COLUMNS, rows, "Joules of different scopes do not compare; idle power is included.") + left


def _rows(checked: CheckedRecord, *, signed: bool) -> list[tuple[str, ...]]:
    return [
        (
            checked.device,
            _bundle_name(checked),
            variant.name,
            checked.report.meter,
            joules(variant.joules_per_output_token),
            joules(variant.net_joules_per_output_token),
            ratio_text(variant.ratio_to_baseline) if variant.ratio_to_baseline else NONE,
            f"{variant.tokens_per_second:.1f}" if variant.tokens_per_second else NONE,
            *(cell(variant) for _, cell in PROMPT_JOULES),
            "yes" if signed else NONE,
        )
        for variant in checked.report.variants
    ]


def _bundle_name(checked: CheckedRecord) -> str:
    return f"{checked.record.bundle} {checked.quantization}"


def _means(records: Sequence[CheckedRecord]) -> list[tuple[str, ...]]:
    """Means over records of one device and equal weights: their interval is how such devices differ."""
    groups: dict[tuple[str, str, str], list[tuple[str, float]]] = {}
    for checked in records:
        for variant in checked.report.variants:
            if figure := variant.joules_per_output_token:
                groups.setdefault((checked.device, checked.weights, variant.name), []).append((_bundle_name(checked), figure.value))
    rows: list[tuple[str, ...]] = []
    for (device, _, name), group in groups.items():
        if len(group) > 1:
            mean = mean_interval([value for _, value in group], range(len(group)))
            rows.append((f"mean of {len(group)} × {device}", group[0][0], name, NONE, joules(mean), *[NONE] * (len(COLUMNS) - 5)))
    return rows
