"""The options of `edge-export`: their help, the checks of those that exclude each other, and the requests they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from edge_devices.command_line import option_group
from edge_export.checkpoint.published.hub import with_revision
from edge_export.checkpoint.published.sizes import published_config
from edge_export.checkpoint.shipped.reference_pair import reference_pair
from edge_export.cli.modes import FirstWord
from edge_export.gguf.media_encoder import ENCODER_TYPES, EncoderType
from edge_export.onnx.request import BLOCKS, DEVICE_WEIGHTS, DEVICES, KV_KINDS, ONNX_WEIGHTS, OnnxRequest
from edge_export.pipeline.gguf_step import DRAFTER_QUANTIZATION, TARGET_QUANTIZATION
from edge_export.pipeline.request import TUNING_MINUTES, Tuning
from edge_export.quantization.importance_sources import ImportanceSources
from edge_runtime.bundle.gguf_types import OFFERED
from edge_runtime.config.presets import expanded, preset_of
from edge_runtime.config.schema import PRESET_NAMES, SpeculativeConfig
from edge_runtime.config.yaml_file import read_config

_PATH = click.Path(path_type=Path)

export_options = option_group(
    click.argument("target", required=False, type=FirstWord()),
    click.argument("drafter", required=False),
    option_group(
        click.option(
            "-o", "--output", type=_PATH, metavar="BUNDLE", help="Folder to write the bundle or package to; required unless --plan."
        ),
        click.option(
            "--revision", metavar="REV", help="Branch, tag or commit of TARGET's hub repository; as OWNER/NAME@REV.  [default: main]"
        ),
        click.option("--drafter-revision", metavar="REV", help="The same for DRAFTER's repository."),
        click.option(
            "--format",
            "formats",
            type=click.Choice(("gguf", "onnx", "both")),
            default="gguf",
            help="Format of the models.",
        ),
        click.option("--reference-pair", "shipped", is_flag=True, help="Export the small trained pair that comes with this package."),
        click.option(
            "--widened",
            is_flag=True,
            help="With --reference-pair: widen its feed-forward layers with zeros: a phone-sized model's cost, the same output.",
        ),
        click.option(
            "--media",
            type=click.Choice(ENCODER_TYPES),
            help="Add the encoder of images and sound, weights of this type; in ONNX graphs of E2B and E4B only.  [default: text only]",
        ),
        click.option(
            "--context",
            type=click.IntRange(min=1),
            help="Context length of the bundle, in tokens.  [default: 4096, or the model's own if that is shorter]",
        ),
        click.option(
            "--sign",
            type=_PATH,
            metavar="KEY",
            help="Sign the manifest with this Ed25519 private key (PEM); needs pip install 'edge-mtp[sign]'.",
        ),
        click.option("--no-verify", is_flag=True, help="Skip the comparison with the reference implementation (transformers)."),
        click.option("--force", is_flag=True, help="Replace an existing bundle as soon as the new one is complete."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table."),
        panel="Bundle",
    ),
    option_group(
        click.option(
            "--target-quant",
            type=click.Choice(OFFERED),
            help=f"Quantization of the target's GGUF.  [default: {TARGET_QUANTIZATION}, the 4-bit type that CPUs run fastest]",
        ),
        click.option(
            "--drafter-quant",
            type=click.Choice(OFFERED),
            help="Quantization of the drafter's GGUF."
            f"  [default: {DRAFTER_QUANTIZATION}, which is nearly lossless and only a few percent of the target's size]",
        ),
        click.option(
            "--calibrate",
            type=_PATH,
            metavar="TEXT",
            help="Weigh and compensate the errors of quantization by running the pair in transformers on this text file:"
            " a few hundred kB of the kind of text that the model will read.",
        ),
        click.option("--save-imatrix", type=_PATH, metavar="FOLDER", help="Save the matrices of --calibrate here, in llama.cpp's format."),
        click.option("--imatrix", type=_PATH, metavar="FILE", help="The target's importance matrix, as written by llama-imatrix."),
        click.option("--drafter-imatrix", type=_PATH, metavar="FILE", help="The drafter's importance matrix."),
        panel="Quantization",
    ),
    option_group(
        click.option(
            "--tune-drafter",
            type=_PATH,
            metavar="TEXT",
            help="Train the drafter on what the target writes after parts of this text file, a few hundred kB of the kind of text that"
            " the model will read. It replaces the original if more of its drafts are accepted on text that it has not seen.",
        ),
        click.option(
            "--tune-minutes",
            type=click.FloatRange(min=0, min_open=True),
            metavar="M",
            help=f"Minutes of training for --tune-drafter; the target writes for as long at most.  [default: {TUNING_MINUTES:g}]",
        ),
        panel="Tuning",
    ),
    option_group(
        click.option("--onnx-target", type=click.Choice(ONNX_WEIGHTS), help="Weight type of the target's ONNX graphs.  [default: int4]"),
        click.option("--onnx-drafter", type=click.Choice(ONNX_WEIGHTS), help="Weight type of the drafter's ONNX graph.  [default: int8]"),
        click.option(
            "--onnx-embedding",
            type=click.Choice(ONNX_WEIGHTS),
            help="Weight type of the target's embedding and output head in ONNX.  [default: that of --onnx-target]",
        ),
        click.option("--onnx-kv", type=click.Choice(KV_KINDS), help="Type of the K/V cache of ONNX graphs.  [default: f32, the fastest]"),
        click.option(
            "--onnx-block",
            type=click.Choice([str(block) for block in BLOCKS]),
            help="Number of int8 or int4 weights that share a scale.  [default: 128; for int4, smaller blocks or 8 bits for the weights"
            " that lose most by rounding; 32 with --device]",
        ),
        click.option(
            "--device",
            type=click.Choice(DEVICES),
            help="Write ONNX graphs of fixed shapes for this NPU, or 'static' for any runtime that needs fixed shapes.",
        ),
        panel="ONNX graphs",
    ),
    option_group(
        click.option(
            "--config",
            "config_path",
            type=_PATH,
            help="YAML file with models, precisions and context; options on the command line override it."
            " Its other settings go into the bundle's config.yaml.",
        ),
        click.option("--preset", type=click.Choice(PRESET_NAMES), help="Run settings for this kind of work, for the bundle's config.yaml."),
        panel="Configuration",
    ),
    click.option(
        "--phase-power",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        metavar="FILE",
        help="With --plan: JSON file with the watts of drafting, verifying and plain decoding.",
    ),
)


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options as given; names are those of the command line, `onnx` holds the --onnx options and --device by name."""

    target: str | None
    drafter: str | None
    output: Path | None
    revision: str | None
    drafter_revision: str | None
    formats: str
    target_quant: str | None
    drafter_quant: str | None
    context: int | None
    config_path: Path | None
    preset: str | None
    calibrate: Path | None
    tune_drafter: Path | None
    tune_minutes: float | None
    save_imatrix: Path | None
    imatrix: Path | None
    drafter_imatrix: Path | None
    sign: Path | None
    no_verify: bool
    force: bool
    as_json: bool
    shipped: bool
    widened: bool
    phase_power: Path | None
    media: EncoderType | None
    onnx: dict[str, Any]

    def check(self, *, planning: bool) -> None:
        """Raises a usage error for options that are missing or exclude each other."""
        if self.output is None and not planning:
            raise click.UsageError("Missing option '-o' / '--output'.")
        if self.phase_power is not None and not planning:
            raise click.UsageError("--phase-power is for --plan; leave it out")
        if self.shipped and (self.target or self.drafter):
            raise click.UsageError("--reference-pair is exported instead of TARGET and DRAFTER; leave them out")
        if self.widened and not self.shipped:
            raise click.UsageError("--widened is for --reference-pair; add it, or leave --widened out")
        if self.calibrate and (self.imatrix or self.drafter_imatrix):
            raise click.UsageError("give --calibrate or an importance matrix, not both")
        if self.tune_minutes and not self.tune_drafter:
            raise click.UsageError("--tune-minutes needs --tune-drafter")
        if self.save_imatrix and not (self.calibrate and self.save_imatrix.is_dir()):
            raise click.UsageError("--save-imatrix needs an existing folder, and --calibrate")
        self._check_formats()

    def _check_formats(self) -> None:
        onnx = self.onnx
        if self.formats == "gguf" and any(onnx.values()):
            raise click.UsageError("the --onnx options and --device need --format onnx or both")
        if onnx["device"] not in (None, "static") and onnx["onnx_block"]:
            raise click.UsageError(f"--device {onnx['device']} has a fixed block size; leave --onnx-block out")
        if onnx["device"] and onnx["onnx_kv"] not in (None, "f32"):
            raise click.UsageError("graphs of fixed shapes keep the K/V cache in float32; leave --onnx-kv out, or --device")
        if self.formats == "onnx" and (self.target_quant or self.drafter_quant):
            raise click.UsageError(
                "--target-quant and --drafter-quant are for GGUF files; with --format onnx give --onnx-target and --onnx-drafter"
            )

    def config(self) -> SpeculativeConfig:
        """Returns the configuration file over the preset. Raises ConfigError."""
        config = SpeculativeConfig() if self.config_path is None else expanded(read_config(self.config_path))
        return config if self.preset is None else config.over(preset_of(self.preset).config)

    def models(self, config: SpeculativeConfig, *, planning: bool = False) -> tuple[str, str]:
        """Returns target and drafter, from the command line or `config`. Raises ExportError, or a usage error if there are none.

        A plan of a built-in size has its own drafter.
        """
        if self.shipped:
            target, drafter = reference_pair()
            return str(target), str(drafter)
        first, second = self.target or config.verifier.model, self.drafter or config.drafter.model
        if planning and first and not second and published_config(first, assistant=True):
            second = first
        if not (first and second):
            raise click.UsageError("give TARGET and DRAFTER, a --config that names both models, or --reference-pair")
        return with_revision(first, self.revision), with_revision(second, self.drafter_revision)

    def onnx_request(self) -> OnnxRequest | None:
        """Returns the ONNX part of the request; None if no graphs are asked for."""
        if self.formats == "gguf":
            return None
        named = {key.removeprefix("onnx_"): value for key, value in self.onnx.items() if value is not None}
        if "block" in named:
            named["block"] = int(named["block"])
        return OnnxRequest(**DEVICE_WEIGHTS.get(named.get("device", ""), {}) | named)

    def tuning(self) -> Tuning | None:
        """Returns what to tune the drafter on; None if nothing."""
        return None if self.tune_drafter is None else Tuning(text=self.tune_drafter, minutes=self.tune_minutes or TUNING_MINUTES)

    def importance(self) -> ImportanceSources:
        """Returns where importance comes from."""
        return ImportanceSources(
            imatrix=self.imatrix, drafter_imatrix=self.drafter_imatrix, calibrate=self.calibrate, save=self.save_imatrix
        )
