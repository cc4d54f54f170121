"""Types of tensors, of quantizations and of K/V rows, with their sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from edge_runtime.bundle.manifest import CacheLayout, LayerCache
from edge_runtime.errors import RequestError

# The one table of what GGUF files hold: ggml's types of tensors, and the quantizations of whole files, which mix some of them.
#
# To add a quantization, add an entry to `_QUANTIZATIONS`: with a `kl_limit`, edge-export offers it. Its error compensation
# (`--calibrate`) also needs the layout of its blocks in edge_export/quantization/compensated_gguf.py.


@dataclass(frozen=True, kw_only=True)
class TensorType:
    """A type of ggml/include/ggml.h: its name, how many weights a block holds, and in how many bytes.

    `copy_bytes` is the size of a block in the copy that llama.cpp repacks (ggml/src/ggml-cpu/repack.cpp) or the row kernels pack
    (backends/kernels/src/layout.h) when a model is loaded, the larger one; 0 where no processor has a copy.
    """

    name: str
    weights: int
    bytes: int
    copy_bytes: int = 0

    @property
    def bits(self) -> float:
        """Bits per weight in a file."""
        return 8 * self.bytes / self.weights

    @property
    def copy_bits(self) -> float:
        """Bits per weight of the copy made for the processor."""
        return 8 * self.copy_bytes / self.weights


# By ggml's number of the type.
TENSOR_TYPES = {
    0: TensorType(name="f32", weights=1, bytes=4),
    1: TensorType(name="f16", weights=1, bytes=2),
    2: TensorType(name="q4_0", weights=32, bytes=18, copy_bytes=18),
    3: TensorType(name="q4_1", weights=32, bytes=20, copy_bytes=20),
    6: TensorType(name="q5_0", weights=32, bytes=22, copy_bytes=22),
    7: TensorType(name="q5_1", weights=32, bytes=24, copy_bytes=24),
    8: TensorType(name="q8_0", weights=32, bytes=34, copy_bytes=34),
    10: TensorType(name="q2_K", weights=256, bytes=84, copy_bytes=84),
    11: TensorType(name="q3_K", weights=256, bytes=110),
    12: TensorType(name="q4_K", weights=256, bytes=144, copy_bytes=148),
    13: TensorType(name="q5_K", weights=256, bytes=176, copy_bytes=180),
    14: TensorType(name="q6_K", weights=256, bytes=210, copy_bytes=210),
    16: TensorType(name="iq2_xxs", weights=256, bytes=66),
    17: TensorType(name="iq2_xs", weights=256, bytes=74),
    18: TensorType(name="iq3_xxs", weights=256, bytes=98),
    19: TensorType(name="iq1_s", weights=256, bytes=50),
    20: TensorType(name="iq4_nl", weights=32, bytes=18, copy_bytes=18),
    21: TensorType(name="iq3_s", weights=256, bytes=110),
    22: TensorType(name="iq2_s", weights=256, bytes=82),
    23: TensorType(name="iq4_xs", weights=256, bytes=136),
    24: TensorType(name="i8", weights=1, bytes=1),
    25: TensorType(name="i16", weights=1, bytes=2),
    26: TensorType(name="i32", weights=1, bytes=4),
    27: TensorType(name="i64", weights=1, bytes=8),
    28: TensorType(name="f64", weights=1, bytes=8),
    29: TensorType(name="iq1_m", weights=256, bytes=56),
    30: TensorType(name="bf16", weights=1, bytes=2),
    34: TensorType(name="tq1_0", weights=256, bytes=54),
    35: TensorType(name="tq2_0", weights=256, bytes=66),
    39: TensorType(name="mxfp4", weights=32, bytes=17, copy_bytes=17),
}
TYPE_NUMBERS = {kind.name: number for number, kind in TENSOR_TYPES.items()}


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """A quantization of a whole file: its name, its number in enum llama_ftype (llama.cpp's include/llama.h), and the types it mixes.

    `matrices` are the types of the layers' matrices with their shares of the weights, empty where the mix is not known here; `tables` is
    that of the tables with a row per token, the tied output head among them. `kl_limit` is the mean KL from the reference, in nats, above
    which an export fails; None where no export makes such a file. `weighed`: llama.cpp chooses its scales by importance. `raised`: tensors
    whose name has this part get this type in all layers, where llama.cpp's own mix has it in some.
    """

    name: str
    file_type: int
    matrices: tuple[tuple[str, float], ...] = ()
    tables: str = ""
    kl_limit: float | None = None
    weighed: bool = False
    raised: tuple[tuple[str, str], ...] = ()

    def file_bytes(self, weights: int, table_weights: int = 0) -> int:
        """Returns about how many bytes a file of so many weights has, `table_weights` of them in tables."""
        bits = sum(share * _named(kind).bits for kind, share in self.matrices)
        return int(((weights - table_weights) * bits + table_weights * _named(self.tables).bits) / 8)

    def copy_bytes(self, weights: int, head_weights: int) -> int:
        """Returns about how many bytes the copies of so many matrix weights and of the output head take."""
        bits = sum(share * _named(kind).copy_bits for kind, share in self.matrices)
        return int((weights * bits + head_weights * _named(self.tables).copy_bits) / 8)


def _named(name: str) -> TensorType:
    return TENSOR_TYPES[TYPE_NUMBERS[name]]


# KL limits: at least twice what such files show of real matrices of 270 million weights (docs/results.md), which lose more than
# larger models, and at most 1.0, where perplexity has doubled or tripled. q5_k_m and q6_k were not measured there and have those of
# their neighbours.
# In the mixes named _M a fifth of the weights of a Gemma 4 is q6_K, with all of ffn_down three tenths.
_QUANTIZATIONS = (
    Quantization(name="q4_0", file_type=2, matrices=(("q4_0", 1),), tables="q6_K", kl_limit=1.0, weighed=True),
    Quantization(
        name="q4_k_m",
        file_type=15,
        matrices=(("q4_K", 0.7), ("q6_K", 0.3)),
        tables="q6_K",
        kl_limit=0.4,
        weighed=True,
        # Of real matrices all layers' mean KL is 0.115 with it, and 0.199 with q4_K there instead. V, which is small, alone costs 0.19
        # where half of its layers have 5 bits.
        raised=(("ffn_down.weight", "q6_K"), ("attn_v.weight", "q6_K")),
    ),
    Quantization(name="q5_k_m", file_type=17, matrices=(("q5_K", 0.8), ("q6_K", 0.2)), tables="q6_K", kl_limit=0.4, weighed=True),
    Quantization(name="q6_k", file_type=18, matrices=(("q6_K", 1),), tables="q6_K", kl_limit=0.2, weighed=True),
    Quantization(name="q8_0", file_type=7, matrices=(("q8_0", 1),), tables="q8_0", kl_limit=0.08),
    Quantization(name="f16", file_type=1, matrices=(("f16", 1),), tables="f16", kl_limit=0.02),
    Quantization(name="bf16", file_type=32, matrices=(("bf16", 1),), tables="bf16", kl_limit=0.05),
    Quantization(name="f32", file_type=0, matrices=(("f32", 1),), tables="f32"),
    Quantization(name="q4_1", file_type=3, matrices=(("q4_1", 1),), tables="q6_K"),
    Quantization(name="q5_0", file_type=8, matrices=(("q5_0", 1),), tables="q6_K"),
    Quantization(name="q5_1", file_type=9, matrices=(("q5_1", 1),), tables="q6_K"),
    Quantization(name="q2_k", file_type=10),
    Quantization(name="q3_k_s", file_type=11),
    Quantization(name="q3_k_m", file_type=12),
    Quantization(name="q3_k_l", file_type=13),
    Quantization(name="q4_k_s", file_type=14),
    Quantization(name="q5_k_s", file_type=16),
    Quantization(name="iq4_nl", file_type=25),
    Quantization(name="iq4_xs", file_type=30),
)
QUANTIZATIONS = {kind.name: kind for kind in _QUANTIZATIONS}
OFFERED = tuple(kind.name for kind in _QUANTIZATIONS if kind.kl_limit is not None)
MIXED = "mixed"


def quantization_name(file_type: object) -> str:
    """Returns the quantization with this number of enum llama_ftype; MIXED if there is none here."""
    return next((kind.name for kind in _QUANTIZATIONS if kind.file_type == file_type), MIXED)


KvType = Literal["f16", "q8_0", "q4_0"]
KV_TYPES: tuple[KvType, ...] = get_args(KvType)
DEFAULT_KV_TYPE: KvType = "f16"
# The quantized ones store this many values of a head with one scale.
BLOCK = 32


def row_bytes(cache: LayerCache, kv_type: KvType) -> int:
    """Returns the bytes of one row of one layer, K and V together."""
    stored = TENSOR_TYPES[TYPE_NUMBERS[kv_type]]
    return 2 * cache.kv_heads * cache.head_dim * stored.bytes // stored.weights


def check_kv_type(layout: CacheLayout, kv_type: str) -> KvType:
    """Returns the type. Raises RequestError if it is unknown, or if its blocks do not divide the heads of this layout."""
    if kv_type not in KV_TYPES:
        raise RequestError(f"KV type {kv_type!r} is unknown; choose one of {', '.join(KV_TYPES)}")
    for name, cache in (("sliding", layout.sliding), ("full", layout.full)):
        if kv_type != "f16" and cache is not None and cache.head_dim % BLOCK:
            raise RequestError(
                f"KV type {kv_type} stores {BLOCK} values together, but the {name} heads have {cache.head_dim}, not a multiple; choose f16"
            )
    return kv_type
