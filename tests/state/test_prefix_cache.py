"""The prefix cache finds the longest usable prefix, keeps to its limits, and frees everything once."""

from __future__ import annotations

import gc
import hashlib
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pyggml_dflash.arch.base import StateLayout, StateTensor
from pyggml_dflash.errors import SnapshotError
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.state import prefix_cache
from pyggml_dflash.state.eviction import Limits, Tokens
from pyggml_dflash.state.fingerprint import PrefixHash, token_key
from pyggml_dflash.state.prefix_cache import KNOWN, NO_ROOM, NOT_LONGER, TAKEN, PrefixCache, Ticket
from pyggml_dflash.state.prefix_match import Match, automatic_limit
from pyggml_dflash.state.snapshot import Snapshot
from tests.state.stored import FINGERPRINT, opened
from tests.state.texts import Text, ids

GIB = 2**30
MARK = bytes(16)


def cache_of(
    *texts: str | Text, limit: int | None = None, most: int = 8, lower: Shelf | None = None
) -> PrefixCache[Text]:
    """A cache that has these texts, the oldest first."""
    cache: PrefixCache[Text] = PrefixCache(fingerprint=MARK, limit_bytes=limit, max_entries=most, lower=lower)
    for text in texts:
        put(cache, text)
    return cache


def put(
    cache: PrefixCache[Text], text: str | Text, *, source: str = "", protect: bool = False, own: bool = False
) -> bool:
    """Reserve and commit."""
    stored = Text(text) if isinstance(text, str) else text
    ticket = cache.reserve(
        stored.tokens,
        len(stored.tokens),
        stored.n_bytes,
        n_restored=len(source),
        protect=protect,
        own=own,
    )
    return ticket is not None and ticket.commit(stored)


def held(cache: PrefixCache[Text]) -> list[str]:
    return [entry.stored.text for entry in cache.entries]


def reuse(
    cache: PrefixCache[Text], prompt: str, bad: Sequence[str] = (), *, cuts: Sequence[int] = ()
) -> tuple[Match, list[str]]:
    """What is reused for a prompt, and which texts were tried; states of those in `bad` are not usable."""
    tried: list[str] = []

    def restore(stored: Text, n: int) -> None:
        assert not stored.closed
        assert n == len(stored.text) or n in cuts
        tried.append(stored.text[:n])
        if stored.text in bad:
            raise SnapshotError("bad")

    return cache.reuse(ids(prompt), restore, cuts=cuts), tried


