"""jinja2 for templates that came with a file from outside: sandboxed, and with every step and every size counted.

jinja2's own sandbox keeps a template from Python's internals; it does not keep it from running for ever or filling the memory.
Here loops and calls count as steps, what is constructed is measured before it can double again, and only such filters and string
methods exist as chat templates use and as cannot multiply their input unseen.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000
MAX_SIZE = 4_000_000
MAX_SECONDS = 10.0
FILTERS = (
    "abs",
    "capitalize",
    "count",
    "d",
    "default",
    "dictsort",
    "first",
    "float",
    "int",
    "items",
    "last",
    "length",
    "list",
    "lower",
    "max",
    "min",
    "reverse",
    "safe",
    "sort",
    "string",
    "title",
    "trim",
    "unique",
    "upper",
)
LAZY_FILTERS = ("map", "reject", "rejectattr", "select", "selectattr")
STRING_METHODS = frozenset(
    (
        "capitalize",
        "count",
        "endswith",
        "find",
        "index",
        "isalnum",
        "isalpha",
        "isdigit",
        "islower",
        "isspace",
        "isupper",
        "join",
        "lower",
        "lstrip",
        "partition",
        "removeprefix",
        "removesuffix",
        "replace",
        "rfind",
        "rpartition",
        "rsplit",
        "rstrip",
        "split",
        "splitlines",
        "startswith",
        "strip",
        "title",
        "upper",
    )
)

# What compiling or rendering a template may raise, by the template's fault. NameError: jinja2 compiles 1e999 to Python's name for it, inf.
FAILURES = (TemplateError, ArithmeticError, LookupError, MemoryError, NameError, RecursionError, TypeError, ValueError)


class LimitError(TemplateError):
    """A template does more than any chat template needs."""


class Budget:
    """What one rendering may still do: steps, output characters, and seconds."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._output = MAX_SIZE
        self._deadline = time.monotonic() + MAX_SECONDS

    def step(self, count: int = 1) -> None:
        """Counts steps; raises LimitError when they, or the time, are used up."""
        self._steps -= count
        if self._steps < 0:
            raise LimitError(f"it takes more than {MAX_STEPS} steps")
        if time.monotonic() > self._deadline:
            raise LimitError(f"it takes longer than {MAX_SECONDS:.0f} s")

    def emit(self, text: str) -> str:
        """Counts output, that of macros and blocks too; raises LimitError when there is too much."""
        self.step()
        self._output -= len(text)
        if self._output < 0:
            raise LimitError(f"it writes more than {MAX_SIZE} characters")
        return text


_BUDGET: ContextVar[Budget] = ContextVar("budget")


@contextlib.contextmanager
def budget() -> Iterator[None]:
    """Gives everything inside a fresh budget; compiling needs one too, since it folds constants."""
    token = _BUDGET.set(Budget())
    try:
        yield
    finally:
        _BUDGET.reset(token)


def measured(value: Any) -> Any:
    """Returns `value`; raises LimitError if it holds more than MAX_SIZE characters and items, those of inner lists counted."""
    left, waiting = MAX_SIZE, [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, int) and one.bit_length() > 64:
            raise LimitError("it computes with integers of more than 64 bits")
        left -= len(one) if isinstance(one, str) else 1
        if left < 0:
            raise LimitError(f"it makes a value of more than {MAX_SIZE} characters")
        if isinstance(one, list | tuple):
            waiting += one
        elif isinstance(one, dict):
            waiting += (*one.keys(), *one.values())
    return value


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template. Render inside `budget()`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], cache_size=0)
        own = {"replace": replace, "join": join, "indent": indent, "tojson": tojson}
        filters: dict[str, Callable[..., Any]] = self.filters
        self.filters = {name: filters[name] for name in FILTERS} | own
        self.filters |= {name: _counting(filters[name]) for name in LAZY_FILTERS}
        self.filters |= {"_counted": counted, "_measured": measured_filter, "_emitted": emitted, "_joined": joined}
        self.globals = {
            "range": self.globals["range"],
            "namespace": TemplateNamespace,
            "dict": lambda **items: items,
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
        }

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Besides jinja2's rules: of a string's methods only those that cannot make it much longer."""
        if isinstance(obj, str) and attr not in STRING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """str.format, which jinja2 would make safe but not small, is no method that a template may use."""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Counts a step and measures what comes back."""
        _BUDGET.get().step()
        bounded = _METHODS.get(getattr(__obj, "__name__", ""))
        if bounded is not None and isinstance(getattr(__obj, "__self__", None), str):
            return bounded(__obj.__self__, *args, **kwargs)
        return measured(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuses operators that multiply text or lists, and measures the rest."""
        if operator in ("*", "**", "%") and not all(isinstance(side, int | float) for side in (left, right)):
            raise LimitError(f"it uses {operator} on something that is no number")
        if operator == "**" and abs(right) > 64:
            raise LimitError(f"it takes a power of {right}")
        return measured(super().call_binop(context, operator, left, right))


class TemplateNamespace(Namespace):
    """A namespace without names that Python itself uses."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace takes no name such as {name!r}")
        super().__setitem__(name, value)


