"""A drafter that is restored with its slot proposes what it would have, and sees what follows (B10)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from pyggml_dflash.engine.drafting import Backlog
from pyggml_dflash.ggml.arena import read_bytes
from pyggml_dflash.state.fingerprint import fingerprint
from pyggml_dflash.state.snapshot import SnapshotMemory
from pyggml_dflash.state.snapshot_store import SnapshotStore
from pyggml_dflash.state.strips import Companion
from tests.drafts.drafted import Drafted, draft_file, open_target, with_draft, with_mtp
from tests.engine.tiny import prompt
from tests.reference.stored import model_file

MTP = {"mtp": "qwen35-tiny", "mtp of streams": "qwen4exp-tiny"}
DRAFTS = ("dflash-tiny", "dflash2-tiny", "dflash-swa-tiny", *MTP)


@contextmanager
def drafted_and_stored(name: str, folder: Path) -> Iterator[tuple[Drafted, SnapshotStore, Companion]]:
    """A target with its drafter, and a store for both their states."""
    with ExitStack() as stack:
        path = model_file(MTP.get(name, "qwen35-tiny"), "F32", folder)
        target = stack.enter_context(open_target(path, mtp=name in MTP))
        drafting = with_mtp(target) if name in MTP else with_draft(target, draft_file(name, folder))
        drafted = stack.enter_context(drafting)
        memory = SnapshotMemory(target.backend, target.backend, target.ledger)
        mark = fingerprint(b"model", target.slots.layout, {})
        store = SnapshotStore(target.slots, target.backend, memory, fingerprint=mark)
        yield drafted, store, drafted.drafter


def held(companion: Companion, n_past: int) -> list[bytes]:
    """The bytes of every strip."""
    return [read_bytes(p.tensor, p.offset, p.strip.n_bytes) for p in companion.parts(n_past)]


def went_on(drafted: Drafted, tokens: list[int]) -> list[tuple[int, ...]]:
    """Proposals now, and after one and forty more tokens, with verified ones that are taken back between."""
    found = [drafted.propose(9).tokens]
    drafted.step([tokens[0], 5, 6, 7], 1)
    found.append(drafted.propose(tokens[1]).tokens)
    drafted.feed(tokens[1:40])
    found.append(drafted.propose(tokens[40]).tokens)
    return found


@pytest.mark.parametrize("n_past", [1, 37, 300])
@pytest.mark.parametrize("name", DRAFTS)
def test_a_restored_drafter_proposes_as_before(name: str, n_past: int, tmp_path: Path) -> None:
    tokens, other = prompt(n_past + 60), prompt(400, seed=3)
    with drafted_and_stored(name, tmp_path) as (drafted, store, companion):
        slot = drafted.target.slot
        drafted.begin()
        drafted.feed(tokens[:n_past])
        drafted.propose(9)  # writes cells behind the sequence
        snapshot = store.capture(slot, tokens[:n_past], companion)
        assert snapshot is not None
        assert snapshot.contents.companion == companion.kind
        before = held(companion, n_past)
        expected = went_on(drafted, tokens[n_past:])
        drafted.begin()
        drafted.feed(other)
        drafted.propose(5)
        store.restore(slot, snapshot, companion)
        assert companion.covers(n_past)
        assert held(companion, n_past) == before
        assert went_on(drafted, tokens[n_past:]) == expected
        for part in companion.parts(n_past):
            assert part.n_written <= part.tensor.n_bytes
        snapshot.close()


@pytest.mark.parametrize("name", DRAFTS)
def test_nothing_of_another_sequence_is_left_in_a_restored_drafter(name: str, tmp_path: Path) -> None:
    with drafted_and_stored(name, tmp_path) as (drafted, store, companion):
        drafted.begin()
        drafted.feed(prompt(20))
        snapshot = store.capture(drafted.target.slot, prompt(20), companion)
        assert snapshot is not None
        drafted.begin()
        drafted.feed(prompt(400, seed=3))
        drafted.propose(5)
        store.restore(drafted.target.slot, snapshot, companion)
        for part in companion.parts(20):
            if part.tensor.name.endswith(("k", "v", "pooled")):
                n = part.tensor.n_bytes - part.strip.n_bytes
                assert not any(read_bytes(part.tensor, part.strip.n_bytes, n)), part.tensor.name
        snapshot.close()


@pytest.mark.parametrize("name", DRAFTS)
def test_a_drafter_without_its_state_says_that_it_has_seen_nothing(name: str, tmp_path: Path) -> None:
    with drafted_and_stored(name, tmp_path) as (drafted, store, companion):
        slot = drafted.target.slot
        drafted.begin()
        drafted.feed(prompt(30))
        plain = store.capture(slot, prompt(30))
        drafted.forwards.decode(slot, 7)
        slot.commit(1)  # a token that the drafter was not shown
        missed = store.capture(slot, [*prompt(30), 7], companion)
        assert plain is not None
        assert missed is not None
        for snapshot in (plain, missed):
            assert snapshot.contents.companion == ""
            store.restore(slot, snapshot, companion)
            assert slot.n_past == snapshot.contents.n_past
            assert companion.covers(0)
            assert not companion.covers(slot.n_past)
            snapshot.close()
        drafted.begin()  # the next sequence is as any
        drafted.feed(prompt(30))
        assert companion.covers(30)
        np.testing.assert_array_less(0, len(drafted.propose(9).tokens))


def run(drafted: Drafted, backlog: Backlog, tokens: list[int]) -> None:
    """Run a piece of a prompt whose rows wait."""
    slot = drafted.target.slot
    backlog.make_room(len(tokens))
    drafted.forwards.prefill(slot, tokens, "none", capture=True)
    backlog.add(tokens, slot.n_past)
    slot.commit(len(tokens))


@pytest.mark.parametrize("name", DRAFTS)
def test_rows_that_wait_are_stored_and_do_not_survive_a_restore(name: str, tmp_path: Path) -> None:
    tokens, other = prompt(110), prompt(90, seed=3)
    with drafted_and_stored(name, tmp_path) as (drafted, store, _):
        slot, backlog = drafted.target.slot, Backlog(drafted.forwards, drafted.drafter)
        slot.reset()
        backlog.begin()
        for start, stop in ((0, 40), (40, 60)):
            run(drafted, backlog, tokens[start:stop])
        assert drafted.forwards.recorded[0] == 60
        snapshot = store.capture(slot, tokens[:60], backlog)
        assert snapshot is not None
        assert snapshot.contents.companion_strips
        run(drafted, backlog, tokens[60:])
        backlog.take()
        expected = drafted.propose(9)
        slot.reset()
        backlog.begin()
        run(drafted, backlog, other[:33])
        backlog.take()
        run(drafted, backlog, other[33:60])  # waits when the other sequence is put back
        store.restore(slot, snapshot, backlog)
        assert drafted.forwards.recorded[0] == 0
        assert backlog.covers(60)
        run(drafted, backlog, tokens[60:])
        assert backlog.covers(110)
        assert drafted.propose(9) == expected
        run(drafted, backlog, other[:10])
        backlog.forget()
        assert drafted.forwards.recorded[0] == 0
        assert backlog.covers(0)
        snapshot.close()


def test_drafts_of_other_files_are_of_other_kinds(tmp_path: Path) -> None:
    kinds, names = set(), DRAFTS[:4]
    for name in names:
        with drafted_and_stored(name, tmp_path) as (_, _, companion):
            kinds.add(companion.kind)
            assert companion.kind == companion.kind
    assert len(kinds) == len(names)
