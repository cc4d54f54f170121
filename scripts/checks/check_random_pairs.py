"""Exports pairs of random shapes and scales in both formats and compares them with transformers, and text with drafts with plain text.

    python scripts/checks/check_random_pairs.py --first 6000 --count 80 --output pairs.jsonl

Each pair is a variation of a member (tests/support/random_pairs.py), with quantizations drawn too. One that the export refuses is compared
once more in float32 on both engines, which shows whether rounding alone was to blame. A pair takes about 20 s. The exit code is 1 if a text
differs, or a pair is off in float32.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from edge_devices.command_line import one_sentence_errors
from edge_export.checkpoint.sources import resolve_pair
from edge_export.errors import ExportError, ParityError
from edge_export.gguf.writer import plan_gguf
from edge_export.onnx.request import WEIGHT_TYPES, OnnxRequest
from edge_export.parity.gguf import ComparedModel, measure_parity
from edge_export.parity.reference import Reference
from edge_export.pipeline.export import export_pair
from edge_export.pipeline.request import ExportRequest
from edge_runtime.backends.selection import BackendKind
from edge_runtime.bundle.gguf_header import OFFERED
from edge_runtime.drafting.policies import Fixed
from edge_runtime.session.open import open_session
from edge_runtime.session.self_checks import check_lossless

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))
from random_pairs import Scales, write_random_pair

ONNX_TYPES = tuple(WEIGHT_TYPES)
ENGINES: tuple[BackendKind, ...] = ("llama", "onnx")
CONTEXT, TOKENS, DRAFT_LENGTHS = 512, 40, (1, 2, 4, 8)
PROMPTS = ("def running_mean(values):", "The reader opens the file once")


def check_pair(seed: int, folder: Path) -> dict[str, Any]:
    """Returns what became of the pair of this seed: its types, figures or refusal, and how many texts with drafts are equal."""
    rng = random.Random(f"scales {seed}")
    scales = Scales(matrices=rng.choice([0.7, 1, 1.5, 2]), queries=rng.choice([1, 2, 4]), tables=rng.choice([0.25, 1, 2]))
    pair, target, drafter = write_random_pair(seed, folder, scales=scales)
    types = [rng.choice(OFFERED), rng.choice(OFFERED), rng.choice(ONNX_TYPES), rng.choice(ONNX_TYPES)]
    record: dict[str, Any] = {"seed": seed, "family": pair.family, "dtype": pair.dtype, "scales": asdict(scales), "types": types}
    try:
        record["figures"] = _export(target, drafter, folder / "verified", types, verify=True)
    except ExportError as error:
        record |= {"refused": str(error), "float32": in_float32(target, drafter, folder)}
    if not (bundle := folder / "verified").exists():
        bundle = folder / "unverified"
        _export(target, drafter, bundle, types, verify=False)
    return record | {"texts": {engine: _texts(bundle, engine) for engine in ENGINES}}


def _export(target: Path, drafter: Path, output: Path, types: list[Any], *, verify: bool) -> dict[str, Any]:
    """Exports both formats; returns the figures of both, as in the manifest."""
    request = ExportRequest(
        target=str(target),
        drafter=str(drafter),
        output=output,
        target_quantization=types[0],
        drafter_quantization=types[1],
        onnx=OnnxRequest(target=types[2], drafter=types[3]),
        threads=1,
        verify=verify,
    )
    parity = export_pair(request).manifest.parity or {}
    return {"llama": _short(parity), "onnx": _short(parity.get("onnx", {}))} if verify else {}


def _short(parity: dict[str, Any]) -> dict[str, Any]:
    if "unquantized" not in parity:
        return parity
    kept = {key: parity["unquantized"][key] for key in ("max_abs_difference", "mean_kl", "median_kl", "greedy_agreement")}
    return kept | {"drafts": parity["drafts"]["unquantized_agreement"], "quantized_kl": parity["quantized"]["mean_kl"]}


def in_float32(target: Path, drafter: Path, folder: Path) -> dict[str, Any]:
    """The figures of both engines with weights in float32, or why they are refused too."""
    sources = resolve_pair(str(target), str(drafter))
    reference = Reference(target=sources[0], drafter=sources[1], threads=1, context=sources[0].checkpoint.architecture.context)
    onnx = OnnxRequest(target="f32", drafter="f32")
    request = ExportRequest(target=str(target), drafter=str(drafter), output=folder / "float32", gguf=False, onnx=onnx, threads=1)
    figures: dict[str, Any] = {}
    try:
        figures["onnx"] = _short((export_pair(request).manifest.parity or {})["onnx"])
    except ParityError as error:
        figures["onnx"] = {"refused": str(error)}
    models = []
    for source in sources:
        assert source.tokenizer is not None
        path = folder / f"{source.role}-f32.gguf"
        plan_gguf(source.checkpoint, "f32", source.tokenizer).write(path, lambda _: None)
        models.append(ComparedModel(quantization="f32", weight_type="f32", unquantized=path, exported=path))
    try:
        figures["llama"] = _short(measure_parity(reference, (models[0], models[1])))
    except ParityError as error:
        figures["llama"] = {"refused": str(error)}
    return figures


def _texts(bundle: Path, engine: BackendKind) -> dict[str, Any]:
    """How many greedy texts with drafts equal plain decoding, and what differs."""
    reports = []
    with open_session(bundle, backend=engine, context=CONTEXT, threads=1) as session:
        for prompt in PROMPTS:
            for length in DRAFT_LENGTHS:
                generation = session.generate(prompt, max_tokens=TOKENS, policy=Fixed(length))
                generation.text()
                reports.append(check_lossless(session, generation))
    different = [report.sentence() for report in reports if not report.equal]
    return {"compared": len(reports), "equal": len(reports) - len(different), "different": different}


def verdict(records: Sequence[dict[str, Any]]) -> tuple[str, bool]:
    """Returns what came of the pairs in a sentence, and whether a text differs or a pair is off in float32."""
    refused = [record for record in records if "refused" in record]
    off = [record for record in refused if any("refused" in figures for figures in record["float32"].values())]
    texts = [texts for record in records for texts in record["texts"].values()]
    compared, equal = (sum(each[key] for each in texts) for key in ("compared", "equal"))
    return (
        f"{len(records)} pairs: {len(refused)} refused, {len(off)} of them in float32 too;"
        f" {equal} of {compared} texts with drafts equal plain decoding",
        equal < compared or bool(off),
    )


@click.command(context_settings={"show_default": True})
@click.option("--first", default=0, help="Seed of the first pair.")
@click.option("--count", type=click.IntRange(min=1), default=20, help="Pairs to try.")
@click.option("--output", type=click.Path(path_type=Path), help="Append a JSON line for each pair here too.")
@one_sentence_errors()
def main(first: int, count: int, output: Path | None) -> None:
    """Export COUNT random pairs and compare what they compute with transformers, and texts with drafts with plain ones."""
    records = []
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory() as folder:
            records.append(check_pair(seed, Path(folder)))
        line = json.dumps(records[-1])
        click.echo(line)
        if output is not None:
            with output.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
    sentence, failed = verdict(records)
    click.echo(sentence)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
