"""Runs an export, of either format, on the reference's tokens, or its encoders on noise, and compares the results with limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_devices.machine.device_package import installed_version
from edge_export.errors import ParityError
from edge_export.parity.reference import (
    DRAFT_LENGTH,
    REFUSED,
    ROWS,
    SEED,
    TEXT,
    TEXT_TOKENS,
    Divergence,
    Reference,
    Rows,
    Rowset,
    divergence,
    held_out_tokens,
    inference,
    load_reference,
    parity_tokens,
    reference_rows,
)
from edge_runtime.bundle.bundle import Quality
from edge_runtime.bundle.manifest import MediaInputs
from edge_runtime.decoding.loop import Decoding, decode
from edge_runtime.decoding.quality import ROWS_PER_FORWARD, RowFigures, joined, row_figures, text_rows
from edge_runtime.drafting.acceptance_model import AcceptanceModel
from edge_runtime.drafting.policies import RoundPlan, RoundResult
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.interfaces import Drafter, Target
from edge_runtime.media.encoder_inputs import RATE, SIDE, Image, Sound
from edge_runtime.media.soft_rows import Media

# To measure the drafter's confidence: tokens to generate, and tokens per draft. It takes about as long as 25 forwards of 5 rows.
WRITTEN, WRITTEN_AT_ONCE = 96, 4
ROOM = WRITTEN + WRITTEN_AT_ONCE + 1


@dataclass(frozen=True, kw_only=True)
class ParityLimits:
    """Limits of the comparison: largest logit difference, mean KL in nats, and smallest shares of equal greedy tokens and drafts."""

    max_abs_difference: float
    mean_kl: float
    greedy_agreement: float
    draft_agreement: float


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The limits for an export, and the words for messages about it.

    `limits` and `median_kl` apply to the unquantized export of `weight_type`. `kl_limit` applies to the mean KL of the export in
    `quantization` on held-out text. Its greedy agreement is recorded but has no limit, because near-ties on unusual text flip easily.

    In messages, `library` ran a `noun` (export or graph). `better` is the next better type with its option and size; `calibrates` says that
    a calibration would help as well.
    """

    library: str
    noun: str
    weight_type: str
    quantization: str
    limits: ParityLimits
    kl_limit: float
    median_kl: float = float("inf")
    better: str | None = None
    calibrates: bool = False

    def figures(
        self,
        plain: Divergence,
        final: Divergence,
        texts: Mapping[str, RowFigures],
        *,
        length: int,
        agreements: Sequence[float],
        contexts: tuple[int, ...],
    ) -> dict[str, Any]:
        """Returns the figures for the manifest. Raises ParityError."""
        whose, limits = f"the {self.weight_type} {self.noun}", self.limits
        demand(f"median KL of {whose}", plain.median_kl, maximum=self.median_kl)
        demand(f"largest logit difference of {whose}", plain.max_abs_difference, maximum=limits.max_abs_difference)
        demand(f"mean KL of {whose}", plain.mean_kl, maximum=limits.mean_kl)
        demand(f"greedy agreement of {whose}", plain.greedy_agreement, minimum=limits.greedy_agreement)
        quality = joined(texts).quality
        self._demand_quality(quality)
        demand(f"share of {whose}'s drafts that are the reference assistant's", agreements[0], minimum=limits.draft_agreement)
        return {
            "reference": "transformers in float32",
            "versions": {name: installed_version(name) for name in ("torch", "transformers", self.library)},
            "tokens": length,
            "rows": ROWS,
            "unquantized": {"weight_type": self.weight_type, **asdict(plain)},
            "quantized": {"quantization": self.quantization, **asdict(final)},
            "quality": {**asdict(quality), "texts": {name: asdict(each.quality) for name, each in texts.items()}},
            "drafts": {
                "draft_length": DRAFT_LENGTH,
                "contexts": list(contexts),
                "unquantized_agreement": agreements[0],
                "quantized_agreement": agreements[1],
            },
            "limits": {"unquantized": asdict(limits), "quantized": {"mean_kl": self.kl_limit}},
        }

    def _demand_quality(self, quality: Quality) -> None:
        if quality.mean_kl <= self.kl_limit:
            return
        ways = [*(["--calibrate TEXT"] if self.calibrates else []), *([self.better] if self.better else [])]
        better = f"; choose {' or '.join(ways)}" if ways else ""
        raise ParityError(
            f"parity failed: the mean KL of the {self.quantization} {self.noun} is {quality.mean_kl:.3g}, at most {self.kl_limit:g} is"
            f" wanted, and it {quality.words}{better}; {REFUSED}"
        )


# A function that runs an export on the tokens to compare, and on the texts by name on which quality is measured.
Run = Callable[[list[int], Mapping[str, list[int]]], Rowset]


