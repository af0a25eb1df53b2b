"""Writes GGUF files, version 3, from metadata and tensors given in Python. Layer 1.

Everything is checked when it is added; `write` then streams tensor bytes from arrays or iterators, so
that a file may be larger than memory. A file stands under its name only once it is complete. What is
written opens with `GgufFile`, and with ggml's reader too: tensors follow each other without gaps.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pyggml_dflash.errors import ModelFileError, UsageError
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf_part import DEFAULT_ALIGNMENT, MAX_DIMS, MAX_NAME_BYTES
from pyggml_dflash.ggml.gguf_values import (
    MAX_KEY_BYTES,
    MAX_STRING_BYTES,
    Strings,
    TypedMetadata,
    ValueType,
    quote,
)

Chunk: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]
_CHUNK_TYPES = (bytes, bytearray, memoryview, np.ndarray)

_VALUE_TYPES = {kind.dtype: kind for kind in ValueType if kind.code}
_ELEMENT_TYPES = {
    np.dtype("<" + code): ElementType[name]
    for code, name in (
        ("f4", "F32"),
        ("f2", "F16"),
        ("f8", "F64"),
        ("i1", "I8"),
        ("i2", "I16"),
        ("i4", "I32"),
        ("i8", "I64"),
    )
}
_SCALAR_INTEGERS = (ValueType.U32, ValueType.I32, ValueType.U64, ValueType.I64)
_ARRAY_INTEGERS = (ValueType.I32, ValueType.I64, ValueType.U64)


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]  # ggml order
    element: ElementType
    data: Chunk | Iterable[Chunk]

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) // self.element.block * self.element.block_bytes


class GgufWriter:
    """Collects metadata and tensors in the order given, and writes them as one file or a split set.

    Holds what it is given by reference until `write`. Every refusal is a UsageError.
    """

    def __init__(self, *, alignment: int = DEFAULT_ALIGNMENT) -> None:
        if not 8 <= alignment < 1 << 32 or alignment & (alignment - 1):
            raise UsageError(f"alignment {alignment} must be a power of two from 8 on, below 2^32")
        self._alignment = alignment
        self._metadata: dict[str, bytes] = {}
        self._tensors: dict[str, _Tensor] = {}

    def set(self, key: str, value: object, kind: ValueType | None = None) -> None:
        """Add a metadata key. Lists, tuples, 1-d arrays and `Strings` become arrays of type `kind`.

        Without `kind`: an integer is u32, or the next of i32, u64, i64 that holds it; in a list i32 or
        i64. A Python float is f32. NumPy values keep their type. `general.alignment` and `split.*`
        are the writer's own.
        """
        if key == "general.alignment" or key.startswith("split."):
            raise UsageError(f"the metadata key {quote(key)} is set by the writer itself")
        if key in self._metadata:
            raise UsageError(f"the metadata key {quote(key)} is there already")
        _check_name(key, "a metadata key", MAX_KEY_BYTES)
        self._metadata[key] = _encode_value(key, value, kind)

    def copy_metadata(self, source: TypedMetadata, *, without: Collection[str] = ()) -> None:
        """Add the keys of an opened file with the types they have there, except those `without`."""
        for key, value in source.metadata.items():
            if key in without or key == "general.alignment" or key.startswith("split."):
                continue
            self.set(key, value, ValueType[source.value_types[key].rpartition(" ")[2].upper()])

    def add_tensor(self, name: str, values: NDArray[Any]) -> None:
        """Add an array of floats or signed integers, [rows, columns] as NumPy has it."""
        element = _ELEMENT_TYPES.get(values.dtype.newbyteorder("<"))
        if element is None:
            raise UsageError(f"tensor {quote(name)}: no element type for NumPy's {values.dtype}; use add_raw")
        tensor = _Tensor(name, values.shape[::-1], element, values)
        self._check(tensor)
        self._tensors[name] = tensor

    def add_raw(
        self, name: str, data: Chunk | Iterable[Chunk], *, shape: Sequence[int], element: ElementType
    ) -> None:
        """Add a tensor as bytes that are laid out already, whole or in chunks of any size.

        `shape` is in ggml order, fastest first. An iterator is read once, by `write`, which also
        finds out whether it yields as many bytes as the shape needs.
        """
        tensor = _Tensor(name, tuple(int(n) for n in shape), element, data)
        self._check(tensor)
        if isinstance(data, _CHUNK_TYPES):
            _check_length(tensor, _bytes_of(data).nbytes)
        self._tensors[name] = tensor

    def _check(self, tensor: _Tensor) -> None:
        shape, what = tensor.shape, f"tensor {quote(tensor.name)}"
        if tensor.name in self._tensors:
            raise UsageError(f"{what} is there already")
        _check_name(tensor.name, "a tensor name", MAX_NAME_BYTES)
        if len(shape) > MAX_DIMS or any(n < 1 for n in shape):
            raise UsageError(
                f"{what} has the shape {list(shape)}; up to {MAX_DIMS} sizes from 1 on are possible"
            )
        tensor.element.row_bytes(shape[0] if shape else 1)

    def write(self, path: Path | str, *, n_parts: int = 1) -> tuple[Path, ...]:
        """Write the file, or `n_parts` files named STEM-00001-of-0000N.gguf; returns their paths.

        Replaces files of these names, all at the end: an error while writing changes none of them. A
        folder that is missing or a disk that is full is a ModelFileError.
        """
        path, tensors = Path(path), list(self._tensors.values())
        if not 1 <= n_parts <= max(1, len(tensors)):
            raise UsageError(f"{n_parts} parts: there must be 1, or up to one per tensor ({len(tensors)})")
        bounds = [len(tensors) * i // n_parts for i in range(n_parts + 1)]
        targets = part_names(path, n_parts)
        unfinished = [target.with_name(f".{target.name}.{os.getpid()}.tmp") for target in targets]
        try:
            for i, part in enumerate(unfinished):
                with part.open("wb") as file:
                    self._write_part(file, i, n_parts, tensors[bounds[i] : bounds[i + 1]])
            for part, target in zip(unfinished, targets, strict=True):
                part.replace(target)
        except OSError as error:
            raise ModelFileError(f"{path} cannot be written: {error}") from error
        finally:
            for part in unfinished:
                with contextlib.suppress(OSError):  # of a name that cannot be, or that was never made
                    part.unlink()
        return targets

    def _write_part(self, file: BinaryIO, index: int, n_parts: int, tensors: Sequence[_Tensor]) -> None:
        metadata = dict(self._metadata) if index == 0 else {}
        if self._alignment != DEFAULT_ALIGNMENT:
            metadata["general.alignment"] = _encode_value("", self._alignment, ValueType.U32)
        if n_parts > 1:
            metadata["split.no"] = _encode_value("", index, ValueType.U16)
            metadata["split.count"] = _encode_value("", n_parts, ValueType.U16)
            metadata["split.tensors.count"] = _encode_value("", len(self._tensors), ValueType.I32)
        header = _header(metadata, tensors, self._alignment)
        file.write(header)
        if tensors:
            file.write(bytes(-len(header) % self._alignment))
        for tensor in tensors:
            _write_data(file, tensor)
            file.write(bytes(-tensor.n_bytes % self._alignment))


def part_names(path: Path, n_parts: int) -> tuple[Path, ...]:
    """The files of a set of `n_parts` under the name `path`; one part is `path` itself."""
    if n_parts == 1:
        return (path,)
    stem = path.name.removesuffix(".gguf")
    return tuple(path.with_name(f"{stem}-{i:05d}-of-{n_parts:05d}.gguf") for i in range(1, n_parts + 1))


def _header(metadata: dict[str, bytes], tensors: Sequence[_Tensor], alignment: int) -> bytes:
    pieces = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, encoded in metadata.items():
        pieces += (_string(key), encoded)
    offset = 0
    for t in tensors:
        n = len(t.shape)
        pieces += (_string(t.name), struct.pack(f"<I{n}QIQ", n, *t.shape, t.element, offset))
        offset += t.n_bytes + -t.n_bytes % alignment
    return b"".join(pieces)


def _write_data(file: BinaryIO, tensor: _Tensor) -> None:
    n_written = 0
    for chunk in _chunks(tensor.data):
        n_written += chunk.nbytes
        if n_written > tensor.n_bytes:
            break
        file.write(chunk)
    _check_length(tensor, n_written)


def _chunks(data: Chunk | Iterable[Chunk]) -> Iterator[memoryview]:
    if isinstance(data, _CHUNK_TYPES):
        yield _bytes_of(data)
        return
    for chunk in data:
        yield _bytes_of(chunk)


def _bytes_of(chunk: Chunk) -> memoryview:
    """The chunk's bytes in C order, numbers little endian; copied only where it is laid out otherwise."""
    if isinstance(chunk, np.ndarray):
        flat = np.ascontiguousarray(chunk, chunk.dtype.newbyteorder("<")).reshape(-1)
        return flat.view(np.uint8).data
    return memoryview(chunk).cast("B")


