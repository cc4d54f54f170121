"""Prompts computed on one device and decoded on the other, which gets the K/V rows once, beside all on the CPU and all on the device.

    python scripts/benchmarks/bench_split_places.py my-bundle --device webgpu --prompt 512 --prompt 2048 --json split.json

Both pairs are opened, as a session that moves its rows would. A device computes on when a prefill returns, and the move waits for it: what
compares is the time to the first token. The exit code is 1 where logits behind moved rows are further from the CPU's than the check of a
device allows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from edge_devices.command_line import one_sentence_errors
from edge_runtime.backends.interface import CPU
from edge_runtime.backends.selection import CARDS, BackendKind
from edge_runtime.decoding.quality import divergence_of, log_softmax
from edge_runtime.errors import RequestError
from edge_runtime.interfaces import SavableTarget
from edge_runtime.session.device_check import allowed_loss, is_rounded
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session

_FOLLOWING = 8
_TEXT = Path(argparse.__file__)  # code, as the reference pair continues


def computed(place: Session, ids: Sequence[int]) -> None:
    """Has a prompt's rows, and no others, in the cache of `place`."""
    place.claim.release()
    place.target.rollback(0)
    place.target.prefill(ids)


def moved(source: Session, place: Session, ids: Sequence[int]) -> int:
    """Copies all rows of `source` to `place`; returns their bytes."""
    if not (isinstance(source.target, SavableTarget) and isinstance(place.target, SavableTarget)):
        raise RequestError("this backend's K/V rows cannot be moved; take another one")
    place.claim.release()
    rows = source.target.state()
    place.target.restore(ids, rows)
    return rows.full.nbytes + rows.sliding.nbytes


def run(source: Session, place: Session, ids: list[int], tokens: int) -> dict[str, Any]:
    """One request whose prompt is computed on `source` and which goes on at `place`."""
    start = time.perf_counter()
    computed(source, ids[:-1])
    there, size = time.perf_counter(), 0
    if source is not place:
        size = moved(source, place, ids[:-1])
    began = time.perf_counter()
    generation = place.generate(ids, max_tokens=tokens, reuse_prefix=True)
    generation.text()
    end, stats = time.perf_counter(), generation.stats
    if stats.reused_tokens != len(ids) - 1:
        raise RequestError(f"{stats.reused_tokens} of {len(ids) - 1} rows were used again; take shorter prompts")
    return {
        "prompt_ms": 1e3 * (there - start),
        "move_ms": 1e3 * (began - there),
        "moved_bytes": size,
        "first_token_ms": 1e3 * (began - start + stats.first_token_seconds),
        "tokens_per_second": stats.tokens_per_second,
        "seconds": end - start,
        "accepted": stats.accepted,
        "drafted": stats.drafted,
        "output": list(generation.tokens),
    }


def loss(source: Session, place: Session, reference: Session, ids: list[int]) -> float:
    """Returns the mean KL, in nats, from rows of `reference` to those at `place` behind rows moved from `source`."""
    prompt, following, rows = ids[:-_FOLLOWING], ids[-_FOLLOWING:], list[NDArray[np.float32]]()
    for first, second in ((reference, reference), (source, place)):
        computed(first, prompt)
        if first is not second:
            moved(first, second, prompt)
        rows.append(second.target.verify(following).copy())
    return float(np.mean([divergence_of(log_softmax(cpu), log_softmax(row)) for cpu, row in zip(*rows, strict=True)]))


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the median of each figure, and the first output."""
    return {name: value if name == "output" else statistics.median(each[name] for each in runs) for name, value in runs[0].items()}


@click.command(context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--device", default="gpu", help="The device beside the CPU.")
@click.option("--backend", type=click.Choice(["llama", "onnx"]), default="onnx", help="The engine.")
@click.option("--prompt", "sizes", type=click.IntRange(_FOLLOWING + 1), multiple=True, default=(512, 2048), help="Tokens of a prompt.")
@click.option("--tokens", default=128, help="Tokens to decode.")
@click.option("--repeats", default=5, help="Runs of each, in turn.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the record here.")
@one_sentence_errors()
def main(
    bundle: Path, device: str, backend: BackendKind, sizes: tuple[int, ...], tokens: int, repeats: int, json_path: Path | None
) -> None:
    """Measure prompts of BUNDLE that are computed on one device and decoded on the other."""
    options: dict[str, Any] = {"backend": backend, "context": max(sizes) + tokens + 16, "measure": True}
    with open_session(bundle, device=device, **options) as there, open_session(bundle, device=CPU, **options) as here:
        text = here.tokenize(_TEXT.read_text(encoding="utf-8"))
        manifest = here.bundle.manifest
        parity = (manifest.parity or {}).get("onnx") if backend == "onnx" else manifest.parity
        limit = allowed_loss(parity, rounded=is_rounded(manifest, CARDS[backend].format))
        places = {
            CPU: (here, here),
            there.device: (there, there),
            f"prompt on {there.device}": (there, here),
            f"prompt on {CPU}": (here, there),
        }
        record: dict[str, Any] = {"bundle": bundle.name, "device": there.device, "limit": limit, "drafts": there.draft_place}
        for size in sizes:
            ids, runs = text[:size], {each: list[dict[str, Any]]() for each in places}
            for number in range(repeats + 1):
                for each, (first, second) in places.items():
                    result = run(first, second, ids, tokens)
                    runs[each] += [result] * bool(number)  # the first is not counted
            figures = {each: medians(values) for each, values in runs.items()}
            output = figures[CPU]["output"]
            for each, (first, second) in places.items():
                kl, same = loss(first, second, here, ids), figures[each].pop("output") == output
                figures[each] |= {"mean_kl": kl, "same_output": same}
                words = {key: round(value, 4) for key, value in figures[each].items()}
                click.echo(f"{size} tokens, {each}: {words}")
            record[f"prompt_{size}"] = figures
    if json_path is not None:
        json_path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    worst = max(each["mean_kl"] for key, value in record.items() if key.startswith("prompt_") for each in value.values())
    click.echo(f"{record['drafts'] or 'drafts are made where the rows are'}; mean KL {worst:.2g} at most, {limit:.2g} is allowed")
    sys.exit(int(not worst <= limit))


if __name__ == "__main__":
    main()
