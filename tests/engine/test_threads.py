"""Any thread and any event loop may use an engine at any time, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pyggml_dflash import (
    Engine,
    EngineClosed,
    GenerationResult,
    Progress,
    SamplingOptions,
    TextPiece,
    TextStream,
    UsageError,
)
from tests.engine.apart import program
from tests.engine.hostile import edited
from tests.engine.scripted import START, scripted
from tests.engine.tiny import LLAMA, PATIENCE_S, QWEN35, opened, prompt

on_posix = pytest.mark.skipif(os.name != "posix", reason="needs a signal that is sent to one process")


@pytest.fixture(scope="module")
def long_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model trained for so many tokens that no test lives to see the last."""
    return edited(LLAMA, tmp_path_factory.mktemp("long") / "long.gguf", keys={"llama.context_length": 65536})


def outcome(future: Future[GenerationResult]) -> GenerationResult | Exception:
    error = future.exception(PATIENCE_S)
    return future.result() if error is None else error  # type: ignore[return-value]


# many callers


def answer(engine: Engine, i: int) -> tuple[tuple[int, ...], str]:
    """One of many requests that differ in prompt, length and sampling."""
    sampling = SamplingOptions(temperature=0.8, seed=i) if i % 2 else SamplingOptions()
    result = engine.generate(
        prompt(3 + 7 * i, seed=i), sampling=sampling, max_tokens=4 + i % 5, ignore_eos=True
    )
    return result.tokens, result.text


@pytest.mark.parametrize("model", [LLAMA, QWEN35])
def test_calls_from_many_threads_give_what_each_gives_alone(model: Path) -> None:
    with opened(model, max_ctx=512, chunk=32) as engine:
        alone = [answer(engine, i) for i in range(40)]
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(lambda i: answer(engine, i), range(40), timeout=PATIENCE_S))
    assert together == alone
    assert len(set(alone)) == 40


def test_engines_beside_each_other_do_not_mix() -> None:
    def answers(engine: Engine) -> list[tuple[tuple[int, ...], str]]:
        return [answer(engine, i) for i in range(12)]

    with opened(LLAMA, max_ctx=512) as first, opened(QWEN35, max_ctx=512) as second:
        alone = [answers(first), answers(second)]
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(answers, (first, second), timeout=PATIENCE_S)) == alone


def test_tokenizing_does_not_wait_for_an_answer_that_runs(long_llama: Path) -> None:
    with opened(long_llama, max_ctx=65536) as engine, engine.stream(prompt(3), ignore_eos=True) as running:
        next(running)
        with ThreadPoolExecutor(4) as pool:
            ids = [pool.submit(engine.tokenize, f"text {i}") for i in range(20)]
            texts = [engine.detokenize(future.result(PATIENCE_S)) for future in ids]
        running.cancel()
        assert running.result.finish_reason == "cancelled"
    assert texts == [f"text {i}" for i in range(20)]


@pytest.mark.parametrize("n_answered", [0, 1, 5])
def test_closing_under_callers_gives_each_an_answer_or_says_closed(long_llama: Path, n_answered: int) -> None:
    engine = opened(long_llama, max_ctx=65536)
    answered = threading.Semaphore(0)

    def call(i: int) -> GenerationResult:
        result = engine.generate(prompt(5, seed=i), max_tokens=200, ignore_eos=True)
        answered.release()
        return result

    with ThreadPoolExecutor(16) as pool:
        calls = [pool.submit(call, i) for i in range(16)]
        for _ in range(n_answered):
            assert answered.acquire(timeout=PATIENCE_S)
        engine.close()
        late = pool.submit(call, 99)
        outcomes = [outcome(future) for future in calls]
        assert isinstance(outcome(late), EngineClosed)
    results = [o for o in outcomes if isinstance(o, GenerationResult)]
    assert len(results) + sum(isinstance(o, EngineClosed) for o in outcomes) == 16
    assert sum(result.finish_reason == "length" for result in results) >= n_answered
    assert sum(result.finish_reason == "cancelled" for result in results) <= 1


def test_every_kind_of_call_that_waits_is_told_of_the_close(long_llama: Path) -> None:
    engine = opened(long_llama, max_ctx=65536)
    running = engine.stream(prompt(3), ignore_eos=True)
    next(running)
    calls: list[Callable[[], object]] = [
        lambda: engine.generate(prompt(3)),
        lambda: engine.logits(prompt(3)),
        lambda: engine.score(prompt(3)),
        lambda: list(engine.stream(prompt(3))),
    ]
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(call) for call in calls for _ in range(2)]
        engine.close()
        for future in waiting:
            assert isinstance(future.exception(PATIENCE_S), EngineClosed)
    assert running.result.finish_reason == "cancelled"


