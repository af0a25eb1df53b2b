"""Memory that was freed goes back to the system where somebody asks for it."""

from __future__ import annotations

from pyggml_dflash.ggml.heap import release_free_heap
from tests.holes import HOLES_BYTES, NEEDS_GLIBC, make_holes, process_bytes


@NEEDS_GLIBC
def test_free_pages_between_blocks_in_use_go_back() -> None:
    between = make_holes()
    before = process_bytes()
    assert release_free_heap()
    assert process_bytes() < before - HOLES_BYTES * 0.75
    assert len(set(between)) == len(between)  # what is in use stays as it is
