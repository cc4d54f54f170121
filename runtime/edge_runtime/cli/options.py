"""What the commands of edge-run share: the options of opening a bundle, of measuring energy, and of sampling."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import click
from click.shell_completion import CompletionItem

from edge_devices.command_line import Decorated, given_options, takes
from edge_devices.energy.live import EnergyWatch, RunEnergy, SharedWatch
from edge_devices.energy.virtual_meters import ESTIMATE, VIRTUAL, requested_meter, virtual_meter
from edge_devices.errors import EdgeError, MeterError, errors_as
from edge_devices.machine.system import System
from edge_devices.meters.base import Meter
from edge_devices.meters.search import find_meters, no_meter_reason
from edge_devices.option_fields import option
from edge_devices.waiting import terminal_wait
from edge_runtime.bundle.bundle import Bundle
from edge_runtime.bundle.manifest import MANIFEST_NAME
from edge_runtime.calibration.power_probe import PowerProbe
from edge_runtime.config.schema import SpeculativeConfig, TuningConfig
from edge_runtime.config.settings import expanded, read_config
from edge_runtime.decoding.sampling import SamplingParams, default_sampling, over_defaults, sampling_sentence
from edge_runtime.drafting.energy_objective import PhasePower, PowerSource, read_phase_power
from edge_runtime.drafting.policies import Event
from edge_runtime.errors import RequestError
from edge_runtime.session.generation import GREEDY_PARAMS
from edge_runtime.session.load_options import LoadOptions
from edge_runtime.session.monitor import MonitorOptions
from edge_runtime.session.open import open_session
from edge_runtime.session.prompt_cache import LIMIT, default_folder
from edge_runtime.session.session import Session
from edge_runtime.text.constraints import MAX_SCHEMA_BYTES, ConstraintSource, Gbnf, JsonSchema


@dataclass(frozen=True, kw_only=True)
class Energy:
    """The meter of a command's runs. `power` is the watts per phase for the objective energy; None if unknown.

    `named` says that the user named this meter.
    """

    system: System
    meter: Meter | None
    power: PhasePower | PowerSource | None
    reason: str = ""  # why there is no meter
    named: bool = False

    def or_estimate(self) -> Energy:
        """Returns this meter, or an estimate by the power model of the device's profile. If there is neither, the reason says why."""
        if self.meter is not None:
            return self
        try:
            return replace(self, meter=virtual_meter(self.system, ESTIMATE))
        except MeterError as error:
            return replace(self, reason=f"{self.reason}, and no estimate: {error} (--meter)")

    def watch(self) -> EnergyWatch:
        """Returns the energy measurement of one run."""
        return EnergyWatch(self.system, self.meter, self.reason)

    def shared_watch(self) -> SharedWatch:
        """Returns the energy measurement of concurrent requests."""
        return SharedWatch(self.system, self.meter, self.reason)


def unwatched() -> EnergyWatch:
    """Returns an energy measurement without a meter."""
    return EnergyWatch(System(), None)


@dataclass(frozen=True, kw_only=True)
class EnergyOptions:
    """The options that name a meter, or a file with the machine's watts."""

    meter: str | None = option(
        metavar="NAME",
        panel="Energy",
        help=f"Energy meter to read: a name from edge-devices meters, or {VIRTUAL}.  [default: the best usable meter, if any]",
    )
    phase_power: Path | None = option(
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        metavar="FILE",
        panel="Energy",
        help="JSON file with the watts of drafting, checking and plain decoding, for joules per token.  [default: measured on first use]",
    )

    def open(self, notify: Callable[[str], None], tuning: TuningConfig) -> Energy:
        """Opens the meter. Raises MeterError if the named meter cannot be used, and a usage error for watts that would have no use."""
        if self.phase_power is not None and tuning.objective == "time":
            raise click.UsageError("--phase-power is for --objective energy; leave one of them out")
        system = System()
        findings = find_meters(system)
        meter = requested_meter(system, findings, self.meter)
        power: PhasePower | PowerSource | None = None
        if self.phase_power is not None:
            power = read_phase_power(self.phase_power)
        elif meter is not None and not (meter.facts.is_estimate or meter.facts.is_replay):
            power = PowerProbe(system=system, meter=meter, notify=notify, waiting=terminal_wait)
        reason = "" if meter else no_meter_reason(findings)
        return Energy(system=system, meter=meter, power=power, reason=reason, named=self.meter is not None)


