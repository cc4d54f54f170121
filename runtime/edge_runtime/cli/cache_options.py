"""The command-line options about the KV cache: its type, the memory it may take, and states kept in files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from edge_devices.command_line import option_group
from edge_runtime.bundle.kv_types import KV_TYPES, KvType
from edge_runtime.session.generation import Generation


@dataclass(frozen=True, kw_only=True)
class CacheValues:
    """What was asked for; None where nothing was. `load` is the file a request starts from, `save` the one it leaves behind."""

    kv_type: KvType | None
    memory_limit: str | None
    load: Path | None
    save: Path | None


cache_options = option_group(
    click.option(
        "--kv-type",
        type=click.Choice(KV_TYPES),
        help="Type of the KV cache; a smaller one is less exact.  [default: the configuration's]",
    ),
    click.option(
        "--memory-limit", help="Refuse to open what would take more, e.g. 2GB.  [default: the configuration's, or what the machine has]"
    ),
    click.option(
        "--load-state", type=click.Path(path_type=Path, dir_okay=False), help="Start from a KV state; the prompt begins with its text."
    ),
    click.option("--save-state", type=click.Path(path_type=Path, dir_okay=False), help="Keep the KV state in this file afterwards."),
)


def cache_values(values: dict[str, Any], *, once: bool) -> CacheValues:
    """Takes the options' values out of all the command's. A usage error for state files unless one prompt runs `once`."""
    files = {"load": values.pop("load_state"), "save": values.pop("save_state")}
    if any(files.values()) and not once:
        raise click.UsageError(
            "--load-state and --save-state are for one PROMPT that runs once, not for a chat or --compare; leave them out"
        )
    return CacheValues(kv_type=values.pop("kv_type"), memory_limit=values.pop("memory_limit"), **files)


def remarks(generation: Generation, *, loaded: bool) -> list[str]:
    """Sentences about what the person may not expect: that the context is full, and what a loaded state was good for."""
    sentences, stats = [], generation.stats
    if generation.finish_reason == "context":
        sentences.append(f"stopped: the context of {generation.target.context} tokens is full; raise --context or shorten the prompt")
    if loaded and stats.reused_tokens:
        sentences.append(f"{stats.reused_tokens} of the prompt's {stats.prompt_tokens} tokens came from the state")
    elif loaded:
        sentences.append("nothing of the state could be used: the prompt does not begin with all of its text; it was computed anew")
    return sentences
