"""Where there is no scratch pool, every question is answered and nothing happens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pyggml_dflash.errors import EngineClosed
from pyggml_dflash.ggml.device import Backend, choose_device
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.graph import GraphAllocator, InputArena, StepGraph
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.pool import PoolStats, has_legacy_pool, pool_stats, trim_pool

NOTHING = PoolStats(
    live_bytes=0, cached_bytes=0, vmm_bytes=0, n_blocks=0, n_pools=0, n_legacy_pools=0, n_graphs=0
)


@pytest.fixture
def cpu() -> Iterator[Backend]:
    backend = Backend(choose_device("CPU"), threads=1)
    yield backend
    backend.close()


def test_the_cpu_has_no_pool(cpu: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it, either."""
    monkeypatch.delattr(Backend, "synchronize")
    for _ in range(2):
        assert has_legacy_pool(cpu) is False
        assert trim_pool(cpu) == 0
        assert pool_stats(cpu) == NOTHING


def test_a_trim_between_runs_changes_no_number(cpu: Backend) -> None:
    ledger = Ledger()
    inputs = InputArena(cpu, ledger, "inputs", {"x": (ElementType.F32, 64 * 64)})
    x = inputs["x"]
    x.array[:] = np.random.default_rng(1).standard_normal(64 * 64)
    builder = GraphBuilder(64)
    square = builder.view(x.tensor, (64, 64), (256,), 0)
    allocator = GraphAllocator(cpu, ledger, "graph")
    graph = StepGraph(cpu, builder, (builder.output(builder.mul_mat(square, square)),), allocator)
    try:
        before = graph.run()[0].copy()
        held = ledger.by_label("CPU")
        assert (has_legacy_pool(cpu), trim_pool(cpu), pool_stats(cpu)) == (False, 0, NOTHING)
        assert graph.run()[0].tobytes() == before.tobytes()
        assert ledger.by_label("CPU") == held
    finally:
        graph.close()
        allocator.close()
        inputs.close()


def test_a_closed_backend_has_no_pool_to_ask() -> None:
    backend = Backend(choose_device("CPU"), threads=1)
    backend.close()
    for ask in (has_legacy_pool, trim_pool, pool_stats):
        with pytest.raises(EngineClosed):
            ask(backend)
