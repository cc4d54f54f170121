"""Presets: named settings for kinds of work. Their ranges are published recommendations for MTP drafts, not measurements."""

from __future__ import annotations

from dataclasses import dataclass

from edge_runtime.config.schema import SpeculativeConfig, TuningConfig
from edge_runtime.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named configuration; `four_bit_target` is whether it is for a 4-bit target, which edge-export then makes."""

    config: SpeculativeConfig
    four_bit_target: bool = False


def _range(start: int, shortest: int, longest: int) -> SpeculativeConfig:
    return SpeculativeConfig(tuning=TuningConfig(policy="rolling", draft_length=start, min_horizon=shortest, max_horizon=longest))


PRESETS = {
    "code": Preset(config=_range(3, 2, 3)),
    "chat": Preset(config=_range(6, 5, 8)),
    "edge": Preset(config=_range(3, 2, 4), four_bit_target=True),
    "batch": Preset(config=_range(8, 8, 10)),
}


def preset_of(name: str) -> Preset:
    """Returns the preset with this name. Raises ConfigError if there is none."""
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} is unknown; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def expanded(config: SpeculativeConfig) -> SpeculativeConfig:
    """Returns the configuration over the preset that it names, if any."""
    name = config.tuning.preset
    return config if name is None else config.over(PRESETS[name].config)
