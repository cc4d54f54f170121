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

from edge_bench.devices.comparison import comparison_tables
from edge_bench.devices.package import read_package
from edge_bench.devices.remote_run import RemoteRequest, bench_on, clean, deploy, end_run
from edge_bench.devices.results import DeviceResult
from edge_bench.report.tables import TextTable
from edge_bench.report.terminal import note, print_tables
from edge_devices.command_line import option_group
from edge_devices.errors import EdgeError
from edge_devices.files.atomic_write import write_text
from edge_devices.transports.adb import AdbTransport, usable_serials
from edge_devices.transports.base import Transport
from edge_devices.transports.ssh import SshTransport
from edge_runtime.errors import RequestError

ALL = "all"
PARQUET = "parquet"
HERE_ONLY = ("runs", "report", "verify_key")
AGAINST_PACKAGE = "llama.cpp=package"
# Options that are passed on to edge-bench on the device where the user gave them.
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
    "minutes",
}
device_options = option_group(
    click.option("--adb", multiple=True, metavar="SERIAL", help="Measure on this phone, or on all that adb sees (all). Repeatable."),
    click.option("--ssh", multiple=True, metavar="HOST", help="Measure on this host of the ssh configuration. Repeatable."),
    click.option("--fleet", metavar="ADDRESS", help="Measure on the phones of all workers of this Dask scheduler (needs edge-mtp[fleet])."),
    click.option("--package", type=click.Path(path_type=Path), help="Device package built by edge-export package."),
    click.option(
        "--results",
        type=click.Path(path_type=Path),
        default=Path("bench-results"),
        help="Folder of the devices' results: RESULTS/RUN/DEVICE.",
    ),
    click.option(
        "--run", "run_name", help="Name of the run; a run that exists on a device is followed and collected.  [default: the time]"
    ),
    click.option("--unplugged", is_flag=True, help="Wait on the device until it is unplugged, then measure at its battery."),
    click.option("--deploy-only", is_flag=True, help="Copy package and bundle to the devices without starting a run."),
    click.option("--stop", is_flag=True, help="End the run --run on the devices; repeat the command without --stop to collect it."),
    click.option(
        "--clean", is_flag=True, help="Remove everything edge-bench put on the devices, after collecting; without BUNDLE at once."
    ),
    click.option("--device-folder", help=f"Folder of edge-bench on the devices.  [default: {AdbTransport.FOLDER}, {SshTransport.FOLDER}]"),
    click.option("--ssh-config", type=click.Path(path_type=Path, exists=True), help="The ssh configuration to use.  [default: your own]"),
    click.option(
        "--compare",
        type=click.Path(path_type=Path),
        multiple=True,
        help="Compare the results of devices below this folder; measure nothing. Repeatable.",
    ),
    panel="Devices",
)


def wants_devices(values: dict[str, Any]) -> bool:
    """Returns whether the options name other machines."""
    return bool(values["adb"] or values["ssh"] or values["fleet"])


def bench_devices(bundle: Path | None, values: dict[str, Any], further: Sequence[str] = ()) -> list[DeviceResult]:
    """Carries out the options on all devices in parallel, with `further` options of edge-bench after the user's.

    Failed devices are left out; raises RequestError if all fail.
    """
    if values["clean"] and bundle is None:
        _each(connect(values), lambda transport: clean(transport))
        return []
    request = remote_request(bundle, values, further)
    if values["fleet"]:
        from edge_bench.devices.fleet import run_fleet

        return run_fleet(values["fleet"], request, values["results"], serials=tuple(values["adb"]), folder=values["device_folder"])
    transports = connect(values)
    if values["stop"]:
        _each(transports, lambda transport: end_run(transport, request.name))
        return []
    if values["deploy_only"]:
        _each(transports, lambda transport: deploy(transport, request, device_log(transport)))
        return []
    note(f"run {request.name} on {', '.join(transport.name for transport in transports)}")
    return _each(transports, lambda transport: bench_on(transport, request, values["results"], device_log(transport)))


