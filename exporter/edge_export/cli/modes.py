"""The sub-commands of `edge-export`: which options each takes, and what `edge-export --help` shows beside them."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from edge_devices.command_line import CommandWithModes
from edge_export.device_package.platforms import PLATFORMS

EXAMPLES = """
\b
Examples:
  edge-export pair google/gemma-4-E2B-it google/gemma-4-E2B-it-assistant -o e2b
  edge-export pair ./target ./drafter -o my-bundle --target-quant q4_k_m --context 8192
  edge-export pair ./target ./drafter -o my-bundle --target-quant q4_k_m --calibrate text.txt
  edge-export pair ./target ./drafter -o my-bundle --tune-drafter my-texts.txt
  edge-export pair ./target ./drafter -o my-bundle --media f16
  edge-export pair target-q4_0.gguf ./drafter -o my-bundle --force
  edge-export pair unsloth/gemma-4-E2B-it-GGUF:gemma-4-E2B-it-Q4_0.gguf unsloth/gemma-4-E2B-it-GGUF:mtp-gemma-4-E2B-it.gguf -o e2b
  edge-export plan E2B --profile raspberry-pi-5
  edge-export reference -o reference
  edge-export reference -o reference --format onnx --onnx-target int8
  edge-export reference -o reference --format onnx --device openvino-npu --context 1024
  edge-export package android-arm64 -o phone-package
"""
_FORM = ("output", "formats", "media", "context", "sign", "no_verify", "force", "as_json", "target_quant", "drafter_quant")
_REVISIONS = ("revision", "drafter_revision")
_IMPORTANCE = ("calibrate", "save_imatrix", "imatrix", "drafter_imatrix")
_TUNING = ("tune_drafter", "tune_minutes")
_ONNX = ("onnx_target", "onnx_drafter", "onnx_embedding", "onnx_kv", "onnx_block", "device", "config_path", "preset")


class FirstWord(click.Path):
    """The first word of edge-export: a checkpoint, or a sub-command that the shell offers too."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        """Returns sub-commands, else lets the shell complete files."""
        names = ctx.command.completed_modes(incomplete) if isinstance(ctx.command, CommandWithModes) else []
        return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="file")]


def add_modes(main: CommandWithModes) -> None:
    """Adds the sub-commands of edge-export."""
    main.add_mode(
        "pair", "Export TARGET and its drafter as one bundle.", ["target", "drafter", *_REVISIONS, *_FORM, *_TUNING, *_IMPORTANCE, *_ONNX]
    )
    main.add_mode(
        "reference",
        "Export the small trained pair that comes with this package.",
        ["widened", *_FORM, *_TUNING, *_IMPORTANCE, *_ONNX],
        shipped=True,
    )
    main.add_mode(
        "plan",
        "Predict memory, speed and joules per token of a pair before it is exported.",
        [
            *("target", "drafter", *_REVISIONS, "shipped", "profile", "target_quant", "drafter_quant", "context"),
            *("config_path", "preset", "phase_power", "as_json"),
        ],
        plan=True,
    )
    main.add_mode(
        "package",
        "Build a folder for PLATFORM that runs bundles on a device where nothing is installed.",
        [
            click.Argument(["package"], metavar="PLATFORM", type=click.Choice(list(PLATFORMS))),
            *("output", "backends", "with_llama_tools", "force", "as_json"),
        ],
    )
