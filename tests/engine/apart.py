"""Opens models in a process of its own, so that a crash there is an outcome here.

`Apart` is the tests' side. The file run as a program is the other side: it reads one job per line, opens the
model, generates, and answers with one line. ggml ends the process on a failed check; then the answer is
missing, the outcome is `crashed`, and the next job gets a new process.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Timer
from types import TracebackType
from typing import Any, Literal

from pyggml_dflash import DflashError, Engine

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0  # a job takes milliseconds; one that never ends is killed then
MAX_LAST_WORDS = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one job; `peak_bytes` is the most memory that the process ever held.

    A warning about something that was not closed makes it `foreign`, with the error 'leak'.
    """

    kind: Literal["ran", "refused", "foreign", "crashed"]
    error: str = ""  # the class of an error
    message: str = ""  # of the error; of a crash the last words on standard error
    exit_code: int = 0
    tokens: tuple[int, ...] = ()
    peak_bytes: int = 0

    @property
    def is_sound(self) -> bool:
        """True if the model ran or was refused by one of our errors."""
        return self.kind in ("ran", "refused")


def environment() -> dict[str, str]:
    """The environment of programs that import the package and the tests."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": path, "GGML_NO_BACKTRACE": "1"}


def program(
    code: str, *arguments: object, warnings: str = "error", deadline_s: float = DEADLINE_S
) -> subprocess.CompletedProcess[str]:
    """What a Python program printed and how it ended; one that hangs is killed, and its status is -9."""
    command = [sys.executable, "-W", warnings, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    deadline = Timer(deadline_s, process.kill)
    deadline.start()
    try:
        out, err = process.communicate()
    finally:
        deadline.cancel()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


class Apart:
    """A process that opens one model after the other; a context manager."""

    def __init__(self) -> None:
        self._worker: subprocess.Popen[str] | None = None
        self._stderr, name = tempfile.mkstemp()  # a file, since nobody empties a pipe while a job runs
        os.unlink(name)

    def open(
        self, path: Path, *, prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 2, **options: object
    ) -> Outcome:
        """Open the model with these engine options, generate, close."""
        options = {"max_ctx": 64, "threads": 1} | options
        job = {"path": str(path), "prompt": list(prompt), "max_tokens": max_tokens, "options": options}
        worker = self._start()
        assert worker.stdin is not None
        assert worker.stdout is not None
        deadline = Timer(DEADLINE_S, worker.kill)
        deadline.start()
        try:
            worker.stdin.write(json.dumps(job) + "\n")
            worker.stdin.flush()
            answer = worker.stdout.readline()
        finally:
            deadline.cancel()
        return _read(answer) if answer else self._crashed()

    def _start(self) -> subprocess.Popen[str]:
        if self._worker is None:
            os.ftruncate(self._stderr, 0)
            self._worker = subprocess.Popen(
                [sys.executable, "-W", "error", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                env=environment(),
            )
        return self._worker

    def _crashed(self) -> Outcome:
        code = self._stop()
        said = os.pread(self._stderr, MAX_LAST_WORDS, 0).decode(errors="replace")[-400:]
        return Outcome(kind="crashed", message=f"exit status {code}: {said}")

    def _stop(self) -> int:
        worker, self._worker = self._worker, None
        if worker is None:
            return 0
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.close()
        worker.stdout.close()
        return worker.wait()

    def __enter__(self) -> Apart:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        os.close(self._stderr)


def _read(answer: str) -> Outcome:
    fields = json.loads(answer)
    return Outcome(**{**fields, "tokens": tuple(fields["tokens"])})


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _run(job: dict[str, Any]) -> Outcome:
    leaks: list[str] = []
    sys.unraisablehook = lambda problem: leaks.append(repr(problem.exc_value))
    outcome = _open(job)
    gc.collect()
    return outcome if not leaks else Outcome(kind="foreign", error="leak", message=" ".join(leaks))


def _open(job: dict[str, Any]) -> Outcome:
    try:
        with Engine.open(job["path"], **job["options"]) as engine:
            result = engine.generate(job["prompt"], max_tokens=job["max_tokens"], ignore_eos=True)
    except DflashError as error:
        return Outcome(
            kind="refused", error=type(error).__name__, message=str(error), exit_code=error.exit_code
        )
    except BaseException as error:
        return Outcome(kind="foreign", error=type(error).__name__, message=traceback.format_exc())
    return Outcome(kind="ran", tokens=result.tokens)


def _main() -> None:
    gc.freeze()  # what is there already is no leak, and need not be looked at again
    for line in sys.stdin:
        outcome = _run(json.loads(line))
        sys.stdout.write(json.dumps({**asdict(outcome), "peak_bytes": _peak_bytes()}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main()
