"""Tiny random checkpoints of every Gemma 4 member and its assistant, as transformers writes them. Seeded, a few hundred KB each.

`write_member(name, folder)` writes one; MEMBERS names them all. Dimensions are toys, traits are the published ones: shared
K/V layers and a double-wide MLP (E2B), two K/V heads (E4B), k = v and fewer K/V heads on full layers (12B, 26B-A4B, 31B),
experts (26B-A4B), ordered embeddings (the E assistants).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kept import kept

VOCABULARY = 512
CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|think|>"]
VISIBLE = '<|channel> <channel|> <|tool> <tool|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|"|>'.split()
CHAT_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ '<|turn>' + m['role'] + '\\n' + m['content'] + '<turn|>\\n' }}{% endfor %}"
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Member:
    """One member: config overrides, its classes, and how its files are written."""

    text: dict[str, Any]
    assistant: bool = False
    unified: bool = False
    multimodal: bool = False
    published_config: bool = False
    ordered: bool = False
    dtype: str = "bfloat16"
    shard_size: str = "50GB"
    backbone: int = 64
    generation: dict[str, Any] = field(default_factory=dict)
    legacy_tokenizer: bool = False
    model_card: str = ""


BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
E_SERIES = BASE | {
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "num_hidden_layers": 8,
    "num_kv_shared_layers": 4,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 2,
    "final_logit_softcapping": 30.0,
}
LARGE = BASE | {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 0,
    "layer_types": [SLIDING] * 5 + [FULL],
    "attention_k_eq_v": True,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 1,
    "final_logit_softcapping": 30.0,
}
NO_PER_LAYER = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
DRAFTER = BASE | {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 4,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
}
LARGE_DRAFTER = DRAFTER | {"num_key_value_heads": 4, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
SAMPLING = {"temperature": 1.0, "top_k": 64, "top_p": 0.95, "do_sample": True, "eos_token_id": [1, 6], "bos_token_id": 2, "pad_token_id": 0}

CARD = """---
license: apache-2.0
base_model: google/gemma-4-E4B
language:
- en
- no
tags: [tiny]
pipeline_tag: text-generation
model_name: Toy
model-index:
- name: toy
  results:
  - metrics:
\t- {type: accuracy, value: 0.5}
datasets:
- allenai/c4
- https://huggingface.co/datasets/wikimedia/wikipedia
- {name: own, organization: us}
---
A toy, *not an &alias.
---
"""

MEMBERS: dict[str, Member] = {
    "e2b": Member(
        text=E_SERIES | {"use_double_wide_mlp": True}, multimodal=True, published_config=True, shard_size="100KB", generation=SAMPLING
    ),
    "e2b-text": Member(text=E_SERIES | {"use_double_wide_mlp": True}, dtype="float32", legacy_tokenizer=True),
    "e2b-assistant": Member(text=DRAFTER | NO_PER_LAYER, assistant=True, ordered=True, published_config=True),
    "e4b": Member(
        text=E_SERIES | {"num_key_value_heads": 2}, multimodal=True, generation=SAMPLING | {"repetition_penalty": 1.5}, model_card=CARD
    ),
    "e4b-assistant": Member(text=DRAFTER | NO_PER_LAYER | {"num_key_value_heads": 2}, assistant=True, ordered=True, dtype="float32"),
    "12b": Member(text=LARGE, multimodal=True, unified=True, published_config=True, generation=SAMPLING | {"suppress_tokens": [7, 8]}),
    "12b-assistant": Member(text=LARGE_DRAFTER, assistant=True, unified=True, published_config=True),
    "26b-a4b": Member(
        text=LARGE
        | NO_PER_LAYER
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24, "num_global_key_value_heads": 2},
        multimodal=True,
        published_config=True,
    ),
    "26b-a4b-assistant": Member(text=LARGE_DRAFTER | NO_PER_LAYER | {"num_global_key_value_heads": 2}, assistant=True),
    "31b": Member(text=LARGE | NO_PER_LAYER, multimodal=True, dtype="float16"),
    "31b-assistant": Member(text=LARGE_DRAFTER | NO_PER_LAYER, assistant=True, published_config=True),
}
TARGETS = [name for name, member in MEMBERS.items() if not member.assistant]


def write_member(name: str, folder: Path, **text_overrides: Any) -> Path:
    """Writes the named member's checkpoint and tokenizer into `folder` (created if missing) and returns it."""
    import torch

    member = MEMBERS[name]
    folder.mkdir(parents=True, exist_ok=True)
    values = member.text | text_overrides
    backbone = {"backbone": member.backbone, "ordered": member.ordered} if member.assistant else {}
    model = built_model(values, unified=member.unified, multimodal=member.multimodal, **backbone)
    _fill(model)
    model.to(getattr(torch, member.dtype))
    model.save_pretrained(folder, max_shard_size=member.shard_size)
    if member.multimodal:
        _add_towers(folder, name)
    if member.published_config:
        publish_config(folder, values)
    _generation_config(folder, member)
    write_tokenizer(folder)
    if member.legacy_tokenizer:
        _make_legacy(folder)
    if member.model_card:
        (folder / "README.md").write_text(member.model_card)
    return folder


