"""What all routes share: the engine once it is loaded, the desk, the counters. Layer 8."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from pyggml_dflash.api import Engine
from pyggml_dflash.errors import EngineClosed
from pyggml_dflash.openai.asks import Defaults, other_model
from pyggml_dflash.openai.forms import OWN_FORMS
from pyggml_dflash.requests import EngineStats, GenerationResult
from pyggml_dflash.serve.desk import Desk
from pyggml_dflash.serve.metrics import Metrics
from pyggml_dflash.serve.problems import Problem
from pyggml_dflash.serve.settings import ServeOptions

# What may hold an answer to a form, whose compiling takes seconds where somebody means it to.
FORMS: Final = frozenset({*OWN_FORMS, "response_format", "text", "output_config", "tools"})
N_COMPILING: Final = 2  # requests with one that are read at once; others need not wait for them
READ_S: Final = 0.25  # how long a report waits for an engine that computes, before it shows what it knows

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the engine last said of itself."""

    memory: Mapping[str, Mapping[str, int]]  # device -> label -> bytes
    stats: EngineStats
    taken_s: float  # on the clock of `time.time`


class Service:
    """One server's state. Routes read `engine`, which refuses with 503 until a model is there."""

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        self.defaults = Defaults(
            reasoning_budget=options.reasoning_budget,
            max_tokens=options.default_max_tokens,
            sampling=options.sampling,
            model_names=options.model_names,
        )
        self.desk = Desk(options.queue_limit)
        self.metrics = Metrics()
        self.created = int(time.time())
        self.loaded_part = 0.0  # of the weights, while the model loads
        self._engine: Engine | None = None
        self._reading: Reading | None = None
        self._refresh: asyncio.Task[None] | None = None
        self._trim: asyncio.Task[int] | None = None
        self._parking = asyncio.Lock()
        self._compiling = ThreadPoolExecutor(N_COMPILING, "dflash-forms")

    @property
    def engine(self) -> Engine:
        """The engine; `Problem` 503 while its model loads."""
        if self._engine is None:
            done = f"{100 * self.loaded_part:.0f} % of the weights are there"
            raise Problem(503, f"the model is loading, {done}", code="loading", headers={"Retry-After": "5"})
        return self._engine

    @property
    def is_ready(self) -> bool:
        """True once the model is loaded."""
        return self._engine is not None

    def open(self, engine: Engine) -> None:
        """Begin to answer with `engine`, which is idle and stays the caller's to close."""
        self._engine, self._reading = engine, _read(engine)
        self.desk.n_slots = engine.options.slots

    @property
    def model_name(self) -> str:
        """The name that answers bear."""
        return self.model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that are shown: those the server was started with, else the model's own."""
        return self.options.model_names or (self.engine.info.name,)

    def check_model(self, name: str | None) -> None:
        """Refuse the name of another model; the file's names work as well, and None is the one there is."""
        problem = other_model(name, self.model_names, self.engine.info)
        if problem is not None:
            raise Problem(404, problem, code="model_not_found", param="model")

    async def asked(self, body: Mapping[str, object], read: Callable[[], T]) -> T:
        """What `read` makes of a body, on a worker thread."""
        if FORMS.isdisjoint(body):
            return await off_loop(read)
        return await asyncio.get_running_loop().run_in_executor(self._compiling, read)

    def count(self, result: GenerationResult) -> None:
        """Count an answer that is over."""
        self.desk.totals.add(result)
        self.metrics.on_result(result)

    async def read(self) -> Reading:
        """What the engine holds and did; what it said last if it is too busy to answer soon."""
        if self._refresh is None or self._refresh.done():
            self._refresh = asyncio.create_task(self._read(self.engine))
        await asyncio.wait({self._refresh}, timeout=READ_S)
        assert self._reading is not None
        return self._reading

    async def trim(self) -> int:
        """Trim scratch pools; the bytes released. Whoever asks meanwhile waits for the same trim."""
        if self._trim is None or self._trim.done():
            self._trim = asyncio.create_task(off_loop(self.engine.trim))
        return await asyncio.shield(self._trim)

    async def park(self, *, cancel: bool) -> None:
        """Give the model's memory back, once answers that run have ended or at once."""
        async with self._parking:
            await off_loop(lambda: self.engine.park(cancel=cancel))

    async def unpark(self) -> None:
        """Load the model again; raises what that raised, and it stays parked."""
        async with self._parking:
            await off_loop(self.engine.unpark)

    async def _read(self, engine: Engine) -> None:
        with contextlib.suppress(EngineClosed):
            self._reading = await off_loop(lambda: _read(engine))


def _read(engine: Engine) -> Reading:
    return Reading(memory=engine.memory(), stats=engine.stats(), taken_s=time.time())


async def off_loop(function: Callable[[], T]) -> T:
    """Run what takes a while on a worker thread."""
    return await asyncio.to_thread(function)
