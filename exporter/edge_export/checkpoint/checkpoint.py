"""Opens a Gemma 4 checkpoint, its assistant, or a GGUF in place of either. Config and tensor headers are checked before use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_export.checkpoint.architecture import (
    ASSISTANT_TYPES,
    EMBEDDING,
    FULL,
    HEAD,
    MAX_LAYERS,
    SLIDING,
    TOKEN_ORDERING,
    AssistantArchitecture,
    Shapes,
    TextArchitecture,
    allowed_shapes,
    needed_shapes,
    parse_architecture,
    text_name,
)
from edge_export.checkpoint.safetensors import (
    MAX_SIZE,
    SOURCE_TYPE,
    CheckedValues,
    StoredTensor,
    mapped,
    read_json_object,
    read_values,
    refuse_pointer,
    same_values,
    stored_tensors,
)
from edge_export.checkpoint.weight_formats import (
    GROUP,
    Rounding,
    names_quantization,
    refuse_adapter,
    refuse_quantized,
    rounds_activations,
    with_codes,
)
from edge_export.errors import CheckpointError
from edge_runtime.bundle import gguf_header
from edge_runtime.bundle.gguf_header import TYPE_NUMBERS, GgufHeader, LongArray, TensorInfo, quantization_name

MAX_CONFIG_BYTES = 8 << 20
MULTIMODAL_TYPES = ("gemma4", "gemma4_unified")
CENTROIDS_PER_PIECE = 64


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint. `tensors` are those of the text model under their text-only names (model.layers.0....), in file order.

    `others` are all other tensors under their own names. `left_out` describes the groups of tensors that are not exported. `rounding` maps
    a matrix's name to the scales by which its linear layer's activations are rounded.
    """

    folder: Path
    config: dict[str, Any]
    model_type: str
    architecture: TextArchitecture
    tensors: dict[str, StoredTensor]
    left_out: tuple[str, ...]
    others: dict[str, StoredTensor] = field(default_factory=dict)
    rounding: dict[str, Rounding] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Number of weights of the text model, without the token order, which is integers."""
        return sum(prod(tensor.shape) for name, tensor in self.tensors.items() if name != TOKEN_ORDERING)

    @property
    def weights(self) -> dict[str, Callable[[], NDArray[Any]]] | None:
        """Functions that read each tensor's values, by name, as float32 or integers; None if transformers can load the folder itself."""
        if self.rounding_method == "gemma":
            return None
        ties_itself = parse_architecture(self.config, self.folder).tied or not self.architecture.tied
        plain = ties_itself and not names_quantization(self.config)
        if plain and all(tensor.scales is None and tensor.name == self._current_name(name) for name, tensor in self.tensors.items()):
            return None
        return {name: partial(read_values, tensor) for name, tensor in self.tensors.items()}

    @property
    def rounding_method(self) -> str | None:
        """The quantization method if the weights are in a format that rounds activations, else None; see `rounds_activations`."""
        return rounds_activations(self.config) if self.rounding else None

    def _current_name(self, name: str) -> str:
        """Returns the name under which transformers saves a tensor of the text model now."""
        if self.model_type not in MULTIMODAL_TYPES or name == HEAD:
            return name
        return f"model.language_model.{name.removeprefix('model.')}"

    @property
    def assistant(self) -> AssistantArchitecture:
        """The architecture of a drafter. Raises CheckpointError if this is a target."""
        if isinstance(self.architecture, AssistantArchitecture):
            return self.architecture
        raise CheckpointError(f"{self.folder} is a {self.model_type} checkpoint, not an assistant; give its MTP assistant as the drafter")


