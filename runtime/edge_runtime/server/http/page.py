"""The chat page at /: one file, assembled from page.html, page.css and three scripts. It loads nothing else.

Its content security policy allows requests to this server only.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources

_SCRIPT = re.compile("<script>(.*?)</script>", re.DOTALL)
_PART = re.compile(r"\{\{([a-z.]+)\}\}")
_STYLE = re.compile("<style>(.*?)</style>", re.DOTALL)


@cache
def page() -> tuple[str, dict[str, str]]:
    """Returns the page and its headers. The policy allows only the file's own script and style, by their hashes."""
    text = _PART.sub(lambda part: _read(part[1]), _read("page.html"))
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


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hashes(pattern: re.Pattern[str], text: str) -> str:
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()}'" for block in pattern.findall(text))
