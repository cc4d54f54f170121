"""The options of `open_session`: given as keywords, as `LoadOptions`, or both."""

from __future__ import annotations

from pathlib import Path
from typing import get_type_hints

import pytest

from edge_runtime import LoadOptions, open_session
from edge_runtime.errors import RequestError
from edge_runtime.session.load_options import LoadKeywords


def test_keywords_and_fields_are_the_same() -> None:
    assert get_type_hints(LoadKeywords) == get_type_hints(LoadOptions)


def test_keywords_override_the_options(exported_pair: Path) -> None:
    options = LoadOptions(threads=1, context=256, drafter="none", check="none")
    with open_session(exported_pair, options, context=300) as session:
        assert session.settings.context == 300
        assert session.drafter_kind == "none"


def test_options_are_checked_either_way() -> None:
    with pytest.raises(RequestError, match="drafter 'fast' is unknown"):
        open_session("nowhere", LoadOptions(drafter="fast"))  # type: ignore[arg-type]
