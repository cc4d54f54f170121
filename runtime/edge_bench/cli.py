"""`edge-bench`: measures the speed-up by drafting. Tables and JSON go to standard output, everything else to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import click

from edge_bench.contribution.command import PROTOCOL, Contribution, contribution_options, print_pool, remote_options
from edge_bench.devices.command import bench_devices, device_options, wants_devices, write_comparison
from edge_bench.devices.results import find_results
from edge_bench.measure.benchmark import Benchmark, BenchRequest
from edge_bench.measure.energy import find_meter, is_energy_log, measure_energy, read_energy
from edge_bench.measure.prompts import DOMAINS, Prompt, read_prompts, shipped_prompts
from edge_bench.measure.record_file import RecordFile
from edge_bench.measure.records import Note, Record, collect, read_records
from edge_bench.measure.variants import CHOOSING_POLICIES, LLAMA_CPP, parse_lengths, parse_names, parse_numbers
from edge_bench.options import EXAMPLES, add_modes, measuring_options, result_options
from edge_bench.report.figures import Figures, figures
from edge_bench.report.terminal import BenchProgress, note, print_report
from edge_devices.command_line import CONTEXT, CommandWithModes, one_sentence_errors
from edge_devices.energy.report import EnergyReport
from edge_devices.energy.run_log import RunLog
from edge_devices.energy.text import report_lines
from edge_devices.energy.virtual_meters import ESTIMATE, EXTERNAL
from edge_devices.errors import DeviceError
from edge_devices.files.atomic_write import write_text
from edge_devices.machine.load import LoadWatch, load_now
from edge_devices.meters.base import Meter
from edge_runtime.bundle.kv_types import KV_TYPES
from edge_runtime.cli.modes import FirstWord
from edge_runtime.cli.options import backend_option, check_options, check_values, config_options, refuse_threads, threads_option
from edge_runtime.drafting.drafter_kinds import DRAFTER_KINDS, DrafterKind
from edge_runtime.errors import OUT_OF_MEMORY, RequestError
from edge_runtime.session.open import default_threads

STDOUT = "-"
NO_ENERGY = "energy was not measured; use --energy FILE"


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Where results go besides the tables; `json_path` "-" is standard output, in place of the tables."""

    json_path: str | None
    html: Path | None

    def write(self, result: Figures) -> None:
        """Writes the figures to all outputs."""
        if self.html is not None:
            from edge_bench.report.html import report_page

            write_text(self.html, [report_page(result)])
        if self._write_json(result.to_json()):
            print_report(result)

    def write_energy(self, report: EnergyReport, log: RunLog) -> None:
        """Writes an energy measurement to all outputs."""
        if self.html is not None:
            from edge_bench.report.html import energy_page

            write_text(self.html, [energy_page(report, log)])
        if self._write_json(report.to_json()):
            for line in report_lines(report):
                click.echo(line)

    def _write_json(self, record: dict[str, Any]) -> bool:
        """Writes the JSON if requested; returns whether standard output remains for the tables."""
        if self.json_path:
            text = json.dumps(record, ensure_ascii=False, allow_nan=False, indent=1) + "\n"
            if self.json_path == STDOUT:
                click.echo(text, nl=False)
            else:
                write_text(Path(self.json_path), [text])
        return self.json_path != STDOUT


def bench_prompts(domains: str, files: Sequence[Path], most: int) -> tuple[Prompt, ...]:
    """Returns the shipped prompts of the domains and the user's own. Raises RequestError for none, or for two sets of one name."""
    prompts = shipped_prompts(parse_names(domains, DOMAINS, "domain"), most)
    for file in files:
        prompts += read_prompts(file, most)
    if not prompts:
        raise RequestError("there is no prompt to measure with; give --domains or --prompts")
    places = [(prompt.domain, prompt.number) for prompt in prompts]
    for domain, number in places:
        if places.count((domain, number)) > 1:
            raise RequestError(f"there are two sets of prompts named {domain!r}; rename one, or leave one out")
    return tuple(prompts)


def peer_folder(against: str | None) -> Path | None:
    """Parses `llama.cpp=PATH`. Raises a usage error for anything else."""
    if against is None:
        return None
    name, equals, path = against.partition("=")
    if name != LLAMA_CPP or not equals or not path:
        raise click.UsageError(f"--against {against!r} is not {LLAMA_CPP}=PATH, with the folder of llama.cpp's binaries")
    return Path(path)


def measure(request: BenchRequest, runs: Path | None, remark: str = "") -> tuple[list[Record], bool]:
    """Returns all records, then `remark` and how busy the machine was, and whether it was interrupted; records until then are kept."""
    records: list[Record] = []
    with RecordFile(runs) as file, BenchProgress() as progress:
        said, watch = said_before(progress), LoadWatch()
        try:
            for record in Benchmark(request, progress).records():
                file.add(record)
                records.append(record)
            load = watch.load()
            for text in (remark, said, load.sentence() if load.is_busy else ""):
                if text:
                    records.append(Note(text=text))
                    file.add(records[-1])
        except KeyboardInterrupt:
            if not records:
                raise
            stopped = Note(text="stopped by Ctrl-C before the end: some figures have fewer repeats, or are missing")
            file.add(stopped)
            return [*records, stopped], True
    return records, False


