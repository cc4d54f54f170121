"""A Gemma-style BPE tokenizer: spaces become U+2581, byte fallback, no pre-tokenizer at run time.

The pieces are learned inside words, runs of spaces and runs of newlines, as Gemma's are, but the saved tokenizer merges
over the whole text, as Gemma's does: llama.cpp's `gemma4` vocabulary does the same and splits at newlines only.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

# Ids 0-3 and the marks of Gemma 4's chat format, thinking channel and tool calls.
CONTROL_TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|think|>"]
_TOOLS = ["<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>']
VISIBLE_TOKENS = ["<|channel>", "<channel|>", *_TOOLS]
SPECIAL_TOKENS = CONTROL_TOKENS + VISIBLE_TOKENS
NAMED_TOKENS = {"<pad>", "<eos>", "<bos>", "<unk>", "<mask>"}
BYTE_TOKENS = [f"<0x{b:02X}>" for b in range(256)]
NEWLINE_RUNS = 16
# Pieces never cross these borders while they are learned. Digits stay single, as in Gemma.
LEARNING_SPLIT = r"\n+|▁▁+|▁?[A-Za-z]+|▁?_+|[0-9]|▁?[^\sA-Za-z0-9▁_]+|▁|[\t\r\f\v]+"

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}"
    "{{ message['content'] | trim + '<turn|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"
)


def learn_merges(texts: Iterable[str], vocab_size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Learns `vocab_size` pieces; returns piece -> id and the merges in order of rank."""
    learner = Tokenizer(BPE())
    learner.normalizer = normalizers.Replace(" ", "▁")
    learner.pre_tokenizer = pre_tokenizers.Split(Regex(LEARNING_SPLIT), behavior="isolated")
    reserved = SPECIAL_TOKENS + BYTE_TOKENS
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=reserved,
        min_frequency=2,
        max_token_length=16,
        limit_alphabet=110,
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    model = json.loads(learner.to_str())["model"]
    return _with_newline_runs(model["vocab"], [(a, b) for a, b in model["merges"]], vocab_size)


def _with_newline_runs(vocab: dict[str, int], merges: list[tuple[str, str]], size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Every run of up to NEWLINE_RUNS newlines is one piece, as in Gemma; the rarest learned pieces make room."""
    # Every split of a run is a merge, shortest runs first, so that merging always ends in the one piece of the whole run.
    newline_merges = [("\n" * a, "\n" * (n - a)) for n in range(2, NEWLINE_RUNS + 1) for a in range(n - 1, 0, -1)]
    merges = [m for m in merges if "\n" not in m[0]]
    runs = ["\n" * n for n in range(1, NEWLINE_RUNS + 1)]
    kept = [piece for piece, _ in sorted(vocab.items(), key=lambda item: item[1]) if "\n" not in piece]
    pieces = (kept[: len(SPECIAL_TOKENS) + 256] + runs + kept[len(SPECIAL_TOKENS) + 256 :])[:size]
    known = set(pieces)
    merges = [m for m in newline_merges + merges if m[0] in known and m[1] in known and m[0] + m[1] in known]
    return {piece: i for i, piece in enumerate(pieces)}, merges


def build(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Returns the tokenizer with exactly `vocab_size` pieces."""
    vocab, merges = learn_merges(texts, vocab_size)
    if len(vocab) != vocab_size:
        raise ValueError(f"the corpus gave {len(vocab)} pieces, fewer than the {vocab_size} asked for: add text or ask for fewer")
    tokenizer = assembled(vocab, merges)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL_TOKENS])
    return tokenizer


def assembled(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> Tokenizer:
    """Returns a tokenizer of these pieces that splits and joins as Gemma's does, without marks."""
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json, its config and the chat template as a Gemma 4 checkpoint carries them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "extra_special_tokens": [t for t in SPECIAL_TOKENS if t not in NAMED_TOKENS],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE + "\n")


def copy(source: Path, folder: Path, *, size: int = 0) -> None:
    """Copies the tokenizer's files of a checkpoint folder, filled up with unused pieces to `size` of them, as Gemma's has them."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, folder / name)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    pieces = tokenizer["model"]["vocab"]
    if size > len(pieces):
        pieces |= {f"<unused{i}>": i for i in range(len(pieces), size)}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
