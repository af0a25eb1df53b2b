"""A tensor as the layers above see it: a view of ggml's, which owns nothing. Layer 1."""

from __future__ import annotations

from dataclasses import dataclass

from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ffi import CData, c_string, ffi, lib


@dataclass(frozen=True, slots=True)
class WeightKind:
    """What a device's choice of kernel for a product with a weight depends on, but for the number of rows."""

    type: ElementType
    shape: tuple[int, int, int]  # in, out, experts
    layout: str  # ggml's name of the buffer type


class Tensor:
    """One ggml tensor; valid as long as the context and buffer behind it.

    Shapes are ggml's, fastest dimension first, always four entries.
    """

    __slots__ = ("ptr",)

    def __init__(self, ptr: CData) -> None:
        self.ptr = ptr

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Elements along each dimension."""
        ne = self.ptr.ne
        return ne[0], ne[1], ne[2], ne[3]

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Bytes from one element to the next along each dimension."""
        nb = self.ptr.nb
        return nb[0], nb[1], nb[2], nb[3]

    @property
    def type(self) -> ElementType:
        """Element type."""
        return ElementType(self.ptr.type)

    @property
    def n_elements(self) -> int:
        """Elements in all."""
        return int(lib.ggml_nelements(self.ptr))

    @property
    def n_bytes(self) -> int:
        """Bytes from the first to the last element."""
        return int(lib.ggml_nbytes(self.ptr))

    @property
    def name(self) -> str:
        """The name it was given, or ggml's."""
        return c_string(self.ptr.name)

    @property
    def is_host(self) -> bool:
        """True if its bytes lie in plain memory of this process."""
        buffer = self.buffer
        return buffer != ffi.NULL and bool(lib.ggml_backend_buffer_is_host(buffer))

    @property
    def buffer(self) -> CData:
        """ggml's buffer that its bytes lie in, also if it is a view."""
        return self.ptr.buffer if self.ptr.view_src == ffi.NULL else self.ptr.view_src.buffer

    @property
    def memory(self) -> str:
        """The kind of memory that its bytes lie in, as ggml calls it: 'CPU', 'CUDA0', 'CUDA_Host'."""
        return c_string(lib.ggml_backend_buft_name(lib.ggml_backend_buffer_get_type(self.buffer)))

    @property
    def weight_kind(self) -> WeightKind | None:
        """What products with it depend on; None if it is no weight but a view or a result."""
        if self.ptr.op != lib.GGML_OP_NONE or self.ptr.buffer == ffi.NULL:
            return None
        return WeightKind(self.type, self.shape[:3], self.memory)

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.type.name}, {list(self.shape)})"
