"""Compares llama.cpp's quantizer with this project's own on the pair of real matrices: KL, perplexity and bytes, weights alone.

    python scripts/pairs/real_matrices.py
    python scripts/benchmarks/bench_quantizers.py --json peers.json --keep build/peers

The dequantized weights run in transformers in float32 on the held-out texts, so kernels and rounded activations have no effect. llama.cpp's
types come from its own quantizer, without and with an importance matrix of the same calibration. Results in `--json` stay: a run goes on
with the ways that are missing.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import click
import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from edge_devices.command_line import one_sentence_errors
from edge_export.checkpoint.architecture import text_name
from edge_export.checkpoint.checkpoint import Checkpoint, open_checkpoint
from edge_export.checkpoint.sources import ResolvedSource
from edge_export.checkpoint.tokenizer_vocabulary import read_vocabulary
from edge_export.gguf.keys import gguf_name, stays_float32
from edge_export.gguf.writer import write_gguf
from edge_export.onnx.block_quantization import WeightSpec, dequantize, quantize_matrix
from edge_export.onnx.request import OnnxRequest
from edge_export.onnx.weights import layers_format, table_format
from edge_export.parity.reference import Reference, held_out_tokens, load_reference, tokenizer_of
from edge_export.quantization import calibration
from edge_export.quantization.calibration import CALIBRATION_TEXT
from edge_export.quantization.gguf_quantization import compensate_gguf, importance_matrix, quantize_gguf
from edge_export.quantization.importance import Importance, SecondMoments, fitted, matrix_kind
from edge_runtime.backends.llama.loader import llama_library
from edge_runtime.bundle.bundle import Quality
from edge_runtime.bundle.gguf_header import QUANTIZATIONS
from edge_runtime.decoding.quality import joined, read_reference, row_figures, write_reference

Floats = NDArray[np.float32]
# Dequantized weights of a matrix, and how many bytes it takes.
Made = tuple[Floats, int]
Quantizer = Callable[[str, Floats], Made]
# Program, name, and what makes all matrices.
Way = tuple[str, str, Callable[[], Iterator[tuple[str, Made]]]]
TABLE = "token_embd.weight"
# The fields of a format that some of a layer's matrices have as their own.
APART = {
    field: re.compile(rf"blk\.\d+\.({names})\.weight") for field, names in {"sensitive": "ffn_down|proj", "values": "attn_k|attn_v"}.items()
}
OWN_GGUF = ("q4_0", "q4_k_m", "q5_k_m")
LLAMA_TYPES = ("q4_0", "iq4_nl", "q4_k_s", "q4_k_m", "q5_0", "q5_k_s", "q5_k_m")
OWN_ONNX = {
    "int4 mixed": OnnxRequest(),
    "int4 in blocks of 32": OnnxRequest(block=32),
    "int8": OnnxRequest(target="int8"),
    "int8 in blocks of 128": OnnxRequest(target="int8", block=128),
}


@dataclass(frozen=True, kw_only=True)
class Loss(Quality):
    """What one way loses; `bytes` are those of the quantized matrices."""

    program: str
    way: str
    bytes: int
    kl_error: float


class Model:
    """The checkpoint in transformers, its matrices by GGUF name, and its own logits of the held-out texts, in mapped files."""

    def __init__(self, source: ResolvedSource, tokens: int, scratch: Path) -> None:
        self._model = load_reference(source.path)
        self.matrices = {}
        for name, parameter in self._model.named_parameters():
            short = gguf_name(text_name(name, multimodal=False) or name)
            if short is not None and parameter.ndim == 2 and not stays_float32(short, 2):
                self.matrices[short] = parameter
        self._exact = {name: _kept(parameter.detach()) for name, parameter in self.matrices.items()}
        self._references = {}
        for kind, text in held_out_tokens(tokenizer_of(source), tokens).items():
            write_reference(scratch, kind, text, [self._logits(text)])
            self._references[kind] = read_reference(scratch, kind)

    def own(self, name: str) -> Floats:
        """The matrix's own weights [N, K]."""
        weights: Floats = self._exact[name].float().numpy()
        return weights

    def loss(self, program: str, way: str, matrices: Iterator[tuple[str, Made]]) -> Loss:
        """What the model loses with these weights in place of its own; it has its own again afterwards."""
        changed, stored = list[str](), 0
        try:
            for name, (weights, count) in matrices:
                if name not in self.matrices:
                    continue
                with torch.inference_mode():
                    self.matrices[name].copy_(torch.from_numpy(np.ascontiguousarray(weights, np.float32)))
                changed.append(name)
                stored += count
            rows = {kind: row_figures(each.logits, [self._logits(each.tokens)], each.tokens) for kind, each in self._references.items()}
        finally:
            with torch.inference_mode():
                for name in changed:
                    self.matrices[name].copy_(self._exact[name])
        figures = joined(rows)
        return Loss(program=program, way=way, bytes=stored, kl_error=figures.kl_error, **asdict(figures.quality))

    def _logits(self, tokens: Sequence[int]) -> Floats:
        with torch.inference_mode():
            logits: Floats = self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()
        return logits


