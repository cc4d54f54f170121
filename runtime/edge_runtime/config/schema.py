"""The `speculative_decoding:` block: its keys, and how one layer of configuration overrides another. Every key: docs/configuration.md.

None means that a key is not set: a lower layer decides, and in the end the defaults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.config.validators import FLAG, SIZE, TEXT, always_true, integer, number, one_of
from edge_runtime.drafting.policies import POLICIES
from edge_runtime.errors import ConfigError

BLOCK = "speculative_decoding"
OBJECTIVES = ("time", "energy")
PRESET_NAMES = ("code", "chat", "edge", "batch")
MAX_CONTEXT = 1 << 24


def _key(check: Callable[[str, Any], None], comment: str) -> Any:
    """Returns the field of an optional key; `comment` describes it in a written file."""
    return field(default=None, metadata={"check": check, "comment": comment})


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the block. Raises ConfigError for a value of the wrong type or out of range."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if value is not None:
                each.metadata["check"](f"{BLOCK}.{self.name}.{each.name}", value)

    def over(self, lower: Self) -> Self:
        """Returns this section; keys that are not set have the values of `lower`."""
        return dataclasses.replace(lower, **{name: value for name, value in vars(self).items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(Section):
    """The drafter's files and its head."""

    name = "drafter"
    model: str | None = _key(TEXT, "source of the drafter; read by edge-export, checked when the bundle is opened")
    precision: str | None = _key(TEXT, "the drafter's quantization; read by edge-export, checked when the bundle is opened")
    sparse_output: bool | None = _key(
        FLAG, "true: the split drafter with its sparse head; false: the dense one; null: the faster one on this machine"
    )
    max_candidates: int | None = _key(integer(1, 1 << 24), "most tokens the sparse head scores; null: the number of the bundle")


@dataclass(frozen=True, kw_only=True)
class VerifierConfig(Section):
    """The target's file and how many rows it verifies at once."""

    name = "verifier"
    model: str | None = _key(TEXT, "source of the target; read by edge-export, checked when the bundle is opened")
    precision: str | None = _key(TEXT, "the target's quantization; read by edge-export, checked when the bundle is opened")
    parallel_batch_size: int | None = _key(
        integer(2, MAX_DRAFT_LENGTH + 1), "most rows of one verify; no draft is longer than this less 1, whatever the horizons are"
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
        one_of("sliding_window"), "always sliding_window: sliding layers keep their window, full layers every row"
    )
    max_context_length: int | None = _key(integer(1, MAX_CONTEXT), "size of the KV cache in tokens, prompt and answer together")
    kv_type: str | None = _key(one_of("f16", "q8_0", "q4_0"), "type of the K/V rows: f16, q8_0 or q4_0")
    memory_limit: int | str | None = _key(SIZE, 'most memory to take, in bytes or like "2GB"; null: what is available')
    overflow: str | None = _key(one_of("stop", "drop_oldest"), "when a chat fills the context: drop_oldest turns, or stop")


@dataclass(frozen=True, kw_only=True)
class TuningConfig(Section):
    """How many tokens to draft. Raises ConfigError too if the first horizon is outside the range."""

    name = "tuning"
    preset: str | None = _key(one_of(*PRESET_NAMES), "code, chat, edge or batch; the values of this file override those of the preset")
    policy: str | None = _key(
        one_of(*POLICIES), "profit: the most profitable length; fixed: always initial_horizon; rolling, stepped: follow the acceptance"
    )
    objective: str | None = _key(one_of(*OBJECTIVES), "what profit optimizes: tokens per second (time) or joules per token (energy)")
    slowdown: float | None = _key(
        number(0, 10), "with objective energy: the most time per token that fewer joules may cost, 0.1 is 10 % more; null: any"
    )
    initial_horizon: int | None = _key(
        integer(0, MAX_DRAFT_LENGTH), "tokens to draft in the first round; 0 with policy fixed is plain decoding"
    )
    min_horizon: int | None = _key(integer(0, MAX_DRAFT_LENGTH), "rolling and stepped never draft fewer (and never fewer than 1)")
    max_horizon: int | None = _key(integer(1, MAX_DRAFT_LENGTH), "rolling and stepped never draft more")
    acceptance_threshold: float | None = _key(number(0, 1), "rolling drafts one token more above this acceptance rate")
    rejection_penalty: float | None = _key(
        number(0.01, MAX_DRAFT_LENGTH), "tokens by which rolling shortens drafts below it; may be a fraction"
    )
    monitoring_window: int | None = _key(
        integer(5, 10_000), "window of warnings and the safety net, in drafted tokens; rolling and stepped use a fifth as many rounds"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        named = {name: value for name in ("min_horizon", "initial_horizon", "max_horizon") if (value := getattr(self, name)) is not None}
        if list(named.values()) != sorted(named.values()):
            values = ", ".join(f"{name} {value}" for name, value in named.items())
            raise ConfigError(f"{BLOCK}.tuning has {values}; min_horizon <= initial_horizon <= max_horizon must hold")


@dataclass(frozen=True, kw_only=True)
class StreamingConfig(Section):
    """How text is streamed."""

    name = "streaming"
    commit_on_accept: bool | None = _key(
        always_true("accepted tokens are final, and holding them back would only delay the text (chunk_size groups them)"),
        "always true: accepted tokens are emitted at once",
    )
    fallback_always_append: bool | None = _key(
        always_true("every round ends with the target's own token; without it the output would not be the target's"),
        "always true: every round ends with the target's own token",
    )
    chunk_size: int | None = _key(integer(1, 4096), "least tokens per piece of text")


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """One layer of configuration: the block, in which any key may be unset."""

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
        """The draft lengths that are set."""
        tuning = self.tuning
        return [value for value in (tuning.min_horizon, tuning.initial_horizon, tuning.max_horizon) if value is not None]

    def over(self, lower: SpeculativeConfig) -> SpeculativeConfig:
        """Returns this layer over `lower`: keys set here win, and `lower`'s horizons and rows are adapted to them where needed."""
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
    """Returns `lower` with its draft lengths inside `upper`'s range, its range around `upper`'s lengths, and enough rows for them."""
    lengths, above, below = upper.horizons, upper.tuning, lower.tuning
    rows = upper.verifier.parallel_batch_size
    room = MAX_DRAFT_LENGTH if rows is None else rows - 1
    longest_allowed = room if above.max_horizon is None else min(room, above.max_horizon)
    shortest, first, longest = below.min_horizon, below.initial_horizon, below.max_horizon
    if shortest is not None:
        shortest = min(shortest, room, *lengths)
    if first is not None:
        first = max(min(first, longest_allowed), above.min_horizon or 0)
    if longest is not None:
        longest = min(max(longest, *lengths, 1), room)
    tuning = dataclasses.replace(below, min_horizon=shortest, initial_horizon=first, max_horizon=longest)
    rows_below = lower.verifier.parallel_batch_size
    if rows_below is not None:
        rows_below = max([rows_below, *(length + 1 for length in (*lengths, first, longest) if length is not None)])
    verifier = dataclasses.replace(lower.verifier, parallel_batch_size=rows_below)
    return dataclasses.replace(lower, tuning=tuning, verifier=verifier)
