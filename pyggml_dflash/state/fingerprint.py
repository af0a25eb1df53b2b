"""What a stored state belongs to, as 16 bytes: another model, layout or way to compute has others. Layer 5.

Within one process all states are of one kind. Files outlive it, so their fingerprint covers everything
that the numbers depend on: a restored state must give what a cold run would give here and now.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from pyggml_dflash.arch.base import StateLayout
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.tensor_file import TensorFile

DIGEST_BYTES: Final = 16
SAMPLE_BYTES: Final = 256  # of each tensor; one page is read, so a model of 1,000 tensors costs 4 MB
VERSION: Final = b"dflash state 1"  # another one when strips come to mean something else

Digest = bytes


def model_identity(file: TensorFile) -> Digest:
    """Equal for the same model: sizes and times of its files, headers, a sample of every tensor.

    A copy with another time counts as another model, which costs a cold run; taking an edited file for
    the one before would cost wrong text.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for path in _files_of(file):
        status = path.stat()
        digest.update(b"%d %d;" % (status.st_size, status.st_mtime_ns))
    if isinstance(file, GgufFile):
        for part in range(len(file.parts)):
            whole = file.mapping(part)
            first = min((t.offset for t in file.tensors.values() if t.part == part), default=len(whole))
            digest.update(whole[:first].data)
    for tensor in file.tensors.values():
        data = file.data(tensor)
        middle = max(0, len(data) - SAMPLE_BYTES) // 2
        digest.update(repr((tensor.name, tensor.type.name, tensor.shape)).encode())
        digest.update(data[middle : middle + SAMPLE_BYTES].data)
    return digest.digest()


def _files_of(file: TensorFile) -> list[Path]:
    if isinstance(file, GgufFile):
        return list(file.parts)
    return sorted(p for p in file.path.iterdir() if p.is_file()) if file.path.is_dir() else [file.path]


def fingerprint(model: Digest, layout: StateLayout, settings: Mapping[str, object]) -> Digest:
    """Of the model, of the layout whatever its context, and of `settings` that change numbers.

    Such as the device, its kernels' version, flash attention, the chunk.
    """
    digest = hashlib.blake2b(VERSION, digest_size=DIGEST_BYTES)
    digest.update(model)
    for t in layout.tensors:
        shape = (t.shape[0], "rows", *t.shape[2:]) if t.grows else t.shape
        digest.update(repr((t.name, t.type.name, shape, t.grows, t.positions_per_row)).encode())
    for name in sorted(settings):
        digest.update(f"{name}={settings[name]!r};".encode())
    return digest.digest()


def token_key(fingerprint: Digest, tokens: npt.NDArray[np.int32]) -> Digest:
    """The index key of a prefix, int32 [n]; whoever finds something under it compares the tokens."""
    return PrefixHash(fingerprint).extend(tokens)


class PrefixHash:
    """Keys of growing prefixes of one prompt, each token hashed once."""

    def __init__(self, fingerprint: Digest) -> None:
        self._hash = hashlib.blake2b(fingerprint, digest_size=DIGEST_BYTES)
        self._n = 0

    def extend(self, tokens: npt.NDArray[np.int32]) -> Digest:
        """The key of everything so far with `tokens` behind it."""
        self._hash.update(np.ascontiguousarray(tokens, "<i4").data)
        self._n += len(tokens)
        with_length = self._hash.copy()
        with_length.update(self._n.to_bytes(8, "little"))
        return with_length.digest()
