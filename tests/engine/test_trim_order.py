"""B02: no cached block is freed while queued kernels use it, whenever a trim is asked for.

A device that computes only when somebody waits for it stands in for a GPU. Like ggml's pool it takes a
kernel's scratch back when the kernel is queued, long before it runs, and it notes every kernel that runs on
memory which was freed meanwhile. All else is the engine's own: graphs, steps, schedules and trims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from pyggml_dflash.engine.core import EngineCore
from pyggml_dflash.engine.loaded import Loaded
from pyggml_dflash.engine.loader import load
from pyggml_dflash.engine.prefill import BackendPools, PoolTrims
from pyggml_dflash.ggml.graph import StepGraph
from pyggml_dflash.ggml.pool import PoolStats
from pyggml_dflash.options import EngineOptions, Spec
from tests.engine.test_prefill import CHUNK, MIB, answer
from tests.engine.test_trim import GIB
from tests.engine.tiny import QWEN35

N_CHUNKS = 6
Ask = Callable[[EngineCore], object]


class LazyDevice:
    """Queues kernels and copies; runs them, in order, when it is waited for."""

    def __init__(self) -> None:
        self._queue: list[tuple[Callable[[], object], int | None]] = []
        self._n_asked = 0
        self.cached: dict[int, int] = {}  # blocks of the pool: address -> bytes
        self.freed: set[int] = set()
        self.used_after_free: list[int] = []
        self.asks: Callable[[], object] = lambda: None  # between submit and synchronise
        self.n_submits = 0

    @property
    def n_queued(self) -> int:
        return len(self._queue)

    def take_over(self, graph: StepGraph) -> None:
        """Have a graph run here."""
        compute, get, synchronize = graph._compute, graph._get, graph._synchronize

        def submit(stream: Any, nodes: Any) -> int:
            self._queue.append((lambda: compute(stream, nodes), self._scratch()))
            self.n_submits += 1
            self.asks()
            return 0

        def read(*arguments: Any) -> None:
            self._queue.append((lambda: get(*arguments), None))

        def wait(stream: Any) -> None:
            for run, block in self._queue:
                if block in self.freed:
                    self.used_after_free.append(block)
                run()
            self._queue.clear()
            synchronize(stream)

        graph._compute, graph._get, graph._synchronize = submit, read, wait

    def _scratch(self) -> int:
        """The block of a kernel, back in the pool's cache already; each wants more than the last."""
        self._n_asked += 1
        self.cached[self._n_asked] = int(MIB * 1.02**self._n_asked)
        return self._n_asked

    def trim(self) -> int:
        """Free what is cached, at once: the driver does not know who will still run on it."""
        released = sum(self.cached.values())
        self.freed |= set(self.cached)
        self.cached.clear()
        return released


class LazyPools(BackendPools):
    """The pool of a lazy device; whether work is queued, the backends say."""

    device: LazyDevice
    check: Callable[[], object]

    def has_legacy(self) -> bool:
        return True

    def trim(self) -> int:
        self.check()
        return self.device.trim()

    def stats(self) -> PoolStats:
        none = PoolStats(
            live_bytes=0, cached_bytes=0, vmm_bytes=0, n_blocks=0, n_pools=1, n_legacy_pools=1, n_graphs=0
        )
        return replace(none, cached_bytes=sum(self.device.cached.values()))

    def memory_free(self) -> int:
        return 4 * GIB


@contextmanager
def on_a_lazy_device(
    monkeypatch: pytest.MonkeyPatch, interval: int, spec: Spec = "off"
) -> Iterator[tuple[Loaded, LazyDevice, list[int]]]:
    """A model on one; the list gets what a slot holds at each trim, which is when nothing is queued."""
    device, seen = LazyDevice(), list[int]()
    make = StepGraph.__init__

    def taken_over(self: StepGraph, *arguments: Any) -> None:
        make(self, *arguments)
        device.take_over(self)

    monkeypatch.setattr(StepGraph, "__init__", taken_over)
    options = EngineOptions(model=QWEN35, max_ctx=1024, chunk=CHUNK, device="CPU", threads=1, spec=spec)
    loaded = load(options, lambda _: None)
    core = loaded.core
    pools = LazyPools((core._forwards._backend,), core._ledger)
    pools.device = device
    pools.check = lambda: seen.append(core.slots[0].n_past)
    core.trims = core._prompts._trims = PoolTrims(pools, interval, chunk=CHUNK)
    device.trim()
    device.freed.clear()
    try:
        yield loaded, device, seen
    finally:
        core.close()


def relieve(core: EngineCore) -> None:
    core.trims.relieve()


def release_scratch(core: EngineCore) -> None:
    core.release_scratch()


def after_chunk(core: EngineCore) -> None:
    """As if the chunk under way were done already, and a trim due behind it."""
    core.trims.after_chunk(core.slots[0].n_past + CHUNK)


@pytest.fixture(scope="module")
def expected() -> tuple[int, ...]:
    """An answer without trims, on the device as it is."""
    options = EngineOptions(model=QWEN35, max_ctx=1024, chunk=CHUNK, device="CPU", threads=1, spec="off")
    loaded = load(options, lambda _: None)
    try:
        return answer(loaded, N_CHUNKS * CHUNK)
    finally:
        loaded.core.close()


@pytest.mark.parametrize("spec", ["off", "mtp"])
def test_trims_come_when_chunks_are_committed_and_nothing_is_queued(
    spec: Spec, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_a_lazy_device(monkeypatch, CHUNK, spec) as (loaded, device, seen):
        assert answer(loaded, N_CHUNKS * CHUNK) == expected
        assert seen == [CHUNK * i for i in range(1, N_CHUNKS)]
        assert device.used_after_free == []
        assert device.freed


@pytest.mark.parametrize("interval", [0, CHUNK])
@pytest.mark.parametrize("ask", [relieve, release_scratch, after_chunk])
def test_a_trim_that_is_asked_for_while_work_is_queued_waits(
    ask: Ask, interval: int, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_a_lazy_device(monkeypatch, interval) as (loaded, device, seen):
        pools = loaded.core.trims._pools

        def asks() -> None:
            before = len(seen)
            assert pools.is_busy
            ask(loaded.core)
            assert len(seen) == before

        device.asks = asks
        assert answer(loaded, N_CHUNKS * CHUNK) == expected
        assert device.used_after_free == []
        assert all(n % CHUNK == 0 for n in seen)  # never between a chunk's start and its end
        if interval or ask is not after_chunk:
            assert sorted(set(seen)) == [CHUNK * i for i in range(1, N_CHUNKS)]
        device.asks = lambda: None
        loaded.core.release_scratch()
        assert (device.cached, device.used_after_free, pools.is_busy) == ({}, [], False)


def test_the_device_notices_a_trim_that_comes_early(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_a_lazy_device(monkeypatch, 0) as (loaded, device, _):
        device.asks = device.trim
        answer(loaded, 2 * CHUNK)
        assert len(device.used_after_free) == device.n_submits > 2
