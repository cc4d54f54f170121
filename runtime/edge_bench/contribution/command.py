"""`edge-bench contribute` and `pool`: make a record of joules per token, here or on devices, and check and pool such records."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from edge_bench.contribution.guide import steps, wait_for_enter
from edge_bench.contribution.pool import pool_records, pool_tables
from edge_bench.contribution.record import make_record, write_record
from edge_bench.devices.remote_run import device_label
from edge_bench.devices.results import ENERGY, DeviceResult
from edge_bench.measure.benchmark import BenchRequest
from edge_bench.report.terminal import note, print_tables
from edge_devices.command_line import option_group
from edge_devices.energy.run_log import RunLog
from edge_devices.files.atomic_write import write_text
from edge_devices.meters.base import Meter
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.bundle.signature import read_signing_key, sign_file
from edge_runtime.errors import RequestError

MINUTES = 27
# What a record measures: plain decoding and the default policy, on all shipped prompts.
PROTOCOL: dict[str, Any] = {"lengths": "none", "policies": "profit", "contexts": "none", "repeats": 1, "warm_up": 1}
REMOTE = tuple(word for name, value in PROTOCOL.items() for word in (f"--{name.replace('_', '-')}", str(value)))
contribution_options = option_group(
    click.option(
        "--contribute",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Measure joules per token, guided, in less than 30 minutes, and write one file that others can check and pool.",
    ),
    click.option("--sign", type=click.Path(path_type=Path), metavar="KEY", help="With --contribute: sign the file with this Ed25519 key."),
    click.option(
        "--pool",
        type=click.Path(path_type=Path, exists=True),
        multiple=True,
        metavar="PATH",
        help="Check the files of --contribute below this folder, and print a table of those that are valid. Repeatable.",
    ),
    click.option(
        "--minutes",
        type=click.IntRange(min=5),
        help="With --energy: fit the protocol into about so many minutes, by fewer repeats and no loops of single phases.",
    ),
    panel="Energy records",
)


def remote_options(minutes: int) -> list[str]:
    """Returns the options of edge-bench on a device that measures for a record."""
    return [*REMOTE, "--minutes", str(minutes)]


def print_pool(places: tuple[Path, ...], public_key: Path | None, json_path: str | None) -> None:
    """Prints the tables of all records, and writes them as JSON if requested."""
    pool = pool_records(places, public_key)
    if json_path:
        records = [
            {
                "file": str(one.path),
                "device": one.device,
                "weights": one.weights,
                "environment": one.run_log.environment,
                **one.report.to_json(),
            }
            for one in pool.valid
        ]
        left_out = [{"file": str(one.path), "reasons": list(reasons)} for one, reasons in pool.not_valid]
        text = json.dumps({"records": records, "not_valid": left_out, "refused": list(pool.refused)}, ensure_ascii=False, indent=1) + "\n"
        if json_path == "-":
            click.echo(text, nl=False)
            return
        write_text(Path(json_path), [text])
    print_tables(pool_tables(pool))


class Contribution:
    """Writes the record of one bundle. The key is read, and the file's place tried, before anything is measured."""

    def __init__(self, bundle: Path, target: Path, sign: Path | None, minutes: int | None) -> None:
        """Raises EdgeError for a bundle, key or place that cannot be used."""
        self._bundle, self._target = open_bundle(bundle), target
        self._folder = bundle
        self._key = read_signing_key(sign) if sign else None
        self.minutes = minutes or MINUTES
        self.run_name = datetime.datetime.now(datetime.UTC).strftime("contribute-%Y%m%d-%H%M%S")
        if target.suffix != ".json" or not target.resolve().parent.is_dir():
            raise RequestError(f"--contribute {target} must be a .json file in a folder that exists")

    def measure_here(self, request: BenchRequest, meter: Meter, measure: Callable[[Path], RunLog]) -> None:
        """Guides, measures with `measure`, which writes the log to the path that it gets, and writes the record."""
        for line in steps(meter.facts, self.minutes):
            note(line)
        wait_for_enter(_can_ask())
        log_path = self._target.with_suffix(".jsonl")
        log = measure(log_path)
        settings = {"threads": request.threads, "tokens": request.tokens, "backend": request.backend, "policies": list(request.policies)}
        self._write(log_path, self._target, settings, ["stopped by Ctrl-C"] if log.stopped else [])

    def guide_devices(self) -> None:
        """Prints the steps for other devices, whose meters are not known yet."""
        for line in steps(None, self.minutes):
            note(line)
        wait_for_enter(_can_ask())

    def collect(self, results: Sequence[DeviceResult], values: dict[str, Any]) -> None:
        """Writes a record for each device; with several devices, each one's label is part of the name."""
        settings = {name: values[name] for name in ("threads", "max_tokens", "backend")} | {"policies": [PROTOCOL["policies"]]}
        for result in results:
            label = device_label(result.device)
            log_path = values["results"] / result.run / label / ENERGY
            if not log_path.exists():
                note(f"{result.device}: no energy was measured; see {log_path.parent} for the reason")
                continue
            target = self._target if len(results) == 1 else self._target.with_stem(f"{self._target.stem}-{label}")
            self._write(log_path, target, settings, result.incidents)

    def _write(self, log_path: Path, target: Path, settings: dict[str, Any], remarks: Sequence[str]) -> None:
        record = make_record(log_path, self._folder, self._bundle.manifest, settings=settings, remarks=remarks)
        write_record(target, record)
        signature = f", signed in {sign_file(target, self._key)}" if self._key else ""
        pool = pool_records([target])
        print_tables(pool_tables(pool))
        note(f"written to {target}{signature}; it holds the readings, the device's model and versions, no names and no serial numbers")
        note("valid: send this file" if pool.valid else "not valid: see why above, and measure again")


def _can_ask() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()
