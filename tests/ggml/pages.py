"""Which pages of a mapped file are in memory; Linux only."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pyggml_dflash.ggml.gguf import TensorInfo


def pages_in_memory(mapping: NDArray[np.uint8]) -> set[int]:
    """Numbers of a mapped file's pages that the system holds, for whomever."""
    held = np.zeros(-(-len(mapping) // mmap.PAGESIZE), np.uint8)
    arguments = mapping.ctypes.data, len(mapping), held.ctypes.data
    kinds = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    status = ctypes.CDLL(None).mincore(*(kind(x) for kind, x in zip(kinds, arguments, strict=True)))
    assert status == 0
    return set(np.flatnonzero(held & 1).tolist())


def pages_of(tensor: TensorInfo, ids: NDArray[np.int32]) -> set[int]:
    """Numbers of the file's pages that rows of a matrix touch."""
    row = tensor.type.row_bytes(tensor.shape[0])
    starts = [tensor.offset + row * int(i) for i in ids.reshape(-1)]
    return {n for s in starts for n in range(s // mmap.PAGESIZE, (s + row - 1) // mmap.PAGESIZE + 1)}


def resident_bytes(path: Path) -> int:
    """Bytes of a file that this process has in its memory, all its mappings together."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split(maxsplit=5)
        if not first.endswith(":"):
            inside = bool(rest) and rest[-1] == str(path)
        elif inside and first == "Rss:":
            total += 1024 * int(rest[0])
    return total