def built_model(
    text: dict[str, Any], *, unified: bool = False, multimodal: bool = False, backbone: int | None = None, ordered: bool = False
) -> Any:
    """A model of transformers' classes with this text config; an assistant with a `backbone`'s width. `unified`: 12B's classes."""
    import transformers

    family = "Gemma4Unified" if unified else "Gemma4"
    text_config = getattr(transformers, f"{family}TextConfig")(**text)
    if backbone is not None:
        config = getattr(transformers, f"{family}AssistantConfig")(
            text_config=text_config,
            backbone_hidden_size=backbone,
            use_ordered_embeddings=ordered,
            num_centroids=32,
            centroid_intermediate_top_k=4,
        )
        return getattr(transformers, f"{family}AssistantForCausalLM")(config)
    if multimodal:
        config = getattr(transformers, f"{family}Config")(text_config=text_config, vision_config=None, audio_config=None)
        return getattr(transformers, f"{family}ForConditionalGeneration")(config)
    return getattr(transformers, f"{family}ForCausalLM")(text_config)


def _fill(model: Any) -> None:
    import torch

    generator = torch.Generator().manual_seed(11)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        else:
            tensor.copy_(torch.randperm(tensor.numel(), generator=generator).view(tensor.shape))


def _add_towers(folder: Path, name: str) -> None:
    """Adds a vision tower, an audio tower and an embedder to the text model; in E2B also K/V weights of sharing layers."""
    import torch
    from safetensors.torch import load_file, save_file

    path = sorted(folder.glob("model*.safetensors"))[0]
    extra = {
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight": torch.ones(8, 8, dtype=torch.bfloat16),
        "model.vision_tower.patch_embedder.input_proj.weight": torch.ones(8, 12, dtype=torch.bfloat16),
        "model.audio_tower.output_proj.weight": torch.ones(4, 8, dtype=torch.bfloat16),
        "model.embed_vision.embedding_projection.weight": torch.ones(64, 8, dtype=torch.bfloat16),
    }
    if name == "e2b":
        extra |= _shared_key_values()
    save_file(load_file(path) | extra, path, metadata={"format": "pt"})
    index_path = folder / "model.safetensors.index.json"
    if index_path.is_file():
        index = json.loads(index_path.read_text())
        index["weight_map"] |= dict.fromkeys(extra, path.name)
        index_path.write_text(json.dumps(index))


def _shared_key_values() -> dict[str, Any]:
    """K/V weights of layers with shared K/V, which do not use them; transformers ignores them in a checkpoint."""
    import torch

    layer = "model.language_model.layers.7.self_attn."
    return {
        f"{layer}k_proj.weight": torch.full((32, 64), 0.5, dtype=torch.bfloat16),
        f"{layer}v_proj.weight": torch.full((32, 64), 0.25, dtype=torch.bfloat16),
        f"{layer}k_norm.weight": torch.ones(32, dtype=torch.bfloat16),
    }


