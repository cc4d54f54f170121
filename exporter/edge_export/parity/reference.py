"""Runs the reference for comparisons, which is transformers on the checkpoint in float32, and measures how far logits differ from it.

torch and transformers are imported only in the functions that run a model, so that a plan or --help needs neither.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from edge_devices.command_line import one_sentence_errors
from edge_devices.errors import byte_text
from edge_devices.machine.device_package import installed_version
from edge_devices.machine.memory import available_memory_bytes
from edge_export.checkpoint.architecture import HEAD, TextArchitecture
from edge_export.checkpoint.sources import ResolvedSource, resolve_target
from edge_export.checkpoint.tokenizer_vocabulary import TOKENIZER_NAME
from edge_export.errors import ParityError
from edge_runtime.decoding.quality import KINDS, agrees, divergence_of, held_out_text, log_softmax, write_reference

Rows = NDArray[np.float32]
# transformers has had the assistant since 5.19. Only 5.23.0 cannot build it ("cache-producing layer types").
FIRST_TRANSFORMERS, UNFIT_TRANSFORMERS, END_TRANSFORMERS = (5, 19), (5, 23), (5, 25)
SEED = 20260101
# The number of rows whose logits are compared. As many tokens as the sliding window holds are before them, so that its edge is tested.
ROWS = 64
MIN_CONTEXT = ROWS + 16
MAX_WINDOW = 1024
DRAFT_LENGTH = 3
# Memory relative to the float32 weights. The rest is activations, the export's pages, and towers of other modalities, which transformers
# loads as well.
MEMORY_MARGIN = 1.2
TEXT = """The reader opens the file once, looks at the first bytes and decides what it is dealing with. If the size does not fit what the
header promises, it says so and stops: a wrong answer that looks right costs more than no answer at all.

def running_mean(values, width):
    total, means = 0.0, []
    for index, value in enumerate(values):
        total += value
        if index >= width:
            total -= values[index - width]
        means.append(total / min(index + 1, width))
    return means
"""
REFUSED = "the bundle is refused (--no-verify skips this check)"
# Weights that the comparison does not use: those of other modalities, tied heads, and the sparse head.
_NOT_COMPARED = re.compile(r"vision|audio|lm_head|masked_embedding")


# Functions that read one tensor each, by names of a text-only checkpoint.
Weights = Mapping[str, Callable[[], NDArray[Any]]]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A pair of checkpoints to run in transformers, in float32 on `threads` threads. `context` is the export's context length."""

    target: ResolvedSource
    drafter: ResolvedSource
    threads: int
    context: int

    @property
    def parameters(self) -> int:
        """The number of weights of both models."""
        return self.target.checkpoint.parameters + self.drafter.checkpoint.parameters

    @property
    def architecture(self) -> TextArchitecture:
        """The target's architecture."""
        return self.target.checkpoint.architecture

    def tokenizer(self) -> Any:
        """Returns the target's own tokenizer, run by transformers."""
        return tokenizer_of(self.target)

    def load_target(self) -> Any:
        """Loads the target; see `load_reference`."""
        return load_reference(self.target.path, self.target.checkpoint.weights)

    def load_drafter(self) -> Any:
        """Loads the drafter; see `load_reference`."""
        return load_reference(self.drafter.path, self.drafter.checkpoint.weights)


@dataclass(frozen=True, kw_only=True)
class Rowset:
    """The results of one implementation: logits [ROWS, vocabulary], and drafts of DRAFT_LENGTH tokens, `drafts[i]` at `contexts[i]`.

    `confidence` holds counts about its drafter's confidence (see comparison.py), and `texts` the logits of texts by name.
    """

    logits: Rows
    contexts: tuple[int, ...]
    drafts: tuple[tuple[int, ...], ...]
    confidence: dict[str, Any] | None = None
    texts: Mapping[str, Rows] = field(default_factory=dict)


def tokenizer_of(source: ResolvedSource) -> Any:
    """Returns a checkpoint's own tokenizer, run by transformers."""
    from transformers import PreTrainedTokenizerFast

    assert source.tokenizer is not None  # only a GGUF source has no tokenizer here
    return PreTrainedTokenizerFast(tokenizer_file=str(source.tokenizer.folder / TOKENIZER_NAME))


