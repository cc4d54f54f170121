"""The options of a measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from edge_bench.measure.prompts import DOMAINS, Prompt, read_prompts, shipped_prompts
from edge_bench.measure.variants import CHOOSING_POLICIES, LLAMA_CPP, parse_lengths, parse_names, parse_numbers
from edge_devices.energy.virtual_meters import VIRTUAL
from edge_devices.machine.cpu_affinity import MAX_THREADS
from edge_devices.option_fields import OPTION, option, spelling
from edge_runtime.bundle.kv_types import KV_TYPES, KvType
from edge_runtime.drafting.drafter_kinds import DRAFTER_KINDS, DrafterKind
from edge_runtime.drafting.policies import DEFAULT_POLICY
from edge_runtime.errors import RequestError
from edge_runtime.media.image import BUDGETS
from edge_runtime.session.load_options import LoadOptions

# The options of `LoadOptions` that a benchmark takes; the others would be measured against themselves.
LOADING = ("backend", "context", "config", "preset", "check", "public_key")
_DRAFTERS = tuple(kind for kind in DRAFTER_KINDS if kind != "none")


class _Listed(click.ParamType[Any]):
    """A text such as 1,2,4 that a function parses; values that are parsed already stay."""

    name = "text"

    def __init__(self, parse: Callable[[str], Any]) -> None:
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002
        try:
            return self._parse(value) if isinstance(value, str) else value
        except RequestError as error:
            raise click.UsageError(str(error), ctx) from error


def _listed(parse: Callable[[str], Any], usual: str = "none", *, about: str) -> Any:
    """Returns the field of an option with a list in one text; `usual` is its default, which is empty if that is no list."""
    default = () if " " in usual else parse(usual)
    text = f"{about}  [default: {usual}]"
    return option(default=default, type=_Listed(parse), multiple=False, show_default=False, panel="Measure", help=text)


def _names(known: Sequence[str], what: str) -> Callable[[str], tuple[str, ...]]:
    return lambda text: parse_names(text, known, what)


def _numbers(what: str) -> Callable[[str], tuple[int, ...]]:
    return lambda text: parse_numbers(text, what)


def _devices(text: str) -> tuple[str, ...]:
    """Parses names of devices. Raises RequestError for none, or one twice."""
    names = tuple(name.strip() for name in text.split(",")) if text != "none" else ()
    if not all(names) or len(set(names)) < len(names):
        raise RequestError(f"{text!r} is not a list of different devices, such as cpu,gpu")
    return names


def _drafters(text: str) -> tuple[str, ...]:
    if text == "none":
        raise RequestError("there is no drafter to measure; for plain decoding alone use --lengths none --policies none")
    return parse_names(text, _DRAFTERS, "drafter")


def _tools_folder(text: str) -> Path:
    """Parses `llama.cpp=PATH`. Raises a usage error for anything else."""
    name, equals, path = text.partition("=")
    if name != LLAMA_CPP or not equals or not path:
        raise click.UsageError(f"--against {text!r} is not {LLAMA_CPP}=PATH, with the folder of llama.cpp's binaries")
    return Path(path)


def threads_option() -> Any:
    """Returns the field of the option --threads."""
    about = "CPU threads, at most one a processor.  [default: all that this process may use]"
    return option("-t", low=1, high=MAX_THREADS, panel="Backend", help=about)


# What --thorough sets in place of the defaults.
THOROUGH = {"lengths": "1-8", "policies": ",".join(CHOOSING_POLICIES), "contexts": "128,512,2048,8192", "repeats": 6, "tokens": 96}


def _be_thorough(context: click.Context, _option: click.Parameter, value: bool) -> bool:
    if value:
        context.default_map = {**(context.default_map or {}), **THOROUGH}
    return value


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """What to measure. `drafters` () is the default of a session; `tools` is the folder of llama.cpp's binaries."""

    domains: tuple[str, ...] = _listed(_names(DOMAINS, "domain"), ",".join(DOMAINS), about="Shipped prompt sets to use, or none.")
    files: tuple[Path, ...] = option(
        "--prompts",
        default=(),
        panel="Measure",
        help="Your own prompts: a JSON list of texts, by domain or not; questions of MT-bench, Spec-Bench or ShareGPT; a text. Repeatable.",
    )
    per_domain: int = option(default=1, low=1, panel="Measure", help="Number of prompts per set.")
    lengths: tuple[int, ...] = _listed(parse_lengths, "1,3,6", about="Fixed draft lengths to measure, such as 3, 1,2,4 or 1-8, or none.")
    policies: tuple[str, ...] = _listed(
        _names(CHOOSING_POLICIES, "policy"), DEFAULT_POLICY, about="Draft length policies to measure, or none."
    )
    drafters: tuple[DrafterKind, ...] = _listed(
        _drafters, "as edge-run chooses", about=f"Drafters to measure: any of {', '.join(_DRAFTERS)}."
    )
    repeats: int = option(default=3, low=1, panel="Measure", help="Number of repeats; the order of variants differs in each.")
    tokens: int = option("--max-tokens", "-n", default=64, low=2, panel="Measure", help="Tokens to generate per request.")
    warm_up: int = option(default=1, low=0, panel="Measure", help="Warm-up requests per variant, which are not counted.")
    contexts: tuple[int, ...] = _listed(
        _numbers("prompt lengths"), "128,512", about="Prompt lengths in tokens to sweep, up to --context, or none."
    )
    concurrency: tuple[int, ...] = _listed(
        _numbers("numbers of clients"), about="Numbers of concurrent clients to measure, such as 1,2,4, or none."
    )
    kv_types: tuple[KvType, ...] = _listed(
        _names(KV_TYPES, "KV type"), about=f"KV cache types to compare: any of {', '.join(KV_TYPES)}, or none. f16 is always included."
    )
    image_sizes: tuple[int, ...] = _listed(
        _numbers("sizes of images"),
        about=f"Sizes of images to measure, in soft rows: any of {', '.join(map(str, BUDGETS))}, or none. With --energy also in joules.",
    )
    tools: Path | None = option(
        "--against",
        type=_Listed(_tools_folder),
        metavar="llama.cpp=PATH",
        panel="Measure",
        help="Also measure llama.cpp's binaries in this folder, in turn. With devices: llama.cpp=package.",
    )
    thorough: bool = option(
        default=False,
        is_eager=True,
        callback=_be_thorough,
        panel="Measure",
        help="Measure for longer, with other defaults: --lengths 1-8, all --policies, --contexts to 8192, --repeats 6, --max-tokens 96.",
    )
    threads: int | None = threads_option()

    def prompts(self) -> tuple[Prompt, ...]:
        """Returns the shipped prompts of the domains and the user's own. Raises RequestError for none, or for two sets of one name."""
        prompts = shipped_prompts(self.domains, self.per_domain)
        for file in self.files:
            prompts += read_prompts(file, self.per_domain)
        if not prompts:
            raise RequestError("there is no prompt to measure with; give --domains or --prompts")
        places = [(prompt.domain, prompt.number) for prompt in prompts]
        for domain, number in places:
            if places.count((domain, number)) > 1:
                raise RequestError(f"there are two sets of prompts named {domain!r}; rename one, or leave one out")
        return tuple(prompts)


