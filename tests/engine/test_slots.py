"""Several requests at once: each gets what it gets alone, whoever runs beside it and however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from pyggml_dflash.engine.loaded import Loaded
from pyggml_dflash.engine.loader import load
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


def test_who_may_not_draft_beside_others_drafts_before_and_afterwards(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows of several slots would not agree in one verify forward."""
    first, second = short_and_long(60)[0], replace(short_and_long(6)[3], tokens=tuple(prompt(20, seed=5)))
    run: list[str] = []

    def noted(name: str) -> None:
        own = getattr(forwards, name)

        def call(*arguments: Any, **more: Any) -> Any:
            run.append(name)
            return own(*arguments, **more)

        monkeypatch.setattr(forwards, name, call)

    with loaded_with(model, 3) as loaded:
        forwards = loaded.core._forwards
        forwards.use(replace(forwards.batching, ragged_rows=1))
        alone = [seen(answered(loaded, replace(request, spec="off"))) for request in (first, second)]
        for name in ("verify", "decode_batch", "verify_ragged"):
            noted(name)
        readers = [Reader(first), Reader(second)]
        serve(loaded, [Arrival(0, readers[0]), Arrival(6, readers[1])])
        assert [seen(reader.result()) for reader in readers] == alone
        stats = readers[0].result().speculation
    assert [name for name, _ in groupby(run)] == ["verify", "decode_batch", "verify"]
    assert stats is not None
    assert (stats.verify_steps, stats.shared_steps) == (run.count("verify"), 0)


def test_drafts_go_on_beside_others_and_the_text_stays(loaded: Loaded) -> None:
    """Alone, joined, alone again: drafted throughout, and beside the other in the same forwards."""
    first, second = short_and_long(60)[0], replace(short_and_long(6)[3], tokens=tuple(prompt(20, seed=5)))
    forwards = loaded.core._forwards  # however many rows there was time to look at
    forwards.use(replace(forwards.batching, ragged_rows=12))
    alone = [seen(answered(loaded, request)) for request in (first, second)]
    readers = [Reader(first), Reader(second)]
    serve(loaded, [Arrival(0, readers[0]), Arrival(6, readers[1])])
    assert [seen(reader.result()) for reader in readers] == alone
    results = [reader.result() for reader in readers]
    if loaded.info.spec == "off":
        assert [result.speculation for result in results] == [None, None]
        return
    first_stats, second_stats = (result.speculation for result in results)
    assert first_stats is not None
    assert second_stats is not None
    assert 1 <= second_stats.shared_steps <= second_stats.verify_steps
    assert (
        0 <= first_stats.shared_steps - second_stats.shared_steps <= 1
    )  # its last token has no room for drafts
    assert first_stats.verify_steps > 5 + first_stats.shared_steps
    for result, stats in zip(results, (first_stats, second_stats), strict=True):
        n_tokens = 1 + stats.verify_steps + stats.accepted + stats.plain_steps
        assert 0 <= n_tokens - len(result.tokens) < 3
        assert result.plain_reason is None
