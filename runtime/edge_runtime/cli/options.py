"""What the commands of edge-run share: the bundle, how it is opened, and the energy of what runs on it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from edge_devices.command_line import Decorated, takes
from edge_devices.waiting import terminal_wait
from edge_runtime.bundle.manifest import MANIFEST_NAME
from edge_runtime.cli.energy_options import Energy, EnergyOptions
from edge_runtime.config.schema import SpeculativeConfig, TuningConfig
from edge_runtime.config.settings import expanded
from edge_runtime.config.yaml_file import read_config
from edge_runtime.session.load_options import LoadOptions
from edge_runtime.session.monitoring.monitor import MonitorOptions
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session

# Shell completion looks at no more folders than this, so that it stays fast.
MAX_FOLDERS = 1000
# Fields of LoadOptions that every command takes.
_LOADING = ("drafter", "backend", "threads", "execution_provider", "context", "kv_type", "memory_limit", "config", "public_key")
TUNING = ("draft_length", "objective")


class BundlePath(click.Path):
    """A path argument, as `pathlib.Path`. Shell completion offers matching bundles; folders if there are none."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        """Returns the bundles, or lets the shell complete folders: click's bash code would drop bundles beside folders."""
        return matching_bundles(incomplete) or [CompletionItem(incomplete, type="dir")]


def matching_bundles(incomplete: str) -> list[CompletionItem]:
    """Returns the bundles whose paths begin with a text."""
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
    """Prints a message to standard error."""
    click.echo(text, err=True)


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

    def options(self, monitoring: MonitorOptions | None = None, *, warn: bool = True) -> LoadOptions:
        """Returns the options of `open_session`; unless `warn`, nothing is printed about rejected drafts."""
        tuned = SpeculativeConfig(tuning=self.tuning)
        file = self.load.config
        return replace(
            self.load,
            config=tuned if file is None else tuned.over(expanded(read_config(file))),  # type: ignore[arg-type]
            power=self.energy.power,
            notify=note,
            waiting=terminal_wait,
            monitoring=replace(
                monitoring or MonitorOptions(), on_event=lambda event: note(f"\nwarning: {event.sentence}") if warn else None
            ),
        )

    def session(self, bundle: Path, *, warn: bool = True) -> Session:
        """Opens a bundle. Raises what `open_session` raises, and a usage error for more threads than processors."""
        refuse_threads(self.load.threads)
        return open_session(bundle, self.options(warn=warn))


def opens_bundle(
    *further: str, tuning: Sequence[str] = TUNING, energy: Sequence[str] = ("meter", "phase_power")
) -> Callable[[Decorated], Decorated]:
    """Returns a decorator that adds the argument BUNDLE and the options of opening it to a command, whose body receives an `Opening`.

    `further` are fields of LoadOptions; `tuning` and `energy` those of TuningConfig and EnergyOptions.
    """

    def add(command: Decorated) -> Decorated:
        @takes("tuning", TuningConfig, only=tuning, panel="Drafting")
        @takes("load", LoadOptions, only=(*_LOADING, *further))
        @takes("energy", EnergyOptions, only=energy)
        @functools.wraps(command)
        def build(*, load: LoadOptions, tuning: TuningConfig, energy: EnergyOptions, **values: Any) -> Any:
            return command(opening=Opening(load=load, tuning=with_policy(tuning), energy=energy.open(note, tuning)), **values)

        return build  # type: ignore[return-value]

    return add


def with_policy(tuning: TuningConfig) -> TuningConfig:
    """Returns the tuning in which a given draft length is that of every round. Raises a usage error where an objective chooses it."""
    if tuning.draft_length is None:
        return tuning
    if tuning.objective == "energy":
        raise click.UsageError("--objective energy chooses draft lengths itself; leave --draft-length out")
    return replace(tuning, policy="fixed")
