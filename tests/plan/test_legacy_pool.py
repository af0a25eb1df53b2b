"""The model of ggml's legacy pool: which block serves a request, what is kept, and what a trim frees."""

from __future__ import annotations

from typing import Final

import pytest

from pyggml_dflash.engine.prefill import TrimSchedule
from pyggml_dflash.errors import DeviceMemoryError
from pyggml_dflash.plan.legacy_pool import TABLE_SIZE, LegacyPoolSim

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
        growing(LegacyPoolSim(limit, flushes=False), interval=0)
    trimmed = LegacyPoolSim(limit, flushes=False)
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
