"""The thread that owns an engine's native memory, and the queue in front of it. Layer 6.

Callers submit requests and receive events; what runs, and in which order, is for `Serving` to say.
Everything else that has to do with native memory comes as a call, which is answered between two steps.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from pyggml_dflash.engine.commands import WAKE, Call, Command, IsCancelled, Park, Queued, Unpark, Wake
from pyggml_dflash.engine.core import EngineCore
from pyggml_dflash.engine.forced import ForcedText, Reading
from pyggml_dflash.engine.handle import OWN_CALLBACK, RequestHandle, check_process, patient
from pyggml_dflash.engine.loaded import Loaded
from pyggml_dflash.engine.serving import Serving
from pyggml_dflash.errors import Cancelled, EngineClosed, EngineParked, QueueFullError, UsageError
from pyggml_dflash.options import EngineOptions
from pyggml_dflash.requests import EngineStats, GenerationRequest, Progress, ProgressCallback, RequestState

T = TypeVar("T")
Loader = Callable[[ProgressCallback, "Loaded | None"], Loaded]  # an engine that was parked, or None


class EngineThread:
    """Loads a model on a thread of its own and serves it until closed."""

    def __init__(self, options: EngineOptions) -> None:
        """Of the options, those that say who waits for whom."""
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._queue_limit, self._prefill_share = options.queue_limit, options.prefill_share
        self._coalesce_s = options.admission_coalesce_ms / 1000
        self._n_slots = 1
        self._n_live = 0  # requests that have a slot or wait for one
        self._n_submitted = 0
        self._call: Call[Any] | None = None  # that runs
        self._changes: deque[Park | Unpark] = deque()  # for when nothing runs
        self._n_parks = 0  # that were asked for and are not carried out: no request may come before them
        self._parked = False
        self._loaded: Loaded | None = None
        self._serving: Serving | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def start(self, loader: Loader, progress: ProgressCallback | None) -> Loaded:
        """Load, then serve; returns when the model is ready or raises what loading raised.

        An interrupt while loading stops the load and frees what it had made.
        """
        ready: Future[None] = Future()  # the thread keeps it for as long as it lives
        self._thread = threading.Thread(
            target=self._main, args=(loader, progress, ready), name="dflash-engine", daemon=True
        )
        try:
            self._thread.start()
            patient(ready)
        except BaseException:
            self.close()
            raise
        assert self._loaded is not None
        return self._loaded

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
        """Queue a request; its events go to `loop` when one is given. `QueueFullError` if too many wait."""
        handle = RequestHandle(request, progress, loop, self._thread, wake=self._wake)
        self._enqueue(handle)
        return handle

    def read(self, reading: Reading[T]) -> T:
        """Read a text in a slot, as a request that waits its turn, and return what was made of its logits.

        An interrupt of this wait stops it, and so does `close`.
        """
        text = ForcedText(reading)
        self._enqueue(text)
        try:
            return patient(text.future)
        except BaseException:
            text.cancel()
            self._wake()
            raise

    def call(self, function: Callable[[EngineCore, IsCancelled], T], *, when_parked: bool = False) -> T:
        """Run `function` on the engine's thread, between two steps of what runs, and return its value.

        Its second argument tells whether it should stop, which an interrupt of this wait and `close` ask for.
        Raises `EngineParked` where there is no model, unless it is one to be called `when_parked`.
        """
        call = Call(function, when_parked)
        self._enqueue(call)
        try:
            return patient(call.future)
        except BaseException:
            call.cancel()
            raise

    def stats(self) -> EngineStats:
        """What the engine does, and did so far."""

        def read(core: EngineCore, _: IsCancelled) -> EngineStats:
            assert self._serving is not None
            return self._serving.stats()

        return self.call(read, when_parked=True)

    @property
    def alive(self) -> bool:
        """True while the thread runs, with a model or parked."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def parked(self) -> bool:
        """True while there is no model."""
        return self._parked

    def park(self, *, cancel: bool) -> None:
        """Refuse new requests, end those there are, and give the model's memory back."""
        command = Park(cancel)
        self._enqueue(command)
        patient(command.future)

    def unpark(self, progress: ProgressCallback | None) -> Loaded:
        """Load the model again; raises what that raised, and it stays parked."""
        command = Unpark(progress)
        self._enqueue(command)
        return patient(command.future)

    def _enqueue(self, command: Queued | Call[Any] | Park | Unpark) -> None:
        if threading.current_thread() is self._thread:
            raise UsageError(OWN_CALLBACK)
        check_process(self._pid)  # in a child the lock may be held for ever
        with self._lock:  # nothing may be queued behind the command that ends the thread
            self.check_open()
            if isinstance(command, Park):
                self._n_parks += 1
            elif isinstance(command, (RequestHandle, ForcedText)):
                self._count(command)
            self._commands.put(command)

    def _count(self, queued: Queued) -> None:
        if self._parked or self._n_parks:
            raise EngineParked
        n_waiting = max(0, self._n_live - self._n_slots)
        is_full = self._queue_limit is not None and self._n_live >= self._n_slots + self._queue_limit
        if is_full:
            assert self._queue_limit is not None
            raise QueueFullError(n_waiting=n_waiting, limit=self._queue_limit)
        self._n_live += 1
        if isinstance(queued, RequestHandle):
            self._n_submitted += 1
            queued.id = self._n_submitted
            n_prompt = len(queued.request.tokens)
            queued.state = RequestState(phase="queued", position=n_waiting + 1, total=n_prompt)

    def _wake(self) -> None:
        """Have the thread look at what was cancelled; called from anywhere, finalizers too."""
        self._commands.put(WAKE)

    def _has_news(self) -> bool:
        return not self._commands.empty()

    def _ended(self) -> None:
        with self._lock:
            self._n_live -= 1

    def close(self) -> None:
        """Cancel everything, free the model and end the thread; a second call does nothing."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self._closing.is_set():
                self._closing.set()
                self._commands.put(None)
        call = self._call
        if call is not None:
            call.cancel()
        thread = self._thread
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join()

    def _main(self, loader: Loader, progress: ProgressCallback | None, ready: Future[None]) -> None:
        try:
            self._loaded = self._load(loader, progress, None)
        except BaseException as error:
            ready.set_exception(error)
            return
        try:
            self._n_slots = self._core.n_slots
            ready.set_result(None)
            self._serve(loader)
        finally:
            self._refuse_rest()
            self._loaded.core.close()

    def _refuse_rest(self) -> None:
        """Let nobody wait for a thread that ends, whatever ends it."""
        with self._lock:
            self._closing.set()
        while not self._commands.empty():
            command = self._commands.get_nowait()
            if isinstance(command, (RequestHandle, ForcedText)):
                command.fail(EngineClosed("Engine"))
            elif isinstance(command, (Call, Park, Unpark)):
                command.future.set_exception(EngineClosed("Engine"))

    def _load(self, loader: Loader, progress: ProgressCallback | None, parked: Loaded | None) -> Loaded:
        def report(event: Progress) -> None:
            if self._closing.is_set():
                raise Cancelled("loading was cancelled")
            if progress is not None:
                progress(event)

        return loader(report, parked)

    def _serve(self, loader: Loader) -> None:
        assert self._loaded is not None
        serving = self._serving = Serving(
            self._loaded, self._has_news, self._ended, prefill_share=self._prefill_share
        )
        try:
            while self._take_commands(serving):
                if not serving.is_idle:
                    serving.turn()
                elif self._changes:
                    self._change(serving, loader, self._changes.popleft())
        finally:
            serving.close()
            for change in self._changes:
                change.future.set_exception(EngineClosed("Engine"))
            self._serving = None  # which knows this thread, too

    def _take_commands(self, serving: Serving) -> bool:
        """Take what is queued, and wait for it where nothing is to be done; False when it is time to end."""
        due_s: float | None = None if serving.is_idle else 0.0  # when the first of those that came begins
        while True:
            if due_s is None and not serving.is_idle:
                due_s = time.perf_counter() + self._coalesce_s
            try:
                command = self._next_command(serving, due_s)
            except queue.Empty:
                return True
            if command is None:
                return False
            if command is WAKE and due_s is not None:
                due_s = 0.0  # who cancelled is not kept waiting
            self._take(serving, command)

    def _next_command(self, serving: Serving, due_s: float | None) -> Command:
        """The next command; `queue.Empty` once something is to be done that does not wait for more."""
        if not self._commands.empty() or self._changes or (due_s is not None and not serving.has_room):
            return self._commands.get_nowait()
        if due_s is not None:
            while (rest_s := due_s - time.perf_counter()) > 0:
                with suppress(queue.Empty):
                    return self._commands.get(timeout=rest_s)
            return self._commands.get_nowait()
        if not self._parked:
            self._core.release_scratch()  # before a wait that may be long
        return self._commands.get()

    def _take(self, serving: Serving, command: Queued | Call[Any] | Park | Unpark | Wake) -> None:
        if isinstance(command, Call):
            self._run_call(self._core, command)
        elif isinstance(command, (Park, Unpark)):
            self._changes.append(command)
            if isinstance(command, Park) and command.cancel:
                serving.cancel_all()
        elif isinstance(command, Wake):
            return
        elif self._parked:  # it came before requests were refused, but behind what parked the engine
            self._ended()
            command.fail(EngineParked())
        else:
            serving.add(command)

    @property
    def _core(self) -> EngineCore:
        assert self._loaded is not None
        return self._loaded.core

    def _change(self, serving: Serving, loader: Loader, change: Park | Unpark) -> None:
        """Park or unpark; nothing runs."""
        try:
            if isinstance(change, Park):
                self._park()
                change.future.set_result(None)
            else:
                change.future.set_result(self._unpark(serving, loader, change.progress))
        except BaseException as error:
            closed = isinstance(error, Cancelled) and self._closing.is_set()
            change.future.set_exception(EngineClosed("Engine") if closed else error)

    def _park(self) -> None:
        with self._lock:
            was_parked, self._parked = self._parked, True  # whatever comes of it
            self._n_parks -= 1
        if not was_parked:
            self._core.park()

    def _unpark(self, serving: Serving, loader: Loader, progress: ProgressCallback | None) -> Loaded:
        assert self._loaded is not None
        if self._parked:
            self._loaded = self._load(loader, progress, self._loaded)
            serving.use(self._loaded)
            self._parked = False
        return self._loaded

    def _run_call(self, core: EngineCore, call: Call[Any]) -> None:
        if self._closing.is_set():
            call.future.set_exception(EngineClosed("Engine"))
            return
        if self._parked and not call.when_parked:
            call.future.set_exception(EngineParked())
            return
        self._call = call
        if self._closing.is_set():
            call.cancel()
        try:
            call.future.set_result(call.function(core, lambda: call.cancelled))
        except BaseException as error:
            closed = isinstance(error, Cancelled) and self._closing.is_set()
            call.future.set_exception(EngineClosed("Engine") if closed else error)
        self._call = None
