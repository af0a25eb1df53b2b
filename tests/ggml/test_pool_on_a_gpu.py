"""A GPU's scratch pools: what `benchmarks/device_check.py` checks of them, as tests."""

from __future__ import annotations

from collections.abc import Callable

import device_pool
import pytest
from device_report import Report

pytestmark = pytest.mark.gpu


def of_a_backend(report: Report, device: str) -> None:
    device_pool.check_product(report, device_pool.open_backend(device))


def of_one_rank(report: Report, device: str) -> None:
    device_pool.check_product(report, device_pool.open_mirrored(device))


def inside_a_capture(report: Report, device: str) -> None:
    device_pool.check_capture(report, device_pool.open_backend(device))


@pytest.mark.parametrize("check", [of_a_backend, of_one_rank, inside_a_capture, device_pool.check_ranks])
def test_blocks_go_back_and_numbers_stay(check: Callable[[Report, str], None], gpu: str) -> None:
    """A legacy pool has something to release and a second trim nothing; other pools are left alone."""
    report = Report("pool")
    check(report, gpu)
    assert report.checks
    assert [c for c in report.checks if not c.holds] == []
