"""A chat of two turns with a system message. Thoughts and tool calls would be events of their own types.

python examples/chat.py my-bundle
"""

import sys

import edge_runtime

if len(sys.argv) != 2:
    sys.exit("usage: python examples/chat.py my-bundle")

with edge_runtime.open_session(sys.argv[1]) as session:
    chat = edge_runtime.Chat(session, system="You write Python.", max_tokens=40)
    for question in ("How do I open a file?", "And how do I close it?"):
        print(f"> {question}")
        answer = chat.say(question)
        for event in answer:
            if isinstance(event, edge_runtime.Text):
                print(event.text, end="", flush=True)
        # The second turn reuses the K/V rows of the first.
        print(f"\n[{answer.finish}, {answer.stats.reused_tokens} tokens of the prompt were in the cache already]")
