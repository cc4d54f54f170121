"""Times our loop and llama.cpp's own `llama-speculative-simple` on the same pair, the same build and the same prompts, in turn.

    scripts/build_llama_cpp.sh .venv build/llama.cpp
    LLAMA_CPP_LIB_PATH=build/llama.cpp/bin python scripts/bench_peers.py BUNDLE --tools build/llama.cpp/bin

LLAMA_CPP_LIB_PATH lets llama-cpp-python load the very libraries the tools use. Run it on a quiet machine; quote the ratios.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import click

from edge_runtime.drafters import DrafterKind
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.opening import open_session
from edge_runtime.policies import Fixed
from edge_runtime.probe import probe_load_options
from edge_runtime.session import Session

PEER = "llama.cpp"
ATTEMPTS = 4
DECODED = re.compile(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds")
COUNTS = re.compile(r"n_(drafted|accept)\s+=\s+(\d+)")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One timed request."""

    side: str
    draft_length: int
    repeat: int
    prompt: int
    tokens: int
    seconds: float
    drafted: int
    accepted: int


def run_ours(session: Session, prompt: str, length: int, tokens: int) -> dict[str, float]:
    """One request through our loop."""
    generation = session.generate(prompt, max_tokens=tokens, policy=Fixed(length))
    for _ in generation.rounds():
        pass
    stats = generation.stats
    return {"tokens": stats.tokens, "seconds": stats.decode_seconds, "drafted": stats.drafted, "accepted": stats.accepted}


@dataclass(frozen=True, kw_only=True)
class Peer:
    """llama.cpp's tools on the bundle's own files: greedy, on the CPU, without weight repacking where our own side has to do without."""

    tools: Path
    target: Path
    drafter: Path
    context: int
    threads: int
    repack: bool
    depth: Callable[[str], int]

    def run(self, prompt: str, length: int, tokens: int) -> dict[str, float]:
        """One request; plain decoding is timed by llama-bench at the prompt's depth, as the other tool has no plain mode."""
        if length == 0:
            return self._plain(self.depth(prompt), tokens)
        # The tool's log thread sometimes ends before its last lines are out; then it is run again.
        for _ in range(ATTEMPTS):
            output = self._output(
                "llama-speculative-simple", "-md", str(self.drafter), "--spec-type", "draft-mtp", "--spec-draft-n-max", str(length),
                "--temp", "0", "-c", str(self.context), "-n", str(tokens), "--no-escape", "-p", prompt,
                *([] if self.repack else ["--no-repack"]),
            )  # fmt: skip
            timing, counts = DECODED.search(output), dict(COUNTS.findall(output))
            if timing and len(counts) == 2:
                figures = {"tokens": int(timing[1]), "seconds": float(timing[2])}
                return figures | {"drafted": int(counts["drafted"]), "accepted": int(counts["accept"])}
        raise click.ClickException(f"llama-speculative-simple printed no figures in {ATTEMPTS} runs: {' '.join(output.splitlines()[-3:])}")

    def _plain(self, depth: int, tokens: int) -> dict[str, float]:
        output = self._output("llama-bench", "-p", "0", "-n", str(tokens), "-d", str(depth), "-r", "1", "-o", "json")
        record = json.loads(output[output.index("[") : output.rindex("]") + 1])[0]
        return {"tokens": tokens, "seconds": tokens / record["avg_ts"], "drafted": 0, "accepted": 0}

    def _output(self, tool: str, *arguments: str) -> str:
        command = [str(self.tools / tool), "-m", str(self.target), "-t", str(self.threads), "-ngl", "0", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=600, check=False)
        if done.returncode:
            raise click.ClickException(f"{tool} ended with {done.returncode}: {' '.join(done.stderr.splitlines()[-3:])}")
        return done.stdout if tool == "llama-bench" else done.stdout + done.stderr


def peer_for(session: Session, tools: Path, threads: int) -> Peer:
    """The tools on the files the session has open."""
    bundle = session.bundle
    files = bundle.file("target", "gguf"), bundle.file("drafter", "gguf")
    target, drafter = (bundle.folder / f.path for f in files)
    answer = probe_load_options(target, drafter, [f.quantization or "unknown" for f in files], notify=lambda _: None)
    return Peer(
        tools=tools, target=target, drafter=drafter, context=bundle.manifest.runtime.context, threads=threads,
        repack=answer.use_extra_bufts, depth=lambda prompt: len(session.vocabulary.encode(prompt)),
    )  # fmt: skip


