"""`edge-export`: makes a bundle from a Gemma 4 target and its MTP drafter. Progress goes to standard error, results to standard output."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import click
from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from edge_devices.command_line import one_sentence_errors
from edge_devices.files.typed_json import to_json
from edge_export.checkpoint.reference_pair import reference_pair
from edge_export.device_package.cli import package_options, package_request, run_package
from edge_export.onnx.request import BLOCKS, DEVICE_WEIGHTS, DEVICES, KV_KINDS, ONNX_WEIGHTS, OnnxRequest
from edge_export.pipeline.dry_run import planned_manifest
from edge_export.pipeline.export import export_pair
from edge_export.pipeline.gguf_step import DRAFTER_QUANTIZATION, TARGET_QUANTIZATION
from edge_export.pipeline.request import ExportRequest
from edge_export.quantization.importance_sources import ImportanceSources
from edge_export.quantization.llama_quantize import QUANTIZATIONS
from edge_runtime.bundle.bundle import Bundle
from edge_runtime.bundle.manifest import Manifest
from edge_runtime.cli.plan import plan_options, plan_values, show_plan
from edge_runtime.config.presets import expanded, preset_of
from edge_runtime.config.schema import PRESET_NAMES, SpeculativeConfig
from edge_runtime.config.yaml_file import read_config
from edge_runtime.drafting.phase_power import read_phase_power
from edge_runtime.errors import OUT_OF_MEMORY
from edge_runtime.planning.device_speed import device_speed
from edge_runtime.planning.speed import manifest_plan

EXAMPLES = """
\b
Examples:
  edge-export google/gemma-4-E2B-it google/gemma-4-E2B-it-assistant -o e2b
  edge-export ./target ./drafter -o my-bundle --target-quant q4_k_m --context 8192
  edge-export ./target ./drafter -o my-bundle --target-quant q4_k_m --calibrate text.txt
  edge-export target-q4_0.gguf ./drafter -o my-bundle --force
  edge-export ./target ./drafter --plan --profile raspberry-pi-5
  edge-export --reference-pair -o reference
  edge-export --reference-pair -o reference --format onnx --onnx-target int8
  edge-export --reference-pair -o reference --format onnx --device openvino-npu --context 1024
  edge-export --package android-arm64 -o phone-package
"""


class Amount(ProgressColumn):
    """Bytes done and wanted, speed and time left; nothing for a step that counts no bytes."""

    def render(self, task: Task) -> Text:
        """Returns e.g. "1.2 GB of 3.4 GB, 210.0 MB/s, ETA 11 s"."""
        if not task.fields["counted"]:
            return Text("")
        parts = [f"{size(int(task.completed))} of {size(int(task.total or 0))}"]
        if not task.finished and task.speed:
            parts.append(f"{size(int(task.speed))}/s")
        if not task.finished and task.time_remaining is not None:
            parts.append(f"ETA {task.time_remaining:.0f} s")
        return Text(", ".join(parts))


class Display:
    """Shows an export on standard error: one bar per step, with bytes, speed and time left. Implements `export.Progress`."""

    def __init__(self, console: Console) -> None:
        self._bars = Bars(TextColumn("{task.description}"), BarColumn(bar_width=12), TimeElapsedColumn(), Amount(), console=console)
        self._task: TaskID | None = None

    def step(self, title: str, total_bytes: int | None) -> None:
        """Finishes the bar before and begins one; without a total it only moves."""
        self._finish()
        self._task = self._bars.add_task(title, total=total_bytes, counted=total_bytes is not None)

    def advance(self, done_bytes: int) -> None:
        """Moves the bar."""
        if self._task is not None:
            self._bars.advance(self._task, done_bytes)

    def say(self, sentence: str) -> None:
        """Prints a sentence above the bars."""
        self._bars.console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        try:
            self._bars.start()
        except RuntimeError as error:  # there is no room for its thread's stack
            raise MemoryError from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._finish()
        self._bars.stop()

    def _finish(self) -> None:
        """Totals are estimates, so a finished step sets its own."""
        if self._task is not None:
            task = next(task for task in self._bars.tasks if task.id == self._task)
            self._bars.update(self._task, total=max(task.completed, 1), completed=max(task.completed, 1))


def size(count: int) -> str:
    """Returns bytes for people: 1.5 MB."""
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def summary(bundle: Bundle) -> Table:
    """The table at the end: every file of the bundle with its size."""
    table = Table(title=f"{bundle.folder}: Gemma 4 {bundle.manifest.architecture.family}", title_justify="left")
    for column, justify in (("file", "left"), ("role", "left"), ("quantization", "left"), ("size", "right")):
        table.add_column(column, justify="right" if justify == "right" else "left", overflow="fold")
    for entry in bundle.manifest.files:
        table.add_row(entry.path, entry.role, entry.quantization or "", size(entry.bytes))
    table.add_section()
    table.add_row("together", "", "", size(sum(entry.bytes for entry in bundle.manifest.files)))
    return table


def parity_sentences(parity: dict[str, Any] | None) -> list[str]:
    """One sentence for each format's comparison with the reference."""
    gguf = {key: value for key, value in (parity or {}).items() if key != "onnx"}
    onnx = (parity or {}).get("onnx")
    sentences = [parity_sentence(gguf)] if gguf or onnx is None else []
    return sentences + ([f"ONNX: {parity_sentence(onnx)}"] if onnx is not None else [])


