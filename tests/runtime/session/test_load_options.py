"""The options of `open_session`: given as keywords, as `LoadOptions`, or both."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

import pytest

from edge_runtime import LoadOptions, open_session
from edge_runtime.errors import RequestError
from edge_runtime.session.open import faster_backend, open_sessions


@pytest.mark.parametrize("function", [open_session, open_sessions])
def test_the_fields_are_shown_as_keywords(function) -> None:
    shown = inspect.signature(function).parameters
    own = ["folder", "count", "options"] if function is open_sessions else ["folder", "options"]
    assert [*shown] == [*own, *(field.name for field in fields(LoadOptions))]
    assert all(shown[field.name].default == getattr(LoadOptions, field.name) for field in fields(LoadOptions))


def test_keywords_override_the_options(exported_pair: Path) -> None:
    options = LoadOptions(threads=1, context=256, drafter="none", check="none")
    with open_session(exported_pair, options, context=300) as session:
        assert session.settings.context == 300
        assert session.drafter_kind == "none"


@pytest.mark.parametrize("function", [open_session, open_sessions, faster_backend])
def test_an_unknown_keyword_is_named_with_the_nearest(function) -> None:
    with pytest.raises(RequestError, match=f"{function.__name__} has no option 'contxt'; the nearest one is 'context'"):
        function("nowhere", contxt=512)


def test_options_are_checked_either_way() -> None:
    with pytest.raises(RequestError, match="drafter 'fast' is unknown; choose one of dense, split, lookup, none"):
        open_session("nowhere", LoadOptions(drafter="fast"))  # type: ignore[arg-type]
