"""Decode steps of seats: one token, or a run of drafted ones; and the loop for one that is alone. Layer 6."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyggml_dflash.engine.acceptance import Chosen
from pyggml_dflash.engine.drafting import Backlog
from pyggml_dflash.engine.graphs import Forwards, Logits
from pyggml_dflash.engine.sampling import best
from pyggml_dflash.engine.seat import Seat

Take = Callable[[int, Logits], bool]  # takes a token and the logits it is from; True: that is enough
Pause = Callable[[], bool]


def decode_run(forwards: Forwards, backlog: Backlog | None, seat: Seat) -> list[Chosen]:
    """A step of a sequence that has it for itself, with drafts if the drafter follows."""
    return seat.next_run(forwards.n_ctx) if seat.speculates else decode_one(forwards, backlog, seat)


def decode_one(forwards: Forwards, backlog: Backlog | None, seat: Seat) -> list[Chosen]:
    """A step without drafts, recorded for the drafter if it follows."""
    slot, token, log = seat.slot, seat.anchor, backlog if seat.drafts else None
    if log is not None:
        log.make_room(1)
    logits = forwards.decode(slot, token, capture=log is not None)
    if log is not None:
        log.add((token,), slot.n_past)
    slot.commit(1)
    return [seat.choose(logits.copy())]  # the next slot's graph may take the memory of this one's


def decode_rows(forwards: Forwards, backlog: Backlog | None, seats: Sequence[Seat]) -> Logits:
    """A token of each of several sequences, committed: logits F32 [n, n_vocab], valid until the next step.

    The one that the drafter follows is recorded for it.
    """
    followed = next((i for i, seat in enumerate(seats) if seat.drafts), None)
    log = None if followed is None else backlog
    if log is not None:
        log.make_room(1)
    logits = forwards.decode_batch(
        [seat.slot for seat in seats], [seat.anchor for seat in seats], capture=followed
    )
    if log is not None and followed is not None:
        log.add((seats[followed].anchor,), seats[followed].slot.n_past)
    for seat in seats:
        seat.slot.commit(1)
    return logits


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
    decode, slot, sampler = forwards.decode, seat.slot, seat.sampler
    pick, accept = sampler.pick if sampler.needs_logits else best, sampler.accept
    token = seat.anchor
    while True:
        logits = decode(slot, token)
        slot.commit(1)
        token = pick(logits)
        accept(token)
        seat.anchor = token
        seat.n_left -= 1
        if take(token, logits):
            return True
        if pause():
            return False


def _run_undrafted(forwards: Forwards, seat: Seat, take: Take, pause: Pause) -> bool:
    """Steps of a sequence that the drafter no longer follows."""
    while True:
        (chosen,) = decode_one(forwards, None, seat)
        if take(chosen.token, chosen.logits):
            return True
        if pause():
            return False