def test_requests_are_answered_in_the_order_of_their_submission() -> None:
    order: list[int] = []
    with opened(LLAMA, max_ctx=512) as engine:
        held = threading.Event()

        def hold(_: Progress) -> None:
            assert held.wait(PATIENCE_S)

        first = engine.stream(prompt(3), max_tokens=1, progress=hold)

        def note(i: int) -> Callable[[Progress], None]:
            return lambda _: order.append(i)

        rest = [engine.stream(prompt(3), max_tokens=1, progress=note(i)) for i in range(8)]
        held.set()
        for stream in (first, *rest):
            assert stream.result.finish_reason == "length"
    assert list(dict.fromkeys(order)) == list(range(8))


# callbacks on the engine's thread


def test_a_callback_may_close_the_engine() -> None:
    before = threading.active_count()
    engine = opened(LLAMA, max_ctx=64)
    result = engine.generate(prompt(3), max_tokens=2, progress=lambda _: engine.close())
    assert result.finish_reason == "cancelled"
    with pytest.raises(EngineClosed):
        engine.generate([1])
    engine.close()
    assert threading.active_count() == before


CALLS_BACK = """
import sys
from tests.engine.tiny import LLAMA, opened
with opened(LLAMA, max_ctx=64) as engine:
    use = {"generate": engine.generate, "logits": engine.logits, "stream": lambda t: list(engine.stream(t))}
    try:
        engine.generate([1, 2], max_tokens=1, progress=lambda _: use[sys.argv[1]]([1]))
    except Exception as error:
        print(type(error).__name__)
    print(len(engine.generate([1, 2], max_tokens=1, ignore_eos=True).tokens))
"""


@pytest.mark.parametrize("use", ["generate", "logits", "stream"])
def test_a_callback_that_calls_the_engine_is_told_that_it_cannot(use: str) -> None:
    done = program(CALLS_BACK, use, deadline_s=5)
    assert done.returncode == 0
    assert done.stdout.splitlines()[1:] == ["1"]


# interrupts


INTERRUPTED = """
import os, signal, sys
from pathlib import Path
from tests.engine.tiny import opened, prompt
done = []
def watch(progress):
    done.append(progress.done)
    if progress.done == 64:
        os.kill(os.getpid(), signal.SIGINT)
        while not stopping:
            pass
stopping = False
engine = opened(Path(sys.argv[1]), max_ctx=65536, chunk=16, slots=2)
other = engine.stream(prompt(5), max_tokens=200, ignore_eos=True)
next(other)
stream = engine.stream(prompt(60000), progress=watch)
cancel = stream.cancel
def note():
    global stopping
    cancel()
    stopping = True
stream.cancel = note
try:
    list(stream)
except KeyboardInterrupt:
    stream.cancel()
    print(stream.result.finish_reason, done[-1] <= 80, len(other.result.tokens))
print(len(engine.generate(prompt(5), max_tokens=3, ignore_eos=True).tokens))
engine.close()
"""


@on_posix
def test_an_interrupt_in_prefill_returns_within_a_chunk(long_llama: Path) -> None:
    """B49: also beside another answer, which goes on."""
    done = program(INTERRUPTED, long_llama)
    assert (done.returncode, done.stdout) == (0, "cancelled True 200\n3\n"), done.stderr


GENERATE_INTERRUPTED = """
import os, signal, sys
from pathlib import Path
from tests.engine.tiny import opened, prompt
done = []
def watch(progress):
    done.append(progress.done)
    if progress.done == 64:
        os.kill(os.getpid(), signal.SIGINT)
with opened(Path(sys.argv[1]), max_ctx=65536, chunk=16) as engine:
    try:
        engine.generate(prompt(60000), progress=watch)
    except KeyboardInterrupt:
        print("interrupted", done[-1] < 60000)
    print(len(engine.generate(prompt(5), max_tokens=3, ignore_eos=True).tokens))
"""


@on_posix
def test_an_interrupt_of_generate_cancels_it(long_llama: Path) -> None:
    done = program(GENERATE_INTERRUPTED, long_llama)
    assert (done.returncode, done.stdout) == (0, "interrupted True\n3\n"), done.stderr


LOGITS_INTERRUPTED = """
import os, signal, sys, threading
from pathlib import Path
from tests.engine.tiny import opened, prompt
engine = opened(Path(sys.argv[1]), max_ctx=65536, chunk=8)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    engine.score(prompt(60000))
except KeyboardInterrupt:
    print("interrupted", flush=True)
engine.close()
print("closed", flush=True)
"""


