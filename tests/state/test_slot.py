"""Slots start empty, forget everything when reset, and never touch each other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pyggml_dflash.arch.base import StateLayout, StateTensor
from pyggml_dflash.errors import DeviceMemoryError
from pyggml_dflash.ggml.arena import host_view
from pyggml_dflash.ggml.device import Backend, choose_device
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.state.slot import RECENT_TOKENS, SlotTable
from tests.engine.tiny import QWEN35, prompt
from tests.reference.opened import assembled, on_the_cpu

N_SLOTS = 3
LAYOUT = StateLayout(
    n_ctx=16,
    tensors=(
        StateTensor(name="k", type=ElementType.F16, shape=(32, 16), grows=True),
        StateTensor(name="v", type=ElementType.Q8_0, shape=(32, 16), grows=True),
        StateTensor(name="conv", type=ElementType.F32, shape=(3, 8), grows=False),
        StateTensor(name="memory", type=ElementType.F32, shape=(4, 4, 2), grows=False),
    ),
)


@pytest.fixture
def cpu() -> Iterator[Backend]:
    backend = Backend(choose_device("CPU"), threads=1)
    yield backend
    backend.close()


@pytest.fixture
def table(cpu: Backend) -> Iterator[SlotTable]:
    table = SlotTable(cpu, Ledger(), LAYOUT, N_SLOTS)
    yield table
    table.close()


def numbers(table: SlotTable, name: str) -> np.ndarray:
    """All slots of a tensor, [slot, ...]."""
    view = host_view(table.tensors[name])
    return view.reshape(N_SLOTS, -1)


def test_slots_start_at_zero_and_empty(table: SlotTable) -> None:
    assert [(slot.id, slot.n_past) for slot in table.slots] == [(0, 0), (1, 0), (2, 0)]
    for name in ("k", "conv", "memory"):
        assert not numbers(table, name).any()


def test_a_table_takes_what_its_layout_says(cpu: Backend) -> None:
    ledger = Ledger()
    table = SlotTable(cpu, ledger, LAYOUT, N_SLOTS)
    assert LAYOUT.slot_bytes == 32 * 16 * 2 + 34 * 16 + 4 * (24 + 32)
    assert LAYOUT.recurrent_bytes == 4 * (24 + 32)
    padding = table.n_bytes - N_SLOTS * LAYOUT.slot_bytes
    assert 0 <= padding < 1024
    assert ledger.by_label("CPU") == {"state": table.n_bytes}
    table.close()
    table.close()
    assert ledger.charged("CPU") == 0


def test_resetting_forgets_what_one_slot_was_given_and_nothing_else(table: SlotTable) -> None:
    for name in ("k", "conv", "memory"):
        numbers(table, name)[:] = 5
    for slot in table.slots:
        slot.offer(range(7))
        slot.commit(7)
    table.slots[1].offer(range(3))  # taken back
    table.slots[1].reset()
    assert [slot.n_past for slot in table.slots] == [7, 0, 7]
    for name in ("k", "conv", "memory"):
        assert (numbers(table, name)[[0, 2]] == 5).all()
    for name in ("conv", "memory"):
        assert not numbers(table, name)[1].any()
    keys = numbers(table, "k")[1].reshape(16, 32)
    assert not keys[:10].any()
    assert (keys[10:] == 5).all()  # nothing was written there


def test_tokens_are_committed_up_to_the_end_of_the_context(table: SlotTable) -> None:
    slot = table.slots[0]
    slot.commit(10)
    slot.commit(6)
    assert slot.n_past == LAYOUT.n_ctx
    with pytest.raises(AssertionError):
        slot.commit(1)


def test_a_state_that_does_not_fit_leaves_nothing(cpu: Backend) -> None:
    ledger = Ledger(caps={"CPU": N_SLOTS * LAYOUT.slot_bytes - 1})
    with pytest.raises(DeviceMemoryError, match="state"):
        SlotTable(cpu, ledger, LAYOUT, N_SLOTS)
    assert ledger.charged("CPU") == 0


def test_a_slot_computes_the_same_beside_others_and_after_a_reset() -> None:
    with assembled(on_the_cpu(QWEN35, max_ctx=256, chunk=64), n_slots=2) as parts:
        forwards, (first, second) = parts.forwards, parts.slots.slots

        def fill(slot: object, seed: int) -> bytes:
            slot.reset()  # type: ignore[attr-defined]
            logits = forwards.prefill(slot, prompt(40, seed=seed), "last")  # type: ignore[arg-type]
            slot.commit(40)  # type: ignore[attr-defined]
            assert logits is not None
            return logits.tobytes() + forwards.decode(slot, 3).tobytes()  # type: ignore[arg-type]

        alone = fill(first, 1)
        other = fill(second, 2)
        assert alone != other
        assert fill(first, 1) == alone
        assert fill(second, 1) == alone
        assert fill(first, 2) == other


def test_the_newest_tokens_are_those_committed(table: SlotTable) -> None:
    slot = table.slots[0]
    slot.offer([1, 2, 3])
    slot.commit(2)  # the third was taken back
    slot.offer([4])
    slot.offer([5, 6])  # a forward that was never committed leaves nothing
    slot.commit(1)
    assert (slot.n_past, slot.recent) == (3, (1, 2, 5))
    slot.offer(range(10, 20))
    slot.commit(10)
    assert slot.recent == tuple(range(20 - RECENT_TOKENS, 20))
    slot.reset()
    assert (slot.n_past, slot.recent) == (0, ())
