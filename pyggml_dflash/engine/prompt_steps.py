"""Forwards of the prompts of seats: alone, or several in one where none comes out otherwise. Layer 6.

Where a forward of a prompt ends depends on the prompt alone. Which other prompts run in it depends on what
else waits, and makes no difference to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pyggml_dflash.arch.base import OutputKind
from pyggml_dflash.engine.drafting import Backlog
from pyggml_dflash.engine.failures import Failures
from pyggml_dflash.engine.graphs import Forwards, Logits
from pyggml_dflash.engine.joined_prompts import PromptRows
from pyggml_dflash.engine.prefill import PoolTrims
from pyggml_dflash.engine.seat import Seat
from pyggml_dflash.state.slot import Slot


class PromptSteps:
    """Runs prompts; has drafters record what they read of them. `n_joined`: forwards that several shared."""

    def __init__(
        self, forwards: Forwards, backlogs: Sequence[Backlog], failures: Failures, trims: PoolTrims
    ) -> None:
        """`backlogs`: what waits for the drafter of each slot; none without drafters."""
        self._forwards, self._backlogs, self._failures, self._trims = forwards, backlogs, failures, trims
        self.n_joined = 0

    def groups(self, seats: Sequence[Seat]) -> list[list[Seat]]:
        """Those whose next forward is the same; one that fails or may fail runs alone."""
        limits = self._forwards.prompt_limits
        wanted = [(seat, _n_next(seat), seat.slot.n_past) for seat in seats]
        joining = [one for one in wanted if _may_join(one[0]) and limits.takes(one[1])]
        together = {seat for seat, _, _ in joining}
        return [*limits.groups(joining), *([seat] for seat in seats if seat not in together)]

    def beside(self, first: Seat, others: Sequence[Seat]) -> list[Seat]:
        """Which of the others have their next forward with the first one."""
        groups = self.groups([first, *others])
        return next(group[1:] for group in groups if group[0] is first)

    def run(
        self, slot: Slot, tokens: Sequence[int], output: OutputKind, *, ahead: Sequence[int], drafting: bool
    ) -> Logits | None:
        """One forward of one prompt. `ahead`: the next one's tokens, for what the host can prepare."""
        capture = drafting and bool(self._backlogs)
        if capture:
            self._make_room(slot, len(tokens))
        rows = self._forwards.prefill(slot, tokens, output, capture=capture, ahead=ahead)
        self._commit(PromptRows(slot, tokens, output, capture))
        self._trims.after_chunk(slot.n_past, slot=slot.id)
        return rows

    def run_together(self, seats: Sequence[Seat]) -> list[Logits | None]:
        """One forward of several prompts; the logits [1, n_vocab] of each one's last row if that ends it."""
        prompts, at = list[PromptRows](), 0
        for seat in seats:
            prompts.append(self._next_rows(seat, at))
            at += len(prompts[-1].tokens) + 1  # a drafter uses the row in front of its own, too
        logits = self._forwards.prefill_together(prompts)
        self.n_joined += 1
        for prompt in prompts:
            self._commit(prompt)
        for seat in seats:
            if seat.drafts:
                self._failures.attempt_drafting(seat, self._backlogs[seat.slot.id].settle)
            self._trims.after_chunk(seat.slot.n_past, slot=seat.slot.id)
        rows = iter(() if logits is None else logits)
        return [next(rows)[None] if prompt.output == "last" else None for prompt in prompts]

    def _next_rows(self, seat: Seat, at: int) -> PromptRows:
        """`at`: the row of the prompts' room where they are recorded."""
        slot, tokens = seat.slot, seat.admission.tokens
        end = seat.end_behind(slot.n_past)
        own = tokens[slot.n_past : end]
        if seat.drafts:
            self._failures.attempt_drafting(seat, partial(self._make_room, slot, len(own), at))
        return PromptRows(slot, own, "last" if end == len(tokens) else "none", seat.drafts)

    def _make_room(self, slot: Slot, n: int, at: int = 0) -> None:
        backlog = self._backlogs[slot.id]
        if slot.n_past == 0:
            backlog.begin()
        backlog.make_room(n, at)

    def _commit(self, prompt: PromptRows) -> None:
        if prompt.capture:
            self._backlogs[prompt.slot.id].add(prompt.tokens, prompt.slot.n_past)
        prompt.slot.commit(len(prompt.tokens))


def _n_next(seat: Seat) -> int:
    return seat.end_behind(seat.slot.n_past) - seat.slot.n_past


def _may_join(seat: Seat) -> bool:
    """Whether logits of one row at most are wanted, and nothing went wrong that others could suffer from."""
    failed = seat.failed_at == seat.slot.n_past
    return seat.admission.sampler is not None and seat.may_join and not seat.regains and not failed
