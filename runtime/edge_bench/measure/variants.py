"""The variants of a comparison: plain decoding, draft lengths, policies, drafters, and llama.cpp's own settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.drafting.drafter_kinds import DrafterKind
from edge_runtime.drafting.policies import POLICIES
from edge_runtime.errors import RequestError

PLAIN, FIXED, DEFAULT = "plain", "fixed", "default"
OURS, LLAMA_CPP = "edge-mtp", "llama.cpp"
# Policies that choose lengths; `fixed` is measured by the fixed lengths.
CHOOSING_POLICIES = tuple(name for name in POLICIES if name != FIXED)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to decode. `side` names the program; `policy` is plain, fixed, a policy, or default (a peer's); `length` belongs to fixed."""

    side: str
    drafter: str
    policy: str
    length: int | None = None

    @property
    def label(self) -> str:
        """The display name; unique among the variants of a run."""
        if self.policy == PLAIN:
            return PLAIN if self.side == OURS else f"{self.side} {PLAIN}"
        who = self.drafter if self.side == OURS else self.side
        return f"{who} {self.length if self.policy == FIXED else self.policy}"


BASELINE = Variant(side=OURS, drafter="none", policy=PLAIN)


def edge_variants(drafters: Sequence[DrafterKind], lengths: Sequence[int], policies: Sequence[str]) -> list[Variant]:
    """Returns plain decoding, then each drafter with each length and each policy."""
    variants = [BASELINE]
    for kind in drafters:
        variants += [Variant(side=OURS, drafter=kind, policy=FIXED, length=length) for length in lengths]
        variants += [Variant(side=OURS, drafter=kind, policy=name) for name in policies]
    return variants


def peer_variants(lengths: Sequence[int]) -> list[Variant]:
    """Returns llama.cpp's plain decoding, its default, and its fixed lengths; it drafts with the dense drafter."""
    return [
        Variant(side=LLAMA_CPP, drafter="none", policy=PLAIN),
        Variant(side=LLAMA_CPP, drafter="dense", policy=DEFAULT),
        *(Variant(side=LLAMA_CPP, drafter="dense", policy=FIXED, length=length) for length in lengths),
    ]


def parse_lengths(text: str) -> tuple[int, ...]:
    """Parses draft lengths such as 3, 1,2,4 or 1-8; "none" is no length. Raises RequestError."""
    lengths = parse_numbers(text, "draft lengths")
    if lengths and not 1 <= min(lengths) <= max(lengths) <= MAX_DRAFT_LENGTH:
        raise RequestError(f"draft lengths {text!r} are not all in 1..{MAX_DRAFT_LENGTH}; plain decoding is always measured")
    return lengths


def parse_numbers(text: str, what: str) -> tuple[int, ...]:
    """Parses positive integers from 1,2,4 or 1-8, sorted without duplicates; "none" is none. Raises RequestError naming `what`."""
    if text == "none":
        return ()
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(first) > 9 or len(last) > 9:
            raise RequestError(f"{what} {text!r} are not numbers such as 1,2,4 or 1-8; 'none' leaves them out")
        low, high = int(first), int(last) if dash else int(first)
        if not 1 <= low <= high < low + 1000:
            raise RequestError(f"{what} {text!r}: {part.strip()} is not a number or range from 1 up; 'none' leaves them out")
        numbers |= set(range(low, high + 1))
    return tuple(sorted(numbers))


def parse_names(text: str, known: Sequence[str], what: str) -> tuple[str, ...]:
    """Parses a comma-separated list of `known` names, in the order given; "none" is none. Raises RequestError naming `what`."""
    if text == "none":
        return ()
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in known:
            raise RequestError(f"{what} {name!r} is unknown; choose from {', '.join(known)}")
    return names
