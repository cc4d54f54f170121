"""Errors as the OpenAI API shapes them: {"error": {"message", "type", "param", "code"}} with an HTTP status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge_runtime.errors import EdgeRuntimeError, RequestError

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class ApiError(EdgeRuntimeError):
    """What a client is told instead of an answer. `param` names the field of the request that is at fault."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def to_json(self) -> dict[str, Any]:
        """The body of the response."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, *, code: str | None = None) -> ApiError:
    """A request that asks for what cannot be."""
    return ApiError(400, message, param=param, code=code)


def told(error: Exception) -> ApiError:
    """Returns what a client is told of any failure: the sentence if the request was at fault, none of our insides otherwise."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return invalid(str(error))
    return ApiError(500, "the model failed on this request; try again, the server's own output says why", code="backend_error")
