"""Measures each KV type: acceptance, tokens per second, bytes, and the KL divergence of next-token distributions from float16.

python scripts/benchmarks/bench_kv_types.py BUNDLE --prompts exporter/edge_export/reference_pair/prompts.code.json --json kv_types.json

Acceptance and KL divergence are measured on the same texts for all types. Tokens per second need a quiet machine.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from edge_bench.measure.sweeps.kv_types import measure_kv_types
from edge_bench.report.tables import kv_table, print_tables
from edge_devices.command_line import one_sentence_errors
from edge_runtime.bundle.kv_types import KV_TYPES, KvType


@click.command(context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--prompts", "files", type=click.Path(path_type=Path, exists=True), required=True, multiple=True, help="JSON lists of prompts."
)
@click.option("--count", type=click.IntRange(min=1), default=10, help="Prompts to take from each file.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=64)
@click.option("--draft-length", type=click.IntRange(1, 12), default=3)
@click.option("--kv-type", "kv_types", type=click.Choice(KV_TYPES), multiple=True, default=KV_TYPES)
@click.option("--threads", type=click.IntRange(min=1))
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures here.")
@one_sentence_errors()
def main(
    bundle: Path,
    files: tuple[Path, ...],
    count: int,
    max_tokens: int,
    draft_length: int,
    kv_types: tuple[KvType, ...],
    threads: int | None,
    json_path: Path | None,
) -> None:
    """Compare the KV types on BUNDLE."""
    prompts = [prompt for file in files for prompt in json.loads(file.read_text(encoding="utf-8"))[:count]]
    costs = measure_kv_types(
        bundle,
        prompts,
        kv_types=kv_types,
        max_tokens=max_tokens,
        draft_length=draft_length,
        threads=threads,
        notify=lambda text: click.echo(text, err=True),
    )
    if json_path:
        json_path.write_text(json.dumps([asdict(cost) for cost in costs], indent=1) + "\n", encoding="utf-8")
    print_tables([kv_table(costs)])


if __name__ == "__main__":
    main()
