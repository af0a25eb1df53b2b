"""Who is served and who waits: every answer in progress, and how many there may be. Layer 8.

Used on the event loop only. States are those that the engine tells, so the desk knows no policy of it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from pyggml_dflash.api import AsyncTextStream
from pyggml_dflash.requests import GenerationResult
from pyggml_dflash.serve.problems import queue_full

State = Literal["queued", "prefill", "decode"]


@dataclass(slots=True, kw_only=True)
class Ticket:
    """One answer in progress."""

    number: int
    request_id: str
    n_prompt: int
    started_s: float = field(default_factory=time.monotonic)
    stream: AsyncTextStream | None = None  # once it is queued
    n_cached: int | None = None  # prompt tokens that need not be read, once that is known
    n_generated: int = 0

    @property
    def state(self) -> State:
        """What the engine does for it."""
        phase = "queued" if self.stream is None else self.stream.state.phase
        return "decode" if phase == "done" else phase

    @property
    def n_prefilled(self) -> int:
        """Prompt tokens that the engine has, read or stored."""
        return 0 if self.stream is None else self.stream.state.done

    @property
    def engine_id(self) -> int | None:
        """The number that the engine knows it by."""
        return None if self.stream is None else self.stream.request_id

    @property
    def age_s(self) -> float:
        """Seconds since it was admitted."""
        return time.monotonic() - self.started_s


@dataclass(slots=True)
class Totals:
    """What was answered since the start."""

    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cache_hits: int = 0
    completion_tokens: int = 0
    verify_steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, result: GenerationResult) -> None:
        """Count an answer that ended, also one that was cancelled."""
        usage, spec = result.usage, result.speculation
        self.answers += 1
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.cache_hits += usage.cached_tokens > 0
        self.completion_tokens += usage.completion_tokens
        if spec is not None:
            self.verify_steps += spec.verify_steps
            self.drafted += spec.drafted
            self.accepted += spec.accepted


class Desk:
    """Admits answers up to `n_slots` + `queue_limit`, and shows what they do."""

    def __init__(self, queue_limit: int) -> None:
        self.queue_limit, self.n_slots = queue_limit, 1
        self.totals = Totals()
        self._tickets: dict[int, Ticket] = {}
        self._last_number = 0

    def check_room(self, n: int) -> None:
        """Refuse `n` more answers if they are too many; those of the only request are not."""
        n_there = len(self._tickets)
        if n_there and n_there + n > self.n_slots + self.queue_limit:
            most = self.n_slots + self.queue_limit
            raise queue_full(f"{n_there} answers run or wait, and {most} may; try again")

    def admit(self, request_id: str, n_prompt: int) -> Ticket:
        """A ticket for an answer, after `check_room`."""
        self._last_number += 1
        ticket = Ticket(number=self._last_number, request_id=request_id, n_prompt=n_prompt)
        self._tickets[ticket.number] = ticket
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """The answer ended or is no longer wanted."""
        self._tickets.pop(ticket.number, None)

    def position(self, ticket: Ticket) -> int:
        """How many waiting answers come before this one, itself included; 0 if it does not wait."""
        waiting = [t.number for t in self.waiting]
        return waiting.index(ticket.number) + 1 if ticket.number in waiting else 0

    @property
    def waiting(self) -> list[Ticket]:
        """Answers that the engine has not begun, in order."""
        return [t for t in self._tickets.values() if t.state == "queued"]

    @property
    def running(self) -> list[Ticket]:
        """Answers that the engine works on."""
        return [t for t in self._tickets.values() if t.state != "queued"]
