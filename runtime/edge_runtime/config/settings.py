"""The settings of a session: read from an untrusted YAML file, resolved from layers, and checked against the bundle.

No other module imports yaml.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path, PurePath
from typing import Any, TypeVar

import yaml

from edge_devices.errors import errors_as
from edge_devices.files.limited_read import read_at_most, read_regular
from edge_runtime.bundle.bundle import Bundle
from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH, RuntimeSettings
from edge_runtime.config.schema import (
    BLOCK,
    OLD_KEYS,
    SECTIONS,
    CacheConfig,
    Section,
    SpeculativeConfig,
    StreamingConfig,
    TuningConfig,
    bytes_of,
    shown,
)
from edge_runtime.drafting.policies import DEFAULT_POLICY, WINDOW_ROUNDS, DrafterKind, DraftLengthPolicy, PolicyOptions, policy_kind
from edge_runtime.errors import BundleError, ConfigError

CONFIG_NAME = "config.yaml"
MAX_CONFIG_BYTES = 64 << 10
# More than a configuration needs, which has three levels and values.
_MAX_DEPTH = 9
_TITLE = (
    "# Run settings of this bundle; edit them freely. Remove a key, or write null, for the default.\n"
    "# The command line and --config override this file. Every key: docs/configuration.md of edge-mtp.\n"
)


def read_config(path: Path | str, *, of_bundle: bool = False) -> SpeculativeConfig:
    """Reads a file with a `speculative_decoding:` block. Raises ConfigError, which states the file, the place, the value and what to do.

    If `of_bundle`, symbolic links are not followed: an untrusted bundle must not make us read and quote another file.
    """
    path = Path(path)
    if not of_bundle and not path.is_file():
        raise ConfigError(f"{path} is not a file; give a YAML file with a {BLOCK} block")
    with errors_as(ConfigError, f"{path} cannot be read", "check the file, or save it as UTF-8", OSError, UnicodeDecodeError):
        text = (read_regular if of_bundle else read_at_most)(path, MAX_CONFIG_BYTES).decode("utf-8-sig")
    return parse_config(text, str(path))


def parse_config(text: str, where: str) -> SpeculativeConfig:
    """Parses the text of a configuration; `where` names it in errors. Raises ConfigError."""
    data = _load(text, where)
    block = _known(data, {BLOCK}, where, "").get(BLOCK) if data is not None else None
    sections = _renamed(_known({} if block is None else block, set(SECTIONS), where, BLOCK), where)
    try:
        parsed: dict[str, Any] = {name: _section(SECTIONS[name], values, where) for name, values in sections.items()}
        return SpeculativeConfig(**parsed)
    except ConfigError as error:
        message = str(error)
        raise ConfigError(message if message.startswith(where) else f"{where}: {message}") from error


def config_text(config: SpeculativeConfig) -> str:
    """Returns the text of a file with this configuration and a comment on every key; ASCII, ends with a newline."""
    lines = [_TITLE, f"{BLOCK}:\n"]
    for name in SECTIONS:
        section = getattr(config, name)
        lines.append(f"  {name}:\n")
        for each in dataclasses.fields(section):
            lines.append(f"    # {each.metadata['comment']}\n    {each.name}: {_scalar(getattr(section, each.name))}\n")
    return "".join(lines)


def _renamed(sections: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the sections, with keys of older files replaced by their current names."""
    renamed = {name: dict(section) if isinstance(section, dict) else section for name, section in sections.items()}
    for (name, key), now in OLD_KEYS.items():
        section = renamed.get(name)
        if not isinstance(section, dict) or key not in section:
            continue
        value = section.pop(key)
        if (new := now(value)) is None or value is None:
            continue
        target = renamed.setdefault(new[0], {})
        if target is None:
            target = renamed[new[0]] = {}
        if isinstance(target, dict) and target.setdefault(new[1], new[2]) != new[2]:
            raise ConfigError(f"{where}: {BLOCK}.{name}.{key} is the older name of {new[0]}.{new[1]}, which has another value; remove one")
    return renamed


def _section(kind: type[Section], values: Any, where: str) -> Section:
    keys = {each.name for each in dataclasses.fields(kind)}
    return kind(**_known({} if values is None else values, keys, where, f"{BLOCK}.{kind.name}"))


def _known(data: Any, keys: set[str], where: str, place: str) -> dict[str, Any]:
    """Returns the mapping `data`. Raises ConfigError unless every key is one of `keys`."""
    if not isinstance(data, dict):
        raise ConfigError(
            f"{where}: {place or 'the file'} is {shown(data)}, not keys with values; write {', '.join(sorted(keys))} under it"
        )
    for key in data:
        if key not in keys:
            raise ConfigError(f"{where}: {place + '.' if place else ''}{_name(key)} is not known; {_advice(str(key), keys, place)}")
    return data


