"""Tiny random multimodal pairs with the members' traits, as transformers writes them.

E2B: both towers, clip bounds that bite. 26B-A4B, 31B: a vision tower that is standardized, not clipped. 12B: no tower. These three attend
in both directions inside an image.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from edge_export.gguf.media_encoder import EncoderType
from edge_export.onnx.request import OnnxRequest
from edge_export.pipeline.export import export_pair
from edge_export.pipeline.request import ExportRequest
from edge_runtime.media.encoder_inputs import Image, Sound
from kept import kept
from tiny_members import MEMBERS, write_member, write_tokenizer

# The text of each media token, and its key in config.json.
MEDIA_TOKENS = {
    "<|image>": "boi_token_id",
    "<|image|>": "image_token_id",
    "<image|>": "eoi_token_id",
    "<|audio>": "boa_token_id",
    "<|audio|>": "audio_token_id",
    "<audio|>": "eoa_token_index",
}
VOCABULARY = 512
FIRST_MEDIA_TOKEN = VOCABULARY - len(MEDIA_TOKENS)
MEDIA_IDS = {text: FIRST_MEDIA_TOKEN + i for i, text in enumerate(MEDIA_TOKENS)}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "position_embedding_size": 128,
    "use_clipped_linears": True,
}
AUDIO = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [128, 4],
    "output_proj_dims": 48,
    "use_clipped_linears": True,
}
STANDARDIZED = VISION | {"use_clipped_linears": False, "standardize": True}
UNIFIED_VISION = {"mm_embed_dim": 64, "output_proj_dims": 64, "mm_posemb_size": 40}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|turn>' + m['role'] + '\\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}<|image|>{% else %}<|audio|>{% endif %}"
    "{% endfor %}{% endif %}{{ '<turn|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"
)


def write_media_member(folder: Path, *, member: str = "e2b", audio: bool = True, dtype: str = "bfloat16", **text: Any) -> Path:
    """Writes a target that takes images and, if the member does and `audio` is not False, sound."""
    import torch

    torch.manual_seed(5)
    model = _model(member, MEMBERS[member].text | text, audio=audio)
    generator = torch.Generator().manual_seed(13)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(_values(name, tensor, generator))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    write_media_tokenizer(folder)
    processor = {"image_processor": {"image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0], "image_seq_length": 280}}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


def _model(member: str, text: dict[str, Any], *, audio: bool) -> Any:
    import transformers

    ids = {key: MEDIA_IDS[token] for token, key in MEDIA_TOKENS.items()}
    if member == "12b":
        config = transformers.Gemma4UnifiedConfig(
            text_config=transformers.Gemma4UnifiedTextConfig(**text),
            vision_config=transformers.Gemma4UnifiedVisionConfig(**UNIFIED_VISION),
            audio_config=transformers.Gemma4UnifiedAudioConfig() if audio else None,
            **ids,
        )
        return transformers.Gemma4UnifiedForConditionalGeneration(config)
    small = member in ("e2b", "e4b")
    config = transformers.Gemma4Config(
        text_config=transformers.Gemma4TextConfig(**text | ({} if small else {"use_bidirectional_attention": "vision"})),
        vision_config=transformers.Gemma4VisionConfig(**VISION if small else STANDARDIZED),
        audio_config=transformers.Gemma4AudioConfig(**AUDIO) if audio and small else None,
        **ids,
    )
    return transformers.Gemma4ForConditionalGeneration(config)


def kept_media_pair(
    *, member: str = "e2b", dtype: str = "float16", media: EncoderType = "f32", context: int = 768, onnx: OnnxRequest | None = None
) -> Path:
    """A folder with a pair of this member, `target` and `drafter`, and its `bundle` of GGUF files, or of graphs if `onnx` is given.

    It is made once for all tests and read-only.
    """

    def make(root: Path) -> None:
        request = ExportRequest(
            target=str(write_media_member(root / "target", member=member, dtype=dtype)),
            drafter=str(write_media_assistant(root / "drafter", member)),
            output=root / "bundle",
            target_quantization="f16",
            drafter_quantization="f16",
            gguf=onnx is None,
            onnx=onnx,
            context=context,
            verify=False,
            media=media,
        )
        export_pair(request)

    return kept("media", {"member": member, "dtype": dtype, "media": media, "context": context, "onnx": onnx}, make)


def picture(height: int, width: int, seed: int) -> Image:
    """Returns an image of noise."""
    return Image(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def noise(samples: int) -> Sound:
    return Sound(np.random.default_rng(1).uniform(-0.5, 0.5, samples).astype(np.float32))


def reference_rows(model: Any, media: Image | Sound) -> np.ndarray:
    """Returns the soft rows of transformers' model [rows, hidden size]."""
    import torch

    with torch.no_grad():
        if isinstance(media, Image):
            result = model.model.get_image_features(torch.from_numpy(media.patches())[None], torch.from_numpy(media.positions())[None])
        else:
            mels = torch.from_numpy(media.mel_frames())[None]
            result = model.model.get_audio_features(mels, torch.ones(mels.shape[:2], dtype=torch.bool))
    rows = result.pooler_output
    return (torch.cat(list(rows)) if isinstance(rows, tuple) else rows).numpy().reshape(media.rows, -1)


def _values(name: str, tensor: Any, generator: Any) -> Any:
    import torch

    random = torch.randn(tensor.shape, generator=generator)
    if name.endswith(("input_min", "output_min")):
        return -2.0 - random.abs()
    if name.endswith(("input_max", "output_max")):
        return 2.0 + random.abs()
    if "norm" in name or name.endswith(("layer_scalar", "per_dim_scale")):
        return 1.0 + 0.1 * random
    return 0.3 * random if tensor.ndim < 2 else random * min(0.5, 1.5 / tensor.shape[-1] ** 0.5)


def write_media_tokenizer(folder: Path) -> None:
    """The tokenizer of the tiny members, whose last pieces become the media tokens, and a template that writes media."""
    write_tokenizer(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    model = tokenizer["model"]
    gone = {piece for piece, index in model["vocab"].items() if index >= FIRST_MEDIA_TOKEN}
    model["vocab"] = {piece: index for piece, index in model["vocab"].items() if piece not in gone} | MEDIA_IDS
    model["merges"] = [merge for merge in model["merges"] if "".join(merge) not in gone]
    tokenizer["added_tokens"] += [tokenizer["added_tokens"][0] | {"id": index, "content": text} for text, index in MEDIA_IDS.items()]
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    kinds = ("boi", "image", "eoi", "boa", "audio", "eoa")
    settings |= {f"{kind}_token": text for kind, text in zip(kinds, MEDIA_IDS, strict=True)}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def write_media_assistant(folder: Path, member: str = "e2b") -> Path:
    """Writes the assistant of `write_media_member`'s target, with the same tokenizer."""
    write_member(f"{member}-assistant", folder)
    write_media_tokenizer(folder)
    return folder
