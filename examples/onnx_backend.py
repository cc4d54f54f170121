"""Runs ONNX graphs on ONNX Runtime instead of GGUF files on llama.cpp, with the same API.

edge-export reference --output onnx-bundle --format onnx
python examples/onnx_backend.py onnx-bundle          (needs edge-mtp[onnx])
"""

import sys

import edge_runtime

if len(sys.argv) != 2:
    sys.exit("usage: python examples/onnx_backend.py onnx-bundle")

with edge_runtime.open_session(sys.argv[1], backend="onnx", device="cpu", threads=1) as session:
    generation = session.generate("def fibonacci(n):", max_tokens=48)
    print("".join(generation))
    print(f"{generation.stats.tokens_per_second:.0f} tok/s on {session.drafter_kind} drafts")
