"""The `speculative_decoding:` block: what may be said, and how one saying goes over another. Every key: docs/configuration.md.

None is "not said": a lower layer, and in the end the defaults, decide.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.config.validators import Check, always_true, flag, number, one_of, size, text, whole
from edge_runtime.drafting.policies import POLICIES
from edge_runtime.errors import ConfigError

BLOCK = "speculative_decoding"
OBJECTIVES = ("time", "energy")
PRESET_NAMES = ("code", "chat", "edge", "batch")
MAX_CONTEXT = 1 << 24


def _key(check: Check, says: str) -> Any:
    """A key that may be left out; `says` is its comment in a written file."""
    return field(default=None, metadata={"check": check, "says": says})


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the block. Raises ConfigError for a value of the wrong type or out of range."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if value is not None:
                each.metadata["check"](f"{BLOCK}.{self.name}.{each.name}", value)

    def over(self, lower: Self) -> Self:
        """Returns this section with `lower`'s values where it says nothing."""
        return dataclasses.replace(lower, **{name: value for name, value in vars(self).items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(Section):
    """The drafter's files and its head."""

    name = "drafter"
    model: str | None = _key(text, "where the drafter came from; read by edge-export, checked when the bundle is opened")
    precision: str | None = _key(text, "the drafter's quantization; read by edge-export, checked when the bundle is opened")
    sparse_output: bool | None = _key(flag, "true: the split drafter with its sparse head; false: the dense one; null: the faster one here")
    max_candidates: int | None = _key(whole(1, 1 << 24), "most tokens the sparse head looks at; null: the head's own number")


@dataclass(frozen=True, kw_only=True)
class VerifierConfig(Section):
    """The target's file and how many rows it verifies at once."""

    name = "verifier"
    model: str | None = _key(text, "where the target came from; read by edge-export, checked when the bundle is opened")
    precision: str | None = _key(text, "the target's quantization; read by edge-export, checked when the bundle is opened")
    parallel_batch_size: int | None = _key(
        whole(2, MAX_DRAFT_LENGTH + 1), "most rows of one verify; a draft is at most one token shorter, whatever the horizons say"
    )


@dataclass(frozen=True, kw_only=True)
class CacheConfig(Section):
    """The one KV cache of target and drafter."""

    name = "cache"
    shared_kv: bool | None = _key(
        always_true("Gemma 4's drafter has no K/V of its own and reads the target's"),
        "always true: the drafter reads the target's K/V rows",
    )
    eviction_policy: str | None = _key(
        one_of("sliding_window"), "sliding_window: sliding layers keep their window, full layers every row; the model allows no other"
    )
    max_context_length: int | None = _key(whole(1, MAX_CONTEXT), "tokens the KV cache holds, prompt and answer together")
    kv_type: str | None = _key(one_of("f16", "q8_0", "q4_0"), "type of the K/V rows: f16, q8_0 or q4_0")
    memory_limit: int | str | None = _key(size, 'most memory to take, in bytes or like "2GB"; null: what the machine has')
    overflow: str | None = _key(one_of("stop", "drop_oldest"), "when a chat fills the context: drop_oldest turns and go on, or stop")


@dataclass(frozen=True, kw_only=True)
class TuningConfig(Section):
    """How many tokens to draft. Raises ConfigError too if the first horizon is outside the range."""

    name = "tuning"
    preset: str | None = _key(one_of(*PRESET_NAMES), "code, chat, edge or batch: its values stand under the ones given in this file")
    policy: str | None = _key(
        one_of(*POLICIES), "profit: what pays here; fixed: always initial_horizon; rolling and stepped: follow the acceptance"
    )
    objective: str | None = _key(
        one_of(*OBJECTIVES), "profit drafts for the most tokens per second (time) or the fewest joules per token (energy)"
    )
    initial_horizon: int | None = _key(
        whole(0, MAX_DRAFT_LENGTH), "tokens to draft in the first round; 0 with policy fixed is plain decoding"
    )
    min_horizon: int | None = _key(whole(0, MAX_DRAFT_LENGTH), "rolling and stepped never draft fewer (and never fewer than 1)")
    max_horizon: int | None = _key(whole(1, MAX_DRAFT_LENGTH), "rolling and stepped never draft more")
    acceptance_threshold: float | None = _key(number(0, 1), "rolling drafts one token more above this share of accepted drafts")
    rejection_penalty: float | None = _key(
        number(0.01, MAX_DRAFT_LENGTH), "rolling drafts so many tokens fewer below it; may be a fraction"
    )
    monitoring_window: int | None = _key(
        whole(5, 10_000), "drafted tokens that warnings and the safety net look back on; rolling and stepped: a fifth as many rounds"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        named = {name: value for name in ("min_horizon", "initial_horizon", "max_horizon") if (value := getattr(self, name)) is not None}
        if list(named.values()) != sorted(named.values()):
            said = ", ".join(f"{name} {value}" for name, value in named.items())
            raise ConfigError(f"{BLOCK}.tuning has {said}; min_horizon <= initial_horizon <= max_horizon must hold")


@dataclass(frozen=True, kw_only=True)
class StreamingConfig(Section):
    """How text goes out."""

    name = "streaming"
    commit_on_accept: bool | None = _key(
        always_true("accepted tokens are final, and holding them back would only delay the text; to group it set chunk_size"),
        "always true: accepted tokens go out at once",
    )
    fallback_always_append: bool | None = _key(
        always_true("the target's own next token ends every round: without it the output would be the drafter's, not the target's"),
        "always true: every round ends with the target's own token",
    )
    chunk_size: int | None = _key(whole(1, 4096), "least tokens per piece of text")


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """One layer of configuration: the whole block, of which anything may be left unsaid."""

    drafter: DrafterConfig = DrafterConfig()
    verifier: VerifierConfig = VerifierConfig()
    cache: CacheConfig = CacheConfig()
    tuning: TuningConfig = TuningConfig()
    streaming: StreamingConfig = StreamingConfig()

    def __post_init__(self) -> None:
        """Raises ConfigError if the horizons need more rows than a verify may have."""
        rows, longest = self.verifier.parallel_batch_size, max(self.horizons, default=0)
        if rows is not None and longest >= rows:
            raise ConfigError(
                f"{BLOCK}.tuning drafts up to {longest} tokens, which need {longest + 1} rows, but verifier.parallel_batch_size is {rows};"
                f" raise it to {longest + 1} or shorten the horizons"
            )

    @property
    def horizons(self) -> list[int]:
        """The draft lengths that are said."""
        tuning = self.tuning
        return [value for value in (tuning.min_horizon, tuning.initial_horizon, tuning.max_horizon) if value is not None]

    def over(self, lower: SpeculativeConfig) -> SpeculativeConfig:
        """Returns this layer with `lower` under it: what is said here holds, and `lower`'s horizons and rows move as far as that needs."""
        lower = _fitted(lower, self)
        return SpeculativeConfig(
            drafter=self.drafter.over(lower.drafter),
            verifier=self.verifier.over(lower.verifier),
            cache=self.cache.over(lower.cache),
            tuning=self.tuning.over(lower.tuning),
            streaming=self.streaming.over(lower.streaming),
        )


SECTIONS: dict[str, type[Section]] = {
    kind.name: kind for kind in (DrafterConfig, VerifierConfig, CacheConfig, TuningConfig, StreamingConfig)
}


def _fitted(lower: SpeculativeConfig, upper: SpeculativeConfig) -> SpeculativeConfig:
    """Returns `lower` with its draft lengths inside `upper`'s range, its range around `upper`'s lengths, and rows for them."""
    said, above, below = upper.horizons, upper.tuning, lower.tuning
    rows = upper.verifier.parallel_batch_size
    room = MAX_DRAFT_LENGTH if rows is None else rows - 1
    longest_allowed = room if above.max_horizon is None else min(room, above.max_horizon)
    shortest, first, longest = below.min_horizon, below.initial_horizon, below.max_horizon
    if shortest is not None:
        shortest = min(shortest, room, *said)
    if first is not None:
        first = max(min(first, longest_allowed), above.min_horizon or 0)
    if longest is not None:
        longest = min(max(longest, *said, 1), room)
    tuning = dataclasses.replace(below, min_horizon=shortest, initial_horizon=first, max_horizon=longest)
    rows_below = lower.verifier.parallel_batch_size
    if rows_below is not None:
        rows_below = max([rows_below, *(length + 1 for length in (*said, first, longest) if length is not None)])
    verifier = dataclasses.replace(lower.verifier, parallel_batch_size=rows_below)
    return dataclasses.replace(lower, tuning=tuning, verifier=verifier)
