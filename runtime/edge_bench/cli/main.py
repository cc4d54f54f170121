"""The commands of `edge-bench`."""

from __future__ import annotations

import click

from edge_devices.command_line import LazyCommands, PanelGroup
from edge_runtime.errors import OUT_OF_MEMORY

COMMANDS = LazyCommands(
    {
        "run": ("edge_bench.cli.run", "Measure BUNDLE on this machine, plainly and with drafts in turn."),
        "quality": (
            "edge_bench.cli.run",
            "Compare the answers of BUNDLEs with those of their checkpoint, or of another bundle, on English, code and chat.",
        ),
        "devices": ("edge_bench.cli.devices", "Measure BUNDLE on phones and hosts, and collect their results."),
        "report": ("edge_bench.cli.report", "Compute the figures of FILEs again, which --runs or --energy wrote."),
        "compare": ("edge_bench.cli.report", "Compare the results of devices below the FOLDERs."),
    }
)
EXAMPLES = """
\b
Examples:
  edge-bench run my-bundle
  edge-bench run my-bundle --lengths 2,3 --policies none --domains code --repeats 2 --contexts none
  edge-bench run my-bundle --runs run.jsonl --html report.html --json figures.json
  edge-bench run my-bundle --drafters dense,split,lookup --concurrency 1,2,4
  edge-bench run my-bundle --against llama.cpp=build/llama.cpp/bin
  edge-bench run my-bundle --devices cpu,gpu --runs by-device      (folders, for edge-bench compare)
  edge-bench run my-bundle --image-sizes 70,280
  edge-bench run my-bundle --prompts my-prompts.json --domains none
  edge-bench run my-bundle --runs run.jsonl --energy energy.jsonl
  edge-bench quality my-bundle --checkpoint google/gemma-4-E2B-it
  edge-bench quality my-bundle smaller-bundle --against f16-bundle --html quality.html
  edge-bench report run.jsonl --html report.html
  edge-bench report energy.jsonl --html energy.html      (the log of --energy)
  edge-bench run my-bundle --energy energy.jsonl --meter external    (afterwards, with the meter's table:)
  edge-bench report energy.jsonl --external usb-meter.csv
  edge-bench devices my-bundle --package phone-package --adb all --lengths 2,3,4
  edge-bench devices my-bundle --package pi-package --ssh pi@raspberrypi --html pi.html
  edge-bench compare bench-results
  edge-bench report mine/*.jsonl theirs/*.jsonl      (records of several machines in one table)
"""


@click.group(cls=PanelGroup, commands=COMMANDS, epilog=EXAMPLES, out_of_memory=OUT_OF_MEMORY)
@click.version_option(package_name="edge-mtp")
def main() -> None:
    """Compare plain decoding with drafting: fixed lengths, policies, drafters, and llama.cpp's own drafting. Compare bundles' answers.

    Use an otherwise idle machine. Ctrl-C stops the benchmark and keeps what was measured.
    """
