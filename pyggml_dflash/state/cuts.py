"""Where the forwards of a prompt end, and at which of these ends a state is worth storing. Layer 5.

Ends depend on the prompt alone, never on what is stored: a run that continues a stored state then has the
same forwards as a cold one, and the same text. A prompt that goes on has all ends of its beginning but
the last, so a state that one request stored lies where a forward of the next one ends.

But a long prompt whose last forward would be long has one end more, its own, shortly before its end: sent
again it runs no more than what is behind. A prompt that goes on does not have that end, so a state from there
is continued by prompts alone that have the same own end: this one, and others that part from it behind there
and are about as long.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

SPACING: Final = 4096  # tokens between two cuts, whatever the template
MIN_CUT: Final = 16  # shorter forwards are not worth their start
NEXT_TURN: Final = 5  # tokens within which a turn begins behind the end of another
MAX_BOUNDARIES: Final = 8192
LONG_TAIL: Final = 4096
SHORT_HEAD: Final = 2048
CHUNK: Final = 512
LONG: Final = 4096  # tokens of a prompt to which one forward more makes little difference
LAST: Final = 64  # fewest tokens behind its own end: fewer leave tiles of a CPU's attention empty

# What begins a turn and what ends one, by family of templates; no end: every beginning is a boundary.
_FAMILIES: Final[tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]] = (
    (("<|im_start|>",), ("<|im_end|>",)),
    (("<|start_header_id|>",), ("<|eot_id|>", "<|eom_id|>")),
    (("<start_of_turn>",), ("<end_of_turn>",)),
    (("<|start|>",), ("<|end|>", "<|return|>", "<|call|>")),
    (("<｜User｜>", "<｜Assistant｜>"), ()),
)


@dataclass(frozen=True, slots=True)
class TurnMarkers:
    """Token ids that begin a turn and that end one; without ends every beginning is a boundary."""

    starts: frozenset[int]
    ends: frozenset[int]

    @classmethod
    def of(cls, find: Callable[[str], int | None]) -> TurnMarkers | None:
        """Those of the first family that the vocabulary has; `find` gives the id of a token's text."""
        for starts, ends in _FAMILIES:
            first = {i for text in starts if (i := find(text)) is not None}
            last = {i for text in ends if (i := find(text)) is not None}
            if len(first) == len(starts) and (last or not ends):
                return cls(frozenset(first), frozenset(last))
        return None


def turn_boundaries(tokens: Sequence[int], markers: TurnMarkers) -> list[int]:
    """Positions just behind the token that begins the next turn, ascending.

    Which role comes next is not part of the prefix. Ends that no turn follows are skipped.
    """
    found: list[int] = []
    ended: int | None = None  # where the turn that began last ended
    begun = False
    for i, token in enumerate(tokens):
        if token in markers.starts:
            if not markers.ends or (ended is not None and i - ended <= NEXT_TURN):
                found.append(i + 1)
            begun, ended = True, None
        elif begun and token in markers.ends:
            ended = i
    return found[:MAX_BOUNDARIES]


def holds_answer(
    tokens: Sequence[int], boundaries: Sequence[int], n_tokens: int, markers: TurnMarkers
) -> bool:
    """True if the first `n_tokens` hold a whole turn, behind the first, of the role that the last turn has.

    A rendered conversation ends with a turn that the model has to write, so these are its earlier answers.
    `boundaries` are those of `turn_boundaries`. What follows one tells the role, or what is before it where
    turns have no ends.
    """
    back = 0 if markers.ends else 1
    roles = [tokens[b - back] if b - back < len(tokens) else None for b in boundaries]
    return any(
        role == roles[-1] and after <= n_tokens for role, after in zip(roles, boundaries[1:], strict=False)
    )


def cut_points(
    n_tokens: int, boundaries: Sequence[int], *, spacing: int = SPACING, min_cut: int = MIN_CUT
) -> list[int]:
    """Where a forward has to end, beside the end of the prompt: at boundaries and multiples of `spacing`.

    Those closer than `min_cut` to the start or to the one before are left out.
    """
    wanted = {*range(spacing, n_tokens, spacing), *(b for b in boundaries if b < n_tokens)}
    cuts: list[int] = []
    for position in sorted(wanted):
        if position - (cuts[-1] if cuts else 0) >= min_cut:
            cuts.append(position)
    return cuts


