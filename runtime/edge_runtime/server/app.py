"""The routes. The only module that imports Starlette."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from edge_runtime.errors import RequestError
from edge_runtime.server.engine.worker import Worker
from edge_runtime.server.errors import ApiError, to_api_error
from edge_runtime.server.http.body import parse_json, read_body
from edge_runtime.server.http.page import page
from edge_runtime.server.requests.completions import CompletionRequest, read_chat, read_completion
from edge_runtime.server.responses import ChatFormat, CompletionFormat, ResponseFormat
from edge_runtime.server.streaming import ClientDisconnected, PendingResponse, unless_disconnected
from edge_runtime.session.monitor import Monitor
from edge_runtime.session.prometheus import CONTENT_TYPE

_CLIENT_CLOSED_REQUEST = 499  # nginx's code, for logs only: the client no longer reads it


class Api:
    """The handlers of the routes. `model` is the model's id for clients, `created_at` the time of the bundle's export (ISO 8601)."""

    def __init__(self, worker: Worker, monitor: Monitor, *, model: str, created_at: str) -> None:
        self._worker = worker
        self._monitor = monitor
        self._name = model
        self._model = {"id": model, "object": "model", "created": _epoch(created_at), "owned_by": "edge-mtp"}

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._respond(request, read_chat, ChatFormat(self._name))

    async def completion(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._respond(request, read_completion, CompletionFormat(self._name))

    async def models(self, _request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/ID."""
        if request.path_params["name"] != self._name:
            raise ApiError(404, f"this server has no such model; use {self._name!r}", param="model", code="model_not_found")
        return JSONResponse(self._model)

    async def health(self, _request: Request) -> Response:
        """GET /health."""
        running, waiting = self._worker.load()
        return JSONResponse({"status": "ok", "running": running, "waiting": waiting})

    async def metrics(self, _request: Request) -> Response:
        """GET /metrics, for Prometheus."""
        return PlainTextResponse(self._monitor.prometheus_text(), headers={"content-type": CONTENT_TYPE})

    async def page(self, _request: Request) -> Response:
        """GET /, the chat page."""
        text, headers = page()
        return HTMLResponse(text, headers=headers)

    async def _respond(self, request: Request, read: Callable[[dict[str, Any]], CompletionRequest], form: ResponseFormat) -> Response:
        try:
            completion = read(parse_json(await read_body(request.stream(), request.headers.get("content-length"))))
            pending = PendingResponse(self._worker, completion, form)
            try:
                await unless_disconnected(request.receive, pending.wait_started())
                if not completion.stream:
                    return JSONResponse(await unless_disconnected(request.receive, pending.complete()))
            except BaseException:
                pending.cancel()
                raise
            return EventStream(pending)
        except (ClientDisconnect, ClientDisconnected):
            return Response(status_code=_CLIENT_CLOSED_REQUEST)


class EventStream(Response):
    """A streamed failure. The request is cancelled when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, pending: PendingResponse) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._pending = pending

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Sends events until the answer ends or the client disconnects."""
        try:
            await unless_disconnected(receive, self._send_all(send))
        except ClientDisconnected:
            pass
        finally:
            self._pending.cancel()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._pending.stream():
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def error_response(_request: Request, error: Exception) -> Response:
    """Returns any failure in the API's error format."""
    if isinstance(error, HTTPException):
        error = ApiError(
            error.status_code, f"{error.detail}: this server has no such path or method; see GET /v1/models", headers=error.headers
        )
    failure = to_api_error(error)
    return JSONResponse(failure.to_json(), failure.status, failure.headers)


def make_app(api: Api) -> Starlette:
    """Returns the ASGI application."""
    return Starlette(
        routes=[
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            Route("/v1/completions", api.completion, methods=["POST"]),
            Route("/v1/models", api.models),
            Route("/v1/models/{name:path}", api.model),
            Route("/health", api.health),
            Route("/metrics", api.metrics),
            Route("/", api.page),
        ],
        # Starlette logs a traceback for errors that only the handler of Exception matches.
        exception_handlers={
            HTTPException: error_response,
            ApiError: error_response,
            RequestError: error_response,
            Exception: error_response,
        },
    )


def _epoch(moment: str) -> int:
    try:
        return int(datetime.fromisoformat(moment).timestamp())
    except ValueError:
        return 0
