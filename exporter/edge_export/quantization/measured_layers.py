"""Runs a target in transformers with one layer at a time in memory, and sums the squares of its matrices' inputs.

All texts run through a layer in float32 before the next layer is read. This module imports torch, so import it only for a calibration.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from edge_export.checkpoint.architecture import text_name
from edge_export.checkpoint.safetensors import StoredTensor, mapped, read_values
from edge_export.checkpoint.sources import ResolvedSource
from edge_export.gguf.keys import gguf_name, stays_float32
from edge_export.quantization.importance import ChannelSums, Entries, SecondMoments

# How many texts run through a layer at once. A layer's intermediate values take several times the memory of the texts' rows.
BATCH = 4

SharedRows = dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class LayerRows:
    """Rows [texts, T, hidden] after the first `layers` layers, and the K/V rows [texts, heads, T, head_dim] that later layers share."""

    layers: int = 0
    rows: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    shared: SharedRows = field(default_factory=dict)


# A function that gets a module, the module's name in the whole model, and a function that runs it on all texts, whose result it returns.
Collect = Callable[[Any, str, Callable[[], torch.Tensor]], torch.Tensor]


class LayeredTarget:
    """The text model of a checkpoint. Embeddings are looked up in the checkpoint's files."""

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
            if name == "rotary_emb":  # it has no weights in the checkpoint but computes its values when it is made
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
        """Runs texts of equal length, starting after the layers of `start`. Returns the final rows, after the last norm.

        `collect` runs the modules that have weights: each layer, and the model outside the layers. `behind` gets the rows after each layer.
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
        # All positions, as a tensor. Given a number, transformers 5.24 cuts the rows before layers that share K/V, and fails on per-layer
        # inputs that a model does not have.
        kept = torch.arange(ids.shape[1])
        rows = collect(self._model, "model", lambda: self._model(input_ids=ids, use_cache=False, logits_to_keep=kept).last_hidden_state)
        return LayerRows(layers=len(self._empty_layers), rows=rows, shared=shared)

    def _filled(self, module: Any, name: str) -> Any:
        module = module.to_empty(device="cpu").eval()
        for part, value in module.state_dict().items():
            tensor = self._tensors.get(f"{name}.{part}")
            # All tensors were checked when the checkpoint was opened. Only a layer's scale may be missing, which stands for 1.
            if tensor is None:
                value.fill_(1)
            else:
                value.copy_(torch.from_numpy(read_values(tensor)).reshape(value.shape))
        return module


def _stand_in(forward: Callable[..., torch.Tensor]) -> nn.Module:
    """Returns a module with this forward function."""
    module = nn.Identity()
    module.forward = forward
    return module


def _lookup(tensor: StoredTensor, scale: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the forward function of an embedding, which reads only the rows that it needs from the file."""
    # Packed weights cannot be mapped, so they are unpacked completely.
    table = mapped(tensor) if tensor.scales is None else read_values(tensor)

    def rows(ids: torch.Tensor) -> torch.Tensor:
        different, places = ids.unique(return_inverse=True)
        return torch.from_numpy(table[different.numpy()].astype(np.float32))[places] * scale

    return rows


def _in_batches(
    layer: Any, rows: torch.Tensor, per_layer: tuple[torch.Tensor | None, ...], shared: SharedRows, inputs: dict[str, Any]
) -> torch.Tensor:
    """Runs a layer on rows [texts, T, hidden] in batches, and adds the K/V rows that it shares to `shared`."""
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


# Hooks sum the squares of the matrices' inputs while a model runs, and the products of all pairs of input channels.

# Matrices whose output goes directly into a norm, as a whole or by heads, and the epsilon of Gemma's norms.
_NORMED, _NORMED_HEADS, _EPSILON = ("o_proj", "down_proj", "per_layer_projection"), ("q_proj", "k_proj"), 1e-6
# Matrices whose output goes through another matrix before it is normed.
_GATED = ("gate_proj", "up_proj")


class InputSums:
    """Sums the squares of rows by GGUF tensor name, and the products of their channels for the matrices that `moments` keeps."""

    def __init__(self, moments: SecondMoments | None) -> None:
        self._moments = moments
        self._products: dict[str, Any] = {}
        self._sums: dict[str, NDArray[np.float64]] = {}
        self._counts: dict[str, NDArray[np.float64]] = {}

    def add(self, name: str, rows: Any, expert: int | None = None, experts: int = 1) -> None:
        """Adds rows [..., K] that were multiplied by this matrix, or by one expert's part of it, for which no moments are kept."""
        flat = rows.reshape(-1, rows.shape[-1]).float()
        place, width = expert or 0, flat.shape[1]
        if name not in self._sums:
            self._sums[name], self._counts[name] = np.zeros((experts, width)), np.zeros(experts)
        self._sums[name][place] += (flat * flat).sum(0).double().numpy()
        self._counts[name][place] += len(flat)
        if self._moments is not None and expert is None and self._moments.takes(name, width):
            if name not in self._products:
                self._products[name] = flat.new_zeros(width, width)
            self._products[name].addmm_(flat.T, flat)

    def entries(self) -> Entries:
        """Returns the sums, and passes the means of the products on to the moments."""
        for name in list(self._products):
            assert self._moments is not None
            self._moments.add(name, (self._products.pop(name) / self._counts[name][0]).numpy())
        return {name: ChannelSums(sums=self._sums[name].reshape(-1), counts=self._counts[name]) for name in self._sums}


