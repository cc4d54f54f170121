"""Checks the GGUF files of a Gemma 4 pair, and of its encoders of images and sound, before llama.cpp opens them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from edge_runtime.bundle.gguf_header import TYPE_NUMBERS, VOCABULARY_KEY, GgufError, GgufHeader, LongArray, read_gguf_header
from edge_runtime.errors import BackendError

# For some values of keys, llama.cpp aborts the process instead of refusing the file. The limits come from load_hparams and create_memory in
# llama.cpp's src/llama-model.cpp, from src/models/gemma4.cpp, and from the assertions in ggml's operators.

# The tokenizers that edge-export writes. All others are code of llama.cpp that a bundle never needs, so they are refused.
TOKENIZERS = ("gemma4", "none")
# ggml's number of this type.
FLOAT32 = 0
TARGET, DRAFTER = "gemma4", "gemma4-assistant"
_WIDTH, _INT32 = 1 << 20, (1 << 31) - 1
# The smallest and largest value of each key. LLAMA_MAX_LAYERS is 512, LLAMA_MAX_EXPERTS 1024. llama.cpp allocates memory for the vocabulary
# size that a file without a tokenizer claims, and for the whole window of a drafter. Gemma 4 has a quarter of this vocabulary size, and
# windows of 512 and 1024.
_INTEGERS = {
    "block_count": (1, 512),
    "context_length": (1, _INT32),
    "embedding_length": (1, _WIDTH),
    "embedding_length_out": (1, _WIDTH),
    "embedding_length_per_layer_input": (0, _WIDTH),
    "attention.key_length": (2, _WIDTH),
    "attention.value_length": (2, _WIDTH),
    "attention.key_length_swa": (2, _WIDTH),
    "attention.value_length_swa": (2, _WIDTH),
    "attention.sliding_window": (1, _WIDTH),
    "expert_count": (0, 1024),
    "expert_group_count": (0, 0),
    "vocab_size": (0, 1 << 20),
}
_OF_EACH_LAYER = {
    "feed_forward_length": (1, 1 << 24),
    "attention.head_count": (1, _WIDTH),
    "attention.head_count_kv": (1, _WIDTH),
    "expert_used_count": (0, 1024),
    "expert_feed_forward_length": (1, 1 << 24),
}
_REALS = {
    "attention.layer_norm_rms_epsilon": (0.0, 1.0),
    "rope.freq_base": (1.0, 1e12),
    "rope.freq_base_swa": (1.0, 1e12),
    "final_logit_softcapping": (1e-3, 1e9),
}
# For these, llama.cpp would use a default if they are missing. Its converter always writes them, so a file without them is refused.
_NEEDED = (
    "block_count",
    "attention.key_length",
    "attention.key_length_swa",
    "attention.value_length",
    "attention.value_length_swa",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.sliding_window_pattern",
)
_SCALINGS = ("none", "linear", "yarn", "longrope")


def check_gguf(path: Path) -> GgufHeader:
    """Returns the header. Raises BackendError if `path` is not a file, or its header is damaged or does not fit the file's size."""
    if not path.is_file():
        raise BackendError(f"{path} is not a file; check the path or export the bundle again")
    try:
        state = path.stat()
        return _header(path, (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns))
    except (GgufError, OSError) as error:
        raise BackendError(f"{error}, or export the bundle again") from error


@lru_cache(maxsize=16)
def _header(path: Path, _state: tuple[int, ...]) -> GgufHeader:
    """Returns the header of a file, cached until the file changes.

    Opening a pair needs each header two or three times, and reading a vocabulary of 262,144 tokens takes a tenth of a second.
    """
    return read_gguf_header(path)


def check_model(path: Path, architecture: str) -> GgufHeader:
    """Returns the header of a model. Raises BackendError as `check_gguf` and `check_header` do."""
    return check_header(check_gguf(path), architecture)


