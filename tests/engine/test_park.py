"""Parking gives memory back and keeps what was found out; unparking goes on as if nothing had happened."""

from __future__ import annotations

import gc
import shutil
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from shutil import copy2
from typing import Any

import pytest

from pyggml_dflash import BackendError, Engine, EngineClosed, EngineParked, ModelFileError
from pyggml_dflash.engine.assembly import DEFAULT_MODEL
from pyggml_dflash.engine.commands import Park, Unpark
from pyggml_dflash.engine.fit import Planner
from pyggml_dflash.engine.handle import RequestHandle
from pyggml_dflash.engine.loop import EngineThread
from pyggml_dflash.engine.serving import Serving
from pyggml_dflash.ggml.graph import StepGraph
from pyggml_dflash.requests import GenerationRequest, TrimStats
from tests.engine.tiny import PATIENCE_S, QWEN3, QWEN35, opened, prompt
from tests.holes import HOLES_BYTES, NEEDS_GLIBC, make_holes, process_bytes
from tests.tiny import Tiny, write_tiny

SHORT: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}
CAP = {"CPU": 6 * 2**20}


def qwen(model: Path = QWEN35, **options: Any) -> Engine:
    return opened(model, **{"max_ctx": 1024, "chunk": 64, **options})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copy(QWEN35, tmp_path / "model.gguf"))


@pytest.mark.parametrize("spec", ["off", "mtp"])
def test_an_engine_goes_on_behind_its_stored_states(spec: str) -> None:
    text = prompt(600)
    drafting = {"spec": spec, "spec_width": "auto" if spec == "off" else 3}
    with qwen(slots=2, **drafting) as engine:
        first = engine.generate(text, **SHORT)
        held, stored = engine.memory()["CPU"], engine.snapshots.list()
        for _ in range(2):
            engine.park()
            assert engine.parked
            assert engine.memory()["CPU"] == {"snapshots": held["snapshots"]}
            assert engine.snapshots.list() == stored
            engine.unpark()
            assert not engine.parked
            found = engine.generate(text, **SHORT)
            assert found.usage.cached_tokens == stored[-1].n_past > 500
            assert found.tokens == first.tokens
            if first.speculation is not None:
                assert found.speculation is not None
                assert found.speculation.accepted == first.speculation.accepted
        assert {name: n for name, n in engine.memory()["CPU"].items() if "graph" not in name} == {
            name: n for name, n in held.items() if "graph" not in name
        }


def test_context_and_chunk_stay_and_nothing_is_fitted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """p11: the search runs once, whatever is free later."""
    searches = []
    search = Planner.search

    def counted(self: Planner, start: int) -> Any:
        searches.append(start)
        return search(self, start)

    monkeypatch.setattr(Planner, "search", counted)
    with qwen(max_ctx="auto", chunk="auto", device_cap=CAP) as engine:
        info, report = engine.info, engine.fit_report()
        assert info.n_ctx < info.n_ctx_train
        assert len(searches) == 1
        for _ in range(3):
            engine.park()
            engine.unpark()
            assert (engine.info, engine.fit_report()) == (info, report)
            engine.generate(prompt(info.n_ctx - 6), **SHORT)
        assert len(searches) == 1
        assert engine.stats().peak_bytes["CPU"] <= CAP["CPU"]


@pytest.mark.parametrize("model", [None, DEFAULT_MODEL])
def test_a_draft_that_was_found_without_being_named_comes_back(model: Path | None) -> None:
    with Engine.open(model, max_ctx=512, device="CPU", threads=1) as engine:
        draft, text = engine.info.draft, engine.generate("Once upon a time", **SHORT).text
        assert draft is not None
        engine.park()
        engine.unpark()
        assert (engine.info.spec, engine.info.draft) == ("dflash", draft)
        assert engine.generate("Once upon a time", **SHORT).text == text


def test_a_drafter_that_was_left_out_stays_out() -> None:
    with qwen(prefix_cache_max_mib=0, fit_margin="0") as plain:
        cap = {"CPU": sum(plain.fit_report().devices[0].terms.values()) + 1000}
    with qwen(spec="auto", device_cap=cap, prefix_cache_max_mib=0, fit_margin="0") as engine:
        info = engine.info
        assert (info.spec, str(info.spec_reason)[:8]) == ("off", "drafting")
        engine.park()
        engine.unpark()
        assert engine.info == info


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, which only Linux has")
@pytest.mark.parametrize("name", ["shipped", "qwen35", "qwen4exp"])
def test_files_are_mapped_while_there_is_a_model(name: str, tmp_path: Path) -> None:
    """Files of its own, since another engine of this process may have the shipped ones mapped."""
    draft = None
    if name == "shipped":
        folder = DEFAULT_MODEL.parent
        path, draft = (Path(copy2(file, tmp_path)) for file in (DEFAULT_MODEL, *folder.glob("*dflash*.gguf")))
    else:
        path = write_tiny(tmp_path, Tiny(architecture=name, n_mtp=1))
    maps = Path("/proc/self/maps")
    with Engine.open(path, draft=draft, max_ctx=512, device="CPU", threads=1) as engine:
        drafts = [] if engine.info.draft is None else [engine.info.draft.path]
        files = [str(path), *(str(draft) for draft in drafts)]
        for _ in range(2):
            assert all(file in maps.read_text() for file in files)
            engine.generate(list(range(100)), **SHORT)
            engine.park()
            assert not any(file in maps.read_text() for file in files)
            engine.unpark()
        engine.close()
        assert not any(file in maps.read_text() for file in files)