def open_checkpoint(folder: Path | str) -> Checkpoint:
    """Reads config.json and the safetensors headers of a folder. It reads weights only to compare a head with the embedding.

    Raises CheckpointError if it is not a Gemma 4 model, if a file is missing or broken, or if a tensor is missing or has a wrong shape.
    """
    folder = Path(folder)
    config_path = folder / "config.json"
    if not config_path.is_file():
        refuse_adapter(folder)
    config = read_json_object(config_path, MAX_CONFIG_BYTES)
    refuse_adapter(folder)
    architecture = parse_architecture(config, config_path)
    _check_shared_layers(architecture, config_path)
    model_type = str(config["model_type"])
    try:
        tensors, others = _text_tensors(stored_tensors(folder), model_type)
        shapes = needed_shapes(architecture) | allowed_shapes(architecture)
        tensors, rounding = with_codes(tensors, shapes, None if rounds_activations(config) else GROUP)
        tensors = _with_one_head(tensors, rounding, architecture)
        architecture = replace(architecture, tied=HEAD not in tensors)
        _check_tensors(folder, tensors, needed_shapes(architecture), allowed_shapes(architecture))
    except CheckpointError:
        refuse_quantized(config, config_path)  # names the format if that is the cause
        raise
    if any(tensor.scales is not None for tensor in tensors.values()):  # else config.json describes an earlier form of the weights
        refuse_quantized(config, config_path)
    left_out = _groups(others)
    if model_type in ASSISTANT_TYPES:
        left_out += _groups({name: tensors[name] for name in tensors if name.startswith("masked_embedding.")})
    return Checkpoint(
        folder=folder,
        config=config,
        model_type=model_type,
        architecture=architecture,
        tensors=tensors,
        left_out=left_out,
        others=others,
        rounding=rounding,
    )


def planned_checkpoint(config: dict[str, Any], path: Path) -> Checkpoint:
    """Returns a checkpoint with the shapes that a parsed config.json requires, and without weights.

    `path` is used in messages. Scales of rounding are not known; where activations are rounded, they are 0. Raises CheckpointError.
    """
    architecture = parse_architecture(config, path)
    refuse_quantized(config, path)
    _check_shared_layers(architecture, path)
    tensors = {
        name: StoredTensor(name=name, path=path, dtype="BF16", shape=shape, offset=0, bytes=2 * prod(shape))
        for name, shape in needed_shapes(architecture).items()
    }
    return Checkpoint(
        folder=path,
        config=config,
        model_type=str(config["model_type"]),
        architecture=architecture,
        tensors=tensors,
        left_out=(),
        rounding=dict.fromkeys(tensors, (0.0, 0.0)) if rounds_activations(config) else {},
    )


def check_pair(target: Checkpoint, drafter: Checkpoint) -> None:
    """Raises CheckpointError unless `drafter` can read the hidden rows and K/V rows of `target` and has the same vocabulary size."""
    reads, model = drafter.assistant, target.architecture
    if isinstance(model, AssistantArchitecture):
        raise CheckpointError(f"{target.folder} is an assistant; give the full model as the target")
    facts: list[tuple[str, float, str, float]] = [
        ("backbone_hidden_size", reads.target_hidden_size, "hidden_size", model.hidden_size),
        ("vocab_size", reads.vocab_size, "vocab_size", model.vocab_size),
    ]
    for kind in sorted(set(reads.layer_types)):
        own, theirs = reads.layer_types.index(kind), _layer_read(target, kind)
        facts += [
            (f"{kind} head_dim", reads.head_dim_of(own), "head_dim", model.head_dim_of(theirs)),
            (f"{kind} K/V heads", reads.kv_heads_of(own), "K/V heads", model.kv_heads_of(theirs)),
        ]
    if FULL in reads.layer_types:
        facts += [
            ("full-attention rope_theta", reads.full_rope_base, "rope_theta", model.full_rope_base),
            ("partial_rotary_factor", reads.full_rotary_share, "partial_rotary_factor", model.full_rotary_share),
        ]
    if SLIDING in reads.layer_types:
        facts.append(("sliding-attention rope_theta", reads.sliding_rope_base, "rope_theta", model.sliding_rope_base))
    for name, value, target_name, expected in facts:
        if value != expected:
            raise mismatch(target, drafter, f"its {name} is {value}, the target's {target_name} is {expected}")
    if SLIDING in reads.layer_types and reads.window != model.window:
        # llama.cpp and the ONNX graphs' K/V buffers have a single window, which is the target's.
        why = f"its sliding_window is {reads.window}, the target's is {model.window}, and both runtimes use the target's for both"
        raise mismatch(target, drafter, why)
    if reads.hidden_size == model.hidden_size:
        raise mismatch(target, drafter, f"both have hidden_size {model.hidden_size}, which llama.cpp refuses")


def _layer_read(target: Checkpoint, kind: str) -> int:
    """Returns the target layer that drafter layers of this kind read.

    Full ones read the last layer, sliding ones the last but one (llama.cpp, gemma4-assistant).
    """
    model = target.architecture
    layer = model.layers - (1 if kind == FULL else 2)
    if layer < 0 or model.layer_types[layer] != kind:
        raise CheckpointError(f"{target.folder}: layer {layer} is not {kind}, so no drafter can read it; use an unmodified Gemma 4 target")
    return layer


