"""Serves a bundle until Ctrl-C or SIGTERM."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Unpack

from edge_devices.energy.live import SharedWatch
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.server.engine.worker import Worker
from edge_runtime.server.http.guard import LOOPBACK_NAMES, Guard, host_name
from edge_runtime.server.options import KEY_VARIABLE, ServeOptions
from edge_runtime.session.open import OpenOptions, open_sessions
from edge_runtime.text.chat_template import bundle_template

INSTALL = "pip install 'edge-mtp[serve]'"
# Beside requests that run or wait: connections that are idle, or fetch the page, models, health and metrics.
_MORE_CONNECTIONS = 64


def serve(
    folder: Path, options: ServeOptions, note: Callable[[str], None], watch: SharedWatch | None = None, **opening: Unpack[OpenOptions]
) -> None:
    """Serves a bundle until a signal ends it; `note` gets sentences for the person who started it, `watch` sees each request's energy.

    Raises RequestError if the address cannot be taken, BackendError if the extra is not installed, and what `open_sessions` raises.
    """
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise BackendError(f"serving needs {' and '.join(missing)}, not installed here; run: {INSTALL}")
    from edge_runtime.server.app import Api, make_app
    from edge_runtime.server.http.connections import run_server, server_config

    with _listening(options) as listener, open_sessions(folder, options.sessions, **opening) as sessions:
        first = sessions.sessions[0]
        for session in sessions.sessions:
            session.profit()  # what it measures the first time, no client should wait for
        worker = Worker(sessions, bundle_template(first.bundle, first.vocabulary), waiting=options.waiting, note=note, watch=watch)
        api = Api(worker, first.monitor, model=folder.resolve().name, made=first.bundle.manifest.created_at)
        guard = Guard(make_app(api), hosts=allowed_hosts(options.host), key=options.api_key)
        config = server_config(guard, options.sessions + options.waiting + _MORE_CONNECTIONS)
        worker.start()
        try:
            _say_where(listener, options, note)
            run_server(config, worker.stop, listener)
        finally:
            worker.close()
            if watch:
                watch.close()
        note("ended")


def allowed_hosts(host: str) -> frozenset[str] | None:
    """Returns the names a Host header may have, None for any: only on the loopback does a client know its server's names."""
    return LOOPBACK_NAMES | {host.lower()} if is_loopback(host) else None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host_name(host).lower() == "localhost"


def _listening(options: ServeOptions) -> socket.socket:
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listener = socket.create_server((options.host, options.port), family=family)
    except OSError as error:
        reason = error.strerror or error
        raise RequestError(f"cannot listen on {options.host} port {options.port} ({reason}); choose another --host or --port") from error
    listener.setblocking(False)
    return listener


def _say_where(listener: socket.socket, options: ServeOptions, note: Callable[[str], None]) -> None:
    host, port = listener.getsockname()[:2]
    if not is_loopback(options.host) and options.api_key is None:
        note(f"warning: anyone who reaches {host} port {port} can use this model; give --api-key or {KEY_VARIABLE}, or serve on 127.0.0.1")
    note(f"serving at http://{f'[{host}]' if ':' in host else host}:{port} (API: /v1, chat page: /); Ctrl-C ends it")