class Shelf:
    """A lower tier in memory; texts in `broken` cannot be loaded."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.broken: set[str] = set()
        self.out: list[Text] = []

    @property
    def n_states(self) -> int:
        return len(self.texts)

    def longest(self, tokens: Tokens, above: int) -> int:
        prompt = "".join(map(chr, tokens))
        return max((len(t) for t in self.texts if prompt.startswith(t) and len(t) > above), default=0)

    def load(self, tokens: Tokens) -> Text:
        text = "".join(map(chr, tokens))
        if text in self.broken:
            raise SnapshotError("broken")
        self.out.append(Text(text))
        return self.out[-1]

    def save(self, stored: Text) -> bool:
        self.texts.append(stored.text)
        return True


@pytest.mark.parametrize(
    ("stored", "prompt", "n_reused", "n_common", "stop"),
    [
        ([], "abc", 0, 0, "nothing stored"),
        (["abx"], "q", 0, 0, "differs"),
        (["ab", "abcd"], "abcdef", 4, 4, "end of what is stored"),
        (["ab", "abcd"], "abxy", 2, 2, "end of what is stored"),
        (["ab", "abcd"], "abcx", 2, 3, "no snapshot between"),
        (["abcd"], "abx", 0, 2, "no snapshot between"),
        (["abcd"], "abc", 0, 3, "no snapshot between"),
        (["ab", "abcd"], "abcd", 2, 4, "whole prompt"),  # its last token has to run
        (["abcd"], "abcd", 0, 4, "whole prompt"),
        (["a", "b", "c"], "c", 0, 1, "whole prompt"),
    ],
)
def test_the_longest_prefix_that_leaves_a_token_is_found(
    stored: list[str], prompt: str, n_reused: int, n_common: int, stop: str
) -> None:
    cache = cache_of(*stored)
    found = cache.find(ids(prompt))
    tier = "memory" if n_reused else None
    assert found == Match(
        n_prompt=len(prompt),
        n_reused=n_reused,
        n_common=n_common,
        stop=stop,
        tier=tier,  # type: ignore[arg-type]
    )
    assert not cache.counters.hits
    assert reuse(cache, prompt) == (found, [prompt[:n_reused]] if n_reused else [])
    assert cache.counters.hits == ({"memory": 1} if n_reused else {})
    assert cache.counters.misses == ({} if n_reused else {stop: 1})
    assert (cache.counters.n_prompt, cache.counters.n_reused) == (len(prompt), n_reused)
    cache.close()


@pytest.mark.parametrize(
    ("stored", "prompt", "n_reused", "n_common", "stop"),
    [
        (["abcdefgh"], "abcdefxy", 6, 6, "differs"),
        (["abcdefgh"], "abcdexyz", 4, 5, "differs"),
        (["abcdefgh"], "abcdef", 4, 6, "differs"),  # its last token has to run
        (["abcdefgh"], "abcdefgh", 6, 8, "whole prompt"),
        (["abcdefgh", "abcd"], "abcdx", 4, 4, "end of what is stored"),  # all of a state before a part
        (["abcdefgh", "abcde"], "abcdex", 5, 5, "end of what is stored"),
        (["abcdefgh", "abc"], "abcx", 3, 3, "end of what is stored"),
        (["abcdefgh", "abc"], "abcdx", 4, 4, "differs"),
        (["abcdefgh", "abc"], "abcdefx", 6, 6, "differs"),
        (["abcdexyz", "abcd"], "abcdeq", 4, 5, "differs"),
        (["abcdefgh"], "ax", 0, 1, "differs"),
        (["abcdefgh"], "x", 0, 0, "differs"),
    ],
)
def test_a_state_of_rows_is_continued_from_the_last_end_of_a_forward_in_what_is_common(
    stored: list[str], prompt: str, n_reused: int, n_common: int, stop: str
) -> None:
    cache, cuts = cache_of(*stored), (2, 4, 6, 8)
    match, tried = reuse(cache, prompt, cuts=cuts)
    assert (match.n_reused, match.n_common, match.stop) == (n_reused, n_common, stop)
    assert tried == ([prompt[:n_reused]] if n_reused else [])
    assert cache.find(ids(prompt), cuts=cuts) == match
    assert cache.counters.n_reused == n_reused
    cache.close()


def test_a_state_that_is_continued_in_part_is_used_as_any_other() -> None:
    cache = cache_of("abcdefgh", "x")
    assert reuse(cache, "abcdx", cuts=(2, 4))[0].n_reused == 4
    assert held(cache) == ["x", "abcdefgh"]
    match, tried = reuse(cache, "abcdx", bad=["abcdefgh"], cuts=(2, 4))
    assert (match.n_reused, tried, held(cache)) == (0, ["abcd"], ["x"])
    cache.close()


def test_a_hit_is_counted_and_moved_after_its_state_was_restored() -> None:
    cache = cache_of("ab", "x", "abcd")
    match, tried = reuse(cache, "abcde", bad=["abcd"])
    assert tried == ["abcd", "ab"]  # what cannot be restored does not hide what can
    assert (match.n_reused, match.tier) == (2, "memory")
    assert held(cache) == ["x", "ab"]
    assert (cache.counters.hits, cache.counters.unusable) == ({"memory": 1}, {"bad": 1})
    match, tried = reuse(cache, "xyz", bad=["x"])
    assert (tried, match.n_reused, match.tier) == (["x"], 0, None)
    assert cache.counters.hits == {"memory": 1}
    assert held(cache) == ["ab"]
    cache.close()


def test_an_error_of_another_kind_changes_nothing() -> None:
    cache = cache_of("ab", "x")

    def fail(stored: Text, n: int) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        cache.reuse(ids("abc"), fail)
    assert held(cache) == ["ab", "x"]
    assert not cache.counters.hits
    cache.close()


def test_keys_are_an_index_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one key for everything the newest state is the only one, and no other is taken for it."""
    monkeypatch.setattr(prefix_cache, "token_key", lambda mark, tokens: b"same")
    cache = cache_of("abc", "xyz")
    assert held(cache) == ["xyz"]
    assert reuse(cache, "abcd")[1] == []
    assert reuse(cache, "xyzw")[1] == ["xyz"]
    assert cache.reserve(ids("abc"), 3, 10) is not None  # not known
    cache.close()


