"""The commands of `edge-export`: pair and reference, which write bundles, and plan, package and publish."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from edge_devices.command_line import PanelCommand, given_options, one_sentence_errors, option_group, takes
from edge_devices.errors import one_line
from edge_devices.option_fields import option
from edge_export.checkpoint.hub import hub_name, own_drafter, with_revision
from edge_export.checkpoint.sources import (
    CHAT_DESCRIPTION,
    DESCRIPTION,
    WIDENED,
    chat_pair,
    reference_pair,
    shipped_acceptance,
    widened_target,
)
from edge_export.checkpoint.weight_formats import SIZES, published_config
from edge_export.cli.display import Display, Steps, show, size_table
from edge_export.device_package.build import README, PackageRequest, copy_command, kernels_sentence, make_package, possible_backends
from edge_export.device_package.inventory import PLATFORMS
from edge_export.onnx.request import DEVICE_WEIGHTS, OnnxRequest
from edge_export.pipeline.export import export_pair, planned_export
from edge_export.pipeline.publish import publication
from edge_export.pipeline.request import ExportRequest
from edge_export.quantization.calibration import ImportanceSources
from edge_export.quantization.gguf_quantization import gguf_can_be_written
from edge_runtime.cli.options import BundlePath
from edge_runtime.cli.plan import PlanOptions, plan_lines, short_lines
from edge_runtime.config.schema import PRESET_NAMES, SpeculativeConfig
from edge_runtime.config.settings import expanded, preset_of, read_config
from edge_runtime.drafting.energy_objective import read_phase_power
from edge_runtime.errors import OUT_OF_MEMORY
from edge_runtime.planning.speed import manifest_plan
from edge_runtime.planning.speed_profile import speed_profile

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
# The arguments have other names than the fields of requests, which are options.
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
    """The models' revisions, and the configuration, which may name the models if the command line does not."""

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
        """Returns the configuration: the file's settings, and those of the preset for all others. Raises ConfigError."""
        config = SpeculativeConfig() if self.config_path is None else expanded(read_config(self.config_path))
        return config if self.preset is None else config.over(preset_of(self.preset))

    def names(self, config: SpeculativeConfig, target: str | None, drafter: str | None, *, planning: bool = False) -> tuple[str, str]:
        """Returns target and drafter, as given or from `config`. Raises ExportError, or a usage error if there are none.

        The drafter is known for a target that Google published with an assistant, and in a plan for a built-in size.
        """
        target, drafter = target or config.verifier.model, drafter or config.drafter.model
        if target and not drafter:
            drafter = own_drafter(target)
        if planning and target and not drafter and published_config(target, assistant=True):
            drafter = target
        if not (target and drafter):
            raise click.UsageError(_names_needed(target, planning=planning))
        return with_revision(target, self.revision), with_revision(drafter, self.drafter_revision)


def _names_needed(target: str | None, *, planning: bool) -> str:
    if target and published_config(target, assistant=False):
        return f"{target} is a size, which a plan takes; here, name the checkpoint: google/gemma-4-{target.upper()}-it"
    no_drafter = f"no drafter of {target} is known here: " if target else ""
    size = f"a size ({', '.join(SIZES.values())}), or " if planning else ""
    return (
        f"{no_drafter}give {size}TARGET and DRAFTER, or a --config with both; google/gemma-4-...-it and GGUF repositories need no DRAFTER"
    )


@contextlib.contextmanager
def export_errors() -> Iterator[None]:
    """`one_sentence_errors` for an export, whose progress display runs in a thread. SIGTERM ends its children and removes its files."""
    threading.excepthook = _thread_ended
    main = threading.current_thread() is threading.main_thread()  # only the main thread may set a handler
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
    """Prints no traceback if the progress thread runs out of memory, because the command itself reports that."""
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
    """Returns the default of --output: gemma-4-E2B-it for google/gemma-4-E2B-it, or for a file or folder of that name."""
    path = Path(target)
    name = None if path.exists() else hub_name(target)
    return Path(path.resolve().name.removesuffix(".gguf") if name is None else name.repository.rpartition("/")[2])


@click.command(cls=PanelCommand)
@option_group(
    click.option("-o", "--output", **_OUTPUT, required=True, help="Folder to write the bundle to."),
    click.option("--chat", is_flag=True, help="The model that answers short questions about Python, units and this tool."),
    click.option("--widened", is_flag=True, help="Widen its feed-forward layers with zeros: a phone-sized model's cost, the same output."),
    panel="Bundle",
)
@_export_options
@takes("models", Models, only=("config_path", "preset"))
@export_errors()
def reference(chat: bool, widened: bool, models: Models, **options: Any) -> None:
    """Export a small trained model that comes with this package.

    It continues Python code; with --chat it answers short questions about Python, units and edge-mtp.
    """
    target, drafter = chat_pair() if chat else reference_pair()
    description = (CHAT_DESCRIPTION if chat else DESCRIPTION) + WIDENED * widened
    # The model is for trying commands. So it is calibrated only by --calibrate, and the export takes seconds.
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
    """Exports and prints a bundle. Raises ExportError, or a usage error for options that exclude each other."""
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
    with contextlib.suppress(KeyboardInterrupt):  # it is too late to stop, because the bundle is complete
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


