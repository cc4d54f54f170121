"""The results of runs on devices: a folder per device with the raw records and device.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from edge_bench.measure.energy import read_energy
from edge_bench.measure.records import read_records
from edge_bench.report.figures import Figures, figures
from edge_devices.files.atomic_write import write_text
from edge_devices.files.limited_read import read_at_most
from edge_runtime.errors import RequestError

SCHEMA = 1
RUNS, ENERGY, WATCH, LOG, DEVICE = "runs.jsonl", "energy.jsonl", "watch.jsonl", "log", "device.json"
MAX_BYTES = 1 << 20
EMPTY: dict[str, Any] = {"device": "", "model": "", "warnings": [], "happenings": [], "hottest_c": None, "charge_used": None}


@dataclass(frozen=True, kw_only=True)
class DeviceResult:
    """One run on one device. `warnings`: from before it; `incidents`: from during it; `charge_used`: percent."""

    device: str
    run: str
    figures: Figures
    model: str = ""
    warnings: tuple[str, ...] = ()
    incidents: tuple[str, ...] = ()
    hottest_c: float | None = None
    charge_used: int | None = None

    @property
    def label(self) -> str:
        """The device with its model, for tables."""
        return f"{self.device} ({self.model})" if self.model else self.device

    def to_json(self) -> dict[str, Any]:
        """Plain values under stable keys."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        incidents = plain.pop("incidents")
        return plain | {"warnings": list(self.warnings), "happenings": list(incidents), "figures": self.figures.to_json()}


def note_device(folder: Path, *, device: str, model: str, warnings: Sequence[str]) -> None:
    """Writes device.json before the run. Raises RequestError if the folder cannot be written."""
    _write(folder, {**EMPTY, "device": device, "model": model, "warnings": list(warnings)})


def complete_result(
    folder: Path, *, device: str, incidents: Sequence[str], hottest_c: float | None, charge_used: int | None
) -> DeviceResult:
    """Adds the incidents of the run to device.json and reads `folder` as a result."""
    known = {**_device(folder / DEVICE), "device": device}
    _write(folder, {**known, "happenings": list(incidents), "hottest_c": hottest_c, "charge_used": charge_used})
    return read_result(folder)


def _write(folder: Path, record: dict[str, Any]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{folder} cannot be created ({error.strerror}); choose another folder with --results") from error
    write_text(folder / DEVICE, [json.dumps({"schema": SCHEMA, **record}, ensure_ascii=False, indent=1), "\n"])


def read_result(folder: Path) -> DeviceResult:
    """Reads a device's folder; without device.json it is a run of this machine. Raises RequestError for anything else."""
    record = _device(folder / DEVICE)
    records = read_records(folder / RUNS)
    energy, log = read_energy(folder / ENERGY) if (folder / ENERGY).exists() else (None, None)
    notes = (*(f"before the run: {text}" for text in record["warnings"]), *record["happenings"])
    return DeviceResult(
        device=record["device"] or folder.name,
        run=folder.parent.name,
        model=record["model"],
        warnings=tuple(record["warnings"]),
        incidents=tuple(record["happenings"]),
        hottest_c=record["hottest_c"],
        charge_used=record["charge_used"],
        figures=figures(replace(records, notes=(*records.notes, *notes)), energy, log),
    )


def find_results(places: Sequence[Path]) -> list[DeviceResult]:
    """Reads all results below the folders `places`. Raises RequestError when there are none."""
    folders = sorted({path.parent for place in places for path in place.rglob(RUNS)})
    if not folders:
        raise RequestError(f"no {RUNS} found below {', '.join(map(str, places))}; give the --results folder of earlier runs")
    return [read_result(folder) for folder in folders]


def _device(path: Path) -> dict[str, Any]:
    if not path.exists():
        return dict(EMPTY)
    try:
        record = json.loads(read_at_most(path, MAX_BYTES).decode())
        schema = record.pop("schema")
        if schema != SCHEMA:
            raise ValueError(f"schema {str(schema)[:40]}; this version reads {SCHEMA}: upgrade edge-mtp")
        if record.keys() != EMPTY.keys():
            raise ValueError("with other keys")
        texts = [record["device"], record["model"], *record["warnings"], *record["happenings"]]
        numbers = [record["hottest_c"], record["charge_used"]]
        if not all(isinstance(text, str) for text in texts) or not all(n is None or isinstance(n, int | float) for n in numbers):
            raise ValueError("with values of other types")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{path} is not a device description ({error}); collect the run again") from error
    return dict(record)
