"""Prompts continue stored states and leave states behind: the prefix cache at work. Layer 6.

A `Reuse` owns every snapshot, the memory they lie in and the folder behind them. It outlives the slots:
`bind` ties it to those of an engine that was loaded, `unbind` lets them go. What is stored never changes an
answer: where the forwards of a prompt end does not depend on it, and a state is restored as it was captured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pyggml_dflash.errors import DflashError, SnapshotError
from pyggml_dflash.ggml.device import Backend, devices
from pyggml_dflash.ggml.heap import release_free_heap
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.requests import FolderStats, SnapshotStats, StoredPrefix
from pyggml_dflash.state.cuts import MIN_CUT, PromptEnds, capture_points
from pyggml_dflash.state.disk_tier import DiskTier
from pyggml_dflash.state.eviction import Limits
from pyggml_dflash.state.fingerprint import Digest
from pyggml_dflash.state.prefix_cache import PrefixCache
from pyggml_dflash.state.prefix_match import Match
from pyggml_dflash.state.slot import Slot, SlotTable
from pyggml_dflash.state.snapshot import Contents, Snapshot, SnapshotMemory, Tokens, snapshot_place
from pyggml_dflash.state.snapshot_store import COPY_FAILED, Fill, SnapshotCounters, SnapshotStore
from pyggml_dflash.state.strips import Companion


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """What may be stored: states and bytes in memory, and a folder's bytes."""

    n_bytes: int
    n_entries: int
    pinned: bool = False
    folder: Path | None = None
    folder_bytes: int = 0
    min_tokens: int = 1  # of a state in the folder


@dataclass(slots=True)
class Continued:
    """A prompt in a slot: what of it was restored, and where its state is still to be captured."""

    tokens: Tokens
    match: Match
    own: int = 0  # where it alone has an end
    points: dict[int, bool] = field(default_factory=dict)  # position -> kept longer than others


