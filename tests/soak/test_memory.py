"""What a storm is judged by tells memory that somebody holds from memory that is merely not given back."""

from __future__ import annotations

import platform

import pytest

from tests.holes import HOLES_BYTES, make_holes
from tests.soak.memory import Flatness, heap_in_use_kib

LIBRARY, VERSION = platform.libc_ver()


@pytest.mark.skipif(
    LIBRARY != "glibc" or tuple(map(int, VERSION.split("."))) < (2, 33),
    reason="only glibc from 2.33 on tells what it has handed out",
)
def test_blocks_in_use_are_counted_and_free_ones_are_not() -> None:
    before = heap_in_use_kib()
    between = make_holes()
    holed = heap_in_use_kib()
    held = bytearray(HOLES_BYTES)
    full = heap_in_use_kib()
    assert before is not None
    assert holed is not None
    assert full is not None
    assert 0 < (holed - before) * 1024 < HOLES_BYTES / 8
    assert 0 <= (full - holed) * 1024 - HOLES_BYTES < HOLES_BYTES / 8
    del between, held


def test_growth_is_that_of_the_last_quarter_behind_the_warm_up() -> None:
    warm_up, first, between, last = [1] * 15, [100] * 20, [500] * 45, [103] * 20
    flatness = Flatness((*warm_up, *first, *between, *last))
    assert (flatness.first, flatness.last, len(flatness.warm)) == (100, 103, 85)
    assert flatness.growth == pytest.approx(0.03)
