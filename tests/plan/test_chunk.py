"""The chunk is the largest that has room; what a plan lacks and has left over follows from its numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml_dflash.plan.chunk import (
    TILE,
    ChunkFit,
    ChunkPlan,
    DeviceShare,
    binding_share,
    fit_chunk,
)


def ten_per_row(rows: int) -> int:
    return 10 * rows


def never(rows: int) -> None:
    return None


@pytest.mark.parametrize(
    ("n_ctx", "available", "fixed", "chunk"),
    [
        (10000, 100000, 0, 8960),
        (10000, 100000, 20000, 6912),
        (10000, 100000, 60000, 2816),
        (10000, 100000, 90000, 0),
        (0, 100000, 0, 0),
        (1, 12, 0, 1),
        (1, 9, 0, 0),
        (4096, 50000, 4040, 4096),
        (4096, 50000, 4041, 3840),
        (131072, 2**40, 0, 32768),
    ],
)
def test_the_chunk_is_the_largest_whole_tile_within_nine_tenths(
    n_ctx: int, available: int, fixed: int, chunk: int
) -> None:
    assert fit_chunk(n_ctx, available, fixed, ten_per_row) == ChunkFit(chunk)


@pytest.mark.parametrize(
    ("n_ctx", "available", "fixed", "wanted", "chunk", "snapshots"),
    [
        (10000, 100000, 20000, 100000, 4096, 29040),
        (10000, 100000, 20000, 1000, 6656, 1000),
        (10000, 50000, 20000, 100000, 2304, 1960),
        (1, 12, 0, 1960, 1, 1),
        (0, 12, 0, 1, 0, 0),
        (4096, 50000, 45000, 100000, 0, 0),
    ],
)
def test_snapshots_come_behind_a_chunk_at_the_floor_and_before_a_larger_one(
    n_ctx: int, available: int, fixed: int, wanted: int, chunk: int, snapshots: int
) -> None:
    found = fit_chunk(n_ctx, available, fixed, ten_per_row, snapshots=wanted)
    assert found == ChunkFit(chunk, snapshots)


@pytest.mark.parametrize("snapshots", [None, 10**6])
def test_what_cannot_be_measured_never_fits(snapshots: int | None) -> None:
    assert fit_chunk(4096, 50000, 0, never, snapshots=snapshots) == ChunkFit(0)


@given(
    n_ctx=st.integers(1, 20000),
    available=st.integers(0, 10**6),
    fixed=st.integers(0, 10**6),
    base=st.integers(0, 10**5),
    slope=st.integers(0, 200),
    max_rows=st.integers(1, 4096),
    headroom=st.integers(0, 10**5),
)
@settings(max_examples=300, deadline=None)
def test_a_chunk_fits_and_a_tile_more_does_not(
    n_ctx: int, available: int, fixed: int, base: int, slope: int, max_rows: int, headroom: int
) -> None:
    workspace: Callable[[int], int] = lambda rows: base + slope * rows  # noqa: E731
    chunk = fit_chunk(n_ctx, available, fixed, workspace, max_rows=max_rows, headroom=headroom).chunk
    room, most = available - headroom - fixed, min(n_ctx, max_rows)
    assert 0 <= chunk <= most
    if chunk:
        assert workspace(chunk) <= room
        assert chunk % TILE == 0 or chunk < TILE
    elif room > 0:
        assert workspace(1) > room
    if chunk + TILE <= most and room > 0:
        larger = chunk + TILE if chunk >= TILE else 2 * chunk or 1
        assert workspace(larger) > room


def plan(n_ctx: int, available: int, required: int | None, position_bytes: int = 1) -> ChunkPlan:
    return ChunkPlan(
        n_ctx=n_ctx, chunk=512, available=available, required=required, position_bytes=position_bytes
    )


def test_a_plan_tells_what_it_lacks_and_what_it_leaves() -> None:
    over, under = plan(4096, 100, 130), plan(4096, 130, 100)
    assert (over.fits, over.missing, over.spare) == (False, 30, 0)
    assert (under.fits, under.missing, under.spare) == (True, 0, 30)
    assert plan(4096, 100, 100).fits


def test_a_plan_without_measurements_lacks_a_quarter_of_its_context() -> None:
    unknown = plan(262144, 10**12, None, position_bytes=131073)
    assert (unknown.fits, unknown.spare) == (False, 0)
    assert unknown.missing == 65536 * 131073


def share(device: str, available: int, *terms: int, headroom: int = 0) -> DeviceShare:
    named = {str(i): n for i, n in enumerate(terms)}
    return DeviceShare(device=device, available=available, headroom=headroom, terms=named)


def test_the_device_that_binds_lacks_most_or_has_least_left() -> None:
    roomy, tight = share("A", 1000, 100), share("B", 300, 150, 50, headroom=30)
    assert (roomy.balance, tight.required, tight.balance) == (900, 230, 70)
    assert binding_share((roomy, tight)) is tight
    assert binding_share((share("A", 10, 100), tight)).device == "A"
