"""The routes. The only module that imports Starlette."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from edge_runtime.errors import RequestError
from edge_runtime.server.apis.messages_api import MessagesFormat, read_message
from edge_runtime.server.apis.ollama import OllamaFormat, read_ollama_chat, read_ollama_generate
from edge_runtime.server.apis.openai import ChatFormat, CompletionFormat
from edge_runtime.server.apis.response_format import ResponseFormat, encoded, energy_metrics, energy_totals, timings, usage_line
from edge_runtime.server.apis.responses_api import ResponsesFormat, read_response
from edge_runtime.server.engine.idle import WorkerOnDemand
from edge_runtime.server.engine.worker import Worker
from edge_runtime.server.errors import ApiError, form_for, to_api_error
from edge_runtime.server.heat import HeatWatch
from edge_runtime.server.http.body import MEDIA_BODY, SMALL_BODY, TEXT_BODY, BodyLimit, Trimmer, parse_json, read_body
from edge_runtime.server.http.guard import CLIENT, REMARKS, nearest
from edge_runtime.server.http.page import page
from edge_runtime.server.json_text import Json
from edge_runtime.server.model_card import OLLAMA_VERSION, ModelCard
from edge_runtime.server.requests.completions import ApiRequest, read_chat, read_completion, read_detokenize, read_tokenize, wants_special
from edge_runtime.server.streaming import ClientDisconnected, PendingResponse, check_logprobs, result_of, unless_disconnected
from edge_runtime.session.monitor import CONTENT_TYPE, Monitor, exposition, gauge

_CLIENT_CLOSED_REQUEST = 499  # nginx's code, for logs only: the client no longer reads it
# A whole answer is sent in parts of this size: the connection of a client that does not read buffers one part, not the answer.
_PART_BYTES = 1 << 16
# The most different sentences about ignored fields and tools that are printed. Each is printed once.
_MOST_SENTENCES = 256
Read = TypeVar("Read")


class Api:
    """The handlers of the routes. `card` describes the model to clients; `notify` gets sentences about ignored parts of requests."""

    def __init__(
        self,
        workers: WorkerOnDemand,
        monitor: Monitor,
        card: ModelCard,
        notify: Callable[[str], None] = lambda _: None,
        heat: HeatWatch | None = None,
    ) -> None:
        self._workers = workers
        self._monitor = monitor
        self.card = card
        self._notify = notify
        self._heat = heat
        self._told: set[str] = set()
        self._trimmer = Trimmer()

    def generates(
        self, read: Callable[[Json], ApiRequest | None], form: Callable[[Json, Any], ResponseFormat], limit: BodyLimit = MEDIA_BODY
    ) -> Callable[[Request], Awaitable[Response]]:
        """Returns the handler of a path that generates. `read` parses a body; it returns None for one that only loads the model."""

        def both(body: Json) -> tuple[ApiRequest | None, ResponseFormat]:
            api_request = read(body)
            return api_request, form(body, api_request)

        async def handler(request: Request) -> Response:
            async with self._workers.working() as worker:
                api_request, made = await self._read(request, both, limit, worker)
                if api_request is None:
                    return Json200(made.complete(()))
                self._say(api_request.remarks)
                return await self._answer(request, api_request, made, worker)

        return handler

    def _say(self, remarks: Sequence[str]) -> None:
        """Tells the operator which parts of a request are ignored. Each sentence is told once, since clients repeat such parts."""
        for sentence in remarks:
            if sentence not in self._told and len(self._told) < _MOST_SENTENCES:
                self._told.add(sentence)
                self._notify(sentence)

    async def ollama_show(self, request: Request) -> Response:
        if not self.card.is_called(await self._read(request, lambda body: body.get("model") or body.get("name"), TEXT_BODY)):
            raise self._no_such_model()
        return Json200(self.card.ollama_details())

    def counts(self, read: Callable[[Json], ApiRequest]) -> Callable[[Request], Awaitable[Response]]:
        """Returns the handler of a path that counts the tokens of a request's prompt."""

        async def handler(request: Request) -> Response:
            async with self._workers.working() as worker:
                api_request = await self._read(request, read, worker=worker)
                counting = worker.count(api_request.choices[0].prompt, request.scope[CLIENT])
                count = await unless_disconnected(request.receive, result_of(counting))
            return Json200({"object": "response.input_tokens", "input_tokens": count})

        return handler

    async def tokenize(self, request: Request) -> Response:
        async with self._workers.working() as worker:
            prompt, special = await self._read(request, lambda body: (read_tokenize(body), wants_special(body)), worker=worker)
            encoding = worker.encode(prompt, request.scope[CLIENT], special=special)
            tokens = await unless_disconnected(request.receive, result_of(encoding))
        return Json200({"tokens": tokens, "count": len(tokens), "max_model_len": self.card.context})

    async def detokenize(self, request: Request) -> Response:
        async with self._workers.working() as worker:
            ids = await self._read(request, lambda body: read_detokenize(body, self.card.context), TEXT_BODY, worker)
            decoding = worker.decode(ids, request.scope[CLIENT])
            text = await unless_disconnected(request.receive, result_of(decoding))
        return Json200({"content": text, "prompt": text})

    async def model(self, request: Request) -> Response:
        if not self.card.is_called(request.path_params["name"]):
            raise self._no_such_model()
        return Json200(self.card.model())

    async def slots(self, request: Request) -> Response:
        """Answers with each session's state, without texts. Answers with 503 if no session is free and the query asks for that."""
        running = self._workers.slots()
        state = [
            {
                "id": number,
                "n_ctx": self.card.context,
                "speculative": self.card.drafter != "none",
                "is_processing": stats is not None,
                **({} if stats is None else {"n_prompt_tokens": stats.prompt_tokens, "n_decoded": stats.tokens, "timings": timings(stats)}),
            }
            for number, stats in enumerate(running)
        ]
        if "fail_on_no_slot" in request.query_params and None not in running:
            raise ApiError(503, "no session is free; try again soon", code="no_slot")
        return Json200(state)

    def health(self) -> Json:
        """Returns how many requests run and wait, and whether the model is in memory."""
        running, waiting = self._workers.load()
        return {"status": "ok", "running": running, "waiting": waiting, "loaded": self._workers.loaded}

    async def metrics(self, _request: Request) -> Response:
        watch = self._workers.watch
        running, waiting = self._workers.load()
        further = [
            gauge("edge_mtp_requests_running", "Requests that sessions run.", running),
            gauge("edge_mtp_requests_waiting", "Requests that wait for a session.", waiting),
            *(energy_metrics(watch.total()) if watch else ()),
            *(self._heat.metrics() if self._heat else ()),
        ]
        return PlainTextResponse(self._monitor.prometheus_text() + exposition(further), headers={"content-type": CONTENT_TYPE})

    async def energy(self, _request: Request) -> Response:
        """Answers with the joules so far, or with 503 and the reason why there are none."""
        watch = self._workers.watch
        body = energy_totals(watch.total()) if watch else {"error": "the server reads no energy meter; see `edge-devices meters`"}
        return Json200(body, 503 if "error" in body else 200)

    async def page(self, _request: Request) -> Response:
        text, headers = page()
        return HTMLResponse(text, headers=headers)

    async def _read(
        self, request: Request, read: Callable[[Json], Read], limit: BodyLimit = MEDIA_BODY, worker: Worker | None = None
    ) -> Read:
        """Returns what `read` makes of the body. With `worker`, large bodies are parsed in another thread."""
        body = await read_body(request.stream(), request.headers.get("content-length"), limit)
        if worker is None or len(body) <= SMALL_BODY:
            return read(parse_json(body, limit))
        self._trimmer.after_request()
        parsing = worker.read(lambda: read(parse_json(body, limit)), request.scope[CLIENT])
        return await unless_disconnected(request.receive, result_of(parsing))

    async def _answer(self, request: Request, api_request: ApiRequest, form: ResponseFormat, worker: Worker) -> Response:
        check_logprobs(api_request, self.card.context)
        pending = PendingResponse(worker, api_request, form, request.scope[CLIENT])
        answer: PieceStream | None = None
        try:
            await unless_disconnected(request.receive, pending.wait_started())
            if api_request.stream:
                answer = PieceStream(pending)
            else:
                answer = PieceStream(pending, encoded(await unless_disconnected(request.receive, pending.complete())))
            return answer
        finally:
            if answer is None:
                pending.cancel()
                _remark(request.scope, usage_line(pending.stats))

    def _no_such_model(self) -> ApiError:
        return ApiError(404, f"this server has no such model; use {self.card.name!r}", param="model", code="model_not_found")


