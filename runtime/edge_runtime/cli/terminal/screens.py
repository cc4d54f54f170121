"""What edge-run prints about a request: the summary line, remarks, and the table of --explain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from edge_runtime.backends.selection import CARDS
from edge_runtime.cli.messages import printable
from edge_runtime.decoding.loop import Round
from edge_runtime.drafting.drafter_kinds import DrafterKind
from edge_runtime.drafting.profit_policy import Decision
from edge_runtime.drafting.sources import MODEL
from edge_runtime.session.generation import Generation
from edge_runtime.session.session import Session
from edge_runtime.session.stats import DecodeStats
from edge_runtime.text.chat_template import is_instruction_tuned

# Name and width of each column of --explain.
COLUMNS = (
    ("round", 5),
    ("mode", 6),
    ("drafted", 7),
    ("verified", 8),
    ("rows", 4),
    ("accepted", 8),
    ("expected", 8),
    ("emitted", 7),
    ("cost", 9),
    ("took ms", 8),
    ("gain", 6),
    ("from", 9),
    ("sure", 0),
)
UNITS = {"time": "ms", "energy": "mJ"}
NONE = "-"


def summary(stats: DecodeStats, drafter: DrafterKind) -> str:
    """Returns the figures of a request in one line; `drafter` is named if it drafted."""
    parts = [
        f"{stats.tokens} tokens",
        f"{stats.tokens_per_second:.1f} tok/s",
        f"mean acceptance length {stats.mean_acceptance_length:.2f}",
    ]
    if stats.acceptance_rate is not None:
        by_position = " ".join(f"{share:.0%}" for share in stats.acceptance_by_position)
        parts.append(f"{stats.acceptance_rate:.1%} of {drafter} drafts accepted (by position {by_position})")
        if others := {source: count for source, count in stats.accepted_from.items() if source != MODEL}:
            parts[-1] += ", of these " + ", ".join(f"{count} from the {source}" for source, count in sorted(others.items()))
    if stats.media_rows:
        parts.append(f"{stats.media_rows} rows of media encoded in {stats.encode_seconds * 1000:.0f} ms")
    parts.append(f"first token after {stats.first_token_seconds * 1000:.0f} ms")
    return ", ".join(parts)


def short_summary(stats: DecodeStats, columns: int) -> str:
    """Returns the figures of an answer in one line of a terminal; the last ones are left out where it is narrow."""
    parts = [f"{stats.tokens} tokens", f"{stats.tokens_per_second:.1f} tok/s", f"{stats.mean_acceptance_length:.2f} tokens per step"]
    if stats.acceptance_rate is not None:
        parts.append(f"{stats.acceptance_rate:.0%} of drafts accepted")
    parts.append(f"first after {stats.first_token_seconds * 1000:.0f} ms")
    while len(parts) > 2 and len(", ".join(parts)) > columns:
        parts.pop()
    return ", ".join(parts)


def greeting(session: Session) -> str:
    """Returns what runs: model, quantization, backend, context and drafter."""
    architecture = session.bundle.manifest.architecture
    kinds = sorted({file.quantization for file in session.bundle.manifest.files if file.role == "target" and file.quantization})
    model = f"{architecture.family}, {architecture.parameters:,} parameters" + (f" in {' and '.join(kinds)}" if kinds else "")
    backend = [CARDS[session.backend].title] if session.backend in CARDS else []
    parts = [model, *backend, f"context {session.target.context}", f"drafter {session.drafter_kind}"]
    return ", ".join(parts)


# The exporter's command, where a screen of the shipped example ends.
EXAMPLE_THAT_ANSWERS = "edge-export reference --chat --output small-chat"


def introduction(session: Session) -> list[str]:
    """Returns what a user who begins a chat should know about a model that has a description: what it is, and which model can chat."""
    if (description := session.bundle.manifest.description) is None:
        return []
    lines = [
        f"This model is {printable(description)}.",
        "A real Gemma 4: edge-export pair google/gemma-4-E2B-it --output gemma-e2b (edge-export plan E2B: download, memory, speed here).",
    ]
    if not is_instruction_tuned(session.bundle, session.vocabulary):
        lines.insert(1, f"An example that answers: {EXAMPLE_THAT_ANSWERS}")
    return lines


def remarks(generation: Generation) -> list[str]:
    """Returns remarks for the user: that the context is full, and how much of the prompt cache was used."""
    sentences, stats = [], generation.stats
    if generation.finish_reason == "context":
        sentences.append(f"stopped: the context of {generation.target.context} tokens is full; raise --context or shorten the prompt")
    if stats.reused_tokens:
        sentences.append(f"{stats.reused_tokens} of the prompt's {stats.prompt_tokens} tokens came from the prompt cache")
    return sentences


class Explain:
    """Round callback that prints one line per round, after a line with the column names.

    `decision` returns the decision behind the latest round, None if the policy records none. Its costs are in seconds, or in joules if
    the `objective` is energy.
    """

    def __init__(self, decision: Callable[[], Decision | None], objective: str, write: Callable[[str], None]) -> None:
        self._decision, self._unit, self._write = decision, UNITS[objective], write
        self._rounds = 0

    def __call__(self, done: Round) -> None:
        """Prints the line of a finished round."""
        if not self._rounds:
            self._write(_line([f"{name} {self._unit}" if name == "cost" else name for name, _ in COLUMNS]))
        self._rounds += 1
        self._write(_line(_cells(self._rounds, done, self._decision())))


def _cells(number: int, done: Round, decision: Decision | None) -> list[str]:
    took = f"{(done.draft_seconds + done.verify_seconds) * 1000:.2f}"
    accepted, emitted = str(done.accepted) if done.drafted else NONE, str(len(done.tokens))
    if decision is None:
        mode = "draft" if done.drafted else "plain"
        verified = [NONE, str(done.drafted), str(done.drafted + 1), accepted]
        return [str(number), mode, *verified, NONE, emitted, NONE, took, NONE, _sources(done), NONE]
    return [
        str(number),
        decision.mode,
        str(decision.drafted),
        str(decision.verified),
        str(decision.verified + decision.padding + 1),
        accepted,
        f"{decision.expected:.2f}",
        emitted,
        f"{decision.cost * 1000:.2f}",
        took,
        f"{decision.best_rate / decision.plain_rate:.2f}",
        _sources(done),
        " ".join(f"{confidence:.2f}" for confidence in decision.confidences) or NONE,
    ]


def _sources(done: Round) -> str:
    """Returns the accepted tokens of each source, in order: "drafter 2, memory 4"."""
    return ", ".join(f"{source} {count}" for source, count in Counter(done.sources).items()) or NONE


def _line(cells: list[str]) -> str:
    return "  ".join(cell.rjust(width) for cell, (_, width) in zip(cells, COLUMNS, strict=True))
