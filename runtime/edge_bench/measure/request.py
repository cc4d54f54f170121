"""The options of a measurement, and its prompts: the shipped ones by domain, and the user's own in several formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import click

from edge_bench.measure.records import CHOOSING_POLICIES, LLAMA_CPP, parse_lengths, parse_names, parse_numbers
from edge_devices.energy.virtual_meters import VIRTUAL
from edge_devices.errors import errors_as
from edge_devices.files.limited_read import read_at_most
from edge_devices.machine.processors import MAX_THREADS
from edge_devices.option_fields import OPTION, option, spelling
from edge_runtime.bundle.gguf_header import KV_TYPES, KvType
from edge_runtime.drafting.policies import DEFAULT_POLICY, DRAFTER_KINDS, DrafterKind
from edge_runtime.errors import RequestError
from edge_runtime.media.encoder_inputs import BUDGETS
from edge_runtime.session.load_options import LoadOptions
from edge_runtime.session.session import Session
from edge_runtime.text.chat_template import MARK, bundle_template

DOMAINS = ("code", "prose", "chat", "structured", "repetitive")
# Prompts of this domain are turns of a user.
CHAT = "chat"
# Keys for conversations in files: lists of texts, or of messages by role. Only the user's first turn becomes a prompt.
CONVERSATIONS = ("turns", "messages", "conversations")
USERS = ("user", "human")
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
FORMATS = "give a JSON list or lines of texts or of objects with prompt, turns, messages or conversations, or lists of texts by domain"
MAX_FILE_BYTES = 16 << 20
MAX_DOMAIN_LETTERS = 40


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt. `number` counts from 0 within its domain. The bundle's chat template is applied to a user's turn.

    After tokenizing, `text` is a text that other programs tokenize to the same `ids`, with control tokens written out.
    """

    domain: str
    number: int
    text: str
    ids: tuple[int, ...] = ()
    is_turn: bool = False


def shipped_prompts(domains: Sequence[str], count: int) -> list[Prompt]:
    """Returns at most `count` prompts of each domain."""
    prompts = []
    for domain in domains:
        texts = json.loads((files("edge_bench.measure") / "prompt_sets" / f"{domain}.json").read_text(encoding="utf-8"))
        prompts += [Prompt(domain=domain, number=n, text=text, is_turn=domain == CHAT) for n, text in enumerate(texts[:count])]
    return prompts


def read_prompts(path: Path, count: int) -> list[Prompt]:
    """Reads at most `count` of the user's prompts of each domain. The file is JSON as in FORMATS, or a text that is one prompt.

    The domain is an entry's `category`, or else the file's name. Raises RequestError.
    """
    with errors_as(RequestError, f"{path} cannot be read as UTF-8 text", "give a file of prompts", OSError, UnicodeDecodeError):
        text = read_at_most(path, MAX_FILE_BYTES).decode()
    prompts: dict[str, list[Prompt]] = {}
    for domain, prompt, is_turn in _entries(path, text):
        if not 0 < len(domain) <= MAX_DOMAIN_LETTERS:
            raise RequestError(f"{path}: the domain {domain[:MAX_DOMAIN_LETTERS]!r} needs 1 to {MAX_DOMAIN_LETTERS} letters; rename it")
        of_domain = prompts.setdefault(domain, [])
        if len(of_domain) < count:
            of_domain.append(Prompt(domain=domain, number=len(of_domain), text=prompt, is_turn=is_turn or domain == CHAT))
    if not prompts:
        raise RequestError(f"{path} holds no prompt; give at least one")
    return [prompt for of_domain in prompts.values() for prompt in of_domain]


def _entries(path: Path, text: str) -> Iterator[tuple[str, str, bool]]:
    """Yields each prompt's domain, its text, and whether it is a user's turn."""
    items = _json_items(path, text)
    if items is None and text.strip():
        yield path.stem, text, False
    for number, item in enumerate(items or (), start=1):
        entry = item if isinstance(item, dict) else {}
        by_domain = entry and not entry.keys() & set(CONVERSATIONS) and all(isinstance(texts, list) for texts in entry.values())
        category = entry.get("category")
        name = category if isinstance(category, str) else path.stem
        for domain, each in [(d, each) for d, texts in entry.items() for each in texts] if by_domain else [(name, item)]:
            if (prompt := _prompt(path, each, number))[0]:
                yield domain, *prompt


def _json_items(path: Path, text: str) -> list[Any] | None:
    """Returns the entries of JSON or JSON Lines, with None for each entry that cannot be read; None for a text that is not JSON."""
    is_json = path.suffix.lower() in JSON_SUFFIXES
    if not is_json and not text.lstrip().startswith(("{", "[")):
        return None
    data, lines = _parsed(text), [line for line in text.split("\n") if line.strip()]
    if data is None and (is_json or isinstance(_parsed(lines[0]), dict)):  # other texts may begin with a bracket
        return [_parsed(line) for line in lines]
    return data if data is None or isinstance(data, list) else [data]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _prompt(path: Path, item: Any, number: int) -> tuple[str, bool]:
    """Returns an entry's text and whether it is a turn. The text is empty if the user has no turn, as in some entries of ShareGPT."""
    text = item.get("prompt") if isinstance(item, dict) else item
    turns = next((item[key] for key in CONVERSATIONS if isinstance(item.get(key), list)), None) if isinstance(item, dict) else None
    if not isinstance(text, str) and turns is not None:
        return next(filter(None, map(_turn, turns)), ""), True
    if not isinstance(text, str) or not text:
        raise RequestError(f"{path}: entry {number} has no text that could be a prompt; {FORMATS}")
    return text, False


