"""Kept graphs stay within their memory, the one used last stays anyway, and answers never depend on it."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

from pyggml_dflash.engine.graph_cache import KEPT_GRAPHS
from pyggml_dflash.engine.graphs import Forwards
from tests.engine.tiny import QWEN35, prompt
from tests.reference.opened import Floats, assembled, on_the_cpu


def decoded(kept_bytes: int | None) -> tuple[list[Floats], int, int]:
    """Logits of tokens decoded over two buckets of cache rows, in turns; the most graphs and bytes kept."""
    with ExitStack() as stack:
        parts = stack.enter_context(assembled(on_the_cpu(QWEN35, max_ctx=1024), n_slots=2))
        forwards = Forwards(
            parts.backend,
            parts.ledger,
            parts.model,
            parts.slots,
            chunk=64,
            host=None,
            kept_bytes=kept_bytes,
        )
        stack.callback(forwards.close)
        found, n_kept, n_bytes = [], 0, 0
        first, second = parts.slots.slots
        for slot in (first, second):
            for start in range(0, 252, 63):
                forwards.prefill(slot, prompt(252)[start : start + 63], "none")
                slot.commit(63)
        for token in range(8):
            for slot in (first, second):
                found.append(forwards.decode(slot, token).copy())
                slot.commit(1)
                n_kept = max(n_kept, len(forwards._cache.keys))
                n_bytes = max(n_bytes, forwards._cache.n_bytes)
        return found, n_kept, n_bytes


def test_graphs_stay_within_the_memory_that_is_set_aside_for_them() -> None:
    everything, n_all, all_bytes = decoded(None)
    assert n_all == 4  # two slots, two buckets
    within, n_within, n_bytes = decoded(all_bytes // 2)
    assert n_within < n_all
    assert n_bytes <= all_bytes // 2
    np.testing.assert_array_equal(within, everything)


@pytest.mark.parametrize("kept_bytes", [0, 1])
def test_the_graph_used_last_stays_whatever_the_limit(kept_bytes: int) -> None:
    everything, _, _ = decoded(None)
    found, n_kept, _ = decoded(kept_bytes)
    assert 1 <= n_kept < KEPT_GRAPHS
    np.testing.assert_array_equal(found, everything)
