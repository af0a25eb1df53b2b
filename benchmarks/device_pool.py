"""Pool checks of `device_check`: has a legacy pool, trims it, computes the same afterwards.

This reaches below the package's public face on purpose, ggml's C functions included: what is checked is the
native overlay, on bare backends as well as inside an engine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from inside import on_core

from pyggml_dflash import Engine
from pyggml_dflash.engine.core import EngineCore
from pyggml_dflash.errors import BackendError
from pyggml_dflash.ggml.arena import TensorArena, read, write
from pyggml_dflash.ggml.device import Backend, DeviceInfo, backend_features, choose_device
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ffi import CData, ffi, lib
from pyggml_dflash.ggml.graph import GraphAllocator
from pyggml_dflash.ggml.handle import Handle, check, check_pointer
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.pool import PoolStats, has_legacy_pool, on_each_rank, pool_stats, trim_pool

SIZE: Final = 256
N_COLUMNS: Final = 4
CAPTURE_RELAXED: Final = 2  # cudaStreamCaptureModeRelaxed, the mode that ggml uses


class Checks(Protocol):
    """Where findings go."""

    details: dict[str, Any]

    def check(self, what: str, found: object, expected: object, holds: bool | None = None) -> None:
        """Record one."""


def expects_legacy_pool() -> bool:
    """Whether this build puts GPUs on the legacy pool: CUDA or HIP without virtual memory."""
    features = backend_features()
    return any(features.get(name, {}).get("NO_VMM") == "1" for name in ("CUDA", "ROCm", "HIP"))


class MirroredBackend(Backend):
    """A meta backend that mirrors every tensor on its ranks, all of them on one device."""

    def __init__(self, rank: DeviceInfo, device: CData | None = None) -> None:
        """`device`: what `mirrored` made; None: of one rank."""
        device = mirrored(listed(rank)) if device is None else device
        self._device, self.peers, self.half_links, self._endpoint = device, (), False, None
        Handle.__init__(self, lib.ggml_backend_dev_init(device, ffi.NULL), lib.ggml_backend_free)
        self.info = rank
        self.n_threads, self.is_busy = 1, False


def listed(device: DeviceInfo) -> CData:
    """ggml's device."""
    return lib.ggml_backend_dev_by_name(device.name.encode())


def mirrored(*devices: CData) -> CData:
    """A meta device whose ranks are on these, which may be one and the same; a meta device only alone."""
    meta = lib.dflash_mirrored_device(ffi.new("ggml_backend_dev_t[]", devices), len(devices))
    return check_pointer(meta, "meta device")


def open_backend(device: str) -> Backend:
    """A backend of its own on the device."""
    return Backend(choose_device(device), threads=1)


def open_mirrored(device: str) -> Backend:
    """A meta backend whose one rank is the device."""
    return MirroredBackend(choose_device(device))


