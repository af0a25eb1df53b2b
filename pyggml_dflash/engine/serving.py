"""Answers requests turn by turn: who leaves, who gets a slot, one step, and to whom its tokens go. Layer 6.

Used by the engine's thread alone. Everything that can fail for one request fails for that one only: its
callbacks, its sampler, its step.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from pyggml_dflash.engine.graphs import Logits
from pyggml_dflash.engine.loaded import Loaded
from pyggml_dflash.engine.scheduler import Scheduler
from pyggml_dflash.engine.seat import Seat
from pyggml_dflash.engine.step import Admission, Granule, Outcome, StepReport
from pyggml_dflash.errors import EngineClosed
from pyggml_dflash.ggml.device import memory_now
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.measures import DeviceMemory, Histogram
from pyggml_dflash.requests import EngineStats, RequestCounts, RequestState


class Running(Protocol):
    """A request that may have a slot. Only `take` must not raise."""

    @property
    def admission(self) -> Admission:
        """What it brings to its slot."""

    @property
    def cancelled(self) -> bool:
        """True once nobody wants it any more."""

    def begin(self, n_cached: int) -> None:
        """It has a slot, with so many tokens of its prompt."""

    def read(self, granule: Granule) -> bool:
        """More of its prompt was read; True if that is enough."""

    def take(self, token: int, logits: Logits) -> bool:
        """Another token; True if that is enough."""

    def finish(self, seat: Seat | None) -> Outcome:
        """Hand out what came of it; without a seat it never ran."""

    def fail(self, error: BaseException) -> None:
        """Hand out an error."""


class Waiting(Protocol):
    """A request in the queue."""

    state: RequestState

    @property
    def id(self) -> int | None:
        """Its number; None for a text that is only read."""

    @property
    def cancelled(self) -> bool:
        """True once nobody wants it any more."""

    def cancel(self) -> None:
        """Nobody wants it any more."""

    def started(self, loaded: Loaded) -> Running:
        """What runs it; may raise, since it is looked at for the first time."""

    def fail(self, error: BaseException) -> None:
        """Hand out an error."""


@dataclass(frozen=True, slots=True)
class Seated:
    """A request that has a slot, and its number."""

    running: Running
    waiting: Waiting  # as it came


def _no_news() -> bool:
    return False


def _nobody() -> None:
    pass


class Serving:
    """The queue, the slots and what runs in them."""

    def __init__(
        self,
        loaded: Loaded,
        has_news: Callable[[], bool] = _no_news,
        on_end: Callable[[], None] = _nobody,
        *,
        prefill_share: float = 1.0,
    ) -> None:
        """`has_news`: whether a turn should end soon, as when something came or was cancelled; it is asked
        after every step. `on_end` is called before an outcome is handed out. `prefill_share`: most of the
        time that prompts may take while others decode."""
        self._loaded, self._core = loaded, loaded.core
        self._has_news, self._on_end = has_news, on_end
        self._scheduler: Scheduler[Waiting] = Scheduler(prefill_share)
        self._counted_s = 0.0  # up to when the time of steps is counted
        self._seated: dict[int, Seated] = {}
        self._ended: Counter[str] = Counter()
        self._granules = Histogram()

    @property
    def is_idle(self) -> bool:
        """True if nothing runs and nothing waits."""
        return not self._seated and not self._scheduler.n_waiting

    def add(self, waiting: Waiting) -> None:
        """Put a request into the queue."""
        self._scheduler.add(waiting)
        self._number()

    def use(self, loaded: Loaded) -> None:
        """Serve with another core, where nothing runs."""
        assert self.is_idle
        self._loaded, self._core = loaded, loaded.core

    def cancel_all(self) -> None:
        """Cancel what runs and what waits."""
        for waiting in self._scheduler.waiting:
            waiting.cancel()
        for seated in self._seated.values():
            seated.waiting.cancel()

    def turn(self) -> None:
        """Let go of what nobody wants, fill free slots, and run a step, or steps while one runs alone."""
        while self._let_go() or self._fill():  # one makes work for the other
            self._number()
        try:
            self._step()
        except Exception as error:  # of no single request
            for id in list(self._seated):
                self._fail(id, error)

    def _let_go(self) -> bool:
        """End what nobody wants any more; True if there was something."""
        gone = self._scheduler.remove(lambda waiting: waiting.cancelled)
        for waiting in gone:
            self._leave(waiting)
        unwanted = [id for id, seated in self._seated.items() if seated.running.cancelled]
        for id in unwanted:
            self._end(id)
        return bool(gone or unwanted)

    def _fill(self) -> bool:
        """Give free slots to those who wait; True if somebody got one."""
        n_waiting = self._scheduler.n_waiting
        while self._core.has_room and (first := self._scheduler.next()) is not None:
            self._seat(first)
        return self._scheduler.n_waiting < n_waiting

    @property
    def has_room(self) -> bool:
        """True while a slot would be free after those who wait got theirs."""
        return len(self._seated) + self._scheduler.n_waiting < self._core.n_slots

    def _step(self) -> None:
        phases = self._core.phases
        plan = self._scheduler.plan(phases, self._core.beside)
        self._counted_s = time.perf_counter()
        if len(plan.decode) == 1 and not plan.prefill:
            self._run_alone(plan.decode[0], self._is_due if "prefill" in phases else self._has_news)
            self._count()
        elif not plan.is_empty:
            report = self._core.step(plan)
            if plan.prefill:
                self._granules = self._granules.including(report.prefill_s)
            if plan.decode:
                self._count(report.prefill_s)
            self._deliver(report)

    def _count(self, prefill_s: float = 0.0) -> None:
        """Tell the scheduler of the time that passed."""
        before_s, self._counted_s = self._counted_s, time.perf_counter()
        self._scheduler.spent(decode_s=self._counted_s - before_s - prefill_s, prefill_s=prefill_s)

    def _is_due(self) -> bool:
        """Whether a turn should end while a prompt waits for its share."""
        self._count()
        return not self._scheduler.postpones or self._has_news()

    def _run_alone(self, id: int, pause: Callable[[], bool]) -> None:
        try:
            is_enough = self._core.run_alone(id, self._seated[id].running.take, pause)
        except Exception as error:
            self._fail(id, error)
            return
        if is_enough:
            self._end(id)

    def _deliver(self, report: StepReport) -> None:
        for id, run in report.decoded.items():
            take = self._seated[id].running.take
            if any(take(chosen.token, chosen.logits) for chosen in run):
                self._end(id)
        for id, granule in (*report.advanced.items(), *report.completed.items()):
            try:
                is_enough = self._seated[id].running.read(granule)
            except BaseException as error:
                self._fail(id, error)
                continue
            if is_enough:
                self._end(id)
        for id, why in report.failed.items():
            self._fail(id, why)

    def _seat(self, waiting: Waiting) -> None:
        try:
            running = waiting.started(self._loaded)
            id = self._core.admit(running.admission)
        except Exception as error:
            self._refuse(waiting, error)
            return
        assert id is not None
        self._seated[id] = Seated(running, waiting)
        try:
            running.begin(self._core.seat(id).n_cached)
        except BaseException as error:
            self._fail(id, error)

    def _leave(self, waiting: Waiting) -> None:
        """A request that never had a slot."""
        try:
            running = waiting.started(self._loaded)
        except Exception as error:
            self._refuse(waiting, error)
        else:
            self._finish(running, None)

    def _end(self, id: int) -> None:
        running, seat = self._seated.pop(id).running, self._core.seat(id)
        self._core.retire(id)
        self._finish(running, seat)

    def _fail(self, id: int, error: BaseException) -> None:
        running = self._seated.pop(id).running
        self._core.retire(id)
        self._refuse(running, error)

    def _finish(self, running: Running, seat: Seat | None) -> None:
        self._on_end()
        try:
            self._ended[running.finish(seat)] += 1
        except BaseException as error:
            self._ended["failed"] += 1
            running.fail(error)

    def _refuse(self, request: Running | Waiting, error: BaseException) -> None:
        self._on_end()
        self._ended["failed"] += 1
        request.fail(error)

    def _number(self) -> None:
        """Tell those who wait where they stand."""
        for position, waiting in enumerate(self._scheduler.waiting, 1):
            if waiting.state.position != position:
                waiting.state = replace(waiting.state, position=position)

    def close(self) -> None:
        """End what runs, as if it were cancelled, and refuse what waits."""
        for id in list(self._seated):
            self._end(id)
        for waiting in self._scheduler.remove(lambda _: True):
            self._refuse(waiting, EngineClosed("Engine"))

    def stats(self) -> EngineStats:
        """What the engine does, and did so far."""
        stats, trims = self._core.stats(), self._core.trims
        requests = {id: seated.waiting.id for id, seated in self._seated.items()}
        counts = {name: self._ended[name] for name in ("done", "cancelled", "failed")}
        return replace(
            stats,
            requests=RequestCounts(running=len(self._seated), waiting=self._scheduler.n_waiting, **counts),
            slots=tuple(replace(slot, request=requests.get(slot.id)) for slot in stats.slots),
            allocation_retries=trims.n_relieved,
            granule_times=self._granules,
            pool=trims.report(),
            devices=_memory_of_devices(self._core.ledger),
        )


def _memory_of_devices(ledger: Ledger) -> dict[str, DeviceMemory]:
    """What the devices that something was charged to have, within their caps."""
    return {
        name: DeviceMemory(total_bytes=ledger.total(name, total), free_bytes=ledger.free(name, free))
        for name, (free, total) in memory_now(ledger.devices()).items()
    }
