"""Draft, verify, accept, take back: decoding several tokens with one target forward. Layer 6.

The accepted stream is the target's own. Greedy, under penalties, and with a seed that the caller gave:
each row's token is picked as plain decoding would pick it, and drafts are kept while they agree with
it. Otherwise drafts are drawn, and each is kept with probability p/q, which leaves the target's
distribution as it is; more of them stay, but the tokens depend on how many were tried.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Iterator, Set
from dataclasses import dataclass, field
from typing import Final

from pyggml_dflash.engine.acceptance import Chosen, match, reject
from pyggml_dflash.engine.drafting import Backlog, Drafter, Proposal
from pyggml_dflash.engine.graphs import Forwards, Logits
from pyggml_dflash.engine.near_tie import NearTies
from pyggml_dflash.engine.sampling import Sampler, best
from pyggml_dflash.engine.width import VerifyWidth
from pyggml_dflash.requests import SpeculationStats
from pyggml_dflash.state.slot import Slot

BESIDE_OTHERS: Final = "others were answered at the same time"


@dataclass(frozen=True, slots=True)
class Drafted:
    """Rows for a verify forward: the newest token and the drafts behind it."""

    rows: tuple[int, ...]
    proposal: Proposal
    late_s: float = 0.0  # what the drafter needed to catch up
    propose_s: float = 0.0


@dataclass(slots=True)
class Counters:
    """What drafting did so far."""

    n_verify: int = 0
    n_plain: int = 0
    n_beside: int = 0  # of these, in steps that others shared
    n_shared: int = 0  # verify forwards that others shared
    n_drafted: int = 0
    n_accepted: int = 0
    n_tokens: int = 0  # behind the first one, which follows the prompt
    draft_s: float = 0.0
    verify_s: float = 0.0
    rollback_s: float = 0.0
    plain_s: float = 0.0
    steps_of: Counter[int] = field(default_factory=Counter)  # verify steps by rows
    tried_at: list[int] = field(default_factory=list)  # per depth: drafts verified there
    held_at: list[int] = field(default_factory=list)  # per depth: of those, accepted
    near_ties: list[int] = field(default_factory=list)  # places in the answer

    def add(self, width: int, n_drafted: int, n_accepted: int) -> None:
        """Count a verify forward and what became of those drafts that were looked at."""
        self.n_verify += 1
        self.steps_of[width] += 1
        self.n_drafted += n_drafted
        self.n_accepted += n_accepted
        missing = max(0, n_drafted - len(self.tried_at))
        self.tried_at += [0] * missing
        self.held_at += [0] * missing
        for depth in range(n_drafted):
            self.tried_at[depth] += 1
            self.held_at[depth] += depth < n_accepted


class Speculation:
    """Continues one sequence: yields tokens in runs, each run from one target forward.

    The slot's state always covers every token of the runs but the newest. The caller may stop at any
    token of a run; then the slot is ahead of what it took.
    """

    def __init__(
        self,
        forwards: Forwards,
        drafter: Drafter,
        sampler: Sampler,
        *,
        width: int | None = None,
        ends: Set[int] = frozenset(),
        backlog: Backlog | None = None,
        control: VerifyWidth | None = None,
    ) -> None:
        """`width`: rows of every verify forward; None lets `control` decide.

        `ends`: tokens behind which nothing is wanted; a run has none but as its last token. `backlog`: rows
        of the prompt that the drafter was not shown yet; without one it was shown all of them, and is in
        the end. `control`: what earlier requests learned about cost and acceptance.
        """
        assert forwards.recording is not None
        self._forwards, self._drafter, self._sampler, self._ends = forwards, drafter, sampler, ends
        self._fixed = width
        most = forwards.max_width if width is None else forwards.recording.max_width
        self._max_width = min(most, drafter.max_drafts + 1)
        self._backlog = Backlog(forwards, drafter) if backlog is None else backlog
        self._leaves_backlog = backlog is not None  # to whoever keeps it for the next request
        self._control = VerifyWidth(self._max_width) if control is None else control
        self._control.begin()
        self._gave_up_before = self._control.gave_up
        self._draws = not (sampler.greedy or sampler.depends_on_answer or sampler.repeats)
        self._ties = NearTies(forwards)
        self.counters = Counters()
        self.why_beside: str = BESIDE_OTHERS  # steps that others shared had no drafts

    def runs(
        self, slot: Slot, anchor: int, n_ctx: int, *, limit: int | None = None
    ) -> Generator[list[Chosen], None, None]:
        """Runs of at most `limit` tokens in all behind `anchor`, the newest token, while there is context."""
        end = n_ctx if limit is None else min(n_ctx, slot.n_past + limit)
        try:
            while slot.n_past < end:
                for run in self._next_runs(slot, anchor, end):
                    anchor = run[-1].token
                    yield run
        finally:
            if not self._leaves_backlog:
                self._backlog.take()

    def _next_runs(self, slot: Slot, anchor: int, end: int) -> Iterator[list[Chosen]]:
        """A verified run, or those of a burst of plain steps."""
        n_past = slot.n_past
        room = min(self._max_width, end - n_past)
        width = self._control.choose(room, n_past) if self._fixed is None else min(room, self._fixed)
        if width >= 2:
            run = self._verified(slot, anchor, width)
            if run:
                self._note_ties(run)
                yield run
                return
        n_steps = 1 if self._fixed is not None else self._control.plain_steps(room, n_past)
        yield from self._plain(slot, anchor, min(n_steps, end - n_past))

    @property
    def repeatable(self) -> bool:
        """True if the sampler's seed gives the same text again, however many rows steps have then."""
        return not self._draws

    @property
    def why_plain(self) -> str | None:
        """Why steps were plain at last; None if none was, or none by choice."""
        counters = self.counters
        chosen = self._control.why_plain if self._fixed is None and counters.n_plain else None
        return chosen or (self.why_beside if counters.n_beside else None)

    @property
    def stats(self) -> SpeculationStats:
        """What drafting did so far."""
        c = self.counters
        return SpeculationStats(
            drafter=self._drafter.name,
            verify_steps=c.n_verify,
            plain_steps=c.n_plain,
            drafted=c.n_drafted,
            accepted=c.n_accepted,
            accept_rates=tuple(held / tried for held, tried in zip(c.held_at, c.tried_at, strict=True)),
            steps_by_width=dict(sorted(c.steps_of.items())),
            gave_up=self._control.gave_up - self._gave_up_before,
            step_costs=self._control.costs.table(),
            draft_s=c.draft_s,
            verify_s=c.verify_s,
            rollback_s=c.rollback_s,
            plain_s=c.plain_s,
            near_ties=tuple(c.near_ties),
            shared_steps=c.n_shared,
        )

    def _plain(self, slot: Slot, anchor: int, n_steps: int) -> Iterator[list[Chosen]]:
        """Plain steps; what they took is told to the control at their end, since little Python is cheaper.

        Where no verify forward ran yet, they are those of plain decoding, and nothing can be a near tie.
        """
        forwards, backlog, sampler, clock = self._forwards, self._backlog, self._sampler, time.perf_counter
        pick = sampler.pick if sampler.needs_logits else best
        n_past, counters, token = slot.n_past, self.counters, anchor
        seconds: list[float] = []
        n_built = [forwards.built.n]
        try:
            for _ in range(n_steps):
                started = clock()
                backlog.make_room(1)
                logits = forwards.decode(slot, token, capture=True)
                backlog.add((token,), slot.n_past)
                slot.commit(1)
                if counters.n_verify:
                    run = self._matched(logits)
                    token = run[0].token
                else:
                    token = pick(logits)
                    sampler.accept(token)
                    run = [Chosen(token, logits)]
                    counters.n_tokens += 1
                seconds.append(clock() - started)
                n_built.append(forwards.built.n)
                yield run
        finally:
            counters.n_plain += len(seconds)
            counters.plain_s += sum(seconds)
            for i, step_s in enumerate(seconds):
                self._observe(1, 0, step_s, n_past + i, built=n_built[i + 1] > n_built[i])

    def _matched(self, logits: Logits) -> list[Chosen]:
        """The token of a step without drafts."""
        run = match(logits[None], (), self._sampler)
        self._note_ties(run)
        return run

    def beside(self, logits: Logits) -> Chosen:
        """The token of a step that was run together with other sequences, or after drafting was put aside."""
        self.counters.n_plain += 1
        self.counters.n_beside += 1
        return self._matched(logits)[0]

    def _verified(self, slot: Slot, anchor: int, width: int) -> list[Chosen]:
        """A verified run; empty if nothing was drafted."""
        counters, n_past, built = self.counters, slot.n_past, self._forwards.built.n
        drafted = self.draft(slot, anchor, width)
        if not drafted.proposal.tokens:
            late_s = drafted.late_s
            self._observe(width, 0, drafted.propose_s, n_past, built=True, extra_s=late_s)
            return []
        t1 = time.perf_counter()
        logits = self._forwards.verify(slot, drafted.rows)
        counters.verify_s += time.perf_counter() - t1
        run, n_judged = self.settle(slot, drafted, logits)
        t3 = time.perf_counter()
        self._backlog.take()
        t4 = time.perf_counter()
        counters.draft_s += t4 - t3
        self._observe(
            len(drafted.rows),
            len(run) - 1,
            drafted.propose_s + t4 - t1,
            n_past,
            n_judged=n_judged,
            built=self._forwards.built.n > built,
            extra_s=drafted.late_s,
        )
        return run

    def draft(self, slot: Slot, anchor: int, width: int) -> Drafted:
        """Up to `width` rows behind what the slot has, all of which a forward can record."""
        started = time.perf_counter()
        if width < 2:
            self._backlog.make_room(1)
            return Drafted((anchor,), Proposal(()))
        self._backlog.take()
        shown = time.perf_counter()
        sampler = self._sampler if self._draws else None
        proposal = self._drafter.propose(anchor, slot.n_past, width - 1, sampler)
        ended = time.perf_counter()
        self.counters.draft_s += ended - started
        return Drafted((anchor, *proposal.tokens), proposal, shown - started, ended - shown)

    def settle(
        self, slot: Slot, drafted: Drafted, logits: Logits, *, place: int = 0, shared: float | None = None
    ) -> tuple[list[Chosen], int]:
        """Keep what holds of rows that a verify forward gave logits for, and how many drafts were looked at.

        `place`: which one the slot was in a forward that others `shared`, which took so many seconds.
        """
        counters, rows, started, n_past = self.counters, drafted.rows, time.perf_counter(), slot.n_past
        slot.torn = True  # the sampler is ahead of the state
        run = self._accept(logits, drafted.proposal)
        n_keep = len(run)
        self._forwards.commit(slot, width=len(rows), n_keep=n_keep, place=place)
        slot.commit(n_keep)
        counters.rollback_s += time.perf_counter() - started
        self._backlog.add(rows[:n_keep], n_past)
        ended = run[-1].token in self._ends or self._sampler.finished_at is not None
        # what was drafted behind the end was not looked at
        n_judged = n_keep - 1 if ended else len(rows) - 1
        if shared is not None:
            self._note_ties(run)
            counters.verify_s += shared
            counters.n_shared += len(rows) > 1
        if len(rows) > 1:
            counters.add(len(rows), n_judged, n_keep - 1)
        else:
            counters.n_plain += 1
        return run, n_judged

    def _observe(
        self,
        width: int,
        accepted: int,
        seconds: float,
        n_past: int,
        *,
        n_judged: int | None = None,
        built: bool,
        extra_s: float = 0.0,
    ) -> None:
        if self._fixed is None:
            self._control.observe(
                width, accepted, seconds, n_past, n_judged=n_judged, built=built, extra_s=extra_s
            )

    def _accept(self, logits: Logits, proposal: Proposal) -> list[Chosen]:
        if not self._draws or not proposal.tokens:
            return match(logits, proposal.tokens, self._sampler, self._ends)
        return reject(logits, proposal, self._sampler, self._ends)

    def _note_ties(self, run: list[Chosen]) -> None:
        counters, greedy = self.counters, self._sampler.greedy
        for chosen in run:
            counters.n_tokens += 1
            if greedy and self._ties.is_near(chosen.lead, chosen.logits):
                counters.near_ties.append(counters.n_tokens)