@contextmanager
def collecting(model: Any, sums: InputSums, prefix: str, head: str | None = None) -> Iterator[None]:
    """Adds the inputs of every matrix of a module that is quantized in a GGUF to `sums`, by hooks.

    `prefix` is what the whole model's names have before the module's own. If `head` is given, inputs of `lm_head` are added under that
    name.
    """
    hooks = []
    values = set()
    for name, module in model.named_modules():
        if hasattr(module, "v_norm"):
            matrix, projection = ("k_proj", module.k_proj) if module.v_proj is None else ("v_proj", module.v_proj)
            values.add(projection)
            short = gguf_name(_text_name(f"{prefix}{name}.{matrix}.weight"))
            assert short is not None, "attention has names in a GGUF"
            hooks += _value_hooks(sums, short, module, projection)
        elif isinstance(module, nn.Linear) and module not in values:
            short = head if name == "lm_head" else gguf_name(_text_name(f"{prefix}{name}.weight"))
            if short is not None and not stays_float32(short, 2):
                behind, width = _normed_behind(model, name, module)
                hooks.append(behind.register_forward_hook(partial(_add_inputs, sums, short, width)))
        elif name.rpartition(".")[2] == "experts" and hasattr(module, "gate_up_proj"):
            names = tuple(gguf_name(_text_name(f"{prefix}{name}.{weight}")) or "" for weight in ("gate_up_proj", "down_proj"))
            hooks.append(module.register_forward_pre_hook(partial(_add_inputs_experts, sums, names)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _normed_behind(model: Any, name: str, module: Any) -> tuple[Any, int | None]:
    """Returns the module that has this matrix's inputs and whose outputs are normed next, and how many outputs a norm covers.

    If the outputs are not normed, it returns the matrix itself and None.
    """
    parent, _, matrix = name.rpartition(".")
    if matrix in _GATED:
        feed_forward = model.get_submodule(parent)
        return feed_forward, feed_forward.down_proj.out_features
    if matrix in _NORMED_HEADS:
        return module, model.get_submodule(parent).head_dim
    return module, module.out_features if matrix in _NORMED else None


def _add_inputs(sums: InputSums, name: str, width: int | None, _module: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Adds a matrix's inputs. If `width` outputs are normed together, errors in a row are weighted relative to the row's length."""
    sums.add(name, inputs[0] if width is None else _counted(inputs[0], _inverse_squares(output, width)))


def _inverse_squares(rows: Any, width: int) -> Any:
    """Returns the mean [...] of the inverse mean squares of each group of `width` values in rows [..., N]."""
    return (rows.unflatten(-1, (-1, width)).square().mean(-1) + _EPSILON).reciprocal().mean(-1)


def _counted(rows: Any, counts: Any) -> Any:
    """Scales rows [..., K] so that their squares are weighted by `counts` [...]. Weights are normalized to 1 on average."""
    return rows * (counts / counts.mean()).sqrt()[..., None]


def _value_hooks(sums: InputSums, name: str, attention: Any, projection: Any) -> list[Any]:
    """Hooks the matrix from which V is computed, and the attention that uses it; returns the hooks.

    An error in a row of V is weighted by the squares of the attention to that row, relative to the row's length, because V is normed. So
    the first token's row counts most: it gets most attention where a query has nothing to attend to, and its V is short.
    """
    kept: list[Any] = []

    def keep(_module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        kept[:] = inputs[0], output

    def add(_module: Any, _inputs: tuple[Any, ...], outputs: tuple[Any, Any]) -> None:
        rows, made = kept
        sums.add(name, _counted(rows, outputs[1].square().sum((1, 2)) * _inverse_squares(made, attention.head_dim)))

    return [projection.register_forward_hook(keep), attention.register_forward_hook(add)]


def _add_inputs_experts(sums: InputSums, names: tuple[str, ...], module: Any, inputs: tuple[Any, ...]) -> None:
    """Adds the inputs of experts. They are one module with 3-D weights, so the inputs of the second matrix are computed again here."""
    rows, chosen = inputs[0], inputs[1]
    experts = len(module.gate_up_proj)
    for expert in chosen.unique().tolist():
        selected = rows[(chosen == expert).any(dim=-1)]
        gate, up = nn.functional.linear(selected, module.gate_up_proj[expert]).chunk(2, dim=-1)
        sums.add(names[0], selected, expert, experts)
        sums.add(names[1], module.act_fn(gate) * up, expert, experts)


def _text_name(name: str) -> str:
    """Returns the name that a weight of transformers' model has in a text-only checkpoint."""
    return text_name(name, multimodal=False) or name
