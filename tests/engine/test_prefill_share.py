"""Prompts take no more than their share of the time of answers, and change none of them. Time is forwards."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pyggml_dflash.arch.base import OutputKind
from pyggml_dflash.engine import core, loop, serving
from pyggml_dflash.engine.graphs import Forwards, Logits
from pyggml_dflash.engine.loaded import Loaded
from pyggml_dflash.engine.loader import load
from pyggml_dflash.engine.serving import Serving
from pyggml_dflash.options import EngineOptions
from pyggml_dflash.requests import GenerationRequest
from pyggml_dflash.state.slot import Slot
from tests.engine.served import Reader, answered
from tests.engine.test_together import eventually
from tests.engine.tiny import QWEN35, opened, prompt

CHUNK = 16
COST = 4  # of a prompt's forward, in forwards of one token


class Counted:
    """Forwards that make time pass, and note which came."""

    def __init__(self, forwards: Forwards) -> None:
        self._forwards, self.order, self.now = forwards, "", 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forwards, name)

    def _count(self, kind: str, cost: int) -> None:
        self.order += kind
        self.now += cost

    def decode(self, slot: Slot, token: int, **more: Any) -> Logits:
        self._count("d", 1)
        return self._forwards.decode(slot, token, **more)

    def decode_batch(self, slots: Sequence[Slot], tokens: Sequence[int], **more: Any) -> Logits:
        self._count("d", 1)
        return self._forwards.decode_batch(slots, tokens, **more)

    def prefill(self, slot: Slot, tokens: Sequence[int], output: OutputKind, **more: Any) -> Logits | None:
        self._count("P", COST)
        return self._forwards.prefill(slot, tokens, output, **more)


def loaded_model() -> Loaded:
    options = EngineOptions(
        model=QWEN35,
        max_ctx=512,
        chunk=CHUNK,
        slots=3,
        device="CPU",
        threads=1,
        spec="off",
        prefix_cache_max_mib=0,
    )
    return load(options, lambda _: None)


@pytest.mark.parametrize("has_news", [True, False])
@pytest.mark.parametrize("n_answers", [1, 2])
@pytest.mark.parametrize(("share", "n_between"), [(1.0, 1), (0.5, 4), (0.2, 16), (0.0, None)])
def test_so_many_tokens_come_between_two_granules(
    share: float, n_between: int | None, n_answers: int, has_news: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [(9, 120, i) for i in range(n_answers)] + [(100, 3, 7)]
    asked = [
        GenerationRequest(tokens=tuple(prompt(n, seed=seed)), max_tokens=most, ignore_eos=True)
        for n, most, seed in sizes
    ]
    loaded = loaded_model()
    try:
        alone = [answered(loaded, request).tokens for request in asked]
        counted = Counted(loaded.core._forwards)
        loaded.core._forwards = counted  # type: ignore[assignment]
        loaded.core._prompts._forwards = counted  # type: ignore[assignment]
        for module in (core, serving):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: counted.now))
        readers, is_begun = [Reader(request) for request in asked], False
        served = Serving(loaded, lambda: has_news or not is_begun, prefill_share=share)
        for reader in readers[:-1]:
            served.add(reader)
        for _ in range(4):
            served.turn()
        assert {reader.state.phase for reader in readers[:-1]} == {"decode"}
        is_begun, counted.order = True, ""
        served.add(readers[-1])
        while not served.is_idle:
            served.turn()
        assert [reader.result().tokens for reader in readers] == alone
    finally:
        loaded.core.close()
    before, *between, behind = counted.order.split("P")
    assert len(between) == -(-100 // CHUNK) - 1
    if n_between is None:
        assert len(before) >= 120 - 5
        assert between == [""] * len(between)
    else:
        assert between == ["d" * n_between] * len(between)
        assert behind


@pytest.mark.parametrize("n_slots", [2, 3])
def test_an_idle_engine_waits_for_more_requests_until_time_or_slots_run_out(
    n_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now))
    with opened(QWEN35, max_ctx=512, slots=n_slots, admission_coalesce_ms=5) as engine:
        first = engine.stream(prompt(9), max_tokens=4, ignore_eos=True)
        for _ in range(20):  # the thread answers calls meanwhile
            assert engine.stats().requests.waiting == 1
        second = engine.stream(prompt(9, seed=2), max_tokens=4, ignore_eos=True)
        if n_slots > 2:
            assert engine.stats().requests.waiting == 2
            now += 0.006
        for stream in (first, second):
            assert len(stream.result.tokens) == 4
        eventually(lambda: engine.stats().requests.done == 2)
        third = engine.stream(prompt(9), max_tokens=4, ignore_eos=True)
        assert engine.stats().requests.waiting == 1
        third.close()  # which waits for nobody
        assert third.result.finish_reason == "cancelled"


def test_an_engine_that_waits_for_more_requests_can_be_closed_and_parked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    with opened(QWEN35, max_ctx=512, slots=2, admission_coalesce_ms=1000) as engine:
        stream = engine.stream(prompt(9), max_tokens=4, ignore_eos=True)
        engine.park(cancel=False)
        assert len(stream.result.tokens) == 4
        engine.unpark()
        engine.stream(prompt(9), ignore_eos=True)
