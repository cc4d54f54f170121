"""What all response formats share: their interface, the parts of an answer, and the `usage` object."""

from __future__ import annotations

import itertools
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from edge_devices.energy.intervals import Interval
from edge_devices.energy.live import RunEnergy
from edge_runtime.server.engine.jobs import Finished, Output, OutputLogprob
from edge_runtime.server.errors import ApiError
from edge_runtime.server.json_text import Json
from edge_runtime.session.monitor import DecodeStats, Metric, Point
from edge_runtime.text.channels import Event

# OpenAI's own value for tokens that cannot occur, because JSON has no infinity.
_LOWEST_LOGPROB = -9999.0
# Stands for `Written` text until it is inserted. It is random, so that no text of a request equals it.
_MARK = secrets.token_hex(16)


@dataclass(frozen=True)
class Written:
    """JSON text that `encoded` inserts as it is."""

    text: str


class Logprobs(ABC):
    """Log probabilities of an answer. Each is encoded when it arrives: a long answer's at once would block the event loop for seconds."""

    def __init__(self, entries: Iterable[OutputLogprob] = ()) -> None:
        self._written: list[str] = []
        self.add(entries)

    def __len__(self) -> int:
        return len(self._written)

    @abstractmethod
    def add(self, entries: Iterable[OutputLogprob]) -> None:
        """Adds the entries of the next tokens."""

    def to_json(self) -> Any:
        """Returns all entries."""
        return Written(f"[{', '.join(self._written)}]")


@dataclass(frozen=True, kw_only=True)
class ChoiceAnswer:
    """One choice of a response that is sent as a whole."""

    events: Sequence[Event]
    logprobs: Logprobs
    finished: Finished


class ResponseFormat(ABC):
    """The format of one response. A stream is `begin`, `output` and `end` for each choice, then `finish`; a whole one is `complete`."""

    media_type = "text/event-stream"

    def begin(self, prompt_tokens: int) -> list[bytes]:  # noqa: ARG002
        """Returns what precedes any output."""
        return []

    def idle(self) -> list[bytes]:
        """Returns what tells a client that the connection is alive while a stream has no new output."""
        return []

    @abstractmethod
    def output(self, choice: int, output: Output) -> list[bytes]:
        """Returns new output of a choice."""

    @abstractmethod
    def end(self, choice: int, finished: Finished) -> list[bytes]:
        """Returns the end of a choice, with the finish reason."""

    def finish(self) -> list[bytes]:
        """Returns the end of the stream, after the last choice."""
        return []

    @abstractmethod
    def failed(self, error: ApiError) -> list[bytes]:
        """Returns the end of a stream that failed."""

    def logprobs(self) -> Logprobs:
        """Returns an empty object for the log probabilities of a choice that is sent as a whole."""
        return ChatLogprobs()

    @abstractmethod
    def complete(self, answers: Sequence[ChoiceAnswer]) -> Json:
        """Returns the complete response."""


