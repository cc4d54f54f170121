"""Mutation testing: changes one operator, number or statement of a module at a time, and counts the changes that its tests notice.

    python scripts/checks/mutants.py acceptance cost_model --sample 60 --seed 1
    python scripts/checks/mutants.py all --output mutants.jsonl
    python scripts/checks/mutants.py all --again mutants.jsonl --output mutants.jsonl  # after more tests

Each mutant runs the module's own tests in a forked child, which gets the mutated source from an import hook; no file changes. A mutant is
killed if a test fails, or if the tests take ten times the processor time. Linux only (fork). mutmut 3.8 works here too, but its
trampolines count every call: statistics of two modules took more than three minutes before the first mutant.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import hashlib
import importlib.abc
import importlib.util
import io
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import click

ROOT = Path(__file__).parents[2]
_RUNTIME, _DEVICES = "tests/runtime", "tests/devices"
# Without the tests that take seconds each.
_QUICK_BUNDLE = ("-k", "not every_flipped_bit and not any_json and not any_flipped_bit and not any_changed_byte")
# Each module, and the tests that are its own.
MODULES: dict[str, tuple[str, Sequence[str]]] = {
    "acceptance": (
        "edge_runtime.decoding.acceptance",
        (f"{_RUNTIME}/decoding/test_acceptance.py", f"{_RUNTIME}/decoding/test_exact_distributions.py"),
    ),
    "acceptance_rules": (
        "edge_runtime.decoding.acceptance_rules",
        (f"{_RUNTIME}/decoding/test_acceptance_rules.py", f"{_RUNTIME}/decoding/test_exact_distributions.py"),
    ),
    "distribution": (
        "edge_runtime.decoding.distribution",
        (f"{_RUNTIME}/decoding/test_sampling.py", f"{_RUNTIME}/decoding/test_acceptance.py"),
    ),
    "sampling": ("edge_runtime.decoding.sampling", (f"{_RUNTIME}/decoding/test_sampling.py",)),
    "loop": ("edge_runtime.decoding.loop", (f"{_RUNTIME}/decoding/test_rounds.py", f"{_RUNTIME}/decoding/test_loop.py")),
    "rollback": ("edge_runtime.backends.committed_tokens", (f"{_RUNTIME}/backends/test_committed_tokens.py",)),
    "windows": ("edge_devices.energy.windows", (f"{_DEVICES}/energy/test_windows.py",)),
    "intervals": ("edge_devices.energy.intervals", (f"{_DEVICES}/energy/test_intervals.py",)),
    "integrity": ("edge_runtime.bundle.integrity", (f"{_RUNTIME}/bundle/test_integrity.py",)),
    "signature": ("edge_runtime.bundle.signature", (f"{_RUNTIME}/bundle/test_signature.py",)),
    "path_checks": (
        "edge_runtime.bundle.bundle",
        (f"{_RUNTIME}/bundle/test_bundle.py", f"{_RUNTIME}/bundle/test_integrity.py", *_QUICK_BUNDLE),
    ),
    "manifest_checks": ("edge_runtime.bundle.manifest", (f"{_RUNTIME}/bundle/test_bundle.py", *_QUICK_BUNDLE)),
    "transports": ("edge_devices.transports.base", (f"{_DEVICES}/transports/test_exit_codes.py",)),
    "cost_model": (
        "edge_runtime.drafting.cost_model",
        (f"{_RUNTIME}/drafting/test_cost_figures.py",),
    ),
    "graph_memory": (
        "edge_runtime.backends.onnx.graph_memory",
        (f"{_RUNTIME}/backends/onnx/test_graph_memory.py", "-k", "not before_onnxruntime_has_it"),
    ),
}
_OWN = ("edge_runtime", "edge_devices", "edge_export")
# A mutant that takes so many times the processor time of the tests is killed; one that waits, after so many seconds.
_SLOWER, _MIN_CPU_SECONDS, _HANGING_SECONDS = 10, 10.0, 1200
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
Change = Callable[[ast.AST], None]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change: the index of its node in ast.walk's order, and which of the node's changes it is."""

    node: int
    change: int
    line: int
    what: str