def _check_length(tensor: _Tensor, n_bytes: int) -> None:
    if n_bytes != tensor.n_bytes:
        more = " or more" if n_bytes > tensor.n_bytes else ""
        raise UsageError(
            f"tensor {quote(tensor.name)} of shape {list(tensor.shape)} and type {tensor.element.label} "
            f"has {tensor.n_bytes} bytes; {n_bytes}{more} were given"
        )


def _check_name(name: str, what: str, limit: int) -> None:
    n = len(_string(name)) - 8
    if not 1 <= n <= limit or "\0" in name:
        raise UsageError(f"{quote(name)} as {what}: it must have 1 to {limit} bytes of UTF-8 and no NUL")


def _string(text: str) -> bytes:
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{quote(text)} cannot be written as UTF-8: {error.reason}") from None
    if len(encoded) > MAX_STRING_BYTES:
        raise UsageError(
            f"{quote(text)} has {len(encoded)} bytes; at most {MAX_STRING_BYTES} can be read back"
        )
    return struct.pack("<Q", len(encoded)) + encoded


def _encode_value(key: str, value: object, kind: ValueType | None) -> bytes:
    """Type numbers and bytes of a value, as they follow the key in the file."""
    if isinstance(value, (np.ndarray, np.generic)):
        if value.ndim > 1:
            raise UsageError(
                f"metadata {quote(key)}: an array of {value.ndim} dimensions, only 1 is possible"
            )
        if kind is None:
            kind = _VALUE_TYPES.get(value.dtype.newbyteorder("<"))
        value = value.tolist()
    if not isinstance(value, (list, tuple, Strings)):
        kind = _infer(key, [value], _SCALAR_INTEGERS) if kind is None else kind
        return struct.pack("<I", kind) + _encode_items(key, [value], kind)
    items = [v.item() if isinstance(v, np.generic) else v for v in value]
    kind = _infer(key, items, _ARRAY_INTEGERS) if kind is None else kind
    return struct.pack("<IIQ", ValueType.ARRAY, kind, len(items)) + _encode_items(key, items, kind)


