"""Measures importance: runs a pair in transformers on a text and sums the squares of every matrix's inputs.

With parity/reference.py the only module that imports torch and transformers, and only when it runs them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_devices.files.limited_read import read_at_most
from edge_export.checkpoint.published.tensor_prefixes import text_name
from edge_export.checkpoint.tokenizer_vocabulary import TOKENIZER_NAME
from edge_export.errors import ExportError, ParityError
from edge_export.gguf.tensor_names import gguf_name, stays_float32
from edge_export.parity.reference import DRAFT_LENGTH, ReferenceRows, Weights, load_reference, why_no_reference
from edge_export.quantization.importance import ChannelSums
from edge_runtime.bundle.manifest import ImportanceSource

MAX_TEXT_BYTES = 64 << 20
# Tokens per forward (as llama-imatrix), and the most forwards of a long text, evenly spread over it.
CHUNK = 512
MAX_CHUNKS = 64
# Tokens of a chunk from one draft to the next.
DRAFT_EVERY = 32
_HEAD = "token_embd.weight"


@dataclass(frozen=True, kw_only=True)
class CalibrationRequest:
    """The pair and the text. Without a drafter folder only the target is measured; window and context are the target's, in tokens."""

    target_folder: Path
    drafter_folder: Path | None
    tokenizer_folder: Path
    text: Path
    parameters: int
    window: int
    context: int
    threads: int
    target_weights: Weights | None = None
    drafter_weights: Weights | None = None


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Sums by GGUF tensor name; the drafter's are empty if none was given. `chunk` is in tokens."""

    source: ImportanceSource
    target: dict[str, ChannelSums]
    drafter: dict[str, ChannelSums]
    chunk: int


def read_text(path: Path, purpose: str = "calibration text") -> tuple[str, ImportanceSource]:
    """Returns a text of the user and its entry for the manifest. Raises ExportError if it is not text, empty, or far too long."""
    try:
        data = read_at_most(path, MAX_TEXT_BYTES)
    except OSError as error:
        raise ExportError(
            f"the {purpose} {path} cannot be read ({error.strerror or error}); give a text file, a few hundred kB are enough"
        ) from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ExportError(f"{path} is not UTF-8 text (byte {error.start}); give the {purpose} as plain text") from error
    if not text.strip():
        raise ExportError(f"the {purpose} {path} is empty; give text of the kind the model will read, a few hundred kB of it")
    digest = hashlib.sha256(data).hexdigest()
    return text, ImportanceSource(kind="calibration", name=path.name, bytes=len(data), sha256=digest)


def calibrate(request: CalibrationRequest, progress: Callable[[int], None] = lambda _: None) -> Calibration:
    """Runs the pair on the text in float32; `progress` gets the bytes of text done since its last call.

    Raises ExportError if the text is unusable or too short, or if torch, transformers or the memory for the pair is missing.
    """
    text, source = read_text(request.text)
    reason = why_no_reference(request.parameters)
    if reason is not None:
        raise ExportError(f"calibration runs the checkpoint in transformers, but {reason}; make an importance matrix elsewhere (--imatrix)")
    chunks = _chunks(request, text)
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(request.threads)
    try:
        with torch.inference_mode():
            sums = _run(request, chunks, lambda index: progress(_share(source.bytes, index, len(chunks))))
    except ParityError as error:
        raise ExportError(f"calibration failed: {error}") from error
    finally:
        torch.set_num_threads(threads)
    tokens = sum(len(chunk) for chunk in chunks)
    made = ImportanceSource(kind=source.kind, name=source.name, bytes=source.bytes, sha256=source.sha256, tokens=tokens)
    return Calibration(source=made, target=sums[0].entries(), drafter=sums[1].entries(), chunk=len(chunks[0]))


def _share(total: int, index: int, parts: int) -> int:
    """The size of the part with this index; all parts add up to `total`."""
    return total * (index + 1) // parts - total * index // parts


