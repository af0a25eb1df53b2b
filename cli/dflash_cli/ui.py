"""What the terminal shows: progress bars and notices on standard error, text and tables on standard
output. Layer 9.

Bars need a terminal; anywhere else standard error gets plain lines only. Tables are plain everywhere,
so that they can be searched and cut.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from dflash_cli.streams import printable
from pyggml_dflash.requests import GenerationResult, Progress, SpeculationStats

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import ProgressColumn, TaskID


def say(text: str) -> None:
    """One line on standard error, whatever `text` has in it."""
    click.echo(f"dflash: {printable(text)}", err=True)


def open_stdout() -> None:
    """Let text through whatever standard output can encode; what it cannot becomes '?', not an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def write(text: str) -> None:
    """Text as it is to standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def rate(n_tokens: int, seconds: float) -> str:
    """Tokens per second."""
    return f"{n_tokens / seconds:.1f} t/s" if seconds > 0 and n_tokens > 0 else "- t/s"


def timings_line(result: GenerationResult) -> str:
    """Tokens and rates of an answer; its first token comes out of the prefill, so decode made one less."""
    usage, timings = result.usage, result.timings
    read, decoded = usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens - 1
    spec = result.speculation
    drafts = "" if spec is None or not spec.verify_steps else f"; {drafted(spec)}"
    return (
        f"prompt {usage.prompt_tokens} tokens, {rate(read, timings.prefill_s)}; "
        f"generated {usage.completion_tokens} tokens, {rate(decoded, timings.decode_s)}; "
        f"finish: {result.finish_reason}{drafts}"
    )


def drafted(spec: SpeculationStats) -> str:
    """How far drafts carried: tokens per verify step, and plain steps where drafting did not pay."""
    plain = f", {spec.plain_steps} plain steps" if spec.plain_steps else ""
    aside = f", put aside {spec.gave_up} times" if spec.gave_up else ""
    return f"{spec.drafter} {spec.acceptance_length:.2f} tokens in {spec.verify_steps} steps{plain}{aside}"


def print_json(value: Any) -> None:
    """One JSON value, ASCII only; dataclasses become objects, numbers that JSON lacks become null."""
    write(json.dumps(plain(value), allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """`value` in the types that JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def print_table(rows: Sequence[Sequence[str]], align: str, *, indent: str = "") -> None:
    """Columns padded to their widest cell; `align` has '<' or '>' for each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)]
        click.echo((indent + "  ".join(cells)).rstrip())


class ProgressBars:
    """One bar at a time: bytes of weights, tokens while a prompt is read. Callable from any thread.

    A bar goes away when its phase ends, or with `close`, which a command calls before it prints.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._shown = sys.stderr.isatty() and not quiet
        self._lock = threading.Lock()
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._phase, self._first, self._started_s = "", 0, 0.0

    def __call__(self, progress: Progress) -> None:
        """Show how far a phase has come."""
        if not self._shown:
            return
        with self._lock:
            if self._bar is None or self._phase != progress.phase:
                self._start(progress)
            assert self._bar is not None
            assert self._task is not None
            n, seconds = progress.done - self._first, time.monotonic() - self._started_s
            self._bar.update(self._task, completed=progress.done, rate=rate(n, seconds) if n else "")
            if progress.done >= progress.total:
                self._stop()

    def close(self) -> None:
        """Take the bar away."""
        with self._lock:
            self._stop()

    def _start(self, progress: Progress) -> None:
        self._stop()
        self._phase = progress.phase
        self._bar = _prefill_bar() if progress.phase == "prefill" else _bytes_bar()
        what = {"load": "loading", "prefill": "reading the prompt", "convert": "converting"}[progress.phase]
        self._task = self._bar.add_task(what, total=progress.total, rate="")
        self._bar.start()
        self._first, self._started_s = progress.done, time.monotonic()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _bytes_bar() -> RichProgress:
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    return _bar(BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())


def _prefill_bar() -> RichProgress:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    speed = TextColumn("tokens  {task.fields[rate]}")
    return _bar(BarColumn(), MofNCompleteColumn(), speed, TimeRemainingColumn())


def _bar(*columns: ProgressColumn) -> RichProgress:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TextColumn

    return RichProgress(
        TextColumn("{task.description}"),
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,  # standard output is the model's text, wherever it goes
        redirect_stderr=False,
    )
