"""Checks the licences of installed packages, and locked versions against published advisories. Used by `make audit`.

The exit code is 1 for a licence that is not allowed and for a known vulnerability. If no advisory service answers, "NOT CHECKED" is printed
and the exit code is 0; with --require-advisories, as for a release, it is 1.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

# Permissive licences, and MPL, whose copyleft ends at its own files: SPDX identifiers, and names that older metadata uses.
ALLOWED = frozenset(
    {"0BSD", "BSD-2-Clause", "BSD-3-Clause", "MIT", "MIT-0", "MIT-CMU", "ISC", "Zlib", "HPND", "PSF-2.0", "CNRI-Python"}
    | {"Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSL-1.0", "CC0-1.0", "Unlicense", "MPL-2.0"}
)
ALLOWED_NAMES = frozenset(
    {"3-Clause BSD License", "BSD", "BSD License", "ISC License (ISCL)", "MIT License", "Python Software Foundation License"}
    | {"Apache 2.0 License", "Apache License, Version 2.0", "Apache Software License"}
    | {"Mozilla Public License 2.0 (MPL 2.0)", "Public Domain"}
    | {"DFSG approved"}  # a classifier that stands beside the licence itself
)
SERVICES = ("pypi", "osv")
_TIMEOUT_SECONDS = 600
_UNREACHABLE = re.compile(
    r"ConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|Max retries exceeded|ServiceError", re.IGNORECASE
)


def is_allowed(licence: str) -> bool:
    """Returns whether the licences of a package, joined by ";", are all permitted.

    Each is a name, an SPDX expression, or a complete text, whose first line is its name.
    """
    parts = [part.strip().partition("\n")[0] for part in licence.split(";")]
    return all(part in ALLOWED_NAMES or _is_allowed_expression(part) for part in parts)


def _is_allowed_expression(expression: str) -> bool:
    """Returns whether an SPDX expression is permitted: all licences of an AND, one of an OR. AND binds more tightly."""
    try:
        text: str = canonicalize_license_expression(expression)
    except InvalidLicenseExpression:
        return False

    def is_allowed_part(part: str) -> bool:
        return any(all(each in ALLOWED for each in terms.split(" AND ")) for terms in part.split(" OR "))

    while "(" in text:
        text = re.sub(r"\(([^()]*)\)", lambda match: "MIT" if is_allowed_part(match[1]) else "refused", text)
    return is_allowed_part(text)


@dataclass(frozen=True, kw_only=True)
class Advisories:
    """The answer of a service: number of packages it checked, names of those it did not, and one sentence per vulnerability."""

    checked: int
    not_checked: tuple[str, ...]
    vulnerabilities: tuple[str, ...]


def read_advisories(report: dict[str, Any]) -> Advisories:
    """Reads the JSON of pip-audit. A skipped package counts as not checked."""
    checked, skipped, sentences = 0, [], []
    for entry in report["dependencies"]:
        if "skip_reason" in entry:
            skipped.append(str(entry["name"]))
            continue
        checked += 1
        for each in entry["vulns"]:
            fixed = ", ".join(each["fix_versions"]) or "no release"
            sentences.append(f"{entry['name']} {entry['version']}: {each['id']}, fixed in {fixed}")
    return Advisories(checked=checked, not_checked=tuple(skipped), vulnerabilities=tuple(sentences))


def query_advisories(tool: Sequence[str], lock: Path, service: str) -> Advisories | str:
    """Runs pip-audit on a lock; returns its findings, or why the service cannot be reached. Raises RuntimeError for other failures."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "audit.json"
        options = ["--disable-pip", "--require-hashes", "--progress-spinner", "off", "-f", "json"]
        command = [*tool, *options, "-s", service, "-r", str(lock), "-o", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
        if output.is_file() and output.stat().st_size:
            return read_advisories(json.loads(output.read_text(encoding="utf-8")))
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]
    if _UNREACHABLE.search(done.stderr):
        return last
    raise RuntimeError(f"pip-audit failed ({last}); run it by hand: {' '.join(command)}")


def check_advisories(tool: Sequence[str], lock: Path, *, required: bool) -> bool:
    """Queries the services in turn until one knows all packages, and prints the result.

    Returns False for a vulnerability, and also if no service answered and `required` is set.
    """
    reasons = []
    for service in SERVICES:
        answer = query_advisories(tool, lock, service)
        if isinstance(answer, str):
            reasons.append(f"{service}: {answer}")
            continue
        for sentence in answer.vulnerabilities:
            click.echo(f"VULNERABLE {sentence}")
        if answer.vulnerabilities:
            return False
        if not answer.not_checked:
            click.echo(f"advisories: {answer.checked} packages of {lock} checked at {service}, no known vulnerability")
            return True
        reasons.append(
            f"{service}: knows {answer.checked} packages, not {len(answer.not_checked)} ({', '.join(answer.not_checked[:5])}, ...)"
        )
    click.echo("=" * 100)
    click.echo(f"NOT CHECKED: no advisory service answered for all packages, so {lock} may have known vulnerabilities:")
    for reason in reasons:
        click.echo(f"  {reason}")
    click.echo("  run `make audit` where pypi.org or api.osv.dev can be reached")
    click.echo("=" * 100)
    return not required


def check_licences(tool: Sequence[str], python: str) -> bool:
    """Prints the packages of `python` whose licence is not allowed; returns whether there are none."""
    command = [*tool, f"--python={python}", "--from=mixed", "--format=json", "--ignore-packages", "edge-mtp"]
    packages = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True).stdout)
    refused = [package for package in packages if not is_allowed(package["License"])]
    for package in refused:
        click.echo(
            f"LICENCE {package['Name']} {package['Version']}: {package['License']!r} is not on the list "
            "in scripts/setup/check_dependencies.py"
        )
    click.echo(f"licences: {len(packages)} packages checked, {len(refused)} not on the list")
    return bool(packages) and not refused


@click.command()
@click.option("--python", required=True, help="The interpreter whose packages are checked.")
@click.option("--lock", type=click.Path(path_type=Path, exists=True), multiple=True, required=True, help="A locked requirements file.")
@click.option("--tools", type=click.Path(path_type=Path), required=True, help="The folder with pip-audit and pip-licenses.")
@click.option("--require-advisories", is_flag=True, help="Fail where no advisory service answers.")
def main(python: str, lock: tuple[Path, ...], tools: Path, require_advisories: bool) -> None:
    """Check licences of installed packages and advisories about locked ones."""
    fine = check_licences([str(tools / "pip-licenses")], python)
    for path in lock:
        fine = check_advisories([str(tools / "pip-audit")], path, required=require_advisories) and fine
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
