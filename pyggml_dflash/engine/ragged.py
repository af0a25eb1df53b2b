"""Steps of several sequences together with drafts: one verify forward over the rows of all. Layer 6.

Each sequence brings its newest token and as many drafts as it has, takes what holds of them, and is taken
back on its own. What such a step costs, and what drafts give in it, is learned by the number of sequences.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from pyggml_dflash.engine.acceptance import Chosen
from pyggml_dflash.engine.drafting import Backlog, Drafter
from pyggml_dflash.engine.failures import Failures
from pyggml_dflash.engine.graphs import Forwards, Logits
from pyggml_dflash.engine.seat import Seat
from pyggml_dflash.engine.speculate import BESIDE_OTHERS, Drafted
from pyggml_dflash.engine.width import VerifyWidth

Run = Sequence[Chosen]


@dataclass(slots=True)
class _Share:
    """What a sequence brings to a step, and what became of it."""

    seat: Seat
    rows: tuple[int, ...]  # its newest token, and drafts behind it
    drafted: Drafted | None = None  # None: its drafter does not follow it


class Ragged:
    """Drafts for several sequences at a time, where rows of such a forward are the same as alone."""

    def __init__(
        self, forwards: Forwards, drafters: Sequence[Drafter], backlogs: Sequence[Backlog], failures: Failures
    ) -> None:
        """Of each slot, what drafts for it and what waits to be shown to that."""
        self._forwards, self._backlogs, self._failures = forwards, backlogs, failures
        self._max_width = min(forwards.max_width, drafters[0].max_drafts + 1)
        self._controls: dict[int, VerifyWidth] = {}  # by number of sequences

    def step(self, seats: Sequence[Seat]) -> dict[int, Run | Exception] | None:
        """The next tokens of each, by its slot; None where one token each is what should be decoded.

        What raises has changed no state of a sequence.
        """
        widths = self._widths(seats)
        if max(widths) < 2:
            self._explain(seats)
            return None
        n_past, n_built, started = _deepest(seats), self._forwards.built.n, time.perf_counter()
        shares = [self._draft(seat, width) for seat, width in zip(seats, widths, strict=True)]
        if all(len(share.rows) == 1 for share in shares):
            self._observe(seats, max(widths), [], time.perf_counter() - started, n_past, built=True)
            return None
        rows = [share.rows for share in shares]
        before = time.perf_counter()
        logits = self._forwards.verify_ragged([seat.slot for seat in seats], rows)
        verify_s = time.perf_counter() - before
        runs, judged, first = dict[int, Run | Exception](), list[tuple[int, int]](), 0
        for place, share in enumerate(shares):
            own = logits[first : first + len(share.rows)]
            first += len(share.rows)
            runs[share.seat.slot.id] = self._take(share, own, place, judged, verify_s)
        seconds, built = time.perf_counter() - started, self._forwards.built.n > n_built
        self._observe(seats, max(map(len, rows)), judged, seconds, n_past, built=built)
        return runs

    def plain(self, seats: Sequence[Seat], seconds: float, *, built: bool) -> None:
        """A step of one token each took so long; `built`: it built graphs."""
        self._observe(seats, 1, [], seconds, _deepest(seats), built=built)

    def _explain(self, seats: Sequence[Seat]) -> None:
        """Have each know why the next token has no drafts, where that is by choice."""
        control = self._controls.get(len(seats))
        for seat in seats:
            if seat.speculates and seat.speculation is not None and control is not None:
                seat.speculation.why_beside = control.why_plain or BESIDE_OTHERS

    def _widths(self, seats: Sequence[Seat]) -> list[int]:
        """Rows of each sequence in the next forward, as cost and acceptance say."""
        drafting = [seat for seat in seats if seat.speculates]
        batching, n_ctx = self._forwards.batching, self._forwards.n_ctx
        others = len(seats) - len(drafting)
        most = (batching.ragged_rows - others) // len(drafting) if drafting and batching.exact else 1
        most, chosen = min(most, self._max_width), 1
        if most >= 2 and any(seat.admission.width is None for seat in drafting):
            chosen = self._control(len(seats)).choose(most, _deepest(seats))
        return [
            min(seat.admission.width or chosen, most, n_ctx - seat.slot.n_past, seat.n_left)
            if seat.speculates
            else 1
            for seat in seats
        ]

    def _control(self, n: int) -> VerifyWidth:
        if n not in self._controls:
            self._controls[n] = VerifyWidth(self._max_width)
        return self._controls[n]

    def _draft(self, seat: Seat, width: int) -> _Share:
        """Ask for drafts; a sequence whose drafter fails goes on without."""
        seat.pause()
        if seat.speculates:
            assert seat.speculation is not None
            draft = partial(seat.speculation.draft, seat.slot, seat.anchor, width)
            drafted = self._failures.attempt_drafting(seat, draft)
            if drafted is not None:
                return _Share(seat, drafted.rows, drafted)
        self._backlogs[seat.slot.id].drop()
        return _Share(seat, (seat.anchor,))

    def _take(
        self, share: _Share, logits: Logits, place: int, judged: list[tuple[int, int]], verify_s: float
    ) -> Run | Exception:
        """What a sequence keeps of its rows, committed; or why it cannot go on."""
        seat, drafted = share.seat, share.drafted
        try:
            if drafted is None:
                seat.slot.torn = True
                self._forwards.commit(seat.slot, width=1, n_keep=1, place=place)
                seat.slot.commit(1)
                return [seat.choose(logits[0])]
            assert seat.speculation is not None
            run, n_judged = seat.speculation.settle(seat.slot, drafted, logits, place=place, shared=verify_s)
            seat.note(*run)
        except Exception as error:
            self._failures.note(error, seat)
            return error
        judged.append((n_judged, len(run) - 1))
        return run

    def _observe(
        self,
        seats: Sequence[Seat],
        width: int,
        judged: Sequence[tuple[int, int]],
        seconds: float,
        n_past: int,
        *,
        built: bool,
    ) -> None:
        if any(seat.speculates and seat.admission.width is None for seat in seats):
            self._control(len(seats)).observe_together(
                width, judged, seconds, n_past, n=len(seats), built=built
            )


def _deepest(seats: Sequence[Seat]) -> int:
    return max(seat.slot.n_past for seat in seats)
