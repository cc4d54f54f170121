"""Runs the server until Ctrl-C or SIGTERM. The only module that imports uvicorn."""

from __future__ import annotations

import ipaddress
import signal
import socket
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Unpack

from edge_devices.shared_watch import SharedWatch
from edge_runtime.chat_template import bundle_template
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.opening import OpenOptions, open_sessions
from edge_runtime.server.guard import LOOPBACK_NAMES, App, Guard, host_name
from edge_runtime.server.options import KEY_VARIABLE, ServeOptions
from edge_runtime.server.worker import Worker

if TYPE_CHECKING:
    import uvicorn

INSTALL = "pip install 'edge-mtp[serve]'"
# Beside requests that run or wait: connections that are idle, or fetch the page, models, health and metrics.
_MORE_CONNECTIONS = 64
# Streams end with a round, once the worker is told; this is for those that do not read.
_PATIENCE_SECONDS = 5


def serve(
    folder: Path, options: ServeOptions, note: Callable[[str], None], watch: SharedWatch | None = None, **opening: Unpack[OpenOptions]
) -> None:
    """Serves a bundle until a signal ends it; `note` gets sentences for the person who started it, `watch` sees each request's energy.

    Raises RequestError if the address cannot be taken, BackendError if the extra is not installed, and what `open_sessions` raises.
    """
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise BackendError(f"serving needs {' and '.join(missing)}, not installed here; run: {INSTALL}")
    from edge_runtime.server.app import Api, make_app

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
            _run(config, worker, listener)
        finally:
            worker.close()
            if watch:
                watch.close()
        note("ended")


def server_config(app: App, connections: int) -> uvicorn.Config:
    """Returns how uvicorn runs an application for so many connections at once."""
    import uvicorn

    return uvicorn.Config(
        app, http="h11", loop="asyncio", ws="none", lifespan="off", interface="asgi3", log_level="warning", access_log=False,
        proxy_headers=False, server_header=False, timeout_graceful_shutdown=_PATIENCE_SECONDS, limit_concurrency=connections,
    )  # fmt: skip


def allowed_hosts(host: str) -> frozenset[str] | None:
    """Returns the names a Host header may have, None for any: only on the loopback does a client know its server's names."""
    return LOOPBACK_NAMES | {host.lower()} if is_loopback(host) else None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host_name(host).lower() == "localhost"


def _run(config: uvicorn.Config, worker: Worker, listener: socket.socket) -> None:
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            worker.stop()  # or it would wait for answers to their ends
            super().handle_exit(sig, frame)

    # uvicorn raises the signal again when it is done; by then it has had its effect.
    previous = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        Server(config).run(sockets=[listener])
    finally:
        for number, action in previous.items():
            signal.signal(number, action)


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
