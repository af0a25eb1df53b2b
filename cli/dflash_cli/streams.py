"""Standard output and standard error of the command, also where they are closed, full or left by their
reader; and text that is safe to show on them. Layer 9.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import IO, Any

import click


class OutputError(click.ClickException):
    """Standard output does not take what is written to it: one line, exit 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        """The line, on standard error."""
        click.echo(f"dflash: error: {self.message}", err=True)


def guard_streams() -> None:
    """Put guards around both streams: errors of output end the command, those of notices do not.

    A broken pipe of standard output stays a `BrokenPipeError`, and is never one of standard error.
    """
    _fill_descriptors()
    sys.stdout = _guarded(sys.stdout, _refuse)
    sys.stderr = _guarded(sys.stderr, _ignore)


def printable(text: str) -> str:
    """`text` on one line, with everything that could steer a terminal escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _Guard(io.RawIOBase):
    """A descriptor's bytes; after a first failure, which `failed` is told, they are dropped."""

    def __init__(self, raw: Any, failed: Callable[[OSError], None]) -> None:
        self._raw, self._failed, self._dead = raw, failed, False

    def write(self, data: Any) -> int | None:
        """As a raw stream does."""
        if self._dead:
            return len(data)
        try:
            if self._raw is None:
                raise OSError("standard output is closed")
            n_written: int | None = self._raw.write(data)
        except OSError as error:
            self._dead = True
            self._failed(error)
            return len(data)
        return n_written

    def writable(self) -> bool:
        """True."""
        return True

    def isatty(self) -> bool:
        """True on a terminal."""
        return self._raw is not None and bool(self._raw.isatty())

    def fileno(self) -> int:
        """The descriptor; `io.UnsupportedOperation` if there is none."""
        return super().fileno() if self._raw is None else int(self._raw.fileno())


def _guarded(stream: Any, failed: Callable[[OSError], None]) -> io.TextIOWrapper:
    buffer = None if stream is None else stream.buffer
    guard = _Guard(getattr(buffer, "raw", buffer), failed)
    return io.TextIOWrapper(
        io.BufferedWriter(guard),
        encoding=getattr(stream, "encoding", "utf-8"),
        errors=getattr(stream, "errors", "backslashreplace"),
        line_buffering=guard.isatty() or failed is _ignore,
        write_through=failed is _ignore,
    )


def _refuse(error: OSError) -> None:
    if isinstance(error, BrokenPipeError):
        raise error
    raise OutputError(f"cannot write: {error.strerror or error}") from error


def _ignore(error: OSError) -> None:
    """Nobody reads the notices, which is no reason to withhold the answer."""


def _fill_descriptors() -> None:
    """Open what the shell closed on nothing, so that no file gets a number that C code writes notices to."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
