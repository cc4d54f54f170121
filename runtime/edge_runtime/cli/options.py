"""The command-line options about trusting a bundle: how its files are compared with the manifest, and whose signature it must have."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

import click

from edge_devices.command_line import option_group
from edge_runtime.bundle.integrity import CHECK_MODES, CheckMode


class CheckValues(TypedDict):
    """What was asked for, under the names of `LoadOptions`."""

    check: CheckMode
    public_key: Path | None


check_options = option_group(
    click.option(
        "--check",
        type=click.Choice(CHECK_MODES),
        default="fast",
        help="full: all files' sha256; fast: that once, then sizes, times and samples; none: sizes.",
    ),
    click.option(
        "--verify-key",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="PUBKEY",
        help="Refuse the bundle unless this Ed25519 key (PEM) signed it; needs [sign].",
    ),
)


def check_values(values: dict[str, Any]) -> CheckValues:
    """Takes the options' values out of all the command's. Raises a usage error for a key beside no check."""
    if values["verify_key"] is not None and values["check"] == "none":
        raise click.UsageError("--verify-key says who made files that --check none does not compare; leave out one of them")
    return {"check": values.pop("check"), "public_key": values.pop("verify_key")}
