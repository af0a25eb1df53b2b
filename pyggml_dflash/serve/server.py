"""Runs the application: listens, loads the model meanwhile, and stops in order. Layer 8."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

import uvicorn

from pyggml_dflash.api import Engine
from pyggml_dflash.errors import Cancelled, UsageError
from pyggml_dflash.options import EngineOptions
from pyggml_dflash.requests import Progress, ProgressCallback
from pyggml_dflash.serve.app import app_of
from pyggml_dflash.serve.service import Service
from pyggml_dflash.serve.settings import ServeOptions

BACKLOG: Final = 2048
REQUEST_S: Final = 30.0  # how long a connection may be open without a whole head of a request
LAST_WORDS_S: Final = 1.0  # for telling clients that their answers are ended, before they are hung up on
Ready = Callable[[Engine, str], None]


def serve(
    engine: EngineOptions,
    options: ServeOptions,
    *,
    progress: ProgressCallback | None = None,
    ready: Ready | None = None,
) -> None:
    """Serve a model until SIGINT or SIGTERM; raises what opening it raises.

    Listens at once, and answers 503 until the model is loaded; then calls `ready` with the engine and the
    address. When told to stop, answers may go on for `grace_s` seconds; then, or with a second signal, their
    clients are told that the server stops. A client that does not take even that is hung up on.
    """
    with listen(options.host, options.port) as listener:
        asyncio.run(_Run(engine, options, progress, ready).run(listener))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; `UsageError` if the address cannot be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        message = f"{host}:{port} cannot be listened on: {reason}"
        raise UsageError(message + _way_out(error, host, port)) from error


def _way_out(error: Exception, host: str, port: int) -> str:
    """What would work instead, for the errors that have a remedy."""
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EADDRINUSE:
        return f"; stop what uses port {port}, or pass another one with --port, 0 for one that is free"
    if code == errno.EACCES:
        return "; ports below 1024 may be reserved: pass another one with --port"
    return f"; pass an address of this machine with --host, not {host}"


def url_of(listener: socket.socket) -> str:
    """Where clients find a server."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn's server, whose stop by a signal is an end like any other.

    By itself it would cancel what still runs when its patience ends, and answer with a bare 500 or nothing;
    and it would keep connections that bring no request, until there are no descriptors for others.
    """

    def __init__(self, config: uvicorn.Config, grace_s: float, end: Callable[[], Awaitable[None]]) -> None:
        """`end` makes every answer come to an end; called when `grace_s` seconds of a stop are over."""
        super().__init__(config)
        self._grace_s, self._end = grace_s, end
        self._waiting: dict[tuple[object, object], float] = {}  # connections between requests -> since when

    async def on_tick(self, counter: int) -> bool:
        """What uvicorn does ten times a second; once a second look for connections without a request."""
        if counter % 10 == 0:
            self._close_silent(time.monotonic())
        return await super().on_tick(counter)

    def _close_silent(self, now_s: float) -> None:
        before, self._waiting = self._waiting, {}
        for connection in list(self.server_state.connections):
            cycle = getattr(connection, "cycle", None)
            if cycle is not None and not cycle.response_complete:
                continue
            since_s = self._waiting[connection, cycle] = before.get((connection, cycle), now_s)
            if now_s - since_s >= REQUEST_S:
                connection.transport.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests, and wait for those that are there."""
        late = asyncio.create_task(self._end_late())
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()

    async def hang_up(self) -> None:
        """Close what connections are left, once their clients had the time for a last word."""
        state = self.server_state
        for _ in range(2):  # what answers do once they are cut off takes a while, too
            end_s = time.monotonic() + LAST_WORDS_S
            while (state.connections or state.tasks) and time.monotonic() < end_s:
                await asyncio.sleep(0.02)
            for connection in list(state.connections):
                connection.transport.abort()

    async def _end_late(self) -> None:
        await asyncio.sleep(self._grace_s)
        await self._end()
        await self.hang_up()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM ask for an end while it serves."""
        wanted = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in wanted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Run:
    """One run of a server: its engine is opened and closed here."""

    def __init__(
        self,
        engine: EngineOptions,
        options: ServeOptions,
        progress: ProgressCallback | None,
        ready: Ready | None,
    ) -> None:
        self._engine_options, self._progress, self._ready = engine, progress, ready
        self._service = Service(options)
        config = uvicorn.Config(
            app_of(self._service), lifespan="off", log_config=None, access_log=False, server_header=False
        )
        self._server = _Server(config, options.grace_s, self._end)

    async def run(self, listener: socket.socket) -> None:
        """Serve to the end, then close the engine."""
        load = asyncio.create_task(self._load(url_of(listener)))
        try:
            await self._server.serve(sockets=[listener])
        finally:
            self._server.should_exit = True
            try:
                await load
            finally:
                await self._end()
                await self._server.hang_up()

    async def _end(self) -> None:
        """Close the engine, which ends every answer."""
        if self._service.is_ready:
            await asyncio.to_thread(self._service.engine.close)

    async def _load(self, url: str) -> None:
        """Open the engine, unless the server is told to stop before; what fails ends the server."""
        try:
            engine = await asyncio.to_thread(Engine, self._engine_options, progress=self._report)
            self._service.open(engine)
            if self._ready is not None:
                self._ready(engine, url)
        except BaseException as error:
            self._server.should_exit = True
            if not isinstance(error, Cancelled):
                raise

    def _report(self, progress: Progress) -> None:
        if self._server.should_exit:
            raise Cancelled("the server was told to stop")
        if progress.phase == "load" and progress.total:
            self._service.loaded_part = progress.done / progress.total
        if self._progress is not None:
            self._progress(progress)