def check_header(header: GgufHeader, architecture: str) -> GgufHeader:
    """Checks and returns the header of a model. Raises BackendError for another architecture, or for values that would abort llama.cpp."""
    if header.architecture != architecture:
        raise BackendError(
            f"{header.path.name} has the architecture {header.architecture!r:.40}, not {architecture!r};"
            " give the files of an exported bundle"
        )
    _check_tokenizer(header)
    check_gemma4(header)
    for tensor in header.tensors:
        # llama.cpp's CPU kernels add and multiply norms and scales with float32 rows only if they are float32 themselves.
        if len(tensor.shape) == 1 and tensor.type != FLOAT32:
            raise BackendError(f"{header.path}: {tensor.name!r:.80} is a vector that is not float32; export the bundle again")
    return header


def _check_tokenizer(header: GgufHeader) -> None:
    kind = header.keys.get("tokenizer.ggml.model")
    if kind not in TOKENIZERS:
        raise BackendError(f"{header.path} has the tokenizer {kind!r:.40}, not {' or '.join(TOKENIZERS)}; export the bundle again")
    tokens = header.keys.get(VOCABULARY_KEY)
    if isinstance(tokens, LongArray) and tokens.doubles:
        raise BackendError(f"{header.path}: {tokens.doubles} of its {tokens.length} tokens occur twice; export the bundle again")


def check_gemma4(header: GgufHeader) -> None:
    """Raises BackendError, which names the key, if a number is missing, is out of range, or does not fit the others."""
    keys = _Keys(header)
    for name in _NEEDED:
        if keys.value(name) is None:
            raise BackendError(f"{header.path}: {header.architecture}.{name} is missing; export the bundle again")
    integers = {name: keys.integer(name, minimum, maximum) for name, (minimum, maximum) in _INTEGERS.items()}
    for name, (lowest, highest) in _REALS.items():
        keys.real(name, lowest, highest, zero=name == "final_logit_softcapping")  # 0 turns capping off
    layers, experts = integers["block_count"], integers["expert_count"]
    each = {name: keys.of_each_layer(name, layers, minimum, maximum) for name, (minimum, maximum) in _OF_EACH_LAYER.items()}
    if any(heads % shared for heads, shared in zip(each["attention.head_count"], each["attention.head_count_kv"], strict=True)):
        raise keys.wrong("attention.head_count_kv", "a divisor of attention.head_count")
    if any(used > experts or bool(used) != bool(experts) for used in each["expert_used_count"]):
        raise keys.wrong("expert_used_count", f"a number up to the {experts} experts")
    if keys.value("rope.scaling.type", "none") not in _SCALINGS:
        raise keys.wrong("rope.scaling.type", f"one of {', '.join(_SCALINGS)}")
    keys.integer("nextn_predict_layers", 0, layers)
    _check_sharing(keys, layers, header.architecture)
    _check_rotation(keys)


def rows_read(drafter: GgufHeader, target: GgufHeader) -> tuple[list[tuple[bool, int, int]], list[tuple[bool, int, int]]]:
    """Returns (is sliding, K/V heads, their width) for each layer of a drafter: what the drafter expects, and what the target has.

    The drafter's sliding layers read the rows of the target's last layer but one, its full layers those of the last one (create_memory).
    """
    own, others = _rows(drafter), _rows(target)
    return own, [others[-2 if sliding else -1] for sliding, _, _ in own]


def _rows(header: GgufHeader) -> list[tuple[bool, int, int]]:
    keys = _Keys(header)
    pattern = keys.value("attention.sliding_window_pattern")
    heads = keys.of_each_layer("attention.head_count_kv", len(pattern), *_OF_EACH_LAYER["attention.head_count_kv"])
    widths = {sliding: keys.value(f"attention.key_length{'_swa' * sliding}") for sliding in (False, True)}
    return [(sliding, count, widths[sliding]) for sliding, count in zip(pattern, heads, strict=True)]


