"""The common parts of all commands: options from declared fields, help in panels, and how errors end a command."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource

from edge_devices.errors import INTERRUPTED, OUT_OF_MEMORY, EdgeError, tell_interrupted
from edge_devices.option_fields import OPTION, spelling

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
# Generic types whose arguments are not alternatives, unlike those of a union.
_WHOLE = (tuple, Sequence, Literal)
CONTEXT = {"show_default": True, "help_option_names": ["-h", "--help"], "max_content_width": 100}
_OTHER = "Other options"
# The attribute of a click parameter with the panel of the help that lists it.
_PANEL = "edge_panel"
# The key in a context's meta that makes the help list all options, not only the usual ones.
_WHOLE_HELP = "edge_whole_help"


def option_group(*options: Callable[[Any], Any], panel: str = "") -> Callable[[Decorated], Decorated]:
    """Returns a decorator that adds click options to a command, in this order. The help lists them under `panel`."""

    def add(command: Decorated) -> Decorated:
        declared: list[click.Parameter] = command.__dict__.setdefault("__click_params__", [])
        before = len(declared)
        for option in reversed(options):
            command = option(command)
        for parameter in declared[before:]:
            if panel and not hasattr(parameter, _PANEL):
                setattr(parameter, _PANEL, panel)
        return command

    return add


class PanelCommand(click.Command):
    """A command whose help lists its options in panels. Its errors explain `--` if a text begins with a dash.

    `usual` are names of parameters. If they are given, --help lists only these, in their order, and --help-all lists all. Otherwise both
    list all.
    """

    def __init__(self, *arguments: Any, usual: Sequence[str] = (), **named: Any) -> None:
        super().__init__(*arguments, **{"context_settings": dict(CONTEXT), **named})
        self.usual = tuple(usual)
        self.params.append(_help_all(hidden=not usual))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the usual options, or all options with a section for each panel in order of first occurrence, and other options last."""
        options = {str(each.name): each for each in self.get_params(ctx) if isinstance(each, click.Option)}
        panels: dict[str, list[click.Option]] = {}
        if self.usual and not ctx.meta.get(_WHOLE_HELP):
            panels[f"Options (the usual ones of {len(options)})"] = [options[name] for name in (*self.usual, "help_all")]
        else:
            for option in options.values():
                panels.setdefault(getattr(option, _PANEL, _OTHER), []).append(option)
            others = panels.pop(_OTHER, [])
            panels[_OTHER if panels else "Options"] = others
        for title, listed in panels.items():
            if rows := [row for option in listed if (row := option.get_help_record(ctx)) is not None]:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses arguments. If an unknown option looks like a text, the error advises `--`; if a text has several words, quotes."""
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            text = next((word for word in words if word.startswith(error.option_name)), error.option_name)
            if " " in text or not text.strip("-")[:1].isalpha():
                raise click.UsageError(f"{text!r} begins with a dash; write -- before a text that is no option: -- {text!r}", ctx) from None
            raise
        except click.UsageError as error:
            texts = [str(parameter.name) for parameter in ctx.command.params if isinstance(parameter, click.Argument)]
            if "unexpected extra argument" in error.message and texts[-1:] == ["prompt"]:
                raise click.UsageError(f"{error.message}; a PROMPT of several words needs quotes: '... {words[-1]}'", ctx) from None
            raise


def _help_all(*, hidden: bool) -> click.Option:
    """Returns the option --help-all. Every command has it, but the help mentions it only if it shows more than --help."""
    return click.Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        hidden=hidden,
        callback=_show_whole_help,
        help="Show all options and exit.",
    )


def _show_whole_help(ctx: click.Context, _option: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[_WHOLE_HELP] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


class LazyCommands(UserDict[str, Any]):
    """Commands by name, each of which is imported when it is first used, so that listing them needs none of their modules."""

    def __init__(self, homes: Mapping[str, tuple[str, str]]) -> None:
        """`homes` holds the module of each command, in which it has the same name, and the first sentence of its help."""
        super().__init__(dict.fromkeys(homes))
        self.sentences = {name: sentence for name, (_, sentence) in homes.items()}
        self._modules = {name: module for name, (module, _) in homes.items()}

    def __getitem__(self, name: str) -> click.Command:
        if self.data[name] is None:
            self.data[name] = getattr(import_module(self._modules[name]), name)
        command: click.Command = self.data[name]
        return command


class PanelGroup(click.Group):
    """A group of PanelCommands, listed in the order in which they were added.

    An error of a command is reported as one sentence, which is `out_of_memory` if there is not enough memory. `elsewhere` maps commands of
    other programs to what does the same here.
    """

    command_class = PanelCommand

    def __init__(
        self, *arguments: Any, out_of_memory: str = OUT_OF_MEMORY, elsewhere: Mapping[str, str] | None = None, **named: Any
    ) -> None:
        super().__init__(*arguments, **{"context_settings": dict(CONTEXT), **named})
        self.params.append(_help_all(hidden=True))
        self._out_of_memory, self._elsewhere = out_of_memory, elsewhere or {}

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Returns the command. For an unknown one, raises a usage error that names its equivalent here, the nearest, or all commands."""
        word = args[0]
        if word in self.commands or ctx.resilient_parsing or word.startswith("-"):
            return super().resolve_command(ctx, args)
        near = difflib.get_close_matches(word[:20], list(self.commands), n=1, cutoff=0.5)
        advice = f"the nearest is {near[0]}" if near else f"there are {', '.join(self.commands)}"
        raise click.UsageError(f"no such command {word!r}: {self._elsewhere.get(word, advice)}", ctx)

    def list_commands(self, _ctx: click.Context) -> list[str]:
        """Returns the names of the commands."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands with their complete first sentences."""
        lazy = self.commands
        own = lazy.sentences if isinstance(lazy, LazyCommands) else {n: each.get_short_help_str(limit=100) for n, each in lazy.items()}
        with formatter.section("Commands"):
            formatter.write_dl(list(own.items()))
        with formatter.section("Help"):
            formatter.write_dl([(f"{ctx.command_path} COMMAND --help", "the options of a command")])

    def invoke(self, ctx: click.Context) -> Any:
        with one_sentence_errors(out_of_memory=self._out_of_memory):
            return super().invoke(ctx)


