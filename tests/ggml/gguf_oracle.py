"""What ggml's own GGUF reader finds in a good file, to compare ours with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pyggml_dflash.ggml.ffi import CData, c_string, ffi, lib
from pyggml_dflash.ggml.gguf_values import ValueType


@contextmanager
def _read(path: Path) -> Iterator[CData]:
    context = lib.gguf_init_from_file(str(path).encode(), {"no_alloc": True, "ctx": ffi.NULL})
    assert context != ffi.NULL
    try:
        yield context
    finally:
        lib.gguf_free(context)


def _value(context: CData, i: int) -> Any:
    kind = ValueType(lib.gguf_get_kv_type(context, i))
    if kind is ValueType.STR:
        return ffi.string(lib.gguf_get_val_str(context, i)).decode()
    if kind is not ValueType.ARRAY:
        return getattr(lib, f"gguf_get_val_{kind.label}")(context, i)
    kind, n = ValueType(lib.gguf_get_arr_type(context, i)), lib.gguf_get_arr_n(context, i)
    if kind is ValueType.STR:
        return [ffi.string(lib.gguf_get_arr_str(context, i, j)).decode() for j in range(n)]
    data = ffi.buffer(lib.gguf_get_arr_data(context, i), n * kind.dtype.itemsize) if n else b""
    return np.frombuffer(data, kind.dtype).tolist()


def metadata(path: Path) -> dict[str, Any]:
    """Every key with its value, arrays as lists, in file order."""
    with _read(path) as context:
        return {
            c_string(lib.gguf_get_key(context, i)): _value(context, i)
            for i in range(lib.gguf_get_n_kv(context))
        }


def tensors(path: Path) -> list[tuple[str, list[int], int, int, int]]:
    """Per tensor: name, the four sizes, type number, offset in the file, bytes."""
    with _read(path) as context:
        start = lib.gguf_get_data_offset(context)
        return [
            (
                c_string(lib.gguf_get_tensor_name(context, i)),
                ffi.unpack(lib.gguf_get_tensor_ne(context, i), 4),
                lib.gguf_get_tensor_type(context, i),
                start + lib.gguf_get_tensor_offset(context, i),
                lib.gguf_get_tensor_size(context, i),
            )
            for i in range(lib.gguf_get_n_tensors(context))
        ]