class Reuse:
    """The stored states of one model, and what becomes of prompts. Used on the engine's thread."""

    def __init__(self, ledger: Ledger, limits: StoreLimits, *, fingerprint: Digest) -> None:
        """`UsageError` if the folder cannot be used."""
        self.ledger, self.limits, self.fingerprint = ledger, limits, fingerprint
        self._counters = SnapshotCounters()
        self._store: SnapshotStore | None = None
        self._memory: SnapshotMemory | None = None
        with ExitStack() as stack:
            self._host = Backend(next(d for d in devices() if d.kind == "cpu"), threads=1)
            stack.callback(self._host.close)
            self.tier: DiskTier[Snapshot] | None = None
            if limits.folder is not None:
                self.tier = DiskTier(
                    limits.folder,
                    self._adopt,
                    fingerprint=fingerprint,
                    budget_bytes=limits.folder_bytes,
                    min_tokens=limits.min_tokens,
                )
            self.cache: PrefixCache[Snapshot] = PrefixCache(
                fingerprint=fingerprint,
                limit_bytes=limits.n_bytes,
                max_entries=limits.n_entries,
                lower=self.tier,
            )
            stack.callback(self.cache.close)
            self._stack = stack.pop_all()

    @property
    def store(self) -> SnapshotStore:
        """What moves states; there is one while an engine is loaded."""
        assert self._store is not None, "no slots are bound"
        return self._store

    def bind(self, slots: SlotTable, compute: Backend, *, chunk: int) -> None:
        """Serve the slots of an engine on `compute`; its forwards of prompts have at most `chunk` rows."""
        limits, on_device = self.limits, snapshot_place(compute.info.kind) == "device"
        if self._memory is None:
            self._memory = SnapshotMemory(
                compute,
                self._host,
                self.ledger,
                pinned=limits.pinned,
                allowance=limits.n_bytes if on_device else None,
            )
        self._store = SnapshotStore(
            slots, compute, self._memory, fingerprint=self.fingerprint, counters=self._counters
        )
        self._chunk = chunk

    def limit(self, n_bytes: int) -> None:
        """Store at most so much from now on; the longest unused go where it is exceeded."""
        self.limits = replace(self.limits, n_bytes=n_bytes)
        self.cache.resize(Limits(n_entries=self.limits.n_entries, n_bytes=n_bytes))
        if self._memory is not None and self._memory.allowance is not None:
            self._memory.allowance = n_bytes

    def unbind(self) -> None:
        """Let the slots and their device go, and with it states in its memory, which the folder keeps."""
        if self._store is None:
            return
        self._store = None
        assert self._memory is not None
        if not self._memory.outlives_compute:
            self.cache.flush()
            self.cache.clear()
            self._memory = None

    def close(self) -> None:
        """Save what the folder lacks, then free everything; a second call does nothing."""
        self.unbind()
        self.cache.flush()
        self._stack.close()

    # a prompt

    def begin(
        self,
        slot: Slot,
        tokens: Sequence[int],
        *,
        boundaries: Sequence[int],
        ends: PromptEnds,
        keep_head: bool = False,
        companion: Companion | None = None,
    ) -> Continued:
        """Have an empty slot hold the longest stored state that the prompt continues, if there is one.

        Turns begin at the `boundaries`, forwards end at the `ends`. At least one token is left to run.
        `companion`: what else takes part in the sequence; it tells whether it covers what was restored.
        States that have rows only, and no companion, are continued from any of the ends that prompts share.
        """
        ids = np.array(tokens, np.int32)
        if companion is not None:
            companion.forget()
        match = self.cache.reuse(
            ids,
            lambda found, n_past: self._restore(slot, found, companion, n_past),
            own=ends.own,
            cuts=ends.shared if companion is None and self.store.has_rows_only else (),
        )
        assert slot.n_past == match.n_reused < len(ids)
        points = capture_points(
            len(ids),
            boundaries,
            ends,
            n_restored=match.n_reused,
            n_common=match.n_common,
            has_tools=keep_head,
            chunk=self._chunk,
        )
        return Continued(ids, match, ends.own, {point.position: point.protect for point in points})

    def _restore(self, slot: Slot, snapshot: Snapshot, companion: Companion | None, n_past: int) -> None:
        try:
            self.store.restore(slot, snapshot, companion, n_past=n_past)
        except SnapshotError:
            raise
        except DflashError as error:  # half-way
            slot.reset()
            raise SnapshotError(COPY_FAILED, str(error)) from error

    def after_forward(self, prompt: Continued, slot: Slot, companion: Companion | None = None) -> None:
        """A forward of the prompt is committed: store the state if it is one of those worth it."""
        protect = prompt.points.pop(slot.n_past, None)
        if protect is not None:
            self._capture(prompt, slot, companion, protect=protect)

    def leave(self, prompt: Continued, slot: Slot, companion: Companion | None = None) -> None:
        """The rest of the prompt will not run: store what was computed, for when it is asked again."""
        n_past = slot.n_past
        if MIN_CUT <= n_past < len(prompt.tokens) and n_past > prompt.match.n_reused:
            self._capture(prompt, slot, companion, protect=False)

    def _capture(self, prompt: Continued, slot: Slot, companion: Companion | None, *, protect: bool) -> None:
        n_past, memory = slot.n_past, self.store.memory
        n_bytes = self.store.estimate(n_past, companion)
        ticket = self.cache.reserve(
            prompt.tokens,
            n_past,
            n_bytes,
            n_restored=prompt.match.n_reused,
            protect=protect,
            own=n_past == prompt.own,
        )
        if ticket is None:
            return
        ticket.clear_the_way(lambda: memory.fits(n_bytes))
        snapshot = self.store.capture(slot, prompt.tokens[:n_past], companion)
        if snapshot is None:
            ticket.abort()
        else:
            ticket.commit(snapshot)

    def _adopt(self, contents: Contents, fill: Fill) -> Snapshot | None:
        memory, n_bytes = self.store.memory, contents.n_bytes
        self.cache.clear_the_way(contents.tokens, n_bytes, lambda: memory.fits(n_bytes))
        return self.store.adopt(contents, fill)

    # what is stored

    def list(self) -> tuple[StoredPrefix, ...]:
        """What is in memory, the longest unused first."""
        return tuple(
            StoredPrefix(
                tokens=tuple(entry.tokens.tolist()),
                n_past=len(entry.tokens),
                n_bytes=entry.n_bytes,
                protected=entry.protected,
                saved=entry.saved,
            )
            for entry in self.cache.entries
        )

    def clear(self) -> None:
        """Free what is in memory, and give it back to the system; the folder keeps what it has."""
        self.cache.clear()
        release_free_heap()

    def flush(self) -> int:
        """Save to the folder what it lacks; how many states it took. 0 without a folder."""
        return self.cache.flush()

    def stats(self) -> SnapshotStats:
        """What is stored now, and what became of prompts, captures and restores."""
        cache, moved, memory = self.cache.counters, self._counters, self._memory
        return SnapshotStats(
            place="host" if memory is None else memory.place,
            n_states=len(self.cache.entries),
            n_bytes=self.cache.n_bytes,
            limit_bytes=self.limits.n_bytes,
            captured=moved.n_captured,
            captured_bytes=moved.captured_bytes,
            capture_times=moved.capture_times,
            capture_failures=dict(moved.failed),
            capture_skips=_summed(cache.skipped, moved.skipped),
            restored=moved.n_restored,
            restored_bytes=moved.restored_bytes,
            restore_times=moved.restore_times,
            unusable=dict(cache.unusable),
            without_drafter=moved.n_without_companion,
            evicted=cache.n_evicted,
            superseded=cache.n_superseded,
            hits=_summed(cache.hits),
            misses=_summed(cache.misses),
            prompt_tokens=cache.n_prompt,
            reused_tokens=cache.n_reused,
            folder=None if self.tier is None else _folder_stats(self.tier),
        )


def _summed(*counts: Mapping[Any, int]) -> dict[str, int]:
    return dict(sum(map(Counter, counts), Counter()))


def _folder_stats(tier: DiskTier[Snapshot]) -> FolderStats:
    counters = tier.counters
    return FolderStats(
        n_states=tier.n_states,
        n_bytes=tier.n_bytes,
        saved=counters.n_saved,
        saved_bytes=counters.saved_bytes,
        save_s=counters.save_s,
        loaded=counters.n_loaded,
        loaded_bytes=counters.loaded_bytes,
        load_s=counters.load_s,
        evicted=counters.n_evicted,
        skipped=dict(counters.skipped),
        failed=dict(counters.failed),
    )