class Product:
    """A Q4_0 matrix of 256 x 256 times a few columns, as a graph that can run again and again.

    Copies go through the backend, never through memory: a meta backend over a host device calls its
    tensors host tensors and gives them addresses that are none.
    """

    def __init__(self, backend: Backend) -> None:
        rng, ledger = np.random.default_rng(5), Ledger()
        with ExitStack() as stack:
            arena = TensorArena(backend, ledger, "tensors", n_tensors=2)
            stack.callback(arena.close)
            w = arena.declare("w", ElementType.Q4_0, SIZE, SIZE)
            x = arena.declare("x", ElementType.F32, SIZE, N_COLUMNS)
            arena.allocate()
            blocks = rng.integers(0, 256, (SIZE * SIZE // 32, 18), np.uint8)
            blocks[:, :2] = np.array([0.01], "<f2").view(np.uint8)
            write(w, blocks.reshape(-1))
            write(x, rng.normal(size=SIZE * N_COLUMNS).astype(np.float32))
            self._graph = GraphBuilder(64)
            stack.callback(self._graph.close)
            self._out = self._graph.output(self._graph.mul_mat(w, x))
            allocator = GraphAllocator(backend, ledger, "graph")
            stack.callback(allocator.close)
            allocator.place(self._graph)
            self._backend = backend
            self._stack = stack.pop_all()

    def run(self, n: int) -> bytes:
        """The output after `n` runs; ggml records a CUDA graph at the second or third, and replays it."""
        for _ in range(n):
            check(lib.ggml_backend_graph_compute(self._backend.ptr, self._graph.graph), "product")
        data: bytes = read(self._out).tobytes()
        return data

    def close(self) -> None:
        """Free it."""
        self._stack.close()


def check_product(report: Checks, backend: Backend) -> None:
    """Legacy pool before and after computing; trims; equal output afterwards; freeing."""
    legacy = expects_legacy_pool()
    try:
        report.check("legacy pool before the first compute", has_legacy_pool(backend), False)
        with closing(Product(backend)) as product:
            before = product.run(4)
            stats = pool_stats(backend)
            report.details["stats_before_trim"] = asdict(stats)
            report.check("legacy pool after it", has_legacy_pool(backend), legacy)
            _check_trims(report, trim_pool(backend), trim_pool(backend))
            n_graphs = 0 if legacy else stats.n_graphs
            report.check("captured graphs after the trims", pool_stats(backend).n_graphs, n_graphs)
            report.details["stats_after_trim"] = asdict(pool_stats(backend))
            report.check(
                "output bytes afterwards", "equal" if product.run(4) == before else "differ", "equal"
            )
            report.details["stats_at_end"] = asdict(pool_stats(backend))
    finally:
        backend.close()
    report.check("backend closes", True, True)


def _check_trims(report: Checks, first: int, second: int) -> None:
    if expects_legacy_pool():
        report.check("first trim releases bytes", first, "> 0", first > 0)
    else:
        report.check("first trim, no legacy pool", first, 0)
    report.check("second trim", second, 0)


def check_engine(report: Checks, engine: Engine) -> None:
    """The same inside an engine, on its own thread, around two greedy answers."""
    legacy = expects_legacy_pool()

    def backend(core: EngineCore) -> Backend:
        return core._forwards._backend

    prompt = engine.tokenize("<|im_start|>user\nTell me a story about a shy fox.<|im_end|>\n" * 20)
    report.details["prompt_tokens"] = len(prompt)
    found = on_core(engine, lambda core: has_legacy_pool(backend(core)))
    report.check("legacy pool before the first compute", found, False)
    before = engine.generate(prompt, max_tokens=64, ignore_eos=True).tokens
    report.check("legacy pool after it", on_core(engine, lambda core: has_legacy_pool(backend(core))), legacy)
    report.details["stats_before_trim"] = asdict(on_core(engine, lambda core: pool_stats(backend(core))))
    first, second = on_core(engine, lambda core: (trim_pool(backend(core)), trim_pool(backend(core))))
    _check_trims(report, first, second)
    report.details["stats_after_trim"] = asdict(on_core(engine, lambda core: pool_stats(backend(core))))
    after = engine.generate(prompt, max_tokens=64, ignore_eos=True).tokens
    report.check("tokens are the same afterwards", before == after, True)
    report.details["stats_at_end"] = asdict(on_core(engine, lambda core: pool_stats(backend(core))))


def check_capture(report: Checks, backend: Backend) -> None:
    """A trim while the backend's stream records: refused, pool and graphs as they were, then possible.

    No function of ggml leaves a capture open, so one is begun from outside, with the CUDA runtime that is
    loaded, on the stream found in the backend's own structure.
    """
    try:
        with closing(Product(backend)) as product:
            before = product.run(4)
            if not has_legacy_pool(backend):
                report.check("trim without a legacy pool", trim_pool(backend), 0)
                return
            stats = pool_stats(backend)
            with _recording(backend.ptr, backend):
                refused = _trim_refused(backend)
            report.check("trim inside a capture", refused, "refused", refused.startswith("refused"))
            report.check("pool and graphs after it", pool_stats(backend), stats)
            report.check("output bytes are the same afterwards", product.run(2) == before, True)
            released = trim_pool(backend)
            report.check("trim outside", released, "> 0", released > 0)
    finally:
        backend.close()


def check_ranks(report: Checks, device: str) -> None:
    """Two and three ranks on one device: all are trimmed, also beside one whose stream records.

    Nested ones cannot be asked here: tensors of theirs end the process.
    """
    rank = choose_device(device)
    one = listed(rank)
    legacy = expects_legacy_pool()
    for n in (2, 3):
        name, backend = f"{n} ranks", MirroredBackend(rank, mirrored(*n * [one]))
        try:
            with closing(Product(backend)) as product:
                before = product.run(4)
                stats = pool_stats(backend)
                report.check(f"{name}: legacy pools", stats.n_legacy_pools, n if legacy else 0)
                refused, left = _trim_beside_a_capture(backend) if legacy else ("refused: no pool", stats)
                report.check(f"{name}: trim, one rank records", refused, "refused", "refused" in refused)
                share = stats.cached_bytes // n
                report.check(f"{name}: cached bytes left, those of that rank", left.cached_bytes, share)
                released = trim_pool(backend)
                report.check(f"{name}: trim, none records", released, share)
                report.check(f"{name}: second trim", trim_pool(backend), 0)
                report.check(f"{name}: output bytes are the same", product.run(4) == before, True)
        finally:
            backend.close()


def _trim_beside_a_capture(backend: Backend) -> tuple[str, PoolStats]:
    """What a trim says while the first rank's stream records, and what is held behind it."""
    first = on_each_rank([backend], lambda rank: rank)[0]
    with _recording(first, backend):
        refused = _trim_refused(backend)
    return refused, pool_stats(backend)


@contextmanager
def _recording(rank: CData, backend: Backend) -> Iterator[None]:
    """The rank's first stream records a graph meanwhile, which is thrown away."""
    runtime, stream = _cuda_runtime(), _stream(rank, backend.name)
    _cuda(runtime.cudaStreamBeginCapture(stream, CAPTURE_RELAXED))
    try:
        yield
    finally:
        recorded = ctypes.c_void_p()
        _cuda(runtime.cudaStreamEndCapture(stream, ctypes.byref(recorded)))
        _cuda(runtime.cudaGraphDestroy(recorded))


def _trim_refused(backend: Backend) -> str:
    try:
        return f"released {trim_pool(backend)}"
    except BackendError as error:
        return f"refused: {error}"


def _cuda(status: int) -> None:
    if status:
        raise RuntimeError(f"CUDA runtime status {status}")


def _cuda_runtime() -> Any:
    """The CUDA runtime of this process, as it is mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if "libcudart" in path:
            return ctypes.CDLL(path)
    raise RuntimeError("no libcudart is loaded; the capture cannot be arranged")


def _stream(rank: CData, expected: str) -> ctypes.c_void_p:
    """A CUDA backend's first stream, read out of its structures after checking that they look as expected.

    struct ggml_backend: guid, 16 functions, device, context. The CUDA context: int device, std::string
    name, an event, then streams.
    """
    fields = ffi.cast("void **", rank)
    if fields[17] != ffi.cast("void *", lib.ggml_backend_get_device(rank)):
        raise RuntimeError("the backend's structure has changed; the capture cannot be arranged")
    context: CData = ffi.cast("char *", fields[18])
    name = ffi.string(ffi.cast("char **", context + 8)[0])
    if name.decode() != expected:
        raise RuntimeError("the CUDA context's structure has changed; the capture cannot be arranged")
    stream = ffi.cast("void **", context + 48)[0]
    return ctypes.c_void_p(int(ffi.cast("uintptr_t", stream)))
