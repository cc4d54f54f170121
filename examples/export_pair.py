"""Exports a checkpoint pair to a bundle from Python: here the small trained pair that ships with the package.

python examples/export_pair.py my-bundle          (needs edge-mtp[export-onnx])
"""

import sys
from pathlib import Path

from edge_export import ExportRequest, OnnxRequest, export_pair, reference_pair

if len(sys.argv) != 2:
    sys.exit("usage: python examples/export_pair.py my-bundle")


target, drafter = reference_pair()  # for Gemma 4: "google/gemma-4-E2B-it" and "google/gemma-4-E2B-it-assistant"
bundle = export_pair(
    # ONNX graphs need wheels only; gguf=True writes GGUF files for llama.cpp, which edge-mtp[llama,export] compiles. verify=True compares
    # the bundle with transformers, if edge-mtp[verify] is installed.
    ExportRequest(target=str(target), drafter=str(drafter), output=Path(sys.argv[1]), gguf=False, onnx=OnnxRequest(), verify=False),
    print,  # a line for each step; an object with the methods of edge_export.Progress could draw a bar
)
for file in bundle.manifest.files:
    print(f"{file.role:14} {file.quantization or '-':6} {file.bytes:>10} bytes  {file.path}")
