"""Long-lived tensors: a ggml context and the buffer behind it, and copies to and from NumPy. Layer 1."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pyggml_dflash.errors import BackendError, DeviceMemoryError, human_bytes
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ffi import CData, ffi, lib
from pyggml_dflash.ggml.handle import Handle, check
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.tensor import Tensor

OWN_PAGES_BYTES: Final = 2**18  # of a context; those of few tensors are smaller

DTYPES: dict[ElementType, npt.DTypeLike] = {
    ElementType.F32: np.float32,
    ElementType.F16: np.float16,
    ElementType.I8: np.int8,
    ElementType.I32: np.int32,
    ElementType.I64: np.int64,
}


class Context(Handle):
    """Room for tensor headers; their data lives elsewhere (`no_alloc`).

    That of a graph is several times what most graphs fill. It has pages of its own, which take memory once
    they are touched and go back to the system: a heap would keep them all.
    """

    __slots__ = ("n_bytes",)

    def __init__(self, n_tensors: int, graph_nodes: int = 0) -> None:
        size = lib.ggml_tensor_overhead() * n_tensors
        if graph_nodes:
            size += lib.ggml_graph_overhead_custom(graph_nodes, False)
        self.n_bytes = int(size)
        if self.n_bytes < OWN_PAGES_BYTES:
            super().__init__(_new_context(self.n_bytes, ffi.NULL), lib.ggml_free)
            return
        try:
            memory = _zero_pages(self.n_bytes)
        except MemoryError:
            raise BackendError(f"the system has no {human_bytes(self.n_bytes)} for tensor headers") from None
        base = ffi.from_buffer(memory)

        def free(ptr: CData) -> None:
            lib.ggml_free(ptr)
            ffi.release(base)
            memory.close()

        super().__init__(_new_context(self.n_bytes, base), free)


def _new_context(n_bytes: int, memory: CData) -> CData:
    params = {"mem_size": n_bytes, "mem_buffer": memory, "no_alloc": True}
    return lib.ggml_init(ffi.new("struct ggml_init_params *", params)[0])


class Buffer(Handle):
    """A piece of memory of one buffer type."""

    __slots__ = ()

    def __init__(self, ptr: CData, *parents: object) -> None:
        super().__init__(ptr, lib.ggml_backend_buffer_free, *parents)


class TensorArena:
    """Tensors that are declared first and allocated together; closed as one.

    `label` names the bytes in the ledger. `buffer_type` defaults to the backend's own.
    """

    def __init__(
        self, backend: Backend, ledger: Ledger, label: str, *, n_tensors: int, buffer_type: CData = None
    ) -> None:
        self.backend, self.label = backend, label
        self._ledger = ledger
        self._buffer_type = backend.buffer_type if buffer_type is None else buffer_type
        self._n_left = n_tensors
        self._declared: list[Tensor] = []
        self.n_bytes = 0
        self._stack = ExitStack()
        self._context = Context(n_tensors)
        self._stack.callback(self._context.close)

    def declare(self, name: str, type: ElementType, *shape: int) -> Tensor:
        """A tensor without memory; `allocate` or `place` gives it some."""
        assert self._n_left > 0, "arena declared too small"
        self._n_left -= 1
        ne = ffi.new("int64_t[]", list(shape))
        tensor = lib.ggml_new_tensor(self._context.ptr, int(type), len(shape), ne)
        lib.ggml_set_name(tensor, name.encode()[:63])
        self._declared.append(Tensor(tensor))
        return self._declared[-1]

    def measure(self) -> int:
        """Bytes that `allocate` would take."""
        return int(lib.ggml_backend_alloc_ctx_tensors_from_buft_size(self._context.ptr, self._buffer_type))

    def allocate(self, *, zero: bool = False) -> None:
        """Give every declared tensor memory; raises `DeviceMemoryError` and leaves nothing behind.

        Zeros of a host device become resident when they are first touched, so a long context costs memory as
        it fills. With a dry ledger the tensors get a buffer of no bytes: graphs over them can be built and
        measured.
        """
        wanted = self.measure()
        device = self.backend.name
        charge = self._ledger.charge(device, self.label, wanted)
        if self._ledger.dry:
            self._stack.callback(charge.release)
            self._stand_in()
            self.n_bytes = wanted
            return
        on_host = lib.ggml_backend_buft_is_host(self._buffer_type)
        try:
            if zero and on_host and self.backend.is_host:
                self._take_pages(wanted)
            else:
                self._take_buffer(zero)
        except MemoryError:
            charge.release()
            self.backend.check_alive()
            free = self._ledger.free(device, self.backend.memory_free())
            raise DeviceMemoryError(what=self.label, wanted=wanted, free=free, device=device) from None
        self._stack.callback(charge.release)
        self.n_bytes = wanted

    def _take_buffer(self, zero: bool) -> None:
        buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(self._context.ptr, self._buffer_type)
        if buffer == ffi.NULL:
            raise MemoryError
        self._stack.callback(Buffer(buffer, self._context).close)
        if zero:
            lib.ggml_backend_buffer_clear(buffer, 0)

    def _take_pages(self, n_bytes: int) -> None:
        """Lay the tensors into fresh pages of the system's, which it hands out as zeros."""
        memory = _zero_pages(max(1, n_bytes))
        self._stack.callback(memory.close)
        base = ffi.from_buffer(memory)
        self._stack.callback(ffi.release, base)
        buffer = Buffer(lib.ggml_backend_cpu_buffer_from_ptr(base, len(memory)), self._context, memory)
        self._stack.callback(buffer.close)
        layout = ffi.new("struct ggml_tallocr *", lib.ggml_tallocr_new(buffer.ptr))
        for tensor in self._declared:
            check(lib.ggml_tallocr_alloc(layout, tensor.ptr), f"placing {self.label}")

    def _stand_in(self) -> None:
        """Tell ggml that the tensors lie in a buffer of this type, so that no graph allocates them."""
        buffer = Buffer(lib.ggml_backend_buft_alloc_buffer(self._buffer_type, 0), self._context)
        self._stack.callback(buffer.close)
        for tensor in self._declared:
            tensor.ptr.buffer = buffer.ptr

    def close(self) -> None:
        """Free the tensors; a second call does nothing."""
        self._declared.clear()
        self._stack.close()


