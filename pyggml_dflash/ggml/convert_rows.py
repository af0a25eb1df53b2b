"""Numbers of tensors from one element type into another, by ggml's own routines. Layer 1."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ffi import ffi, lib

LARGEST_HALF: Final = 65504.0  # of half precision
PLAIN: Final = frozenset({ElementType.F32, ElementType.F16, ElementType.BF16})


def to_single(data: NDArray[np.uint8], element: ElementType) -> NDArray[np.float32]:
    """The elements of F32, F16 or BF16 bytes in single precision, flat; exact."""
    assert element in PLAIN
    if element == ElementType.BF16:  # the upper half of a single
        return (data.view("<u2").astype("<u4") << 16).view("<f4")
    return data.view("<f4" if element == ElementType.F32 else "<f2").astype("<f4")


def from_single(values: NDArray[np.float32], element: ElementType) -> NDArray[np.uint8]:
    """Rows [n, columns] in the bytes of an element type that needs no importance matrix."""
    rows: NDArray[Any] = np.ascontiguousarray(values, "<f4")
    n_rows, n_columns = rows.shape
    out = np.empty(n_rows * element.row_bytes(n_columns), np.uint8)
    source, target = ffi.cast("float *", ffi.from_buffer(rows)), ffi.from_buffer(out)
    written = lib.ggml_quantize_chunk(int(element), source, target, 0, n_rows, n_columns, ffi.NULL)
    assert written == out.nbytes
    return out


def largest(element: ElementType) -> float:
    """The largest number that an element type of `from_single` can hold."""
    if element == ElementType.F16:
        return LARGEST_HALF
    return 127 * LARGEST_HALF if element == ElementType.Q8_0 else float(np.finfo(np.float32).max)
