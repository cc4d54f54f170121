"""Generates text with and without drafts, and prints speed and acceptance rate.

python examples/generate.py my-bundle
"""

import sys

import edge_runtime

if len(sys.argv) != 2:
    sys.exit("usage: python examples/generate.py my-bundle")

with edge_runtime.open_session(sys.argv[1]) as session:
    for draft_length in (0, 3):  # left out, the policy `profit` chooses the length before each round
        generation = session.generate("class Stack:", max_tokens=48, draft_length=draft_length)
        text = "".join(generation)
        stats = generation.stats
        print(f"draft length {draft_length}: {stats.tokens} tokens, {stats.tokens_per_second:.0f} tok/s", end="")
        print(f", {stats.acceptance_rate:.0%} of the drafts accepted" if stats.drafted else "")
    print(text)
