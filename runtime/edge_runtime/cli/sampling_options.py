"""The options of a command that say how tokens are drawn and where a text ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from edge_devices.command_line import option_group
from edge_runtime.decoding.acceptance_rules import ACCEPTANCE_METHODS, DEFAULT_ACCEPTANCE
from edge_runtime.decoding.sampling import PENALTY_WINDOW, SamplingParams
from edge_runtime.errors import RequestError
from edge_runtime.text.constraints import ConstraintSource, Gbnf, JsonSchema, Regex
from edge_runtime.text.grammar_limits import MAX_SCHEMA_BYTES


def read_biases(_context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[int, float]:
    """Returns the bias of each token id from `ID=VALUE` texts; a usage error if one is not of that form."""
    biases = {}
    for value in values:
        token, _, bias = value.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise click.BadParameter(f"{value!r} is not ID=VALUE, such as 17=-2.5 or 17=-inf", param=parameter) from None
    return biases


sampling_options = option_group(
    click.option("--temperature", type=float, default=0.0, help="0 is greedy; 1 is the model's own distribution."),
    click.option("--top-k", type=int, default=0, help="Draw from the K likeliest tokens; 0 is all."),
    click.option("--top-p", type=float, default=1.0, help="Draw from the likeliest tokens that have this probability together."),
    click.option("--min-p", type=float, default=0.0, help="Draw from tokens at least this many times as likely as the likeliest."),
    click.option("--repetition-penalty", type=float, default=1.0, help="Divides positive logits of recent tokens, multiplies others."),
    click.option("--presence-penalty", type=float, default=0.0, help="Subtracted from the logits of recent tokens."),
    click.option("--frequency-penalty", type=float, default=0.0, help="Subtracted once per occurrence."),
    click.option("--penalty-window", type=int, default=PENALTY_WINDOW, help="How many tokens count as recent."),
    click.option(
        "--logit-bias",
        multiple=True,
        metavar="ID=VALUE",
        callback=read_biases,
        help="Added to the logit of a token; -inf bans it. Repeatable.",
    ),
    click.option("--seed", type=int, help="Repeats a run with the same --drafter.  [default: another draw each time]"),
    click.option(
        "--acceptance", type=click.Choice(ACCEPTANCE_METHODS), default=DEFAULT_ACCEPTANCE, help="How sampled drafts are accepted."
    ),
    click.option("--json-schema", metavar="FILE|JSON", help="Write only JSON that this schema describes."),
    click.option("--grammar", metavar="FILE", type=click.Path(path_type=Path), help="Write only what this GBNF grammar allows."),
    click.option("--regex", metavar="PATTERN", help="Write only what this regular expression matches as a whole."),
    click.option("--stop", multiple=True, help="Text that ends the answer and is not shown. Repeatable."),
    click.option("--chunk-size", type=int, help="Show at least this many tokens at once.  [default: the configuration's, else 1]"),
)


def request_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keyword arguments for `Session.generate` from the options' values. Raises RequestError or a usage error."""
    rest = dict(values)
    outside = {name: rest.pop(name) for name in ("acceptance", "stop", "chunk_size")}
    constraint = read_constraint(rest.pop("json_schema"), rest.pop("grammar"), rest.pop("regex"))
    sampling = SamplingParams(**rest)
    if sampling.temperature == 0 and (sampling.top_k, sampling.top_p, sampling.min_p) != (0, 1, 0):
        raise click.UsageError("--top-k, --top-p and --min-p change nothing at temperature 0; give --temperature too")
    return {"sampling": sampling, "constraint": constraint, **outside}


def read_constraint(json_schema: str | None, grammar: Path | None, regex: str | None) -> ConstraintSource | None:
    """Returns what the options ask for. Raises a usage error for more than one, RequestError for a file that cannot be read."""
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
            return file.read(MAX_SCHEMA_BYTES + 1).decode()  # one byte too many is refused where the text is read
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from None
