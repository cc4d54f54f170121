"""Prints what the policy `profit` decides in each round, with the costs and gains it expects on this machine.

python examples/explain_profit.py my-bundle
"""

import sys

import edge_runtime

if len(sys.argv) != 2:
    sys.exit("usage: python examples/explain_profit.py my-bundle")

with edge_runtime.open_session(sys.argv[1]) as session:
    profit = session.profit()  # costs that are kept, else computed ones, which the rounds replace
    if profit is None:
        sys.exit("this session has another policy, or no drafter")
    generation = session.generate(
        "import os\n", max_tokens=64, on_round=edge_runtime.Explain(lambda: profit.last, session.settings.objective, print)
    )
    text = "".join(generation)
    stats = generation.stats
    print(f"\n{stats.tokens} tokens in {stats.rounds} rounds, {stats.tokens_per_second:.0f} tok/s\n{text}")
