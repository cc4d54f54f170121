"""Options of several commands: the bundle, the drafts, the backend, the checks of a bundle, the KV cache and monitoring."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from edge_devices.command_line import one_sentence_errors, option_group, take
from edge_devices.machine.cpu_affinity import MOST_THREADS
from edge_runtime.backends.selection import BACKENDS, BackendKind
from edge_runtime.bundle.integrity import CHECK_MODES, CheckMode
from edge_runtime.bundle.kv_types import KV_TYPES, KvType
from edge_runtime.bundle.manifest import MANIFEST_NAME
from edge_runtime.cli.doctor.screen import doctor_option
from edge_runtime.config.presets import expanded
from edge_runtime.config.schema import PRESET_NAMES, SpeculativeConfig, TuningConfig
from edge_runtime.config.yaml_file import read_config
from edge_runtime.drafting.acceptance_window import WARN_ABOVE
from edge_runtime.drafting.draft_store import STORE_SIZE, forget
from edge_runtime.drafting.drafter_kinds import DRAFTER_KINDS, DrafterKind
from edge_runtime.drafting.policies import POLICIES
from edge_runtime.errors import OUT_OF_MEMORY
from edge_runtime.session.chat import MAX_TOKENS

# Shell completion looks at no more folders than this, so that it stays fast.
MOST_FOLDERS = 1000
RUN_TOKENS = 128


class BundlePath(click.Path):
    """A path argument, as `pathlib.Path`. Shell completion offers matching bundles; folders if there are none."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        """Returns the bundles, or lets the shell complete folders: click's bash code would drop bundles beside folders."""
        parent, _, start = incomplete.rpartition("/")
        folder = parent + "/" if incomplete.startswith("/") or parent else ""
        try:
            names = sorted(path.name for path, _ in zip(Path(folder or ".").iterdir(), range(MOST_FOLDERS), strict=False))
        except OSError:
            names = []
        bundles = [name for name in names if name.startswith(start) and (Path(folder) / name / MANIFEST_NAME).is_file()]
        return [CompletionItem(folder + name) for name in bundles] or [CompletionItem(incomplete, type="dir")]


def refuse_threads(count: int | None) -> None:
    """Raises a usage error for more threads than this machine has processors: they would only wait for each other."""
    processors = os.cpu_count()
    if count is not None and processors is not None and count > processors:
        raise click.UsageError(f"--threads {count} is more than the {processors} processors of this machine; give at most {processors}")


