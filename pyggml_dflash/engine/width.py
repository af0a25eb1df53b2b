"""How many rows the next step should have: measured costs against measured acceptance. Layer 6.

A step of w rows costs a proposal and one target forward, and commits one token plus those drafts that
survive. `StepCosts` knows what steps take, `Acceptance` how far drafts carry; `VerifyWidth` takes the width
with the most tokens per second, or plain steps where those are faster.

Trying costs time, so there is a budget. What verify steps lose against plain ones is a debt, what they gain
pays it back, and so does a small part of every plain step. Speculation that looks worthless is tried again
only when nothing is owed, and speculation that looks good is put aside when it owes too much. So whatever
drafts and clocks do, the loss stays below that part of the whole plus a few steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

WIDTHS: Final = (2, 3, 4, 6, 8, 12, 16)  # few, so that graphs are used again

KEEP_COST: Final = 0.8  # weight of the past in running means of costs
MOST_GROWTH: Final = 2.0  # times the mean that a longer step counts as at most
STALE: Final = 128  # verify steps after which the cost of a width that none of them had is doubted
KEEP_HELD: Final = 0.9  # weight of the past in what drafts did, per draft at that depth
STRENGTH: Final = 2.0  # drafts that an expectation weighs as much as
USUAL: Final = 0.8  # chance of a draft to hold that is expected before anything is known
HOPED: Final = 0.95  # and the one that is worth a try
UNKNOWN_ROW: Final = 0.15  # plain steps that a row adds, where no verify step was measured
SPARE: Final = 0.02  # part of plain steps' time that may go into trying
MOST_DEBT: Final = 4.0  # plain steps that may be owed before speculation is put aside
MOST_CREDIT: Final = 8.0  # plain steps that gains of the past may pay for
START: Final = 1.05  # times plain decoding's rate that is expected of a start; 1 is enough to go on
REFRESH: Final = 64  # verify steps after which a plain step is due, so that its cost stays known
MOST_BURST: Final = 32  # plain steps between two looks at the clocks
LEAST_SPARE: Final = 0.01  # the same while one try after the other fails
FORGET_TO: Final = 4.0  # drafts per depth that an earlier request still counts as


class Acceptance:
    """The chance of each draft to hold where those before it did, from what drafts did lately."""

    def __init__(self, max_drafts: int) -> None:
        self._held, self._tried = [0.0] * max_drafts, [0.0] * max_drafts

    def observe(self, n_drafts: int, n_held: int) -> None:
        """The first `n_held` of `n_drafts` held."""
        for depth in range(min(n_drafts, n_held + 1)):
            self._tried[depth] = KEEP_HELD * self._tried[depth] + 1
            self._held[depth] = KEEP_HELD * self._held[depth] + (depth < n_held)

    def forget(self) -> None:
        """Let the past weigh little: another text begins."""
        for depth, tried in enumerate(self._tried):
            if tried > FORGET_TO:
                self._held[depth] *= FORGET_TO / tried
                self._tried[depth] = FORGET_TO

    def tokens(self, width: int, usual: float) -> float:
        """Tokens to expect of a step of `width` rows; a depth is expected to be like the one before it."""
        total, survival, chance = 1.0, 1.0, usual
        for held, tried in zip(self._held[: width - 1], self._tried[: width - 1], strict=True):
            chance = (held + STRENGTH * chance) / (tried + STRENGTH)
            survival *= chance
            total += survival
        return total


class StepCosts:
    """Seconds of a plain step by context, and of verify steps as multiples of it.

    Contexts are told apart by their number of binary digits. A verify step grows with the context about as
    a plain one does, so one factor per width serves all contexts.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        """`seconds`: by rows, drafting included, measured in a short context; 1 is a plain step."""
        self._plain: dict[int, float] = {}
        self._last: dict[int, float] = {}  # plain steps that the last step of a width cost
        self._factor: dict[int, float] = {1: 1.0}
        if 1 in seconds:
            self._plain[0] = seconds[1]
            self._factor |= {rows: s / seconds[1] for rows, s in seconds.items()}
        self._first = dict(self._factor)
        self._n_steps, self._seen = 0, dict.fromkeys(self._factor, 0)

    def knows_plain(self, n_past: int) -> bool:
        """True if a plain step was measured in such a context."""
        return _context(n_past) in self._plain

    @property
    def knows_any(self) -> bool:
        """True if a verify step was measured."""
        return len(self._factor) > 1

    def n_alike(self, n_past: int) -> int:
        """Positions from `n_past` on whose steps count as equal."""
        return (256 << _context(n_past)) - n_past

    def plain_s(self, n_past: int) -> float:
        """Seconds of a plain step; that of the nearest context measured."""
        context = _context(n_past)
        return self._plain[min(self._plain, key=lambda known: abs(known - context))]

    def factor(self, width: int) -> float:
        """Plain steps that a step of `width` rows costs: measured, or on the line through its neighbours."""
        known = self._factor.get(width)
        if known is not None:
            return known
        below = max(w for w in self._factor if w < width)
        above = [w for w in self._factor if w > width]
        if above:
            part = (width - below) / (min(above) - below)
            return self._factor[below] + part * (self._factor[min(above)] - self._factor[below])
        slope = (self._factor[below] - 1) / (below - 1) if below > 1 else UNKNOWN_ROW
        return self._factor[below] + slope * (width - below)

    def observe(self, width: int, seconds: float, n_past: int) -> None:
        """A step took `seconds`, built no graph and did nothing but its work.

        Clocks have outliers, all of them too long: what counts is the shorter of the last two steps.
        """
        if width == 1:
            context = _context(n_past)
            likely = self._likely(1, seconds)
            self._plain[context] = _mean(self._plain.get(context), likely)
        elif self._plain:
            expected = self.factor(width) if self.knows_any else None
            self._factor[width] = _mean(expected, self._likely(width, seconds / self.plain_s(n_past)))
            self._n_steps += 1
            self._seen[width] = self._n_steps
            self._doubt()

    def _doubt(self) -> None:
        """Go back to the first cost of a width, or to what its neighbours say, where the last is long ago."""
        for width, step in list(self._seen.items()):
            if width != 1 and self._n_steps - step >= STALE:
                self._seen[width] = self._n_steps
                if width in self._first:
                    self._factor[width] = self._first[width]
                else:
                    del self._factor[width], self._seen[width]

    def is_usual(self, width: int, cost: float) -> bool:
        """False if a step of `width` rows that cost so many plain steps took far longer than it should."""
        return cost <= max(2 * self.factor(width), self._last.get(width, 0))

    def _likely(self, width: int, value: float) -> float:
        last = self._last.get(width, value)
        self._last[width] = value
        return min(value, last)

    def table(self) -> dict[int, float]:
        """Plain steps that a step costs, by rows, as far as measured."""
        return dict(sorted(self._factor.items()))


