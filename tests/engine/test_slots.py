"""Several requests at once: each gets what it gets alone, whoever runs beside it and however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyggml_dflash.engine.core import DRAFTER_TAKEN
from pyggml_dflash.engine.loaded import Loaded
from pyggml_dflash.engine.loader import load
from pyggml_dflash.engine.speculate import BESIDE_OTHERS
from pyggml_dflash.options import Auto, EngineOptions
from tests.engine.arrivals import Arrival, assert_alone_is_together, every_order, seen, serve, short_and_long
from tests.engine.served import Reader, answered
from tests.engine.tiny import prompt
from tests.reference.stored import model_file

FAMILIES = ("qwen35-tiny", "qwen35moe-tiny", "qwen4exp-tiny")
CHUNK = 32
N_SLOTS = 4


def options(model: Path, **more: Any) -> EngineOptions:
    """Single precision throughout, so that the order of a sum does not show in a choice."""
    common = {"chunk": CHUNK, "slots": N_SLOTS, "device": "CPU", "threads": 1, "max_ctx": 512}
    exact = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attn": "off"}
    return EngineOptions(model=model, **{**common, **exact, **more})  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_file(request.param, "F32", tmp_path_factory.mktemp("slots"))


@contextmanager
def loaded_with(model: Path, width: int | Auto | None) -> Iterator[Loaded]:
    """A model whose verify forwards have so many rows; None: without drafts."""
    more: dict[str, Any] = {"spec": "off"} if width is None else {"spec": "mtp", "spec_width": width}
    loaded = load(options(model, **more), lambda _: None)
    try:
        yield loaded
    finally:
        loaded.core.close()


@pytest.fixture(scope="module", params=[None, 3], ids=["plain", "drafted"])
def loaded(request: pytest.FixtureRequest, model: Path) -> Iterator[Loaded]:
    with loaded_with(model, request.param) as found:
        yield found


def test_answers_do_not_depend_on_who_else_is_answered(loaded: Loaded) -> None:
    assert_alone_is_together(loaded, short_and_long(), every_order(every_time=False))


@pytest.mark.slow
@pytest.mark.parametrize("width", [None, 2, 5, "auto"])
def test_answers_do_not_depend_on_when_others_are_answered(model: Path, width: int | Auto | None) -> None:
    with loaded_with(model, width) as loaded:
        assert_alone_is_together(loaded, short_and_long(), every_order(every_time=True))


def test_more_requests_than_slots_are_answered_in_order(loaded: Loaded) -> None:
    requests = [replace(short_and_long(5)[0], tokens=tuple(prompt(8 + i, seed=i))) for i in range(11)]
    alone = [seen(answered(loaded, request)) for request in requests]
    readers = [Reader(request) for request in requests]
    serve(loaded, [Arrival(0, reader) for reader in readers])
    assert [seen(reader.result()) for reader in readers] == alone
    starts = [reader.result().timings.queue_s + reader.submitted_s for reader in readers]
    assert starts == sorted(starts)


def test_the_drafter_is_handed_over_and_the_text_stays(loaded: Loaded) -> None:
    """Alone, joined, alone again: drafted, plain beside the other, and drafted again."""
    first, second = short_and_long(60)[0], replace(short_and_long(6)[3], tokens=tuple(prompt(20, seed=5)))
    alone = [seen(answered(loaded, request)) for request in (first, second)]
    readers = [Reader(first), Reader(second)]
    serve(loaded, [Arrival(0, readers[0]), Arrival(6, readers[1])])
    assert [seen(reader.result()) for reader in readers] == alone
    results = [reader.result() for reader in readers]
    if loaded.info.spec == "off":
        assert [result.speculation for result in results] == [None, None]
        return
    assert results[1].plain_reason == DRAFTER_TAKEN
    stats = results[0].speculation
    assert stats is not None
    assert 1 + stats.verify_steps + stats.accepted + stats.plain_steps >= len(results[0].tokens)
    assert stats.plain_steps >= 5
    assert stats.verify_steps > 5
    assert results[0].plain_reason == BESIDE_OTHERS
    again = answered(loaded, second)  # nobody has the drafter now
    assert again.speculation is not None
