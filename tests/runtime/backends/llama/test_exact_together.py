"""Several sequences in one memory of llama.cpp: rows and answers have the bits they have alone, wherever cells lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kept import shipped_bundle

pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")

from edge_runtime.backends.llama.context import LlamaOptions
from edge_runtime.backends.llama.loader import llama_library
from edge_runtime.backends.llama.target import LlamaTarget
from edge_runtime.bundle.gguf_header import KvType
from edge_runtime.decoding.sampling import SamplingParams
from edge_runtime.session.generation import Generation
from edge_runtime.session.open import open_session, open_sessions
from edge_runtime.session.session import Session

pytestmark = pytest.mark.skipif(llama_library().row_kernels is None, reason=f"stock kernels run: {llama_library().stock_reason}")
PROMPTS = [
    "class Stack:\n    def push(",
    "def add(a, b):\n    return",
    "import os\n\nfor name in os.",
    "# The quick brown",
    "def area(r):",
    "x = [",
]
# More than the sliding layers keep: their cells are written anew, also by the interleaved rows alone (640, there are 512).
LONG = 900


def bundle_of(quantization: str) -> Path:
    pytest.importorskip("gguf", reason="needs edge-mtp[export]")
    return shipped_bundle(target_quantization=quantization)


@pytest.mark.parametrize(("quantization", "kv_type", "threads"), [("q4_0", "f16", 2), ("q4_0", "q4_0", 1), ("q8_0", "q8_0", 1)])
def test_rows_of_interleaved_sequences_have_the_bits_of_each_alone(quantization: str, kv_type: KvType, threads: int) -> None:
    random = np.random.default_rng(4)
    path = next(bundle_of(quantization).glob("target-*.gguf"))
    texts = random.integers(50, 4000, (3, LONG)).tolist()
    with LlamaTarget(path, LlamaOptions(context=1024, threads=threads, draft=False, sequences=3, kv_type=kv_type)) as target:
        sequences = target.shared.sequences
        for item, text, first in zip(sequences, texts, (800, 560, 700), strict=True):
            item.prefill(text[:first])
        while any(item.length < LONG for item in sequences):
            running = [item for item in sequences if item.length < LONG and random.random() < 0.7]
            batches = [(item, texts[item.number][item.length :][: int(random.integers(1, 13))]) for item in running]
            if not batches:
                continue
            rows = target.shared.verify_all(batches)
            last = {item.number: logits[-1].copy() for (item, _), logits in zip(batches, rows, strict=True) if item.length == LONG}
            for item in running:
                if item.number in last:
                    texts[item.number].append(last[item.number])
                elif random.random() < 0.5:
                    item.rollback(item.length - min(item.length, int(random.integers(0, 2))))
    for text, pieces in zip(texts, (LONG - 1, 77, 400), strict=True):  # behind every prefill
        *tokens, result = text
        with LlamaTarget(path, LlamaOptions(context=1024, threads=1, draft=False, kv_type=kv_type)) as target:
            for first in range(0, LONG - 1, pieces):
                target.prefill(tokens[: LONG - 1][first : first + pieces])
            assert np.array_equal(target.verify(tokens[-1:])[0], result), pieces


@pytest.mark.parametrize(("quantization", "draft_length"), [("q4_0", 0), ("q4_0", 4), ("q4_0", None), ("q8_0", 4)])
def test_four_clients_get_the_answers_of_each_request_alone(quantization: str, draft_length: int | None) -> None:
    bundle = bundle_of(quantization)
    drawn = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, seed=1)]

    def started(session: Session, number: int) -> Generation:
        prompt, sampling = PROMPTS[number % len(PROMPTS)], drawn[number // len(PROMPTS)]
        # Prefixes in a session's cache are used: rows behind them have the same bits.
        return session.generate(
            prompt, max_tokens=12 + number, sampling=sampling, draft_length=draft_length, acceptance="coupled", reuse_prefix=True
        )

    count = len(PROMPTS) * len(drawn)
    expected = []
    with open_session(bundle, backend="llama", context=512, threads=1) as alone:
        for number in range(count):
            generation = started(alone, number)
            generation.text()
            expected.append(generation.tokens)
    with open_sessions(bundle, 4, backend="llama", context=512, threads=1) as sessions:
        batch = [started(sessions.sessions[number % 4], number) for number in range(count)]
        list(sessions.run(batch))
    assert [item.tokens for item in batch] == expected
