"""Steps that fail: which may be tried once more, and without what. Layer 6."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeVar

from pyggml_dflash.engine.seat import Seat
from pyggml_dflash.errors import DeviceMemoryError

LOG: Final = logging.getLogger(__name__)

T = TypeVar("T")


class Failures:
    """Counts steps that failed, and says which may be repeated.

    A step is repeated for its slot alone, once, and only where it had changed nothing, so that one sequence
    that cannot go on takes no others with it. Where a forward of several may have changed their states, each
    gets its own again first. It may have been the drafter's fault, so a sequence goes on without it.
    """

    def __init__(self) -> None:
        self.n = 0

    def attempt(self, seat: Seat, work: Callable[[], T]) -> T | Exception:
        """What a step of one slot gives, or why it cannot be done."""
        while True:
            try:
                return work()
            except Exception as error:
                self.note(error, seat)
                if not self.may_repeat(seat, error):
                    return error

    def attempt_drafting(self, seat: Seat, work: Callable[[], T]) -> T | None:
        """What a drafter's work gives; where it fails, which changes no state, the sequence has no drafts."""
        try:
            return work()
        except Exception as error:
            self.note(error, seat)
            _undraft(seat, error)
            return None

    def note(self, error: Exception, *seats: Seat) -> None:
        """Count a step of these slots, and log why it failed."""
        self.n += 1
        places = ", ".join(f"slot {seat.slot.id} at position {seat.slot.n_past}" for seat in seats)
        LOG.warning("a step of %s failed: %s: %s", places, type(error).__name__, error)

    def set_apart(self, seat: Seat, error: Exception) -> None:
        """A forward that prompts shared failed: this one shares none any more, and goes on undrafted."""
        _undraft(seat, error)
        seat.failed_at, seat.may_join = seat.slot.n_past, False

    def may_repeat(self, seat: Seat, error: Exception) -> bool:
        """Whether the step may be tried once more; it then has no drafts."""
        return self.may_regain(seat, error) and seat.is_whole

    def may_regain(self, seat: Seat, error: Exception) -> bool:
        """Whether the step may be tried once more in a state that is good; it then has no drafts."""
        _undraft(seat, error)
        n_past, in_prompt = seat.slot.n_past, seat.phase == "prefill"
        # the allocation of a prompt's graph was repeated already, after scratch was given back
        is_last = seat.failed_at == n_past or (in_prompt and isinstance(error, DeviceMemoryError))
        seat.failed_at = n_past
        return not is_last


def _undraft(seat: Seat, error: Exception) -> None:
    """Have a sequence go on without its drafter, where it had one."""
    if seat.drafts:
        seat.put_drafts_aside(f"drafting was put aside: {error}")
