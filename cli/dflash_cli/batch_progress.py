"""How far a batch has come, on standard error: a bar on a terminal, else a line now and then. Layer 9."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Final

from dflash_cli.ui import lines_bar, rate, say
from pyggml_dflash.jsonl.files import LineBatch
from pyggml_dflash.jsonl.records import Record

LINE_EVERY_S: Final = 30.0


class BatchProgress:
    """Counts what one run of a batch does; a context manager that ends with one line on all of it."""

    def __init__(self, lines: LineBatch, *, quiet: bool) -> None:
        self._lines, self._quiet = lines, quiet
        self._started_s = self._said_s = time.monotonic()
        self._n_records = self._n_tokens = 0
        self._bar = lines_bar() if sys.stderr.isatty() and not quiet else None
        if self._bar is not None:
            total, there = lines.n_lines, lines.n_records
            self._task = self._bar.add_task("answering", total=total, completed=there, note="")

    def add(self, record: Record) -> None:
        """One more record is in the file."""
        self._n_records += 1
        self._n_tokens += record.completion_tokens
        if self._bar is not None:
            self._bar.update(self._task, completed=self._lines.n_records, note=self._note())
        elif not self._quiet and time.monotonic() - self._said_s >= LINE_EVERY_S:
            self._said_s = time.monotonic()
            left = time.strftime("%H:%M:%S", time.gmtime(self._left_s()))
            say(f"{self._lines.n_records} of {self._lines.n_lines} {self._note()}, {left} left")

    def _note(self) -> str:
        failed = f", {self._lines.n_failed} failed" if self._lines.n_failed else ""
        return f"lines, {rate(self._n_tokens, self._elapsed_s())}{failed}"

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def _left_s(self) -> float:
        return self._elapsed_s() / max(1, self._n_records) * self._lines.n_left

    def __enter__(self) -> BatchProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if not self._quiet:
            seconds, lines = self._elapsed_s(), self._lines
            say(
                f"{self._n_records} records in {seconds:.1f} s, {self._n_tokens} tokens generated, "
                f"{rate(self._n_tokens, seconds)}"
                + (f"; {lines.n_left} lines are left, --resume goes on" if lines.n_left else "")
            )
