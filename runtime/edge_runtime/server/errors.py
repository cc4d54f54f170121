"""Error responses in the format of each API. OpenAI's is {"error": {"message", "type", "param", "code"}}, with an HTTP status."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from edge_runtime.errors import EdgeRuntimeError, RequestError


class ErrorForm(Enum):
    """The API whose error format a response has."""

    OPENAI = "openai"
    OLLAMA = "ollama"
    ANTHROPIC = "anthropic"


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


CONTEXT_EXCEEDED = "context_length_exceeded"


class ApiError(EdgeRuntimeError):
    """An error response. `param` names the request field that caused it; `numbers` are further integer fields of the error object."""

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
        """Returns a copy without traceback and cause, which would keep the request's values in memory."""
        return ApiError(self.status, str(self), param=self.param, code=self.code, headers=self.headers, numbers=self.numbers)

    def body(self, form: ErrorForm) -> dict[str, Any]:
        """Returns the body of the response."""
        if form is ErrorForm.OLLAMA:
            return {"error": str(self)}
        return self._to_anthropic() if form is ErrorForm.ANTHROPIC else self.to_json()

    def to_json(self) -> dict[str, Any]:
        """Returns OpenAI's form."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code, **self.numbers}}

    def _to_anthropic(self) -> dict[str, Any]:
        message = str(self)
        if self.code == CONTEXT_EXCEEDED:  # clients recognize the error by this wording of Anthropic's
            message = f"prompt is too long: {self.numbers['n_prompt_tokens']} tokens > {self.numbers['n_ctx']} maximum; {message}"
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message, **self.numbers}}


def invalid(message: str, param: str | None = None, *, code: str | None = None) -> ApiError:
    """Returns the error for an invalid request (400)."""
    return ApiError(400, message, param=param, code=code)


def to_api_error(error: Exception) -> ApiError:
    """Returns the error to send for any failure. It has the failure's message only if the request caused it, never internal details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return invalid(str(error))
    return ApiError(500, "the model failed on this request; try again, or see the server's output", code="backend_error")


def form_for(path: str) -> ErrorForm:
    """Returns the error format of the API that a path belongs to."""
    if path.startswith("/api/"):
        return ErrorForm.OLLAMA
    return ErrorForm.ANTHROPIC if path.startswith("/v1/messages") else ErrorForm.OPENAI
