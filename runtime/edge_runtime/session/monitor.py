"""Figures of requests, and their monitoring: rates, percentiles, warnings, a record per request, and totals for Prometheus."""

from __future__ import annotations

import datetime
import errno
import html
import json
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from edge_devices.errors import errors_as
from edge_devices.option_fields import option
from edge_runtime.decoding.loop import Round
from edge_runtime.drafting.policies import WARN_ABOVE, WINDOW_TOKENS, AcceptanceWindow, Event
from edge_runtime.errors import RequestError

_REPR_CHARACTERS = 40


@dataclass
class DecodeStats:
    """Counts of one request. `lengths` counts rounds by their numbers of verified drafts and of accepted ones.

    `reused_tokens` of the prompt were already in the cache. Times are in seconds: `prefill_seconds` until the prompt is in the cache,
    `first_token_seconds` from the request until the first emitted token, `decode_seconds` from the end of the prefill until the last
    token. Of the latter, `draft_seconds` are drafting and `verify_seconds` are the target's forwards. `accepted_from` counts the accepted
    drafts of each source: the drafter, a grammar, the memory of the text. `media_rows` counts the rows of images and sound that this
    request prefilled. Encoding them took `encode_seconds` of the prefill; 0 if an earlier request had encoded them.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    lengths: dict[tuple[int, int], int] = field(default_factory=dict)
    media_rows: int = 0
    encode_seconds: float = 0.0
    prefill_seconds: float = 0.0
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accepted_from: Counter[str] = field(default_factory=Counter)

    def count_round(self, drafted: int, accepted: int, emitted: int, sources: Sequence[str] = ()) -> None:
        """Adds one round. `sources` names the source of each accepted draft."""
        for source in sources:
            self.accepted_from[source] += 1
        self.rounds += 1
        self.tokens += emitted
        self.drafted += drafted
        self.accepted += accepted
        self.lengths[drafted, accepted] = self.lengths.get((drafted, accepted), 0) + 1

    @property
    def drafted_at(self) -> list[int]:
        """For each draft position, how many rounds drafted it."""
        longest = max((drafted for drafted, _ in self.lengths), default=0)
        return [sum(rounds for (drafted, _), rounds in self.lengths.items() if drafted > i) for i in range(longest)]

    @property
    def accepted_at(self) -> list[int]:
        """For each drafted position, how many rounds accepted it."""
        return [sum(rounds for (_, accepted), rounds in self.lengths.items() if accepted > i) for i in range(len(self.drafted_at))]

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted; None when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each position i: rounds that accepted draft i / rounds that drafted it."""
        return [a / d for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def mean_acceptance_length(self) -> float:
        """Emitted tokens / target forwards while decoding; 1 without drafts."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens / decode seconds."""
        return self.tokens / self.decode_seconds if self.decode_seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """Counts, seconds and derived rates under stable keys."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "tokens": self.tokens,
            "rounds": self.rounds,
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "accepted_from": dict(self.accepted_from),
            "acceptance_rate": self.acceptance_rate,
            "acceptance_by_position": self.acceptance_by_position,
            "mean_acceptance_length": self.mean_acceptance_length,
            "tokens_per_second": self.tokens_per_second,
            "media_rows": self.media_rows,
            "encode_seconds": self.encode_seconds,
            "prefill_seconds": self.prefill_seconds,
            "time_to_first_token_seconds": self.first_token_seconds,
            "decode_seconds": self.decode_seconds,
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
        }


class Latencies:
    """Latencies per token: a round's seconds divided by its emitted tokens. Percentiles cover the last `keep` rounds."""

    def __init__(self, keep: int | None = None) -> None:
        self._rounds: deque[tuple[float, int]] = deque(maxlen=keep)
        self.seconds = 0.0
        self.count = 0

    def add(self, seconds: float, tokens: int = 1) -> None:
        """Adds a round that took `seconds` and emitted `tokens`."""
        if tokens > 0:
            self._rounds.append((seconds / tokens, tokens))
            self.seconds += seconds
            self.count += tokens

    def percentile(self, percent: int) -> float | None:
        """Returns the smallest latency that `percent` of the tokens do not exceed (nearest rank); None without tokens."""
        left = percent * sum(tokens for _, tokens in self._rounds)
        for latency, tokens in sorted(self._rounds):
            left -= 100 * tokens
            if left <= 0:
                return latency
        return None


def shortened(text: str) -> str:
    """Returns the repr of the text's beginning."""
    return repr(text if len(text) <= _REPR_CHARACTERS else text[:_REPR_CHARACTERS] + "…")


def figures(stats: DecodeStats) -> str:
    """Returns a request's figures as a short text."""
    parts = [f"{stats.tokens} tokens", f"{stats.tokens_per_second:.1f} tok/s"]
    if stats.acceptance_rate is not None:
        parts.append(f"{stats.acceptance_rate:.0%} of drafts accepted")
        parts.append(f"mean acceptance length {stats.mean_acceptance_length:.2f}")
    return ", ".join(parts)


def generation_html(text: str, stats: DecodeStats) -> str:
    """Returns the text and its figures as HTML; the text is escaped."""
    return f"<pre style='white-space: pre-wrap'>{html.escape(text)}</pre><small>{html.escape(figures(stats))}</small>"


# Prometheus' text exposition format (prometheus.io/docs/instrumenting/exposition_formats).

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One value of a metric. `suffix` is _sum or _count for those values of a summary."""

    value: float
    labels: Mapping[str, str]
    suffix: str = ""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric with its samples; `description` is its help text."""

    name: str
    kind: Literal["counter", "gauge", "summary"]
    description: str
    samples: Sequence[Point]


def counter(name: str, description: str, value: float) -> Metric:
    """A counter without labels."""
    return Metric(name=name, kind="counter", description=description, samples=[Point(value=value, labels={})])


def gauge(name: str, description: str, value: float) -> Metric:
    """A gauge without labels."""
    return Metric(name=name, kind="gauge", description=description, samples=[Point(value=value, labels={})])


def exposition(metrics: Sequence[Metric]) -> str:
    """Returns the response to a scrape, ending in a newline. A metric without samples is left out."""
    lines = []
    for metric in metrics:
        if metric.samples:
            lines += [f"# HELP {metric.name} {_escaped(metric.description)}", f"# TYPE {metric.name} {metric.kind}"]
            lines += [f"{metric.name}{sample.suffix}{_labels(sample.labels)} {sample.value!r}" for sample in metric.samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value, quoted=True)}"' for name, value in labels.items()) + "}"


