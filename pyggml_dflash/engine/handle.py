"""A submitted request as its caller holds it: events in order, where it stands, and the flag that stops it.
Layer 6."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Final, TypeVar

from pyggml_dflash.engine.generation import Generation
from pyggml_dflash.engine.loaded import Loaded
from pyggml_dflash.errors import BackendError, UsageError
from pyggml_dflash.requests import (
    GenerationRequest,
    GenerationResult,
    ProgressCallback,
    RequestState,
    TextPiece,
)

# A signal that arrives just before a wait without a limit is seen only when the wait ends.
WAIT_S: Final = 0.25
OWN_CALLBACK: Final = "a callback of this engine called it and would wait for itself; call it afterwards"

T = TypeVar("T")
Event = TextPiece | GenerationResult | BaseException


def _nobody() -> None:
    """Nobody has to be told."""


class RequestHandle:
    """One submitted request."""

    def __init__(
        self,
        request: GenerationRequest,
        progress: ProgressCallback | None,
        loop: asyncio.AbstractEventLoop | None,
        server: threading.Thread | None,
        *,
        wake: Callable[[], None] = _nobody,
    ) -> None:
        """`server`: the thread that answers, and must never wait for an answer; `wake` tells it of a stop."""
        self.request, self.progress = request, progress
        self.id: int | None = None  # its number, in the order of submission
        self.state = RequestState(phase="queued", total=len(request.tokens))
        self._server, self._wake = server, wake
        self.submitted_s = time.perf_counter()
        self._stop = threading.Event()
        self._done = threading.Event()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._loop = loop
        self._async_events: asyncio.Queue[Event] = asyncio.Queue()
        self._outcome: GenerationResult | BaseException | None = None
        self._read_end = False
        self._pid = os.getpid()

    @property
    def cancelled(self) -> bool:
        """True once somebody asked to stop."""
        return self._stop.is_set()

    def cancel(self) -> None:
        """Stop after the current step, or at once if it waits."""
        if not self._stop.is_set():
            self._stop.set()
            self._wake()

    def started(self, loaded: Loaded) -> Generation:
        """The request as it runs."""
        return Generation(loaded, self.request, self)

    def emit(self, event: Event) -> None:
        """Hand an event to the caller; a result or an error is the last one. Engine thread only."""
        if not isinstance(event, TextPiece):
            self._outcome = event
        if self._loop is None:
            self._events.put(event)
        elif self._loop.is_closed():
            self.cancel()  # nobody is left to read
        else:
            try:
                self._loop.call_soon_threadsafe(self._async_events.put_nowait, event)
            except RuntimeError:  # closed in between
                self.cancel()
        if not isinstance(event, TextPiece):
            self._done.set()

    def fail(self, error: BaseException) -> None:
        """Emit an error in place of an answer."""
        self.state = replace(self.state, phase="done")
        self.emit(error)

    @property
    def is_own_callback(self) -> bool:
        """True on the thread that answers the request, as in a progress callback."""
        return threading.current_thread() is self._server

    def _check_caller(self) -> None:
        check_process(self._pid)
        if self.is_own_callback:
            raise UsageError(OWN_CALLBACK)

    def next_piece(self) -> TextPiece | None:
        """The next piece, or None after the last; raises what the request raised."""
        self._check_caller()
        while not self._read_end:
            try:
                return self._take(self._events.get(timeout=WAIT_S))
            except queue.Empty:
                continue
        return None

    async def next_piece_async(self) -> TextPiece | None:
        """`next_piece` without blocking the event loop.

        A piece that is there already waits for a turn of the loop: a reader that is slower than the model
        would else keep everybody from theirs, and so never hear that its own client is gone.
        """
        if self._read_end:
            return None
        if not self._async_events.empty():
            await asyncio.sleep(0)
        return self._take(await self._async_events.get())

    def _take(self, event: Event) -> TextPiece | None:
        if isinstance(event, TextPiece):
            return event
        self._read_end = True
        if isinstance(event, BaseException):
            raise event
        return None

    def wait(self) -> None:
        """Block until the engine has let go of the request."""
        self._check_caller()
        while not self._done.wait(WAIT_S):
            pass

    def result(self) -> GenerationResult:
        """The whole answer, waiting for its end."""
        self.wait()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome


def check_process(pid: int) -> None:
    """Raise in a forked child, which has the objects of the process `pid`, but not its threads."""
    if os.getpid() != pid:
        raise BackendError(
            "this engine was opened before a fork; open one in the child, or start it with 'spawn'"
        )


def patient(future: Future[T]) -> T:
    """The future's result, waiting in pieces so that an interrupt is seen soon.

    It waits on a queue made in C: `concurrent.futures.wait` raises RuntimeError when it is interrupted at the
    moment at which it takes its lock back.
    """
    ready: queue.SimpleQueue[object] = queue.SimpleQueue()
    future.add_done_callback(ready.put)
    while not future.done():
        try:
            ready.get(timeout=WAIT_S)
        except queue.Empty:
            continue
    return future.result()
