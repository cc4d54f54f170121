"""Checks of a session: an accelerator against the CPU, drafts against plain decoding, and how long an image takes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_runtime.bundle.bundle import exported_quality
from edge_runtime.bundle.manifest import Manifest
from edge_runtime.calibration.measured import MeasuredValue
from edge_runtime.decoding.quality import divergence_of, log_softmax
from edge_runtime.drafting.policies import Fixed
from edge_runtime.errors import EdgeRuntimeError, RequestError
from edge_runtime.interfaces import Drafter, Logits, Target
from edge_runtime.media.encoder_inputs import SIDE, Image
from edge_runtime.session.generation import Generation
from edge_runtime.session.monitor import DecodeStats
from edge_runtime.session.session import Session

# Before an accelerator is trusted, its logits and drafts for a fixed text are compared with the CPU's.
#
# A fault of its driver, its execution provider or its memory causes no error. The result is kept for a driver; a new one is checked again.

# The number of tokens of a prompt, of a long prompt, and of those that are verified after it.
_PROMPT, _LONG, _FOLLOWING = 40, 700, 13
_WIDTHS = (1, 2, 4, 8, 13)
_VERIFY = "a step's tokens"
_DRAFTS = 4
# The allowed mean KL divergence in nats. The first limit is for weights that lose nothing. For others it is the second one, or this share
# of the KL that their quantization causes if that is more. Two ways of rounding activations to 8 bits differ by 0.0003
# (docs/design/onnx-graphs.md). A single wrong operator may add as little as 0.001.
_FLOAT_LIMIT, _ROUNDED_LIMIT, _SHARE = 1e-4, 0.002, 0.1
_FLOAT_BITS = 32
# The limit for rounded weights if the export measured nothing. The largest KL of 80 random pairs on llama.cpp's RPC device was 0.0024.
_UNKNOWN_LIMIT = 0.005
# Limits for models with experts. At a near tie, a row may choose another expert, which changes it by up to 0.23. The first limit is for a
# verify's rows beyond the eighth, the second for the other means. The largest means of five correct pairs were 0.021 and 0.12; the smallest
# ones with a fault were 0.117 and 0.39.
_TILE, _ROUTED_BEYOND_LIMIT, _ROUTED_LIMIT = 8, 0.07, 0.2
# A near tie changes few rows, unless it is in the prompt. K/V rows that are stale or not read change all rows after them. So the median of
# at least this many rows has its own limit. The largest median of 40 correct pairs was 0.048; of four rows it was 0.09. If a pair is opened
# for at most 7 rows, only the mean is checked.
_FEWEST_ROWS, _ROUTED_MEDIAN_LIMIT = 8, 0.08
# Drafts depend on rows that differ a little. At least this share of them must equal the CPU's, or be less likely there by at most so many
# nats. The same must hold at each draft position where at least the last number of drafts are compared. A wrong draft costs time, but
# never changes the text.
_SAME_DRAFTS, _TIE, _FEWEST_DRAFTS = 0.2, 1.0, 4
# How many rows are checked for NaN and infinity, with those that are compared, and the most seconds for the additional ones.
_ROWS, _SECONDS = 1100, 5.0


@dataclass(frozen=True, kw_only=True)
class DeviceCheck:
    """The result of a comparison. `worst` is the part of the text that is closest to its limit, or exceeds it most.

    `mean_kl` is the mean KL(CPU || device) of its rows, in nats; their median if `worst` is a middle token. `same_drafts` is the share of
    drafts that agree with the CPU's. `rows` is the number of rows that the device computed. `failure` is the error that ended the check.
    `rows_differ` says that rows have other bits alone than in a verify, so that drafts may change near ties.
    """

    device: str
    limit: float
    worst: str = ""
    mean_kl: float = 0.0
    same_drafts: float = 0.0
    rows: int = 0
    rows_differ: bool = False
    failure: str = ""

    @property
    def passed(self) -> bool:
        """Whether the device computes what the CPU does."""
        return not self.failure and self.mean_kl <= self.limit and self.same_drafts >= _SAME_DRAFTS

    def sentence(self) -> str:
        """What the comparison showed, in one sentence."""
        if self.failure:
            return f"{self.device} failed the comparison with the CPU: {self.failure}"
        if self.mean_kl > self.limit:
            part, figures = self.worst, f"KL {self.mean_kl:.2g}, at most {self.limit:.2g} is allowed"
            return f"{self.device} computes something else than the CPU: {figures}, in {part}"
        if not self.passed:
            share = f"as few as {self.same_drafts:.0%} of its drafts are the CPU's, or as likely"
            return f"{self.device} drafts something else than the CPU: {share}"
        ties = "; drafts may swap tokens there that are almost equally likely" if self.rows_differ else ""
        return f"{self.device} computes what the CPU does (mean KL {self.mean_kl:.2g} at most, {self.rows} tokens){ties}"


CHECKS = MeasuredValue(
    kind="device", value_class=DeviceCheck, doing="comparing the device with the CPU", times=1, disturbed_by_load=lambda _: False
)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """A pair's answers to the text: rows of logits for each part, drafts, and the scores of each draft token's choice, if known."""

    rows: dict[str, NDArray[np.float32]]
    drafts: list[list[int]] = field(default_factory=list)
    scores: list[list[_Scores]] = field(default_factory=list)


class _Scores(NamedTuple):
    """The drafter's logits, of all tokens or only of `tokens`."""

    logits: NDArray[np.float32]
    tokens: NDArray[np.integer] | None

    @property
    def likeliest(self) -> int:
        best = int(self.logits.argmax())
        return best if self.tokens is None else int(self.tokens[best])

    def behind(self, token: int) -> float:
        """How much less likely a token is than the likeliest one, in nats."""
        tokens = np.arange(len(self.logits)) if self.tokens is None else self.tokens
        own = self.logits[tokens == token]
        return float(self.logits.max() - own[0]) if len(own) else np.inf


