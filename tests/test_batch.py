"""Many requests through one engine: every one gets its own result, in order or as they get ready."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from pyggml_dflash import (
    Batch,
    BatchRequest,
    Constraint,
    ContextOverflowError,
    DflashError,
    Engine,
    EngineClosed,
    SamplingOptions,
    UsageError,
)
from pyggml_dflash.batch import SPARE, WINDOW, InFlight, Streams, as_request
from pyggml_dflash.errors import Cancelled

FOX = [{"role": "user", "content": "Tell me a story about a shy fox."}]
WAIT_S = 60
ENDLESS = BatchRequest(prompt="Once upon a time", max_tokens=3900, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open(slots=3, max_ctx=4096, threads=1) as opened:
        yield opened


def prompts(n: int) -> list[str]:
    return [f"There were {i} foxes" for i in range(n)]


def test_messages_are_a_chat_and_a_text_is_a_prompt(engine: Engine) -> None:
    assert as_request(FOX) == BatchRequest(messages=FOX)
    assert [as_request(item).prompt for item in ("a", [5, 6])] == ["a", [5, 6]]
    with engine.batch([FOX]) as batch:
        (found,) = batch
    assert found.result.tokens == engine.chat(FOX).tokens


@pytest.mark.parametrize("ordered", [True, False])
def test_every_request_gets_the_answer_that_it_gets_alone(engine: Engine, ordered: bool) -> None:
    requests = [
        BatchRequest(prompt=prompt, max_tokens=3 + i % 4, logprobs=i % 2 or None)
        for i, prompt in enumerate(prompts(9))
    ]
    requests.append(BatchRequest(messages=FOX, max_tokens=5, reasoning=False))
    requests.append(
        BatchRequest(prompt="A", max_tokens=5, sampling=SamplingOptions(temperature=1.0, seed=7), stop=("e",))
    )
    with engine.batch(requests, ordered=ordered) as batch:
        found = list(batch)
    assert sorted(r.index for r in found) == list(range(len(requests)))
    if ordered:
        assert [r.index for r in found] == list(range(len(requests)))
    for result in found:
        assert result.request is requests[result.index]
        alone = requests[result.index].submit(engine).result
        assert (result.result.text, result.result.tokens) == (alone.text, alone.tokens)
        assert result.result.logprobs == alone.logprobs


def test_answers_follow_their_constraint_and_their_budget(engine: Engine) -> None:
    upper = Constraint(kind="regex", text="[A-Z]{4}")
    thinking = BatchRequest(messages=FOX, reasoning=True, reasoning_budget=3, max_tokens=20)
    requests = [
        BatchRequest(prompt="Once", constraint=upper),
        BatchRequest(messages=FOX, reasoning=False, constraint=upper),
        thinking,
    ]
    with engine.batch(requests) as batch:
        raw, chat, thought = (found.result for found in batch)
    assert re.fullmatch("[A-Z]{4}", raw.text)
    assert re.fullmatch("[A-Z]{4}", chat.text)
    assert thought.tokens == thinking.submit(engine).result.tokens
    assert thought.usage.reasoning_tokens <= 3


def test_a_text_and_token_ids_are_continued_as_generate_does() -> None:
    with Engine.open(max_ctx=64, threads=1) as small:
        first, second = small.batch(["Once upon", small.tokenize("Once upon")])
        expected = small.generate("Once upon")
    assert first.result.text == second.result.text == expected.text
    assert first.result.finish_reason == "length"


def test_a_request_that_fails_is_a_result_and_the_others_go_on(engine: Engine) -> None:
    bad: list[Any] = ["x " * engine.info.n_ctx, 5, None, "", "\ud800", [10**9]]
    with engine.batch([*bad, BatchRequest(prompt="a", max_tokens=2)]) as batch:
        *failed, last = batch
    assert [type(r.error) for r in failed] == [ContextOverflowError, *[UsageError] * 5]
    assert all(r.answer is None for r in failed)
    assert last.error is None
    assert len(last.result.tokens) == 2
    with pytest.raises(UsageError, match="tokens is 5"):
        _ = failed[1].result


def test_a_batch_waits_where_others_fill_the_queue() -> None:
    short = BatchRequest(prompt="a", max_tokens=3)
    with Engine.open(slots=1, queue_limit=0, max_ctx=1024, threads=1) as engine:
        with engine.batch([short] * 4) as batch:
            assert [r.result.usage.completion_tokens for r in batch] == [3] * 4
        with engine.stream("a", max_tokens=900, ignore_eos=True), engine.batch([short]) as batch:
            batch.cancel()
            assert list(batch) == []


def test_no_request_is_no_result(engine: Engine) -> None:
    with engine.batch([]) as batch:
        assert list(batch) == []
        assert list(batch) == []


@pytest.mark.parametrize("requests", ["text", b"x", 5, BatchRequest(prompt="a")])
def test_what_is_no_iterable_of_requests_is_refused(engine: Engine, requests: Any) -> None:
    with pytest.raises(UsageError, match=r"requests is .* iterable"):
        engine.batch(requests)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "either a prompt or messages"),
        ({"prompt": "a", "messages": FOX}, "either a prompt or messages"),
        ({"prompt": "a", "tools": []}, "tools and reasoning"),
        ({"prompt": "a", "reasoning": True}, "tools and reasoning"),
        ({"prompt": "a", "reasoning_budget": 5}, "tools and reasoning"),
        ({"messages": FOX, "reasoning_budget": -2}, "reasoning_budget is -2"),
        ({"prompt": "a", "constraint": "[a-z]"}, "constraint is"),
        ({"prompt": "a", "cache_prompt": 1}, "cache_prompt is 1"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0"),
        ({"prompt": "a", "stop": ["x"]}, "stop is"),
        ({"prompt": "a", "sampling": None}, "sampling is None"),
        ({"prompt": "a", "spec": "eagle"}, "spec is 'eagle'"),
    ],
)
def test_a_request_that_cannot_be_is_refused_when_it_is_made(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BatchRequest(**fields)


def test_cancel_stops_what_runs_and_keeps_what_is_whole(engine: Engine) -> None:
    with engine.batch([BatchRequest(prompt="a", max_tokens=1), ENDLESS, ENDLESS, ENDLESS]) as batch:
        first = next(batch)
        batch.cancel()
        assert list(batch) == []
        assert batch.cancelled
    assert first.result.finish_reason == "length"
    assert engine.generate("a", max_tokens=1).text == first.result.text


def test_leaving_the_block_lets_go_of_the_engine(engine: Engine) -> None:
    with engine.batch([ENDLESS] * 5):
        pass
    with engine.batch([BatchRequest(prompt="a", max_tokens=1), *[ENDLESS] * 5]) as batch:
        next(batch)
    assert engine.generate("a", max_tokens=1).usage.completion_tokens == 1
    assert not [t for t in threading.enumerate() if t.name.startswith("dflash-batch")]


def test_a_batch_that_nobody_reads_any_more_is_cancelled(engine: Engine) -> None:
    batch = engine.batch([BatchRequest(prompt="a", max_tokens=1), *[ENDLESS] * 5])
    next(batch)
    gone = weakref.ref(batch)
    del batch
    gc.collect()
    assert gone() is None
    assert engine.generate("a", max_tokens=1).usage.completion_tokens == 1


def test_an_engine_that_is_closed_ends_the_batch_with_its_error() -> None:
    with Engine.open(threads=1) as engine, engine.batch([ENDLESS] * 5) as batch:
        closing = threading.Timer(0.3, engine.close)
        closing.start()
        with pytest.raises((EngineClosed, Cancelled)):
            list(batch)
        closing.join()
        with pytest.raises(EngineClosed):
            list(engine.batch(["a"]))


def test_an_error_of_the_requests_themselves_is_raised_and_stops_the_rest(engine: Engine) -> None:
    def requests() -> Iterator[BatchRequest]:
        yield ENDLESS
        raise LookupError("no more rows")

    with pytest.raises(LookupError, match="no more rows"):
        list(engine.batch(requests()))
    assert engine.generate("a", max_tokens=1).usage.completion_tokens == 1


def events(n: int) -> list[threading.Event]:
    """One for each of `n` things and one for what would come next, which is set."""
    made = [threading.Event() for _ in range(n + 1)]
    made[n].set()
    return made


def test_in_order_means_that_late_ones_wait_for_early_ones() -> None:
    done = events(5)

    def work(i: int, streams: Streams) -> int:
        assert done[i + 1].wait(WAIT_S)
        done[i].set()
        return i

    with InFlight(work, range(5), n=5, ordered=True) as values:
        assert list(values) == [0, 1, 2, 3, 4]


def test_out_of_order_means_as_they_get_ready() -> None:
    handed_out = events(5)

    def work(i: int, streams: Streams) -> int:
        assert handed_out[i + 1].wait(WAIT_S)
        return i

    found = []
    with InFlight(work, range(5), n=5, ordered=False) as values:
        for value in values:
            found.append(value)
            handed_out[value].set()
    assert found == [4, 3, 2, 1, 0]


@pytest.mark.parametrize("ordered", [True, False])
def test_items_are_taken_as_they_are_needed(ordered: bool) -> None:
    taken, running, most = 0, 0, 0
    lock = threading.Lock()

    def items() -> Iterator[int]:
        nonlocal taken
        for i in range(50):
            taken += 1
            yield i

    def work(i: int, streams: Streams) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        with lock:
            running -= 1
        return i

    with InFlight(work, items(), n=3, ordered=ordered) as values:
        assert taken == 0
        n_out = 0
        for _ in values:
            n_out += 1
            assert most <= 3
            assert taken <= n_out + 3 + (WINDOW if ordered else 50)
    assert n_out == 50


def test_a_slow_first_one_does_not_fill_the_memory() -> None:
    release, taken = threading.Event(), 0

    def items() -> Iterator[int]:
        nonlocal taken
        for i in range(WINDOW * 3):
            taken += 1
            if taken == WINDOW + 2:
                release.set()
            yield i

    def work(i: int, streams: Streams) -> int:
        if i == 0:
            assert release.wait(WAIT_S)
        return i

    with InFlight(work, items(), n=2, ordered=True) as values:
        assert next(values) == 0
        assert taken <= WINDOW + 2
        assert list(values) == list(range(1, WINDOW * 3))


def test_an_error_of_the_function_is_raised_once_and_ends_it() -> None:
    def work(i: int, streams: Streams) -> int:
        if i == 3:
            raise DflashError("third")
        return i

    values = InFlight(work, range(10), n=1, ordered=True)
    assert [next(values) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DflashError, match="third"):
        next(values)
    assert list(values) == []


def test_two_requests_more_than_slots_are_in_flight(engine: Engine) -> None:
    n_open, most = 0, 0
    lock = threading.Lock()
    answer = Streams.answer

    class Counting(Streams):
        def answer(self, *args: Any) -> Any:
            nonlocal n_open, most
            with lock:
                n_open += 1
                most = max(most, n_open)
            try:
                return answer(self, *args)
            finally:
                with lock:
                    n_open -= 1

    batch = Batch(engine, [BatchRequest(prompt="a", max_tokens=30)] * 12, ordered=True)
    batch._streams = Counting()
    assert len(list(batch)) == 12
    assert most == engine.options.slots + SPARE
