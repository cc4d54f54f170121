"""Tries a bundle in a child process first, where this process has a limit of address space (`ulimit -v`).

llama.cpp and ggml abort the process when certain allocations fail, and which ones will fail cannot be foreseen. The child gets as much
address space as this process has left, opens the bundle as this process would, and computes its largest forwards.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from edge_devices.children import Limits, limit_process, limited_command, print_answer, run_child
from edge_devices.errors import byte_text
from edge_devices.machine.memory import mapped_bytes, share_one_arena
from edge_runtime.backends.llama.context import LlamaOptions
from edge_runtime.backends.llama.loader import llama_library
from edge_runtime.backends.llama.pair import open_with_drafter
from edge_runtime.bundle.bundle import Bundle, open_bundle
from edge_runtime.drafting.policies import DrafterKind
from edge_runtime.errors import BackendError

TIMEOUT_SECONDS = 300.0
CHILD_COMMAND = limited_command("edge_runtime.backends.llama.memory_trial")
# Reserved for what this process maps between the trial and its own forwards: thread stacks, text buffers.
_KEPT_BYTES = 32 << 20


def try_in_child(folder: Path, options: LlamaOptions, drafter: DrafterKind | None, left: int) -> None:
    """Opens the bundle and computes in a child that may map `left` bytes, less a reserve for this process.

    Raises BackendError with the reason if the child fails.
    """
    setup = {"folder": str(folder.resolve()), "options": asdict(options), "drafter": drafter, "bytes": max(0, left - _KEPT_BYTES)}
    child = run_child([*CHILD_COMMAND, json.dumps(setup)], seconds=TIMEOUT_SECONDS, failure=BackendError)
    if child.answer.get("alive") is not True:
        reason = child.answer.get("error") or child.reason or f"a trial in a child process {child.end or 'gave no answer'}"
        raise BackendError(
            f"{byte_text(left)} of address space are left (ulimit -v), with which this bundle does not run: {reason};"
            " raise that limit or ask for a smaller context"
        )


def open_and_compute(bundle: Bundle, options: LlamaOptions, drafter_kind: DrafterKind | None) -> None:
    """Runs in the child: opens a bundle, decodes one row, a whole batch and the longest verify, and drafts. BackendError, or crashes."""
    target, drafter, _ = open_with_drafter(bundle, options, drafter_kind)
    with target:
        first = max(target.vocabulary.bos, 0)
        rows = options.max_draft_length + 1
        target.verify([first])
        target.prefill([first] * max(1, min(options.batch, options.context - rows - 2)))
        if options.context > rows + 2:
            target.verify([first] * rows)
        if drafter is not None:
            drafter.draft(first, 1)


def main() -> dict[str, object]:
    """Runs in the child: reads the setup from its argument, limits its own address space, opens the bundle and computes."""
    setup: dict[str, Any] = json.loads(sys.argv[1])
    share_one_arena()
    llama_library()  # loaded before the limit is set, because the parent has loaded it already
    limit_process(Limits(memory_bytes=(mapped_bytes() or 0) + setup["bytes"]))
    bundle = open_bundle(setup["folder"], check="none")
    open_and_compute(bundle, LlamaOptions(**setup["options"]), cast("DrafterKind | None", setup["drafter"]))
    return {"alive": True}


if __name__ == "__main__":
    print_answer(main)
