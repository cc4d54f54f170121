"""Runs a bundle on some prompts and prints tokens, drafts and acceptance as JSON: drafts_of.py BUNDLE BACKEND DRAFTER MAX_TOKENS PROMPT...

The same file runs here and on an emulated device, so that both can be compared token for token.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def drafts_of(bundle: Path, backend: Any, drafter: Any, max_tokens: int, prompts: list[str]) -> list[dict[str, Any]]:
    """Each prompt's tokens, and of each round of drafts of 3 the drafts and how many were accepted."""
    from edge_runtime.session.open import open_session

    result = []
    with open_session(bundle, backend=backend, drafter=drafter, threads=1, context=256) as session:
        assert session.drafter is not None
        draft, drafted = session.drafter.draft, []

        def watched(*arguments: Any) -> list[int]:
            tokens = draft(*arguments)
            drafted.append([int(token) for token in tokens])
            return tokens

        session.drafter.draft = watched  # type: ignore[method-assign]
        for prompt in prompts:
            drafted.clear()
            generation = session.generate(prompt, max_tokens=max_tokens, draft_length=3)
            accepted = [item.accepted for item in generation.rounds()]
            result.append({"tokens": [int(token) for token in generation.tokens], "drafts": list(drafted), "accepted": accepted})
    return result


if __name__ == "__main__":
    folder, backend, drafter, count, *prompts = sys.argv[1:]
    print(json.dumps(drafts_of(Path(folder), backend, drafter, int(count), prompts)))
