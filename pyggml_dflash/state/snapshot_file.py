"""The file format of a stored state: self-describing, every part with a checksum. Layer 5.

    magic "dfsnap01", u32 length and u32 CRC-32 of the header, the header (JSON, UTF-8),
    the tokens (i32), then the strips in the header's order, each of these with its CRC-32 (u32) behind it.

Integers are little-endian. The header names the fingerprint, the number of tokens, the companion and
every strip with type and shape, so what a file holds and how long it is can be told from it alone. Every
claim is checked before it is used; whatever is wrong raises `SnapshotError` with a fixed reason.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from pyggml_dflash.errors import SnapshotError
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.state.fingerprint import Digest
from pyggml_dflash.state.snapshot import Contents
from pyggml_dflash.state.strips import Strip

Bytes = npt.NDArray[np.uint8]

FAMILY: Final = b"dfsnap"  # begins the files of every version of this format
MAGIC: Final = FAMILY + b"01"
START: Final = struct.Struct("<8sII")
CHECKSUM: Final = struct.Struct("<I")
MAX_HEADER_BYTES: Final = 16 * 2**20
MAX_TOKENS: Final = 2**31 - 1
MAX_FILE_BYTES: Final = 2**50

NOT_OURS: Final = "not a snapshot file"
OTHER_VERSION: Final = "file of another version of the format"
CUT_SHORT: Final = "file is cut short"
WRONG_LENGTH: Final = "file has another length than its header says"
BAD_HEADER: Final = "header is damaged"
BAD_DATA: Final = "data is damaged"


def write_snapshot(file: BinaryIO, contents: Contents, data: Callable[[int], Bytes]) -> None:
    """Write a state whose strip `i` is `data(i)`, uint8 [n_bytes]."""
    header = _encode(contents)
    file.write(START.pack(MAGIC, len(header), zlib.crc32(header)))
    file.write(header)
    _write_section(file, np.ascontiguousarray(contents.tokens, "<i4").view(np.uint8))
    for i in range(len(contents.all_strips)):
        _write_section(file, data(i))


def _write_section(file: BinaryIO, data: Bytes) -> None:
    file.write(data.data)
    file.write(CHECKSUM.pack(zlib.crc32(data.data)))


def file_bytes(contents: Contents) -> int:
    """Length of the file that `write_snapshot` makes."""
    return _file_bytes(len(_encode(contents)), contents.n_past, contents.all_strips)


def _file_bytes(n_header: int, n_past: int, strips: tuple[Strip, ...]) -> int:
    sections = [4 * n_past, *(strip.n_bytes for strip in strips)]
    return START.size + n_header + sum(sections) + CHECKSUM.size * len(sections)


class SnapshotReader:
    """An open file whose header has been checked; reads the tokens first, then any strip.

    The file belongs to the caller, who leaves it alone meanwhile.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        family = file.read(len(FAMILY))
        if family != FAMILY:
            raise SnapshotError(NOT_OURS)
        magic, n_header, checksum = START.unpack(family + self._exactly(START.size - len(FAMILY)))
        if magic != MAGIC:
            raise SnapshotError(OTHER_VERSION)
        if n_header > MAX_HEADER_BYTES:
            raise SnapshotError(BAD_HEADER)
        header = self._exactly(n_header)
        if zlib.crc32(header) != checksum:
            raise SnapshotError(BAD_HEADER)
        self.fingerprint, self.n_past, self._companion, self._strips, self._more = _decode(header)
        self.n_bytes = _file_bytes(n_header, self.n_past, self._strips + self._more)
        if os.fstat(file.fileno()).st_size != self.n_bytes:
            raise SnapshotError(WRONG_LENGTH)

    def read_contents(self) -> Contents:
        """The tokens and what strips follow."""
        tokens = np.empty(self.n_past, "<i4")
        self._section(tokens.view(np.uint8))
        tokens = tokens.astype(np.int32, copy=False)
        tokens.setflags(write=False)
        return Contents(
            tokens=tokens,
            fingerprint=self.fingerprint,
            strips=self._strips,
            companion=self._companion,
            companion_strips=self._more,
        )

    def read_strip(self, i: int, target: Bytes) -> None:
        """Read strip `i` into uint8 [n_bytes]."""
        strips = self._strips + self._more
        before = sum(strip.n_bytes + CHECKSUM.size for strip in strips[i:])
        self._file.seek(self.n_bytes - before)
        self._section(target)

    def _section(self, target: Bytes) -> None:
        self._into(target)
        (checksum,) = CHECKSUM.unpack(self._exactly(CHECKSUM.size))
        if zlib.crc32(target.data) != checksum:
            raise SnapshotError(BAD_DATA)

    def _exactly(self, n: int) -> bytes:
        data = np.empty(n, np.uint8)
        self._into(data)
        return data.tobytes()

    def _into(self, target: Bytes) -> None:
        view = target.data
        while len(view):
            n = self._file.readinto(view)  # type: ignore[attr-defined]
            if not n:
                raise SnapshotError(CUT_SHORT)
            view = view[n:]


def _encode(contents: Contents) -> bytes:
    fields = {
        "fingerprint": contents.fingerprint.hex(),
        "n_past": contents.n_past,
        "strips": _rows(contents.strips),
        "companion": contents.companion,
        "companion_strips": _rows(contents.companion_strips),
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def _rows(strips: tuple[Strip, ...]) -> list[list[Any]]:
    return [[strip.name, strip.type.name, list(strip.shape)] for strip in strips]


def _decode(header: bytes) -> tuple[Digest, int, str, tuple[Strip, ...], tuple[Strip, ...]]:
    try:
        fields = json.loads(header)
        fingerprint = bytes.fromhex(fields["fingerprint"])
        n_past, companion = fields["n_past"], fields["companion"]
        strips = tuple(_strip(row) for row in fields["strips"])
        more = tuple(_strip(row) for row in fields["companion_strips"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SnapshotError(BAD_HEADER, str(error)) from error
    if type(n_past) is not int or not 0 < n_past <= MAX_TOKENS or not isinstance(companion, str):
        raise SnapshotError(BAD_HEADER)
    if sum(strip.n_bytes for strip in strips + more) > MAX_FILE_BYTES:
        raise SnapshotError(BAD_HEADER)
    return fingerprint, n_past, companion, strips, more


def _strip(row: Any) -> Strip:
    name, type_name, shape = row
    if not isinstance(name, str) or not isinstance(shape, list) or not 1 <= len(shape) <= 4:
        raise ValueError("a strip is a name, a type and a shape")
    if not all(type(n) is int and 0 <= n <= MAX_FILE_BYTES for n in shape):
        raise ValueError("a shape is made of whole numbers")
    strip = Strip(name=name, type=ElementType[type_name], shape=tuple(shape))
    if strip.n_bytes > MAX_FILE_BYTES:
        raise ValueError("a strip is too long")
    return strip
