"""The documentation: its links, names, commands, and figures that have a record, and the site, built strictly and loading nothing from
elsewhere.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import click
import pytest

import edge_runtime

ROOT = Path(__file__).parent.parent
FOLDERS = ". docs docs/design examples scripts .github .github/ISSUE_TEMPLATE exporter/edge_export/reference_pair".split()
PAGES = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))
FENCES = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
PACKAGES = {"edge_devices": "devices", "edge_export": "exporter", "edge_runtime": "runtime"}
NAMED_FILE = re.compile(r"`((?:docs|examples|scripts|tests|devices|exporter|runtime|edge_\w+)/[\w/.-]+\.\w+)`")
NAMED_OBJECT = re.compile(r"`(edge_(?:devices|export|runtime)(?:\.\w+)+)")
COMMANDS = {"run": "edge_runtime.cli.run", "bench": "edge_bench.cli.main", "export": "edge_export.cli.command"}
COMMAND = re.compile(r"(?:`|^[ \t]*(?:\$ |\.venv/bin/)?)edge-(run|bench|export) +([^\s`]+)", re.MULTILINE)
# A command with its options, to the end of the line, of the quotation or of the command, or to the next one.
WITH_OPTIONS = re.compile(r"\bedge-(run|bench|export) +(\w+)\b((?:(?!\bedge-)[^`\n#;|])*)")
# An option where the command belongs.
WITHOUT_COMMAND = re.compile(r"\bedge-(run|bench|export) +(?:BUNDLE +)?(--[a-z][\w-]*)")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def commands(name: str) -> dict[str, click.Command]:
    """The commands of edge-`name`."""
    group: click.Group = resolve_name(COMMANDS[name]).main
    return group.commands


def prose(path: Path) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "", FENCES.sub("", path.read_text(encoding="utf-8")))


def anchors(path: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", FENCES.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    broken = []
    for link in LINK.findall(prose(page)):
        if re.match(r"(https?|mailto):", link):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_objects_named_on_a_page_exist(page):
    text = page.read_text(encoding="utf-8")
    paths = [name if name.split("/")[0] not in PACKAGES else f"{PACKAGES[name.split('/')[0]]}/{name}" for name in NAMED_FILE.findall(text)]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    for name in NAMED_OBJECT.findall(text):
        resolve_name(name)


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "examples").glob("*.py"))], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_written_with_their_sub_command(page):
    text = page.read_text(encoding="utf-8")
    for name, word in COMMAND.findall(text):
        first = re.split(r"[|,.]", word)[0]
        assert first in (*commands(name), "BUNDLE") or word.startswith(("-", "edge-")), f"edge-{name} {word}"
    check_options(text)
    if page.name != "CHANGELOG.md":  # it names what was dropped
        check_no_command_is_an_option(text)


def check_options(text: str) -> None:
    """Asserts that each option behind a command is one of that command."""
    for name, command, rest in WITH_OPTIONS.findall(text):
        if command in commands(name):
            known = {flag for each in commands(name)[command].params for flag in (*each.opts, *each.secondary_opts)} | {"--help"}
            named = set(re.findall(r"(?<!\S)--[a-z][\w-]*", rest))
            assert named <= known, f"edge-{name} {command}: {named - known}"


def check_no_command_is_an_option(text: str) -> None:
    assert {option for _, option in WITHOUT_COMMAND.findall(text)} <= {"--help", "--version"}


def test_commands_in_the_sources_exist():
    """Errors, help texts and docstrings."""
    paths = [
        path
        for folder in ("devices", "runtime", "exporter", "scripts", "examples", "tests", ".github", ".ci")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".sh", ".yml", ".html", ".js", ""} and path.is_file()
    ]
    assert len(paths) > 400
    for path in (*paths, ROOT / "Makefile", ROOT / "Dockerfile"):
        if path != Path(__file__):
            text = path.read_text(encoding="utf-8", errors="replace")
            check_options(text)
            check_no_command_is_an_option(text)


def test_there_are_links_to_check():
    assert sum(len(LINK.findall(prose(page))) for page in PAGES) > 30


def test_every_public_name_is_in_the_reference():
    named = re.findall(r"^::: edge_runtime\.(\w+)$", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(edge_runtime.__all__)


def record(name: str) -> Any:
    return json.loads((ROOT / "docs" / "records" / f"{name}.json").read_text(encoding="utf-8"))


def cells(page: str, row: str) -> list[str]:
    """The cells behind the first ones of the table's row that begins with `row`."""
    lines = [line for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines() if line.startswith(f"| {row} |")]
    assert len(lines) == 1, f"{page} has {len(lines)} rows that begin with {row}"
    return [cell.strip() for cell in lines[0].removeprefix(f"| {row} |").strip(" |").split("|")]


