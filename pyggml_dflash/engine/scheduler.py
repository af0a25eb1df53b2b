"""Who gets a slot, and whose prompt goes on: first come, first served, and turns. Layer 6.

Knows requests only as things that wait, and slots only by their phases; no model and no clock. While
nobody decodes, every prompt goes on in each step. While somebody does, one prompt goes on by one granule,
so that an answer waits for one forward per token, and long prompts take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from pyggml_dflash.engine.step import Phase, StepPlan

R = TypeVar("R")


class Scheduler(Generic[R]):
    """The queue in front of the slots, and the plan of each step."""

    def __init__(self) -> None:
        self._waiting: deque[R] = deque()
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

    def plan(self, phases: Sequence[Phase]) -> StepPlan:
        """The next step of slots in these phases."""
        decode = tuple(id for id, phase in enumerate(phases) if phase == "decode")
        reading = [id for id, phase in enumerate(phases) if phase == "prefill"]
        if decode and reading:
            self._last = next((id for id in reading if id > self._last), reading[0])
            reading = [self._last]
        return StepPlan(decode=decode, prefill=tuple(reading))
