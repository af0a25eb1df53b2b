"""Runs the application: listens, loads the model meanwhile, and stops in order. Layer 8."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from pyggml_dflash.api import Engine
from pyggml_dflash.errors import Cancelled, UsageError
from pyggml_dflash.options import EngineOptions
from pyggml_dflash.requests import Progress, ProgressCallback
from pyggml_dflash.serve.app import app_of
from pyggml_dflash.serve.service import Service
from pyggml_dflash.serve.settings import ServeOptions

BACKLOG = 2048
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
    address. When told to stop, answers may go on for `grace_s` seconds; a second signal ends them at once.
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
    """uvicorn's server, whose stop by a signal is an end like any other."""

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
        self._server = _Server(
            uvicorn.Config(
                app_of(self._service),
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=max(1, round(options.grace_s)),
            )
        )

    async def run(self, listener: socket.socket) -> None:
        """Serve to the end, then close the engine."""
        load = asyncio.create_task(self._load(url_of(listener)))
        try:
            await self._server.serve(sockets=[listener])
        finally:
            self._server.should_exit = True
            engine = await load
            if engine is not None:
                await asyncio.to_thread(engine.close)

    async def _load(self, url: str) -> Engine | None:
        """Open the engine; None if the server was told to stop before."""
        try:
            engine = await asyncio.to_thread(Engine, self._engine_options, progress=self._report)
        except Cancelled:
            return None
        except BaseException:
            self._server.should_exit = True
            raise
        self._service.open(engine)
        if self._ready is not None:
            self._ready(engine, url)
        return engine

    def _report(self, progress: Progress) -> None:
        if self._server.should_exit:
            raise Cancelled("the server was told to stop")
        if progress.phase == "load" and progress.total:
            self._service.loaded_part = progress.done / progress.total
        if self._progress is not None:
            self._progress(progress)
