"""The model of ggml's legacy pool: which block serves a request, what is kept, and what a trim frees."""

from __future__ import annotations

from typing import Final

import pytest

from pyggml_dflash.engine.prefill import TrimSchedule
from pyggml_dflash.errors import DeviceMemoryError
from pyggml_dflash.plan.legacy_pool import TABLE_SIZE, LegacyPoolSim, Relief

MIB: Final = 2**20
CHUNK: Final = 512
N_PROMPT: Final = 60_363


def chunk_ends(n_prompt: int, chunk: int) -> list[int]:
    return [*range(chunk, n_prompt, chunk), n_prompt]


def run(pool: LegacyPoolSim, interval: int) -> list[int]:
    """A prompt whose temporaries grow by a MiB per chunk; the bytes that each trim released."""
    released = []
    schedule = TrimSchedule.of(0, N_PROMPT, interval)
    for i, n_past in enumerate(chunk_ends(N_PROMPT, CHUNK), 1):
        first, second = pool.alloc(i * MIB), pool.alloc(2 * i * MIB)
        pool.free(second)
        pool.free(first)
        if schedule.is_due(n_past):
            released.append(pool.trim())
            schedule = schedule.behind(n_past)
    return released


def test_a_long_prompt_leaves_every_size_behind() -> None:
    pool = LegacyPoolSim()
    assert run(pool, 0) == []
    assert (pool.peak_bytes, pool.n_mallocs) == (4_059_409_664, 49)


def test_trims_bound_what_is_kept() -> None:
    pool = LegacyPoolSim()
    released = run(pool, 8192)
    assert (pool.peak_bytes, pool.n_mallocs) == (868_693_248, 58)
    assert [round(n / MIB, 1) for n in released] == [286.7, 513.5, 614.3, 629.0, 664.7, 828.5, 746.6]


def test_a_trim_after_every_chunk_keeps_one_chunk() -> None:
    pool = LegacyPoolSim()
    assert len(run(pool, CHUNK)) == 117
    assert (pool.peak_bytes, pool.n_mallocs) == (389_755_904, 236)


def test_the_tightest_cached_block_serves_and_the_first_of_equals() -> None:
    pool = LegacyPoolSim()
    for block in [pool.alloc(n) for n in (3 * MIB, MIB, 2 * MIB)]:
        pool.free(block)
    held, mallocs = pool.held_bytes, pool.n_mallocs
    assert pool.alloc(MIB + 1).n_bytes < 2 * MIB  # what was asked with 1 MiB and look-ahead
    assert pool.alloc(MIB + 1).n_bytes >= 2 * MIB
    assert (pool.held_bytes, pool.n_mallocs) == (held, mallocs)


@pytest.mark.parametrize(("asked", "given"), [(1, 256), (256, 512), (1000, 1280), (10**6, 1_050_112)])
def test_a_new_block_is_a_little_larger_and_aligned(asked: int, given: int) -> None:
    assert LegacyPoolSim().alloc(asked).n_bytes == given


def test_a_full_table_gives_blocks_back() -> None:
    pool = LegacyPoolSim()
    blocks = [pool.alloc(1000) for _ in range(TABLE_SIZE + 3)]
    for block in blocks:
        pool.free(block)
    assert pool.n_blocks == TABLE_SIZE
    assert (pool.held_bytes, pool.live_bytes) == (TABLE_SIZE * 1280, 0)


def test_a_trim_leaves_live_blocks_alone_and_a_second_one_frees_nothing() -> None:
    pool = LegacyPoolSim()
    live, cached = pool.alloc(MIB), pool.alloc(2 * MIB)
    pool.free(cached)
    assert pool.trim() == cached.n_bytes
    assert pool.trim() == 0
    assert pool.held_bytes == pool.live_bytes == live.n_bytes


def growing(pool: LegacyPoolSim, *, interval: int) -> int:
    """40 chunks whose temporary grows 2 % each; trims done. Raises where the device is full."""
    n_trims = 0
    schedule = TrimSchedule.of(0, 40 * CHUNK, interval)
    for i in range(1, 41):
        pool.free(pool.alloc(int(8 * MIB * 1.02**i)))
        if schedule.is_due(CHUNK * i):
            pool.trim()
            n_trims += 1
            schedule = schedule.behind(CHUNK * i)
    return n_trims