def publish_config(folder: Path, text: dict[str, Any]) -> None:
    """Turns config.json into the published form: global_head_dim and num_global_key_value_heads instead of per_layer_config."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    inner = config.get("text_config", config)
    inner.pop("per_layer_config", None)
    inner["global_head_dim"] = text["global_head_dim"]
    inner["num_global_key_value_heads"] = text.get("num_global_key_value_heads")
    inner.setdefault("moe_intermediate_size", None)
    path.write_text(json.dumps(config, indent=2))


def _generation_config(folder: Path, member: Member) -> None:
    path = folder / "generation_config.json"
    if member.generation:
        path.write_text(json.dumps(member.generation))
    else:
        path.unlink(missing_ok=True)


def _make_legacy(folder: Path) -> None:
    """Rewrites the tokenizer as older tools did: merges as text, special tokens as objects, one added token outside the base."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    model = tokenizer["model"]
    last = list(model["vocab"])[-1]
    outside = model["vocab"].pop(last)
    model["merges"] = [" ".join(merge) for merge in model["merges"] if "".join(merge) != last]
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": outside, "content": "<|image|>", "special": False})
    tokenizer["post_processor"] = None
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    named = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": False,
        "chat_template": CHAT_TEMPLATE,
        "additional_special_tokens": ["<|turn>", "<turn|>"],
        "added_tokens_decoder": {
            str(t["id"]): flags | {"content": t["content"], "special": t["special"]} for t in tokenizer["added_tokens"]
        },
    }
    config |= {key: flags | {"__type": "AddedToken", "content": text, "special": True} for key, text in named.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (folder / "chat_template.jinja").unlink()


def write_tokenizer(folder: Path) -> None:
    """Writes a Gemma-style BPE tokenizer with VOCABULARY pieces: byte fallback, spaces as U+2581, newline runs, chat marks."""
    reserved = CONTROL + VISIBLE + [f"<0x{b:02X}>" for b in range(256)]
    letters = ["\n", "▁", *"etaoinshrdlucmfwypvbgkjqxz.,;:!?'()-0123456789"]
    pieces, merges = reserved + letters, []
    for a in letters[1:]:
        for b in letters[2:18]:
            if len(pieces) < VOCABULARY:
                pieces.append(a + b)
                merges.append([a, b])
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    added = [
        {"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for i, t in enumerate(CONTROL + VISIBLE)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                {"SpecialToken": {"id": "<bos>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "<bos>", "type_id": 1}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
    config = {
        "tokenizer_class": "GemmaTokenizer",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
        "sot_token": "<|turn>",
        "eot_token": "<turn|>",
        "think_token": "<|think|>",
        "extra_special_tokens": ["<|tool>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def settled(folder_of: Callable[[str], Path], name: str) -> Path:
    """A copy of the member `name` with unit norms and matrices of variance 1 / fan-in; made once, read-only. For tests of parity: plain
    random pairs amplify rounding, trained ones do not."""

    def make(folder: Path) -> None:
        shutil.copytree(folder_of(name), folder)
        settle(folder)

    return kept("settled", {"name": name}, make)


def settle(folder: Path) -> None:
    """Gives a checkpoint unit norms and matrices of variance 1 / fan-in, in place."""
    from safetensors.torch import load_file, save_file

    for path in folder.glob("*.safetensors"):
        tensors = {key: _settle(key, tensor) for key, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})


def _settle(name: str, tensor: Any) -> Any:
    import torch

    if not tensor.is_floating_point():
        return tensor
    if tensor.dim() < 2:
        # Queries and keys of unit variance in their dot product: the attention scale is 1.
        return torch.full_like(tensor, tensor.numel() ** -0.25 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0)
    return (tensor * tensor.shape[-1] ** -0.5).contiguous()