def takes(name: str, of: object, *, only: Sequence[str] | None = None, panel: str = "") -> Callable[[Decorated], Decorated]:
    """Returns a decorator that adds the declared options of a dataclass to a command.

    The command's function gets an object of the dataclass as argument `name`. `of` is the dataclass, or an instance with other defaults. If
    `only` is given, only these fields become options, and the others keep their defaults. `panel` is for fields that declare none.
    """
    declared = declared_options(of, only=only, panel=panel)

    def add(command: Decorated) -> Decorated:
        @functools.wraps(command)
        def build(*arguments: Any, **values: Any) -> Any:
            options = {str(each.name): values.pop(str(each.name)) for each in declared}
            try:
                values[name] = of(**options) if isinstance(of, type) else dataclasses.replace(of, **options)  # type: ignore[type-var]
            except EdgeError as error:
                raise click.UsageError(str(error)) from error
            return command(*arguments, **values)

        vars(build).setdefault("__click_params__", []).extend(reversed(declared))
        return build  # type: ignore[return-value]

    return add


def declared_options(of: object, *, only: Sequence[str] | None, panel: str = "") -> list[click.Option]:
    """Returns the options that a dataclass declares, as `takes` adds them. Raises KeyError for a field that is not an option."""
    kind: Any = of if isinstance(of, type) else type(of)
    hints, declared = get_type_hints(kind), {each.name: each for each in dataclasses.fields(kind) if OPTION in each.metadata}
    chosen = [declared[name] for name in (declared if only is None else only)]
    return [_option(field, hints[field.name], field.default if of is kind else getattr(of, field.name), panel) for field in chosen]


def _option(field: dataclasses.Field[Any], hint: Any, default: Any, panel: str) -> click.Option:
    attributes = dict(field.metadata[OPTION].attributes)
    panel = attributes.pop("panel", "") or panel or _OTHER
    bounds = (attributes.pop("low", None), attributes.pop("high", None))
    choices = attributes.pop("choices", ())
    alternatives = [hint] if get_origin(hint) in _WHOLE else [kind for kind in get_args(hint) if kind is not type(None)]
    kind = alternatives[0] if alternatives else hint
    if kind is bool:
        attributes["is_flag"] = True
    elif get_origin(kind) in (tuple, Sequence):
        attributes = {"multiple": True, "type": _click_type(get_args(kind)[0], bounds, choices), **attributes}
    else:
        attributes = {"type": _click_type(kind, bounds, choices), **attributes}
    attributes |= {"required": True} if default is dataclasses.MISSING else {"default": default}
    option = click.Option([*spelling(field), field.name], **attributes)
    setattr(option, _PANEL, panel)
    return option


def _click_type(kind: Any, bounds: tuple[Any, Any], choices: Sequence[Any]) -> Any:
    """Returns the click type of an option's values, from the field's type and its declaration."""
    if choices or get_origin(kind) is Literal:
        return _NumberChoice(list(map(str, choices))) if kind is int else click.Choice(choices or get_args(kind))
    if bounds != (None, None):
        return _WholeNumber(*bounds) if kind is int else click.FloatRange(*bounds)
    return click.Path(path_type=Path) if kind is Path else kind


class _WholeNumber(click.IntRange):
    """A range of whole numbers, which are called so in errors and help."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            low, high = "" if self.min is None else f" of {self.min} or more", "" if self.max is None else f", at most {self.max}"
            raise click.BadParameter(f"{value!r} is not a whole number{low}{high}.", ctx, param) from error


class _NumberChoice(click.Choice[str]):
    """A choice of whole numbers."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return int(super().convert(str(value), param, ctx))


def given_options(context: click.Context) -> set[str]:
    """Returns the names of the parameters that were given on the command line."""
    return {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}


@contextlib.contextmanager
def one_sentence_errors(*, out_of_memory: str = OUT_OF_MEMORY, stopped: str = "stopped") -> Iterator[None]:
    """Ends the command after an EdgeError or MemoryError with a sentence and exit code 1, after Ctrl-C with `stopped` and code 130.

    This is a context manager and a decorator. As a decorator, put it below a command's options.
    """
    try:
        yield
    except EdgeError as error:
        raise click.ClickException(str(error)) from error
    except MemoryError as error:
        raise click.ClickException(out_of_memory) from error
    except KeyboardInterrupt:
        tell_interrupted(stopped)
        raise SystemExit(INTERRUPTED) from None