def server_sent(value: Json, event: str | None = None) -> bytes:
    """Returns a server-sent event, named `event` if that is given."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + encoded(value) + b"\n\n"


def encoded(value: Json) -> bytes:
    """Returns JSON as UTF-8. Lone surrogates, which requests may contain, become question marks."""
    written: list[str] = []

    def mark(value: Written) -> str:
        written.append(value.text)
        return _MARK

    parts = json.dumps(value, ensure_ascii=False, default=mark).split(f'"{_MARK}"')
    return "".join(itertools.chain(*zip(parts, [*written, ""], strict=True))).encode("utf-8", "replace")


class ChatLogprobs(Logprobs):
    """`logprobs.content` of /v1/chat/completions; /v1/responses and /api/chat have the same format."""

    def add(self, entries: Iterable[OutputLogprob]) -> None:
        for entry in entries:
            top = [_token(piece, logprob) for piece, logprob in entry.top]
            self._written.append(json.dumps({**_token(entry.piece, entry.logprob), "top_logprobs": top}, ensure_ascii=False))

    def join(self, others: ChatLogprobs) -> None:
        """Adds the entries of another list."""
        self._written += others._written


class CompletionLogprobs(Logprobs):
    """`logprobs` of /v1/completions; `offset` is the number of characters before the first entry."""

    def __init__(self, entries: Iterable[OutputLogprob] = (), offset: int = 0) -> None:
        self._columns: Json = {"tokens": [], "token_logprobs": [], "text_offset": []}
        self._offset = offset
        super().__init__(entries)

    def add(self, entries: Iterable[OutputLogprob]) -> None:
        for entry in entries:
            for name, value in zip(self._columns, (_text(entry.piece), _finite(entry.logprob), self._offset), strict=True):
                self._columns[name].append(value)
            self._offset += len(_text(entry.piece))
            self._written.append(json.dumps({_text(piece): _finite(logprob) for piece, logprob in entry.top}, ensure_ascii=False))

    def to_json(self) -> Json:
        return self._columns | {"top_logprobs": super().to_json()}


def _token(piece: bytes, logprob: float) -> Json:
    return {"token": _text(piece), "logprob": _finite(logprob), "bytes": list(piece)}


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)


class UsageCount:
    """The usage of a response while it is generated. `n` choices share a prompt, which counts once."""

    def __init__(self, choices: int, n: int) -> None:
        self._stats = [DecodeStats() for _ in range(choices)]
        self._n = n
        self._energy: RunEnergy | None = None

    def update(self, choice: int, stats: DecodeStats, energy: RunEnergy | None = None) -> None:
        """Takes the newest figures of a choice. Energy cannot be split, so it is reported only for responses of one choice."""
        self._stats[choice] = stats
        self._energy = energy if len(self._stats) == 1 else None

    @property
    def stats(self) -> DecodeStats:
        """The sum of all choices. They run at the same time, so the seconds are the slowest one's, and the first token is the earliest."""
        every = self._stats
        if len(every) == 1:
            return every[0]
        return DecodeStats(
            prompt_tokens=sum(choice.prompt_tokens for choice in every[:: self._n]),
            reused_tokens=sum(choice.reused_tokens for choice in every[:: self._n]),
            tokens=sum(choice.tokens for choice in every),
            drafted=sum(choice.drafted for choice in every),
            accepted=sum(choice.accepted for choice in every),
            prefill_seconds=max(choice.prefill_seconds for choice in every),
            first_token_seconds=min(choice.first_token_seconds for choice in every),
            decode_seconds=max(choice.decode_seconds for choice in every),
        )

    def to_json(self) -> Json:
        """Returns the `usage` object of the OpenAI API: its counts, then this server's additions.

        Drafts are reported as the API's predicted tokens, except that rejected drafts do not count as completion tokens.
        """
        stats = self.stats
        counts = {
            "prompt_tokens": stats.prompt_tokens,
            "completion_tokens": stats.tokens,
            "total_tokens": stats.prompt_tokens + stats.tokens,
            "prompt_tokens_details": {"cached_tokens": stats.reused_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": stats.accepted,
                "rejected_prediction_tokens": stats.drafted - stats.accepted,
            },
        }
        return counts | _additions(stats, self._energy)


def _additions(stats: DecodeStats, energy: RunEnergy | None) -> Json:
    """Returns the additions to `usage`. Without a meter there is no `energy`; /metrics and /energy_metrics state why."""
    return figures(stats) | ({"energy": energy_usage(energy)} if energy is not None and energy.facts is not None else {})


def timings(stats: DecodeStats) -> Json:
    """Returns llama-server's `timings`: times in milliseconds, and counts. The prompt's figures do not include cached tokens."""
    prompt, prompt_ms = stats.prompt_tokens - stats.reused_tokens, stats.prefill_seconds * 1000
    answer, answer_ms = stats.tokens, stats.decode_seconds * 1000
    return {
        "cache_n": stats.reused_tokens,
        "prompt_n": prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt if prompt else 0.0,
        "prompt_per_second": prompt / prompt_ms * 1000 if prompt_ms else 0.0,
        "predicted_n": answer,
        "predicted_ms": answer_ms,
        "predicted_per_token_ms": answer_ms / answer if answer else 0.0,
        "predicted_per_second": stats.tokens_per_second,
        "draft_n": stats.drafted,
        "draft_n_accepted": stats.accepted,
    }


def figures(stats: DecodeStats) -> Json:
    """Returns the figures about drafts and times that no API defines."""
    return {
        "drafted_tokens": stats.drafted,
        "accepted_tokens": stats.accepted,
        "tokens_per_second": stats.tokens_per_second,
        "time_to_first_token_seconds": stats.first_token_seconds,
        "prefill_seconds": stats.prefill_seconds,
    }