def test_keys_are_the_same_in_every_process() -> None:
    tokens = np.array([1, 2, 70000, 2**31 - 1, 0], np.int32)
    keys = [token_key(mark, tokens[:n]).hex() for mark in (MARK, b"other") for n in range(6)]
    assert len(set(keys)) == 12
    whole = MARK + tokens.astype("<i4").tobytes() + (5).to_bytes(8, "little")
    assert keys[5] == hashlib.blake2b(whole, digest_size=16).hexdigest()
    script = (
        "import numpy as np; from pyggml_dflash.state.fingerprint import token_key;"
        "t = np.array([1, 2, 70000, 2**31 - 1, 0], np.int32);"
        "print(*(token_key(m, t[:n]).hex() for m in (bytes(16), b'other') for n in range(6)))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert found.stdout.split() == keys, found.stderr
    prefix = PrefixHash(MARK)
    assert [prefix.extend(tokens[n : n + 1]).hex() for n in range(5)] == keys[1:6]


def test_one_room_is_reserved_at_a_time() -> None:
    cache = cache_of()
    ticket = cache.reserve(ids("abc"), 2, 10)
    assert ticket is not None
    assert (cache.reserved, ticket.cut) == (ticket, 2)
    assert cache.reserve(ids("xyz"), 2, 10) is None
    ticket.cancel()
    other = cache.reserve(ids("xyz"), 2, 10)
    assert other is not None
    other.abort()
    for end in (ticket.cancel, other.abort, lambda: other.commit(Text("xy"))):
        with pytest.raises(AssertionError):
            end()
    assert (cache.counters.n_cancelled, cache.counters.n_aborted, cache.counters.n_committed) == (1, 1, 0)
    assert cache.counters.skipped == {TAKEN: 1}
    assert held(cache) == []


def test_a_lost_ticket_gives_its_room_back() -> None:
    cache = cache_of()
    ticket = cache.reserve(ids("abc"), 2, 10)
    del ticket
    gc.collect()
    assert cache.reserved is None
    assert put(cache, "xyz")
    cache.close()


def test_room_is_not_reserved_for_nothing() -> None:
    cache = cache_of("ab", limit=25)
    assert cache.reserve(ids("abcd"), 2, 10) is None
    assert cache.reserve(ids("abcd"), 3, 10, n_restored=3) is None
    assert cache.reserve(ids("xyz"), 3, 26) is None
    assert cache.counters.skipped == {KNOWN: 1, NOT_LONGER: 1, NO_ROOM: 1}
    assert held(cache) == ["ab"]
    cache.close()


@pytest.mark.parametrize("end", ["cancel", "abort", "lost"])
def test_a_capture_that_comes_to_nothing_disturbs_nothing(end: str) -> None:
    cache = cache_of("a", "b", most=2)
    before = cache.entries
    ticket = cache.reserve(ids("cd"), 2, 10)
    assert ticket is not None
    assert [entry.stored.text for entry in ticket.victims] == ["a"]
    if end != "lost":
        getattr(ticket, end)()
    del ticket
    assert cache.entries == before
    assert not any(entry.stored.closed for entry in before)
    cache.close()


def test_a_state_may_land_before_its_cut() -> None:
    cache = cache_of()
    ticket = cache.reserve(ids("abcdef"), 4, 10)
    assert ticket is not None
    with pytest.raises(AssertionError):
        ticket.commit_at(Text("abcd"))
    assert ticket.commit_at(Text("abc"))
    ticket = cache.reserve(ids("abcdef"), 4, 10)
    assert ticket is not None
    newer = Text("abc")
    assert ticket.commit_at(newer)  # takes the place of the one before
    assert [entry.stored for entry in cache.entries] == [newer]
    cache.close()


def test_a_growing_conversation_keeps_its_head_and_its_newest_state() -> None:
    cache = cache_of("sys", most=3)
    text = "sys"
    for turn in "abcdefgh":
        match, _ = reuse(cache, text + turn + "?")
        assert match.n_reused == len(text)
        assert put(cache, text + turn, source=text)
        text += turn
    assert held(cache) == ["sys", text] or held(cache) == [text, "sys"]
    assert cache.counters.n_evicted == 0
    cache.close()


@pytest.mark.parametrize(("most", "limit"), [(1, None), (8, 15)])
def test_the_state_that_was_restored_does_not_hold_a_conversation_back(most: int, limit: int | None) -> None:
    cache = cache_of("a", most=most, limit=limit)
    for text in ("ab", "abc", "abcd"):
        match, _ = reuse(cache, text + "?")
        assert put(cache, text, source=text[: match.n_reused])
        assert held(cache) == [text]
    cache.close()


def test_a_state_of_an_end_that_is_a_prompts_own_serves_prompts_with_the_same_alone() -> None:
    with closing(cache_of("ab")) as cache:
        assert put(cache, "abcd", own=True)
        for own, n_reused, stop in ((4, 4, "end of what is stored"), (3, 2, "no snapshot between")):
            found = cache.find(ids("abcdef"), own=own)
            assert (found.n_reused, found.n_common, found.stop) == (n_reused, 4, stop)
        assert cache.find(ids("abcdef"), own=3, cuts=(2, 6)).n_reused == 2  # rows up to there are of all
        match, tried = reuse(cache, "abcdx")
        assert (match.n_reused, tried) == (2, ["ab"])
        match, _ = reuse(cache, "abcd")
        assert (match.n_reused, match.stop) == (2, "no snapshot between")


def test_states_of_own_ends_go_before_those_that_others_can_continue() -> None:
    shelf = Shelf()
    with closing(cache_of("ab", lower=shelf, most=4)) as cache:
        for text in ("abcd", "abcdef"):
            assert put(cache, text)
            assert put(cache, text + "!", own=True)
        # the first own end goes although nothing continues it; the second takes no shared one's place
        assert held(cache) == ["ab", "abcd!", "abcdef", "abcdef!"]
        assert put(cache, "abcd!gh", own=True)
        assert held(cache) == ["ab", "abcdef", "abcdef!", "abcd!gh"]
        assert put(cache, "x")
        assert put(cache, "y")
        assert held(cache) == ["ab", "abcd!gh", "x", "y"]  # else the longest unused that nothing continues
        assert shelf.texts == ["abcdef"]  # another process hardly asks for exactly that prompt
        assert cache.flush() == 3


def test_protected_states_outlive_others_and_stay_protected() -> None:
    cache = cache_of(most=2)
    put(cache, "tools", protect=True)
    for text in ("a", "b", "c"):
        assert put(cache, text)
        assert "tools" in held(cache)
    ticket = cache.reserve(ids("toolsX"), 6, 10)
    assert ticket is not None
    assert ticket.commit_at(Text("tools"))
    assert {e.stored.text: e.protected for e in cache.entries} == {"c": False, "tools": True}
    cache.close()


def test_a_pinned_state_is_not_freed_while_it_is_read() -> None:
    cache = cache_of("a", "b", most=2)
    with cache.pin(ids("a")) as stored, cache.pin(ids("zz")) as nothing:
        assert nothing is None
        assert stored is not None
        put(cache, "c")
        assert held(cache) == ["a", "c"]
        cache.clear()
        assert not stored.closed
    assert stored.closed
    assert cache.n_bytes == 0


def test_a_room_that_was_pinned_meanwhile_is_not_taken() -> None:
    cache = cache_of("a", limit=15)
    ticket = cache.reserve(ids("b"), 1, 10)
    assert ticket is not None
    new = Text("b")
    with cache.pin(ids("a")):
        assert not ticket.commit(new)
    assert new.closed
    assert held(cache) == ["a"]
    assert cache.counters.skipped == {NO_ROOM: 1}
    cache.close()


def test_what_has_to_go_is_saved_below_and_comes_back_once() -> None:
    """Counted as one hit of the tier that had it; memory has it then (B23)."""
    shelf = Shelf()
    cache = cache_of("ab", "xy", most=2, lower=shelf)
    put(cache, "q")
    assert (shelf.texts, held(cache)) == (["ab"], ["xy", "q"])
    match, tried = reuse(cache, "abc")
    assert (match.n_reused, match.tier, tried) == (2, "disk", ["ab"])
    assert held(cache) == ["q", "ab"]
    assert reuse(cache, "abd")[0].tier == "memory"
    assert cache.counters.hits == {"disk": 1, "memory": 1}
    assert not cache.counters.misses
    assert (cache.counters.n_saved, shelf.texts) == (2, ["ab", "xy"])
    put(cache, "r")
    put(cache, "s")
    assert shelf.texts == ["ab", "xy", "q"]  # what came from below is not saved again
    assert cache.flush() == 2
    assert cache.flush() == 0
    assert sorted(shelf.texts) == ["ab", "q", "r", "s", "xy"]
    cache.close()


def test_a_miss_tells_whether_there_was_anything_to_compare_with() -> None:
    cache = cache_of(lower=Shelf("abcd"))
    assert cache.find(ids("xyz")).stop == "differs"
    cache = cache_of(lower=Shelf())
    assert cache.find(ids("xyz")).stop == "nothing stored"


def test_the_tier_with_the_longer_prefix_is_asked() -> None:
    cache = cache_of("ab", "abcdef", lower=Shelf("abcd", "abcdefgh"))
    assert [reuse(cache, text)[0].tier for text in ("abcd!", "abc", "abcdefg", "abcdefgh")] == [
        "disk", "memory", "memory", "memory",
    ]  # fmt: skip
    match, _ = reuse(cache, "abcdefghi")
    assert (match.n_reused, match.n_common, match.tier) == (8, 8, "disk")
    cache.close()


@pytest.mark.parametrize("problem", ["load", "restore"])
def test_a_state_below_that_cannot_be_used_does_not_hide_a_shorter_one(problem: str) -> None:
    shelf = Shelf("a", "abc", "abcde")
    cache = cache_of("ab", lower=shelf)
    if problem == "load":
        shelf.broken = {"abc", "abcde"}
    match, tried = reuse(cache, "abcdef", bad=["abc", "abcde"])
    assert tried[-1] == "ab"
    assert (match.n_reused, match.tier) == (2, "memory")
    assert sum(cache.counters.unusable.values()) == 2
    assert all(stored.closed for stored in shelf.out)
    cache.close()


def test_a_state_from_below_that_memory_has_no_room_for_is_used_and_freed() -> None:
    shelf = Shelf("abc")
    cache = cache_of(limit=5, lower=shelf)
    assert reuse(cache, "abcd")[0].n_reused == 3
    assert held(cache) == []
    assert [stored.closed for stored in shelf.out] == [True]


@pytest.mark.parametrize(
    ("n_slots", "snapshot", "available", "limit"),
    [
        (1, 1 * GIB, 64 * GIB, 3 * GIB),
        (1, 10 * GIB, 64 * GIB, 16 * GIB),
        (4, 1 * GIB, 64 * GIB, 9 * GIB),
        (4, 10 * GIB, 64 * GIB, 16 * GIB),
        (2, 100 * 2**20, 64 * GIB, 4 * GIB),
        (2, 1 * GIB, 6 * GIB, 3 * GIB),
        (1, 100, 10, 2),
    ],
)
def test_an_automatic_limit_follows_slots_and_memory(
    n_slots: int, snapshot: int, available: int, limit: int
) -> None:
    assert automatic_limit(snapshot, n_slots, available) == limit


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, which only Linux has")
def test_memory_stays_within_the_limit_however_many_turns() -> None:
    """Three hundred states of 2 MiB, with room for three (B06)."""
    big = StateTensor(name="memory", type=ElementType.F32, shape=(1024, 512), grows=False)
    with opened(layout=StateLayout(n_ctx=64, tensors=(big,))) as states:
        limit = 3 * states.store.estimate(64)
        cache: PrefixCache[Snapshot] = PrefixCache(fingerprint=FINGERPRINT, limit_bytes=limit)
        slot, resident = states.table.slots[0], []
        for turn in range(300):
            slot.reset()
            slot.commit(40)
            tokens = [turn, *range(39)]
            ticket = cache.reserve(tokens, 40, states.store.estimate(40))
            snapshot = states.store.capture(slot, tokens)
            assert ticket is not None
            assert snapshot is not None
            assert ticket.commit(snapshot)
            assert cache.n_bytes == states.memory.n_held <= limit
            if turn in (20, 299):
                resident.append(resident_bytes())
        assert states.store.counters.captured_bytes == 300 * 2 * 2**20
        assert resident[1] - resident[0] < limit
        cache.close()
        assert states.memory.n_held == 0


def resident_bytes() -> int:
    """Memory of this process now, as the system counts it."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Machine(RuleBasedStateMachine):
    """Any order of captures, reuses, pins and failures."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Text] = []
        self.ticket: Ticket[Text] | None = None
        self.shelf = Shelf()
        self.cache = cache_of(limit=40, most=4, lower=self.shelf)
        self.pins: list[tuple[Text, object]] = []

    def text(self, text: str, size: int) -> Text:
        self.made.append(Text(text, size))
        return self.made[-1]

    @precondition(lambda self: self.ticket is None)
    @rule(
        prompt=st.text("ab", min_size=2, max_size=7),
        cut=st.integers(1, 6),
        size=st.integers(1, 25),
        protect=st.booleans(),
        restored=st.booleans(),
    )
    def reserve(self, prompt: str, cut: int, size: int, protect: bool, restored: bool) -> None:
        cut = min(cut, len(prompt) - 1)
        n_restored = self.cache.find(ids(prompt)).n_reused if restored else 0
        before = self.cache.entries
        self.ticket = self.cache.reserve(ids(prompt), cut, size, n_restored=n_restored, protect=protect)
        self.size = size
        assert self.cache.entries == before

    @precondition(lambda self: self.ticket is not None)
    @rule(early=st.integers(0, 2))
    def commit(self, early: int) -> None:
        ticket, self.ticket = self.ticket, None
        assert ticket is not None
        cut = max(1, ticket.cut - early)
        stored = self.text("".join(map(chr, ticket.tokens[:cut])), self.size)
        kept = (ticket.commit if cut == ticket.cut else ticket.commit_at)(stored)
        assert kept == (stored in [entry.stored for entry in self.cache.entries])
        assert kept or self.pins

    @precondition(lambda self: self.ticket is not None)
    @rule(how=st.sampled_from(["cancel", "abort", "lose"]))
    def give_up(self, how: str) -> None:
        before = self.cache.entries
        if how != "lose":
            getattr(self.ticket, how)()
        self.ticket = None
        assert self.cache.reserved is None
        assert self.cache.entries == before

    @rule(prompt=st.text("ab", min_size=1, max_size=8), n_bad=st.integers(0, 2))
    def reuse(self, prompt: str, n_bad: int) -> None:
        usable = {*held(self.cache), *self.shelf.texts}
        prefixes = sorted((t for t in usable if prompt.startswith(t) and len(t) < len(prompt)), key=len)
        bad, left = prefixes[len(prefixes) - n_bad :], prefixes[: len(prefixes) - n_bad]
        match, tried = reuse(self.cache, prompt, bad)
        self.made += [text for text in self.shelf.out if text not in self.made]
        assert match.n_reused == max((len(t) for t in left if t not in bad), default=0)
        assert [t for t in tried if t not in bad] == ([prompt[: match.n_reused]] if match.n_reused else [])

    @precondition(lambda self: len(self.pins) < 2 and self.cache.entries)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.cache.entries))
        pin = self.cache.pin(entry.tokens)
        stored = pin.__enter__()
        assert stored is entry.stored
        self.pins.append((stored, pin))

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        _, pin = self.pins.pop()
        pin.__exit__(None, None, None)  # type: ignore[attr-defined]

    @invariant()
    def limits_are_kept_and_nothing_is_lost(self) -> None:
        entries = self.cache.entries
        assert len(entries) <= 4
        assert self.cache.n_bytes == sum(e.n_bytes for e in entries) <= 40
        assert len({entry.stored.text for entry in entries}) == len(entries)
        alive = {id(entry.stored) for entry in entries} | {id(stored) for stored, _ in self.pins}
        assert all(stored.closed == (id(stored) not in alive) for stored in self.made)

    def teardown(self) -> None:
        for _, pin in self.pins:
            pin.__exit__(None, None, None)  # type: ignore[attr-defined]
        self.cache.close()
        self.cache.close()
        assert all(stored.closed for stored in self.made)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)


