"""Many callers of one engine with several slots: each gets its own words, in its turn."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pyggml_dflash import (
    Engine,
    EngineClosed,
    GenerationResult,
    Progress,
    QueueFullError,
    RequestCounts,
    SamplingOptions,
    TextStream,
)
from pyggml_dflash.engine import invariance
from pyggml_dflash.options import Spec
from tests.engine.apart import program
from tests.engine.hostile import edited
from tests.engine.tiny import LLAMA, PATIENCE_S, QWEN35, opened, prompt
from tests.engine.workers import workers

N_SLOTS = 4
WIDTH = 2  # given, so that drafts are verified however slow the machine is


@pytest.fixture(scope="module")
def long_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model trained for so many tokens that no test lives to see the last."""
    return edited(LLAMA, tmp_path_factory.mktemp("long") / "long.gguf", keys={"llama.context_length": 65536})


@pytest.fixture(scope="module", params=["off", "mtp"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with opened(QWEN35, spec=request.param, spec_width=WIDTH, slots=N_SLOTS, max_ctx=512, chunk=32) as engine:
        yield engine


@pytest.fixture(scope="module")
def pico() -> Iterator[Engine]:
    with opened(None, spec="auto", spec_width=WIDTH, slots=N_SLOTS, max_ctx=512) as engine:
        yield engine


def n_drafted_together(results: list[GenerationResult]) -> int:
    """Verify forwards that several of them shared."""
    return sum(result.speculation.shared_steps for result in results if result.speculation is not None)


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """The values of calls that all begin in the same moment, each in a thread of its own."""
    ready = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        ready.wait(PATIENCE_S)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls, timeout=PATIENCE_S))