@click.command(cls=PanelCommand)
@target_name
@drafter_name
@click.option(
    "--phase-power",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="JSON file with the watts of drafting, checking and plain decoding.",
)
@takes("models", Models)
@takes("request", REQUEST, only=("context", "target_quantization", "drafter_quantization"), panel="Bundle")
@takes("options", PlanOptions, only=("profile", "how", "as_json"))
def plan(
    target_name: str | None,
    drafter_name: str | None,
    *,
    phase_power: Path | None,
    models: Models,
    request: ExportRequest,
    options: PlanOptions,
) -> None:
    """Predict download, disk, memory, speed and joules per token of a model before it is exported.

    No weights are needed: TARGET may be E2B, E4B, 12B, 26B-A4B or 31B; of a hub repository only config.json is fetched.
    """
    config = models.config()
    target, drafter = models.names(config, target_name, drafter_name, planning=True)
    planned = planned_export(
        target,
        drafter,
        target_quantization=request.target_quantization or config.verifier.precision,
        drafter_quantization=request.drafter_quantization or config.drafter.precision,
        context=request.context or config.cache.max_context_length,
    )
    manifest, power = planned.manifest, read_phase_power(phase_power) if phase_power is not None else None
    predicted = manifest_plan(manifest, speed_profile(options.profile, None), context=manifest.runtime.context, power=power)
    if options.as_json:
        click.echo(json.dumps({"export": planned.to_json(), "plan": predicted.to_json()}, ensure_ascii=False))
        return
    for line in [*planned.lines(), *(plan_lines if options.how else short_lines)(predicted)]:
        click.echo(line)


@click.command(cls=PanelCommand)
@click.argument("platform", type=click.Choice(list(PLATFORMS)), metavar="PLATFORM")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), metavar="FOLDER", help="Folder to write the package to.")
@takes("request", PackageRequest(platform="", output=Path(), backends=()))
@as_json
@export_errors()
def package(platform: str, output: Path, request: PackageRequest, as_json: bool) -> None:
    """Build a folder for PLATFORM that runs bundles on a device where nothing is installed."""
    there = possible_backends(PLATFORMS[platform])
    chosen = tuple(dict.fromkeys(request.backends)) or ("onnx",)
    if not set(chosen) <= set(there) or (request.tools and "llama" not in there):
        raise click.UsageError(f"llama.cpp is not compiled for {platform} yet; give --backend onnx, without --with-llama-tools")
    console = Console(stderr=True)
    with Steps(console) as step:
        inventory = make_package(replace(request, platform=platform, output=output, backends=chosen), step, step.note)
    if as_json:
        click.echo(json.dumps({"package": str(output), **asdict(inventory)}))
        return
    sizes = sorted(inventory.sizes.items(), key=lambda item: -item[1])
    Console().print(size_table(f"{output}: {inventory.platform}, {len(inventory.files)} files", "part", sizes))
    for line in (
        f"{kernels_sentence(inventory.row_kernels)}.",
        f"Licences of all {len(inventory.licences)} components are in {output / 'licences'}.",
        f"Next: {copy_command(PLATFORMS[platform], str(output))}",
        f"{output / README} says how to make a bundle, chat, serve and measure on the device.",
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


@click.command(cls=PanelCommand)
@click.argument("bundle", type=BundlePath())
@click.argument("repository", metavar="OWNER/NAME")
@click.option(
    "--figures",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    multiple=True,
    metavar="FILE",
    help="Figures of this bundle for its card, by edge-bench run --markdown. Repeatable.",
)
@click.option("--public", is_flag=True, help="Let everybody read a new repository.  [default: private]")
@click.option("--dry-run", is_flag=True, help="Print what would be uploaded, and the model card; ask nothing of the hub.")
@one_sentence_errors(stopped="stopped; the same command goes on")
def publish(bundle: Path, repository: str, figures: tuple[Path, ...], public: bool, dry_run: bool) -> None:
    """Upload BUNDLE and its model card to OWNER/NAME on the Hugging Face hub.

    It needs the hub's token (hf auth login). After an interruption, run the same command again: it continues.
    """
    console = Console(stderr=True)
    planned = publication(bundle, repository, figures)
    console.print(size_table(planned.repository, "file", planned.tree()))
    if dry_run:
        click.echo(planned.card)
        return
    uploaded, others = planned.upload(private=not public)
    if others:
        names = one_line(", ".join(others[:5])) + (" ..." if len(others) > 5 else "")
        console.print(f"What was in the repository stays beside the bundle: {names}.", markup=False, highlight=False, soft_wrap=True)
    if uploaded.private == public:
        state = "private" if uploaded.private else "public"
        console.print(f"The repository is {state} as before; the hub's settings change that.", highlight=False, soft_wrap=True)
    click.echo(uploaded.address)
