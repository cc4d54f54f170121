"""`edge-bench contribute`: measures speeds and joules per token, guided, here or on devices, and writes records that others can pool."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from edge_bench.cli.devices import ReachOptions, measure_on
from edge_bench.contribution.energy_records import make_record, write_record
from edge_bench.contribution.pool import pool_records, pool_tables
from edge_bench.contribution.speed_records import MIN_REPEATS
from edge_bench.devices.remote_run import device_label
from edge_bench.devices.results import ENERGY, RUNS
from edge_bench.measure.command import measure_joules, measure_speeds
from edge_bench.measure.energy import find_meter
from edge_bench.measure.progress import note
from edge_bench.measure.request import BenchRequest, MeterOptions, option_words
from edge_bench.report.tables import print_tables
from edge_devices.command_line import PanelCommand, takes
from edge_devices.energy.virtual_meters import ESTIMATE, EXTERNAL
from edge_devices.meters.base import MeterFacts, Scope
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.bundle.signature import read_signing_key, sign_file
from edge_runtime.cli.options import BundlePath, refuse_threads
from edge_runtime.errors import RequestError
from edge_runtime.session.load_options import LoadOptions

MINUTES = 27
CLOSE = "close browsers, updates, backups and everything else that computes; leave the machine alone until the end"
PLACE = "place it as it is used: on a table, no cushion, fan free, not in the sun"
BY_SCOPE = {
    Scope.DEVICE: (
        "charge the battery to 40 to 90 %, then unplug the charger and every USB device",
        "set the screen to its lowest brightness and keep it on",
    ),
    Scope.BOARD: (
        "use the maker's power supply; unplug USB disks and HATs: the board's sensors do not see them",
        "a Raspberry Pi needs its fan or heat sink: a throttled run does not count",
    ),
    Scope.EXTERNAL: ("plug the meter between supply and device, and start its recording now",),
    Scope.WALL: ("plug the device alone into the meter, and start its recording now",),
    Scope.ESTIMATE: ("nothing is measured: watts are a model's, and the record is labelled ESTIMATE",),
}
PLUGGED = ("plug in the charger: a processor's meter does not depend on it, and batteries change the clocks",)
REMOTE = (
    "keep the cable in, or wireless adb connected, until this program says that the run has started",
    "a phone without rail meters is measured at its battery: add --unplugged, and unplug it when asked",
)
REPLY = "Press Enter to begin, or Ctrl-C to leave: "
# What a record measures: plain decoding and the default policy, on all shipped prompts. The protocol of joules has repeats of its own.
PROTOCOL = BenchRequest(lengths=(), policies=("profit",), contexts=(), repeats=MIN_REPEATS, warm_up=1)


@click.command(cls=PanelCommand)
@click.argument("bundle", type=BundlePath())
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--sign", type=click.Path(path_type=Path), metavar="KEY", help="Sign the file with this Ed25519 key.")
@takes("meters", MeterOptions(minutes=MINUTES))
@takes("request", PROTOCOL, only=["threads"])
@takes("load", LoadOptions, only=["backend"])
@takes("reach", ReachOptions, panel="Devices")
def contribute(
    bundle: Path, file: Path, sign: Path | None, meters: MeterOptions, request: BenchRequest, load: LoadOptions, reach: ReachOptions
) -> None:
    """Measure speeds and joules per token, guided, in about 30 minutes, and write FILE for others to check and pool.

    Without an energy meter the record has speeds alone.
    """
    contribution = Contribution(bundle, file, sign, request, load)
    if reach.adb or reach.ssh:
        contribution.on_devices(reach, meters)
    else:
        refuse_threads(request.threads)
        contribution.on_this_machine(meters)


class Contribution:
    """Writes the record of one bundle. The key is read, and the file's place tried, before anything is measured."""

    def __init__(self, bundle: Path, target: Path, sign: Path | None, request: BenchRequest, load: LoadOptions) -> None:
        """Raises EdgeError for a bundle, key or place that cannot be used."""
        self._bundle, self._target = open_bundle(bundle), target
        self._folder, self._request, self._load = bundle, request, load
        self._key = read_signing_key(sign) if sign else None
        if target.suffix != ".json" or not target.resolve().parent.is_dir():
            raise RequestError(f"{target} must be a .json file in a folder that exists")

    def on_this_machine(self, meters: MeterOptions) -> None:
        """Guides, measures and writes the record, without joules where no meter is. Raises RequestError for one that is read later."""
        meter, reason = find_meter(meters.meter)
        if meter is None and meters.meter is not None:
            raise RequestError(f"{reason}; see edge-devices meters, or leave --meter out for a record of speeds alone")
        if meter is not None and meter.facts.name == EXTERNAL:
            raise RequestError("a record needs a meter that is read during the runs; use edge-bench run --energy and a table")
        if meter is None:
            note(f"{reason}: the record will have speeds, and no joules; --meter {ESTIMATE} adds some that are labelled as estimates")
        else:
            guide(meter.facts, meters)
        runs, log_path = self._target.with_suffix(".runs.jsonl"), None
        _, stopped = measure_speeds(self._folder, self._request, self._load, runs)
        if meter is not None and not stopped:
            log_path = self._target.with_suffix(".jsonl")
            _, log = measure_joules(self._folder, self._request, self._load, log_path, meter, meters.minutes)
            stopped = log.stopped
        self._write(log_path, runs, self._target, ["stopped by Ctrl-C"] if stopped else [])

    def on_devices(self, reach: ReachOptions, meters: MeterOptions) -> None:
        """Guides, measures and writes a record for each device; with several, each one's label is part of the name."""
        guide(None, meters)
        words = (*option_words(self._request), *option_words(self._load), *option_words(meters))
        results = measure_on(reach, reach.run_of(self._folder, options=words, energy=True, meter=meters.meter))
        for result in results:
            label = device_label(result.device)
            folder = reach.results / result.run / label
            log_path: Path | None = folder / ENERGY
            if log_path is not None and not log_path.exists():
                note(f"{result.device}: no energy was measured, so the record has speeds alone; see {folder} for the reason")
                log_path = None
            target = self._target if len(results) == 1 else self._target.with_stem(f"{self._target.stem}-{label}")
            self._write(log_path, folder / RUNS, target, result.happenings)

    def _write(self, log_path: Path | None, runs: Path, target: Path, remarks: Sequence[str]) -> None:
        request = self._request
        settings = {"threads": request.threads, "tokens": request.tokens, "backend": self._load.backend, "policies": list(request.policies)}
        record = make_record(log_path, runs, self._folder, self._bundle.manifest, settings=settings, remarks=remarks)
        write_record(target, record)
        signature = f", signed in {sign_file(target, self._key)}" if self._key else ""
        pool = pool_records([target])
        print_tables(pool_tables(pool))
        holds = "it holds the measurements, the device's model and versions; no texts, no names and no serial numbers"
        note(f"written to {target}{signature}; {holds}")
        counts = [kind for kind, valid in (("speeds", pool.speeds), ("joules", pool.valid)) if valid]
        rest = "; what is not valid is named above" if pool.not_valid or pool.refused else ""
        note(f"valid ({' and '.join(counts)}): send this file{rest}" if counts else "not valid: see why above, and measure again")


def guide(meter: MeterFacts | None, meters: MeterOptions) -> None:
    """Prints the steps before a measurement, and waits for Enter where somebody can press it."""
    for line in steps(meter, meters.minutes or MINUTES):
        note(line)
    if sys.stdin is not None and sys.stdin.isatty():
        input(REPLY)


def steps(facts: MeterFacts | None, minutes: int) -> list[str]:
    """Returns the steps before a measurement, numbered; `facts` None: on another device, whose meter is not known yet."""
    own: Sequence[str] = REMOTE if facts is None else BY_SCOPE.get(facts.scope, PLUGGED)
    every = [
        *own,
        CLOSE,
        PLACE,
        f"wait: this takes about {minutes} minutes; Ctrl-C keeps what was measured, but such a record does not count",
    ]
    head = "the device's own meter" if facts is None else f"meter {facts.name}, scope {facts.scope}"
    return [f"Joules per token of this bundle, with {head}:", *(f"  {number}. {text}" for number, text in enumerate(every, start=1))]