def _zero_pages(n_bytes: int) -> mmap.mmap:
    """Private memory of zeros; raises `MemoryError`."""
    try:
        if sys.platform == "win32":
            return mmap.mmap(-1, n_bytes)
        return mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError from error


Home = Callable[[str], Backend]  # by a tensor's name, the backend that holds it


class SpreadArena:
    """Tensors of several backends that are declared and allocated together: each where `home` says."""

    def __init__(self, home: Home, ledger: Ledger, label: str, *, n_tensors: int) -> None:
        self._home, self._ledger, self._label, self._n_tensors = home, ledger, label, n_tensors
        self._arenas: dict[str, TensorArena] = {}
        self._stack = ExitStack()

    @property
    def n_bytes(self) -> int:
        """Bytes allocated, on all devices together."""
        return sum(arena.n_bytes for arena in self._arenas.values())

    def declare(self, name: str, type: ElementType, *shape: int) -> Tensor:
        """A tensor without memory, on the backend that holds what has its name."""
        backend = self._home(name)
        if backend.name not in self._arenas:
            arena = TensorArena(backend, self._ledger, self._label, n_tensors=self._n_tensors)
            self._stack.callback(arena.close)
            self._arenas[backend.name] = arena
        return self._arenas[backend.name].declare(name, type, *shape)

    def allocate(self, *, zero: bool = False) -> None:
        """Give every tensor memory; raises `DeviceMemoryError`, after which only `close` is left to do."""
        for arena in self._arenas.values():
            arena.allocate(zero=zero)

    def close(self) -> None:
        """Free the tensors; a second call does nothing."""
        self._stack.close()


class MappedArena:
    """Tensors that lie in memory somebody else owns, such as a mapped file; host devices only."""

    def __init__(self, memory: npt.NDArray[np.uint8], *, n_tensors: int) -> None:
        self._memory = memory
        self._base = ffi.cast("char *", ffi.from_buffer(memory))
        self._context = Context(n_tensors)
        self._buffer = Buffer(
            lib.ggml_backend_cpu_buffer_from_ptr(self._base, memory.nbytes), self._context, memory
        )
        lib.ggml_backend_buffer_set_usage(self._buffer.ptr, lib.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)

    def place(self, name: str, type: ElementType, shape: tuple[int, ...], offset: int) -> Tensor:
        """The tensor whose first byte lies `offset` bytes into the memory."""
        ne = ffi.new("int64_t[]", list(shape))
        tensor = lib.ggml_new_tensor(self._context.ptr, int(type), len(shape), ne)
        lib.ggml_set_name(tensor, name.encode()[:63])
        assert offset + lib.ggml_nbytes(tensor) <= self._memory.nbytes
        check(lib.ggml_backend_tensor_alloc(self._buffer.ptr, tensor, self._base + offset), f"placing {name}")
        return Tensor(tensor)

    def close(self) -> None:
        """Forget the tensors; the memory stays its owner's."""
        self._buffer.close()
        self._context.close()


def host_view(tensor: Tensor) -> npt.NDArray[Any]:
    """The elements of a contiguous host tensor as an array, without a copy, in NumPy's order."""
    dtype = np.dtype(DTYPES[tensor.type])
    flat = np.frombuffer(ffi.buffer(ffi.cast("char *", tensor.ptr.data), tensor.n_bytes), dtype)
    return flat.reshape(tensor.shape[::-1])


def write(tensor: Tensor, data: npt.NDArray[Any] | memoryview, offset: int = 0) -> None:
    """Copy bytes into a tensor, `offset` bytes from its start; returns when they are there."""
    source = ffi.from_buffer(data)
    n_bytes = len(source)
    assert offset + n_bytes <= tensor.n_bytes
    lib.ggml_backend_tensor_set(tensor.ptr, source, offset, n_bytes)


def read(tensor: Tensor) -> npt.NDArray[Any]:
    """A copy of a contiguous tensor's elements, in NumPy's order (slowest dimension first)."""
    data = np.empty(tensor.shape[::-1], DTYPES[tensor.type])
    lib.ggml_backend_tensor_get(tensor.ptr, ffi.from_buffer(data), 0, data.nbytes)
    return data


def read_bytes(tensor: Tensor, offset: int, n_bytes: int) -> bytes:
    """`n_bytes` of a tensor from byte `offset` on."""
    data = bytearray(n_bytes)
    lib.ggml_backend_tensor_get(tensor.ptr, ffi.from_buffer(data), offset, n_bytes)
    return bytes(data)


def zero(tensor: Tensor, offset: int = 0, n_bytes: int | None = None) -> None:
    """Fill a tensor, or `n_bytes` from `offset` on, with zero bytes."""
    lib.ggml_backend_tensor_memset(
        tensor.ptr, 0, offset, tensor.n_bytes - offset if n_bytes is None else n_bytes
    )
