"""The variants that a benchmark compares, and its raw records: one JSON object per line, from which all figures can be computed again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from edge_bench.measure.conditions import MachineConditions
from edge_devices.files.atomic_write import GrowingFile
from edge_devices.files.typed_json import StructureError, from_json, to_json
from edge_devices.machine.processors import MachineLoad, mean_load
from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.drafting.policies import POLICIES, DrafterKind
from edge_runtime.errors import RequestError
from edge_runtime.session.row_equality import RowEquality

PLAIN, FIXED, DEFAULT = "plain", "fixed", "default"
OURS, LLAMA_CPP = "edge-mtp", "llama.cpp"
# The policies that choose draft lengths. The policy `fixed` is measured as the fixed lengths.
CHOOSING_POLICIES = tuple(name for name in POLICIES if name != FIXED)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to decode. `side` is the program. `policy` is plain, fixed, a policy's name, or default for a peer. `length` is for fixed."""

    side: str
    drafter: str
    policy: str
    length: int | None = None

    @property
    def label(self) -> str:
        """The display name, which is unique among the variants of a run."""
        if self.policy == PLAIN:
            return PLAIN if self.side == OURS else f"{self.side} {PLAIN}"
        who = self.drafter if self.side == OURS else self.side
        return f"{who} {self.length if self.policy == FIXED else self.policy}"


BASELINE = Variant(side=OURS, drafter="none", policy=PLAIN)


def edge_variants(drafters: Sequence[DrafterKind], lengths: Sequence[int], policies: Sequence[str]) -> list[Variant]:
    """Returns plain decoding, then each drafter with each length and each policy."""
    variants = [BASELINE]
    for kind in drafters:
        variants += [Variant(side=OURS, drafter=kind, policy=FIXED, length=length) for length in lengths]
        variants += [Variant(side=OURS, drafter=kind, policy=name) for name in policies]
    return variants


def peer_variants(lengths: Sequence[int]) -> list[Variant]:
    """Returns llama.cpp's plain decoding, its default drafting, and fixed lengths. It drafts with the dense drafter."""
    return [
        Variant(side=LLAMA_CPP, drafter="none", policy=PLAIN),
        Variant(side=LLAMA_CPP, drafter="dense", policy=DEFAULT),
        *(Variant(side=LLAMA_CPP, drafter="dense", policy=FIXED, length=length) for length in lengths),
    ]


def parse_lengths(text: str) -> tuple[int, ...]:
    """Parses draft lengths such as 3, 1,2,4 or 1-8; "none" gives an empty tuple. Raises RequestError."""
    lengths = parse_numbers(text, "draft lengths")
    if lengths and not 1 <= min(lengths) <= max(lengths) <= MAX_DRAFT_LENGTH:
        raise RequestError(f"draft lengths {text!r} are not all in 1..{MAX_DRAFT_LENGTH}; plain decoding is always measured")
    return lengths


def parse_numbers(text: str, what: str) -> tuple[int, ...]:
    """Parses positive integers such as 1,2,4 or 1-8, sorted, without duplicates; "none" gives none. Raises RequestError about `what`."""
    if text == "none":
        return ()
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(first) > 9 or len(last) > 9:
            raise RequestError(f"{what} {text!r} are not numbers such as 1,2,4 or 1-8; 'none' leaves them out")
        low, high = int(first), int(last) if dash else int(first)
        if not 1 <= low <= high < low + 1000:
            raise RequestError(f"{what} {text!r}: {part.strip()} is not a number or range from 1 up; 'none' leaves them out")
        numbers |= set(range(low, high + 1))
    return tuple(sorted(numbers))


def parse_names(text: str, known: Sequence[str], what: str) -> tuple[str, ...]:
    """Parses a comma-separated list of `known` names, in the given order; "none" gives none. Raises RequestError about `what`."""
    if text == "none":
        return ()
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in known:
            raise RequestError(f"{what} {name!r} is unknown; choose from {', '.join(known)}")
    return names


# The raw records of a benchmark. The first line of a file is the header; each other line names its kind. Seconds are wall time. The fields
# are described in docs/measure-speed.md.