def compare_export(
    reference: Reference, plain: Run, final: Run | None, judgement: Judgement, *, as_llama: bool, uncalibrated: Run | None
) -> dict[str, Any]:
    """Runs the unquantized and the final export on the tokens and returns the figures for the manifest.

    `final` is None if both are the same. `as_llama` is that of `reference_rows`. `uncalibrated` is the final export without its
    calibration; its mean KL is one of the figures. Raises ParityError if the export does not run or a figure is beyond its limit; the
    message then names the figure, the limit and --no-verify.
    """
    tokens = parity_tokens(reference)
    texts = held_out_tokens(reference.tokenizer(), min(TEXT_TOKENS, reference.context, len(tokens) + ROOM))
    try:
        first = plain(tokens, texts if final is None else {})
        last = first if final is None else final(tokens, texts)
        before = {} if uncalibrated is None else uncalibrated(tokens, texts).texts
    except EdgeRuntimeError as error:
        library = judgement.library.removesuffix("-python").replace("llama-cpp", "llama.cpp")
        raise ParityError(f"the export does not run in {library}: {error}; correct that, or export with --no-verify") from error
    logits, text_logits, agreements = reference_rows(reference, tokens, texts, [first, last], as_llama=as_llama)
    figures = judgement.figures(
        divergence(logits, first.logits),
        divergence(logits, last.logits),
        {name: row_figures(text_logits[name], [last.texts[name]], text) for name, text in texts.items()},
        length=len(tokens),
        agreements=agreements,
        contexts=first.contexts,
    )
    figures["drafts"]["confidence"] = last.confidence
    if before:
        rows = {name: row_figures(text_logits[name], [before[name]], text) for name, text in texts.items()}
        figures["quality"]["mean_kl_uncalibrated"] = joined(rows).quality.mean_kl
    return figures


def demand(what: str, value: float, *, maximum: float = float("inf"), minimum: float = 0.0) -> None:
    """Raises ParityError for a figure that is beyond its limit."""
    if not minimum <= value <= maximum:
        bound = f"at most {maximum:g}" if value > maximum else f"at least {minimum:g}"
        raise ParityError(f"parity failed: the {what} is {value:.4g}, {bound} is wanted; {REFUSED}")


def export_rowset(target: Target, drafter: Drafter | None, tokens: list[int], texts: Mapping[str, list[int]]) -> Rowset:
    """Runs a loaded export on the tokens and on each text. The last token is not decoded; it only starts the last draft.

    Without texts, the drafter's confidence is not measured, because such an export is not the one that goes into the bundle.
    """
    first = len(tokens) - 1 - ROWS
    target.prefill(tokens[:first])
    logits: list[Rows] = []
    drafts: list[tuple[int, ...]] = []
    # A draft starts after each forward, so there are ROWS / ROWS_PER_FORWARD drafts.
    contexts = tuple(range(first + ROWS_PER_FORWARD, len(tokens), ROWS_PER_FORWARD))
    for end in contexts:
        logits.append(np.array(target.verify(tokens[end - ROWS_PER_FORWARD : end])))
        if drafter is not None:
            drafts.append(tuple(drafter.draft(tokens[end], DRAFT_LENGTH)))
    confidence = drafter_confidence(target, drafter, tokens[-1]) if texts else None
    text_logits = {name: np.concatenate([np.array(rows) for rows in text_rows(target, text)]) for name, text in texts.items()}
    return Rowset(logits=np.concatenate(logits), contexts=contexts, drafts=tuple(drafts), confidence=confidence, texts=text_logits)


def check_tokenizer(reference: Reference, tokens: list[int], whose: str) -> None:
    """Raises ParityError unless `tokens` are those of TEXT by the checkpoint's own tokenizer."""
    expected = reference.tokenizer().encode(TEXT, add_special_tokens=False)
    if tokens != expected:
        first = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), min(len(tokens), len(expected)))
        raise ParityError(
            f"parity failed: {whose}'s tokenizer differs from the checkpoint's from token {first} of the test text on; {REFUSED}"
        )


class _Learner:
    """A policy with a fixed draft length, whose rounds train an acceptance model."""

    def __init__(self) -> None:
        self.model = AcceptanceModel()
        self._bins: list[int] = []

    def plan(self, requests: int = 1, *, any_prefix: bool = True) -> RoundPlan:  # noqa: ARG002
        """Drafts WRITTEN_AT_ONCE tokens and records the drafter's confidence in each."""
        self._bins = []
        return RoundPlan(WRITTEN_AT_ONCE, should_continue=self._record)

    def observe(self, result: RoundResult) -> None:
        """Trains the model on the result of a round."""
        self.model.observe(self._bins, result.verified, result.accepted)

    def _record(self, confidence: float) -> bool:
        self._bins.append(self.model.bin_of(confidence, len(self._bins)))
        return True


