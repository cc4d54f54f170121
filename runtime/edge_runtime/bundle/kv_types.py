"""The types of K/V rows and their sizes, for every backend."""

from __future__ import annotations

from typing import Literal, get_args

from edge_runtime.bundle.gguf_types import TENSOR_TYPES, TYPE_NUMBERS
from edge_runtime.bundle.manifest import CacheLayout, LayerCache
from edge_runtime.errors import RequestError

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
