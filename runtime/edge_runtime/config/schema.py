"""The `speculative_decoding:` block: its keys, and how one layer of configuration overrides another. Every key: docs/configuration.md.

A key that is None is not set in its layer: a lower layer decides, the lowest being the defaults.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from edge_devices.option_fields import declaration
from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.drafting.policies import POLICIES
from edge_runtime.errors import ConfigError

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000**i for i, prefix in enumerate("KMGT", start=1)}
_UNITS |= {f"{prefix}IB": 1024**i for i, prefix in enumerate("KMGT", start=1)}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?([A-Za-z]{0,3})", re.ASCII)
_MAX_SIZE = 1 << 63
_MAX_TEXT = 4096


@dataclass(frozen=True)
class Check:
    """Accepts the values for which `is_valid` is true; `advice` is the end of the message about any other value."""

    is_valid: Callable[[Any], bool]
    advice: str

    def __call__(self, key: str, value: Any) -> None:
        """Raises ConfigError unless the value of `key` is valid."""
        if not self.is_valid(value):
            raise ConfigError(f"{key} is {shown(value)}{self.advice}")


def integer(low: int, high: int) -> Check:
    """Accepts an integer from `low` to `high`."""
    return Check(lambda value: type(value) is int and low <= value <= high, f"; write an integer from {low} to {high}")


def number(low: float, high: float) -> Check:
    """Accepts a number from `low` to `high`."""
    return Check(lambda value: type(value) in (int, float) and low <= value <= high, f"; write a number from {low:g} to {high:g}")


def one_of(*choices: str) -> Check:
    """Accepts one of these words."""
    return Check(
        lambda value: type(value) is str and value in choices, f"; {'choose one of' if choices[1:] else 'write'} {', '.join(choices)}"
    )


def shown(value: Any) -> str:
    """Returns a value for a message, cut to 40 characters."""
    # Python refuses to print an integer with thousands of digits.
    if type(value) is int and abs(value) >= 10**39:
        return "a number of 40 digits or more"
    return {None: "null", True: "true", False: "false"}[value] if value is None or type(value) is bool else repr(value)[:40]


def bytes_of(value: int | str) -> int:
    """Returns the number of bytes of a value that SIZE accepts: a GB is 1000^3 bytes, a GiB 1024^3."""
    if isinstance(value, int):
        return value
    match = _SIZE.fullmatch(value)
    assert match is not None, "a checked size"
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _is_size(value: Any) -> bool:
    if type(value) is str:
        match = _SIZE.fullmatch(value)
        return match is not None and match[2].upper() in _UNITS and 0 < bytes_of(value) < _MAX_SIZE
    return type(value) is int and 0 < value < _MAX_SIZE


FLAG = Check(lambda value: type(value) is bool, "; write true or false")
TEXT = Check(
    lambda value: type(value) is str and 0 < len(value) <= _MAX_TEXT,
    f"; write a text of 1 to {_MAX_TEXT} characters (in quotes if it looks like a number)",
)
SIZE = Check(_is_size, '; write a number of bytes above 0, or a text such as "2GB" or "1.5 GiB"')


BLOCK = "speculative_decoding"
OBJECTIVES = ("time", "energy")
PRESET_NAMES = ("code", "chat", "edge", "batch")
MAX_CONTEXT = 1 << 24
# These draft lengths must ascend in this order.
_LENGTHS = ("min_horizon", "draft_length", "max_horizon", "longest_draft")


def _key(check: Callable[[str, Any], None], comment: str, *flags: str, **option: Any) -> Any:
    """Returns the field of an optional key. `comment` describes it in a written file; other arguments make it an option of commands."""
    return field(default=None, metadata={"check": check, "comment": comment} | (declaration(*flags, **option) if option else {}))


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
        """Returns this section, in which keys that are not set take the values of `lower`."""
        return dataclasses.replace(lower, **{name: value for name, value in vars(self).items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(Section):
    """The drafter's files and its head."""

    name = "drafter"
    model: str | None = _key(TEXT, "source of the drafter; read by edge-export, checked when the bundle is opened")
    precision: str | None = _key(TEXT, "the drafter's quantization; read by edge-export, checked when the bundle is opened")
    sparse_output: bool | None = _key(
        FLAG, "true: the split drafter with its sparse head; false: the dense one; null: split where it is there and runs"
    )
    max_candidates: int | None = _key(integer(1, 1 << 24), "most tokens the sparse head scores; null: the number of the bundle")


@dataclass(frozen=True, kw_only=True)
class VerifierConfig(Section):
    """The target's file."""

    name = "verifier"
    model: str | None = _key(TEXT, "source of the model; read by edge-export, checked when the bundle is opened")
    precision: str | None = _key(TEXT, "the model's quantization; read by edge-export, checked when the bundle is opened")


@dataclass(frozen=True, kw_only=True)
class CacheConfig(Section):
    """The one KV cache of target and drafter."""

    name = "cache"
    max_context_length: int | None = _key(integer(1, MAX_CONTEXT), "size of the KV cache in tokens, prompt and answer together")
    kv_type: str | None = _key(one_of("f16", "q8_0", "q4_0"), "type of the KV cache: f16, q8_0 or q4_0")
    memory_limit: int | str | None = _key(SIZE, 'most memory to take, in bytes or like "2GB"; null: what is available')
    overflow: str | None = _key(one_of("stop", "drop_oldest"), "when a chat fills the context: drop_oldest turns, or stop")