def eventually(true: Callable[[], bool]) -> None:
    """Wait until it is."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# nobody gets another's words


def test_equal_prompts_at_once_have_one_answer(engine: Engine) -> None:
    """B24: with drafts too."""

    def call() -> GenerationResult:
        return engine.generate(prompt(50), max_tokens=24, ignore_eos=True)

    alone = call()
    results = at_once([call] * 12)
    assert {(result.tokens, result.text) for result in results} == {(alone.tokens, alone.text)}
    assert (n_drafted_together(results) > 0) == (engine.info.spec == "mtp")


NAMES = (
    *("Zog", "Mia", "Tom", "Lily", "Ben", "Max", "Sue", "Kit"),
    *("Ana", "Sam", "Rex", "Ivy", "Bob", "Amy", "Leo", "Pip"),
)


def test_no_word_of_one_prompt_is_in_the_answer_to_another(pico: Engine) -> None:
    """B24: sixteen stories, each about somebody else, drafted beside each other."""
    prompts = [f"Once upon a time there was a child named {name}. {name} liked to" for name in NAMES]

    def tell(text: str, spec: Spec | None = None) -> GenerationResult:
        return pico.generate(text, max_tokens=50, spec=spec)

    alone = [tell(text, "off").text for text in prompts]
    results = at_once([lambda text=text: tell(text) for text in prompts])  # type: ignore[misc]
    together = [result.text for result in results]
    assert n_drafted_together(results) > 0
    assert sum(name in text for name, text in zip(NAMES, together, strict=True)) >= 8
    for i, (text, own) in enumerate(zip(together, alone, strict=True)):
        others = {name for name in NAMES if name in text} - {NAMES[i]}
        assert others <= {name for name in NAMES if name in own}


@pytest.mark.parametrize("n", [2, 3, 4, 9])
def test_requests_of_one_moment_all_get_their_answers(engine: Engine, n: int) -> None:
    """B26: of a model with delta nets, whose prompts begin in one step."""

    def call(i: int) -> tuple[int, ...]:
        return engine.generate(prompt(3 + 20 * i, seed=i), max_tokens=6 + i, ignore_eos=True).tokens

    alone = [call(i) for i in range(n)]
    assert at_once([lambda i=i: call(i) for i in range(n)]) == alone  # type: ignore[misc]
    assert [len(tokens) for tokens in alone] == [6 + i for i in range(n)]


def test_threads_tasks_and_other_calls_share_an_engine(engine: Engine) -> None:
    """B49: eight threads, five calls each."""
    text = prompt(60, seed=3)
    sampling = SamplingOptions(temperature=0.8, seed=11)

    def generate(i: int) -> object:
        tokens, drawn = prompt(5 + 11 * i, seed=i), sampling if i % 2 else None
        return engine.generate(tokens, max_tokens=9, sampling=drawn, ignore_eos=True).tokens

    async def stream(i: int) -> list[int]:
        pieces = engine.astream(prompt(5 + 11 * i, seed=i), max_tokens=9, ignore_eos=True)
        return [token async for piece in pieces for token in piece.tokens]

    def calls(i: int) -> list[object]:
        kind = i % 4
        if kind == 0:
            return [engine.score(text).logprob, engine.logits(text).sum()]
        if kind == 1:
            return [asyncio.run(stream(i))]
        if kind == 2:
            return [engine.chat([{"role": "user", "content": f"call {i}"}], max_tokens=5).tokens]
        return [generate(i + k) for k in range(3)]

    alone = [calls(i) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(calls, [*range(8)] * 5, timeout=PATIENCE_S))
    assert together == alone * 5
    assert all(slot.phase == "free" for slot in engine.stats().slots)


# the queue


def test_those_who_wait_see_their_place_and_come_in_order(long_llama: Path) -> None:
    with opened(long_llama, max_ctx=65536, slots=2) as engine:
        running = [engine.stream(prompt(5, seed=i), ignore_eos=True) for i in range(2)]
        for stream in running:
            next(stream)
        assert {stream.state.phase for stream in running} == {"decode"}
        waiting = [engine.stream(prompt(5, seed=i), max_tokens=200, ignore_eos=True) for i in range(3)]
        assert [(s.state.phase, s.state.position) for s in waiting] == [("queued", i) for i in (1, 2, 3)]
        stats = engine.stats()
        assert (stats.requests.running, stats.requests.waiting) == (2, 3)
        assert [slot.request for slot in stats.slots] == [stream.request_id for stream in running]
        assert all(slot.n_past >= 5 for slot in stats.slots)
        waiting[1].cancel()
        eventually(lambda: waiting[2].state.position == 2)
        assert waiting[1].result.finish_reason == "cancelled"
        assert waiting[1].result.tokens == ()
        running[1].close()
        eventually(lambda: waiting[0].state.phase != "queued")
        assert (waiting[2].state.phase, waiting[2].state.position) == ("queued", 1)
        assert len(waiting[0].result.tokens) == len(waiting[2].result.tokens) == 200
        assert waiting[0].result.timings.queue_s < waiting[2].result.timings.queue_s
        running[0].close()
        assert {stream.state.phase for stream in (*running, *waiting)} == {"done"}
        assert engine.stats().requests == RequestCounts(done=2, cancelled=3)


def test_a_prompt_tells_how_far_it_was_read(long_llama: Path) -> None:
    reached, go = threading.Event(), threading.Event()

    def hold(progress: Progress) -> None:
        if progress.done == 32:
            reached.set()
            assert go.wait(PATIENCE_S)

    with opened(long_llama, max_ctx=1024, slots=2, chunk=16) as engine:
        stream = engine.stream(prompt(100), max_tokens=2, ignore_eos=True, progress=hold)
        assert reached.wait(PATIENCE_S)
        state = stream.state
        assert (state.phase, state.done, state.total) == ("prefill", 32, 100)
        go.set()
        assert len(stream.result.tokens) == 2


@pytest.mark.parametrize(("slots", "limit"), [(1, 0), (2, 0), (2, 1), (1, 3)])
def test_a_queue_that_is_full_refuses_at_once(long_llama: Path, slots: int, limit: int) -> None:
    with opened(long_llama, max_ctx=65536, slots=slots, queue_limit=limit) as engine:
        streams = [engine.stream(prompt(5), ignore_eos=True) for _ in range(slots + limit)]
        with pytest.raises(QueueFullError, match=f"{limit} requests wait .* at most {limit} may"):
            engine.generate(prompt(5))
        for call in (engine.logits, engine.score):
            with pytest.raises(QueueFullError):
                call(prompt(5))
        streams[0].close()
        eventually(lambda: engine.stats().requests.waiting < max(1, limit))
        streams.append(engine.stream(prompt(5), max_tokens=1))
        for stream in streams[:-1]:
            stream.close()
        assert streams[-1].result.finish_reason == "length"
        for _ in range(3):  # nobody is left, so nobody is in the way
            assert len(engine.generate(prompt(5), max_tokens=2, ignore_eos=True).tokens) == 2


# who leaves


def leave_in_the_queue(engine: Engine) -> TextStream:
    others = [engine.stream(prompt(5), ignore_eos=True) for _ in range(N_SLOTS)]
    stream = engine.stream(prompt(5), ignore_eos=True)
    stream.close()
    for other in others:
        other.close()
    return stream


def leave_in_the_prompt(engine: Engine) -> TextStream:
    stream = engine.stream(prompt(60_000), ignore_eos=True)
    eventually(lambda: stream.state.done > 0)
    stream.close()
    return stream


def leave_in_the_answer(engine: Engine) -> TextStream:
    with engine.stream(prompt(5), ignore_eos=True) as stream:
        for _ in stream:
            break
    return stream


LEAVES = [leave_in_the_queue, leave_in_the_prompt, leave_in_the_answer]


@pytest.mark.parametrize("leave", LEAVES)
@pytest.mark.parametrize("beside", [False, True])
def test_leaving_frees_the_slot_and_nobody_notices(
    long_llama: Path, leave: Callable[[Engine], TextStream], beside: bool
) -> None:
    with opened(long_llama, max_ctx=65536, slots=N_SLOTS, chunk=16) as engine:
        expected = engine.generate(prompt(40), max_tokens=300, ignore_eos=True).tokens
        other = engine.stream(prompt(40), max_tokens=300, ignore_eos=True) if beside else None
        result = leave(engine).result
        assert result.finish_reason == "cancelled"
        stats = engine.stats()
        assert (stats.requests.failed, stats.requests.waiting) == (0, 0)
        assert sum(slot.phase != "free" for slot in stats.slots) <= beside
        if other is not None:
            assert other.result.tokens == expected
        assert engine.generate(prompt(40), max_tokens=300, ignore_eos=True).tokens == expected


def test_a_prompt_is_left_within_a_granule(long_llama: Path) -> None:
    done: list[int] = []
    streams: list[TextStream] = []

    def stop(progress: Progress) -> None:
        done.append(progress.done)
        if progress.done == 64:
            eventually(lambda: bool(streams))
            streams[0].cancel()

    with opened(long_llama, max_ctx=4096, slots=2, chunk=16) as engine:
        streams.append(engine.stream(prompt(4000), progress=stop))
        assert streams[0].result.finish_reason == "cancelled"
    assert done == [0, 16, 32, 48, 64]


def test_a_reader_that_does_not_read_holds_nobody_up(long_llama: Path) -> None:
    with opened(long_llama, max_ctx=65536, slots=2) as engine:
        slow = engine.stream(prompt(5), ignore_eos=True)
        next(slow)
        for i in range(5):
            assert len(engine.generate(prompt(5, seed=i), max_tokens=50, ignore_eos=True).tokens) == 50
        assert slow.state.phase == "decode"
        slow.close()
        assert len(slow.result.tokens) >= 5 * 50  # it went on, one token in each of the others' steps


def test_a_long_prompt_lets_answers_go_on(long_llama: Path) -> None:
    order: list[str] = []
    with opened(long_llama, max_ctx=65536, slots=3, chunk=16) as engine:
        answers = [engine.stream(prompt(5, seed=i), ignore_eos=True) for i in range(2)]
        for stream in answers:
            next(stream)
        long = engine.stream(
            prompt(1000), max_tokens=1, progress=lambda progress: order.append(f"{progress.done}")
        )
        before = [engine.stats().slots[i].n_past for i in range(2)]
        assert len(long.result.tokens) == 1
        after = [engine.stats().slots[i].n_past for i in range(2)]
        for stream in answers:
            stream.close()
    n_granules = -(-1000 // 16)
    assert len(order) == n_granules + 1
    assert min(b - a for a, b in zip(before, after, strict=True)) >= n_granules - 10


# the end


@pytest.mark.parametrize("n_answered", [0, 2, 5])
def test_closing_ends_what_runs_and_refuses_what_waits(long_llama: Path, n_answered: int) -> None:
    engine = opened(long_llama, max_ctx=65536, slots=3)
    answered = threading.Semaphore(0)

    def call(i: int) -> GenerationResult:
        result = engine.generate(prompt(5, seed=i), max_tokens=200, ignore_eos=True)
        answered.release()
        return result

    with ThreadPoolExecutor(16) as pool:
        calls = [pool.submit(call, i) for i in range(12)]
        scored = [pool.submit(engine.score, prompt(3000)) for _ in range(2)]
        for _ in range(n_answered):
            assert answered.acquire(timeout=PATIENCE_S)
        engine.close()
        errors = [future.exception(PATIENCE_S) for future in calls]
    assert all(error is None or isinstance(error, EngineClosed) for error in errors)
    results = [future.result() for future, error in zip(calls, errors, strict=True) if error is None]
    assert sum(result.finish_reason == "length" for result in results) >= n_answered
    assert sum(result.finish_reason == "cancelled" for result in results) <= 3
    for future in scored:
        error = future.exception(PATIENCE_S)
        assert error is None or isinstance(error, EngineClosed)


@pytest.mark.parametrize("allowed", [False, True])
def test_slots_take_turns_where_rows_round_otherwise_unless_that_is_allowed(
    allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which kernels of a CPU do not, so the comparison of whole forwards is told so."""
    monkeypatch.setattr(invariance, "_agreeing_rows", lambda *_: 1)
    with opened(QWEN35, slots=3, max_ctx=512, chunk=32, allow_batch_variance=allowed) as engine:
        info = engine.info
        if allowed:
            expected = ("batched", 3, "rows may be rounded otherwise than alone, as asked for")
        else:
            expected = ("sequential", 1, "whole forwards of two rows round otherwise than those of one")
        assert (info.decode_mode, info.decode_rows, info.decode_reason) == expected
        calls = [
            lambda i=i: engine.generate(prompt(9 + 30 * i, seed=i), max_tokens=20, ignore_eos=True).tokens
            for i in range(3)
        ]
        alone = [call() for call in calls]
        together = at_once(calls)  # type: ignore[arg-type]
        assert [len(tokens) for tokens in together] == [20] * 3
        assert together == alone or allowed


