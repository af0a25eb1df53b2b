"""Rows of a tensor that stays in its mapped file: read here and there, never as a whole. Layer 1.

Left alone, the system reads 128 KiB or more around every row and waits for each in turn. Here it is told not
to, and is asked for all rows of a read before the first is touched: 32,768 rows of 90 bytes take 0.3 s from
a cold disk where they took 1.8 s (local disk of a 2-core virtual machine).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from pyggml_dflash.errors import UnsupportedModelError
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ffi import ffi, lib
from pyggml_dflash.ggml.gguf_part import TensorInfo

_WILL_NEED: Final = getattr(mmap, "MADV_WILLNEED", None)
_RANDOM: Final = getattr(mmap, "MADV_RANDOM", None)

Raw = npt.NDArray[np.uint8]


class MappedRows:
    """The rows of a matrix in a mapped file, as they lie there and as numbers.

    Touches no ggml object, and holds the mapping until closed; any thread may use it.
    """

    def __init__(self, mapping: mmap.mmap, tensor: TensorInfo) -> None:
        if not can_expand(tensor.type):
            raise UnsupportedModelError(f"rows of type {tensor.type.label} cannot be turned into numbers")
        self.width, self.n_rows = tensor.shape
        self.row_bytes = tensor.type.row_bytes(self.width)
        self._type, self._offset = tensor.type, tensor.offset
        self._mapping: mmap.mmap | None = mapping
        data = np.frombuffer(mapping, np.uint8, tensor.n_bytes, tensor.offset)
        self._rows = data.reshape(self.n_rows, self.row_bytes)
        self._advise(_RANDOM, (0,), tensor.n_bytes)

    def read(self, ids: npt.NDArray[np.int32]) -> Raw:
        """Copies of the rows at `ids` [n], uint8 [n, row_bytes].

        Asking costs 0.7 us for a row that is in memory and 6 us for one that is not.
        """
        self._advise(_WILL_NEED, (ids.astype(np.int64) * self.row_bytes).tolist(), self.row_bytes)
        return self._rows.take(ids, axis=0)

    def expand(self, raw: Raw, out: npt.NDArray[np.float32]) -> None:
        """Write rows that were read into `out`, F32 [n * width]."""
        assert out.size == raw.shape[0] * self.width
        assert out.flags.c_contiguous
        if self._type is ElementType.F32:
            out[:] = raw.reshape(-1).view(np.float32)
            return
        traits = lib.ggml_get_type_traits(int(self._type))
        traits.to_float(ffi.from_buffer(raw), ffi.from_buffer("float[]", out), out.size)

    def close(self) -> None:
        """Let the mapping go; nothing can be read any more. A second call does nothing."""
        self._mapping = None
        self._rows = np.empty((0, self.row_bytes), np.uint8)

    def _advise(self, advice: int | None, starts: Iterable[int], n_bytes: int) -> None:
        """Tell the system about the pages of runs of bytes, counted from the table's start."""
        if advice is None or self._mapping is None:
            return
        tell, offset, page = self._mapping.madvise, self._offset, mmap.PAGESIZE
        try:
            for start in starts:
                inside = (offset + start) % page
                tell(advice, offset + start - inside, inside + n_bytes)
        except OSError:
            return  # a file system may take no advice; rows are read all the same


def can_expand(type: ElementType) -> bool:
    """True if elements of this type can be turned into single-precision numbers."""
    return type is ElementType.F32 or lib.ggml_get_type_traits(int(type)).to_float != ffi.NULL
