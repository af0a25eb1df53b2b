"""A storm over real engines, and what is there when it has passed."""

from __future__ import annotations

import faulthandler
import gc
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pyggml_dflash import Engine, EngineStats
from pyggml_dflash.engine.core import EngineCore
from tests.soak.asks import Ask, Case, asks, cases
from tests.soak.clients import Client, World
from tests.soak.faults import KINDS, Faults
from tests.soak.memory import Flatness, Watch, open_files, widen_interned
from tests.soak.upheaval import DEVICE, Trouble, Upheaval

PATIENCE_S: Final = 60.0  # after this, a thread that should have ended is called stuck
ALL: Final = (
    "ended done",
    "ended cancelled",
    "ended failed",
    "cancels",
    "stalls",
    "parks",
    "clears",
    "damaged files",
    "lowered caps",
    "restored from memory",
    "evicted from memory",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long a storm lasts, and how much of it there is."""

    seed: int
    least_s: float
    most_s: float  # where it has to go on until everything has happened
    n_asks: int = 40
    n_clients: int = 5  # of each engine
    every_s: float = 1.0  # between two samples of memory
    fault_pause_s: float = 0.5  # most between two faults
    deed_pause_s: float = 1.0  # most between two parks and the like, of each engine
    lull_s: float = 15.0  # between two lulls


@dataclass(slots=True)
class Report:
    """What happened in a storm, by model, and what was wrong."""

    seed: int
    seconds: float = 0.0
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: dict[str, Flatness] = field(default_factory=dict)

    @property
    def total(self) -> Counter[str]:
        """Counts of all models together."""
        return sum(self.counts.values(), Counter())

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "seed": self.seed,
            "seconds": self.seconds,
            "counts": {name: dict(counts) for name, counts in self.counts.items()},
            "faults": dict(self.faults),
            "wrong": self.wrong,
            "memory": {what: flatness.samples for what, flatness in self.memory.items()},
        }


@dataclass(slots=True)
class Battered:
    """An engine in a storm, and what it held before."""

    case: Case
    world: World
    asks: Sequence[Ask]
    held: dict[str, int]  # by label, when it was opened
    threads: list[threading.Thread] = field(default_factory=list)


def run(
    folder: Path, plan: Plan, *, names: Sequence[str] = (), tell: Callable[[str], None] = print
) -> Report:
    """Ask for cold answers, then storm; `names`: of the models, none for all."""
    report = Report(plan.seed)
    faults, stop = Faults(), threading.Event()
    chosen = [case for case in cases(folder) if not names or case.name in names]
    asked = {case.name: _cold(case, plan) for case in chosen}
    tell(f"{sum(map(len, asked.values()))} cold answers of {len(chosen)} models, seed {plan.seed}")
    n_files, n_threads = open_files(), threading.active_count()
    with ExitStack() as stack:
        engines = [stack.enter_context(_battered(case, folder, asked[case.name], faults)) for case in chosen]
        widen_interned()
        watch = Watch(stop, every_s=plan.every_s)
        with faults:
            others: list[threading.Thread] = [
                watch,
                Trouble(faults, stop, seed=f"{plan.seed} trouble", pause_s=plan.fault_pause_s),
            ]
            for battered in engines:
                _begin(battered, folder, plan)
            for thread in others:
                thread.start()
            report.seconds = _last(engines, faults, plan, watch)
            stop.set()
            for battered in engines:
                battered.world.stop.set()
            stuck = _ended([*others, *(thread for battered in engines for thread in battered.threads)])
            faults.disarm()
        if stuck:
            faulthandler.dump_traceback(sys.stderr)
            raise AssertionError(f"stuck: {stuck}")
        for battered in engines:
            _settled(battered)
            report.counts[battered.case.name] = battered.world.counts
            report.wrong += battered.world.wrong
    report.faults = Counter({kind: faults.fired[kind] for kind in KINDS})
    report.memory = watch.samples.flatness()
    gc.collect()
    for what, before, after in (
        ("files", n_files, open_files()),
        ("threads", n_threads, threading.active_count()),
    ):
        if after > before:
            report.wrong.append(f"{after} {what} are open, and were {before}")
    return report


def _cold(case: Case, plan: Plan) -> list[Ask]:
    with case.cold() as engine:
        return asks(case, engine, plan.n_asks, random.Random(f"{plan.seed} {case.name}"))


@contextmanager
def _battered(case: Case, folder: Path, asked: Sequence[Ask], faults: Faults) -> Iterator[Battered]:
    """An engine that may hold what it needs, and as much again of stored states as it is to have."""
    with case.hot(folder / f"{case.name} probe", None) as free:
        needs = sum(free.fit_report().devices[0].terms.values())
    cap = needs + case.states_mib * 2**20
    with case.hot(folder / f"{case.name} states", cap) as engine:
        yield Battered(case, World(engine, faults, cap), asked, engine.memory()[DEVICE])


def _begin(battered: Battered, folder: Path, plan: Plan) -> None:
    name, world = battered.case.name, battered.world
    seed = f"{plan.seed} {name}"
    battered.threads = [
        *(
            Client(world, battered.asks, name=f"{name} client {i}", seed=f"{seed} {i}")
            for i in range(plan.n_clients)
        ),
        Upheaval(
            world,
            folder / f"{name} states",
            name=f"{name} upheaval",
            seed=f"{seed} upheaval",
            pause_s=plan.deed_pause_s,
        ),
    ]
    for thread in battered.threads:
        thread.start()


def _last(engines: Sequence[Battered], faults: Faults, plan: Plan, watch: Watch) -> float:
    """Let it storm for as long as it is to; seconds."""
    started = time.monotonic()
    n_lulls = 0
    while (seconds := time.monotonic() - started) < plan.most_s:
        time.sleep(0.05)
        if seconds >= plan.lull_s * n_lulls:
            _lull([battered.world for battered in engines], faults, watch)
            n_lulls += 1
        if seconds >= plan.least_s and all(faults.fired[kind] for kind in KINDS) and _has_all(engines):
            break
    return seconds


def _lull(worlds: Sequence[World], faults: Faults, watch: Watch) -> None:
    """Park all engines with nothing stored, note what memory is left, and go on."""
    with ExitStack() as stack:
        stack.enter_context(faults.calm())
        for world in worlds:
            stack.enter_context(world.moving)
            stack.enter_context(world.parked.on())
        for world in worlds:
            world.engine.park()
            world.engine.snapshots.clear()
        watch.note_quiet()
        for world in worlds:
            world.engine.unpark()


def _has_all(engines: Sequence[Battered]) -> bool:
    """True once every kind of thing has happened somewhere."""
    seen: Counter[str] = Counter()
    for battered in engines:
        with battered.world.lock:
            seen += battered.world.counts
    return all(seen[name] for name in ALL)


def _ended(threads: Sequence[threading.Thread]) -> list[str]:
    """Wait for threads; those that do not end."""
    deadline = time.monotonic() + PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread.name for thread in threads if thread.is_alive()]


def _settled(battered: Battered) -> None:
    """Check that an engine is as it was: idle, whole, and with nothing that nobody knows of."""
    world, engine = battered.world, battered.world.engine
    stats = engine.stats()
    _check_counts(world, stats)
    _note(world, stats)
    for ask in battered.asks[:: max(1, len(battered.asks) // 8)]:
        found = engine.generate(ask.prompt, **ask.options)
        if found.tokens != ask.answer.tokens:
            world.tell(f"{battered.case.name}, after the storm: {found.tokens} is not {ask.answer.tokens}")
    engine.snapshots.clear()
    checks = {
        "a cleared, parked engine holds": (_parked(engine), {}),
        "snapshots are counted as held": (engine._thread.call(_held_by_snapshots, when_parked=True), 0),
    }
    engine.unpark()
    held, before = _without_graphs(engine.memory()[DEVICE]), _without_graphs(battered.held)
    checks["an engine holds more or less than when it was opened"] = (held, before)
    for what, (found_now, expected) in checks.items():
        if found_now != expected:
            world.tell(f"{battered.case.name}: {what}: {found_now}, not {expected}")


def _parked(engine: Engine) -> dict[str, int]:
    engine.park()
    return engine.memory()[DEVICE]


def _without_graphs(held: dict[str, int]) -> dict[str, int]:
    """What does not depend on the time that probes had."""
    return {name: n for name, n in held.items() if "graphs" not in name}


def _held_by_snapshots(core: EngineCore, _: object) -> int:
    assert core.reuse is not None
    memory = core.reuse._memory
    return 0 if memory is None else memory.n_held


def _check_counts(world: World, stats: EngineStats) -> None:
    """What the engine counted is what its clients saw."""
    counts, requests, states = world.counts, stats.requests, stats.snapshots
    assert states is not None
    for what, found, expected in (
        ("slots", [slot.phase for slot in stats.slots], ["free"] * len(stats.slots)),
        ("running and waiting", (requests.running, requests.waiting), (0, 0)),
        ("done", requests.done, counts["ended done"]),
        ("cancelled", requests.cancelled, counts["ended cancelled"]),
        ("failed", requests.failed, counts["ended failed"]),
        ("restored", states.restored, sum(states.hits.values())),
    ):
        if found != expected:
            world.tell(f"{what}: the engine says {found}, its clients {expected}")
    for what, low, high in (
        ("reused tokens", states.reused_tokens, states.prompt_tokens),
        ("bytes of states", states.n_bytes, states.limit_bytes),
        ("most bytes held", stats.peak_bytes[DEVICE], world.cap),
    ):
        if low > high:
            world.tell(f"{what}: {low}, more than {high}")


def _note(world: World, stats: EngineStats) -> None:
    """Take over what the engine alone can tell."""
    states = stats.snapshots
    assert states is not None
    folder = states.folder
    assert folder is not None
    world.counts |= Counter(
        {
            "captured states": states.captured,
            **_by_reason("capture failed", states.capture_failures),
            **_by_reason("capture left out", states.capture_skips),
            "restored from memory": states.hits.get("memory", 0),
            "restored from the folder": states.hits.get("disk", 0),
            **_by_reason("not restored", states.unusable),
            "evicted from memory": states.evicted,
            "superseded": states.superseded,
            "evicted from the folder": folder.evicted,
            **_by_reason("file not written", folder.skipped),
            **_by_reason("file not used", folder.failed),
            "steps that failed": stats.step_failures,
        }
    )


def _by_reason(what: str, counts: Mapping[str, int]) -> dict[str, int]:
    return {f"{what}: {reason}": n for reason, n in counts.items()}
