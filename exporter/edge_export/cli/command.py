"""The command `edge-export`: writes a bundle from a Gemma 4 target and its MTP drafter.

Progress goes to standard error, results to standard output.
"""

from __future__ import annotations

from typing import Any

import click

from edge_devices.command_line import LazyCommands, PanelGroup

COMMANDS = LazyCommands(
    {
        "pair": ("edge_export.cli.export", "Export TARGET and its MTP assistant DRAFTER as one bundle."),
        "reference": ("edge_export.cli.export", "Export a small trained model that comes with this package."),
        "plan": ("edge_export.cli.export", "Predict download, disk, memory, speed and joules per token of a model before it is exported."),
        "package": ("edge_export.cli.export", "Build a folder for PLATFORM that runs bundles on a device where nothing is installed."),
        "publish": ("edge_export.cli.export", "Upload BUNDLE and its model card to OWNER/NAME on the Hugging Face hub."),
    }
)
EXAMPLES = """
\b
Examples:
  edge-export pair google/gemma-4-E2B-it                with its assistant, as the bundle gemma-4-E2B-it
  edge-export pair ./target ./drafter -o my-bundle --target-quant q4_k_m --context 8192
  edge-export pair ./target ./drafter -o my-bundle --target-quant q4_k_m --calibrate text.txt
  edge-export pair ./target ./drafter -o my-bundle --tune-drafter my-texts.txt
  edge-export pair ./target ./drafter -o my-bundle --media f16
  edge-export pair gemma-4-E2B-it-Q4_0.gguf ./drafter -o my-bundle --force
  edge-export pair unsloth/gemma-4-E2B-it-GGUF:Q4_0 -o e2b              with the drafter beside it
  edge-export plan E2B --profile raspberry-pi-5
  edge-export reference -o reference
  edge-export reference -o reference --format onnx --onnx-target int8
  edge-export reference -o reference --format onnx --device openvino-npu --context 1024
  edge-export package android-arm64 -o phone-package
  edge-export publish my-bundle me/gemma-4-E2B-it-edge-mtp --dry-run
"""


INSTALL = "pip install 'edge-mtp[export]' (or [export-onnx], without llama.cpp)"


class ExportCommands(PanelGroup):
    """A command group whose errors explain the right command if a target is in place of a command, and name a missing package."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().main(*arguments, **options)
        except ModuleNotFoundError as error:
            if (error.name or "edge_export").partition(".")[0].startswith("edge_"):
                raise
            click.echo(f"Error: edge-export needs {error.name}, which is not installed; run: {INSTALL}", err=True)
            raise SystemExit(1) from error

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Returns the command. Raises a usage error if a checkpoint is in its place."""
        if args[0] not in self.commands and ("/" in args[0] or args[0].endswith(".gguf")):
            raise click.UsageError(f"{args[0]} stands where a command belongs: edge-export pair {args[0]} DRAFTER --output BUNDLE", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=ExportCommands, commands=COMMANDS, epilog=EXAMPLES)
@click.version_option(package_name="edge-mtp")
def main() -> None:
    """Export a Gemma 4 target and its MTP drafter as one bundle, or build what runs bundles on a device."""
