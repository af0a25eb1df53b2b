"""What the OpenAPI document says of answers that routes do not name in their signature. Layer 8."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel

from pyggml_dflash.serve.problems import AnthropicErrorBody, ErrorBody

Responses = dict[int | str, dict[str, Any]]

_EVENT: Final = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
    "description": "One event of a stream; `data` is JSON but for the last word of OpenAI's streams.",
}
_REASONS: Final = {
    400: "A value was refused; the message names it.",
    401: "The API key is missing or wrong.",
    403: "Pages of this origin, or requests under this name, are not allowed.",
    404: "No such model.",
    413: "The body is too large.",
    429: "Too many answers run or wait; Retry-After says when to try again.",
    500: "The engine failed.",
    503: "The model is loading, or the server is stopping.",
}


def responses(ok: type[BaseModel] | None, *statuses: int, error: type[BaseModel] = ErrorBody) -> Responses:
    """A body of success, and errors."""
    found: Responses = {status: {"model": error, "description": _REASONS[status]} for status in statuses}
    if ok is not None:
        found[200] = {"model": ok}
    return found


def answer_responses(ok: type[BaseModel], *, anthropic: bool = False) -> Responses:
    """Of a route that generates, as one body or as a stream of events."""
    error = AnthropicErrorBody if anthropic else ErrorBody
    found = responses(ok, *_REASONS, error=error)
    found[200]["content"] = {"text/event-stream": {"schema": _EVENT}}
    return found


def report_responses(ok: type[BaseModel] | None) -> Responses:
    """Of a route that reads."""
    return responses(ok, 400, 401, 403, 413, 500, 503)
