"""Serves a bundle until Ctrl-C or SIGTERM."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import ipaddress
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from edge_devices.energy.live import SharedWatch
from edge_devices.machine.device_package import how_to_get
from edge_runtime.bundle.bundle import Bundle
from edge_runtime.bundle.gguf_gemma4 import TARGET, check_gguf
from edge_runtime.decoding.sampling import MODEL_SAMPLING, default_sampling, sampling_sentence
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.server.engine.idle import WorkerOnDemand
from edge_runtime.server.engine.worker import Worker
from edge_runtime.server.heat import HeatWatch
from edge_runtime.server.http.guard import LOOPBACK_NAMES, AccessLog, Guard, host_name
from edge_runtime.server.model_card import ModelCard
from edge_runtime.server.options import KEY_VARIABLE, ServeOptions
from edge_runtime.session.load_options import LoadOptions
from edge_runtime.session.monitor import Monitor
from edge_runtime.session.open import open_sessions
from edge_runtime.session.row_equality import RowEquality
from edge_runtime.session.session import Session
from edge_runtime.text.chat_template import ROLE, bundle_template, is_instruction_tuned

# Connections beyond running and waiting requests: idle ones, and those for the page, models, health and metrics.
_EXTRA_CONNECTIONS = 64
# While one thread parses a request, a thread that returns from a forward waits this long for the interpreter lock, several times per
# round. With Python's default of 5 ms, this adds up to tenths of a second.
_SWITCH_SECONDS = 0.0005


def serve(
    folder: Path, options: ServeOptions, load: LoadOptions, announce: Callable[[str], None], watch: SharedWatch | None = None
) -> None:
    """Serves a bundle until a signal ends it. `announce` gets messages for the operator; `watch` measures each request's energy.

    Raises RequestError if the address is not available, BackendError if the extra is not installed, and the errors of `open_sessions`.
    """
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise BackendError(f"the server needs {' and '.join(missing)}; {how_to_get('serve')}")
    from edge_runtime.server.app import Api, make_app
    from edge_runtime.server.http.connections import run_server, server_config

    sys.setswitchinterval(_SWITCH_SECONDS)
    loading = _Loading(folder, options, load, announce, watch)
    with (
        contextlib.closing(watch) if watch else contextlib.nullcontext(),
        _open_socket(options) as listener,
        contextlib.closing(
            WorkerOnDemand(loading.load, sessions=options.sessions, idle_seconds=options.idle_unload, notify=announce, watch=watch)
        ) as workers,
        contextlib.closing(HeatWatch(announce, lambda: workers.load()[0] > 0)) as heat,
    ):
        card = loading.card
        api = Api(workers, loading.monitor, card, announce, heat)
        hosts = allowed_hosts(options.host, options.allow_host)
        guard = Guard(make_app(api), hosts=hosts, keys=options.api_key, origins=options.allow_origin)
        config = server_config(AccessLog(guard, announce), options.sessions + options.waiting + _EXTRA_CONNECTIONS)
        if card.manifest.generation is not None:
            sampling = default_sampling(card.manifest.generation, MODEL_SAMPLING)
            announce(f"requests that name no sampling get the model's generation_config: {sampling_sentence(sampling)}")
        _print_address(listener, options, announce)
        gc.freeze()  # else a large body makes the garbage collector scan everything that was loaded, 30 ms with the lock held
        run_server(config, workers.stop, listener)
    announce("stopped")


class _Loading:
    """Opens the sessions of a bundle, each time in the same way. `card` and `monitor` are kept from the first time."""

    card: ModelCard
    monitor: Monitor

    def __init__(
        self, folder: Path, options: ServeOptions, load: LoadOptions, announce: Callable[[str], None], watch: SharedWatch | None
    ) -> None:
        self._folder, self._options, self._load, self._announce, self._watch = folder, options, load, announce, watch
        self._first = True

    @contextlib.contextmanager
    def load(self) -> Iterator[Worker]:
        """Yields a worker that runs on new sessions. Raises the errors of `open_sessions`."""
        options, announce = self._options, self._announce
        with open_sessions(self._folder, options.sessions, self._load) as sessions:
            first = sessions.sessions[0]
            rows = sessions.row_equality(announce, self._load.waiting)
            alone = options.deterministic and options.sessions > 1 and not rows.exact
            if not rows.exact and self._first:
                announce(rows.sentence() + ("; deterministic: one request runs at a time" if alone else ""))
            if self._first:
                self.card, self.monitor = _model_card(self._folder, first, options, rows), first.monitor
                self._first = False
            for session in sessions.sessions:  # the counts continue
                session.monitor = self.monitor
            worker = Worker(
                sessions,
                bundle_template(first.bundle, first.vocabulary),
                waiting=options.waiting,
                notify=announce,
                watch=self._watch,
                deterministic=options.deterministic,
                alone=alone,
                exact=rows.exact,
                clients=client_names(options.api_key),
                max_tokens=options.max_tokens,
            )
            worker.start()
            try:
                yield worker
            finally:
                worker.close()


def client_names(keys: Sequence[str]) -> list[str]:
    """Returns the names under which the prompt cache keeps the clients' prompts: one for each key, unlike those of other programs."""
    return [f"serve {hashlib.sha256(key.encode()).hexdigest()}" for key in keys] or ["serve"]


