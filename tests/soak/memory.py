"""The process's memory over a storm: whether it is as much at the end as it was after the beginning.

While engines work it goes up and down by a third, as graphs come and go and engines are parked. So it is
looked at in lulls as well, when every engine is parked and has no stored states: what is resident once free
memory went back to the system, and what the C library and Python have handed out and not got back, which
shows a leak long before the resident memory does.
"""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import sys
import threading
from array import array
from dataclasses import dataclass, field
from typing import Final

from pyggml_dflash.ggml.heap import release_free_heap
from tests.holes import process_bytes

WARM_UP: Final = 0.15  # of the samples; until then caches fill
N_NAMES: Final = 200_000  # more than the table has room for
RESIDENT: Final = "KiB resident, all the time"
QUIET: Final = "KiB resident, in lulls"
IN_USE: Final = "KiB of the C library's heap in use, in lulls"
BLOCKS: Final = "blocks of Python's in use, in lulls"
# By itself glibc keeps what is freed: in each heap up to twice the largest block that it ever mapped, and for
# each thread some blocks of each size, which it counts as in use.
KEEP_NOTHING: Final = ":".join(
    f"glibc.malloc.{name}" for name in ("tcache_count=0", "mmap_threshold=131072", "trim_threshold=131072")
)


class _MallInfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def resident_kib() -> int | None:
    """Memory of this process that is there; None where nobody tells, as only Linux does."""
    return process_bytes() // 1024 if sys.platform == "linux" else None


def heap_in_use_kib() -> int | None:
    """What the C library has handed out; None where it does not tell, as only glibc from 2.33 on does."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return None
    mallinfo.restype = _MallInfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd) // 1024


def widen_interned() -> None:
    """Have the interpreter's table of interned strings double now: it does so once, by about 1 MiB, when as
    many came and went (names in templates that are compiled again, say) as it has room for."""
    for i in range(N_NAMES):
        sys.intern(f"a name that comes and goes: {i}")


def open_files() -> int:
    """Files, sockets and pipes of this process."""
    return len(os.listdir("/dev/fd"))


@dataclass(frozen=True, slots=True)
class Flatness:
    """Medians of the first and the last quarter of samples behind the warm-up."""

    samples: tuple[int, ...]

    @property
    def warm(self) -> tuple[int, ...]:
        """Samples behind the warm-up."""
        return self.samples[int(len(self.samples) * WARM_UP) :]

    @property
    def first(self) -> float:
        """The median of the first quarter."""
        return statistics.median(self.warm[: max(1, len(self.warm) // 4)])

    @property
    def last(self) -> float:
        """The median of the last quarter."""
        return statistics.median(self.warm[-max(1, len(self.warm) // 4) :])

    @property
    def growth(self) -> float:
        """The last quarter over the first, less one."""
        return self.last / self.first - 1


@dataclass(slots=True)
class Samples:
    """What was seen, by what it is."""

    of: dict[str, array[int]] = field(default_factory=dict)  # which makes no object of each

    def add(self, what: str, n: int | None) -> None:
        """One more; None: it cannot be known here."""
        if n is not None:
            self.of.setdefault(what, array("Q")).append(n)

    def flatness(self) -> dict[str, Flatness]:
        """That of each."""
        return {what: Flatness(tuple(samples)) for what, samples in self.of.items()}


class Watch(threading.Thread):
    """Samples the process's memory until stopped; whoever knows of a quiet moment adds that."""

    def __init__(self, stop: threading.Event, *, every_s: float) -> None:
        super().__init__(name="watch", daemon=True)
        self._stop_event, self._every_s = stop, every_s
        self.samples = Samples()

    def run(self) -> None:
        """Go on until the storm is over."""
        while not self._stop_event.wait(self._every_s):
            self.samples.add(RESIDENT, resident_kib())

    def note_quiet(self) -> None:
        """Nothing runs, and all that can be let go was."""
        gc.collect()
        release_free_heap()
        self.samples.add(QUIET, resident_kib())
        self.samples.add(IN_USE, heap_in_use_kib())
        self.samples.add(BLOCKS, sys.getallocatedblocks())
