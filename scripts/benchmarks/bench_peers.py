"""Compares our speculative loop with llama.cpp's on the same pair, build and prompts, and prints the table of the README.

    make llama-cpp
    .venv/bin/python scripts/benchmarks/bench_peers.py --runs peers.jsonl
    .venv/bin/python scripts/benchmarks/bench_peers.py --report peers.jsonl

Measures with `edge-bench run BUNDLE --against` and passes all other options to it. Without a BUNDLE, the reference pair is widened and
exported to build/wide first. Tools of llama.cpp that are missing are built. llama-cpp-python loads the same libraries as the tools. Run it
on a quiet machine and quote the ratios.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from edge_bench.measure.records import read_records
from edge_bench.measure.variants import FIXED, OURS, PLAIN
from edge_bench.report.figures import Figures, Row, figures
from edge_bench.report.tables import machine_line, ratio_text
from edge_devices.command_line import one_sentence_errors

ROOT = Path(__file__).resolve().parents[2]
PAIR = ROOT / "exporter" / "edge_export" / "reference_pair"
EDGE_BENCH = [sys.executable, "-c", "from edge_bench.cli.main import main; main(prog_name='edge-bench')"]
EDGE_EXPORT = [sys.executable, "-c", "from edge_export.cli.command import main; main(prog_name='edge-export')"]


def run(command: Sequence[str | Path], **environment: str) -> None:
    """Runs a command; its messages go to standard error. Raises ClickException if it fails."""
    done = subprocess.run([str(part) for part in command], cwd=ROOT, env={**os.environ, **environment}, stdout=sys.stderr, check=False)
    if done.returncode:
        raise click.ClickException(f"{' '.join(map(str, command[:4]))} ended with exit code {done.returncode}")


def tools_folder(tools: Path) -> Path:
    """Returns the folder of llama.cpp's tools; builds them if they are missing."""
    if not (tools / "llama-speculative-simple").is_file():
        run(["sh", ROOT / "scripts" / "setup" / "build_llama_cpp.sh", Path(sys.prefix), tools.parent])
    return tools.resolve()


def wide_bundle(folder: Path) -> Path:
    """Returns the bundle of the widened reference pair; makes it if it is missing."""
    bundle = folder / "bundle"
    if not bundle.is_dir():
        widen = [sys.executable, ROOT / "scripts" / "pairs" / "widen_pair.py", PAIR, "-o", folder / "pair"]
        run([*widen, "--intermediate", "49152", "--vocabulary", "65536"])
        run([*EDGE_EXPORT, "pair", folder / "pair" / "target", folder / "pair" / "drafter", "-o", bundle])
    return bundle


def markdown_table(result: Figures) -> str:
    """One line per draft length and policy, three columns per drafter and program."""

    def cells(row: Row | None) -> str:
        if row is None:
            return "| | | "
        accepted = "-" if row.acceptance_rate is None else f"{row.acceptance_rate:.1%}"
        return f"| {row.tokens_per_second:.1f} | {ratio_text(row.speed_up)} | {accepted} "

    rows = {(row.variant.side, row.variant.drafter if row.variant.policy != PLAIN else None, setting(row)): row for row in result.overall}
    columns = list(dict.fromkeys((row.variant.side, row.variant.drafter) for row in result.overall if row.variant.policy != PLAIN))
    settings = sorted({setting(row) for row in result.overall}, key=lambda s: (s != PLAIN, not s.isdecimal(), s))
    names = [drafter if side == OURS else side for side, drafter in columns]
    lines = [
        "| draft length | " + " | ".join(f"{name} tok/s | over our plain | accepted" for name in names) + " |",
        "|--:" * (1 + 3 * len(columns)) + "|",
    ]
    for name in settings:
        found = (rows.get((side, None if name == PLAIN else drafter, name)) for side, drafter in columns)
        lines.append(f"| {name} " + "".join(map(cells, found)) + "|")
    return "\n".join(lines)


def setting(row: Row) -> str:
    """Returns the draft length, or the name of the policy."""
    return str(row.variant.length) if row.variant.policy == FIXED else row.variant.policy


@click.command(context_settings={"show_default": True, "ignore_unknown_options": True})
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False), required=False)
@click.option(
    "--tools", type=click.Path(path_type=Path), default=ROOT / "build" / "llama.cpp" / "bin", help="Folder of llama.cpp's binaries."
)
@click.option("--runs", type=click.Path(path_type=Path, dir_okay=False), help="Measure, and write the measurements here.")
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Measure nothing; print the table of this file.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@one_sentence_errors()
def main(bundle: Path | None, tools: Path, runs: Path | None, report: Path | None, options: tuple[str, ...]) -> None:
    """Compare our loop with llama.cpp's on BUNDLE; other OPTIONS are passed to edge-bench."""
    if (runs is None) == (report is None):
        raise click.UsageError("give --runs FILE to measure, or --report FILE")
    if runs is not None:
        folder, runs = tools_folder(tools), runs.resolve()
        bundle = bundle.resolve() if bundle else wide_bundle(ROOT / "build" / "wide")
        command = [*EDGE_BENCH, "run", bundle, "--against", f"llama.cpp={folder}", "--contexts", "none", "--runs", runs, *options]
        run(command, LLAMA_CPP_LIB_PATH=str(folder))
    result = figures(read_records(runs or report or Path()))
    click.echo(machine_line(result.records.header) + "\n")
    click.echo(markdown_table(result))


if __name__ == "__main__":
    main()