def _escaped(text: str, *, quoted: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quoted else text


# Percentiles over all requests cover only the newest rounds and requests, so that memory is bounded.
KEPT_ROUNDS = 4096
KEPT_REQUESTS = 1024
PERCENTILES = (50, 95)


@dataclass(frozen=True, kw_only=True)
class MonitorOptions:
    """`window` is in drafted tokens. When the share of rejected drafts rises above a value in `warn_above`, there is one event.

    `log` gets one JSON line per request. `on_event` is called immediately, in the thread of the request.
    """

    window: int = WINDOW_TOKENS
    warn_above: tuple[float, ...] = WARN_ABOVE
    log: Path | None = option(panel="Monitoring", help="Append the figures of each request to this file, one JSON line each.")
    on_event: Callable[[Event], None] = lambda _: None


class RequestMonitor:
    """Latencies and events of one request. The session's monitor counts them too. `settings` are part of the record in the log."""

    def __init__(self, monitor: Monitor, settings: Mapping[str, Any]) -> None:
        self.events: list[Event] = []
        self.latencies = Latencies()
        self.settings = dict(settings)
        self._monitor = monitor
        self._seconds = 0.0

    def record_round(self, round_done: Round, stats: DecodeStats) -> None:
        """Counts a round that was already added to `stats`."""
        seconds, self._seconds = stats.decode_seconds - self._seconds, stats.decode_seconds
        self.latencies.add(seconds, len(round_done.tokens))
        warning = self._monitor.record_round(round_done, seconds)
        if warning is not None:
            self.events.append(warning)

    def record_event(self, event: Event) -> None:
        """Counts an event of the safety net."""
        self.events.append(event)
        self._monitor.record_event(event)


class Monitor:
    """Counts a session's rounds, events and requests. `options` None takes the defaults. Any thread may call it."""

    def __init__(self, options: MonitorOptions | None = None) -> None:
        """Raises RequestError for a window or threshold out of range, and for a log that cannot be appended to."""
        self.options = options = options or MonitorOptions()
        self._window = AcceptanceWindow(options.window, options.warn_above)
        self._token_latencies = Latencies(KEPT_ROUNDS)
        self._first_tokens = Latencies(KEPT_REQUESTS)
        self._requests: Counter[str] = Counter()  # totals of finished requests
        self._rounds = DecodeStats()  # totals of all rounds
        self._prefill_seconds = 0.0
        self._events: Counter[str] = Counter()
        self._lock = threading.Lock()
        if options.log is not None:
            _append(options.log, b"")

    def record_round(self, round_done: Round, seconds: float) -> Event | None:
        """Counts a round; returns the warning that it caused, after `on_event` was called with it."""
        with self._lock:
            self._rounds.count_round(round_done.drafted, round_done.accepted, len(round_done.tokens))
            self._token_latencies.add(seconds, len(round_done.tokens))
            event = self._window.add(round_done.drafted, round_done.accepted)
        if event is not None:
            self.record_event(event)
        return event

    def record_event(self, event: Event) -> None:
        """Counts an event and calls `on_event`."""
        with self._lock:
            self._events[event.kind] += 1
        self.options.on_event(event)

    def record_request(self, request: RequestMonitor, stats: DecodeStats, *, finish_reason: str | None) -> dict[str, Any]:
        """Counts a finished request, appends its record to the log if there is one, and returns the record.

        Raises RequestError if the log cannot be written; the request is counted nevertheless.
        """
        with self._lock:
            self._requests.update(requests=1, prompt_tokens=stats.prompt_tokens, cached=stats.reused_tokens)
            self._prefill_seconds += stats.prefill_seconds
            if stats.rounds:
                self._first_tokens.add(stats.first_token_seconds)
        record = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            "finish_reason": finish_reason,
            "stats": stats.to_json(),
            "latency": {
                "token_p50_seconds": request.latencies.percentile(50),
                "token_p95_seconds": request.latencies.percentile(95),
                "time_to_first_token_seconds": stats.first_token_seconds if stats.rounds else None,
            },
            "session": self.summary(),
            "events": [event.to_json() for event in request.events],
            "settings": request.settings,
        }
        if self.options.log is not None:
            _append(self.options.log, (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode())
        return record

    def summary(self) -> dict[str, Any]:
        """Returns acceptance and rejection within the window, and P50 and P95 of token latency and time to the first token."""
        with self._lock:
            rejection = self._window.rejection
            return {
                "window_drafted_tokens": self._window.drafted,
                "window_acceptance_rate": None if rejection is None else 1 - rejection,
                "window_rejection_rate": rejection,
                "token_p50_seconds": self._token_latencies.percentile(50),
                "token_p95_seconds": self._token_latencies.percentile(95),
                "time_to_first_token_p50_seconds": self._first_tokens.percentile(50),
                "time_to_first_token_p95_seconds": self._first_tokens.percentile(95),
            }

    def prometheus_text(self) -> str:
        """Returns all totals in Prometheus' text format (`CONTENT_TYPE`)."""
        with self._lock:
            requests, rounds, rejection = self._requests, self._rounds, self._window.rejection
            return exposition(
                [
                    counter("edge_mtp_requests_total", "Finished requests.", requests["requests"]),
                    counter("edge_mtp_prompt_tokens_total", "Prompt tokens of finished requests.", requests["prompt_tokens"]),
                    counter("edge_mtp_cached_prompt_tokens_total", "Prompt tokens that were in a cache.", requests["cached"]),
                    counter("edge_mtp_prefill_seconds_total", "Seconds of prefill of finished requests.", self._prefill_seconds),
                    counter("edge_mtp_tokens_total", "Emitted tokens.", rounds.tokens),
                    counter("edge_mtp_rounds_total", "Steps of the model.", rounds.rounds),
                    counter("edge_mtp_drafted_tokens_total", "Drafted tokens.", rounds.drafted),
                    counter("edge_mtp_accepted_tokens_total", "Accepted drafted tokens.", rounds.accepted),
                    _by_position("edge_mtp_drafted_tokens_by_position_total", "Drafted tokens by their place.", rounds.drafted_at),
                    _by_position("edge_mtp_accepted_tokens_by_position_total", "Accepted drafts by their place.", rounds.accepted_at),
                    Metric(
                        name="edge_mtp_events_total",
                        kind="counter",
                        description="Warnings and changes of drafting, by kind.",
                        samples=[Point(value=count, labels={"kind": kind}) for kind, count in sorted(self._events.items())],
                    ),
                    Metric(
                        name="edge_mtp_mean_acceptance_length",
                        kind="gauge",
                        description="Tokens / steps of the model.",
                        samples=[Point(value=rounds.mean_acceptance_length, labels={})] if rounds.rounds else [],
                    ),
                    Metric(
                        name="edge_mtp_rejection_ratio",
                        kind="gauge",
                        description=f"Rejected / drafted, last {self.options.window} drafted tokens.",
                        samples=[] if rejection is None else [Point(value=rejection, labels={})],
                    ),
                    _summary("edge_mtp_token_seconds", "Seconds per emitted token; quantiles of recent rounds.", self._token_latencies),
                    _summary(
                        "edge_mtp_time_to_first_token_seconds",
                        "Seconds until the first token; quantiles of recent requests.",
                        self._first_tokens,
                    ),
                ]
            )


def _by_position(name: str, description: str, counts: Sequence[int]) -> Metric:
    """A counter with a value for each draft position. Positions begin at 0, as in vLLM and llama-server."""
    samples = [Point(value=count, labels={"position": str(place)}) for place, count in enumerate(counts) if count]
    return Metric(name=name, kind="counter", description=description, samples=samples)


def _summary(name: str, description: str, latencies: Latencies) -> Metric:
    quantiles = [(percent, latencies.percentile(percent)) for percent in PERCENTILES]
    samples = [Point(value=value, labels={"quantile": f"{percent / 100:g}"}) for percent, value in quantiles if value is not None]
    samples += [Point(value=latencies.seconds, labels={}, suffix="_sum"), Point(value=latencies.count, labels={}, suffix="_count")]
    return Metric(name=name, kind="summary", description=description, samples=samples)


def _append(path: Path, line: bytes) -> None:
    """Appends with a single write, so that lines of several processes do not mix."""
    with errors_as(RequestError, f"the log {path} cannot be appended to", "choose another file"):
        # O_NONBLOCK makes opening a pipe without a reader fail instead of waiting for one.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0), 0o644)
        try:
            if hasattr(os, "O_NONBLOCK"):
                os.set_blocking(descriptor, True)
            if os.write(descriptor, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)