@on_posix
def test_an_interrupt_of_score_does_not_wait_for_its_end(long_llama: Path) -> None:
    assert program(LOGITS_INTERRUPTED, long_llama, deadline_s=10).stdout == "interrupted\nclosed\n"


LOAD_INTERRUPTED = """
import os, signal, threading
from tests.engine.tiny import QWEN3, opened
sent = []
def interrupt(progress):
    if not sent:
        sent.append(progress)
        os.kill(os.getpid(), signal.SIGINT)
try:
    engine = opened(QWEN3, progress=interrupt)
    engine.close()  # the load was over before the main thread saw the interrupt
    threading.Event().wait(30)
except KeyboardInterrupt:
    print("interrupted", threading.active_count())
"""


@on_posix
def test_an_interrupt_while_loading_ends_the_load_and_its_thread() -> None:
    done = program(LOAD_INTERRUPTED)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted 1\n", "")


# asyncio


async def gathered(engine: Engine, tokens: list[int], **options: Any) -> list[TextPiece]:
    return [piece async for piece in engine.astream(tokens, **options)]


def test_astream_gives_what_stream_gives(tmp_path: Path) -> None:
    pieces = [b"on", b"e \xf0", b"\x9f\x98", b"\x80", b" st", b"op", b" here"]
    with opened(scripted(tmp_path / "m.gguf", pieces)) as engine:
        choices: list[dict[str, Any]] = [{}, {"stop": ["stop"]}, {"max_tokens": 3}, {"logprobs": 1}]
        for options in choices:
            expected = list(engine.stream([START], **options))
            assert asyncio.run(gathered(engine, [START], **options)) == expected


def test_many_tasks_and_threads_share_an_engine() -> None:
    async def all_of_them(engine: Engine) -> list[str]:
        runs = (gathered(engine, prompt(4 + i), max_tokens=6, ignore_eos=True) for i in range(12))
        return ["".join(piece.text for piece in pieces) for pieces in await asyncio.gather(*runs)]

    with opened(LLAMA, max_ctx=128) as engine:
        alone = [engine.generate(prompt(4 + i), max_tokens=6, ignore_eos=True).text for i in range(12)]
        with ThreadPoolExecutor(4) as pool:
            runs = [pool.submit(asyncio.run, all_of_them(engine)) for _ in range(3)]
            assert [run.result(PATIENCE_S) for run in runs] == [alone] * 3


def test_the_event_loop_goes_on_while_an_answer_is_made(long_llama: Path) -> None:
    async def both(engine: Engine) -> int:
        n_turns = 0

        async def turn() -> None:
            nonlocal n_turns
            while True:
                n_turns += 1
                await asyncio.sleep(0.001)

        turning = asyncio.create_task(turn())
        await gathered(engine, prompt(2000), max_tokens=20, ignore_eos=True)
        turning.cancel()
        return n_turns

    with opened(long_llama, max_ctx=4096, chunk=16) as engine:
        assert asyncio.run(both(engine)) > 10


def test_a_reader_with_pieces_ahead_lets_others_of_its_loop_go_on() -> None:
    async def read(engine: Engine) -> tuple[int, int]:
        n_turns = 0

        async def turn() -> None:
            nonlocal n_turns
            while True:
                n_turns += 1
                await asyncio.sleep(0)

        stream = await engine.submit(prompt(5), max_tokens=100, ignore_eos=True)
        while stream.state.phase != "done":
            await asyncio.sleep(0.001)
        turning, n_pieces = asyncio.create_task(turn()), 0
        async for _ in stream:
            n_pieces += 1
        turning.cancel()
        return n_pieces, n_turns

    with opened(LLAMA, max_ctx=128) as engine:
        n_pieces, n_turns = asyncio.run(read(engine))
    assert n_turns >= n_pieces > 10


async def aclose(stream: AsyncGenerator[TextPiece, None]) -> None:
    await anext(stream)
    await stream.aclose()


async def athrow(stream: AsyncGenerator[TextPiece, None]) -> None:
    await anext(stream)
    with pytest.raises(ZeroDivisionError):
        await stream.athrow(ZeroDivisionError())


async def cancel_task(stream: AsyncGenerator[TextPiece, None]) -> None:
    reading = asyncio.create_task(rest_of(stream))
    await asyncio.sleep(0.05)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def time_out(stream: AsyncGenerator[TextPiece, None]) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(rest_of(stream), 0.05)


async def rest_of(stream: AsyncGenerator[TextPiece, None]) -> list[TextPiece]:
    return [piece async for piece in stream]