def answers(target: Target, drafter: Drafter | None, longest: int, *, scored: bool = True) -> Answers:
    """Runs the text through a pair and empties its KV caches. A verify has at most `longest` rows. Drafts are greedy; their scores are
    recorded if `scored`."""
    gathered = Answers(rows={})

    def draft(last: int) -> None:
        if drafter is not None:
            steps: list[_Scores] = []

            def likeliest(logits: Logits, tokens: NDArray[np.integer] | None = None) -> int:
                steps.append(_Scores(logits.copy(), None if tokens is None else tokens.copy()))
                return steps[-1].likeliest

            gathered.drafts.append(drafter.draft(last, min(_DRAFTS, longest - 1), likeliest if scored else None))
            gathered.scores.append(steps)

    for part, rows in _rows(target, min(longest, _FOLLOWING), draft):
        gathered.rows[part] = rows.copy()
    target.rollback(0)
    return gathered


def compared(
    device: str,
    reference: Answers,
    target: Target,
    drafter: Drafter | None,
    *,
    longest: int,
    parity: object,
    routed: bool = False,
    rounded: bool = True,
) -> DeviceCheck:
    """Compares a device's pair with the CPU's answers. Empties the KV caches.

    `parity` is what the export measured, `routed` says whether the model has experts, and `rounded` is the result of `is_rounded`.
    """
    limit = allowed_loss(parity, rounded=rounded)
    try:
        device_answers = answers(target, drafter, longest, scored=False)
        rows = sum(len(rows) for rows in device_answers.rows.values())
        rows += _finite_rows(target, min(longest, _FOLLOWING), _ROWS - rows)
    except (EdgeRuntimeError, FloatingPointError) as error:
        return DeviceCheck(device=device, limit=limit, failure=str(error))
    of_rows = {part: _losses(rows, device_answers.rows[part]) for part, rows in reference.rows.items()}
    losses = {part: float(each.mean()) for part, each in of_rows.items()}
    limits = dict.fromkeys(losses, limit if not routed else max(limit, _ROUTED_LIMIT))
    if routed:
        _limit_routed(of_rows, losses, limits, limit)
    worst = max(losses, key=lambda part: losses[part] / limits[part])
    alone = device_answers.rows[_verified(1)][0]
    return DeviceCheck(
        device=device,
        limit=limits[worst],
        worst=worst,
        mean_kl=losses[worst],
        same_drafts=_same_drafts(reference, device_answers.drafts),
        rows=rows,
        rows_differ=any(not np.array_equal(alone, rows[0]) for part, rows in device_answers.rows.items() if part.startswith(_VERIFY)),
    )