def changes_of(node: ast.AST) -> Iterator[tuple[str, Change]]:
    """Yields what can be changed in a node, as a description and a function that changes it in place."""
    yield from _of_expression(node)
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield "condition negated", _negate
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield "returns None", _setter("value", None, ast.Constant(None))
    for name in ("body", "orelse", "finalbody"):
        for place, statement in enumerate(getattr(node, name, None) or () if not isinstance(node, ast.IfExp | ast.Lambda) else ()):
            if isinstance(statement, ast.Raise | ast.AugAssign) or (
                isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
            ):
                yield f"no {type(statement).__name__} in line {statement.lineno}", _setter(name, place, ast.Pass())


def _of_expression(node: ast.AST) -> Iterator[tuple[str, Change]]:
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            if other := _COMPARISONS.get(type(operator)):
                yield f"{type(operator).__name__} -> {other.__name__}", _setter("ops", place, other())
    elif isinstance(node, ast.BinOp | ast.AugAssign) and (swapped := _ARITHMETIC.get(type(node.op))):
        yield f"{type(node.op).__name__} -> {swapped.__name__}", _setter("op", None, swapped())
    elif isinstance(node, ast.BoolOp):
        yield "and <-> or", _setter("op", None, ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield f"no {type(node.op).__name__}", _setter("op", None, ast.UAdd() if isinstance(node.op, ast.USub) else _Truth())
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        other_value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield f"{node.value} -> {other_value}", _setter("value", None, other_value)
    elif isinstance(node, ast.Name) and node.id in _NAMES:
        yield f"{node.id} -> {_NAMES[node.id]}", _setter("id", None, _NAMES[node.id])


class _Truth(ast.Not):
    """Stands for a `not` that was taken away; `_Untruth` removes it."""


class _Untruth(ast.NodeTransformer):
    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return node.operand if isinstance(node.op, _Truth) else node


def _setter(name: str, place: int | None, value: object) -> Change:
    def change(node: ast.AST) -> None:
        if place is None:
            setattr(node, name, value)
        else:
            getattr(node, name)[place] = value

    return change


def _negate(node: ast.AST) -> None:
    node.test = ast.UnaryOp(ast.Not(), node.test)  # type: ignore[attr-defined]


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _code(tree: ast.Module) -> Iterator[tuple[int, ast.AST]]:
    """Yields the nodes that run, by their place in ast.walk's order: no annotations, imports, or texts of messages."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        for name in ("annotation", "returns", "decorator_list"):
            part = getattr(node, name, None)
            for root in part if isinstance(part, list) else [part] if part else []:
                skipped.update(ast.walk(root))
        if isinstance(node, ast.JoinedStr | ast.ImportFrom | ast.Import):
            skipped.update(ast.walk(node))
    yield from ((place, node) for place, node in enumerate(ast.walk(tree)) if node not in skipped)


def mutants_of(source: str) -> list[Mutant]:
    """Returns all mutants of a module."""
    kept = []
    for place, node in _code(ast.parse(source)):
        for number, (what, _) in enumerate(changes_of(node)):
            kept.append(Mutant(node=place, change=number, line=getattr(node, "lineno", 0), what=what))
    return kept


def mutated(source: str, mutant: Mutant) -> ast.Module:
    """Returns the module with one change."""
    tree = copy.deepcopy(ast.parse(source))
    node = list(ast.walk(tree))[mutant.node]
    list(changes_of(node))[mutant.change][1](node)
    return ast.fix_missing_locations(_Untruth().visit(tree))


class _Hook(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Delivers the mutated module."""

    def __init__(self, name: str, path: Path, tree: ast.Module) -> None:
        self._name, self._path, self._tree = name, path, tree

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:  # noqa: ARG002 - the interface's
        return importlib.util.spec_from_file_location(fullname, self._path, loader=self) if fullname == self._name else None  # type: ignore[arg-type]

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._tree, str(self._path), "exec"), module.__dict__)


def _is_ours(module: ModuleType) -> bool:
    """Whether a module is the project's own: code, tests, or what tests import."""
    return module.__name__.split(".")[0] in _OWN or str(getattr(module, "__file__", None) or "").startswith(f"{ROOT}{os.sep}tests{os.sep}")