def allowed_hosts(host: str, further: Sequence[str] = ()) -> frozenset[str] | None:
    """Returns the allowed names of the Host header; None allows any.

    The names of addresses other than loopback are unknown here, so any name is allowed for them unless `further` names are given.
    """
    if not further and not is_loopback(host):
        return None
    return LOOPBACK_NAMES | {host.lower(), *(name.lower() for name in further)}


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host_name(host).lower() == "localhost"


def _model_card(folder: Path, session: Session, options: ServeOptions, rows: RowEquality) -> ModelCard:
    bundle = session.bundle
    formats = [file for file in bundle.manifest.files if file.role == "target"]
    return ModelCard(
        name=folder.resolve().name,
        context=session.target.context,
        trained_context=_trained_context(bundle),
        sessions=options.sessions,
        drafter=session.drafter_kind,
        kernels=session.row_kernels,
        files_format=formats[0].format if formats else "",
        template=bundle.path(ROLE).read_text(encoding="utf-8") if bundle.has(ROLE) else "",
        manifest=bundle.manifest,
        answers=is_instruction_tuned(bundle, session.vocabulary),
        rows=rows,
        fingerprint=f"fp_{hashlib.sha256(f'{session.fingerprint} {options.sessions} {options.deterministic}'.encode()).hexdigest()[:16]}",
    )


def _trained_context(bundle: Bundle) -> int | None:
    """Returns the target's max_position_embeddings, from gemma4.context_length in its GGUF file; None in a bundle without such a file."""
    if not bundle.has("target", "gguf"):
        return None
    try:
        header = check_gguf(bundle.path("target", "gguf"))
    except BackendError:  # a session on the ONNX graphs does not need the file
        return None
    trained = header.keys.get(f"{TARGET}.context_length")
    return trained if isinstance(trained, int) else None


def _open_socket(options: ServeOptions) -> socket.socket:
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listener = socket.create_server((options.host, options.port), family=family)
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while ")[0]  # socket.create_server adds the address again
        raise RequestError(f"cannot listen on {options.host} port {options.port} ({reason}); choose another --host or --port") from error
    listener.setblocking(False)
    return listener


def _print_address(listener: socket.socket, options: ServeOptions, notify: Callable[[str], None]) -> None:
    host, port = listener.getsockname()[:2]
    if not is_loopback(options.host) and not options.api_key:
        # Only a warning, as in llama-server and ollama: a home network often needs no key.
        who = "this machine over a network" if host in ("0.0.0.0", "::") else host
        notify(
            f"warning: without a key, whoever reaches {who} may use the model: --api-key KEY or {KEY_VARIABLE} asks for one,"
            " and --host 127.0.0.1 lets only this machine in"
        )
    notify(f"serving at http://{f'[{host}]' if ':' in host else host}:{port} (API: /v1, chat page: /); Ctrl-C stops it")