SCHEMA = 1
NO_ROW_KERNELS = "none"
LONGEST_LINE = 16 << 20
MAX_LINES = 1_000_000
# The shortest decoding time, in seconds, that a clock can distinguish from zero.
SHORTEST = 1e-9
# Figures are disturbed if the machine was busy for more than this share of the time.
DISTURBED_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """One file of the bundle. `sha256` is empty in records of earlier versions."""

    role: str
    format: str
    quantization: str | None
    bytes: int
    sha256: str = ""


@dataclass(frozen=True, kw_only=True)
class Header:
    """Machine, time, bundle and settings of the benchmark. `machine` and `settings` have plain values; `engines` has versions by name.

    `row_kernels` names the variant of this project's own kernels, or is NO_ROW_KERNELS if standard kernels are used. `planned` is the
    number of measurements in the complete benchmark (see `Records.measured`). Both are None in records of earlier versions. `run` is a
    random name of this run, which its energy log has too; it is empty in records of earlier versions.
    """

    schema: int
    version: str
    created_at: str
    bundle: str
    target: str
    files: tuple[ModelFile, ...]
    machine: dict[str, Any]
    settings: dict[str, Any]
    engines: dict[str, str] = field(default_factory=dict)
    planned: int | None = None
    row_kernels: str | None = None
    run: str = ""

    @property
    def weights(self) -> str:
        """A short hash of the bundle's model files. Records with equal hashes can be compared. Empty if a file's hash is unknown."""
        hashes = sorted(file.sha256 for file in self.files)
        return hashlib.sha256("".join(hashes).encode()).hexdigest()[:8] if all(hashes) and hashes else ""


@dataclass(frozen=True, kw_only=True)
class Note:
    """A remark for readers of the figures, such as what was left out and why."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """One request. `part` is "domains", or "contexts" if the prompt was extended to `domain` tokens.

    `seconds` is decoding time. The seconds of a phase are None if the program does not report them. Fields that begin with `round` have a
    value for each round. `output` is a digest of the emitted ids; `accepted_from` counts the accepted drafts of each source. `load` and
    `conditions` cover the time since the previous ones. They are None for a run that was too short; the next run's hold for it too.
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
    round_drafted: tuple[int, ...] = ()
    round_accepted: tuple[int, ...] = ()
    round_draft_seconds: tuple[float, ...] = ()
    round_verify_seconds: tuple[float, ...] = ()
    prefill_seconds: float | None = None
    first_token_seconds: float | None = None
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    output: str | None = None
    accepted_from: dict[str, int] = field(default_factory=dict)
    load: MachineLoad | None = None
    conditions: MachineConditions | None = None


@dataclass(frozen=True, kw_only=True)
class CostRecord:
    """Costs in seconds after a text of `length` tokens: `verify_seconds[n - 1]` for a target forward of n rows, and one draft step."""

    drafter: str
    length: int
    verify_seconds: tuple[float, ...]
    draft_step_seconds: float | None
    conditions: MachineConditions | None = None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The peak resident size of a process that opened the bundle for `sequences` concurrent requests and ran each once."""

    drafter: str
    sequences: int
    context: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class KvTypeCost:
    """Figures of one KV cache type, on the same texts for all types.

    `kl_mean` and `kl_max` are KL(float16 cache || this type) in nats per token. `same_best` is the share of positions with the same most
    likely token. `tokens_per_second` is for text that was generated with this type, with drafts.
    """

    kv_type: str
    cache_bytes: int
    tokens: int
    acceptance_rate: float
    tokens_per_second: float
    kl_mean: float
    kl_max: float
    same_best: float
    conditions: MachineConditions | None = None


@dataclass(frozen=True, kw_only=True)
class Concurrency:
    """One level of concurrency: `clients` that each send their next request when the previous one ends.

    `request_seconds` has the time from each request to its end, `token_seconds` the time between tokens of a request (tokens of one round
    share its time). Of `compared` outputs, `equal` are the same as in a single session.
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
    load: MachineLoad | None = None
    conditions: MachineConditions | None = None


