"""Compares 4-bit quantizations of a target by the error of its outputs: llama.cpp's types and ours, as they are, with errors weighed by
importance, and compensated besides (what --calibrate does).

    python scripts/benchmarks/bench_quantizers.py --json quantizers.json

Only the weights differ: the dequantized weights run in the reference implementation in float32, so kernels and rounded activations have no
effect. Rows are all positions of held-out prompts and of the reference's greedy continuations. Importance is computed from the source of
Python's standard library (or --text), without the files that the prompts are from.
"""

from __future__ import annotations

import json
import re
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from edge_devices.command_line import one_sentence_errors
from edge_export.checkpoint.architecture import text_name
from edge_export.checkpoint.checkpoint import Checkpoint, open_checkpoint
from edge_export.checkpoint.shipped_pair import reference_pair
from edge_export.checkpoint.sources import ResolvedSource
from edge_export.checkpoint.tokenizer_vocabulary import read_vocabulary
from edge_export.gguf.tensor_names import gguf_name, stays_float32
from edge_export.gguf.writer import write_gguf
from edge_export.onnx.block_quantization import WeightSpec, dequantize, quantize_matrix
from edge_export.onnx.request import OnnxRequest
from edge_export.onnx.weights import table_format, weight_format
from edge_export.parity.reference import Reference, divergence, load_reference
from edge_export.quantization.calibration import CalibrationRequest, calibrate
from edge_export.quantization.compensated_gguf import compensate_gguf
from edge_export.quantization.importance import Importance, SecondMoments, fitted
from edge_export.quantization.llama_quantize import quantize_gguf

