"""What several commands of `edge-export` share: the models and their configuration, and options without a declared field."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from edge_devices.option_fields import option
from edge_export.checkpoint.published.hub import with_revision
from edge_export.checkpoint.published.sizes import published_config
from edge_runtime.config.schema import PRESET_NAMES, SpeculativeConfig
from edge_runtime.config.settings import expanded, preset_of
from edge_runtime.config.yaml_file import read_config

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
# Not called like fields of requests, which are options too.
target_name = click.argument("target_name", metavar="[TARGET]", required=False)
drafter_name = click.argument("drafter_name", metavar="[DRAFTER]", required=False)


@dataclass(frozen=True, kw_only=True)
class Models:
    """The revisions of the models named on the command line, and the configuration, which may name them instead."""

    revision: str | None = option(
        metavar="REV", help="Branch, tag or commit of TARGET's hub repository; as OWNER/NAME@REV.  [default: main]", panel="Bundle"
    )
    drafter_revision: str | None = option(metavar="REV", help="The same for DRAFTER's repository.", panel="Bundle")
    config_path: Path | None = option(
        "--config",
        panel="Configuration",
        help="YAML file with models, precisions and context; options on the command line override it."
        " Its other settings go into the bundle's config.yaml.",
    )
    preset: str | None = option(
        choices=PRESET_NAMES, panel="Configuration", help="Run settings for this kind of work, for the bundle's config.yaml."
    )

    def config(self) -> SpeculativeConfig:
        """Returns the configuration file over the preset. Raises ConfigError."""
        config = SpeculativeConfig() if self.config_path is None else expanded(read_config(self.config_path))
        return config if self.preset is None else config.over(preset_of(self.preset).config)

    def names(self, config: SpeculativeConfig, target: str | None, drafter: str | None, *, planning: bool = False) -> tuple[str, str]:
        """Returns target and drafter, as given or from `config`. Raises ExportError, or a usage error if there are none.

        A plan of a built-in size has its own drafter.
        """
        target, drafter = target or config.verifier.model, drafter or config.drafter.model
        if planning and target and not drafter and published_config(target, assistant=True):
            drafter = target
        if not (target and drafter):
            raise click.UsageError("give TARGET and DRAFTER, or a --config that names both models")
        return with_revision(target, self.revision), with_revision(drafter, self.drafter_revision)