class Counting(NodeTransformer):
    """Puts a counting filter around every loop, output and constructed value of a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        """What is looped over is counted."""
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_counted")
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        """All output is counted, the template's own text too."""
        self.generic_visit(node)
        node.nodes = [
            _filtered(nodes.Const(one.data, lineno=one.lineno) if isinstance(one, nodes.TemplateData) else one, "_emitted")
            for one in node.nodes
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        """`a ~ b` becomes a filter that measures."""
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_joined")

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        """A list that is written out is measured, since it may hold the same long list twice."""
        self.generic_visit(node)
        return _filtered(node, "_measured")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        """So is a tuple, unless it is what a value is assigned to."""
        self.generic_visit(node)
        return _filtered(node, "_measured") if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        """And a mapping."""
        self.generic_visit(node)
        return _filtered(node, "_measured")

    def visit_Filter(self, node: nodes.Filter) -> nodes.Expr:
        """And what a filter returns. A filter block has no value of its own: its output is counted."""
        self.generic_visit(node)
        return _filtered(node, "_measured") if node.node is not None else node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


# Filters that take the context are never folded at compile time.
@pass_context
def counted(_context: Context, values: Iterable[Any]) -> Iterable[Any]:
    """Counts each item as a step; what has a length keeps it, as `loop.length` and `loop.last` ask for it."""
    if isinstance(values, Sized):
        _BUDGET.get().step(len(values))
        return values
    return _counted_one_by_one(values)


def _counted_one_by_one(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _BUDGET.get().step()
        yield value


def _counting(lazy: Callable[..., Any]) -> Callable[..., Any]:
    """A lazy filter that counts what it reads, since it may yield nothing of it."""

    @functools.wraps(lazy)
    def count(context: Context, values: Iterable[Any], *arguments: Any, **named: Any) -> Any:
        return lazy(context, _counted_one_by_one(values), *arguments, **named)

    return count


@pass_context
def measured_filter(_context: Context, value: Any) -> Any:
    """`measured`, as a filter; what a lazy filter yields is counted."""
    _BUDGET.get().step()
    return _counted_one_by_one(value) if isinstance(value, Iterator) else measured(value)


@pass_context
def emitted(_context: Context, value: Any) -> str:
    """The text of an output expression, counted."""
    return _BUDGET.get().emit(str(measured(value)))


@pass_context
def joined(_context: Context, values: list[Any]) -> str:
    """`a ~ b`: the texts of all values."""
    return join(values)


def join(values: Iterable[Any], between: str = "", attribute: str | None = None) -> str:
    """jinja2's filter with the size known before the text is made."""
    if attribute is not None:
        values = [value.get(attribute, "") if isinstance(value, Mapping) else "" for value in values]
    texts = [str(value) for value in measured(list(counted(None, values)))]  # type: ignore[arg-type]
    return _join(str(between), texts)


def join_by(between: str, values: Iterable[Any]) -> str:
    """str.join, bounded."""
    return _join(between, [str(value) for value in measured(list(values))])


def _join(between: str, texts: list[str]) -> str:
    _check_size(sum(map(len, texts)) + len(between) * len(texts))
    return between.join(texts)


def replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    """jinja2's filter and str.replace with the size known before the text is made."""
    whole, old, new = str(measured(text)), str(old), str(new)
    _check_size(len(whole) + whole.count(old) * len(new))
    return whole.replace(old, new, -1 if count is None else count)


_METHODS: dict[str, Callable[..., str]] = {"replace": replace, "join": join_by}


def indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """jinja2's filter, bounded: lines after the first are indented, and the first and blank ones if asked."""
    if not isinstance(width, str):
        _check_size(width)
        width = " " * width
    lines = str(measured(text)).splitlines(keepends=True)
    _check_size(sum(map(len, lines)) + len(width) * len(lines))
    return "".join(width + line if (i or first) and (blank or line.strip()) else line for i, line in enumerate(lines))


def tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """JSON without HTML escapes, with the options that transformers gives templates."""
    if not (indent is None or (isinstance(indent, int) and 0 <= indent <= 16)):
        raise LimitError(f"it indents JSON by {indent!r}")
    measured([value, list(separators or ())])
    return str(measured(json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)))


def raise_exception(message: Any) -> None:
    """Lets a template refuse a conversation."""
    raise TemplateError(str(message)[:1000])


def strftime_now(pattern: str) -> str:
    """The local time in this pattern."""
    if len(pattern) > 100:
        raise LimitError(f"it asks for the time in a pattern of {len(pattern)} characters")
    return datetime.now().strftime(pattern)


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise LimitError(f"it makes a text of {size} characters")


def compile_template(source: str) -> Callable[[dict[str, Any]], str]:
    """Returns what renders `source` with variables that are plain JSON values.

    Raises one of FAILURES, then as well as now.
    """
    sandbox = Sandbox()
    with budget():
        tree = Counting().visit(sandbox.parse(source))
        code = sandbox.compile(tree)
    template = sandbox.template_class.from_code(sandbox, code, sandbox.make_globals(None))

    def render(variables: dict[str, Any]) -> str:
        with budget():
            return template.render(variables)

    return render