Weights = dict[str, NDArray[np.float32]]
TABLES = ("token_embd.weight", "per_layer_token_embd.weight")
GGUF_TYPES = ("q4_0", "q4_k_m")
BLOCKS = (32, 128)
# What the ONNX exporter makes of int4, the embedding included.
EXPORTS = {f"ONNX int4, blocks of {block}": OnnxRequest(block=block) for block in (32, 64, 128)} | {
    "ONNX int4, mixed": OnnxRequest(),
    "ONNX int4, mixed, int4 embedding": OnnxRequest(embedding="int4"),
}
SENSITIVE, VALUES = re.compile(r"blk\.\d+\.(ffn_down|proj)\.weight"), re.compile(r"blk\.\d+\.attn_v\.weight")
TEXT_BYTES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What one way loses: mean KL in nats with its standard error over prompts, greedy agreement, bits per weight as stored."""

    way: str
    kl: float
    kl_error: float
    greedy_agreement: float
    bits: float


class Target:
    """The reference model, its matrices by GGUF name, and what it says of the prompts with its own weights."""

    def __init__(self, folder: Path, prompts: list[str], continuation: int) -> None:
        from transformers import PreTrainedTokenizerFast

        self._model = load_reference(folder)
        self._matrices = {}
        for name, parameter in self._model.named_parameters():
            short = gguf_name(text_name(name, multimodal=False) or name)
            if short is not None and parameter.ndim == 2 and not stays_float32(short, 2):
                self._matrices[short] = parameter
        self.weights: Weights = {name: parameter.detach().numpy().copy() for name, parameter in self._matrices.items()}
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        self._texts = [self._continued(tokenizer.encode(prompt), continuation) for prompt in prompts]
        self._reference = [self._logits(tokens) for tokens in self._texts]

    @property
    def rows(self) -> int:
        """How many rows of logits are compared."""
        return sum(len(tokens) for tokens in self._texts)

    def loss(self, way: str, weights: Weights, bits: float) -> Loss:
        """What the model loses with these weights in place of its own; it has its own again afterwards."""
        self._put(weights)
        try:
            results = [divergence(exact, self._logits(tokens)) for tokens, exact in zip(self._texts, self._reference, strict=True)]
        finally:
            self._put(self.weights)
        counts = np.array([len(tokens) for tokens in self._texts])
        share = counts / counts.sum()
        kls = np.array([each.mean_kl for each in results])
        mean = float(share @ kls)
        return Loss(
            way=way,
            kl=mean,
            kl_error=float(np.sqrt(np.sum((share * (kls - mean)) ** 2))),
            greedy_agreement=float(share @ [each.greedy_agreement for each in results]),
            bits=bits,
        )

    def _put(self, weights: Weights) -> None:
        with torch.inference_mode():
            for name, values in weights.items():
                self._matrices[name].copy_(torch.from_numpy(values))

    def _logits(self, tokens: list[int]) -> NDArray[np.float32]:
        with torch.inference_mode():
            logits: NDArray[np.float32] = self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()
        return logits

    def _continued(self, tokens: list[int], count: int) -> list[int]:
        made = self._model.generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False) if count else torch.tensor([tokens])
        return [int(token) for token in made[0]]


def losses(
    target: Target, checkpoint: Checkpoint, importance: Importance, folder: Path, threads: int, say: Callable[[str], None]
) -> Iterator[Loss]:
    """Yields what every way loses."""
    plain = folder / "plain.gguf"
    write_gguf(checkpoint, plain, "f32", lambda _: None)
    weighed = replace(importance, moments=None)
    ways = {"": None, ", importance": weighed, ", compensated": importance}
    for kind in GGUF_TYPES:
        for name, counts in ways.items():
            say(way := f"GGUF {kind}{name}")
            quantize_gguf(plain, folder / "made.gguf", kind, threads, importance=counts)
            if counts is importance:
                compensate_gguf(folder / "made.gguf", checkpoint, importance)
            weights, bits = read_weights(folder / "made.gguf", target.weights)
            yield target.loss(way, weights, bits)
    for block in BLOCKS:
        for method, used in (("rtn", None), ("search", None), ("search", weighed)):
            say(way := f"nbits {block}, {method}{', importance' if used else ''}")
            weights, bits = rounded(target.weights, WeightSpec(bits=4, block=block, method=method), used)  # type: ignore[arg-type]
            yield target.loss(way, weights, bits)
    for name, request in EXPORTS.items():
        for how, counts in ways.items():
            say(way := f"{name}{how}")
            weights, bits = exported(target.weights, request, counts)
            yield target.loss(way, weights, bits)


def read_weights(path: Path, exact: Weights) -> tuple[Weights, float]:
    """The dequantized matrices of a GGUF file, and their bits per weight."""
    tensors = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name in exact]
    weights = {t.name: np.array(gguf.quants.dequantize(t.data, t.tensor_type), np.float32).reshape(exact[t.name].shape) for t in tensors}
    return weights, 8 * sum(int(t.n_bytes) for t in tensors) / sum(values.size for values in weights.values())


def rounded(weights: Weights, spec: WeightSpec, importance: Importance | None) -> tuple[Weights, float]:
    """The matrices quantized and back, the tables in 8 bits; rows that a block does not divide take the largest block that does."""

    def spec_of(name: str, columns: int) -> WeightSpec:
        block = next((b for b in (spec.block, 64, 32) if b <= spec.block and columns % b == 0), 32)
        return WeightSpec(bits=8 if name in TABLES else spec.bits, block=block, method=spec.method)

    return quantized(weights, spec_of, importance)


def exported(weights: Weights, request: OnnxRequest, importance: Importance | None) -> tuple[Weights, float]:
    """The matrices quantized as the ONNX exporter does it, and back."""

    def spec_of(name: str, columns: int) -> WeightSpec:
        format = table_format(request) if name == TABLES[0] else weight_format(request.target, request)
        if format.sensitive is not None and SENSITIVE.fullmatch(name):
            format = format.sensitive
        elif format.values is not None and VALUES.fullmatch(name):
            format = format.values
        spec = format.for_columns(columns).spec
        assert spec is not None, "rows of the pair are whole blocks"
        return spec

    return quantized(weights, spec_of, importance)


def quantized(weights: Weights, spec_of: Callable[[str, int], WeightSpec], importance: Importance | None) -> tuple[Weights, float]:
    """The matrices quantized and back, and their bits per weight; `spec_of` says how from a name and a row's length."""
    made, stored = {}, 0
    for name, values in weights.items():
        counts = importance.values.get(name) if importance else None
        moments = importance.moments if importance else None
        factor = moments.factor(name) if moments and moments.has(name) else None
        packed = quantize_matrix(values, spec_of(name, values.shape[1]), None if counts is None else counts[0], factor)
        made[name] = dequantize(packed)
        stored += packed.packed.nbytes + packed.scales.nbytes
    return made, 8 * stored / sum(values.size for values in weights.values())