class Json200(Response):
    """A JSON object. Unlike Starlette's response, it accepts strings with lone surrogates."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encoded(content)


class PieceStream(Response):
    """A response in pieces: a stream, or a `whole` answer. The request ends when it is sent or the client disconnects."""

    def __init__(self, pending: PendingResponse, whole: bytes | None = None) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(media_type=pending.media_type if whole is None else "application/json", headers=headers if whole is None else None)
        del self.headers["content-length"]
        if whole is not None:
            self.headers["content-length"] = str(len(whole))
        self._pending, self._whole = pending, whole

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends pieces until the answer ends or the client disconnects."""
        left = ""
        try:
            await unless_disconnected(receive, self._send_all(send))
        except ClientDisconnected:
            left = "the client left"
        finally:
            self._pending.cancel()
            _remark(scope, usage_line(self._pending.stats), left)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._pending.stream() if self._whole is None else self._parts(self._whole):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _parts(self, whole: bytes) -> AsyncIterator[bytes]:
        """Yields the parts of a whole answer; each waits until the connection takes it."""
        parts = [whole[first : first + _PART_BYTES] for first in range(0, len(whole), _PART_BYTES)]
        for part in parts[:-1]:
            yield part
        self._pending.cancel()  # before the last one: a client that has its answer finds the place free
        yield parts[-1]


