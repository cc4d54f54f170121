"""Records of a benchmark that nobody measured, with known truths."""

from __future__ import annotations

import numpy as np

from edge_bench.measure.records import (
    BASELINE,
    FIXED,
    LLAMA_CPP,
    OURS,
    PLAIN,
    SCHEMA,
    Concurrency,
    CostRecord,
    Header,
    KvTypeCost,
    Memory,
    ModelFile,
    Note,
    Record,
    Run,
    Variant,
)
from edge_runtime.session.row_equality import RowEquality

# Options of edge-bench for a run of seconds: one domain, one drafter, one draft length, each request once; tests add their --max-tokens.
ONE_OF_EACH = (
    *("--domains", "code", "--drafters", "dense", "--lengths", "2", "--policies", "none", "--repeats", "1", "--contexts", "none"),
    *("--warm-up", "0", "--threads", "1"),
)
PEER_PLAIN = Variant(side=LLAMA_CPP, drafter="none", policy=PLAIN)


def fixed(length: int, side: str = OURS) -> Variant:
    return Variant(side=side, drafter="dense", policy=FIXED, length=length)


def rolling() -> Variant:
    return Variant(side=OURS, drafter="dense", policy="rolling")


def header(**changes: object) -> Header:
    values = {
        "schema": SCHEMA,
        "version": "0",
        "created_at": "2026-01-01T00:00:00+00:00",
        "bundle": "made-up",
        "target": "pair",
        "files": (ModelFile(role="target", format="gguf", quantization="q4_0", bytes=5_000_000),),
        "machine": {"processor": "a processor", "usable_processors": 2},
        "settings": {"threads": 2, "tokens": 10, "repeats": 2},
    }
    return Header(**(values | changes))


def run(
    variant: Variant,
    *,
    domain: str = "code",
    prompt: int = 0,
    repeat: int = 0,
    seconds: float = 1.0,
    part: str = "domains",
    output: str | None = "same",
    drafted_at: tuple[int, ...] = (),
    accepted_at: tuple[int, ...] = (),
    prompt_tokens: int = 4,
    first_token: float | None = 0.2,
) -> Run:
    """Ten tokens in five rounds of two."""
    return Run(
        part=part,
        domain=domain,
        prompt=prompt,
        repeat=repeat,
        variant=variant,
        prompt_tokens=prompt_tokens,
        tokens=10,
        seconds=seconds,
        drafted=sum(drafted_at),
        accepted=sum(accepted_at),
        drafted_at=drafted_at,
        accepted_at=accepted_at,
        round_seconds=(seconds / 5,) * 5,
        round_tokens=(2,) * 5,
        prefill_seconds=0.1,
        first_token_seconds=first_token,
        draft_seconds=seconds / 10 if drafted_at else 0.0,
        verify_seconds=seconds / 2,
        output=output,
    )


def noisy_runs(speed_ups: dict[str, float], *, repeats: int, seed: int, noise: float = 0.03, drift: float = 0.0) -> list[Run]:
    """Plain decoding and draft length 3, of one prompt per domain, with log-normal noise in every run."""
    random, runs = np.random.default_rng(seed), []
    for repeat in range(repeats):
        for domain, speed_up in speed_ups.items():
            slow = 1 + drift * repeat
            for variant, factor in ((BASELINE, 1.0), (fixed(3), speed_up)):
                runs.append(run(variant, domain=domain, repeat=repeat, seconds=slow * float(np.exp(random.normal(0, noise))) / factor))
    return runs


def whole_benchmark() -> list[Record]:
    """A record of every kind; drafting 2 is 1.5 times as fast as plain decoding, llama.cpp's half as fast, 4 as fast as plain."""
    records: list[Record] = [header()]
    speeds = {BASELINE: 1.0, fixed(2): 1.5, fixed(4): 1.0, rolling(): 1.2, PEER_PLAIN: 1.0, fixed(2, LLAMA_CPP): 0.5}
    for repeat in range(3):
        for domain in ("code", "prose"):
            for variant, speed in speeds.items():
                counts = {"drafted_at": (5, 5), "accepted_at": (4, 1)} if variant.policy != PLAIN and variant.side == OURS else {}
                reported = None if variant.side == LLAMA_CPP else "same"
                records.append(run(variant, domain=domain, repeat=repeat, seconds=(1 + repeat / 10) / speed, output=reported, **counts))
    records += [run(v, part="contexts", domain=n, seconds=s) for n, s in (("128", 1.0), ("512", 2.0)) for v in (BASELINE, rolling())]
    records += [
        CostRecord(drafter="dense", length=64, verify_seconds=(0.02, 0.03, 0.025), draft_step_seconds=0.002),
        Memory(drafter="dense", sequences=1, context=64, peak_bytes=100_000_000),
        Memory(drafter="dense", sequences=2, context=64, peak_bytes=120_000_000),
        Concurrency(
            clients=2,
            variant=rolling(),
            repeat=0,
            requests=4,
            tokens=40,
            seconds=2.0,
            request_seconds=(1.0, 1.0, 0.9, 0.9),
            token_seconds=(0.1,) * 36,
            equal=4,
            compared=4,
        ),
        KvTypeCost(
            kv_type="q8_0", cache_bytes=1000, tokens=9, acceptance_rate=0.5, tokens_per_second=10, kl_mean=1e-5, kl_max=1e-4, same_best=1
        ),
        RowEquality(compared=13, different=2, largest=0.25),
        Note(text="something was left out"),
    ]
    return records
