"""Why a line has no answer, as the status and the body that OpenAI's records have for it. Layer 8."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pyggml_dflash.errors import (
    ContextOverflowError,
    DeviceMemoryError,
    DflashError,
    ModelFileError,
    UsageError,
)

LOG: Final = logging.getLogger(__name__)

_TYPES: Final = {
    400: "invalid_request_error",
    404: "not_found_error",
    500: "server_error",
    503: "service_unavailable",
}


@dataclass(frozen=True, slots=True)
class LineProblem:
    """What is wrong with one line, or went wrong with it."""

    status: int
    code: str
    message: str
    numbers: Mapping[str, int | None] = field(default_factory=dict)
    param: str | None = None  # the member that is to blame

    @property
    def body(self) -> dict[str, Any]:
        """The body of the response."""
        kind = _TYPES[self.status]
        detail = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": {**detail, **self.numbers}}

    @property
    def error(self) -> dict[str, str]:
        """The short form beside the response."""
        return {"code": self.code, "message": self.message}


class Refused(Exception):
    """Raised where a line is read, with its problem."""

    def __init__(self, problem: LineProblem) -> None:
        self.problem = problem
        super().__init__(problem.message)


def refused(code: str, message: str, *, status: int = 400, param: str | None = None) -> Refused:
    """The error for a line that cannot be a request."""
    return Refused(LineProblem(status, code, message, param=param))


def problem_of(error: Exception) -> LineProblem:
    """What an error means for a line."""
    if isinstance(error, Refused):
        return error.problem
    if isinstance(error, ContextOverflowError):
        numbers = {"n_ctx": error.n_ctx, "n_prompt": error.n_prompt, "max_tokens": error.max_tokens}
        return LineProblem(400, "context_length_exceeded", str(error), numbers)
    if isinstance(error, UsageError):
        return LineProblem(400, "invalid_value", str(error), param=error.param)
    if isinstance(error, ModelFileError):  # its chat template cannot be used
        return LineProblem(400, "invalid_value", str(error))
    if isinstance(error, DeviceMemoryError):
        return LineProblem(503, "out_of_memory", str(error))
    if isinstance(error, DflashError):
        return LineProblem(500, "engine_failure", str(error))
    LOG.error("a line failed", exc_info=error)
    return LineProblem(500, "internal_error", f"{type(error).__name__}: {error}")
