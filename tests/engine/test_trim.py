"""When a prompt's chunks are followed by a trim: the grid, the adaptive policy, counters and the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from pyggml_dflash.engine.prefill import LOW_BYTES, AdaptiveTrim, PoolTrims, TrimSchedule
from pyggml_dflash.errors import BackendError
from pyggml_dflash.ggml.pool import PoolStats
from pyggml_dflash.options import Auto

MIB = 2**20
GIB = 2**30


def ends(n_prompt: int, chunk: int, origin: int = 0) -> Iterator[int]:
    """Committed positions after each chunk."""
    yield from range(origin + chunk, n_prompt, chunk)
    yield n_prompt


@dataclass
class ScriptedPools:
    """Pools that hold what they are told; `calls` lists what was asked of them."""

    legacy: bool = True
    cached: int = 100 * MIB
    live: int = 0
    free: int = 4 * GIB
    is_busy: bool = False
    calls: list[str] = field(default_factory=list)

    def has_legacy(self) -> bool:
        self.calls.append("has_legacy")
        return self.legacy

    def trim(self) -> int:
        self.calls.append("trim")
        released, self.cached = self.cached, 0
        self.free += released
        return released

    def stats(self) -> PoolStats:
        return PoolStats(
            live_bytes=self.live,
            cached_bytes=self.cached,
            vmm_bytes=0,
            n_blocks=3,
            n_pools=1,
            n_legacy_pools=1,
            n_graphs=3,
        )

    def memory_free(self) -> int:
        return self.free


def trimmed_at(interval: int | Auto, n_prompt: int, chunk: int, *, origin: int = 0) -> list[int]:
    """Positions after which the pools were trimmed."""
    pools, found = ScriptedPools(), []
    trims = PoolTrims(pools, interval, chunk=1)
    trims.begin(origin, n_prompt)
    for n_past in ends(n_prompt, chunk, origin):
        pools.cached = MIB
        pools.calls.clear()
        trims.after_chunk(n_past)
        if "trim" in pools.calls:
            found.append(n_past)
    return found


@pytest.mark.parametrize(
    ("n_prompt", "expected"),
    [(60_363, 7), (32_781, 4), (100_013, 12), (131_013, 15), (200_013, 24), (258_013, 31)],
)
def test_trims_are_counted_by_the_grid(n_prompt: int, expected: int) -> None:
    found = trimmed_at(8192, n_prompt, 512)
    assert found == [8192 * i for i in range(1, expected + 1)]


def test_chunks_that_do_not_meet_the_grid_trim_behind_it() -> None:
    assert trimmed_at(8192, 60_363, 3000) == [9000, 18000, 27000, 33000, 42000, 51000, 60000]


def test_points_that_one_chunk_passes_over_count_once() -> None:
    assert trimmed_at(1000, 20_000, 4096) == [4096, 8192, 12288, 16384]


def test_the_last_chunk_is_never_followed_by_a_trim() -> None:
    assert trimmed_at(512, 2048, 512) == [512, 1024, 1536]
    assert trimmed_at(2048, 2048, 512) == []
    assert trimmed_at(1, 512, 512) == []


def test_an_interval_of_zero_never_trims() -> None:
    assert trimmed_at(0, 100_000, 512) == []


def test_the_grid_begins_where_this_request_begins_to_prefill() -> None:
    assert trimmed_at(8192, 30_000, 512, origin=5000) == [13_192, 21_384, 29_576]
    schedule = TrimSchedule.of(5000, 30_000, 8192)
    assert schedule.next_at == 13_192
    assert not schedule.is_due(13_191)
    assert schedule.is_due(13_192)
    assert schedule.behind(21_500).next_at == 5000 + 3 * 8192


def test_prompts_that_take_turns_have_a_grid_each() -> None:
    pools, found = ScriptedPools(), []
    trims = PoolTrims(pools, 1000, chunk=500)
    trims.begin(0, 5000, slot=0)
    trims.begin(700, 4000, slot=2)
    for n in range(500, 5001, 500):
        for slot, n_past in ((0, n), (2, 700 + n)):
            pools.calls.clear()
            trims.after_chunk(n_past, slot=slot)
            if "trim" in pools.calls:
                found.append((slot, n_past))
    assert [n_past for slot, n_past in found if slot == 0] == [1000, 2000, 3000, 4000]
    assert [n_past for slot, n_past in found if slot == 2] == [1700, 2700, 3700]
    trims.begin(0, 5000, slot=0)
    trims.end(0)
    trims.end(1)
    pools.calls.clear()
    trims.after_chunk(1000, slot=0)
    assert pools.calls == []


def test_a_trim_that_releases_nothing_still_moves_on() -> None:
    pools = ScriptedPools(cached=0)
    trims = PoolTrims(pools, 1000, chunk=500)
    trims.begin(0, 10_000)
    for n_past in ends(10_000, 500):
        trims.after_chunk(n_past)
    assert pools.calls.count("trim") == 9


def test_pools_that_are_not_legacy_are_left_alone() -> None:
    for interval in (512, "auto"):
        pools = ScriptedPools(legacy=False, free=0)
        trims = PoolTrims(pools, interval, chunk=512)
        trims.begin(0, 4096)
        for n_past in ends(4096, 512):
            trims.after_chunk(n_past)
        trims.relieve()
        trims.release_scratch()
        assert "trim" not in pools.calls
        assert trims.counts == ()


def test_auto_trims_when_the_next_growth_may_not_find_room() -> None:
    adaptive = AdaptiveTrim()
    for held in (0, 800 * MIB, 900 * MIB):
        adaptive.observe(held)
    assert adaptive.growth_bytes == 800 * MIB
    assert adaptive.is_due(free=1199 * MIB, cached=1)
    assert not adaptive.is_due(free=1200 * MIB, cached=1)
    assert not adaptive.is_due(free=0, cached=0)
    assert AdaptiveTrim().is_due(free=LOW_BYTES - 1, cached=1)
    assert not AdaptiveTrim().is_due(free=LOW_BYTES, cached=1)


def test_auto_leaves_pools_alone_while_there_is_room() -> None:
    pools = ScriptedPools(free=3 * GIB, cached=0)
    trims = PoolTrims(pools, "auto", chunk=512)
    trims.begin(0, 60 * 512)
    low = 3 * GIB
    for n_past in ends(60 * 512, 512):
        pools.cached += 100 * MIB
        pools.free -= 100 * MIB
        trims.after_chunk(n_past)
        low = min(low, pools.free)
    (counts,) = trims.counts
    assert counts.n_trims == 2  # each after 25 chunks and some
    assert low >= LOW_BYTES - 100 * MIB
    assert counts.released_bytes == 52 * 100 * MIB


def test_counters_tell_how_often_how_much_and_why() -> None:
    pools = ScriptedPools()
    trims = PoolTrims(pools, 1024, chunk=512)
    trims.begin(0, 4096)
    for n_past in ends(4096, 512):
        pools.cached = MIB
        trims.after_chunk(n_past)
    pools.cached = 5 * MIB
    trims.relieve()
    pools.cached = 7 * MIB
    trims.release_scratch()
    trims.release_scratch()
    found = {c.reason: (c.n_trims, c.released_bytes) for c in trims.counts}
    assert found == {"prefill": (3, 3 * MIB), "allocation": (1, 5 * MIB), "idle": (1, 7 * MIB)}
    assert all(c.seconds >= 0 for c in trims.counts)


def test_a_trim_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    pools = ScriptedPools(cached=int(412.5 * MIB), free=int(4.21 * GIB))
    trims = PoolTrims(pools, 16384, chunk=512)
    trims.begin(0, 60_363)
    with caplog.at_level(logging.DEBUG):
        trims.after_chunk(16384)
        trims.after_chunk(32768)
    first, second = caplog.records
    assert first.levelno == logging.INFO
    line = first.getMessage()
    assert line.startswith("pool-trim reason=prefill pos=16384/60363 released=412.5MiB graphs=3 ranks=1 ms=")
    assert line.endswith("free=4.61GiB")
    assert second.levelno == logging.DEBUG
    assert "released=0.0MiB" in second.getMessage()


def test_an_interval_below_the_chunk_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    trims = PoolTrims(ScriptedPools(), 100, chunk=512)
    trims.begin(0, 4096)
    for n_past in ends(4096, 512):
        trims.after_chunk(n_past)
    assert [r.getMessage()[:40] for r in caplog.records if r.levelno == logging.WARNING] == [
        "a trim interval of 100 tokens is below t"
    ]
    caplog.clear()
    for interval in (0, 512, "auto"):
        PoolTrims(ScriptedPools(), interval, chunk=512)
    assert not caplog.records


def test_a_device_that_fails_while_idle_is_told_of_later(caplog: pytest.LogCaptureFixture) -> None:
    class FailingPools(ScriptedPools):
        def trim(self) -> int:
            raise BackendError("the device failed")

    trims = PoolTrims(FailingPools(), 0, chunk=512)
    trims.release_scratch()
    trims.relieve()
    assert trims.counts == ()
    assert [r.getMessage() for r in caplog.records] == 2 * ["pools were not trimmed: the device failed"]
    trims = PoolTrims(FailingPools(), 512, chunk=512)
    trims.begin(0, 4096)
    with pytest.raises(BackendError):
        trims.after_chunk(512)
