"""What an engine measures is summed up without a loss."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyggml_dflash import Histogram, PoolReport


@given(st.lists(st.floats(0, 1e6), max_size=30))
def test_every_duration_is_counted_at_the_first_bound_that_it_does_not_exceed(durations: list[float]) -> None:
    times = Histogram()
    for seconds in durations:
        times = times.including(seconds)
    below = [sum(s <= bound for s in durations) for bound in times.bounds_s]
    assert [sum(times.counts[: i + 1]) for i in range(len(below))] == below
    assert times.n == len(durations)
    assert times.sum_s == pytest.approx(sum(durations))
    assert times.max_s == max(durations, default=0.0)


@pytest.mark.parametrize(("kind", "strategy"), [("none", "none"), ("legacy", "overlay"), ("vmm", "none")])
def test_legacy_pools_alone_are_trimmed(kind: str, strategy: str) -> None:
    assert PoolReport(kind=kind).trim_strategy == strategy  # type: ignore[arg-type]
