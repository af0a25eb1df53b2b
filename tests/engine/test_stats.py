"""What an engine tells of itself while it works."""

from __future__ import annotations

import pytest

from pyggml_dflash.errors import DeviceMemoryError
from pyggml_dflash.measures import PoolReport
from tests.engine.test_trim import MIB, ScriptedPools
from tests.engine.tiny import LLAMA, opened, prompt


def test_forwards_of_prompts_and_moves_of_states_are_timed_one_by_one() -> None:
    with opened(LLAMA, max_ctx=1024, chunk=128) as engine:
        assert engine.stats().granule_times.n == 0
        engine.generate(prompt(500), max_tokens=2, cache_prompt=False)
        stats = engine.stats()
        assert stats.granule_times.n == 4
        assert 0 < stats.granule_times.max_s <= stats.granule_times.sum_s
        for _ in range(2):
            engine.generate(prompt(500), max_tokens=1)
        stored = engine.stats().snapshots
        assert stored is not None
        assert stored.capture_times.n == stored.captured > 0
        assert stored.restore_times.n == stored.restored == 1


def test_a_device_has_as_much_as_the_system_says_or_its_cap() -> None:
    with opened(LLAMA, max_ctx=256) as engine:
        room = engine.stats().devices["CPU"]
        assert 0 < room.free_bytes < room.total_bytes
    with opened(LLAMA, max_ctx=256, device_cap={"CPU": 64 * MIB}) as engine:
        room = engine.stats().devices["CPU"]
        assert room.total_bytes == 64 * MIB
        assert room.free_bytes == 64 * MIB - sum(engine.memory()["CPU"].values())


def test_an_allocation_that_was_refused_is_counted_as_tried_again() -> None:
    with opened(LLAMA, max_ctx=1024, chunk=512) as engine:
        engine.generate(prompt(20), max_tokens=1)
        ledger = engine._loaded.core.ledger
        before, ledger.caps = ledger.caps, {"CPU": ledger.charged("CPU")}
        assert engine.stats().allocation_retries == 0
        with pytest.raises(DeviceMemoryError):
            engine.generate(prompt(900), max_tokens=1)
        n = engine.stats().allocation_retries
        assert n > 0
        ledger.caps = before
        engine.generate(prompt(900), max_tokens=1)
        assert engine.stats().allocation_retries == n


def test_scratch_pools_are_told_of_while_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(LLAMA, max_ctx=256) as engine:
        assert engine.stats().pool == PoolReport()  # a CPU has none
        monkeypatch.setattr(engine._loaded.core.trims, "_pools", ScriptedPools(cached=0, live=MIB))
        assert engine.stats().pool == PoolReport(kind="legacy", live_bytes=MIB)
        monkeypatch.undo()
        engine.park()
        assert engine.stats().pool == PoolReport()
        assert engine.alive
    assert not engine.alive
