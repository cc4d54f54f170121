"""jinja2 as transformers sets it up for chat templates: its options, its `generation` tag and its helpers, in jinja2's sandbox.

Source: transformers, utils/chat_template_utils.py. The sandbox hides Python's internals from a template. It limits neither time nor memory,
so it only runs in a child process with limits (`template_renderer`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_CHARACTERS = 4_000_000


class GenerationTag(Extension):
    """`{% generation %}` marks what the assistant wrote, for training. Here it only renders its body, which has its own scope."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Returns a node that calls the block, as transformers' tag does."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class TemplateDict:
    """`dict` in a template: creates a dictionary, without the other attributes of Python's type."""

    def __call__(self, *items: Any, **named: Any) -> dict[Any, Any]:
        return dict(*items, **named)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        """As `dict.fromkeys`."""
        return dict.fromkeys(*arguments)


class TemplateNamespace(Namespace):
    """`namespace` in a template. Its names cannot begin with an underscore, as Python's internal names do."""

    def __init__(*positional: Any, **named: Any) -> None:  # no parameter is named `self`, because a template may use that name
        self, *items = positional
        values = dict(*items, **named)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name such as {name!r}")


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """Returns JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compile_template(source: str) -> Callable[[dict[str, Any]], str]:
    """Returns a function that renders `source` with variables that are plain JSON values.

    A template may raise anything when it is compiled or rendered. Raises ValueError if it writes more than MAX_CHARACTERS.
    """
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": TemplateDict(),
        "namespace": TemplateNamespace,
    }
    template = environment.from_string(source)

    def render(variables: dict[str, Any]) -> str:
        pieces, left = [], MAX_CHARACTERS
        for piece in template.generate(variables):
            left -= len(piece)
            if left < 0:
                raise ValueError(f"it writes more than {MAX_CHARACTERS} characters")
            pieces.append(piece)
        return "".join(pieces)

    return render
