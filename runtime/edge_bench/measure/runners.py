"""Runs a benchmark's requests on edge-mtp, with the time of each phase, or with llama.cpp's tools. All variants take turns on a prompt."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from edge_bench.measure.records import FIXED, PLAIN, Run, Variant
from edge_bench.measure.request import Prompt, long_prompt
from edge_devices.children import run_child
from edge_runtime.bundle.bundle import Bundle
from edge_runtime.decoding.loop import Round
from edge_runtime.drafting.policies import Fixed
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.session.generation import Generation
from edge_runtime.session.session import Session

DOMAINS_PART, CONTEXTS_PART = "domains", "contexts"
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A comparison: `variants` on `prompts`, `repeats` times, with `tokens` tokens each. `part` is as in `records.Run`."""

    part: str
    variants: tuple[Variant, ...]
    prompts: tuple[Prompt, ...]
    repeats: int
    tokens: int

    def requests(self) -> Iterator[tuple[int, Prompt, Variant]]:
        """Yields (repeat, prompt, variant): all variants on one prompt in the order of `mixed`, then all on the next prompt."""
        for repeat in range(self.repeats):
            for index, prompt in enumerate(self.prompts):
                for variant in mixed(self.variants, repeat, index):
                    yield repeat, prompt, variant

    def warm_up(self, count: int) -> list[tuple[int, Prompt, Variant]]:
        """Returns `count` requests of each variant on the first prompt, whose figures are discarded."""
        return [(0, self.prompts[0], variant) for variant in self.variants for _ in range(count)]

    def __len__(self) -> int:
        return self.repeats * len(self.prompts) * len(self.variants)


def context_schedule(
    prompts: Sequence[Prompt], variants: Sequence[Variant], lengths: Sequence[int], *, repeats: int, tokens: int
) -> Schedule:
    """Returns a comparison on one prompt of each length in tokens. These prompts are made by joining all `prompts`."""
    long = tuple(Prompt(domain=str(length), number=0, ids=long_prompt(prompts, length), text="") for length in lengths)
    return Schedule(part=CONTEXTS_PART, variants=tuple(variants), prompts=long, repeats=repeats, tokens=tokens)