def parity_sentence(parity: dict[str, Any]) -> str:
    """One sentence about a comparison with the reference."""
    if not parity or "skipped" in parity:
        return f"Parity not measured: {parity.get('skipped', 'no reason given')}."
    plain, final, drafts = parity["unquantized"], parity["quantized"], parity["drafts"]
    return (
        f"Parity with {parity['reference']}: unquantized logits within {plain['max_abs_difference']:.3g}, "
        f"{final['quantization']} mean KL {final['mean_kl']:.3g} and greedy agreement {final['greedy_agreement']:.0%}, "
        f"drafts agree {drafts['unquantized_agreement']:.0%} ({drafts['quantized_agreement']:.0%} quantized)."
    )


def check_formats(formats: str, quantization: str | None, onnx: dict[str, Any]) -> None:
    """Raises a usage error for options of a format that is not made."""
    if formats == "gguf" and any(onnx.values()):
        raise click.UsageError("the --onnx options and --device need --format onnx or both")
    if onnx["device"] not in (None, "static") and onnx["onnx_block"]:
        raise click.UsageError(f"--device {onnx['device']} takes weights in groups of its own; leave --onnx-block out")
    if onnx["device"] and onnx["onnx_kv"] not in (None, "f32"):
        raise click.UsageError("graphs of fixed shapes keep K/V rows in float32; leave --onnx-kv out, or --device")
    if formats == "onnx" and quantization:
        raise click.UsageError(
            "--target-quant and --drafter-quant are those of GGUF files; with --format onnx give --onnx-target, --onnx-drafter"
        )


def check_making(output: Path | None, phase_power: Path | None, planning: bool) -> None:
    """Raises a usage error where a bundle has no place to go, or for what only a plan takes."""
    if output is None and not planning:
        raise click.UsageError("Missing option '-o' / '--output'.")
    if phase_power is not None and not planning:
        raise click.UsageError("--phase-power is for --plan; leave it out")


def check_weighing(calibrate: Path | None, save_imatrix: Path | None, imatrix: Path | None) -> None:
    """Raises a usage error for ways to weigh errors that contradict each other."""
    if calibrate and imatrix:
        raise click.UsageError("give --calibrate or an importance matrix, not both")
    if save_imatrix and not (calibrate and save_imatrix.is_dir()):
        raise click.UsageError("--save-imatrix takes an existing folder, and goes with --calibrate")


def onnx_request(given: dict[str, Any]) -> OnnxRequest:
    """The ONNX part of a request out of the --onnx options that were given."""
    named = {key.removeprefix("onnx_"): value for key, value in given.items() if value is not None}
    if "block" in named:
        named["block"] = int(named["block"])
    return OnnxRequest(**DEVICE_WEIGHTS.get(named.get("device", ""), {}) | named)


