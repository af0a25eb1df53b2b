"""Requests answered on the test's own thread: the turns of the engine's thread without the thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pyggml_dflash.engine.generation import Generation
from pyggml_dflash.engine.loaded import Loaded
from pyggml_dflash.engine.serving import Serving
from pyggml_dflash.requests import (
    GenerationRequest,
    GenerationResult,
    ProgressCallback,
    RequestState,
    TextPiece,
)


@dataclass(slots=True)
class Reader:
    """Takes pieces, and wants no more of them once `is_enough` says so."""

    request: GenerationRequest | None = None
    is_enough: Callable[[], bool] = lambda: False
    pieces: list[TextPiece] = field(default_factory=list)
    outcome: GenerationResult | BaseException | None = None
    progress: ProgressCallback | None = None
    submitted_s: float = field(default_factory=time.perf_counter)
    state: RequestState = field(default_factory=lambda: RequestState(phase="queued"))
    id: int | None = None

    @property
    def cancelled(self) -> bool:
        """True once it has enough."""
        return self.is_enough()

    def emit(self, event: TextPiece | GenerationResult | BaseException) -> None:
        """Keep an event."""
        if isinstance(event, TextPiece):
            self.pieces.append(event)
        else:
            self.outcome = event

    def cancel(self) -> None:
        """Want no more."""
        self.is_enough = lambda: True

    def started(self, loaded: Loaded) -> Generation:
        """The request as it runs."""
        assert self.request is not None
        return Generation(loaded, self.request, self)

    def fail(self, error: BaseException) -> None:
        """Keep an error."""
        self.outcome = error

    def result(self) -> GenerationResult:
        """The answer, or what was raised instead."""
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome


def answered(loaded: Loaded, request: GenerationRequest, reader: Reader | None = None) -> GenerationResult:
    """The answer to one request, alone."""
    reader = Reader() if reader is None else reader
    reader.request = request
    serving = Serving(loaded, lambda: reader.cancelled)
    serving.add(reader)
    while not serving.is_idle:
        serving.turn()
    return reader.result()
