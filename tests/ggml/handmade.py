"""GGUF files put together by hand, without any check, so that they can be wrong."""

from __future__ import annotations

import struct
from pathlib import Path

from pyggml_dflash.ggml.gguf import GgufFile

# Numbers of value types in a file.
U16, U32, I32, BOOL, STR, ARRAY, U64 = 2, 4, 5, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def row(name: str | bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf(
    entries: list[bytes], rows: list[bytes], data: bytes = b"", *, version: int = 3, alignment: int = 32
) -> bytes:
    """A file made by hand, without any check; its data section begins where the format says."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(rows), len(entries)) + b"".join(entries + rows)
    return header + bytes(-len(header) % alignment) + data


def opened(folder: Path, content: bytes) -> GgufFile:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return GgufFile.open(path)
