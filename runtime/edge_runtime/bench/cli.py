"""`edge-bench`: what drafts bring on this machine. Tables and JSON go to standard output, everything else to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import click

from edge_devices.command_line import one_sentence_errors
from edge_devices.energy.report import Report
from edge_devices.energy.run_log import RunLog
from edge_devices.energy.text import NO_METER, report_lines
from edge_devices.energy.virtual_meters import EXTERNAL, VIRTUAL
from edge_devices.files.atomic_write import write_text
from edge_devices.machine.cpu_affinity import MOST_THREADS
from edge_devices.meters.base import Meter
from edge_runtime.backends.selection import BACKENDS
from edge_runtime.bench.devices.command import bench_devices, device_options, wants_devices, write_comparison
from edge_runtime.bench.devices.results import find_results
from edge_runtime.bench.measure.benchmark import Benchmark, BenchRequest
from edge_runtime.bench.measure.energy import find_meter, is_energy_log, measure_energy, read_energy
from edge_runtime.bench.measure.prompts import DOMAINS, Prompt, read_prompts, shipped_prompts
from edge_runtime.bench.measure.record_file import RecordFile
from edge_runtime.bench.measure.records import Note, Record, collect, read_records
from edge_runtime.bench.measure.variants import CHOOSING_POLICIES, LLAMA_CPP, parse_lengths, parse_names, parse_numbers
from edge_runtime.bench.report.figures import Figures, figures
from edge_runtime.bench.report.terminal import BenchProgress, note, print_report
from edge_runtime.bundle.kv_types import KV_TYPES
from edge_runtime.cli.options import BundlePath, check_options, check_values
from edge_runtime.config.schema import PRESET_NAMES
from edge_runtime.drafting.drafter_kinds import DRAFTER_KINDS, DrafterKind
from edge_runtime.errors import OUT_OF_MEMORY, RequestError
from edge_runtime.session.open import default_threads

EXAMPLES = """
\b
Examples:
  edge-bench my-bundle
  edge-bench my-bundle --lengths 2,3 --policies none --domains code --repeats 2 --contexts none
  edge-bench my-bundle --runs run.jsonl --html report.html --json figures.json
  edge-bench my-bundle --drafters dense,split,lookup --concurrency 1,2,4
  edge-bench my-bundle --against llama.cpp=build/llama.cpp/bin
  edge-bench my-bundle --prompts my-prompts.json --domains none
  edge-bench my-bundle --runs run.jsonl --energy energy.jsonl
  edge-bench --report run.jsonl --html report.html
  edge-bench --report energy.jsonl --html energy.html      (the log of --energy)
  edge-bench my-bundle --energy energy.jsonl --meter external    (then, with the meter's table:)
  edge-bench --report energy.jsonl --external usb-meter.csv
  edge-bench my-bundle --package phone-package --adb all --lengths 2,3,4
  edge-bench my-bundle --package pi-package --ssh pi@raspberrypi --html pi.html
  edge-bench --compare bench-results
"""
STDOUT = "-"
NOT_ASKED = "energy was not measured; --energy FILE does"


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Where results go besides the tables; `json_path` "-" is standard output instead of them."""

    json_path: str | None
    html: Path | None

    def write(self, result: Figures) -> None:
        """Writes all of them."""
        if self.html is not None:
            from edge_runtime.bench.report.html import report_page

            write_text(self.html, [report_page(result)])
        if self._write_json(result.to_json()):
            print_report(result)

    def write_energy(self, report: Report, log: RunLog) -> None:
        """Writes all of an energy measurement alone."""
        if self.html is not None:
            from edge_runtime.bench.report.html import energy_page

            write_text(self.html, [energy_page(report, log)])
        if self._write_json(report.to_json()):
            for line in report_lines(report):
                click.echo(line)

    def _write_json(self, record: dict[str, Any]) -> bool:
        """Writes the JSON where it was asked for; returns whether standard output is left for the tables."""
        if self.json_path:
            text = json.dumps(record, ensure_ascii=False, allow_nan=False, indent=1) + "\n"
            if self.json_path == STDOUT:
                click.echo(text, nl=False)
            else:
                write_text(Path(self.json_path), [text])
        return self.json_path != STDOUT


def bench_prompts(domains: str, files: Sequence[Path], most: int) -> tuple[Prompt, ...]:
    """Returns the shipped prompts of the domains and people's own. Raises RequestError if there is none, or two sets of one name."""
    prompts = shipped_prompts(parse_names(domains, DOMAINS, "domain"), most)
    for file in files:
        prompts += read_prompts(file, most)
    if not prompts:
        raise RequestError("there is no prompt to measure with; name --domains or give --prompts")
    places = [(prompt.domain, prompt.number) for prompt in prompts]
    for domain, number in places:
        if places.count((domain, number)) > 1:
            raise RequestError(f"there are two sets of prompts named {domain!r}; rename one, or leave one out")
    return tuple(prompts)


def peer_folder(against: str | None) -> Path | None:
    """Reads `llama.cpp=PATH`; a usage error for anything else."""
    if against is None:
        return None
    name, equals, path = against.partition("=")
    if name != LLAMA_CPP or not equals or not path:
        raise click.UsageError(f"--against {against!r} is not {LLAMA_CPP}=PATH, with the folder of llama.cpp's binaries")
    return Path(path)


def measure(request: BenchRequest, runs: Path | None, remark: str = "") -> tuple[list[Record], bool]:
    """Returns all records, `remark` as the last, and whether it was interrupted, which keeps what was measured."""
    records: list[Record] = []
    with RecordFile(runs) as file, BenchProgress() as progress:
        try:
            for record in Benchmark(request, progress).records():
                file.add(record)
                records.append(record)
            if remark:
                records.append(Note(text=remark))
                file.add(records[-1])
        except KeyboardInterrupt:
            if not records:
                raise
            stopped = Note(text="stopped by Ctrl-C before it was through: some figures rest on fewer repeats, or are missing")
            file.add(stopped)
            return [*records, stopped], True
    return records, False


def measure_joules(request: BenchRequest, path: Path, meter: Meter) -> tuple[Report | None, RunLog]:
    """Runs the energy protocol over the same variants. Raises DeviceError where it cannot be done."""
    with ExitStack() as stack, BenchProgress() as progress:
        benchmark = Benchmark(request, progress)
        recording = "; its recording must run from now until the end" if meter.facts.name == EXTERNAL else ""
        progress.say(f"energy: {meter.facts.name}; idle, warm-up and repeats take a while{recording}")
        return measure_energy(path, meter, benchmark.energy_workloads(stack), threads=request.threads or default_threads())


@click.command(epilog=EXAMPLES, context_settings={"show_default": True})
@click.argument("bundle", type=BundlePath(), required=False)
@click.option("--domains", default=",".join(DOMAINS), help="Shipped prompt sets to run, or none.")
@click.option(
    "--prompts",
    "files",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Own prompts: a JSON list of texts, an object of lists by domain, or a text file. Repeatable.",
)
@click.option("--per-domain", type=click.IntRange(min=1), default=1, help="Prompts of each set.")
@click.option("--lengths", default="1-8", help="Fixed draft lengths, such as 3, 1,2,4 or 1-8, or none.")
@click.option("--policies", default=",".join(CHOOSING_POLICIES), help="Policies that choose the length, or none.")
@click.option(
    "--drafters",
    default=None,
    help=f"Kinds of drafter, out of {', '.join(k for k in DRAFTER_KINDS if k != 'none')}.  [default: what edge-run takes]",
)
@click.option("--repeats", type=click.IntRange(min=1), default=6, help="Of everything, every other time the other way round.")
@click.option("--max-tokens", type=click.IntRange(min=2), default=96, help="Tokens per request.")
@click.option("--warm-up", type=click.IntRange(min=0), default=1, help="Requests of each variant that do not count.")
@click.option("--contexts", default="128,512,2048,8192", help="Lengths of text in tokens to sweep, as far as --context reaches, or none.")
@click.option("--concurrency", default="none", help="Numbers of clients at once, such as 1,2,4.")
@click.option("--kv-types", default="none", help=f"Types of KV cache to compare, out of {', '.join(KV_TYPES)}; f16 comes along.")
@click.option("--against", metavar="llama.cpp=PATH", help="Run llama.cpp's own binaries of this folder in turn with ours.")
@click.option("--backend", type=click.Choice(BACKENDS), help="llama.cpp or onnxruntime.  [default: what the bundle has and is installed]")
@click.option("--threads", type=click.IntRange(1, MOST_THREADS), help="CPU threads.  [default: all this process may use]")
@click.option("--context", type=click.IntRange(min=16), help="Tokens the KV cache holds.  [default: the configuration's]")
@click.option("--config", type=click.Path(path_type=Path), help="YAML file that goes over --preset and the bundle's own config.yaml.")
@click.option("--preset", type=click.Choice(PRESET_NAMES), help="Draft lengths for a kind of work; goes over the bundle's config.yaml.")
@check_options
@click.option("--runs", type=click.Path(path_type=Path), help="Write every measurement here, one JSON line each, as it is made.")
@click.option(
    "--energy",
    type=click.Path(path_type=Path),
    help="Measure energy too, by the protocol of docs/energy.md (long), and write its log here; with --report: read it.",
)
@click.option(
    "--meter",
    metavar="NAME",
    help=f"Energy meter of edge-devices meters, {VIRTUAL}, or external: one whose table is read afterwards with --external.  [default: the first usable one]",
)
@click.option(
    "--external",
    type=click.Path(path_type=Path),
    metavar="TABLE",
    help="With --report of an energy log: the table of a meter in the supply line, in place of the log's readings.",
)
@click.option("--json", "json_path", help="Write the figures here; - is standard output, instead of tables.")
@click.option("--html", type=click.Path(path_type=Path), help="Write a page with plots here (needs edge-mtp[report]).")
@click.option(
    "--report", type=click.Path(path_type=Path), help="Measure nothing: make the figures of a file of --runs again, or of --energy alone."
)
@device_options
@click.version_option(package_name="edge-mtp")
def main(bundle: Path | None, runs: Path | None, json_path: str | None, html: Path | None, report: Path | None, **values: Any) -> None:
    """Measure plain decoding of BUNDLE against drafting: fixed lengths, policies, kinds of drafter, llama.cpp's own.

    Run it on a machine that does nothing else. Ctrl-C ends it and keeps what was measured.
    """
    values |= {"runs": runs, "report": report}
    check_usage(bundle, values)
    outputs, stopped = Outputs(json_path=json_path, html=html), False
    remark = "stopped; a run on a device goes on there, --run NAME collects it" if wants_devices(values) else "stopped"
    with one_sentence_errors(out_of_memory=OUT_OF_MEMORY, stopped=remark):
        if html is not None and not values["compare"]:
            from edge_runtime.bench.report.svg import require_library

            require_library()
        if wants_devices(values) or values["compare"]:
            measure_elsewhere(bundle, values, outputs)
        elif report is not None:
            report_again(report, values["energy"], values["external"], outputs)
        else:
            stopped = measure_all(bench_request(cast(Path, bundle), values), runs, values["energy"], values["meter"], outputs)
    if stopped:
        note("stopped; the figures are of what was measured until then")
        sys.exit(130)


def check_usage(bundle: Path | None, values: dict[str, Any]) -> None:
    """Raises UsageError for options that exclude each other."""
    report, elsewhere = values["report"], wants_devices(values)
    if values["compare"] and (bundle or report or elsewhere):
        raise click.UsageError("--compare measures nothing: leave BUNDLE, --report and devices out")
    if not elsewhere and not values["compare"] and (bundle is None) == (report is None):
        raise click.UsageError("give a BUNDLE to measure, or --report with a file of --runs")
    if report is not None and values["runs"] is not None:
        raise click.UsageError("--report measures nothing, so there is nothing for --runs")
    if values["external"] is not None and report is None:
        raise click.UsageError("--external is for --report, with the energy log that was written meanwhile; leave it out")


def measure_elsewhere(bundle: Path | None, values: dict[str, Any], outputs: Outputs) -> None:
    """Measures on other machines, or compares what they measured. Names and numbers are looked at before anything is sent."""
    if bundle is not None:
        bench_request(bundle, dict(values))
    results = find_results(values["compare"]) if values["compare"] else bench_devices(bundle, values)
    if len(results) == 1 and not values["compare"]:
        outputs.write(results[0].figures)
    elif results:
        write_comparison(results, values["compare"] or ((values["results"],) if values["fleet"] else ()), outputs.json_path, outputs.html)


def report_again(report: Path, energy: Path | None, external: Path | None, outputs: Outputs) -> None:
    """Makes the figures of records, of an energy log, or of both again. Raises RequestError for files that do not fit each other."""
    if report.exists() and not report.is_file():
        raise RequestError(f"{report} is no file, or a pipe, which cannot be read twice; give the file that edge-bench --runs wrote")
    if is_energy_log(report):
        if energy is not None:
            raise RequestError(f"{report} is an energy log itself; give --energy beside a file of --runs")
        outputs.write_energy(*read_energy(report, external))
        return
    if external is not None and energy is None:
        raise RequestError(f"{report} is no energy log, which an external meter's table belongs to; add --energy LOG")
    joules, log = read_energy(energy, external) if energy else (None, None)
    outputs.write(figures(read_records(report), joules, log))


def measure_all(request: BenchRequest, runs: Path | None, energy: Path | None, meter_name: str | None, outputs: Outputs) -> bool:
    """Measures, energy last and only if a log for it is named, and writes; returns whether it was interrupted."""
    meter = find_meter(meter_name)
    if energy and meter is None:
        raise RequestError(
            f"{NO_METER}; leave --energy out, see edge-devices meters, or take --meter {EXTERNAL} if a meter in the supply line writes a table"
        )
    measured, stopped = measure(request, runs, "" if energy else NO_METER if meter is None else NOT_ASKED)
    records, joules, log = collect(measured), None, None
    if energy and meter and not stopped:
        try:
            joules, log = measure_joules(request, energy, meter)
        except KeyboardInterrupt:
            stopped = True
    outputs.write(figures(records, joules, log if joules else None))
    if log is not None and joules is None:
        note(f"{energy} waits for the {EXTERNAL} meter's table: edge-bench --report {energy} --external TABLE")
    return stopped


def bench_request(bundle: Path, values: dict[str, Any]) -> BenchRequest:
    """Makes the request of the command's values. Raises RequestError for names and numbers that cannot be."""
    drafters, check = values["drafters"], check_values(values)
    if drafters == "none":
        raise RequestError("there is no drafter to measure; plain decoding alone is --lengths none --policies none")
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
        contexts=parse_numbers(values["contexts"], "lengths of text"),
        concurrency=parse_numbers(values["concurrency"], "numbers of clients"),
        kv_types=parse_names(values["kv_types"], KV_TYPES, "KV type"),
        tools=peer_folder(values["against"]),
        backend=values["backend"],
        threads=values["threads"],
        context=values["context"],
        config=values["config"],
        preset=values["preset"],
        check=check.check,
        public_key=check.verify_key,
    )
