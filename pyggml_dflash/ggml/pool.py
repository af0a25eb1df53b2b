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
    """Scratch memory of one backend, summed over its legacy pools; bytes."""

    live: int
    cached: int
    n_blocks: int
    n_pools: int
    n_graphs: int


def has_legacy_pool(backend: Backend) -> bool:
    """True once the backend has made a legacy pool; false before its first compute and on VMM pools."""
    return bool(lib.ggml_backend_cuda_has_legacy_pool(backend.ptr))


def trim_pool(backend: Backend) -> int:
    """Give the legacy pool's cached blocks back to the driver; returns the bytes released.

    Waits for queued work first and drops captured graphs, since both may still point into those
    blocks. 0 on a virtual-memory pool and on backends without a pool.
    """
    released = int(lib.ggml_backend_cuda_trim_pool(backend.ptr))
    if released == 2 ** (8 * ffi.sizeof("size_t")) - 1:
        raise BackendError(f"{backend.name}: the pool cannot be trimmed while a graph is being captured")
    return released