def _kept(weights: torch.Tensor) -> torch.Tensor:
    """A copy of float32 weights, in bfloat16 where that holds them exactly."""
    half = weights.to(torch.bfloat16)
    return half if torch.equal(half.float(), weights) else weights.clone()


def measured_importance(source: ResolvedSource, keep: Path, pieces: int, threads: int) -> Importance:
    """Importance and second moments of the package's calibration text, kept in `keep`: a run that was stopped goes on."""
    calibration.MAX_CHUNKS = pieces
    moments = SecondMoments(keep / "target")
    request = calibration.CalibrationRequest(
        reference=Reference(target=source, drafter=source, threads=threads, context=source.checkpoint.architecture.context),
        text=CALIBRATION_TEXT,
        with_drafter=False,
        moments={"target": moments},
        state=keep / "layers.npz",
    )
    made = calibration.calibrate(request)
    return replace(fitted(made.target, source.checkpoint, made.source), moments=moments)


def llama_quantize(source: Path, destination: Path, kind: str, threads: int, importance: Importance | None) -> None:
    """llama.cpp's own quantizer with its own mix of types, as llama-quantize calls it. Raises ClickException if it fails."""
    library = llama_library()
    api = library.api
    library.log.clear()
    parameters = api.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = QUANTIZATIONS[kind].file_type, threads
    if importance is not None:
        matrix = importance_matrix(api, importance.values)
        parameters.imatrix = ctypes.cast(matrix, ctypes.POINTER(api.llama_model_imatrix_data))
    if api.llama_model_quantize(bytes(source), bytes(destination), ctypes.byref(parameters)):
        raise click.ClickException(f"llama.cpp could not quantize to {kind}{library.quoted_error()}")


def gguf_ways(checkpoint: Checkpoint, importance: Importance, keep: Path, threads: int) -> Iterator[Way]:
    """llama.cpp's types without and with an importance matrix, and this project's, whose errors are compensated."""
    plain, made = keep / "plain.gguf", keep / "made.gguf"

    def written(kind: str, counts: Importance | None, own: bool = False) -> Iterator[tuple[str, Made]]:
        if not plain.exists():
            write_gguf(checkpoint, plain, "bf16", lambda _: None)
        if own:
            quantize_gguf(plain, made, kind, threads, importance=counts)
        else:
            llama_quantize(plain, made, kind, threads, counts)
        if own and counts is not None:
            without = frozenset(matrix_kind(part) for part, _ in QUANTIZATIONS[kind].raised)
            compensate_gguf(made, checkpoint, replace(counts, moments=SecondMoments(keep / "target", without)))
        for tensor in gguf.GGUFReader(made).tensors:
            if len(tensor.shape) == 2:
                yield tensor.name, (gguf.quants.dequantize(tensor.data, tensor.tensor_type), int(tensor.n_bytes))

    name = f"llama.cpp (llama-cpp-python {version('llama-cpp-python')})"
    for kind in LLAMA_TYPES:
        yield name, kind, partial(written, kind, None)
        yield name, f"{kind}, importance matrix", partial(written, kind, importance)
    for kind in OWN_GGUF:
        yield "edge-mtp", f"GGUF {kind}, calibrated", partial(written, kind, importance, own=True)


