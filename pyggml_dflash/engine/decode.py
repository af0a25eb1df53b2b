"""Decode steps of seats: one token, or a run of drafted ones; and the loop for one that is alone. Layer 6."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from pyggml_dflash.engine.drafting import Backlog
from pyggml_dflash.engine.failures import Failures
from pyggml_dflash.engine.graphs import Forwards, Logits
from pyggml_dflash.engine.ragged import Ragged, Run
from pyggml_dflash.engine.sampling import best
from pyggml_dflash.engine.seat import Seat

Take = Callable[[int, Logits], bool]  # takes a token and the logits it is from; True: that is enough
Pause = Callable[[], bool]


def decode_step(
    forwards: Forwards,
    backlogs: Sequence[Backlog],
    ragged: Ragged | None,
    failures: Failures,
    seats: Sequence[Seat],
) -> dict[int, Run | Exception]:
    """The next tokens of every sequence, by its slot: as many as drafts give it, or one.

    `backlogs`: what waits for the drafter of each slot; none without drafters, and then nothing is `ragged`.
    As few forwards as rows may share; each is committed before the next, so that one that fails leaves the
    sequences of the others as they should be. Those whose last step failed share none. An empty run is that
    of a sequence whose state was lost through another.
    """
    if len(seats) == 1:
        (seat,) = seats
        return {seat.slot.id: failures.attempt(seat, partial(_decode_run, forwards, backlogs, seat))}
    apart = [seat for seat in seats if seat.failed_at == seat.slot.n_past]
    found = _decode_alone(forwards, backlogs, failures, apart)
    together = [seat for seat in seats if seat not in apart]
    for group in _groups(together, forwards.batching.rows):
        found |= _decode_group(forwards, backlogs, ragged, failures, group)
    return found


def _groups(seats: Sequence[Seat], most: int) -> list[Sequence[Seat]]:
    """Runs of about the same length, at most `most` each."""
    n = -(-len(seats) // most)
    ends = [len(seats) * i // max(1, n) for i in range(n + 1)]
    return [seats[start:stop] for start, stop in pairwise(ends)]


def _decode_group(
    forwards: Forwards,
    backlogs: Sequence[Backlog],
    ragged: Ragged | None,
    failures: Failures,
    seats: Sequence[Seat],
) -> dict[int, Run | Exception]:
    """The next tokens of each, from one forward; where that fails, one token of each alone."""
    if len(seats) > 1:
        try:
            runs = None if ragged is None else ragged.step(seats)
            return _decode_plainly(forwards, backlogs, ragged, failures, seats) if runs is None else runs
        except Exception as error:
            failures.note(error, *seats)
            may_go_on = {seat.slot.id: failures.may_regain(seat, error) for seat in seats}
            whole = [seat for seat in seats if may_go_on[seat.slot.id] and seat.is_whole]
            rest = [seat.slot.id for seat in seats if seat not in whole]
            stopped: dict[int, Run | Exception] = {id: () if may_go_on[id] else error for id in rest}
            return stopped | _decode_alone(forwards, backlogs, failures, whole)
    return _decode_alone(forwards, backlogs, failures, seats)


def _decode_plainly(
    forwards: Forwards,
    backlogs: Sequence[Backlog],
    ragged: Ragged | None,
    failures: Failures,
    seats: Sequence[Seat],
) -> dict[int, Run | Exception]:
    """One token each, from one forward."""
    started, n_built = time.perf_counter(), forwards.built.n
    rows = _decode_rows(forwards, backlogs, failures, seats)
    runs = {seat.slot.id: _chosen(seat, row) for seat, row in zip(seats, rows, strict=True)}
    if ragged is not None:
        ragged.plain(seats, time.perf_counter() - started, built=forwards.built.n > n_built)
    return runs


def _decode_alone(
    forwards: Forwards, backlogs: Sequence[Backlog], failures: Failures, seats: Sequence[Seat]
) -> dict[int, Run | Exception]:
    """One token each, from a forward each."""
    return {
        seat.slot.id: failures.attempt(seat, partial(_decode_one, forwards, backlogs, seat)) for seat in seats
    }


def _decode_run(forwards: Forwards, backlogs: Sequence[Backlog], seat: Seat) -> Run:
    """A step of a sequence that has it for itself, with drafts if the drafter follows."""
    return seat.next_run(forwards.n_ctx) if seat.speculates else _decode_one(forwards, backlogs, seat)


def _decode_one(forwards: Forwards, backlogs: Sequence[Backlog], seat: Seat) -> Run:
    """A step without drafts, recorded for the drafter if it follows."""
    slot, token, log = seat.slot, seat.anchor, backlogs[seat.slot.id] if seat.drafts else None
    if log is not None:
        log.make_room(1)
    logits = forwards.decode(slot, token, capture=log is not None)
    if log is not None:
        log.add((token,), slot.n_past)
    slot.commit(1)
    return [seat.choose(logits)]


def _decode_rows(
    forwards: Forwards, backlogs: Sequence[Backlog], failures: Failures, seats: Sequence[Seat]
) -> Logits:
    """A token of each of several sequences, committed: logits F32 [n, n_vocab], valid until the next step.

    Those that a drafter follows are recorded for it.
    """
    for seat in seats:
        if seat.drafts:
            failures.attempt_drafting(seat, partial(backlogs[seat.slot.id].make_room, 1))
    followed = [i for i, seat in enumerate(seats) if seat.drafts]
    logits = forwards.decode_batch(
        [seat.slot for seat in seats], [seat.anchor for seat in seats], capture=followed
    )
    for i in followed:
        backlogs[seats[i].slot.id].add((seats[i].anchor,), seats[i].slot.n_past)
    for seat in seats:
        seat.slot.commit(1)
    return logits


def _chosen(seat: Seat, logits: Logits) -> Run | Exception:
    """The next token of one sequence, or why it has none."""
    try:
        return [seat.choose(logits)]
    except Exception as error:
        return error


def run_alone(forwards: Forwards, seat: Seat, take: Take, pause: Pause) -> bool:
    """Steps of the only sequence until `take` has enough (True) or `pause` says so."""
    if seat.speculates:
        return _run_drafted(forwards, seat, take, pause)
    if seat.speculation is not None:
        return _run_undrafted(forwards, seat, take, pause)
    return _run_plain(forwards, seat, take, pause)


def _run_drafted(forwards: Forwards, seat: Seat, take: Take, pause: Pause) -> bool:
    while True:
        for chosen in seat.next_run(forwards.n_ctx):
            if take(chosen.token, chosen.logits):
                return True
        if pause():
            return False


def _run_plain(forwards: Forwards, seat: Seat, take: Take, pause: Pause) -> bool:
    """The loop that most tokens come from; little Python is cheaper."""
    decode, slot, sampler, note = forwards.decode, seat.slot, seat.sampler, seat.answer.append
    pick, accept = sampler.pick if sampler.needs_logits else best, sampler.accept
    token = seat.anchor
    while True:
        logits = decode(slot, token)
        slot.commit(1)
        token = pick(logits)
        accept(token)
        note(token)
        seat.anchor = token
        seat.n_left -= 1
        if take(token, logits):
            return True
        if pause():
            return False


def _run_undrafted(forwards: Forwards, seat: Seat, take: Take, pause: Pause) -> bool:
    """Steps of a sequence that the drafter no longer follows."""
    while True:
        (chosen,) = _decode_one(forwards, (), seat)
        if take(chosen.token, chosen.logits):
            return True
        if pause():
            return False
