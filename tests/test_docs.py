"""The documentation: links and anchors of every page, the public names, and the site, built strictly and loading nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import resolve_name

import click
import pytest

import edge_runtime

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path
    for folder in (".", "docs", "examples", ".github", ".github/ISSUE_TEMPLATE", "exporter/edge_export/reference_pair")
    for path in (ROOT / folder).glob("*.md")
)
FENCES = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
PACKAGES = {"edge_devices": "devices", "edge_export": "exporter", "edge_runtime": "runtime"}
NAMED_FILE = re.compile(r"`((?:docs|examples|scripts|tests|devices|exporter|runtime|edge_\w+)/[\w/.-]+\.\w+)`")
NAMED_OBJECT = re.compile(r"`(edge_(?:devices|export|runtime)(?:\.\w+)+)")
COMMANDS = {"run": "edge_runtime.cli.run", "bench": "edge_bench.cli.main", "export": "edge_export.cli.command"}
COMMAND = re.compile(r"(?:`|^[ \t]*(?:\$ |\.venv/bin/)?)edge-(run|bench|export) +([^\s`]+)", re.MULTILINE)
FLAT_MODES = "--(doctor|plan|serve|compare|demo)"
# Passages about the older flat spelling, or of an earlier version.
OLDER = (
    re.compile(r"^The flat spelling works too.*?\n\n", re.MULTILINE | re.DOTALL),
    re.compile(r"^The other two are of an earlier.*?^## ", re.MULTILINE | re.DOTALL),
)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


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
    for passage in OLDER:
        text = passage.sub("", text)
    for name, word in COMMAND.findall(text):
        main = resolve_name(COMMANDS[name]).main
        modes = main.commands if isinstance(main, click.Group) else main.modes
        first = re.split(r"[|,.]", word)[0]
        option = word.startswith("-") and not re.match(FLAT_MODES, word)
        assert first in modes or option or word.startswith("edge-"), f"edge-{name} {word}"


def test_there_are_links_to_check():
    assert sum(len(LINK.findall(prose(page))) for page in PAGES) > 30


def test_every_public_name_is_in_the_reference():
    named = re.findall(r"^::: edge_runtime\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(edge_runtime.__all__)


def test_the_readme_fits_on_two_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pictures_exist_and_are_small(page):
    for link in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", prose(page)):
        assert (page.parent / link).stat().st_size < 150_000, link


def test_every_script_is_on_its_page():
    page = (ROOT / "docs" / "scripts.md").read_text()
    scripts = [path.name for path in (ROOT / "scripts").glob("*/*") if path.suffix in {".py", ".sh"} and path.name != "__init__.py"]
    assert [name for name in scripts if f"`{name}" not in page] == []


def test_every_folder_of_the_packages_is_on_the_map():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    folders = [f"{above}/{package}" for package, above in PACKAGES.items()]
    named = [path.parent.name for folder in folders for path in (ROOT / folder).glob("*/__init__.py")]
    assert len(named) > 20
    assert [name for name in named if not re.search(rf"^  {name}\b", text, re.MULTILINE)] == []


def test_every_page_is_in_the_navigation():
    yaml = pytest.importorskip("yaml")
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"[\w-]+\.md", str(yaml.safe_load(text)["nav"]))
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("material", reason="needs edge-mtp[docs]")
    pytest.importorskip("mkdocstrings", reason="needs edge-mtp[docs]")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site"), strict=True))
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 10
    for page in pages:
        loaded = re.findall(
            r"<(?:script|img|iframe|link rel=\"(?:stylesheet|icon|preconnect)\")[^>]*?(?:src|href)=\"(https?:[^\"]+)", page.read_text()
        )
        assert loaded == [], page
    reference = (tmp_path / "site" / "api" / "index.html").read_text()
    assert [name for name in edge_runtime.__all__ if f'id="edge_runtime.{name}"' not in reference] == []