@dataclass(frozen=True, kw_only=True)
class PromptCacheOptions:
    """Where the K/V rows of prompts are kept; `prompt_cache` None is the user's own folder."""

    prompt_cache: str | None = option(
        metavar="off|FOLDER",
        panel="Prompt cache",
        help="Keep computed prompts in this folder, readable by you alone: a text that comes back starts faster.  [default: a folder"
        " in ~/.cache/edge-mtp; edge-run forget empties it]",
    )
    prompt_cache_limit: str = option(
        default=LIMIT,
        metavar="SIZE",
        panel="Prompt cache",
        help="The largest size of the folder; what was used longest ago is removed first.",
    )

    def folder(self) -> Path | None:
        """Returns the folder; None if the cache is off or the user has no home folder."""
        if self.prompt_cache is not None:
            return None if self.prompt_cache == "off" else Path(self.prompt_cache)
        with contextlib.suppress(EdgeError):
            return default_folder()
        return None


def energy_record(energy: RunEnergy) -> dict[str, Any]:
    """Returns the energy part of a run's JSON: null and the reason if there are no joules per token."""
    if energy.joules_per_token is None:
        return {"energy": None, "energy_reason": energy.sentence()}
    return {"energy": energy.to_json()}


# Shell completion looks at no more folders than this, so that it stays fast.
MAX_FOLDERS = 1000
# Fields of LoadOptions that every command takes.
_LOADING = ("drafter", "backend", "threads", "device", "context", "kv_type", "memory_limit", "packed_cache", "config", "public_key")
TUNING = ("draft_length", "objective")


class BundlePath(click.Path):
    """A `pathlib.Path` argument. Shell completion offers matching bundles; folders if there are none."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        """Returns the bundles, or else lets the shell complete folders. Not both: click's bash code would drop the bundles."""
        return matching_bundles(incomplete) or [CompletionItem(incomplete, type="dir")]


def matching_bundles(incomplete: str) -> list[CompletionItem]:
    """Returns the bundles whose paths begin with `incomplete`."""
    parent, _, start = incomplete.rpartition("/")
    folder = parent + "/" if incomplete.startswith("/") or parent else ""
    try:
        names = sorted(path.name for path, _ in zip(Path(folder or ".").iterdir(), range(MAX_FOLDERS), strict=False))
    except OSError:
        return []
    bundles = [name for name in names if name.startswith(start) and (Path(folder) / name / MANIFEST_NAME).is_file()]
    return [CompletionItem(folder + name) for name in bundles]


def refuse_threads(count: int | None) -> None:
    """Raises a usage error for more threads than this machine has processors: they would only wait for each other."""
    processors = os.cpu_count()
    if count is not None and processors is not None and count > processors:
        raise click.UsageError(f"--threads {count} is more than the {processors} processors of this machine; give at most {processors}")


def note(text: str) -> None:
    """Prints a message to standard error. At a terminal, long lines are broken between words."""
    click.echo(wrapped(text, sys.stderr), err=True)