def usage_line(stats: DecodeStats) -> str:
    """Returns a request's figures for the operator's log line; an empty string for a request that did not begin."""
    if not stats.prompt_tokens:
        return ""
    cached = f" ({stats.reused_tokens} cached)" if stats.reused_tokens else ""
    parts = [f"{stats.prompt_tokens} prompt tokens{cached}", f"{stats.tokens} generated", f"{stats.tokens_per_second:.1f} tok/s"]
    if stats.acceptance_rate is not None:
        parts.append(f"{stats.acceptance_rate:.0%} of {stats.drafted} drafts accepted")
    return ", ".join(parts)


def responses_usage(stats: DecodeStats, thought_tokens: int, energy: RunEnergy | None) -> Json:
    """Returns the `usage` object of /v1/responses."""
    counts = {
        "input_tokens": stats.prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.reused_tokens},
        "output_tokens": stats.tokens,
        "output_tokens_details": {"reasoning_tokens": thought_tokens},
        "total_tokens": stats.prompt_tokens + stats.tokens,
    }
    return counts | _additions(stats, energy)


def messages_usage(stats: DecodeStats, thought_tokens: int, energy: RunEnergy | None = None) -> Json:
    """Returns the `usage` object of /v1/messages. Its input tokens do not include cached ones."""
    counts = {
        "input_tokens": stats.prompt_tokens - stats.reused_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stats.reused_tokens,
        "output_tokens": stats.tokens,
        "output_tokens_details": {"thinking_tokens": thought_tokens},
    }
    return counts | _additions(stats, energy)


def energy_usage(energy: RunEnergy) -> Json:
    """Returns a request's energy: the machine's joules while it ran, idle power and other load included.

    Joules per token are null if other requests ran at the same time.
    """

    def figure(value: Interval | None) -> Json:
        record = value.to_json() if value else {}
        return {"value": record.get("value"), "low": record.get("low"), "high": record.get("high")}

    joules, per_token = figure(energy.joules), figure(energy.joules_per_token)
    return {
        "joules": joules["value"],
        "joules_interval": [joules["low"], joules["high"]],
        "joules_per_token": per_token["value"],
        "joules_per_token_interval": [per_token["low"], per_token["high"]],
        "scope": energy.facts.scope if energy.facts else None,
        "meter": energy.facts.name if energy.facts else None,
        "estimate": energy.facts.is_estimate if energy.facts else False,
        "shared_with": energy.shared_with,
        "reason": energy.reason or None,
    }


def energy_totals(total: RunEnergy) -> Json:
    """Returns the machine's joules while requests ran, since the start, and the time of the reading in seconds.

    A client subtracts two answers. The first two fields are those of trtllm-serve's path of the same name. If there is no figure, `error`
    has the reason.
    """
    if total.joules is None and total.reason:
        return {"error": total.reason}
    figures = energy_usage(total)
    own = {key: figures[key] for key in ("joules_interval", "joules_per_token", "joules_per_token_interval", "scope", "meter", "estimate")}
    return {"total_energy_j": figures["joules"] or 0.0, "query_time": time.perf_counter(), **own}


def energy_metrics(total: RunEnergy) -> list[Metric]:
    """Returns the energy of all requests together: the machine's joules while requests ran, idle power included.

    The info metric has the kind of figure (measured, estimate, none), and for none the reason.
    """
    facts = total.facts
    labels = {"meter": facts.name, "scope": str(facts.scope)} if facts else {}
    info = {"kind": total.kind, **labels, "reason": total.sentence() if total.kind == "none" else ""}
    metrics = [Metric(name="edge_mtp_energy_info", kind="gauge", description="The energy figure.", samples=[Point(value=1, labels=info)])]
    figures = (
        ("edge_mtp_energy_joules", "Joules while requests ran, idle power included.", total.joules),
        ("edge_mtp_energy_joules_per_token", "Joules per emitted token of all requests.", total.joules_per_token),
    )
    for name, description, interval in figures:
        if interval is not None:
            every = (("value", interval.value), ("low", interval.low), ("high", interval.high))
            samples = [Point(value=value, labels={**labels, "bound": bound}) for bound, value in every]
            metrics.append(Metric(name=name, kind="gauge", description=description, samples=samples))
    return metrics
