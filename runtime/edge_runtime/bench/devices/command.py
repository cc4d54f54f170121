"""The part of `edge-bench` that measures on other machines: phones behind adb, hosts behind ssh, fleets of either."""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from edge_devices.command_line import option_group
from edge_devices.errors import EdgeError
from edge_devices.transports.adb import AdbTransport, usable_serials
from edge_devices.transports.base import Transport
from edge_devices.transports.ssh import SshTransport
from edge_runtime.bench.devices.comparison import comparison_tables
from edge_runtime.bench.devices.package import read_package
from edge_runtime.bench.devices.remote_run import RemoteRequest, bench_on, clean, deploy, end_run
from edge_runtime.bench.devices.results import DeviceResult
from edge_runtime.bench.measure.record_file import atomic_write
from edge_runtime.bench.report.tables import TextTable
from edge_runtime.bench.report.terminal import note, print_tables
from edge_runtime.errors import RequestError

ALL = "all"
PARQUET = "parquet"
HERE_ONLY = ("runs", "report", "against", "verify_key")
# What edge-bench on the device is told as well, where the user gave it.
FORWARDED = {
    "domains",
    "files",
    "per_domain",
    "lengths",
    "policies",
    "drafters",
    "repeats",
    "max_tokens",
    "warm_up",
    "contexts",
    "concurrency",
    "kv_types",
    "backend",
    "threads",
    "context",
    "config",
    "preset",
    "check",
}
device_options = option_group(
    click.option("--adb", multiple=True, metavar="SERIAL", help="Measure on this phone, or on all that adb sees (all). Repeatable."),
    click.option("--ssh", multiple=True, metavar="HOST", help="Measure on this host of your ssh configuration. Repeatable."),
    click.option("--fleet", metavar="ADDRESS", help="Measure on the phones of all workers of this Dask scheduler (needs edge-mtp[fleet])."),
    click.option("--package", type=click.Path(path_type=Path), help="The device package that edge-export --package built."),
    click.option("--results", type=click.Path(path_type=Path), default=Path("bench-results"), help="Devices' results: RESULTS/RUN/DEVICE."),
    click.option("--run", "run_name", help="The run's name; one that a device has already is followed and collected.  [default: the time]"),
    click.option("--unplugged", is_flag=True, help="The device waits until its cable is pulled, then measures at its battery."),
    click.option("--deploy-only", is_flag=True, help="Bring package and bundle to the devices, and start nothing."),
    click.option("--stop", is_flag=True, help="End the run of --run on the devices; collect it with the same command without --stop."),
    click.option("--clean", is_flag=True, help="Remove all of ours from the devices after collecting; without BUNDLE: at once."),
    click.option("--device-folder", help=f"Our folder on the devices.  [default: {AdbTransport.FOLDER}, {SshTransport.FOLDER}]"),
    click.option("--ssh-config", type=click.Path(path_type=Path, exists=True), help="Another ssh configuration than your own."),
    click.option("--compare", type=click.Path(path_type=Path), multiple=True, help="Measure nothing: set devices' results side by side."),
)


def wants_devices(values: dict[str, Any]) -> bool:
    """Returns whether another machine is to measure."""
    return bool(values["adb"] or values["ssh"] or values["fleet"])


def bench_devices(bundle: Path | None, values: dict[str, Any]) -> list[DeviceResult]:
    """Does what was asked on all devices at once. Raises RequestError when nothing came of it on any; others are told and left out."""
    if values["clean"] and bundle is None:
        _each(connect(values), lambda transport: clean(transport))
        return []
    request = remote_request(bundle, values)
    if values["fleet"]:
        from edge_runtime.bench.devices.fleet import run_fleet

        return run_fleet(values["fleet"], request, values["results"], serials=tuple(values["adb"]), folder=values["device_folder"])
    transports = connect(values)
    if values["stop"]:
        _each(transports, lambda transport: end_run(transport, request.name))
        return []
    if values["deploy_only"]:
        _each(transports, lambda transport: deploy(transport, request, reporter(transport)))
        return []
    note(f"run {request.name} on {', '.join(transport.name for transport in transports)}")
    return _each(transports, lambda transport: bench_on(transport, request, values["results"], reporter(transport)))


def reporter(transport: Transport) -> Callable[[str], None]:
    """Returns what says a sentence about a device to the person."""
    return lambda text: note(f"[{transport.name}] {text}")


