"""The prefix cache: which stored state a prompt can continue, and which states are worth keeping. Layer 5.

It owns snapshots and knows nothing of what is in them. A prefix is found by comparing tokens; keys are
an index only. A state of rows alone may be continued from any forward's end in it, others from their end. A
hit counts once the state is in a slot. What has to go may be kept by a lower tier, such
as a folder of files, and comes back from there when it is asked for.

Capturing takes time, so room is reserved first: one `Ticket` at a time, which ends in `commit`, or in
`cancel` or `abort` with everything as it was. Nothing stored is freed before its successor is complete.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Generic

import numpy as np

from pyggml_dflash.errors import SnapshotError
from pyggml_dflash.options import MAX_PREFIXES
from pyggml_dflash.state.eviction import (
    Limits,
    Tokens,
    choose_by_bytes,
    choose_by_count,
    common_prefix,
    continues,
    make_room,
    superseded,
)
from pyggml_dflash.state.fingerprint import Digest, token_key
from pyggml_dflash.state.prefix_match import CacheCounters, LowerTier, Match, S, Stop

DEFAULT_ENTRIES: Final = 32

TAKEN: Final = "another capture is under way"
NOT_LONGER: Final = "nothing beyond what was restored"
KNOWN: Final = "stored already"
NO_ROOM: Final = "no room within the limits"
OWN: Final = b"own"  # in keys


@dataclass(slots=True, eq=False)
class Entry(Generic[S]):
    """One stored prefix."""

    stored: S
    key: Digest
    protected: bool = False
    own: bool = False  # continued by prompts alone that have the same own end
    saved: bool = False  # the lower tier has it
    n_pins: int = 0

    @property
    def tokens(self) -> Tokens:
        """int32 [n]."""
        return self.stored.tokens

    @property
    def n_bytes(self) -> int:
        """Memory that it takes."""
        return self.stored.n_bytes

    @property
    def pinned(self) -> bool:
        """True while somebody reads it."""
        return self.n_pins > 0


class PrefixCache(Generic[S]):
    """Stored states by the tokens that led to them, within limits. Used on one thread."""

    def __init__(
        self,
        *,
        fingerprint: Digest,
        limit_bytes: int | None = None,
        max_entries: int = DEFAULT_ENTRIES,
        lower: LowerTier[S] | None = None,
    ) -> None:
        assert 1 <= max_entries <= MAX_PREFIXES
        self._fingerprint, self._lower = fingerprint, lower
        self.limits = Limits(n_entries=max_entries, n_bytes=limit_bytes)
        self.counters = CacheCounters()
        self._entries: OrderedDict[Digest, Entry[S]] = OrderedDict()  # oldest use first
        self._open: weakref.ref[Ticket[S]] | None = None

    @property
    def entries(self) -> tuple[Entry[S], ...]:
        """What is stored, the longest unused first."""
        return tuple(self._entries.values())

    @property
    def n_bytes(self) -> int:
        """Memory of everything stored."""
        return sum(entry.n_bytes for entry in self._entries.values())

    def find(self, tokens: Sequence[int] | Tokens, *, own: int = 0, cuts: Sequence[int] = ()) -> Match:
        """The longest stored prefix that leaves a token to run; nothing is counted or changed.

        `own`: where forwards of this prompt have an end that is its own, see `cuts`. `cuts`: where else they
        end, ascending, if states may be continued from there that go on otherwise.
        """
        ids = np.asarray(tokens, np.int32)
        return self._find(ids, len(ids) - 1, own, cuts)[0]

    def _find(
        self, tokens: Tokens, most_lower: int, own: int, cuts: Sequence[int]
    ) -> tuple[Match, Entry[S] | None]:
        """`most_lower`: the longest prefix that the lower tier is asked for."""
        best: Entry[S] | None = None
        n_common, n_best, is_whole = 0, 0, False
        for entry in self._entries.values():
            n = common_prefix(entry.tokens, tokens)
            n_common = max(n_common, n)
            whole = n == len(entry.tokens) < len(tokens) and (not entry.own or n == own)
            n_usable = n if whole else _last(cuts, min(n, len(tokens) - 1))
            if (n_usable, whole) > (n_best, is_whole):
                best, n_best, is_whole = entry, n_usable, whole
        n_lower = 0 if self._lower is None else self._lower.longest(tokens[:most_lower], n_best)
        n_reused = max(n_best, n_lower)
        match = Match(
            n_prompt=len(tokens),
            n_reused=n_reused,
            n_common=max(n_common, n_reused),
            stop=self._why(tokens, n_reused, n_common, has_cuts=bool(cuts), is_whole=is_whole or n_lower > 0),
            tier="disk" if n_lower else "memory" if best is not None else None,
        )
        return match, None if n_lower else best

    def _why(self, tokens: Tokens, n_reused: int, n_common: int, *, has_cuts: bool, is_whole: bool) -> Stop:
        if not n_reused and not self._entries and not (self._lower and self._lower.n_states):
            return "nothing stored"
        if self._at(tokens) is not None:
            return "whole prompt"
        if n_reused >= n_common and is_whole:
            return "end of what is stored"
        return "no snapshot between" if n_common and not has_cuts else "differs"

    def reuse(
        self,
        tokens: Sequence[int] | Tokens,
        restore: Callable[[S, int], None],
        *,
        own: int = 0,
        cuts: Sequence[int] = (),
    ) -> Match:
        """Have `restore` put the longest usable stored prefix into a slot; what became of it.

        It is given a state and how many of its tokens. A state for which it raises `SnapshotError` is dropped
        and the next shorter one is tried. `own` and `cuts` as in `find`.
        """
        ids = np.asarray(tokens, np.int32)
        most_lower = len(ids) - 1
        self.counters.n_prompt += len(ids)
        while True:
            match, entry = self._find(ids, most_lower, own, cuts)
            if match.tier is None:
                self.counters.misses[match.stop] += 1
                return match
            try:
                if entry is None:
                    self._restore_lower(ids[: match.n_reused], restore)
                else:
                    restore(entry.stored, match.n_reused)
            except SnapshotError as error:
                self.counters.unusable[error.reason] += 1
                most_lower = min(most_lower, match.n_reused - 1)
                if entry is not None:
                    self._drop(entry)
                continue
            if entry is not None:
                self._entries.move_to_end(entry.key)
            self.counters.hits[match.tier] += 1
            self.counters.n_reused += match.n_reused
            return match

    def _restore_lower(self, tokens: Tokens, restore: Callable[[S, int], None]) -> None:
        assert self._lower is not None
        stored = self._lower.load(tokens)
        try:
            restore(stored, len(tokens))
        except BaseException:
            stored.close()
            raise
        self._insert(Entry(stored, self._key(tokens), saved=True))

    def reserve(
        self,
        tokens: Sequence[int] | Tokens,
        cut: int,
        n_bytes: int,
        *,
        n_restored: int = 0,
        protect: bool = False,
        own: bool = False,
    ) -> Ticket[S] | None:
        """Plan to store the state of the first `cut` tokens, which will take `n_bytes`; None: do not capture.

        `n_restored`: the prefix that the run was continued from. `own`: the cut is the prompt's own; what is
        stored there does not go to the lower tier. `counters.skipped` tells the reasons.
        """
        ids = np.array(tokens, np.int32)[:cut]
        assert len(ids) == cut > 0
        reason = self._refusal(ids, n_restored, own)
        source = self._at(ids[:n_restored])
        victims = None if reason else make_room(self.entries, ids, n_bytes, self.limits, source, own=own)
        if victims is None:
            self.counters.skipped[reason or NO_ROOM] += 1
            return None
        ticket = Ticket(self, ids, source, victims, protect=protect, own=own)
        self._open = weakref.ref(ticket)  # a ticket that is lost is as good as cancelled
        return ticket

    @property
    def reserved(self) -> Ticket[S] | None:
        """The open ticket."""
        return None if self._open is None else self._open()

    def _refusal(self, tokens: Tokens, n_restored: int, own: bool) -> str:
        """Why a state of `tokens` is not worth capturing now; '' if it is."""
        if self.reserved is not None:
            return TAKEN
        if len(tokens) <= n_restored:
            return NOT_LONGER
        return "" if self._at(tokens, own) is None else KNOWN

    @contextmanager
    def pin(self, tokens: Sequence[int] | Tokens) -> Iterator[S | None]:
        """The state of exactly these tokens, which is not freed meanwhile; None if memory has none."""
        entry = self._at(np.asarray(tokens, np.int32))
        if entry is None:
            yield None
            return
        entry.n_pins += 1
        try:
            yield entry.stored
        finally:
            entry.n_pins -= 1
            if not entry.pinned and self._entries.get(entry.key) is not entry:
                entry.stored.close()

    def _insert(self, entry: Entry[S], source: Entry[S] | None = None) -> bool:
        """Take ownership; False if there is no room, the state is closed then."""
        known = self._at(entry.tokens, entry.own)
        others = [other for other in self._entries.values() if other is not known]
        victims = make_room(others, entry.tokens, entry.n_bytes, self.limits, source, own=entry.own)
        if victims is None:
            entry.stored.close()
            return False
        if known is not None:
            entry.protected |= known.protected
        for old in superseded(others, entry.tokens, own=entry.own):
            self._drop(old)
            self.counters.n_superseded += 1
        for old in victims:
            self._evict(old)
        if entry.key in self._entries:  # the same tokens, or others with the same key
            self._drop(self._entries[entry.key])
        self._entries[entry.key] = entry
        return True

    def clear_the_way(
        self, tokens: Sequence[int] | Tokens, n_bytes: int, has_room: Callable[[], bool]
    ) -> None:
        """As that of a ticket, for a state of `tokens` that comes from the lower tier and takes `n_bytes`.

        Nobody goes where that would not be enough.
        """
        ids = np.asarray(tokens, np.int32)
        victims = make_room(self.entries, ids, n_bytes, self.limits)
        if victims is not None:
            self._let_go(superseded(self.entries, ids), victims, has_room)

    def _let_go(
        self, replaced: Sequence[Entry[S]], victims: Sequence[Entry[S]], has_room: Callable[[], bool]
    ) -> None:
        for entry in replaced:
            if has_room():
                return
            self._drop(entry)
            self.counters.n_superseded += 1
        for entry in victims:
            if has_room():
                return
            self._evict(entry)

    def resize(self, limits: Limits) -> None:
        """Other limits; what exceeds them goes, as it would for a new state."""
        self.limits = limits
        while self._entries:
            excess = 0 if limits.n_bytes is None else self.n_bytes - limits.n_bytes
            if excess > 0:
                victim = choose_by_bytes(self.entries, excess)
            elif len(self._entries) > limits.n_entries:
                victim = choose_by_count(self.entries)
            else:
                return
            if victim is None:  # all are pinned
                return
            self._evict(victim)

    def _evict(self, entry: Entry[S]) -> None:
        self._save(entry)
        self._drop(entry)
        self.counters.n_evicted += 1

    def _save(self, entry: Entry[S]) -> None:
        if self._lower is None or entry.saved or entry.own:
            return
        if self._lower.save(entry.stored):
            entry.saved = True
            self.counters.n_saved += 1

    def flush(self) -> int:
        """Save what the lower tier does not have, newest first; how many states it kept."""
        before = self.counters.n_saved
        for entry in reversed(self.entries):
            self._save(entry)
        return self.counters.n_saved - before

    def clear(self) -> None:
        """Free everything; counters and the lower tier stay."""
        for entry in self.entries:
            self._drop(entry)

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        self.clear()

    def _drop(self, entry: Entry[S]) -> None:
        del self._entries[entry.key]
        if not entry.pinned:
            entry.stored.close()

    def _at(self, tokens: Tokens, own: bool = False) -> Entry[S] | None:
        """The entry of exactly these tokens."""
        entry = self._entries.get(self._key(tokens, own))
        return entry if entry is not None and np.array_equal(entry.tokens, tokens) else None

    def _key(self, tokens: Tokens, own: bool = False) -> Digest:
        return token_key(self._fingerprint + OWN if own else self._fingerprint, tokens)


def _last(cuts: Sequence[int], most: int) -> int:
    """The last of the ascending cuts up to `most`, or 0."""
    i = bisect_right(cuts, most)
    return cuts[i - 1] if i else 0


class Ticket(Generic[S]):
    """Room for one state to come. Ends with the first of its methods that is called, or when it is lost."""

    __slots__ = ("__weakref__", "_cache", "_own", "_protect", "_source", "tokens", "victims")

    def __init__(
        self,
        cache: PrefixCache[S],
        tokens: Tokens,
        source: Entry[S] | None,
        victims: list[Entry[S]],
        *,
        protect: bool,
        own: bool,
    ) -> None:
        self._cache, self.tokens, self._source = cache, tokens, source
        self._protect, self._own = protect, own
        self.victims = victims  # who would go now; `commit` looks again

    @property
    def cut(self) -> int:
        """Position that the state is to be captured at."""
        return len(self.tokens)

    def commit(self, stored: S) -> bool:
        """Store the state of `tokens`; the cache owns it now. False if there is no room any more."""
        assert len(stored.tokens) == self.cut
        return self._store(stored)

    def commit_at(self, stored: S) -> bool:
        """`commit` for a state that was captured earlier than at `cut`."""
        assert len(stored.tokens) < self.cut
        return self._store(stored)

    def _store(self, stored: S) -> bool:
        counters = self._cache.counters
        self._end()
        assert np.array_equal(stored.tokens, self.tokens[: len(stored.tokens)])
        source = self._source
        if source is not None and not (
            source in self._cache.entries and continues(stored.tokens, source.tokens)
        ):
            source = None
        own = self._own and len(stored.tokens) == self.cut
        entry = Entry(stored, self._cache._key(stored.tokens, own), self._protect, own)
        if not self._cache._insert(entry, source):
            counters.skipped[NO_ROOM] += 1
            return False
        counters.n_committed += 1
        return True

    def clear_the_way(self, has_room: Callable[[], bool]) -> None:
        """Let go now of those who have to, one after the other, until there is room: for memory that cannot
        hold them beside their successor."""
        self._cache._let_go(
            superseded(self._cache.entries, self.tokens, own=self._own), self.victims, has_room
        )

    def cancel(self) -> None:
        """Give the room back: nothing was captured."""
        self._end()
        self._cache.counters.n_cancelled += 1

    def abort(self) -> None:
        """Give the room back: capturing failed."""
        self._end()
        self._cache.counters.n_aborted += 1

    def _end(self) -> None:
        assert self._cache.reserved is self, "the ticket has ended"
        self._cache._open = None
