"""How far the engine has read a prompt, as streams tell it. Layer 8.

Members and their meaning are those of llama.cpp's server, where `return_progress` asks for them
(https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md): of the whole prompt
processed/total is read, of what had to be computed (processed - cache)/(total - cache).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pyggml_dflash.requests import Progress

INTERVAL_S: Final = 0.1  # least time between two reports on one prompt, but for the last


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptProgress:
    """One report; counts are tokens of the prompt."""

    total: int
    cache: int  # continued from a stored state
    processed: int  # read by now, those included
    time_ms: int  # since the engine began with the prompt


class Reporter:
    """Carries progress from the engine's thread to an event loop, where `deliver` gets it.

    The first report comes before anything is computed, the last one when all of the prompt is read.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[PromptProgress], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: seconds."""
        self._loop, self._deliver, self._clock = loop, deliver, clock
        self._cache: int | None = None
        self._started_s = self._told_s = 0.0

    def __call__(self, progress: Progress) -> None:
        """Called by the engine after each part of the prompt."""
        now_s = self._clock()
        if self._cache is None:
            self._cache, self._started_s = progress.done, now_s
        elif progress.done < progress.total and now_s - self._told_s < INTERVAL_S:
            return
        self._told_s = now_s
        told = PromptProgress(
            total=progress.total,
            cache=self._cache,
            processed=progress.done,
            time_ms=round(1000 * (now_s - self._started_s)),
        )
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody listens
            self._loop.call_soon_threadsafe(self._deliver, told)
