"""The thread that owns an engine's native memory, and the queue in front of it. Layer 6.

Callers submit requests and receive events; requests run one after the other, first come first
served. Cancellation is a flag that is read between steps and between chunks.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from pyggml_dflash.engine.core import EngineCore, IsCancelled
from pyggml_dflash.engine.generation import Generation
from pyggml_dflash.engine.loader import Loaded
from pyggml_dflash.errors import BackendError, Cancelled, EngineClosed, UsageError
from pyggml_dflash.requests import GenerationRequest, GenerationResult, Progress, ProgressCallback, TextPiece

# A signal that arrives just before a wait without a limit is seen only when the wait ends.
WAIT_S: Final = 0.25
OWN_CALLBACK: Final = "a callback of this engine called it and would wait for itself; call it afterwards"

T = TypeVar("T")
Event = TextPiece | GenerationResult | BaseException
Loader = Callable[[ProgressCallback], Loaded]


class RequestHandle:
    """One submitted request: its events in order, and the flag that stops it."""

    def __init__(
        self,
        request: GenerationRequest,
        progress: ProgressCallback | None,
        loop: asyncio.AbstractEventLoop | None,
        server: threading.Thread | None,
    ) -> None:
        """`server`: the thread that answers, which must never wait for an answer."""
        self.request, self.progress = request, progress
        self._server = server
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
        """Stop after the current step."""
        self._stop.set()

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
        """`next_piece` without blocking the event loop."""
        return None if self._read_end else self._take(await self._async_events.get())

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


@dataclass(slots=True)
class _Call(Generic[T]):
    """A function to run on the engine's thread between requests; it asks now and then whether to go on."""

    function: Callable[[EngineCore, IsCancelled], T]
    future: Future[T] = field(default_factory=Future)
    _stop: threading.Event = field(default_factory=threading.Event)

    @property
    def cancelled(self) -> bool:
        """True once nobody waits for the value."""
        return self._stop.is_set()

    def cancel(self) -> None:
        """Stop after the current step."""
        self._stop.set()


class EngineThread:
    """Loads a model on a thread of its own and serves it until closed."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[RequestHandle | _Call[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._running: RequestHandle | _Call[Any] | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def start(self, loader: Loader, progress: ProgressCallback | None) -> Loaded:
        """Load, then serve; returns when the model is ready or raises what loading raised.

        An interrupt while loading stops the load and frees what it had made.
        """
        ready: Future[Loaded] = Future()

        def report(event: Progress) -> None:
            if self._closing.is_set():
                raise Cancelled("loading was cancelled")
            if progress is not None:
                progress(event)

        self._thread = threading.Thread(
            target=self._main, args=(loader, report, ready), name="dflash-engine", daemon=True
        )
        try:
            self._thread.start()
            return _patient(ready)
        except BaseException:
            self.close()
            raise

    def check_open(self) -> None:
        """Raise `EngineClosed` after `close`, and a clear error in a forked child."""
        check_process(self._pid)
        if self._closing.is_set():
            raise EngineClosed("Engine")

    def submit(
        self,
        request: GenerationRequest,
        progress: ProgressCallback | None,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> RequestHandle:
        """Queue a request; its events go to `loop` when one is given."""
        handle = RequestHandle(request, progress, loop, self._thread)
        self._enqueue(handle)
        return handle

    def call(self, function: Callable[[EngineCore, IsCancelled], T]) -> T:
        """Run `function` on the engine's thread, after what was queued before, and return its value.

        Its second argument tells whether it should stop, which an interrupt of this wait and `close` ask for.
        """
        call = _Call(function)
        self._enqueue(call)
        try:
            return _patient(call.future)
        except BaseException:
            call.cancel()
            raise

    def _enqueue(self, command: RequestHandle | _Call[Any]) -> None:
        if threading.current_thread() is self._thread:
            raise UsageError(OWN_CALLBACK)
        check_process(self._pid)  # in a child the lock may be held for ever
        with self._lock:  # nothing may be queued behind the command that ends the thread
            self.check_open()
            self._commands.put(command)

    def close(self) -> None:
        """Cancel everything, free the model and end the thread; a second call does nothing."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self._closing.is_set():
                self._closing.set()
                self._commands.put(None)
        running = self._running
        if running is not None:
            running.cancel()
        thread = self._thread
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join()

    def _main(self, loader: Loader, report: ProgressCallback, ready: Future[Loaded]) -> None:
        try:
            loaded = loader(report)
        except BaseException as error:
            ready.set_exception(error)
            return
        try:
            ready.set_result(loaded)
            self._serve(loaded)
        finally:
            loaded.core.close()

    def _serve(self, loaded: Loaded) -> None:
        while (command := self._next(loaded.core)) is not None:
            if self._closing.is_set():
                _refuse(command)
                continue
            self._running = command
            if self._closing.is_set():
                command.cancel()
            if isinstance(command, RequestHandle):
                _answer(loaded, command)
            else:
                self._run_call(loaded.core, command)
            self._running = None

    def _next(self, core: EngineCore) -> RequestHandle | _Call[Any] | None:
        """The next command; scratch memory goes back to the driver before a wait for it."""
        try:
            return self._commands.get_nowait()
        except queue.Empty:
            core.release_scratch()
            return self._commands.get()

    def _run_call(self, core: EngineCore, call: _Call[Any]) -> None:
        try:
            call.future.set_result(call.function(core, lambda: call.cancelled))
        except BaseException as error:
            closed = isinstance(error, Cancelled) and self._closing.is_set()
            call.future.set_exception(EngineClosed("Engine") if closed else error)


def _patient(future: Future[T]) -> T:
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


def _answer(loaded: Loaded, handle: RequestHandle) -> None:
    try:
        handle.emit(Generation(loaded, handle.request).run(handle))
    except (StopIteration, StopAsyncIteration) as error:  # would end the caller's loop as if all were well
        handle.emit(RuntimeError(f"a callback raised {type(error).__name__}"))
    except BaseException as error:
        handle.emit(error)


def _refuse(command: RequestHandle | _Call[Any]) -> None:
    if isinstance(command, RequestHandle):
        command.emit(EngineClosed("Engine"))
    else:
        command.future.set_exception(EngineClosed("Engine"))
