"""The command `edge-export`: writes a bundle from a Gemma 4 target and its MTP drafter.

Progress goes to standard error, results to standard output.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from edge_devices.command_line import CONTEXT, CommandWithModes, one_sentence_errors
from edge_export.checkpoint.shipped.widened_pair import widened_target
from edge_export.cli.display import Display, show
from edge_export.cli.modes import EXAMPLES, add_modes
from edge_export.cli.options import ExportOptions, export_options
from edge_export.device_package.cli import package_options, package_request, run_package
from edge_export.pipeline.dry_run import planned_manifest
from edge_export.pipeline.export import export_pair
from edge_export.pipeline.request import ExportRequest
from edge_runtime.bundle.manifest import Manifest
from edge_runtime.cli.plan import plan_options, plan_values, show_plan
from edge_runtime.config.schema import SpeculativeConfig
from edge_runtime.drafting.phase_power import read_phase_power
from edge_runtime.errors import OUT_OF_MEMORY
from edge_runtime.planning.device_speed import device_speed
from edge_runtime.planning.speed import manifest_plan

_ONNX_OPTIONS = ("onnx_target", "onnx_drafter", "onnx_embedding", "onnx_kv", "onnx_block", "device")


@click.command(cls=CommandWithModes, epilog=EXAMPLES, context_settings=CONTEXT)
@export_options
@plan_options
@package_options
@click.version_option(package_name="edge-mtp")
def main(**values: Any) -> None:
    """Export TARGET and its MTP assistant DRAFTER as one bundle.

    Each is a Hugging Face checkpoint folder, a GGUF file, which is checked and copied unchanged, or a hub name: OWNER/NAME, with
    @REVISION, and with :FILE for a GGUF file of the repository. A --config file may name them instead. --plan needs no weights: it takes
    E2B, E4B, 12B, 26B-A4B and 31B too.
    """
    package = package_request(values, values["output"], values["force"])
    if package is not None:
        with export_errors():
            run_package(package, values["as_json"])
        return
    planning = plan_values(values)
    options = ExportOptions(onnx={name: values.pop(name) for name in _ONNX_OPTIONS}, **values)
    options.check(planning=planning.plan)
    console = Console(stderr=True)
    with export_errors(), contextlib.ExitStack() as stack:
        config = options.config()
        models = options.models(config, planning=options.output is None or planning.plan)
        if options.widened:
            models = str(stack.enter_context(widened_target(Path(models[0])))), models[1]
        if options.output is None or planning.plan:
            run_plan(plan_manifest(options, models, config), planning.profile, options.phase_power, options.as_json)
            return
        request = export_request(options, models, config, options.output)
        with Display(console) as display:
            bundle = export_pair(request, display)
    with contextlib.suppress(KeyboardInterrupt):  # too late to stop anything: the bundle is complete
        show(bundle, console, options.as_json)


def plan_manifest(options: ExportOptions, models: tuple[str, str], config: SpeculativeConfig) -> Manifest:
    """Returns the manifest that a dry run predicts from. Raises ExportError."""
    return planned_manifest(
        *models,
        target_quantization=options.target_quant or config.verifier.precision,
        drafter_quantization=options.drafter_quant or config.drafter.precision,
        context=options.context or config.cache.max_context_length,
    )


def run_plan(manifest: Manifest, device: str | None, phase_power: Path | None, as_json: bool) -> None:
    """Prints predictions for the pair's GGUF files on a device. Raises RequestError."""
    power = read_phase_power(phase_power) if phase_power is not None else None
    show_plan(manifest_plan(manifest, device_speed(device, None), context=manifest.runtime.context, power=power), None, as_json=as_json)


def export_request(options: ExportOptions, models: tuple[str, str], config: SpeculativeConfig, output: Path) -> ExportRequest:
    """Returns the request that the options and the configuration make."""
    gguf = options.formats != "onnx"
    return ExportRequest(
        target=models[0],
        drafter=models[1],
        output=output,
        target_quantization=options.target_quant or (config.verifier.precision if gguf else None),
        drafter_quantization=options.drafter_quant or (config.drafter.precision if gguf else None),
        context=options.context or config.cache.max_context_length,
        verify=not options.no_verify,
        force=options.force,
        config=config,
        gguf=gguf,
        onnx=options.onnx_request(),
        importance=options.importance(),
        sign=options.sign,
        media=options.media,
        tuning=options.tuning(),
    )


@contextlib.contextmanager
def export_errors() -> Iterator[None]:
    """`one_sentence_errors` for an export, whose progress display runs in a thread."""
    threading.excepthook = _thread_ended
    with one_sentence_errors(out_of_memory=OUT_OF_MEMORY, stopped="stopped; nothing unfinished was left behind"):
        yield


def _thread_ended(ended: threading.ExceptHookArgs) -> None:
    """Prints no traceback if the progress thread runs out of memory: the command itself reports that."""
    if not issubclass(ended.exc_type, MemoryError):
        threading.__excepthook__(ended)


add_modes(main)
