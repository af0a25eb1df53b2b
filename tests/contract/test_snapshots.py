"""A restored state is the cold one bit by bit, for every architecture and cache type, in every slot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from pyggml_dflash.arch import ARCHITECTURES
from pyggml_dflash.errors import SnapshotError
from pyggml_dflash.ggml.arena import read_bytes
from pyggml_dflash.options import KV_TYPES, KVType
from pyggml_dflash.state.fingerprint import fingerprint
from pyggml_dflash.state.slot import RECENT_TOKENS, Slot
from pyggml_dflash.state.snapshot import Snapshot, SnapshotMemory
from pyggml_dflash.state.snapshot_store import SnapshotStore
from pyggml_dflash.state.strips import layout_strips
from tests.reference.opened import Floats, Parts, assembled, on_the_cpu
from tests.tiny import Tiny, tokens, write_tiny

N_SLOTS = 3
CUTS = (1, 7, 31, 63, 100)
END = 112  # behind the last cut a prompt goes on to here, then tokens are decoded
IDS = tokens(130, seed=31)
OTHER = tokens(170, seed=32)  # longer, so that it leaves more behind


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("snapshots"), Tiny(architecture=request.param))


@contextmanager
def stored(model: Path, cache: KVType) -> Iterator[tuple[Parts, SnapshotStore]]:
    """A model with three slots, and a store for their states."""
    options = on_the_cpu(model, max_ctx=256, chunk=256, cache_type_k=cache, cache_type_v=cache)
    with assembled(options, n_slots=N_SLOTS) as parts:
        memory = SnapshotMemory(parts.backend, parts.backend, parts.ledger)
        mark = fingerprint(b"model", parts.slots.layout, {})
        yield parts, SnapshotStore(parts.slots, parts.backend, memory, fingerprint=mark)


def image(parts: Parts, slot: Slot) -> dict[str, bytes]:
    """Every byte of a slot."""
    tensors = parts.slots.tensors
    return {
        t.name: read_bytes(tensors[t.name], slot.id * t.n_bytes, t.n_bytes)
        for t in parts.slots.layout.tensors
    }


def state(parts: Parts, slot: Slot) -> dict[str, bytes]:
    """The slot's bytes with zeros where its positions left nothing, as in rows that are not complete."""
    strips = layout_strips(parts.slots.layout, slot.n_past)
    return {
        name: data[: strip.n_bytes].ljust(len(data), b"\0")
        for strip, (name, data) in zip(strips, image(parts, slot).items(), strict=True)
    }


def run(parts: Parts, slot: Slot, ids: list[int]) -> Floats:
    logits = parts.forwards.prefill(slot, ids, "last")
    slot.commit(len(ids))
    assert logits is not None
    return logits[0]


def go_on(parts: Parts, slot: Slot, cut: int) -> list[Floats]:
    """Logits of what follows a cut: the rest of the prompt, then decoded tokens."""
    found = [run(parts, slot, IDS[cut:END])]
    for token in IDS[END : END + 4]:
        found.append(parts.forwards.decode(slot, token).copy())
        slot.commit(1)
    return found


@dataclass(frozen=True, slots=True)
class Cold:
    """A run with nothing stored: snapshot and state at its cut, what follows, the state at the end."""

    cut: int
    snapshot: Snapshot
    before: dict[str, bytes]
    logits: list[Floats]
    after: dict[str, bytes]


def cold_run(parts: Parts, store: SnapshotStore, slot: Slot, cut: int) -> Cold:
    slot.reset()
    run(parts, slot, IDS[:cut])
    snapshot = store.capture(slot, IDS[:cut])
    assert snapshot is not None
    assert snapshot.n_bytes == store.estimate(cut)
    before = state(parts, slot)
    return Cold(cut, snapshot, before, go_on(parts, slot, cut), state(parts, slot))


def run_other(parts: Parts, slot: Slot) -> None:
    """Have a slot hold another text, longer than what is restored."""
    slot.reset()
    run(parts, slot, OTHER[slot.id :])


@pytest.mark.parametrize("cache", KV_TYPES)
def test_a_restored_state_is_the_cold_one_in_every_slot(model: Path, cache: KVType) -> None:
    with stored(model, cache) as (parts, store), ExitStack() as stack:
        slots = parts.slots.slots
        runs = [cold_run(parts, store, slots[1], cut) for cut in CUTS]
        for each in runs:
            stack.callback(each.snapshot.close)
        for slot in slots:
            run_other(parts, slot)
        others = [image(parts, slot) for slot in slots]
        for target in slots:
            for each in runs:
                store.restore(target, each.snapshot)
                assert (target.n_past, list(target.recent)) == (each.cut, IDS[: each.cut][-RECENT_TOKENS:])
                assert image(parts, target) == each.before  # what is behind the cut is zero
                np.testing.assert_array_equal(go_on(parts, target, each.cut), each.logits)
                assert state(parts, target) == each.after
            for slot in slots:
                assert slot is target or image(parts, slot) == others[slot.id]
            target.reset()
            assert not any(any(data) for data in image(parts, target).values())
            run_other(parts, target)
            assert image(parts, target) == others[target.id]
        assert store.counters.n_captured == len(CUTS)
        assert store.counters.n_restored == N_SLOTS * len(CUTS)
        assert not store.counters.failed
        stack.close()
        assert store.memory.n_held == parts.ledger.by_label("CPU").get("snapshots", 0) == 0


def test_a_state_grows_with_its_tokens_and_not_with_the_context(model: Path) -> None:
    sizes = []
    for max_ctx in (256, 1024):
        with assembled(on_the_cpu(model, max_ctx=max_ctx)) as parts:
            memory = SnapshotMemory(parts.backend, parts.backend, parts.ledger)
            store = SnapshotStore(parts.slots, parts.backend, memory, fingerprint=b"x")
            sizes.append([store.estimate(n) for n in (1, 64, 256)])
            layout = parts.slots.layout
            rows = [t for t in layout.tensors if t.grows and t.positions_per_row == 1]
            row_bytes = sum(t.type.row_bytes(t.shape[0]) for t in rows)
            grown = store.estimate(256) - store.estimate(128)
            assert 0 <= grown - 128 * (row_bytes + 4) <= grown // 4  # alignment, pooled rows
            assert store.estimate(256) >= layout.recurrent_bytes + 256 * row_bytes
    assert sizes[0] == sizes[1]


def test_a_state_of_another_model_or_layout_is_refused_and_changes_nothing(model: Path) -> None:
    with stored(model, "f16") as (parts, store), stored(model, "q8_0") as (others, other_store):
        slot, target = others.slots.slots[0], parts.slots.slots[2]
        run(others, slot, IDS[:40])
        run(parts, target, OTHER[:50])
        snapshot = other_store.capture(slot, IDS[:40])
        assert snapshot is not None
        before = image(parts, target)
        with pytest.raises(SnapshotError, match="another model or layout"):
            store.restore(target, snapshot)
        assert (target.n_past, image(parts, target)) == (50, before)
        assert store.counters.refused == {"another model or layout": 1}
        snapshot.close()
