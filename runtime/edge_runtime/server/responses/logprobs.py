"""Log probabilities in the formats of the APIs."""

from __future__ import annotations

from collections.abc import Sequence

from edge_runtime.server.engine.jobs import OutputLogprob
from edge_runtime.server.responses.response_format import Json

# JSON has no infinity; the API's own value for tokens that cannot occur.
_LOWEST = -9999.0


def chat_logprobs(entries: Sequence[OutputLogprob]) -> list[Json]:
    """Returns `logprobs.content` of /v1/chat/completions, which /v1/responses has too."""
    return [
        {**_one(entry.piece, entry.logprob), "top_logprobs": [_one(piece, logprob) for piece, logprob in entry.top]} for entry in entries
    ]


def completion_logprobs(entries: Sequence[OutputLogprob], offset: int) -> Json:
    """Returns `logprobs` of /v1/completions; `offset` is the number of characters before the first entry."""
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(_text(entry.piece))
    return {
        "tokens": [_text(entry.piece) for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [{_text(piece): _finite(logprob) for piece, logprob in entry.top} for entry in entries],
        "text_offset": offsets,
    }


def _one(piece: bytes, logprob: float) -> Json:
    return {"token": _text(piece), "logprob": _finite(logprob), "bytes": list(piece)}


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
