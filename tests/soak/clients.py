"""Clients of a storm: each asks again and again, reads as clients do, and checks what it gets.

A request ends in its cold answer, in the beginning of it where somebody wanted no more, or in a typed error
that a fault or a parked engine explains. Everything else is wrong.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pyggml_dflash import DeviceMemoryError, Engine, EngineParked, GenerationResult
from pyggml_dflash.engine.handle import RequestHandle
from tests.soak.asks import Answer, Ask
from tests.soak.faults import Faults
from tests.soak.spell import Spell

STALL_S: Final = 0.3
MOST_TOLD: Final = 20  # wrong ends that are told in full

Outcome = GenerationResult | BaseException


@dataclass(slots=True)
class World:
    """What the clients of one engine share."""

    engine: Engine
    faults: Faults
    cap: int  # bytes of the device
    parked: Spell = field(default_factory=Spell)
    cancelled: Spell = field(default_factory=Spell)  # parked by cancelling what ran
    squeezed: Spell = field(default_factory=Spell)  # capped at what was held
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    moving: threading.Lock = field(default_factory=threading.Lock)  # held by who parks it or lowers its cap
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, *names: str) -> None:
        """One more of each."""
        with self.lock:
            self.counts.update(names)

    def tell(self, what: str) -> None:
        """Something is wrong."""
        with self.lock:
            self.counts["wrong"] += 1
            if len(self.wrong) < MOST_TOLD:
                self.wrong.append(what)


@dataclass(slots=True)
class Told:
    """One request: when it was made, and whether its client left early."""

    world: World
    parked: int
    cancelled: int
    squeezed: int
    left: bool = False

    @classmethod
    def now(cls, world: World) -> Told:
        """A request that is about to be made."""
        return cls(world, world.parked.mark(), world.cancelled.mark(), world.squeezed.mark())

    def may_be_cut(self) -> bool:
        """True if somebody wanted no more."""
        return self.left or self.world.cancelled.since(self.cancelled)

    def explains(self, error: BaseException) -> str | None:
        """What is behind an error; None: nothing that is known."""
        if isinstance(error, EngineParked) and self.world.parked.since(self.parked):
            return "refused, as the engine was parked"
        if self.world.faults.are_behind(error):
            return f"failed by a fault: {type(error).__name__}"
        if isinstance(error, DeviceMemoryError) and self.world.squeezed.since(self.squeezed):
            return "failed under a lowered cap"
        return None


class Client(threading.Thread):
    """Asks until the storm is over."""

    def __init__(self, world: World, asks: Sequence[Ask], *, name: str, seed: str) -> None:
        super().__init__(name=name, daemon=True)
        self._world, self._asks, self._rng = world, asks, random.Random(seed)

    def run(self) -> None:
        """Ask, in all the ways there are."""
        ways: dict[Callable[[Ask, Told], Outcome], int] = {
            self._generate: 40,
            self._read: 15,
            self._leave: 12,
            self._drop: 6,
            self._stall: 10,
            self._read_async: 10,
            self._leave_async: 6,
            self._forsake_loop: 3,
        }
        while not self._world.stop.is_set():
            (way,) = self._rng.choices(list(ways), list(ways.values()))
            ask, told = self._rng.choice(self._asks), Told.now(self._world)
            try:
                outcome: Outcome = way(ask, told)
            except BaseException as error:
                outcome = error
            self._judge(way.__name__.lstrip("_"), ask, told, outcome)
            if self._rng.random() < 0.2:
                time.sleep(self._rng.random() * 0.05)

    def _judge(self, way: str, ask: Ask, told: Told, outcome: Outcome) -> None:
        world = self._world
        if isinstance(outcome, BaseException):
            why = told.explains(outcome)
            if why is None:
                world.tell(f"{self.name}, {way}: {type(outcome).__name__}: {outcome}")
            else:
                world.count(why, *(() if isinstance(outcome, EngineParked) else ("ended failed",)))
            while isinstance(outcome, EngineParked) and world.engine.parked and not world.stop.wait(0.02):
                pass
            return
        found = Answer.of(outcome)
        if found.reason == "cancelled":
            world.count("ended cancelled")
            right = told.may_be_cut() and ask.answer.begins_with(found)
        else:
            world.count("ended done")
            right = found == ask.answer
        if not right:
            world.tell(
                f"{self.name}, {way}, prompt of {len(ask.prompt)}, {ask.options}, reuse {outcome.reuse}, "
                f"speculation {outcome.speculation}: {found} is not {ask.answer}"
            )

    def _options(self, ask: Ask) -> dict[str, Any]:
        more: dict[str, Any] = {}
        if self._rng.random() < 0.2:
            more["spec"] = "off"
        elif self._rng.random() < 0.4:  # draft, whether it pays or not
            more["spec_width"] = self._rng.randrange(2, self._world.engine.info.exact_width + 1)
        if self._rng.random() < 0.1:
            more["cache_prompt"] = False
        return {**ask.options, **more}

    # ways to ask

    def _generate(self, ask: Ask, told: Told) -> Outcome:
        return self._world.engine.generate(ask.prompt, **self._options(ask))

    def _read(self, ask: Ask, told: Told) -> Outcome:
        with self._world.engine.stream(ask.prompt, **self._options(ask)) as stream:
            text = "".join(piece.text for piece in stream)
            return self._same_text(text, stream.result)

    def _leave(self, ask: Ask, told: Told) -> Outcome:
        """Cancel after some pieces, or before the first."""
        told.left, n = True, self._rng.randrange(5)
        self._world.count("cancels")
        with self._world.engine.stream(ask.prompt, **self._options(ask)) as stream:
            if n == 0:
                time.sleep(self._rng.random() * 0.05)
            for _, _ in zip(range(n), stream, strict=False):
                pass
        return stream.result

    def _drop(self, ask: Ask, told: Told) -> Outcome:
        """Forget the stream without a word."""
        told.left = True
        self._world.count("cancels")
        stream = self._world.engine.stream(ask.prompt, **self._options(ask))
        handle = stream._handle
        time.sleep(self._rng.random() * 0.05)
        del stream
        return handle.result()

    def _stall(self, ask: Ask, told: Told) -> Outcome:
        """Read nothing for a while, then everything."""
        self._world.count("stalls")
        with self._world.engine.stream(ask.prompt, **self._options(ask)) as stream:
            time.sleep(self._rng.random() * STALL_S)
            text = "".join(piece.text for piece in stream)
            return self._same_text(text, stream.result)

    def _same_text(self, text: str, result: GenerationResult) -> Outcome:
        if text != result.text:
            return AssertionError(f"pieces {text!r} are not the answer {result.text!r}")
        return result

    def _read_async(self, ask: Ask, told: Told) -> Outcome:
        async def read() -> Outcome:
            stream = await self._world.engine.submit(ask.prompt, **self._options(ask))
            pieces = [piece.text async for piece in stream]
            return self._same_text("".join(pieces), stream.result)

        return asyncio.run(read())

    def _leave_async(self, ask: Ask, told: Told) -> Outcome:
        told.left, n = True, self._rng.randrange(5)
        self._world.count("cancels")

        async def read() -> RequestHandle:
            stream = await self._world.engine.submit(ask.prompt, **self._options(ask))
            if n == 0:
                await asyncio.sleep(self._rng.random() * STALL_S)
                self._world.count("stalls")
            async for _ in stream:
                n_read.append(1)
                if len(n_read) > n:
                    break
            stream.cancel()
            return stream._handle

        n_read: list[int] = []
        return asyncio.run(read()).result()

    def _forsake_loop(self, ask: Ask, told: Told) -> Outcome:
        """Close the event loop while pieces are on their way."""
        told.left = True
        self._world.count("cancels")

        async def ask_only() -> RequestHandle:
            return (await self._world.engine.submit(ask.prompt, **self._options(ask)))._handle

        return asyncio.run(ask_only()).result()
