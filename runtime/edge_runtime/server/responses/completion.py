"""Responses of /v1/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from edge_runtime.server.engine.jobs import Finished, Output, OutputLogprob
from edge_runtime.server.errors import ApiError
from edge_runtime.server.requests.completions import ApiRequest
from edge_runtime.server.responses.logprobs import completion_logprobs
from edge_runtime.server.responses.response_format import Answer, Json, server_sent
from edge_runtime.server.responses.usage import UsageCount
from edge_runtime.text.channels import Event, Text


class CompletionFormat:
    """One response. A stream has one chunk per piece of text."""

    media_type = "text/event-stream"

    def __init__(self, model: str, request: ApiRequest, fingerprint: str) -> None:
        self._stem = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._request = request
        self._usage = UsageCount(len(request.choices), request.n)
        self._lengths = [0] * len(request.choices)

    def begin(self) -> list[bytes]:
        """Returns nothing: nothing precedes the text."""
        return []

    def output(self, choice: int, output: Output) -> list[bytes]:
        """Returns one chunk."""
        self._usage.update(choice, output.stats)
        return [self._chunk(self._piece(choice, _text_of(output.events), output.logprobs))]

    def end(self, choice: int, finished: Finished) -> list[bytes]:
        """Returns the chunk with the reason."""
        self._usage.update(choice, finished.stats, finished.energy)
        return [self._chunk(self._piece(choice, "", finish=finished.reason))]

    def finish(self) -> list[bytes]:
        """Returns the chunk with the usage, if it was requested, and the end mark."""
        usage = {**self._stem, "choices": [], "usage": self._usage.to_json()}
        return [*([server_sent(usage)] if self._request.usage_at_end else []), b"data: [DONE]\n\n"]

    def failed(self, error: ApiError) -> list[bytes]:
        """Returns the error as an event."""
        return [server_sent(error.to_json())]

    def complete(self, answers: Sequence[Answer]) -> Json:
        """Returns the response with all texts."""
        choices = []
        for i, answer in enumerate(answers):
            self._usage.update(i, answer.finished.stats, answer.finished.energy)
            choices.append(self._piece(i, _text_of(answer.events), answer.logprobs, answer.finished.reason))
        return {**self._stem, "choices": choices, "usage": self._usage.to_json()}

    def _piece(self, choice: int, text: str, logprobs: Sequence[OutputLogprob] = (), finish: str | None = None) -> Json:
        wanted = self._request.choices[0].logprobs is not None
        shown = completion_logprobs(logprobs, self._lengths[choice]) if wanted and (logprobs or finish is None) else None
        self._lengths[choice] += len(text)
        return {"index": choice, "text": text, "logprobs": shown, "finish_reason": finish}

    def _chunk(self, piece: Json) -> bytes:
        value: Json = {**self._stem, "choices": [piece]}
        if self._request.usage_always:
            value["usage"] = self._usage.to_json()
        elif self._request.usage_at_end:
            value["usage"] = None
        return server_sent(value)


def _text_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))
