"""Ranks of meta backends: each is asked, nested ones too, and one that fails keeps no other from its turn.

Ranks here are on one device, as if it were several. What a rank does on a CPU is made up, since there is no
pool; the ranks are ggml's own. It puts a meta backend into another one only as its single rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing

import pytest
from device_pool import MirroredBackend, listed, mirrored

from pyggml_dflash.engine.prefill import BackendPools
from pyggml_dflash.errors import BackendError
from pyggml_dflash.ggml import pool
from pyggml_dflash.ggml.device import Backend, choose_device
from pyggml_dflash.ggml.ffi import CData, ffi
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.pool import has_legacy_pool, on_each_rank, pool_stats, trim_pool

CPU = choose_device("CPU")


@pytest.fixture
def opened() -> Iterator[Callable[[Backend], Backend]]:
    """Closes what it was given."""
    with ExitStack() as stack:
        yield lambda backend: stack.enter_context(closing(backend))


def address(rank: CData) -> int:
    return int(ffi.cast("uintptr_t", rank))


def plain(backends: Sequence[Backend]) -> list[int]:
    return on_each_rank(backends, address)


class FakeRanks:
    """Trims that release 1, 2, 4, ... bytes in the order of ranks; those of `failing` places raise."""

    def __init__(self, *failing: int) -> None:
        self._failing, self.asked = failing, list[int]()

    def trim(self, rank: CData) -> int:
        place = len(self.asked)
        self.asked.append(address(rank))
        if place in self._failing:
            raise BackendError(f"rank {place} failed")
        return 2**place


def test_a_backend_that_computes_is_its_own_rank(opened: Callable[[Backend], Backend]) -> None:
    backend = opened(Backend(CPU, threads=1))
    assert plain([backend]) == [address(backend.ptr)]


def test_ranks_are_visited_once_each_through_nested_meta_backends(
    opened: Callable[[Backend], Backend],
) -> None:
    dev = listed(CPU)
    pair = opened(MirroredBackend(CPU, mirrored(dev, dev)))
    nested = opened(MirroredBackend(CPU, mirrored(mirrored(mirrored(dev, dev, dev, dev)))))
    alone = opened(Backend(CPU, threads=1))
    assert len(set(plain([pair]))) == 2
    assert len(set(plain([nested]))) == 4
    assert plain([pair, alone, nested]) == plain([pair]) + plain([alone]) + plain([nested])
    for backend in (pair, nested):
        assert address(backend.ptr) not in plain([backend])
        assert (has_legacy_pool(backend), trim_pool(backend), pool_stats(backend).n_pools) == (False, 0, 0)


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_ranks_beside_one_that_fails_are_trimmed_and_its_error_is_raised(
    failing: int, opened: Callable[[Backend], Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    dev = listed(CPU)
    nested = opened(MirroredBackend(CPU, mirrored(mirrored(dev, dev, dev))))
    beside = opened(Backend(CPU, threads=1))
    ranks = FakeRanks(failing)
    monkeypatch.setattr(pool, "_trim_rank", ranks.trim)
    with pytest.raises(BackendError, match=f"^rank {failing} failed$"):
        BackendPools((nested, beside), Ledger()).trim()
    assert ranks.asked == plain([nested, beside])
    assert len(ranks.asked) == 4
    whole = FakeRanks()
    monkeypatch.setattr(pool, "_trim_rank", whole.trim)
    assert BackendPools((nested, beside), Ledger()).trim() == 0b1111


def test_all_failures_are_told_at_the_end(
    opened: Callable[[Backend], Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    dev = listed(CPU)
    pair = opened(MirroredBackend(CPU, mirrored(dev, dev, dev)))
    ranks = FakeRanks(0, 2)
    monkeypatch.setattr(pool, "_trim_rank", ranks.trim)
    with pytest.raises(BackendError, match=r"^rank 0 failed; rank 2 failed$"):
        trim_pool(pair)
    assert len(ranks.asked) == 3