def owned_rows(target: GgufHeader) -> list[tuple[bool, int, int]]:
    """Returns (is sliding, K/V heads, their width) for each layer of a target that owns K/V rows; other layers read these rows."""
    rows = _rows(target)
    return rows[: len(rows) - _Keys(target).integer("attention.shared_kv_layers", 0, len(rows))]


def _check_sharing(keys: _Keys, layers: int, architecture: str) -> None:
    """Checks that layers without K/V rows can read those of the last sliding and of the last full layer that own rows."""
    pattern = keys.value("attention.sliding_window_pattern", [])
    if not isinstance(pattern, list) or len(pattern) != layers or True not in pattern or not {type(kind) for kind in pattern} <= {bool}:
        raise keys.wrong("attention.sliding_window_pattern", f"a list of {layers} booleans, some of them true")
    shared = keys.integer("attention.shared_kv_layers", 0, layers)
    if architecture == DRAFTER:
        return  # a drafter owns no rows
    first = layers - shared
    if first < 2 or any(pattern[first - 2 if sliding else first - 1] != sliding for sliding in pattern[first:]):
        raise keys.wrong("attention.shared_kv_layers", "a number that leaves a sliding and a full layer, last of those with K/V rows")


def _check_rotation(keys: _Keys) -> None:
    """Checks that V is as wide as K, and that an even number of K's values is rotated, in full and in sliding layers."""
    turned = None
    for kind in ("", "_swa"):
        length = keys.value(f"attention.key_length{kind}")
        if keys.value(f"attention.value_length{kind}") != length:
            raise keys.wrong(f"attention.value_length{kind}", f"the {length} of a key")
        turned = keys.value(f"rope.dimension_count{kind}", length if turned is None else turned)
        if not _is_integer(turned, 2, length) or turned % 2:  # with 0, llama.cpp would loop forever
            raise keys.wrong(f"rope.dimension_count{kind}", f"an even number from 2 to the {length} values of a key", turned)


