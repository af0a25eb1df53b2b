"""What a model on disk is to the rest: typed metadata, a table of tensors, their mapped bytes. Layer 1.

A GGUF file is one as it stands. Other forms are opened under the keys and names of a GGUF file, so that
nothing above has to know which form it reads.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType

import numpy as np
from numpy.typing import NDArray

from pyggml_dflash.errors import EngineClosed, UsageError
from pyggml_dflash.ggml.gguf_part import TensorInfo
from pyggml_dflash.ggml.gguf_values import MetaValue, TypedMetadata
from pyggml_dflash.ggml.mapped_rows import MappedRows


class TensorFile(TypedMetadata):
    """One model, mapped for reading; a tensor's `part` says in which of the mappings it lies.

    Close it, or use it as a context manager. The bytes stay mapped while a view of them lives; who
    hands an address to C keeps the view. Sizes are checked when opening: a file that is cut short
    afterwards, in place, ends the process at the next access (SIGBUS), so replace files by renaming.
    """

    path: Path  # as given
    tensors: Mapping[str, TensorInfo]

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, MetaValue],
        value_types: Mapping[str, str],
        tensors: Mapping[str, TensorInfo],
        maps: Sequence[mmap.mmap],
        *,
        memory: mmap.mmap | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """`memory`: bytes that are in no file, as one more part. `names`: see `shown`."""
        self.path, self.metadata, self.value_types = path, metadata, value_types
        self.tensors = MappingProxyType(dict(tensors))
        self.names = MappingProxyType(dict(names or {}))
        self._maps = list(maps)
        every = self._maps if memory is None else [*self._maps, memory]
        self._mappings: list[NDArray[np.uint8]] | None = [np.frombuffer(m, dtype=np.uint8) for m in every]
        for mapping in self._mappings:
            mapping.flags.writeable = False

    @property
    def maps(self) -> tuple[mmap.mmap, ...]:
        """The mapped files, for another view of the same bytes; empty once closed."""
        return tuple(self._maps)

    def data(self, tensor: TensorInfo) -> NDArray[np.uint8]:
        """The tensor's bytes, uint8 [n_bytes], a read-only view of the mapping."""
        if self.tensors.get(tensor.name) != tensor:
            raise UsageError(f"tensor '{tensor.name}' is not one of {self.path}")
        return self.mapping(tensor.part)[tensor.offset : tensor.offset + tensor.n_bytes]

    def mapping(self, part: int) -> NDArray[np.uint8]:
        """All bytes of a part, uint8, read-only; the address of the first is page-aligned."""
        if self._mappings is None:
            raise EngineClosed(f"file {self.path}")
        return self._mappings[part]

    def forget(self, tensor: TensorInfo) -> None:
        """Let the system drop the tensor's pages from memory; a later access reads them again."""
        if tensor.part >= len(self._maps):
            return  # in no file: they could not be read again
        start = -(-tensor.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (tensor.offset + tensor.n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._maps[tensor.part].madvise(mmap.MADV_DONTNEED, start, length)

    def rows(self, tensor: TensorInfo) -> MappedRows:
        """The rows of a matrix that is read here and there, never as a whole; also outlives the file."""
        if not self._maps:
            raise EngineClosed(f"file {self.path}")
        return MappedRows(self._maps[tensor.part], tensor)

    def close(self) -> None:
        """Let go of the mappings; each is unmapped with the last view of it. May be called twice."""
        self._mappings = None
        self._maps = []

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, {len(self.tensors)} tensors)"