def device_log(transport: Transport) -> Callable[[str], None]:
    """Returns a function that prints a message with the device's name before it."""
    return lambda text: note(f"[{transport.name}] {text}")


def connect(values: dict[str, Any]) -> list[Transport]:
    """Returns the transports of --adb and --ssh. Raises TransportError for what cannot be reached."""
    folder = values["device_folder"]
    options = ["-F", str(values["ssh_config"])] if values["ssh_config"] else []
    serials = [one for serial in values["adb"] for one in (usable_serials(note) if serial == ALL else [serial])]
    phones: list[Transport] = [AdbTransport(serial, folder or AdbTransport.FOLDER) for serial in dict.fromkeys(serials)]
    return phones + [SshTransport(host, folder or SshTransport.FOLDER, options) for host in dict.fromkeys(values["ssh"])]


def remote_request(bundle: Path | None, values: dict[str, Any], further: Sequence[str] = ()) -> RemoteRequest:
    """Builds the request from the command's values. Raises RequestError for options that do not apply to a device."""
    if bundle is None:
        raise RequestError("name the BUNDLE to measure")
    if values["package"] is None:
        raise RequestError("a device needs --package DIR; build it with edge-export package")
    for name in HERE_ONLY:
        if values.get(name):
            raise RequestError(f"--{name.replace('_', '-')} applies to this machine only; results of devices go to --results")
    if values["against"] not in (None, AGAINST_PACKAGE):
        raise RequestError(f"--against {values['against']} is a folder of this machine; devices have their package's: {AGAINST_PACKAGE}")
    package = read_package(values["package"])
    if values["against"] and not (package.folder / "tools").is_dir():
        raise RequestError(f"{package.folder} has no tools of llama.cpp; build it with edge-export package NAME --with-llama-tools")
    if values["stop"] and not values["run_name"]:
        raise RequestError("--stop needs the name of the run, --run NAME")
    return RemoteRequest(
        bundle=bundle,
        package=package,
        check=values["check"],
        options=(*forwarded(click.get_current_context()), *further),
        name=values["run_name"] or datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S"),
        energy=bool(values["energy"]),
        meter=values["meter"],
        against_package=values["against"] is not None,
        unplugged=values["unplugged"],
        clean=values["clean"],
    )


def forwarded(context: click.Context) -> list[str | Path]:
    """Returns the options that the user gave and that apply on the device too; files as local paths."""
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
    """Runs `work` on all devices in parallel; raises RequestError if it fails on all. Ctrl-C does not end runs on devices."""
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
            thread.join(0.2)  # a join without a timeout would block Ctrl-C
    if len(failures) + len(outcomes) < len(transports):
        raise RequestError("an internal error ended the work on a device; please report the messages above")
    if failures and not outcomes:
        raise RequestError("; ".join(failures.values()))
    for text in failures.values():
        note(f"left out: {text}")
    return [outcomes[transport.name] for transport in transports if transport.name in outcomes]


def write_comparison(results: Sequence[DeviceResult], places: Sequence[Path], json_path: str | None, html: Path | None) -> None:
    """Prints the tables of results and of the fleets below `places`; writes JSON and HTML where requested. Raises RequestError."""
    results = sorted(results, key=lambda one: (one.run, one.device))  # the same order as when they are read again later
    tables = [*comparison_tables(results), *parquet_tables(places)]
    if html is not None:
        from edge_bench.report.html import tables_page

        write_text(html, [tables_page("edge-bench: devices", tables)])
    devices = [
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
    text = json.dumps({"devices": devices}, ensure_ascii=False, allow_nan=False, indent=1) + "\n"
    if json_path == "-":
        click.echo(text, nl=False)
        return
    if json_path:
        write_text(Path(json_path), [text])
    print_tables(tables)


def parquet_tables(places: Sequence[Path]) -> list[TextTable]:
    """Returns the tables of a fleet's Parquet folders below the folders `places`."""
    folders = [place / PARQUET for place in places if (place / PARQUET).is_dir()]
    if not folders:
        return []
    from edge_bench.devices.parquet import fleet_tables

    return [table for folder in folders for table in fleet_tables(folder)]
