"""Prints text as soon as its tokens are accepted, with a mark after each round, and stops early.

python examples/stream.py my-bundle
"""

import sys

import edge_runtime

if len(sys.argv) != 2:
    sys.exit("usage: python examples/stream.py my-bundle")

rounds: list[edge_runtime.Round] = []

with edge_runtime.open_session(sys.argv[1]) as session:
    generation = session.generate("def area(width, height):\n", max_tokens=200, draft_length=4, on_round=rounds.append)
    for number, piece in enumerate(generation):
        print(piece, end="|", flush=True)  # text between two marks is from one target forward
        if number == 20:
            break  # leaving the loop cancels the generation; the session can be used again at once

print(f"\n{len(rounds)} rounds, {sum(len(done.tokens) for done in rounds)} tokens")
