"""Snapshots are whole or absent, and a restore leaves nothing of what was in the slot before."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from pyggml_dflash.arch.base import StateLayout, StateTensor
from pyggml_dflash.errors import BackendError, EngineClosed, SnapshotError
from pyggml_dflash.ggml.arena import TensorArena, write
from pyggml_dflash.ggml.device import Backend, DeviceKind, choose_device
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.ggml.transfer import Transfer
from pyggml_dflash.state import snapshot_store
from pyggml_dflash.state.slot import SlotTable
from pyggml_dflash.state.snapshot import Contents, Snapshot, SnapshotMemory, snapshot_place
from pyggml_dflash.state.snapshot_store import (
    CLOSED,
    COPY_FAILED,
    NO_MEMORY,
    NO_ROOM,
    OTHER_MODEL,
    OTHER_STRIPS,
    TOO_LONG,
    SnapshotStore,
)
from pyggml_dflash.state.strips import Strip, layout_strips, snapshot_bytes
from tests.state.stored import FINGERPRINT, LAYOUT, Ring, States, opened, used

CUTS = (1, 3, 4, 7, 31, 63, 64)
IDS = list(range(100, 164))


@pytest.fixture
def states() -> Iterator[States]:
    with opened() as states:
        yield states


def captured(states: States, slot: int, n_past: int) -> tuple[Snapshot, dict[str, bytes]]:
    """A snapshot of noise, and what a slot has to hold after it was restored."""
    source = states.table.slots[slot]
    states.fill(source, n_past)
    snapshot = states.store.capture(source, IDS[:n_past])
    assert snapshot is not None
    return snapshot, states.expected(states.bytes_of(source), n_past)


@pytest.mark.parametrize("n_past", CUTS)
def test_a_restore_writes_or_zeroes_every_byte_of_its_slot_alone(states: States, n_past: int) -> None:
    snapshot, expected = captured(states, 0, n_past)
    for target in states.table.slots:
        for slot in states.table.slots:
            states.fill(slot, 40)
        others = [states.bytes_of(slot) for slot in states.table.slots]
        states.store.restore(target, snapshot)
        assert states.bytes_of(target) == expected
        assert (target.n_past, target.n_written) == (n_past, n_past)
        assert all(states.bytes_of(s) == others[s.id] for s in states.table.slots if s is not target)
        target.reset()
        assert not any(any(data) for data in states.bytes_of(target).values())
    snapshot.close()


ROWS = StateLayout(n_ctx=64, tensors=tuple(t for t in LAYOUT.tensors if t.grows))


@pytest.mark.parametrize("n_past", [1, 3, 4, 7, 31, 32])
def test_a_state_of_rows_has_those_of_every_position_before(n_past: int) -> None:
    with opened(layout=ROWS) as states:
        assert states.store.has_rows_only
        snapshot, _ = captured(states, 0, 32)
        image = states.bytes_of(states.table.slots[0])
        for target in states.table.slots:
            states.fill(target, 40)
            states.store.restore(target, snapshot, n_past=n_past)
            assert states.bytes_of(target) == states.expected(image, n_past)
            assert (target.n_past, target.n_written) == (n_past, n_past)
            assert target.recent == tuple(IDS[:n_past][-8:])
        snapshot.close()


def test_a_state_with_more_than_rows_is_restored_whole(states: States) -> None:
    assert not states.store.has_rows_only
    snapshot, _ = captured(states, 0, 32)
    with pytest.raises(AssertionError):
        states.store.restore(states.table.slots[1], snapshot, n_past=31)
    snapshot.close()


def test_a_snapshot_does_not_change_with_its_slot(states: States) -> None:
    snapshot, expected = captured(states, 1, 30)
    states.fill(states.table.slots[1], 64)
    states.store.restore(states.table.slots[1], snapshot)
    assert states.bytes_of(states.table.slots[1]) == expected
    snapshot.close()


@pytest.mark.parametrize("n_past", CUTS)
def test_a_snapshot_takes_what_is_used_and_says_so(states: States, n_past: int) -> None:
    snapshot, _ = captured(states, 0, n_past)
    strips = snapshot.contents.strips
    assert [strip.name for strip in strips] == [t.name for t in LAYOUT.tensors]
    assert [strip.n_bytes for strip in strips] == [used(t, n_past) for t in LAYOUT.tensors]
    assert snapshot.n_bytes == states.store.estimate(n_past) == states.memory.n_held
    held = states.ledger.by_label("CPU")["snapshots"]
    assert sum(s.n_bytes for s in strips) <= held <= snapshot.n_bytes
    snapshot.close()
    snapshot.close()
    assert states.memory.n_held == 0
    assert "snapshots" not in states.ledger.by_label("CPU")


def test_what_a_snapshot_takes_is_a_matter_of_arithmetic() -> None:
    strips = layout_strips(LAYOUT, 7)
    assert [strip.shape for strip in strips] == [(32, 7), (32, 7), (3, 8), (8, 1), (4, 4, 2)]
    data = [448, 238, 96, 32, 128]
    assert [strip.n_bytes for strip in strips] == data
    assert snapshot_bytes(strips, 7, alignment=1) == sum(data) + 5 * 1024 + 4 * 7
    assert snapshot_bytes(strips, 7) == 512 + 4 * 256 + 5 * 1024 + 4 * 7
    assert snapshot_bytes(layout_strips(LAYOUT, 3), 3) == 4 * 256 + 4 * 1024 + 4 * 3  # no pooled row yet


def test_tokens_and_state_of_a_snapshot_cannot_be_changed(states: States) -> None:
    ids = np.array(IDS[:20], np.int32)
    states.fill(states.table.slots[0], 20)
    snapshot = states.store.capture(states.table.slots[0], ids)
    assert snapshot is not None
    ids[:] = 0
    assert snapshot.tokens.tolist() == IDS[:20]
    with pytest.raises(ValueError, match="read-only"):
        snapshot.tokens[0] = 1
    snapshot.close()


def test_an_empty_slot_and_foreign_tokens_are_mistakes(states: States) -> None:
    with pytest.raises(AssertionError):
        states.store.capture(states.table.slots[0], [])
    states.fill(states.table.slots[0], 20)
    with pytest.raises(AssertionError):
        states.store.capture(states.table.slots[0], IDS[:19])


def test_beyond_the_allowance_captures_are_skipped_and_harmless() -> None:
    """Four slots' worth of captures with room for one and a half (B21)."""
    with opened() as plain:
        need = plain.store.estimate(40)
    with opened(allowance=need * 3 // 2) as states:
        first, expected = captured(states, 0, 40)
        others = []
        for slot in states.table.slots:
            states.fill(slot, 40)
            others.append(states.bytes_of(slot))
            assert states.store.capture(slot, IDS[:40]) is None
            assert states.bytes_of(slot) == others[-1]
        assert states.store.counters.skipped == {NO_ROOM: 3}
        assert not states.store.counters.failed
        states.store.restore(states.table.slots[2], first)
        assert states.bytes_of(states.table.slots[2]) == expected
        first.close()
        second, _ = captured(states, 1, 40)  # there is room again
        second.close()


def test_a_capture_without_memory_fails_and_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with opened() as plain:
        state = plain.ledger.charged("CPU")
        need = plain.store.estimate(60)
    with opened(caps={"CPU": state + need // 2}) as states:
        states.fill(states.table.slots[0], 60)
        before = states.bytes_of(states.table.slots[0])
        with caplog.at_level(logging.WARNING):
            assert states.store.capture(states.table.slots[0], IDS[:60]) is None
        assert "no snapshot of 60 tokens" in caplog.text
        assert states.store.counters.failed == {NO_MEMORY: 1}
        assert states.bytes_of(states.table.slots[0]) == before
        assert states.ledger.charged("CPU") == state
        snapshot, _ = captured(states, 0, 2)  # a smaller one fits
        snapshot.close()


class Delayed(Transfer):
    """Copies as late as a device may: when somebody waits for them."""

    n_late = 0

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._queue: list[tuple[Tensor, int, Tensor, int, int]] = []

    def copy(self, source: Tensor, start: int, target: Tensor, to: int, n_bytes: int) -> None:
        self._queue.append((source, start, target, to, n_bytes))

    def wait(self) -> None:
        for each in self._queue:
            super().copy(*each)
            Delayed.n_late += 1
        self._queue.clear()
        super().wait()


class Failing(Transfer):
    """A device that fails at the third copy."""

    n_left = 0

    def copy(self, source: Tensor, start: int, target: Tensor, to: int, n_bytes: int) -> None:
        Failing.n_left -= 1
        if Failing.n_left < 0:
            raise BackendError("the device failed")
        super().copy(source, start, target, to, n_bytes)


def test_nothing_is_published_before_the_last_copy_is_done(
    states: States, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_store, "Transfer", Delayed)
    Delayed.n_late = 0
    snapshot, expected = captured(states, 0, 33)
    states.fill(states.table.slots[0], 64)  # too late to show
    states.store.restore(states.table.slots[1], snapshot)
    snapshot.close()
    assert states.bytes_of(states.table.slots[1]) == expected
    assert Delayed.n_late == 2 * len(LAYOUT.tensors)


def test_a_copy_that_fails_is_no_snapshot(states: States, monkeypatch: pytest.MonkeyPatch) -> None:
    states.fill(states.table.slots[0], 33)
    held = states.ledger.charged("CPU")
    monkeypatch.setattr(snapshot_store, "Transfer", Failing)
    Failing.n_left = 2
    assert states.store.capture(states.table.slots[0], IDS[:33]) is None
    assert states.store.counters.failed == {COPY_FAILED: 1}
    assert (states.memory.n_held, states.ledger.charged("CPU")) == (0, held)


def test_a_restore_that_fails_half_way_leaves_a_slot_that_a_reset_clears(
    states: States, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot, _ = captured(states, 0, 50)
    target = states.table.slots[1]
    monkeypatch.setattr(snapshot_store, "Transfer", Failing)
    Failing.n_left = 3
    with pytest.raises(BackendError):
        states.store.restore(target, snapshot)
    assert target.n_past == 0
    target.reset()
    assert not any(any(data) for data in states.bytes_of(target).values())
    assert states.store.counters.n_restored == 0
    snapshot.close()


def other_layouts() -> dict[str, tuple[StateLayout, bytes, str]]:
    """Tables that a state of LAYOUT at 40 does not belong into, and why."""
    k, *rest = LAYOUT.tensors
    changed = {
        "type": (type(k)(name="k", type=ElementType.F32, shape=k.shape, grows=True), *rest),
        "width": (type(k)(name="k", type=k.type, shape=(64, 64), grows=True), *rest),
        "name": (type(k)(name="K", type=k.type, shape=k.shape, grows=True), *rest),
        "order": (rest[0], k, *rest[1:]),
        "fewer": tuple(rest),
        "kind": (type(k)(name="k", type=k.type, shape=k.shape, grows=False), *rest),
    }
    found = {
        name: (StateLayout(n_ctx=64, tensors=tensors), FINGERPRINT, OTHER_STRIPS)
        for name, tensors in changed.items()
    }
    found["context"] = (StateLayout(n_ctx=39, tensors=LAYOUT.tensors), FINGERPRINT, TOO_LONG)
    found["fingerprint"] = (LAYOUT, bytes(16), OTHER_MODEL)
    return found


@pytest.mark.parametrize("name", list(other_layouts()))
def test_what_does_not_belong_is_refused_before_anything_changes(states: States, name: str) -> None:
    layout, mark, reason = other_layouts()[name]
    snapshot, _ = captured(states, 0, 40)
    with opened(layout=layout) as others:
        store = SnapshotStore(others.table, others.backend, others.memory, fingerprint=mark)
        target = others.table.slots[1]
        others.fill(target, 30)
        before = others.bytes_of(target)
        with pytest.raises(SnapshotError) as refused:
            store.restore(target, snapshot)
        assert refused.value.reason == reason
        assert store.counters.refused == {reason: 1}
        assert (target.n_past, others.bytes_of(target)) == (30, before)
    snapshot.close()


def test_a_closed_snapshot_is_refused(states: States) -> None:
    snapshot, _ = captured(states, 0, 40)
    snapshot.close()
    with pytest.raises(SnapshotError, match=CLOSED):
        states.store.restore(states.table.slots[0], snapshot)
    with pytest.raises(EngineClosed):
        snapshot.data(0)


def test_speeds_are_bytes_of_strips_by_time(states: States) -> None:
    counters = states.store.counters
    assert (counters.capture_gbs, counters.restore_gbs) == (0, 0)
    snapshot, _ = captured(states, 0, 40)
    for slot in states.table.slots:
        states.store.restore(slot, snapshot)
    n_bytes = sum(used(t, 40) for t in LAYOUT.tensors)
    assert (counters.n_captured, counters.captured_bytes) == (1, n_bytes)
    assert (counters.n_restored, counters.restored_bytes) == (3, 3 * n_bytes)
    assert counters.capture_gbs == pytest.approx(n_bytes / counters.capture_times.sum_s / 1e9)
    assert counters.restore_gbs == pytest.approx(3 * n_bytes / counters.restore_times.sum_s / 1e9)
    snapshot.close()


def test_a_state_from_elsewhere_is_filled_strip_by_strip(states: States) -> None:
    snapshot, expected = captured(states, 0, 3)  # with an empty strip
    asked = []

    def fill(i: int, target: np.ndarray) -> None:
        asked.append(i)
        target[:] = snapshot.data(i)

    copy = states.store.adopt(snapshot.contents, fill)
    assert copy is not None
    assert asked == [0, 1, 2, 4]
    assert len(snapshot.data(3)) == 0
    snapshot.close()
    states.store.restore(states.table.slots[2], copy)
    assert states.bytes_of(states.table.slots[2]) == expected
    copy.close()


def test_a_state_that_cannot_be_filled_leaves_nothing(states: States) -> None:
    contents = Contents(
        tokens=np.arange(9, dtype=np.int32), fingerprint=FINGERPRINT, strips=layout_strips(LAYOUT, 9)
    )

    def fill(i: int, target: np.ndarray) -> None:
        if i == 2:
            raise SnapshotError("data is damaged")

    held = states.ledger.charged("CPU")
    with pytest.raises(SnapshotError, match="damaged"):
        states.store.adopt(contents, fill)
    assert (states.memory.n_held, states.ledger.charged("CPU")) == (0, held)


@pytest.mark.parametrize(
    ("kind", "place"),
    [("gpu", "host"), ("igpu", "device"), ("cpu", "device"), ("meta", "host"), ("accel", "host")],
)
def test_where_snapshots_lie_is_a_matter_of_the_device(kind: DeviceKind, place: str) -> None:
    assert snapshot_place(kind) == place


def test_pinned_memory_that_does_not_exist_is_asked_for_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING), opened(pinned=True) as states:
        for _ in range(3):
            captured(states, 0, 10)[0].close()
    assert [r.message for r in caplog.records] == [
        "CPU has no pinned memory: snapshots lie in ordinary memory"
    ]


@pytest.fixture
def ring(states: States) -> Iterator[Ring]:
    """A companion full of noise that has seen 40 positions."""
    arena = TensorArena(states.backend, states.ledger, "ring", n_tensors=2)
    ring = Ring(arena.declare("ring", ElementType.I8, 8, 16), arena.declare("row", ElementType.I8, 4))
    arena.allocate()
    for tensor in (ring.cells, ring.row):
        write(tensor, states.rng.integers(1, 256, tensor.n_bytes, dtype=np.uint8))
    ring.n_seen = 40
    yield ring
    arena.close()


@pytest.mark.parametrize("n_past", [5, 40])
def test_a_companion_is_captured_and_restored_with_its_slot(states: States, ring: Ring, n_past: int) -> None:
    ring.n_seen = n_past
    slot = states.table.slots[0]
    states.fill(slot, n_past)
    image, held = states.expected(states.bytes_of(slot), n_past), ring.bytes()
    snapshot = states.store.capture(slot, IDS[:n_past], ring)
    assert snapshot is not None
    assert snapshot.n_bytes == states.store.estimate(n_past, ring)
    assert snapshot.contents.companion == "ring"
    write(ring.cells, bytes([7] * 128))
    write(ring.row, bytes([7] * 4))
    states.store.restore(states.table.slots[1], snapshot, ring)
    n_used = 8 * min(n_past, 16)
    assert ring.bytes() == held[:n_used] + bytes(128 - n_used) + held[128:]
    assert ring.calls == ["forget", f"resume {n_past}"]
    assert states.bytes_of(states.table.slots[1]) == image
    states.store.restore(states.table.slots[2], snapshot)  # nobody there to take the rest
    assert states.bytes_of(states.table.slots[2]) == image
    assert states.store.counters.n_without_companion == 0
    snapshot.close()


def test_a_companion_that_has_missed_something_is_left_out(states: States, ring: Ring) -> None:
    states.fill(states.table.slots[0], 41)
    snapshot = states.store.capture(states.table.slots[0], IDS[:41], ring)
    assert snapshot is not None
    assert (snapshot.contents.companion, snapshot.contents.companion_strips) == ("", ())
    states.store.restore(states.table.slots[1], snapshot, ring)
    assert ring.calls == ["forget"]
    assert states.store.counters.n_without_companion == 2
    snapshot.close()


@pytest.mark.parametrize("other", ["kind", "strips"])
def test_another_companion_forgets_and_the_slot_is_restored(states: States, ring: Ring, other: str) -> None:
    states.fill(states.table.slots[0], 40)
    expected = states.expected(states.bytes_of(states.table.slots[0]), 40)
    snapshot = states.store.capture(states.table.slots[0], IDS[:40], ring)
    assert snapshot is not None
    if other == "kind":
        ring.kind = "another"
    else:
        ring.n_cells = 12
    states.store.restore(states.table.slots[1], snapshot, ring)
    assert (ring.calls, any(ring.bytes())) == (["forget"], False)
    assert states.bytes_of(states.table.slots[1]) == expected
    snapshot.close()


def test_a_companion_of_a_restore_that_fails_has_seen_nothing(
    states: States, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    states.fill(states.table.slots[0], 40)
    snapshot = states.store.capture(states.table.slots[0], IDS[:40], ring)
    assert snapshot is not None
    monkeypatch.setattr(snapshot_store, "Transfer", Failing)
    Failing.n_left = len(LAYOUT.tensors) + 1  # one of the companion's strips gets there
    with pytest.raises(BackendError):
        states.store.restore(states.table.slots[1], snapshot, ring)
    assert ring.calls == ["forget", "resume 40", "forget"]
    assert not any(ring.bytes())
    assert not ring.covers(40)
    snapshot.close()


def test_snapshots_in_system_memory_outlive_what_computed_them() -> None:
    """As where a model's memory is given back and taken again."""
    host, ledger = Backend(choose_device("CPU"), threads=1), Ledger()
    tables = []
    for n_ctx in (64, 48):
        compute = Backend(choose_device("CPU"), threads=1)
        layout = StateLayout(n_ctx=n_ctx, tensors=at_most(n_ctx))
        table = SlotTable(compute, ledger, layout, 2)
        tables.append((compute, table))
        if n_ctx == 64:
            memory = SnapshotMemory(compute, host, ledger)
            states = States(compute, ledger, table, store_of(table, compute, memory))
            snapshot, expected = captured(states, 0, 40)
            assert memory.outlives_compute
            table.close()
            compute.close()
    compute, table = tables[-1]
    states = States(compute, ledger, table, store_of(table, compute, memory))
    states.store.restore(table.slots[1], snapshot)
    image = states.bytes_of(table.slots[1])
    assert {n: data.ljust(len(expected[n]), b"\0") for n, data in image.items()} == expected
    for each in (snapshot, table, compute, host):
        each.close()


def at_most(n_ctx: int) -> tuple[StateTensor, ...]:
    """The tensors of LAYOUT with room for `n_ctx` positions."""
    return tuple(
        replace(t, shape=(t.shape[0], n_ctx // t.positions_per_row)) if t.grows else t for t in LAYOUT.tensors
    )


def store_of(table: SlotTable, compute: Backend, memory: SnapshotMemory) -> SnapshotStore:
    return SnapshotStore(table, compute, memory, fingerprint=FINGERPRINT)


def test_strips_are_equal_when_they_mean_the_same() -> None:
    a = Strip(name="k", type=ElementType.F16, shape=(32, 7))
    assert a == Strip(name="k", type=ElementType.F16, shape=(32, 7))
    assert a != Strip(name="k", type=ElementType.BF16, shape=(32, 7))
    assert a.n_bytes == 448
