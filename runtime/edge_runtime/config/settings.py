"""The settings of a session: the layers of configuration resolved, completed by defaults and checked against the bundle."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path, PurePath
from typing import Any, TypeVar

from edge_devices.errors import errors_as
from edge_runtime.bundle.bundle import Bundle
from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH, RuntimeSettings
from edge_runtime.config.schema import CacheConfig, SpeculativeConfig, StreamingConfig, TuningConfig, bytes_of
from edge_runtime.config.yaml_file import CONFIG_NAME, read_config
from edge_runtime.drafting.drafter_kinds import DrafterKind
from edge_runtime.drafting.policies import DEFAULT_POLICY, WINDOW_ROUNDS, DraftLengthPolicy, PolicyOptions, policy_kind
from edge_runtime.errors import BundleError, ConfigError


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
    """Returns the configuration over the preset that it names, if any."""
    name = config.tuning.preset
    return config if name is None else config.over(PRESETS[name])


T = TypeVar("T")
LONGEST = 8
WINDOW_TOKENS = 50


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every setting with its value. `drafter` and `max_candidates` None: the kind that the backend takes, the head's own number.

    `longest_draft` bounds any draft; `draft_length`, the first, `shortest` and `longest` are those of the policy; `window` is in drafted
    tokens; `memory_limit` in bytes, None for no limit.
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
        """Whether the policy weighs drafts by measured costs (`Session.profit`)."""
        return policy_kind(self.policy).needs_costs

    def new_policy(self) -> DraftLengthPolicy:
        """Returns a policy for one request that needs no costs: the configured one, or its replacement without costs."""
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
    """Returns the lowest layer: the manifest's recommendation and the defaults. Raises ConfigError if the former is out of range."""
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
    """Resolves the layers: `context` over `config` (or the file of that name), over the preset, over the bundle's config.yaml.

    `notify` gets a sentence if a preset is meant for another target. Raises ConfigError and BundleError.
    """
    layers = [SpeculativeConfig(cache=CacheConfig(max_context_length=context))]
    if config is not None:
        layers.append(config if isinstance(config, SpeculativeConfig) else read_config(config))
    if preset is not None:
        layers.append(preset_of(preset))
        made = bundle.file("target").quantization or "of unknown precision"
        if preset in _FOR_FOUR_BITS and not made.startswith("q4"):
            notify(f"preset {preset} is meant for a 4-bit target, this one is {made}; edge-export pair --preset {preset} makes one")
    if os.path.lexists(bundle.folder / CONFIG_NAME):
        layers.append(read_config(bundle.folder / CONFIG_NAME, of_bundle=True))
    return resolve_settings(layers, bundle)


def resolve_settings(layers: Iterable[SpeculativeConfig], bundle: Bundle) -> Settings:
    """Resolves `layers`, the highest first, over the bundle's recommendation and the defaults.

    Raises ConfigError if they name other models or quantizations than the bundle's, BundleError if the bundle's recommendation is out
    of range.
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
    """Raises ConfigError where the configuration describes another model or quantization than the bundle holds."""
    for section, role in ((config.verifier, "target"), (config.drafter, "drafter")):
        source = bundle.manifest.sources.get(role)
        if section.model is not None and source is not None and PurePath(section.model).name != PurePath(source.origin).name:
            raise ConfigError(
                f"{section.name}.model is {section.model!r}, but {bundle.folder} was made from {source.origin!r};"
                " export that model with edge-export, or correct the key"
            )
        made = bundle.file(role).quantization if section.precision is not None and bundle.has(role) else None
        if section.precision is not None and made is not None and section.precision.lower() != made:
            raise ConfigError(
                f"{section.name}.precision is {section.precision!r}, but the {role} in {bundle.folder} is {made};"
                " export it again with this precision, or correct the key"
            )