class _Keys:
    """The keys of the file's architecture, by name without the architecture's prefix."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header

    def value(self, name: str, default: Any = None) -> Any:
        return self._header.keys.get(f"{self._header.architecture}.{name}", default)

    def wrong(self, name: str, expected: str, value: Any = None) -> BackendError:
        actual = self.value(name, value)
        return BackendError(
            f"{self._header.path}: {self._header.architecture}.{name} is {actual!r:.60}, not {expected}; export the bundle again"
        )

    def integer(self, name: str, minimum: int, maximum: int) -> int:
        """Returns the value of a key, 0 if it is missing. Raises BackendError if it is out of range."""
        value = self.value(name)
        if value is None:
            return 0
        if not _is_integer(value, minimum, maximum):
            raise self.wrong(name, f"an integer from {minimum} to {maximum}")
        return int(value)

    def real(self, name: str, minimum: float, maximum: float, *, zero: bool = False) -> None:
        """Raises BackendError if a float key is out of range. With `zero`, 0 is allowed too."""
        value = self.value(name)
        in_range = isinstance(value, float) and (minimum <= value <= maximum or (zero and value == 0))
        if value is not None and not in_range:
            raise self.wrong(name, f"a number from {minimum:g} to {maximum:g}")

    def of_each_layer(self, name: str, layers: int, minimum: int, maximum: int) -> Sequence[int]:
        """Returns one value per layer. The key has a list, or one value for all layers; if it is missing, the value is `minimum`."""
        value = self.value(name, minimum)
        values = value if isinstance(value, list) else [value] * layers
        if len(values) != layers or not all(_is_integer(number, minimum, maximum) for number in values):
            raise self.wrong(name, f"an integer from {minimum} to {maximum}, or one for each of the {layers} layers")
        return values


def _is_integer(value: Any, minimum: int, maximum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum


# Checks the GGUF file of a media encoder before llama.cpp opens it: its keys, and that it has every tensor with the shape that the keys
# require. Gemma 4 models have towers of layers (gemma4v, gemma4a), or only projections (12B: gemma4uv, gemma4ua).

_LARGEST = 1 << 16
_MAX_LAYERS = 128
_FLOAT_TYPES = tuple(TYPE_NUMBERS[name] for name in ("f32", "f16", "bf16"))
# Names of matrices that may be quantized, because ggml multiplies with them.
_MATRIX = re.compile(r"(?:[va]\.blk\.\d+\.(?:attn|ffn|conv_pw)\w*|mm\.(?:a\.)?input_projection|a\.pre_encode\.out)\.weight")
_PATCH, _POOLING, _COLOURS = 16, 3, 3
# Without an audio tower, a row has this many samples of sound at 16 kHz (tools/mtmd/clip.cpp).
_SAMPLES = 640
_BOUNDS = ("input_max", "input_min", "output_max", "output_min")
Shapes = dict[str, tuple[int, ...]]
# GGUF's types of all keys of an encoder that libmtmd reads; another type would abort the process.
_U32, _F32, _BOOL, _STRING, _FLOATS = (4,), (6,), (7,), (8,), (9, 6)
_SIZES = ("projection_dim", "embedding_length", "feed_forward_length", "block_count", "attention.head_count")
_EPSILON = "attention.layer_norm_epsilon"
_KEY_TYPES: dict[str, tuple[int, ...]] = (
    dict.fromkeys(("general.architecture", "general.name", "general.description"), _STRING)
    | dict.fromkeys(("clip.has_vision_encoder", "clip.has_audio_encoder", "clip.use_gelu"), _BOOL)
    | {f"clip.{tower}.{key}": _U32 for tower in ("vision", "audio") for key in _SIZES}
    | {f"clip.{tower}.projector_type": _STRING for tower in ("vision", "audio")}
    | {f"clip.{tower}.{_EPSILON}": _F32 for tower in ("vision", "audio")}
    | {"clip.vision.image_size": _U32, "clip.vision.patch_size": _U32, "clip.audio.num_mel_bins": _U32}
    | dict.fromkeys(("clip.vision.image_mean", "clip.vision.image_std"), _FLOATS)
)


@dataclass(frozen=True, kw_only=True)
class EncoderFacts:
    """Facts about an encoder. `has_audio`: it takes sound too; `mel_frames`: it does so through an audio tower.

    `longest`: the most pixels on a side of an image.
    """

    has_audio: bool
    mel_frames: bool
    longest: int


def check_encoder(path: Path, width: int) -> EncoderFacts:
    """Checks an encoder's file and returns its facts. `width` is the hidden size of the target.

    Raises BackendError if the file is damaged, of another kind, or for another target.
    """
    try:
        header = read_gguf_header(path)
    except GgufError as error:
        raise BackendError(str(error)) from error
    audio = header.keys.get("clip.has_audio_encoder") is True
    unified = header.keys.get("clip.vision.projector_type") == "gemma4uv"
    _check_keys(path, header, _expected_keys(width, audio=audio, unified=unified))
    if unified:
        expected = _embedder_shapes(path, header, width) | ({"mm.a.input_projection.weight": (width, _SAMPLES)} if audio else {})
    else:
        expected = _vision_shapes(path, header, width) | (_audio_shapes(path, header, width) if audio else {})
    _check_tensors(path, header, expected)
    side = _PATCH * (_POOLING if unified else 1)
    return EncoderFacts(
        has_audio=audio, mel_frames=audio and not unified, longest=side * _dimension(path, header, "v.position_embd.weight", 1)
    )


def _expected_keys(width: int, *, audio: bool, unified: bool) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "general.architecture": "clip",
        "clip.has_vision_encoder": True,
        "clip.vision.projector_type": "gemma4uv" if unified else "gemma4v",
        "clip.vision.patch_size": _PATCH,
        "clip.vision.projection_dim": width,
    }
    if audio:
        kind = "gemma4ua" if unified else "gemma4a"
        keys |= {"clip.audio.projector_type": kind, "clip.audio.num_mel_bins": 128, "clip.audio.projection_dim": width}
    if not unified:
        return keys | {"clip.use_gelu": True}
    inputs = ("vision", "audio") if audio else ("vision",)
    return keys | {f"clip.{medium}.{key}": 0 for medium in inputs for key in ("feed_forward_length", "block_count", "attention.head_count")}


def _check_keys(path: Path, header: GgufHeader, expected: dict[str, Any]) -> None:
    for key, types in header.types.items():
        if types != _KEY_TYPES.get(key, None if key.startswith("clip.") else types):
            raise BackendError(f"{path}: the key {key[:80]!r} is none of an encoder, or of another type; export the bundle again")
        value = header.keys[key]
        odd = key.endswith(_EPSILON) and not 0 <= value < 1
        if key in _KEY_TYPES and types == _FLOATS:
            odd = not isinstance(value, list) or len(value) != _COLOURS
        if odd:
            raise BackendError(f"{path}: {key} is {str(value)[:40]}, which no encoder has; export the bundle again")
    for key, value in expected.items():
        if header.keys.get(key) != value:
            raise BackendError(f"{path}: {key} is {str(header.keys.get(key))[:40]!r}, not {value!r}; export the bundle again")


def _check_tensors(path: Path, header: GgufHeader, expected: Shapes) -> None:
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if tensors.keys() != expected.keys():
        odd = sorted(tensors.keys() ^ expected.keys())[0]
        raise BackendError(f"{path}: the tensor {odd[:80]!r} is {'unknown' if odd in tensors else 'missing'}; export the bundle again")
    for name, shape in expected.items():
        quantized = tensors[name].type == TYPE_NUMBERS["q8_0"] and len(shape) == 2 and _MATRIX.fullmatch(name)
        if tuple(tensors[name].shape)[::-1] != shape or not (quantized or tensors[name].type in _FLOAT_TYPES):
            got = f"{list(tensors[name].shape)[::-1]} of type {tensors[name].type}"
            raise BackendError(f"{path}: {name!r} is {got}, not {list(shape)} of floats or q8_0; export the bundle again")


def _count(path: Path, header: GgufHeader, key: str, maximum: int = _LARGEST) -> int:
    value = header.keys.get(key)
    if type(value) is not int or not 0 < value <= maximum:
        raise BackendError(f"{path}: {key} is {str(value)[:40]!r}, not a number from 1 to {maximum}; export the bundle again")
    return value


def _dimension(path: Path, header: GgufHeader, name: str, index: int) -> int:
    """Returns a size that no key states: dimension `index` of a tensor, with the number of rows as dimension 0."""
    for tensor in header.tensors:
        if tensor.name == name and len(tensor.shape) > index and 0 < tensor.shape[::-1][index] <= _LARGEST:
            return tensor.shape[::-1][index]
    raise BackendError(f"{path} lacks a usable tensor {name!r}; export the bundle again")


def _heads(path: Path, header: GgufHeader, tower: str, size: int) -> int:
    heads = _count(path, header, f"clip.{tower}.attention.head_count")
    if size % (4 * heads):
        raise BackendError(f"{path}: {heads} heads do not share {size} values in fours; export the bundle again")
    return heads


def _linear(name: str, shape: tuple[int, int], clipped: bool) -> Shapes:
    return {f"{name}.weight": shape} | ({f"{name}.{bound}": (1,) for bound in _BOUNDS} if clipped else {})


def _embedder_shapes(path: Path, header: GgufHeader, width: int) -> Shapes:
    size = _count(path, header, "clip.vision.embedding_length")
    values = 3 * (_PATCH * _POOLING) ** 2
    shapes: Shapes = {
        "v.patch_embd.weight": (size, values),
        "v.patch_embd.bias": (size,),
        "v.position_embd.weight": (2, _dimension(path, header, "v.position_embd.weight", 1), size),
        "mm.input_projection.weight": (width, size),
    }
    for norm, length in ((1, values), (2, size), (3, size)):
        shapes |= {f"v.patch_norm.{norm}.{part}": (length,) for part in ("weight", "bias")}
    return shapes


def _vision_shapes(path: Path, header: GgufHeader, width: int) -> Shapes:
    size = _count(path, header, "clip.vision.embedding_length")
    wide = _count(path, header, "clip.vision.feed_forward_length")
    head = size // _heads(path, header, "vision", size)
    clipped = any(tensor.name == "v.blk.0.attn_q.input_max" for tensor in header.tensors)
    positions = _dimension(path, header, "v.position_embd.weight", 1)
    shapes: Shapes = {
        "v.patch_embd.weight": (size, 3, 16, 16),
        "v.position_embd.weight": (2, positions, size),
        "mm.input_projection.weight": (width, size),
    }
    if any(tensor.name.startswith("v.std_") for tensor in header.tensors):
        shapes |= {"v.std_bias": (size,), "v.std_scale": (size,)}
    for layer in range(_count(path, header, "clip.vision.block_count", _MAX_LAYERS)):
        at = f"v.blk.{layer}."
        shapes |= {f"{at}{norm}.weight": (size,) for norm in ("ln1", "ln2", "attn_post_norm", "ffn_post_norm")}
        shapes |= {f"{at}{norm}.weight": (head,) for norm in ("attn_q_norm", "attn_k_norm")}
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            shapes |= _linear(at + name, (size, size), clipped)
        for name, shape in (("ffn_gate", (wide, size)), ("ffn_up", (wide, size)), ("ffn_down", (size, wide))):
            shapes |= _linear(at + name, shape, clipped)
    return shapes


def _audio_shapes(path: Path, header: GgufHeader, width: int) -> Shapes:
    size = _count(path, header, "clip.audio.embedding_length")
    head = size // _heads(path, header, "audio", size)
    clipped = any(tensor.name == "a.blk.0.attn_q.input_max" for tensor in header.tensors)
    first, second = (_dimension(path, header, f"a.conv1d.{i}.norm.weight", 0) for i in (0, 1))
    output = _dimension(path, header, "a.pre_encode.out.bias", 0)
    shapes: Shapes = {
        "a.conv1d.0.weight": (first, 1, 3, 3),
        "a.conv1d.0.norm.weight": (first,),
        "a.conv1d.1.weight": (second, first, 3, 3),
        "a.conv1d.1.norm.weight": (second,),
        "a.input_projection.weight": (size, 32 * second),
        "a.pre_encode.out.weight": (output, size),
        "a.pre_encode.out.bias": (output,),
        "mm.a.input_projection.weight": (width, output),
    }
    norms = (
        "ffn_norm",
        "ffn_post_norm",
        "ffn_norm_1",
        "ffn_post_norm_1",
        "attn_pre_norm",
        "attn_post_norm",
        "conv_norm",
        "norm_conv",
        "ln2",
    )
    for layer in range(_count(path, header, "clip.audio.block_count", _MAX_LAYERS)):
        at = f"a.blk.{layer}."
        shapes |= {f"{at}{norm}.weight": (size,) for norm in norms}
        shapes |= {f"{at}per_dim_scale.weight": (head,), f"{at}attn_k_rel.weight": (size, size), f"{at}conv_dw.weight": (size, 5)}
        for end in ("", "_1"):
            shapes |= _linear(f"{at}ffn_up{end}", (4 * size, size), clipped) | _linear(f"{at}ffn_down{end}", (size, 4 * size), clipped)
        for name in ("attn_q", "attn_k", "attn_v", "attn_out", "conv_pw2"):
            shapes |= _linear(at + name, (size, size), clipped)
        shapes |= _linear(f"{at}conv_pw1", (2 * size, size), clipped)
    return shapes