def _forget(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    if path is None or context.resilient_parsing:
        return
    with one_sentence_errors(out_of_memory=OUT_OF_MEMORY):
        count = forget(path)
        click.echo(f"{path}: {count} texts forgotten" if count else f"{path}: there was nothing to forget", err=True)
    context.exit()


backend_option = click.option(
    "--backend",
    "-b",
    type=click.Choice(BACKENDS),
    help="llama.cpp or ONNX Runtime.  [default: the faster one on this machine, measured on first use]",
)


def threads_option(default: str) -> Callable[[Any], Any]:
    """Returns the option --threads; `default` describes its default."""
    return click.option(
        "--threads",
        "-t",
        type=click.IntRange(1, MOST_THREADS),
        help=f"CPU threads, at most one a processor.  [default: {default}]",
    )


config_options = option_group(
    click.option("--context", "-c", type=click.IntRange(min=16), help="Size of the KV cache in tokens.  [default: from the configuration]"),
    click.option("--config", type=click.Path(path_type=Path), help="YAML file that overrides --preset and the bundle's config.yaml."),
    click.option("--preset", type=click.Choice(PRESET_NAMES), help="Draft lengths for a kind of work; overrides the bundle's config.yaml."),
    panel="Configuration",
)
drafting_options = option_group(
    click.option(
        "--draft-length",
        "-d",
        type=click.IntRange(0, 12),
        help="Tokens to draft per round; 0 is plain decoding. With --policy rolling, the initial length.  [default: "
        "from the configuration]",
    ),
    click.option("--policy", type=click.Choice(POLICIES), help="How the draft length is chosen.  [default: from the configuration]"),
    click.option(
        "--drafter",
        type=click.Choice(DRAFTER_KINDS),
        help="dense: MTP drafter; split: MTP drafter with a sparse head; lookup: copies from the text; none: no drafts."
        "  [default: from the configuration, else the faster of dense and split]",
    ),
    panel="Drafting",
)
backend_options = option_group(
    backend_option,
    click.option(
        "--execution-provider", metavar="NAME", help="ONNX: where graphs run, such as cpu, openvino or openvino:NPU.  [default: cpu]"
    ),
    click.option(
        "--keep-packed",
        is_flag=True,
        help="ONNX: cache weights packed for this CPU on disk, at twice their size. Opens faster and maps memory.",
    ),
    threads_option("the fastest number per phase, measured on first use"),
    panel="Backend",
)
check_options = option_group(
    click.option(
        "--check",
        type=click.Choice(CHECK_MODES),
        default="fast",
        help="full: SHA-256 of all files; fast: SHA-256 on first use, then sizes, times and samples; none: sizes only.",
    ),
    click.option(
        "--verify-key",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="PUBKEY",
        help="Refuse the bundle unless it is signed with this Ed25519 key (PEM). Needs edge-mtp[sign].",
    ),
    panel="Checks",
)
cache_options = option_group(
    click.option(
        "--kv-type",
        type=click.Choice(KV_TYPES),
        help="Data type of the KV cache; smaller types are less exact.  [default: from the configuration]",
    ),
    click.option(
        "--memory-limit",
        help="Refuse to open a bundle that needs more memory, such as 2GB.  [default: from the configuration, else the available memory]",
    ),
    click.option(
        "--load-state",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Start from a saved KV state; PROMPT must begin with its text.",
    ),
    click.option("--save-state", type=click.Path(path_type=Path, dir_okay=False), help="Save the KV state to this file afterwards."),
    panel="Memory",
)
memory_options = option_group(
    click.option(
        "--draft-store",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Keep answers in this file, for you alone, and copy drafts from it: faster where texts come back.  [default: keep nothing]",
    ),
    click.option(
        "--draft-store-size",
        default=STORE_SIZE,
        help="With --draft-store: the most that the file may hold; the oldest texts make room.",
    ),
    click.option(
        "--remember",
        type=click.Path(path_type=Path),
        multiple=True,
        metavar="TEXT",
        help="With --draft-store: add a text file to it, such as one that answers will quote. Repeatable.",
    ),
    click.option(
        "--forget",
        type=click.Path(path_type=Path),
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=_forget,
        help="Remove a file of --draft-store and exit.",
    ),
    panel="Drafting",
)
monitoring_options = option_group(
    click.option("--log", type=click.Path(path_type=Path), help="Append the figures of each request to this file, one JSON line each."),
    click.option(
        "--warn-rejection",
        type=click.FloatRange(0, 1, min_open=True, max_open=True),
        multiple=True,
        default=WARN_ABOVE,
        help="Warn when more than this share of recent drafts is rejected. Repeatable.",
    ),
    panel="Monitoring",
)
mode_options = option_group(
    click.option(
        "--max-tokens",
        "-n",
        type=click.IntRange(min=1),
        help=f"Maximum number of tokens to generate.  [default: {RUN_TOKENS}; {MAX_TOKENS} for an answer through the chat template]",
    ),
    click.option("--json", "as_json", is_flag=True, is_eager=True, help="Print one JSON object instead of text; in a chat, one per turn."),
    doctor_option,
    click.option(
        "--verify-lossless", is_flag=True, help="Run again without drafts; report whether the output is equal, else the first difference."
    ),
    click.option("--compare", "comparing", is_flag=True, help="Run with and without drafts and print a table."),
    click.option("--demo", is_flag=True, help="Stream several kinds of text with accepted drafts in colour, beside plain decoding."),
    click.option(
        "--repeats", type=click.IntRange(min=1), default=3, help="Comparison: runs with and without drafts; the table shows medians."
    ),
    click.option("--measure", is_flag=True, help="Plan: also run the bundle here and print the deviation of each prediction."),
    panel="Run",
)


@dataclass(frozen=True, kw_only=True)
class ModeValues:
    """Values of `mode_options`: what to run, and in which form to print it."""

    max_tokens: int | None
    as_json: bool
    verify_lossless: bool
    comparing: bool
    demo: bool
    repeats: int
    measure: bool


@dataclass(frozen=True, kw_only=True)
class DraftingValues:
    """Values of `drafting_options` and `config_options`."""

    draft_length: int | None
    policy: str | None
    drafter: DrafterKind | None
    context: int | None
    config: Path | None
    preset: str | None

    @property
    def fixed_length(self) -> int | None:
        """The draft length of every round; None if a policy chooses it."""
        return None if self.policy == "rolling" else self.draft_length

    def configuration(self, objective: str | None, slowdown: float | None) -> SpeculativeConfig:
        """Returns the configuration file, overridden by the draft options of the command line."""
        tuning = TuningConfig(policy=self.policy, draft_length=self.draft_length, objective=objective, slowdown=slowdown)
        options = SpeculativeConfig(tuning=tuning)
        return options if self.config is None else options.over(expanded(read_config(self.config)))


@dataclass(frozen=True, kw_only=True)
class BackendValues:
    """Values of `backend_options`."""

    backend: BackendKind | None
    execution_provider: str | None
    keep_packed: bool
    threads: int | None


@dataclass(frozen=True, kw_only=True)
class CheckValues:
    """Values of `check_options`."""

    check: CheckMode
    verify_key: Path | None


@dataclass(frozen=True, kw_only=True)
class CacheValues:
    """Values of `cache_options`. A request starts from the state in `load_state` and leaves one in `save_state`."""

    kv_type: KvType | None
    memory_limit: str | None
    load_state: Path | None
    save_state: Path | None


@dataclass(frozen=True, kw_only=True)
class MemoryValues:
    """Values of `memory_options`, by the names of `LoadOptions`."""

    draft_store: Path | None
    draft_store_size: str
    remember: tuple[Path, ...]


@dataclass(frozen=True, kw_only=True)
class MonitoringValues:
    """Values of `monitoring_options`."""

    log: Path | None
    warn_rejection: tuple[float, ...]


def drafting_values(values: dict[str, Any]) -> DraftingValues:
    """Takes the options' values. Raises a usage error for a policy and a draft length that contradict each other."""
    taken = take(values, DraftingValues)
    if taken.policy in ("profit", "stepped") and taken.draft_length is not None:
        raise click.UsageError(f"--policy {taken.policy} chooses its own draft lengths; leave --draft-length out")
    if taken.policy == "rolling" and taken.draft_length == 0:
        raise click.UsageError("--policy rolling needs a --draft-length of at least 1")
    return taken


def check_values(values: dict[str, Any]) -> CheckValues:
    """Takes the options' values. Raises a usage error for a key without a check."""
    taken = take(values, CheckValues)
    refuse_unchecked_key(taken.check, taken.verify_key)
    return taken


def refuse_unchecked_key(check: CheckMode, key: Path | None) -> None:
    """Raises a usage error for a key without a check."""
    if key is not None and check == "none":
        raise click.UsageError("--verify-key is of no use with --check none, which does not compare the files; leave one of them out")


def cache_values(values: dict[str, Any], *, once: bool) -> CacheValues:
    """Takes the options' values. Raises a usage error for state files unless one prompt runs `once`."""
    taken = take(values, CacheValues)
    if (taken.load_state or taken.save_state) and not once:
        raise click.UsageError("--load-state and --save-state need a PROMPT that runs once, not a chat or --compare; leave them out")
    return taken
