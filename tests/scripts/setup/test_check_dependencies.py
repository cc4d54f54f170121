"""What counts as an allowed licence, as a vulnerability, and as not checked."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import check_dependencies

CLEAN = {"dependencies": [{"name": "click", "version": "8.4", "vulns": []}]}
SKIPPED = {"dependencies": [{"name": "click", "skip_reason": "Dependency not found on PyPI"}]}
VULNERABLE = {"dependencies": [{"name": "jinja2", "version": "3.1.2", "vulns": [{"id": "GHSA-x", "fix_versions": ["3.1.6"]}]}]}
UNREACHABLE = "requests.exceptions.ConnectionError: Max retries exceeded with url: /v1/query"


@pytest.mark.parametrize(
    ("licence", "allowed"),
    [
        ("MIT", True),
        ("Apache-2.0 AND BSD-2-Clause", True),
        ("Apache Software License; MIT License", True),
        ("GPL-3.0 OR MIT", True),
        ("(MIT OR GPL-2.0)", True),
        ("Mozilla Public License 2.0 (MPL 2.0)", True),
        ("(GPL-2.0 OR LGPL-2.1) AND MIT", False),
        ("GPL-3.0 AND MIT", False),
        ("MIT; GPL-3.0", False),
        ("UNKNOWN", False),
        ("", False),
        ("AGPL-3.0", False),
        ("LGPL-3.0 WITH MIT", False),
        ("Apache-2.0 WITH LLVM-exception AND MIT", True),
    ],
)
def test_licences(licence, allowed):
    assert check_dependencies.is_allowed(licence) is allowed


@pytest.fixture
def audit(tmp_path):
    """Runs the command with a pip-audit that gives one answer per service (a report, or what it says before it dies)."""

    def run(licence: str = "MIT", *options: str, **answers: dict | str):
        (tmp_path / "answers.json").write_text(json.dumps(answers))
        (tmp_path / "lock.txt").write_text("")
        script(tmp_path / "pip-licenses", f"print({json.dumps(json.dumps([{'Name': 'a', 'Version': '1', 'License': licence}]))})")
        script(
            tmp_path / "pip-audit",
            f"answer = json.load(open({str(tmp_path / 'answers.json')!r}))[sys.argv[sys.argv.index('-s') + 1]]\n"
            "if isinstance(answer, str): sys.exit(answer)\n"
            "open(sys.argv[sys.argv.index('-o') + 1], 'w').write(json.dumps(answer))",
        )
        return CliRunner().invoke(
            check_dependencies.main, ["--python", "python", "--lock", str(tmp_path / "lock.txt"), "--tools", str(tmp_path), *options]
        )

    return run


def script(path: Path, text: str) -> None:
    path.write_text(f"#!{sys.executable}\nimport json, sys\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_all_clean(audit):
    result = audit(pypi=CLEAN)
    assert result.exit_code == 0, result.output
    assert "1 packages of" in result.output
    assert "NOT CHECKED" not in result.output


def test_a_vulnerability_fails(audit):
    result = audit(pypi=VULNERABLE)
    assert result.exit_code == 1
    assert "VULNERABLE jinja2 3.1.2: GHSA-x, fixed in 3.1.6" in result.output


def test_the_second_service_is_asked_where_the_first_knows_nothing(audit):
    assert audit(pypi=SKIPPED, osv=VULNERABLE).exit_code == 1
    result = audit(pypi=UNREACHABLE, osv=CLEAN)
    assert result.exit_code == 0
    assert "NOT CHECKED" not in result.output


@pytest.mark.parametrize("first", [UNREACHABLE, SKIPPED], ids=["unreachable", "skips all"])
def test_nobody_answers(audit, first):
    result = audit(pypi=first, osv=UNREACHABLE)
    assert result.exit_code == 0
    assert "NOT CHECKED: no advisory service answered" in result.output
    assert "no known vulnerability" not in result.output
    required = audit("MIT", "--require-advisories", pypi=first, osv=UNREACHABLE)
    assert required.exit_code == 1
    assert "NOT CHECKED" in required.output
    assert audit("MIT", "--require-advisories", pypi=first, osv=CLEAN).exit_code == 0


def test_another_failure_is_not_taken_for_silence(audit):
    result = audit(pypi="Traceback: something else")
    assert isinstance(result.exception, RuntimeError)


def test_a_licence_fails(audit):
    result = audit("GPL-3.0", pypi=CLEAN)
    assert result.exit_code == 1
    assert "LICENCE a 1: 'GPL-3.0' is not on the list" in result.output
