"""Runs the command line: as a process, on a pipe or a terminal, as a user does."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyggml_dflash

PICO = Path(pyggml_dflash.__file__).parent / "models" / "pico-q8_0.gguf"
COMMAND = (sys.executable, "-m", "pyggml_dflash")
ENDLESS = ("--logit-bias", "4090=-inf", "--logit-bias", "4092=-inf")  # without the tokens that end an answer
LIMIT_S = 240

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job, whose children ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def dflash(
    *args: str, stdin: str | bytes = b"", env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Outcome:
    """Run a command to its end; `stdin` is piped in, and empty unless given."""
    done = subprocess.run(
        [*COMMAND, *args],
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        timeout=LIMIT_S,
        env={**os.environ, **(env or {})},
        cwd=cwd,
    )
    return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())


def told(*args: str, stdin: str | bytes = b"") -> str:
    """Standard output of a command that ends well."""
    done = dflash(*args, stdin=stdin)
    assert done.code == 0, done.err
    return done.out


# Takes the terminal on descriptor 0 as its own, so that Ctrl-C reaches it, and becomes the command.
_TAKE_TERMINAL = (
    "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
)


@dataclass
class Terminal:
    """A terminal with a command in it; `shown` is everything that has appeared."""

    process: subprocess.Popen[bytes]
    master: int
    shown: str = field(default="")

    def type(self, text: str) -> None:
        """Press keys; '\\x03' is Ctrl-C, '\\x04' is Ctrl-D."""
        os.write(self.master, text.encode())

    def wait_for(self, text: str, *, after: int = 0) -> int:
        """Read until `text` appears behind position `after`; returns where it ends."""
        while text not in self.shown[after:]:
            assert self._read(), f"{text!r} did not appear in {self.shown!r}"
        return self.shown.index(text, after) + len(text)

    def press_until(self, key: str, text: str, *, after: int = 0) -> int:
        """Press a key, again every two seconds, until `text` appears behind `after`; returns where it ends.

        A signal that comes just before the terminal library waits for a key is noticed with the next one.
        """
        for _ in range(LIMIT_S // 2):
            self.type(key)
            while text not in self.shown[after:] and select.select([self.master], [], [], 2)[0]:
                assert self._read(), f"{text!r} did not appear in {self.shown!r}"
            if text in self.shown[after:]:
                break
        return self.shown.index(text, after) + len(text)

    def wait(self) -> int:
        """Read to the end; the exit code."""
        while self._read():
            pass
        return self.process.wait(LIMIT_S)

    def _read(self) -> bool:
        assert select.select([self.master], [], [], LIMIT_S)[0], f"nothing more than {self.shown!r}"
        try:
            data = os.read(self.master, 65536)
        except OSError:  # what Linux says when the other end is closed
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)


@contextmanager
def terminal(*args: str) -> Iterator[Terminal]:
    """A command whose input, output and errors are one terminal."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _TAKE_TERMINAL, *COMMAND, *args],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)