def export_config(path: Path | None, preset: str | None) -> SpeculativeConfig:
    """Returns the configuration file over the preset. Raises ConfigError."""
    config = SpeculativeConfig() if path is None else expanded(read_config(path))
    return config if preset is None else config.over(preset_of(preset).config)


@contextlib.contextmanager
def export_errors() -> Iterator[None]:
    """`one_sentence_errors` for an export, whose progress display runs in a thread."""
    threading.excepthook = _thread_ended
    with one_sentence_errors(out_of_memory=OUT_OF_MEMORY, stopped="stopped; nothing unfinished was left behind"):
        yield


def _thread_ended(ended: threading.ExceptHookArgs) -> None:
    """Prints no traceback where the progress thread finds no memory: the command itself reports that."""
    if not issubclass(ended.exc_type, MemoryError):
        threading.__excepthook__(ended)


def show(bundle: Bundle, console: Console, as_json: bool) -> None:
    """Prints what was made, and how it compares with the reference."""
    if as_json:
        click.echo(json.dumps({"bundle": str(bundle.folder), **to_json(bundle.manifest)}, ensure_ascii=False))
        return
    Console().print(summary(bundle))
    for sentence in parity_sentences(bundle.manifest.parity):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def run_plan(manifest: Manifest, device: str | None, phase_power: Path | None, as_json: bool) -> None:
    """Prints what to expect of the pair's GGUF files on a device."""
    power = read_phase_power(phase_power) if phase_power is not None else None
    show_plan(manifest_plan(manifest, device_speed(device, None), context=manifest.runtime.context, power=power), None, as_json=as_json)


