"""Exports a pair as one .litertlm file with its drafter, to measure LiteRT-LM on the same shapes (bench_peers.py). Its environment has
litert-torch 0.10.0 and transformers 5.22 (scripts/setup/build_peers.sh).

    LITERT/bin/python scripts/pairs/export_litert_pair.py PAIR/target PAIR/drafter OUT [--recipe dynamic_wi4_afp32] [--cache 1280]

litert-torch 0.10.0 exports Gemma 4 targets of the multimodal class alone, without activations for a drafter, and no drafter (issue
google-ai-edge/litert-torch 1214). So the target gets that class around it, a verify returns its hidden rows, and the drafter becomes a
graph of one draft that reads the K/V of the target, with the input and output names of LiteRT-LM's executor
(runtime/executor/llm_litert_mtp_drafter.cc). Its ordered head is computed as the dense one, with the tokens of other clusters masked.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from ai_edge_litert import schema_py_generated
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Gemma4AssistantForCausalLM
from transformers.models.gemma4.modeling_gemma4 import apply_rotary_pos_emb

# litert-torch imports a module of TensorFlow, which its own schema has replaced; the libraries above look for a whole TensorFlow.
TENSORFLOW = ("tensorflow", "tensorflow.lite", "tensorflow.lite.python")
sys.modules |= {name: types.ModuleType(name) for name in TENSORFLOW}
sys.modules[TENSORFLOW[-1]].schema_py_generated = schema_py_generated  # type: ignore[attr-defined]

from litert_torch.generative.export_hf import export  # noqa: E402
from litert_torch.generative.export_hf.core import export_lib, litert_lm_builder  # noqa: E402
from litert_torch.generative.export_hf.model_ext.gemma4 import exportable_module, patch  # noqa: E402

for _name in TENSORFLOW:
    del sys.modules[_name]

# Rows of its prefill graphs; a prompt is split into them.
PREFILL_ROWS = [16, 128, 512]
# Drafts of a round, and the row before them.
VERIFY_ROWS = 5
OUT_OF_REACH = -1e4
Generate = exportable_module.LiteRTExportableModuleForDecoderOnlyLMGenerateExternalEmbedder


def with_media_class(target: Path, folder: Path) -> None:
    """Writes the text model `target` as a model of the multimodal class, without towers; its logits are the same."""
    folder.mkdir(parents=True)
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor for name, tensor in load_file(target / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((target / "config.json").read_text(encoding="utf-8"))
    last = text["vocab_size"]
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "text_config": {key: value for key, value in text.items() if key not in ("architectures", "transformers_version")},
        "vision_config": None,
        "audio_config": None,
        **{name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        **{name: last - number for number, name in enumerate(("image_token_id", "audio_token_id", "video_token_id"), start=1)},
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (target / name).is_file():
            shutil.copy(target / name, folder / name)


def verified(module: Any, embeddings: Any, per_layer_embeddings: Any, input_pos: Any, kv_cache: Any, mask: Any, **flags: Any) -> Any:
    """The forward of one or several rows, in place of the library's: with the logits' soft cap, and in a verify with the hidden rows."""
    flags.update(module.composite_flags())
    rows = module.adapt_inputs(None, embeddings, per_layer_embeddings, input_pos, kv_cache, mask, use_bool_mask=False, **flags)
    text = module.model.config.text_config
    rows["past_key_values"] = rows["past_key_values"].insert_dummy_cache_layers(text)
    output = module.model.model.language_model(**rows, **module.attention_kwargs())
    logits = module.model.lm_head(output.last_hidden_state)
    if text.final_logit_softcapping:
        logits = torch.tanh(logits / text.final_logit_softcapping) * text.final_logit_softcapping
    outputs = {"kv_cache": output.past_key_values.remove_dummy_cache_layers(text), "logits": logits}
    return outputs | ({"activations": output.last_hidden_state} if module.export_verifier else {})


def mend_library() -> None:
    """Replaces what keeps litert-torch 0.10.0 from exporting a target whose verifies serve a drafter."""
    patch.LiteRTGemma4TextModel._can_set_experts_implementation_cached_value = True  # transformers 5.22 asks its source for it
    Generate.forward = verified
    samples = Generate.get_sample_inputs

    def with_float_mask(module: Any, config: Any) -> Any:
        graphs = samples(module, config)
        if "verify" in graphs:  # the sample is boolean, but the graph adds it to a mask
            rows, dynamic = graphs["verify"]
            graphs["verify"] = rows | {"mask": rows["mask"].float()}, dynamic
        return graphs

    Generate.get_sample_inputs = with_float_mask


class Draft(torch.nn.Module):
    """One draft of the assistant: from an embedding beside a hidden row to logits and the next hidden row, over K/V of the target."""

    def __init__(self, assistant: Any, sources: dict[str, int]) -> None:
        """`sources`: the target's layer whose K/V each type of layer reads."""
        super().__init__()
        self.assistant, self.sources, self.config = assistant, sources, assistant.config.get_text_config()
        head = assistant.masked_embedding
        if head is not None:
            cluster = torch.empty(head.vocab_size, dtype=torch.int32)
            cluster[head.token_ordering.long()] = (torch.arange(head.vocab_size) // head.vocab_size_per_centroid).to(torch.int32)
            self.register_buffer("cluster", cluster, persistent=False)

    def forward(self, activations: Any, input_pos: Any, mask: Any, **kv: Any) -> dict[str, Any]:
        """Shapes: activations [1, 1, 2 D], input_pos [1], mask [1, 1, 1, S] (not needed), K [1, heads, S, d], V [1, heads, d, S]."""
        model, row = self.assistant.model, self.assistant.pre_projection(activations)
        place, now = torch.arange(mask.shape[-1], dtype=torch.int32).view(1, 1, 1, -1), input_pos.view(1, 1, 1, 1)
        reachable = {"full_attention": place < now, "sliding_attention": (place < now) & (place >= now - self.config.sliding_window - 1)}
        masks = {kind: torch.where(inside, 0.0, OUT_OF_REACH) + 0.0 * mask for kind, inside in reachable.items()}
        angles = {kind: model.rotary_emb(row, input_pos.view(1, 1), kind) for kind in set(self.config.layer_types)}
        for layer in model.layers:
            kind = layer.self_attn.layer_type
            keys, values = (kv[f"kv_cache_{which}_{self.sources[kind]}"] for which in "kv")
            attended = self._attend(layer.self_attn, layer.input_layernorm(row), keys, values, masks[kind], angles[kind])
            row = row + layer.post_attention_layernorm(attended)
            row = (row + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(row)))) * layer.layer_scalar
        hidden = model.norm(row)
        return {"logits": self._logits(hidden), "projected_activations": self.assistant.post_projection(hidden)}

    def _attend(self, own: Any, row: Any, keys: Any, values: Any, mask: Any, angles: Any) -> Any:
        queries = apply_rotary_pos_emb(own.q_norm(own.q_proj(row).view(1, 1, -1, own.head_dim)), *angles, unsqueeze_dim=2)
        queries = queries.view(1, keys.shape[1], -1, own.head_dim)
        shares = torch.softmax(queries @ keys.transpose(-1, -2) * own.scaling + mask, -1)
        return own.o_proj((shares @ values.transpose(-1, -2)).reshape(1, 1, -1))

    def _logits(self, hidden: Any) -> Any:
        head, logits = self.assistant.masked_embedding, self.assistant.lm_head(hidden)
        if head is None:
            return logits
        nearness = head.centroids(hidden)[0, 0]
        # torch.topk becomes STABLEHLO_SORT, which the runtime does not have.
        weakest = torch.ops.tfl.topk_v2(nearness, head.centroid_intermediate_top_k)[0][-1:]
        return logits + ((nearness >= weakest).to(torch.float32)[self.cluster] - 1.0).view(1, 1, -1) * -OUT_OF_REACH