@dataclass(frozen=True, kw_only=True)
class TuningConfig(Section):
    """How many tokens to draft. Also raises ConfigError if the draft lengths are not in order."""

    name = "tuning"
    preset: str | None = _key(one_of(*PRESET_NAMES), "code, chat, edge or batch; the values of this file override those of the preset")
    policy: str | None = _key(
        one_of(*POLICIES), "profit: the most profitable length; fixed: always draft_length; rolling, stepped: follow the acceptance"
    )
    objective: str | None = _key(
        one_of(*OBJECTIVES),
        "what profit optimizes: tokens per second (time) or joules per token (energy)",
        choices=OBJECTIVES,
        panel="Energy",
        help="Draft for the most tokens per second (time) or the fewest joules per token (energy).  [default: from the configuration]",
    )
    slowdown: float | None = _key(
        number(0, 10), "with objective energy: the most time per token that fewer joules may cost, 0.1 is 10 % more; null: any"
    )
    draft_length: int | None = _key(
        integer(0, MAX_DRAFT_LENGTH),
        "tokens to draft in the first step; 0 with policy fixed is plain decoding",
        "-d",
        low=0,
        high=MAX_DRAFT_LENGTH,
        help="Draft this many tokens in every step; 0 is plain decoding.  [default: chosen anew in each step, unless configured]",
    )
    min_horizon: int | None = _key(integer(0, MAX_DRAFT_LENGTH), "rolling and stepped never draft fewer (and never fewer than 1)")
    max_horizon: int | None = _key(integer(1, MAX_DRAFT_LENGTH), "rolling and stepped never draft more")
    longest_draft: int | None = _key(integer(1, MAX_DRAFT_LENGTH), "no draft is longer, whatever the policy; a step has a token more")
    acceptance_threshold: float | None = _key(number(0, 1), "rolling drafts one token more above this acceptance rate")
    rejection_penalty: float | None = _key(
        number(0.01, MAX_DRAFT_LENGTH), "tokens by which rolling shortens drafts below it; may be a fraction"
    )
    monitoring_window: int | None = _key(
        integer(5, 10_000), "window of warnings and the safety net, in drafted tokens; rolling and stepped use a fifth as many steps"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        named = {name: value for name in _LENGTHS if (value := getattr(self, name)) is not None}
        if list(named.values()) != sorted(named.values()):
            values = ", ".join(f"{name} {value}" for name, value in named.items())
            raise ConfigError(f"{BLOCK}.tuning has {values}; {' <= '.join(_LENGTHS)} must hold")

    @property
    def lengths(self) -> list[int]:
        """The policy's draft lengths that are set."""
        return [value for value in (self.min_horizon, self.draft_length, self.max_horizon) if value is not None]

    def over(self, lower: Self) -> Self:
        """Returns this section over `lower`.

        Draft lengths of `lower` that conflict with this section's are changed: the first length is moved into this section's range, and the
        bounds are widened or narrowed to fit.
        """
        room = MAX_DRAFT_LENGTH if self.longest_draft is None else self.longest_draft
        longest_allowed = room if self.max_horizon is None else min(room, self.max_horizon)
        shortest, first, longest, longest_draft = lower.min_horizon, lower.draft_length, lower.max_horizon, lower.longest_draft
        if shortest is not None:
            shortest = min(shortest, room, *self.lengths)
        if first is not None:
            first = max(min(first, longest_allowed), self.min_horizon or 0)
        if longest is not None:
            longest = min(max(longest, *self.lengths, 1), room)
        if longest_draft is not None:
            longest_draft = max([longest_draft, *(length for length in (*self.lengths, first, longest) if length is not None)])
        fitted: dict[str, Any] = {"min_horizon": shortest, "draft_length": first, "max_horizon": longest, "longest_draft": longest_draft}
        return super().over(dataclasses.replace(lower, **fitted))


@dataclass(frozen=True, kw_only=True)
class StreamingConfig(Section):
    """How text is streamed."""

    name = "streaming"
    chunk_size: int | None = _key(integer(1, 4096), "least tokens per piece of text")


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """One layer of configuration: the whole block, in which any key may be unset."""

    drafter: DrafterConfig = DrafterConfig()
    verifier: VerifierConfig = VerifierConfig()
    cache: CacheConfig = CacheConfig()
    tuning: TuningConfig = TuningConfig()
    streaming: StreamingConfig = StreamingConfig()

    def over(self, lower: SpeculativeConfig) -> SpeculativeConfig:
        """Returns this layer over `lower`: keys that are set here win, and draft lengths of `lower` are adapted to them if needed."""
        return SpeculativeConfig(**{name: getattr(self, name).over(getattr(lower, name)) for name in SECTIONS})


SECTIONS: dict[str, type[Section]] = {
    kind.name: kind for kind in (DrafterConfig, VerifierConfig, CacheConfig, TuningConfig, StreamingConfig)
}

# Keys of older files, each with a function that returns the section, key and value that mean the same now; None if the key has no effect.
OLD_KEYS: dict[tuple[str, str], Callable[[Any], tuple[str, str, Any] | None]] = {
    ("tuning", "initial_horizon"): lambda value: ("tuning", "draft_length", value),
    ("verifier", "parallel_batch_size"): lambda value: ("tuning", "longest_draft", value - 1 if type(value) is int else value),
    **dict.fromkeys(
        [("cache", "shared_kv"), ("cache", "eviction_policy"), ("streaming", "commit_on_accept"), ("streaming", "fallback_always_append")],
        lambda _: None,
    ),
}
