"""`edge-export pair` and `edge-export reference`: checkpoints to a bundle; and the options that several commands share."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from edge_devices.command_line import PanelCommand, given_options, one_sentence_errors, option_group, takes
from edge_devices.option_fields import option
from edge_export.checkpoint.published.formats import published_config
from edge_export.checkpoint.published.hub import hub_name, own_drafter, with_revision
from edge_export.checkpoint.shipped_pair import (
    CHAT_DESCRIPTION,
    DESCRIPTION,
    WIDENED,
    chat_pair,
    reference_pair,
    shipped_acceptance,
    widened_target,
)
from edge_export.cli.display import Display, show
from edge_export.onnx.request import DEVICE_WEIGHTS, OnnxRequest
from edge_export.pipeline.export import export_pair
from edge_export.pipeline.request import ExportRequest
from edge_export.quantization.importance_sources import ImportanceSources
from edge_export.quantization.llama_quantize import gguf_can_be_written
from edge_runtime.config.schema import PRESET_NAMES, SpeculativeConfig
from edge_runtime.config.settings import expanded, preset_of
from edge_runtime.config.yaml_file import read_config
from edge_runtime.errors import OUT_OF_MEMORY

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
# Not called like fields of requests, which are options too.
target_name = click.argument("target_name", metavar="[TARGET]", required=False)
drafter_name = click.argument("drafter_name", metavar="[DRAFTER]", required=False)
REQUEST = ExportRequest(target="", drafter="", output=Path())
_OUTPUT: dict[str, Any] = {"type": click.Path(path_type=Path), "metavar": "BUNDLE"}
_export_options = option_group(
    click.option(
        "--format",
        "formats",
        type=click.Choice(("gguf", "onnx", "both")),
        help="Format of the models.  [default: gguf, or onnx where llama-cpp-python is not installed]",
    ),
    takes("request", REQUEST, panel="Bundle"),
    takes("importance", ImportanceSources, panel="Quantization"),
    takes("onnx", OnnxRequest, panel="ONNX graphs"),
    as_json,
    panel="Bundle",
)


@dataclass(frozen=True, kw_only=True)
class Models:
    """The revisions of the models named on the command line, and the configuration, which may name them instead."""

    revision: str | None = option(
        metavar="REV", help="Branch, tag or commit of TARGET's hub repository, as in OWNER/NAME@REV.  [default: main]", panel="Bundle"
    )
    drafter_revision: str | None = option(metavar="REV", help="The same for DRAFTER's repository.", panel="Bundle")
    config_path: Path | None = option(
        "--config",
        panel="Configuration",
        help="YAML file with models, precisions and context; options on the command line override it."
        " Its other settings go into the bundle's config.yaml.",
    )
    preset: str | None = option(
        choices=PRESET_NAMES, panel="Configuration", help="Run settings for this kind of work, for the bundle's config.yaml."
    )

    def config(self) -> SpeculativeConfig:
        """Returns the configuration file over the preset. Raises ConfigError."""
        config = SpeculativeConfig() if self.config_path is None else expanded(read_config(self.config_path))
        return config if self.preset is None else config.over(preset_of(self.preset))

    def names(self, config: SpeculativeConfig, target: str | None, drafter: str | None, *, planning: bool = False) -> tuple[str, str]:
        """Returns target and drafter, as given or from `config`. Raises ExportError, or a usage error if there are none.

        A plan of a built-in size has its own drafter, and so has a target that Google published with an assistant.
        """
        target, drafter = target or config.verifier.model, drafter or config.drafter.model
        if target and not drafter:
            drafter = own_drafter(target)
        if planning and target and not drafter and published_config(target, assistant=True):
            drafter = target
        if not (target and drafter):
            raise click.UsageError(
                "give TARGET and DRAFTER, or a --config with both; google/gemma-4-...-it and GGUF repositories need no DRAFTER"
            )
        return with_revision(target, self.revision), with_revision(drafter, self.drafter_revision)


@contextlib.contextmanager
def export_errors() -> Iterator[None]:
    """`one_sentence_errors` for an export, whose progress display runs in a thread. SIGTERM ends it with its children and its files."""
    threading.excepthook = _thread_ended
    main = threading.current_thread() is threading.main_thread()  # only it may set a handler
    before = signal.signal(signal.SIGTERM, _terminated) if main else None
    try:
        with one_sentence_errors(out_of_memory=OUT_OF_MEMORY, stopped="stopped; nothing unfinished was left behind"):
            yield
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)


def _terminated(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _thread_ended(ended: threading.ExceptHookArgs) -> None:
    """Prints no traceback if the progress thread runs out of memory: the command itself reports that."""
    if not issubclass(ended.exc_type, MemoryError):
        threading.__excepthook__(ended)


@click.command(cls=PanelCommand)
@target_name
@drafter_name
@option_group(
    click.option("-o", "--output", **_OUTPUT, help="Folder to write the bundle to.  [default: the last part of TARGET's name, here]"),
    panel="Bundle",
)
@_export_options
@takes("models", Models)
@export_errors()
def pair(target_name: str | None, drafter_name: str | None, output: Path | None, models: Models, **options: Any) -> None:
    """Export TARGET and its MTP assistant DRAFTER as one bundle.

    Each is a Hugging Face checkpoint folder, a GGUF file, which is checked and copied unchanged, or a hub name: OWNER/NAME, with
    @REVISION, and with :FILE or :TAG (Q4_K_M) for a GGUF file of the repository. DRAFTER may be left out for google/gemma-4-...-it and for
    GGUF files that lie together. A --config file may name them instead.
    """
    config = models.config()
    target, drafter = models.names(config, target_name, drafter_name)
    _export(target, drafter, config, output=output or default_output(target), **options)


def default_output(target: str) -> Path:
    """The folder here that a bundle gets without --output: gemma-4-E2B-it for google/gemma-4-E2B-it, or for a file of that name."""
    path = Path(target)
    name = None if path.exists() else hub_name(target)
    return Path(path.resolve().name.removesuffix(".gguf") if name is None else name.repository.rpartition("/")[2])


@click.command(cls=PanelCommand)
@option_group(
    click.option("-o", "--output", **_OUTPUT, required=True, help="Folder to write the bundle to."),
    click.option("--chat", is_flag=True, help="The pair that answers short questions about Python, units and this tool."),
    click.option("--widened", is_flag=True, help="Widen its feed-forward layers with zeros: a phone-sized model's cost, the same output."),
    panel="Bundle",
)
@_export_options
@takes("models", Models, only=("config_path", "preset"))
@export_errors()
def reference(chat: bool, widened: bool, models: Models, **options: Any) -> None:
    """Export a small trained pair that comes with this package.

    It continues Python code; with --chat it answers short questions about Python, units and edge-mtp.
    """
    target, drafter = chat_pair() if chat else reference_pair()
    description = (CHAT_DESCRIPTION if chat else DESCRIPTION) + WIDENED * widened
    # It is for trying commands: calibrated by --calibrate only, so that it is there in seconds.
    options["importance"] = replace(options["importance"], by_default=False)
    with widened_target(target) if widened else contextlib.nullcontext(target) as folder:
        acceptance = shipped_acceptance(drafter)
        _export(str(folder), str(drafter), models.config(), description=description, acceptance=acceptance, **options)


def _export(
    target: str,
    drafter: str,
    config: SpeculativeConfig,
    *,
    output: Path,
    formats: str | None,
    request: ExportRequest,
    importance: ImportanceSources,
    onnx: OnnxRequest,
    as_json: bool,
    description: str | None = None,
    acceptance: dict[str, Any] | None = None,
) -> None:
    """Exports and prints the bundle. Raises ExportError, or a usage error for options that exclude each other."""
    option_names = given_options(click.get_current_context())
    console = Console(stderr=True)
    if formats is None:
        formats = "gguf" if gguf_can_be_written() or request.target_quantization or request.drafter_quantization else "onnx"
        if formats == "onnx":
            console.print(
                "Writing ONNX graphs. For GGUF files: pip install 'edge-mtp\\[llama,export]', then --format gguf.", highlight=False
            )
    _check(formats, request, importance, onnx, option_names)
    gguf = formats != "onnx"
    device_weights = {name: value for name, value in DEVICE_WEIGHTS.get(onnx.device or "", {}).items() if name not in option_names}
    complete = replace(
        request,
        target=target,
        drafter=drafter,
        output=output,
        target_quantization=request.target_quantization or (config.verifier.precision if gguf else None),
        drafter_quantization=request.drafter_quantization or (config.drafter.precision if gguf else None),
        context=request.context or config.cache.max_context_length,
        gguf=gguf,
        onnx=None if formats == "gguf" else replace(onnx, **device_weights),
        config=config,
        importance=importance,
        description=description,
        acceptance=acceptance,
    )
    with Display(console) as display:
        bundle = export_pair(complete, display)
    with contextlib.suppress(KeyboardInterrupt):  # too late to stop anything: the bundle is complete
        show(bundle, console, as_json)


def _check(formats: str, request: ExportRequest, importance: ImportanceSources, onnx: OnnxRequest, option_names: set[str]) -> None:
    if importance.calibrate and (importance.imatrix or importance.drafter_imatrix):
        raise click.UsageError("give --calibrate or an importance matrix, not both")
    if importance.calibrate and "by_default" in option_names:
        raise click.UsageError("give --calibrate TEXT or --no-calibrate, not both")
    if importance.save and not (importance.calibrate and importance.save.is_dir()):
        raise click.UsageError("--save-imatrix needs an existing folder, and --calibrate")
    if "tune_minutes" in option_names and not request.tune_drafter:
        raise click.UsageError("--tune-minutes needs --tune-drafter")
    if formats == "gguf" and option_names & {"target", "drafter", "embedding", "kv", "block", "device"}:
        raise click.UsageError("the --onnx options and --device need --format onnx or both")
    if formats == "onnx" and (request.target_quantization or request.drafter_quantization):
        raise click.UsageError(
            "--target-quant and --drafter-quant are for GGUF files; with --format onnx give --onnx-target and --onnx-drafter"
        )
    if onnx.device not in (None, "static") and onnx.block:
        raise click.UsageError(f"--device {onnx.device} has a fixed block size; leave --onnx-block out")
    if onnx.device and onnx.kv != "f32":
        raise click.UsageError("graphs of fixed shapes keep the K/V cache in float32; leave --onnx-kv out, or --device")
