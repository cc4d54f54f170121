"""Options for sampling, constraints and the end of the text."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from edge_devices.command_line import option_group, take
from edge_runtime.decoding.acceptance_rules import ACCEPTANCE_METHODS, DEFAULT_ACCEPTANCE
from edge_runtime.decoding.sampling import PENALTY_WINDOW, SamplingParams
from edge_runtime.errors import RequestError
from edge_runtime.text.constraints import ConstraintSource, Gbnf, JsonSchema, Regex
from edge_runtime.text.grammar_limits import MAX_SCHEMA_BYTES


def read_biases(_context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[int, float]:
    """Parses `ID=VALUE` texts into a bias per token id. Raises a usage error for any other text."""
    biases = {}
    for value in values:
        token, _, bias = value.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise click.BadParameter(f"{value!r} is not ID=VALUE, such as 17=-2.5 or 17=-inf", param=parameter) from None
    return biases


sampling_options = option_group(
    click.option(
        "--temperature",
        "-T",
        type=float,
        default=0.0,
        show_default="the bundle's, else 0",
        help="Sampling temperature; 0 is greedy, 1 the model's own distribution.",
    ),
    click.option(
        "--top-k", type=int, default=0, show_default="the bundle's, else 0", help="Sample from the K most likely tokens; 0 is all."
    ),
    click.option(
        "--top-p",
        type=float,
        default=1.0,
        show_default="the bundle's, else 1",
        help="Sample from the most likely tokens whose probabilities add up to this.",
    ),
    click.option("--min-p", type=float, default=0.0, help="Sample from tokens with at least this fraction of the highest probability."),
    click.option(
        "--repetition-penalty", type=float, default=1.0, help="Divide positive logits of recent tokens by this; multiply negative ones."
    ),
    click.option("--presence-penalty", type=float, default=0.0, help="Subtract this from the logits of recent tokens."),
    click.option("--frequency-penalty", type=float, default=0.0, help="Subtract this from a token's logit per recent occurrence."),
    click.option("--penalty-window", type=int, default=PENALTY_WINDOW, help="Number of tokens that count as recent."),
    click.option(
        "--logit-bias",
        multiple=True,
        metavar="ID=VALUE",
        callback=read_biases,
        help="Add this to a token's logit; -inf bans the token. Repeatable.",
    ),
    click.option("--seed", type=int, help="Random seed; repeats a run with the same --drafter.  [default: random]"),
    click.option(
        "--acceptance",
        type=click.Choice(ACCEPTANCE_METHODS),
        default=DEFAULT_ACCEPTANCE,
        help="How sampled drafts are verified: as a block, one by one (rejection), or by match with the token that the target samples.",
    ),
    click.option("--json-schema", metavar="FILE|JSON", help="Generate only JSON that matches this schema."),
    click.option("--grammar", metavar="FILE", type=click.Path(path_type=Path), help="Generate only text that this GBNF grammar allows."),
    click.option("--regex", metavar="PATTERN", help="Generate only text that this regular expression matches completely."),
    click.option("--stop", multiple=True, help="Stop before this text; it is not printed. Repeatable."),
    click.option("--chunk-size", type=int, help="Print at least this many tokens at once.  [default: from the configuration, else 1]"),
    panel="Sampling and constraints",
)


@dataclass(frozen=True, kw_only=True)
class OutputValues:
    """Values of the options above that are not `SamplingParams`."""

    acceptance: str
    json_schema: str | None
    grammar: Path | None
    regex: str | None
    stop: tuple[str, ...]
    chunk_size: int | None


def given_values() -> frozenset[str]:
    """The names of the `SamplingParams` that the command line gives."""
    context, named = click.get_current_context(silent=True), {field.name for field in fields(SamplingParams)}
    if context is None:
        return frozenset(named)
    return frozenset(name for name in named if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE)


def request_values(values: dict[str, Any]) -> dict[str, Any]:
    """Takes the options' values; returns keyword arguments for `Session.generate`. Raises RequestError or a usage error."""
    output = take(values, OutputValues)
    constraint = read_constraint(output.json_schema, output.grammar, output.regex)
    sampling = take(values, SamplingParams)
    if sampling.temperature == 0 and (sampling.top_k, sampling.top_p, sampling.min_p) != (0, 1, 0):
        raise click.UsageError("--top-k, --top-p and --min-p have no effect at temperature 0; give --temperature too")
    return {
        "sampling": sampling,
        "constraint": constraint,
        "acceptance": output.acceptance,
        "stop": output.stop,
        "chunk_size": output.chunk_size,
    }


def read_constraint(json_schema: str | None, grammar: Path | None, regex: str | None) -> ConstraintSource | None:
    """Returns the requested constraint. Raises a usage error for more than one, RequestError for a file that cannot be read."""
    if sum(option is not None for option in (json_schema, grammar, regex)) > 1:
        raise click.UsageError("--json-schema, --grammar and --regex exclude each other; give one of them")
    if json_schema is not None:
        inline = json_schema.lstrip().startswith("{")
        return JsonSchema(json_schema if inline else _read(Path(json_schema)))
    if grammar is not None:
        return Gbnf(_read(grammar))
    return None if regex is None else Regex(regex)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_SCHEMA_BYTES + 1).decode()  # the constraint's parser refuses texts above MAX_SCHEMA_BYTES
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from None
