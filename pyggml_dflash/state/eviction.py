"""Which stored prefixes give way to a new one: pure rules over what is stored, oldest first. Layer 5.

A leaf is a prefix that no other stored one continues. Leaves go first: a shared beginning serves every
conversation that grew out of it. Protected prefixes go after others of their kind, pinned ones never. The
prefix that the new one was continued from goes last of all, and only because its successor takes over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

FIRST_BLOCK: Final = 256  # tokens compared at first; most texts differ early


class Candidate(Protocol):
    """A stored prefix as the rules see it."""

    @property
    def tokens(self) -> Tokens:
        """int32 [n]."""

    @property
    def n_bytes(self) -> int:
        """What it takes."""

    @property
    def protected(self) -> bool:
        """True for a beginning worth keeping, such as a system prompt with tools."""

    @property
    def pinned(self) -> bool:
        """True while somebody reads it."""

    @property
    def own(self) -> bool:
        """True if texts that go on do not continue it, see `cuts`."""


C = TypeVar("C", bound=Candidate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that may be stored at a time; None for bytes: whatever memory gives."""

    n_entries: int
    n_bytes: int | None = None


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many tokens two texts begin with alike."""
    n, start, size = min(len(a), len(b)), 0, FIRST_BLOCK
    while start < n:
        stop = min(n, start + size)
        differs = a[start:stop] != b[start:stop]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
        start, size = stop, 4 * size
    return n


def continues(text: Tokens, prefix: Tokens) -> bool:
    """True if `text` begins with all of `prefix` and goes on."""
    n = len(prefix)
    return n < len(text) and (n == 0 or text[n - 1] == prefix[-1]) and common_prefix(text, prefix) == n


def superseded(stored: Sequence[C], new: Tokens, *, own: bool = False) -> list[C]:
    """Those that `new` continues, but for the shallowest of them and those that are protected or pinned.

    What is `own` serves its text alone: as the new one it takes the place of others that are so only, as a
    stored one it goes in any case.
    """
    ancestors = [entry for entry in stored if continues(new, entry.tokens)]
    gone = [entry for entry in ancestors if entry.own]
    if not own:
        heads = [entry for entry in ancestors if not entry.own]
        shallowest = min((len(entry.tokens) for entry in heads), default=0)
        gone += [entry for entry in heads if len(entry.tokens) > shallowest]
    return [entry for entry in gone if not entry.protected and not entry.pinned]


def choose_by_count(stored: Sequence[C], source: C | None = None) -> C | None:
    """Who makes room for one more entry, without regard to bytes; None: nobody may."""
    free = [entry for entry in stored if entry is not source and not entry.pinned]
    leaves = [entry for entry in free if _is_leaf(entry, stored)]
    for entry in leaves:
        if not entry.protected:
            return entry
    if source is None and leaves:
        return leaves[0]
    inner = [entry for entry in free if not entry.protected]  # none of them is a leaf
    if inner:
        return min(inner, key=lambda entry: len(entry.tokens))
    return None if source is None or source.protected or source.pinned else source


def choose_by_bytes(stored: Sequence[C], excess: int, source: C | None = None) -> C | None:
    """Who makes room for `excess` bytes: the first who alone is enough, else the first of all."""
    free = [entry for entry in stored if entry is not source and not entry.pinned]
    leaves = [entry for entry in free if _is_leaf(entry, stored)]
    in_order = [entry for entry in leaves if not entry.protected]
    in_order += [entry for entry in leaves if entry.protected]
    inner = [entry for entry in free if not _is_leaf(entry, stored)]
    in_order += [entry for entry in inner if not entry.protected]
    in_order += [entry for entry in inner if entry.protected]
    for entry in in_order:
        if entry.n_bytes >= excess:
            return entry
    if in_order:
        return in_order[0]
    return None if source is None or source.protected or source.pinned else source


def make_room(
    stored: Sequence[C],
    new: Tokens,
    n_bytes: int,
    limits: Limits,
    source: C | None = None,
    *,
    own: bool = False,
) -> list[C] | None:
    """Who has to go, beside those superseded, for a new entry of `n_bytes`; None if it cannot be stored.

    `stored` is in order of use, oldest first; `source` is what the new entry was continued from.
    """
    gone = {id(entry) for entry in superseded(stored, new, own=own)}
    rest = [entry for entry in stored if id(entry) not in gone]
    if source is not None and id(source) in gone:
        source = None
    victims: list[C] = []

    def excess() -> int:
        return 0 if limits.n_bytes is None else sum(e.n_bytes for e in rest) + n_bytes - limits.n_bytes

    while len(rest) >= limits.n_entries or excess() > 0:
        by_count = len(rest) >= limits.n_entries
        victim = choose_by_count(rest, source) if by_count else choose_by_bytes(rest, excess(), source)
        if victim is None:
            return None
        rest = [entry for entry in rest if entry is not victim]
        victims.append(victim)
        source = None if victim is source else source
    return victims


def _is_leaf(entry: C, stored: Sequence[C]) -> bool:
    return not any(continues(other.tokens, entry.tokens) for other in stored)