def mixed(items: Sequence[Item], turn: int, place: int = 0) -> list[Item]:
    """Returns the items in a pseudo-random order for a turn and a place. The order is the same in every measurement.

    Two successive turns have one order and its reverse, so that slow drift cancels out. The next two turns have another order, so that no
    item always comes after the same one: forwards of many rows leave a machine warmer than those of a single row.
    """
    order = list(items)
    random.Random(1_000_003 * place + turn // 2).shuffle(order)
    return order if (turn + place) % 2 == 0 else order[::-1]


class Runner(Protocol):
    """A program that decodes: edge-mtp or another one."""

    def run(self, variant: Variant, prompt: Prompt, tokens: int, *, part: str = DOMAINS_PART, repeat: int = 0) -> Run:
        """Greedily decodes at most `tokens` tokens after a prompt. `part` and `repeat` are as in `records.Run`."""


class EdgeRunner:
    """Runs variants on one opened pair. Each policy gets its own session, as if it had been opened with that policy."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._sessions: dict[str, Session] = {}

    def run(self, variant: Variant, prompt: Prompt, tokens: int, *, part: str = DOMAINS_PART, repeat: int = 0) -> Run:
        """Runs one request. Policies have the default safety net; plain decoding and fixed lengths have none."""
        rounds: list[Round] = []
        generation = start(self._session(variant), variant, prompt.ids, tokens, rounds.append)
        seconds, round_seconds = 0.0, []
        for _ in generation.rounds():
            round_seconds.append(generation.stats.decode_seconds - seconds)
            seconds = generation.stats.decode_seconds
        stats = generation.stats
        return Run(
            part=part,
            domain=prompt.domain,
            prompt=prompt.number,
            repeat=repeat,
            variant=variant,
            prompt_tokens=stats.prompt_tokens,
            tokens=stats.tokens,
            seconds=stats.decode_seconds,
            drafted=stats.drafted,
            accepted=stats.accepted,
            drafted_at=tuple(stats.drafted_at),
            accepted_at=tuple(stats.accepted_at),
            round_seconds=tuple(round_seconds),
            round_tokens=tuple(len(each.tokens) for each in rounds),
            round_drafted=tuple(each.drafted for each in rounds),
            round_accepted=tuple(each.accepted for each in rounds),
            round_draft_seconds=tuple(each.draft_seconds for each in rounds),
            round_verify_seconds=tuple(each.verify_seconds for each in rounds),
            prefill_seconds=stats.prefill_seconds,
            first_token_seconds=stats.first_token_seconds,
            draft_seconds=stats.draft_seconds,
            verify_seconds=stats.verify_seconds,
            output=digest(generation.tokens),
            accepted_from=dict(stats.accepted_from),
        )

    def _session(self, variant: Variant) -> Session:
        if variant.policy not in self._sessions:
            self._sessions[variant.policy] = session_for(self.session, variant)
        return self._sessions[variant.policy]


def session_for(session: Session, variant: Variant) -> Session:
    """Returns a session on the same pair as if it had been opened with the variant's policy."""
    return session.with_policy(FIXED if variant.policy == PLAIN else variant.policy)


def start(
    session: Session, variant: Variant, ids: Sequence[int], tokens: int, on_round: Callable[[Round], None] | None = None
) -> Generation:
    """Starts a greedy request of the variant. The session's settings must have the variant's policy."""
    length = 0 if variant.policy == PLAIN else variant.length
    policy = None if length is None else Fixed(length)
    return session.generate(ids, max_tokens=tokens, policy=policy, on_round=on_round)


def digest(tokens: Sequence[int]) -> str:
    """Returns a short hash of the tokens."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]


SPECULATIVE, BENCH = "llama-speculative-simple", "llama-bench"
ATTEMPTS = 12
TIMEOUT_SECONDS = 600
TRIAL_ROWS = 8
DECODED = re.compile(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds")
ENCODED = re.compile(r"encoded\s+(\d+) tokens in\s+([\d.]+) seconds")
COUNTS = re.compile(r"n_(drafted|accept)\s+=\s+(\d+)")


@dataclass(frozen=True, kw_only=True)
class LlamaTools:
    """The tools in the folder `tools`. They decode greedily on the CPU, without weight repacking if that crashes on this machine."""

    tools: Path
    target: Path
    drafter: Path
    context: int
    threads: int
    repack: bool = True

    def __post_init__(self) -> None:
        for name in (SPECULATIVE, BENCH):
            if not (self.tools / name).is_file():
                raise RequestError(
                    f"{self.tools} has no {name}; give the folder of llama.cpp's binaries (scripts/setup/build_llama_cpp.sh builds it)"
                )

    def run(self, variant: Variant, prompt: Prompt, tokens: int, *, part: str = DOMAINS_PART, repeat: int = 0) -> Run:
        """Runs one request. llama-bench times plain decoding at the prompt's depth, because the speculative tool has no plain mode.

        Each run loads the files again, but its seconds are for decoding only. llama-bench's prefill ends with the first token's logits; the
        speculative tool's prefill leaves out the last row. Raises BackendError if a tool fails.
        """
        first_token = prefill = None
        if variant.policy == PLAIN:
            emitted, drafted, accepted, depth = tokens, 0, 0, len(prompt.ids)
            seconds = self._bench_seconds(tokens, "-p", "0", "-n", str(tokens), "-d", str(depth))
            first_token = self._bench_seconds(depth, "-p", str(depth), "-n", "0")
        else:
            emitted, drafted, accepted, seconds, prefill = self._speculative(variant, prompt.text, tokens)
        if not seconds > 0 or not emitted > 0 or accepted > drafted:
            raise BackendError(f"llama.cpp's tool reported {emitted} tokens in {seconds} s; the output of this build is not supported")
        return Run(
            part=part,
            domain=prompt.domain,
            prompt=prompt.number,
            repeat=repeat,
            variant=variant,
            prompt_tokens=len(prompt.ids),
            tokens=emitted,
            seconds=seconds,
            drafted=drafted,
            accepted=accepted,
            prefill_seconds=prefill,
            first_token_seconds=first_token,
        )

    def _speculative(self, variant: Variant, text: str, tokens: int) -> tuple[int, int, int, float, float | None]:
        """Returns the emitted, drafted and accepted tokens, and the seconds of decoding and prefill."""
        drafts = ["-md", str(self.drafter), "--spec-type", "draft-mtp"]
        drafts += ["--spec-draft-n-max", str(variant.length)] if variant.policy == FIXED else []
        request = ["--temp", "0", "-c", str(self.context), "-n", str(tokens), "--no-escape", "-p", text]
        # The tool's log thread sometimes ends before it has written the last lines. Then the tool is run again.
        for _ in range(ATTEMPTS):
            output = self._output(SPECULATIVE, *drafts, *request, *([] if self.repack else ["--no-repack"]))
            timing, prefill, counts = DECODED.search(output), ENCODED.search(output), dict(COUNTS.findall(output))
            if timing and len(counts) == 2:
                seconds = float(prefill[2]) if prefill else None
                return int(timing[1]), int(counts["drafted"]), int(counts["accept"]), float(timing[2]), seconds
        raise BackendError(f"{SPECULATIVE} printed no figures in {ATTEMPTS} runs: {' '.join(output.splitlines()[-3:])}")

    def _bench_seconds(self, tokens: int, *test: str) -> float:
        """Returns the seconds that llama-bench needs for the `tokens` of a test."""
        record = self._bench(*test)
        try:
            return tokens / float(record["avg_ts"])
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise BackendError(f"{BENCH} printed no figures ({error!r}); the output of this build is not supported") from error

    def _bench(self, *test: str) -> dict[str, Any]:
        """Returns llama-bench's record of its first test."""
        output = self._output(BENCH, *test, "-r", "1", "-o", "json", *([] if self.repack else ["--repack", "0"]))
        try:
            record: dict[str, Any] = json.loads(output[output.index("[") : output.rindex("]") + 1])[0]
        except (ValueError, IndexError) as error:
            raise BackendError(f"{BENCH} printed no figures ({error!r}); the output of this build is not supported") from error
        return record

    def tried(self) -> LlamaTools:
        """Returns the tools with repacking turned off if they crash: a build for AMX does on virtual machines that report AMX wrongly."""
        try:
            self._bench_seconds(TRIAL_ROWS, "-p", str(TRIAL_ROWS), "-n", "1")
        except BackendError:
            return replace(self, repack=False)
        return self

    def build(self) -> str:
        """Returns the number and commit of the build, as llama-bench reports them."""
        record = self._bench("-p", "1", "-n", "0")
        return f"b{record.get('build_number', '?')} ({record.get('build_commit', '?')})"

    def _output(self, tool: str, *arguments: str) -> str:
        command = [str(self.tools / tool), "-m", str(self.target), "-t", str(self.threads), "-ngl", "0", *arguments]
        done = run_child(command, seconds=TIMEOUT_SECONDS, failure=BackendError)
        if done.end:
            raise BackendError(f"{tool} {done.end}: {done.reason or 'it printed nothing'}")
        output, errors = (data.decode("utf-8", "replace") for data in (done.output, done.errors))
        return output if tool == BENCH else output + errors


def llama_tools(bundle: Bundle, tools: Path, *, context: int, threads: int) -> LlamaTools:
    """Returns the tools for a bundle's model files, after a trial run. That this project's own build of llama.cpp runs does not suffice."""
    target, drafter = (bundle.folder / bundle.file(role, "gguf").path for role in ("target", "drafter"))
    return LlamaTools(tools=tools, target=target, drafter=drafter, context=context, threads=threads).tried()