def test_whole_forwards_are_compared_on_a_device_whatever_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may fuse products with others there, which a CPU does not: a large model is not compared on one."""
    monkeypatch.setattr(invariance, "_agreeing_rows", lambda *_: 1)
    monkeypatch.setattr(invariance, "THREAD_WORK", 0.0)
    with workers(1) as (worker,):
        for device, mode in ((worker.name, "sequential"), ("CPU", "batched")):
            with opened(QWEN35, device=device, slots=3, max_ctx=512, chunk=32) as engine:
                assert engine.info.decode_mode == mode, device


def test_event_loops_of_several_threads_are_served_together(engine: Engine) -> None:
    async def gather(seed: int) -> list[str]:
        async def one(i: int) -> str:
            pieces = engine.astream(prompt(5 + i, seed=seed), max_tokens=8, ignore_eos=True)
            return "".join([piece.text async for piece in pieces])

        return list(await asyncio.gather(*(one(i) for i in range(5))))

    alone = [asyncio.run(gather(seed)) for seed in range(3)]
    assert at_once([lambda seed=seed: asyncio.run(gather(seed)) for seed in range(3)]) == alone  # type: ignore[misc]


FORKED = """
import os
from pyggml_dflash import BackendError
from tests.engine.tiny import LLAMA, opened, prompt
with opened(LLAMA, max_ctx=256, slots=3) as engine:
    streams = [engine.stream(prompt(5, seed=i), max_tokens=150, ignore_eos=True) for i in range(5)]
    next(streams[0])
    child = os.fork()
    if child == 0:
        for use in (engine.generate, engine.logits, engine.score):
            try:
                use([1, 2])
            except BackendError as error:
                assert "fork" in str(error)
            else:
                os._exit(1)
        os._exit(0)
    print(os.waitpid(child, 0)[1], [len(stream.result.tokens) for stream in streams])
"""


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="this system has no fork")
def test_a_forked_child_is_told_while_several_answers_run() -> None:
    """B49: and its parent goes on."""
    done = program(FORKED, warnings="default")
    assert (done.returncode, done.stdout) == (0, "0 [150, 150, 150, 150, 150]\n"), done.stderr
