"""What a GGUF file may not claim, and in which words it is refused."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from pyggml_dflash.errors import DamagedFileError, ModelFileError, UnsupportedModelError
from pyggml_dflash.ggml.gguf import GgufFile
from tests.ggml.handmade import ARRAY, BOOL, STR, U32, U64, entry, gguf, opened, row, text

MODELS = Path(__file__).parents[1] / "data" / "models"

KEY = entry("a", U32, bytes(4))
DAMAGED = {
    "magic": (b"GGML" + bytes(40), "not a GGUF file: it begins with b'GGML'"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "web page": (b"<!DOCTYPE html><html><head></head></html>", "web page"),
    "checkpoint": (b"PK\3\4" + bytes(40), "convert the model to GGUF"),
    "empty": (b"", "has 0 bytes"),
    "short": (b"GGUF\3\0\0\0", "has 8 bytes"),
    "version 0": (gguf([], [], version=0), "version is 0"),
    "key count": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "counts 9223372036854775808 metadata keys"),
    "tensor count": (b"GGUF" + struct.pack("<IQQ", 3, 2**64 - 1, 0), "counts 18446744073709551615 tensors"),
    "key twice": (gguf([KEY, KEY], []), "the metadata key 'a' is there twice"),
    "empty key": (gguf([entry("", U32, bytes(4))], []), "key 0 of 1 is ''"),
    "NUL in a key": (gguf([entry("a\0b", U32, bytes(4))], []), "none of them NUL"),
    "UTF-8 of a key": (
        gguf([entry(b"a\xff", U32, bytes(4))], []),
        "key 0 of 1 at offset 32 is not valid UTF-8",
    ),
    "UTF-8 of a value": (
        gguf([entry("a", STR, text(b"\xc3"))], []),
        "value of 'a' at offset 45 is not valid",
    ),
    "value type": (gguf([entry("a", 13, bytes(4))], []), "unknown type 13; types are 0 to 12"),
    "bool": (gguf([entry("a", BOOL, b"\2")], []), "a bool that is neither 0 nor 1"),
    "bool array": (gguf([entry("a", ARRAY, struct.pack("<IQ", BOOL, 3) + b"\0\1\2")], []), "neither 0 nor 1"),
    "array length": (
        gguf([entry("a", ARRAY, struct.pack("<IQ", U32, 2**62))], []),
        "value of 'a' needs 18446744073709551616 bytes at offset",
    ),
    "number of strings": (
        gguf([entry("a", ARRAY, struct.pack("<IQ", STR, 2**61))], []),
        "value of 'a' (2305843009213693952 to read) ends beyond the file's",
    ),
    "length of a string": (
        gguf([entry("a", ARRAY, struct.pack("<IQ", STR, 2) + text("x") + struct.pack("<Q", 2**60))], []),
        "string 1 of the value of 'a' (1 to read) ends beyond",
    ),
    "UTF-8 in an array": (
        gguf([entry("a", ARRAY, struct.pack("<IQ", STR, 2) + text("x") + text(b"\x80"))], []),
        "string 1 of the value of 'a' at offset",
    ),
    "alignment 0": (gguf([entry("general.alignment", U32, bytes(4))], []), "must be a power of two"),
    "alignment 24": (gguf([entry("general.alignment", U32, b"\x18\0\0\0")], []), "alignment is 24"),
    "alignment type": (gguf([entry("general.alignment", U64, b"\x20" + bytes(7))], []), "u64; u32 is needed"),
    "alignment text": (gguf([entry("general.alignment", STR, text("32"))], []), "an integer is needed"),
    "tensor twice": (
        gguf([], [row("w", (1,)), row("w", (1,), 0, 32)], bytes(64)),
        "tensor 'w' is there twice",
    ),
    "tensor name": (
        gguf([], [row(b"\xfe", (1,))], bytes(4)),
        "name of tensor 0 of 1 at offset 32 is not valid",
    ),
    "no tensor name": (gguf([], [row("", (1,))], bytes(32)), "the name of tensor 0 of 1 is ''"),
    "dimensions": (gguf([], [row("w", (1, 1, 1, 1, 1))], bytes(4)), "has 5 dimensions; at most 4"),
    "size 0": (gguf([], [row("w", (4, 0))], bytes(32)), "tensor 'w' has the shape [4, 0]"),
    "size 2^63": (
        gguf([], [row("w", (2**63, 2**63))], bytes(32)),
        "tensor 'w' needs bytes 96..3402823669209384",
    ),
    "half a block": (
        gguf([], [row("w", (48,), 2)], bytes(64)),
        "rows of 48 elements, not a whole number of q4_0",
    ),
    "k-quant of narrow rows": (
        gguf([], [row("per_layer_token_embd.weight", (160, 64), 12)], bytes(160 * 64)),
        "tensor 'per_layer_token_embd.weight' has rows of 160 elements, not a whole number of q4_k blocks of "
        "256; iq4_nl, q5_0, q8_0 or f16 would fit, so quantise this tensor to another type",
    ),
    "scalar block": (
        gguf([], [row("w", (), 8)], bytes(64)),
        "rows of 1 elements, not a whole number of q8_0 blocks of 32; f16 would",
    ),
    "misaligned": (gguf([], [row("w", (1,), 0, 8)], bytes(64)), "tensor 'w' begins at 72, no multiple of 32"),
    "offset": (gguf([], [row("w", (1,), 0, 64)], bytes(64)), "'w' needs bytes 128..132, the file has 128"),
    "offset 2^64": (gguf([], [row("w", (1,), 0, 2**64 - 32)], bytes(64)), "the file has 128"),
    "overlap": (
        gguf([], [row("v", (1,), 0, 32), row("w", (16,), 0, 0)], bytes(64)),
        "tensors 'w' and 'v' overlap at byte 128",
    ),
}
UNSUPPORTED = {
    "version 1": (gguf([], [], version=1), "version 1 is too old"),
    "version 4": (gguf([], [], version=4), "version 4 is newer"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "array of arrays": (
        gguf([entry("a", ARRAY, struct.pack("<IQ", ARRAY, 1) + struct.pack("<IQ", U32, 0))], []),
        "array of arrays",
    ),
    "long key": (gguf([entry("k" * 65_536, U32, bytes(4))], []), "65536 bytes long; at most 65535"),
    "long name": (gguf([], [row("w" * 64, (1,))], bytes(4)), "64 bytes long; at most 63"),
    "element type": (
        gguf([], [row("w", (1,), 43)], bytes(4)),
        "element type 43, which this ggml does not know",
    ),
    "removed type": (
        gguf([], [row("w", (32,), 31)], bytes(32)),
        "Q4_0_4_4, which ggml has dropped; use the Q4_0",
    ),
    "many keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, 65_537) + bytes(14 * 65_537), "at most 65536"),
}


@pytest.mark.parametrize(("content", "words"), DAMAGED.values(), ids=DAMAGED)
def test_contradictions_are_damage(content: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(DamagedFileError) as caught:
        opened(tmp_path, content)
    assert words in str(caught.value)
    assert str(tmp_path / "model.gguf") in str(caught.value)


@pytest.mark.parametrize(("content", "words"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_sound_files_of_another_kind_are_unsupported(content: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        opened(tmp_path, content)
    assert words in str(caught.value)
    assert str(tmp_path / "model.gguf") in str(caught.value)


def test_a_cut_file_names_the_tensor_with_needed_and_present_size(tmp_path: Path) -> None:
    content = (MODELS / "llama-tiny-Q8_0.gguf").read_bytes()
    with GgufFile.open(MODELS / "llama-tiny-Q8_0.gguf") as file:
        last = max(file.tensors.values(), key=lambda t: t.offset)
    end = last.offset + last.n_bytes
    for size in (end - 1, last.offset + 1):
        with pytest.raises(DamagedFileError) as caught:
            opened(tmp_path, content[:size])
        assert f"tensor '{last.name}' needs bytes {last.offset}..{end}, the file has {size}" in str(
            caught.value
        )


def test_a_false_count_costs_no_memory(tmp_path: Path) -> None:
    strings = entry("a", ARRAY, struct.pack("<IQ", STR, 9_999) + bytes(8 * 9_998) + b"cut")
    content = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + strings
    (tmp_path / "m.gguf").write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedFileError):
            GgufFile.open(tmp_path / "m.gguf")
        assert tracemalloc.get_traced_memory()[1] < 2 * len(content)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: None, "does not exist"),
        (lambda p: p.mkdir(), "is a directory; name a .gguf file in it"),
        (lambda p: os.mkfifo(p), "is not a regular file"),
        (lambda p: p.symlink_to(p), "cannot be read"),
    ],
    ids=["absent", "folder", "pipe", "loop"],
)
def test_a_path_that_is_no_file_is_named(make: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    make(path)
    with pytest.raises(ModelFileError, match=words) as caught:
        GgufFile.open(path)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 3