def test_little_live_memory_fills_a_card_unless_trimmed() -> None:
    limit = 100 * MIB
    with pytest.raises(DeviceMemoryError, match="pool"):
        growing(LegacyPoolSim(limit, relief="none"), interval=0)
    trimmed = LegacyPoolSim(limit, relief="none")
    assert growing(trimmed, interval=2048) == (40 * CHUNK - 1) // 2048
    assert trimmed.peak_bytes <= limit


def test_a_pool_that_flushes_survives_on_its_own_and_true_exhaustion_is_an_error() -> None:
    pool = LegacyPoolSim(100 * MIB)
    growing(pool, interval=0)
    assert pool.n_flushes > 0
    kept = pool.alloc(60 * MIB)
    with pytest.raises(DeviceMemoryError) as raised:
        pool.alloc(60 * MIB)
    assert raised.value.free is not None
    assert raised.value.free < raised.value.wanted
    assert pool.live_bytes == kept.n_bytes


# a device that is nearly full


@pytest.mark.parametrize("relief", ["flush", "exact"])
def test_cached_blocks_are_reclaimed_for_what_finds_no_room(relief: Relief) -> None:
    pool = LegacyPoolSim(10 * MIB, relief=relief)
    for block in [pool.alloc(n * MIB) for n in (2, 3, 1)]:
        pool.free(block)
    block = pool.alloc(7 * MIB)
    assert block.n_bytes == pool_size(7 * MIB)  # with look-ahead, since there is room
    assert (pool.n_flushes, pool.n_blocks, pool.cached_bytes) == (1, 0, 0)
    assert pool.held_bytes == pool.live_bytes == block.n_bytes


@pytest.mark.parametrize("relief", ["flush", "exact"])
def test_live_blocks_are_preserved_under_pressure(relief: Relief) -> None:
    pool = LegacyPoolSim(10 * MIB, relief=relief)
    live = [pool.alloc(2 * MIB), pool.alloc(MIB)]
    pool.free(pool.alloc(4 * MIB))
    live.append(pool.alloc(5 * MIB))
    assert pool.held_bytes == pool.live_bytes == sum(block.n_bytes for block in live) <= 10 * MIB
    for block in live:
        pool.free(block)
    assert (pool.live_bytes, pool.n_blocks) == (0, 3)


def test_the_exact_size_is_tried_where_look_ahead_does_not_fit() -> None:
    pool = LegacyPoolSim(10 * MIB, relief="exact")
    pool.free(pool.alloc(6 * MIB))
    block = pool.alloc(10 * MIB)
    assert block.n_bytes == pool.held_bytes == 10 * MIB
    pool.free(block)
    assert pool.alloc(9 * MIB).n_bytes == 10 * MIB  # from the cache
    with pytest.raises(DeviceMemoryError):
        LegacyPoolSim(10 * MIB, relief="flush").alloc(10 * MIB)


@pytest.mark.parametrize("relief", ["none", "flush", "exact"])
def test_true_exhaustion_is_an_error_and_the_pool_is_as_it_was(relief: Relief) -> None:
    pool = LegacyPoolSim(10 * MIB, relief=relief)
    live = pool.alloc(6 * MIB)
    with pytest.raises(DeviceMemoryError) as raised:
        pool.alloc(5 * MIB)
    assert raised.value.free == 10 * MIB - live.n_bytes
    assert raised.value.free < raised.value.wanted == (5 * MIB if relief == "exact" else pool_size(5 * MIB))
    assert pool.held_bytes == pool.live_bytes == live.n_bytes
    pool.free(live)
    assert pool.alloc(5 * MIB) == live
    assert pool.n_mallocs == 1


def pool_size(n_bytes: int) -> int:
    """What an endless pool takes for a new block."""
    return LegacyPoolSim().alloc(n_bytes).n_bytes