@pytest.mark.parametrize("leave", [aclose, athrow, cancel_task, time_out])
def test_leaving_astream_frees_the_engine(
    long_llama: Path, leave: Callable[[AsyncGenerator[TextPiece, None]], Coroutine[None, None, None]]
) -> None:
    async def use(engine: Engine) -> None:
        stream = engine.astream(prompt(5), ignore_eos=True)
        assert isinstance(stream, AsyncGenerator)
        await leave(stream)

    with opened(long_llama, max_ctx=65536) as engine:
        asyncio.run(use(engine))
        assert engine.generate(prompt(5), max_tokens=3, ignore_eos=True).finish_reason == "length"


def test_leaving_the_loop_early_frees_the_engine_when_the_program_leaves_asyncio(long_llama: Path) -> None:
    async def use(engine: Engine) -> None:
        async for _ in engine.astream(prompt(5), ignore_eos=True):
            break

    with opened(long_llama, max_ctx=65536) as engine:
        asyncio.run(use(engine))
        assert engine.generate(prompt(5), max_tokens=3, ignore_eos=True).finish_reason == "length"


def test_closing_the_engine_ends_its_asyncio_streams(long_llama: Path) -> None:
    async def use(engine: Engine) -> tuple[list[TextPiece], BaseException | None]:
        running = engine.astream(prompt(5), ignore_eos=True)
        await anext(running)
        waiting = asyncio.create_task(gathered(engine, prompt(6), ignore_eos=True))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(engine.close)
        rest = [piece async for piece in running]
        await asyncio.wait([waiting], timeout=PATIENCE_S)
        return rest, waiting.exception()

    engine = opened(long_llama, max_ctx=65536)
    _, error = asyncio.run(use(engine))
    assert isinstance(error, EngineClosed)


def test_bad_values_raise_from_astream_as_from_stream() -> None:
    async def use(engine: Engine) -> None:
        for tokens, options in (([10**6], {}), ([], {}), ([1], {"max_tokens": 0}), (prompt(65), {})):
            with pytest.raises(ValueError if len(tokens) < 65 else Exception, match=r"token|prompt"):
                await gathered(engine, tokens, **options)

    with opened(LLAMA, max_ctx=64) as engine:
        asyncio.run(use(engine))


LOOP_CLOSED = """
import asyncio, sys
from pathlib import Path
from tests.engine.tiny import opened, prompt
engine = opened(Path(sys.argv[1]), max_ctx=65536)
loop = asyncio.new_event_loop()
stream = engine.astream(prompt(5), ignore_eos=True)
loop.run_until_complete(stream.__anext__())
loop.close()
print(len(engine.generate(prompt(5), max_tokens=3, ignore_eos=True).tokens), flush=True)
engine.close()
"""


def test_an_event_loop_that_is_closed_early_ends_its_answers(long_llama: Path) -> None:
    assert program(LOOP_CLOSED, long_llama, warnings="ignore", deadline_s=10).stdout == "3\n"


def test_an_astream_that_is_never_started_costs_nothing() -> None:
    async def use(engine: Engine) -> None:
        engine.astream(prompt(5))
        await asyncio.sleep(0)

    with opened(LLAMA, max_ctx=64) as engine:
        asyncio.run(use(engine))
        gc.collect()
        assert engine.generate(prompt(5), max_tokens=1).usage.completion_tokens <= 1


@pytest.fixture
def small() -> Iterator[Engine]:
    with opened(LLAMA, max_ctx=64) as engine:
        yield engine


def test_a_stream_closed_in_its_own_callback_ends_and_the_engine_goes_on(small: Engine) -> None:
    streams: list[TextStream] = []

    def stop(progress: Progress) -> None:
        if streams:
            streams[0].close()

    ready = threading.Event()

    def hold(progress: Progress) -> None:
        ready.wait(60)
        stop(progress)

    streams.append(small.stream([5] * 40, max_tokens=20, ignore_eos=True, progress=hold))
    ready.set()
    assert streams[0].result.finish_reason == "cancelled"
    assert len(small.generate([5, 6], max_tokens=3, ignore_eos=True).tokens) == 3


def test_a_callback_that_waits_for_its_own_stream_is_told_so(small: Engine) -> None:
    streams: list[TextStream] = []
    ready = threading.Event()

    def wait(progress: Progress) -> None:
        ready.wait(60)
        _ = streams[0].result

    streams.append(small.stream([5] * 40, max_tokens=20, progress=wait))
    ready.set()
    with pytest.raises(UsageError, match="would wait for itself"):
        _ = streams[0].result


def test_a_callback_cannot_end_the_callers_loop_unnoticed(small: Engine) -> None:
    def end(progress: Progress) -> None:
        raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(small.stream([5] * 40, max_tokens=3, progress=end))
