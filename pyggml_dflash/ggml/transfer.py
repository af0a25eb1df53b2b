"""Copies of bytes between tensors, queued on a backend's stream. Layer 1.

Either side may lie on the device or in system memory; the copies are contiguous runs of bytes, whatever
the element types.
"""

from __future__ import annotations

from types import TracebackType

from pyggml_dflash.ggml.arena import Context
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.ffi import CData, ffi, lib
from pyggml_dflash.ggml.handle import check
from pyggml_dflash.ggml.pins import Pins
from pyggml_dflash.ggml.tensor import Tensor


class Transfer:
    """A run of copies behind the work that a backend and its peers have queued: done once `wait` returns.

    Both tensors must live until then. Used as a context manager it waits at the end, also after an error.
    """

    __slots__ = ("_backends", "_headers", "_pins")

    def __init__(self, backend: Backend) -> None:
        self._backends, self._pins = backend.all, Pins(backend.all)
        self._headers: list[Context] = []

    def _stream(self, tensor: Tensor) -> CData:
        """The stream of the backend that holds a tensor."""
        own = self._backends
        return (own[0] if len(own) == 1 else own[self._pins.home(tensor.ptr)]).ptr

    def copy(self, source: Tensor, start: int, target: Tensor, to: int, n_bytes: int) -> None:
        """Queue a copy of `n_bytes` from byte `start` of `source` to byte `to` of `target`."""
        assert 0 <= start <= source.n_bytes - n_bytes
        assert 0 <= to <= target.n_bytes - n_bytes
        if target.is_host:
            there = _address(target, to)
            lib.ggml_backend_tensor_get_async(self._stream(source), source.ptr, there, start, n_bytes)
        elif source.is_host:
            here = _address(source, start)
            lib.ggml_backend_tensor_set_async(self._stream(target), target.ptr, here, to, n_bytes)
        else:
            self.copy_on_device(source, start, target, to, n_bytes)

    def copy_on_device(self, source: Tensor, start: int, target: Tensor, to: int, n_bytes: int) -> None:
        """`copy` where neither side can be reached from the system's memory."""
        headers = Context(2)
        self._headers.append(headers)  # the backend may look at them until the copy is done
        lib.ggml_backend_tensor_copy_async(
            self._stream(source),
            self._stream(target),
            _run(headers, source, start, n_bytes),
            _run(headers, target, to, n_bytes),
        )

    def wait(self) -> None:
        """Return when every copy is done."""
        for backend in self._backends:
            backend.synchronize()
        while self._headers:
            self._headers.pop().close()
        for backend in self._backends:
            backend.check_alive()

    def __enter__(self) -> Transfer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wait()


def _address(tensor: Tensor, offset: int) -> CData:
    return ffi.cast("char *", tensor.ptr.data) + offset


def _run(headers: Context, tensor: Tensor, start: int, n_bytes: int) -> CData:
    """A run of the tensor's bytes as a tensor of its own."""
    run = lib.ggml_new_tensor_1d(headers.ptr, lib.GGML_TYPE_I8, n_bytes)
    placed = lib.ggml_backend_tensor_alloc(tensor.buffer, run, _address(tensor, start))
    check(placed, f"a view of {tensor.name}")
    return run
