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
from edge_devices.files.typed_json import from_json, to_json
from edge_runtime.errors import RequestError

SCHEMA = 1
RUNS, ENERGY, WATCH, LOG, DEVICE = "runs.jsonl", "energy.jsonl", "watch.jsonl", "log", "device.json"
MAX_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class DeviceDescription:
    """What device.json holds. `warnings`: from before the run; `happenings`: from during it; `charge_used`: percent."""

    schema: int = SCHEMA
    device: str = ""
    model: str = ""
    warnings: tuple[str, ...] = ()
    happenings: tuple[str, ...] = ()
    hottest_c: float | None = None
    charge_used: int | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceResult(DeviceDescription):
    """One run on one device."""

    run: str
    figures: Figures

    @property
    def label(self) -> str:
        """The device with its model, for tables."""
        return f"{self.device} ({self.model})" if self.model else self.device

    def to_json(self) -> dict[str, Any]:
        """Plain values under stable keys."""
        return {field.name: to_json(getattr(self, field.name)) for field in fields(DeviceDescription)} | {
            "run": self.run,
            "figures": self.figures.to_json(),
        }


def note_device(folder: Path, *, device: str, model: str, warnings: Sequence[str]) -> None:
    """Writes device.json before the run. Raises RequestError if the folder cannot be written."""
    _write(folder, DeviceDescription(device=device, model=model, warnings=tuple(warnings)))


def complete_result(
    folder: Path, *, device: str, incidents: Sequence[str], hottest_c: float | None, charge_used: int | None
) -> DeviceResult:
    """Adds the incidents of the run to device.json and reads `folder` as a result."""
    noted = _description(folder / DEVICE)
    _write(folder, replace(noted, device=device, happenings=tuple(incidents), hottest_c=hottest_c, charge_used=charge_used))
    return read_result(folder)


def _write(folder: Path, description: DeviceDescription) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{folder} cannot be created ({error.strerror}); choose another folder with --results") from error
    write_text(folder / DEVICE, [json.dumps(to_json(description), ensure_ascii=False, indent=1), "\n"])


def read_result(folder: Path) -> DeviceResult:
    """Reads a device's folder; without device.json it is a run of this machine. Raises RequestError for anything else."""
    noted = _description(folder / DEVICE)
    records = read_records(folder / RUNS)
    energy, log = read_energy(folder / ENERGY) if (folder / ENERGY).exists() else (None, None)
    notes = (*(f"before the run: {text}" for text in noted.warnings), *noted.happenings)
    all_figures = figures(replace(records, notes=(*records.notes, *notes)), energy, log)
    return DeviceResult(**vars(noted) | {"device": noted.device or folder.name}, run=folder.parent.name, figures=all_figures)


def find_results(places: Sequence[Path]) -> list[DeviceResult]:
    """Reads all results below the folders `places`. Raises RequestError when there are none."""
    folders = sorted({path.parent for place in places for path in place.rglob(RUNS)})
    if not folders:
        raise RequestError(f"no {RUNS} found below {', '.join(map(str, places))}; give the --results folder of earlier runs")
    return [read_result(folder) for folder in folders]


def _description(path: Path) -> DeviceDescription:
    if not path.exists():
        return DeviceDescription()
    try:
        description = from_json(DeviceDescription, json.loads(read_at_most(path, MAX_BYTES).decode()), "device", exact=True)
        if description.schema != SCHEMA:
            raise ValueError(f"schema {description.schema}; this version reads {SCHEMA}: upgrade edge-mtp")
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not a device description ({error}); collect the run again") from error
    return description
