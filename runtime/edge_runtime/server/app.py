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
from edge_runtime.server.errors import ApiError, told
from edge_runtime.server.http.body import parse_json, read_body
from edge_runtime.server.http.page import page
from edge_runtime.server.requests.completions import Ask, read_chat, read_completion
from edge_runtime.server.responses import ChatForm, CompletionForm, Form
from edge_runtime.server.streaming import ClientGone, Reply, unless_gone
from edge_runtime.session.monitor import Monitor
from edge_runtime.session.prometheus import CONTENT_TYPE

_CLIENT_GONE = 499  # nobody reads it; nginx made the number known


class Api:
    """What the routes answer with. `model` is what clients call it, `made` when the bundle was made (ISO 8601)."""

    def __init__(self, worker: Worker, monitor: Monitor, *, model: str, made: str) -> None:
        self._worker = worker
        self._monitor = monitor
        self._name = model
        self._model = {"id": model, "object": "model", "created": _epoch(made), "owned_by": "edge-mtp"}

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, read_chat, ChatForm(self._name))

    async def completion(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, read_completion, CompletionForm(self._name))

    async def models(self, _request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/ID."""
        if request.path_params["name"] != self._name:
            raise ApiError(404, f"there is no such model; this server has {self._name!r}", param="model", code="model_not_found")
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

    async def _answer(self, request: Request, read: Callable[[dict[str, Any]], Ask], form: Form) -> Response:
        try:
            ask = read(parse_json(await read_body(request.stream(), request.headers.get("content-length"))))
            reply = Reply(self._worker, ask, form)
            try:
                await unless_gone(request.receive, reply.begun())
                if not ask.stream:
                    return JSONResponse(await unless_gone(request.receive, reply.whole()))
            except BaseException:
                reply.cancel()
                raise
            return EventStream(reply)
        except (ClientDisconnect, ClientGone):
            return Response(status_code=_CLIENT_GONE)


class EventStream(Response):
    """An answer while it is made. The request ends when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, reply: Reply) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._reply = reply

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Sends until the answer ends or the client leaves."""
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientGone:
            pass
        finally:
            self._reply.cancel()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._reply.stream():
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def failed(_request: Request, error: Exception) -> Response:
    """Any failure in the API's shape; what is our own fault goes to the log from here."""
    if isinstance(error, HTTPException):
        error = ApiError(
            error.status_code, f"{error.detail}: there is no such path or method here; see GET /v1/models", headers=error.headers
        )
    answer = told(error)
    return JSONResponse(answer.to_json(), answer.status, answer.headers)


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
        # Starlette logs a traceback of what only Exception's handler takes.
        exception_handlers={HTTPException: failed, ApiError: failed, RequestError: failed, Exception: failed},
    )


def _epoch(moment: str) -> int:
    try:
        return int(datetime.fromisoformat(moment).timestamp())
    except ValueError:
        return 0
