"""One GGUF file, read and checked as far as its tensor table; the bytes of tensors are not touched. Layer 1.

A file is a header (magic, version, two counts), key-value metadata, a table of tensors and, from the
next multiple of the alignment on, their bytes. Every claim is held against the file's size before it
is used; a `Part` that was made has all its tensors in range, aligned and apart from each other.
"""

from __future__ import annotations

import itertools
import mmap
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType

from pyggml_dflash.errors import DamagedFileError, ModelFileError, UnsupportedModelError
from pyggml_dflash.ggml.element import REMOVED_TYPES, ElementType
from pyggml_dflash.ggml.gguf_values import (
    MAX_KEY_BYTES,
    Cursor,
    MetaValue,
    TypedMetadata,
    ValueType,
    quote,
)

HEADER_BYTES = 24
KEY_VALUE_MIN_BYTES = 14  # length and one character of the key, type, one byte of value
TENSOR_MIN_BYTES = 25  # length and one character of the name, dimension count, type, offset
MAX_ENTRIES = 65_536  # keys or tensors; bounds memory. The largest public models have some 50,000 tensors
MAX_DIMS = 4
MAX_NAME_BYTES = 63  # ggml keeps 64 with the final NUL
DEFAULT_ALIGNMENT = 32

_FOREIGN = {
    b"vers": "a Git LFS pointer, not the file itself: run `git lfs pull`",
    b"PK\3\4": "a zip archive or PyTorch checkpoint; convert the model to GGUF",
    b"<!do": "a web page, not a model file; download the file itself",
    b"<!DO": "a web page, not a model file; download the file itself",
    b"<htm": "a web page, not a model file; download the file itself",
    b"tjgg": "a GGJT file, the format before GGUF; convert the model again",
    b"lmgg": "a GGML file, the format before GGUF; convert the model again",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor's bytes are. `shape` is in ggml order, fastest first, as long as in the file."""

    name: str
    shape: tuple[int, ...]
    type: ElementType
    part: int  # index of the part file that holds it
    offset: int  # bytes from the start of that file
    n_bytes: int

    @property
    def n_elements(self) -> int:
        return prod(self.shape)


class Part(TypedMetadata):
    """One checked and mapped file: a whole model, or part `index` of the `split_count` of a set."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = _map(path)
        cursor = Cursor(path, self.data)
        self.version, n_tensors, n_keys = _read_header(cursor)
        self.metadata, self.value_types = _read_metadata(cursor, n_keys)
        self.alignment = _alignment(self)
        self.split_count = self.get_int("split.count", 0)  # 0 and 1: the whole model is in this file
        self.index = self.get_int("split.no") if self.split_count > 1 else 0
        self.tensors = _read_tensors(cursor, n_tensors, self.alignment, self.index)
        _check_extents(path, self.tensors, self.alignment, len(self.data))


def _map(path: Path) -> mmap.mmap:
    try:
        mode = path.stat().st_mode  # before opening, which waits for a writer when the path is a pipe
        if stat.S_ISDIR(mode):
            raise ModelFileError(f"{path} is a directory; name a .gguf file in it")
        if not stat.S_ISREG(mode):
            raise ModelFileError(f"{path} is not a regular file, so it cannot be mapped")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < HEADER_BYTES:
                raise DamagedFileError(
                    f"{path} has {size} bytes, fewer than the {HEADER_BYTES} of a GGUF header (truncated?)"
                )
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelFileError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path} cannot be read: {error}") from error


def _read_header(cursor: Cursor) -> tuple[int, int, int]:
    """Version, tensor count and key count, each possible in a file of this size."""
    magic = cursor.take(4, "the magic")
    if magic != b"GGUF":
        known = _FOREIGN.get(magic, f"not a GGUF file: it begins with {magic!r}, not with b'GGUF'")
        raise cursor.damaged(f"this is {known}")
    version = cursor.u32("the version")
    if version not in (2, 3):
        raise _bad_version(cursor, version)
    n_tensors, n_keys = cursor.u64("the tensor count"), cursor.u64("the key count")
    for n, least, what in (
        (n_keys, KEY_VALUE_MIN_BYTES, "metadata keys"),
        (n_tensors, TENSOR_MIN_BYTES, "tensors"),
    ):
        if n * least > cursor.size - HEADER_BYTES:
            raise cursor.damaged(
                f"the header counts {n} {what}, which need {n * least} bytes or more; "
                f"the file has {cursor.size} (truncated?)"
            )
        if n > MAX_ENTRIES:
            raise UnsupportedModelError(f"{cursor.path}: {n} {what}; at most {MAX_ENTRIES} are accepted")
    return version, n_tensors, n_keys


def _bad_version(cursor: Cursor, version: int) -> ModelFileError:
    if version & 0xFFFF == 0 and version:
        return UnsupportedModelError(
            f"{cursor.path}: the file is big-endian; only little-endian GGUF files are read"
        )
    if version == 0:
        return cursor.damaged("the GGUF version is 0")
    age = "too old: convert the model again" if version == 1 else "newer than this reader"
    return UnsupportedModelError(f"{cursor.path}: GGUF version {version} is {age}; versions 2 and 3 are read")


def _read_metadata(cursor: Cursor, n: int) -> tuple[Mapping[str, MetaValue], Mapping[str, str]]:
    values: dict[str, MetaValue] = {}
    types: dict[str, str] = {}
    for i in range(n):
        key = cursor.name(f"metadata key {i} of {n}", MAX_KEY_BYTES)
        if key in values:
            raise cursor.damaged(f"the metadata key {quote(key)} is there twice")
        values[key], types[key] = cursor.value(f"the value of {quote(key)}")
    return MappingProxyType(values), MappingProxyType(types)


def _alignment(part: Part) -> int:
    """The specification wants a multiple of 8, ggml a u32 and a power of two."""
    key = "general.alignment"
    alignment = part.get_int(key, DEFAULT_ALIGNMENT)
    if key in part.metadata and part.value_types[key] != ValueType.U32.label:
        raise DamagedFileError(f"{part.path}: {key} is {part.value_types[key]}; u32 is needed")
    if alignment < 8 or alignment & (alignment - 1):
        raise DamagedFileError(f"{part.path}: {key} is {alignment}; it must be a power of two from 8 on")
    return alignment


def _read_tensors(cursor: Cursor, n: int, alignment: int, part: int) -> list[TensorInfo]:
    """The tensor table, offsets still unchecked against the file's size."""
    rows: dict[str, tuple[tuple[int, ...], ElementType, int]] = {}
    for i in range(n):
        name = cursor.name(f"the name of tensor {i} of {n}", MAX_NAME_BYTES)
        what = f"tensor {quote(name)}"
        if name in rows:
            raise cursor.damaged(f"{what} is there twice")
        shape = _read_shape(cursor, what)
        element = _element_type(cursor, what)
        n_row = shape[0] if shape else 1
        if n_row % element.block:
            raise cursor.damaged(
                f"{what} has rows of {n_row} elements, not a whole number of {element.label} blocks of "
                f"{element.block}; {_types_for(n_row)} would fit, so quantise this tensor to another type"
            )
        rows[name] = shape, element, cursor.u64(f"the offset of {what}")
    start = -(-cursor.pos // alignment) * alignment
    return [
        TensorInfo(
            name, shape, element, part, start + offset, prod(shape) // element.block * element.block_bytes
        )
        for name, (shape, element, offset) in rows.items()
    ]


def _read_shape(cursor: Cursor, what: str) -> tuple[int, ...]:
    """None to four sizes, none of them 0; no dimension at all is a single element, as in ggml."""
    n_dims = cursor.u32(f"the dimension count of {what}")
    if n_dims > MAX_DIMS:
        raise cursor.damaged(f"{what} has {n_dims} dimensions; at most {MAX_DIMS} are possible")
    shape = tuple(cursor.u64(f"the shape of {what}") for _ in range(n_dims))
    if 0 in shape:
        raise cursor.damaged(f"{what} has the shape {list(shape)}, so no elements")
    return shape


def _element_type(cursor: Cursor, what: str) -> ElementType:
    number = cursor.u32(f"the type of {what}")
    try:
        return ElementType(number)
    except ValueError:
        known = REMOVED_TYPES.get(number, f"{number}, which this ggml does not know")
        raise UnsupportedModelError(f"{cursor.path}: {what} has the element type {known}") from None


def _types_for(n_row: int) -> str:
    """Types that quantisers give to rows of this width."""
    usual = (ElementType.IQ4_NL, ElementType.Q5_0, ElementType.Q8_0, ElementType.F16)
    *others, last = [t.label for t in usual if n_row % t.block == 0]
    return f"{', '.join(others)} or {last}" if others else last


def _check_extents(path: Path, tensors: Sequence[TensorInfo], alignment: int, size: int) -> None:
    """Every tensor aligned, inside the file and apart from the others; gaps between them are harmless."""
    for t in tensors:
        if t.offset % alignment:
            raise DamagedFileError(
                f"{path}: tensor {quote(t.name)} begins at {t.offset}, no multiple of {alignment}"
            )
        if t.offset + t.n_bytes > size:
            raise DamagedFileError(
                f"{path}: tensor {quote(t.name)} needs bytes {t.offset}..{t.offset + t.n_bytes}, "
                f"the file has {size} (truncated?)"
            )
    ordered = sorted(tensors, key=lambda t: t.offset)
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.n_bytes > after.offset:
            raise DamagedFileError(
                f"{path}: tensors {quote(before.name)} and {quote(after.name)} overlap at byte {after.offset}"
            )
