"""Rows of a tensor that stays in its mapped file: read here and there, never as a whole. Layer 1.

Left alone, the system reads 128 KiB or more around every row and waits for each in turn. Here it is told not
to, and is asked for all rows of a read before the first is touched: 32,768 rows of 90 bytes take 0.25 s from
a cold disk where they took 1.8 s (local disk of a 2-core virtual machine).
"""

from __future__ import annotations

import contextlib
import mmap
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

    Touches no ggml object, and holds the mapping; any thread may use it.
    """

    def __init__(self, mapping: mmap.mmap, tensor: TensorInfo) -> None:
        if not can_expand(tensor.type):
            raise UnsupportedModelError(f"rows of type {tensor.type.label} cannot be turned into numbers")
        self.width, self.n_rows = tensor.shape
        self.row_bytes = tensor.type.row_bytes(self.width)
        self._type, self._mapping, self._offset = tensor.type, mapping, tensor.offset
        data = np.frombuffer(mapping, np.uint8, tensor.n_bytes, tensor.offset)
        self._rows = data.reshape(self.n_rows, self.row_bytes)
        start = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._advise(_RANDOM, start, tensor.offset + tensor.n_bytes - start)

    def pages(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Numbers of the file's pages that hold the rows, each once, in order."""
        first_byte = self._offset + ids.astype(np.int64) * self.row_bytes
        first, last = first_byte // mmap.PAGESIZE, (first_byte + self.row_bytes - 1) // mmap.PAGESIZE
        reach = np.arange((self.row_bytes - 2) // mmap.PAGESIZE + 2)  # pages that one row may touch
        return np.unique(np.minimum(first[:, None] + reach, last[:, None]))

    def read(self, ids: npt.NDArray[np.int32]) -> Raw:
        """Copies of the rows at `ids` [n], uint8 [n, row_bytes].

        Asking costs 0.5 us for a page that is in memory and 6 us for one that is not.
        """
        for page in self.pages(ids).tolist():
            self._advise(_WILL_NEED, page * mmap.PAGESIZE, mmap.PAGESIZE)
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

    def _advise(self, advice: int | None, start: int, n_bytes: int) -> None:
        if advice is not None:
            with contextlib.suppress(OSError):  # a file system may know no advice; rows are read all the same
                self._mapping.madvise(advice, start, n_bytes)


def can_expand(type: ElementType) -> bool:
    """True if elements of this type can be turned into single-precision numbers."""
    return type is ElementType.F32 or lib.ggml_get_type_traits(int(type)).to_float != ffi.NULL