def mismatch(target: Checkpoint, drafter: Checkpoint, why: str) -> CheckpointError:
    """Returns an error for two halves that do not belong together; `why` says what differs."""
    return CheckpointError(f"{drafter.folder} is not the assistant of {target.folder}: {why}; give the two halves of one release")


def _check_shared_layers(model: TextArchitecture, path: Path) -> None:
    """Raises CheckpointError unless llama.cpp and transformers let K/V-shared layers read the same layers.

    In llama.cpp they read the last two owning layers, in transformers the last owner of each kind.
    """
    if isinstance(model, AssistantArchitecture) or not model.kv_shared_layers:
        return
    if model.layer_types[max(model.owning_layers - 2, 0) : model.owning_layers] != (SLIDING, FULL):
        raise CheckpointError(f"{path}: the last layers that own K/V are not one sliding and one full; use an unmodified Gemma 4 config")


def _text_tensors(stored: dict[str, StoredTensor], model_type: str) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    text: dict[str, StoredTensor] = {}
    others: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        short = _text_name(name, model_type)
        if short is None:
            others[name] = tensor
        elif short in text:
            raise CheckpointError(f"{tensor.path}: {name!r} and {text[short].name!r} are the same tensor; download the checkpoint again")
        else:
            text[short] = tensor
    return text, others


def _text_name(name: str, model_type: str) -> str | None:
    """Returns the tensor's name in a text-only checkpoint; None if the text model does not have it."""
    if name.endswith(".rotary_emb.inv_freq"):
        return None
    return text_name(name, multimodal=model_type in MULTIMODAL_TYPES)


def _with_one_head(tensors: dict[str, StoredTensor], rounding: Mapping[str, Rounding], model: TextArchitecture) -> dict[str, StoredTensor]:
    """Returns the tensors, with a separate head only if it differs from the embedding.

    The stored tensors decide, as in transformers, because config.json of a fine-tune may be wrong about it. A drafter's embedding is used
    only as its head. If a target's config says tied, either tensor may be missing.
    """
    head, embedding = tensors.get(HEAD), tensors.get(EMBEDDING)
    if head is None:
        return tensors
    if isinstance(model, AssistantArchitecture) or (embedding is None and model.tied):
        return {EMBEDDING if name == HEAD else name: tensor for name, tensor in tensors.items() if name != EMBEDDING}
    if embedding is None or HEAD in rounding or not same_values(head, embedding):
        return tensors
    return {name: tensor for name, tensor in tensors.items() if name != HEAD}


def _groups(tensors: dict[str, StoredTensor]) -> tuple[str, ...]:
    counts: dict[str, list[int]] = {}
    for name, tensor in tensors.items():
        group = name.removeprefix("model.").split(".")[0]
        counts.setdefault(group, []).append(tensor.bytes)
    return tuple(f"{group}: {len(sizes)} tensors, {sum(sizes)} bytes" for group, sizes in sorted(counts.items()))


def _check_tensors(folder: Path, tensors: dict[str, StoredTensor], needed: Shapes, allowed: Shapes) -> None:
    for name, shape in needed.items():
        if name not in tensors:
            raise CheckpointError(f"{folder} lacks the tensor {name!r} {list(shape)} that its config requires; download all its shards")
    for name, tensor in tensors.items():
        expected = needed.get(name, allowed.get(name))
        if name.startswith("masked_embedding.") and expected is None:
            continue
        if expected is None:
            raise CheckpointError(
                f"{tensor.path}: {tensor.name!r} is not a tensor of the model in its config; use an unmodified checkpoint"
            )
        if tensor.shape != expected:
            raise CheckpointError(
                f"{tensor.path}: {tensor.name!r} has shape {list(tensor.shape)}, its config requires {list(expected)};"
                " config.json and the weights belong to different models"
            )
        types = ("I64", "I32") if name == TOKEN_ORDERING else tuple(SOURCE_TYPE)
        if tensor.dtype not in types and tensor.scales is None:
            expected_types = " or ".join(types)
            raise CheckpointError(f"{tensor.path}: {tensor.name!r} is {tensor.dtype}, not {expected_types}; use an unquantized checkpoint")