def _encode_items(key: str, items: Sequence[Any], kind: ValueType) -> bytes:
    try:
        if kind is ValueType.STR:
            return b"".join(map(_string, items))
        if kind is ValueType.BOOL and not all(isinstance(v, bool) for v in items):
            raise TypeError
        return struct.pack(f"<{len(items)}{kind.code}", *items)
    except (struct.error, TypeError, AttributeError, OverflowError):
        shown = quote(repr(items[0] if len(items) == 1 else items))
        raise UsageError(f"metadata {quote(key)}: {shown} does not fit {kind.label}") from None


def _infer(key: str, items: Sequence[Any], integers: Sequence[ValueType]) -> ValueType:
    """The type of values of one kind; for integers the first of `integers` that holds them all."""
    kinds = {type(v) for v in items}
    if kinds == {bool}:
        return ValueType.BOOL
    if kinds == {str}:
        return ValueType.STR
    if kinds in ({float}, {int, float}):
        return ValueType.F32
    if kinds == {int}:
        least, most = min(items), max(items)
        for kind in integers:
            limits = np.iinfo(kind.dtype)
            if limits.min <= least and most <= limits.max:
                return kind
    raise UsageError(
        f"metadata {quote(key)}: no type suits {quote(repr(items))}; name one, or split the values"
    )