def drafter_confidence(target: Target, drafter: Drafter | None, last: int) -> dict[str, Any] | None:
    """Greedily generates WRITTEN tokens after those in the cache and `last`, and returns the counts of an `AcceptanceModel`.

    Returns None if the context has no room for them, or if the drafter does not report its confidence.
    """
    if drafter is None or not drafter.stepwise or target.context - target.length < ROOM:
        return None
    learner = _Learner()
    for _ in decode(target, drafter, Decoding(target, last, learner, max_tokens=WRITTEN)):
        pass
    return learner.model.to_json() if learner.model.observed else None


# Height and width of the compared images of noise, in soft rows.
_SIDES = ((2, 3), (7, 9))


def measure_media_parity(
    reference: Reference, encode: Callable[[Sequence[Media]], list[Rows]], inputs: MediaInputs, *, quantization: str, limit: float
) -> dict[str, Any]:
    """Returns the figures for the manifest: the largest distance of an image's rows and of a sound's rows, relative to their norm.

    `encode` runs the exported encoder, whose weights are of type `quantization`. `limit` is the largest distance allowed. Raises
    ParityError if the encoder does not run or a distance is beyond the limit; the message then names the figure, the limit and --no-verify.
    """
    media = probes(sound=inputs.audio is not None)
    try:
        exported = encode(media)
    except EdgeRuntimeError as error:
        raise ParityError(f"the encoder of images and sound does not run: {error}; correct that, or export with --no-verify") from error
    with inference(reference.threads):
        model = load_reference(reference.target.path).model
        expected = [_rows_of(model, each, inputs) for each in media]
    distances = [distance(*rows) for rows in zip(exported, expected, strict=True)]
    figures: dict[str, Any] = {"quantization": quantization, "limit": limit}
    for kind, name in ((Image, "image_rows"), (Sound, "sound_rows")):
        of_kind = [value for value, each in zip(distances, media, strict=True) if isinstance(each, kind)]
        if of_kind:
            figures[name] = max(of_kind)
            demand(f"distance of {name.replace('_', ' ')} of the {quantization} encoder", figures[name], maximum=limit)
    return figures


def probes(*, sound: bool) -> list[Media]:
    """Returns images of noise and, with `sound`, one second of noise, to be encoded and compared."""
    random = np.random.default_rng(SEED)
    media: list[Media] = [Image(random.integers(0, 256, (SIDE * high, SIDE * wide, 3), dtype=np.uint8)) for high, wide in _SIDES]
    return [*media, Sound(random.uniform(-0.5, 0.5, RATE).astype(np.float32))] if sound else media


def distance(exported: Rows, expected: Rows) -> float:
    """Returns the norm of the difference relative to that of `expected`; infinite if the shapes differ."""
    if exported.shape != expected.shape:
        return float("inf")
    return float(np.linalg.norm(exported - expected) / np.linalg.norm(expected))


def _rows_of(model: Any, media: Media, inputs: MediaInputs) -> Rows:
    """Returns the rows [rows, hidden size] that transformers computes for an image or a sound."""
    import torch

    if isinstance(media, Image):
        tower = inputs.vision is None or inputs.vision.layers is not None
        patches, positions = (media.patches(), media.positions()) if tower else _blocks(media)
        features = model.get_image_features(torch.from_numpy(patches)[None], torch.from_numpy(positions)[None])
    elif inputs.samples_per_row is None:
        mels = torch.from_numpy(media.mel_frames())[None]
        features = model.get_audio_features(mels, torch.ones(mels.shape[:2], dtype=torch.bool))
    else:
        frames = np.zeros((-(-len(media.samples) // inputs.samples_per_row), inputs.samples_per_row), np.float32)
        frames.ravel()[: len(media.samples)] = media.samples
        features = model.get_audio_features(torch.from_numpy(frames)[None])
    rows = features.pooler_output
    joined = torch.cat(list(rows)) if isinstance(rows, tuple | list) else rows.flatten(0, -2)
    made: Rows = joined.float().numpy()
    return made


def _blocks(image: Image) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Returns the input of the member without a tower: blocks of pixels and their positions (x, y).

    A block is SIDE x SIDE pixels [rows, values], in the order row, column, colour.
    """
    high, wide = (side // SIDE for side in image.rgb.shape[:2])
    pixels = (image.rgb.astype(np.float32) / np.float32(255)).reshape(high, SIDE, wide, SIDE, 3).transpose(0, 2, 1, 3, 4)
    y, x = np.divmod(np.arange(high * wide), wide)
    blocks: NDArray[np.float32] = pixels.reshape(high * wide, -1)
    return blocks, np.stack([x, y], 1)
