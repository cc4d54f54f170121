"""`edge-run prove`: checks that drafts do not change the text, with this bundle on this machine."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from edge_devices.command_line import PanelCommand, takes
from edge_devices.files.atomic_write import atomic_write
from edge_devices.machine.detection import read_machine
from edge_devices.option_fields import option
from edge_devices.waiting import Waiting, silent_wait, terminal_wait
from edge_runtime.bundle.bundle import read_signing_key, sign_file
from edge_runtime.cli.demo import MESSAGES, TEXTS
from edge_runtime.cli.options import BundlePath, Opening, opens_bundle
from edge_runtime.decoding.sampling import SamplingParams, sampling_sentence
from edge_runtime.drafting.policies import Fixed
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.session.generation import GREEDY_PARAMS
from edge_runtime.session.row_equality import RowEquality
from edge_runtime.session.self_checks import LosslessReport, check_lossless
from edge_runtime.session.session import Session
from edge_runtime.text.chat_template import answering_template

# Tokens of each compared piece. The draft length changes from piece to piece.
_PIECE = 50
_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12)


@dataclass(frozen=True, kw_only=True)
class ProveOptions:
    """How much to compare, and where the result goes."""

    tokens: int = option("-n", default=2000, low=1, panel="Output", help="Tokens to compare with plain decoding.")
    record: Path | None = option(metavar="FILE", panel="Output", help="Write the result as JSON to this file, without any text.")
    sign: Path | None = option(
        metavar="KEY", panel="Output", help="Sign the record with this Ed25519 private key (PEM), as FILE.sig; needs [sign]."
    )
    as_json: bool = option("--json", default=False, panel="Output", help="Print one JSON object instead of text.")


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was compared: rows of logits, and pieces of text with drafts of several lengths against plain decoding.

    Half of the pieces are greedy. The others are sampled with the seeds in `sampled_seeds`.
    """

    rows: RowEquality
    reports: tuple[LosslessReport, ...]
    drafted: int
    accepted: int
    seconds: float
    sampled_seeds: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """How many tokens were compared."""
        return sum(report.tokens for report in self.reports)

    @property
    def equal(self) -> int:
        """How many tokens equal those of plain decoding. None counts after the first difference of a piece."""
        return sum(report.tokens if report.equal else report.position or 0 for report in self.reports)

    def sentences(self) -> list[str]:
        """Returns the result as sentences, with the differences last."""
        share = f", {self.accepted / self.drafted:.0%} of {self.drafted} drafts accepted" if self.drafted else ", nothing was drafted"
        result = f"{self.equal:,} of {self.tokens:,} tokens are those of plain decoding{share}"
        if self.sampled_seeds:
            first, last = self.sampled_seeds[0], self.sampled_seeds[-1]
            result += f"; half of them are sampled ({sampling_sentence(_sampling(first))}, seeds {first} to {last})"
        return [self.rows.sentence(), result, *(report.sentence() for report in self.reports if not report.equal)]

    def to_json(self) -> dict[str, Any]:
        """Returns plain values under stable keys."""
        return {
            "tokens": self.tokens,
            "equal_tokens": self.equal,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "sampled_seeds": list(self.sampled_seeds),
            "seconds": round(self.seconds, 1),
            "rows": self.rows.to_json(),
            "differences": [report.to_json() for report in self.reports if not report.equal],
        }


def proof(session: Session, tokens: int, waiting: Waiting) -> Proof:
    """Extends five kinds of text in turn, with drafts of all lengths, and compares each piece with plain decoding."""
    begin, rows = time.perf_counter(), session.row_equality(waiting=waiting)
    template = answering_template(session.bundle, session.vocabulary)
    if template is None:
        texts = [session.vocabulary.encode(text) for text in TEXTS.values()]
    else:
        texts = [template.encode([{"role": "user", "content": text}]) for text in MESSAGES.values()]
    starts = list(texts)
    reports: list[LosslessReport] = []
    seeds: list[int] = []
    done = drafted = accepted = 0
    with waiting(f"comparing {tokens} tokens with plain decoding") as report:
        while done < tokens:
            report(done / tokens)
            kind = len(reports) % len(texts)
            length = _LENGTHS[len(reports) // len(texts) % len(_LENGTHS)]
            sampling = GREEDY_PARAMS
            if len(reports) % 2:
                seeds.append(len(seeds) + 1)
                sampling = _sampling(seeds[-1])
            generation = session.generate(texts[kind], max_tokens=min(_PIECE, tokens - done), policy=Fixed(length), sampling=sampling)
            for _ in generation.rounds():
                pass
            reports.append(check_lossless(session, generation))
            done += len(generation.tokens)
            drafted, accepted = drafted + generation.stats.drafted, accepted + generation.stats.accepted
            ended = generation.finish_reason != "length" or len(texts[kind]) + 2 * _PIECE > session.target.context
            texts[kind] = starts[kind] if ended else [*texts[kind], *generation.tokens]
    return Proof(
        rows=rows,
        reports=tuple(reports),
        drafted=drafted,
        accepted=accepted,
        seconds=time.perf_counter() - begin,
        sampled_seeds=tuple(seeds),
    )


def _sampling(seed: int) -> SamplingParams:
    """Returns the sampling of Gemma 4's generation_config.json, with a seed."""
    return SamplingParams(temperature=1.0, top_k=64, top_p=0.95, seed=seed)


@click.command(cls=PanelCommand)
@click.argument("bundle", type=BundlePath())
@takes("options", ProveOptions)
@opens_bundle(tuning=(), energy=())
def prove(bundle: Path, options: ProveOptions, opening: Opening) -> None:
    """Check on this machine that drafts change neither the text nor the logits.

    Text is written in pieces with drafts of 1 to 12 tokens, each compared with plain decoding. Half of the pieces are greedy, the others
    are sampled with a seed. Exit code 1: they differ.
    """
    if options.sign is not None and options.record is None:
        raise click.UsageError("--sign needs --record FILE")
    key = None if options.sign is None else read_signing_key(options.sign)
    with opening.session(bundle, warn=False) as session:
        result = proof(session, options.tokens, silent_wait if options.as_json else terminal_wait)
        facts = {"bundle": session.fingerprint, "processor": read_machine().processor, "backend": session.backend}
    record = json.dumps({"schema": "edge-mtp proof 1", **facts, **result.to_json()}, indent=1)
    if options.record is not None:
        atomic_write(options.record, [record.encode()])
        if key is not None:
            sign_file(options.record, key)
    click.echo(record if options.as_json else "\n".join(result.sentences()))
    if result.equal != result.tokens:
        raise EdgeRuntimeError("drafts changed the text; they can where logits are not exact (docs/lossless.md)")
