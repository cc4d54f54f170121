"""The command `edge-export`: writes a bundle from a Gemma 4 target and its MTP drafter.

Progress goes to standard error, results to standard output.
"""

from __future__ import annotations

import click

from edge_devices.command_line import PanelGroup
from edge_export.cli.export import pair, reference
from edge_export.cli.package import package
from edge_export.cli.plan import plan

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


@click.group(cls=PanelGroup, epilog=EXAMPLES)
@click.version_option(package_name="edge-mtp")
def main() -> None:
    """Export a Gemma 4 target and its MTP drafter as one bundle, or build what runs bundles on a device."""


for _command in (pair, reference, plan, package):
    main.add_command(_command)