def said_before(progress: BenchProgress) -> str:
    """Says if the machine is busy before the first run, and returns the sentence; an empty text if it is not."""
    before = load_now()
    text = f"before the first run, {before.sentence()}" if before.is_busy else ""
    if text:
        progress.message(text)
    return text


def measure_joules(request: BenchRequest, path: Path, meter: Meter, minutes: int | None) -> tuple[EnergyReport | None, RunLog]:
    """Runs the energy protocol over the same variants. Raises DeviceError where it cannot be done."""
    with ExitStack() as stack, BenchProgress() as progress:
        said_before(progress)
        benchmark = Benchmark(request, progress)
        recording = "; its recording must run from now until the end" if meter.facts.name == EXTERNAL else ""
        progress.message(f"energy: {meter.facts.name}; measuring idle, warm-up and repeats{recording}")
        threads = request.threads or default_threads()
        return measure_energy(path, meter, benchmark.energy_workloads(stack), threads=threads, minutes=minutes, waiting=progress.wait)


@click.command(cls=CommandWithModes, epilog=EXAMPLES, context_settings=CONTEXT)
@click.argument("bundle", type=FirstWord(), required=False)
@measuring_options
@backend_option
@threads_option("all that this process may use")
@config_options
@check_options
@result_options
@contribution_options
@device_options
@click.version_option(package_name="edge-mtp")
def main(bundle: Path | None, runs: Path | None, json_path: str | None, html: Path | None, report: Path | None, **values: Any) -> None:
    """Compare plain decoding of BUNDLE with drafting: fixed lengths, policies, drafters, and llama.cpp's own drafting.

    Use an otherwise idle machine. Ctrl-C stops the benchmark and keeps what was measured.
    """
    values |= {"runs": runs, "report": report}
    check_usage(bundle, values)
    outputs, stopped = Outputs(json_path=json_path, html=html), False
    remark = "stopped; the run continues on the device, and --run NAME collects it" if wants_devices(values) else "stopped"
    with one_sentence_errors(out_of_memory=OUT_OF_MEMORY, stopped=remark):
        if html is not None and not values["compare"]:
            from edge_bench.report.svg import require_library

            require_library()
        if values["pool"]:
            print_pool(values["pool"], values["verify_key"], json_path)
        elif values["contribute"]:
            contribute(cast(Path, bundle), values)
        elif wants_devices(values) or values["compare"]:
            measure_elsewhere(bundle, values, outputs)
        elif report is not None:
            report_again(report, values["energy"], values["external"], values["columns"], outputs)
        else:
            request = bench_request(cast(Path, bundle), values)
            stopped = measure_all(request, runs, values["energy"], values["meter"], outputs, minutes=values["minutes"])
    if stopped:
        note("stopped; the figures cover what was measured until then")
        sys.exit(130)


def check_usage(bundle: Path | None, values: dict[str, Any]) -> None:
    """Raises a usage error for options that exclude each other."""
    report, elsewhere = values["report"], wants_devices(values)
    if not elsewhere:
        refuse_threads(values["threads"])
    for option in ("compare", "pool"):
        if values[option] and (bundle or report or elsewhere):
            raise click.UsageError(f"--{option} does not measure: leave BUNDLE, --report and devices out")
    if not elsewhere and not values["compare"] and not values["pool"] and (bundle is None) == (report is None):
        raise click.UsageError("give a BUNDLE to measure, or --report with a file from --runs")
    if report is not None and values["runs"] is not None:
        raise click.UsageError("--report does not measure, so it cannot write --runs; leave one of them out")
    if values["contribute"] and (report or values["runs"] or values["energy"]):
        raise click.UsageError("--contribute has a protocol of its own: leave --report, --runs and --energy out")
    if values["sign"] and not values["contribute"]:
        raise click.UsageError("--sign is for --contribute; add it, or leave --sign out")
    if values["minutes"] and not (values["energy"] or values["contribute"]):
        raise click.UsageError("--minutes is for --energy and --contribute; add one of them, or leave --minutes out")
    if values["columns"] is not None and values["external"] is None:
        raise click.UsageError("--columns is for the table of --external; add it, or leave --columns out")
    if values["external"] is not None and report is None:
        raise click.UsageError("--external needs --report with an energy log; add it, or leave --external out")


