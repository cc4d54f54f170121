"""Looks for false alarms of the check of accelerators, and for texts that drafts change on one.

    python scripts/checks/check_device.py --double --pairs 200 --minutes 15 --output pairs.jsonl
    python scripts/checks/check_device.py --double --bundle my-bundle --minutes 20 --output texts.jsonl

Without --bundle random pairs (tests/support/random_pairs.py) with drawn types of weights are exported and opened: a sound device passes
its check with all of them. With --bundle texts of 100 tokens with drafts of 1 to 12 and of `profit` are compared with plain decoding on the
device. --double takes a device by software, llama.cpp's RPC backend of the tests; else --device names one. The exit code is 1 after an
alarm, or a text that differs elsewhere than at a near tie.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from edge_devices.command_line import one_sentence_errors
from edge_export.onnx.request import WEIGHT_TYPES, OnnxRequest
from edge_export.pipeline.export import export_pair
from edge_export.pipeline.request import ExportRequest
from edge_runtime.backends.selection import BackendKind
from edge_runtime.bundle.gguf_header import OFFERED
from edge_runtime.cli.demo import TEXTS
from edge_runtime.config.schema import SpeculativeConfig, TuningConfig
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.session.open import open_session
from edge_runtime.session.self_checks import check_lossless

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))
import remote_gpu
from random_pairs import write_random_pair

DOUBLE: tuple[str, BackendKind] = ("rpc0", "llama")
ONNX_TYPES = tuple(WEIGHT_TYPES)
PAIR_CONTEXT, TEXT_CONTEXT, TOKENS, LENGTHS = 512, 160, 100, (*range(1, 13), None)
# Logits this near may change places where a row has other bits alone than in a verify.
NEAR_TIE = 0.1
_IN_DOUBLE = "EDGE_MTP_CHECKED_DOUBLE"  # says that this process runs with the double
FIXED = SpeculativeConfig(tuning=TuningConfig(draft_length=3))
PROMPTS = ("def area(r):", "class Stack:", "import os\n", "for i in range(10):\n", "try:\n", *TEXTS.values())


def pair_records(device: str, engine: BackendKind, first: int) -> Iterator[dict[str, Any]]:
    """Yields what the check says of each random pair from the seed `first` on."""
    for seed in range(first, sys.maxsize):
        rng = random.Random(f"types {seed}")
        gguf, onnx = [rng.choice(OFFERED) for _ in "td"], [rng.choice(ONNX_TYPES) for _ in "td"]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            pair, target, drafter = write_random_pair(seed, folder)
            request = ExportRequest(
                target=str(target),
                drafter=str(drafter),
                output=folder / "bundle",
                target_quantization=gguf[0],
                drafter_quantization=gguf[1],
                gguf=engine == "llama",
                onnx=OnnxRequest(target=onnx[0], drafter=onnx[1]) if engine == "onnx" else None,
                threads=1,
                verify=False,
            )
            export_pair(request)
            sentences: list[str] = []
            record: dict[str, Any] = {"seed": seed, "family": pair.family, "types": gguf if engine == "llama" else onnx}
            try:
                with open_session(
                    folder / "bundle", backend=engine, device=device, context=PAIR_CONTEXT, threads=1, config=FIXED, notify=sentences.append
                ) as session:
                    record |= {"passed": session.device != "cpu", "says": [each for each in sentences if "the CPU" in each]}
            except RequestError as error:
                record |= {"refused": str(error)}
            except BackendError as error:
                record |= {"passed": False, "says": [str(error)]}
            yield record


def text_records(device: str, engine: BackendKind, bundle: Path, first: int) -> Iterator[dict[str, Any]]:
    """Yields each text with drafts from the `first` on: its length of drafts, and whether it is that of plain decoding on the device."""
    with open_session(bundle, backend=engine, device=device, context=TEXT_CONTEXT, threads=2) as session:
        for index, prompt in enumerate(PROMPTS):
            lengths = LENGTHS[max(0, first - index * len(LENGTHS)) :]
            if not lengths:
                continue
            plain = session.generate(prompt, max_tokens=TOKENS, draft_length=0)
            plain.text()
            for length in lengths:
                generation = session.generate(prompt, max_tokens=TOKENS, draft_length=length)
                generation.text()
                stats, equal = generation.stats, list(generation.tokens) == list(plain.tokens)
                record = {"prompt": prompt, "drafts": length or "profit", "tokens": len(generation.tokens), "passed": equal}
                record |= {"drafted": stats.drafted, "accepted": stats.accepted, "rounds": stats.rounds}
                if not equal:
                    report = check_lossless(session, generation)
                    gap = report.logit_gap
                    record |= {"passed": gap is not None and abs(gap) < NEAR_TIE, "says": [report.sentence()]}
                yield record


@click.command(context_settings={"show_default": True})
@click.option("--double", is_flag=True, help="A device by software, of the tests: llama.cpp's RPC backend.")
@click.option("--device", help="Another device of this machine.")
@click.option("--backend", type=click.Choice(["llama", "onnx"]), default="onnx", help="The engine of --device.")
@click.option("--bundle", type=click.Path(path_type=Path), help="Compare texts of this bundle; without it, random pairs are checked.")
@click.option("--first", default=0, help="Seed of the first pair, or number of the first text.")
@click.option("--pairs", default=200, help="Pairs, or texts, at most.")
@click.option("--minutes", default=15.0, help="Minutes, at most.")
@click.option("--output", type=click.Path(path_type=Path), help="Append a JSON line for each here too.")
@one_sentence_errors()
def main(
    *,
    double: bool,
    device: str | None,
    backend: BackendKind,
    bundle: Path | None,
    first: int,
    pairs: int,
    minutes: float,
    output: Path | None,
) -> None:
    """Check a device with random pairs, or compare texts with drafts there with plain ones."""
    name, engine = DOUBLE if double else (device or "gpu", backend)
    if double and _IN_DOUBLE not in os.environ:  # what a driver finds is read when a process starts
        sys.exit(_in_a_process_of_the_double())
    records = pair_records(name, engine, first) if bundle is None else text_records(name, engine, bundle, first)
    what = f"pairs passed the check of {name}" if bundle is None else f"texts with drafts are those of plain decoding on {name}"
    end, done, passed, refused = time.monotonic() + 60 * minutes, 0, 0, 0
    for record in records:
        if "refused" in record:
            refused += 1
        else:
            done, passed = done + 1, passed + record["passed"]
        line = json.dumps(record)
        click.echo(line)
        if output is not None:
            with output.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        if done + refused == pairs or time.monotonic() > end:
            break
    click.echo(f"{passed} of {done} {what}" + (f"; {refused} more do not run there, and it says so" if refused else ""))
    sys.exit(int(passed < done or done == 0))


def _in_a_process_of_the_double() -> int:
    with tempfile.TemporaryDirectory() as folder, remote_gpu.remote_gpu() as environment:
        own = os.environ | {"EDGE_MTP_CACHE": folder, _IN_DOUBLE: "1"} | environment
        return subprocess.run([sys.executable, *sys.argv], env=own, check=False).returncode


if __name__ == "__main__":
    main()