def why_not(reference: Reference, library: str, extra: str) -> str | None:
    """Returns the reason why parity cannot be measured here, or None if it can. Imports nothing heavy.

    `library` runs the export, and `extra` is the extra of edge-mtp that installs it.
    """
    if reference.context < MIN_CONTEXT:
        return f"the comparison takes {MIN_CONTEXT} tokens, the context is {reference.context}"
    reason = why_no_reference(reference.parameters)
    if reason is None and installed_version(library) is None:
        return f"{library} is not installed; pip install 'edge-mtp[{extra}]' to run the export"
    return reason


def why_no_reference(parameters: int) -> str | None:
    """Returns the reason why transformers cannot run this many parameters in float32 here, or None. Imports nothing heavy."""
    return why_no_run(int(4 * parameters * MEMORY_MARGIN), "the float32 reference")


def why_no_run(needed: int, what: str) -> str | None:
    """Returns the reason why transformers cannot run `what`, which needs `needed` bytes, here, or None. Imports nothing heavy."""
    for package in ("torch", "transformers"):
        if installed_version(package) is None:
            return f"{package} is not installed; pip install 'edge-mtp[verify]' to compare with the reference"
    installed = installed_version("transformers") or ""
    release = tuple(int(part) for part in re.findall(r"\d+", installed)[:2])
    if not FIRST_TRANSFORMERS <= release < END_TRANSFORMERS or release == UNFIT_TRANSFORMERS:
        return (
            f"transformers {installed} is not known to build the Gemma 4 assistant, 5.19 to 5.22.2 and 5.24 can; "
            "pip install 'edge-mtp[verify]'"
        )
    free = available_memory_bytes()
    if free is not None and needed > free:
        return f"{what} needs {byte_text(needed)} of memory, {byte_text(free)} are available"
    return None


def parity_tokens(reference: Reference) -> list[int]:
    """Returns the tokens to compare: TEXT, after random tokens of it (with a fixed seed), as many as the window or the context holds."""
    tokenizer = reference.tokenizer()
    ids: list[int] = tokenizer.encode(TEXT, add_special_tokens=False)
    begin: list[int] = tokenizer.encode("", add_special_tokens=True)
    text = [ids[i % len(ids)] for i in range(ROWS + 1)]
    shuffled = min(reference.architecture.window, MAX_WINDOW, reference.context - len(begin) - len(text))
    chosen = np.random.default_rng(SEED).integers(len(ids), size=shuffled)
    return [*begin, *(ids[i] for i in chosen), *text]


def reference_rows(
    reference: Reference, tokens: list[int], texts: Mapping[str, list[int]], rowsets: list[Rowset], *, as_llama: bool
) -> tuple[Rows, dict[str, Rows], list[float]]:
    """Returns the reference's logits [ROWS, vocabulary], its logits of each text, and the share of equal drafts for each row set.

    The shares are of drafted tokens that equal the assistant's. `as_llama` makes the assistant compute what llama.cpp computes: with the
    dense head, and with two rows less in the window.
    """
    with inference(reference.threads):
        window = reference.architecture.window - 1 if as_llama else len(tokens)
        target = reference.load_target()
        logits, rows = run_target(target, tokens[:-1], ROWS, window)
        text_logits = {name: run_target(target, text, len(text), window)[0].float().numpy() for name, text in texts.items()}
        assistant = reference.load_drafter()
        if as_llama:
            assistant.config.use_ordered_embeddings = False
        agreements = [_agreement(assistant, rows, tokens, rowset) for rowset in rowsets]
        return logits.float().numpy(), text_logits, agreements


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Makes torch use `count` threads inside the block."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def inference(threads: int) -> Iterator[None]:
    """Runs models inside the block without gradients, on `threads` threads."""
    import torch

    with torch_threads(threads), torch.inference_mode():
        yield


def run_target(target: Any, tokens: list[int], rows: int, window: int) -> tuple[Any, ReferenceRows]:
    """Runs a target on tokens. Returns the logits [rows, vocabulary] of the last ones, and the assistant's inputs."""
    import torch

    output = target(
        input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True, return_shared_kv_states=True, logits_to_keep=rows
    )
    return output.logits[0], ReferenceRows(target.get_input_embeddings(), output.hidden_states[-1], dict(output.shared_kv_states), window)


@dataclass(frozen=True)
class ReferenceRows:
    """Inputs of the assistant: the embedding, hidden rows [1, T, hidden], K/V [1, heads, T, head_dim] by layer type.

    `window` is the number of rows that its sliding layers get. The assistant masks rows beyond its own window.
    """

    embed: Any
    hidden: Any
    shared: dict[str, tuple[Any, Any]]
    window: int

    def before(self, position: int) -> dict[str, tuple[Any, Any]]:
        """Returns the K/V rows for a query at `position`: all rows before it, and on sliding layers only the last `window` of them."""
        first = {"sliding_attention": max(0, position - self.window)}
        return {kind: tuple(rows[:, :, first.get(kind, 0) : position] for rows in pair) for kind, pair in self.shared.items()}