def export_spec(request: OnnxRequest, name: str, columns: int) -> WeightSpec:
    """How the ONNX exporter stores the matrix with this GGUF name."""
    format = table_format(request) if name == TABLE else layers_format(request)
    own = (getattr(format, field) for field, names in APART.items() if names.fullmatch(name))
    spec = (next(own, None) or format).for_columns(columns).spec
    assert spec is not None, "rows of the pair are whole blocks"
    return spec


def onnx_quantizer(request: OnnxRequest, importance: Importance | None) -> Quantizer:
    """The exporter's own matrices of this request."""

    def quantize(name: str, weights: Floats) -> Made:
        spec = export_spec(request, name, weights.shape[1])
        counts, moments = (importance.values.get(name), importance.moments) if importance else (None, None)
        factor = moments.factor(name) if moments and spec.bits == 4 and moments.has(name) else None
        packed = quantize_matrix(weights, spec, None if counts is None else counts[0], factor)
        return dequantize(packed), packed.packed.nbytes + packed.scales.nbytes

    return quantize


def report(losses: list[Loss]) -> str:
    """One line per way, by bytes."""
    lines = ["| program | weights | MB | mean KL | perplexity | same first choice |", "|:--|:--|--:|--:|--:|--:|"]
    lines += [
        f"| {each.program} | {each.way} | {each.bytes / 1e6:.0f} | {each.mean_kl:.3f} ± {each.kl_error:.3f} | {each.perplexity:.1f} |"
        f" {each.greedy_agreement:.0%} |"
        for each in sorted(losses, key=lambda each: each.bytes)
    ]
    return "\n".join(lines)


@click.command(context_settings={"show_default": True})
@click.option("--target", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Checkpoint.  [default: that of make real]")
@click.option("--tokens", default=352, help="Tokens of each of the three held-out texts.")
@click.option("--pieces", default=calibration.MAX_CHUNKS, help="Pieces of 512 tokens of the calibration text.")
@click.option("--threads", type=click.IntRange(min=1), default=2)
@click.option("--only", default="", help="Only ways whose program and name hold this.")
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder for the calibration and files.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), required=True, help="Write all figures here.")
@one_sentence_errors()
def main(target: Path | None, tokens: int, pieces: int, threads: int, only: str, keep: Path, json_path: Path) -> None:
    """Compare quantizers on real matrices."""
    if target is None:
        sys.path.append(str(Path(__file__).parents[1] / "pairs"))
        from real_matrices import FOLDER

        target = FOLDER / "target"
        if not (target / "measured.json").is_file():
            raise click.ClickException("there are no real matrices; run make real, or give --target")
    torch.set_num_threads(threads)
    keep.mkdir(parents=True, exist_ok=True)
    losses = [Loss(**each) for each in json.loads(json_path.read_text())] if json_path.exists() else []
    source = ResolvedSource(role="target", origin=str(target), checkpoint=open_checkpoint(target), tokenizer=read_vocabulary(target))
    importance = measured_importance(source, keep, pieces, threads)
    model = Model(source, tokens, keep)

    def matrices(quantizer: Quantizer) -> Iterator[tuple[str, Made]]:
        return ((name, quantizer(name, model.own(name))) for name in model.matrices)

    own = {f"ONNX {way}, calibrated": onnx_quantizer(request, importance) for way, request in OWN_ONNX.items()}
    own["ONNX int4 mixed"] = onnx_quantizer(OnnxRequest(), None)
    ways: list[Way] = [("edge-mtp", way, partial(matrices, quantizer)) for way, quantizer in own.items()]
    done = {(loss.program, loss.way) for loss in losses}
    for program, way, make in (*ways, *gguf_ways(source.checkpoint, importance, keep, threads)):
        if only in f"{program} {way}" and (program, way) not in done:
            losses.append(model.loss(program, way, make()))
            click.echo(report(losses[-1:]).splitlines()[-1], err=True)
            json_path.write_text(json.dumps([asdict(loss) for loss in losses], indent=1), encoding="utf-8")
    click.echo(report(losses))


if __name__ == "__main__":
    main()
