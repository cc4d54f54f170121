"""The options of `edge-bench` on this machine, and its sub-commands."""

from __future__ import annotations

from pathlib import Path

import click

from edge_bench.measure.prompts import DOMAINS
from edge_bench.measure.variants import CHOOSING_POLICIES
from edge_devices.command_line import CommandWithModes, option_group
from edge_devices.energy.external.columns import COLUMNS_HELP
from edge_devices.energy.virtual_meters import VIRTUAL
from edge_runtime.bundle.kv_types import KV_TYPES
from edge_runtime.cli.options import BundlePath
from edge_runtime.drafting.drafter_kinds import DRAFTER_KINDS
from edge_runtime.media.image import BUDGETS

EXAMPLES = """
\b
Examples:
  edge-bench run my-bundle
  edge-bench run my-bundle --lengths 2,3 --policies none --domains code --repeats 2 --contexts none
  edge-bench run my-bundle --runs run.jsonl --html report.html --json figures.json
  edge-bench run my-bundle --drafters dense,split,lookup --concurrency 1,2,4
  edge-bench run my-bundle --against llama.cpp=build/llama.cpp/bin
  edge-bench run my-bundle --image-sizes 70,280
  edge-bench run my-bundle --prompts my-prompts.json --domains none
  edge-bench run my-bundle --runs run.jsonl --energy energy.jsonl
  edge-bench report run.jsonl --html report.html
  edge-bench report energy.jsonl --html energy.html      (the log of --energy)
  edge-bench run my-bundle --energy energy.jsonl --meter external    (afterwards, with the meter's table:)
  edge-bench report energy.jsonl --external usb-meter.csv
  edge-bench devices my-bundle --package phone-package --adb all --lengths 2,3,4
  edge-bench devices my-bundle --package pi-package --ssh pi@raspberrypi --html pi.html
  edge-bench compare bench-results
  edge-bench contribute my-bundle my-device.json      (joules per token, guided, for others to pool)
  edge-bench pool records
"""
measuring_options = option_group(
    click.option("--domains", default=",".join(DOMAINS), help="Shipped prompt sets to use, or none."),
    click.option(
        "--prompts",
        "files",
        type=click.Path(path_type=Path),
        multiple=True,
        help="Your own prompts: a JSON list of texts, an object of lists by domain, or a text file. Repeatable.",
    ),
    click.option("--per-domain", type=click.IntRange(min=1), default=1, help="Number of prompts per set."),
    click.option("--lengths", default="1-8", help="Fixed draft lengths to measure, such as 3, 1,2,4 or 1-8, or none."),
    click.option("--policies", default=",".join(CHOOSING_POLICIES), help="Draft length policies to measure, or none."),
    click.option(
        "--drafters",
        default=None,
        help=f"Drafters to measure: any of {', '.join(k for k in DRAFTER_KINDS if k != 'none')}.  [default: as edge-run chooses]",
    ),
    click.option("--repeats", type=click.IntRange(min=1), default=6, help="Number of repeats; every second one runs in reverse order."),
    click.option("--max-tokens", "-n", type=click.IntRange(min=2), default=96, help="Tokens to generate per request."),
    click.option("--warm-up", type=click.IntRange(min=0), default=1, help="Warm-up requests per variant, which are not counted."),
    click.option("--contexts", default="128,512,2048,8192", help="Prompt lengths in tokens to sweep, up to --context, or none."),
    click.option("--concurrency", default="none", help="Numbers of concurrent clients to measure, such as 1,2,4, or none."),
    click.option(
        "--kv-types", default="none", help=f"KV cache types to compare: any of {', '.join(KV_TYPES)}, or none. f16 is always included."
    ),
    click.option(
        "--image-sizes",
        default="none",
        help=f"Sizes of images to measure, in soft rows: any of {', '.join(map(str, BUDGETS))}, or none. With --energy also in joules.",
    ),
    click.option(
        "--against",
        metavar="llama.cpp=PATH",
        help="Also measure llama.cpp's binaries in this folder, in turn. With devices: llama.cpp=package.",
    ),
    panel="Measure",
)
result_options = option_group(
    click.option("--runs", type=click.Path(path_type=Path), help="Write each measurement to this file at once, one JSON line each."),
    click.option(
        "--energy",
        type=click.Path(path_type=Path),
        help="Also measure energy by the protocol of docs/energy.md (takes long); write its log here. With --report: read this log.",
    ),
    click.option(
        "--meter",
        metavar="NAME",
        help=f"Energy meter to read: a name from edge-devices meters, {VIRTUAL}, or external (see --external)."
        "  [default: the first usable meter]",
    ),
    click.option(
        "--external",
        type=click.Path(path_type=Path),
        metavar="TABLE",
        help="With --report of an energy log: use this table of an external meter in place of the log's readings.",
    ),
    click.option("--columns", metavar="KEY=NAME,...", help=COLUMNS_HELP),
    click.option("--json", "json_path", help="Write the figures to this file; - is standard output, in place of the tables."),
    click.option("--html", type=click.Path(path_type=Path), help="Write a page with plots to this file. Needs edge-mtp[report]."),
    click.option(
        "--report", type=click.Path(path_type=Path), help="Do not measure: compute the figures of a file from --runs or --energy again."
    ),
    panel="Results",
)


def add_modes(main: CommandWithModes) -> None:
    """Adds the sub-commands of edge-bench."""
    bundle = click.Argument(["bundle"], type=BundlePath())
    what = ("domains", "files", "per_domain", "lengths", "policies", "drafters", "repeats", "max_tokens", "warm_up", "contexts")
    how = ("concurrency", "kv_types", "image_sizes", "backend", "threads", "context", "config", "preset", "check")
    outputs, table = ("json_path", "html"), ("external", "columns")
    main.add_mode(
        "run",
        "Measure BUNDLE on this machine, plainly and with drafts in turn.",
        [bundle, *what, "against", *how, "verify_key", "runs", "energy", "minutes", "meter", *outputs],
    )
    main.add_mode(
        "devices",
        "Measure BUNDLE on phones and hosts, and collect their results.",
        [
            click.Argument(["bundle"], type=BundlePath(), required=False),
            *("adb", "ssh", "fleet", "package", "results", "run_name", "unplugged", "deploy_only", "stop", "clean", "device_folder"),
            *("ssh_config", *what, "against", *how, "energy", "minutes", "meter", *outputs),
        ],
    )
    main.add_mode(
        "report",
        "Compute the figures of FILE again, which --runs or --energy wrote.",
        [click.Argument(["report"], metavar="FILE", type=click.Path(path_type=Path)), "energy", *table, *outputs],
    )
    main.add_mode(
        "compare",
        "Compare the results of devices below the FOLDERs.",
        [click.Argument(["compare"], metavar="FOLDER...", nargs=-1, required=True, type=click.Path(path_type=Path)), *outputs],
    )
    main.add_mode(
        "contribute",
        "Measure joules per token, guided, in less than 30 minutes, and write FILE, which others can check and pool.",
        [
            bundle,
            click.Argument(["contribute"], metavar="FILE", type=click.Path(path_type=Path)),
            *("sign", "minutes", "meter", "threads", "backend", "adb", "ssh", "package", "results", "run_name", "unplugged", "ssh_config"),
            "device_folder",
        ],
    )
    main.add_mode(
        "pool",
        "Check the files of contribute below the PATHs, and print a table of those that are valid.",
        [
            click.Argument(["pool"], metavar="PATH...", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True)),
            *("verify_key", "json_path"),
        ],
    )
