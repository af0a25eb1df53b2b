"""Several requests at once over several devices: each gets what it gets alone on one device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from pyggml_dflash import Engine, GenerationResult, SamplingOptions
from pyggml_dflash.api import route_stats
from pyggml_dflash.engine import core as core_module
from pyggml_dflash.engine.core import EngineCore
from pyggml_dflash.requests import SnapshotStats
from pyggml_dflash.state.cuts import prompt_ends
from tests.engine.tiny import LLAMA, opened
from tests.engine.workers import Worker, workers
from tests.reference.opened import on_the_cpu
from tests.tiny import Tiny, tokens, write_tiny

N_SLOTS: Final = 4
EXPERTS: Final = ("qwen35moe", "qwen4exp")
COMMON: Final[dict[str, Any]] = {"device": "CPU", "max_ctx": 512, "chunk": 64, "repack": "off"}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Worker, ...]]:
    with workers(2) as started:
        yield started


# texts

PROMPTS: Final = [tokens(n, seed=n) for n in (150, 20, 33, 47)]


@pytest.fixture(scope="module", params=EXPERTS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = Tiny(architecture=request.param, n_expert=16, n_used=3)
    return write_tiny(tmp_path_factory.mktemp("models"), tiny)


@pytest.fixture(scope="module")
def alone(model: Path) -> list[GenerationResult]:
    """The answers of one device and one slot."""
    with opened(model, **COMMON) as engine:
        return [ask(engine, prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def counted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("counts") / "picks.csv"
    route_stats(on_the_cpu(model), [PROMPTS[0]]).write(path)
    return path


def ask(engine: Engine, prompt: list[int], **options: Any) -> GenerationResult:
    return engine.generate(prompt, **{"max_tokens": 20, "ignore_eos": True, **options})


def ask_together(engine: Engine, prompts: Sequence[list[int]], **options: Any) -> list[GenerationResult]:
    asked = {"max_tokens": 20, "ignore_eos": True, **options}
    return [stream.result for stream in [engine.stream(prompt, **asked) for prompt in prompts]]


def texts(results: Sequence[GenerationResult]) -> list[tuple[int, ...]]:
    return [result.tokens for result in results]


@pytest.mark.parametrize("placement", ["experts", pytest.param("three devices", marks=pytest.mark.slow)])
def test_four_slots_over_several_devices_answer_as_one_slot_on_one(
    model: Path, alone: list[GenerationResult], pair: tuple[Worker, ...], placement: str
) -> None:
    names = [worker.name for worker in pair]
    apart: dict[str, Any] = {"device": None, "devices": ("CPU", *names)}
    if placement == "experts":
        apart = {"expert_device": names[0]}
    with opened(model, **{**COMMON, **apart}, slots=N_SLOTS) as engine:
        assert texts(ask_together(engine, PROMPTS)) == texts(alone)


@pytest.mark.parametrize("n_workers", [1, 2])
def test_four_slots_of_a_dense_model_over_several_devices_answer_as_one_slot_on_one(
    pair: tuple[Worker, ...], n_workers: int
) -> None:
    apart = {"device": None, "devices": ("CPU", *(worker.name for worker in pair[:n_workers]))}
    with opened(LLAMA, **COMMON) as engine:
        alone = [ask(engine, prompt) for prompt in PROMPTS]
    with opened(LLAMA, **{**COMMON, **apart}, slots=N_SLOTS) as engine:
        assert engine.info.split == "layers"
        assert texts(ask_together(engine, PROMPTS)) == texts(alone)


@pytest.mark.parametrize("slots", [1, N_SLOTS])
def test_copies_of_experts_change_no_answer_and_several_slots_do_without_them(
    model: Path,
    alone: list[GenerationResult],
    counted: Path,
    pair: tuple[Worker, ...],
    caplog: pytest.LogCaptureFixture,
    slots: int,
) -> None:
    hot: dict[str, Any] = {"expert_device": pair[0].name, "expert_placement": counted}
    with (
        caplog.at_level(logging.INFO, "pyggml_dflash"),
        opened(model, **{**COMMON, **hot}, slots=slots) as engine,
    ):
        assert ("hot experts" in engine.memory()["CPU"]) == (slots == 1)
        assert texts(ask_together(engine, PROMPTS)) == texts(alone)
    told = "expert_placement is not used with 4 slots" if slots > 1 else "experts are copied to CPU"
    assert told in caplog.text


# where prompts are cut, and what is stored there (B1, B8)

START, END, LINE = 258, 259, 10
DRAWN: Final[dict[str, Any]] = {"max_tokens": 12, "sampling": SamplingOptions(temperature=1.0, seed=5)}


def turn(role: int, n: int, seed: int) -> list[int]:
    return [START, role, LINE, *tokens(n, seed=seed), END, LINE]


TALKS: Final = [[*turn(1, 40 + 3 * i, i), *turn(2, 40, 10 + i), START, 3, LINE] for i in range(N_SLOTS)]


@pytest.fixture(scope="module")
def touchy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which the rounding of a row soon shows in the text."""
    tiny = Tiny(architecture="qwen35moe", n_layer=12, interval=4, n_expert=64, weight_scale=4.0, shared_ff=0)
    return write_tiny(tmp_path_factory.mktemp("touchy"), tiny)


