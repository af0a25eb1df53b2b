"""Ownership of native objects: freed once, in order, by whoever owns them. Layer 1."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable

from pyggml_dflash.errors import BackendError, EngineClosed
from pyggml_dflash.ggml.ffi import CData, ffi, lib

Free = Callable[[CData], object]


def check(status: int, what: str) -> None:
    """Turn a ggml status into an exception; success returns."""
    if status != lib.GGML_STATUS_SUCCESS:
        names = {lib.GGML_STATUS_ALLOC_FAILED: "allocation failed", lib.GGML_STATUS_ABORTED: "aborted"}
        raise BackendError(f"{what}: {names.get(status, f'ggml status {status}')}")


def check_pointer(pointer: CData, what: str) -> CData:
    """The pointer itself, or an exception when C returned NULL."""
    if pointer == ffi.NULL:
        raise BackendError(f"{what}: ggml returned nothing")
    return pointer


def _free_leaked(free: Free, pointer: CData, parents: tuple[object, ...], what: str) -> None:
    free(pointer)  # before the warning, which may be an error
    del parents  # held until here, so that nothing is freed after what it was made from
    warnings.warn(f"{what} was not closed", ResourceWarning, stacklevel=2)


class Handle:
    """One native object: freed once, by `close`, never before what it was made from.

    The finalizer is a net: it holds the parents, warns, and frees. Collection may happen on any
    thread, so code that owns handles closes them.
    """

    __slots__ = ("__weakref__", "_free", "_net", "_ptr")

    def __init__(self, ptr: CData, free: Free, *parents: object) -> None:
        self._ptr = check_pointer(ptr, type(self).__name__)
        self._free = free
        self._net = weakref.finalize(self, _free_leaked, free, ptr, parents, type(self).__name__)
        self._net.atexit = False

    @property
    def ptr(self) -> CData:
        """The C pointer; raises after `close`."""
        if not self._net.alive:
            raise EngineClosed(type(self).__name__)
        return self._ptr

    @property
    def closed(self) -> bool:
        """True once freed."""
        return not self._net.alive

    def close(self) -> None:
        """Free the object; a second call does nothing."""
        if self._net.detach():
            self._free(self._ptr)
