"""Counts tokens of greedy output with drafts that equal plain decoding, one request at a time and several at once.

python scripts/checks/count_exact.py BUNDLE --backend onnx --tokens 250000
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import click
import numpy as np

import edge_export
from edge_devices.command_line import one_sentence_errors
from edge_runtime.backends.selection import BackendKind
from edge_runtime.session.batch import Sessions
from edge_runtime.session.generation import Generation
from edge_runtime.session.open import open_sessions
from edge_runtime.session.session import Session

PROMPTS = Path(edge_export.__file__).parent / "reference_pair"
# Fixed draft lengths; None is the session's policy, whose lengths change from round to round.
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 9, 12, None)
CONTEXT = 512


class Campaign:
    """Requests of random prompts; each is decoded plainly once and then with drafts of several lengths."""

    def __init__(self, sessions: Sessions, seed: int, tokens: int) -> None:
        self._random = np.random.default_rng(seed)
        self._sessions = sessions
        self._tokens = tokens
        self._texts = [text for name in ("code", "prose") for text in json.loads((PROMPTS / f"prompts.{name}.json").read_text())]
        self.compared = self.different = 0

    def run(self, limit: int) -> Iterator[None]:
        """Compares until `limit` tokens were compared; yields after each group of requests."""
        sessions = self._sessions.sessions
        while self.compared < limit:
            prompts = [self._prompt(session) for session in sessions]
            plain = [self._generate(session, prompt, 0) for session, prompt in zip(sessions, prompts, strict=True)]
            for generation in plain:
                generation.text()
            for length in self._random.permutation(np.array(LENGTHS, object))[:5]:
                drafted = [self._generate(session, prompt, length) for session, prompt in zip(sessions, prompts, strict=True)]
                for _ in self._sessions.run(drafted):
                    pass
                for generation, expected in zip(drafted, plain, strict=True):
                    self._compare(generation.tokens, expected.tokens, length)
            yield

    def _prompt(self, session: Session) -> list[int]:
        text = self._texts[self._random.integers(len(self._texts))]
        ids = session.vocabulary.encode(text)
        extra = self._random.integers(300, session.bundle.manifest.architecture.vocab_size, int(self._random.integers(0, 40)))
        return [*ids, *map(int, extra)][: CONTEXT // 2] if self._random.random() < 0.3 else ids[: CONTEXT // 2]

    def _generate(self, session: Session, prompt: Sequence[int], length: int | None) -> Generation:
        return session.generate(prompt, max_tokens=self._tokens, draft_length=length)

    def _compare(self, tokens: Sequence[int], expected: Sequence[int], length: int | None) -> None:
        self.compared += len(tokens)
        if list(tokens) != list(expected):
            self.different += 1
            at = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), min(len(tokens), len(expected)))
            click.echo(f"drafts of {length}: token {at} of {len(expected)} differs")


@click.command(context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--backend", type=click.Choice(("llama", "onnx")), required=True)
@click.option("--tokens", type=click.IntRange(min=1), default=250_000, help="Tokens to compare.")
@click.option("--requests", type=click.IntRange(1, 16), default=1, help="Requests at once, the drafted ones; llama only.")
@click.option("--length", type=click.IntRange(min=1), default=200, help="Most tokens of a request.")
@click.option("--threads", type=click.IntRange(min=1), default=1)
@click.option("--seed", default=1)
@one_sentence_errors()
def main(bundle: Path, backend: str, tokens: int, requests: int, length: int, threads: int, seed: int) -> None:
    """Compare BUNDLE's greedy output with drafts of any length to plain decoding, token for token."""
    begin = last = time.monotonic()
    with open_sessions(bundle, requests, backend=cast(BackendKind, backend), context=CONTEXT, threads=threads) as sessions:
        campaign = Campaign(sessions, seed, length)
        for _ in campaign.run(tokens):
            if time.monotonic() - last > 60:
                last = time.monotonic()
                click.echo(f"{campaign.compared} tokens after {last - begin:.0f} s, {campaign.different} outputs different")
    click.echo(f"{bundle.name}, {backend}, {requests} at once: {campaign.compared} tokens compared, {campaign.different} outputs different")
    if campaign.different:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