def _warm_up(tests: Sequence[str]) -> None:
    """Imports what the tests import, so that no child has to: collects them."""
    import pytest

    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main([*tests, "--collect-only", "-q", "-p", "no:cacheprovider"])


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Whether all tests passed, or were ended because they took too long, and their processor time."""

    passed: bool
    too_long: bool
    cpu_seconds: float


def run_tests(tests: Sequence[str], cpu_seconds: float, hook: _Hook | None) -> Outcome:
    """Runs tests in a forked child, for at most so much processor time: on a busy machine, time on the clock says little."""
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.setpgid(0, 0)
        for number in (signal.SIGALRM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(_HANGING_SECONDS)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        for name in [name for name, module in sys.modules.items() if _is_ours(module)]:
            del sys.modules[name]
        if hook is not None:
            sys.meta_path.insert(0, hook)
        import pytest

        os._exit(int(pytest.main([*tests, "-x", "-q", "-p", "no:cacheprovider", "-p", "no:unraisableexception", "-m", "not slow"])))
    _, status, used = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return Outcome(passed=code == 0, too_long=code in (-signal.SIGALRM, -signal.SIGPROF), cpu_seconds=used.ru_utime + used.ru_stime)


def survivors_in(path: Path, module: str, digest: str) -> tuple[set[tuple[int, int]], int]:
    """Returns the survivors of a module in the last line about it of an output file, and how many mutants were killed then.

    Raises ClickException where the module's source had another `digest`: places of mutants are those of one source.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    kept = [line for line in lines if (line["module"], line.get("source_sha256")) == (module, digest)]
    if not kept:
        raise click.ClickException(f"{path} has no line about {module} as it is now; leave out --again for it")
    return {(mutant["node"], mutant["change"]) for mutant in kept[-1]["survivors"]}, kept[-1]["killed"]


def check(name: str, sample: int | None, seed: int, again: Path | None, on_survivor: Callable[[Mutant], None]) -> dict[str, object]:
    """Runs the mutants of one module, a random sample of them, or those that survived before."""
    module, tests = MODULES[name]
    path = Path(str(importlib.util.find_spec(module).origin))  # type: ignore[union-attr]
    source = path.read_text(encoding="utf-8")
    digest = hashlib.sha256(source.encode()).hexdigest()
    every = mutants_of(source)
    chosen = every if sample is None or sample >= len(every) else random.Random(seed).sample(every, sample)
    before = 0
    if again is not None:
        left, before = survivors_in(again, module, digest)
        chosen = [mutant for mutant in every if (mutant.node, mutant.change) in left]
    _warm_up(tests)
    unchanged = run_tests(tests, 600, None)
    if not unchanged.passed:
        raise click.ClickException(f"the tests of {name} fail without a mutant: {' '.join(tests)}")
    limit = max(_MIN_CPU_SECONDS, _SLOWER * unchanged.cpu_seconds)
    survivors, too_long = [], 0
    for mutant in chosen:
        outcome = run_tests(tests, limit, _Hook(module, path, mutated(source, mutant)))
        too_long += outcome.too_long
        if outcome.passed:
            survivors.append(mutant)
            on_survivor(mutant)
    tried = before + len(chosen)
    killed = tried - len(survivors)
    return {
        "module": module, "source_sha256": digest, "mutants": len(every), "tried": tried, "killed": killed,
        "score": round(killed / max(1, tried), 3), "too_long": too_long, "survivors": [asdict(mutant) for mutant in survivors],
    }  # fmt: skip


@click.command(context_settings={"show_default": True})
@click.argument("names", nargs=-1, required=True, type=click.Choice([*MODULES, "all"]))
@click.option("--sample", type=click.IntRange(min=1), help="Mutants per module, chosen at random; all if left out.")
@click.option("--seed", default=1)
@click.option("--again", type=click.Path(path_type=Path, dir_okay=False, exists=True), help="Only what survived in this output file.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Append one JSON line per module.")
def main(names: tuple[str, ...], sample: int | None, seed: int, again: Path | None, output: Path | None) -> None:
    """Mutate modules, run their tests, and list the mutants that no test noticed."""
    os.chdir(ROOT)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    sys.dont_write_bytecode = False  # else each child compiles everything
    # Plugins that happen to be installed take seconds to load, in every child.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import hypothesis.strategies  # imported once, not in each child
    import jinja2  # noqa: F401
    import numpy as np  # noqa: F401
    import pytest  # noqa: F401
    import yaml  # noqa: F401

    # The same examples for every mutant and in every run.
    hypothesis.settings.register_profile("mutants", database=None, deadline=None, derandomize=True)
    hypothesis.settings.load_profile("mutants")

    for name in MODULES if "all" in names else names:
        result = check(name, sample, seed, again, lambda mutant: click.echo(f"  survived: line {mutant.line}: {mutant.what}"))
        click.echo(f"{name}: {result['killed']} of {result['tried']} killed ({result['mutants']} in all)")
        if output is not None:
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