def _limit_routed(of_rows: Mapping[str, NDArray[np.float64]], losses: dict[str, float], limits: dict[str, float], limit: float) -> None:
    """Adds further limits for models with experts: for rows beyond the eighth, and for the median row, which near ties hardly change."""
    for part, each in list(of_rows.items()):
        if len(each) > _TILE and part.startswith(_VERIFY):
            losses[f"{part} beyond the eighth"] = float(each[_TILE:].mean())
            limits[f"{part} beyond the eighth"] = max(limit, _ROUTED_BEYOND_LIMIT)
        if len(each) >= _FEWEST_ROWS:
            losses[f"the middle token of {part}"] = float(np.median(each))
            limits[f"the middle token of {part}"] = max(limit, _ROUTED_MEDIAN_LIMIT)


def is_rounded(manifest: Manifest, format: str) -> bool:
    """Whether the target's weights in this format, or the graphs' K/V rows, have fewer bits than float32. True if that is unknown."""
    files = (file for file in manifest.files if file.role in ("target", "target_data") and file.format.startswith(format))
    bits = max((file.bits_per_weight or 0 for file in files), default=0)
    return bits < _FLOAT_BITS or any(buffer.dtype != "f32" for buffer in manifest.cache_layout.buffers)


def allowed_loss(parity: object, *, rounded: bool) -> float:
    """Returns the allowed mean KL from the CPU's rows, in nats, which depends on what quantization loses; for models without experts."""
    quality = exported_quality(parity)
    if quality is None:
        return _UNKNOWN_LIMIT if rounded else _FLOAT_LIMIT
    return _FLOAT_LIMIT if quality.mean_kl < _FLOAT_LIMIT else max(_ROUNDED_LIMIT, _SHARE * quality.mean_kl)


