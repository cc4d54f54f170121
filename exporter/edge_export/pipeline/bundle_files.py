"""A bundle's files besides its models: the manifest's facts, tokenizer, chat template, config.yaml and signature."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isfinite, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_devices.errors import errors_as
from edge_devices.files.limited_read import sha256_of
from edge_devices.waiting import Progress
from edge_export.checkpoint.architecture import FULL, SLIDING, TextArchitecture
from edge_export.checkpoint.checkpoint import Checkpoint, check_pair
from edge_export.checkpoint.sources import ResolvedSource, manifest_source, source_files
from edge_export.checkpoint.tokenizer_vocabulary import MAX_TEMPLATE_BYTES, TEMPLATE_NAME, TOKENIZER_NAME
from edge_export.checkpoint.weight_formats import SIZES
from edge_export.errors import CheckpointError, ExportError
from edge_export.gguf.keys import GENERATION_NAME, gguf_name, read_generation
from edge_export.output import BundlePart
from edge_runtime.bundle.bundle import SIGNATURE_NAME
from edge_runtime.bundle.bundle import read_signing_key as read_key
from edge_runtime.bundle.gguf_header import read_gguf_header
from edge_runtime.bundle.manifest import (
    MAX_DRAFT_LENGTH,
    Architecture,
    BundleFile,
    CacheLayout,
    GenerationDefaults,
    LayerCache,
    Manifest,
    ModelSource,
)
from edge_runtime.config.schema import CacheConfig, DrafterConfig, SpeculativeConfig, VerifierConfig
from edge_runtime.config.settings import defaults, expanded
from edge_runtime.errors import BackendError, EdgeRuntimeError
from edge_runtime.text.template_renderer import Renderer, TemplateError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_PIECE_BYTES = 4 << 20
CACHE_DTYPE = "f16"
# llama.cpp rounds its caches up to this many rows (src/llama-kv-cache-iswa.cpp).
ROW_STEP = 256
# For names of settings, which are ours and those of generation_config.json: the keys that llama.cpp's converter writes.
_NUMBERS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_TOP_K, _SUPPRESSED = "general.sampling.top_k", "tokenizer.ggml.suppress_tokens"
# Settings that matter only if tokens are sampled. A repetition penalty always matters.
_SAMPLED = ("temperature", "top_k", "top_p", "min_p")
_ENDS = "eos_token_id"
# The lowest and highest values that SamplingParams accepts.
_RANGES = {"temperature": (0.0, 100.0), "top_p": (1e-9, 1.0), "min_p": (0.0, 1.0), "repetition_penalty": (1e-6, 1e6)}


def cache_layout(target: Checkpoint, drafter: Checkpoint, context: int) -> CacheLayout:
    """Returns the layout of the K/V rows for a context: which layers own them, which layers read them, and how many there are.

    Raises CheckpointError if the two are not a pair, or if `context` is not in 1..max_position_embeddings.
    """
    check_pair(target, drafter)
    model = target.architecture
    if not 1 <= context <= model.context:
        raise CheckpointError(f"context {context} is not in 1..{model.context}, what {target.folder} was made for; choose another")
    owners = tuple(layer if layer < model.owning_layers else model.last_owner(kind) for layer, kind in enumerate(model.layer_types))
    sliding = None
    if SLIDING in model.layer_types:
        rows = -(-(model.window + MAX_DRAFT_LENGTH) // ROW_STEP) * ROW_STEP
        sliding = _layer_cache(model, SLIDING, min(rows, context), model.window)
    return CacheLayout(
        sliding=sliding,
        full=_layer_cache(model, FULL, context, None),
        layer_owners=owners,
        drafter_sources=tuple(model.last_owner(kind) for kind in drafter.architecture.layer_types),
        rewind_slack=MAX_DRAFT_LENGTH,
    )


def _layer_cache(model: TextArchitecture, kind: str, capacity: int, window: int | None) -> LayerCache:
    owners = tuple(layer for layer in range(model.owning_layers) if model.layer_types[layer] == kind)
    return LayerCache(
        kv_heads=model.kv_heads_of(owners[0]),
        head_dim=model.head_dim_of(owners[0]),
        dtype=CACHE_DTYPE,
        capacity=capacity,
        window=window,
        owner_layers=owners,
    )


def architecture(target: Checkpoint, drafter: Checkpoint, context: int) -> Architecture:
    """Returns the manifest's facts about the pair. `context` is the context length for which the bundle is made."""
    model, assistant = target.architecture, drafter.assistant
    return Architecture(
        family=SIZES.get((model.layers, model.hidden_size), "custom"),
        hidden_size=model.hidden_size,
        layers=model.layers,
        vocab_size=model.vocab_size,
        context_length=context,
        parameters=target.parameters,
        drafter_hidden_size=assistant.hidden_size,
        drafter_layers=assistant.layers,
        drafter_parameters=drafter.parameters,
        ordered_embeddings=assistant.ordered_embeddings,
        feed_forward_size=_widest_feed_forward(model),
        per_layer_size=model.per_layer_size,
        drafter_feed_forward_size=_widest_feed_forward(assistant),
        prompt_parameters=_prompt_parameters(target),
        experts=model.experts or None,
    )