def _chunks(request: CalibrationRequest, text: str) -> list[list[int]]:
    """The text's tokens in pieces of equal length, each after the tokenizer's start tokens."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(request.tokenizer_folder / TOKENIZER_NAME))
    begin: list[int] = tokenizer.encode("", add_special_tokens=True)
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    length = min(CHUNK, request.context) - len(begin)
    if len(tokens) < length:
        raise ExportError(f"the calibration text {request.text} has {len(tokens)} tokens, at least {length} are needed; give a longer one")
    count = min(len(tokens) // length, MAX_CHUNKS)
    starts = np.linspace(0, len(tokens) - length, count).astype(int)
    return [[*begin, *tokens[start : start + length]] for start in starts]


def _run(request: CalibrationRequest, chunks: list[list[int]], done: Callable[[int], None]) -> tuple[_Sums, _Sums]:
    import torch

    target, drafter = load_reference(request.target_folder, request.target_weights), None
    if request.drafter_folder is not None:
        drafter = load_reference(request.drafter_folder, request.drafter_weights)
        # The dense head has the same input row as the sparse one.
        drafter.config.use_ordered_embeddings = False
    sums = _Sums(), _Sums()
    with _listening(target, sums[0]), _listening(drafter, sums[1]):
        for index, tokens in enumerate(chunks):
            output = target(
                input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True, return_shared_kv_states=True, logits_to_keep=1
            )
            rows = ReferenceRows(target.get_input_embeddings(), output.hidden_states[-1], dict(output.shared_kv_states), request.window - 1)
            # The head ran on one row only: all logits of a chunk would be hundreds of megabytes.
            sums[0].add(_HEAD if _tied(target) else "output.weight", rows.hidden)
            if drafter is not None:
                _draft(drafter, rows, tokens)
            done(index)
    return sums


def _draft(drafter: Any, rows: ReferenceRows, tokens: list[int]) -> None:
    """Drafts greedily as decoding does: each step continues with its own token and hidden row, at the position of the first."""
    import torch

    for position in range(DRAFT_EVERY, len(tokens), DRAFT_EVERY):
        last, hidden, shared = tokens[position], rows.hidden[:, position - 1 : position], rows.before(position)
        for _ in range(DRAFT_LENGTH):
            output = drafter(
                inputs_embeds=torch.cat([rows.embed(torch.tensor([[last]])), hidden], dim=-1),
                position_ids=torch.tensor([[position]]),
                shared_kv_states=shared,
                use_cache=False,
            )
            last, hidden = int(output.logits[0, -1].argmax()), output.last_hidden_state


class _Sums:
    """Adds up the squares of rows, by GGUF tensor name."""

    def __init__(self) -> None:
        self._sums: dict[str, NDArray[np.float64]] = {}
        self._counts: dict[str, NDArray[np.float64]] = {}

    def add(self, name: str, rows: Any, expert: int = 0, experts: int = 1) -> None:
        """Adds rows [..., K] that were multiplied with this matrix, or with this expert of it."""
        flat = rows.reshape(-1, rows.shape[-1]).float()
        if name not in self._sums:
            self._sums[name], self._counts[name] = np.zeros((experts, flat.shape[1])), np.zeros(experts)
        self._sums[name][expert] += (flat * flat).sum(0).double().numpy()
        self._counts[name][expert] += len(flat)

    def entries(self) -> dict[str, ChannelSums]:
        """All that was added."""
        return {name: ChannelSums(sums=self._sums[name].reshape(-1), counts=self._counts[name]) for name in self._sums}


@contextmanager
def _listening(model: Any, sums: _Sums) -> Iterator[None]:
    """Hooks `sums` to the inputs of every matrix that a GGUF of the model quantizes; a tied head's rows count for the embedding."""
    import torch

    hooks = []
    for name, module in model.named_modules() if model is not None else ():
        if isinstance(module, torch.nn.Linear):
            short = gguf_name(_text_name(f"{name}.weight"))
            if name == "lm_head":
                # A drafter's head runs on every row that counts, a target's does not (see _run).
                short = _HEAD if _tied(model) and hasattr(model, "pre_projection") else None
            if short is not None and not stays_float32(short, 2):
                hooks.append(module.register_forward_pre_hook(partial(_add_inputs, sums, short)))
        elif name.endswith(".experts") and hasattr(module, "gate_up_proj"):
            names = tuple(gguf_name(_text_name(f"{name}.{weight}")) or "" for weight in ("gate_up_proj", "down_proj"))
            hooks.append(module.register_forward_pre_hook(partial(_add_inputs_experts, sums, names)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _add_inputs(sums: _Sums, name: str, _module: Any, inputs: tuple[Any, ...]) -> None:
    sums.add(name, inputs[0])


def _add_inputs_experts(sums: _Sums, names: tuple[str, ...], module: Any, inputs: tuple[Any, ...]) -> None:
    """Experts are one module with 3-D weights, so the inputs of their second matrix are computed here again."""
    from torch.nn.functional import linear

    rows, chosen = inputs[0], inputs[1]
    experts = len(module.gate_up_proj)
    for expert in chosen.unique().tolist():
        taken = rows[(chosen == expert).any(dim=-1)]
        gate, up = linear(taken, module.gate_up_proj[expert]).chunk(2, dim=-1)
        sums.add(names[0], taken, expert, experts)
        sums.add(names[1], module.act_fn(gate) * up, expert, experts)


def _text_name(name: str) -> str:
    """The name that a weight of transformers' model has in a text-only one."""
    return text_name(name, multimodal=False) or name


def _tied(model: Any) -> bool:
    return bool(model.lm_head.weight is model.get_input_embeddings().weight)