@dataclass(frozen=True, kw_only=True)
class DeviceList:
    """Which devices of this machine compute."""

    devices: tuple[str, ...] = _listed(
        _devices, about="Devices of this machine, such as cpu,gpu, one after the other in one table; --runs and --energy are folders."
    )


@dataclass(frozen=True, kw_only=True)
class MeterOptions:
    """Which meter is read, and about how many minutes the energy protocol may take."""

    meter: str | None = option(
        metavar="NAME",
        panel="Energy",
        help=f"Energy meter to read: a name from edge-devices meters, {VIRTUAL}, or external:SECONDS (a table, with a row every so often)."
        "  [default: the first usable meter]",
    )
    minutes: int | None = option(
        low=1,
        panel="Energy",
        help="Fit the energy protocol into about this many minutes, with fewer repeats and without loops of single phases; a line says what"
        " that does to the intervals.",
    )


def option_words(options: BenchRequest | LoadOptions | MeterOptions) -> list[str | Path]:
    """Returns what `edge-bench run` on a device gets for the options that have another value than usual; files as local paths.

    Meter, files of results, key and tools are chosen for the device; what --thorough sets goes there as options.
    """
    usual, words = type(options)(), list[str | Path]()
    for field in fields(options):
        value = getattr(options, field.name)
        left_out = OPTION not in field.metadata or field.name in ("meter", "tools", "public_key", "thorough")
        if left_out or value == getattr(usual, field.name):
            continue
        if field.metadata[OPTION][1].get("multiple") is False:
            value = ",".join(map(str, value)) or "none"
        for word in value if isinstance(value, tuple) else (value,):
            words += [spelling(field)[0], word if isinstance(word, Path) else str(word)]
    return words