def _prompt_parameters(target: Checkpoint) -> int:
    """Returns how many weights a prompt's token is multiplied by to compute its K/V rows.

    Only the K and V matrices of the last layer with its own K/V are counted, and nothing after it. Of experts, those that a token uses are
    counted; of the projection to per-layer embeddings, the part of the counted layers.
    """
    model, needed = target.architecture, 0
    last = model.owning_layers - 1
    for name, tensor in target.tensors.items():
        place = gguf_name(name) or name  # tensors of a GGUF file have GGUF names already
        _, layer, part = place.split(".", 2) if place.startswith("blk.") else ("", "", place)
        count = prod(tensor.shape) if len(tensor.shape) > 1 else 0
        if layer.isdecimal() and int(layer) < last:
            needed += count * model.experts_used // model.experts if "_exps." in part else count
        elif layer == str(last) and part.startswith(("attn_k.", "attn_v.")):
            needed += count
        elif part == "per_layer_model_proj.weight":
            needed += count * last // model.layers
    return needed


def _widest_feed_forward(model: TextArchitecture) -> int:
    """Returns the most values per token that a feed-forward block computes at once: the dense width plus that of the experts in use."""
    return max(model.feed_forward_of(layer) for layer in range(model.layers)) + model.experts_used * model.expert_size


def generation_defaults(target: ResolvedSource) -> GenerationDefaults | None:
    """Returns the target's generation settings as transformers reads them, or None. Raises CheckpointError for impossible values."""
    size = target.checkpoint.architecture.vocab_size
    ends: tuple[int, ...] = ()
    if target.gguf is None:
        path, values = target.path / GENERATION_NAME, dict(read_generation(target.path))
        if values.get("do_sample") is True:
            values.setdefault("temperature", 1.0)
        else:
            values = {key: value for key, value in values.items() if key not in _SAMPLED}
            values |= {"temperature": 0.0} if values.get("do_sample") is False else {}
        ends = _end_tokens(target, values, size)
    else:
        path, keys = target.path, target.gguf.keys
        values = {name: keys.get(key) for name, key in _NUMBERS.items()}
        # A GGUF does not say whether decoding is greedy, and has a temperature only if one was set.
        values |= {"top_k": keys.get(_TOP_K), "suppress_tokens": keys.get(_SUPPRESSED)}
    defaults = GenerationDefaults(
        **{name: _number(values, name, path) for name in _NUMBERS},
        top_k=_top_k(values, path),
        end_tokens=ends,
        suppress_tokens=_tokens(values, "suppress_tokens", size, path),
    )
    return None if defaults == GenerationDefaults() else defaults


def _end_tokens(target: ResolvedSource, generation: dict[str, Any], size: int) -> tuple[int, ...]:
    """Returns the end tokens of the first that has any: generation_config.json, config.json, text_config in config.json."""
    config = target.checkpoint.config
    inner = config.get("text_config")
    places = ((GENERATION_NAME, generation), ("config.json", config), ("config.json", inner if isinstance(inner, dict) else {}))
    for name, values in places:
        if values.get(_ENDS) is not None:
            return _tokens(values, _ENDS, size, target.path / name)
    return ()


def _number(values: dict[str, Any], name: str, path: Path) -> float | None:
    value = values.get(name)
    if value is None:
        return None
    minimum, maximum = _RANGES[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or not minimum <= value <= maximum:
        raise _wrong(path, name, value, f"a number from {minimum:g} to {maximum:g}")
    return float(value)


def _top_k(values: dict[str, Any], path: Path) -> int | None:
    value = values.get("top_k")
    if value is not None and (type(value) is not int or not 0 <= value < 1 << 31):
        raise _wrong(path, "top_k", value, "a number of tokens")
    return value


def _tokens(values: dict[str, Any], name: str, size: int, path: Path) -> tuple[int, ...]:
    value = values.get(name)
    tokens = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int and 0 <= token < size for token in tokens):
        raise _wrong(path, name, value, f"ids of tokens below {size}")
    return tuple(dict.fromkeys(tokens))


def _wrong(path: Path, name: str, value: object, expected: str) -> CheckpointError:
    return CheckpointError(f"{path}: {name} is {str(value)[:60]!r}, not {expected}; correct it")


def copy_file(source: Path, destination: Path, progress: Callable[[int], None] = lambda _: None) -> None:
    """Copies a file. `progress` gets the bytes copied since its last call."""
    with source.open("rb") as reader, destination.open("wb") as writer:
        while piece := reader.read(_PIECE_BYTES):
            writer.write(piece)
            progress(len(piece))