def interval(value: float, low: float, high: float) -> str:
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


@pytest.mark.parametrize(
    ("row", "name", "device"),
    [("GGUF, CPU", "h200-vulkan", "cpu"), ("GGUF, Vulkan", "h200-vulkan", "vulkan0"), ("GGUF, CUDA", "h200-cuda", "cuda0")],
)
def test_speeds_of_the_gpu_are_those_of_its_record(row: str, name: str, device: str) -> None:
    (figures,) = (each["figures"] for each in record(name)["devices"] if each["device"] == device)
    rows = {(each["variant"]["policy"], each["variant"]["length"]): each for each in figures["overall"]}
    speeds = [f"{rows[key]['tokens_per_second']:,.0f}" for key in (("plain", None), ("fixed", 3), ("profit", None))]
    gain = rows["profit", None]["speed_up"]
    assert cells("accelerators.md", row) == [*speeds, interval(gain["value"], gain["low"], gain["high"])]


def test_results_have_the_kept_figures_of_each_class_of_processors() -> None:
    text = " ".join((ROOT / "docs" / "results.md").read_text(encoding="utf-8").split())
    for entry in record("headline")["entries"]:
        assert interval(*entry["over_plain"]) in text, entry["processor"]
        assert f"{entry['over_llama_cpp']:.2f}" in re.findall(r"\d\.\d\d", text), entry["processor"]


def test_the_demo_that_the_readme_quotes_was_measured():
    """The range of the demo's gains is the one of the best-served class of processors in docs/records/headline.json."""
    best = max(record("headline")["entries"], key=lambda each: each["over_plain"][0])
    quoted = re.search(r"made it (\d[\d.]*) to (\d[\d.]*) times", " ".join((ROOT / "README.md").read_text(encoding="utf-8").split()))
    assert quoted
    assert f"({quoted[1]} to {quoted[2]} by kind of text)" in best["demo"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pictures_exist_and_are_small(page):
    for link in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", prose(page)):
        assert (page.parent / link).stat().st_size < 150_000, link


def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("zensical", reason="needs edge-mtp[docs]")
    pytest.importorskip("mkdocstrings", reason="needs edge-mtp[docs]")
    # The site is written beside its configuration, so it is built from a copy; zensical reads pages below it alone.
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in ("exporter", "runtime", "devices"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(tmp_path / "mkdocs.yml")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "build" / "site"
    pages = list(site.rglob("*.html"))
    assert len(pages) > 10
    for page in pages:
        loaded = re.findall(
            r"<(?:script|img|iframe|link rel=\"(?:stylesheet|icon|preconnect)\")[^>]*?(?:src|href)=\"(https?:[^\"]+)", page.read_text()
        )
        assert loaded == [], page
    reference = (site / "python" / "index.html").read_text()
    assert [name for name in edge_runtime.__all__ if f'id="edge_runtime.{name}"' not in reference] == []


def test_the_release_workflow_runs_targets_of_the_makefile() -> None:
    workflow = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    called = set(re.findall(r"\bmake ([\w-]+)$", workflow, re.MULTILINE))
    assert called == {"release"}
    assert called <= targets
