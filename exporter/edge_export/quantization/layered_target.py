"""A target in float32 of which one layer at a time is in memory: all texts run through a layer before the next one is read.

Imports torch: import it only where a target is calibrated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from edge_export.checkpoint.safetensors import StoredTensor, mapped, read_values
from edge_export.checkpoint.sources import ResolvedSource

# Texts that run through a layer at once: what it computes in between takes several times the memory of their rows.
BATCH = 4

SharedRows = dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class LayerRows:
    """The rows [texts, T, hidden] behind the first `layers` layers, and the K/V rows [texts, heads, T, head_dim] that later ones share."""

    layers: int = 0
    rows: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    shared: SharedRows = field(default_factory=dict)


# From a module, its name in the whole model, and what runs it on all texts; returns what that returns.
Collect = Callable[[Any, str, Callable[[], torch.Tensor]], torch.Tensor]


class LayeredTarget:
    """The text model of a checkpoint. Its embeddings are looked up in the checkpoint's files."""

    def __init__(self, source: ResolvedSource) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(source.path, local_files_only=True).get_text_config()
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        self._tensors, self._model = source.checkpoint.tensors, whole.model.eval()
        self._empty_layers = list(self._model.layers)
        for name, module in list(self._model.named_children()):
            if name == "rotary_emb":  # it has no weights, and values of its own
                self._model.rotary_emb = type(module)(self._model.config)
            elif isinstance(module, nn.Embedding):
                setattr(self._model, name, _stand_in(_lookup(self._tensors[f"model.{name}.weight"], module.scalar_embed_scale)))
            elif name != "layers":
                setattr(self._model, name, self._filled(module, f"model.{name}"))

    @property
    def embed(self) -> Any:
        """The token embedding."""
        return self._model.embed_tokens

    def run(self, texts: list[list[int]], collect: Collect, behind: Callable[[LayerRows], None], start: LayerRows) -> LayerRows:
        """Runs texts of one length, from `start` on; returns the last rows, after the norm.

        `collect` runs what has weights: what is outside of the layers, and each layer. `behind` gets the rows behind each layer.
        """
        shared: SharedRows = dict(start.shared)

        def layer(number: int) -> Callable[..., torch.Tensor]:
            def forward(rows: torch.Tensor, *per_layer: torch.Tensor | None, **inputs: Any) -> torch.Tensor:
                if number < start.layers:
                    return start.rows
                name = f"model.layers.{number}"
                module = self._filled(copy.deepcopy(self._empty_layers[number]), name)
                rows = collect(module, name, lambda: _in_batches(module, rows, per_layer, shared, inputs))
                behind(LayerRows(layers=number + 1, rows=rows, shared=shared))
                return rows

            return forward

        self._model.layers = nn.ModuleList(_stand_in(layer(number)) for number in range(len(self._empty_layers)))
        ids = torch.tensor(texts)
        # All places: by a number transformers 5.24 cuts rows before layers that share K/V, also per-layer inputs where there are none.
        kept = torch.arange(ids.shape[1])
        rows = collect(self._model, "model", lambda: self._model(input_ids=ids, use_cache=False, logits_to_keep=kept).last_hidden_state)
        return LayerRows(layers=len(self._empty_layers), rows=rows, shared=shared)

    def _filled(self, module: Any, name: str) -> Any:
        module = module.to_empty(device="cpu").eval()
        for part, value in module.state_dict().items():
            tensor = self._tensors.get(f"{name}.{part}")
            # All tensors were checked when the checkpoint was opened; only a layer's scale may be left out, and is 1.
            if tensor is None:
                value.fill_(1)
            else:
                value.copy_(torch.from_numpy(read_values(tensor)).reshape(value.shape))
        return module


def _stand_in(forward: Callable[..., torch.Tensor]) -> nn.Module:
    """A module that computes this."""
    module = nn.Identity()
    module.forward = forward
    return module


def _lookup(tensor: StoredTensor, scale: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """An embedding whose rows are read from a file when they are asked for."""
    # Packed weights are unpacked at once.
    table = mapped(tensor) if tensor.scales is None else read_values(tensor)

    def rows(ids: torch.Tensor) -> torch.Tensor:
        different, places = ids.unique(return_inverse=True)
        return torch.from_numpy(table[different.numpy()].astype(np.float32))[places] * scale

    return rows


def _in_batches(
    layer: Any, rows: torch.Tensor, per_layer: tuple[torch.Tensor | None, ...], shared: SharedRows, inputs: dict[str, Any]
) -> torch.Tensor:
    """A layer on rows [texts, T, hidden]; the K/V rows that it shares are added to `shared`."""
    count = len(rows)
    mask = inputs["attention_mask"]
    made, owned = [], []
    for first in range(0, count, BATCH):
        here = slice(first, first + BATCH)
        own = {kind: (keys[here], values[here]) for kind, (keys, values) in shared.items()}
        changed = {
            "shared_kv_states": own,
            "attention_mask": mask[here] if mask is not None and len(mask) == count else mask,
        }
        made.append(layer(rows[here], *(part if part is None else part[here] for part in per_layer), **inputs | changed))
        owned.append(own)
    if layer.self_attn.store_full_length_kv:
        kind = layer.self_attn.layer_type
        shared[kind] = (torch.cat([own[kind][0] for own in owned]), torch.cat([own[kind][1] for own in owned]))
    return torch.cat(made)