def _advice(key: str, keys: set[str], place: str) -> str:
    """Returns advice about an unknown key: the section that it belongs to, or the most similar key of this section."""
    homes = [f"{BLOCK}.{name}" for name, kind in SECTIONS.items() if key in {each.name for each in dataclasses.fields(kind)}]
    if key == BLOCK or key in SECTIONS or homes:
        return f"it belongs under {homes[0] if homes else 'the top of the file' if key == BLOCK else BLOCK}"
    nearest = difflib.get_close_matches(key[:40], sorted(keys), n=1, cutoff=0.0)
    return f"the nearest known key is {nearest[0]}" + (f" ({place} knows {', '.join(sorted(keys))})" if place else "")


def _name(key: Any) -> str:
    return key[:40] if isinstance(key, str) and key.isprintable() else shown(key)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """A YAML loader without what no configuration needs: aliases (which can make a small file huge), tags, deep nesting, merges, and
    repeated keys.
    """

    def __init__(self, text: str, where: str) -> None:
        super().__init__(text)
        self._where, self._depth = where, 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        place = f"{self._where} line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise ConfigError(f"{place}: anchors and aliases (& and *) are not allowed; write the value out")
        if event.tag is not None:
            raise ConfigError(f"{place}: the tag {event.tag[:40]} is not allowed; write a plain value")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ConfigError(f"{place}: this is nested deeper than any configuration; correct it")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                raise ConfigError(f"{self._where} line {line}: a key must be a plain word; correct it")
            if key.value in lines:
                first = lines[key.value]
                raise ConfigError(f"{self._where}: {key.value[:40]} stands in line {first} and again in line {line}; remove one")
            lines[key.value] = line
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _load(text: str, where: str) -> Any:
    try:
        return _Loader(text, where).get_single_data()
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML ({' '.join(str(error).split())[:200]}); correct it") from error
    except (ValueError, OverflowError, RecursionError) as error:
        # For example an integer with thousands of digits, or an impossible date.
        raise ConfigError(f"{where} has a value that cannot be read ({str(error)[:80]}); correct it") from error


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    dumped: str = yaml.safe_dump(value, default_style='"' if isinstance(value, str) else None, width=1 << 20)
    return dumped.removesuffix("...\n").strip()


def _range(start: int, shortest: int, longest: int) -> SpeculativeConfig:
    return SpeculativeConfig(tuning=TuningConfig(policy="rolling", draft_length=start, min_horizon=shortest, max_horizon=longest))


PRESETS = {"code": _range(3, 2, 3), "chat": _range(6, 5, 8), "edge": _range(3, 2, 4), "batch": _range(8, 8, 10)}
_FOR_FOUR_BITS = ("edge",)


def preset_of(name: str) -> SpeculativeConfig:
    """Returns the configuration of the preset with this name. Raises ConfigError if there is none."""
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} is unknown; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def expanded(config: SpeculativeConfig) -> SpeculativeConfig:
    """Returns the configuration, layered over the preset that it names, if any."""
    name = config.tuning.preset
    return config if name is None else config.over(PRESETS[name])


T = TypeVar("T")
LONGEST = 8
WINDOW_TOKENS = 50


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The final value of every setting.

    `drafter` None takes the backend's default kind, `max_candidates` None the number in the head. `longest_draft` limits every draft;
    `draft_length` (the first), `shortest` and `longest` belong to the policy. `window` is in drafted tokens, `memory_limit` in bytes (None:
    no limit).
    """

    context: int
    drafter: DrafterKind | None
    max_candidates: int | None
    longest_draft: int
    kv_type: str
    memory_limit: int | None
    overflow: str
    policy: str
    objective: str
    slowdown: float | None
    draft_length: int
    shortest: int
    longest: int
    threshold: float
    penalty: float
    window: int
    chunk_size: int

    @property
    def needs_costs(self) -> bool:
        """Whether the policy weighs drafts by their costs (`Session.profit`)."""
        return policy_kind(self.policy).needs_costs

    def new_policy(self) -> DraftLengthPolicy:
        """Returns a policy for one request: the configured one, or its fallback if that needs costs."""
        options = PolicyOptions(
            first=self.draft_length,
            shortest=max(self.shortest, 1),
            longest=self.longest,
            threshold=self.threshold,
            penalty=self.penalty,
            window=max(1, self.window * WINDOW_ROUNDS // WINDOW_TOKENS),
        )
        return policy_kind(self.policy).new(options)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def defaults(runtime: RuntimeSettings) -> SpeculativeConfig:
    """Returns the lowest layer: the manifest's recommendations, then the defaults. Raises ConfigError if a recommendation is invalid."""
    first = runtime.draft_length
    return SpeculativeConfig(
        cache=CacheConfig(max_context_length=runtime.context, kv_type="f16", overflow="drop_oldest"),
        tuning=TuningConfig(
            policy=DEFAULT_POLICY,
            objective="time",
            draft_length=first,
            min_horizon=min(1, first),
            max_horizon=max(LONGEST, first),
            longest_draft=MAX_DRAFT_LENGTH,
            acceptance_threshold=0.7,
            rejection_penalty=1.0,
            monitoring_window=WINDOW_TOKENS,
        ),
        streaming=StreamingConfig(chunk_size=1),
    )