def draft_steps(assistant: Any, rows: ReferenceRows, token: int, position: int) -> Generator[Any, int, None]:
    """Runs the assistant's steps at a constant position. Yields the logits [vocabulary] of each step; send it the next step's token."""
    import torch

    hidden, shared = rows.hidden[:, position - 1 : position], rows.before(position)
    while True:
        output = assistant(
            inputs_embeds=torch.cat([rows.embed(torch.tensor([[token]])), hidden], dim=-1),
            position_ids=torch.tensor([[position]]),
            shared_kv_states=shared,
            use_cache=False,
        )
        hidden = output.last_hidden_state
        token = yield output.logits[0, -1].float()


def _agreement(assistant: Any, rows: ReferenceRows, tokens: list[int], rowset: Rowset) -> float:
    """Returns the share of the export's drafted tokens that are the assistant's. It compares every step, even after one that differs."""
    agreed = 0
    for position, draft in zip(rowset.contexts, rowset.drafts, strict=True):
        steps = draft_steps(assistant, rows, tokens[position], position)
        for step, token in enumerate(draft):
            logits = steps.send(draft[step - 1]) if step else next(steps)
            agreed += agrees(logits.numpy(), token)
    return agreed / (len(rowset.contexts) * DRAFT_LENGTH)


def load_reference(folder: Path, weights: Weights | None = None) -> Any:
    """Loads a checkpoint in float32, or its config with these weights. Raises ParityError if a weight of the text model is missing."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model, lacking = _loaded(folder) if weights is None else _filled(folder, weights)
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
    missing = sorted(name for name in lacking if not _NOT_COMPARED.search(name))
    if missing:
        raise ParityError(f"transformers finds no {missing[0]} in {folder}; it cannot be the reference; {REFUSED}")
    return model.eval()


def _loaded(folder: Path) -> tuple[Any, list[str]]:
    import torch
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, output_loading_info=True
    )
    return model, list(report["missing_keys"])


def _filled(folder: Path, weights: Weights) -> tuple[Any, list[str]]:
    """Builds the text model of a config with these weights. Returns it and the names of the weights that are missing."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if not hasattr(config, "backbone_hidden_size"):
        config = config.get_text_config()
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = HEAD not in weights
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    state = model.state_dict()
    with torch.no_grad():
        for name, read in weights.items():
            if name in state:
                state[name].copy_(torch.from_numpy(read()))
    return model, [name for name in state if name not in weights]


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Differences between an export and the reference over all rows.

    They are the largest absolute logit difference, mean and median KL(reference || export) in nats, and greedy agreement, which is the
    share of rows whose likeliest token is the reference's (`agrees`).
    """

    max_abs_difference: float
    mean_kl: float
    median_kl: float
    greedy_agreement: float


def divergence(reference: Rows, export: Rows) -> Divergence:
    """Compares logits [rows, vocabulary], row by row, to avoid a float64 copy of all rows. A NaN or infinity results in infinity."""
    if not np.isfinite(export).all():
        return Divergence(max_abs_difference=float("inf"), mean_kl=float("inf"), median_kl=float("inf"), greedy_agreement=0.0)
    divergences = [divergence_of(log_softmax(expected), log_softmax(actual)) for expected, actual in zip(reference, export, strict=True)]
    return Divergence(
        max_abs_difference=float(np.abs(reference - export).max()),
        mean_kl=float(np.mean(divergences)),
        median_kl=float(np.median(divergences)),
        greedy_agreement=float(np.mean([agrees(row, int(own.argmax())) for row, own in zip(reference, export, strict=True)])),
    )


# The held-out texts, tokenized by a checkpoint's own tokenizer in transformers.

# How many tokens of each text an export is compared on. With the three texts, this makes 3 * (176 - 9) = 501 rows.
TEXT_TOKENS = 176


def held_out_tokens(tokenizer: Any, count: int) -> dict[str, list[int]]:
    """Returns the first `count` tokens of each held-out text, by kind, from a tokenizer of transformers."""
    begin: list[int] = tokenizer.encode("", add_special_tokens=True)
    return {kind: [*begin, *tokenizer.encode(held_out_text(kind), add_special_tokens=False)][:count] for kind in KINDS}


# edge-bench quality must not import this package, so it runs this module as a program.


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