def token_order(drafter: Checkpoint) -> NDArray[np.int32]:
    """Returns the tokens [vocabulary] in cluster order. Raises CheckpointError if it is not a permutation, or the sizes do not divide."""
    model, stored = drafter.assistant, drafter.tensors[TOKEN_ORDERING]
    _check_sizes(drafter, model)
    order = read_values(stored)
    if not np.array_equal(np.sort(order), np.arange(model.vocab_size)):
        raise CheckpointError(f"{stored.path}: {stored.name!r} does not name every token once; download the checkpoint again")
    return order.astype(np.int32)


def _check_sizes(drafter: Checkpoint, model: AssistantArchitecture) -> None:
    if model.vocab_size % model.centroids or model.top_centroids > model.centroids:
        sizes = f"{model.vocab_size} tokens, {model.centroids} centroids and the best {model.top_centroids} of them"
        raise CheckpointError(f"{drafter.folder}: {sizes} do not match; use an unmodified config")


def cluster_rows(drafter: Checkpoint, ordering: NDArray[np.int32]) -> Iterator[NDArray[np.float32]]:
    """Yields output rows [n, hidden] as float32 in the order of the tokens `ordering` [vocabulary], a few clusters at a time."""
    table, model = mapped(drafter.tensors[EMBEDDING]), drafter.assistant
    step = CENTROIDS_PER_PIECE * (model.vocab_size // model.centroids)
    for first in range(0, len(ordering), step):
        yield table[ordering[first : first + step]].astype(np.float32)


# An existing GGUF is read as a Checkpoint whose architecture comes from its keys, so that all pairs are checked and planned in the same
# way.
#
# Key names: llama.cpp, gguf-py/gguf/constants.py. Their meaning for Gemma 4: conversion/gemma.py and src/models/gemma4*.cpp.

TARGET_ARCHITECTURE, DRAFTER_ARCHITECTURE = "gemma4", "gemma4-assistant"
# Larger frequency factors mark pairs that are not rotated (proportional RoPE).
_TURNS_BELOW = 1e20


def read_gguf_header(path: Path) -> GgufHeader:
    """Reads keys and tensor infos. Raises CheckpointError if this is not a GGUF file of a known version, or is truncated or corrupt."""
    try:
        return gguf_header.read_gguf_header(path)
    except gguf_header.GgufError as error:
        refuse_pointer(path)
        raise CheckpointError(str(error)) from error


def open_gguf(path: Path) -> tuple[Checkpoint, GgufHeader]:
    """Reads a GGUF's header into a Checkpoint, without weights. The checkpoint's folder is the file itself.

    Raises CheckpointError if the file is corrupt, split, or neither a gemma4 nor a gemma4-assistant model.
    """
    header = read_gguf_header(path)
    name = header.architecture
    _check_architecture(path, name)
    below = f"{name}."
    own = {key.removeprefix(below): value for key, value in header.keys.items() if key.startswith(below)}
    keys = CheckedValues(own, path, below, "convert the checkpoint again")
    parts = header.keys.get("split.count")
    if type(parts) is int and parts > 1:
        raise CheckpointError(f"{path} is one part of a split GGUF; join the parts first with llama-gguf-split --merge")
    tensors = {tensor.name: tensor for tensor in header.tensors}
    pieces = header.keys.get("tokenizer.ggml.tokens")
    if not isinstance(pieces, LongArray):
        raise CheckpointError(f"{path} holds no vocabulary (tokenizer.ggml.tokens); convert the checkpoint again")
    fields = _fields(keys, tensors, pieces.length)
    made: TextArchitecture
    if name == TARGET_ARCHITECTURE:
        made = TextArchitecture(**fields)
    else:
        ordered = any(tensor.startswith("masked_embd") for tensor in tensors)
        made = AssistantArchitecture(
            **fields | {"kv_shared_layers": len(fields["layer_types"])},
            target_hidden_size=keys.integer("embedding_length_out"),
            ordered_embeddings=ordered,
            centroids=0,
            top_centroids=0,
        )
    stored = {
        tensor.name: StoredTensor(
            name=tensor.name, path=path, dtype=f"ggml type {tensor.type}", shape=tensor.shape, offset=tensor.offset, bytes=tensor.bytes
        )
        for tensor in header.tensors
        if tensor.name != "rope_freqs.weight"
    }
    kind = "gemma4" if name == TARGET_ARCHITECTURE else "gemma4_assistant"
    checkpoint = Checkpoint(folder=path, config={}, model_type=kind, architecture=made, tensors=stored, left_out=())
    return checkpoint, header


def quantization_of(header: GgufHeader) -> str:
    """Returns the name of the quantization in `general.file_type`; "mixed" if it is unknown."""
    return quantization_name(header.keys.get("general.file_type"))


def _check_architecture(path: Path, name: str) -> None:
    if name == DRAFTER_ARCHITECTURE.replace("-", "_"):
        raise CheckpointError(
            f"{path} has the architecture {name!r}, an early spelling that llama.cpp refuses (it wants {DRAFTER_ARCHITECTURE!r});"
            " give the assistant's checkpoint folder instead, or convert it again"
        )
    if name not in (TARGET_ARCHITECTURE, DRAFTER_ARCHITECTURE):
        raise CheckpointError(
            f"{path} has the architecture {name!r}, not {TARGET_ARCHITECTURE!r} or {DRAFTER_ARCHITECTURE!r};"
            " give a Gemma 4 model and its drafter"
        )


def _fields(keys: CheckedValues, tensors: dict[str, TensorInfo], vocabulary: int) -> dict[str, Any]:
    layers = keys.integer("block_count", high=MAX_LAYERS)
    sliding = keys.array("attention.sliding_window_pattern", layers)
    kinds = tuple(SLIDING if flag else FULL for flag in sliding)
    if kinds[-1] != FULL:
        raise keys.wrong("attention.sliding_window_pattern", "a pattern that ends in a full-attention layer")
    kv_heads = _per_layer(keys, "attention.head_count_kv", layers)
    feed_forward = _per_layer(keys, "feed_forward_length", layers)
    last_full, first_sliding = layers - 1, kinds.index(SLIDING) if SLIDING in kinds else layers - 1
    full_head_dim = keys.integer("attention.key_length")
    experts = keys.integer("expert_count", low=0, default=0)
    per_layer_size = keys.integer("embedding_length_per_layer_input", low=0, default=0)
    return {
        "hidden_size": keys.integer("embedding_length"),
        "layer_types": kinds,
        "heads": _per_layer(keys, "attention.head_count", layers)[0],
        "kv_heads": kv_heads[first_sliding],
        "full_kv_heads": kv_heads[last_full],
        "head_dim": keys.integer("attention.key_length_swa"),
        "full_head_dim": full_head_dim,
        "intermediate_size": feed_forward[0],
        "double_wide": len(set(feed_forward)) > 1,
        "kv_shared_layers": keys.integer("attention.shared_kv_layers", low=0, high=layers, default=0),
        "k_eq_v": any(f"blk.{i}.attn_k.weight" in tensors and f"blk.{i}.attn_v.weight" not in tensors for i in range(layers)),
        "window": keys.integer("attention.sliding_window"),
        "context": keys.integer("context_length"),
        "vocab_size": vocabulary,
        "per_layer_size": per_layer_size,
        "per_layer_vocab_size": vocabulary if per_layer_size else 0,
        "experts": experts,
        "experts_used": keys.integer("expert_used_count") if experts else 0,
        "expert_size": keys.integer("expert_feed_forward_length") if experts else 0,
        "norm_epsilon": keys.number("attention.layer_norm_rms_epsilon"),
        "logit_softcap": keys.number("final_logit_softcapping") if keys.get("final_logit_softcapping") else None,
        "full_rope_base": keys.number("rope.freq_base"),
        "sliding_rope_base": keys.number("rope.freq_base_swa"),
        "full_rotary_share": _rotary_share(keys, tensors.get("rope_freqs.weight"), full_head_dim),
        "tied": "output.weight" not in tensors,
    }


def _rotary_share(keys: CheckedValues, factors: TensorInfo | None, head_dim: int) -> float:
    """Returns the rotated fraction of a full layer's head: the share of frequency factors [head_dim / 2] that are not huge."""
    if factors is None or factors.type != TYPE_NUMBERS["f32"] or factors.shape != (head_dim // 2,):
        raise CheckpointError(f"{keys.path} has no float32 tensor rope_freqs.weight [{head_dim // 2}]; convert the checkpoint again")
    with keys.path.open("rb") as file:
        file.seek(factors.offset)
        values = np.frombuffer(file.read(factors.bytes), dtype="<f4")
    return float((values < _TURNS_BELOW).sum()) * 2 / head_dim


def _per_layer(keys: CheckedValues, key: str, layers: int) -> list[int]:
    if type(keys.get(key)) is int:
        return [keys.integer(key)] * layers
    values = keys.array(key, layers)
    if not all(type(value) is int and 1 <= value <= MAX_SIZE for value in values):
        raise keys.wrong(key, f"an integer from 1 to {MAX_SIZE} per layer")
    return values
