"""Checks the licences of what is installed, and locked versions against published advisories. Used by `make audit`.

Licences outside the list, and known vulnerabilities, end it with exit code 1. Where no advisory service answers it says NOT CHECKED, loudly, with
exit code 0: nothing is known to be wrong, and nothing is known to be right. With --require-advisories, as for a release, that is exit code 1 too.
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

# Permissive ones, and MPL, whose copyleft ends at its own files. Spellings are those of the packages' metadata.
ALLOWED = frozenset(
    {
        "0BSD",
        "3-Clause BSD License",
        "Apache 2.0 License",
        "Apache Software License",
        "Apache-2.0",
        "Apache-2.0 WITH LLVM-exception",
        "BSD",
        "BSD License",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "CNRI-Python",
        "HPND",
        "ISC",
        "ISC License (ISCL)",
        "MIT",
        "MIT License",
        "MIT-0",
        "MIT-CMU",
        "MPL-2.0",
        "Mozilla Public License 2.0 (MPL 2.0)",
        "PSF-2.0",
        "Python Software Foundation License",
        "Unlicense",
        "Zlib",
    }
)
SERVICES = ("pypi", "osv")
_TIMEOUT_SECONDS = 600
_UNREACHABLE = re.compile(
    r"ConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|Max retries exceeded|ServiceError", re.IGNORECASE
)


def is_allowed(licence: str, allowed: frozenset[str] = ALLOWED) -> bool:
    """Whether an expression is permitted: all parts of AND (and of lists with ;), one of OR."""
    parts = re.split(r"\s+AND\s+|\s*;\s*", licence.strip())
    # A bracket may belong to a name, "ISC License (ISCL)", or hold an expression together.
    return all(any({one, one.strip("()")} & allowed for one in re.split(r"\s+OR\s+", part)) for part in parts)


@dataclass(frozen=True, kw_only=True)
class Advisories:
    """What a service said: how many packages it knew, which it did not, and each vulnerability as a sentence."""

    checked: int
    not_checked: tuple[str, ...]
    vulnerabilities: tuple[str, ...]


def read_advisories(report: dict[str, Any]) -> Advisories:
    """Reads pip-audit's JSON. A package that was skipped was not checked, whatever the summary says."""
    checked, skipped, found = 0, [], []
    for entry in report["dependencies"]:
        if "skip_reason" in entry:
            skipped.append(str(entry["name"]))
            continue
        checked += 1
        for one in entry["vulns"]:
            fixed = ", ".join(one["fix_versions"]) or "no release"
            found.append(f"{entry['name']} {entry['version']}: {one['id']}, fixed in {fixed}")
    return Advisories(checked=checked, not_checked=tuple(skipped), vulnerabilities=tuple(found))


def ask_advisories(tool: Sequence[str], lock: Path, service: str) -> Advisories | str:
    """Runs pip-audit on a lock; returns what it found, or why the service could not be asked. Raises RuntimeError for other failures."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "audit.json"
        command = [
            *tool,
            "-s",
            service,
            "--disable-pip",
            "--require-hashes",
            "-r",
            str(lock),
            "-f",
            "json",
            "-o",
            str(output),
            "--progress-spinner",
            "off",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
        if output.is_file() and output.stat().st_size:
            return read_advisories(json.loads(output.read_text(encoding="utf-8")))
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]
    if _UNREACHABLE.search(done.stderr):
        return last
    raise RuntimeError(f"pip-audit failed ({last}); run it by hand: {' '.join(command)}")


def check_advisories(tool: Sequence[str], lock: Path, *, required: bool) -> bool:
    """Asks one service after the other until one knows all packages. Prints what came of it; returns False if something is vulnerable, or,
    if the answer is `required`, there was none."""
    reasons = []
    for service in SERVICES:
        answer = ask_advisories(tool, lock, service)
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
    click.echo(
        f"NOT CHECKED: no advisory service answered for all packages. Whether {lock} has known vulnerabilities was not found out here:"
    )
    for reason in reasons:
        click.echo(f"  {reason}")
    click.echo("  run `make audit` where pypi.org or api.osv.dev can be reached")
    click.echo("=" * 100)
    return not required


def check_licences(tool: Sequence[str], python: str) -> bool:
    """Prints what is installed for `python` under a licence that is not on the list; returns whether there was nothing."""
    command = [*tool, f"--python={python}", "--from=mixed", "--format=json", "--ignore-packages", "edge-mtp"]
    packages = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True).stdout)
    refused = [package for package in packages if not is_allowed(package["License"])]
    for package in refused:
        click.echo(
            f"LICENCE {package['Name']} {package['Version']}: {package['License']!r} is not on the list in scripts/setup/check_dependencies.py"
        )
    click.echo(f"licences: {len(packages)} packages looked at, {len(refused)} not on the list")
    return bool(packages) and not refused


@click.command()
@click.option("--python", required=True, help="The interpreter whose packages are looked at.")
@click.option("--lock", type=click.Path(path_type=Path, exists=True), multiple=True, required=True, help="A locked requirements file.")
@click.option("--tools", type=click.Path(path_type=Path), required=True, help="The folder with pip-audit and pip-licenses.")
@click.option("--require-advisories", is_flag=True, help="Fail where no advisory service answers.")
def main(python: str, lock: tuple[Path, ...], tools: Path, require_advisories: bool) -> None:
    """Check licences and advisories."""
    fine = check_licences([str(tools / "pip-licenses")], python)
    for path in lock:
        fine = check_advisories([str(tools / "pip-audit")], path, required=require_advisories) and fine
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
