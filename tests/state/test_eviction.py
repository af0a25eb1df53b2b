"""Who gives way to a new state: the tables of the rules, oldest entry first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml_dflash.state.eviction import (
    Limits,
    choose_by_bytes,
    choose_by_count,
    common_prefix,
    continues,
    make_room,
    superseded,
)
from tests.state.texts import Text, ids

TOKENS = st.lists(st.integers(0, 2), max_size=12)


def stored(*written: str) -> list[Text]:
    """Entries as written: text, then '!' if protected, '*' if pinned, then its size if it is not 10."""
    found = []
    for entry in written:
        text = entry.rstrip("!*0123456789")
        rest = entry[len(text) :]
        size = rest.strip("!*")
        found.append(Text(text, int(size or 10), "!" in rest, "*" in rest))
    return found


def named(entries: list[Text], text: str | None) -> Text | None:
    return None if text is None else next(entry for entry in entries if entry.text == text)


@given(a=TOKENS, b=TOKENS, n=st.integers(0, 2000))
def test_a_common_prefix_is_as_long_as_texts_are_alike(a: list[int], b: list[int], n: int) -> None:
    x, y = (np.array([7] * n + tail, np.int32) for tail in (a, b))
    expected = n
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        expected += 1
    assert common_prefix(x, y) == common_prefix(y, x) == expected
    assert continues(y, x) == (expected == len(x) < len(y))


@pytest.mark.parametrize(
    ("entries", "source", "victim"),
    [
        # the oldest leaf that is not protected; inner nodes stay, however old
        (["a", "b", "c"], None, "a"),
        (["a", "ab", "x"], None, "ab"),
        (["a", "ab", "abc", "x"], None, "abc"),
        (["a!", "b", "c"], None, "b"),
        (["a*", "b", "c"], None, "b"),
        # without a restore source: the oldest protected leaf
        (["a!", "b!"], None, "a"),
        (["a", "ab!"], None, "ab"),
        (["a*", "b*"], None, None),
        ([], None, None),
        # every leaf is being read: the shallowest inner node
        (["aa*", "ab", "aba*"], None, "ab"),
        (["a!", "ab", "abc", "abcd*"], None, "ab"),
        (["a!", "ab*"], None, None),
        # with one: it is skipped, then the shallowest inner node, never a protected leaf
        (["a", "b"], "a", "b"),
        (["a", "ab", "abc"], "abc", "a"),
        (["ab", "a", "abc"], "abc", "a"),
        (["a!", "ab", "abc"], "abc", "ab"),
        (["a*", "ab", "abc"], "abc", "ab"),
        (["x!", "a", "ab"], "ab", "a"),
        # nothing else is left: its successor may take its place
        (["a"], "a", "a"),
        (["x!", "a"], "a", "a"),
        (["a!"], "a", None),
        (["a*"], "a", None),
    ],
)
def test_by_count(entries: list[str], source: str | None, victim: str | None) -> None:
    texts = stored(*entries)
    found = choose_by_count(texts, named(texts, source))
    assert (None if found is None else found.text) == victim


@pytest.mark.parametrize(
    ("entries", "excess", "source", "victim"),
    [
        # the first of its round that is enough alone
        (["a", "b", "c"], 10, None, "a"),
        (["a5", "b", "c"], 10, None, "b"),
        # rounds: leaf, protected leaf, any, protected any
        (["x!", "a", "ab"], 10, None, "ab"),
        (["x!", "a", "ab5"], 10, None, "x"),
        (["x!5", "a", "ab5"], 10, None, "a"),
        (["x!5", "a!", "ab5"], 10, None, "a"),
        (["a*", "ab5", "x"], 10, None, "x"),
        # nobody alone is enough: the first of all
        (["a5", "b6"], 10, None, "a"),
        (["a", "ab5", "x!6"], 20, None, "ab"),
        # the restore source comes last
        (["a", "b5"], 10, "a", "b"),
        (["a"], 10, "a", "a"),
        (["a!"], 10, "a", None),
        ([], 1, None, None),
    ],
)
def test_by_bytes(entries: list[str], excess: int, source: str | None, victim: str | None) -> None:
    texts = stored(*entries)
    found = choose_by_bytes(texts, excess, named(texts, source))
    assert (None if found is None else found.text) == victim


@pytest.mark.parametrize(
    ("entries", "new", "gone"),
    [
        (["a", "ab", "abc"], "abcd", ["ab", "abc"]),  # the shallowest stays
        (["a", "ab!", "abc"], "abcd", ["abc"]),
        (["a", "ab*", "abc"], "abcd", ["abc"]),
        (["a", "ab", "abx"], "abcd", ["ab"]),  # though another one continues it
        (["ab"], "abcd", []),
        (["abcd", "x"], "abcd", []),
        (["abcde"], "abcd", []),
    ],
)
def test_what_a_new_entry_supersedes(entries: list[str], new: str, gone: list[str]) -> None:
    assert [entry.text for entry in superseded(stored(*entries), ids(new))] == gone


@pytest.mark.parametrize(
    ("entries", "new", "limits", "source", "victims"),
    [
        (["a", "b"], "c10", (3, 100), None, []),
        (["a", "b"], "c10", (2, 100), None, ["a"]),
        (["a", "b"], "c10", (3, 25), None, ["a"]),
        (["a", "b"], "c10", (3, None), None, []),
        (["a5", "b5", "x30"], "c30", (9, 40), None, ["x"]),  # one is enough: the small ones stay
        (["a5", "b5", "x5"], "c12", (9, 15), None, ["a", "b", "x"]),
        (["a", "b"], "c101", (9, 100), None, None),  # larger than the limit: nobody has to go
        (["a*", "b*"], "c90", (9, 100), None, None),
        # what is superseded makes room without being a victim
        (["a", "ab", "abc"], "abcd10", (3, 100), "abc", []),
        (["a", "ab", "abc"], "abcd10", (9, 25), "abc", []),
        # a conversation that grows is not held at its depth by the state it came from
        (["a"], "ab10", (1, 100), "a", ["a"]),
        (["a"], "ab10", (9, 15), "a", ["a"]),
        (["a", "x"], "ab10", (2, 100), "a", ["x"]),
        (["a!"], "ab10", (1, 100), "a", None),
    ],
)
def test_room_is_made_or_nobody_goes(
    entries: list[str],
    new: str,
    limits: tuple[int, int | None],
    source: str | None,
    victims: list[str] | None,
) -> None:
    texts, (text,) = stored(*entries), stored(new)
    found = make_room(texts, text.tokens, text.n_bytes, Limits(n_entries=limits[0], n_bytes=limits[1]),
                      named(texts, source))  # fmt: skip
    assert (None if found is None else [entry.text for entry in found]) == victims
    assert len(texts) == len(entries)


TEXTS = st.lists(
    st.tuples(
        st.text("ab", min_size=1, max_size=5), st.integers(1, 9), st.booleans(), st.sampled_from([0, 0, 0, 1])
    ),
    max_size=7,
    unique_by=lambda entry: entry[0],
)


@settings(max_examples=300, deadline=None)
@given(
    entries=TEXTS,
    new=st.text("ab", min_size=1, max_size=6),
    size=st.integers(1, 12),
    n_entries=st.integers(1, 6),
    n_bytes=st.none() | st.integers(1, 40),
    data=st.data(),
)
def test_the_rest_is_within_the_limits_and_pins_stay(
    entries: list[tuple[str, int, bool, int]],
    new: str,
    size: int,
    n_entries: int,
    n_bytes: int | None,
    data: st.DataObject,
) -> None:
    texts = [Text(text, n, protected, bool(pin)) for text, n, protected, pin in entries if text != new]
    ancestors = [t for t in texts if new.startswith(t.text)]
    source = data.draw(st.none() | st.sampled_from(ancestors)) if ancestors else None
    limits = Limits(n_entries=n_entries, n_bytes=n_bytes)
    victims = make_room(texts, ids(new), size, limits, source)
    gone = superseded(texts, ids(new))
    must_stay = [t for t in texts if t.pinned]
    if victims is None:
        held = sum(t.n_bytes for t in texts if t.protected or t.pinned)
        too_many = len([t for t in texts if t.protected or t.pinned]) >= n_entries
        assert too_many or (n_bytes is not None and held + size > n_bytes)
        return
    assert not {id(t) for t in victims} & {id(t) for t in gone}
    rest = [t for t in texts if t not in victims and t not in gone]
    assert all(t in rest for t in must_stay)
    assert len(rest) < n_entries
    assert n_bytes is None or sum(t.n_bytes for t in rest) + size <= n_bytes
    if victims:  # without the last victim it would not fit
        kept = [*rest, victims[-1]]
        total = sum(t.n_bytes for t in kept) + size
        assert len(kept) >= n_entries or (n_bytes is not None and total > n_bytes)
