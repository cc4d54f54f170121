"""Errors as the OpenAI API shapes them: {"error": {"message", "type", "param", "code"}} with an HTTP status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge_runtime.errors import EdgeRuntimeError, RequestError

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class ApiError(EdgeRuntimeError):
    """An error response. `param` names the field of the request that caused it; `numbers` are further fields of the error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.numbers = dict(numbers or {})

    def alone(self) -> ApiError:
        """Returns this error without where it was raised and why, which would keep a request's values."""
        return ApiError(self.status, str(self), param=self.param, code=self.code, headers=self.headers, numbers=self.numbers)

    def body(self, *, ollama: bool) -> dict[str, Any]:
        """Returns the body of the response, in Ollama's form or OpenAI's."""
        return {"error": str(self)} if ollama else self.to_json()

    def to_json(self) -> dict[str, Any]:
        """Returns OpenAI's form."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code, **self.numbers}}


def invalid(message: str, param: str | None = None, *, code: str | None = None) -> ApiError:
    """Returns the error for an invalid request (400)."""
    return ApiError(400, message, param=param, code=code)


def to_api_error(error: Exception) -> ApiError:
    """Returns the client's error for any failure: its message if the request caused it; otherwise no internal details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return invalid(str(error))
    return ApiError(500, "the model failed on this request; try again, or see the server's output", code="backend_error")
