"""What goes wrong, as HTTP answers in the shape that the caller's client reads. Layer 8.

The one place where an error becomes a status: OpenAI's object everywhere, Anthropic's below /v1/messages.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from pyggml_dflash.errors import (
    Cancelled,
    ContextOverflowError,
    DeviceMemoryError,
    DflashError,
    EngineClosed,
    EngineParked,
    ModelFileError,
    QueueFullError,
    UsageError,
)
from pyggml_dflash.serve.bodies import json_response

LOG: Final = logging.getLogger(__name__)
ANTHROPIC_PATHS: Final = "/v1/messages"
RETRY_AFTER_S: Final = 1
BODY_TOO_LARGE: Final = "body_too_large"

# HTTP status -> type of OpenAI's error, type of Anthropic's
_TYPES: Final = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("service_unavailable", "overloaded_error"),
}


class ErrorDetail(BaseModel):
    """OpenAI's error; the numbers are there where a prompt is too long."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None
    n_ctx: int | None = None
    n_prompt: int | None = None
    max_tokens: int | None = None


class ErrorBody(BaseModel):
    """An error in OpenAI's shape."""

    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    """Anthropic's error; the numbers are there where a prompt is too long."""

    type: str
    message: str
    n_ctx: int | None = None
    n_prompt: int | None = None
    max_tokens: int | None = None


class AnthropicErrorBody(BaseModel):
    """An error in Anthropic's shape."""

    type: str
    error: AnthropicErrorDetail
    request_id: str | None = None


@dataclass(eq=False)
class Problem(Exception):
    """An HTTP answer that is no success; raised anywhere below a route."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    numbers: Mapping[str, int | None] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    @property
    def openai(self) -> dict[str, Any]:
        """The body in OpenAI's shape."""
        kind = _TYPES.get(self.status, _TYPES[500])[0]
        detail = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": {**detail, **self.numbers}}

    @property
    def anthropic(self) -> dict[str, Any]:
        """The body in Anthropic's shape."""
        kind = _TYPES.get(self.status, _TYPES[500])[1]
        return {"type": "error", "error": {"type": kind, "message": self.message, **self.numbers}}

    def body_for(self, path: str) -> dict[str, Any]:
        """The body in the shape that clients of this path read."""
        return self.anthropic if path.startswith(ANTHROPIC_PATHS) else self.openai

    def response(self, path: str) -> Response:
        """The whole answer."""
        return json_response(self.body_for(path), self.status, self.headers)


def problem_of(error: BaseException) -> Problem:
    """What an error means to an HTTP client."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, ContextOverflowError):
        numbers = {"n_ctx": error.n_ctx, "n_prompt": error.n_prompt, "max_tokens": error.max_tokens}
        return Problem(400, error.request_advice, code="context_length_exceeded", numbers=numbers)
    if isinstance(error, UsageError):
        return Problem(400, str(error), code="invalid_value", param=error.param)
    if isinstance(error, ModelFileError):  # its chat template cannot be used
        return Problem(400, str(error), code="invalid_value")
    if isinstance(error, EngineClosed):
        return Problem(503, "the server is stopping", code="stopping")
    if isinstance(error, Cancelled):
        return Problem(503, "the answer was stopped, with the server or to park its model", code="stopping")
    if isinstance(error, EngineParked):
        return Problem(503, "the model is parked; POST /admin/unpark brings it back", code="parked")
    if isinstance(error, QueueFullError):
        return queue_full(str(error))
    if isinstance(error, DeviceMemoryError):
        return Problem(503, str(error), code="out_of_memory", headers={"Retry-After": "5"})
    if isinstance(error, DflashError):
        LOG.error("a request failed: %s", error)
        return Problem(500, str(error), code="engine_failure")
    LOG.error("a request failed", exc_info=error)
    return Problem(500, "the server failed; its log has the reason", code="internal_error")


def queue_full(message: str) -> Problem:
    """Too many answers run or wait."""
    return Problem(429, message, code="queue_full", headers={"Retry-After": str(RETRY_AFTER_S)})


def problem_of_validation(error: RequestValidationError) -> Problem:
    """Why a body is no JSON object; what is in it is checked by the routes."""
    unreadable = next((e for e in error.errors() if e["type"] == "json_invalid"), None)
    if unreadable is not None:
        reason = unreadable.get("ctx", {}).get("error", "it cannot be read")
        return Problem(400, f"the body is no JSON: {reason}", code="invalid_json")
    what = "the body must be a JSON object, sent with Content-Type: application/json"
    return Problem(400, what, code="invalid_body")


def install(app: FastAPI) -> None:
    """Answer every error of `app` in these shapes."""

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return problem_of_validation(error).response(request.url.path)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = BODY_TOO_LARGE if error.status_code == 413 else None
        problem = Problem(error.status_code, str(error.detail), code=code, headers=dict(error.headers or {}))
        return problem.response(request.url.path)

    async def on_error(request: Request, error: Exception) -> Response:
        return problem_of(error).response(request.url.path)

    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    for kind in (Problem, DflashError, Exception):
        app.add_exception_handler(kind, on_error)