def _rows(target: Target, longest: int, draft: Callable[[int], None]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yields the parts of the text with their rows, which the next part may overwrite. Calls `draft` after the verify of each width."""
    text, other = _text(1), _text(2)
    target.rollback(0)
    target.prefill(text[:_PROMPT])
    for width in sorted({min(width, longest) for width in _WIDTHS}):
        target.rollback(_PROMPT)
        yield _verified(width), _checked(target.verify(text[_PROMPT : _PROMPT + width]))
        draft(text[_PROMPT + width])
    target.rollback(_PROMPT)
    target.verify(other[:longest])
    target.rollback(_PROMPT + 1)
    target.rollback(_PROMPT)
    yield "the tokens after a rollback", _checked(target.verify(text[_PROMPT : _PROMPT + longest]))
    target.rollback(0)
    target.prefill(other[:_PROMPT])
    yield "the tokens after another prompt", _checked(target.verify(text[_PROMPT : _PROMPT + longest]))
    target.rollback(0)
    long = [token for part in range(3, 40) for token in _text(part)][: max(1, min(_LONG, target.context - longest - 1))]
    target.prefill(long)
    yield "the tokens behind a long text", _checked(target.verify(text[:longest]))


def _same_drafts(reference: Answers, given: list[list[int]]) -> float:
    """Returns the share of draft tokens that equal the CPU's or are nearly as likely there: of all, or at the position with the fewest.

    Tokens after the first different one of a draft are not compared, because they depend on it.
    """
    fine: list[list[bool]] = [[] for _ in range(_DRAFTS)]
    for expected, scores, drafted in zip(reference.drafts, reference.scores, given, strict=True):
        for place, theirs in enumerate(expected):
            ours = drafted[place] if place < len(drafted) else None
            fine[place].append(theirs == ours or (ours is not None and place < len(scores) and scores[place].behind(ours) <= _TIE))
            if theirs != ours:
                break
    groups = [[each for place in fine for each in place], *(place for place in fine if len(place) >= _FEWEST_DRAFTS)]
    return min((sum(each) / len(each) for each in groups if each), default=1.0)


def _verified(width: int) -> str:
    return f"{_VERIFY} ({width} of them)"


def _finite_rows(target: Target, width: int, count: int) -> int:
    """Computes up to `count` more rows within `_SECONDS`; returns how many. Raises FloatingPointError for a row with a NaN."""
    text, end, rows = _text(1), time.monotonic() + _SECONDS, 0
    target.rollback(0)
    target.prefill(text[:_PROMPT])
    while rows < count and time.monotonic() < end:
        target.rollback(_PROMPT)
        _checked(target.verify(text[_PROMPT : _PROMPT + width]))
        rows += width
    target.rollback(0)
    return rows


def _checked(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    if not np.isfinite(rows).all():
        raise FloatingPointError("logits that are no numbers")
    return rows


def _losses(expected: NDArray[np.float32], rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """KL(CPU || device) of each row, in nats."""
    return np.array([divergence_of(log_softmax(cpu), log_softmax(row)) for cpu, row in zip(expected, rows, strict=True)])


def _text(number: int) -> list[int]:
    """Returns a text of tokens that every vocabulary has. Each number gives another text."""
    tokens: list[int] = np.random.default_rng(number).integers(4, 204, _PROMPT + _FOLLOWING + 1).tolist()
    return tokens


# Requests that check or time a session: whether drafts change the output, and how long an image takes.
#
# One row and several rows may go through different kernels, whose last bits differ. If the two largest logits are that close, the most
# likely token can change. The logit gap tells such a tie from a fault.


@dataclass(frozen=True, kw_only=True)
class LosslessReport:
    """Whether the outputs are `equal`; if not, the first divergence: its position, both tokens and their logit gap in plain decoding."""

    equal: bool
    tokens: int
    position: int | None = None
    plain_token: int | None = None
    draft_token: int | None = None
    logit_gap: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def sentence(self) -> str:
        """Returns the report as one sentence."""
        if self.equal:
            return f"lossless: all {self.tokens} tokens equal plain decoding"
        return (
            f"first divergence at output token {self.position}: {self.draft_token} instead of {self.plain_token}, "
            f"logits {self.logit_gap:.3g} apart in plain decoding"
        )


def check_lossless(session: Session, generation: Generation) -> LosslessReport:
    """Reruns a finished request without drafts and compares the tokens. Raises RequestError if its sampling is not repeatable."""
    options = generation.options
    if not options.repeatable:
        raise RequestError("sampled tokens differ from run to run; compare at temperature 0, or with a seed")
    plain = session.generate(
        generation.prompt_input,
        max_tokens=len(generation.tokens),
        policy=Fixed(0),
        sampling=options.sampling,
        acceptance=options.acceptance,
        constraint=options.constraint,
    )
    for _ in plain.rounds():
        pass
    for position, (expected, got) in enumerate(zip(plain.tokens, generation.tokens, strict=False)):
        if expected != got:
            gap = _logit_gap(session, [*plain.prompt, *plain.tokens[:position]], expected, got)
            return LosslessReport(
                equal=False, tokens=len(generation.tokens), position=position, plain_token=expected, draft_token=got, logit_gap=gap
            )
    return LosslessReport(equal=len(plain.tokens) == len(generation.tokens), tokens=len(generation.tokens))


def _logit_gap(session: Session, context: list[int], first: int, second: int) -> float:
    with session.exclusive():
        session.target.rollback(0)
        session.target.prefill(context[:-1])
        row = session.target.verify(context[-1:])[0]
        return float(row[first] - row[second])


QUESTION = "What is this?"


def square(budget: int, seed: int) -> Image:
    """Returns a square image of noise within the budget. Each seed gives another image, so that no cache has its rows."""
    side = SIDE * math.isqrt(budget)
    return Image(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def time_image(session: Session, image: Image) -> DecodeStats:
    """Runs a request about an image up to its first token. The first such request of a session also loads the encoder."""
    generation = session.generate(session.media_prompt(QUESTION, [image]), max_tokens=1, draft_length=0)
    for _ in generation.rounds():
        pass
    return generation.stats