def connect(values: dict[str, Any]) -> list[Transport]:
    """Returns the transports of --adb and --ssh. Raises TransportError for what cannot be reached."""
    folder = values["device_folder"]
    options = ["-F", str(values["ssh_config"])] if values["ssh_config"] else []
    serials = [one for serial in values["adb"] for one in (usable_serials(note) if serial == ALL else [serial])]
    phones: list[Transport] = [AdbTransport(serial, folder or AdbTransport.FOLDER) for serial in dict.fromkeys(serials)]
    return phones + [SshTransport(host, folder or SshTransport.FOLDER, options) for host in dict.fromkeys(values["ssh"])]


def remote_request(bundle: Path | None, values: dict[str, Any]) -> RemoteRequest:
    """Makes the request of the command's values. Raises RequestError for what cannot be asked of a device."""
    if bundle is None:
        raise RequestError("name the BUNDLE to measure")
    if values["package"] is None:
        raise RequestError("a device needs --package DIR; build it with edge-export --package")
    for name in HERE_ONLY:
        if values.get(name):
            raise RequestError(f"--{name.replace('_', '-')} is for this machine; what a device measures goes to --results")
    if values["stop"] and not values["run_name"]:
        raise RequestError("--stop needs the name of the run, --run NAME")
    return RemoteRequest(
        bundle=bundle,
        package=read_package(values["package"]),
        options=tuple(forwarded(click.get_current_context())),
        name=values["run_name"] or datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S"),
        energy=bool(values["energy"]),
        meter=values["meter"],
        unplugged=values["unplugged"],
        clean=values["clean"],
    )


def forwarded(context: click.Context) -> list[str | Path]:
    """Returns the options that the user gave and that mean the same on the device; files as paths of ours."""
    words: list[str | Path] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        if name not in FORWARDED or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, bool):
                words.append((parameter.opts if one else parameter.secondary_opts)[0])
            else:
                words += [parameter.opts[0], one if isinstance(one, Path) else str(one)]
    return words


Outcome = TypeVar("Outcome")


def _each(transports: Sequence[Transport], work: Callable[[Transport], Outcome]) -> list[Outcome]:
    """Does the work on all devices at once; tells who failed, and raises RequestError when all did. Ctrl-C leaves what runs on them alone."""
    outcomes: dict[str, Outcome] = {}
    failures: dict[str, str] = {}

    def one(transport: Transport) -> None:
        try:
            outcomes[transport.name] = work(transport)
        except EdgeError as error:
            failures[transport.name] = str(error)

    threads = [threading.Thread(target=one, args=(transport,), daemon=True) for transport in transports]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.2)  # a join without an end would not hear Ctrl-C
    if len(failures) + len(outcomes) < len(transports):
        raise RequestError("a device was given up on because of a mistake in this program; please report what it printed above")
    if failures and not outcomes:
        raise RequestError("; ".join(failures.values()))
    for text in failures.values():
        note(f"left out: {text}")
    return [outcomes[transport.name] for transport in transports if transport.name in outcomes]


def write_comparison(results: Sequence[DeviceResult], places: Sequence[Path], json_path: str | None, html: Path | None) -> None:
    """Prints the tables of several results and of the fleets below `places`, and writes them where asked. Raises RequestError."""
    results = sorted(results, key=lambda one: (one.run, one.device))  # the same order now and when they are read again
    tables = [*comparison_tables(results), *parquet_tables(places)]
    if html is not None:
        from edge_runtime.bench.report.html import tables_page

        atomic_write(html, tables_page("edge-bench: devices", tables))
    said = [
        {
            "device": r.device,
            "run": r.run,
            "model": r.model,
            "warnings": list(r.warnings),
            "happenings": list(r.incidents),
            "hottest_c": r.hottest_c,
            "charge_used": r.charge_used,
            "figures": r.figures.to_json(),
        }
        for r in results
    ]
    text = json.dumps({"devices": said}, ensure_ascii=False, allow_nan=False, indent=1) + "\n"
    if json_path == "-":
        click.echo(text, nl=False)
        return
    if json_path:
        atomic_write(Path(json_path), text)
    print_tables(tables)


def parquet_tables(places: Sequence[Path]) -> list[TextTable]:
    """Returns the tables of a fleet's Parquet folders below some folders; none where there is none."""
    folders = [place / PARQUET for place in places if (place / PARQUET).is_dir()]
    if not folders:
        return []
    from edge_runtime.bench.devices.parquet import fleet_tables

    return [table for folder in folders for table in fleet_tables(folder)]