@dataclass(frozen=True, kw_only=True)
class ImageCost:
    """One request with an image of `rows` soft rows, at most `budget`: the seconds of its encoder and of the prefill."""

    budget: int
    repeat: int
    rows: int
    encode_seconds: float
    prefill_seconds: float
    load: MachineLoad | None = None
    conditions: MachineConditions | None = None


KINDS: dict[str, type[Any]] = {
    "header": Header,
    "run": Run,
    "cost_curve": CostRecord,
    "memory": Memory,
    "kv_type": KvTypeCost,
    "concurrency": Concurrency,
    "image": ImageCost,
    "rows": RowEquality,
    "note": Note,
}
Record = Header | Run | CostRecord | Memory | KvTypeCost | Concurrency | ImageCost | RowEquality | Note


@dataclass(frozen=True, kw_only=True)
class Records:
    """All records of one benchmark. `rows` is None in records of earlier versions, which did not compare rows."""

    header: Header
    runs: tuple[Run, ...] = ()
    cost_curves: tuple[CostRecord, ...] = ()
    memory: tuple[Memory, ...] = ()
    kv_types: tuple[KvTypeCost, ...] = ()
    concurrency: tuple[Concurrency, ...] = ()
    images: tuple[ImageCost, ...] = ()
    rows: RowEquality | None = None
    notes: tuple[str, ...] = ()

    @property
    def measured(self) -> int:
        """The number of measurements; a complete benchmark has `header.planned`."""
        return len(self.runs) + len(self.concurrency) + len(self.images) + len(self.kv_types)

    def doubts(self) -> tuple[str, ...]:
        """Returns the reasons why the figures are not conclusive; each begins with "incomplete" or "disturbed"."""
        texts = []
        if self.header.planned is not None and self.measured < self.header.planned:
            texts.append(f"incomplete: {self.measured} of {self.header.planned} measurements")
        timed: tuple[Run | Concurrency | ImageCost, ...] = (*self.runs, *self.concurrency, *self.images)
        loads = [each.load for each in timed if each.load is not None]
        mean = mean_load(loads)
        busy = sum(load.seconds for load in loads if load.is_busy) / mean.seconds if loads and mean.seconds else 0.0
        if mean.is_busy or busy > DISTURBED_SHARE:
            texts.append(f"disturbed: the machine was busy for {busy:.0%} of the time (on average {mean.words()})")
        return tuple(texts)


def collect(records: Sequence[Record]) -> Records:
    """Groups records by kind. The first record must be the header."""
    header = records[0]
    assert isinstance(header, Header)
    return Records(
        header=header,
        runs=tuple(r for r in records if isinstance(r, Run)),
        cost_curves=tuple(r for r in records if isinstance(r, CostRecord)),
        memory=tuple(r for r in records if isinstance(r, Memory)),
        kv_types=tuple(r for r in records if isinstance(r, KvTypeCost)),
        concurrency=tuple(r for r in records if isinstance(r, Concurrency)),
        images=tuple(r for r in records if isinstance(r, ImageCost)),
        rows=next((r for r in records if isinstance(r, RowEquality)), None),
        notes=tuple(r.text for r in records if isinstance(r, Note)),
    )


def trace_lines(runs: Sequence[Run]) -> Iterator[str]:
    """Yields a line of JSON for each round of this program's runs, with the names of vLLM's counters (docs/measure-speed.md)."""
    for request, run in enumerate(runs):
        place = {"request": request, "part": run.part, "domain": run.domain, "prompt": run.prompt, "repeat": run.repeat}
        rounds = zip(run.round_drafted, run.round_accepted, run.round_draft_seconds, run.round_verify_seconds, strict=True)
        for number, (drafted, accepted, draft_seconds, verify_seconds) in enumerate(rounds):
            counts = {
                "round": number,
                "num_draft_tokens": drafted,
                "num_accepted_tokens": accepted,
                "num_accepted_tokens_per_pos": [int(position < accepted) for position in range(drafted)],
                "draft_seconds": draft_seconds,
                "verify_seconds": verify_seconds,
            }
            yield json.dumps({**place, "method": run.variant.label, **counts}, ensure_ascii=False) + "\n"


