"""What befalls an engine in a storm, beside its clients: parks, damaged files, faults, a lower cap."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pyggml_dflash import DflashError
from pyggml_dflash.engine.core import EngineCore
from pyggml_dflash.ggml.ledger import Ledger
from tests.soak.clients import World
from tests.soak.faults import KINDS, MOST_AT_ONCE, Faults

DEVICE: Final = "CPU"


class Upheaval(threading.Thread):
    """Does something to one engine every now and then, and leaves it unparked and with its cap."""

    def __init__(self, world: World, folder: Path, *, name: str, seed: str, pause_s: float) -> None:
        super().__init__(name=name, daemon=True)
        self._world, self._folder, self._pause_s, self._rng = world, folder, pause_s, random.Random(seed)

    def run(self) -> None:
        """Go on until the storm is over."""
        deeds: dict[Callable[[], None], int] = {
            self._park: 3,
            self._clear: 2,
            self._flush: 2,
            self._look: 6,
            self._damage: 2,
            self._squeeze: 3,
            self._trim: 1,
        }
        while not self._world.stop.wait(self._rng.random() * self._pause_s):
            (deed,) = self._rng.choices(list(deeds), list(deeds.values()))
            try:
                with self._world.moving:
                    deed()
            except BaseException as error:
                self._world.tell(f"{self.name}, {deed.__name__}: {type(error).__name__}: {error}")

    def _park(self) -> None:
        world, engine, cancel = self._world, self._world.engine, self._rng.random() < 0.4
        with world.parked.on():
            if cancel:
                with world.cancelled.on():
                    engine.park(cancel=True)
            else:
                engine.park()
            world.count("parks")
            world.stop.wait(self._rng.random() * 0.1)
            self._unpark()
            if engine.parked:
                with world.faults.calm():
                    engine.unpark()

    def _unpark(self) -> None:
        """Unpark, or find it parked still behind a fault."""
        try:
            self._world.engine.unpark()
        except DflashError as error:
            if not self._world.faults.are_behind(error):
                raise
            self._world.count("unparks that a fault stopped")
            if not self._world.engine.parked:
                raise AssertionError("the engine failed to unpark, and is not parked") from error

    def _clear(self) -> None:
        self._world.engine.snapshots.clear()
        self._world.count("clears")

    def _flush(self) -> None:
        self._world.engine.snapshots.flush()

    def _trim(self) -> None:
        self._world.engine.trim()

    def _look(self) -> None:
        """Ask what is going on: numbers stay within their limits all the time."""
        stats = self._world.engine.stats()
        states = stats.snapshots
        assert states is not None
        assert states.n_bytes <= states.limit_bytes
        assert stats.requests.running == sum(slot.phase != "free" for slot in stats.slots)
        assert stats.peak_bytes[DEVICE] <= self._world.cap
        with self._world.lock:
            self._world.counts["evicted from memory"] = states.evicted
            self._world.counts["restored from memory"] = states.hits.get("memory", 0)

    def _damage(self) -> None:
        """Flip a byte of a file, cut it short, or take it away."""
        files = sorted(self._folder.glob("*.dfsnap"))
        if not files:
            return
        path, how = self._rng.choice(files), self._rng.randrange(3)
        try:
            if how == 0:
                path.unlink()
            else:
                data = bytearray(path.read_bytes())
                data[self._rng.randrange(len(data))] ^= 0x55
                beside = path.with_suffix(".other")
                beside.write_bytes(data if how == 1 else data[: len(data) // 2])
                beside.rename(path)
        except FileNotFoundError:  # it went meanwhile
            return
        self._world.count("damaged files")

    def _squeeze(self) -> None:
        """Leave nothing free for a moment."""
        world = self._world

        def lower(core: EngineCore, _: object) -> Ledger:
            core._ledger.caps[DEVICE] = core._ledger.charged(DEVICE)  # type: ignore[index]
            return core._ledger

        with world.squeezed.on():
            ledger = world.engine._thread.call(lower)
            try:
                time.sleep(self._rng.random() * 0.1)
            finally:
                ledger.caps[DEVICE] = world.cap  # type: ignore[index]
        world.count("lowered caps")


class Trouble(threading.Thread):
    """Arms faults, one kind after the other, on all engines."""

    def __init__(self, faults: Faults, stop: threading.Event, *, seed: str, pause_s: float) -> None:
        super().__init__(name="trouble", daemon=True)
        self._faults, self._stop_event, self._rng, self._pause_s = faults, stop, random.Random(seed), pause_s

    def run(self) -> None:
        """Go on until the storm is over."""
        while not self._stop_event.wait(self._rng.random() * self._pause_s):
            self._faults.arm(self._rng.choice(KINDS), self._rng.randrange(1, MOST_AT_ONCE + 1))
        self._faults.disarm()