def contribute(bundle: Path, values: dict[str, Any]) -> None:
    """Measures joules per token here or on devices, and writes a record of each."""
    contribution = Contribution(bundle, values["contribute"], values["sign"], values["minutes"])
    if wants_devices(values):
        contribution.guide_devices()
        values |= {"energy": True, "run_name": values["run_name"] or contribution.run_name}
        contribution.collect(bench_devices(bundle, values, remote_options(contribution.minutes)), values)
        return
    meter, reason = find_meter(values["meter"])
    if meter is None:
        raise RequestError(f"{reason}; see edge-devices meters, or add --meter {ESTIMATE} for a record that is labelled as one")
    if meter.facts.name == EXTERNAL:
        raise RequestError("--contribute needs a meter that is read during the runs; use --energy and --external for a table")
    request = bench_request(bundle, values | PROTOCOL)
    contribution.measure_here(request, meter, lambda path: measure_joules(request, path, meter, contribution.minutes)[1])


def measure_elsewhere(bundle: Path | None, values: dict[str, Any], outputs: Outputs) -> None:
    """Measures on other machines, or compares their results. Option values are checked before anything is sent."""
    if bundle is not None:
        bench_request(bundle, dict(values))
    results = find_results(values["compare"]) if values["compare"] else bench_devices(bundle, values)
    if len(results) == 1 and not values["compare"]:
        outputs.write(results[0].figures)
    elif results:
        write_comparison(results, values["compare"] or ((values["results"],) if values["fleet"] else ()), outputs.json_path, outputs.html)


def report_again(report: Path, energy: Path | None, external: Path | None, columns: str | None, outputs: Outputs) -> None:
    """Computes the figures of records, of an energy log, or of both again. Raises RequestError for files that do not match."""
    if report.exists() and not report.is_file():
        raise RequestError(f"{report} is not a regular file; give a file that edge-bench run --runs wrote")
    if is_energy_log(report):
        if energy is not None:
            raise RequestError(f"{report} is an energy log itself; --energy is for a file from --runs")
        outputs.write_energy(*read_energy(report, external, columns))
        return
    if external is not None and energy is None:
        raise RequestError(f"--external needs an energy log, which {report} is not; add --energy LOG")
    joules, log = read_energy(energy, external, columns) if energy else (None, None)
    outputs.write(figures(read_records(report), joules, log))


def measure_all(
    request: BenchRequest, runs: Path | None, energy: Path | None, meter_name: str | None, outputs: Outputs, *, minutes: int | None
) -> bool:
    """Measures, then measures energy if `energy` is given, and writes the results; returns whether it was interrupted."""
    meter, reason = find_meter(meter_name)
    if energy and meter is None:
        raise RequestError(
            f"{reason}; leave --energy out, see edge-devices meters, or use --meter {EXTERNAL} with a meter that writes a table"
        )
    measured, stopped = measure(request, runs, "" if energy else reason or NO_ENERGY)
    records, joules, log = collect(measured), None, None
    failure: DeviceError | None = None
    if energy and meter and not stopped:
        try:
            joules, log = measure_joules(request, energy, meter, minutes)
            stopped = log.stopped
        except KeyboardInterrupt:
            stopped = True
        except DeviceError as error:  # the speeds are measured, and are not lost with it
            failure = error
            records = collect([*measured, Note(text=f"no energy figures: {error}")])
    outputs.write(figures(records, joules, log if joules else None))
    if failure is not None:
        raise failure
    if log is not None and joules is None:
        note(f"the {EXTERNAL} meter's table is still needed: edge-bench report {energy} --external TABLE")
    return stopped


def bench_request(bundle: Path, values: dict[str, Any]) -> BenchRequest:
    """Returns the benchmark request of the command's values. Raises RequestError for invalid names and numbers."""
    drafters, check = values["drafters"], check_values(values)
    if drafters == "none":
        raise RequestError("there is no drafter to measure; for plain decoding alone use --lengths none --policies none")
    kinds = parse_names(drafters, [kind for kind in DRAFTER_KINDS if kind != "none"], "drafter") if drafters else ()
    return BenchRequest(
        bundle=bundle,
        prompts=bench_prompts(values["domains"], values["files"], values["per_domain"]),
        drafters=cast(tuple[DrafterKind, ...], kinds),
        lengths=parse_lengths(values["lengths"]),
        policies=parse_names(values["policies"], CHOOSING_POLICIES, "policy"),
        repeats=values["repeats"],
        tokens=values["max_tokens"],
        warm_up=values["warm_up"],
        contexts=parse_numbers(values["contexts"], "prompt lengths"),
        concurrency=parse_numbers(values["concurrency"], "numbers of clients"),
        kv_types=parse_names(values["kv_types"], KV_TYPES, "KV type"),
        image_sizes=parse_numbers(values["image_sizes"], "sizes of images"),
        tools=peer_folder(values["against"]),
        backend=values["backend"],
        threads=values["threads"],
        context=values["context"],
        config=values["config"],
        preset=values["preset"],
        check=check.check,
        public_key=check.verify_key,
    )


add_modes(main)