def talking(model: Path, **options: Any) -> Engine:
    """An engine in which rows of a long forward cross between devices in half precision, as those of a short
    one do not: where a prompt is cut shows in its answer."""
    rounding = {"link_type": "f16", "cache_type_k": "q4_0", "cache_type_v": "q4_0"}
    return opened(model, **{**COMMON, **rounding, "chunk": 256, "slots": N_SLOTS, **options})


def answers_alone(engine: Engine) -> list[tuple[int, ...]]:
    """One after the other, each as the first of its engine."""
    found = []
    for talk in TALKS:
        engine.snapshots.clear()
        found.append(ask(engine, talk, **DRAWN).tokens)
    engine.snapshots.clear()
    return found


def answers_together(engine: Engine) -> list[tuple[int, ...]]:
    return texts(ask_together(engine, TALKS, **DRAWN))


def stored(engine: Engine) -> SnapshotStats:
    stats = engine.stats().snapshots
    assert stats is not None
    return stats


def state_bytes(engine: Engine) -> int:
    """What the state that the last request left behind takes."""
    engine.snapshots.clear()
    ask(engine, TALKS[-1], **DRAWN)
    (state,) = engine.snapshots.list()
    engine.snapshots.clear()
    return state.n_bytes


def limit(engine: Engine, n_bytes: int) -> None:
    """Store at most so much."""
    engine._thread.call(lambda core, _: core.reuse.limit(n_bytes))


def cuts_of_captures(engine: Engine) -> Callable[[int, Sequence[int], int], list[int]]:
    """Ends of forwards as they should not be: at turns only while there is room to store a state."""
    core: EngineCore = engine._thread.call(lambda core, _: core)

    def ends(n_tokens: int, boundaries: Sequence[int], most: int) -> list[int]:
        assert core.reuse is not None
        store = core.reuse.store
        reading = [core.seat(id) for id, phase in enumerate(core.phases) if phase == "prefill"]
        promised = sum(store.estimate(seat.ends[0]) for seat in reading if len(seat.ends) > 1)
        has_room = store.memory.fits(promised + store.estimate(boundaries[0]))
        return prompt_ends(n_tokens, boundaries if has_room else (), most)

    return ends


def test_cuts_that_depend_on_what_is_stored_change_answers_and_ours_do_not(
    touchy: Path, pair: tuple[Worker, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B1: room for one state and a half in the memory of the device that computes."""
    with talking(touchy, expert_device=pair[0].name) as engine:
        limit(engine, state_bytes(engine) * 3 // 2)
        alone = answers_alone(engine)
        assert answers_together(engine) == alone
        assert stored(engine).evicted > 0
        engine.snapshots.clear()
        with monkeypatch.context() as patch:
            patch.setattr(core_module, "prompt_ends", cuts_of_captures(engine))
            assert answers_together(engine) != alone
        limit(engine, state_bytes(engine) // 2)
        before = stored(engine)
        assert answers_together(engine) == alone
        after = stored(engine)
    assert (after.n_states, after.captured, after.capture_failures) == (0, before.captured, {})
    assert after.capture_skips == {"no room within the limits": N_SLOTS}


@pytest.mark.slow
def test_in_system_memory_all_states_are_stored(
    touchy: Path, pair: tuple[Worker, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B8: and so even cuts that depend on them are always the same."""
    with talking(touchy, device=pair[0].name, expert_device="CPU") as engine:
        alone = answers_alone(engine)
        monkeypatch.setattr(core_module, "prompt_ends", cuts_of_captures(engine))
        assert answers_together(engine) == alone
        stats = stored(engine)
    assert stats.place == "host"
    assert (stats.captured, stats.capture_failures, stats.capture_skips) == (2 * N_SLOTS, {}, {})


def test_states_whose_memory_cannot_be_had_are_counted_and_change_no_answer(
    pair: tuple[Worker, ...], tmp_path: Path
) -> None:
    path = write_tiny(tmp_path, Tiny(architecture="qwen35moe", net_head_dim=64))
    prompts = [tokens(150 + i, seed=i) for i in range(N_SLOTS)]
    far: dict[str, Any] = {**COMMON, "device": pair[0].name, "expert_device": "CPU", "slots": N_SLOTS}
    far |= {"cache_type_k": "f32", "cache_type_v": "f32", "prefix_cache_max_mib": 64}
    with opened(path, **far) as engine:
        expected = [ask(engine, prompt, max_tokens=5).tokens for prompt in prompts]
        planned = next(d.terms for d in engine.fit_report().devices if d.device == "CPU")
    with opened(path, **far, device_cap={"CPU": sum(planned.values())}, fit_margin="0") as engine:
        assert texts(ask_together(engine, prompts, max_tokens=5)) == expected
        stats = stored(engine)
    assert (stats.n_states, stats.capture_failures) == (0, {"allocation failed": N_SLOTS})
