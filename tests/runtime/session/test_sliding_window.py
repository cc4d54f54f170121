"""Drafts go on behind the sliding window, and the text is the plain one: E2B's window is 512 tokens, the reference pair's 128."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edge_runtime import LoadOptions, open_session

WINDOW = 128


@pytest.mark.parametrize("backend", ["llama", "onnx"])
@pytest.mark.parametrize("prompt", ["class Stack:\n", "class Stack:\n" + "    x = 1\n" * 60], ids=["grows past it", "begins past it"])
def test_drafts_behind_the_window_leave_the_text(
    backend: str, prompt: str, request: pytest.FixtureRequest, onnx_pair: Callable[[str], Path]
) -> None:
    bundle = request.getfixturevalue("quantized_pair") if backend == "llama" else onnx_pair("int4")
    with open_session(bundle, LoadOptions(backend=backend, threads=1, context=1024, drafter="split")) as session:
        if session.row_kernels is None:
            pytest.skip("rows are exact on the project's own kernels alone, which have no variant for this processor")
        plain = session.generate(prompt, max_tokens=2 * WINDOW, draft_length=0)
        plain.text()
        drafted = session.generate(prompt, max_tokens=2 * WINDOW, draft_length=7)
        accepted = [round_.accepted for round_ in drafted.rounds()]
    assert drafted.tokens == plain.tokens
    assert len(plain.tokens) == 2 * WINDOW
    assert sum(accepted[-len(accepted) // 4 :]) > 0, "the last quarter of the text stands behind the window"
