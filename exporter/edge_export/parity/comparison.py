"""Runs an export over the reference's tokens, or its encoders over noise, and judges what comes out, whatever the format."""

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

# Tokens to generate, and tokens of each draft. A few hundred drafts take as long as about 25 forwards of 5 rows.
WRITTEN, WRITTEN_AT_ONCE = 96, 4
ROOM = WRITTEN + WRITTEN_AT_ONCE + 1


@dataclass(frozen=True, kw_only=True)
class ParityLimits:
    """Limits of equality: largest logit difference, mean KL in nats, shares of equal greedy tokens and drafts."""

    max_abs_difference: float
    mean_kl: float
    greedy_agreement: float
    draft_agreement: float


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """By what an export is judged, and what messages call it: `library` ran a `noun` (export, graph).

    The unquantized one, of `weight_type`, is judged by `limits`, and by the median KL of its rows. The one of `quantization` is judged by
    its mean KL on held-out text; its greedy agreement is only recorded, as near-ties on unusual text flip easily. A refusal names the ways
    out: `better`, the next better type with its option and bytes, and a calibration where `calibrates` says that it would help.
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


# From the tokens to compare on, and texts by name to measure quality on.
Run = Callable[[list[int], Mapping[str, list[int]]], Rowset]


def compare_export(
    reference: Reference, plain: Run, final: Run | None, judgement: Judgement, *, as_llama: bool, uncalibrated: Run | None
) -> dict[str, Any]:
    """Runs the unquantized and the final export (None: the same) over the tokens and returns the figures for the manifest.

    `as_llama`: as of `reference_rows`. `uncalibrated` is the final export without its calibration: how far that is away is a figure too.

    Raises ParityError, naming the figure, the limit and --no-verify, if a figure is beyond its limit,
    or if the export does not run.
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
    """Runs a loaded export over the tokens, and over each text. The last token is not decoded: it only starts the last draft.

    An export without texts is not the one that is kept: the confidence of its drafter is not measured.
    """
    first = len(tokens) - 1 - ROWS
    target.prefill(tokens[:first])
    logits: list[Rows] = []
    drafts: list[tuple[int, ...]] = []
    # A draft starts after each forward, so there are ROWS / ROWS_PER_FORWARD contexts of drafts.
    contexts = tuple(range(first + ROWS_PER_FORWARD, len(tokens), ROWS_PER_FORWARD))
    for end in contexts:
        logits.append(np.array(target.verify(tokens[end - ROWS_PER_FORWARD : end])))
        if drafter is not None:
            drafts.append(tuple(drafter.draft(tokens[end], DRAFT_LENGTH)))
    confidence = drafter_confidence(target, drafter, tokens[-1]) if texts else None
    text_logits = {name: np.concatenate([np.array(rows) for rows in text_rows(target, text)]) for name, text in texts.items()}
    return Rowset(logits=np.concatenate(logits), contexts=contexts, drafts=tuple(drafts), confidence=confidence, texts=text_logits)


def check_tokenizer(reference: Reference, tokens: list[int], whose: str) -> None:
    """Raises ParityError if `tokens`, those of TEXT, are not those of the checkpoint's own tokenizer."""
    expected = reference.tokenizer().encode(TEXT, add_special_tokens=False)
    if tokens != expected:
        first = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), min(len(tokens), len(expected)))
        raise ParityError(
            f"parity failed: {whose}'s tokenizer differs from the checkpoint's from token {first} of the test text on; {REFUSED}"
        )


class _Learner:
    """A policy of one draft length whose rounds train an acceptance model."""

    def __init__(self) -> None:
        self.model = AcceptanceModel()
        self._bins: list[int] = []

    def plan(self, requests: int = 1, *, any_prefix: bool = True) -> RoundPlan:  # noqa: ARG002
        """Drafts WRITTEN_AT_ONCE tokens and records the drafter's confidence in each."""
        self._bins = []
        return RoundPlan(WRITTEN_AT_ONCE, should_continue=self._record)

    def observe(self, result: RoundResult) -> None:
        """Trains the model on a round."""
        self.model.observe(self._bins, result.verified, result.accepted)

    def _record(self, confidence: float) -> bool:
        self._bins.append(self.model.bin_of(confidence, len(self._bins)))
        return True


def drafter_confidence(target: Target, drafter: Drafter | None, last: int) -> dict[str, Any] | None:
    """Returns the counts of an `AcceptanceModel` after WRITTEN tokens that follow the cache's and `last`, greedily.

    None if there is no room for them, or if the drafter reports no confidence.
    """
    if drafter is None or not drafter.stepwise or target.context - target.length < ROOM:
        return None
    learner = _Learner()
    for _ in decode(target, drafter, Decoding(target, last, learner, max_tokens=WRITTEN)):
        pass
    return learner.model.to_json() if learner.model.observed else None


# Sides of the compared images of noise, in soft rows.
_SIDES = ((2, 3), (7, 9))


def measure_media_parity(
    reference: Reference, encode: Callable[[Sequence[Media]], list[Rows]], inputs: MediaInputs, *, quantization: str, limit: float
) -> dict[str, Any]:
    """Returns the figures for the manifest: the largest distance of an image's and of a sound's rows, as shares of their norm.

    `encode` runs the exported encoder, whose weights are of type `quantization`; `limit` is the largest distance allowed. Raises
    ParityError, naming the figure, the limit and --no-verify, if one is beyond the limit, or if the encoder does not run.
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
    """Returns the images and the sound of one second that are compared."""
    random = np.random.default_rng(SEED)
    media: list[Media] = [Image(random.integers(0, 256, (SIDE * high, SIDE * wide, 3), dtype=np.uint8)) for high, wide in _SIDES]
    return [*media, Sound(random.uniform(-0.5, 0.5, RATE).astype(np.float32))] if sound else media


def distance(exported: Rows, expected: Rows) -> float:
    """Returns the norm of the difference as a share of `expected`'s; infinite for rows of another shape."""
    if exported.shape != expected.shape:
        return float("inf")
    return float(np.linalg.norm(exported - expected) / np.linalg.norm(expected))


def _rows_of(model: Any, media: Media, inputs: MediaInputs) -> Rows:
    """transformers' rows [rows, hidden size] of an image or a sound."""
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
    """What the member without a tower takes: blocks of SIDE x SIDE pixels [rows, values], by row, column and colour, and their (x, y)."""
    high, wide = (side // SIDE for side in image.rgb.shape[:2])
    pixels = (image.rgb.astype(np.float32) / np.float32(255)).reshape(high, SIDE, wide, SIDE, 3).transpose(0, 2, 1, 3, 4)
    y, x = np.divmod(np.arange(high * wide), wide)
    blocks: NDArray[np.float32] = pixels.reshape(high * wide, -1)
    return blocks, np.stack([x, y], 1)