def measure(
    ours: dict[str, Session], peer: Peer, prompts: list[str], lengths: list[int], repeats: int, tokens: int
) -> list[Sample]:  # fmt: skip
    """All samples: for each repeat, prompt and draft length ours and then the peer's, every other repeat the other way round."""
    sides = [*ours, PEER]
    samples = []
    runs = [(r, p, k) for r in range(repeats) for p in range(len(prompts)) for k in lengths]
    with click.progressbar(runs, label="measuring", file=sys.stderr) as bar:
        for repeat, prompt, length in bar:
            for side in sides if repeat % 2 == 0 else reversed(sides):
                text = prompts[prompt]
                figures = peer.run(text, length, tokens) if side == PEER else run_ours(ours[side], text, length, tokens)
                samples.append(Sample(side=side, draft_length=length, repeat=repeat, prompt=prompt, **figures))  # type: ignore[arg-type]
    return samples


def speed(samples: Iterable[Sample]) -> float:
    """Median over the repeats of tokens per second, all prompts of a repeat taken together."""
    by_repeat: dict[int, list[Sample]] = {}
    for sample in samples:
        by_repeat.setdefault(sample.repeat, []).append(sample)
    return statistics.median(sum(s.tokens for s in group) / sum(s.seconds for s in group) for group in by_repeat.values())


def table(samples: list[Sample]) -> str:
    """A Markdown table: for each side tokens per second, the ratio to its own plain decoding, and acceptance."""

    def pick(side: str, length: int) -> list[Sample]:
        return [s for s in samples if s.side == side and s.draft_length == length]

    def acceptance(chosen: list[Sample]) -> str:
        drafted = sum(s.drafted for s in chosen)
        return f"{sum(s.accepted for s in chosen) / drafted:.1%}" if drafted else "-"

    def column(side: str, length: int) -> str:
        chosen = pick(side, length)
        return f"{speed(chosen):.1f} | {speed(chosen) / speed(pick(side, 0)):.2f} | {acceptance(chosen)}"

    sides = list(dict.fromkeys(s.side for s in samples if s.repeat == 0))
    lines = [
        "| draft length | " + " | ".join(f"{side} tok/s | over its plain | accepted" for side in sides) + " |",
        "|--:|" + "--:|" * 3 * len(sides),
    ]
    for length in sorted({s.draft_length for s in samples}):
        lines.append(f"| {length or 'plain'} | " + " | ".join(column(side, length) for side in sides) + " |")
    return "\n".join(lines)


@click.command(context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--tools", type=click.Path(path_type=Path, exists=True), required=True, help="Folder of llama.cpp's binaries.")
@click.option("--prompts", type=click.Path(path_type=Path, exists=True), required=True, multiple=True, help="JSON lists of prompts.")
@click.option("--count", default=1, help="How many prompts of each list to use.")
@click.option(
    "--drafter", "drafters", type=click.Choice(["dense", "split"]), multiple=True, default=("dense",), help="Ours, one column each."
)
@click.option("--lengths", default="0,1,2,3,4,5,6,7,8", help="Draft lengths; 0 is plain decoding.")
@click.option("--repeats", default=5)
@click.option("--tokens", default=128)
@click.option("--threads", default=os.cpu_count() or 1)
@click.option("--output", type=click.Path(path_type=Path), help="Write all samples as JSON.")
def main(
    bundle: Path, tools: Path, prompts: tuple[Path, ...], count: int, drafters: tuple[DrafterKind, ...], lengths: str, repeats: int,
    tokens: int, threads: int, output: Path | None,
) -> None:  # fmt: skip
    """Compare our loop with llama.cpp's own on BUNDLE."""
    texts = [text for file in prompts for text in json.loads(file.read_text())[:count]]

    def note(text: str) -> None:
        click.echo(text, err=True)

    try:
        with ExitStack() as stack:
            ours = {
                kind: stack.enter_context(open_session(bundle, threads=threads, drafter=kind, check_hashes=False, notify=note))
                for kind in drafters
            }
            peer = peer_for(next(iter(ours.values())), tools, threads)
            samples = measure(ours, peer, texts, [int(k) for k in lengths.split(",")], repeats, tokens)
    except EdgeRuntimeError as error:
        raise click.ClickException(str(error)) from error
    if output:
        output.write_text(json.dumps([vars(s) for s in samples], indent=1) + "\n")
    click.echo(table(samples))


if __name__ == "__main__":
    main()
