"""Long-lived worker processes, one per side of a comparison: one JSON line in, one JSON line out.

Both halves of the pipe are here: `Worker` for the script that compares, `serve` for the script that is
compared. Only one side computes at a time, because the next command is sent when the last is answered.
Standard library only: the peer's interpreter imports this too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

Answer = dict[str, Any]
SETTLE_S: Final = 0.05  # threads of the side that just computed spin for some milliseconds before they sleep


class WorkerError(Exception):
    """A worker refused its command or ended."""


class Worker:
    """One side of a comparison in a process of its own. Use it as a context manager."""

    def __init__(self, command: list[str], env: Mapping[str, str] | None = None) -> None:
        self._command = command
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )

    def ask(self, **command: Any) -> Answer:
        """The answer to one command. Raises `WorkerError` with what the worker says went wrong."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; its status is read below
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise WorkerError(f"{' '.join(self._command)} ended with status {status}")
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{Path(self._command[1]).name}: {answer['error']}")
        time.sleep(SETTLE_S)
        return answer

    def close(self) -> None:
        """Let the worker end, by force if it does not."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve(answer: Callable[[Answer], Answer]) -> None:
    """Answer commands from standard input until it ends.

    Standard output is kept for answers: what native code prints there goes to standard error.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            result = answer(json.loads(line))
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), file=out, flush=True)
