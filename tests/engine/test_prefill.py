"""Trims in real prompts change nothing but memory: when they come, what they count, what follows failures."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from pyggml_dflash import DeviceMemoryError, Engine, GenerationRequest
from pyggml_dflash.arch.base import OutputKind
from pyggml_dflash.engine.graphs import Forwards, Logits
from pyggml_dflash.engine.loaded import Loaded
from pyggml_dflash.engine.loader import load
from pyggml_dflash.engine.prefill import PoolTrims
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.pool import PoolStats
from pyggml_dflash.options import TRIM_VARIABLE, Auto, EngineOptions, Spec
from pyggml_dflash.plan.legacy_pool import LegacyPoolSim
from pyggml_dflash.state.slot import Slot
from tests.engine.served import answered
from tests.engine.test_memory import load_parts
from tests.engine.tiny import LLAMA, PATIENCE_S, QWEN35, opened, prompt

MIB = 2**20
CHUNK = 16
N_CHUNKS = 40


class SimulatedPools:
    """A legacy pool with a limit; `check` is called before each trim."""

    is_busy = False

    def __init__(self, limit: int | None = None, check: Callable[[], None] = lambda: None) -> None:
        self.pool = LegacyPoolSim(limit, relief="none")
        self._check = check
        self.n_trims = 0

    def has_legacy(self) -> bool:
        return self.pool.n_mallocs > 0

    def trim(self) -> int:
        assert self.pool.live_bytes == 0, "a kernel still uses the pool"
        self._check()
        self.n_trims += 1
        return self.pool.trim()

    def stats(self) -> PoolStats:
        pool = self.pool
        return PoolStats(
            live_bytes=pool.live_bytes,
            cached_bytes=pool.cached_bytes,
            vmm_bytes=0,
            n_blocks=pool.n_blocks,
            n_pools=1,
            n_legacy_pools=1,
            n_graphs=0,
        )

    def memory_free(self) -> int:
        return 2**40 if self.pool.limit is None else self.pool.limit - self.pool.held_bytes


class ScratchForwards:
    """Forwards whose prompt chunks take scratch from a pool, 2 % more each time, while they compute."""

    def __init__(self, forwards: Forwards, pool: LegacyPoolSim) -> None:
        self._forwards, self._pool, self._n = forwards, pool, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forwards, name)

    def prefill(self, slot: Slot, tokens: Sequence[int], output: OutputKind, **more: Any) -> Logits | None:
        self._n += 1
        block = self._pool.alloc(int(8 * MIB * 1.02**self._n))
        try:
            return self._forwards.prefill(slot, tokens, output, **more)
        finally:
            self._pool.free(block)


@contextmanager
def on_a_card(
    interval: int | Auto, *, limit: int | None = None, spec: Spec = "auto"
) -> Iterator[tuple[Loaded, SimulatedPools]]:
    """A model whose chunks use a simulated pool."""
    options = EngineOptions(model=QWEN35, max_ctx=1024, chunk=CHUNK, device="CPU", threads=1, spec=spec)
    loaded = load(options, lambda _: None)
    core = loaded.core
    pools = SimulatedPools(limit)
    core.trims = core._prompts._trims = PoolTrims(pools, interval, chunk=CHUNK)
    core._forwards = core._prompts._forwards = ScratchForwards(core._forwards, pools.pool)  # type: ignore[assignment]
    try:
        yield loaded, pools
    finally:
        core.close()


def answer(loaded: Loaded, n_prompt: int = N_CHUNKS * CHUNK) -> tuple[int, ...]:
    request = GenerationRequest(tokens=tuple(prompt(n_prompt)), max_tokens=12, ignore_eos=True)
    return answered(loaded, request).tokens


@pytest.fixture(scope="module")
def untrimmed() -> tuple[int, ...]:
    with on_a_card(0) as (loaded, _):
        return answer(loaded)


@pytest.mark.parametrize("spec", ["auto", "mtp"])
@pytest.mark.parametrize("interval", [0, 8192, 128, CHUNK, 1, "auto"])
def test_an_answer_does_not_depend_on_trims(
    interval: int | Auto, spec: Spec, untrimmed: tuple[int, ...]
) -> None:
    limit = 200 * MIB if interval == "auto" else None
    with on_a_card(interval, spec=spec, limit=limit) as (loaded, pools):
        assert answer(loaded) == untrimmed
        (*_, counts) = loaded.core.stats().trims or (None,)
    n_prompt = N_CHUNKS * CHUNK
    expected = {0: 0, 8192: 0, 128: (n_prompt - 1) // 128, CHUNK: N_CHUNKS - 1, 1: N_CHUNKS - 1}
    if interval == "auto":
        assert pools.n_trims > 0
    else:
        assert pools.n_trims == expected[interval]
    assert (0 if counts is None else counts.n_trims) == pools.n_trims


def test_growing_temporaries_fill_a_card_unless_they_are_trimmed(untrimmed: tuple[int, ...]) -> None:
    """B01: forty chunks, each of which takes 2 % more scratch than the one before."""
    limit = 100 * MIB
    with on_a_card(0, limit=limit) as (loaded, _):
        with pytest.raises(DeviceMemoryError, match="pool"):
            answer(loaded)
        loaded.core.trims.relieve()
        assert len(answer(loaded, 30)) == 12  # the engine is as good as new
    for interval in (64, "auto"):
        with on_a_card(interval, limit=limit) as (loaded, pools):
            assert answer(loaded) == untrimmed
            (counts,) = loaded.core.stats().trims
            assert pools.pool.peak_bytes <= limit
        if interval == 64:
            assert counts.n_trims == (N_CHUNKS * CHUNK - 1) // 64
        assert (counts.reason, counts.released_bytes > 0) == ("prefill", True)


@pytest.mark.parametrize("spec", ["auto", "mtp"])
def test_a_trim_comes_when_the_chunk_is_committed_and_recorded_for_the_draft(spec: Spec) -> None:
    seen: list[int] = []
    with on_a_card(CHUNK, spec=spec) as (loaded, pools):
        core = loaded.core

        def check() -> None:
            slot = core.slots[0]
            seen.append(slot.n_past)
            for drafter, backlog in zip(core._drafters, core._backlogs, strict=True):
                waiting = len(backlog._tokens)  # in a record of its own, which no trim touches
                assert drafter._n_seen + waiting == slot.n_past > 0  # type: ignore[attr-defined]

        pools._check = check
        answer(loaded, 5 * CHUNK + 3)
    assert seen == [CHUNK * i for i in range(1, 6)]


def test_scored_texts_are_trimmed_between_chunks_too() -> None:
    with on_a_card(2 * CHUNK) as (loaded, pools):
        rows = loaded.core.logits(prompt(10 * CHUNK))
        assert len(rows) == 10 * CHUNK
        assert pools.n_trims == 4


# an allocation that fails


def test_a_failed_graph_allocation_is_relieved_and_tried_once_more() -> None:
    caps: dict[str, int] = {}
    calls: list[str] = []

    def relieve() -> None:
        calls.append("relieve")
        caps.clear()

    ledger = Ledger(caps=caps)
    with ExitStack() as stack:
        forwards = load_parts(stack, LLAMA, ledger)
        forwards._cache._relieve = relieve
        slot = forwards._slots.slots[0]
        slot.reset()
        caps["CPU"] = ledger.charged("CPU")
        assert forwards.prefill(slot, prompt(64), "all") is not None
        assert calls == ["relieve"]


def test_a_second_failure_is_the_end_and_the_engine_goes_on() -> None:
    caps: dict[str, int] = {}
    calls: list[str] = []
    ledger = Ledger(caps=caps)
    with ExitStack() as stack:
        forwards = load_parts(stack, LLAMA, ledger)
        forwards._cache._relieve = lambda: calls.append("relieve")
        slot = forwards._slots.slots[0]
        slot.reset()
        expected = forwards.prefill(slot, prompt(8), "last")
        caps["CPU"] = ledger.charged("CPU")
        with pytest.raises(DeviceMemoryError, match="graphs"):
            forwards.prefill(slot, prompt(64), "all")
        assert calls == ["relieve"]
        again = forwards.prefill(slot, prompt(8), "last")
        assert expected is not None
        assert again is not None
        assert again.tolist() == expected.tolist()


# through the engine


def with_pools(engine: Engine, interval: int | Auto) -> SimulatedPools:
    """Put simulated pools below an open engine, with something cached."""
    pools = SimulatedPools()
    pools.pool.free(pools.pool.alloc(MIB))
    engine._loaded.core.trims = PoolTrims(pools, interval, chunk=CHUNK)
    return pools


def test_scratch_goes_back_when_nothing_waits() -> None:
    with opened(LLAMA) as engine:
        pools = with_pools(engine, 0)
        engine.generate([1, 2, 3], max_tokens=2)
        deadline = time.monotonic() + PATIENCE_S
        while not engine.stats().trims:
            assert time.monotonic() < deadline
        (counts,) = engine.stats().trims
        assert (counts.reason, counts.n_trims, counts.released_bytes) == ("idle", 1, 1_101_056)
        assert pools.pool.held_bytes == 0


def test_devices_without_a_pool_are_never_trimmed() -> None:
    with opened(QWEN35, trim_interval=16, chunk=16) as engine:
        engine.generate(prompt(200), max_tokens=2)
        stats = engine.stats()
    assert stats.trims == ()
    assert stats.peak_bytes["CPU"] > 0


@pytest.mark.parametrize(
    ("text", "interval", "warns"),
    [
        ("", 0, False),
        ("0", 0, False),
        ("8192", 8192, False),
        (" 8192 ", 8192, False),
        ("-1", 0, True),
        ("8k", 0, True),
        ("0x10", 0, True),
        ("99999999999", 0, True),
        ("12.5", 0, True),
    ],
)
def test_the_environment_asks_for_trims_or_is_warned_of(
    text: str, interval: int, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(TRIM_VARIABLE, text)
    with opened(LLAMA) as engine:
        assert engine.options.trim_interval == interval
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == warns
    if warns:
        assert TRIM_VARIABLE in warnings[0]
        assert repr(text) in warnings[0]


def test_an_option_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRIM_VARIABLE, "8192")
    with opened(LLAMA, trim_interval=0) as engine:
        assert engine.options.trim_interval == 0
    monkeypatch.delenv(TRIM_VARIABLE)
    with opened(LLAMA) as engine:
        assert engine.options.trim_interval is None
