"""The process's memory over a storm: whether it is as much at the end as it was after the beginning.

While engines work it goes up and down by a third, as graphs come and go and engines are parked. So it is
looked at in lulls as well, when every engine is parked and has no stored states.
"""

from __future__ import annotations

import gc
import os
import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PAGE_KIB: Final = os.sysconf("SC_PAGESIZE") // 1024
WARM_UP: Final = 0.15  # of the samples; until then caches fill


def resident_kib() -> int:
    """Memory of this process that is there."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_KIB


def open_files() -> int:
    """Files, sockets and pipes of this process."""
    return len(os.listdir("/proc/self/fd"))


@dataclass(frozen=True, slots=True)
class Flatness:
    """Medians of the first and the last quarter of samples, in KiB."""

    n: int
    first: float
    last: float

    @classmethod
    def of(cls, samples: Sequence[int]) -> Flatness:
        """That of samples behind the warm-up."""
        warm = samples[int(len(samples) * WARM_UP) :]
        quarter = max(1, len(warm) // 4)
        return cls(len(warm), statistics.median(warm[:quarter]), statistics.median(warm[-quarter:]))

    @property
    def growth(self) -> float:
        """The last quarter over the first, less one."""
        return self.last / self.first - 1


class Watch(threading.Thread):
    """Samples the process's memory until stopped; whoever knows of a quiet moment adds that."""

    def __init__(self, stop: threading.Event, *, every_s: float) -> None:
        super().__init__(name="watch", daemon=True)
        self._stop_event, self._every_s = stop, every_s
        self.samples: list[int] = []
        self.quiet: list[int] = []

    def run(self) -> None:
        """Go on until the storm is over."""
        while not self._stop_event.wait(self._every_s):
            self.samples.append(resident_kib())

    def note_quiet(self) -> None:
        """Nothing runs, and all that can be let go was."""
        gc.collect()
        self.quiet.append(resident_kib())
