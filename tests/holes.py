"""Free memory between blocks in use, which a heap keeps until it is asked; and what a process has in all."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Final

import pytest

N_BLOCKS: Final = 16_384
BLOCK_BYTES: Final = 4000  # too few for a mapping of their own
EVERY: Final = 64  # of these blocks one stays
HOLES_BYTES: Final = N_BLOCKS * BLOCK_BYTES * (EVERY - 1) // EVERY
NEEDS_GLIBC: Final = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc gives free pages inside a heap back"
)


def make_holes() -> list[bytes]:
    """What lies between the holes; they are free while this is held."""
    return [os.urandom(BLOCK_BYTES) for _ in range(N_BLOCKS)][::EVERY]


def process_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
