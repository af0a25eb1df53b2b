"""Which of several backends runs each operation of a graph under construction. Layer 1.

Every operation is pinned where it is made: to the backend that the builder stands on, which follows the
weights. A view, and an operation that writes in place, belong to whoever holds the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.ffi import CData, ffi, lib
from pyggml_dflash.ggml.tensor import Tensor


def address(pointer: CData) -> int:
    """A pointer as a number, to find things by."""
    return int(ffi.cast("uintptr_t", pointer))


class Pins:
    """Backends by their place in `backends`; `now` is where the next operation runs."""

    __slots__ = ("_by_buffer", "_by_device", "_of", "backends", "half_links", "now")

    def __init__(self, backends: Sequence[Backend], *, half_links: bool = False) -> None:
        """`half_links`: rows of a prompt may cross between backends in half precision."""
        self.backends, self.now, self.half_links = tuple(backends), 0, half_links
        self._by_device = {address(b.device): i for i, b in enumerate(self.backends)}
        host = next((i for i, b in enumerate(self.backends) if b.is_host), None)
        if host is not None:
            self._by_device[0] = host  # memory that was mapped names no device
        self._by_buffer: dict[int, int] = {}
        self._of: dict[int, int] = {}

    @property
    def backend(self) -> Backend:
        """Where the next operation runs."""
        return self.backends[self.now]

    def put(self, operation: CData) -> None:
        """Pin an operation to where the builder stands."""
        self._of[address(operation)] = self.now

    def get(self, operation: CData) -> int | None:
        """Where an operation was pinned to; None for those that ggml made on the way to another."""
        return self._of.get(address(operation))

    def follow(self, x: Tensor) -> None:
        """Stand on the backend that holds a tensor with memory of its own, such as a weight."""
        self.now = self.home(x.ptr)

    def home(self, tensor: CData) -> int:
        """The backend in whose memory a tensor, or what it is a view of, was allocated."""
        root = tensor if tensor.view_src == ffi.NULL else tensor.view_src
        buffer = address(root.buffer)
        if buffer not in self._by_buffer:
            assert buffer, f"{Tensor(root)!r} has no memory to follow"
            device = lib.ggml_backend_buft_get_device(lib.ggml_backend_buffer_get_type(root.buffer))
            self._by_buffer[buffer] = self._by_device[address(device)]
        return self._by_buffer[buffer]