def standard_library(without: list[str]) -> str:
    """About TEXT_BYTES of Python's own library, spread over it, leaving out every file that one of these texts is in."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")) + sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-s]*/*.py"))
    files = [path for path in files if "site-packages" not in path.parts]
    texts = [text for text in (path.read_text("utf-8", "ignore") for path in files) if not any(piece.strip() in text for piece in without)]
    each = max(1, TEXT_BYTES // len(texts))
    return "".join(text[:each] for text in texts)


def measured_importance(folder: Path, text: Path, checkpoint: Checkpoint, scratch: Path, threads: int) -> Importance:
    """Importance of the target's channels on this text, with second moments in the folder `scratch`."""
    moments = SecondMoments(scratch)
    source = ResolvedSource(role="target", origin=str(folder), checkpoint=checkpoint, tokenizer=read_vocabulary(folder))
    reference = Reference(target=source, drafter=source, threads=threads, context=source.checkpoint.architecture.context)
    request = CalibrationRequest(reference=reference, text=text, with_drafter=False, moments={"target": moments})
    made = calibrate(request)
    return replace(fitted(made.target, checkpoint, made.source), moments=moments)


def report(results: list[Loss]) -> str:
    """One line per way."""
    lines = [f"{'way':<40} {'mean KL':>9} {'+-':>8} {'greedy':>7} {'bits/weight':>11}"]
    for loss in results:
        lines.append(f"{loss.way:<40} {loss.kl:>9.5f} {loss.kl_error:>8.5f} {loss.greedy_agreement:>7.1%} {loss.bits:>11.2f}")
    return "\n".join(lines)


@click.command(context_settings={"show_default": True})
@click.option("--target", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Checkpoint.  [default: the shipped one]")
@click.option(
    "--prompts", "prompt_files", type=click.Path(path_type=Path, exists=True, dir_okay=False), multiple=True, help="JSON lists of texts."
)
@click.option(
    "--text", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Calibration text.  [default: Python's own library]"
)
@click.option("--continuation", type=click.IntRange(min=0), default=48, help="Tokens the reference continues each prompt by.")
@click.option("--threads", type=click.IntRange(min=1), default=1)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write all figures here.")
@one_sentence_errors()
def main(
    target: Path | None, prompt_files: tuple[Path, ...], text: Path | None, continuation: int, threads: int, json_path: Path | None
) -> None:
    """Compare 4-bit quantizers on a target."""
    torch.set_num_threads(threads)

    def say(what: str) -> None:
        click.echo(what, err=True)

    folder = target or reference_pair()[0]
    files = prompt_files or tuple(sorted(reference_pair()[0].parent.glob("prompts.*.json")))
    prompts = [prompt for path in files for prompt in json.loads(path.read_text("utf-8"))]
    checkpoint = open_checkpoint(folder)
    with tempfile.TemporaryDirectory() as name:
        if text is None:
            text = Path(name) / "standard-library.txt"
            text.write_text(standard_library(prompts), encoding="utf-8")
        say(f"calibrating on {text}")
        importance = measured_importance(folder, text, checkpoint, Path(name) / "moments", threads)
        say(f"running {len(prompts)} prompts")
        model = Target(folder, prompts, continuation)
        results = list(losses(model, checkpoint, importance, Path(name), threads, say))
    if json_path:
        result: dict[str, Any] = {
            "target": str(folder),
            "rows": model.rows,
            "prompts": len(prompts),
            "importance": asdict(importance.source),
        }
        json_path.write_text(json.dumps(result | {"losses": [asdict(loss) for loss in results]}, indent=1), encoding="utf-8")
    click.echo(f"{model.rows} rows of {len(prompts)} prompts; importance from {importance.source.tokens} tokens")
    click.echo(report(results))


if __name__ == "__main__":
    main()
