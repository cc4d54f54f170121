"""jinja2 for chat templates that came with a file from outside: sandboxed, with every step and every size counted.

Loops and calls count as steps, values are measured before they can double again, and only those filters and string methods exist that
chat templates use and that cannot multiply their input uncounted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from edge_runtime.text.template import filters as template_filters
from edge_runtime.text.template.filters import BUDGET, LimitError, budget, measured

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

# What a faulty template may raise when compiled or rendered. NameError: jinja2 compiles 1e999 to Python's name for it, inf.
FAILURES = (TemplateError, ArithmeticError, LookupError, MemoryError, NameError, RecursionError, TypeError, ValueError)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template. Render inside `budget()`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], cache_size=0)
        own = {name: getattr(template_filters, name) for name in ("replace", "join", "indent", "tojson")}
        filters: dict[str, Callable[..., Any]] = self.filters
        self.filters = {name: filters[name] for name in FILTERS} | own
        self.filters |= {name: template_filters.counting(filters[name]) for name in LAZY_FILTERS}
        # Filters that take the context are never folded at compile time.
        self.filters |= {
            "_counted": pass_context(template_filters.counted),
            "_measured": pass_context(template_filters.measured_filter),
            "_emitted": pass_context(template_filters.emitted),
            "_joined": pass_context(template_filters.joined),
        }
        self.globals = {
            "range": self.globals["range"],
            "namespace": TemplateNamespace,
            "dict": lambda **items: items,
            "raise_exception": template_filters.raise_exception,
            "strftime_now": template_filters.strftime_now,
        }

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Applies jinja2's rules, and allows only the string methods that cannot make a string much longer."""
        if isinstance(obj, str) and attr not in STRING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """Never allows str.format, which jinja2 would make safe but not small."""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Counts a step and measures the result."""
        BUDGET.get().step()
        bounded = template_filters.METHODS.get(getattr(__obj, "__name__", ""))
        if bounded is not None and isinstance(getattr(__obj, "__self__", None), str):
            return bounded(__obj.__self__, *args, **kwargs)
        return measured(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuses operators that multiply text or lists, and measures the rest."""
        if operator in ("*", "**", "%") and not all(isinstance(side, int | float) for side in (left, right)):
            raise LimitError(f"it uses {operator} on a value that is no number")
        if operator == "**" and abs(right) > 64:
            raise LimitError(f"it takes a power of {right}")
        return measured(super().call_binop(context, operator, left, right))


class TemplateNamespace(Namespace):
    """A namespace whose names cannot begin with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace takes no name such as {name!r}")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        """Refuses: jinja2's text of it would hold the addresses of methods."""
        raise SecurityError("a namespace has no text")


class Counting(NodeTransformer):
    """Puts a counting filter around every loop, output and constructed value of a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        """Counts the items of a loop."""
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_counted")
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        """Counts all output, including the template's own text."""
        self.generic_visit(node)
        node.nodes = [
            _filtered(nodes.Const(part.data, lineno=part.lineno) if isinstance(part, nodes.TemplateData) else part, "_emitted")
            for part in node.nodes
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        """Replaces `a ~ b` by a filter that measures the result."""
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_joined")

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        """Measures a list literal, since it may hold the same long list twice."""
        self.generic_visit(node)
        return _filtered(node, "_measured")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        """Measures a tuple literal, unless it is the target of an assignment."""
        self.generic_visit(node)
        return _filtered(node, "_measured") if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(node, "_measured")

    def visit_Filter(self, node: nodes.Filter) -> nodes.Expr:
        """Measures what a filter returns. A filter block has no value: its output is counted instead."""
        self.generic_visit(node)
        return _filtered(node, "_measured") if node.node is not None else node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def compile_template(source: str) -> Callable[[dict[str, Any]], str]:
    """Returns a function that renders `source` with variables that are plain JSON values.

    Both compiling and rendering may raise any of FAILURES.
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
