"""The chat page at /: one file, no other resources, under a policy that lets it talk to this server only."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources

_SCRIPT = re.compile("<script>(.*?)</script>", re.DOTALL)
_STYLE = re.compile("<style>(.*?)</style>", re.DOTALL)


@cache
def page() -> tuple[str, dict[str, str]]:
    """Returns the page and its headers; only the script and the style that are in the file may run (their hashes are in the policy)."""
    text = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {_hashes(_SCRIPT, text)}; style-src {_hashes(_STYLE, text)}; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return text, headers


def _hashes(pattern: re.Pattern[str], text: str) -> str:
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(found.encode()).digest()).decode()}'" for found in pattern.findall(text))
