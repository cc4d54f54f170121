"""The held-out texts as a checkpoint's own tokenizer and transformers read them.

Run as a module it writes them for a program that may not import this package: edge-bench quality.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edge_devices.command_line import one_sentence_errors
from edge_export.checkpoint.sources import resolve_target
from edge_export.errors import ParityError
from edge_export.parity.reference import inference, load_reference, run_target, tokenizer_of, why_no_reference
from edge_runtime.decoding.quality import KINDS, held_out_text, write_reference

# Tokens of each text that an export is judged by, so rows of all: 3 * (176 - 9) = 501.
TEXT_TOKENS = 176


def held_out_tokens(tokenizer: Any, count: int) -> dict[str, list[int]]:
    """The texts by kind as this tokenizer (of transformers) reads them, the first `count` tokens of each."""
    begin: list[int] = tokenizer.encode("", add_special_tokens=True)
    return {kind: [*begin, *tokenizer.encode(held_out_text(kind), add_special_tokens=False)][:count] for kind in KINDS}


@click.command()
@click.argument("target")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("count", type=int)
@click.argument("threads", type=int)
@one_sentence_errors()
def main(target: str, folder: Path, count: int, threads: int) -> None:
    """Writes the first `count` tokens of each text, and the checkpoint's logits behind them, for `read_reference`."""
    source = resolve_target(target)
    if (reason := why_no_reference(source.checkpoint.parameters)) is not None:
        raise ParityError(f"{target} cannot be the reference: {reason}")
    model, texts = load_reference(source.path, source.checkpoint.weights), held_out_tokens(tokenizer_of(source), count)
    with inference(threads):
        for kind, tokens in texts.items():
            logits, _ = run_target(model, tokens, len(tokens), len(tokens))
            write_reference(folder, kind, tokens, [logits.float().numpy()])


if __name__ == "__main__":
    main()