def _turn(message: Any) -> str | None:
    """Returns the text of a turn, or of a user's message; None for other messages."""
    if isinstance(message, dict):
        is_user = message.get("role", message.get("from")) in USERS
        message = message.get("content", message.get("value")) if is_user else None
    if isinstance(message, list):  # parts, as in the OpenAI API
        message = "".join(part["text"] for part in message if isinstance(part, dict) and isinstance(part.get("text"), str))
    return message if isinstance(message, str) else None


def prepare(prompts: Sequence[Prompt], session: Session) -> list[Prompt]:
    """Tokenizes prompts for a session's pair. Raises RequestError if its chat template refuses one."""
    vocabulary = session.vocabulary
    template = bundle_template(session.bundle, vocabulary) if any(p.is_turn for p in prompts) else None
    bos = vocabulary.piece(vocabulary.bos, special=True).decode("utf-8", "replace") if template and vocabulary.bos >= 0 else ""
    prepared = []
    for prompt in prompts:
        ids, text = vocabulary.encode(prompt.text), prompt.text
        if template is not None and prompt.is_turn:
            messages = [{"role": "user", "content": prompt.text}]
            ids, text = template.encode(messages), template.render(messages).replace(MARK, "").removeprefix(bos)
        prepared.append(replace(prompt, ids=tuple(ids), text=text))
    return prepared


def long_prompt(prompts: Sequence[Prompt], length: int) -> tuple[int, ...]:
    """Returns `length` ids: all prompts one after the other, repeated as needed."""
    once = [token for prompt in prompts for token in prompt.ids]
    return tuple((once * (length // len(once) + 1))[:length])


# The options of `LoadOptions` that a benchmark takes. It varies the others itself.
LOADING = ("backend", "context", "packed_cache", "config", "preset", "check", "public_key")
_DRAFTERS = tuple(kind for kind in DRAFTER_KINDS if kind != "none")


class _Listed(click.ParamType[Any]):
    """A text such as 1,2,4 that a function parses. Values that are already parsed stay as they are."""

    name = "text"

    def __init__(self, parse: Callable[[str], Any]) -> None:
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002
        try:
            return self._parse(value) if isinstance(value, str) else value
        except RequestError as error:
            raise click.UsageError(str(error), ctx) from error


def _listed(parse: Callable[[str], Any], usual: str = "none", *, about: str) -> Any:
    """Returns the field of an option whose text is a list. `usual` is the default; a default in words stands for an empty list."""
    default = () if " " in usual else parse(usual)
    text = f"{about}  [default: {usual}]"
    return option(default=default, type=_Listed(parse), multiple=False, show_default=False, panel="Measure", help=text)


def _names(known: Sequence[str], what: str) -> Callable[[str], tuple[str, ...]]:
    return lambda text: parse_names(text, known, what)


def _numbers(what: str) -> Callable[[str], tuple[int, ...]]:
    return lambda text: parse_numbers(text, what)


def _devices(text: str) -> tuple[str, ...]:
    """Parses names of devices. Raises RequestError for an empty or repeated name."""
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
    """What to measure. Empty `drafters` stand for a session's default; `tools` is the folder of llama.cpp's binaries."""

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
        about=f"Sizes of images to measure, in tokens: any of {', '.join(map(str, BUDGETS))}, or none. With --energy also in joules.",
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
        """Returns the shipped prompts of the domains, and the user's own. Raises RequestError if there are none or a name occurs twice."""
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
    """The devices of this machine to measure on."""

    devices: tuple[str, ...] = _listed(
        _devices, about="Devices of this machine, such as cpu,gpu, one after the other in one table; --runs and --energy are folders."
    )


@dataclass(frozen=True, kw_only=True)
class MeterOptions:
    """Which meter to read, and about how many minutes the energy protocol may take."""

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
    """Returns the arguments of `edge-bench run` on a device for all options that differ from their defaults. Files are local paths.

    Meter, result files, key and tools are chosen for the device instead. What --thorough sets is passed as single options.
    """
    usual, words = type(options)(), list[str | Path]()
    for field in fields(options):
        value = getattr(options, field.name)
        left_out = OPTION not in field.metadata or field.name in ("meter", "tools", "public_key", "thorough")
        if left_out or value == getattr(usual, field.name):
            continue
        if isinstance(value, bool):
            words.append(spelling(field)[0])
            continue
        if field.metadata[OPTION].attributes.get("multiple") is False:
            value = ",".join(map(str, value)) or "none"
        for word in value if isinstance(value, tuple) else (value,):
            words += [spelling(field)[0], word if isinstance(word, Path) else str(word)]
    return words
