"""Opens an engine and consumes an answer, with Ctrl-C stopping the answer and not the program. Layer 9."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Protocol

from dflash_cli.build_info import read_build
from dflash_cli.main import INTERRUPTED
from dflash_cli.ui import ProgressBars, say, write
from pyggml_dflash.api import Engine, TextStream, devices
from pyggml_dflash.options import EngineOptions
from pyggml_dflash.requests import GenerationResult


def without_states(engine: EngineOptions) -> EngineOptions:
    """The options for one answer, behind which nobody continues a state unless a folder keeps it."""
    if engine.prefix_cache_max_mib != "auto" or engine.kv_cache_dir is not None:
        return engine
    return replace(engine, prefix_cache_max_mib=0)


@contextmanager
def open_engine(options: EngineOptions, bars: ProgressBars, *, quiet: bool = False) -> Iterator[Engine]:
    """An engine for a command: says so when it runs the shipped model, or not on the hardware built for."""
    with Engine(options, progress=bars) as engine:
        bars.close()
        if options.model is None and not quiet:
            name = engine.info.name + (" and its draft" if engine.info.draft and not options.draft else "")
            say(f"no MODEL given: using the small model that ships with the package ({name})")
        if len(engine.info.devices) > 1 and not quiet:
            say(engine.info.placement)
        if options.device is None:
            warn_of_cpu(engine.info.device)
        yield engine


def warn_of_cpu(device: str) -> None:
    """Say so when `device`, which nobody asked for, is the CPU, and the build is for something faster."""
    build = read_build()
    if build is None or build.backend == "cpu":
        return
    if any(d.name == device and d.kind == "cpu" for d in devices()):
        say(
            f"built for {build.backend}, but no such device is found; running on the CPU, see 'dflash doctor'"
        )


class Cancellable(Protocol):
    """Something that runs, and stops soon after `cancel`, which any thread may call."""

    def cancel(self) -> None:
        """Ask it to stop."""


class StopOnInterrupt:
    """While open, Ctrl-C cancels `running`; the `last`-th one ends the process at once with exit code 130.

    A thread of its own reacts, told by the signal's C handler: a handler in Python has to wait until the
    main thread runs Python again, which it does not while it waits for the next piece of an answer.
    """

    def __init__(self, running: Cancellable, *, last: int) -> None:
        self._running, self._last = running, last
        self._stack = ExitStack()

    def __enter__(self) -> StopOnInterrupt:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            return self  # a background job, which the terminal's Ctrl-C does not mean
        ours, signals = socket.socketpair()
        signals.setblocking(False)
        thread = threading.Thread(target=self._watch, args=(ours,), name="dflash-interrupt", daemon=True)
        thread.start()
        with ExitStack() as stack:
            stack.callback(ours.close)
            stack.callback(thread.join)
            stack.callback(signals.close)  # ends the thread
            stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(signals.fileno()))
            stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, _do_nothing))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _watch(self, ours: socket.socket) -> None:
        n_pressed = 0
        while number := ours.recv(1):
            n_pressed += number[0] == signal.SIGINT
            if n_pressed >= self._last:
                _leave()
            if n_pressed:
                self._running.cancel()


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Keeps Ctrl-C from raising KeyboardInterrupt."""


def _leave() -> None:
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h\n")  # a bar may have hidden the cursor
    os._exit(INTERRUPTED)


def consume(stream: TextStream, bars: ProgressBars, *, show: bool = True, last: int = 2) -> GenerationResult:
    """Run an answer to its end, and print it as it comes if it is to be shown, with a line break at its end.

    Ctrl-C stops it, and the `last`-th one the process: see `StopOnInterrupt`.
    """
    with stream, StopOnInterrupt(stream, last=last):
        for piece in stream:
            bars.close()
            if show:
                write(piece.text)
        result = stream.result
    bars.close()
    if show and not result.text.endswith("\n"):
        write("\n")
    return result