def export_draft(drafter: Path, text: Any, cache: int, path: Path, recipe: str) -> str:
    """Writes the graph of a draft for the target of config `text`; returns the path of the quantized one."""
    assistant = Gemma4AssistantForCausalLM.from_pretrained(drafter, dtype=torch.float32).eval()
    owners = list(text.layer_types)[: text.num_hidden_layers - text.num_kv_shared_layers]
    sources = {kind: max(layer for layer, each in enumerate(owners) if each == kind) for kind in set(owners)}
    inputs = {
        "activations": torch.zeros(1, 1, 2 * assistant.backbone_hidden_size),
        "input_pos": torch.zeros(1, dtype=torch.int32),
        "mask": torch.zeros(1, 1, 1, cache),
    }
    for kind, source in sorted(sources.items(), key=lambda pair: pair[1]):
        size = next(layer.self_attn.head_dim for layer in assistant.model.layers if layer.self_attn.layer_type == kind)
        inputs[f"kv_cache_k_{source}"] = torch.zeros(1, text.num_key_value_heads, cache, size)
        inputs[f"kv_cache_v_{source}"] = torch.zeros(1, text.num_key_value_heads, size, cache)
    converter = export_lib.converter_utils.Converter()
    converter.add_signature("mtp_drafter", Draft(assistant, sources).eval(), sample_kwargs=inputs)
    converter.convert(strict_export=False).export(str(path))
    return str(export_lib.maybe_quantize_model(str(path), recipe))


def main() -> None:
    """Exports a pair."""
    parser = argparse.ArgumentParser(usage="export_litert_pair.py TARGET DRAFTER OUT [--recipe NAME] [--cache TOKENS]")
    for name in ("target", "drafter", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--recipe", default="dynamic_wi4_afp32", help="quantization, a name of ai_edge_quantizer.recipe")
    parser.add_argument("--cache", type=int, default=1280, help="K/V rows")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    wrapped = options.out / "checkpoint"
    with_media_class(options.target, wrapped)
    mend_library()
    builder = litert_lm_builder.litertlm_builder
    build = builder.LitertLmFileBuilder.build

    def with_drafter(own: Any, file: Any, *arguments: Any, **keywords: Any) -> Any:
        text = AutoConfig.from_pretrained(wrapped).get_text_config()
        draft = export_draft(options.drafter, text, options.cache, options.out / "mtp_drafter.tflite", options.recipe)
        own.add_tflite_model(draft, builder.TfLiteModelType.MTP_DRAFTER)
        return build(own, file, *arguments, **keywords)

    builder.LitertLmFileBuilder.build = with_drafter
    export.export(
        model=str(wrapped),
        output_dir=str(options.out),
        prefill_lengths=PREFILL_ROWS,
        cache_length=options.cache,
        quantization_recipe=options.recipe,
        externalize_embedder=True,
        single_token_embedder=False,
        keep_temporary_files=True,
        export_vision_encoder=False,
        export_audio_encoder=False,
        assistant_model=str(options.drafter),
        mtp_verifier_step=VERIFY_ROWS,
    )
    for path in options.out.iterdir():  # gigabytes of what it was made of
        if path.name != "model.litertlm":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


if __name__ == "__main__":
    main()
