"""State over several devices is stored and restored as on one."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

from pyggml_dflash.ggml.device import Backend, choose_device, named_device
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.state.slot import SlotTable
from pyggml_dflash.state.snapshot import SnapshotMemory
from pyggml_dflash.state.snapshot_store import SnapshotStore
from tests.engine.workers import workers
from tests.state.stored import FINGERPRINT, LAYOUT, N_SLOTS, States

IDS = np.arange(40, dtype=np.int32).tolist()
FAR = ("v", "memory")


@pytest.mark.parametrize("target", ["CPU", "worker"])
def test_a_state_over_two_devices_comes_back_in_another_slot(target: str) -> None:
    with workers(1) as (worker,), ExitStack() as stack:
        near, far = (choose_device("CPU"), named_device(worker.name))[:: 1 if target == "CPU" else -1]
        peer = Backend(far, threads=1)
        stack.callback(peer.close)
        backend = Backend(near, threads=1, peers=(peer,))
        stack.callback(backend.close)
        ledger = Ledger()

        def home(name: str) -> Backend:
            return peer if name in FAR else backend

        table = SlotTable(backend, ledger, LAYOUT, N_SLOTS, home)
        stack.callback(table.close)
        host = peer if peer.is_host else backend
        memory = SnapshotMemory(backend, host, ledger)
        states = States(
            backend, ledger, table, SnapshotStore(table, backend, memory, fingerprint=FINGERPRINT)
        )
        states.fill(table.slots[0], 33)
        expected = states.expected(states.bytes_of(table.slots[0]), 33)
        snapshot = states.store.capture(table.slots[0], IDS[:33])
        assert snapshot is not None
        stack.callback(snapshot.close)
        states.fill(table.slots[2], 40)
        states.store.restore(table.slots[2], snapshot)
        assert states.bytes_of(table.slots[2]) == expected
        assert ledger.charged(worker.name) == ledger.by_label(worker.name)["state"]
