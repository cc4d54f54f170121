"""The command line of the server, and what it says before it serves."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from click.testing import CliRunner

from edge_devices.energy.live import SharedWatch
from edge_runtime.cli import options as cli_options
from edge_runtime.cli import run as cli
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.server import serve as serving
from edge_runtime.server.options import ServeOptions
from edge_runtime.server.serve import allowed_hosts, is_loopback
from edge_runtime.session.load_options import LoadOptions


def options(**values: Any) -> ServeOptions:
    return ServeOptions(**{"host": "127.0.0.1", "port": 0, "sessions": 1, "waiting": 1, "api_key": (), **values})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["a prompt"], "unexpected extra argument"),
        (["--temperature", "1"], "No such option"),
        (["--sessions", "0"], "is not a whole number of 1 or more, at most 32"),
        (["--api-key", " "], "--api-key is empty"),
        (["--api-key", "a", "--api-key", "b c"], "or has blanks"),
        (["--allow-origin", "example"], "is no origin"),
    ],
)
def test_options_that_do_not_fit(arguments, says):
    result = CliRunner().invoke(cli.main, ["serve", "bundle", *arguments])
    assert result.exit_code == 2
    assert says in result.stderr


def test_what_the_command_passes_on(monkeypatch):
    calls = []
    monkeypatch.setattr(serving, "serve", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(cli_options, "find_meters", lambda _: [])
    arguments = ["serve", "bundle", "--sessions", "3", "--context", "256", "--draft-length", "2"]
    result = CliRunner().invoke(cli.main, arguments, env={"EDGE_MTP_API_KEY": "first second"})
    assert result.exit_code == 0, result.output
    _, asked, load, _, watch = calls[0]
    assert isinstance(watch, SharedWatch), "without a meter it gives the reason"
    assert asked == options(port=8080, sessions=3, waiting=16, api_key=("first", "second"))
    assert load.context == 256
    assert load.config.tuning.draft_length == 2


def test_loopback_and_other_addresses():
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "192.168.1.2", "localhost.example")] == [False] * 4
    assert "127.9.9.9" in (allowed_hosts("127.9.9.9") or ())


def test_a_port_that_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        with pytest.raises(RequestError, match=rf"cannot listen on 127.0.0.1 port {port} \([^()]+\); choose another"):
            serving.serve(tmp_path, options(port=port), LoadOptions(), lambda _: None)


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"needs starlette and uvicorn.*edge-mtp\[serve\]"):
        serving.serve(tmp_path, options(), LoadOptions(), lambda _: None)


@pytest.mark.parametrize(("host", "key", "warns"), [("0.0.0.0", (), True), ("0.0.0.0", ("k",), False), ("127.0.0.1", (), False)])
def test_an_open_address_without_a_key_is_warned_about(host, key, warns):
    notes: list[str] = []
    with socket.create_server((host, 0)) as listener:
        serving._print_address(listener, options(host=host, api_key=key), notes.append)
    assert any("without a key" in note and "--api-key" in note and "--host 127.0.0.1" in note for note in notes) == warns
    assert notes[-1].startswith(f"serving at http://{host}:")
