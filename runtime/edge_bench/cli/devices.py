"""`edge-bench devices`: measures on other machines, which are phones over adb, hosts over ssh, or fleets of phones."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from edge_bench.cli.report import Outputs
from edge_bench.devices.remote_run import RemoteRequest, bench_on, check_name, clean, deploy, end_run
from edge_bench.devices.results import DeviceResult
from edge_bench.measure.progress import note
from edge_bench.measure.request import LOADING, BenchRequest, MeterOptions, option_words
from edge_devices.command_line import PanelCommand, one_sentence_errors, takes
from edge_devices.errors import EdgeError
from edge_devices.machine.device_package import read_package
from edge_devices.option_fields import option
from edge_devices.remote.transport import AdbTransport, SshTransport, Transport, usable_serials
from edge_runtime.cli.options import BundlePath
from edge_runtime.errors import RequestError
from edge_runtime.session.load_options import LoadOptions

ALL = "all"
PACKAGES_TOOLS = Path("package")
STOPPED = "stopped; the run continues on the device, and --run NAME collects it"


@dataclass(frozen=True, kw_only=True)
class ReachOptions:
    """Which devices to measure on, how they are reached, and the name of the run."""

    adb: tuple[str, ...] = option(default=(), metavar="SERIAL", help="Measure on this phone, or on all that adb sees (all). Repeatable.")
    ssh: tuple[str, ...] = option(default=(), metavar="HOST", help="Measure on this host of the ssh configuration. Repeatable.")
    package: Path | None = option(help="Device package built by edge-export package.")
    results: Path = option(default=Path("bench-results"), help="Folder of the devices' results: RESULTS/RUN/DEVICE.")
    run_name: str | None = option(
        "--run", help="Name of the run; a run that exists on a device is followed and collected.  [default: the time]"
    )
    unplugged: bool = option(default=False, help="Wait on the device until it is unplugged, then measure at its battery.")
    device_folder: str | None = option(
        help=f"Folder of edge-bench on the devices.  [default: {AdbTransport.FOLDER}, {SshTransport.FOLDER}]"
    )
    ssh_config: Path | None = option(
        type=click.Path(path_type=Path, exists=True), help="The ssh configuration to use.  [default: your own]"
    )

    def connect(self) -> list[Transport]:
        """Returns the transports for --adb and --ssh. Raises TransportError for a device that cannot be reached."""
        options = ["-F", str(self.ssh_config)] if self.ssh_config else []
        serials = [serial for name in self.adb for serial in (usable_serials(note) if name == ALL else [name])]
        phones: list[Transport] = [AdbTransport(serial, self.device_folder or AdbTransport.FOLDER) for serial in dict.fromkeys(serials)]
        return phones + [SshTransport(host, self.device_folder or SshTransport.FOLDER, options) for host in dict.fromkeys(self.ssh)]

    def run_of(self, bundle: Path, **fields: Any) -> RemoteRequest:
        """Returns the request of a run of the bundle; `fields` are further fields of it. Raises EdgeError without a usable package."""
        if self.package is None:
            raise RequestError("a device needs --package DIR; build it with edge-export package")
        name = self.run_name or datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
        return RemoteRequest(bundle=bundle, package=read_package(self.package), name=name, unplugged=self.unplugged, **fields)


@dataclass(frozen=True, kw_only=True)
class FleetOptions(ReachOptions):
    """The address of a fleet, and what to do on devices besides measuring speeds."""

    fleet: str | None = option(
        metavar="ADDRESS", help="Measure on the phones of all workers of this Dask scheduler (needs edge-mtp[fleet])."
    )
    deploy_only: bool = option(default=False, help="Copy package and bundle to the devices without starting a run.")
    stop: bool = option(default=False, help="End the run --run on the devices; BUNDLE is not needed for it, but to collect the run.")
    clean: bool = option(default=False, help="Remove everything edge-bench put on the devices, after collecting; without BUNDLE at once.")
    energy: bool = option(
        default=False, panel="Energy", help="Also measure energy on the devices by the protocol of docs/measure-energy.md (takes long)."
    )


@click.command(cls=PanelCommand)
@click.argument("bundle", type=BundlePath(), required=False)
@takes("reach", FleetOptions, panel="Devices")
@takes("request", BenchRequest)
@takes("load", LoadOptions, only=LOADING)
@takes("meters", MeterOptions)
@takes("outputs", Outputs, only=["json_path", "csv_path", "html", "wide"])
@one_sentence_errors(stopped=STOPPED)
def devices(
    bundle: Path | None, reach: FleetOptions, request: BenchRequest, load: LoadOptions, meters: MeterOptions, outputs: Outputs
) -> None:
    """Measure BUNDLE on phones and hosts, and collect their results."""
    outputs.check()
    if not (reach.adb or reach.ssh or reach.fleet):
        raise click.UsageError("name devices with --adb SERIAL, --adb all, --ssh HOST or --fleet ADDRESS")
    if meters.minutes and not reach.energy:
        raise click.UsageError("--minutes is for --energy; add it, or leave --minutes out")
    if reach.stop:
        if not reach.run_name:
            raise RequestError("--stop needs the name of the run, --run NAME")
        check_name(reach.run_name)
        on_each(reach.connect(), lambda transport: end_run(transport, str(reach.run_name), device_log(transport)))
        return
    if bundle is None:
        if not reach.clean:
            raise RequestError("name the BUNDLE to measure")
        on_each(reach.connect(), lambda transport: clean(transport, device_log(transport)))
        return
    request.prompts()  # raises for unusable prompts before anything is sent
    remote = remote_request(bundle, reach, request, load, meters)
    if reach.deploy_only:
        on_each(reach.connect(), lambda transport: deploy(transport, remote, device_log(transport)))
        return
    results = fleet_results(reach, remote) if reach.fleet else measure_on(reach, remote)
    if len(results) == 1:
        outputs.write(results[0].figures)
    else:
        outputs.write_devices(results, (reach.results,) if reach.fleet else ())
        for result in results:  # printed again, because a command cannot be copied from a table
            for text in result.remarks:
                note(f"{result.device}: {text}")
    if all(result.failed for result in results):  # what was measured before is already shown
        raise RequestError("; ".join(f"{result.device}: {result.happenings[-1]}" for result in results))


def remote_request(bundle: Path, reach: FleetOptions, request: BenchRequest, load: LoadOptions, meters: MeterOptions) -> RemoteRequest:
    """Builds the request from the command's options. Raises RequestError for options that do not apply to a device."""
    if request.tools not in (None, PACKAGES_TOOLS):
        raise RequestError(f"--against {request.tools} is a folder of this machine; devices have their package's: llama.cpp=package")
    remote = reach.run_of(
        bundle,
        check=load.check,
        public_key=load.public_key,
        options=(*option_words(request), *option_words(load), *option_words(meters)),
        energy=reach.energy,
        meter=meters.meter,
        against_package=request.tools is not None,
        clean=reach.clean,
    )
    if request.tools and not (remote.package.folder / "tools").is_dir():
        raise RequestError(f"{reach.package} has no tools of llama.cpp; build it with edge-export package NAME --with-llama-tools")
    return remote


