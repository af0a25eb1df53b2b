"""A sequence gets a state again that was lost in a forward which it shared with others. Layer 6.

What is stored of its prompt is restored, the rest runs in the forwards that it had, and then its answer token
by token: these are the same numbers, so the text goes on as if nothing had happened.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from pyggml_dflash.arch.base import OutputKind
from pyggml_dflash.engine.graphs import Forwards
from pyggml_dflash.engine.reuse import Reuse
from pyggml_dflash.engine.seat import Seat
from pyggml_dflash.state.cuts import prompt_ends

LOG: Final = logging.getLogger(__name__)
REPLAYED: Final = 16  # tokens of an answer that run at a time; others wait for them

RunPrompt = Callable[[Sequence[int], OutputKind], object]  # a forward of the prompt, committed


def begin_again(seat: Seat, reuse: Reuse | None, rows: int) -> None:
    """Go back to what is stored of the prompt, whose forwards have at most `rows` rows."""
    slot, admission = seat.slot, seat.admission
    slot.reset()
    seat.lose()
    if seat.prompt is not None and reuse is not None:
        ends = prompt_ends(len(admission.tokens), admission.boundaries, rows)
        try:
            reuse.begin(slot, admission.tokens, boundaries=admission.boundaries, ends=ends)
        except Exception as error:
            LOG.warning("no stored state was continued: %s: %s", type(error).__name__, error)
            slot.reset()
    seat.n_read = slot.n_past


def regain(forwards: Forwards, seat: Seat, run_prompt: RunPrompt) -> None:
    """Run a granule of the prompt again, or a few tokens of the answer; decode again once all of it ran."""
    slot, tokens = seat.slot, seat.admission.tokens
    start, n_prompt = slot.n_past, len(seat.admission.tokens)
    if start < n_prompt:
        end = seat.end_behind(start)
        run_prompt(tokens[start:end], "last" if end == n_prompt else "none")
    else:
        for token in seat.answer[start - n_prompt : -1][:REPLAYED]:
            forwards.decode(slot, token)
            slot.commit(1)
    seat.n_read = slot.n_past
    if slot.n_past == seat.n_before_anchor:
        seat.phase, seat.regains = "decode", False
