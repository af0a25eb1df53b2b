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
from pyggml_dflash.requests import (
    NOTHING_TO_DRAFT_WITH,
    SWITCHED_OFF,
    GenerationResult,
    Progress,
    SpeculationStats,
)

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
    drafts = drafted(result)
    stored = f" ({usage.cached_tokens} stored)" if usage.cached_tokens else ""
    return (
        f"prompt {usage.prompt_tokens} tokens{stored}, {rate(read, timings.prefill_s)}; "
        f"generated {usage.completion_tokens} tokens, {rate(decoded, timings.decode_s)}; "
        f"{drafts + '; ' if drafts else ''}finish: {result.finish_reason}"
    )


def drafted(result: GenerationResult) -> str:
    """How far drafts carried, and why there were none or fewer than could be; '' if nothing needs saying."""
    spec, reason = result.speculation, result.plain_reason
    if spec is None:
        return "" if reason in (None, SWITCHED_OFF, NOTHING_TO_DRAFT_WITH) else f"no drafts, since {reason}"
    parts = []
    if spec.verify_steps:
        parts.append(f"{spec.acceptance_length:.2f} tokens in each of {spec.verify_steps} verify steps")
    if spec.plain_steps:
        parts.append(f"{spec.plain_steps} plain steps" + (f" since {reason}" if reason else ""))
    if spec.gave_up > 1:
        parts.append(f"put aside {spec.gave_up} times")
    return f"{spec.drafter} {', '.join(parts)}" if parts else ""


def drafting_lines(spec: SpeculationStats) -> list[str]:
    """How drafts did by position, and where the time went."""
    lines = []
    if spec.verify_steps:
        rates = " ".join(f"{100 * rate:.0f}%" for rate in spec.accept_rates)
        lines.append(f"{spec.accepted} of {spec.drafted} drafts accepted; by position {rates}")
        rows = ", ".join(f"{n} of {width} rows" for width, n in spec.steps_by_width.items())
        lines.append(f"verify steps: {rows}")
    times = (("draft", spec.draft_s), ("verify", spec.verify_s), ("rollback", spec.rollback_s))
    shown = ", ".join(f"{name} {1000 * s:.1f} ms" for name, s in (*times, ("plain steps", spec.plain_s)))
    return [*lines, f"time: {shown}"]


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


def lines_bar() -> RichProgress:
    """A bar of lines with a field `note` behind it."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    note = TextColumn("{task.fields[note]}")
    return _bar(BarColumn(), MofNCompleteColumn(), note, TimeRemainingColumn())


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