# memory that cannot hold a state beside those it replaces


def test_a_ticket_lets_go_of_what_has_to_go_until_there_is_room() -> None:
    shelf = Shelf()
    cache = cache_of("a", "ab", "x", "y", limit=40, lower=shelf)
    assert cache.n_bytes == 40
    ticket = cache.reserve(ids("abc"), 3, 20)
    assert ticket is not None
    left: list[int] = []

    def has_room() -> bool:
        left.append(len(cache.entries))
        return False

    ticket.clear_the_way(has_room)
    assert left == [4, 3]
    assert held(cache) == ["x", "y"]  # 'ab', from which the new one takes over, then the longest unused
    assert shelf.texts == ["a"]
    ticket.abort()
    assert held(cache) == ["x", "y"]
    cache.close()


def test_smaller_limits_let_go_as_for_a_new_state() -> None:
    cache = cache_of("a", "ab", "x", "y")
    size = cache.n_bytes
    cache.resize(Limits(n_entries=3))
    assert held(cache) == ["a", "x", "y"]
    cache.resize(Limits(n_entries=3, n_bytes=size // 2))
    assert held(cache) == ["x", "y"]
    with cache.pin(ids("y")) as pinned:
        assert pinned is not None
        cache.resize(Limits(n_entries=3, n_bytes=0))
        assert held(cache) == ["y"]
    cache.resize(Limits(n_entries=3, n_bytes=0))
    assert held(cache) == []


def test_room_is_made_for_what_comes_from_below_as_far_as_it_helps() -> None:
    shelf = Shelf()
    cache = cache_of("a", "ab", "x", "y", limit=40, lower=shelf)
    cache.clear_the_way(ids("z"), 50, lambda: False)
    assert len(cache.entries) == 4
    cache.clear_the_way(ids("z"), 20, lambda: len(cache.entries) == 3)
    assert [entry.stored.text for entry in cache.entries] == ["a", "x", "y"]
    cache.clear_the_way(ids("xyz"), 20, lambda: False)
    assert [entry.stored.text for entry in cache.entries] == ["x", "y"]
    assert shelf.texts == ["ab", "a"]
    assert cache.counters.n_evicted == 2