@NEEDS_GLIBC
@pytest.mark.parametrize("give_back", [Engine.park, lambda engine: engine.snapshots.clear()])
def test_free_memory_of_the_heap_goes_back_too(give_back: Callable[[Engine], None]) -> None:
    with qwen() as engine:
        between = make_holes()
        before = process_bytes()
        give_back(engine)
        assert process_bytes() < before - HOLES_BYTES * 0.75
        del between


def test_nothing_is_kept_of_a_model_that_was_parked_and_loaded_again() -> None:
    with qwen(spec="mtp") as engine:
        for _ in range(2):
            engine.generate(prompt(100), **SHORT)
            parts = engine._loaded.core, engine._loaded.tokenizer, engine._loaded.constraints
            before = [weakref.ref(part) for part in parts]
            del parts
            engine.park()
            engine.unpark()
            gc.collect()
            assert [part() for part in before] == [None] * len(before)


@pytest.mark.parametrize("states", [0, "auto"])
def test_counts_go_on_where_they_were(states: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = StepGraph.run

    def fails_once(graph: StepGraph) -> Any:
        monkeypatch.setattr(StepGraph, "run", run)
        raise BackendError("on purpose")

    with qwen(slots=2, prefix_cache_max_mib=states, device_cap={"CPU": 2**30}) as engine:
        counts = (TrimStats(reason="idle", n_trims=2, released_bytes=30, seconds=0.5),)
        engine._loaded.core.trims.add(counts)
        engine._loaded.core.trims.n_relieved = 3
        for n in (1, 2):
            monkeypatch.setattr(StepGraph, "run", fails_once)
            with pytest.raises(BackendError, match="on purpose"):
                engine.generate(prompt(20), **SHORT)
            engine.generate(prompt(900), **SHORT)
            before = engine.stats()
            assert before.step_failures == n
            engine.park()
            parked = engine.stats()
            engine.unpark()
            for after in (parked, engine.stats()):
                assert (after.step_failures, after.trims, after.requests) == (n, counts, before.requests)
                assert (after.allocation_retries, after.granule_times) == (3, before.granule_times)
                assert after.peak_bytes["CPU"] >= before.peak_bytes["CPU"]
                assert after.snapshots == before.snapshots


# requests


def test_a_parked_engine_refuses_work_and_answers_questions() -> None:
    with qwen() as engine:
        engine.generate(prompt(20), **SHORT)
        engine.park()
        for call in (
            lambda: engine.generate(prompt(5)),
            lambda: engine.stream(prompt(5)),
            lambda: engine.score([1, 2, 3]),
            lambda: engine.logits([1, 2, 3]),
            lambda: engine.trim(),
        ):
            with pytest.raises(EngineParked, match=r"the engine is parked; unpark\(\) brings it back"):
                call()
        stats = engine.stats()
        assert (stats.requests.running, stats.requests.waiting, stats.requests.done) == (0, 0, 1)
        assert engine.tokenize("a")
        engine.park()
        engine.unpark()
        engine.unpark()
        assert len(engine.generate(prompt(5), **SHORT).tokens) == 6


def test_what_runs_and_waits_is_answered_before_the_engine_parks() -> None:
    with qwen(slots=2) as engine:
        alone = [engine.generate(prompt(50, seed=i), max_tokens=40, ignore_eos=True) for i in range(5)]
        streams = [engine.stream(prompt(50, seed=i), max_tokens=40, ignore_eos=True) for i in range(5)]
        engine.park()
        assert all(stream.state.phase == "done" for stream in streams)
        assert [stream.result.tokens for stream in streams] == [result.tokens for result in alone]


def test_what_runs_and_waits_can_be_cancelled_instead() -> None:
    with qwen(slots=2, max_ctx=4096) as engine:
        streams = [engine.stream(prompt(50, seed=i), ignore_eos=True) for i in range(5)]
        next(streams[0])
        engine.park(cancel=True)
        assert [stream.result.finish_reason for stream in streams] == ["cancelled"] * 5
        assert engine.stats().requests.cancelled == 5
        engine.unpark()
        assert len(engine.generate(prompt(5), **SHORT).tokens) == 6


def test_threads_that_park_unpark_and_ask_all_come_to_an_end() -> None:
    expected = {}
    with qwen() as engine:
        for seed in range(4):
            expected[seed] = engine.generate(prompt(30, seed=seed), **SHORT).tokens
        wrong: list[object] = []

        def ask(seed: int) -> None:
            for _ in range(6):
                try:
                    tokens = engine.generate(prompt(30, seed=seed), **SHORT).tokens
                except EngineParked:
                    continue
                if tokens != expected[seed]:
                    wrong.append(tokens)

        def move() -> None:
            for _ in range(3):
                engine.park()
                engine.unpark()

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
        threads += [threading.Thread(target=move) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        assert wrong == []
        engine.unpark()
        assert engine.generate(prompt(30, seed=1), **SHORT).tokens == expected[1]


# failures


def test_a_failure_leaves_the_engine_parked_with_its_states(model: Path) -> None:
    with qwen(model) as engine:
        first = engine.generate(prompt(600), **SHORT)
        engine.park()
        held = engine.memory()
        away = model.rename(model.with_suffix(".away"))
        for _ in range(2):
            with pytest.raises(ModelFileError):
                engine.unpark()
            assert engine.parked
            assert engine.memory() == held
            with pytest.raises(EngineParked):
                engine.generate(prompt(5))
        away.rename(model)
        engine.unpark()
        found = engine.generate(prompt(600), **SHORT)
        assert (found.tokens, found.usage.cached_tokens > 500) == (first.tokens, True)


def test_a_file_that_changed_meanwhile_loses_its_states(model: Path) -> None:
    with qwen(model) as engine:
        engine.generate(prompt(600), **SHORT)
        engine.park()
        model.touch()
        engine.unpark()
        assert engine.snapshots.list() == ()
        assert engine.generate(prompt(600), **SHORT).usage.cached_tokens == 0


def test_a_load_that_is_given_up_leaves_the_engine_parked() -> None:
    with qwen(QWEN3) as engine:  # some of its weights are copied, which is told
        engine.park()

        def fail(_: object) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            engine.unpark(progress=fail)
        assert engine.parked


def test_a_parked_engine_can_be_closed(tmp_path: Path) -> None:
    engine = qwen(kv_cache_dir=tmp_path)
    engine.generate(prompt(600), **SHORT)
    engine.park()
    assert len(list(tmp_path.glob("*.dfsnap"))) == 1  # what the folder lacks is saved at once
    engine.close()
    engine.close()
    with pytest.raises(EngineClosed):
        engine.unpark()


def test_no_request_comes_between_unparking_and_a_park_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Park, unpark, park are queued while the thread is busy; a request right behind unparking is refused."""
    change, refused = EngineThread._change, []

    def noted(self: EngineThread, serving: Any, loader: Any, command: Any) -> None:
        change(self, serving, loader, command)
        if isinstance(command, Unpark):
            with pytest.raises(EngineParked):
                self._count(RequestHandle(request, None, None, None, wake=lambda: None))
            refused.append(self.parked)

    request = GenerationRequest(tokens=(1, 2, 3))
    monkeypatch.setattr(EngineThread, "_change", noted)
    with qwen() as engine:
        thread, busy = engine._thread, threading.Event()
        holder = threading.Thread(target=thread.call, args=(lambda core, _: busy.wait(PATIENCE_S),))
        holder.start()
        commands = [Park(False), Unpark(None), Park(False)]
        for command in commands:
            thread._enqueue(command)
        busy.set()
        holder.join()
        commands[-1].future.result(PATIENCE_S)
        assert refused == [False]
        assert engine.parked


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that belongs to no request ends the engine; those who wait are told, and those who come."""
    with qwen(slots=2) as engine:
        streams = [engine.stream(prompt(5, seed=i), ignore_eos=True) for i in range(2)]
        next(streams[0])

        def broken(self: Serving) -> bool:
            for i in range(3):  # behind what the thread has taken
                late.append(
                    RequestHandle(GenerationRequest(tokens=(i,)), None, None, None, wake=lambda: None)
                )
                engine._thread._commands.put(late[-1])
            raise RuntimeError("broken on purpose")

        late: list[RequestHandle] = []
        monkeypatch.setattr(Serving, "_let_go", broken)
        assert [stream.result.finish_reason for stream in streams] == ["cancelled", "cancelled"]
        for handle in late:
            with pytest.raises(EngineClosed):
                handle.result()
        assert len(late) == 3
        with pytest.raises(EngineClosed):
            engine.generate(prompt(5))
        with pytest.raises(EngineClosed):
            engine.stats()
