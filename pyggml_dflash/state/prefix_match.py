"""What the prefix cache keeps, what it answers and what it counts. Layer 5."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, TypeVar

from pyggml_dflash.requests import Tier
from pyggml_dflash.state.eviction import Tokens

FLOOR_BYTES: Final = 4096 * 2**20  # of an automatic limit with several slots

Stop = Literal["nothing stored", "differs", "no snapshot between", "end of what is stored", "whole prompt"]


class Stored(Protocol):
    """What the cache keeps: `tokens` int32 [n], what led to it."""

    @property
    def tokens(self) -> Tokens:
        """int32 [n]."""

    @property
    def n_bytes(self) -> int:
        """Memory that it takes."""

    def close(self) -> None:
        """Free it."""


S = TypeVar("S", bound=Stored)


class LowerTier(Protocol[S]):
    """Where states go that memory has no room for."""

    @property
    def n_states(self) -> int:
        """States that are kept."""

    def longest(self, tokens: Tokens, above: int) -> int:
        """Length of the longest prefix of `tokens` that is kept and longer than `above`; 0 for none."""

    def load(self, tokens: Tokens) -> S:
        """The state of exactly these tokens, the caller's to close; `SnapshotError` if it cannot be had."""

    def save(self, stored: S) -> bool:
        """Keep a copy; False if it was not kept. Never raises for what the outside world does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """How much of a prompt a stored state covers, and why it is not more.

    `n_common` tokens are those of some text in memory. 'differs': the prompt goes its own way there, and what
    is reused reaches up to there, or up to where the last forward before ends; 'no snapshot between': it does
    so too, or was to keep a token to run, and no state was stored up to there but the one that is reused;
    'end of what is stored': all of a stored text is reused; 'whole prompt': a state of the whole prompt is
    stored, but its last token has to run again.
    """

    n_prompt: int
    n_reused: int
    n_common: int
    stop: Stop
    tier: Tier | None  # None: nothing is reused


@dataclass(slots=True)
class CacheCounters:
    """What the cache did; tokens are those of prompts."""

    hits: Counter[Tier] = field(default_factory=Counter)
    misses: Counter[Stop] = field(default_factory=Counter)
    unusable: Counter[str] = field(default_factory=Counter)  # states dropped, by reason
    n_prompt: int = 0
    n_reused: int = 0
    n_committed: int = 0
    n_cancelled: int = 0
    n_aborted: int = 0
    n_superseded: int = 0
    n_evicted: int = 0
    n_saved: int = 0  # to the lower tier
    skipped: Counter[str] = field(default_factory=Counter)  # captures not worth or not possible, by reason


def automatic_limit(
    snapshot_bytes: int, n_slots: int, available: int, *, floor_bytes: int = FLOOR_BYTES
) -> int:
    """A limit for snapshots of `snapshot_bytes` at full context: one to continue and one to capture per
    slot, and one that they share.

    At most a quarter of the `available` memory; with several slots at least `floor_bytes`, or half of what is
    there.
    """
    wanted = min((2 * n_slots + 1) * snapshot_bytes, available // 4)
    floor = min(floor_bytes, available // 2) if n_slots > 1 else 0
    return max(wanted, floor)
