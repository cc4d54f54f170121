"""Options of what is drawn and where it ends: sampling, constraints, stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from edge_devices.command_line import Decorated, given_options, takes
from edge_devices.option_fields import option
from edge_runtime.bundle.bundle import Bundle
from edge_runtime.cli.options import note
from edge_runtime.decoding.sampling import SamplingParams, default_sampling, over_defaults, sampling_sentence
from edge_runtime.errors import RequestError
from edge_runtime.session.generation import GREEDY_PARAMS
from edge_runtime.text.constraints import ConstraintSource, Gbnf, JsonSchema
from edge_runtime.text.grammar_limits import MAX_SCHEMA_BYTES


def takes_sampling(command: Decorated) -> Decorated:
    """Adds the options of sampling to a command, whose body receives `SamplingParams`."""
    return takes("sampling", GREEDY_PARAMS, panel="Sampling")(command)


def sampling_of(sampling: SamplingParams, bundle: Bundle) -> SamplingParams:
    """Returns the bundle's sampling where the command line says nothing, and prints what that is."""
    named = given_options(click.get_current_context())
    chosen = over_defaults(sampling, named, default_sampling(bundle.manifest.generation, GREEDY_PARAMS))
    if chosen != sampling:
        note(f"sampling as the model's generation_config says: {sampling_sentence(chosen)} (--temperature 0 is greedy)")
    return chosen


def refuse_greedy_filters(sampling: SamplingParams) -> None:
    """Raises a usage error for options that only matter where tokens are drawn."""
    if sampling.temperature == 0 and (sampling.top_k, sampling.top_p, sampling.min_p) != (0, 1, 0):
        raise click.UsageError("--top-k, --top-p and --min-p have no effect at temperature 0; give --temperature too")


@dataclass(frozen=True, kw_only=True)
class TextLimits:
    """What the text may be, and where it ends."""

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
    try:
        with path.open("rb") as file:
            return file.read(MAX_SCHEMA_BYTES + 1).decode()  # the constraint's parser refuses texts above MAX_SCHEMA_BYTES
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from None