def load_settings(
    bundle: Bundle,
    *,
    config: SpeculativeConfig | Path | str | None = None,
    preset: str | None = None,
    context: int | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> Settings:
    """Resolves the layers. From the highest: `context`, `config` (or the file of that name), the preset, the bundle's config.yaml.

    `notify` gets a sentence if the preset is meant for another target. Raises ConfigError and BundleError.
    """
    layers = [SpeculativeConfig(cache=CacheConfig(max_context_length=context))]
    if config is not None:
        layers.append(config if isinstance(config, SpeculativeConfig) else read_config(config))
    if preset is not None:
        layers.append(preset_of(preset))
        quantization = bundle.file("target").quantization or "of unknown precision"
        if preset in _FOR_FOUR_BITS and not quantization.startswith("q4"):
            notify(f"preset {preset} is meant for a 4-bit model, this one is {quantization}; edge-export pair --preset {preset} makes one")
    if os.path.lexists(bundle.folder / CONFIG_NAME):
        layers.append(read_config(bundle.folder / CONFIG_NAME, of_bundle=True))
    return resolve_settings(layers, bundle)


def resolve_settings(layers: Iterable[SpeculativeConfig], bundle: Bundle) -> Settings:
    """Resolves `layers`, the highest first, over the bundle's recommendations and the defaults.

    Raises ConfigError if they name other models or quantizations than the bundle has, BundleError if a recommendation of the bundle is
    invalid.
    """
    with errors_as(BundleError, f"{bundle.folder}: the manifest recommends invalid settings", "export it again", ConfigError):
        lowest = defaults(bundle.manifest.runtime)
    config = reduce(lambda upper, lower: upper.over(lower), [*(expanded(layer) for layer in layers), lowest])
    _check_files(config, bundle)
    tuning, sparse, memory = config.tuning, config.drafter.sparse_output, config.cache.memory_limit
    return Settings(
        context=_required(config.cache.max_context_length),
        drafter=None if sparse is None else "split" if sparse else "dense",
        max_candidates=config.drafter.max_candidates,
        longest_draft=_required(tuning.longest_draft),
        kv_type=_required(config.cache.kv_type),
        memory_limit=None if memory is None else bytes_of(memory),
        overflow=_required(config.cache.overflow),
        policy=_required(tuning.policy),
        objective=_required(tuning.objective),
        slowdown=tuning.slowdown,
        draft_length=_required(tuning.draft_length),
        shortest=_required(tuning.min_horizon),
        longest=_required(tuning.max_horizon),
        threshold=_required(tuning.acceptance_threshold),
        penalty=_required(tuning.rejection_penalty),
        window=_required(tuning.monitoring_window),
        chunk_size=_required(config.streaming.chunk_size),
    )


def _required(value: T | None) -> T:
    assert value is not None, "the defaults set every key"
    return value


def _check_files(config: SpeculativeConfig, bundle: Bundle) -> None:
    """Raises ConfigError if the configuration names another model or quantization than the bundle has."""
    for section, role in ((config.verifier, "target"), (config.drafter, "drafter")):
        source = bundle.manifest.sources.get(role)
        if section.model is not None and source is not None and PurePath(section.model).name != PurePath(source.origin).name:
            raise ConfigError(
                f"{section.name}.model is {section.model!r}, but {bundle.folder} was made from {source.origin!r};"
                " export that model with edge-export, or correct the key"
            )
        quantization = bundle.file(role).quantization if section.precision is not None and bundle.has(role) else None
        if section.precision is not None and quantization is not None and section.precision.lower() != quantization:
            raise ConfigError(
                f"{section.name}.precision is {section.precision!r}, but the {role} in {bundle.folder} is {quantization};"
                " export it again with this precision, or correct the key"
            )