def forward_ends(n_tokens: int, cuts: Sequence[int], limit: int) -> list[int]:
    """Where the forwards of a prompt end: every `limit` tokens from a cut on, at cuts, and at its end."""
    ends: list[int] = []
    start = 0
    for cut in (*cuts, n_tokens):
        ends += [*range(start + limit, cut, limit), cut]
        start = cut
    return ends


def own_end(n_tokens: int, ends: Sequence[int]) -> int:
    """Where a long prompt has an end of its own, if its forwards end at `ends` else; 0: it has none.

    At most a 50th of the prompt lies behind, and at least `LAST` tokens. It is a whole number of steps behind
    the end before, so that prompts of nearly the same length have the same.
    """
    if n_tokens < LONG:
        return 0
    start = ends[-2] if len(ends) > 1 else 0
    step = 1 << (n_tokens // 256).bit_length() - 1
    n_steps = (n_tokens - start - LAST) // step
    return start + n_steps * step if n_steps > 0 else 0


@dataclass(frozen=True, slots=True)
class PromptEnds:
    """Where the forwards of a prompt end, ascending; `own` is the one of these that is its own, or 0."""

    all: tuple[int, ...]
    own: int = 0

    @property
    def shared(self) -> tuple[int, ...]:
        """Those that a prompt that goes on has too, and the end of this one."""
        return tuple(end for end in self.all if end != self.own) if self.own else self.all


def prompt_ends(n_tokens: int, boundaries: Sequence[int], limit: int) -> PromptEnds:
    """Where the forwards of a prompt end, each of at most `limit` tokens, if turns begin at `boundaries`."""
    ends = forward_ends(n_tokens, cut_points(n_tokens, boundaries), limit)
    own = own_end(n_tokens, ends)
    return PromptEnds((*ends[:-1], own, n_tokens) if own else tuple(ends), own)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturePoint:
    """Where a forward ends and the state is stored; a protected one is kept longer than others."""

    position: int
    protect: bool = False


def capture_points(
    n_tokens: int,
    boundaries: Sequence[int],
    ends: PromptEnds,
    *,
    n_restored: int,
    n_common: int = 0,
    has_tools: bool = False,
    chunk: int = CHUNK,
) -> list[CapturePoint]:
    """Which of the `ends` behind `n_restored` are worth a state, ascending; most prompts have one or two.

    The boundary before the newest turn, where the next request may part if that turn is edited; the last
    one, if the newest turn is longer than a `chunk` or, in a long prompt, than a 64th of it; with tools the
    head that every conversation shares; and where the prompt leaves what is stored (`n_common`), since
    another one may do so too. The last one before the end, where that is more than a `chunk` behind the last
    boundary, or there is none. And the prompt's own.
    """
    wanted: dict[int, bool] = {}
    shared = ends.shared

    def want(position: int, protect: bool = False) -> None:
        i = bisect_right(shared, min(position, n_tokens - 1))  # rounded down to where a forward ends
        if i and shared[i - 1] > n_restored:
            wanted[shared[i - 1]] = wanted.get(shared[i - 1], False) or protect

    inside = [b for b in boundaries if b < n_tokens]
    if inside:
        before, last = inside[-2:] if len(inside) > 1 else (inside[-1], inside[-1])
        if n_tokens - before < LONG_TAIL or before > SHORT_HEAD:
            want(before)
        few = chunk if n_tokens < LONG else min(chunk, n_tokens // 64)
        if n_tokens - before >= LONG_TAIL or last - before > few:
            want(last)
    if not inside or n_tokens - inside[-1] > chunk:
        want(n_tokens)
    if inside and has_tools:
        want(inside[0], protect=True)
    if n_common > n_restored:
        want(n_common)
    points = [CapturePoint(position=end, protect=wanted[end]) for end in sorted(wanted)]
    if ends.own > n_restored:
        points.append(CapturePoint(position=ends.own))
    return points
