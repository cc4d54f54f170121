"""Exports a checkpoint pair to a bundle from Python: here the small trained pair that ships with the package.

python examples/export_pair.py my-bundle          (needs edge-mtp[export])
"""

import sys
from pathlib import Path

from edge_export import ExportRequest, export_pair, reference_pair

if len(sys.argv) != 2:
    sys.exit("usage: python examples/export_pair.py my-bundle")


class Lines:
    """Prints a line for each step; a progress bar would use the bytes."""

    def step(self, title: str, total_bytes: int | None) -> None:
        """Prints the title of a step that begins; its size is an estimate."""
        size = f" (about {total_bytes / 1e6:.0f} MB)" if total_bytes else ""
        print(f"{title}{size}", file=sys.stderr)

    def advance(self, done_bytes: int) -> None:
        """Ignores the number of bytes done since the last call."""

    def say(self, sentence: str) -> None:
        """Prints a message."""
        print(sentence, file=sys.stderr)


target, drafter = reference_pair()  # for Gemma 4: "google/gemma-4-E2B-it" and "google/gemma-4-E2B-it-assistant"
bundle = export_pair(
    # verify=True compares the bundle with transformers, if edge-mtp[verify] is installed.
    ExportRequest(target=str(target), drafter=str(drafter), output=Path(sys.argv[1]), target_quantization="q4_0", verify=False),
    Lines(),
)
for file in bundle.manifest.files:
    print(f"{file.role:14} {file.quantization or '-':6} {file.bytes:>10} bytes  {file.path}")
