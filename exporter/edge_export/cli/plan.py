"""`edge-export plan`: what a pair will take and how fast it will be, before it is exported."""

from __future__ import annotations

import json
from pathlib import Path

import click

from edge_devices.command_line import PanelCommand, takes
from edge_export.cli.export import REQUEST, Models, drafter_name, target_name
from edge_export.pipeline.dry_run import planned_export
from edge_export.pipeline.request import ExportRequest
from edge_runtime.cli.plan import PlanOptions, plan_lines, short_lines
from edge_runtime.drafting.phase_power import read_phase_power
from edge_runtime.planning.speed import manifest_plan
from edge_runtime.planning.speed_profile import speed_profile


@click.command(cls=PanelCommand)
@target_name
@drafter_name
@click.option(
    "--phase-power",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="JSON file with the watts of drafting, verifying and plain decoding.",
)
@takes("models", Models)
@takes("request", REQUEST, only=("context", "target_quantization", "drafter_quantization"), panel="Bundle")
@takes("options", PlanOptions, only=("profile", "how", "as_json"))
def plan(
    target_name: str | None,
    drafter_name: str | None,
    *,
    phase_power: Path | None,
    models: Models,
    request: ExportRequest,
    options: PlanOptions,
) -> None:
    """Predict download, disk, memory, speed and joules per token of a pair before it is exported.

    No weights are needed: TARGET may be E2B, E4B, 12B, 26B-A4B or 31B; of a hub repository only config.json is fetched.
    """
    config = models.config()
    target, drafter = models.names(config, target_name, drafter_name, planning=True)
    planned = planned_export(
        target,
        drafter,
        target_quantization=request.target_quantization or config.verifier.precision,
        drafter_quantization=request.drafter_quantization or config.drafter.precision,
        context=request.context or config.cache.max_context_length,
    )
    manifest, power = planned.manifest, read_phase_power(phase_power) if phase_power is not None else None
    predicted = manifest_plan(manifest, speed_profile(options.profile, None), context=manifest.runtime.context, power=power)
    if options.as_json:
        click.echo(json.dumps({"export": planned.to_json(), "plan": predicted.to_json()}, ensure_ascii=False))
        return
    for line in [*planned.lines(), *(plan_lines if options.how else short_lines)(predicted)]:
        click.echo(line)
