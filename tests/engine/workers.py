"""Workers for tests: `dflash`'s own, each in a process of its own on a free port of this machine."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pyggml_dflash import BackendError
from pyggml_dflash.ggml.rpc import Endpoint, ask_worker

HOST: Final = "127.0.0.1"
START_S: Final = 30.0


@dataclass(frozen=True)
class Worker:
    """A running worker and its device's name."""

    name: str
    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        """Let it answer nothing, its connection as it is."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it answer again."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as s:
        s.bind((HOST, 0))
        return int(s.getsockname()[1])


def start_worker(port: int | None = None, host: str = HOST) -> Worker:
    """A worker with one thread on the CPU, which answers when this returns."""
    port = free_port() if port is None else port
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-m", "pyggml_dflash", "rpc-worker", "--listen", f"{host}:{port}"]
    process = subprocess.Popen([*command, "--threads", "1"], stdout=quiet, stderr=quiet)
    end = time.monotonic() + START_S
    while True:
        try:
            ask_worker(Endpoint(host, port))
            return Worker(f"rpc://{host}:{port}", process)
        except BackendError:
            if process.poll() is not None or time.monotonic() > end:
                process.kill()
                process.wait()
                raise
            time.sleep(0.02)


@contextlib.contextmanager
def workers(n: int) -> Iterator[tuple[Worker, ...]]:
    """`n` workers, ended with the block."""
    started: list[Worker] = []
    try:
        started += [start_worker() for _ in range(n)]
        yield tuple(started)
    finally:
        for worker in started:
            worker.kill()
