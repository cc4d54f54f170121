"""Serves a bundle and sends a request with OpenAI's client.

python examples/openai_client.py my-bundle          (needs edge-mtp[serve] and openai)
"""

import subprocess
import sys

from openai import OpenAI

if len(sys.argv) != 2:
    sys.exit("usage: python examples/openai_client.py my-bundle")

# --port 0 takes a free port, which the server prints on standard error.
command = ["edge-run", "serve", sys.argv[1], "--port", "0"]
with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
    assert server.stderr is not None
    try:
        url = next(line.split("serving at ")[1].split()[0] for line in server.stderr if "serving at " in line)
        client = OpenAI(base_url=f"{url}/v1", api_key="none")
        stream = client.chat.completions.create(
            model="my-bundle",
            messages=[{"role": "user", "content": "Write a class."}],
            max_tokens=48,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
            elif chunk.usage:
                usage = chunk.usage.model_dump()
                print(f"\n{usage['completion_tokens']} tokens, {usage['accepted_tokens']} of {usage['drafted_tokens']} drafts accepted")
    finally:
        server.terminate()