def template_of(target: ResolvedSource) -> str | None:
    """Returns the target's chat template, or None. Raises CheckpointError if the runtime would refuse it."""
    if target.gguf is not None:
        text = target.gguf.keys.get("tokenizer.chat_template")
        template, advice = text if isinstance(text, str) else None, "give another GGUF, or its checkpoint"
    else:
        template, advice = target.tokenizer.chat_template if target.tokenizer is not None else None, f"correct {TEMPLATE_NAME}"
    if template is None:
        return None
    with errors_as(CheckpointError, f"{target.origin} has a chat template that is no Unicode text", advice, UnicodeEncodeError):
        size = len(template.encode())
    if size > MAX_TEMPLATE_BYTES:
        raise CheckpointError(f"{target.origin} has a chat template of {size} bytes, at most {MAX_TEMPLATE_BYTES} are read; {advice}")
    with errors_as(CheckpointError, f"{target.origin} has a chat template that does not compile", advice, TemplateError, BackendError):
        Renderer(template)
    return template


def copy_texts(target: ResolvedSource, template: str | None, folder: Path, progress: Progress) -> list[BundlePart]:
    """Copies the tokenizer and the chat template into the bundle. A GGUF source has no separate tokenizer to copy."""
    progress.step("Copy the tokenizer", None)
    parts: list[BundlePart] = []
    if target.tokenizer is not None:
        copy_file(target.tokenizer.folder / TOKENIZER_NAME, folder / TOKENIZER_NAME)
        parts.append(BundlePart(role="tokenizer", path=folder / TOKENIZER_NAME, format="json"))
    if template is not None:
        (folder / TEMPLATE_NAME).write_text(template, encoding="utf-8", newline="")
        parts.append(BundlePart(role="chat_template", path=folder / TEMPLATE_NAME, format="jinja"))
    return parts


def hash_parts(parts: list[BundlePart], folder: Path, weights: Mapping[str, int], progress: Progress) -> tuple[BundleFile, ...]:
    """Returns the manifest's entries of the written files. `weights` holds the number of weights of target and drafter."""
    progress.step("Hash the bundle", None)
    return tuple(
        BundleFile(
            path=part.path.relative_to(folder).as_posix(),
            role=part.role,
            format=part.format,
            bytes=part.path.stat().st_size,
            sha256=sha256_of(part.path),
            quantization=part.quantization,
            bits_per_weight=_bits(part, weights.get(part.role.removesuffix("_data"))),
        )
        for part in parts
    )


def _bits(part: BundlePart, weights: int | None) -> float | None:
    """Returns the bits per weight of a model's file, or None. In a GGUF only tensors are counted, as in llama.cpp."""
    if not weights or part.format not in ("gguf", "onnx_data"):
        return None
    is_gguf = part.format == "gguf"
    size = sum(tensor.bytes for tensor in read_gguf_header(part.path).tensors) if is_gguf else part.path.stat().st_size
    return round(8 * size / weights, 2)


def hash_source(source: ResolvedSource, progress: Progress) -> ModelSource:
    """Returns the manifest's entry for the source files of one half."""
    progress.step(f"Hash the {source.role}'s source", sum(path.stat().st_size for path in source_files(source)))
    return manifest_source(source, progress.advance)


def bundle_config(config: SpeculativeConfig, manifest: Manifest) -> SpeculativeConfig:
    """Returns the bundle's config.yaml: the manifest's models, quantizations and context, then `config`, then the defaults."""
    # If there are two formats, that of the first file is used, as readers do.
    quantizations = {entry.role: entry.quantization for entry in reversed(manifest.files)}
    exported = SpeculativeConfig(
        drafter=DrafterConfig(model=manifest.sources["drafter"].origin, precision=quantizations["drafter"]),
        verifier=VerifierConfig(model=manifest.sources["target"].origin, precision=quantizations["target"]),
        cache=CacheConfig(max_context_length=manifest.runtime.context),
    )
    complete = exported.over(expanded(config)).over(defaults(manifest.runtime))
    # All values of the preset are written out, so its name is not needed.
    return replace(complete, tuning=replace(complete.tuning, preset=None))


def read_signing_key(path: Path) -> Ed25519PrivateKey:
    """Returns the private key in a PEM file without a password. Raises ExportError if the file has none."""
    try:
        return read_key(path)
    except EdgeRuntimeError as error:
        raise ExportError(str(error)) from error


def sign_manifest(folder: Path, manifest: bytes, key: Ed25519PrivateKey) -> None:
    """Writes the signature of the manifest's bytes beside the manifest."""
    (folder / SIGNATURE_NAME).write_bytes(base64.b64encode(key.sign(manifest)) + b"\n")
