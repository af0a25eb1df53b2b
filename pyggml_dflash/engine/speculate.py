"""Draft, verify, accept, take back: decoding several tokens with one target forward. Layer 6.

The accepted stream is the target's own. Greedy, under penalties, and with a seed that the caller gave:
each row's token is picked as plain decoding would pick it, and drafts are kept while they agree with
it. Otherwise drafts are drawn, and each is kept with probability p/q, which leaves the target's
distribution as it is; more of them stay, but the tokens depend on how many were tried.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from pyggml_dflash.engine.acceptance import Chosen, match, reject
from pyggml_dflash.engine.drafting import Drafter, Proposal
from pyggml_dflash.engine.graphs import Forwards, Logits
from pyggml_dflash.engine.near_tie import NearTies
from pyggml_dflash.engine.sampling import Sampler
from pyggml_dflash.engine.width import VerifyWidth
from pyggml_dflash.requests import SpeculationStats
from pyggml_dflash.state.slot import Slot


@dataclass(slots=True)
class Counters:
    """What drafting did so far."""

    n_verify: int = 0
    n_plain: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_tokens: int = 0  # behind the first one, which follows the prompt
    draft_s: float = 0.0
    verify_s: float = 0.0
    rollback_s: float = 0.0
    tried_at: list[int] = field(default_factory=list)  # per depth: drafts verified there
    held_at: list[int] = field(default_factory=list)  # per depth: of those, accepted
    near_ties: list[int] = field(default_factory=list)  # places in the answer

    def add(self, n_drafted: int, n_accepted: int) -> None:
        """Count a verify forward and what became of its drafts."""
        self.n_verify += 1
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
    ) -> None:
        """`width`: rows of every verify forward; None lets measured cost and acceptance decide.

        `ends`: tokens behind which nothing is wanted; a run has none but as its last token.
        """
        assert forwards.recording is not None
        self._forwards, self._drafter, self._sampler, self._ends = forwards, drafter, sampler, ends
        self._fixed = width
        self._max_width = min(forwards.recording.max_width, drafter.max_drafts + 1)
        self._control = VerifyWidth(self._max_width)
        self.repeatable = sampler.greedy or sampler.depends_on_answer or sampler.repeats
        self._ties = NearTies(forwards)
        self.counters = Counters()

    def runs(
        self, slot: Slot, anchor: int, n_ctx: int, *, limit: int | None = None
    ) -> Iterator[list[Chosen]]:
        """Runs of at most `limit` tokens in all behind `anchor`, the newest token, while there is context."""
        end = n_ctx if limit is None else min(n_ctx, slot.n_past + limit)
        while slot.n_past < end:
            room = min(self._max_width, end - slot.n_past)
            width = min(room, self._fixed) if self._fixed is not None else self._control.choose(room)
            started = time.perf_counter()
            run = self._plain(slot, anchor) if width < 2 else self._verified(slot, anchor, width)
            self._control.observe(width, len(run) - 1, time.perf_counter() - started)
            self._note_ties(run)
            anchor = run[-1].token
            yield run

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
            gave_up=self._control.gave_up,
            draft_s=c.draft_s,
            verify_s=c.verify_s,
            rollback_s=c.rollback_s,
            near_ties=tuple(c.near_ties),
        )

    def _plain(self, slot: Slot, anchor: int) -> list[Chosen]:
        n_past = slot.n_past
        logits = self._forwards.decode(slot, anchor, capture=True)
        slot.commit(1)
        self._drafter.observe((anchor,), n_past)
        self.counters.n_plain += 1
        return match(logits[None], (), self._sampler)

    def _verified(self, slot: Slot, anchor: int, width: int) -> list[Chosen]:
        counters, n_past = self.counters, slot.n_past
        t0 = time.perf_counter()
        proposal = self._drafter.propose(
            anchor, n_past, width - 1, None if self.repeatable else self._sampler
        )
        t1 = time.perf_counter()
        counters.draft_s += t1 - t0
        if not proposal.tokens:
            return self._plain(slot, anchor)
        rows = (anchor, *proposal.tokens)
        logits = self._forwards.verify(slot, rows)
        t2 = time.perf_counter()
        run = self._accept(logits, proposal)
        n_keep = len(run)
        self._forwards.commit(slot, width=len(rows), n_keep=n_keep)
        slot.commit(n_keep)
        self._drafter.observe(rows[:n_keep], n_past)
        counters.verify_s += t2 - t1
        counters.rollback_s += time.perf_counter() - t2
        ended = run[-1].token in self._ends  # what was drafted behind it was not looked at
        counters.add(n_keep - 1 if ended else len(proposal.tokens), n_keep - 1)
        return run

    def _accept(self, logits: Logits, proposal: Proposal) -> list[Chosen]:
        if self.repeatable:
            return match(logits, proposal.tokens, self._sampler, self._ends)
        return reject(logits, proposal, self._sampler, self._ends)

    def _note_ties(self, run: list[Chosen]) -> None:
        counters, greedy = self.counters, self._sampler.greedy
        for chosen in run:
            counters.n_tokens += 1
            if greedy and self._ties.is_near(chosen.lead, chosen.logits):
                counters.near_ties.append(counters.n_tokens)
