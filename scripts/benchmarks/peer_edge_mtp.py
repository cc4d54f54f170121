"""This program as a worker of bench_peers.py: one session on one backend, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, cast

from edge_bench.measure.records import Variant
from edge_bench.measure.request import Prompt, long_prompt, prepare, shipped_prompts
from edge_bench.measure.runners import EdgeRunner
from edge_devices.files.typed_json import from_json, to_json
from edge_devices.machine.device_package import installed_version
from edge_runtime.backends.selection import BackendKind
from edge_runtime.session.load_options import LoadOptions
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session
from peer_protocol import Answer, worker_options

DISTRIBUTIONS = {"onnx": "onnxruntime", "llama": "llama-cpp-python"}
# Of a run, what the benchmark knows itself.
PLACE = ("part", "domain", "prompt", "repeat", "variant")


@contextmanager
def engine() -> Iterator[tuple[dict[str, Any], Answer]]:
    """Opens the bundle that the arguments name."""
    parser = worker_options("bundle")
    parser.add_argument("--backend", choices=DISTRIBUTIONS)
    options = parser.parse_args()
    load = LoadOptions(
        backend=cast(BackendKind, options.backend), threads=options.threads, context=options.context, measure=True, check="none"
    )
    with open_session(options.bundle, load) as session:
        runner = EdgeRunner(session)
        distribution = DISTRIBUTIONS[options.backend]
        about = {
            "version": f"edge-mtp {installed_version('edge-mtp')} on {distribution} {installed_version(distribution)}",
            "flags": f"{session.drafter_kind} drafter, kernels: {session.row_kernels or 'those of the engine alone'}",
            "drafter": session.drafter_kind,
        }
        yield about, lambda request: answer(session, runner, request)


def answer(session: Session, runner: EdgeRunner, request: dict[str, Any]) -> dict[str, Any]:
    """Returns the prompts for all engines, or the figures of a run."""
    if "lengths" in request:
        return {"prompts": to_json(prompts(session, request["domains"], request["per_domain"], request["lengths"]))}
    prompt, variant = from_json(Prompt, request["prompt"], "prompt"), from_json(Variant, request["variant"], "variant")
    run = runner.run(variant, prompt, request["tokens"])
    return {field.name: to_json(getattr(run, field.name)) for field in fields(run) if field.name not in PLACE}


def prompts(session: Session, domains: list[str], per_domain: int, lengths: list[int]) -> list[Prompt]:
    """Returns the shipped prompts, then for each length a text of about so many tokens, whose domain is that length."""
    vocabulary, texts = session.vocabulary, prepare(shipped_prompts(domains, per_domain), session)
    long = []
    for length in lengths:
        ids = [token for token in long_prompt(texts, 2 * length) if token != vocabulary.bos][: length - 1]
        text = b"".join(vocabulary.piece(token) for token in ids).decode("utf-8", "ignore")
        long.append(Prompt(domain=str(length), number=0, text=text, ids=tuple(vocabulary.encode(text))))
    return [*texts, *long]