def wrapped(text: str, stream: TextIO | None) -> str:
    """Returns the text for a stream. For a terminal, long lines are broken between words."""
    if stream is None or not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    fill = functools.partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
    # Colour codes take no room.
    return "\n".join(line if len(click.unstyle(line)) <= width else fill(line) for line in text.split("\n"))


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The options with which a command opens its bundle, and the energy of what runs on it."""

    load: LoadOptions
    tuning: TuningConfig
    energy: Energy

    @property
    def draft_length(self) -> int | None:
        """The draft length of every round; None if the configured policy chooses it."""
        return self.tuning.draft_length

    def options(self, monitoring: MonitorOptions | None = None, *, warn: bool = True, measure: bool = False) -> LoadOptions:
        """Returns the options of `open_session`. Unless `warn`, nothing is printed about rejected drafts."""
        tuned = SpeculativeConfig(tuning=self.tuning)
        file = self.load.config
        return replace(
            self.load,
            config=tuned if file is None else tuned.over(expanded(read_config(file))),  # type: ignore[arg-type]
            power=self.energy.power,
            measure=measure,
            notify=note,
            waiting=terminal_wait,
            monitoring=replace(monitoring or MonitorOptions(), on_event=lambda event: self._warn(event) if warn else None),
        )

    def _warn(self, event: Event) -> None:
        # A user who chose the draft length can choose another one. A policy reacts to rejected drafts itself, so users need no warning.
        if event.kind != "rejection" or self.draft_length is not None:
            note(f"\nwarning: {event.sentence}")

    def session(self, bundle: Path, *, warn: bool = True, measure: bool = False) -> Session:
        """Opens a bundle. Raises what `open_session` raises, and a usage error for more threads than processors."""
        refuse_threads(self.load.threads)
        return open_session(bundle, self.options(warn=warn, measure=measure))


def opens_bundle(
    *further: str, tuning: Sequence[str] = TUNING, energy: Sequence[str] = ("meter", "phase_power"), prompt_cache: bool = False
) -> Callable[[Decorated], Decorated]:
    """Returns a decorator that adds the options of opening a bundle to a command, whose body receives an `Opening`.

    `further` names more fields of LoadOptions; `tuning` and `energy` name fields of TuningConfig and EnergyOptions. `prompt_cache` adds
    the options of the prompt cache.
    """

    def add(command: Decorated) -> Decorated:
        @takes("tuning", TuningConfig, only=tuning, panel="Drafting")
        @takes("load", LoadOptions, only=(*_LOADING, *further))
        @takes("energy", EnergyOptions, only=energy)
        @takes("cache", PromptCacheOptions, only=None if prompt_cache else ())
        @functools.wraps(command)
        def build(*, load: LoadOptions, tuning: TuningConfig, energy: EnergyOptions, cache: PromptCacheOptions, **values: Any) -> Any:
            if prompt_cache:
                load = replace(load, prompt_cache=cache.folder(), prompt_cache_limit=cache.prompt_cache_limit)
            return command(opening=Opening(load=load, tuning=with_policy(tuning), energy=energy.open(note, tuning)), **values)

        return build  # type: ignore[return-value]

    return add


def with_policy(tuning: TuningConfig) -> TuningConfig:
    """Returns the tuning with the policy that drafts a given length in every round. Raises a usage error for the objective energy."""
    if tuning.draft_length is None:
        return tuning
    if tuning.objective == "energy":
        raise click.UsageError("--objective energy chooses draft lengths itself; leave --draft-length out")
    return replace(tuning, policy="fixed")


def takes_sampling(command: Decorated) -> Decorated:
    """Adds the options of sampling to a command, whose body receives `SamplingParams`."""
    return takes("sampling", GREEDY_PARAMS, panel="Sampling")(command)


def sampling_of(sampling: SamplingParams, bundle: Bundle) -> SamplingParams:
    """Returns the sampling: values that the command line does not give come from the bundle. Prints the result if they changed it."""
    named = given_options(click.get_current_context())
    chosen = over_defaults(sampling, named, default_sampling(bundle.manifest.generation, GREEDY_PARAMS))
    if chosen != sampling:
        note(f"sampling as the model's generation_config says: {sampling_sentence(chosen)} (--temperature 0 is greedy)")
    return chosen


def refuse_greedy_filters(sampling: SamplingParams) -> None:
    """Raises a usage error for sampling filters without effect at temperature 0."""
    if sampling.temperature == 0 and (sampling.top_k, sampling.top_p, sampling.min_p) != (0, 1, 0):
        raise click.UsageError("--top-k, --top-p and --min-p have no effect at temperature 0; give --temperature too")


@dataclass(frozen=True, kw_only=True)
class TextLimits:
    """Which text is allowed, and where it ends."""

    json_schema: str | None = option(metavar="FILE|JSON", panel="Text", help="Generate only JSON that matches this schema.")
    grammar: Path | None = option(metavar="FILE", panel="Text", help="Generate only text that this GBNF grammar allows.")
    stop: Sequence[str] = option(default=(), panel="Text", help="Stop before this text; it is not printed. Repeatable.")

    def constraint(self) -> ConstraintSource | None:
        """Returns the requested constraint. Raises a usage error for two, RequestError for a file that cannot be read."""
        if self.json_schema is not None and self.grammar is not None:
            raise click.UsageError("--json-schema and --grammar exclude each other; give one of them")
        if self.json_schema is not None:
            inline = self.json_schema.lstrip().startswith("{")
            return JsonSchema(self.json_schema if inline else _read(Path(self.json_schema)))
        return None if self.grammar is None else Gbnf(_read(self.grammar))


def _read(path: Path) -> str:
    unreadable = errors_as(RequestError, f"{path} cannot be read as text", "check the path", OSError, UnicodeDecodeError)
    with unreadable, path.open("rb") as file:
        return file.read(MAX_SCHEMA_BYTES + 1).decode()  # the constraint's parser refuses texts above MAX_SCHEMA_BYTES