def line_of(record: Record) -> str:
    """Returns the record's line, with its newline."""
    kind = next(name for name, cls in KINDS.items() if isinstance(record, cls))
    return json.dumps({"kind": kind, **to_json(record)}, ensure_ascii=False, allow_nan=False) + "\n"


def read_records(path: Path) -> Records:
    """Reads a file of records. Raises RequestError, with the line number, if it is invalid."""
    try:
        with path.open(encoding="utf-8") as file:
            records = list(_parsed(path, iter(lambda: file.readline(LONGEST_LINE), "")))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read ({error}); give a file that edge-bench run --runs or --energy wrote") from error
    if not records:
        raise RequestError(f"{path} is empty; give a file that edge-bench run --runs or --energy wrote")
    return collect(records)


def _parsed(path: Path, lines: Iterator[str]) -> Iterator[Record]:
    for number, line in enumerate(lines, start=1):
        if number > MAX_LINES:
            raise RequestError(f"{path} has more than {MAX_LINES} lines; no benchmark writes that many")
        try:
            yield _record(json.loads(line), first=number == 1)
        except (ValueError, OverflowError, RecursionError) as error:
            raise RequestError(f"{path}: line {number} is not a valid record ({error}); give the file that --runs wrote") from error


def _record(data: Any, *, first: bool) -> Record:
    kind = data.pop("kind", None) if isinstance(data, dict) else None
    if not isinstance(kind, str) or (kind == "header") != first or kind not in KINDS:
        raise StructureError(f"a record of kind {str(kind)[:40]!r} {'as the first line' if first else 'after the first line'}")
    if first and data.get("schema") != SCHEMA:
        raise StructureError(f"schema {str(data.get('schema'))[:40]}; this version reads {SCHEMA}: upgrade edge-mtp")
    record: Record = from_json(KINDS[kind], data, kind)
    if not isinstance(record, Header):
        _check_numbers(record, kind)
    return record


def _check_numbers(value: Any, where: str) -> None:
    """Raises StructureError for negative numbers, for runs without tokens or time, and for more accepted than drafted tokens."""
    if is_dataclass(value) and not isinstance(value, MachineConditions):  # a temperature may be below zero
        for field in fields(value):
            _check_numbers(getattr(value, field.name), f"{where}.{field.name}")
    elif isinstance(value, tuple):
        for item in value:
            _check_numbers(item, where)
    elif isinstance(value, Mapping):
        for item in value.values():
            _check_numbers(item, where)
    elif isinstance(value, int | float) and not 0 <= value < 1e18:
        raise StructureError(f"{where} is {value}")
    if isinstance(value, Run):
        rounds = value.round_drafted, value.round_accepted, value.round_draft_seconds, value.round_verify_seconds
        lists = (
            (value.drafted_at, value.accepted_at),
            (value.round_seconds, value.round_tokens),
            *((rounds[0], each) for each in rounds[1:]),
        )
        timed = value.tokens and value.seconds >= SHORTEST and (value.first_token_seconds or 1.0) >= SHORTEST
        impossible = not timed or value.accepted > value.drafted or any(len(a) != len(b) for a, b in lists)
        if max(rounds[0], default=0) > MAX_DRAFT_LENGTH:
            raise StructureError(f"{where} has a step of {max(rounds[0])} drafts; a draft has at most {MAX_DRAFT_LENGTH} tokens")
        if impossible or any(a > d for pair in (lists[0], rounds[:2]) for d, a in zip(*pair, strict=True)):
            raise StructureError(
                f"{where} is inconsistent: {value.tokens} tokens in {value.seconds} s, {value.accepted} of {value.drafted} accepted"
            )
    if isinstance(value, Concurrency) and not (value.tokens and value.seconds and value.clients and value.equal <= value.compared):
        raise StructureError(f"{where} is inconsistent: {value.tokens} tokens of {value.clients} clients in {value.seconds} s")


class RecordFile(GrowingFile):
    """A file with one line per record. It is valid after every line, and is kept after an error if it has more than the header."""

    def add(self, record: Record) -> None:
        """Appends a record. Raises MeasurementError if the disk is full."""
        self.append([line_of(record)])
        self.worth_keeping = not isinstance(record, Header)
