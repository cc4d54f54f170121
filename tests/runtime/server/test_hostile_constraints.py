"""A constraint that costs seconds is compiled beside the worker, so that others are served meanwhile; a large schema is not compiled."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

for needed in ("uvicorn", "starlette", "llguidance"):
    pytest.importorskip(needed, reason="needs edge-mtp[serve,grammar]")

from chat_server import CHAT, HI, Scripted, scripted_server, send
from edge_runtime.session.session import Session
from edge_runtime.text.constraints import MAX_SCHEMA_BYTES

WAIT_S = 60.0


def ask(server: Scripted, schema: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    fields: dict[str, Any] = {"messages": HI, "max_tokens": 8, "temperature": 0}
    if schema is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    status, _, body = send(server, "POST", CHAT, fields)
    return status, body


def test_others_are_served_while_a_constraint_is_compiled(monkeypatch):
    """The compilation ends only when the others were served."""
    served = threading.Event()
    compile_constraint = Session.compile_constraint

    def slow(self: Session, constraint: Any) -> Any:
        assert constraint is None or served.wait(WAIT_S)
        return compile_constraint(self, constraint)

    monkeypatch.setattr(Session, "compile_constraint", slow)
    answers: list[tuple[int, dict[str, Any]]] = []
    with scripted_server("hello there") as server:
        hostile = threading.Thread(target=lambda: answers.append(ask(server, {"type": "string", "maxLength": 10**9})))
        hostile.start()
        assert [ask(server)[0] for _ in range(3)] == [200, 200, 200]
        served.set()
        hostile.join()
    assert answers[0][0] == 200


def test_a_schema_may_be_a_megabyte_and_no_more() -> None:
    schema: dict[str, Any] = {"const": 1, "description": ""}
    rest = MAX_SCHEMA_BYTES - len(json.dumps(schema))
    with scripted_server("hello there") as server:
        assert ask(server, schema | {"description": "a" * rest})[0] == 200
        status, body = ask(server, schema | {"description": "a" * (rest + 1)})
    message = f"the JSON schema has {MAX_SCHEMA_BYTES + 1} bytes; at most {MAX_SCHEMA_BYTES} are allowed"
    assert (status, body["error"]["message"]) == (400, message)