@click.command(epilog=EXAMPLES)
@click.argument("target", required=False)
@click.argument("drafter", required=False)
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="BUNDLE", help="Folder to make; needed unless --plan.")
@click.option("--format", "formats", type=click.Choice(("gguf", "onnx", "both")), default="gguf", help="Files to make.  [default: gguf]")
@click.option(
    "--target-quant",
    type=click.Choice(QUANTIZATIONS),
    help=f"Target's weights.  [default: {TARGET_QUANTIZATION}, the 4-bit type that CPUs repack and run fastest]",
)
@click.option(
    "--drafter-quant",
    type=click.Choice(QUANTIZATIONS),
    help=f"Drafter's weights.  [default: {DRAFTER_QUANTIZATION}: nearly exact, and still a few percent of the target's size]",
)
@click.option("--onnx-target", type=click.Choice(ONNX_WEIGHTS), help="Target's weights in ONNX.  [default: int4]")
@click.option("--onnx-drafter", type=click.Choice(ONNX_WEIGHTS), help="Drafter's weights in ONNX.  [default: int8]")
@click.option("--onnx-embedding", type=click.Choice(ONNX_WEIGHTS), help="Target's embedding and head.  [default: as its other weights]")
@click.option("--onnx-kv", type=click.Choice(KV_KINDS), help="K/V rows of ONNX graphs.  [default: f32, the fastest]")
@click.option(
    "--onnx-block",
    type=click.Choice([str(block) for block in BLOCKS]),
    help="Weights of int8 and int4 that share a scale.  [default: 128, for int4 with smaller blocks or 8 bits where rounding costs most; 32 with --device]",
)
@click.option("--device", type=click.Choice(DEVICES), help="ONNX graphs of fixed shapes: for any runtime that wants them, or for this NPU.")
@click.option(
    "--context", type=click.IntRange(min=1), help="Tokens the KV cache is laid out for.  [default: 4096, or the model's if shorter]"
)
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="YAML file: models, precisions and context where the command line names none; the rest goes into the bundle's config.yaml.",
)
@click.option("--preset", type=click.Choice(PRESET_NAMES), help="Settings for a kind of work, for the bundle's config.yaml.")
@click.option(
    "--calibrate",
    type=click.Path(path_type=Path),
    metavar="TEXT",
    help="Weigh quantization errors by what the pair computes on this text, in transformers: a few hundred kB of what it will read.",
)
@click.option(
    "--save-imatrix", type=click.Path(path_type=Path), metavar="FOLDER", help="Keep what --calibrate measured, as llama.cpp's files."
)
@click.option("--imatrix", type=click.Path(path_type=Path), metavar="FILE", help="Target's importance matrix, as llama-imatrix makes it.")
@click.option("--drafter-imatrix", type=click.Path(path_type=Path), metavar="FILE", help="Drafter's importance matrix.")
@click.option(
    "--sign", type=click.Path(path_type=Path), metavar="KEY", help="Sign the manifest with this Ed25519 private key (PEM); needs [sign]."
)
@click.option("--no-verify", is_flag=True, help="Do not compare the export with the reference implementation.")
@click.option("--force", is_flag=True, help="Replace an existing bundle, once the new one is whole.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("--reference-pair", "shipped", is_flag=True, help="Export the small trained pair shipped with this package.")
@click.option(
    "--phase-power",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="With --plan: watts of draft, verify and plain as JSON.",
)
@plan_options
@package_options
@click.version_option(package_name="edge-mtp")
def main(
    target: str | None,
    drafter: str | None,
    output: Path | None,
    target_quant: str | None,
    drafter_quant: str | None,
    context: int | None,
    config_path: Path | None,
    preset: str | None,
    no_verify: bool,
    force: bool,
    as_json: bool,
    shipped: bool,
    calibrate: Path | None,
    save_imatrix: Path | None,
    imatrix: Path | None,
    drafter_imatrix: Path | None,
    formats: str,
    phase_power: Path | None,
    sign: Path | None,
    **onnx: Any,
) -> None:
    """Export TARGET and its MTP assistant DRAFTER as one bundle.

    Each is a Hugging Face folder, a hub id, or an existing GGUF (checked, then taken as it is). A --config file may name them instead.
    """
    package = package_request(onnx, output, force)
    if package is not None:
        with export_errors():
            run_package(package, as_json)
        return
    planning = plan_values(onnx)
    check_making(output, phase_power, planning.plan)
    with one_sentence_errors():
        config = export_config(config_path, preset)
    if not shipped:
        target, drafter = target or config.verifier.model, drafter or config.drafter.model
    if shipped and (target or drafter):
        raise click.UsageError("--reference-pair is exported instead of TARGET and DRAFTER; leave them out")
    if not shipped and not (target and drafter):
        raise click.UsageError("give TARGET and DRAFTER, a --config that names both models, or --reference-pair")
    check_formats(formats, target_quant or drafter_quant, onnx)
    check_weighing(calibrate, save_imatrix, imatrix or drafter_imatrix)
    console, gguf = Console(stderr=True), formats != "onnx"
    with export_errors():
        if shipped:
            target, drafter = map(str, reference_pair())
        if output is None or planning.plan:
            run_plan(
                planned_manifest(
                    str(target),
                    str(drafter),
                    target_quantization=target_quant or config.verifier.precision,
                    drafter_quantization=drafter_quant or config.drafter.precision,
                    context=context or config.cache.max_context_length,
                ),
                planning.profile,
                phase_power,
                as_json,
            )
            return
        request = ExportRequest(
            target=str(target),
            drafter=str(drafter),
            output=output,
            target_quantization=target_quant or (config.verifier.precision if gguf else None),
            drafter_quantization=drafter_quant or (config.drafter.precision if gguf else None),
            context=context or config.cache.max_context_length,
            verify=not no_verify,
            force=force,
            config=config,
            gguf=gguf,
            onnx=None if formats == "gguf" else onnx_request(onnx),
            importance=ImportanceSources(imatrix=imatrix, drafter_imatrix=drafter_imatrix, calibrate=calibrate, save=save_imatrix),
            sign=sign,
        )
        with Display(console) as display:
            bundle = export_pair(request, display)
    with contextlib.suppress(KeyboardInterrupt):  # too late to stop anything: the bundle is whole
        show(bundle, console, as_json)
