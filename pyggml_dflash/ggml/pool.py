"""The scratch pool of CUDA and HIP backends: what kind it is, what it holds, and trimming it. Layer 1.

On other backends, and on builds without CUDA or HIP, there is no pool and every answer says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from pyggml_dflash.errors import BackendError
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.ffi import CData, c_string, ffi, lib

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Scratch memory of one backend, summed over its pools; bytes and counts."""

    live_bytes: int  # of legacy pools, in use by kernels
    cached_bytes: int  # of legacy pools, kept for later: what a trim would release
    vmm_bytes: int  # mapped by virtual-memory pools, which never shrink
    n_blocks: int  # cached ones
    n_pools: int
    n_legacy_pools: int
    n_graphs: int  # captured


def has_legacy_pool(backend: Backend) -> bool:
    """True once the backend has made a legacy pool; false before its first compute and on VMM pools."""
    return bool(lib.ggml_backend_cuda_has_legacy_pool(backend.ptr))


def trim_pool(*backends: Backend) -> int:
    """Give cached blocks of legacy pools back to the driver; returns the bytes released.

    Waits for queued work first and drops captured graphs, since both may still point into those
    blocks. 0 on virtual-memory pools and on backends without a pool. Every rank of every backend is
    trimmed, also when another one fails: `BackendError` then names those that did.
    """
    return sum(on_each_rank(backends, _trim_rank))


def on_each_rank(backends: Iterable[Backend], act: Callable[[CData], T]) -> list[T]:
    """What `act` gives for every backend that computes, in order; those behind a meta backend are its ranks.

    One that fails does not stop the others: their `BackendError`s are raised together at the end.
    """
    found: list[T] = []
    errors: list[BackendError] = []
    for backend in backends:
        for rank in _ranks(backend.ptr):
            try:
                found.append(act(rank))
            except BackendError as error:
                errors.append(error)
    if len(errors) > 1:
        raise BackendError("; ".join(map(str, errors))) from errors[0]
    if errors:
        raise errors[0]
    return found


def _ranks(backend: CData) -> Iterator[CData]:
    if not lib.ggml_backend_is_meta(backend):
        yield backend
        return
    for i in range(lib.ggml_backend_meta_n_backends(backend)):
        yield from _ranks(lib.ggml_backend_meta_simple_backend(backend, i))


def _trim_rank(rank: CData) -> int:
    released = int(ffi.cast("ptrdiff_t", lib.ggml_backend_cuda_trim_pool(rank)))
    if released >= 0:
        return released
    name = c_string(lib.ggml_backend_name(rank))
    if released == lib.DFLASH_TRIM_CAPTURING:
        raise BackendError(f"{name}: the pool cannot be trimmed while a graph is being captured")
    raise BackendError(f"{name}: the device failed while its pool was trimmed")


def pool_stats(backend: Backend) -> PoolStats:
    """What the backend's pools hold now; all zero on backends without a pool."""
    stats = ffi.new("struct dflash_pool_stats *")
    lib.ggml_backend_cuda_pool_stats(backend.ptr, stats)
    return PoolStats(
        live_bytes=int(stats.live_bytes),
        cached_bytes=int(stats.cached_bytes),
        vmm_bytes=int(stats.vmm_bytes),
        n_blocks=int(stats.n_blocks),
        n_pools=int(stats.n_pools),
        n_legacy_pools=int(stats.n_legacy_pools),
        n_graphs=int(stats.n_graphs),
    )
