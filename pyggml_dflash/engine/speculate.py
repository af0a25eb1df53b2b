"""Draft, verify, accept, take back: decoding several tokens with one target forward. Layer 6.

The accepted stream is the target's own. Greedy, and under penalties: each row's token is picked as
plain decoding would pick it, and drafts are kept while they agree with it. With temperature and
nothing that depends on the answer: drafts are drawn, and each is kept with probability p/q, which
leaves the target's distribution as it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from pyggml_dflash.engine.drafting import Drafter, Proposal
from pyggml_dflash.engine.graphs import Forwards, Logits
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
    draft_s: float = 0.0
    verify_s: float = 0.0
    rollback_s: float = 0.0
    tried_at: list[int] = field(default_factory=list)  # per depth: drafts verified there
    held_at: list[int] = field(default_factory=list)  # per depth: of those, accepted

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


@dataclass(frozen=True, slots=True)
class Chosen:
    """A token of the answer and the logits F32 [n_vocab] it was chosen from."""

    token: int
    logits: Logits


class Speculation:
    """Continues one sequence: yields tokens in runs, each run from one target forward.

    The slot's state always covers every token but the newest. The caller may stop at any token of a
    run and need not take the rest.
    """

    def __init__(
        self, forwards: Forwards, drafter: Drafter, sampler: Sampler, *, width: int | None = None
    ) -> None:
        """`width`: rows of every verify forward; None lets measured cost and acceptance decide."""
        assert forwards.recording is not None
        self._forwards, self._drafter, self._sampler = forwards, drafter, sampler
        self._fixed = width
        self._max_width = min(forwards.recording.max_width, drafter.max_drafts + 1)
        self._control = VerifyWidth(self._max_width)
        self._rejects = not sampler.greedy and not sampler.depends_on_answer
        self.counters = Counters()

    def runs(self, slot: Slot, anchor: int, n_ctx: int) -> Iterator[list[Chosen]]:
        """Runs of tokens behind `anchor`, the newest token, until the context is full."""
        while slot.n_past < n_ctx:
            room = min(self._max_width, n_ctx - slot.n_past)
            width = min(room, self._fixed) if self._fixed is not None else self._control.choose(room)
            started = time.perf_counter()
            run = self._plain(slot, anchor) if width < 2 else self._verified(slot, anchor, width)
            self._control.observe(width, len(run) - 1, time.perf_counter() - started)
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
        )

    def rehearse(self, slot: Slot, anchor: int, width: int) -> list[Chosen]:
        """A verified run that is not committed: the slot stays where it is."""
        proposal = self._drafter.propose(
            anchor, slot.n_past, width - 1, self._sampler if self._rejects else None
        )
        logits = self._forwards.verify(slot, (anchor, *proposal.tokens))
        return self._reject(logits, proposal) if self._rejects else self._match(logits, proposal.tokens)

    def _plain(self, slot: Slot, anchor: int) -> list[Chosen]:
        n_past = slot.n_past
        logits = self._forwards.decode(slot, anchor, capture=True)
        slot.commit(1)
        self._drafter.observe((anchor,), n_past)
        self.counters.n_plain += 1
        token = self._sampler.pick(logits)
        self._sampler.accept(token)
        return [Chosen(token, logits)]

    def _verified(self, slot: Slot, anchor: int, width: int) -> list[Chosen]:
        counters, n_past = self.counters, slot.n_past
        t0 = time.perf_counter()
        sampler = self._sampler if self._rejects else None
        proposal = self._drafter.propose(anchor, n_past, width - 1, sampler)
        rows = (anchor, *proposal.tokens)
        t1 = time.perf_counter()
        logits = self._forwards.verify(slot, rows)
        t2 = time.perf_counter()
        run = self._reject(logits, proposal) if self._rejects else self._match(logits, proposal.tokens)
        n_keep = len(run)
        self._forwards.commit(slot, width=len(rows), n_keep=n_keep)
        slot.commit(n_keep)
        self._drafter.observe(rows[:n_keep], n_past)
        counters.draft_s += t1 - t0
        counters.verify_s += t2 - t1
        counters.rollback_s += time.perf_counter() - t2
        counters.add(len(proposal.tokens), n_keep - 1)
        return run

    def _match(self, logits: Logits, drafts: Sequence[int]) -> list[Chosen]:
        run: list[Chosen] = []
        for i, row in enumerate(logits):
            token = self._sampler.pick(row)
            self._sampler.accept(token)
            run.append(Chosen(token, row))
            if i == len(drafts) or token != drafts[i]:
                break
        return run

    def _reject(self, logits: Logits, proposal: Proposal) -> list[Chosen]:
        assert proposal.distributions is not None
        run: list[Chosen] = []
        for row, draft, q in zip(logits, proposal.tokens, proposal.distributions, strict=False):
            p = self._sampler.probabilities(row)
            if self._sampler.uniform() * q[draft] < p[draft]:
                self._take(run, draft, row)
                continue
            rest = np.maximum(p - q, 0)
            self._take(run, self._sampler.draw(rest if rest.sum() > 0 else p), row)
            return run
        last = logits[len(proposal.tokens)]
        self._take(run, self._sampler.pick(last), last)
        return run

    def _take(self, run: list[Chosen], token: int, row: Logits) -> None:
        self._sampler.accept(token)
        run.append(Chosen(token, row))