def _context(n_past: int) -> int:
    return (n_past // 256).bit_length()


def _mean(old: float | None, new: float) -> float:
    return new if old is None else KEEP_COST * old + (1 - KEEP_COST) * min(new, MOST_GROWTH * old)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is expected of a width: tokens of a step, and plain steps that it costs."""

    width: int
    tokens: float
    cost: float

    @property
    def gain(self) -> float:
        """Rate over that of plain decoding."""
        return self.tokens / self.cost

    def refusal(self, owed: float) -> str:
        """Why it was not taken, where `owed` plain steps were lost before."""
        if self.gain > 1:
            return f"drafts lost {max(owed, 0):.1f} plain steps that are not yet made up for"
        return f"{self.width} rows cost {self.cost:.1f} plain steps and give {self.tokens:.1f} tokens"


class VerifyWidth:
    """Chooses the rows of each step up to `max_width`, from what it is told of each; 1 is a plain step.

    One per engine: what it learns in a request serves the next. Knows no clock.
    """

    def __init__(self, max_width: int, seconds: Mapping[int, float] | None = None) -> None:
        """`seconds`: of steps by rows, drafting included, as far as they were measured before."""
        self._widths = [w for w in WIDTHS if w < max_width] + [max_width]
        self.costs = StepCosts(seconds or {})
        self._acceptance = Acceptance(max_width - 1)
        self._hoped = Acceptance(max_width - 1)  # never told anything
        self._outlooks: dict[
            int, tuple[Outlook, Outlook]
        ] = {}  # by room: of the best width, and the one hoped
        self._debt = 0.0  # in plain steps
        self._spare = SPARE
        self._drafting = False  # the last step that was free to draft did
        self._trying = False  # and did so against expectation
        self._since_plain = 0  # verify steps since a plain one was measured
        self._why: Outlook | None = None
        self.gave_up = 0  # times speculation was put aside

    @property
    def why_plain(self) -> str | None:
        """Why the last step was plain; None if it was not, or not by choice."""
        return None if self._why is None else self._why.refusal(self._debt)

    def begin(self) -> None:
        """Another text begins."""
        self._acceptance.forget()
        self._outlooks.clear()

    def choose(self, room: int, n_past: int) -> int:
        """Rows of the next step, at most `room`, behind `n_past` tokens."""
        if room < 2 or not self.costs.knows_plain(n_past) or self._since_plain >= REFRESH:
            return 1
        best, hoped = self._outlooks.get(room) or self._look(room)
        least_gain, most_debt = (1.0, MOST_DEBT) if self._drafting else (START, 0.0)
        if best.gain >= least_gain and self._debt <= most_debt:
            return self._draft(best, trying=False)
        if hoped.gain >= START and self._debt + min(hoped.cost - 1, MOST_CREDIT) <= 0:
            return self._draft(hoped, trying=True)
        self.gave_up += self._drafting
        self._drafting, self._why = False, best
        return 1

    def plain_steps(self, room: int, n_past: int) -> int:
        """Where `choose` wanted a plain step: how many may be taken before it has to be asked again."""
        if room < 2 or self._drafting or not self.costs.knows_plain(n_past):
            return 1
        best, hoped = self._outlooks.get(room) or self._look(room)
        owed = math.inf
        if best.gain >= START:
            owed = self._debt
        elif hoped.gain >= START:
            owed = self._debt + min(hoped.cost - 1, MOST_CREDIT)
        return max(1, min(MOST_BURST, self.costs.n_alike(n_past), int(min(owed, MOST_DEBT) / self._spare)))

    def observe(
        self,
        width: int,
        accepted: int,
        seconds: float,
        n_past: int,
        *,
        n_judged: int | None = None,
        built: bool = False,
        extra_s: float = 0.0,
    ) -> None:
        """A step of `width` rows behind `n_past` tokens took `seconds`; its first `accepted` drafts held.

        `n_judged`: drafts that were looked at, where the answer ended before the others. `built`: it built
        graphs, which the next one will not. `extra_s`: what the drafter needed before it, to catch up with
        plain steps.
        """
        if width == 1:
            if not built:
                self.costs.observe(1, seconds, n_past)
                self._since_plain = 0
            self._debt = max(-MOST_CREDIT, self._debt - self._spare)
            return
        self._acceptance.observe(width - 1 if n_judged is None else n_judged, accepted)
        self._account(width, 1 + accepted, seconds, n_past, built=built, extra_s=extra_s)

    def observe_together(
        self,
        width: int,
        judged: Sequence[tuple[int, int]],
        seconds: float,
        n_past: int,
        *,
        n: int,
        built: bool = False,
    ) -> None:
        """A step of `n` sequences took `seconds`, each of which had up to `width` rows.

        `judged`: of those with drafts, how many were looked at and how many held. A plain step, of width 1,
        is one of as many sequences. The graphs of a first one are an investment: all who come together later
        have them.
        """
        if width == 1:
            self.observe(1, 0, seconds, n_past, built=built)
            return
        for n_judged, accepted in judged:
            self._acceptance.observe(n_judged, accepted)
        tokens = 1 + sum(accepted for _, accepted in judged) / n
        if built and not self.costs.knows_any and self.costs.knows_plain(n_past):
            seconds = self.costs.factor(width) * self.costs.plain_s(n_past)
        self._account(width, tokens, seconds, n_past, built=built, extra_s=0.0)

    def _account(
        self, width: int, tokens: float, seconds: float, n_past: int, *, built: bool, extra_s: float
    ) -> None:
        """Learn of a verify step what it cost, and what it gained against plain steps."""
        self._since_plain += 1
        self._outlooks.clear()
        lost = self._charge(width, seconds, extra_s, n_past, built) - tokens
        self._debt = max(-MOST_CREDIT, self._debt + lost)
        if not self._trying:
            self._spare = SPARE
        elif lost > 0:
            self._spare = max(LEAST_SPARE, self._spare / 2)
        if not built:
            self.costs.observe(width, seconds, n_past)

    def _draft(self, outlook: Outlook, *, trying: bool) -> int:
        self._drafting, self._trying, self._why = True, trying, None
        return outlook.width

    def _look(self, room: int) -> tuple[Outlook, Outlook]:
        found = self._best(room, self._acceptance, USUAL), self._best(room, self._hoped, HOPED)
        self._outlooks[room] = found
        return found

    def _best(self, room: int, acceptance: Acceptance, usual: float) -> Outlook:
        outlooks = (
            Outlook(w, acceptance.tokens(w, usual), self.costs.factor(w)) for w in self._widths if w <= room
        )
        return max(outlooks, key=lambda outlook: outlook.gain)

    def _charge(self, width: int, seconds: float, extra_s: float, n_past: int, built: bool) -> float:
        """Plain steps that a step is held to have cost.

        Graphs, and catching up, are an investment where drafting is known to pay, and part of the price of
        a try. A single step that takes far too long had another reason.
        """
        if not self.costs.knows_plain(n_past):
            return self.costs.factor(width)
        plain_s = self.costs.plain_s(n_past)
        if built and self.costs.knows_any and not self._trying:
            return self.costs.factor(width)
        cost = seconds / plain_s
        if not built and not self.costs.is_usual(width, cost):
            cost = 2 * self.costs.factor(width)
        return cost + (extra_s / plain_s if self._trying else 0)
