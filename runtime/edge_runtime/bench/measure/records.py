"""What a benchmark writes down, one JSON object a line, before any statistics: every figure can be computed again from the file.

The first line is the header; each other line names its kind. Seconds are wall time. Fields: docs/measuring.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from edge_devices.files.typed_json import StructureError, from_json, to_json
from edge_runtime.bench.measure.variants import Variant
from edge_runtime.errors import RequestError

SCHEMA = 1
LONGEST_LINE = 16 << 20
MAX_LINES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """One file of the bundle."""

    role: str
    format: str
    quantization: str | None
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Header:
    """Where, when, on what and how. `machine` and `settings` are plain values."""

    schema: int
    version: str
    created_at: str
    bundle: str
    target: str
    files: tuple[ModelFile, ...]
    machine: dict[str, Any]
    settings: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Note:
    """What a reader of the figures must know, such as what was left out and why."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """One request. `part` is "domains", or "contexts" where the prompt was made as long as `domain` says, in tokens.

    `seconds` are of decoding; those of a phase are None where the program does not tell them. `round_seconds` and `round_tokens` are
    per round; `output` is a digest of the emitted ids.
    """

    part: str
    domain: str
    prompt: int
    repeat: int
    variant: Variant
    prompt_tokens: int
    tokens: int
    seconds: float
    drafted: int
    accepted: int
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    round_seconds: tuple[float, ...] = ()
    round_tokens: tuple[int, ...] = ()
    prefill_seconds: float | None = None
    first_token_seconds: float | None = None
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    output: str | None = None


@dataclass(frozen=True, kw_only=True)
class CostCurve:
    """Seconds after a text of `length` tokens: `verify_seconds[n - 1]` of one target forward of n rows, and of one draft step."""

    drafter: str
    length: int
    verify_seconds: tuple[float, ...]
    draft_step_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The largest resident size of a process that opened the bundle for `sequences` requests at once and served them once."""

    drafter: str
    sequences: int
    context: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class KvTypeCost:
    """What a type of KV cache costs, on the same texts for all types; the fields are those of `kv_cost.KvCost`."""

    kv_type: str
    cache_bytes: int
    tokens: int
    acceptance_rate: float
    tokens_per_second: float
    kl_mean: float
    kl_max: float
    same_best: float


@dataclass(frozen=True, kw_only=True)
class Concurrency:
    """One level: `clients` that each send their next request when the last one is over.

    `request_seconds` from request to end, `token_seconds` between a request's tokens (those of one round share its time);
    `equal` of `compared` outputs are those of a session on its own.
    """

    clients: int
    variant: Variant
    repeat: int
    requests: int
    tokens: int
    seconds: float
    request_seconds: tuple[float, ...]
    token_seconds: tuple[float, ...]
    equal: int
    compared: int


KINDS: dict[str, type[Any]] = {
    "header": Header,
    "run": Run,
    "cost_curve": CostCurve,
    "memory": Memory,
    "kv_type": KvTypeCost,
    "concurrency": Concurrency,
    "note": Note,
}
Record = Header | Run | CostCurve | Memory | KvTypeCost | Concurrency | Note


@dataclass(frozen=True, kw_only=True)
class Records:
    """All of one benchmark."""

    header: Header
    runs: tuple[Run, ...] = ()
    cost_curves: tuple[CostCurve, ...] = ()
    memory: tuple[Memory, ...] = ()
    kv_types: tuple[KvTypeCost, ...] = ()
    concurrency: tuple[Concurrency, ...] = ()
    notes: tuple[str, ...] = ()


def collect(records: Sequence[Record]) -> Records:
    """Sorts records by kind; the first is the header."""
    header = records[0]
    assert isinstance(header, Header)
    return Records(
        header=header,
        runs=tuple(r for r in records if isinstance(r, Run)),
        cost_curves=tuple(r for r in records if isinstance(r, CostCurve)),
        memory=tuple(r for r in records if isinstance(r, Memory)),
        kv_types=tuple(r for r in records if isinstance(r, KvTypeCost)),
        concurrency=tuple(r for r in records if isinstance(r, Concurrency)),
        notes=tuple(r.text for r in records if isinstance(r, Note)),
    )


def line_of(record: Record) -> str:
    """Returns the record's line, with its newline."""
    kind = next(name for name, cls in KINDS.items() if isinstance(record, cls))
    return json.dumps({"kind": kind, **to_json(record)}, ensure_ascii=False, allow_nan=False) + "\n"


def read_records(path: Path) -> Records:
    """Reads a file of records. Raises RequestError, with the line's number, for anything else."""
    try:
        with path.open(encoding="utf-8") as file:
            records = list(_parsed(path, iter(lambda: file.readline(LONGEST_LINE), "")))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read ({error}); give the file that edge-bench --runs wrote") from error
    if not records:
        raise RequestError(f"{path} is empty; give the file that edge-bench --runs wrote")
    return collect(records)


def _parsed(path: Path, lines: Iterator[str]) -> Iterator[Record]:
    for number, line in enumerate(lines, start=1):
        if number > MAX_LINES:
            raise RequestError(f"{path} has more than {MAX_LINES} lines; no benchmark writes as many")
        try:
            yield _record(json.loads(line), first=number == 1)
        except (ValueError, OverflowError, RecursionError) as error:
            raise RequestError(f"{path}: line {number} is none of a benchmark ({error}); give the file that --runs wrote") from error


def _record(data: Any, *, first: bool) -> Record:
    kind = data.pop("kind", None) if isinstance(data, dict) else None
    if (kind == "header") != first or kind not in KINDS:
        raise StructureError(f"a line of kind {str(kind)[:40]!r} {'at the beginning' if first else 'in the middle'}")
    if first and data.get("schema") != SCHEMA:
        raise StructureError(f"schema {str(data.get('schema'))[:40]}; this reader knows {SCHEMA}")
    record: Record = from_json(KINDS[kind], data, kind)
    if not isinstance(record, Header):
        _check_numbers(record, kind)
    return record


def _check_numbers(value: Any, where: str) -> None:
    """Raises StructureError for counts and seconds below 0, and for a decoding without time or with more accepted than drafted."""
    if is_dataclass(value):
        for field in fields(value):
            _check_numbers(getattr(value, field.name), f"{where}.{field.name}")
    elif isinstance(value, tuple):
        for item in value:
            _check_numbers(item, where)
    elif isinstance(value, int | float) and not 0 <= value < 1e18:
        raise StructureError(f"{where} is {value}")
    if isinstance(value, Run):
        lists = (value.drafted_at, value.accepted_at), (value.round_seconds, value.round_tokens)
        impossible = not (value.tokens and value.seconds) or value.accepted > value.drafted or any(len(a) != len(b) for a, b in lists)
        if impossible or any(a > d for d, a in zip(*lists[0], strict=True)):
            raise StructureError(
                f"{where} cannot be: {value.tokens} tokens in {value.seconds} s, {value.accepted} of {value.drafted} accepted"
            )
    if isinstance(value, Concurrency) and not (value.tokens and value.seconds and value.clients and value.equal <= value.compared):
        raise StructureError(f"{where} cannot be: {value.tokens} tokens of {value.clients} clients in {value.seconds} s")
