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

    __slots__ = (
        "_by_buffer",
        "_by_device",
        "_host",
        "_of",
        "backends",
        "half_links",
        "near_links",
        "now",
        "stream_rows",
    )

    def __init__(
        self,
        backends: Sequence[Backend],
        *,
        half_links: bool = False,
        near_links: bool = False,
        stream_rows: int = 0,
    ) -> None:
        """`half_links`: rows of a prompt may cross between backends in half precision. `near_links`: a
        crossing costs time, its bytes hardly any. `stream_rows`: fewest rows for which experts in host memory
        are copied to whom the rows belong; 0: never."""
        self.backends, self.now = tuple(backends), 0
        self.near_links = near_links
        self.half_links, self.stream_rows = half_links, stream_rows
        self._by_device = {address(b.device): i for i, b in enumerate(self.backends)}
        self._host = next((i for i, b in enumerate(self.backends) if b.is_host), None)
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
            self._by_buffer[buffer] = self._holder(root.buffer)
        return self._by_buffer[buffer]

    def _holder(self, buffer: CData) -> int:
        """The backend of a buffer's device; the CPU's for plain memory, whatever device pinned it."""
        device = lib.ggml_backend_buft_get_device(lib.ggml_backend_buffer_get_type(buffer))
        found = self._by_device.get(address(device), self._host)
        assert found is not None
        is_pinned = lib.ggml_backend_buffer_is_host(buffer) and not self.backends[found].is_host
        return self._host if is_pinned and self._host is not None else found

    def streams(self, weight: Tensor, n_rows: int) -> bool:
        """True if a weight is copied to where the builder stands, for so many rows."""
        return (
            0 < self.stream_rows <= n_rows and self.home(weight.ptr) == self._host and self.now != self._host
        )
