"""One call for one answer: opens a bundle, runs one request and closes it again."""

from __future__ import annotations

from pathlib import Path

from edge_runtime.decoding.sampling import SamplingParams
from edge_runtime.session.chat import MAX_TOKENS, Chat
from edge_runtime.session.generation import GREEDY_PARAMS
from edge_runtime.session.load_options import LoadOptions
from edge_runtime.session.open import open_session


def generate(
    bundle: Path | str,
    prompt: str,
    *,
    max_tokens: int = 128,
    sampling: SamplingParams = GREEDY_PARAMS,
    options: LoadOptions | None = None,
) -> str:
    """Returns the text that continues `prompt`, without a chat template. `options` are those of `open_session`, which raises the same.

    Opening takes most of the time of a short request: keep a session open for several.
    """
    with open_session(bundle, options) as session:
        return session.generate(prompt, max_tokens=max_tokens, sampling=sampling).text()


def chat(
    bundle: Path | str,
    message: str,
    *,
    system: str | None = None,
    max_tokens: int = MAX_TOKENS,
    sampling: SamplingParams = GREEDY_PARAMS,
    options: LoadOptions | None = None,
) -> str:
    """Returns the model's answer to one message, through the bundle's chat template. Otherwise as `generate`."""
    with open_session(bundle, options) as session:
        return Chat(session, system=system, max_tokens=max_tokens, sampling=sampling).say(message).read()