def _remark(scope: Scope, *remarks: str) -> None:
    """Adds remarks to the operator's log line about a request."""
    scope.get(REMARKS, []).extend(filter(None, remarks))


async def error_response(request: Request, error: Exception) -> Response:
    """Returns any failure in the error format of the path's API."""
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, f"{error.detail}: {_advice(request, error)}", headers=error.headers)
    failure = to_api_error(error)
    _remark(request.scope, repr(failure.param)[1:-1] if failure.param else failure.code or "")
    return Json200(failure.body(form_for(request.url.path)), failure.status, failure.headers)


def _advice(request: Request, error: HTTPException) -> str:
    """Returns what to do about a path or a method that does not exist."""
    if allowed := (error.headers or {}).get("Allow"):
        return f"this path takes {allowed}"
    known = [route.path.partition("{")[0] for route in request.app.routes]
    return f"this server has no such path; {nearest(request.url.path, known)}"


async def closed_response(_request: Request, _error: Exception) -> Response:
    """Returns the response for a client that is gone."""
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _no_embeddings(request: Request) -> Response:
    """Refuses: this model was not trained to embed texts, so its vectors of similar texts are not near each other."""
    message = "this model writes text and was not trained to make embeddings; use an embedding model, such as EmbeddingGemma, beside it"
    return await error_response(request, ApiError(400, message, code="unsupported_model"))


async def _no_pull(request: Request) -> Response:
    """Refuses: a server has one model, a folder on its machine."""
    message = (
        "this server has one model, and pulls none; on its machine, make another with 'edge-export pair NAME -o FOLDER',"
        " then run 'edge-run serve FOLDER'"
    )
    return await error_response(request, ApiError(400, message, code="unsupported_operation"))


def make_app(api: Api) -> Starlette:
    """Returns the ASGI application."""
    card, name = api.card, api.card.name
    app = Starlette(
        routes=[
            *(
                Route(path, api.generates(*how), methods=["POST"])
                for path, *how in (
                    ("/v1/chat/completions", read_chat, lambda _, read: ChatFormat(name, read, card.fingerprint)),
                    ("/v1/completions", read_completion, lambda _, read: CompletionFormat(name, read, card.fingerprint), TEXT_BODY),
                    ("/v1/responses", read_response, lambda body, _: ResponsesFormat(name, body)),
                    ("/v1/messages", read_message, lambda *_: MessagesFormat(name)),
                    ("/api/chat", read_ollama_chat, lambda *_: OllamaFormat(name, chat=True)),
                    ("/api/generate", read_ollama_generate, lambda *_: OllamaFormat(name, chat=False)),
                )
            ),
            Route("/v1/chat/completions/input_tokens", api.counts(read_chat), methods=["POST"]),
            Route("/v1/responses/input_tokens", api.counts(read_response), methods=["POST"]),
            Route("/v1/messages/count_tokens", api.counts(read_message), methods=["POST"]),
            *(Route(path, _no_embeddings, methods=["POST"]) for path in ("/v1/embeddings", "/api/embed", "/api/embeddings")),
            *(Route(path, _no_pull, methods=["POST"]) for path in ("/api/pull", "/api/create")),
            Route("/v1/models", _facts(card.models)),
            Route("/v1/models/{name:path}", api.model),
            Route("/tokenize", api.tokenize, methods=["POST"]),
            Route("/detokenize", api.detokenize, methods=["POST"]),
            Route("/props", _facts(card.props)),
            Route("/slots", api.slots),
            Route("/health", _facts(api.health)),
            Route("/metrics", api.metrics),
            Route("/energy_metrics", api.energy),
            Route("/api/show", api.ollama_show, methods=["POST"]),
            Route("/api/tags", _facts(lambda: {"models": [card.ollama_model()]})),
            Route("/api/ps", _facts(lambda: {"models": [card.ollama_model()]})),
            Route("/api/version", _facts(lambda: {"version": OLLAMA_VERSION})),
            Route("/", api.page),
        ],
        # All classes are listed, because Starlette logs a traceback for errors that only the handler of Exception matches.
        exception_handlers={
            HTTPException: error_response,
            ApiError: error_response,
            RequestError: error_response,
            ClientDisconnect: closed_response,
            ClientDisconnected: closed_response,
            Exception: error_response,
        },
    )
    app.router.redirect_slashes = False  # a redirect would go to the name in the Host header
    return app


def _facts(value: Callable[[], Json]) -> Callable[[Request], Awaitable[Response]]:
    """Returns the handler of a path that answers with `value()`, whatever the request."""

    async def handler(_request: Request) -> Response:
        return Json200(value())

    return handler