def fleet_results(reach: FleetOptions, remote: RemoteRequest) -> list[DeviceResult]:
    """Measures on the phones of all workers. Raises RequestError if Dask is missing, or if no phone returns results."""
    from edge_bench.devices.fleet import run_fleet

    return run_fleet(str(reach.fleet), remote, reach.results, serials=reach.adb, folder=reach.device_folder)


def measure_on(reach: ReachOptions, remote: RemoteRequest) -> list[DeviceResult]:
    """Measures on all devices in parallel. Failed ones are left out; raises RequestError if all fail."""
    transports = reach.connect()
    note(f"run {remote.name} on {', '.join(transport.name for transport in transports)}")
    return on_each(transports, lambda transport: bench_on(transport, remote, reach.results, device_log(transport)))


def device_log(transport: Transport) -> Callable[[str], None]:
    """Returns a function that prints a message with the device's name before it."""
    return lambda text: note(f"[{transport.name}] {text}")


Outcome = TypeVar("Outcome")


def on_each(transports: Sequence[Transport], work: Callable[[Transport], Outcome]) -> list[Outcome]:
    """Runs `work` on all devices in parallel. Raises RequestError if it fails on all. Ctrl-C does not end the runs on devices."""
    outcomes: dict[str, Outcome] = {}
    failures: dict[str, str] = {}

    def work_on(transport: Transport) -> None:
        try:
            outcomes[transport.name] = work(transport)
        except EdgeError as error:
            failures[transport.name] = str(error)

    threads = [threading.Thread(target=work_on, args=(transport,), daemon=True) for transport in transports]
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
