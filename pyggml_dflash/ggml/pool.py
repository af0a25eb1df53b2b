"""The scratch pool of CUDA and HIP backends: what kind it is, what it holds, and trimming it. Layer 1.

On other backends, and on builds without CUDA or HIP, there is no pool and every answer says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyggml_dflash.errors import BackendError
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.ffi import ffi, lib


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


def trim_pool(backend: Backend) -> int:
    """Give the legacy pool's cached blocks back to the driver; returns the bytes released.

    Waits for queued work first and drops captured graphs, since both may still point into those
    blocks. 0 on a virtual-memory pool and on backends without a pool.
    """
    released = int(ffi.cast("ptrdiff_t", lib.ggml_backend_cuda_trim_pool(backend.ptr)))
    if released >= 0:
        return released
    if released == lib.DFLASH_TRIM_CAPTURING:
        raise BackendError(f"{backend.name}: the pool cannot be trimmed while a graph is being captured")
    raise BackendError(f"{backend.name}: the device failed while its pool was trimmed")


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
