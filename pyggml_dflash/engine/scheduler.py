"""Who gets a slot, and whose prompt goes on: first come, first served, and turns. Layer 6.

Knows requests only as things that wait, and slots only by their phases; no model and no clock. While
nobody decodes, every prompt goes on in each step. While somebody does, one prompt goes on by one granule,
and with it those that share its forward, so that an answer waits for one forward per token, and long prompts
take turns; a share of the time below 1 makes prompts wait for more tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from pyggml_dflash.engine.step import Phase, StepPlan

R = TypeVar("R")


class Scheduler(Generic[R]):
    """The queue in front of the slots, and the plan of each step."""

    def __init__(self, prefill_share: float = 1.0) -> None:
        """`prefill_share`: most of the time that prompts may take while somebody decodes."""
        self._waiting: deque[R] = deque()
        self._share = prefill_share
        self._owed_s = 0.0  # by prompts to those who decode, who pay it off by decoding
        self._last = -1  # the slot whose prompt went on last while others decoded

    @property
    def waiting(self) -> tuple[R, ...]:
        """What waits for a slot, the next one first."""
        return tuple(self._waiting)

    @property
    def n_waiting(self) -> int:
        """How many wait for a slot."""
        return len(self._waiting)

    def add(self, request: R) -> None:
        """Put a request at the end of the queue."""
        self._waiting.append(request)

    def next(self) -> R | None:
        """Take the first of the queue, for which there is a slot; None if nobody waits."""
        return self._waiting.popleft() if self._waiting else None

    def remove(self, unwanted: Callable[[R], bool]) -> list[R]:
        """Take the unwanted ones out of the queue; the others keep their order."""
        gone: list[R] = []
        for _ in range(len(self._waiting)):
            request = self._waiting.popleft()
            (gone if unwanted(request) else self._waiting).append(request)
        return gone

    @property
    def postpones(self) -> bool:
        """True while prompts have had more than their share of the time of those who decode."""
        return self._share == 0 or self._owed_s > 0

    def spent(self, *, decode_s: float, prefill_s: float) -> None:
        """Count what a step took in which somebody decoded.

        Time in which no prompt goes on is not saved up for later ones.
        """
        change_s = (1 - self._share) * prefill_s - self._share * decode_s
        self._owed_s = max(0.0, self._owed_s + change_s)

    def plan(
        self, phases: Sequence[Phase], beside: Callable[[int], Sequence[int]] = lambda id: ()
    ) -> StepPlan:
        """The next step of slots in these phases. `beside`: whose prompts share the forward of a slot's."""
        decode = tuple(id for id, phase in enumerate(phases) if phase == "decode")
        reading = [id for id, phase in enumerate(phases) if phase == "prefill"]
        if not decode:
            self._owed_s = 0.0
        elif self.postpones:
            reading = []
        elif reading:
            self._last = next((id for id in reading if id > self._last), reading[0])
            reading = [self._last, *beside(self._last)]
        return StepPlan(decode=decode, prefill=tuple(reading))
